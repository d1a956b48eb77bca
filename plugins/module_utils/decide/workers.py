# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a server's tree has all the worker processes that its flags make, and whether they live.

The only proof there is for a node of rank 1 and above: its /health is a constant 200 of a dummy server. On node 0 it
finds what HTTP hides: behind a data parallel controller a dead scheduler is never noticed by SGLang itself.
"""

from __future__ import annotations

import re
import typing as t
from dataclasses import dataclass, field, replace

from ..model import Process
from ..sglang.servers import Member, tree_of
from .topology import Flags, plan_topology

Ranks = tuple[tuple[str, int], ...]
_SHOWN = 8
_STOPPED = "T"
_DIMENSIONS = ("DP", "PP", "TP")  # what a title says beyond these follows from them
# With these SGLang runs no schedulers of its own here, or lets Ray run them.
_OTHER_TREES = ("encoder-only", "use-ray")
_DP = re.compile(r"DP(\d+)")
_WORKERS = ("scheduler", "detokenizer", "detokenizer_router", "data_parallel_controller", "tokenizer_worker")
_ROLES = ("leader", *_WORKERS)
MOST_RANKS = 4096  # of one host; flags that ask for more are a slip, and nobody is named by them


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
    ``hung``: the problem is one of stopped processes, none is dead. ``unknown``: why nothing can be said. ``note``:
    what is odd and no failure.
    """

    expected: t.Optional[int]
    schedulers: int
    starting: int = 0
    missing: t.Optional[tuple[str, ...]] = None
    dead: tuple[Worker, ...] = ()
    stopped: tuple[Worker, ...] = ()
    problem: t.Optional[str] = None
    hung: bool = False
    unknown: t.Optional[str] = None
    note: t.Optional[str] = None


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
    if any(Flags(flags).has(name) for name in _OTHER_TREES):
        return Expected(schedulers, None, False, False)
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
    replicas = 1 if attention_dp else dp
    if replicas * pp_here * tp_here > MOST_RANKS:
        return None
    found: list[Ranks] = []
    for replica in range(replicas):
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
    """The leader and its descendants, as they are judged here. One with its parent's role is no worker: whatever a
    worker forks bears its title until it executes something, and its comm as a zombie."""
    members = tree_of(leader, processes)
    workers = {member.process.pid: _worker(member) for member in members}
    parents = {member.process.pid: workers.get(member.process.ppid) for member in members}
    return tuple(
        replace(worker, role="other", ranks={}) if _is_fork(worker, parents[pid]) else worker
        for pid, worker in workers.items()
    )


def _is_fork(worker: Worker, parent: t.Optional[Worker]) -> bool:
    return parent is not None and worker.role in _WORKERS and worker.role == parent.role


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
    if workers is None:
        return Workers(expected.schedulers, 0, unknown="the server's processes can't be read")
    living = [worker for worker in workers if not worker.zombie]
    schedulers = [worker for worker in living if worker.role == "scheduler"]
    dead = tuple(worker for worker in workers if worker.zombie and worker.role in _ROLES)
    stopped = tuple(worker for worker in living if worker.stopped and worker.role in _ROLES)
    missing = _missing(schedulers, expected)
    problem = _problem(dead, stopped, living, schedulers, missing, expected)
    return Workers(
        expected=expected.schedulers,
        schedulers=len(schedulers),
        starting=sum(worker.role == "starting" for worker in living),
        missing=missing,
        dead=dead,
        stopped=stopped,
        problem=problem,
        hung=problem is not None and bool(stopped) and not dead,
        note=_note(schedulers, expected),
    )


def lost_ranks(workers: Workers, ranks: int) -> frozenset[int]:
    """The data parallel ranks that can't answer, since one of their processes is dead, stopped or missing: a request to
    them would only hang, and leave work behind. All of them, where it can't be told which."""
    everyone = frozenset(range(ranks))
    if workers.problem is None:
        return frozenset()
    found: set[int] = set()
    for label in workers.missing or ():
        match = _DP.match(label)
        if match is None:
            return everyone
        found.add(int(match.group(1)))
    for worker in (*workers.dead, *workers.stopped):
        if worker.role != "scheduler" or (ranks > 1 and "DP" not in worker.ranks and not worker.zombie):
            return everyone
        if not worker.zombie:  # a zombie has no title any more; its rank is among the missing ones
            found.add(worker.ranks.get("DP", 0))
    return frozenset(found) if found else everyone


def _missing(schedulers: t.Sequence[Worker], expected: Expected) -> t.Optional[tuple[str, ...]]:
    if expected.ranks is None:
        return None
    present: list[Ranks] = [
        tuple((name, worker.ranks[name]) for name in _DIMENSIONS if name in worker.ranks) for worker in schedulers
    ]
    absent = []
    for ranks in expected.ranks:
        if ranks in present:
            present.remove(ranks)
        else:
            absent.append(" ".join(f"{name}{number}" for name, number in ranks) or "the only one")
    return tuple(absent)


def _problem(
    dead: t.Sequence[Worker],
    stopped: t.Sequence[Worker],
    living: t.Sequence[Worker],
    schedulers: t.Sequence[Worker],
    missing: t.Optional[t.Sequence[str]],
    expected: Expected,
) -> t.Optional[str]:
    problems = []
    if dead:
        problems.append(f"{_named(dead)} {_is(dead)} dead (a zombie)")
    if stopped:
        problems.append(f"{_named(stopped)} {_is(stopped)} stopped by a signal (state T)")
    wanted = expected.schedulers
    if len(schedulers) < (1 if wanted is None else wanted):
        words = f"{len(schedulers)} of {1 if wanted is None else wanted} schedulers run"
        if missing and missing != ("the only one",):
            rest = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            words += f": {', '.join(missing[:_SHOWN])}{rest} {'is' if len(missing) == 1 else 'are'} missing"
        problems.append(words)
    elif missing:
        problems.append(f"no scheduler runs for {', '.join(missing[:_SHOWN])}")
    for role, needed in (("detokenizer", expected.first_node), ("data_parallel_controller", expected.controller)):
        there = any(worker.role in (role, f"{role}_router") for worker in (*living, *dead))
        if needed and not there:
            problems.append(f"the {role.replace('_', ' ')} is gone")
    return "; ".join(problems) or None


def _note(schedulers: t.Sequence[Worker], expected: Expected) -> t.Optional[str]:
    if expected.schedulers is None:
        return f"how many schedulers there should be is not known; {len(schedulers)} run"
    if len(schedulers) > expected.schedulers:
        return f"{len(schedulers)} schedulers run, {expected.schedulers} are expected by the flags"
    return None


def _named(workers: t.Sequence[Worker]) -> str:
    rest = f" and {len(workers) - _SHOWN} more" if len(workers) > _SHOWN else ""
    return ", ".join(worker.label for worker in workers[:_SHOWN]) + rest


def _is(workers: t.Sequence[Worker]) -> str:
    return "is" if len(workers) == 1 else "are"
