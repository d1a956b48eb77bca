# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A chain of processes each of which forked the next: each is told with few words, not with one for each above it."""

from __future__ import annotations

import random

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.targets import (
    Memory,
    Request,
    nearest_leaders,
    select,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.tests.unit.builders import LEADER, leader, process, snapshot

LENGTH = 4000
FIRST = 10_000
SERVER = process(FIRST, LEADER)
CHAIN = [process(FIRST + number, ppid=FIRST + number - 1, sid=FIRST, pgid=FIRST) for number in range(1, LENGTH)]
SCOPED = Request(port=30000)


@pytest.mark.parametrize("order", ["as forked", "the last first", "any"])
@pytest.mark.parametrize("alive", [True, False])
def test_each_of_a_chain_is_told_with_few_words(order: str, alive: bool) -> None:
    """With its leader, and after the leader's death by what was seen before; in whatever order they are remembered."""
    chain = list(CHAIN)
    if order == "the last first":
        chain.reverse()
    elif order == "any":
        random.Random(7).shuffle(chain)
    seen = snapshot(*([SERVER] if alive else []), *chain, leaders=[leader(SERVER)] if alive else [])
    memory = Memory({one.key: f"descends from leader {FIRST}" for one in chain}, (SERVER,))
    found = select(seen, SCOPED, memory)
    assert {one.process.pid for one in found.members} == {one.pid for one in CHAIN}
    assert max(len(one.why) for one in found.members) <= 3
    assert sum(len(why) for one in found.members for why in one.why) < 200 * LENGTH


def test_who_is_below_whom_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that the walk up takes, counted: each link of the chain once, whatever the order."""
    steps = 0

    class Counted(dict[int, Process]):
        def get(self, key: int, default: object = None) -> Process | None:  # type: ignore[override]
            nonlocal steps
            steps += 1
            return super().get(key)

    seen = snapshot(SERVER, *reversed(CHAIN), leaders=[leader(SERVER)])
    monkeypatch.setitem(seen.__dict__, "processes", Counted(seen.processes))
    assert set(nearest_leaders(seen)) == {FIRST, *(one.pid for one in CHAIN)}
    assert steps <= 2 * LENGTH
