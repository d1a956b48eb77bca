# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who descends from whom. Pure."""

from __future__ import annotations

import typing as t

from ..model import Process


def descendants(pid: int, processes: t.Mapping[int, Process]) -> list[int]:
    """All pids below ``pid`` by parent links."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    result: list[int] = []
    queue = list(children.get(pid, ()))
    while queue:
        current = queue.pop()
        if current not in result and current != pid:
            result.append(current)
            queue.extend(children.get(current, ()))
    return result
