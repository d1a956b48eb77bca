# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A launch becomes the last good one when all nodes of its server are proved, and not before."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import record_files
from ansible_collections.cleanslate.sglang.plugins.modules import server_ready
from ansible_collections.cleanslate.sglang.tests.unit.kept_launches import keep


def params(state: Path) -> dict[str, t.Any]:
    return {"state_dir": str(state), "name": "main", "last_good": "now"}


def good(state: Path) -> str | None:
    return record_files.look_link(str(state), "main", "last_good").launch_id


def write_proof(state: Path, launch: str, verdict: str) -> None:
    record_files.write_document(str(state), "main", launch, "proof", {"verdict": verdict})


def test_the_current_launch_is_marked(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    launch = keep(tmp_path, 2)
    write_proof(tmp_path, launch, "ready")
    assert good(tmp_path) is None
    assert server_ready.mark_now(params(tmp_path))["launch_id"] == launch
    assert good(tmp_path) == launch


def test_check_mode_marks_nothing(tmp_path: Path) -> None:
    write_proof(tmp_path, keep(tmp_path, 1), "ready")
    server_ready.mark_now(params(tmp_path), check_mode=True)
    assert good(tmp_path) is None


@pytest.mark.parametrize("verdict", [None, "failed"])
def test_what_was_not_proved_is_not_marked(tmp_path: Path, verdict: str | None) -> None:
    launch = keep(tmp_path, 1)
    if verdict:
        write_proof(tmp_path, launch, verdict)
    with pytest.raises(CleanSlateError, match="can't become last_good"):
        server_ready.mark_now(params(tmp_path))
    assert good(tmp_path) is None


def test_without_a_launch_there_is_nothing_to_mark(tmp_path: Path) -> None:
    with pytest.raises(CleanSlateError, match="no launch of 'main' is recorded"):
        server_ready.mark_now(params(tmp_path))
