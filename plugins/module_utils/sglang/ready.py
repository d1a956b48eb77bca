# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waits until a server is proved to serve, surely won't, or is hung. All looking is done through `Eyes`, time too.

Ready means: the process that we started lives, owns the port, answers /health with 200, and passes the whole proof
(proving.py). A 200 of a stale server is the classic lie, so whose the port is comes first, and last once more. What
can't become ready fails at once; what makes no progress is hung, with evidence; what still makes some when the time is
over is starting. A wait may come in slices: what one has seen, the next one gets as a `Watch`.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t
from dataclasses import dataclass, field

from ..decide.workers import judge_workers
from .causes import Kills, bind_error, is_fatal, last_error, silent_end
from .evidence import Closeup, Evidence, telling, words_of
from .http import Response
from .logs import tail_lines, total_tokens
from .phases import PHASES, Clock, Phase, Progress, line_of, progress
from .proving import Proof, ProofEyes, ProofWants, prove, prove_node
from .watch import Activity, Limits, Sight, Trouble, Watch, advance, judge, rate_words, read_rate

POLL_S = 1.0
_RANKED = re.compile(r"[A-Z]+\d")  # a label with a rank in it, such as "DP1 TP0"
_SHOWN = 8
UNSEEN_PORT_POLLS = 3
HEALTH_DEADLINE_S = 25.0
GPU_LOOK_S = 10.0
ANSWERED_FOR_S = 15.0
EVIDENCE_LINES = 40


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
    """What is demanded. ``slice_s``: how long this call may take; None: to the end. ``started_at``: the launch's, UTC
    seconds. ``node``: a node of rank 1 and above, where HTTP tells nothing. ``model``: for people, in errors."""

    deadline_s: float
    proof: ProofWants = field(default_factory=ProofWants)
    limits: Limits = field(default_factory=Limits)
    launch_id: str = ""
    boot_id: t.Optional[str] = None
    slice_s: t.Optional[float] = None
    started_at: t.Optional[float] = None
    utc_offset_s: int = 0
    node: bool = False
    model: t.Optional[str] = None


class Eyes(ProofEyes, t.Protocol):
    """How the world is looked at. Each call is bounded by itself."""

    def sleep(self, seconds: float) -> None: ...

    def wall(self) -> float:
        """UTC seconds, for the log's times only."""

    def leader(self) -> t.Optional[Leader]:
        """The launch's process, if it lives."""

    def port_owners(self) -> t.Optional[t.Sequence[PortOwner]]:
        """Who listens on the port; None if that can't be read."""

    def health(self, deadline_s: float) -> Response: ...

    def activity(self, leader: int) -> Activity:
        """The leader's tree."""

    def gpus_in_use(self) -> t.Optional[t.Mapping[str, int]]:
        """Used MiB of each of the server's GPUs; None if there is none, or it can't be read."""

    def oom_places(self, leader: int) -> tuple[str, ...]:
        """Where the OOM kills of the leader's control group are counted."""

    def oom_counts(self, places: t.Sequence[str]) -> t.Mapping[str, t.Optional[int]]:
        """``cgroup`` and ``host``: how often the OOM killer has struck."""

    def closeup(self, leader: t.Optional[int], kills: Kills) -> Closeup:
        """One close look, for evidence."""


@dataclass(frozen=True)
class Readiness:
    """The end of the wait, or of this slice. ``verdict``: ready, failed, hung or starting. ``error``: one sentence,
    None when ready. ``finished`` False: the slice is over and the deadline is not; go on with ``watch``."""

    verdict: str
    finished: bool
    phase: str
    phases: tuple[Phase, ...]
    progress_line: str
    leader: t.Optional[Leader]
    port_owner: t.Optional[PortOwner]
    proof: t.Optional[Proof]
    evidence: t.Optional[Evidence]
    total_tokens: t.Optional[int]
    error: t.Optional[str]
    log: t.Optional[str]
    seconds: float
    watch: t.Optional[Watch]


@dataclass
class _Found:
    """What this call has seen so far."""

    watch: Watch
    leader: t.Optional[Leader] = None
    owner: t.Optional[PortOwner] = None
    health: t.Optional[Response] = None
    proof: t.Optional[Proof] = None
    log: t.Optional[str] = None
    seen: Progress = field(default_factory=lambda: progress(""))
    gone: bool = False
    unseen: int = 0


def begin(eyes: Eyes, wants: Wants) -> Watch:
    """A watch that begins now."""
    leader = eyes.leader()
    places = () if leader is None else eyes.oom_places(leader.pid)
    now = eyes.now()
    return Watch(
        wants.launch_id,
        wants.boot_id,
        began=now,
        progressed_at=now,
        pid=None if leader is None else leader.pid,
        start_ticks=None if leader is None else leader.start_ticks,
        oom=dict(eyes.oom_counts(places)),
        cgroups=places,
    )


def wait_ready(eyes: Eyes, wants: Wants, watch: t.Optional[Watch] = None) -> Readiness:
    """Look until it is ready, surely won't be, is hung, or the time is over: the slice's or all of it."""
    start = eyes.now()
    found = _Found(watch if watch is not None else begin(eyes, wants))
    end = found.watch.began + wants.deadline_s
    slice_end = None if wants.slice_s is None else start + wants.slice_s
    while True:
        trouble = _look(eyes, wants, found)
        if trouble is None and _may_ask(found):
            verdict = _ask(eyes, wants, found, end)
            if verdict is not None:
                return _finished(eyes, wants, found, verdict)
        elif trouble is not None:
            return _finished(eyes, wants, found, trouble)
        now = eyes.now()
        if now + POLL_S > end:
            return _finished(eyes, wants, found, Trouble("starting", _why_not_yet(found, wants, now)))
        if slice_end is not None and (now + POLL_S > slice_end or found.watch.answered_at is not None):
            return _unfinished(eyes, wants, found)
        eyes.sleep(POLL_S)


def _may_ask(found: _Found) -> bool:
    """Only our own listener is asked, and none whose ranks are stopped or dead: each question would hang there."""
    return found.owner is not None and found.owner.ours and not _disabled(found.watch)


def _disabled(watch: Watch) -> bool:
    return any(odd.kind in ("stopped", "dead") for odd in watch.odd.values())


def _ask(eyes: Eyes, wants: Wants, found: _Found, end: float) -> t.Optional[Trouble]:
    """/health, and after its 200 the proof. None: not yet; a ``ready`` trouble is none.

    In a slice the 200 ends the slice, so that people see that the proof begins; the next one need not ask again.
    """
    now = eyes.now()
    if wants.node:
        return _judge_proof(eyes, wants, found)
    answered = found.watch.answered_at
    if answered is None or not 0 <= now - answered <= ANSWERED_FOR_S:
        found.health = eyes.health(max(min(HEALTH_DEADLINE_S, end - now), 1.0))
        found.watch = dataclasses.replace(found.watch, answered_at=eyes.now() if found.health.ok else None)
        if not found.health.ok or wants.slice_s is not None:
            return None
    found.watch = dataclasses.replace(found.watch, answered_at=None)
    return _judge_proof(eyes, wants, found)


def _judge_proof(eyes: Eyes, wants: Wants, found: _Found) -> Trouble:
    """The proof, and whether it is still our process that has the port."""
    found.proof = (prove_node if wants.node else prove)(eyes, wants.proof)
    trouble = _look(eyes, wants, found)
    if trouble is not None:
        return trouble
    if found.owner is None or not found.owner.ours:
        return Trouble("failed", "the server does not listen any more")
    if found.proof.problem is not None:
        return Trouble("hung" if found.proof.hung else "failed", found.proof.problem)
    return Trouble("ready", "")


def _look(eyes: Eyes, wants: Wants, found: _Found) -> t.Optional[Trouble]:
    """Identity, port, log and processes; a trouble if it surely won't become ready, or is hung."""
    trouble = _identify(eyes, found)
    if found.gone:
        return trouble
    found.log = eyes.log()
    found.seen = progress(found.log or "", _clock(eyes, wants))
    listening = found.owner is not None and found.owner.ours
    sight = _sight(eyes, found, listening)
    found.watch = advance(found.watch, sight)
    if trouble is not None:
        return trouble
    taken = None if listening else bind_error(found.log or "")
    if taken is not None:
        return Trouble("failed", taken)
    return judge(found.watch, sight, wants.limits)


def _identify(eyes: Eyes, found: _Found) -> t.Optional[Trouble]:
    """Whether our process lives and nobody else has its port."""
    leader, before = eyes.leader(), found.watch.pid
    if leader is None:
        found.gone = True
        words = "the server that was launched is gone" if before is None else f"the server (pid {before}) has ended"
        return Trouble("failed", words)
    found.leader = leader
    if before is None:
        found.watch = dataclasses.replace(found.watch, pid=leader.pid, start_ticks=leader.start_ticks)
    elif (leader.pid, leader.start_ticks) != (before, found.watch.start_ticks):
        return Trouble("failed", f"the server (pid {before}) has ended and was started anew (pid {leader.pid})")
    owners = eyes.port_owners()
    if owners is None:
        found.owner = None
        found.unseen += 1
        return Trouble("failed", "whose the port is can't be read") if found.unseen >= UNSEEN_PORT_POLLS else None
    found.unseen = 0
    strangers = [owner for owner in owners if not owner.ours]
    found.owner = next((owner for owner in owners if owner.ours), None) or (strangers[0] if strangers else None)
    if strangers:
        found.owner = strangers[0]
        return Trouble("failed", _stranger(strangers[0]))
    return None


def _stranger(owner: PortOwner) -> str:
    if owner.pid is None:
        return f"somebody listens on the port ({owner.address}) who can't be seen from here; run as root"
    return (
        f"another process listens on the port: pid {owner.pid} ({owner.title}); it would answer in the server's place"
    )


def _sight(eyes: Eyes, found: _Found, listening: bool) -> Sight:
    now = eyes.now()
    gpus = None
    if now >= found.watch.gpus_next_at:
        gpus = eyes.gpus_in_use()
        # A driver that is slow to answer is not asked all the time.
        pause = max(GPU_LOOK_S, 10 * (eyes.now() - now))
        found.watch = dataclasses.replace(found.watch, gpus_next_at=now + pause)
    leader = found.leader
    if leader is None:
        raise AssertionError("a sight without a leader")
    return Sight(
        now=now,
        phase=_phase_of(found.seen, listening),
        percent=found.seen.current.percent,
        steps=found.seen.steps,
        kinds=found.seen.kinds,
        log_known=found.log is not None,
        fatal=is_fatal(found.log or ""),
        listening=listening,
        activity=eyes.activity(leader.pid),
        gpus=gpus,
    )


def _phase_of(seen: Progress, listening: bool) -> str:
    """By the log, and by the port where the log is behind or can't be read."""
    if listening and PHASES.index(seen.phase) < PHASES.index("warm_up"):
        return "warm_up"
    return seen.phase


def _clock(eyes: Eyes, wants: Wants, ended: bool = False) -> Clock:
    return Clock(wants.started_at, None if ended else eyes.wall(), wants.utc_offset_s)


def _why_not_yet(found: _Found, wants: Wants, now: float) -> str:
    watch = found.watch
    last = f"the last progress was {watch.progressed_by}, {now - watch.progressed_at:.0f} s ago"
    within = f"within {wants.deadline_s:g} s"
    if found.owner is None:
        return f"the server did not listen {within} and is still starting ({_line(found)}); {last}"
    health = found.health
    seen = "was not asked" if health is None else health.error or f"says {health.status}"
    return f"the server did not become ready {within}: /health {seen} ({_line(found)}); {last}"


def _line(found: _Found) -> str:
    return line_of(found.seen.phases, rate_words(read_rate(found.watch)) if found.seen.phase == "weights" else None)


def _unfinished(eyes: Eyes, wants: Wants, found: _Found) -> Readiness:
    """The slice is over."""
    line = f"{_line(found)}; it answers, the proof begins" if found.watch.answered_at is not None else _line(found)
    result = _readiness(eyes, found, "starting", None, None)
    return dataclasses.replace(result, finished=False, progress_line=line, watch=found.watch)


def _finished(eyes: Eyes, wants: Wants, found: _Found, trouble: Trouble) -> Readiness:
    if found.gone:
        # What it wrote last is known only now.
        found.log = eyes.log()
        found.seen = progress(found.log or "", _clock(eyes, wants, ended=True))
    if trouble.verdict == "ready":
        return _readiness(eyes, found, "ready", None, None)
    if trouble.pid is not None and trouble.verdict == "failed":
        trouble = dataclasses.replace(trouble, words=f"{trouble.words}{_who_is_missing(eyes, wants)}")
    kills = _kills(eyes, found.watch)
    error = last_error(found.log or "", kills, wants.model)
    closeup = eyes.closeup(None if found.leader is None or found.gone else found.leader.pid, kills)
    evidence = Evidence(
        log_error=error,
        last_lines=tuple(tail_lines(found.log or "", EVIDENCE_LINES)),
        processes=closeup.processes,
        gpus=closeup.gpus,
        gpus_problem=closeup.gpus_problem,
        memory=closeup.memory,
        port=_port_words(found.owner),
    )
    return _readiness(eyes, found, trouble.verdict, _sentence(found, trouble, evidence, kills), evidence)


def _kills(eyes: Eyes, watch: Watch) -> Kills:
    """How often the OOM killer struck since the watch began. A launch that was dead by then tells nothing."""
    if watch.pid is None:
        return Kills()
    counts = eyes.oom_counts(watch.cgroups)

    def since(name: str) -> t.Optional[int]:
        before, now = watch.oom.get(name), counts.get(name)
        return None if before is None or now is None else max(now - before, 0)

    return Kills(since("cgroup"), since("host"))


def _port_words(owner: t.Optional[PortOwner]) -> str:
    if owner is None:
        return "nobody listens"
    who = "somebody who can't be seen" if owner.pid is None else f"pid {owner.pid}"
    return f"{who} listens{' (ours)' if owner.ours else ''} on {owner.address or 'it'}"


def _who_is_missing(eyes: Eyes, wants: Wants) -> str:
    """The ranks that no living scheduler's title has: a dead one is a zombie at best, which keeps no title. Nothing
    where all are missing: then none has its title yet."""
    workers = judge_workers(eyes.schedulers(), wants.proof.expected)
    missing = [label for label in workers.missing or () if _RANKED.match(label)]
    if not missing or not workers.schedulers:
        return ""
    return f" ({_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing)"


def _listed(labels: t.Sequence[str]) -> str:
    rest = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    return ", ".join(labels[:_SHOWN]) + rest


def _sentence(found: _Found, trouble: Trouble, evidence: Evidence, kills: Kills) -> str:
    """The verdict's words, with what tells most: the log's own error, or the process that is at fault."""
    if found.gone:
        if found.log is None:
            return f"{trouble.words}; its log can't be read"
        return f"{trouble.words}: {evidence.log_error or silent_end(found.log, kills)}"
    if found.owner is not None and not found.owner.ours:
        return trouble.words
    if trouble.verdict == "hung":
        process = telling(evidence.processes, trouble.pid)
        words = trouble.words if process is None else f"{trouble.words}: {words_of(process)}"
        cause = f"; its log says: {evidence.log_error}" if evidence.log_error else ""
        return f"{words}{cause}; see evidence"
    if trouble.verdict == "failed" and found.proof is None and evidence.log_error and trouble.words not in (
        evidence.log_error,
        bind_error(found.log or ""),
    ):
        return f"{trouble.words}: {evidence.log_error}"
    return trouble.words


def _readiness(
    eyes: Eyes, found: _Found, verdict: str, error: t.Optional[str], evidence: t.Optional[Evidence]
) -> Readiness:
    listening = found.owner is not None and found.owner.ours
    return Readiness(
        verdict=verdict,
        finished=True,
        phase="ready" if verdict == "ready" else _phase_of(found.seen, listening),
        phases=found.seen.phases,
        progress_line=_line(found),
        leader=found.leader,
        port_owner=found.owner,
        proof=found.proof,
        evidence=evidence,
        total_tokens=total_tokens(found.log or ""),
        error=error,
        log=found.log,
        seconds=round(eyes.now() - found.watch.began, 1),
        watch=None,
    )
