# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 20: GB10 and Jetson have no memory of their own: host memory decides, and it must be said how much is needed."""

from __future__ import annotations

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.lies import unified_memory
from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import Recorded, codes, warnings


def test_not_clean_by_default(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0, name="NVIDIA GB10"), *unified_memory(0))
    result = recorded.clean()
    assert (result.json["verdict"], codes(result)) == ("unknown", ["unified_memory"])
    memory = result.json["facts_seen"]["gpus"][0]["memory"]
    assert (memory["unified"], memory["used_mib"], memory["total_mib"]) == (True, None, None)


def test_host_memory_decides(recorded: Recorded) -> None:
    recorded.write(meminfo_kib={"MemAvailable": 100 * 1024 * 1024})
    recorded.nvml.write(Gpu(0, name="NVIDIA GB10"), *unified_memory(0))
    enough = recorded.clean(required_available_mib=90 * 1024)
    assert (enough.json["verdict"], warnings(enough)) == ("clean", ["unified_memory"])
    short = recorded.clean(required_available_mib=101 * 1024)
    assert (short.json["verdict"], codes(short)) == ("dirty", ["host_memory_short"])


def test_a_holder_is_seen_all_the_same(recorded: Recorded) -> None:
    recorded.write(recorded.holder(900, ["python3", "train.py"], 0))
    recorded.nvml.write(Gpu(0, name="NVIDIA GB10"), *unified_memory(0))
    result = recorded.clean(required_available_mib=1)
    assert (result.json["verdict"], codes(result)) == ("dirty", ["held"])
