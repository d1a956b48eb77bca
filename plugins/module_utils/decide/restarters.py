# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who may start a server again within a moment after it was ended. Pure.

A supervisor is the process's parent, or the manager of its unit or container. A program that looks from time to time
whether the server is there has no tie to it, and comes when it comes: that is for the verdict after the eviction.
"""

from __future__ import annotations

import os
import re
import typing as t

from ..cgroups import container_of, unit_of, user_unit_of
from ..model import Process

# What a login leaves behind restarts nothing.
_SESSION = re.compile(r"session-[^/]+\.scope|init\.scope")
# Programs that adopt orphans and restart only what their units say. tini, runit and shells as process 1 are not among
# them: whoever is process 1 of a container may be its restart loop.
_INITS = ("systemd", "init")


def restarter_of(leader: Process, processes: t.Mapping[int, Process]) -> str:
    """Who may start this leader again by itself, in a few words; empty where nobody has a tie to it.

    What can't be seen counts as somebody.
    """
    unit = unit_of(leader) or user_unit_of(leader)
    if unit is not None and not _SESSION.fullmatch(unit):
        return f"unit {unit}"
    container = container_of(leader)
    if container is not None and container.startswith("docker:"):
        return f"container {container}"
    parent = processes.get(leader.ppid)
    if parent is None:
        return f"pid {leader.ppid}, which can't be seen"
    return "" if _is_init(parent) else f"pid {parent.pid} ({parent.title[:60]})"


def _is_init(process: Process) -> bool:
    pid = process.nspid[-1] if process.nspid else process.pid
    program = process.exe or (process.argv[0] if process.argv else process.comm)
    return pid == 1 and os.path.basename(program) in _INITS
