# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Promise 2 on a host with systemd and sshd: a relaunch signals its own server's leader, and nobody else."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.trace import STRACE, parse_trace
from ansible_collections.cleanslate.sglang.tests.lab.containers import Container
from ansible_collections.cleanslate.sglang.tests.lab.gpus import USED_MIB, Gpus
from ansible_collections.cleanslate.sglang.tests.lab.inventory import (
    API_KEY,
    host_vars,
    run_on,
    server,
    write_inventory,
)
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import OPERATOR, PYTHON
from ansible_collections.cleanslate.sglang.tests.lab.servers import (
    ask,
    leaders,
    standin_argv,
    start_bystanders,
    start_unit,
    unit_file,
    unit_state,
    wait_serving,
)

pytestmark = pytest.mark.lab

PORT, OTHER_PORT = 30000, 30001
TRACED_PYTHON = "/usr/local/bin/traced-python3"
TRACES = "/run/traces"


def trace_modules(box: Container) -> None:
    """An interpreter for modules that writes every signal which they send below TRACES."""
    script = f'#!/bin/sh\nexec {shlex.join(STRACE)} -o {TRACES}/$$ {PYTHON} "$@"\n'
    path = box.root / TRACED_PYTHON.lstrip("/")
    path.write_text(script)
    path.chmod(0o755)
    (box.root / TRACES.lstrip("/")).mkdir(mode=0o1777)


def signals(box: Container) -> set[tuple[int | None, str]]:
    """(target, signal) of all that the modules sent; their own helpers' groups are told by their negative pids."""
    traces = (box.root / TRACES.lstrip("/")).iterdir()
    found = [signal for trace in traces for signal in parse_trace(trace.read_text(errors="replace"))]
    return {(one.target, one.signal) for one in found}


@pytest.mark.promise
def test_exactly_the_leader_is_signalled(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    """The server to go was started by hand; another server, a notebook, an editor, GPU services and shells live on."""
    trace_modules(box)
    bystanders = start_bystanders(box, gpus.paths)
    other = unit_file(
        standin_argv(OTHER_PORT), restart="always", environment={"SGLANG_STANDIN_DEVICES": "/dev/nvidia1,/dev/nvidia0"}
    )
    start_unit(box, "embed.service", other)
    start = f"nohup {shlex.join(standin_argv(PORT))} >log 2>&1 </dev/null &"
    settings = "export SGLANG_STANDIN_DEVICES=/dev/nvidia0,/dev/nvidia1;"
    subprocess.run([*box.ssh_argv(OPERATOR, "-T"), f"{settings} {start}"], timeout=60, check=True)
    wait_serving(box, PORT)
    wait_serving(box, OTHER_PORT)
    old = leaders(box, PORT)[0]
    ranks = gpus.holders(0)
    neighbours = gpus.holders(1)
    assert len(ranks) == len(neighbours) == 1
    family = {one.pid for one in box.processes().values() if one.uid == old.uid and "user@" not in one.title}
    before = {pid: one.start_ticks for pid, one in box.processes().items() if pid not in family}
    assert set(bystanders.values()) | neighbours <= set(before)

    inventory = write_inventory(
        tmp_path / "hosts.json",
        {box.name: {**host_vars(box, [server("chat", PORT, 0)]), "ansible_python_interpreter": TRACED_PYTHON}},
    )
    run = run_on(box, ROOT / "playbooks/relaunch.yml", inventory, tmp_path, "-e", "server=chat").check()

    assert signals(box) == {(old.pid, "SIGTERM")}
    after = {pid: one.start_ticks for pid, one in box.processes().items()}
    assert not {pid for pid in before if after.get(pid) != before[pid]}, (before, after)
    assert old.pid not in after and not ranks & set(after)
    assert gpus.holders(1) == neighbours and len(gpus.holders(0)) == 1
    assert unit_state(box, "embed.service", "NRestarts")["NRestarts"] == "0"
    assert ask(box, "GET", "/health", OTHER_PORT)[0] == 200
    assert ask(box, "GET", "/health", PORT, key=API_KEY)[0] == 200
    result = run.of_action("gpu_evict")[0].result
    assert result["before"][0]["used_mib"] == USED_MIB and result["after"][0]["used_mib"] == 0
    spared = {one["pid"] for one in result["spared"]}
    assert {bystanders["dcgm"], bystanders["persistenced"]} <= spared, result["spared"]
