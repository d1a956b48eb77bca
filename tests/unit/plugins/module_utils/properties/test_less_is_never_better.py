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
import sys
import types
import typing as t
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils import evict
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide import (
    drift,
    guardrails,
    leftovers,
    workers,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.conditions import Facts
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.workers import (
    Worker,
    expected_workers,
    judge_workers,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Reason, ShmFile

TODAY = datetime.date(2026, 1, 31)


def copy_without(module: types.ModuleType, *edits: tuple[str, str]) -> types.ModuleType:
    """A copy of this module in which edits have taken a defence away; the module itself stays as it is."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    for old, new in edits:
        assert source.count(old) == 1, f"found {source.count(old)} times: {old!r}"
        source = source.replace(old, new)
    name = f"{module.__name__}_broken"
    copied = types.ModuleType(name)
    copied.__package__ = module.__package__
    sys.modules[name] = copied  # where dataclasses look up the module of their class
    try:
        exec(compile(source, name, "exec"), copied.__dict__)
    finally:
        del sys.modules[name]
    return copied


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


def evicted(reasons: list[Reason], climbed: bool, module: types.ModuleType = evict) -> str:
    report = types.SimpleNamespace(reasons=reasons, rungs=["term"] if climbed else [])
    return str(module._verdict(types.SimpleNamespace(report=report), False, False))


REASONS = st.builds(
    Reason,
    code=st.sampled_from([*sorted(evict.NOT_SEEN), "still_there", "respawned"]),
    message=st.just("x"),
    subject=st.just("y"),
    severity=st.sampled_from(["required", "required", "warning"]),
)
EVICT_ORDER = {"failed": 2, "unknown": 1}


def no_better(reasons: list[Reason], code: str, climbed: bool, module: types.ModuleType = evict) -> bool:
    """Whether one more thing that was not seen leaves the verdict as bad as it was, or makes it worse."""
    before = evicted(reasons, climbed, module)
    after = evicted([*reasons, Reason(code, "it could not be seen", "z")], climbed, module)
    return after in ("failed", "unknown") and EVICT_ORDER[after] >= EVICT_ORDER.get(before, 0)


UNSEEN = st.tuples(st.lists(REASONS, max_size=4), st.sampled_from(sorted(evict.NOT_SEEN)), st.booleans())


@given(UNSEEN)
def test_a_look_that_failed_never_makes_an_eviction_better(drawn: tuple[list[Reason], str, bool]) -> None:
    assert no_better(*drawn)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('    if codes:\n        return "unknown"\n', ""),
        ("    if codes - NOT_SEEN and not check_mode:", "    if codes - NOT_SEEN == codes and codes:"),
    ],
    ids=["what was not seen is forgotten", "a doubt hides a failure"],
)
def test_an_eviction_that_is_better_for_knowing_less_would_be_found(old: str, new: str) -> None:
    broken = copy_without(evict, (old, new))
    find(UNSEEN, lambda drawn: not no_better(drawn[0], drawn[1], drawn[2], broken))


# --- readiness: the server's processes ---

FLAGS: tuple[dict[str, t.Any], ...] = ({}, {"tp-size": 2}, {"dp-size": 2}, {"tp-size": 4, "nnodes": 2, "node-rank": 1})


@st.composite
def trees(draw: st.DrawFn, whole: bool = False) -> list[Worker]:
    """``whole``: with a detokenizer and a scheduler that are well, and more may come."""
    tree = [Worker(1, "python3 -m sglang.launch_server", "leader", draw(st.sampled_from("SRT")))]
    if whole:
        tree += [Worker(90, "sglang::x", "detokenizer", "S"), Worker(91, "sglang::x", "scheduler", "S")]
    for pid in range(2, 2 + draw(st.integers(0, 4))):
        ranks = draw(st.sampled_from([{}, {"TP": 0}, {"TP": 1}, {"DP": 0}, {"DP": 1}]))
        zombie = draw(st.sampled_from([False, False, True]))
        role = draw(st.sampled_from(["scheduler", "scheduler", "detokenizer", "other"]))
        tree.append(Worker(pid, "sglang::x", role, "Z" if zombie else draw(st.sampled_from("SSRT")), ranks, zombie))
    return tree


def mending(tree: list[Worker], flags: dict[str, t.Any], module: types.ModuleType = workers) -> list[Worker]:
    """The sane schedulers without which a tree that has a problem would have none."""
    expected = expected_workers(flags)
    if module.judge_workers(tree, expected).problem is None:
        return []
    sane = [worker for worker in tree if worker.role == "scheduler" and not worker.zombie and not worker.stopped]
    without = [(lost, [worker for worker in tree if worker is not lost]) for lost in sane]
    return [lost for lost, rest in without if module.judge_workers(rest, expected).problem is None]


@given(trees(), st.sampled_from(FLAGS))
def test_a_scheduler_that_is_not_seen_never_mends_a_tree(tree: list[Worker], flags: dict[str, t.Any]) -> None:
    assert judge_workers(None, expected_workers(flags)).unknown is not None
    assert mending(tree, flags) == []


@pytest.mark.parametrize(
    "edits",
    [
        [("    if stopped:\n", "    if stopped and len(schedulers) > 1:\n")],
        [("    if dead:\n", "    if dead and len(schedulers) > 1:\n")],
        [
            ("    missing = _missing(schedulers, expected)\n", "    missing = ()\n"),
            (
                "    if len(schedulers) < (1 if wanted is None else wanted):",
                "    if schedulers and len(schedulers) < (1 if wanted is None else wanted):",
            ),
        ],
    ],
    ids=["the stopped count beside others only", "the dead count beside others only", "none at all is fine"],
)
def test_a_judge_that_a_loss_makes_content_would_be_found(edits: list[tuple[str, str]]) -> None:
    broken = copy_without(workers, *edits)
    drawn = st.tuples(trees(whole=True), st.sampled_from(FLAGS))
    find(drawn, lambda one: bool(mending(one[0], one[1], broken)))


# --- leftovers ---


Known = dict[str, t.Any]
KNOWN = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["sgl_shm_mm_7_x", "sglang_loads_1", "nccl-a", "psm_1", "multi_tokenizer_args_7"]),
        "alive": st.sampled_from([True, False, None]),
        "server_uid": st.sampled_from([None, 0, 1]),
        "died_at": st.sampled_from([None, 5.0]),
        "mtime": st.sampled_from([1.0, 5.0, 9.0]),
        "complete": st.booleans(),
        "used": st.booleans(),
    }
)


def freed_by(known: Known, module: types.ModuleType = leftovers) -> list[str]:
    """What must not be known, so that a file may go which may not go by all that is known."""

    def judge(**less: t.Any) -> bool:
        now = {**known, **less}
        file = ShmFile(now["name"], 1.0, 0, now["mtime"], 7, now["alive"], (3,) if now["used"] else (), ())
        return bool(
            module.judge_leftover(
                file,
                server_uid=now["server_uid"],
                leader_died_at=now["died_at"],
                scan_complete=now["complete"],
            ).removable
        )

    if judge():
        return []
    less: list[tuple[str, t.Any]] = [("alive", None), ("died_at", None), ("complete", False)]
    if not known["name"].startswith(("sgl_shm", "multi")):
        # A file that names its creator is proved by that; whose the server was only forbids more.
        less.append(("server_uid", None))
    return [what for what, unknown in less if judge(**{what: unknown})]


@given(KNOWN)
def test_knowing_less_never_makes_a_file_removable(known: Known) -> None:
    assert freed_by(known) == []


@pytest.mark.parametrize(
    "words",
    [
        "not every process could be looked at: it may be in use",
        "whether its creator lives is not known",
        "nobody uses it, but the server's user is not known",
        "nobody uses it, but when the server's leader died is not known",
    ],
)
def test_a_rule_that_frees_what_is_not_known_would_be_found(words: str) -> None:
    broken = copy_without(leftovers, (f'return Leftover(False, "{words}")', f'return Leftover(True, "{words}")'))
    find(KNOWN, lambda known: bool(freed_by(known, broken)))


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
