# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""cgroup.kill: the kernel kills everybody in a cgroup at once, also those that are forked meanwhile (Linux 5.14, v2).
"""

from __future__ import annotations

import os
import typing as t

from ..observe.cgroupfs import directories_of, pids_below, read_mounts


def kill_cgroup(path: str, objection: t.Callable[[int], t.Optional[str]], proc: str = "/proc") -> t.Optional[str]:
    """Kill a cgroup that is a server's own. Returns None, or why it was left alone.

    ``path``: the cgroup as /proc/PID/cgroup names it. ``objection``: why a pid that is in it must not go; one such
    pid stops us. Whoever is forked into it after that is the server's child.
    """
    mounts = [mount for mount in read_mounts(proc) or () if mount.version == 2]
    directories = directories_of(path, mounts)
    if not directories:
        return f"{path} is in no cgroup v2 hierarchy here"
    if not os.path.exists(f"{directories[0]}/cgroup.kill"):
        return "this kernel has no cgroup.kill (Linux 5.14 has)"
    pids = pids_below(directories[0])
    if pids is None:
        return f"who is in {path} can't be read"
    for pid in sorted(pids):
        why = objection(pid)
        if why:
            return f"pid {pid} in {path} must be left alone: {why}"
    try:
        with open(f"{directories[0]}/cgroup.kill", "w", encoding="ascii") as stream:
            stream.write("1")
    except OSError as exc:
        return f"{directories[0]}/cgroup.kill: {exc.strerror}"
    return None
