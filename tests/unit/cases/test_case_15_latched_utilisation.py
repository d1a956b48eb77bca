# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 15: 100 % utilisation, 0 MiB, no process, after a kill in mid-kernel: clean with a warning."""

from __future__ import annotations

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.lies import busy_when_idle
from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import Recorded, warnings


def test_clean_with_a_warning(recorded: Recorded) -> None:
    recorded.nvml.write(busy_when_idle(0), Gpu(1))
    result = recorded.clean()
    assert not result.failed
    assert (result.json["verdict"], warnings(result)) == ("clean", ["utilization_latched"])
    (warning,) = [row for row in result.json["warnings_found"] if row["code"] == "utilization_latched"]
    assert "GPU 0" in warning["message"]


def test_a_busy_gpu_with_a_process_is_no_latch(recorded: Recorded) -> None:
    recorded.write(recorded.holder(900, ["python3", "train.py"], 0))
    recorded.nvml.write(busy_when_idle(0))
    result = recorded.clean()
    assert result.json["verdict"] == "dirty"
    assert "utilization_latched" not in warnings(result)
