# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.tools import mutation

HEAD = "# x: survived\n--- a\n+++ b\n@@ -1 +1 @@\n"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('return Reason("a", "it is so")', 'return Reason("a", "XXit is soXX")', True),
        ('return Reason("a", "it is so")', 'return Reason("XXaXX", "it is so")', False),
        ('return Reason("a", "it is so")', 'return Reason("a", None)', False),
        ('if role != "holder":', 'if role != "XXholderXX":', False),
        ("if a and b:", "if a or b:", False),
    ],
)
def test_a_change_of_words_alone(before: str, after: str, words: bool) -> None:
    assert mutation.only_words(f"{HEAD} def f():\n-    {before}\n+    {after}\n") is words


def test_the_score(tmp_path: Path) -> None:
    meta = tmp_path / "mutants" / mutation.INSIDE / mutation.DECIDE / "holders.py.meta"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"exit_code_by_key": {"a": 1, "b": 0, "c": 33, "d": None, "e": 36, "f": 1}}))
    found = mutation.score(tmp_path, "holders", {"b": f'{HEAD}-    x("it is so")\n+    x("XXit is soXX")\n'})
    assert found == mutation.Score("holders", killed=3, survived=2, words=1, left=1)
    assert str(found) == "holders          3 of     5 killed (60 %; without mere words 75 %), 1 not tried"


def test_every_module_and_test_is_there() -> None:
    for module, tests in mutation.TESTS.items():
        assert (mutation.ROOT / mutation.DECIDE / f"{module}.py").is_file()
        assert all((mutation.ROOT / mutation.UNIT / f"{test}.py").is_file() for test in tests)
