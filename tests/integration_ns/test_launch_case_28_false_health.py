# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 28: /health says 200 while generation hangs, or one data parallel rank is dead: only tokens of every rank
count."""

from __future__ import annotations

import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.modules import ModuleResult, run_module
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.standin import STANDIN

pytestmark = pytest.mark.ns


def judged(ns: Namespace, tmp_path: Path, flags: t.Mapping[str, t.Any], fault: str, value: str) -> ModuleResult:
    (tmp_path / "model").mkdir()
    launched = run_module(
        "server_launch",
        {
            "name": "main",
            "python": sys.executable,
            "user": "root",
            "launcher": "detached",
            "state_dir": str(tmp_path / "state"),
            "port": 30000,
            "flags": {"model_path": str(tmp_path / "model"), "device": "cpu", **flags},
            "environment": {"PYTHONPATH": str(STANDIN), f"SGLANG_STANDIN_{fault}": value},
        },
        60,
        ns=ns,
    )
    assert not launched.failed, launched.json
    arguments = {"name": "main", "state_dir": str(tmp_path / "state"), "deadline_s": 40, "token_deadline_s": 3}
    return run_module("server_ready", arguments, 90, ns=ns)


def test_generation_hangs(ns: Namespace, tmp_path: Path) -> None:
    ready = judged(ns, tmp_path, {}, "HANG_AFTER", "0")
    assert ready.failed
    assert ready.json["verdict"] == "hung"
    assert "/health says 200" in ready.json["error"]
    assert "within 3 s" in ready.json["error"]
    assert ready.json["tokens"][0]["count"] is None


def test_one_rank_is_dead(ns: Namespace, tmp_path: Path) -> None:
    ready = judged(ns, tmp_path, {"dp_size": 2, "skip_server_warmup": True}, "DEAD_DP_RANK", "1")
    assert ready.failed
    assert ready.json["verdict"] == "failed"
    # By the watch of the start where it is seen to die, else by the proof's count.
    assert "scheduler" in ready.json["error"]
    assert ready.json["ready"] is False
    assert all(row["count"] is None for row in ready.json["tokens"] if row["dp_rank"] == 1)


def test_all_ranks_generate(ns: Namespace, tmp_path: Path) -> None:
    ready = judged(ns, tmp_path, {"dp_size": 2}, "HANG_AFTER", "-1")
    assert not ready.failed, ready.json
    assert [(row["dp_rank"], row["count"]) for row in ready.json["tokens"]] == [(0, 4), (1, 4)]
