# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 17: client 367.44, kernel module 367.35 (NVML 18): unknown, with both versions named."""

from __future__ import annotations

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml import lies
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Fault, Gpu, System
from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import Recorded, codes

MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  367.35  Mon Jul 11 23:14:21 PDT 2016\nGCC version:  gcc\n"


def mismatch(recorded: Recorded) -> None:
    recorded.write(files={"driver/nvidia/version": MODULE})
    recorded.nvml.write(
        System(driver="367.44", nvml="8.367.44"), Gpu(0), Fault("nvmlInit*", code=lies.LIB_RM_VERSION_MISMATCH)
    )


def test_both_versions_are_named(recorded: Recorded) -> None:
    mismatch(recorded)
    result = recorded.clean()
    assert (result.json["verdict"], codes(result)) == ("unknown", ["driver_mismatch"])
    assert "367.44" in result.json["summary"]
    assert "367.35" in result.json["summary"]
    driver = result.json["facts_seen"]["driver"]
    assert (driver["nvml_version"], driver["kernel_module_version"]) == ("8.367.44", "367.35")


def test_gpu_info_shows_null_and_no_empty_list(recorded: Recorded) -> None:
    mismatch(recorded)
    result = recorded.module("gpu_info").json
    assert result["gpus"] is None
    assert [row["code"] for row in result["problems"]] == [lies.LIB_RM_VERSION_MISMATCH]


def test_an_eviction_by_holders_does_not_pretend_to_have_seen_them(recorded: Recorded) -> None:
    mismatch(recorded)
    result = recorded.module("gpu_evict", check=True, scope="gpu", shm_dir=str(recorded.root / "shm"))
    assert result.failed
    assert (result.json["verdict"], codes(result)) == ("unknown", ["gpus_unknown"])


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (4, "driver_no_permission"),
        (9, "driver_not_loaded"),
        (12, "driver_library_missing"),
        (15, "gpu_lost"),
        (999, "driver_unknown_error"),
    ],
)
def test_every_failure_of_the_driver_is_unknown_and_says_what_to_do(recorded: Recorded, code: int, reason: str) -> None:
    recorded.nvml.write(Gpu(0), *lies.init_fails(code))
    result = recorded.clean()
    assert (result.json["verdict"], codes(result)) == ("unknown", [reason])
    assert f"NVML error {code}" in result.json["summary"]


def test_a_driver_that_hangs_is_unknown_within_the_deadline(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0), *lies.hangs())
    result = recorded.clean(nvml_deadline_s=0.5, samples=1)
    assert (result.json["verdict"], codes(result)) == ("unknown", ["driver_hung"])
    assert result.json["seconds"] < 20
