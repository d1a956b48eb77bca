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

from ..cgroups import guest_of
from ..errors import CleanSlateError
from ..model import Problem, Process
from ..snapshot import Guest, Stuck
from .cgroupfs import guest_directories, read_mounts
from .devices import CONTROL_MINORS
from .inside import device_numbers, open_inside, read_inside
from .procfs import read_text, read_wchan
from .vantage import vantage

VMID = re.compile(r"[0-9]{1,9}\Z")
PASSWD_LIMIT_BYTES = 1 << 20


def check_container(vmid: str, proc: str = "/proc") -> None:
    """Refuse what can't be a container of this machine.

    Raises:
        CleanSlateError: it is no number, or this is not the node itself.
    """
    if not VMID.match(vmid):
        raise CleanSlateError(f"container is {vmid!r}; it must be a container's number (vmid) on this node, like 129.")
    if vantage(proc) != "host":
        raise CleanSlateError(
            f"container {vmid} can only be looked at from its Proxmox node: this is a container itself (or another PID "
            "namespace), where other containers' processes can't be seen. Run the task on the node."
        )


def read_guest(
    vmid: str, processes: t.Mapping[int, Process], device_major: int, proc: str = "/proc", sys: str = "/sys"
) -> Guest:
    """What can be told of a container by its cgroup and its processes. Bounded by the caller."""
    members = {pid: one for pid, one in processes.items() if guest_of(one) == vmid}
    living = {pid: one for pid, one in members.items() if not one.dead}
    problems: list[Problem] = []
    mounts = read_mounts(proc, sys)
    if mounts is None:
        problems.append(Problem("read mountinfo", None, "the cgroup mounts can't be read"))
    directories = guest_directories(vmid, mounts or ())
    inits = [one for one in living.values() if _is_init(one, members)]
    init = _working_init(inits, proc)
    root = init.pid if init else _root_by_members(living, proc)
    base = _uid_base(root, proc) if root is not None else None
    return Guest(
        vmid=vmid,
        state=_state(init, living, directories, mounts is not None),
        members=frozenset(members),
        inits=frozenset(one.pid for one in inits),
        init_pid=init.pid if init else None,
        root_pid=root,
        uid_base=base,
        device_minors=None if root is None else _minors(root, device_major, proc),
        stuck=tuple(Stuck(one.pid, one.state, read_wchan(one.pid, proc)) for one in living.values() if _stuck(one)),
        directories=tuple(directories),
        problems=tuple(problems),
    )


def uid_outside(guest: Guest, user: str, proc: str = "/proc") -> t.Optional[int]:
    """The uid on the node of a container's user (a name in its own /etc/passwd, or a number); None: not to be told."""
    if guest.root_pid is None:
        return None
    inner = int(user) if user.isdecimal() else _uid_by_name(guest.root_pid, user, proc)
    if inner is None:
        return None
    for inside, outside, count in _uid_map(guest.root_pid, proc):
        if inside <= inner < inside + count:
            return outside + inner - inside
    return None


def shm_opener(guest: Guest, path: str, proc: str = "/proc") -> t.Callable[[], int]:
    """Opens the container's own /dev/shm. The call raises OSError where it can't be had."""

    def opened() -> int:
        if guest.root_pid is None:
            raise FileNotFoundError(2, f"no living process of {guest.label} leads to its files", path)
        return open_inside(guest.root_pid, path, os.O_RDONLY | os.O_DIRECTORY, proc)

    return opened


def _is_init(process: Process, members: t.Mapping[int, Process]) -> bool:
    """Pid 1 of the container itself: a nested container's one has a parent among the members."""
    return process.inner_pid == 1 and process.ppid not in members


def _working_init(inits: t.Sequence[Process], proc: str) -> t.Optional[Process]:
    """The init that can be attached to. One that was killed while a child can't end stays, without its namespaces."""
    working = [one for one in inits if _link(f"{proc}/{one.pid}/ns/mnt") is not None and not one.kill_pending]
    return max(working, key=lambda one: one.start_ticks, default=None)


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


def _state(
    init: t.Optional[Process], living: t.Mapping[int, Process], directories: t.Sequence[str], mounts_known: bool
) -> str:
    if init is not None:
        return "running"
    if living:
        return "broken"
    return "stopped" if mounts_known and not directories else "unknown"


def _stuck(process: Process) -> bool:
    return process.kill_pending and process.state in ("D", "R", "S", "T", "t")


def _minors(root_pid: int, device_major: int, proc: str) -> t.Optional[frozenset[int]]:
    nodes = device_numbers(root_pid, "/dev", proc)
    if nodes is None:
        return None
    return frozenset(minor for _name, major, minor in nodes if major == device_major and minor not in CONTROL_MINORS)


def _uid_base(root_pid: int, proc: str) -> t.Optional[int]:
    return next((outside for inside, outside, _count in _uid_map(root_pid, proc) if inside == 0), None)


def _uid_map(root_pid: int, proc: str) -> list[tuple[int, int, int]]:
    """(inside, outside, count) rows."""
    rows = []
    for line in (read_text(f"{proc}/{root_pid}/uid_map") or "").splitlines():
        words = line.split()
        if len(words) == 3 and all(word.isdecimal() for word in words):
            rows.append((int(words[0]), int(words[1]), int(words[2])))
    return rows


def _uid_by_name(root_pid: int, user: str, proc: str) -> t.Optional[int]:
    for line in (read_inside(root_pid, "/etc/passwd", proc, PASSWD_LIMIT_BYTES) or "").splitlines():
        fields = line.split(":")
        if len(fields) >= 3 and fields[0] == user and fields[2].isdecimal():
            return int(fields[2])
    return None


def _link(path: str) -> t.Optional[str]:
    try:
        return os.readlink(path)
    except OSError:
        return None
