# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host for playbook tests: an inventory in the test's directory, two simulated GPUs and the stand-in server.

host = PlaybookHost(tmp_path, ns)
host.servers = [host.server("demo", 31000, gpus=[0])]
host.run("relaunch.yml").check()
"""

from __future__ import annotations

import json
import os
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Hold, NvmlDouble
from ansible_collections.cleanslate.sglang.tests.harness import tree
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace, NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, playbook_env, run_playbook
from ansible_collections.cleanslate.sglang.tests.harness.standin import environment as standin_environment

PLAYBOOK_DEADLINE_S = 240
# Modules that change a host. None of them may have run where a run was refused.
CHANGING = ("gpu_evict", "server_launch")
HELD_MIB = 20_000


class PlaybookHost:
    """One host reached by a local connection, inside the test's namespace where there is one."""

    def __init__(self, directory: Path, ns: Namespace | None = None, name: str = "gpu01") -> None:
        self.directory = directory
        self.ns = ns
        self.name = name
        self.servers: list[dict[str, t.Any]] = []
        self.variables: dict[str, t.Any] = {}
        self.other_hosts: dict[str, dict[str, t.Any]] = {}
        nvml_directory = directory / "nvml"
        nvml_directory.mkdir()
        self.nvml = NvmlDouble(nvml_directory)
        self.nvml.write(Gpu(0), Gpu(1))

    def follow_schedulers(self) -> None:
        """Simulated memory follows the schedulers: both GPUs for a server with two ranks, GPU 0 for one with one."""
        self.nvml.write(
            Gpu(0),
            Gpu(1),
            Hold(0, HELD_MIB, title_is="sglang::scheduler"),
            Hold(0, HELD_MIB, title="sglang::scheduler_TP0"),
            Hold(1, HELD_MIB, title="sglang::scheduler_TP1"),
        )

    def follow_mappings(self, nodes: t.Sequence[Path]) -> None:
        """The GPUs are these device nodes, and their memory belongs to whoever has them mapped readable."""
        self.nvml.write(
            *(Gpu(index, minor=os.minor(os.stat(node).st_rdev)) for index, node in enumerate(nodes)),
            *(Hold(index, HELD_MIB, device=str(node), id=f"gpu{index}") for index, node in enumerate(nodes)),
        )
        self.variables["sglang_device_major"] = LOOP_MAJOR

    def server(self, name: str, port: int, **settings: t.Any) -> dict[str, t.Any]:
        """A stand-in server's entry in sglang_servers."""
        model = self.directory / "model"
        model.mkdir(exist_ok=True)
        flags = {"model_path": str(model), **settings.pop("flags", {})}
        faults = settings.pop("faults", None)
        return {
            "name": name,
            "port": port,
            "python": sys.executable,
            "user": "root",
            "launcher": "detached",
            "flags": flags,
            "environment": {**standin_environment(faults), **settings.pop("environment", {})},
            "ready_deadline_s": 60,
            "shm_required_mib": 16,
            **settings,
        }

    def inventory(self) -> Path:
        """The inventory file, written anew."""
        variables = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "sglang_become": False,
            "sglang_allow_simulated": True,
            "sglang_state_dir": str(self.directory / "state"),
            "sglang_task_environment": self.nvml.env(),
            "sglang_servers": self.servers,
            **self.variables,
        }
        hosts = {self.name: variables, **self.other_hosts}
        path = self.directory / "inventory.yml"
        path.write_text(json.dumps({"sglang": {"hosts": hosts}}))
        return path

    def run(
        self,
        playbook: str,
        *arguments: str,
        check: bool = False,
        extra_vars: t.Mapping[str, t.Any] | None = None,
        env: t.Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> PlaybookRun:
        """Run one of our playbooks (its file name, or an FQCN)."""
        return run_playbook(
            playbook if "." in playbook.replace(".yml", "") else tree.root() / "playbooks" / playbook,
            *arguments,
            scratch=self.directory,
            deadline_s=PLAYBOOK_DEADLINE_S,
            inventory=self.inventory(),
            extra_vars=extra_vars,
            env={"ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml", **(env or {})},
            cwd=cwd,
            check=check,
            ns=self.ns,
        )

    def start(self, playbook: str, output: Path) -> NsProcess:
        """Start one of our playbooks inside the namespace, in a session of its own, and don't wait for it."""
        assert self.ns is not None
        argv = [str(Path(sys.executable).parent / "ansible-playbook"), str(tree.root() / "playbooks" / playbook)]
        argv += ["-i", str(self.inventory())]
        env = {**playbook_env(self.directory), "PYTHONUNBUFFERED": "1"}
        return self.ns.popen(argv, env, detached=True, output=output)

    def record(self, name: str) -> dict[str, t.Any]:
        """The record of a server's last launch."""
        text = (self.directory / "state" / name / "current.json").read_text()
        return t.cast("dict[str, t.Any]", json.loads(text))


def summary_of(run: PlaybookRun) -> str:
    """The text of the last summary for people; an AssertionError with the output where there is none."""
    found = [
        task.result["msg"] for task in run.tasks if task.task.startswith(("Summary of", "Verdict for", "Show what"))
    ]
    assert found, f"no summary\n{run.stdout}\n{run.stderr}"
    text = found[-1]
    return text if isinstance(text, str) else "\n".join(text)


def refusal_of(run: PlaybookRun) -> str:
    """The one error of a run that was refused before anything was touched; every other outcome is an AssertionError."""
    failed = [task for task in run.tasks if task.status == "failed" and not task.ignored]
    assert run.rc == 2, f"rc {run.rc}\n{run.stdout}\n{run.stderr}"
    assert len(failed) == 1, f"{len(failed)} errors\n{run.stdout}\n{run.stderr}"
    changing = [task for task in run.tasks if task.action.rpartition(".")[2] in CHANGING]
    touched = [task.task for task in changing if task.result.get("changed")]
    assert not touched, f"{touched} ran\n{run.stdout}"
    return str(failed[0].result["msg"])
