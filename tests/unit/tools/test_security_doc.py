# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each test that docs/security.md names for a claim is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def missing(page: str) -> list[str]:
    """The tests that a page names and that are not there."""
    named = re.findall(r"`([\w/.-]+\.py)(?:::(\w+))?`", page)
    gone = []
    for file, test in named:
        path = ROOT / "tests" / file.removeprefix("tests/")
        if not path.is_file() or (test and f"def {test}(" not in path.read_text(encoding="utf-8")):
            gone.append(f"{file}::{test}")
    return gone


def test_every_claim_s_test_is_there() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert len(re.findall(r"\.py::\w+", page)) > 50
    assert missing(page) == []


def test_a_test_that_is_gone_is_found() -> None:
    assert missing("`unit/tools/test_security_doc.py::test_of_yesterday` `unit/tools/no_such.py`") == [
        "unit/tools/test_security_doc.py::test_of_yesterday",
        "unit/tools/no_such.py::",
    ]
