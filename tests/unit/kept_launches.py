# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Launches in a state directory, as files, for the tests of records and histories."""

from __future__ import annotations

import dataclasses
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import record as records
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import record_files
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.launch import (
    Account,
    ChosenGpu,
    LaunchRequest,
    plan_launch,
)

KEY = "sk-Kept-Secret-1"
TOKEN = "hf-Kept-Secret-2"
REQUEST = LaunchRequest(
    name="main",
    python="/opt/v/bin/python",
    account=Account("sglang", "sglang", 900, 900, "/home/sglang"),
    flags={"model_path": "/m", "tp_size": 2, "json_model_override_args": {"a": [1, 'q"$%']}},
    launcher="systemd",
    state_dir="/s",
    boot_id="b",
    host="0.0.0.0",
    port=8000,
    gpus=(ChosenGpu(3, "GPU-c"), ChosenGpu(1, "GPU-a")),
    environment={"NCCL_DEBUG": "INFO", "QUOTES": 'a "b" \\ $HOME `x` = #'},
    secret_environment={"PLAIN_NAME": TOKEN},
    secrets={"api-key": KEY},
    unit="sglang-main.service",
    operator="alice",
    run_id="run-1",
)


def launch_id(day: int) -> str:
    return f"202601{day:02}T000000Z-0000"


def keep(state: Path, day: int, request: LaunchRequest = REQUEST, **changes: t.Any) -> str:
    """One launch as server_launch leaves it, without a process; returns its id."""
    plan = plan_launch(dataclasses.replace(request, state_dir=str(state), **changes), launch_id(day))
    folder = records.create_launch_dir(str(state), request.name, launch_id(day))
    for name, text in {**plan.files, **plan.kept}.items():
        records.write_file(folder, name, text.encode())
    started = dataclasses.replace(
        plan.record, state="started", pid=100 + day, start_ticks=5, started_at=f"2026-01-{day:02}T00:00:01+00:00"
    )
    records.write_record(str(state), started)
    record_files.set_link(str(state), request.name, "current", launch_id(day))
    return launch_id(day)


def prove(state: Path, launch: str, verdict: str = "ready", **values: t.Any) -> None:
    """Its proof, and last_good where it is one."""
    record_files.write_document(str(state), "main", launch, "proof", {"verdict": verdict, **values})
    if verdict == "ready":
        record_files.mark_good(str(state), "main", launch)
