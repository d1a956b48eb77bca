# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The process tree below a process, read from /proc."""

from __future__ import annotations

import os
import signal


def descendants(pid: int) -> list[int]:
    """All living descendants of ``pid``, parents before children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # gone between the listing and the look
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def kill_tree(include_self: bool) -> None:
    """SIGKILL to all descendants, then to this process: SGLang's ``kill_process_tree(os.getpid())``.

    It ends even a clean shutdown this way, so that the exit status of a stopped server is 137.
    """
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if include_self:
        os.kill(os.getpid(), signal.SIGKILL)
