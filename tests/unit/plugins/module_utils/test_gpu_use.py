# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.gpu_use import GpuUse, gpu_use, planned_gpus
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.holders import find_holders
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import DeviceScan, DeviceUse
from ansible_collections.cleanslate.sglang.tests.unit.builders import gpu, holds, process, visits

P = {pid: process(pid) for pid in (10, 11, 66)}


def uses(
    found: t.Sequence[DeviceUse],
    planned: t.Sequence[str] = ("0",),
    tree: t.Collection[int] = (10, 11),
    unreadable: tuple[int, ...] = (),
    listed: t.Sequence[int] = (),
) -> tuple[GpuUse, ...]:
    one = gpu(0, listed=listed)
    holders = {0: find_holders(one, DeviceScan(tuple(found), unreadable, 3, 0.0), P)}
    return gpu_use(planned, [one], holders, tree, unreadable)


def test_one_of_ours_holds_it() -> None:
    (use,) = uses([holds(10), visits(11)])
    assert (use.used, use.ours, use.strangers) == (True, (10,), ())


def test_by_uuid_as_well() -> None:
    one = gpu(0)
    assert one.uuid
    (use,) = uses([holds(10)], planned=(one.uuid,))
    assert (use.used, use.index) == (True, 0)


def test_having_it_open_is_no_use() -> None:
    (use,) = uses([visits(10), visits(11)])
    assert (use.used, use.note) == (False, None)


def test_a_stranger_is_named_beside_ours_and_alone() -> None:
    (both,) = uses([holds(10), holds(66)])
    assert both.used is True
    assert both.strangers[0].startswith("pid 66 (")
    (alone,) = uses([holds(66)])
    assert alone.used is False
    assert alone.strangers


def test_a_process_that_can_t_be_read_makes_it_unknown() -> None:
    (use,) = uses([], unreadable=(11,))
    assert use.used is None
    assert "pid 11" in str(use.note)
    (other,) = uses([], unreadable=(66,))
    assert other.used is False


def test_contradicting_evidence_is_unknown() -> None:
    (use,) = uses([], listed=[10])
    assert use.used is None


def test_a_gpu_that_is_not_shown_is_absent() -> None:
    (use,) = uses([holds(10)], planned=("GPU-gone",))
    assert (use.used, use.index, use.absent) == (False, None, True)


def test_a_gpu_whose_holders_nobody_looked_at_is_unknown() -> None:
    (use,) = gpu_use(("0",), [gpu(0)], {}, (10, 11))
    assert (use.used, use.index, use.absent) == (None, 0, False)


@pytest.mark.parametrize(
    ("flags", "planned"),
    [
        ({}, ("a",)),
        ({"tp_size": 2}, ("a", "b")),
        ({"tp_size": 2, "base_gpu_id": 1}, ("b", "c")),
        ({"tp_size": 2, "gpu_id_step": 2}, ("a", "c")),
        ({"tp_size": 4, "nnodes": 2, "node_rank": 1}, ("a", "b")),
        ({"tp_size": "many"}, ("a", "b", "c", "d")),
    ],
)
def test_which_of_the_chosen_are_taken(flags: dict[str, t.Any], planned: tuple[str, ...]) -> None:
    assert planned_gpus(flags, ("a", "b", "c", "d")) == planned
