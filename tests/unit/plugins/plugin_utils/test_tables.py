# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Values in tables: measured ones are rounded for people, those of a configuration never."""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils.serve_report import proof_lines
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.tables import cell, exact


@pytest.mark.parametrize(
    ("value", "measured", "written"),
    [
        (0.52, "0.5", "0.52"),
        (4096, "4,096", "4096"),
        (True, "yes", "true"),
        (None, "unknown", "unknown"),
        ([8, 0.25], "8, 0.2", "8, 0.25"),
        ("a\nb", "a b", "a b"),
    ],
)
def test_a_measured_value_and_one_that_was_written(value: t.Any, measured: str, written: str) -> None:
    assert (cell(value), exact(value)) == (measured, written)


def test_flags_that_run_otherwise_show_as_they_are_written() -> None:
    row = {"item": "mem-fraction-static", "wanted": 0.88, "found": 0.92}
    verify = {"verdict": "ready", "ready": True, "flags_differ": {"differences": [], "resolved": [row]}}
    assert "wanted 0.88, runs with 0.92" in " ".join(proof_lines(verify))
