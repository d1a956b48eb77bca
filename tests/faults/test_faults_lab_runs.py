# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each row of the fault matrix in LXC containers that runs a whole playbook is a test."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.faults import lab_site, matrix, rows_lab, runner
from ansible_collections.cleanslate.sglang.tests.faults.model import Row
from ansible_collections.cleanslate.sglang.tests.harness.trace import strace_missing
from ansible_collections.cleanslate.sglang.tests.lab.containers import why_not

pytestmark = [
    pytest.mark.lab,
    pytest.mark.long(60),
    pytest.mark.timeout(900),
    pytest.mark.skipif(strace_missing() is not None, reason="strace is not installed"),
]


@pytest.fixture(scope="module", autouse=True)
def shared_lab() -> t.Iterator[None]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    yield
    lab_site.close_shared()


@pytest.mark.parametrize("row", rows_lab.PLAYBOOKS, ids=lambda row: row.id)
def test_row(row: Row, tmp_path: Path) -> None:
    outcome = runner.run_row(row, tmp_path)
    assert outcome.result == "ok", matrix.line(row, outcome) + f"\n{outcome.detail}"
