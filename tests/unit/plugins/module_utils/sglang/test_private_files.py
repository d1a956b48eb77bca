# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.launch import (
    Account,
    LaunchPlan,
    LaunchRequest,
    plan_launch,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.private_files import secrets_differ

REQUEST = LaunchRequest(
    name="main",
    python="/opt/v/bin/python",
    account=Account("sglang", "sglang", 900, 900, "/home/sglang"),
    flags={"model_path": "/m"},
    launcher="detached",
    state_dir="/s",
    boot_id="b",
    secrets={"api-key": "sk-1"},
    secret_environment={"HF_TOKEN": "hf-1"},
)


@pytest.fixture
def before(tmp_path: Path) -> LaunchPlan:
    """A launch whose private files lie on the host."""
    plan = plan_launch(dataclasses.replace(REQUEST, state_dir=str(tmp_path)), "20260131T235959Z-1a2b")
    os.makedirs(plan.folder)
    for name, text in plan.files.items():
        (Path(plan.folder) / name).write_text(text)
    return plan


def compare(before: LaunchPlan, tmp_path: Path, **changes: object) -> bool | None:
    request = dataclasses.replace(REQUEST, state_dir=str(tmp_path), **changes)  # type: ignore[arg-type]
    return secrets_differ(before.record, plan_launch(request, "20260201T000000Z-1a2b"), str(tmp_path))


def test_the_same_secrets_are_the_same(before: LaunchPlan, tmp_path: Path) -> None:
    assert compare(before, tmp_path) is False
    assert compare(before, tmp_path, flags={"model_path": "/other"}) is False


@pytest.mark.parametrize(
    "changes",
    [
        {"secrets": {"api-key": "sk-2"}},
        {"secrets": {}},
        {"secrets": {"api-key": "sk-1", "admin-api-key": "sk-1"}},
        {"secret_environment": {"HF_TOKEN": "hf-2"}},
        {"secret_environment": {}},
    ],
)
def test_another_secret_is_seen(before: LaunchPlan, tmp_path: Path, changes: dict[str, object]) -> None:
    assert compare(before, tmp_path, **changes) is True


@pytest.mark.parametrize("name", ["config.yaml", "env"])
def test_files_that_cannot_be_read_are_unknown(before: LaunchPlan, tmp_path: Path, name: str) -> None:
    path = Path(before.folder) / name
    path.unlink()
    assert compare(before, tmp_path) is None
    path.symlink_to("/etc/hostname")
    assert compare(before, tmp_path) is None


def test_a_configuration_that_is_not_understood_is_unknown(before: LaunchPlan, tmp_path: Path) -> None:
    (Path(before.folder) / "config.yaml").write_text("api-key: [\n")
    assert compare(before, tmp_path) is None


def test_without_a_launch_before_nothing_is_known(before: LaunchPlan, tmp_path: Path) -> None:
    assert secrets_differ(None, before, str(tmp_path)) is None
