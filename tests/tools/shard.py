# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""pytest plugin: ``--shard K/N`` keeps the K-th of N parts of the collected tests.

Whole files stay together, since their fixtures (containers, engines) cost more than the tests.  Files go, the heaviest
first, to the part that is lightest so far; the same tree gives the same parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

# What one test weighs, by its marker: a guess in seconds that only balances the parts. ``long(600)`` says it itself.
WEIGHTS = {"engine": 40.0, "lab": 15.0, "slow": 30.0, "long": 200.0}
PLAIN_WEIGHT = 2.0
# A whole ansible-playbook a test, or several.
PLAYBOOK_FILES, PLAYBOOK_WEIGHT = ("test_playbooks_", "test_drift_runner", "test_faults_"), 8.0


def parse_shard(text: str) -> tuple[int, int]:
    """``K/N`` as two numbers, 1 <= K <= N."""
    part, _slash, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"--shard {text}: want K/N with 1 <= K <= N, for example 2/4")
    return int(part), int(parts)


def weight(markers: Iterable[str], name: str = "", told: Iterable[float] = ()) -> float:
    """The weight of a test with these markers in the file ``name``; ``told``: what its markers say themselves."""
    least = PLAYBOOK_WEIGHT if any(part in name for part in PLAYBOOK_FILES) else PLAIN_WEIGHT
    return max((least, *(WEIGHTS.get(marker, least) for marker in markers), *told))


def assign(weights: Mapping[str, float], parts: int) -> dict[str, int]:
    """Which part (1..parts) each file goes to."""
    loads = [0.0] * parts
    chosen: dict[str, int] = {}
    for name in sorted(weights, key=lambda each: (-weights[each], each)):
        lightest = loads.index(min(loads))
        loads[lightest] += weights[name]
        chosen[name] = lightest + 1
    return chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", help="run the K-th of N parts of the tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    text = config.getoption("--shard")
    if not text:
        return
    part, parts = parse_shard(str(text))
    weights: dict[str, float] = {}
    for item in items:
        name = item.nodeid.split("::", 1)[0]
        marks = list(item.iter_markers())
        told = [float(mark.args[0]) for mark in marks if mark.name == "long" and mark.args]
        weights[name] = weights.get(name, 0.0) + weight((mark.name for mark in marks), name, told)
    chosen = assign(weights, parts)
    kept = [item for item in items if chosen[item.nodeid.split("::", 1)[0]] == part]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
