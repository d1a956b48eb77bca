# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How snapshots look in a module's result: plain data, times for people, no command line that may hold a secret."""

from __future__ import annotations

import datetime
import pwd
import typing as t

from .cgroups import container_of, guest_of, unit_of
from .decide.ports import program_of
from .model import Gpu, Holder, Process, to_json
from .observe.procfs import age_s, read_uptime_s
from .snapshot import Guest, Snapshot

JSON = dict[str, t.Any]


def user_name(uid: t.Optional[int]) -> t.Optional[str]:
    """The user's name here, the number where this machine has none for it."""
    if uid is None:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def user_id(user: str) -> t.Optional[int]:
    """The number of an account, given by its name or its number; None where this machine has none of that name."""
    if user.isascii() and user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        return None


def account(user: t.Optional[str]) -> t.Optional[str]:
    """One name for an account that has several, or that is given by its number: what `user_name` says of it."""
    uid = None if user is None else user_id(user)
    return user if uid is None else user_name(uid)


def process_row(process: Process, uptime_s: t.Optional[float], now: t.Optional[float] = None) -> JSON:
    """A process for people: who, what, since when. The age counts by the boot clock."""
    age = age_s(process, uptime_s)
    started = None
    if age is not None:
        moment = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=age)
        started = moment.replace(microsecond=0).isoformat()
    return {
        "pid": process.pid,
        "start_ticks": process.start_ticks,
        "ppid": process.ppid,
        "uid": process.uid,
        "user": user_name(process.uid),
        "title": program_of(process),
        "exe": process.exe,
        "state": process.state,
        "started_at": started,
        "age_s": None if age is None else round(age, 1),
        "unit": unit_of(process),
        "container": container_of(process),
        "cgroup": process.cgroups[0] if process.cgroups else None,
        "nspid": list(process.nspid),
        "inner_pid": process.inner_pid,
        "lxc": guest_of(process),
    }


def guest_row(guest: t.Optional[Guest]) -> t.Optional[JSON]:
    """A container that was looked at from its node; None where none was."""
    if guest is None:
        return None
    return {
        "vmid": guest.vmid,
        "state": guest.state,
        "members": len(guest.members),
        "init_pid": guest.init_pid,
        "unprivileged": guest.unprivileged,
        "gpu_nodes": None if guest.device_minors is None else sorted(guest.device_minors),
        "stuck": to_json(guest.stuck),
        "problems": to_json(guest.problems),
    }


def holder_row(holder: Holder, uptime_s: t.Optional[float]) -> JSON:
    """A holder, visitor or suspect with its evidence."""
    row = process_row(holder.process, uptime_s) if holder.process else {"pid": holder.pid}
    return {**row, "role": holder.role, "evidence": list(holder.evidence), "protected": holder.protected}


def gpu_row(gpu: Gpu, snapshot: Snapshot, uptime_s: t.Optional[float]) -> JSON:
    """A GPU with everybody who has to do with it."""
    found = snapshot.holders[gpu.index]
    return {
        **to_json(gpu),
        "holders": [holder_row(one, uptime_s) for one in found.holders],
        "visitors": [holder_row(one, uptime_s) for one in found.visitors],
        "suspects": [holder_row(one, uptime_s) for one in found.suspects],
        "stale_pids": list(found.stale_pids),
        "holder_rule_holds": found.rule_holds,
    }


def gpu_rows(snapshot: Snapshot, proc: str = "/proc") -> list[JSON]:
    """All chosen GPUs of a snapshot."""
    uptime = read_uptime_s(proc)
    return [gpu_row(gpu, snapshot, uptime) for gpu in snapshot.gpus]


def memory_rows(snapshot: t.Optional[Snapshot]) -> list[JSON]:
    """The short form for before and after: one row a GPU."""
    if snapshot is None:
        return []
    return [
        {
            "index": gpu.index,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "used_mib": gpu.memory.used_mib if gpu.memory else None,
            "total_mib": gpu.memory.total_mib if gpu.memory else None,
            "holders": [
                {
                    "pid": one.pid,
                    "title": program_of(one.process) if one.process else None,
                    "lxc": guest_of(one.process) if one.process else None,
                }
                for one in snapshot.holders[gpu.index].holders
            ],
        }
        for gpu in snapshot.gpus
    ]


def driver_row(snapshot: Snapshot) -> JSON:
    """What the driver said of itself."""
    reading = snapshot.reading
    return {
        "source": reading.source,
        "simulated": reading.simulated,
        "driver_version": reading.driver_version,
        "kernel_module_version": reading.kernel_module_version,
        "nvml_version": reading.nvml_version,
        "cuda_driver_version": reading.cuda_driver_version,
        "library": reading.library,
        "problems": to_json(reading.problems + snapshot.problems),
    }
