# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each row of the fault matrix at clean_state in a namespace is a test; `make faults` prints them as a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.faults import matrix, runner
from ansible_collections.cleanslate.sglang.tests.faults.model import Row
from ansible_collections.cleanslate.sglang.tests.harness.trace import strace_missing

pytestmark = [
    pytest.mark.ns,
    pytest.mark.timeout(600),
    pytest.mark.skipif(strace_missing() is not None, reason="strace is not installed"),
]


@pytest.mark.parametrize("row", matrix.of_modules("clean_state"), ids=lambda row: row.id)
def test_row(row: Row, tmp_path: Path) -> None:
    outcome = runner.run_row(row, tmp_path)
    assert outcome.result == "ok", matrix.line(row, outcome) + f"\n{outcome.detail}"
