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


def dead_pids() -> list[Line]:
    return [Hold(0, mib=MIB, always=True, pid=pid, mig=number % 8) for number, pid in enumerate(DEAD)]


def test_the_instance_that_gives_no_answer_is_null(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0, total_mib=TOTAL_MIB), *lies.mig_with_a_mute_instance(0, 8, MUTE), *dead_pids())
    (gpu,) = recorded.module("gpu_info").json["gpus"]
    used = [None if one["memory"] is None else one["memory"]["used_mib"] for one in gpu["mig"]]
    assert used[MUTE] is None
    assert gpu["mig"][MUTE]["errors"][0]["code"] == lies.UNKNOWN
    assert all(mib is not None and mib >= 3 * MIB for number, mib in enumerate(used) if number != MUTE)
    assert gpu["stale_pids"] == list(DEAD)
    result = recorded.clean()
    assert result.json["verdict"] == "dirty"
    assert codes(result).count("memory_in_use") == 7
    assert codes(result).count("mig_no_answer") == 1
    assert codes(result).count("stale_pid") == 1


def test_a_mute_instance_alone_is_unknown(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0), *lies.mig_with_a_mute_instance(0, 8, MUTE))
    result = recorded.clean()
    assert (result.json["verdict"], codes(result)) == ("unknown", ["mig_no_answer"])


def test_instances_that_cannot_be_counted_are_unknown(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0), Mig(0, 0), Fault("nvmlDeviceGetMaxMigDeviceCount", gpu=0, code=lies.UNKNOWN))
    result = recorded.clean()
    assert (result.json["verdict"], codes(result)) == ("unknown", ["mig_no_answer"])


def test_free_instances_are_clean(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0), *(Mig(0, number) for number in range(8)))
    assert recorded.clean().json["verdict"] == "clean"
