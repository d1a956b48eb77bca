# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The soak in short: every kind of fault once, twelve in a row on one host; `make soak` goes on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.lab import containers, soak

pytestmark = [pytest.mark.lab, pytest.mark.long(350), pytest.mark.timeout(1400)]


@pytest.mark.parametrize("half", [0, 1])
def test_every_fault_once_leaves_nothing_behind(tmp_path: Path, half: int) -> None:
    reason = containers.why_not()
    if reason is not None:
        pytest.skip(reason)
    faults = soak.FAULTS[half::2]
    with soak.opened(tmp_path) as place:
        report = soak.Soak(place, seed=8).run(1 + len(faults), faults=faults)
    assert report.ok, "\n".join([*(one.line() for one in report.rounds if not one.ok), report.table()])
    assert {one.fault for one in report.rounds} == {"none", *(one.name for one in faults)}
