# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a server's processes are at, for people: states, processor time, where they wait, and their stacks.

Python's stack comes from py-spy where root has one of its own: a service user's copy is never run. Else the kernel's
view is told: its stack, the call, and the states of the threads. Everything is read in bounded children, since a locked
process would hold whoever looks at it.
"""

from __future__ import annotations

import os
import stat
import time
import typing as t
from dataclasses import dataclass

from ..errors import CleanSlateError
from ..sglang.evidence import MAX_STACK_LINES, ProcessEvidence, activity_word, kernel_line, parse_py_spy
from ..sglang.watch import Member
from ..spawn import fetch_bounded, run_bounded
from .bounded import fetch_process
from .procfs import parse_stat, read_text, read_wchan

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_PROCESSES = 16
MAX_THREADS = 64
PY_SPY_DEADLINE_S = 10.0
ALL_STACKS_DEADLINE_S = 45.0
KERNEL_DEADLINE_S = 2.0
TITLE_DEADLINE_S = 2.0
_LONGEST_LINE = 300
_CPU_SAMPLE_S = 0.5
_ORDER = ("leader", "scheduler", "controller", "detokenizer", "worker", "other")


@dataclass(frozen=True)
class PySpy:
    """Root's own py-spy. ``path`` None: there is none, and ``problem`` says why."""

    path: t.Optional[str]
    problem: t.Optional[str] = None


def find_py_spy(path: str = SYSTEM_PATH, owner: int = 0) -> PySpy:
    """py-spy in the system's folders, if nobody but ``owner`` can change it or what leads to it."""
    problem = f"py-spy is in none of {path.replace(':', ', ')}"
    for folder in path.split(":"):
        candidate = os.path.realpath(os.path.join(folder, "py-spy"))
        if not os.access(candidate, os.X_OK):
            continue
        changeable = _changeable(candidate, owner)
        if changeable is None:
            return PySpy(candidate)
        problem = f"{candidate} is not used: {changeable}"
    return PySpy(None, problem)


def _changeable(path: str, owner: int) -> t.Optional[str]:
    """Who else could change this file, in words; None: nobody."""
    while True:
        try:
            status = os.stat(path)
        except OSError as error:
            return f"{path}: {error.strerror}"
        if status.st_uid not in (0, owner):
            return f"{path} belongs to uid {status.st_uid}"
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            return f"{path} can be changed by others (mode {stat.S_IMODE(status.st_mode):04o})"
        parent = os.path.dirname(path)
        if parent == path:
            return None
        path = parent


def gather(
    members: t.Sequence[Member],
    py_spy: PySpy,
    proc: str = "/proc",
    deadline_s: float = ALL_STACKS_DEADLINE_S,
) -> tuple[ProcessEvidence, ...]:
    """Evidence of the ranks first, then of the others; of 16 processes at most, within ``deadline_s`` and a little."""
    chosen = sorted(members, key=lambda member: (_ORDER.index(member.role), member.pid))[:MAX_PROCESSES]
    percents = _cpu_percents([member.pid for member in chosen], proc)
    titles = _titles(chosen, proc)
    end = time.monotonic() + deadline_s
    return tuple(_evidence(member, titles, percents, py_spy, proc, end) for member in chosen)


def _evidence(
    member: Member,
    titles: t.Mapping[int, t.Optional[str]],
    percents: t.Mapping[int, t.Optional[float]],
    py_spy: PySpy,
    proc: str,
    end: float,
) -> ProcessEvidence:
    state = parse_stat(read_text(f"{proc}/{member.pid}/stat") or "") or {"state": member.state, "threads": None}
    percent = percents.get(member.pid)
    lines, source, problem = _stack(member, state["state"], py_spy, proc, end)
    called = fetch_bounded(lambda: read_wchan(member.pid, proc), KERNEL_DEADLINE_S)
    return ProcessEvidence(
        pid=member.pid,
        title=titles.get(member.pid),
        role=member.role,
        state=state["state"],
        activity=activity_word(state["state"], percent),
        cpu_percent=percent,
        wchan=called.value if called.ok else None,
        threads=state["threads"],
        stack=tuple(line[:_LONGEST_LINE] for line in lines),
        stack_source=source,
        stack_problem=problem,
    )


def _stack(
    member: Member, state: str, py_spy: PySpy, proc: str, end: float
) -> tuple[t.Sequence[str], str, t.Optional[str]]:
    if state in ("Z", "X"):
        return (), "none", "it is dead"
    left = end - time.monotonic()
    if left <= 0:
        return (), "none", "the time for stacks was over"
    problem = py_spy.problem
    if py_spy.path is not None and proc == "/proc":
        lines, problem = _by_py_spy(py_spy.path, member.pid, min(PY_SPY_DEADLINE_S, left))
        if lines:
            return lines, "py-spy", None
    kernel = _by_kernel(member.pid, proc, min(KERNEL_DEADLINE_S, max(end - time.monotonic(), 0.1)))
    if kernel is None:
        return (), "none", _joined(problem, "the kernel's view was not read in time")
    return kernel, "kernel" if kernel else "none", problem


def _joined(first: t.Optional[str], second: str) -> str:
    return f"{first}; {second}" if first else second


def _by_py_spy(path: str, pid: int, deadline_s: float) -> tuple[list[str], t.Optional[str]]:
    environment = {"PATH": SYSTEM_PATH, "HOME": "/", "LANG": "C.UTF-8"}
    done = run_bounded([path, "dump", "--pid", str(pid), "--nonblocking"], deadline_s, environment)
    if done.timed_out:
        return [], f"py-spy did not answer within {deadline_s:g} s"
    if not done.ok:
        words = (done.error or done.stderr or done.stdout).strip().splitlines()
        return [], f"py-spy: {words[-1][:200] if words else 'no reason given'}"
    return parse_py_spy(done.stdout), None


def _by_kernel(pid: int, proc: str, deadline_s: float) -> t.Optional[list[str]]:
    """None: no answer in time."""
    called = fetch_bounded(lambda: _kernel_lines(pid, proc), deadline_s)
    return called.value if called.ok else None


def _kernel_lines(pid: int, proc: str) -> list[str]:
    stack = (read_text(f"{proc}/{pid}/stack") or "").splitlines()
    lines = [line for line in map(kernel_line, stack) if line is not None]
    call = (read_text(f"{proc}/{pid}/syscall") or "").split()
    if call:
        lines.append("call: running" if call[0] == "running" else f"call: number {call[0]}")
    return (lines + _threads(pid, proc))[:MAX_STACK_LINES]


def _threads(pid: int, proc: str) -> list[str]:
    """How many threads are in which state at which place."""
    try:
        tids = sorted((int(tid) for tid in os.listdir(f"{proc}/{pid}/task")), key=lambda tid: (tid != pid, tid))
    except (OSError, ValueError):
        return []
    groups: dict[tuple[str, str], int] = {}
    for tid in tids[:MAX_THREADS]:
        base = f"{proc}/{pid}/task/{tid}"
        task = parse_stat(read_text(f"{base}/stat") or "")
        if task is not None:
            place = (read_text(f"{base}/wchan") or "").strip()
            key = (task["state"], place if place not in ("", "0") else "no place told")
            groups[key] = groups.get(key, 0) + 1
    rest = len(tids) - MAX_THREADS
    lines = [f"threads: {count} in state {state}, {place}" for (state, place), count in groups.items()]
    return lines + ([f"threads: {rest} more"] if rest > 0 else [])


def _cpu_percents(pids: t.Sequence[int], proc: str) -> dict[int, t.Optional[float]]:
    before, start = {pid: _cpu_ticks(pid, proc) for pid in pids}, time.monotonic()
    time.sleep(_CPU_SAMPLE_S)
    seconds = time.monotonic() - start
    result: dict[int, t.Optional[float]] = {}
    for pid in pids:
        first, last = before[pid], _cpu_ticks(pid, proc)
        ticks = None if first is None or last is None else max(last - first, 0)
        result[pid] = None if ticks is None else round(100 * ticks / os.sysconf("SC_CLK_TCK") / seconds, 0)
    return result


def _cpu_ticks(pid: int, proc: str) -> t.Optional[int]:
    """User and system time: fields 14 and 15 of stat."""
    fields = (read_text(f"{proc}/{pid}/stat") or "").rpartition(")")[2].split()
    try:
        return int(fields[11]) + int(fields[12])
    except (IndexError, ValueError):
        return None


def _titles(members: t.Sequence[Member], proc: str) -> dict[int, t.Optional[str]]:
    """Command lines. After two that are locked nobody's is asked for any more: it is for people only."""
    titles: dict[int, t.Optional[str]] = {}
    locked = 0
    for member in members:
        if locked >= 2:
            break
        try:
            process = fetch_process(member.pid, proc, TITLE_DEADLINE_S)
        except CleanSlateError:
            locked += 1
            continue
        titles[member.pid] = None if process is None else " ".join(process.argv) or f"[{process.comm}]"
    return titles
