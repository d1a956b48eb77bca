# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.gpus import (
    baseline_for,
    choose_gpus,
    names_gpu,
    same_bus_id,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import UnknownDevice
from ansible_collections.cleanslate.sglang.tests.unit.builders import gpu

GPUS = [gpu(0), gpu(1, uuid="GPU-AbC"), gpu(2, uuid=None, bus_id=None)]


@pytest.mark.parametrize(
    "name", ["1", " 1 ", "01", "GPU-AbC", "gpu-abc", "00000000:02:00.0", "0000:02:00.0", "02:00.0"]
)
def test_one_gpu_has_many_names(name: str) -> None:
    assert [one.index for one in choose_gpus(GPUS, [name])] == [1]


def test_the_order_is_the_askers_and_nothing_means_all() -> None:
    assert [one.index for one in choose_gpus(GPUS, ["2", "0"])] == [2, 0]
    assert [one.index for one in choose_gpus(GPUS, [])] == [0, 1, 2]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["3"], "'3' is not on this host; it shows: 0 (GPU-0), 1 (GPU-AbC), 2 (no handle)"),
        (["GPU-zzz"], "not on this host"),
        (["-1"], "not on this host"),
        ([""], "not on this host"),
        (["\u00b2"], "not on this host"),
        (["1", "GPU-abc"], "named twice (it is GPU 1)"),
    ],
)
def test_wrong_names_are_named(names: list[str], words: str) -> None:
    with pytest.raises(UnknownDevice) as error:
        choose_gpus(GPUS, names)
    assert words in str(error.value)


def test_bus_ids_compare_by_meaning() -> None:
    assert same_bus_id("00000000:3B:00.0", "0000:3b:00.0")
    assert same_bus_id("3b:00.0", "00000000:3B:00.0")
    assert not same_bus_id("00000001:3B:00.0", "0000:3b:00.0")


def test_baselines() -> None:
    assert baseline_for(GPUS[1], {"0": 5, "gpu-abc": 150}) == 150
    assert baseline_for(GPUS[0], {"1": 150}) == 0


@given(st.text())
def test_any_text_names_a_gpu_or_not(text: str) -> None:
    assert names_gpu(GPUS[1], text) in (True, False)
