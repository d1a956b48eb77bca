# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Inventories of lab containers, written as an operator would write one: hosts by ssh, servers as data."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

from ..harness.command import ROOT
from ..harness.devices import LOOP_MAJOR
from ..harness.playbook import PlaybookRun, TaskResult, run_playbook
from .containers import Container, ansible_host
from .rootfs import MODEL, OPERATOR, SERVER_USER, SGLANG_PYTHON

# What is never to show on a command line, in a unit, in a result or in a summary.
API_KEY = "lab-key-5b2f9c71"
RUN_DEADLINE_S = 240


def server(name: str, port: int, gpu: int, **settings: t.Any) -> dict[str, t.Any]:
    """One entry of ``sglang_servers``: a stand-in with one rank on one GPU, which sees and has open every GPU."""
    order = f"/dev/nvidia{gpu},/dev/nvidia{1 - gpu}"
    environment = {"SGLANG_STANDIN_DEVICES": order, "PYTHONDONTWRITEBYTECODE": "1", **settings.pop("environment", {})}
    flags = {"model_path": MODEL, "tp_size": 1, **settings.pop("flags", {})}
    return {
        "name": name,
        "port": port,
        "gpus": [str(gpu)],
        "python": SGLANG_PYTHON,
        "user": SERVER_USER,
        "group": SERVER_USER,
        "flags": flags,
        "environment": environment,
        "api_key": API_KEY,
        "ready_deadline_s": 40,
        "deadlines": {"stop": 15, "term": 15, "kill": 10},
        **settings,
    }


def host_vars(box: Container, servers: t.Sequence[t.Mapping[str, t.Any]], **more: t.Any) -> dict[str, t.Any]:
    """The variables of one host; root by ssh, so no become is needed."""
    return {
        **ansible_host(box),
        "sglang_become": False,
        "sglang_expected_gpus": 2,
        "sglang_device_major": LOOP_MAJOR,
        "sglang_servers": [dict(one) for one in servers],
        **more,
    }


def unprivileged(box: Container) -> dict[str, t.Any]:
    """Variables for a login that is not root and has no way to become it."""
    return {**ansible_host(box, OPERATOR), "sglang_become": False}


def write_inventory(path: Path, hosts: t.Mapping[str, t.Mapping[str, t.Any]]) -> Path:
    """An inventory file (JSON is YAML) with the group ``sglang``."""
    path.write_text(json.dumps({"all": {"children": {"sglang": {"hosts": {**hosts}}}}}, indent=1))
    path.chmod(0o600)
    return path


def ansible_env(box: Container) -> dict[str, str]:
    """Connections are shared (that is what operators have), with their sockets in the lab's directory."""
    args = "-o ControlMaster=auto -o ControlPersist=30s"
    return {
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(box.lab.sockets),
        "ANSIBLE_SSH_ARGS": args,
        "ANSIBLE_PIPELINING": "True",
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml",
        "ANSIBLE_TIMEOUT": "10",
    }


def run_module_on(
    box: Container,
    module: str,
    arguments: t.Mapping[str, t.Any],
    scratch: Path,
    *,
    variables: t.Mapping[str, t.Any] | None = None,
    check: bool = False,
    deadline_s: float = RUN_DEADLINE_S,
) -> TaskResult:
    """One of our modules in the container, by ssh and AnsiballZ. A failed task is returned, not raised."""
    inventory = write_inventory(scratch / f"{box.name}.module.json", {box.name: variables or ansible_host(box)})
    task = {"name": "the task", f"cleanslate.sglang.{module}": dict(arguments)}
    play = scratch / f"{box.name}.module.yml"
    play.write_text(json.dumps([{"hosts": box.name, "gather_facts": False, "tasks": [task]}]))
    run = run_playbook(
        play, scratch=scratch, deadline_s=deadline_s, inventory=inventory, env=ansible_env(box), check=check
    )
    assert len(run.tasks) == 1, f"rc {run.rc}\n{run.stdout}\n{run.stderr}"
    return run.tasks[0]


def run_on(
    box: Container,
    playbook: Path | str,
    inventory: Path,
    scratch: Path,
    *arguments: str,
    cwd: Path = ROOT,
    env: t.Mapping[str, str] | None = None,
    extra_vars: t.Mapping[str, t.Any] | None = None,
    check: bool = False,
    deadline_s: float = RUN_DEADLINE_S,
) -> PlaybookRun:
    """A playbook against lab containers, by ssh."""
    return run_playbook(
        playbook,
        *arguments,
        scratch=scratch,
        deadline_s=deadline_s,
        inventory=inventory,
        extra_vars=extra_vars,
        env={**ansible_env(box), **(env or {})},
        check=check,
        cwd=cwd,
    )
