# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import types
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils import hosteyes


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ({}, 1),
        ({"dp-size": 4}, 4),
        ({"--dp_size": "2"}, 2),
        ({"dp-size": 0}, 1),
        ({"dp-size": -3}, 1),
        ({"dp-size": None}, 1),
        ({"dp-size": "x"}, 1),
        ({"dp-size": 10**9}, 1),
        ({"dp-size": "9" * 5000}, 1),
    ],
)
def test_ranks_of_a_record(flags: dict[str, t.Any], ranks: int) -> None:
    assert hosteyes.ranks_of(t.cast(t.Any, types.SimpleNamespace(flags=flags))) == ranks
