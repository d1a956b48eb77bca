# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whom an eviction may touch, and on what evidence. Pure: a snapshot and a request in, a selection out.

Nothing is selected by name alone. A leader is selected because the launch record, its unit or its port says that it is
the server asked for (scope ``server``), or because it is an SGLang launcher on the chosen GPUs (``sglang``, ``gpu``). A
member is selected because it descends from such a leader, was seen to do so before, lives in a cgroup that is the
leader's own, or is a worker (or a holder of a GPU) in the session or process group that the leader itself leads.
"""

from __future__ import annotations

import os
import typing as t
from dataclasses import dataclass, field

from ..cgroups import unit_of
from ..model import Holder, Process
from ..sglang.cmdline import worker_role
from ..snapshot import Leader, Snapshot
from .guests import elsewhere, place_of
from .holders import killable
from .kinship import Children, children_of, descendants
from .ports import program_of
from .protected import protected_why
from .visible import given_gpus

SPAWN_MARK = "--multiprocessing-fork"


@dataclass(frozen=True)
class RecordedLaunch:
    """What the launch record says of the server's last launch on this boot. Pids are ours, also those of a container's
    record; ``pid`` None: not known, or (in a container) dead, so that no number of ours stands for it.
    """

    pid: t.Optional[int]
    start_ticks: t.Optional[int]
    sid: t.Optional[int]
    boot_id: t.Optional[str]
    unit: t.Optional[str]
    port: t.Optional[int]
    program: t.Optional[str] = None  # the interpreter's file, as /proc/PID/exe names it
    own_session: bool = False  # the launch gave the leader a session of its own
    config: t.Optional[str] = None  # the launch's configuration file, where it lies on this machine


@dataclass(frozen=True)
class Request:
    """What is to be evicted. ``devices`` empty: all GPUs."""

    scope: str = "server"
    name: t.Optional[str] = None
    port: t.Optional[int] = None
    unit: t.Optional[str] = None
    record: t.Optional[RecordedLaunch] = None
    protect: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Memory:
    """Processes selected in earlier looks of this run: after their leader is gone, they are still the server's.

    ``cgroups``: those that were a leader's own, and its unit: whoever is in one is the server's as well, however often
    it has forked since.
    """

    members: t.Mapping[tuple[int, int], str] = field(default_factory=dict)
    leaders: tuple[Process, ...] = ()
    cgroups: t.Mapping[str, str] = field(default_factory=dict)

    def with_selection(self, selection: Selection) -> Memory:
        members = dict(self.members)
        for target in selection.members:
            members.setdefault(target.process.key, target.why[0])
        known = {leader.key for leader in self.leaders}
        fresh = tuple(target.process for target in selection.leaders if target.process.key not in known)
        return Memory(members, self.leaders + fresh, self.cgroups)


@dataclass(frozen=True)
class Target:
    """A process that may be signalled: ``part`` is leader, member or holder; ``why`` is the evidence."""

    process: Process
    part: str
    why: tuple[str, ...]


@dataclass(frozen=True)
class Owner:
    """What restarts or supervises a leader: a systemd unit or a container, asked before anybody is signalled.

    ``guest``: the LXC container whose systemd runs the unit, where that is not ours.
    """

    kind: str
    name: str
    leader_pid: int
    restart: str = ""
    guest: t.Optional[str] = None


@dataclass(frozen=True)
class Spared:
    """A process that is left alone, and why; people want to read this."""

    process: Process
    why: str


@dataclass(frozen=True)
class Selection:
    """Who is asked at which rung."""

    leaders: tuple[Target, ...] = ()
    members: tuple[Target, ...] = ()
    holders: tuple[Target, ...] = ()
    owners: tuple[Owner, ...] = ()
    spared: tuple[Spared, ...] = ()

    @property
    def everybody(self) -> tuple[Target, ...]:
        return self.leaders + self.members + self.holders


def select(snapshot: Snapshot, request: Request, memory: t.Optional[Memory] = None) -> Selection:
    """Choose whom an eviction may touch, from what was seen now and earlier in the run."""
    memory = memory or Memory()
    shields = _shields(snapshot, request)
    wanted = {leader.process.key: why for leader in snapshot.leaders if (why := _leader_why(leader, snapshot, request))}
    chosen = {key: why for key, why in wanted.items() if key[0] not in shields}
    leaders = [leader for leader in snapshot.leaders if leader.process.key in chosen]
    members = _members(snapshot, leaders, request, memory)
    holders = _holders(snapshot, request, {*chosen, *members})
    spared = {key: Spared(snapshot.processes[key[0]], shields[key[0]]) for key in wanted if key not in chosen}

    def targets(part: str, found: t.Mapping[tuple[int, int], tuple[str, ...]]) -> tuple[Target, ...]:
        result = []
        for key, why in sorted(found.items()):
            process = snapshot.processes[key[0]]
            if process.pid in shields:
                spared[key] = Spared(process, shields[process.pid])
            else:
                result.append(Target(process, part, why))
        return tuple(result)

    selection = Selection(
        leaders=targets("leader", {key: (why,) for key, why in chosen.items()}),
        members=targets("member", members),
        holders=targets("holder", holders),
    )
    asked = {target.process.pid for target in selection.leaders}
    guest = snapshot.guest.vmid if snapshot.guest else None
    owners = tuple(owner for leader in leaders if leader.process.pid in asked and (owner := owner_of(leader, guest)))
    return Selection(
        selection.leaders,
        selection.members,
        selection.holders,
        owners,
        tuple({**{one.process.key: one for one in bystanders(snapshot, selection)}, **spared}.values()),
    )


def _shields(snapshot: Snapshot, request: Request) -> dict[int, str]:
    """Who must not be signalled, by pid, and why. Protecting a server's leader protects its ranks with it."""
    result = {}
    for process in snapshot.processes.values():
        why = protected_why(process, snapshot.own_pids, request.protect, snapshot.units)
        if why:
            result[process.pid] = why
    if snapshot.guest is not None:
        result.update({pid: f"init of {snapshot.guest.label}" for pid in snapshot.guest.inits})
    for pid, leader in nearest_leaders(snapshot).items():
        if leader in result and pid not in result:
            result[pid] = f"part of the server of pid {leader}, which is left alone ({result[leader]})"
    return result


def owner_of(leader: Leader, guest: t.Optional[str] = None) -> t.Optional[Owner]:
    """The unit or container that runs this leader and nothing else; None where it is nobody's, or somebody else's."""
    if leader.owns_unit and leader.unit is not None:
        return Owner("systemd", leader.unit.name, leader.process.pid, leader.unit.restart, guest)
    if (
        guest is None
        and leader.container
        and leader.container.startswith("docker:")
        and leader.process.nspid[-1:] == (1,)
    ):
        return Owner("container", leader.container.partition(":")[2], leader.process.pid)
    return None


def bystanders(snapshot: Snapshot, selection: Selection) -> tuple[Spared, ...]:
    """Everybody who uses a chosen GPU, or is a server, and is left alone: with the reason."""
    touched = {target.process.key for target in selection.everybody}
    result: dict[tuple[int, int], Spared] = {}
    for leader in snapshot.leaders:
        if leader.process.key not in touched:
            where = place_of(leader.process, snapshot)
            why = f"another SGLang server (port {leader.port if leader.port is not None else 'unknown'})"
            why += f", {where}" if where else ""
            result[leader.process.key] = Spared(leader.process, why)
    for gpu in snapshot.gpus:
        found = snapshot.holders[gpu.index]
        for holder in found.holders + found.visitors + found.suspects:
            if holder.process is not None and holder.process.key not in touched:
                result.setdefault(holder.process.key, Spared(holder.process, _spared_why(holder, snapshot)))
    return tuple(result.values())


def _spared_why(holder: Holder, snapshot: Snapshot) -> str:
    if holder.protected:
        return holder.protected
    words = {"holder": "holds", "visitor": "only has open", "suspect": "may hold"}[holder.role]
    place = place_of(holder.process, snapshot) if holder.process else ""
    beyond = (
        f"outside of the scope: {place}" if place and holder.process and elsewhere(holder.process, snapshot) else ""
    )
    return f"{words} GPU {holder.gpu_index} ({'; '.join(holder.evidence)}), {beyond or 'outside of the scope'}"


# --- leaders ----------------------------------------------------------------------------------------------------------


def _leader_why(leader: Leader, snapshot: Snapshot, request: Request) -> t.Optional[str]:
    if elsewhere(leader.process, snapshot):
        return None
    named = _names_this_server(leader, snapshot, request)
    if named or request.scope == "server":
        return named
    return _on_chosen_gpus(leader, snapshot, request)


def _names_this_server(leader: Leader, snapshot: Snapshot, request: Request) -> t.Optional[str]:
    record = request.record
    same_boot = record is not None and record.boot_id is not None and record.boot_id == snapshot.boot_id
    if record and same_boot and leader.process.key == (record.pid, record.start_ticks):
        return "the launch record names this process"
    unit = request.unit or (record.unit if record else None)
    if unit and leader.owns_unit and leader.unit is not None and leader.unit.name == unit:
        if leader.wrapper_pid is not None:
            return f"pid {leader.wrapper_pid}, the main process of {unit}, is only a shell around it"
        return f"main process of {unit}"
    port = request.port or (record.port if record else None)
    if port is not None and leader.port == port and leader.same_network:
        return f"its command line says port {port}"
    return None


def _on_chosen_gpus(leader: Leader, snapshot: Snapshot, request: Request) -> t.Optional[str]:
    if not request.devices:
        return "an SGLang launcher, and all GPUs were asked for"
    family = {leader.process.pid, *descendants(leader.process.pid, snapshot.processes)}
    held = sorted(gpu.index for gpu in snapshot.gpus if family & _holder_pids(snapshot, gpu.index))
    if held:
        return "its ranks hold GPU " + ", ".join(map(str, held))
    anywhere = any(family & _holder_pids(snapshot, index) for index in snapshot.holders)
    given = given_gpus(leader, snapshot)
    if not anywhere and given is not None:
        aimed = [gpu.index for gpu in snapshot.gpus if gpu.index in given.indices]
        if aimed:
            return f"it starts on GPU {', '.join(map(str, aimed))} (CUDA_VISIBLE_DEVICES)"
    return None


def _holder_pids(snapshot: Snapshot, gpu_index: int) -> set[int]:
    return {holder.pid for holder in snapshot.holders[gpu_index].holders}


def nearest_leaders(snapshot: Snapshot) -> dict[int, int]:
    """For everybody below an SGLang launcher: the pid of the closest one above (a launcher's is its own).

    What has pid 1 as its parent need not be pid 1's child: orphans go there as well. So a launcher that is pid 1 of a
    container has only those below it that are in its session.
    """
    leaders = {leader.process.pid: leader.process for leader in snapshot.leaders}
    nearest: dict[int, t.Optional[int]] = {pid: pid for pid in leaders}
    result: dict[int, int] = {}
    for process in snapshot.processes.values():
        found = _nearest(process, snapshot.processes, nearest)
        if found is not None and (found != 1 or process.sid == leaders[found].sid):
            result[process.pid] = found
    return result


def _nearest(
    process: Process, processes: t.Mapping[int, Process], known: dict[int, t.Optional[int]]
) -> t.Optional[int]:
    """The closest launcher above, noted in ``known`` for everybody on the way: a fork chain of thousands is walked
    once, not once for each of its members."""
    way: dict[int, None] = {}
    current: t.Optional[Process] = process
    while current is not None and current.pid not in known and current.pid not in way:
        way[current.pid] = None
        current = processes.get(current.ppid)
    found = known.get(current.pid) if current is not None else None
    known.update(dict.fromkeys(way, found))
    return found


# --- members ----------------------------------------------------------------------------------------------------------


def _members(
    snapshot: Snapshot, leaders: t.Sequence[Leader], request: Request, memory: Memory
) -> dict[tuple[int, int], tuple[str, ...]]:
    found: dict[tuple[int, int], list[str]] = {}
    leader_keys = {leader.process.key for leader in leaders}
    family = nearest_leaders(snapshot)
    processes = snapshot.processes
    foreign = {processes[pid].key for pid, leader in family.items() if processes[leader].key not in leader_keys}

    def add(process: Process, why: str) -> None:
        if process.key in leader_keys or process.dead or process.key in foreign or elsewhere(process, snapshot):
            return
        found.setdefault(process.key, []).append(why)

    roots = [(leader.process.pid, "leader") for leader in leaders]
    for key, why in memory.members.items():
        process = snapshot.processes.get(key[0])
        if process is not None and process.key == key:
            add(process, why)
            roots.append((process.pid, "member"))
    children = children_of(processes)
    walked: set[int] = set()
    for pid, part in roots:
        for child in _below_once(pid, children, walked):
            add(snapshot.processes[child], f"descends from {part} {pid}")
    for leader in leaders:
        _add_own_cgroup(snapshot, leader, add)
    for path, name in memory.cgroups.items():
        for process in processes.values():
            if any(_below(one, path) for one in process.cgroups):
                add(process, f"in the cgroup of {name}, which ran the leader and nothing else")
    for past in {process.key: process for process in [*memory.leaders, *(one.process for one in leaders)]}.values():
        _add_own_session(snapshot, past, add)
    _add_recorded_session(snapshot, request, add)
    _add_recorded_unit(snapshot, request, add)
    if request.scope in ("sglang", "gpu"):
        _add_orphans(snapshot, request, add)
    return {key: tuple(dict.fromkeys(why)) for key, why in found.items()}


def _below_once(pid: int, children: Children, walked: set[int]) -> t.Iterator[int]:
    """Everybody below ``pid`` but those below somebody in ``walked``, to which everybody here is added. Each is told at
    most once: in a fork chain of thousands each would otherwise be told once for everybody above.
    """
    queue = [pid]
    while queue:
        current = queue.pop()
        if current in walked:
            continue
        walked.add(current)
        for child in children.get(current, ()):
            if child != pid:
                yield child
                queue.append(child)


def _add_own_cgroup(snapshot: Snapshot, leader: Leader, add: t.Callable[[Process, str], None]) -> None:
    if not leader.owns_unit or leader.unit is None:
        return
    own = [path for path in leader.process.cgroups if f"/{leader.unit.name}" in path]
    for process in snapshot.processes.values():
        if any(_below(path, top) for path in process.cgroups for top in own):
            add(process, f"in the cgroup of {leader.unit.name}, which runs the leader and nothing else")


def _below(path: str, top: str) -> bool:
    return path == top or path.startswith(top + "/")


def _add_own_session(snapshot: Snapshot, leader: Process, add: t.Callable[[Process, str], None]) -> None:
    """A session or process group that the leader itself leads: in it SGLang's own workers, by their titles or as they
    look while they import, and the leader's program where it holds a GPU (a forked orphan).

    The kernel gives out no pid that is still in use as a session or group id, so the number can't mislead. Membership
    alone is not enough all the same: ``sglang serve | tee log`` shares the group, and a leader that was exec'ed by a
    login shell leads the session of all its jobs.
    """
    holding = {pid for index in snapshot.holders for pid in _holder_pids(snapshot, index)}
    for process in snapshot.processes.values():
        if process.start_ticks < leader.start_ticks or process.pid == leader.pid:
            continue
        which = "session" if process.sid == leader.pid else "process group" if process.pgid == leader.pid else None
        same_program = leader.exe is not None and process.exe == leader.exe
        worker = worker_role(process.title) is not None or (same_program and SPAWN_MARK in process.argv)
        if which and (worker or (same_program and process.pid in holding)):
            add(process, f"in the {which} that leader {leader.pid} led, a worker or a holder of a GPU")


def _add_recorded_session(snapshot: Snapshot, request: Request, add: t.Callable[[Process, str], None]) -> None:
    """Orphans of a leader that died before this run: their session was made for this server alone, by its launch.

    Once the session is empty its number may be given to somebody else: to any Python program, since a virtual
    environment's interpreter is the base Python's file. So it takes a worker's title, or the launch's own program as a
    worker that imports or as a holder of a GPU; and no other process may have got the leader's pid.
    """
    record = request.record
    if record is None or record.boot_id is None or record.boot_id != snapshot.boot_id:
        return
    if record.start_ticks is None or record.sid is None or not record.own_session:
        return
    now = snapshot.processes.get(record.pid) if record.pid is not None else None
    if now is not None and now.start_ticks != record.start_ticks:
        return
    holding = {pid for index in snapshot.holders for pid in _holder_pids(snapshot, index)}
    for process in snapshot.processes.values():
        same_program = record.program is not None and process.exe == record.program
        works = SPAWN_MARK in process.argv or process.pid in holding
        ours = worker_role(process.title) is not None or (same_program and works)
        if process.sid == record.sid and process.start_ticks >= record.start_ticks and ours:
            add(process, f"in session {record.sid}, which the launch record made for this server")


def _add_recorded_unit(snapshot: Snapshot, request: Request, add: t.Callable[[Process, str], None]) -> None:
    """Orphans in the cgroup of the unit that the launch made for this server alone: systemd can't end those that it
    can't see (another PID namespace), and forgets those of a unit whose leader was killed.
    """
    record = request.record
    if record is None or not record.unit or record.boot_id is None or record.boot_id != snapshot.boot_id:
        return
    holding = {pid for index in snapshot.holders for pid in _holder_pids(snapshot, index)}
    for process in snapshot.processes.values():
        if unit_of(process) != record.unit or record.start_ticks is None or process.start_ticks < record.start_ticks:
            continue
        same_program = record.program is not None and process.exe == record.program
        if worker_role(process.title) is not None or (same_program and process.pid in holding):
            add(process, f"in the cgroup of {record.unit}, which the launch record made for this server")


def _add_orphans(snapshot: Snapshot, request: Request, add: t.Callable[[Process, str], None]) -> None:
    """Scope ``sglang``: workers without a leader, by title and, where GPUs were chosen, by holding one of them."""
    holding = {pid for gpu in snapshot.gpus for pid in _holder_pids(snapshot, gpu.index)}
    orphans = [
        process
        for process in snapshot.processes.values()
        if worker_role(process.title) and _python(process) and not elsewhere(process, snapshot)
    ]
    groups = {process.pgid for process in orphans if process.pid in holding}
    for process in orphans:
        if not request.devices:
            add(process, f"SGLang worker {program_of(process)} without a leader")
        elif process.pid in holding:
            add(process, f"SGLang worker {program_of(process)} holds a chosen GPU")
        elif process.pgid in groups:
            add(process, f"SGLang worker {program_of(process)} in the process group of one that holds a chosen GPU")


def _python(process: Process) -> bool:
    return process.exe is None or os.path.basename(process.exe).startswith("python")


# --- other holders ----------------------------------------------------------------------------------------------------


def _holders(
    snapshot: Snapshot, request: Request, taken: t.Collection[tuple[int, int]]
) -> dict[tuple[int, int], tuple[str, ...]]:
    """Scope ``gpu``: whoever else holds a chosen GPU on solid evidence. A visitor never is one."""
    found: dict[tuple[int, int], tuple[str, ...]] = {}
    if request.scope != "gpu":
        return found
    for gpu in snapshot.gpus:
        for holder in snapshot.holders[gpu.index].holders:
            process = holder.process
            if process is None or process.key in taken or not killable(holder):
                continue
            if elsewhere(process, snapshot):
                continue
            words = tuple(f"GPU {gpu.index}: {text}" for text in holder.evidence)
            found[process.key] = found.get(process.key, ()) + words
    return found
