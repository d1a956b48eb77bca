# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host for our playbooks with the real SGLang on the CPU and simulated GPUs whose memory follows its schedulers."""

from __future__ import annotations

import http.client
import json
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.engine.real import cpu_environment, cpu_flags, engine_python
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace, NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, playbook_env, run_playbook
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import PlaybookHost

# A relaunch that fails and goes back is two starts, each with its eviction and its verdict, on a busy machine.
RUN_DEADLINE_S = 420


class RealHost(PlaybookHost):
    """One host with one server, ``chat``."""

    ns: Namespace

    def __init__(self, directory: Path, ns: Namespace, port: int = 31000, **flags: t.Any) -> None:
        super().__init__(directory, ns)
        self.port = port
        self.follow_schedulers()
        self.servers = [self.entry(**flags)]

    def entry(self, **flags: t.Any) -> dict[str, t.Any]:
        """The server's entry in the inventory with these flags."""
        return {
            "name": "chat",
            "port": self.port,
            "gpus": [0],
            "python": str(engine_python()),
            "user": "root",
            "launcher": "detached",
            "flags": cpu_flags(**flags),
            "environment": cpu_environment(),
            "ready_deadline_s": 200,
            "shm_required_mib": 16,
            "soak": {"requests": 2, "concurrency": 2, "tokens": 8},
        }

    def controller(self, operator: str) -> dict[str, str]:
        """The environment of one operator's own controller process."""
        home = self.directory / operator
        home.mkdir(exist_ok=True)
        return {
            "HOME": str(home),
            "USER": operator,
            "LOGNAME": operator,
            "ANSIBLE_HOME": str(home / "ansible"),
            "ANSIBLE_LOCAL_TEMP": str(home / "ansible" / "local"),
            "ANSIBLE_REMOTE_TEMP": str(home / "ansible" / "remote"),
        }

    def play(self, playbook: str, operator: str = "alice", **extra_vars: t.Any) -> PlaybookRun:
        """Run one of our playbooks as this operator, to its end."""
        return run_playbook(
            ROOT / "playbooks" / playbook,
            scratch=self.directory,
            deadline_s=RUN_DEADLINE_S,
            inventory=self.inventory(),
            extra_vars=extra_vars,
            env={"ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml", **self.controller(operator)},
            ns=self.ns,
        )

    def begin(self, playbook: str, output: Path, operator: str = "alice") -> NsProcess:
        """Start one of our playbooks as this operator, in a session of its own, and don't wait for it."""
        argv = [str(Path(sys.executable).parent / "ansible-playbook"), str(ROOT / "playbooks" / playbook)]
        argv += ["-i", str(self.inventory())]
        env = {**playbook_env(self.directory), "PYTHONUNBUFFERED": "1", **self.controller(operator)}
        return self.ns.popen(argv, env, detached=True, output=output)

    def sglang(self) -> dict[int, str]:
        """pid -> title of everything of SGLang that lives here."""
        living = {pid for pid, _ticks in self.ns.living()}
        found = {pid: title for pid, title in self.ns.titles().items() if pid in living}
        return {pid: title for pid, title in found.items() if "sglang::" in title or "sglang.launch_server" in title}

    def generates(self) -> int:
        """How many tokens the server on the port makes of a prompt; 0 where nobody answers."""

        def ask() -> int:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            body = {"text": "hello", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
            try:
                connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
                return int(json.loads(connection.getresponse().read())["meta_info"]["completion_tokens"])
            except OSError:
                return 0

        return self.ns.call(ask, 40)

    def link(self, name: str) -> str:
        """The launch id that ``current`` or ``last_good`` points to; empty where there is none."""
        path = self.directory / "state" / "chat" / name
        return path.readlink().name if path.is_symlink() else ""


def failure_of(run: PlaybookRun) -> str:
    """The messages of the tasks that failed a run; an AssertionError where it did not fail."""
    assert run.rc == 2, f"rc {run.rc}\n{run.stdout}\n{run.stderr}"
    found = [str(task.result.get("msg", "")) for task in run.tasks if task.status == "failed" and not task.ignored]
    assert found, run.stdout
    return "\n".join(found)
