# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A row of the fault matrix, what was seen of it, and the judgement. Pure: the processes are in site.py.

A row makes a fault, runs one entry point of the collection, and is judged by facts: which verdict came, who died, how
long it took. A row's patches take away the defence that it is about; with them it must turn red.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch

OK = "ok"
FALSE_CLEAN = "false_clean"
BYSTANDER_KILLED = "bystander_killed"
HANG = "hang"
WRONG_VERDICT = "wrong_verdict"
ERROR = "error"
RESULTS = (OK, FALSE_CLEAN, BYSTANDER_KILLED, HANG, WRONG_VERDICT, ERROR)
# What a broken defence must show as; an exception proves nothing.
RED = (FALSE_CLEAN, BYSTANDER_KILLED, HANG, WRONG_VERDICT)

# Verdicts that claim that all is well. Where a row expects another one of them, it is false all the same.
CLAIMS = frozenset(
    {"clean", "evicted", "nothing_to_do", "serving", "in_sync", "done", "complete", "allowed", "ready"}
)
ENTRIES = ("gpu_info", "gpu_evict", "clean_state", "relaunch", "drift", "rollout")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the entry point said: its verdict, the codes of its reasons, and the whole of it for people."""

    verdict: str
    codes: frozenset[str] = frozenset()
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was seen of one run. ``answer`` None: it gave none, for ``problem``.

    ``died``: processes that lived before and do not any more, by name; ``signalled``: those that were signalled,
    whether or not they died; ``stayed``: processes that the run left behind; ``missing``: files that somebody used.
    """

    answer: Answer | None
    seconds: float
    died: tuple[str, ...] = ()
    signalled: tuple[str, ...] = ()
    stayed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    timed_out: bool = False
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A row's result, and in one sentence what makes it so."""

    result: str
    detail: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One fault at one entry point.

    ``verdicts``: any of these is right. ``codes``: reasons that must be among the given ones. ``may_die``: names of the
    processes that the scene named; everybody else is a bystander. ``bound_s``: the entry point's time, on a busy
    machine. ``breaks``: what takes the defence away. ``quick``: part of ``make faults``. ``world``: ns, lab
    (LXC), or light (a host with a network of its own).
    """

    id: str
    fault: str
    entry: str
    verdicts: tuple[str, ...]
    scene: t.Callable[..., None]
    breaks: tuple[Patch, ...]
    codes: tuple[str, ...] = ()
    may_die: tuple[str, ...] = ()
    bound_s: float = 60.0
    quick: bool = True
    world: str = "ns"


def judge(row: Row, facts: Facts) -> Outcome:
    """The gravest finding counts: a killed bystander, then a hang, a false claim, a wrong verdict."""
    result, detail = _finding(row, facts)
    return Outcome(result, detail, facts.seconds)


def _finding(row: Row, facts: Facts) -> tuple[str, str]:
    killed = [name for name in facts.died if name not in row.may_die]
    if killed:
        return BYSTANDER_KILLED, f"died: {', '.join(killed)}"
    struck = [name for name in facts.signalled if name not in row.may_die]
    if struck:
        return BYSTANDER_KILLED, f"signalled: {', '.join(struck)}"
    if facts.missing:
        return BYSTANDER_KILLED, f"files in use were removed: {', '.join(facts.missing)}"
    if facts.timed_out or facts.seconds > row.bound_s:
        return HANG, f"{facts.seconds:.1f} s, the bound is {row.bound_s:g} s"
    if facts.answer is None:
        return ERROR, facts.problem or "no answer"
    answer = facts.answer
    if answer.verdict not in row.verdicts:
        kind = FALSE_CLEAN if answer.verdict in CLAIMS else WRONG_VERDICT
        return kind, f"{answer.verdict} instead of {' or '.join(row.verdicts)}: {answer.text}"
    absent = [code for code in row.codes if code not in answer.codes]
    if absent:
        return WRONG_VERDICT, f"{answer.verdict} without {', '.join(absent)}: {', '.join(sorted(answer.codes)) or '-'}"
    if facts.stayed:
        return WRONG_VERDICT, f"left behind: {', '.join(facts.stayed)}"
    return (ERROR, facts.problem) if facts.problem else (OK, "")


def judge_proof(row: Row, facts: Facts) -> Outcome:
    """The row with its defence broken: ``ok`` if it turned red for a reason that counts, else ``error``."""
    broken = judge(row, facts)
    if broken.result in RED:
        return Outcome(OK, f"{broken.result}: {broken.detail}", broken.seconds)
    words = "it stayed green" if broken.result == OK else f"{broken.result}: {broken.detail}"
    return Outcome(ERROR, f"without its defence: {words}", broken.seconds)


def counts(outcomes: t.Iterable[Outcome]) -> dict[str, int]:
    """How many of each result."""
    found = dict.fromkeys(RESULTS, 0)
    for outcome in outcomes:
        found[outcome.result] += 1
    return found
