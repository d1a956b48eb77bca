# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 6: all GPUs at 0 MiB and a page cache of 50 GiB: clean. Memory in the page cache is not memory in use."""

from __future__ import annotations

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu
from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import Recorded, codes

GIB_KIB = 1024 * 1024
MEMORY = {
    "MemTotal": 449 * GIB_KIB,
    "MemFree": 394 * GIB_KIB,
    "MemAvailable": 444 * GIB_KIB,
    "Buffers": 0,
    "Cached": 50 * GIB_KIB,
    "SReclaimable": 0,
}


def test_eight_free_gpus_and_a_large_page_cache_are_clean(recorded: Recorded) -> None:
    recorded.write(meminfo_kib=MEMORY)
    recorded.nvml.write(*(Gpu(index) for index in range(8)))
    result = recorded.clean(expected_gpus=8, required_available_mib=440 * 1024)
    assert not result.failed, result.json["summary"]
    assert (result.json["verdict"], result.json["changed"], codes(result)) == ("clean", False, [])
    facts = result.json["facts_seen"]
    assert facts["available_mib"] == 444 * 1024
    assert (facts["memory"]["mem_total_mib"], facts["memory"]["cached_mib"]) == (449 * 1024, 50 * 1024)
    assert [sample["used_mib"] for sample in result.json["samples_taken"]] == [{str(n): 0 for n in range(8)}] * 3
    assert "8 GPUs free (simulated driver)" in result.json["summary"]


def test_a_simulated_driver_proves_nothing_unless_it_is_allowed_to(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0))
    result = recorded.clean(allow_simulated=False)
    assert result.failed
    assert (result.json["verdict"], codes(result), result.json["simulated"]) == ("unknown", ["simulated"], True)


def test_nvidia_smi_over_the_same_library_is_simulated_too(recorded: Recorded) -> None:
    """A client library that is not root's own (others may write it) is not used: nvidia-smi speaks, over the double."""
    recorded.nvml.write(Gpu(0))
    recorded.distrust_client()
    result = recorded.clean(allow_simulated=False)
    assert (result.json["verdict"], codes(result)) == ("unknown", ["simulated"])
    assert result.json["facts_seen"]["driver"]["source"] == "nvidia-smi"
    assert recorded.clean().json["verdict"] == "clean"


def test_too_little_memory_is_dirty_and_too_few_gpus_unknown(recorded: Recorded) -> None:
    recorded.write(meminfo_kib=MEMORY)
    recorded.nvml.write(Gpu(0))
    short = recorded.clean(required_available_mib=445 * 1024)
    assert (short.json["verdict"], codes(short)) == ("dirty", ["host_memory_short"])
    fewer = recorded.clean(expected_gpus=8)
    assert (fewer.json["verdict"], codes(fewer)) == ("unknown", ["gpu_count"])
    assert "8 GPUs are expected, the driver shows 1" in fewer.json["summary"]


def test_memory_that_cannot_be_read_is_unknown(recorded: Recorded) -> None:
    recorded.write()
    (recorded.proc / "meminfo").write_text("MemTotal: 1 kB\n")
    recorded.nvml.write(Gpu(0))
    result = recorded.clean(required_available_mib=1)
    assert (result.json["verdict"], codes(result)) == ("unknown", ["host_memory_unknown"])
    assert result.json["facts_seen"]["available_mib"] is None
