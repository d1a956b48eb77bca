# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who descends from whom. Pure."""

from __future__ import annotations

import typing as t

from ..model import Process

Children = t.Mapping[int, t.Sequence[int]]


def children_of(processes: t.Mapping[int, Process]) -> Children:
    """The pids of each parent's children. For many questions about the same processes: made once, not for each."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    return children


def descendants(
    pid: int, processes: t.Mapping[int, Process], children: t.Optional[Children] = None
) -> list[int]:
    """All pids below ``pid`` by parent links. ``children``: those of ``processes``, where they were looked up before.

    A fork storm has thousands: nobody is looked for in a list here.
    """
    below = children_of(processes) if children is None else children
    found: dict[int, None] = {}
    queue = list(below.get(pid, ()))
    while queue:
        current = queue.pop()
        if current not in found and current != pid:
            found[current] = None
            queue.extend(below.get(current, ()))
    return list(found)
