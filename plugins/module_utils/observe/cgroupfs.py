# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where cgroups are mounted (v1, v2 and hybrid hosts), and who is in one."""

from __future__ import annotations

import errno
import os
import re
import typing as t
from dataclasses import dataclass

from .procfs import read_bytes

MAX_CGROUPS = 100_000


@dataclass(frozen=True)
class CgroupMount:
    """``root``: which cgroup the mount point shows. ``controllers``: of a v1 hierarchy, its name among them."""

    version: int
    root: str
    point: str
    controllers: frozenset[str] = frozenset()


def unescape(field: bytes) -> str:
    r"""mountinfo writes blanks, tabs, newlines and backslashes as \040, \011, \012, \134."""
    return os.fsdecode(re.sub(rb"\\([0-3][0-7]{2})", lambda match: bytes([int(match.group(1), 8)]), field))


def rebase(point: str, sys: str) -> t.Optional[str]:
    """Where a mount point is found when ``sys`` stands for /sys; None where a recorded tree can't hold it."""
    if point == "/sys" or point.startswith("/sys/"):
        return sys + point[len("/sys") :]
    return point if sys == "/sys" else None


def parse_mounts(mountinfo: bytes, sys: str = "/sys") -> list[CgroupMount]:
    """All cgroup mounts of /proc/PID/mountinfo. Lines that make no sense are passed over."""
    result = []
    for line in mountinfo.split(b"\n"):
        before, separator, after = line.partition(b" - ")
        left, right = before.split(b" "), after.split(b" ")
        if not separator or len(left) < 6 or len(right) < 3:
            continue
        point = rebase(unescape(left[4]), sys)
        if point is None:
            continue
        root = unescape(left[3])
        if right[0] == b"cgroup2":
            result.append(CgroupMount(2, root, point))
        elif right[0] == b"cgroup":
            words = frozenset(os.fsdecode(word) for word in right[2].split(b","))
            result.append(CgroupMount(1, root, point, words))
    return result


def read_mounts(proc: str = "/proc", sys: str = "/sys") -> t.Optional[list[CgroupMount]]:
    """The cgroup mounts that we see, v2 first; None where the table can't be read."""
    data = read_bytes(f"{proc}/self/mountinfo")
    return None if data is None else sorted(parse_mounts(data, sys), key=lambda mount: -mount.version)


def directories_of(path: str, mounts: t.Sequence[CgroupMount]) -> list[str]:
    """Where this cgroup is found, one directory for each hierarchy that has it."""
    found = []
    for mount in mounts:
        root = mount.root.rstrip("/")
        if root and path != root and not path.startswith(root + "/"):
            continue
        directory = mount.point + path[len(root) :]
        if ".." not in path.split("/") and os.path.isdir(directory):
            found.append(directory)
    return list(dict.fromkeys(found))


def guest_paths(vmid: str) -> tuple[str, ...]:
    """What the cgroup of an LXC container is called, on Proxmox and with LXC's own defaults."""
    return (f"/lxc/{vmid}", f"/lxc.payload/{vmid}", f"/lxc.payload.{vmid}")


def guest_directories(vmid: str, mounts: t.Sequence[CgroupMount]) -> list[str]:
    """The cgroup directories of an LXC container, v2 first. Empty: it does not run (or never did)."""
    return [directory for path in guest_paths(vmid) for directory in directories_of(path, mounts)]


def pids_below(directory: str) -> t.Optional[frozenset[int]]:
    """Everybody in this cgroup and those below it; None where that can't be read. A vanished one is empty.

    A threaded cgroup refuses (EOPNOTSUPP): its processes stand in the domain above it.
    """
    pids: set[int] = set()
    waiting, count = [directory], 0
    while waiting:
        current = waiting.pop()
        count += 1
        try:
            waiting.extend(entry.path for entry in os.scandir(current) if entry.is_dir(follow_symlinks=False))
            with open(f"{current}/cgroup.procs", "rb") as stream:
                pids.update(int(word) for word in stream.read().split() if word.isdigit())
        except FileNotFoundError:
            continue
        except OSError as exc:
            if exc.errno == errno.ENODEV or (exc.errno == errno.EOPNOTSUPP and current != directory):
                continue
            return None
        if count > MAX_CGROUPS:
            return None
    return frozenset(pids)
