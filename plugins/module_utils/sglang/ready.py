# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waits until a server is proved to serve, or surely won't. All looking is done through `Eyes`, time too.

Ready means: the process that we started lives, owns the port, answers /health with 200, generates tokens on every
data parallel rank,
keeps reasoning apart where asked for, and leaves the demanded GPU memory free. A 200 of a stale server is the classic
lie, so whose
the port is comes first. What can't become ready fails at once: the process is gone, or somebody else has the port, or
a rank hangs.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field

from .http import Response
from .logs import Phase, headroom_mib, last_error, progress, total_tokens
from .proof import Reasoning, Tokens, judge_reasoning, judge_tokens

POLL_S = 1.0
UNSEEN_PORT_POLLS = 3


@dataclass(frozen=True)
class Leader:
    """The process that the launch's record stands for."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class PortOwner:
    """Who listens on the port. ``pid`` None: somebody whom we can't see. ``ours``: in the leader's tree."""

    pid: t.Optional[int]
    title: t.Optional[str]
    ours: bool
    address: str = ""


@dataclass(frozen=True)
class Wants:
    """What is demanded. ``ranks``: data parallel size. ``headroom_mib`` 0, or no GPU: not judged."""

    deadline_s: float
    ranks: int = 1
    reasoning: bool = False
    headroom_mib: int = 0
    uses_gpu: bool = True
    token_deadline_s: float = 60.0


class Eyes(t.Protocol):
    """How the world is looked at. Each call is bounded by itself."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...

    def leader(self) -> t.Optional[Leader]:
        """The launch's process, if it lives."""

    def port_owners(self) -> t.Optional[t.Sequence[PortOwner]]:
        """Who listens on the port; None if that can't be read."""

    def log(self) -> t.Optional[str]:
        """The launch's log so far."""

    def health(self, deadline_s: float) -> Response: ...

    def generate(self, rank: int, deadline_s: float) -> Response: ...

    def chat(self, deadline_s: float) -> Response: ...

    def free_gpu_mib(self) -> t.Optional[int]:
        """Free memory of the server's fullest GPU; None if it can't be read."""


@dataclass(frozen=True)
class Readiness:
    """The end of the wait. ``verdict``: ready, failed or timeout. ``error``: one sentence, None when ready."""

    verdict: str
    phase: str
    phases: tuple[Phase, ...]
    leader: t.Optional[Leader]
    port_owner: t.Optional[PortOwner]
    tokens: tuple[Tokens, ...]
    reasoning: t.Optional[Reasoning]
    headroom_mib: t.Optional[int]
    total_tokens: t.Optional[int]
    error: t.Optional[str]
    log: t.Optional[str]
    seconds: float


@dataclass(frozen=True)
class _Failure:
    """Why it won't become ready. ``cause_in_log``: the log's own error belongs behind the words."""

    words: str
    cause_in_log: bool = True


@dataclass
class _Found:
    """What was seen so far."""

    leader: t.Optional[Leader] = None
    owner: t.Optional[PortOwner] = None
    health: t.Optional[Response] = None
    tokens: list[Tokens] = field(default_factory=list)
    reasoning: t.Optional[Reasoning] = None
    headroom_mib: t.Optional[int] = None
    unseen: int = 0


def wait_ready(eyes: Eyes, wants: Wants) -> Readiness:
    """Look until it is ready, surely won't be, or the time is over."""
    start = eyes.now()
    end = start + wants.deadline_s
    found = _Found()
    while True:
        failure = _look(eyes, found)
        if failure is not None:
            return _ended(eyes, found, "failed", failure, start)
        if found.owner is not None and found.owner.ours:
            found.health = eyes.health(max(min(25.0, end - eyes.now()), 1.0))
            if found.health.ok:
                failure = _prove(eyes, wants, found)
                return _ended(eyes, found, "ready" if failure is None else "failed", failure, start)
        if eyes.now() + POLL_S > end:
            return _ended(eyes, found, "timeout", _Failure(_why_not_yet(eyes, found, wants)), start)
        eyes.sleep(POLL_S)


def _look(eyes: Eyes, found: _Found) -> t.Optional[_Failure]:
    """Identity and port; a failure if it surely won't become ready."""
    leader = eyes.leader()
    if leader is None:
        return _Failure(
            "the server that was launched is gone"
            if found.leader is None
            else f"the server (pid {found.leader.pid}) has ended"
        )
    if found.leader is not None and leader != found.leader:
        return _Failure(f"the server (pid {found.leader.pid}) has ended and was started anew (pid {leader.pid})")
    found.leader = leader
    owners = eyes.port_owners()
    if owners is None:
        found.unseen += 1
        return _Failure("whose the port is can't be read", False) if found.unseen >= UNSEEN_PORT_POLLS else None
    strangers = [owner for owner in owners if not owner.ours]
    found.owner = next((owner for owner in owners if owner.ours), None) or (strangers[0] if strangers else None)
    if strangers:
        return _Failure(_stranger(strangers[0]), False)
    found.unseen = 0
    return None


def _stranger(owner: PortOwner) -> str:
    if owner.pid is None:
        return f"somebody listens on the port ({owner.address}) who can't be seen from here; run as root"
    return (
        f"another process listens on the port: pid {owner.pid} ({owner.title}); it would answer in the server's place"
    )


def _prove(eyes: Eyes, wants: Wants, found: _Found) -> t.Optional[_Failure]:
    """After a /health of 200: tokens, reasoning, headroom, and the identity once more."""
    for rank in range(wants.ranks):
        tokens = judge_tokens(rank, wants.ranks, eyes.generate(rank, wants.token_deadline_s))
        found.tokens.append(tokens)
        if tokens.problem is not None:
            who = f"data parallel rank {rank}" if wants.ranks > 1 else "the server"
            return _Failure(f"/health says 200, but {who} does not generate: {tokens.problem}")
    if wants.reasoning:
        found.reasoning = judge_reasoning(eyes.chat(wants.token_deadline_s))
        if found.reasoning.verdict != "separated":
            return _Failure(f"a reasoning parser was asked for: {found.reasoning.message}", False)
    if wants.uses_gpu:
        shortage = _judge_headroom(eyes, wants, found)
        if shortage is not None:
            return _Failure(shortage, False)
    return _look(eyes, found)


def _judge_headroom(eyes: Eyes, wants: Wants, found: _Found) -> t.Optional[str]:
    """The lower of what the driver says now and what the log said after graph capture."""
    by_log = headroom_mib(eyes.log() or "")
    by_driver = eyes.free_gpu_mib()
    figures = [figure for figure in (by_log, by_driver) if figure is not None]
    found.headroom_mib = min(figures) if figures else None
    if wants.headroom_mib <= 0:
        return None
    if found.headroom_mib is None:
        return "how much GPU memory is left is known neither by the driver nor by the log"
    if found.headroom_mib < wants.headroom_mib:
        who = "the log" if found.headroom_mib == by_log else "the driver"
        return (
            f"only {found.headroom_mib} MiB of GPU memory are left by {who}, {wants.headroom_mib} MiB are demanded: "
            "the first large prefill may fail; lower mem_fraction_static"
        )
    return None


def _why_not_yet(eyes: Eyes, found: _Found, wants: Wants) -> str:
    within = f"within {wants.deadline_s:g} s"
    if found.owner is None:
        seen_so_far = progress(eyes.log() or "")
        percent = "" if seen_so_far.weights_percent is None else f", {seen_so_far.weights_percent} %"
        return f"the server did not listen {within} (phase {seen_so_far.phase}{percent})"
    health = found.health
    seen = "was not asked" if health is None else health.error or f"says {health.status}"
    return f"the server did not become ready {within}: /health {seen}"


def _ended(eyes: Eyes, found: _Found, verdict: str, failure: t.Optional[_Failure], start: float) -> Readiness:
    log = eyes.log()
    seen = progress(log or "")
    return Readiness(
        verdict=verdict,
        phase="ready" if verdict == "ready" else seen.phase,
        phases=seen.phases,
        leader=found.leader,
        port_owner=found.owner,
        tokens=tuple(found.tokens),
        reasoning=found.reasoning,
        headroom_mib=found.headroom_mib,
        total_tokens=total_tokens(log or ""),
        error=None if failure is None else _sentence(failure, log),
        log=log,
        seconds=round(eyes.now() - start, 1),
    )


def _sentence(failure: _Failure, log: t.Optional[str]) -> str:
    if not failure.cause_in_log:
        return failure.words
    if log is None:
        return f"{failure.words}; its log can't be read"
    return f"{failure.words}: {last_error(log) or 'its log names no error'}"
