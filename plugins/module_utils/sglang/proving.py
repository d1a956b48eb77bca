# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The proof of a server that says it is ready: one sequence of questions, each with a verdict of its own.

All looking is done through `ProofEyes`. Called after the port was found to be ours and /health said 200 (`prove`), or
on a node of rank 1 and above, where HTTP says nothing (`prove_node`). What can't hang is judged even after a failure,
since a person wants all findings; after a request without any answer nothing more is asked over HTTP.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field

from ..decide.gpu_use import GpuUse
from ..decide.workers import Expected, Worker, Workers, judge_workers, lost_ranks
from .http import Response, info_of
from .logs import headroom_mib
from .proof import Reasoning, Tokens, Tools, judge_reasoning, judge_tokens, judge_tools
from .running import FlagDifference, FlagsJudgement, RunningFlags, judge_flags
from .soak import Soak, SoakWants, run_soak, together, too_slow

_JOIN_S = 5.0
# The first requests of a server compile kernels and fill caches: on one GPU the same configuration made 328 tokens/s
# in its first seconds, and 890 in those of its next start. So one that seems too slow is asked again, twice.
_SOAK_TRIES = 3


@dataclass(frozen=True)
class ProofWants:
    """What is demanded. ``expected``: the worker processes by the flags (decide/workers.py). ``flags``: those of the
    record; None: not judged. ``headroom_mib`` 0: measured and not judged. ``uses_gpu`` false: GPUs are not judged."""

    ranks: int = 1
    reasoning: bool = False
    tools: bool = False
    headroom_mib: int = 0
    uses_gpu: bool = True
    expected: Expected = field(default_factory=lambda: Expected(None))
    flags: t.Optional[t.Mapping[str, t.Any]] = None
    soak: SoakWants = field(default_factory=SoakWants)
    token_deadline_s: float = 60.0
    info_deadline_s: float = 10.0


class ProofEyes(t.Protocol):
    """How the world is looked at. Each call is bounded by itself, and none raises for what the server does."""

    def now(self) -> float: ...

    def generate(self, rank: int, deadline_s: float) -> Response:
        """Called by several threads at once, one for each rank."""

    def chat(self, deadline_s: float) -> Response: ...

    def tool_chat(self, deadline_s: float) -> Response: ...

    def soak_request(self, index: int, tokens: int, deadline_s: float) -> Response:
        """Called by several threads at once."""

    def server_info(self, deadline_s: float) -> Response: ...

    def schedulers(self) -> t.Optional[t.Sequence[Worker]]:
        """All processes of the leader's tree (`workers_of`); None if they can't be read."""

    def gpu_users(self) -> t.Optional[t.Sequence[GpuUse]]:
        """Who holds each planned GPU; None if that can't be seen from here."""

    def free_gpu_mib(self) -> t.Optional[int]:
        """Free memory of the server's fullest GPU; None if it can't be read."""

    def log(self) -> t.Optional[str]: ...

    def running_flags(self) -> t.Optional[RunningFlags]: ...


@dataclass(frozen=True)
class Proof:
    """What was found. ``problems``: every failure, in the order of the questions; none: it serves. ``warnings``: what
    a person should know and what is no failure. ``hung``: the first problem is a server that lives and does not answer
    (or is stopped), rather than one that answers wrongly. None of the parts: not asked, or not demanded."""

    workers: t.Optional[Workers] = None
    tokens: tuple[Tokens, ...] = ()
    reasoning: t.Optional[Reasoning] = None
    tools: t.Optional[Tools] = None
    flags: t.Optional[FlagsJudgement] = None
    gpus_used: t.Optional[tuple[GpuUse, ...]] = None
    headroom_mib: t.Optional[int] = None
    soak: t.Optional[Soak] = None
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    hung: bool = False
    seconds: float = 0.0

    @property
    def problem(self) -> t.Optional[str]:
        """The first failure, in one sentence."""
        return self.problems[0] if self.problems else None


class _Proving:
    """One run: what was found so far."""

    def __init__(self, eyes: ProofEyes, wants: ProofWants) -> None:
        self.eyes = eyes
        self.wants = wants
        self.start = eyes.now()
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.hung = False
        self.answers = True  # false: the next request would hang, or be refused like the last one
        self.workers: t.Optional[Workers] = None
        self.tokens: tuple[Tokens, ...] = ()
        self.reasoning: t.Optional[Reasoning] = None
        self.tools: t.Optional[Tools] = None
        self.flags: t.Optional[FlagsJudgement] = None
        self.gpus_used: t.Optional[tuple[GpuUse, ...]] = None
        self.headroom_mib: t.Optional[int] = None
        self.by_log: t.Optional[int] = None
        self.soak: t.Optional[Soak] = None

    def fail(self, words: str, hung: bool = False) -> None:
        if not self.problems:
            self.hung = hung
        self.problems.append(words)

    def silence(self, words: str, silent: bool) -> None:
        """A request that failed; after one without any answer no other is sent."""
        self.fail(words, silent)
        if silent:
            self.answers = False

    # --- the questions, in their order --------------------------------------------------------------------------------

    def look_at_workers(self, again: bool = False) -> None:
        workers = judge_workers(self.eyes.schedulers(), self.wants.expected)
        if again and self.workers is not None and self.workers.problem is not None:
            return
        self.workers = workers
        if workers.problem is not None:
            self.fail(f"after the soak {workers.problem}" if again else workers.problem, workers.hung)
        elif not again:
            self.warnings += [words for words in (workers.unknown, workers.note) if words]

    def ask_tokens(self) -> None:
        """All ranks at once: one that hangs costs its deadline, however many there are."""
        ranks = self.wants.ranks
        lost = lost_ranks(self.workers, ranks) if self.workers is not None else frozenset()
        judged: dict[int, Tokens] = {}

        def ask(rank: int) -> None:
            answer = self.eyes.generate(rank, self.wants.token_deadline_s)
            judged[rank] = judge_tokens(rank, ranks, answer)

        asked = [rank for rank in range(ranks) if rank not in lost]
        if asked:
            together([_bound(ask, rank) for rank in asked], self.wants.token_deadline_s + _JOIN_S)
        for rank in range(ranks):
            if rank in lost:
                judged[rank] = Tokens(rank, None, 0.0, "not asked: a process that it needs is not there, or stopped")
                self.answers = False  # any of the next requests may be given to it
            elif rank not in judged:
                judged[rank] = Tokens(rank, None, self.wants.token_deadline_s, "its request did not end", True)
        self.tokens = tuple(judged[rank] for rank in range(ranks))
        for tokens in self.tokens:
            if tokens.problem is not None and tokens.dp_rank not in lost:
                who = f"data parallel rank {tokens.dp_rank}" if ranks > 1 else "the server"
                self.fail(f"/health says 200, but {who} does not generate: {tokens.problem}", tokens.silent)
                self.answers = self.answers and tokens.count is not None

    def ask_reasoning(self) -> None:
        self.reasoning = judge_reasoning(self.eyes.chat(self.wants.token_deadline_s))
        if self.reasoning.verdict != "separated":
            self.silence(f"a reasoning parser was asked for: {self.reasoning.message}", self.reasoning.silent)

    def ask_tools(self) -> None:
        tools = self.tools = judge_tools(self.eyes.tool_chat(self.wants.token_deadline_s))
        if tools.verdict == "called":
            return
        if tools.verdict == "not_called" or tools.refused:
            self.warnings.append(f"the tool parser is not proved: {tools.message}")
            return
        self.silence(f"a tool parser was asked for: {tools.message}", tools.silent)

    def compare_flags(self) -> None:
        if self.wants.flags is None:
            return
        running = self.eyes.running_flags()
        info, problem = None, None
        if self.answers:
            info, problem = info_of(self.eyes.server_info(self.wants.info_deadline_s))
        flags = self.flags = judge_flags(self.wants.flags, running, info, problem)
        if flags.differences:
            rows = "; ".join(map(_difference, flags.differences[:5]))
            rest = len(flags.differences) - 5
            self.fail(f"it does not run with the flags as wanted: {rows}{f'; and {rest} more' if rest > 0 else ''}")
        self.warnings += flags.notes
        if flags.problem is not None:
            self.warnings.append(f"the flags as running are not known in full: {flags.problem}")

    def look_at_gpus(self) -> None:
        users = self.eyes.gpu_users()
        if users is None:
            self.fail("which GPUs the server uses can't be seen from here, so that it uses those planned is not proved")
            return
        self.gpus_used = tuple(users)
        idle = [use.gpu for use in users if use.used is False and not use.absent]
        if idle:
            words = f"GPU {idle[0]} is" if len(idle) == 1 else f"GPUs {', '.join(idle)} are"
            self.fail(f"{words} planned for this server, and none of its processes holds it")
        for use in users:
            if use.absent:
                self.fail(f"GPU {use.gpu} is planned for this server, and the driver does not show it")
            elif use.used is None:
                self.warnings.append(f"whether GPU {use.gpu} is used is not known: {use.note}")
            if use.strangers:
                self.warnings.append(f"GPU {use.gpu} is also held by {', '.join(use.strangers)}")

    def look_at_headroom(self, again: bool = False) -> None:
        """The lower of what the driver says now and what the log said after graph capture."""
        if again and (self.headroom_mib is None or any("GPU memory" in problem for problem in self.problems)):
            return
        self.by_log = self.by_log if again else headroom_mib(self.eyes.log() or "")
        by_driver = self.eyes.free_gpu_mib()
        figures = [figure for figure in (self.by_log, by_driver, self.headroom_mib) if figure is not None]
        self.headroom_mib = min(figures) if figures else None
        wanted = self.wants.headroom_mib
        if wanted <= 0:
            return
        if self.headroom_mib is None:
            self.fail("how much GPU memory is left is known neither by the driver nor by the log")
        elif self.headroom_mib < wanted:
            who = "the log" if self.headroom_mib == self.by_log else "the driver"
            self.fail(
                f"only {self.headroom_mib} MiB of GPU memory are left by {who}{' after the soak' if again else ''},"
                f" {wanted} MiB are demanded: the first large prefill may fail; lower mem_fraction_static"
            )

    def run_soak(self) -> None:
        wants = self.wants.soak
        slow: t.Optional[str] = None
        for attempt in range(_SOAK_TRIES):
            soak = self.soak = run_soak(self._asking(attempt * wants.requests), wants, self.eyes.now, self.wants.ranks)
            if soak.failed:
                self.silence(
                    f"{soak.failed} of {soak.requests} requests of the soak failed: {soak.first_error}", soak.silent
                )
                return
            before, slow = slow, too_slow(soak, wants)
            if slow is None:
                self.warnings += [f"at first {before}; asked again it was fast enough"] if before is not None else []
                return
        self.fail(f"{slow} (the last of {_SOAK_TRIES} times)")

    def _asking(self, offset: int) -> t.Callable[[int, int, float], Response]:
        """Requests whose prompts were not sent before, since a cache would answer those faster."""
        return lambda index, tokens, deadline_s: self.eyes.soak_request(offset + index, tokens, deadline_s)

    def result(self) -> Proof:
        return Proof(
            workers=self.workers,
            tokens=self.tokens,
            reasoning=self.reasoning,
            tools=self.tools,
            flags=self.flags,
            gpus_used=self.gpus_used,
            headroom_mib=self.headroom_mib,
            soak=self.soak,
            problems=tuple(self.problems),
            warnings=tuple(self.warnings),
            hung=self.hung,
            seconds=round(self.eyes.now() - self.start, 1),
        )


def prove(eyes: ProofEyes, wants: ProofWants) -> Proof:
    """The whole proof of a server with HTTP."""
    run = _Proving(eyes, wants)
    run.look_at_workers()
    run.ask_tokens()
    if wants.reasoning and run.answers:
        run.ask_reasoning()
    if wants.tools and run.answers:
        run.ask_tools()
    run.compare_flags()
    if wants.uses_gpu:
        run.look_at_gpus()
        run.look_at_headroom()
    # A server that is refused anyway needs no baseline.
    if wants.soak.requests > 0 and not run.problems:
        run.run_soak()
        if wants.uses_gpu:
            run.look_at_headroom(again=True)
        run.look_at_workers(again=True)
    return run.result()


def prove_node(eyes: ProofEyes, wants: ProofWants) -> Proof:
    """The proof of a node of rank 1 and above: its processes, flags as started and GPUs. Its HTTP is a dummy's, whose
    /health is a constant 200, so nothing is asked there."""
    run = _Proving(eyes, wants)
    run.answers = False
    run.look_at_workers()
    if run.workers is not None and run.workers.unknown is not None:
        run.fail(f"{run.workers.unknown}, and they are all the proof that there is of a node of rank 1 and above")
    run.compare_flags()
    if wants.uses_gpu:
        run.look_at_gpus()
        run.look_at_headroom()
    return run.result()


def _bound(call: t.Callable[[int], None], rank: int) -> t.Callable[[], None]:
    return lambda: call(rank)


def _difference(row: FlagDifference) -> str:
    where = "is" if row.seen == "launched" else "was resolved to"
    if row.wanted is None:
        return f"{row.item} is {row.found!r} and was not wanted"
    if row.found is None:
        return f"{row.item} is not set, {row.wanted!r} is wanted"
    return f"{row.item} {where} {row.found!r}, {row.wanted!r} is wanted"
