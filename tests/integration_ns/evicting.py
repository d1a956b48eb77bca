# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the eviction tests share: a host inside a namespace with simulated GPUs, and modules run under trace in it.

The GPUs are loop devices (block devices with a driver behind, so they can be mapped like a real node), whose minor
numbers the NVML double tells as the GPUs'. So holders have a real readable mapping, visitors real doorbells.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Hold, Line, NvmlDouble
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR
from ansible_collections.cleanslate.sglang.tests.harness.modules import ModuleResult, run_module
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace, NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.standin import Standin, start_standin
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

FIXTURES = ROOT / "tests" / "fixtures"
RANK_MIB = 20_000
NAME = "main"
DEADLINES = {"stop": 5, "term": 8, "term_hung": 2, "kill": 5, "holders": 4}
SLACK_S = 20  # beyond the sum of the deadlines: looks, a loaded machine, strace

Pairs = set[tuple[t.Optional[int], str]]


@dataclasses.dataclass
class Host:
    """A namespace with GPUs. ``nodes`` are their device nodes, in the order of their indices."""

    ns: Namespace
    nvml: NvmlDouble
    nodes: t.Sequence[Path]

    def gpus(self) -> list[Line]:
        return [Gpu(index, minor=os.minor(os.stat(node).st_rdev)) for index, node in enumerate(self.nodes)]

    def memory_follows_mappings(self, *more: Line, release_s: float | None = None) -> None:
        """The GPUs' memory belongs to whoever has their node mapped readable."""
        holds = [
            Hold(index, mib=RANK_MIB, device=str(node), release_s=release_s, id=f"gpu{index}")
            for index, node in enumerate(self.nodes)
        ]
        self.nvml.write(*self.gpus(), *holds, *more)

    def server(self, *flags: str, gpus: t.Sequence[int] = (0,), see: t.Sequence[int] = (), **options: t.Any) -> Standin:
        """A stand-in whose ranks hold ``gpus`` in this order and whose every process has these and ``see`` open."""
        paths = [str(self.nodes[index]) for index in (*gpus, *see)]
        faults = {"DEVICES": ",".join(paths), **options.pop("faults", {})}
        return start_standin(self.ns, "--tp-size", str(max(1, len(gpus))), *flags, faults=faults, **options)

    def hold(self, *words: str, **options: t.Any) -> NsProcess:
        """A process of tests/fixtures/hold_device.py."""
        return self.fixture("hold_device.py", *words, **options)

    def fixture(self, script: str, *words: str, **options: t.Any) -> NsProcess:
        options.setdefault("detached", True)
        return self.ns.popen([sys.executable, str(FIXTURES / script), *words], **options)

    def bystanders(self, *kinds: str) -> dict[str, int]:
        """The processes of tests/fixtures/bystanders.py, by kind; those of a GPU kind have all nodes open and mapped"""
        directory = self.ns.directory / "bystanders"
        directory.mkdir(exist_ok=True)
        output = directory / f"pids.{len(list(directory.glob('pids.*')))}"
        devices = ",".join(map(str, self.nodes))
        self.fixture("bystanders.py", "--directory", str(directory), "--devices", devices, *kinds, output=output)
        wait_for("the bystanders", lambda: output.exists() and output.read_text().endswith("}\n"), 60)
        found: dict[str, int] = json.loads(output.read_text())
        return found

    def module(self, module: str, /, *, check: bool = False, trace: bool = False, **arguments: t.Any) -> ModuleResult:
        values = {"device_major": LOOP_MAJOR, **arguments}
        return run_module(module, values, 120, ns=self.ns, env=self.nvml.env(), check=check, trace=trace)

    def evict(self, *, check: bool = False, trace: bool = True, **arguments: t.Any) -> ModuleResult:
        """gpu_evict under trace, with short deadlines and a state directory of the test's own."""
        values = {"state_dir": str(self.state_dir), "deadlines": DEADLINES, **arguments}
        return self.module("gpu_evict", check=check, trace=trace, **values)

    def clean(self, **arguments: t.Any) -> ModuleResult:
        values = {"allow_simulated": True, "interval_s": 0.1, "shm_required_mib": 1, **arguments}
        return self.module("clean_state", **values)

    @property
    def state_dir(self) -> Path:
        return self.ns.directory / "state"

    def record(self, server: Standin, *, name: str = NAME, **changes: t.Any) -> None:
        """The record that a detached launch of this server would have left."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = (self.ns.proc / str(server.leader.pid) / "stat").read_text()
        values = {
            "name": name,
            "launch_id": "20260101T000000Z-0a1b",
            "state": "started",
            "launcher": "detached",
            "boot_id": boot_id,
            "pid": server.leader.pid,
            "start_ticks": self.ns.start_ticks(server.leader.pid),
            "sid": int(stat.rpartition(")")[2].split()[3]),
            "port": server.port,
            "python": sys.executable,
            **changes,
        }
        folder = self.state_dir / name
        folder.mkdir(parents=True, mode=0o755)
        (folder / "current.json").write_text(json.dumps(values))

    def kill(self, pid: int, number: signal.Signals) -> None:
        self.ns.call(lambda: os.kill(pid, number))

    def gone(self, pids: t.Iterable[int], deadline_s: float = 10) -> None:
        wanted = set(pids)
        wait_for(f"{wanted} gone", lambda: not wanted & {pid for pid, _unused in self.ns.living()}, deadline_s)

    def alive(self, pids: t.Iterable[int]) -> bool:
        return set(pids) <= {pid for pid, _unused in self.ns.living()}


def sent(result: ModuleResult) -> Pairs:
    """(pid, signal) of everything that the module signalled, without the ends of its own helpers."""
    found: Pairs = set()
    for one in result.signals:
        assert one.target is not None, one
        if one.call == "pidfd_send_signal":
            found.add((one.target, one.signal))
        else:
            # What is not a pidfd is a helper that the module started itself; it may only be killed.
            assert one.signal == "SIGKILL", one
    return found


def plain_signals(result: ModuleResult) -> list[t.Any]:
    """Signals that did not go through a pidfd; there are none unless a helper of the module's own had to be ended."""
    return [one for one in result.signals if one.call != "pidfd_send_signal"]


def rung(result: ModuleResult, name: str) -> dict[str, t.Any]:
    """The first climbed rung of this name."""
    found = [row for row in result.json["rungs"] if row["rung"] == name]
    assert found, f"{name} was not climbed: {[row['rung'] for row in result.json['rungs']]}"
    return t.cast(dict[str, t.Any], found[0])


def rungs(result: ModuleResult) -> list[str]:
    return [row["rung"] for row in result.json["rungs"]]


def codes(result: ModuleResult) -> set[str]:
    return {row["code"] for row in result.json["reasons"]}


def bounded(result: ModuleResult) -> None:
    """The module took no longer than its deadlines and the wait for memory allow."""
    pinned = result.json["pinned"] or {}
    assert result.json["seconds"] < sum(DEADLINES.values()) + float(pinned.get("expected_s") or 0) + SLACK_S
