# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 13: an idle GPU shows 103 or 308 MiB by the old memory call, which counts the driver's own part."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Hold, Variant
from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import Recorded, codes


@pytest.mark.parametrize("reserved_mib", [103, 308, 615])
def test_the_new_call_tells_them_apart(recorded: Recorded, reserved_mib: int) -> None:
    recorded.nvml.write(Gpu(0, reserved_mib=reserved_mib))
    result = recorded.clean()
    assert result.json["verdict"] == "clean"
    memory = result.json["facts_seen"]["gpus"][0]["memory"]
    assert (memory["api"], memory["used_mib"], memory["reserved_mib"]) == ("v2", 0, reserved_mib)


def test_where_only_the_old_call_is_there_nvidia_smi_decides(tmp_path: Path) -> None:
    host = Recorded(tmp_path, Variant.WITHOUT_MEMORY_V2)
    host.nvml.write(Gpu(0, reserved_mib=308))
    result = host.clean()
    assert result.json["verdict"] == "clean", result.json["summary"]
    memory = result.json["facts_seen"]["gpus"][0]["memory"]
    assert (memory["api"], memory["used_mib"]) == ("nvidia-smi", 0)


def test_the_old_call_alone_above_the_limit_is_unknown(tmp_path: Path) -> None:
    host = Recorded(tmp_path, Variant.WITHOUT_MEMORY_V2, smi=False)
    host.nvml.write(Gpu(0, reserved_mib=308))
    result = host.clean()
    assert (result.json["verdict"], codes(result)) == ("unknown", ["reserved_unknown"])
    assert "308 MiB by the old memory call" in result.json["summary"]
    assert result.json["facts_seen"]["gpus"][0]["memory"]["api"] == "v1"


def test_a_library_of_many_years_ago_gives_no_process_list_and_never_an_empty_one(tmp_path: Path) -> None:
    host = Recorded(tmp_path, Variant.WITHOUT_V3, smi=False)
    host.nvml.write(Gpu(0, reserved_mib=308))
    (gpu,) = host.module("gpu_info").json["gpus"]
    assert gpu["processes"] is None
    assert "nvmlDeviceGetComputeRunningProcesses" in [row["call"] for row in gpu["errors"]]
    assert codes(host.clean()) == ["reserved_unknown"]


def test_the_old_call_alone_is_enough_below_the_limit_and_with_a_baseline(tmp_path: Path) -> None:
    host = Recorded(tmp_path, Variant.WITHOUT_MEMORY_V2, smi=False)
    host.nvml.write(Gpu(0, reserved_mib=60))
    assert host.clean().json["verdict"] == "clean"
    host.nvml.write(Gpu(0, reserved_mib=308))
    assert host.clean(baselines={"0": 308}).json["verdict"] == "clean"


def test_memory_in_use_is_dirty_by_nvidia_smi_too(tmp_path: Path) -> None:
    host = Recorded(tmp_path, Variant.WITHOUT_MEMORY_V2)
    host.nvml.write(Gpu(0, reserved_mib=308), Hold(0, mib=602, always=True, listed="no"))
    result = host.clean(vantage="host")
    assert (result.json["verdict"], codes(result)) == ("dirty", ["holder_unknown"])
    assert "602 MiB in use" in result.json["summary"]
