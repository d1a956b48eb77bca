# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rows of the fault matrix in which the host is gone and comes back, or accepts and says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.faults import matrix, runner
from ansible_collections.cleanslate.sglang.tests.faults.model import Row
from ansible_collections.cleanslate.sglang.tests.harness.trace import strace_missing
from ansible_collections.cleanslate.sglang.tests.lab import light

REASON = strace_missing() or light.why_not()

pytestmark = [
    pytest.mark.lab,
    pytest.mark.ns,
    pytest.mark.slow,
    pytest.mark.long(120),
    pytest.mark.timeout(900),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@pytest.mark.parametrize("row", matrix.of_light("light-blink-", "light-sshd-"), ids=lambda row: row.id)
def test_row(row: Row, tmp_path: Path) -> None:
    outcome = runner.run_row(row, tmp_path)
    assert outcome.result == "ok", matrix.line(row, outcome) + f"\n{outcome.detail}"
