# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 18: one of four GPUs has no handle: that one is unknown, the other three are judged."""

from __future__ import annotations

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml import lies
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Hold, System
from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import Recorded, codes

GPUS = tuple(Gpu(index) for index in range(4))


@pytest.mark.parametrize("code", [lies.UNKNOWN, lies.GPU_IS_LOST, lies.RESET_REQUIRED])
def test_that_one_is_unknown(recorded: Recorded, code: int) -> None:
    recorded.nvml.write(*GPUS, *lies.no_handle(2, code))
    result = recorded.clean(expected_gpus=4)
    assert (result.json["verdict"], codes(result)) == ("unknown", ["gpu_no_answer"])
    assert "GPU 2" in result.json["summary"]
    assert [sample["used_mib"] for sample in result.json["samples_taken"]] == [{"0": 0, "1": 0, "2": None, "3": 0}] * 3
    gpus = recorded.module("gpu_info").json["gpus"]
    assert [gpu["memory"] is None for gpu in gpus] == [False, False, True, False]
    assert gpus[2]["errors"][0]["code"] == code


def test_the_others_are_clean_when_asked_alone(recorded: Recorded) -> None:
    recorded.nvml.write(*GPUS, *lies.no_handle(2))
    assert recorded.clean(devices=["0", "1", "3"]).json["verdict"] == "clean"


def test_the_others_are_dirty_all_the_same(recorded: Recorded) -> None:
    recorded.nvml.write(*GPUS, *lies.no_handle(2), Hold(3, mib=500, always=True, listed="no"))
    result = recorded.clean(vantage="host")
    assert (result.json["verdict"], codes(result)) == ("dirty", ["holder_unknown", "gpu_no_answer"])


def test_nvidia_smi_that_leaves_one_out_cannot_tell_which_is_which(recorded: Recorded) -> None:
    recorded.nvml.write(System(smi_handle_rc=0), *GPUS, *lies.no_handle(1))
    recorded.distrust_client()
    result = recorded.clean()
    assert result.json["verdict"] == "unknown"


def test_a_gpu_that_is_not_there_is_one_clear_error(recorded: Recorded) -> None:
    recorded.nvml.write(*GPUS)
    result = recorded.clean(devices=["4"])
    assert result.failed
    assert "GPU '4' is not on this host" in result.json["msg"]
