# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Servers under systemd that somebody else set up: the owner is asked first, and nobody comes back behind our back."""

from __future__ import annotations

import shlex
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.containers import Container
from ansible_collections.cleanslate.sglang.tests.lab.gpus import Gpus
from ansible_collections.cleanslate.sglang.tests.lab.inventory import run_module_on
from ansible_collections.cleanslate.sglang.tests.lab.servers import (
    leaders,
    standin_argv,
    start_unit,
    unit_file,
    unit_state,
    wait_serving,
)

pytestmark = pytest.mark.lab

PORT = 30000
UNIT = "kimi.service"
ON_GPU_0 = {"SGLANG_STANDIN_DEVICES": "/dev/nvidia0,/dev/nvidia1"}


def evict(box: Container, scratch: Path, **arguments: t.Any) -> dict[str, t.Any]:
    """gpu_evict for the server of port 30000 on GPU 0; its result, which must not be a failure."""
    settings = {
        "name": "main",
        "port": PORT,
        "devices": ["0"],
        "expected_gpus": 2,
        "device_major": LOOP_MAJOR,
        "deadlines": {"stop": 15, "term": 10, "kill": 10},
        **arguments,
    }
    done = run_module_on(box, "gpu_evict", settings, scratch)
    assert done.status == "ok", done.result
    return done.result


def rungs_of(result: t.Mapping[str, t.Any]) -> list[str]:
    return [rung["rung"] for rung in result["rungs"]]


def test_the_unit_is_asked_to_stop(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    start_unit(box, UNIT, unit_file(standin_argv(PORT), environment=ON_GPU_0))
    wait_serving(box, PORT)
    leader = leaders(box)[0]
    held = gpus.holders(0)
    assert held
    result = evict(box, tmp_path)
    assert result["verdict"] == "evicted" and rungs_of(result) == ["stop"], result
    assert result["rungs"][0]["asked"] == [
        {"what": f"stop systemd {UNIT}", "pid": leader.pid, "result": "accepted", "detail": ""}
    ]
    assert held | {leader.pid} <= {ended["pid"] for ended in result["ended"]}
    assert result["before"][0]["used_mib"] == 20000 and result["after"][0]["used_mib"] == 0
    assert not leaders(box) and not gpus.holders(0)
    assert unit_state(box, UNIT, "ActiveState")["ActiveState"] in ("inactive", "failed")


@pytest.mark.promise
def test_a_unit_that_always_restarts_is_stopped_first(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    start_unit(box, UNIT, unit_file(standin_argv(PORT), restart="always", environment=ON_GPU_0))
    wait_serving(box, PORT)
    invocation = unit_state(box, UNIT, "InvocationID")
    result = evict(box, tmp_path)
    assert rungs_of(result) == ["stop"] and result["respawns"] == []
    # RestartSec is 1 s: a restart that was coming would be here by now.
    time.sleep(2.5)
    assert not leaders(box)
    state = unit_state(box, UNIT, "ActiveState", "NRestarts", "InvocationID")
    assert state["ActiveState"] in ("inactive", "failed") and state["NRestarts"] == "0"
    assert state["InvocationID"] == invocation["InvocationID"]


def test_a_crash_loop_is_ended_by_its_unit(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    environment = {"SGLANG_STANDIN_CRASH": "nccl", **ON_GPU_0}
    start_unit(box, UNIT, unit_file(standin_argv(PORT), restart="always", environment=environment))
    wait_for("two restarts", lambda: int(unit_state(box, UNIT, "NRestarts")["NRestarts"]) >= 2, 30)
    result = evict(box, tmp_path, unit=UNIT)
    assert result["verdict"] == "evicted" and rungs_of(result) == ["stop"], result
    restarts = unit_state(box, UNIT, "NRestarts")["NRestarts"]
    time.sleep(2.5)
    state = unit_state(box, UNIT, "ActiveState", "NRestarts")
    assert state == {"ActiveState": state["ActiveState"], "NRestarts": restarts}
    assert state["ActiveState"] in ("inactive", "failed") and not leaders(box)


@pytest.mark.parametrize("restart", ["no", "always"])
def test_a_unit_that_runs_a_shell_around_the_server(box: Container, gpus: Gpus, tmp_path: Path, restart: str) -> None:
    command = f"/bin/bash -c '{shlex.join(standin_argv(PORT))}; echo ended'"
    start_unit(box, UNIT, unit_file(command, restart=restart, environment=ON_GPU_0))
    wait_serving(box, PORT)
    main = int(unit_state(box, UNIT, "MainPID")["MainPID"])
    leader = leaders(box)[0]
    assert main != leader.pid
    result = evict(box, tmp_path)
    assert result["verdict"] == "evicted" and rungs_of(result) == ["stop"], result
    assert {main, leader.pid} <= {ended["pid"] for ended in result["ended"]}
    time.sleep(2.5)
    assert not leaders(box) and not gpus.holders(0)
