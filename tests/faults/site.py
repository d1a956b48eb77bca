# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a row of the fault matrix happens: a namespace with two simulated GPUs, bystanders, and one run of an entry
point between two looks at who lives.

A scene makes its fault with what is here, names whoever the row may name, and then runs one entry point:

    def ignores_sigterm(site: Site) -> None:
        site.server(gpus=(0, 1), faults={"IGNORE_TERM": "1"})
        site.evict(port=30000)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import NvmlDouble, Variant
from ansible_collections.cleanslate.sglang.tests.faults.looking import Looking
from ansible_collections.cleanslate.sglang.tests.faults.model import Answer
from ansible_collections.cleanslate.sglang.tests.harness.command import Completed
from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR, loop_nodes
from ansible_collections.cleanslate.sglang.tests.harness.modules import (
    ModuleResult,
    module_argv,
    module_env,
    parse_result,
)
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.standin import Standin
from ansible_collections.cleanslate.sglang.tests.harness.trace import CALLS, traced
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import DEADLINES, Host


class Site(Looking):
    """One row's place. ``host`` has the namespace, the NVML double and the device nodes."""

    def __init__(self, directory: Path, ns: Namespace, host: Host, bound_s: float) -> None:
        super().__init__(directory, ns, bound_s)
        self.ns = ns
        self.host = host

    # --- what there is ----------------------------------------------------------------------------------------------

    def bystanders(self) -> None:
        """Those of every row: one that sees all GPUs and works on none, and command lines that name a server."""
        nodes = [str(node) for node in self.host.nodes]
        visitor = self.host.hold("--map", "--write-only", *nodes)
        maps = self.ns.proc / str(visitor.pid) / "maps"
        found = self.host.bystanders("editor", "shell")
        wait_for("the visitor's doorbells", lambda: nodes[-1] in maps.read_text())
        self.name("visitor", visitor.pid)
        for kind, pid in found.items():
            self.name(kind, pid)

    def service(self, kind: str) -> int:
        """A GPU service of tests/fixtures/bystanders.py with all nodes open and their doorbells mapped; its pid."""
        node = str(self.host.nodes[0])
        pid = self.host.bystanders(kind)[kind]
        wait_for("its doorbells", lambda: node in (self.ns.proc / str(pid) / "maps").read_text())
        self.name(kind, pid)
        return pid

    def server(self, *flags: str, name: str = "server", **options: t.Any) -> Standin:
        """A stand-in server; its whole tree bears the name."""
        started = self.host.server(*flags, **options)
        self.name(name, *started.tree())
        return started

    def holder(self, *words: str, gpu: int = 0, name: str = "holder", **options: t.Any) -> int:
        """A process with a readable mapping of the GPU's node; its pid."""
        node = str(self.host.nodes[gpu])
        held = self.host.hold("--map", *words, node, **options)
        maps = self.ns.proc / str(held.pid) / "maps"
        wait_for("the mapping", lambda: node in maps.read_text())
        self.name(name, held.pid)
        return held.pid

    # --- the run ----------------------------------------------------------------------------------------------------

    def module(
        self,
        module: str,
        /,
        *,
        trace: bool = False,
        inject: t.Sequence[str] = (),
        wrap: t.Sequence[str] = (),
        env: t.Mapping[str, str] | None = None,
        smi: bool = True,
        check: bool = False,
        meanwhile: t.Callable[[], None] | None = None,
        tell: t.Callable[[dict[str, t.Any]], Answer] | None = None,
        **arguments: t.Any,
    ) -> None:
        """One module between two looks. ``inject``: strace's injections, which hold up a system call. ``wrap``: words
        before the command. ``meanwhile``: runs beside it."""
        record = self.ns.directory / "trace"
        argv = [*wrap, *module_argv(module, check=check)]
        if trace or inject:
            argv = traced(argv, record)
            at = argv.index("-o")
            argv[at:at] = [word for one in inject for word in ("-e", f"inject={one}")]
            # A later set takes the place of the one before; only a call that is traced can be held up or made to fail.
            calls = dict.fromkeys([*CALLS.split(","), *(one.partition(":")[0] for one in inject)])
            argv[at:at] = ["-e", f"trace={','.join(calls)}"]
        environment = module_env({**self.host.nvml.env(smi=smi), **(env or {})})
        values = json.dumps(arguments)

        def run() -> Answer:
            done = self.ns.run(argv, self.deadline_s, environment, stdin=values)
            return (tell or told)(module_result(done).json)

        self.look(run, record if trace or inject else None, meanwhile)

    # --- entry points -----------------------------------------------------------------------------------------------

    def evict(self, **options: t.Any) -> None:
        """gpu_evict with short deadlines and a state directory of its own, under trace."""
        values = {"state_dir": str(self.host.state_dir), "deadlines": DEADLINES, "trace": True, **options}
        self.module("gpu_evict", **{"device_major": LOOP_MAJOR, **values})

    def clean(self, **options: t.Any) -> None:
        """clean_state with quick samples; the simulated driver counts."""
        values = {"allow_simulated": True, "interval_s": 0.1, "shm_required_mib": 1, "xid_window_s": 0, **options}
        self.module("clean_state", **{"device_major": LOOP_MAJOR, **values})

    def info(self, tell: t.Callable[[dict[str, t.Any]], Answer], **options: t.Any) -> None:
        """gpu_info; ``tell`` makes a verdict of what it shows."""
        self.module("gpu_info", tell=tell, **{"device_major": LOOP_MAJOR, **options})


def module_result(done: Completed) -> ModuleResult:
    return ModuleResult(done.rc, parse_result(done.stdout, done.stderr), done.stderr)


def told(result: dict[str, t.Any]) -> Answer:
    """A module's verdict and the codes of its reasons and warnings."""
    assert "verdict" in result, f"no verdict: {result}"
    rows = [*(result.get("reasons") or ()), *(result.get("warnings_found") or ())]
    text = str(result.get("summary") or result.get("msg") or "")
    codes = {row["code"] for row in rows}
    if result.get("failed") and not rows:
        codes.add("refused")
    return Answer(str(result["verdict"]), frozenset(codes), text)


@dataclasses.dataclass(frozen=True)
class Place:
    """What a row's site is made of."""

    shm_mib: int = 64
    variant: Variant = Variant.FULL


@contextlib.contextmanager
def opened(directory: Path, bound_s: float, place: Place | None = None) -> t.Iterator[Site]:
    """A site with two GPUs whose memory follows mappings, and its bystanders; at the end nothing of it is left."""
    chosen = place or Place()
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        ns = stack.enter_context(Namespace(directory, shm_mib=chosen.shm_mib))
        nodes = stack.enter_context(loop_nodes(directory / "dev", 2))
        nvml = stack.enter_context(NvmlDouble(directory, chosen.variant))
        host = Host(ns, nvml, nodes)
        host.memory_follows_mappings()
        site = Site(directory, ns, host, bound_s)
        stack.enter_context(site.later)
        site.bystanders()
        yield site
