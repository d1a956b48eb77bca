# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 4: a kill in the container left all eight GPUs full. Dirty; who holds them is named, or said to be elsewhere."""

from __future__ import annotations

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Hold, Line
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Proc
from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import Recorded, codes

USED_MIB = (76_109, 76_113, 76_111, 76_109, 76_069, 76_113, 76_110, 76_112)
RANKS = range(700, 708)


def gpus() -> list[Line]:
    return [Gpu(index, name="NVIDIA RTX PRO 6000 Blackwell", total_mib=97_887, cc="12.0") for index in range(8)]


def full(listed: str) -> list[Line]:
    return [
        Hold(index, mib=mib, always=True, pid=pid, listed=listed)
        for index, (mib, pid) in enumerate(zip(USED_MIB, RANKS))
    ]


def test_seen_from_the_container_it_is_held_elsewhere_or_unpinning(recorded: Recorded) -> None:
    """The driver lists nobody here, since the holders are in another PID namespace."""
    recorded.nvml.write(*gpus(), *full("no"))
    result = recorded.clean(expected_gpus=8, vantage="container")
    assert result.failed
    assert (result.json["verdict"], codes(result)) == ("dirty", ["held_elsewhere"] * 8)
    message = result.json["reasons"][4]["message"]
    assert "76069 MiB" in message
    assert "held elsewhere" in message
    assert "unpinning" in message
    assert "look from the host" in message
    assert [row["memory"]["used_mib"] for row in result.json["facts_seen"]["gpus"]] == list(USED_MIB)


def test_holders_that_are_seen_are_named(recorded: Recorded) -> None:
    ranks = [recorded.holder(pid, f"sglang::scheduler_TP{pid - 700}", pid - 700, ppid=1) for pid in RANKS]
    recorded.write(*ranks)
    recorded.nvml.write(*gpus(), *full("yes"))
    result = recorded.clean(expected_gpus=8)
    assert result.json["verdict"] == "dirty"
    named = [row["message"] for row in result.json["reasons"] if row["code"] == "memory_in_use"]
    assert len(named) == 8
    assert "pid 704 sglang::scheduler_TP4 (readable mapping 2048 KiB)" in named[4]
    # Their leader is gone: each is an orphan as well.
    assert codes(result).count("orphan") == 8


@pytest.mark.parametrize("vantage", ["container", "host"])
def test_dead_pids_in_the_drivers_list_are_no_holders(recorded: Recorded, vantage: str) -> None:
    """The ranks were killed; the driver lists them still, and nobody alive has the device."""
    recorded.write(Proc(4000, ("python3", "bystander.py")))
    recorded.nvml.write(*gpus(), *full("yes"))
    result = recorded.clean(expected_gpus=8, vantage=vantage)
    assert (result.json["verdict"], codes(result)) == ("dirty", ["stale_pid"] * 8)
    assert "pid 700, which is dead" in result.json["reasons"][0]["message"]


def test_one_full_gpu_of_eight_is_enough(recorded: Recorded) -> None:
    recorded.nvml.write(*gpus(), Hold(4, mib=76_069, always=True, listed="no"))
    result = recorded.clean(expected_gpus=8, vantage="container")
    assert (result.json["verdict"], codes(result)) == ("dirty", ["held_elsewhere"])
    assert recorded.clean(devices=["0", "3"], vantage="container").json["verdict"] == "clean"
