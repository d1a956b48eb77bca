# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 21: 602/536/536/600 MiB, nobody listed, nobody has the device: dirty, and the next opt-in rung is named."""

from __future__ import annotations

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu
from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import Recorded, codes

USED_MIB = (602, 536, 536, 600)


def test_holder_unknown(recorded: Recorded) -> None:
    recorded.nvml.write(*(Gpu(index, extra_mib=mib) for index, mib in enumerate(USED_MIB)))
    result = recorded.clean(vantage="host")
    assert (result.json["verdict"], codes(result)) == ("dirty", ["holder_unknown"] * 4)
    for mib, row in zip(USED_MIB, result.json["reasons"]):
        assert f"{mib} MiB" in row["message"]
        assert "gpu_reset" in row["message"]


def test_an_eviction_finds_nobody_to_ask(recorded: Recorded) -> None:
    recorded.nvml.write(*(Gpu(index, extra_mib=mib) for index, mib in enumerate(USED_MIB)))
    result = recorded.module("gpu_evict", check=True, scope="gpu", shm_dir=str(recorded.root / "shm"))
    assert (result.json["verdict"], result.json["plan"]) == ("nothing_to_do", [])
