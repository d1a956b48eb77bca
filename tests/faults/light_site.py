# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The world `light` of the fault matrix: a host with pids, files, a network and an sshd of its own
(tests/lab/light.py), on which a server runs beside bystanders, and a controller that reaches it by ssh over a bridge.

A run of relaunch.yml is broken off at one of its STEPS: its task has begun, and its module runs on the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
import time
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Hold
from ansible_collections.cleanslate.sglang.tests.faults.looking import Key, Looking
from ansible_collections.cleanslate.sglang.tests.harness import tree
from ansible_collections.cleanslate.sglang.tests.harness.command import DeadlinePassed
from ansible_collections.cleanslate.sglang.tests.harness.modules import run_module
from ansible_collections.cleanslate.sglang.tests.harness.namespace import NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, playbook_env, read_events
from ansible_collections.cleanslate.sglang.tests.harness.standin import READY_LINE, start_standin, tree_of
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import Host
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import HELD_MIB, PlaybookHost
from ansible_collections.cleanslate.sglang.tests.lab.light import STATE_DIR, LightHost, LightNetwork

PORT = 30000
STEP_DEADLINE_S = 120
MODULE_END_S = 90  # a module that nobody waits for any more ends by itself within its own deadlines
RELAUNCH = "PLAY [Relaunch, one server at a time]"
# Each step by its task as it is printed (the plan before anything is touched, the others after that), and its module.
STEPS = {
    "plan": ("Plan chat", "server_plan"),
    "lease": ("Take the lease on chat", "server_lease"),
    "evict": ("Evict what holds the GPUs of chat", "gpu_evict"),
    "clean": ("Ask whether the host is clean for chat", "clean_state"),
    "launch": ("launch : Start chat", "server_launch"),
    "proof": ("Wait for the proof that it serves: chat", "server_ready"),
}
# The task that ends a run in each step.
ENDS = {
    "Plan chat": "plan",
    "Touch nothing without the lease": "lease",
    "Judge the eviction": "evict",
    "Accept nothing but a clean host": "clean",
    "Judge the start of chat": "launch",
    "Accept nothing but the proof": "proof",
}


@dataclasses.dataclass(frozen=True)
class Running:
    """A run under way, in a session of its own in the centre."""

    process: NsProcess
    output: Path
    events: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def reached(self, step: str) -> bool:
        """Whether the step's task is printed."""
        before, heading, after = self.text().partition(RELAUNCH)
        return STEPS[step][0] in (before if step == "plan" else after if heading else "")

    def ended(self) -> PlaybookRun | None:
        rc = self.process.popen.poll()
        return None if rc is None else PlaybookRun(rc, self.text(), "", read_events(self.events))

    def end(self, deadline_s: float) -> PlaybookRun:
        """DeadlinePassed: it did not end."""
        until = time.monotonic() + deadline_s
        while (run := self.ended()) is None:
            if time.monotonic() > until:
                raise DeadlinePassed(f"the run did not end within {deadline_s:g} s\n{self.text()[-2000:]}")
            time.sleep(0.1)
        return run


class LightSite(Looking):
    """One host with a server named chat, and the centre, where Ansible runs."""

    def __init__(self, directory: Path, network: LightNetwork, host: LightHost, bound_s: float) -> None:
        super().__init__(directory, host.ns, bound_s)
        self.network = network
        self.centre = network.centre
        self.host = host
        self.kit = PlaybookHost(network.shared)
        # By the titles of two ranks: the bystanding server has one.
        rows = [Hold(gpu, HELD_MIB, title=f"sglang::scheduler_TP{gpu}") for gpu in (0, 1)]
        self.kit.nvml.write(Gpu(0), Gpu(1), *rows)
        self.entry = self.kit.server("chat", PORT, flags={"tp_size": 2}, soak={"requests": 2, "tokens": 4})
        self._runs = itertools.count(1)
        self.brings_newcomers(lambda title: title.startswith("sshd"))

    # --- what there is ----------------------------------------------------------------------------------------------

    def bystanders(self) -> None:
        """Another server on another port, an editor and a shell that name a server."""
        for kind, pid in Host(self.host.ns, self.kit.nvml, []).bystanders("editor", "shell").items():
            self.name(kind, pid)
        other = start_standin(self.host.ns, "--device", "cpu", port=PORT + 1)
        self.name("other server", *other.tree())

    def old_server(self) -> None:
        """The server runs, started by the collection and not yet by this run."""
        names = ("name", "port", "python", "user", "launcher", "flags", "environment")
        arguments = {name: self.entry[name] for name in names}
        result = run_module("server_launch", arguments, 60, ns=self.host.ns, env=self.kit.nvml.env())
        assert not result.failed, result.json
        log = self.host.path(STATE_DIR) / "chat" / "launches" / result.json["launch_id"] / "server.log"
        wait_for("it serves", lambda: log.exists() and READY_LINE in log.read_text(errors="replace"), 90)
        self.name("server", *tree_of(self.host.ns, result.json["pid"]))

    def gone(self) -> None:
        """The host is reached by nobody any more, and all its connections are dead."""
        for key in self.host.ns.living():
            if " ".join(self.host.ns.cmdline(key[0])).startswith("sshd"):
                self.departs(key)
        self.host.lose()

    def leaders(self) -> set[int]:
        """First processes of servers chat: two would be two servers on the same GPUs."""
        port = f"--port {PORT + 1}"
        return {
            pid
            for pid, title in self.host.ns.titles().items()
            if title.startswith(sys.executable) and "-m sglang.launch_server" in title and port not in title
        }

    def recorded(self) -> int:
        """The pid that the record of the current launch names."""
        return int(json.loads(self.host.path(f"{STATE_DIR}/chat/current.json").read_text())["pid"])

    def modules(self) -> list[int]:
        """Processes of Ansible's modules on the host: pipelining hands the code to a bare interpreter."""
        return [pid for pid, title in self.host.ns.titles().items() if title == sys.executable]

    def unpacked(self, module: str) -> bool:
        """Whether this module is at work: an interpreter that still waits for its code has unpacked none."""
        return any(self.host.path("/tmp").glob(f"ansible_*{module}_payload_*"))

    def modules_end(self) -> bool:
        """Whether those that run now end by themselves."""
        try:
            wait_for("the modules' own end", lambda: not self.modules(), MODULE_END_S)
        except AssertionError:
            return False
        return True

    def _expected(self, key: Key) -> bool:
        """A server is left behind only if nobody knows it by its record."""
        return super()._expected(key) or key[0] in tree_of(self.host.ns, self.recorded())

    # --- runs -------------------------------------------------------------------------------------------------------

    def inventory(self) -> Path:
        variables = {
            **self.network.variables(self.host),
            "ansible_python_interpreter": sys.executable,
            "sglang_allow_simulated": True,
            "sglang_expected_gpus": 2,
            "sglang_task_environment": self.kit.nvml.env(),
            "sglang_servers": [self.entry],
        }
        path = self.network.shared / "inventory.json"
        path.write_text(json.dumps({"all": {"children": {"sglang": {"hosts": {self.host.name: variables}}}}}))
        return path

    def begin(self, playbook: str = "relaunch.yml") -> Running:
        """Start a playbook in the centre."""
        kept = self.network.shared / f"run.{next(self._runs)}"
        kept.mkdir()
        argv = [str(Path(sys.executable).parent / "ansible-playbook"), str(tree.root() / "playbooks" / playbook)]
        argv += ["-i", str(self.inventory())]
        env = {**playbook_env(kept), **LightNetwork.ansible_env(), "HARNESS_EVENTS": str(kept / "events")}
        env["PYTHONUNBUFFERED"] = "1"
        process = self.centre.popen(["setsid", "--wait", *argv], env, output=kept / "output")
        return Running(process, kept / "output", kept / "events")

    def reach(self, run: Running, step: str) -> None:
        """Until the module of the step runs on the host; an AssertionError where the run ends before that."""

        def there() -> bool:
            assert run.ended() is None, run.text()
            return run.reached(step) and self.unpacked(STEPS[step][1])

        wait_for(f"the step {step}", there, STEP_DEADLINE_S)

    def kill_controller(self) -> None:
        """All of the centre at once: Ansible, its workers, its ssh and their shared connections."""

        def strike() -> None:
            me = {os.getpid(), os.getppid()}
            for name in os.listdir("/proc"):
                if name.isdigit() and int(name) not in {1, *me}:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(name), signal.SIGKILL)

        self.centre.call(strike)


def where_it_ended(run: PlaybookRun) -> str:
    """The step whose failure ended the run; '' where none is known. Only the last unreachable task can be the end."""
    failed = [task.task for task in run.tasks if task.status == "failed" and not task.ignored]
    unreachable = [task.task for task in run.tasks if task.status == "unreachable"]
    name = (failed[:1] or unreachable[-1:] or [""])[0]
    return next((step for words, step in ENDS.items() if words in name), name)


@contextlib.contextmanager
def opened(directory: Path, bound_s: float) -> t.Iterator[LightSite]:
    """One host and its centre, with bystanders; at the end nothing of it is left."""
    # A copy of the collection, where one is run, must show inside.
    with LightNetwork(directory / "light", keep=[tree.collections()]) as network:
        site = LightSite(directory, network, network.host("gpu01"), bound_s)
        with site.later:
            site.bystanders()
            yield site
