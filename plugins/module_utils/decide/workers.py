# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a server's tree has all the worker processes that its flags make, and whether they live.

The only proof there is for a node of rank 1 and above: its /health is a constant 200 of a dummy server. On node 0 it
finds what HTTP hides: behind a data parallel controller a dead scheduler is never noticed by SGLang itself.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field

from ..model import Process
from ..sglang.servers import Member, tree_of
from .topology import Flags, plan_topology

Ranks = tuple[tuple[str, int], ...]
_SHOWN = 8
_STOPPED = "T"


@dataclass(frozen=True)
class Worker:
    """A process of the server's tree. ``role`` and ``ranks`` as its title says them; a zombie keeps no title, and is
    known by its comm alone (cut to 15 characters: `sglang::schedul`)."""

    pid: int
    title: str
    role: str
    state: str
    ranks: t.Mapping[str, int] = field(default_factory=dict)
    zombie: bool = False

    @property
    def stopped(self) -> bool:
        """By a signal. `t` is not meant: that is a debugger's stop, such as py-spy's, and passes."""
        return self.state == _STOPPED

    @property
    def label(self) -> str:
        return f"pid {self.pid} ({self.title})"


@dataclass(frozen=True)
class Workers:
    """The verdict over a tree. ``expected`` and ``missing`` None: not known by the flags.

    ``schedulers``: living ones by their titles. ``starting``: spawned and not yet named. ``missing``: the ranks whose
    scheduler is not there, as titles say them ("DP1 TP0"; "the only one" has no rank). ``problem`` None: all is well.
    ``hung``: the problem is one of stopped processes, none is dead.
    """

    expected: t.Optional[int]
    schedulers: int
    starting: int = 0
    missing: t.Optional[tuple[str, ...]] = None
    dead: tuple[Worker, ...] = ()
    stopped: tuple[Worker, ...] = ()
    problem: t.Optional[str] = None
    hung: bool = False


@dataclass(frozen=True)
class Expected:
    """What the flags make on this host. None: the flags don't tell. ``first_node``: detokenizer and HTTP are here."""

    schedulers: t.Optional[int]
    ranks: t.Optional[tuple[Ranks, ...]] = None
    controller: bool = False
    first_node: bool = True


def expected_workers(
    flags: t.Mapping[str, t.Any], version: t.Optional[str] = None, schedulers: t.Optional[int] = None
) -> Expected:
    """What a server with these flags runs on this host. ``schedulers``: a number that somebody knows better."""
    topology, _findings = plan_topology(flags, None, version=version)
    rank = topology.node_rank
    wanted = Flags(flags)
    ranks = None if wanted.bad else _ranks_here(topology.tp, topology.pp, topology.dp, topology.nnodes, rank, wanted)
    count = topology.ranks_here if schedulers is None else schedulers
    if ranks is not None and len(ranks) != count:
        ranks = None  # the flags and the given number disagree: count, and name nobody
    return Expected(count, ranks, (topology.dp or 1) > 1, not rank)


def _ranks_here(
    tp: t.Optional[int],
    pp: t.Optional[int],
    dp: t.Optional[int],
    nnodes: t.Optional[int],
    node: t.Optional[int],
    wanted: Flags,
) -> t.Optional[tuple[Ranks, ...]]:
    """The ranks of this host's schedulers, as SGLang deals them out (entrypoints/engine.py _calculate_rank_ranges)."""
    if tp is None or pp is None or dp is None or nnodes is None or node is None:
        return None
    attention_dp = wanted.has("enable-dp-attention") or (wanted.whole("attn-dp-size", 1) or 1) > 1
    pp_here, nodes_per_pp = max(pp // nnodes, 1), max(nnodes // pp, 1)
    tp_here = tp // nodes_per_pp
    first_pp, first_tp = pp_here * (node // nodes_per_pp), tp_here * (node % nodes_per_pp)
    found: list[Ranks] = []
    for replica in range(1 if attention_dp else dp):
        for pp_rank in range(first_pp, first_pp + pp_here):
            for tp_rank in range(first_tp, first_tp + tp_here):
                parts: list[tuple[str, int]] = []
                if dp > 1:
                    if attention_dp and tp % dp:
                        return None
                    parts.append(("DP", tp_rank // (tp // dp) if attention_dp else replica))
                if pp > 1:
                    parts.append(("PP", pp_rank))
                if tp > 1:
                    parts.append(("TP", tp_rank))
                found.append(tuple(parts))
    return tuple(found)


def workers_of(leader: Process, processes: t.Mapping[int, Process]) -> tuple[Worker, ...]:
    """The leader and its descendants, as they are judged here."""
    return tuple(_worker(member) for member in tree_of(leader, processes))


def _worker(member: Member) -> Worker:
    process = member.process
    role = member.role
    if process.dead and role == "other":
        role = "scheduler" if process.comm.startswith("sglang::sched") else role
        role = "detokenizer" if process.comm.startswith("sglang::detok") else role
        role = "data_parallel_controller" if process.comm.startswith("sglang::data_p") else role
    return Worker(process.pid, process.title, role, process.state, dict(member.ranks), process.dead)


def judge_workers(workers: t.Optional[t.Sequence[Worker]], expected: Expected) -> Workers:
    """Dead and stopped ones are named first, then who is missing. ``workers`` None: nobody could look."""
    raise NotImplementedError
