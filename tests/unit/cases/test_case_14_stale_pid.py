# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 14: 10,151 MiB and 100 % utilisation under a pid that does not exist: dirty, and nobody to signal."""

from __future__ import annotations

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Hold
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Proc
from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import Recorded, codes

DEAD = 3_999_001


def test_a_dead_pid_is_named_as_stale(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0, util=100), Hold(0, mib=10_151, always=True, pid=DEAD))
    result = recorded.clean()
    assert (result.json["verdict"], codes(result)) == ("dirty", ["stale_pid"])
    assert f"pid {DEAD}, which is dead (stale pid)" in result.json["summary"]
    (gpu,) = recorded.module("gpu_info").json["gpus"]
    assert (gpu["stale_pids"], gpu["holders"]) == ([DEAD], [])
    assert gpu["processes"][0]["used_mib"] == 10_151


def test_a_zombie_is_as_dead(recorded: Recorded) -> None:
    recorded.write(Proc(DEAD, "python3", state="Z"))
    recorded.nvml.write(Gpu(0), Hold(0, mib=10_151, always=True, pid=DEAD))
    assert codes(recorded.clean()) == ["stale_pid"]


def test_an_eviction_plans_nothing_for_it(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0, util=100), Hold(0, mib=10_151, always=True, pid=DEAD))
    result = recorded.module("gpu_evict", check=True, scope="gpu", shm_dir=str(recorded.root / "shm"))
    assert (result.json["verdict"], result.json["plan"], result.json["changed"]) == ("nothing_to_do", [], False)


def test_a_dead_pid_without_memory_is_a_warning(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0), Hold(0, mib=0, always=True, pid=DEAD))
    result = recorded.clean()
    assert result.json["verdict"] == "clean"
    assert [row["code"] for row in result.json["warnings_found"] if row["severity"] == "warning"] == ["stale_pid"]
