# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The systemd side of a start: whose unit it is, what runs in it, and what its journal says of this start alone."""

from __future__ import annotations

import dataclasses
import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.act import launch as act
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_process
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.launch import (
    Account,
    LaunchPlan,
    LaunchRequest,
    plan_launch,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.record import read_record
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.unit import MARK
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Unit
from ansible_collections.cleanslate.sglang.plugins.module_utils.spawn import Completed

UNIT = "sglang-main.service"
ID = "20260131T235959Z-1a2b"
KEY = "sk-Journal-1"
STOPPED = Unit(UNIT, 0, "no", "inactive", "loaded", "")
LEADER_PID = 4711


class Host:
    """A unit directory, and a systemd that answers as told and notes what it was asked."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.units = tmp_path / "units"
        self.units.mkdir()
        self.path = self.units / UNIT
        self.state: t.Optional[Unit] = STOPPED
        self.after_start: t.Optional[Unit] = STOPPED
        self.argv: tuple[str, ...] = ()
        self.commands: list[list[str]] = []
        self.fails: tuple[str, ...] = ()
        self.journal = ""
        self.request = LaunchRequest(
            name="main",
            python="/opt/v/bin/python",
            account=Account("root", "root", os.geteuid(), os.getegid(), "/root"),
            flags={"model_path": "m"},
            launcher="systemd",
            state_dir=str(tmp_path / "state"),
            boot_id="b",
            secrets={"api-key": KEY},
            unit=UNIT,
        )
        monkeypatch.setattr(act, "read_unit", lambda _unit: self.state)
        monkeypatch.setattr(act, "run_bounded", self._run)
        monkeypatch.setattr(act, "fetch_process", self.process)

    def _run(self, argv: list[str], _deadline_s: float) -> Completed:
        self.commands.append(argv)
        if argv[0] == "journalctl":
            return Completed(0, self.journal, "")
        if argv[1] == "start":
            self.state = self.after_start
        return Completed(1, "", f"Job failed: {KEY}") if argv[1] in self.fails else Completed(0, "", "")

    def process(self, pid: int) -> t.Optional[Process]:
        one = read_process(os.getpid())
        assert one is not None
        return dataclasses.replace(one, pid=pid, argv=self.argv, state="S")

    def plan(self) -> LaunchPlan:
        return plan_launch(self.request, ID)

    def running(self, state: str = "active") -> Unit:
        return Unit(UNIT, LEADER_PID, "no", state, "loaded", "/system.slice/x")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def check(host: Host, argv: tuple[str, ...] = (), may_run: bool = False) -> None:
    host.argv = argv
    process = host.process(LEADER_PID)
    assert process is not None
    act.check_unit_free(host.request, str(host.units), {LEADER_PID: process}, may_run)


@pytest.mark.parametrize("may_run", [False, True])
def test_a_unit_written_by_hand_is_never_overwritten(host: Host, may_run: bool) -> None:
    host.path.write_text("[Service]\nExecStart=/bin/mine\n")
    with pytest.raises(CleanSlateError, match="was not written by cleanslate.sglang; choose another unit name"):
        check(host, may_run=may_run)


def test_a_masked_unit_is_not_ours_either(host: Host) -> None:
    host.path.symlink_to("/dev/null")
    with pytest.raises(CleanSlateError, match="was not written by cleanslate.sglang"):
        check(host)


def test_a_unit_of_ours_that_is_stopped_is_free(host: Host) -> None:
    host.path.write_text(MARK + "\n")
    check(host)
    host.path.unlink()
    check(host)


@pytest.mark.parametrize("state", ["active", "activating", "reloading"])
def test_a_unit_that_runs_something_else_is_refused(host: Host, state: str) -> None:
    host.state = host.running(state)
    for may_run in (False, True):
        with pytest.raises(CleanSlateError, match=rf"is {state} with pid 4711 \(/bin/mine --api-key \*+\)"):
            check(host, ("/bin/mine", "--api-key", KEY), may_run)


def test_a_server_in_the_unit_is_an_error_unless_it_would_be_evicted_before(host: Host) -> None:
    host.state = host.running()
    leader = ("/opt/v/bin/python", "-m", "sglang.launch_server", "--config", "/elsewhere")
    check(host, leader, may_run=True)
    with pytest.raises(CleanSlateError, match="pid 4711"):
        check(host, leader)


def test_a_systemd_that_does_not_answer_is_no_free_unit(host: Host) -> None:
    host.state = None
    with pytest.raises(CleanSlateError, match="does not tell the state"):
        check(host)


def test_the_unit_is_checked_again_before_the_record_is_written(host: Host) -> None:
    host.path.write_text("[Service]\nExecStart=/bin/mine\n")
    with pytest.raises(CleanSlateError, match="was not written by"):
        act.start(host.request, host.plan(), str(host.units))
    assert host.path.read_text() == "[Service]\nExecStart=/bin/mine\n"
    assert read_record(host.request.state_dir, "main").record is None
    assert host.commands == []


def test_a_main_process_of_another_launch_never_completes_the_record(host: Host) -> None:
    plan = host.plan()
    host.after_start = host.running()
    host.argv = ("/opt/v/bin/python", "-m", "sglang.launch_server", "--config", "/elsewhere")
    with pytest.raises(CleanSlateError, match="its main process 4711 is not this launch"):
        act.start(host.request, plan, str(host.units))
    record = read_record(host.request.state_dir, "main").record
    assert record is not None
    assert (record.state, record.pid) == ("starting", None)


def test_the_main_process_of_this_launch_completes_it(host: Host) -> None:
    plan = host.plan()
    host.after_start = host.running()
    host.argv = plan.argv
    launched = act.start(host.request, plan, str(host.units))
    assert (launched.record.state, launched.record.pid) == ("started", LEADER_PID)
    assert MARK in host.path.read_text()


def test_a_failed_start_is_explained_by_its_own_journal_without_secrets(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(act.time, "time", lambda: 1769903999.25)
    host.fails = ("start",)
    host.journal = f"ValueError: no such key {KEY}\n"
    with pytest.raises(CleanSlateError, match="ValueError: no such key") as raised:
        act.start(host.request, host.plan(), str(host.units))
    assert KEY not in str(raised.value)
    journal = host.commands[-1]
    assert journal[journal.index("--since") + 1] == "@1769903999.250000"
