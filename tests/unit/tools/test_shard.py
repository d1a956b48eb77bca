# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Shards: every file in exactly one part, heavy ones apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.tests.tools.shard import assign, parse_shard, weight

FILES = st.dictionaries(st.text("abc", min_size=1, max_size=4), st.floats(1, 100), max_size=12)


@given(FILES, st.integers(1, 6))
def test_every_file_is_in_one_part(weights: dict[str, float], parts: int) -> None:
    chosen = assign(weights, parts)
    assert chosen.keys() == weights.keys()
    assert all(1 <= part <= parts for part in chosen.values())


def test_heavy_files_are_kept_apart() -> None:
    chosen = assign({"a": 40.0, "b": 40.0, "c": 2.0, "d": 2.0}, 2)
    assert chosen["a"] != chosen["b"]
    assert chosen["c"] != chosen["d"]


def test_the_heaviest_marker_counts() -> None:
    assert weight([]) < weight(["lab"]) < weight(["lab", "engine"])
    assert weight(["long"], told=[600.0]) == 600
    assert weight([]) < weight([], "tests/x/test_playbooks_plan.py") < weight(["lab"], "tests/x/test_playbooks_plan.py")


@pytest.mark.parametrize("text", ["", "3", "0/2", "3/2", "a/b", "1/2/3", "-1/2"])
def test_bad_shards_are_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="want K/N"):
        parse_shard(text)


def test_a_shard() -> None:
    assert parse_shard("2/4") == (2, 4)
