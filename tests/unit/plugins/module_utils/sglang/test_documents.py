# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.documents import (
    CUT,
    DOCUMENT_LIMIT,
    document_text,
)


def test_what_fits_is_kept_as_it_is() -> None:
    data = {"verdict": "clean", "gpus": [{"index": 0}], "none": None, "number": 1.5}
    assert json.loads(document_text(data)) == data


@pytest.mark.parametrize(
    "data",
    [
        {"text": "x" * 1_000_000},
        {"rows": list(range(1_000_000))},
        {"rows": [{"line": "y" * 3000} for _number in range(5000)]},
        {f"key{number}": "z" * 500 for number in range(5000)},
        {"deep": {f"key{number}": {"inner": "v" * 100} for number in range(20000)}, "small": 1},
        {"\u20ac" * 100000: "\u20ac" * 100000},
    ],
)
def test_what_is_too_large_is_shortened_to_the_limit_and_says_so(data: dict[str, t.Any]) -> None:
    text = document_text(data)
    assert len(text.encode()) <= DOCUMENT_LIMIT
    assert "at most 262144 are kept" in json.loads(text)[CUT]


def test_small_parts_of_a_large_document_stay() -> None:
    kept = json.loads(document_text({"verdict": "failed", "log": ["l" * 1000] * 1000}))
    assert kept["verdict"] == "failed"
    assert len(kept["log"]) > 10


def test_what_json_does_not_know() -> None:
    deep: list[t.Any] = []
    for _step in range(5000):
        deep = [deep]
    kept = json.loads(document_text({"nan": float("nan"), "inf": float("inf"), "set": {1}, "deep": deep, "any": 1j}))
    assert (kept["nan"], kept["inf"], kept["set"], kept["any"]) == (None, None, [1], "1j")
