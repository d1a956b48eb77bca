# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An LXC container, looked at from its Proxmox node without entering it: no pct, no attach, nothing that can hang.

Its processes are those in its cgroup, whatever PID namespace they are in: one that was attached without the namespace,
or that an earlier run of the container left behind, can't be seen from inside.
"""

from __future__ import annotations

import os
import re
import typing as t
from dataclasses import dataclass

from ..cgroups import guest_of
from ..errors import CleanSlateError
from ..model import Problem, Process
from ..snapshot import Guest, Stuck
from ..spawn import fetch_bounded
from .cgroupfs import guest_directories, pids_below, read_mounts
from .devices import CONTROL_MINORS
from .inside import device_numbers, open_inside, read_inside
from .procfs import read_identity, read_text, read_wchan
from .vantage import vantage

VMID = re.compile(r"[0-9]{1,9}\Z")
PASSWD_LIMIT_BYTES = 1 << 20
BOOT_ID_LIMIT_BYTES = 100
FILES_DEADLINE_S = 5.0
DEPTH = 2
INITIAL_CGROUP_NAMESPACE = "cgroup:[4026531835]"  # PROC_CGROUP_INIT_INO, include/linux/proc_ns.h
_NOBODY = Process(0, 0, 0, 0, 0, "X", "", ())


def check_container(vmid: str, proc: str = "/proc") -> None:
    """Refuse what can't be a container of this machine.

    Raises:
        CleanSlateError: it is no number, or this is not the node itself.
    """
    if not VMID.match(vmid):
        raise CleanSlateError(f"container is {vmid!r}; it must be a container's number (vmid) on this node, like 129.")
    cgroups = _link(f"{proc}/self/ns/cgroup")
    if vantage(proc) != "host" or cgroups not in (INITIAL_CGROUP_NAMESPACE, None):
        raise CleanSlateError(
            f"container {vmid} can only be looked at from its Proxmox node: this is a container itself (or another PID "
            "or cgroup namespace), where other containers' processes can't be seen. Run the task on the node."
        )


def read_guest(
    vmid: str, processes: t.Mapping[int, Process], device_major: int, proc: str = "/proc", sys: str = "/sys"
) -> Guest:
    """What can be told of a container by its cgroup and its processes. Bounded by the caller; its own file systems are
    asked in children with a deadline of their own, since one that hangs must not hide the processes.
    """
    mounts = read_mounts(proc, sys)
    problems = [] if mounts is not None else [Problem("read mountinfo", None, "the cgroup mounts can't be read")]
    directories = guest_directories(vmid, mounts or ())
    pids = _members(vmid, processes, directories, problems, proc)
    members = {pid: processes[pid] for pid in pids}
    living = {pid: one for pid, one in members.items() if not one.dead}
    inits = [one for one in living.values() if _is_init(one, members)]
    init = _working_init(inits, proc)
    files = _files(init, living, device_major, proc, problems)
    return Guest(
        vmid=vmid,
        state=_state(init, living, directories, mounts is not None),
        members=pids,
        inits=frozenset(one.pid for one in inits),
        init_pid=init.pid if init else None,
        root_pid=files.root.pid if files.root else None,
        root_start=files.root.start_ticks if files.root else None,
        depth=len((init or (inits[0] if inits else None) or _NOBODY).nspid) or DEPTH,
        boot_id=files.boot_id,
        uid_base=files.uid_base,
        device_minors=files.minors,
        stuck=tuple(Stuck(one.pid, one.state, read_wchan(one.pid, proc)) for one in living.values() if _stuck(one)),
        directories=tuple(directories),
        problems=tuple(problems),
    )


def uid_outside(guest: Guest, user: str, proc: str = "/proc") -> t.Optional[int]:
    """The uid on the node of a container's user (a name in its own /etc/passwd, or a number); None: not to be told."""
    if guest.root_pid is None:
        return None
    inner = int(user) if user.isdecimal() and len(user) <= 10 else _uid_by_name(guest, user, proc)
    if inner is None:
        return None
    for inside, outside, count in _uid_map(guest.root_pid, proc):
        if inside <= inner < inside + count:
            return outside + inner - inside
    return None


def uids_of(guest: Guest, proc: str = "/proc") -> tuple[range, ...]:
    """The uids on the node that are the container's: of a privileged one all of them. Empty: not to be told.

    A folder of the node that is shown in an unprivileged container may hold files of others, which its root could not
    remove.
    """
    rows = _uid_map(guest.root_pid, proc) if guest.root_pid is not None else []
    return tuple(range(outside, outside + count) for _inside, outside, count in rows)


def shm_opener(guest: Guest, path: str, proc: str = "/proc") -> t.Callable[[], int]:
    """Opens the container's own /dev/shm. The call raises OSError where it can't be had."""

    def opened() -> int:
        if guest.root_pid is None or guest.root_start is None:
            raise FileNotFoundError(2, f"no living process of {guest.label} leads to its files", path)
        return open_inside(guest.root_pid, path, os.O_RDONLY | os.O_DIRECTORY, proc, guest.root_start)

    return opened


def outsiders(guest: Guest, processes: t.Mapping[int, Process]) -> frozenset[int]:
    """Members that know themselves by our pids: they are outside of the container's PID namespace."""
    return frozenset(pid for pid in guest.members if pid in processes and len(processes[pid].nspid) < guest.depth)


def _members(
    vmid: str, processes: t.Mapping[int, Process], directories: t.Sequence[str], problems: list[Problem], proc: str
) -> frozenset[int]:
    """By the path that /proc tells, and by the cgroup's own list: a path can be too long for /proc."""
    found = {pid for pid, one in processes.items() if guest_of(one) == vmid}
    for directory in directories:
        listed = pids_below(directory)
        if listed is None:
            problems.append(Problem(f"read {directory}", None, "who is in this cgroup can't be read"))
            continue
        found |= {pid for pid in listed if pid in processes}
    unplaced = [
        pid
        for pid, one in processes.items()
        if not (one.cgroups or one.kernel_thread or one.dead or pid in found) and _without_cgroup(one, proc)
    ]
    if unplaced:
        pids = ", ".join(map(str, unplaced[:4]))
        text = f"whose {len(unplaced)} processes are (pid {pids}) can't be told: their cgroup can't be read"
        problems.append(Problem("read cgroup", None, text))
    return frozenset(found)


def _without_cgroup(process: Process, proc: str) -> bool:
    """Whether it still lives and its cgroup can't be read; one that ended while we looked has none either."""
    now = read_identity(process.pid, proc)
    alive = now is not None and now.key == process.key and not now.dead
    return alive and not (read_text(f"{proc}/{process.pid}/cgroup") or "").strip()


def _is_init(process: Process, members: t.Mapping[int, Process]) -> bool:
    """Pid 1 of the container itself: a nested container's one has a parent among the members."""
    return process.inner_pid == 1 and process.ppid not in members


def _working_init(inits: t.Sequence[Process], proc: str) -> t.Optional[Process]:
    """The init that can be attached to. One that was killed while a child can't end stays, without its namespaces."""
    working = [one for one in inits if _link(f"{proc}/{one.pid}/ns/mnt") is not None and not one.kill_pending]
    return max(working, key=lambda one: one.start_ticks, default=None)


@dataclass(frozen=True)
class _Files:
    """What a container's own file systems tell, and the process through which they were seen."""

    root: t.Optional[Process] = None
    boot_id: t.Optional[str] = None
    uid_base: t.Optional[int] = None
    minors: t.Optional[frozenset[int]] = None


def _files(
    init: t.Optional[Process],
    living: t.Mapping[int, Process],
    device_major: int,
    proc: str,
    problems: list[Problem],
) -> _Files:
    root = init
    if root is None and living:
        called = fetch_bounded(lambda: _root_by_members(living, proc), FILES_DEADLINE_S)
        root = living.get(called.value) if called.ok else None
    if root is None:
        return _Files()
    pid = root.pid
    base = next((outside for inside, outside, _count in _uid_map(pid, proc) if inside == 0), None)
    called = fetch_bounded(lambda: (_minors(root, device_major, proc), _boot_id(root, proc)), FILES_DEADLINE_S)
    if not called.ok:
        why = called.error or f"no answer within {FILES_DEADLINE_S:g} s"
        problems.append(Problem("read /dev of the container", None, f"its own files can't be read: {why}"))
        return _Files(root, None, base, None)
    return _Files(root, called.value[1], base, called.value[0])


def _root_by_members(living: t.Mapping[int, Process], proc: str) -> t.Optional[int]:
    """Without an init, somebody whose root directory is not the node's; the oldest, since nested ones come later."""
    ours = _identity(f"{proc}/self/root/.")
    for one in sorted(living.values(), key=lambda process: process.start_ticks):
        theirs = _identity(f"{proc}/{one.pid}/root/.")
        if theirs is not None and theirs != ours and not one.kernel_thread:
            return one.pid
    return None


def _identity(path: str) -> t.Optional[tuple[int, int]]:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _boot_id(root: Process, proc: str) -> t.Optional[str]:
    """LXC mounts a random one over /proc/sys/kernel/random/boot_id of each container (lxc.autodev)."""
    path = "/proc/sys/kernel/random/boot_id"
    return (read_inside(root.pid, path, proc, BOOT_ID_LIMIT_BYTES, root.start_ticks) or "").strip() or None


def _state(
    init: t.Optional[Process], living: t.Mapping[int, Process], directories: t.Sequence[str], mounts_known: bool
) -> str:
    if init is not None:
        return "running"
    if living:
        return "broken"
    return "stopped" if mounts_known and not directories else "unknown"


def _stuck(process: Process) -> bool:
    """SIGKILL is pending and has not ended it; a dead leader counts while one of its threads can't end."""
    if process.state == "Z":
        return "D" in process.task_states
    return process.kill_pending


def _minors(root: Process, device_major: int, proc: str) -> t.Optional[frozenset[int]]:
    nodes = device_numbers(root.pid, "/dev", proc, root.start_ticks)
    if nodes is None:
        return None
    return frozenset(minor for _name, major, minor in nodes if major == device_major and minor not in CONTROL_MINORS)


def _uid_map(root_pid: int, proc: str) -> list[tuple[int, int, int]]:
    """(inside, outside, count) rows."""
    rows = []
    for line in (read_text(f"{proc}/{root_pid}/uid_map") or "").split("\n"):
        words = line.split()
        if len(words) == 3 and all(word.isdecimal() for word in words):
            rows.append((int(words[0]), int(words[1]), int(words[2])))
    return rows


def _uid_by_name(guest: Guest, user: str, proc: str) -> t.Optional[int]:
    if guest.root_pid is None:
        return None
    text = read_inside(guest.root_pid, "/etc/passwd", proc, PASSWD_LIMIT_BYTES, guest.root_start)
    for line in (text or "").split("\n"):
        fields = line.split(":")
        if len(fields) >= 3 and fields[0] == user and fields[2].isdecimal() and len(fields[2]) <= 10:
            return int(fields[2])
    return None


def _link(path: str) -> t.Optional[str]:
    try:
        return os.readlink(path)
    except OSError:
        return None
