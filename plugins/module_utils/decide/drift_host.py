# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The host around its servers: GPUs, who holds them, what dead servers left in shared memory. Pure."""

from __future__ import annotations

import dataclasses
import os
import typing as t
from dataclasses import dataclass, field

from ..model import Gpu, Process, ShmReading
from ..snapshot import GpuHolders, Snapshot
from .drift import Row, unknown
from .gpus import baseline_for
from .leftovers import judge_leftover
from .ports import program_of
from .protected import protected_why

MAX_USED_MIB = 64
_SHOWN = 5


@dataclass(frozen=True)
class WantedHost:
    """What the inventory says of the host. ``expected_gpus`` None: any number.
    ``max_used_mib`` and ``baselines``: memory of a GPU that needs no holder that is seen."""

    expected_gpus: t.Optional[int] = None
    max_used_mib: int = MAX_USED_MIB
    baselines: t.Mapping[str, int] = field(default_factory=dict)


def judge_gpus(wanted: WantedHost, snapshot: Snapshot, ours: t.Collection[int]) -> list[Row]:
    """``ours``: the pids of all servers that the inventory declares."""
    if wanted.expected_gpus == 0:
        return []
    reading = snapshot.reading
    if reading.gpus is None:
        why = "; ".join(problem.message for problem in reading.problems) or "the driver does not answer"
        return [unknown(None, "gpu_count", f"the GPUs can't be read: {why}")]
    rows = []
    if wanted.expected_gpus is not None and len(reading.gpus) != wanted.expected_gpus:
        remedy = "look at the host's kernel log for Xids, and at nvidia-smi"
        found = len(reading.gpus)
        rows.append(Row(None, "gpu_count", wanted.expected_gpus, found, "host", "critical", remedy))
    rows += _holders(snapshot, ours)
    for gpu in reading.gpus:
        rows += _memory(wanted, gpu, snapshot.holders.get(gpu.index))
    return rows


def _holders(snapshot: Snapshot, ours: t.Collection[int]) -> list[Row]:
    found: dict[int, tuple[t.Optional[Process], list[int]]] = {}
    for index, holders in sorted(snapshot.holders.items()):
        for holder in (*holders.holders, *holders.suspects):
            if holder.pid not in ours and holder.protected is None:
                found.setdefault(holder.pid, (holder.process, []))[1].append(index)
    remedy = "declare it in the inventory, accept it, or end it: gpu_evict with scope: gpu"
    rows = [
        Row(
            None, f"holder:{pid}/{_short(process)}", "nobody but the declared servers",
            f"{'a process' if process is None else program_of(process)} holds GPU {', '.join(map(str, gpus))}",
            "host", "warning", remedy,
        )  # fmt: skip
        for pid, (process, gpus) in found.items()
    ]
    why = []
    blind = [pid for pid in snapshot.scan.unreadable if not _shielded(pid, snapshot)]
    if blind:
        why.append(f"{len(blind)} processes can't be looked into (pid {', '.join(map(str, blind[:_SHOWN]))})")
    why += [f"{problem.call}: {problem.message}" for problem in snapshot.problems]
    doubted = [str(index) for index, holders in sorted(snapshot.holders.items()) if holders.rule_holds is False]
    if doubted:
        why.append(f"the driver's list of GPU {', '.join(doubted)} does not fit what the processes have mapped")
    why += [words for gpu in snapshot.reading.gpus or () if (words := _unlisted(gpu, snapshot, ours))]
    return [*rows, *([unknown(None, "holders", "; ".join(why))] if why else [])]


def _unlisted(gpu: Gpu, snapshot: Snapshot, ours: t.Collection[int]) -> str:
    """With the driver's list one of those that have the GPU open could turn out to be a holder."""
    found = snapshot.holders.get(gpu.index)
    if gpu.processes is not None or gpu.memory is None or gpu.mig or found is None:
        return ""
    others = [str(one.pid) for one in found.visitors if one.protected is None and one.pid not in ours]
    pids = ", ".join(others[:_SHOWN])
    return f"the driver gives no process list of GPU {gpu.index}, and it is open in pid {pids}" if others else ""


def _short(process: t.Optional[Process]) -> str:
    """The program without its folders, for a pattern that accepts it whatever its pid is."""
    if process is None:
        return "?"
    words = tuple(word if " " in word else os.path.basename(word) or word for word in process.argv)
    return program_of(dataclasses.replace(process, argv=words))


def _shielded(pid: int, snapshot: Snapshot) -> bool:
    """Gone since, or one that would be no finding if it did hold a GPU."""
    process = snapshot.processes.get(pid)
    return process is None or protected_why(process, snapshot.own_pids, (), snapshot.units) is not None


def _memory(wanted: WantedHost, gpu: Gpu, holders: t.Optional[GpuHolders]) -> t.Iterator[Row]:
    """Memory that nobody who is seen holds."""
    memory = gpu.memory
    if memory is not None and memory.unified:
        return
    used = None if memory is None else memory.used_mib
    if memory is None or used is None:
        why = "; ".join(problem.message for problem in gpu.errors) or "the driver does not tell its memory"
        yield unknown(None, f"gpu:{gpu.index}", f"{gpu.label}: {why}")
        return
    limit = wanted.max_used_mib + baseline_for(gpu, wanted.baselines)
    if used <= limit or (holders is not None and (holders.holders or holders.suspects)):
        return
    if not memory.used_excludes_reserved:
        why = f"{gpu.label} has {used} MiB in use or reserved: this driver does not tell them apart"
        yield unknown(None, f"gpu:{gpu.index}", why)
        return
    yield Row(
        None, f"memory_unexplained:{gpu.index}", f"at most {limit} MiB without a holder", f"{used} MiB in use", "host",
        "warning", "look for its holder outside of this container, or for a dead server's children; see inspect.yml",
    )  # fmt: skip


def judge_leftovers(shm: ShmReading) -> list[Row]:
    """Files in shared memory whose names carry the pid of a dead server."""
    if shm.files is None:
        why = "; ".join(problem.message for problem in shm.problems) or f"{shm.path} can't be listed"
        return [unknown(None, "leftovers", f"{shm.path}: {why}")]
    surely, perhaps = [], []
    for file in shm.files:
        if judge_leftover(file, server_uid=None, leader_died_at=None, scan_complete=shm.scan_complete).removable:
            surely.append(file.name)
        elif file.creator_alive is None and not file.mapped_by and not file.opened_by:
            # Had every process been seen, and none of them its creator: would it be one?
            alone = dataclasses.replace(file, creator_alive=False)
            if judge_leftover(alone, server_uid=None, leader_died_at=None, scan_complete=True).removable:
                perhaps.append(file.name)
    rows = []
    if surely:
        remedy = "relaunch or tear down: the eviction removes a server's own; else remove them by hand"
        rows.append(Row(None, "leftovers", "none", _named(surely), "host", "warning", remedy))
    if perhaps:
        problems = "; ".join(problem.message for problem in shm.problems) or "not every process could be looked at"
        why = f"{_named(perhaps)}: whether somebody uses them is not known: {problems}"
        rows.append(unknown(None, "leftovers", why))
    return rows


def _named(names: t.Sequence[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
