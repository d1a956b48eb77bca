# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a server's processes do at this moment: states, bytes read, memory, and how often the OOM killer struck.

Who there is comes from /proc/PID/stat alone, which never waits for a process; the rest is read in a bounded child.
Roles are those of the comm, which SGLang's workers keep even as zombies: a command line may be locked.
"""

from __future__ import annotations

import os
import typing as t

from ..sglang.watch import Activity, Member
from ..spawn import fetch_bounded
from .cgroupfs import directories_of, read_mounts
from .procfs import list_pids, parse_cgroups, parse_stat, parse_status, read_text

ACTIVITY_DEADLINE_S = 5.0
MAX_TREE = 4096
_ROLES = (
    ("sglang::sched", "scheduler"),
    ("sglang::detok", "detokenizer"),
    ("sglang::data_p", "controller"),
    ("sglang::", "worker"),
    ("sgl_diffusion::", "worker"),
)
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


def role_of(comm: str) -> str:
    """The role of a worker by its comm (15 characters of its title); ``other`` for what SGLang did not name."""
    return next((role for prefix, role in _ROLES if comm.startswith(prefix)), "other")


def read_tree(leader: int, proc: str = "/proc") -> tuple[Member, ...]:
    """The leader and its descendants, zombies too, by parents. Empty where the leader is gone."""
    stats: dict[int, dict[str, t.Any]] = {}
    for pid in list_pids(proc):
        stat = parse_stat(read_text(f"{proc}/{pid}/stat") or "")
        if stat is not None:
            stats[pid] = stat
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat["ppid"], []).append(pid)
    found: list[Member] = []
    roles: dict[int, str] = {}
    waiting, seen = [leader], {leader}
    while waiting and len(found) < MAX_TREE:
        pid = waiting.pop(0)
        if pid in stats:
            member = _member(pid, stats[pid], leader, roles.get(stats[pid]["ppid"]))
            roles[pid] = role_of(stats[pid]["comm"]) if pid != leader else "leader"
            found.append(member)
        for child in children.get(pid, ()):
            if child not in seen:
                seen.add(child)
                waiting.append(child)
    return tuple(found)


def _member(pid: int, stat: t.Mapping[str, t.Any], leader: int, parent: t.Optional[str]) -> Member:
    """A process of the tree. One with its parent's role is no rank: whatever a rank forks bears its comm until it
    executes something, and as a zombie for as long as nobody reaps it."""
    # A zombie whose threads live on is no dead process: it still holds what they use.
    state = "S" if stat["state"] == "Z" and stat["threads"] > 1 else stat["state"]
    role = "leader" if pid == leader else role_of(stat["comm"])
    return Member(pid, stat["start_ticks"], "other" if role == parent else role, state)


def fetch_activity(leader: int, proc: str = "/proc", deadline_s: float = ACTIVITY_DEADLINE_S) -> Activity:
    """The tree at this moment. Figures that can't be read in time are None; who there is is always told."""
    members = read_tree(leader, proc)
    called = fetch_bounded(lambda: _figures(members, proc), deadline_s)
    if not called.ok:
        return Activity(members)
    read, resident, places = called.value
    waiting = tuple(Member(one.pid, one.start_ticks, one.role, one.state, places.get(one.pid)) for one in members)
    return Activity(waiting, read, resident)


def _figures(
    members: t.Sequence[Member], proc: str
) -> tuple[t.Optional[int], t.Optional[int], dict[int, t.Optional[str]]]:
    """Bytes read, resident MiB, and where those in state D wait."""
    living = [member for member in members if not member.dead]
    read = [size for size in (_read_bytes(member.pid, proc) for member in living) if size is not None]
    pages = [size for size in (_resident_pages(member.pid, proc) for member in living) if size is not None]
    places = {member.pid: _wchan(member.pid, proc) for member in living if member.state == "D"}
    return sum(read) if read else None, int(sum(pages) * _PAGE_MIB) if pages else None, places


def _read_bytes(pid: int, proc: str) -> t.Optional[int]:
    """What it read: by read(), from wherever, or from a disk by mapped files; the larger of the two."""
    fields = parse_status(read_text(f"{proc}/{pid}/io") or "")
    sizes = [int(fields[name]) for name in ("rchar", "read_bytes") if fields.get(name, "").isdigit()]
    return max(sizes) if sizes else None


def _resident_pages(pid: int, proc: str) -> t.Optional[int]:
    words = (read_text(f"{proc}/{pid}/statm") or "").split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None


def _wchan(pid: int, proc: str) -> t.Optional[str]:
    text = (read_text(f"{proc}/{pid}/wchan") or "").strip()
    return text if text and text != "0" else None


# --- the OOM killer ---------------------------------------------------------------------------------------------------


def memory_cgroups(pid: int, proc: str = "/proc", sys: str = "/sys") -> tuple[str, ...]:
    """The directories that count a process's out-of-memory kills, as seen from here."""
    paths = parse_cgroups(read_text(f"{proc}/{pid}/cgroup") or "")
    mounts = read_mounts(proc, sys) or []
    return tuple(
        directory
        for path in paths
        for directory in directories_of(path, mounts)
        if os.path.exists(f"{directory}/memory.events") or os.path.exists(f"{directory}/memory.oom_control")
    )


def oom_kills(directories: t.Sequence[str]) -> t.Optional[int]:
    """How often the OOM killer struck in these cgroups; None where that can't be read (any more)."""
    counts = [count for count in map(_count, directories) if count is not None]
    return max(counts) if counts else None


def _count(directory: str) -> t.Optional[int]:
    for name in ("memory.events", "memory.oom_control"):
        for line in (read_text(f"{directory}/{name}") or "").splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == "oom_kill" and words[1].isdigit():
                return int(words[1])
    return None


def host_oom_kills(proc: str = "/proc") -> t.Optional[int]:
    """How often the kernel's OOM killer struck since boot, on the whole host."""
    for line in (read_text(f"{proc}/vmstat") or "").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == "oom_kill" and words[1].isdigit():
            return int(words[1])
    return None
