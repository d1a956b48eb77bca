# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Knowing less never makes a verdict better. Those of clean_state and of the selection are beside their decisions
(test_clean, test_clean_guest, test_targets, test_targets_guest, test_conditions); here are the others.

Each property is shown able to fail: a decision that forgets its doubts breaks it.
"""

from __future__ import annotations

import dataclasses
import datetime
import types
import typing as t
from collections.abc import Callable, Iterable

import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils import evict
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide import drift, guardrails
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.conditions import Facts
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.leftovers import judge_leftover
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.workers import (
    Worker,
    expected_workers,
    judge_workers,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Reason, ShmFile

TODAY = datetime.date(2026, 1, 31)

# --- drift ---

ORDER = ("in_sync", "unknown", "drifted")
ITEMS = ("flags.tp-size", "environment.A", "unit:text")


@st.composite
def drift_rows(draw: st.DrawFn) -> drift.Row:
    return drift.Row(
        server=draw(st.sampled_from(["chat", None])),
        item=draw(st.sampled_from(ITEMS)),
        wanted=1,
        found=2,
        where=draw(st.sampled_from(drift.PLACES)),
        severity=draw(st.sampled_from(["note", "warning", "critical"])),
        remedy="x",
        state=draw(st.sampled_from(["drift", "drift", "unknown"])),
    )


ACCEPTED = st.lists(
    st.builds(
        drift.Acceptance,
        server=st.sampled_from(["chat", "*"]),
        item=st.sampled_from([*ITEMS, "flags.*"]),
        reason=st.just("so"),
        until=st.sampled_from([TODAY, TODAY - datetime.timedelta(1)]),
    ),
    max_size=2,
)
Settle = Callable[[Iterable[drift.Row], t.Sequence[drift.Acceptance], datetime.date], tuple[t.Any, t.Any]]


def drift_verdict(rows: list[drift.Row], accepted: list[drift.Acceptance], settle: Settle = drift.settle) -> str:
    return drift.verdict_of(settle(rows, accepted, TODAY)[0])


def unseen(row: drift.Row) -> drift.Row:
    """The same place, of which nothing could be seen."""
    return dataclasses.replace(row, state="unknown", severity="warning", found="it could not be read")


@given(st.lists(drift_rows(), max_size=5), ACCEPTED, st.data())
def test_what_could_not_be_seen_never_brings_a_server_in_sync(
    rows: list[drift.Row], accepted: list[drift.Acceptance], data: st.DataObject
) -> None:
    before = drift_verdict(rows, accepted)
    hidden = data.draw(drift_rows().map(unseen))
    assert drift_verdict([*rows, hidden], accepted) != "in_sync"
    assert ORDER.index(drift_verdict([*rows, hidden], accepted)) >= ORDER.index(before)
    if before != "in_sync" and rows:
        at = data.draw(st.integers(0, len(rows) - 1))
        blind = [unseen(row) if number == at else row for number, row in enumerate(rows)]
        assert drift_verdict(blind, accepted) != "in_sync"


def test_a_drift_that_forgets_what_was_not_seen_would_be_found() -> None:
    def forgetful(rows: Iterable[drift.Row], accepted: t.Any, today: t.Any) -> tuple[t.Any, t.Any]:
        return drift.settle([row for row in rows if row.state != "unknown"], accepted, today)

    find(
        st.lists(drift_rows(), min_size=1, max_size=5),
        lambda rows: drift_verdict(rows, []) == "unknown" and drift_verdict(rows, [], forgetful) == "in_sync",
    )


# --- the eviction ---


def evicted(reasons: list[Reason], climbed: bool) -> str:
    report = types.SimpleNamespace(reasons=reasons, rungs=["term"] if climbed else [])
    return evict._verdict(t.cast(t.Any, types.SimpleNamespace(report=report)), False, False)


REASONS = st.builds(
    Reason,
    code=st.sampled_from([*sorted(evict.NOT_SEEN), "still_there", "respawned"]),
    message=st.just("x"),
    subject=st.just("y"),
    severity=st.sampled_from(["required", "required", "warning"]),
)
EVICT_ORDER = {"failed": 2, "unknown": 1}


@given(st.lists(REASONS, max_size=4), st.sampled_from(sorted(evict.NOT_SEEN)), st.booleans())
def test_a_look_that_failed_never_makes_an_eviction_better(reasons: list[Reason], code: str, climbed: bool) -> None:
    before = evicted(reasons, climbed)
    after = evicted([*reasons, Reason(code, "it could not be seen", "z")], climbed)
    assert after in ("failed", "unknown")
    assert EVICT_ORDER[after] >= EVICT_ORDER.get(before, 0)


# --- readiness: the server's processes ---

FLAGS: tuple[dict[str, t.Any], ...] = ({}, {"tp-size": 2}, {"dp-size": 2}, {"tp-size": 4, "nnodes": 2, "node-rank": 1})


@st.composite
def trees(draw: st.DrawFn) -> list[Worker]:
    workers = [Worker(1, "python3 -m sglang.launch_server", "leader", draw(st.sampled_from("SRT")))]
    for pid in range(2, 2 + draw(st.integers(0, 4))):
        ranks = draw(st.sampled_from([{}, {"TP": 0}, {"TP": 1}, {"DP": 0}, {"DP": 1}]))
        zombie = draw(st.sampled_from([False, False, True]))
        role = draw(st.sampled_from(["scheduler", "scheduler", "detokenizer", "other"]))
        workers.append(Worker(pid, "sglang::x", role, "Z" if zombie else draw(st.sampled_from("SSRT")), ranks, zombie))
    return workers


@given(trees(), st.sampled_from(FLAGS), st.data())
def test_a_scheduler_that_is_not_seen_never_mends_a_tree(
    tree: list[Worker], flags: dict[str, t.Any], data: st.DataObject
) -> None:
    expected = expected_workers(flags)
    whole = judge_workers(tree, expected)
    nothing = judge_workers(None, expected)
    assert nothing.unknown is not None
    sane = [worker for worker in tree if worker.role == "scheduler" and not worker.zombie and not worker.stopped]
    if whole.problem is not None and sane:
        lost = data.draw(st.sampled_from(sane))
        assert judge_workers([worker for worker in tree if worker is not lost], expected).problem is not None


# --- leftovers ---


@given(
    name=st.sampled_from(["sgl_shm_mm_7_x", "sglang_loads_1", "nccl-a", "psm_1", "multi_tokenizer_args_7"]),
    alive=st.sampled_from([True, False, None]),
    server_uid=st.sampled_from([None, 0, 1]),
    died_at=st.sampled_from([None, 5.0]),
    mtime=st.sampled_from([1.0, 5.0, 9.0]),
    complete=st.booleans(),
    used=st.booleans(),
)
def test_knowing_less_never_makes_a_file_removable(
    name: str,
    alive: bool | None,
    server_uid: int | None,
    died_at: float | None,
    mtime: float,
    complete: bool,
    used: bool,
) -> None:
    def judge(**less: t.Any) -> bool:
        known: dict[str, t.Any] = {"alive": alive, "server_uid": server_uid, "died_at": died_at, "complete": complete}
        known.update(less)
        file = ShmFile(name, 1.0, 0, mtime, 7, known["alive"], (3,) if used else (), ())
        return judge_leftover(
            file,
            server_uid=known["server_uid"],
            leader_died_at=known["died_at"],
            scan_complete=known["complete"],
        ).removable

    if not judge():
        assert not judge(alive=None)
        assert not judge(died_at=None)
        assert not judge(complete=False)
        if not name.startswith(("sgl_shm", "multi")):
            # A file that names its creator is proved by that; whose the server was only forbids more.
            assert not judge(server_uid=None)


# --- guardrails ---

VALUES = st.sampled_from([None, 1, 2, 8])
CONDITION = st.recursive(
    st.builds(
        lambda fact, operator, value: {"fact": fact, operator: value},
        st.sampled_from(["topology.tp", "topology.pp", "topology.dp"]),
        st.sampled_from(["at_least", "below", "is", "not"]),
        st.sampled_from([1, 2, 8]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"all": parts}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"any": parts}),
        inner.map(lambda part: {"not": part}),
    ),
    max_leaves=5,
)


@given(
    CONDITION,
    st.fixed_dictionaries({"tp": VALUES, "pp": VALUES, "dp": VALUES}),
    st.sets(st.sampled_from(["tp", "pp", "dp"])),
)
def test_a_deny_never_falls_silent_by_knowing_less(
    condition: t.Any, topology: dict[str, int | None], hidden: set[str]
) -> None:
    rule = {"id": "too_many", "when": condition, "severity": "deny", "reason": "a", "remedy": "b", "source": "c"}
    rules, problems = guardrails.parse_rules([rule])
    assert not problems
    less = {name: None if name in hidden else value for name, value in topology.items()}
    known, blind = (guardrails.judge(rules, Facts({"topology": facts})) for facts in (topology, less))
    if known:
        assert blind
    if not known:
        assert not any(finding.severity == "deny" for finding in blind)


def test_a_guardrail_that_takes_unknown_for_false_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    condition = {"fact": "topology.tp", "at_least": 2}
    rule = {"id": "too_many", "when": condition, "severity": "deny", "reason": "a", "remedy": "b", "source": "c"}
    rules, _problems = guardrails.parse_rules([rule])
    assert guardrails.judge(rules, Facts({"topology": {"tp": None}}))
    monkeypatch.setattr(guardrails, "_unknown", lambda *_words: None)
    assert guardrails.judge(rules, Facts({"topology": {"tp": None}})) == [None]
