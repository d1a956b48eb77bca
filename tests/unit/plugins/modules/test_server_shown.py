# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the server modules show where a record is missing, or a process can't be read."""

from __future__ import annotations

import dataclasses
import os
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils import hosteyes
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import bounded
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_boot_id, read_process
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.http import Endpoint
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.launch import (
    Account,
    LaunchRequest,
    plan_launch,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.proof import Client
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.record import Record
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.unit import MARK
from ansible_collections.cleanslate.sglang.plugins.modules import server_info, server_launch

ID = "20260131T235959Z-1a2b"
UNIT = "sglang-main.service"
REQUEST = LaunchRequest(
    name="main",
    python="/opt/v/bin/python",
    account=Account("sglang", "sglang", 900, 900, "/home/sglang"),
    flags={"model_path": "/m"},
    launcher="systemd",
    state_dir="/s",
    boot_id="b",
    unit=UNIT,
)


def hang(*_words: t.Any) -> t.NoReturn:
    time.sleep(600)
    raise AssertionError("nobody waited")


def test_the_difference_shows_the_unit_that_is_there_without_a_record(tmp_path: Path) -> None:
    (tmp_path / UNIT).write_text(f"{MARK}\n[Service]\nNice=5\n")
    shown = server_launch.diff(None, REQUEST, plan_launch(REQUEST, ID), str(tmp_path))
    assert "Nice=5" in shown["before"]


def test_the_difference_shows_the_unit_at_the_wanted_name(tmp_path: Path) -> None:
    plan = plan_launch(REQUEST, ID)
    (tmp_path / UNIT).write_text(str(plan.unit_text))
    detached = dataclasses.replace(plan.record, unit=None, launcher="detached")
    shown = server_launch.diff(detached, REQUEST, plan, str(tmp_path))
    assert shown["before"] == shown["after"]


def eyes() -> hosteyes.HostEyes:
    """Eyes on this very process as if it were the recorded leader."""
    own = read_process(os.getpid())
    assert own is not None
    record = Record(
        "main", ID, "started", "detached", boot_id=read_boot_id(), pid=own.pid, start_ticks=own.start_ticks
    )
    client = Client(Endpoint("127.0.0.1", 30000, None), "m", ranks=1, version=None, nonce=ID)
    return hosteyes.HostEyes(record, client, " ".join, 1.0)


def test_locked_neighbours_do_not_hide_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader is known by pid and start time; nobody's command line is needed for that."""
    monkeypatch.setattr(bounded, "read_processes", hang)
    leader = eyes().leader()
    assert leader is not None
    assert leader.pid == os.getpid()


def test_a_locked_owner_of_the_port_is_shown_without_its_title(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "read_process", hang)
    monkeypatch.setattr(hosteyes, "TITLE_DEADLINE_S", 0.2)
    one = t.cast(t.Any, dataclasses.make_dataclass("Use", ["state", "address", "pids"]))
    monkeypatch.setattr(hosteyes, "read_ports", lambda ports: [one("LISTEN", "127.0.0.1", (os.getpid(),))])
    owners = eyes().port_owners()
    assert owners is not None
    assert [(owner.pid, owner.title, owner.ours) for owner in owners] == [(os.getpid(), None, True)]


def test_a_leader_that_cannot_be_read_is_a_problem_and_does_not_hold_the_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded, "read_launched", hang)
    monkeypatch.setattr(server_info, "fetch_launched", lambda leader, proc: bounded.fetch_launched(leader, proc, 0.2))
    own = read_process(os.getpid())
    assert own is not None
    seen = object.__new__(server_info.Survey)
    seen.params, seen.proc, seen.records, seen.problems = {"name": None, "port": 30000}, "/proc", {}, []
    seen.leaders = [own]
    assert seen.servers() == []
    [problem] = seen.problems
    assert f"how pid {own.pid} was launched: not read within 0.2 s" in problem.message
