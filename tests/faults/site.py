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
import threading
import time
import traceback
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import NvmlDouble, Variant
from ansible_collections.cleanslate.sglang.tests.faults.model import Answer, Facts
from ansible_collections.cleanslate.sglang.tests.harness.command import Completed, DeadlinePassed
from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR, loop_nodes
from ansible_collections.cleanslate.sglang.tests.harness.modules import (
    ModuleResult,
    module_argv,
    module_env,
    parse_result,
)
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.standin import Standin
from ansible_collections.cleanslate.sglang.tests.harness.trace import Signal, parse_trace, traced
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import DEADLINES, Host

Key = tuple[int, int]  # pid, start ticks
GRACE_S = 3.0  # beyond a row's bound, so that what is late is seen to be late and not cut off at the bound
SETTLE_S = 3.0  # how long a helper of the run may take to be reaped
TITLE = 60


class Site:
    """One row's place. ``host`` has the namespace, the NVML double and the device nodes."""

    def __init__(self, directory: Path, ns: Namespace, host: Host, bound_s: float) -> None:
        self.directory = directory
        self.ns = ns
        self.host = host
        self.deadline_s = bound_s + GRACE_S
        self.later = contextlib.ExitStack()
        self.facts: Facts | None = None
        self._names: dict[Key, str] = {}
        self._arrived: dict[Key, str] = {}
        self._departed: set[Key] = set()
        self._restless: set[int] = set()
        self._newcomers = False

    # --- who is who -------------------------------------------------------------------------------------------------

    def name(self, name: str, *pids: int) -> None:
        """Call these processes so; a row's ``may_die`` speaks of names."""
        for pid in pids:
            ticks = self.ns.start_ticks(pid)
            assert ticks is not None, f"{name}: pid {pid} is gone"
            self._names[pid, ticks] = name

    def arrives(self, name: str, pid: int) -> None:
        """A bystander that came during the run: it must live afterwards too."""
        ticks = self.ns.start_ticks(pid)
        assert ticks is not None, f"{name}: pid {pid} is gone"
        self._arrived[pid, ticks] = name

    def departs(self, key: Key) -> None:
        """The scene itself ends this one during the run."""
        self._departed.add(key)

    def restless(self, group: int) -> None:
        """The processes of this group come and go all the time: who of them dies is nobody's deed."""
        self._restless.add(group)

    def brings_newcomers(self) -> None:
        """Processes may be there afterwards that were not there before."""
        self._newcomers = True

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
        environment = module_env({**self.host.nvml.env(smi=smi), **(env or {})})
        values = json.dumps(arguments)

        def run() -> Answer:
            done = self.ns.run(argv, self.deadline_s, environment, stdin=values)
            return (tell or told)(module_result(done).json)

        self.look(run, record if trace or inject else None, meanwhile)

    def look(
        self,
        run: t.Callable[[], Answer],
        record: Path | None = None,
        meanwhile: t.Callable[[], None] | None = None,
    ) -> None:
        """Run it between two looks at who lives, and keep what was seen."""
        before, files = self.ns.living(), self._shm()
        names = {key: self._called(key) for key in before}
        groups = {key: self._stat(key[0])[2] for key in before} if self._restless else {}
        answer: Answer | None = None
        problems: list[str] = []
        beside = threading.Thread(target=self._beside, args=(meanwhile, problems))
        timed_out = False
        started = time.monotonic()
        if meanwhile is not None:
            beside.start()
        try:
            answer = run()
        except DeadlinePassed as passed:
            timed_out = True
            problems.append(str(passed))
        except Exception:  # a fact like others: the row's result is `error`, unless something worse was seen
            problems.append(traceback.format_exc())
        seconds = time.monotonic() - started
        if meanwhile is not None:
            beside.join(30)
        died = self._died(before, groups)
        signals = parse_trace(record.read_text(errors="replace")) if record is not None and record.exists() else []
        self.facts = Facts(
            answer=answer,
            seconds=round(seconds, 1),
            died=tuple(sorted({names.get(key) or self._arrived[key] for key in died})),
            signalled=tuple(sorted(self._signalled(signals, before, names))),
            stayed=() if timed_out or self._newcomers else tuple(self._stayed(before)),
            missing=tuple(self._robbed(files - self._shm())),
            timed_out=timed_out,
            problem="\n".join(problems),
        )

    @staticmethod
    def _beside(meanwhile: t.Callable[[], None] | None, problems: list[str]) -> None:
        try:
            if meanwhile is not None:
                meanwhile()
        except Exception:  # told with the facts
            problems.append(traceback.format_exc())

    def _called(self, key: Key) -> str:
        title = " ".join(self.ns.cmdline(key[0]))[:TITLE]
        return self._names.get(key) or f"pid {key[0]} {title}"

    def _died(self, before: set[Key], groups: t.Mapping[Key, int]) -> set[Key]:
        expected = (before | set(self._arrived)) - self._departed
        gone = expected - self.ns.living()
        # A group that could not be told belongs to one that was gone before it could be looked at.
        return {key for key in gone if not self._restless or groups.get(key, 0) not in {*self._restless, -1}}

    def _stat(self, pid: int) -> tuple[str, int, int]:
        """(state, parent, group) of a process inside; parent -1 where it is gone."""
        try:
            fields = (self.ns.proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return "", -1, -1
        return fields[0], int(fields[1]), int(fields[2])

    def _signalled(self, signals: t.Sequence[Signal], before: set[Key], names: t.Mapping[Key, str]) -> set[str]:
        """Names of those who were there and got a signal through a pidfd, as the product sends them."""
        there = {key[0]: names[key] for key in before if key not in self._departed}
        there.update({key[0]: name for key, name in self._arrived.items()})
        sent = {one.target for one in signals if one.call == "pidfd_send_signal" and one.result == 0}
        return {there[pid] for pid in sent if pid in there}

    def _stayed(self, before: set[Key]) -> list[str]:
        """Processes that the run left behind: new ones that are nobody's children but process 1's."""
        known = {key[0] for key in before} | {key[0] for key in self._arrived}

        def left() -> list[str]:
            found = []
            for key in self.ns.living() - before - set(self._arrived):
                if not self._belongs(key[0], known):
                    found.append(self._called(key))
            return found

        end = time.monotonic() + SETTLE_S
        while (found := left()) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _belongs(self, pid: int, known: t.Collection[int]) -> bool:
        """Whether one of those who were there brought this one up, or it is restless, or gone."""
        while pid > 1 and pid not in known:
            _state, parent, group = self._stat(pid)
            if parent == -1 or group in self._restless:
                return True
            pid = parent
        return pid in known

    def _robbed(self, gone: t.Collection[str]) -> list[str]:
        """Those of the removed files of /dev/shm that somebody who lives has still mapped."""
        mapped = ""
        for pid in self.ns.pids() if gone else ():
            with contextlib.suppress(OSError):
                mapped += (self.ns.proc / str(pid) / "maps").read_text(errors="replace")
        return sorted(name for name in gone if f"/dev/shm/{name} (deleted)" in mapped)

    def _shm(self) -> set[str]:
        return {path.name for path in (self.ns.root / "dev" / "shm").iterdir()}

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
