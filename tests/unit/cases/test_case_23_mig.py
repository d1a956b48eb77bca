# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 23: 160 GiB on 25 dead pids over 8 MIG instances, and one query failed: null, never 0."""

from __future__ import annotations

from ansible_collections.cleanslate.sglang.tests.doubles.nvml import lies
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Fault, Gpu, Hold, Line, Mig
from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import Recorded, codes

MUTE = 3
DEAD = tuple(range(3_998_000, 3_998_025))
MIB = 160 * 1024 // 25
TOTAL_MIB = 8 * 5 * MIB
INSTANCES = tuple((gpu, mig) for gpu in (0, 1) for mig in range(4))  # one GPU has seven at most


def dead_pids() -> list[Line]:
    places = [INSTANCES[number % 8] for number in range(len(DEAD))]
    return [Hold(gpu, mig=mig, mib=MIB, always=True, pid=pid) for pid, (gpu, mig) in zip(DEAD, places)]


def test_the_instance_that_gives_no_answer_is_null(recorded: Recorded) -> None:
    gpus = [Gpu(index, total_mib=TOTAL_MIB) for index in (0, 1)]
    slices = [*lies.mig_with_a_mute_instance(0, 4, MUTE), *(Mig(1, number) for number in range(4))]
    recorded.nvml.write(*gpus, *slices, *dead_pids())
    found = recorded.module("gpu_info").json["gpus"]
    used = {(gpu["index"], slot): one["memory"] for gpu in found for slot, one in enumerate(gpu["mig"])}
    assert used.pop((0, MUTE)) is None
    assert found[0]["mig"][MUTE]["errors"][0]["code"] == lies.UNKNOWN
    assert len(used) == 7
    assert sum(memory["used_mib"] for memory in used.values()) == 22 * MIB
    assert sorted(found[0]["stale_pids"] + found[1]["stale_pids"]) == list(DEAD)
    result = recorded.clean()
    assert result.json["verdict"] == "dirty"
    assert codes(result).count("memory_in_use") == 7
    assert codes(result).count("mig_no_answer") == 1
    assert codes(result).count("stale_pid") == 2


def test_a_mute_instance_alone_is_unknown(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0), *lies.mig_with_a_mute_instance(0, 7, MUTE))
    result = recorded.clean()
    assert (result.json["verdict"], codes(result)) == ("unknown", ["mig_no_answer"])


def test_instances_that_cannot_be_counted_are_unknown(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0), Mig(0, 0), Fault("nvmlDeviceGetMaxMigDeviceCount", gpu=0, code=lies.UNKNOWN))
    result = recorded.clean()
    assert (result.json["verdict"], codes(result)) == ("unknown", ["mig_no_answer"])


def test_free_instances_are_clean(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0), *(Mig(0, number) for number in range(7)))
    assert recorded.clean().json["verdict"] == "clean"
