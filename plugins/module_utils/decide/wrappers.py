# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Units whose main process is a shell around the server (``ExecStart=/bin/bash start.sh``). Pure.

Such a unit is the server's own all the same: systemd would start the shell, and so the server, again. But a unit that
runs anything else beside the server is somebody else's, and so is a daemon that started it (cron, sshd, supervisord).
"""

from __future__ import annotations

import typing as t

from ..cgroups import unit_of
from ..model import Process
from ..snapshot import Unit
from .protected import program_name

# Programs that wait for the one command that they were given.
WRAPPERS = (
    *("sh", "bash", "dash", "zsh", "ksh", "busybox"),
    *("su", "sudo", "runuser", "timeout", "time", "flock", "unshare"),
    *("tini", "dumb-init", "catatonit"),
)
# What stands behind the server in a pipeline.
LOGGERS = ("tee", "cat", "logger")


def wrapper_pid(leader: Process, unit: t.Optional[Unit], processes: t.Mapping[int, Process]) -> t.Optional[int]:
    """The unit's main process, if all that it and its unit do is to run this leader; else None."""
    if unit is None or unit.main_pid in (0, leader.pid):
        return None
    chain = _chain(leader, unit.main_pid, processes)
    if chain is None or any(program_name(one) not in WRAPPERS for one in chain):
        return None
    above = {one.pid for one in chain}
    for process in processes.values():
        if process.dead or unit_of(process) != unit.name or process.pid in above:
            continue
        tree = {process.pid, *(one.pid for one in _ancestors(process, processes))}
        if leader.pid not in tree and not (program_name(process) in LOGGERS and process.ppid in above):
            return None
    return unit.main_pid


def _chain(leader: Process, main_pid: int, processes: t.Mapping[int, Process]) -> t.Optional[list[Process]]:
    """The leader's ancestors up to the main process; None where that one is no ancestor."""
    chain: list[Process] = []
    for one in _ancestors(leader, processes):
        chain.append(one)
        if one.pid == main_pid:
            return chain
    return None


def _ancestors(process: Process, processes: t.Mapping[int, Process]) -> t.Iterator[Process]:
    seen = {process.pid}
    parent = processes.get(process.ppid)
    while parent is not None and parent.pid not in seen:
        seen.add(parent.pid)
        yield parent
        parent = processes.get(parent.ppid)
