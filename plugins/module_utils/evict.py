# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One eviction from order to report: the launch record, the climb, the leftovers, the verdict."""

from __future__ import annotations

import math
import os
import resource
import time
import typing as t
from dataclasses import dataclass, field

from .act.climb import Climber, Deadlines
from .act.drain import DrainWish
from .act.leftovers import remove_leftover
from .act.optin import OptIn
from .decide.guests import judge_absence
from .decide.leftovers import judge_leftover
from .decide.ports import program_of
from .decide.targets import RecordedLaunch, Request
from .errors import CleanSlateError
from .exhausted import exhausted_by
from .lease import Kept, check_run_id, keep
from .model import Process, Reason, ShmFile, to_json
from .observe.look import LookOptions, bounded_view
from .observe.nvml import PendingReading
from .observe.procfs import read_boot_id, read_identity
from .observe.shm import read_shm
from .observe.vantage import vantage
from .recorded import launch_by, launch_of, recorded_death
from .results import guest_row, memory_rows
from .sglang.cmdline import is_leader
from .sglang.record import CURRENT, Record, find_recorded, parse, read_record, recorded_process, server_dir
from .snapshot import Guest, Snapshot
from .spawn import fetch_bounded

LIVE_PROC = "/proc"
SHM_DEADLINE_S = 30.0
MANY_DESCRIPTORS = 1 << 16  # no more: programs that we start may close all that there could be, one by one
# Reasons that say what could not be seen: with no other beside them the verdict is unknown, not failed.
NOT_SEEN = frozenset(
    {
        "memory_unknown",
        "gpus_unknown",
        "scan_incomplete",
        "server_unknown",
        "look_failed",
        "unit_runs_something_else",
        "container_unknown",
        "record_unknown",
    }
)


@dataclass(frozen=True)
class Order:
    """What to evict, how far to climb, and how to look."""

    look: LookOptions
    scope: str = "server"
    name: t.Optional[str] = None
    state_dir: str = "/var/lib/cleanslate"
    unit: t.Optional[str] = None
    port: t.Optional[int] = None
    rungs: tuple[str, ...] = ("stop", "term", "kill", "holders")
    deadlines: Deadlines = field(default_factory=Deadlines)
    hung: bool = False
    max_used_mib: int = 64
    baselines: t.Mapping[str, int] = field(default_factory=dict)
    shm_dir: str = "/dev/shm"
    check_mode: bool = False
    pve_dir: str = "/etc/pve"
    confirm_container_stop: t.Optional[str] = None
    confirm_gpu_reset: tuple[str, ...] = ()
    acknowledge: tuple[str, ...] = ()
    run_id: t.Optional[str] = None
    drain: DrainWish = field(default_factory=DrainWish)


def evict(order: Order, asked: t.Optional[PendingReading] = None) -> dict[str, t.Any]:
    """Climb (or plan, in check mode) and report as plain data. ``asked``: the GPUs, asked already for the first look.

    Raises:
        CleanSlateError: the order makes no sense, names an unknown GPU, or this Python has no pidfd; or another run
            holds the server.
    """
    _validate(order)
    _allow_many_descriptors()
    if order.name is None or order.look.container is not None:
        return _evict(order, None, asked)  # a container's lease lies in its own file system, and was taken there
    deadline_s = sum(getattr(order.deadlines, rung, 0.0) for rung in order.rungs)
    with keep(order.state_dir, order.name, order.run_id, "gpu_evict", deadline_s, order.check_mode) as kept:
        return _evict(order, kept, asked)


def _evict(order: Order, kept: t.Optional[Kept], asked: t.Optional[PendingReading]) -> dict[str, t.Any]:
    started, looked_at = time.monotonic(), time.time()
    request, reasons = _request(order)
    climber = Climber(
        options=order.look,
        request=request,
        rungs=order.rungs if order.scope == "gpu" else tuple(rung for rung in order.rungs if rung != "holders"),
        deadlines=order.deadlines,
        hung=order.hung,
        max_used_mib=order.max_used_mib,
        baselines=order.baselines,
        optin=OptIn(
            order.pve_dir, order.confirm_container_stop, order.confirm_gpu_reset, order.acknowledge, order.look.protect
        ),
        drain=order.drain,
        config=request.record.config if request.record is not None and order.look.container is None else None,
    )
    climber.asked = asked
    if kept is not None:
        climber.fence = kept.lost
    climber.report.reasons.extend(reasons)
    plan = climber.plan() if order.check_mode else ()
    seen_to_the_end = order.check_mode or _climb(climber)
    _report_absent(order, climber)
    lost = any(reason.code == "lease_lost" for reason in climber.report.reasons)
    removed, left = _clear_leftovers(order, climber, looked_at) if seen_to_the_end and not lost else ([], [])
    report = climber.report
    verdict = _verdict(climber, bool(plan), order.check_mode)
    seen = climber.after or climber.latest
    return {
        "changed": bool(plan or report.rungs or removed),
        "verdict": verdict,
        "summary": _summary(verdict, climber, len(plan)),
        "plan": [{"rung": rung, "targets": list(targets)} for rung, targets in plan],
        "rungs": [_rung_row(rung) for rung in report.rungs],
        "ended": list(report.ended),
        "before": memory_rows(climber.before),
        "after": memory_rows(climber.after),
        "pinned": to_json(report.pinned),
        "drain": to_json(report.drained),
        "container": guest_row(seen.guest if seen else None),
        "vantage": vantage(order.look.proc),
        "gpu_resets": dict(report.resets),
        "respawns": list(report.respawns),
        "spared": [{"pid": one.process.pid, "title": program_of(one.process), "why": one.why} for one in report.spared],
        "leftovers": {"removed": removed, "kept": left},
        "reasons": to_json(report.reasons),
        "simulated": bool(climber.before and climber.before.simulated),
        "seconds": round(time.monotonic() - started, 3),
    }


def _allow_many_descriptors() -> None:
    """Each process that is signalled is held by a descriptor: a fork storm must not use up the soft limit of 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MANY_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _report_absent(order: Order, climber: Climber) -> None:
    """Nobody there is only good news of a container that this node has."""
    seen = climber.after or climber.latest
    guest = seen.guest if seen else None
    if guest is None or guest.state in ("running", "broken"):
        return
    from .observe.pve import read_guest as read_guest_config

    climber.report.reasons.extend(judge_absence(guest, read_guest_config(guest.vmid, order.pve_dir)))


def _climb(climber: Climber) -> bool:
    """Climb; False where a look failed after somebody was asked already: the report must tell of that all the same.

    Raises:
        CleanSlateError: before anybody was asked.
        OSError, MemoryError: the same, or a mistake of ours.
    """
    try:
        climber.climb()
    except (CleanSlateError, OSError, MemoryError) as exc:
        limit = exhausted_by(exc)
        if not climber.report.rungs or not (limit or isinstance(exc, CleanSlateError)):
            raise
        climber.report.reasons.append(Reason("look_failed", limit or str(exc), "processes", means="unknown"))
        return False
    return True


def _validate(order: Order) -> None:
    if order.look.proc != LIVE_PROC and not order.check_mode:
        raise CleanSlateError(
            f"proc_root is {order.look.proc}: a recorded tree has nobody to signal. Use check mode, or {LIVE_PROC}."
        )
    if order.scope == "server" and order.name is None and order.port is None and order.unit is None:
        raise CleanSlateError(
            "scope is 'server', but no server is named: give 'name' (a launched server), 'port' or 'unit'; or choose "
            "scope 'sglang' (every SGLang server on these GPUs) or 'gpu' (any holder)."
        )
    if order.look.without_gpus and order.scope != "server":
        raise CleanSlateError(
            f"scope is {order.scope!r} on a host (or for a server) without GPUs: it means whoever uses the chosen "
            "GPUs, and there are none. Use scope 'server'."
        )
    if "container_stop" in order.rungs and order.look.container is None:
        raise CleanSlateError(
            "the rung container_stop needs 'container', the container's number (vmid), and to run on its Proxmox node."
        )
    if "gpu_reset" in order.rungs and order.look.without_gpus:
        raise CleanSlateError("the rung gpu_reset makes no sense on a host (or for a server) without GPUs.")
    if order.run_id is not None and order.name is None:
        raise CleanSlateError("run_id needs 'name': the lease is on a server of that name.")
    if order.run_id is not None:
        check_run_id(order.run_id)
    for name, value in to_json(order.deadlines).items():
        if not math.isfinite(value) or value < 0:
            raise CleanSlateError(f"deadlines.{name} is {value:g}; it is seconds, 0 or more, and must have an end.")


def _request(order: Order) -> tuple[Request, tuple[Reason, ...]]:
    """What is to be evicted. A container's record that can't be read is told and done without, where the server has
    another name (port, unit): those containers need the eviction most.
    """
    record: t.Optional[Record] = None
    reasons: tuple[Reason, ...] = ()
    try:
        record = _find_record(order) if order.name else None
    except CleanSlateError as exc:
        if order.look.container is None or (order.port is None and order.unit is None):
            raise
        reasons = (Reason("record_unknown", str(exc), str(order.name), means="unknown"),)
    request = _request_with(order, record)
    return request, reasons


def _request_with(order: Order, record: t.Optional[Record]) -> Request:
    return Request(
        scope=order.scope,
        name=order.name,
        port=order.port,
        unit=order.unit,
        record=None if record is None else _recorded(record, order),
        protect=order.look.protect,
        devices=order.look.devices,
    )


def _has_config(process: Process, record: Record) -> bool:
    """Whether its command line names the launch's own configuration file, which no other launch has."""
    path = record.config
    return path is not None and os.path.isabs(path) and path in process.argv and is_leader(process.argv)


def _program_inside(record: Record, guest: t.Optional[Guest], proc: str) -> t.Optional[str]:
    """The interpreter's file, as /proc/PID/exe of the container's processes names it."""
    root_pid, python = (guest.root_pid if guest else None), record.python
    if root_pid is None or python is None:
        return None
    from .observe.inside import real_path_inside

    start = guest.root_start if guest else None
    called = fetch_bounded(lambda: real_path_inside(root_pid, python, proc, start), SHM_DEADLINE_S)
    return t.cast("t.Optional[str]", called.value) if called.ok else None


def _find_record(order: Order) -> t.Optional[Record]:
    """The launch record, of a container from its own file system. None: there is none.

    Raises:
        CleanSlateError: there may be one, and it can't be read.
    """
    name = order.name or ""
    if order.look.container is None:
        return find_recorded(order.state_dir, name)
    _processes, _scan, _leaders, guest = bounded_view(order.look)
    root_pid = guest.root_pid if guest else None
    if root_pid is None:
        return None  # nobody leads into it: then its port and its unit tell the server
    from .observe.inside import load_inside

    path = f"{server_dir(order.state_dir, name)}/{CURRENT}"
    owner = guest.uid_base if guest else None
    start = guest.root_start if guest else None
    called = fetch_bounded(
        lambda: load_inside(root_pid, path, order.look.proc, owner=owner, start_ticks=start), SHM_DEADLINE_S
    )
    if not called.ok:
        why = called.error or f"no answer within {SHM_DEADLINE_S:g} s"
        raise CleanSlateError(f"the record {path} of container {order.look.container} can't be read: {why}.")
    if called.value is None:
        return None
    try:
        record = parse(called.value)
    except (ValueError, RecursionError) as error:
        raise CleanSlateError(
            f"the record {path} of container {order.look.container} can't be used: it {error}; look at it, then remove "
            "or mend it"
        ) from None
    return record if record.name == name else None


def _recorded(record: Record, order: Order) -> RecordedLaunch:
    """The record's process. A launch that was cut off knows no pid yet, and systemd's restart gave the server another
    one: then it is found by the launch's configuration file on its command line."""
    boot_id = read_boot_id(order.look.proc)
    if order.look.container is not None:
        return _recorded_inside(record, order, boot_id)
    known = read_identity(record.pid, order.look.proc) if record.pid is not None else None
    if record.boot_id == boot_id and (known is None or known.start_ticks != record.start_ticks):
        processes = bounded_view(order.look)[0]
        found = recorded_process(record, processes, boot_id)
        if found is not None:
            return launch_of(found, record, boot_id)
    return launch_by(record)


def _recorded_inside(record: Record, order: Order, boot_id: t.Optional[str]) -> RecordedLaunch:
    """A container's record, its pids turned into ours. Of a dead leader only its session can be told, by those who are
    still in it; a number that another process got since is no session of its.
    """
    processes, _scan, _leaders, guest = bounded_view(order.look)
    if guest is None:
        raise CleanSlateError(f"container {order.look.container} could not be looked at.")
    inside = [processes[pid] for pid in sorted(guest.members) if not processes[pid].dead]
    # A container has a boot id of its own; it is this boot's as long as the container runs.
    same_boot = record.boot_id is not None and record.boot_id in (guest.boot_id, boot_id)
    by_pid = [one for one in inside if guest.pid_inside(one.nspid) == record.pid]
    by_config = [one for one in inside if _has_config(one, record)]
    same = [one for one in by_pid if one.start_ticks == record.start_ticks] if same_boot else []
    for one in (same + by_config)[:1]:
        return launch_of(one, record, boot_id)
    taken = any(one.start_ticks != record.start_ticks for one in by_pid)
    sids = {one.sid for one in inside if guest.pid_inside(one.nssid) == record.sid and one.sid > 0}
    return RecordedLaunch(
        pid=None,
        start_ticks=record.start_ticks,
        sid=sids.pop() if len(sids) == 1 and not taken else None,
        boot_id=boot_id if same_boot else record.boot_id,
        unit=record.unit,
        port=record.port,
        program=_program_inside(record, guest, order.look.proc),
        own_session=record.sid is not None and record.sid == record.pid,
    )


def _deaths(order: Order, climber: Climber, looked_at: float) -> list[tuple[t.Optional[int], t.Optional[float]]]:
    """(user, time) of leaders' deaths: of the one that was evicted, and of the launch whose leader was dead before."""
    report = climber.report
    found: list[tuple[t.Optional[int], t.Optional[float]]] = [(report.server_uid, report.leader_died_at)]
    seen = climber.after or climber.latest
    if order.name is not None and order.look.container is None and seen is not None:
        record = read_record(order.state_dir, order.name).record
        earlier = recorded_death(record, seen.processes, read_boot_id(order.look.proc), looked_at)
        found += [earlier] if earlier is not None else []
    return found


def _shm_of_guest(
    order: Order, seen: t.Optional[Snapshot]
) -> tuple[t.Optional[t.Callable[[], int]], t.Optional[frozenset[int]], t.Optional[tuple[range, ...]]]:
    """How a container's shared memory is opened, which members know themselves by our pids, and whose files are its
    own; None for our own."""
    guest = seen.guest if seen else None
    if guest is None or seen is None:
        return None, None, None
    from .observe.guest import outsiders, shm_opener, uids_of

    proc = order.look.proc
    return shm_opener(guest, order.shm_dir, proc), outsiders(guest, seen.processes), uids_of(guest, proc)


def _clear_leftovers(order: Order, climber: Climber, looked_at: float) -> tuple[list[str], list[dict[str, str]]]:
    """Remove what a dead server left in shared memory, as far as the rules allow; say what was kept and why.

    ``looked_at``: the time before anybody was looked at. In check mode nothing is removed; what would be, is named.
    """
    open_shm, inner, owners = _shm_of_guest(order, climber.after)
    called = fetch_bounded(lambda: read_shm(order.shm_dir, order.look.proc, open_shm, inner), SHM_DEADLINE_S)
    if not called.ok:
        why = called.error or f"no answer within {SHM_DEADLINE_S:g} s"
        return [], [{"name": order.shm_dir, "path": order.shm_dir, "why": f"it could not be looked at: {why}"}]
    reading = called.value
    deaths = _deaths(order, climber, looked_at)
    removed, kept = [], []
    for file in reading.files or ():
        judged = [
            judge_leftover(
                file, server_uid=uid, leader_died_at=died_at, scan_complete=reading.scan_complete, owners=owners
            )
            for uid, died_at in deaths
        ]
        leftover = next((one for one in judged if one.removable), judged[0])
        if not leftover.removable:
            if leftover.why.startswith("not a name of SGLang"):
                continue
            kept.append({"name": file.name, "why": leftover.why})
            continue
        error = None if order.check_mode else _remove(order.shm_dir, file, open_shm)
        if error is None:
            removed.append(file.name)
        else:
            kept.append({"name": file.name, "why": error})
    return removed, kept


def _remove(path: str, file: ShmFile, opener: t.Optional[t.Callable[[], int]]) -> t.Optional[str]:
    """Remove one leftover; of a container in a child, since its file systems may hang at any moment."""
    if opener is None:
        return remove_leftover(path, file)
    called = fetch_bounded(lambda: remove_leftover(path, file, opener), SHM_DEADLINE_S)
    if not called.ok:
        return called.error or f"{file.name}: no answer within {SHM_DEADLINE_S:g} s"
    return t.cast("t.Optional[str]", called.value)


def _verdict(climber: Climber, planned: bool, check_mode: bool) -> str:
    codes = {reason.code for reason in climber.report.reasons if reason.severity == "required"}
    if codes - NOT_SEEN and not check_mode:
        return "failed"
    if codes:
        return "unknown"
    if check_mode:
        return "planned" if planned else "nothing_to_do"
    return "evicted" if climber.report.rungs else "nothing_to_do"


def _summary(verdict: str, climber: Climber, planned: int) -> str:
    report = climber.report
    if verdict in ("failed", "unknown"):
        required: list[Reason] = [reason for reason in report.reasons if reason.severity == "required"]
        more = f" (and {len(required) - 1} more)" if len(required) > 1 else ""
        return f"{verdict}: {required[0].message}{more}"
    if verdict == "planned":
        return f"{planned} rungs would be climbed"
    if verdict == "nothing_to_do":
        return "nobody wanted gone is here"  # leftovers may have been removed all the same
    rungs = ", ".join(f"{rung.rung} {rung.seconds:.1f} s" for rung in report.rungs)
    memory = f"; {report.pinned.note}" if report.pinned else ""
    return f"{len(report.ended)} processes ended ({rungs}){memory}"


def _rung_row(rung: t.Any) -> dict[str, t.Any]:
    return {
        "rung": rung.rung,
        "asked": list(rung.asked),
        "left": list(rung.left),
        "stayed": [{"pid": one.process.pid, "title": program_of(one.process), "why": one.why} for one in rung.stayed],
        "seconds": rung.seconds,
        "note": rung.note,
    }
