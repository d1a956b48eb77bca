# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The proof of a server that says it is ready: one sequence of questions, each with a verdict of its own.

All looking is done through `ProofEyes`. Called after the port was found to be ours and /health said 200 (`prove`), or
on a node of rank 1 and above, where HTTP says nothing (`prove_node`). What can't hang is judged even after a failure,
since a person wants all findings; after a request without any answer nothing more is asked.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field

from ..decide.gpu_use import GpuUse
from ..decide.workers import Expected, Worker, Workers
from .http import Response
from .proof import Reasoning, Tokens, Tools
from .running import FlagsJudgement, RunningFlags
from .soak import Soak, SoakWants


@dataclass(frozen=True)
class ProofWants:
    """What is demanded. ``expected``: the worker processes by the flags (decide/workers.py). ``planned_gpus``: UUIDs or
    indices; None: all of the host; not judged where ``uses_gpu`` is false. ``flags``: those of the record.
    ``headroom_mib`` 0: measured and not judged."""

    ranks: int = 1
    reasoning: bool = False
    tools: bool = False
    headroom_mib: int = 0
    uses_gpu: bool = True
    expected: Expected = field(default_factory=lambda: Expected(None))
    planned_gpus: t.Optional[tuple[str, ...]] = None
    flags: t.Mapping[str, t.Any] = field(default_factory=dict)
    soak: SoakWants = field(default_factory=SoakWants)
    token_deadline_s: float = 60.0
    info_deadline_s: float = 10.0


class ProofEyes(t.Protocol):
    """How the world is looked at. Each call is bounded by itself, and none raises for what the server does."""

    def now(self) -> float: ...

    def generate(self, rank: int, deadline_s: float) -> Response: ...

    def chat(self, deadline_s: float) -> Response: ...

    def tool_chat(self, deadline_s: float) -> Response: ...

    def soak_request(self, index: int, deadline_s: float) -> Response:
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


def prove(eyes: ProofEyes, wants: ProofWants) -> Proof:
    """The whole proof of a server with HTTP."""
    raise NotImplementedError


def prove_node(eyes: ProofEyes, wants: ProofWants) -> Proof:
    """The proof of a node of rank 1 and above: its processes and GPUs alone."""
    raise NotImplementedError
