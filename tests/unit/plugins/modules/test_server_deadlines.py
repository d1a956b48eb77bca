# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Numbers of seconds that would make a module wait for ever."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.modules import server_info, server_launch, server_ready
from ansible_collections.cleanslate.sglang.tests.unit.fake_host import run_module

NONSENSE = [float("nan"), float("inf"), float("-inf"), -1.0, 0.0]
LAUNCH = {"python": "/opt/v/bin/python", "flags": {"model_path": "/m"}}
CASES: list[tuple[t.Any, str, dict[str, t.Any]]] = [
    (server_ready, "deadline_s", {}),
    (server_ready, "token_deadline_s", {}),
    (server_ready, "nvml_deadline_s", {}),
    (server_ready, "soak_max_latency_s", {}),
    (server_launch, "nvml_deadline_s", LAUNCH),
    (server_info, "nvml_deadline_s", {}),
]


@pytest.mark.parametrize("value", NONSENSE)
@pytest.mark.parametrize(("module", "name", "others"), CASES)
def test_no_end_is_no_deadline(
    module: t.Any,
    name: str,
    others: dict[str, t.Any],
    value: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = {"name": "main", "state_dir": str(tmp_path), **others, name: value}
    result = run_module(module.main, arguments, capsys)
    assert result["failed"] is True
    assert f"{name} is " in result["msg"]
