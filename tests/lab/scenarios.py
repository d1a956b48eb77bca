# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the scenarios of a Proxmox node share: inventories, runs with a bound, signals that were sent, the node's own
bystanders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import sys
import time
import typing as t
from pathlib import Path

import pytest

from ..harness import tree
from ..harness.command import ROOT
from ..harness.devices import LOOP_MAJOR
from ..harness.playbook import PlaybookRun, TaskResult, run_playbook
from ..harness.trace import STRACE, parse_trace
from .inventory import ansible_env, host_vars, server
from .node import NAME, Guest, Node, started
from .servers import standin_argv, start_unit, unit_file, wait_serving

PORT, OTHER_PORT = 30000, 30001
# What a step may take beyond its deadlines: ssh, AnsiballZ and the controller, on a busy machine with two cores.
STEP_S = 5.0
STEPS = 22
SETTLE_S = 3
# Of the rungs in all scenarios, in seconds.
DEADLINES = {"stop": 10, "term": 10, "kill": 10, "attach": 5, "container_stop": 20, "container_start": 20}
NVML_S = 10
READY_S = 40
PCT_TRY_S = 25


def chat(**settings: t.Any) -> dict[str, t.Any]:
    """The server that is relaunched: on GPU 0, with everything of SGLang in its container in scope."""
    return server(
        "chat",
        PORT,
        0,
        **{"scope": "sglang", "deadlines": DEADLINES, "settle_s": SETTLE_S, "ready_deadline_s": READY_S, **settings},
    )


def start_by_hand(guest: Guest, name: str, port: int, gpu: int, *, restart: str = "no", **environment: str) -> None:
    """A stand-in server as a unit of somebody's, on one GPU, with every GPU open; returns when it serves."""
    order = f"/dev/nvidia{gpu},/dev/nvidia{1 - gpu}"
    start_unit(
        guest.box,
        f"{name}.service",
        unit_file(standin_argv(port), restart=restart, environment={"SGLANG_STANDIN_DEVICES": order, **environment}),
    )
    wait_serving(guest.box, port)


# --- runs -------------------------------------------------------------------------------------------------------------


def run_host(
    guest: Guest,
    playbook: str,
    scratch: Path,
    *arguments: str,
    servers: t.Sequence[t.Mapping[str, t.Any]] | None = None,
    variables: t.Mapping[str, t.Any] | None = None,
    node_variables: t.Mapping[str, t.Any] | None = None,
    env: t.Mapping[str, str] | None = None,
    deadline_s: float = 280,
) -> PlaybookRun:
    """A playbook against a container whose node is named."""
    node = guest.node
    settings = {**host_vars(guest.box, servers or [chat()]), **guest.variables(), **(variables or {})}
    hosts = {
        "sglang": {"hosts": {guest.box.name: settings}},
        "proxmox_nodes": {"hosts": {NAME: node.host_vars(**(node_variables or {}))}},
    }
    inventory = scratch / "hosts.json"
    inventory.write_text(json.dumps({"all": {"children": hosts}}, indent=1))
    inventory.chmod(0o600)
    return run_playbook(
        tree.root() / "playbooks" / f"{playbook}.yml",
        *arguments,
        scratch=scratch,
        deadline_s=deadline_s,
        inventory=inventory,
        env={**ansible_env(guest.box), **(env or {})},
    )


def run_module_on_node(
    node: Node,
    module: str,
    arguments: t.Mapping[str, t.Any],
    scratch: Path,
    *,
    deadline_s: float = 200,
    **node_variables: t.Any,
) -> TaskResult:
    """One of our modules on the node, by ssh and AnsiballZ. A failed task is returned, not raised."""
    inventory = scratch / "node.module.json"
    hosts = {NAME: node.host_vars(**node_variables)}
    inventory.write_text(json.dumps({"all": {"hosts": hosts}}))
    task = {
        "name": "the task",
        f"cleanslate.sglang.{module}": {"device_major": LOOP_MAJOR, **arguments},
        "environment": node.environment,
    }
    play = scratch / "node.module.yml"
    play.write_text(json.dumps([{"hosts": NAME, "gather_facts": False, "tasks": [task]}]))
    run = run_playbook(play, scratch=scratch, deadline_s=deadline_s, inventory=inventory, env=ansible_env_of(node))
    assert len(run.tasks) == 1, f"rc {run.rc}\n{run.stdout}\n{run.stderr}"
    return run.tasks[0]


def ansible_env_of(node: Node) -> dict[str, str]:
    """As for containers, on the connection to the node."""
    return {
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(node.lab.sockets),
        "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=30s",
        "ANSIBLE_PIPELINING": "True",
        "ANSIBLE_TIMEOUT": "10",
    }


def evictions(run: PlaybookRun) -> tuple[dict[str, t.Any], dict[str, t.Any]]:
    """What gpu_evict returned inside and on the node; each empty where it was not asked."""
    results = [task.result for task in run.of_action("gpu_evict") if task.status != "skipped"]
    inside = [one for one in results if not one.get("container")]
    outside = [one for one in results if one.get("container")]
    assert len(inside) <= 1 and len(outside) <= 1, run.stdout
    return (inside or [{}])[0], (outside or [{}])[0]


def joint_verdict(run: PlaybookRun) -> dict[str, t.Any]:
    """The last verdict that was joined from both views."""
    facts = [task.result.get("ansible_facts", {}) for task in run.named("Join both views")]
    verdicts = [one["clean_state_result"] for one in facts if "clean_state_result" in one]
    assert verdicts, run.stdout
    last: dict[str, t.Any] = verdicts[-1]
    return last


def evict(node: Node, scratch: Path, guest: Guest, *rungs: str, **more: t.Any) -> dict[str, t.Any]:
    """gpu_evict on the node with these rungs alone (the default ones where none is named); its result, and whether it
    ``failed``.
    """
    arguments = {
        "container": str(guest.vmid),
        "name": "chat",
        "port": PORT,
        "scope": "sglang",
        "devices": ["0"],
        "deadlines": DEADLINES,
        **({"rungs": list(rungs)} if rungs else {}),
        **more,
    }
    done = run_module_on_node(node, "gpu_evict", arguments, scratch)
    return {**done.result, "failed": done.status == "failed"}


def codes(result: t.Mapping[str, t.Any]) -> set[str]:
    """The stable codes of a result's reasons."""
    return {reason["code"] for reason in result.get("reasons", [])}


# --- bounds -----------------------------------------------------------------------------------------------------------


def relaunch_bound_s(*more: float) -> float:
    """The sum of the deadlines of one relaunch that goes to the node: every step may use all of its time."""
    rungs = DEADLINES["stop"] + DEADLINES["term"] + DEADLINES["kill"]
    inside = rungs + 4 * NVML_S
    outside = rungs + DEADLINES["attach"] + 6 * NVML_S
    judged = 3 * (SETTLE_S + 3 + 3 * NVML_S)
    return inside + outside + judged + READY_S + STEPS * STEP_S + sum(more)


def teardown_bound_s(*more: float) -> float:
    """The same for a teardown, or a judgement, by the node."""
    rungs = DEADLINES["stop"] + DEADLINES["term"] + DEADLINES["kill"]
    return 2 * rungs + DEADLINES["attach"] + 10 * NVML_S + STEPS * STEP_S + sum(more)


@contextlib.contextmanager
def bounded(request: pytest.FixtureRequest, name: str, most_s: float) -> t.Iterator[None]:
    """Time the block and hold it to the sum of its deadlines; the line is printed with the summary of the run."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    line = f"bounded: {name} took {took:.1f} s of at most {most_s:.0f} s"
    print(line)
    request.node.user_properties.append(("bounded", line))
    assert took <= most_s, line


# --- who was signalled ------------------------------------------------------------------------------------------------


def trace_node(node: Node) -> str:
    """An interpreter for modules on the node that records every signal which they and their helpers send."""
    traces = node.directory / "traces"
    traces.mkdir()
    path = node.directory / "traced-python"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(STRACE)} -o {traces}/$$ {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def signalled(node: Node) -> set[tuple[int | None, str]]:
    """(target, signal) of all that modules on the node sent; their own helpers' groups, negative numbers, left out."""
    found = set()
    for trace in (node.directory / "traces").iterdir():
        for one in parse_trace(trace.read_text(errors="replace")):
            if one.target is None or one.target > 0:
                found.add((one.target, one.signal))
    return found


def start_ticks(pid: int) -> int | None:
    """When a process started; None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@dataclasses.dataclass(frozen=True)
class Census:
    """Who lived at one moment: pid and start time outside. ``check`` says that all of them still do."""

    living: t.Mapping[int, int]

    @classmethod
    def of(cls, pids: t.Iterable[int]) -> Census:
        found = {pid: start_ticks(pid) for pid in pids}
        gone = [pid for pid, ticks in found.items() if ticks is None]
        assert found and not gone, gone
        return cls({pid: ticks for pid, ticks in found.items() if ticks is not None})

    def check(self) -> None:
        changed = {pid: start_ticks(pid) for pid, ticks in self.living.items() if start_ticks(pid) != ticks}
        assert not changed, f"gone or replaced: {changed}"


def everybody_in(guest: Guest) -> set[int]:
    """Outer pids of all processes that the container sees, but for sessions, which end by themselves."""
    return {one.outer_pid for one in guest.box.processes().values() if not _of_a_session(one.outer_pid)}


def _of_a_session(pid: int) -> bool:
    try:
        return "/user.slice/" in Path(f"/proc/{pid}/cgroup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextlib.contextmanager
def bystanders_on(node: Node, *kinds: str) -> t.Iterator[dict[str, int]]:
    """The node's own persistenced, exporter, notebook and so on, with its GPUs open; kind -> pid."""
    devices = ",".join(map(str, node.gpus.nodes))
    words = ["--directory", str(node.directory / "bystanders"), "--devices", devices, *kinds]
    with started([sys.executable, str(ROOT / "tests/fixtures/bystanders.py"), *words]) as process:
        assert process.stdout is not None
        pids: dict[str, int] = json.loads(process.stdout.readline())
        try:
            yield pids
        finally:
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def holder_on(node: Node, gpu: int) -> t.Iterator[int]:
    """A process of the node itself that holds one of its GPUs; its pid."""
    program = str(ROOT / "tests/fixtures/hold_device.py")
    with started([sys.executable, program, "--map", str(node.gpus.nodes[gpu])]) as process:
        yield process.pid
