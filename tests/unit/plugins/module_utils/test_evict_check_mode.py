# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check mode and the real run agree on what could not be seen: a plan of a host that was seen in part is unknown."""

from __future__ import annotations

import dataclasses
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils import evict as evict_module
from ansible_collections.cleanslate.sglang.plugins.module_utils.act import climb
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.climb import Climber
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.targets import Request
from ansible_collections.cleanslate.sglang.plugins.module_utils.evict import Order, evict
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import GpuReading, Problem, Reason
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.look import LookOptions
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Snapshot
from ansible_collections.cleanslate.sglang.tests.unit.builders import (
    LEADER,
    gpu,
    holds,
    leader,
    process,
    snapshot,
    visits,
)

SERVER = process(100, LEADER)
RANK = process(101, "sglang::scheduler", ppid=100, sid=100, pgid=100)
OTHER = process(300, LEADER)
SEEN = snapshot(SERVER, RANK, gpus=[gpu(0, 20_000)], uses=[holds(101)], leaders=[leader(SERVER)])
HIDDEN = Problem("list processes", None, "hidden")


def unplaced(**changes: t.Any) -> Snapshot:
    more = [leader(SERVER), leader(OTHER, **changes)]
    return snapshot(SERVER, RANK, OTHER, gpus=[gpu(0, 20_000)], uses=[holds(101)], leaders=more)


# Each part of a look that can fail, as it looks when it did.
PARTS: dict[str, tuple[Snapshot, str, str]] = {
    "the list of processes": (dataclasses.replace(SEEN, problems=(HIDDEN,)), "server", "scan_incomplete"),
    "the driver": (
        snapshot(SERVER, RANK, leaders=[leader(SERVER)], reading=GpuReading("none", None)),
        "gpu",
        "gpus_unknown",
    ),
    "a GPU's node": (
        snapshot(SERVER, RANK, gpus=[gpu(0, 20_000, minor=None)], leaders=[leader(SERVER)]),
        "gpu",
        "gpus_unknown",
    ),
    "the driver's list": (
        snapshot(
            SERVER,
            RANK,
            process(400),
            gpus=[gpu(0, 20_000, processes=None)],
            uses=[holds(101), visits(400)],
            leaders=[leader(SERVER)],
        ),
        "gpu",
        "gpus_unknown",
    ),
    "open files and mappings": (
        snapshot(
            SERVER, RANK, process(400), gpus=[gpu(0)], uses=[holds(101)], leaders=[leader(SERVER)], unreadable=[400]
        ),
        "gpu",
        "scan_incomplete",
    ),
    "a launcher's port": (unplaced(port=None), "server", "server_unknown"),
    "a launcher's network": (unplaced(same_network=None), "server", "server_unknown"),
}


def planned(monkeypatch: pytest.MonkeyPatch, shm: Path, seen: Snapshot, scope: str) -> dict[str, t.Any]:
    monkeypatch.setattr(climb, "look", lambda _options: seen)
    monkeypatch.setattr(Climber, "_waiting_unit", lambda _self: None)
    return evict(Order(LookOptions(), scope=scope, port=30000, check_mode=True, shm_dir=str(shm)))


def test_a_whole_look_is_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for scope in ("server", "sglang", "gpu"):
        result = planned(monkeypatch, tmp_path, SEEN, scope)
        assert (result["verdict"], result["changed"]) == ("planned", True), result["summary"]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_was_not_seen_is_unknown_and_the_plan_is_told(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen, scope, code = PARTS[part]
    result = planned(monkeypatch, tmp_path, seen, scope)
    assert result["verdict"] == "unknown"
    assert code in [reason["code"] for reason in result["reasons"]]
    assert [row["rung"] for row in result["plan"]][:2] == ["term", "kill"]


@pytest.mark.parametrize("code", sorted(evict_module.NOT_SEEN))
def test_whatever_the_real_run_calls_unknown_check_mode_does_too(code: str) -> None:
    climber = Climber(LookOptions(), Request(port=1), (), climb.Deadlines())
    climber.report.reasons.append(Reason(code, "it could not be seen", "x"))
    for there_is_a_plan in (True, False):
        assert evict_module._verdict(climber, there_is_a_plan, check_mode=True) == "unknown"
        assert evict_module._verdict(climber, there_is_a_plan, check_mode=False) == "unknown"
