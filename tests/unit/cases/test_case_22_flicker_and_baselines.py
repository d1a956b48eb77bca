# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 22: memory that flickers or comes back is unstable; a baseline belongs to one GPU, by the inventory."""

from __future__ import annotations

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Hold
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.lies import rebounds
from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import Recorded, codes


def test_idle_1675_of_2000_is_clean(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0, extra_mib=1675))
    assert recorded.clean(max_used_mib=2000).json["verdict"] == "clean"


def test_flicker_after_a_teardown_is_waited_out(recorded: Recorded) -> None:
    recorded.nvml.write(rebounds(0, 9000, 1675, 5000, 1675, 1675, 1675))
    result = recorded.clean(max_used_mib=2000, settle_s=30)
    assert result.json["verdict"] == "clean", result.json["summary"]
    assert [sample["used_mib"]["0"] for sample in result.json["samples_taken"]] == [1675, 1675, 1675]


def test_flicker_without_patience_is_unstable(recorded: Recorded) -> None:
    recorded.nvml.write(rebounds(0, 1675, 5000, 1675))
    result = recorded.clean(max_used_mib=2000)
    assert (result.json["verdict"], codes(result)) == ("dirty", ["unstable"])
    assert "1675, 5000, 1675 MiB" in result.json["summary"]


def test_a_server_that_comes_back_between_samples_is_unstable(recorded: Recorded) -> None:
    recorded.nvml.write(rebounds(0, 0, 0, 20_000))
    result = recorded.clean()
    assert (result.json["verdict"], codes(result)) == ("dirty", ["unstable"])


def test_a_desktop_has_a_baseline_of_its_own(recorded: Recorded) -> None:
    recorded.write(recorded.holder(900, "/usr/lib/xorg/Xorg", 0, exe="/usr/lib/xorg/Xorg"))
    recorded.nvml.write(Gpu(0), Gpu(1), Hold(0, mib=150, always=True, pid=900, type="graphics"))
    assert codes(recorded.clean(max_used_mib=100)) == ["memory_in_use"]
    for name in ("0", "00000000:01:00.0", "0000:01:00.0", "GPU-00000000-0000-0000-0000-000000000000"):
        result = recorded.clean(max_used_mib=100, baselines={name: 150})
        assert result.json["verdict"] == "clean", (name, result.json["summary"])
    assert codes(recorded.clean(max_used_mib=100, baselines={"1": 150})) == ["memory_in_use"]
    # Xorg is left alone always: its holding the GPU within the baseline is no reason.
    assert recorded.clean(max_used_mib=100, baselines={"0": 150}).json["verdict"] == "clean"


def test_a_baseline_excuses_no_holder(recorded: Recorded) -> None:
    recorded.write(recorded.holder(900, ["python3", "train.py"], 0))
    recorded.nvml.write(Gpu(0), Hold(0, mib=150, always=True, pid=900))
    assert codes(recorded.clean(baselines={"0": 150})) == ["held"]
