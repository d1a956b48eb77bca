# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""server_launch, server_ready and server_info where systemd runs the server: unit, journal, restarts."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.unit import MARK
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.containers import Container
from ansible_collections.cleanslate.sglang.tests.lab.inventory import run_module_on
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import MODEL, SERVER_USER, SGLANG_PYTHON
from ansible_collections.cleanslate.sglang.tests.lab.servers import unit_state

pytestmark = pytest.mark.lab

UNIT = "sglang-main.service"
KEY = "sk-Unit-Secret-1"


def launch(box: Container, scratch: Path, **changes: t.Any) -> dict[str, t.Any]:
    arguments = {
        "name": "main",
        "python": SGLANG_PYTHON,
        "user": SERVER_USER,
        "port": 30000,
        "flags": {"model_path": MODEL, "device": "cpu", **changes.pop("flags", {})},
        "environment": {f"SGLANG_STANDIN_{name}": value for name, value in changes.pop("faults", {}).items()},
        **changes,
    }
    done = run_module_on(box, "server_launch", arguments, scratch)
    return {**done.result, "failed": done.status == "failed"}


def ready(box: Container, scratch: Path, **changes: t.Any) -> dict[str, t.Any]:
    return dict(run_module_on(box, "server_ready", {"name": "main", "deadline_s": 40, **changes}, scratch).result)


def test_a_unit_is_started_proved_by_the_journal_and_shown(box: Container, tmp_path: Path) -> None:
    result = launch(box, tmp_path, api_key=KEY, unit_overrides={"Service": {"Nice": 5}})
    assert result["failed"] is False, result
    assert (result["launcher"], result["unit"], result["log"]) == ("systemd", UNIT, "journal")
    state = unit_state(box, UNIT, "MainPID", "Nice", "User", "Restart", "UnitFileState")
    assert state == {
        "MainPID": str(result["pid"]),
        "Nice": "5",
        "User": SERVER_USER,
        "Restart": "no",
        "UnitFileState": "static",
    }
    proof = ready(box, tmp_path, api_key=KEY)
    assert proof["ready"] is True, proof
    assert any("ready to roll" in line for line in proof["log_tail"])
    assert [phase["name"] for phase in proof["phases"]][-1] == "ready"
    info = run_module_on(box, "server_info", {"api_key": KEY, "expected_gpus": 0}, tmp_path).result
    [server] = info["servers"]
    assert (server["name"], server["unit"], server["state"]) == ("main", UNIT, "serving")
    for shown in (result, proof, info):
        assert KEY not in json.dumps(shown)
    again = launch(box, tmp_path)
    assert again["failed"] is True
    assert f"pid {result['pid']}" in again["msg"]


def test_a_server_that_dies_is_explained_by_the_journal(box: Container, tmp_path: Path) -> None:
    launch(box, tmp_path, faults={"CRASH": "cuda_oom"})
    proof = ready(box, tmp_path)
    assert (proof["ready"], proof["verdict"]) == (False, "failed")
    assert "out of GPU memory" in proof["error"]


def test_the_log_of_an_earlier_launch_is_not_taken_for_this_ones(box: Container, tmp_path: Path) -> None:
    launch(box, tmp_path, faults={"CRASH": "cuda_oom"})
    assert "out of GPU memory" in ready(box, tmp_path)["error"]
    wait_for("the unit ended", lambda: unit_state(box, UNIT, "MainPID")["MainPID"] == "0", 20)
    second = launch(box, tmp_path, flags={"no_such_option": 1})
    assert second["failed"] is False, second
    error = ready(box, tmp_path)["error"]
    assert "no-such-option" in error
    assert "out of GPU memory" not in error


def test_a_restart_by_systemd_during_the_wait_is_told(box: Container, tmp_path: Path) -> None:
    overrides = {"Service": {"RestartSec": 1}}
    launch(box, tmp_path, faults={"CRASH": "memory"}, restart="on-failure", unit_overrides=overrides)
    proof = ready(box, tmp_path)
    assert (proof["ready"], proof["verdict"]) == (False, "failed")
    assert "no GPU memory is left for the KV cache" in proof["error"]


def test_a_unit_that_cannot_start_is_one_clear_error(box: Container, tmp_path: Path) -> None:
    result = launch(box, tmp_path, start_check=["/bin/false"])
    assert result["failed"] is True
    assert f"systemctl start {UNIT} failed" in result["msg"]
    # And it is no obstacle for the next one.
    assert launch(box, tmp_path)["failed"] is False
    assert ready(box, tmp_path)["ready"] is True


def test_enabled_at_boot_only_where_chosen(box: Container, tmp_path: Path) -> None:
    launch(box, tmp_path, enabled=True)
    assert unit_state(box, UNIT, "UnitFileState")["UnitFileState"] == "enabled"
    box.run(["systemctl", "stop", UNIT], 60).check()
    launch(box, tmp_path)
    assert unit_state(box, UNIT, "UnitFileState")["UnitFileState"] == "static"
    assert not (box.root / "etc/systemd/system/multi-user.target.wants" / UNIT).is_symlink()


def test_a_unit_of_somebody_else_is_neither_overwritten_nor_taken_for_ours(box: Container, tmp_path: Path) -> None:
    path = box.root / "etc/systemd/system" / UNIT
    by_hand = "[Service]\nExecStart=/bin/sleep 600\n"
    path.write_text(by_hand)
    refused = launch(box, tmp_path)
    assert refused["failed"] is True
    assert "was not written by cleanslate.sglang" in refused["msg"]
    assert path.read_text() == by_hand
    # One of ours by its text, in which something else runs: its process is never recorded as the server.
    path.write_text(f"{MARK}\n{by_hand}")
    box.run(["systemctl", "daemon-reload"], 60).check()
    box.run(["systemctl", "start", UNIT], 60).check()
    refused = launch(box, tmp_path)
    assert refused["failed"] is True
    assert "is active with pid" in refused["msg"]
    assert "/bin/sleep 600" in refused["msg"]
    box.run(["systemctl", "stop", UNIT], 60).check()
    assert launch(box, tmp_path)["failed"] is False
