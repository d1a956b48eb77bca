# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.holders import find_holders, killable
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import (
    DeviceScan,
    DeviceUse,
    MigInstance,
    NvmlProcess,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import GpuHolders
from ansible_collections.cleanslate.sglang.tests.unit.builders import gpu, holds, process, visits

P = {pid: process(pid) for pid in (10, 11, 12)}


def find(uses: t.Sequence[DeviceUse] = (), listed: t.Sequence[int] = (), **options: t.Any) -> GpuHolders:
    unreadable = options.pop("unreadable", ())
    return find_holders(
        options.pop("gpu", gpu(0, listed=listed)),
        DeviceScan(tuple(uses), tuple(unreadable), 3, 0.0),
        options.pop("processes", P),
        **options,
    )


def pids(found: GpuHolders) -> tuple[list[int], list[int], list[int]]:
    return ([x.pid for x in found.holders], [x.pid for x in found.visitors], [x.pid for x in found.suspects])


def test_a_readable_mapping_makes_a_holder_whoever_is_listed() -> None:
    found = find([holds(10), visits(11)])
    assert pids(found) == ([10], [11], [])
    assert found.holders[0].evidence == (
        "readable mapping 2048 KiB",
        "3 open descriptors",
        "doorbells 128 KiB write-only",
    )
    assert killable(found.holders[0])


def test_listed_alive_and_open_makes_a_holder() -> None:
    found = find([visits(10)], listed=[10])
    assert pids(found) == ([10], [], [])
    assert killable(found.holders[0])
    assert found.rule_holds is False


def test_listed_without_having_it_open_is_a_suspect_and_never_killable() -> None:
    found = find(listed=[10])
    assert pids(found) == ([], [], [10])
    assert not killable(found.suspects[0])


def test_a_simulated_list_makes_a_holder_that_is_not_killable() -> None:
    found = find(listed=[10], simulated=True)
    assert pids(found) == ([10], [], [])
    assert not killable(found.holders[0])


def test_the_dead_are_stale() -> None:
    processes = {10: process(10, state="Z"), 11: process(11, state="Z", threads=2)}
    found = find([holds(11)], listed=[10, 11, 99], processes=processes)
    assert found.stale_pids == (10, 99)
    assert pids(found) == ([11], [], [])


def test_uses_of_another_gpu_do_not_count() -> None:
    assert pids(find([holds(10, minor=1)])) == ([], [], [])


def test_a_gpu_without_a_minor_ties_nobody_by_device() -> None:
    assert pids(find([holds(10, minor=0)], gpu=gpu(0, minor=None))) == ([], [], [])


def test_who_cannot_be_read_is_a_suspect_not_a_visitor() -> None:
    found = find([visits(10)], unreadable=[10])
    assert pids(found) == ([], [], [10])
    assert "can't be read" in found.suspects[0].evidence[-1]


def test_protected_holders_are_marked_and_not_killable() -> None:
    found = find([holds(10)], own_pids=[10])
    assert found.holders[0].protected == "this run itself"
    assert not killable(found.holders[0])


def test_processes_of_mig_instances_count() -> None:
    row = NvmlProcess(10, "compute", 5)
    sliced = gpu(0, processes=None, mig=(MigInstance("MIG-1", None, (row,)), MigInstance("MIG-2", None, None)))
    assert pids(find([visits(10)], gpu=sliced)) == ([10], [], [])


@pytest.mark.parametrize(
    ("uses", "listed", "rule"),
    [([holds(10)], [10], True), ([holds(10), visits(11)], [10, 11], False), ([holds(10)], [], None), ([], [10], None)],
)
def test_the_rule_is_compared_with_the_drivers_list(
    uses: list[DeviceUse], listed: list[int], rule: bool | None
) -> None:
    assert find(uses, listed).rule_holds is rule


def test_a_holder_whose_files_cannot_all_be_read_stays_one() -> None:
    """What was seen is evidence enough; only a guess becomes a suspicion."""
    for found in (find([holds(10)], unreadable=[10]), find([visits(10)], [10], unreadable=[10])):
        assert pids(found) == ([10], [], [])
        assert killable(found.holders[0])


def test_the_evidence_says_what_was_seen_and_no_more() -> None:
    assert find([], [10]).suspects[0].evidence == ("listed by the driver, but the device is not open here",)
    simulated = find([], [10], simulated=True)
    assert simulated.holders[0].evidence == ("listed by the simulated driver",)
    assert not killable(simulated.holders[0])
    both = find([visits(10)], [10]).holders[0].evidence
    assert both[0] == "listed by the driver with the device open"
    assert not any("not open here" in words or "simulated" in words for words in both)
    assert find([], gpu=gpu(3)).gpu_index == 3


def test_a_unit_s_protection_reaches_its_processes() -> None:
    assert find([holds(10)], protect=["x.service"], units={10: "x.service"}).holders[0].protected is not None
    assert find([holds(10)], protect=["x.service"], units={11: "x.service"}).holders[0].protected is None
