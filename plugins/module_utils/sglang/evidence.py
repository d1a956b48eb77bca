# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a person would want to see of a server that does not come up, and its one telling process in words. Pure."""

from __future__ import annotations

import os
import re
import typing as t
from dataclasses import dataclass, field

MAX_STACK_LINES = 60
MAX_LINE = 300
_BUSY_PERCENT = 20
_FRAME = re.compile(r"^\s+(?P<function>.+?) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)$")
_MAIN = re.compile(r'^Thread .*"MainThread"')
_KERNEL = "kernel: "


@dataclass(frozen=True)
class ProcessEvidence:
    """One process. ``activity``: busy, sleeping, stopped, waiting (in the kernel) or dead. ``stack_source``: py-spy,
    kernel or none."""

    pid: int
    title: t.Optional[str]
    role: str
    state: str
    activity: str
    cpu_percent: t.Optional[float]
    wchan: t.Optional[str]
    threads: t.Optional[int]
    stack: tuple[str, ...] = ()
    stack_source: str = "none"
    stack_problem: t.Optional[str] = None


@dataclass(frozen=True)
class GpuEvidence:
    """Memory of one of the server's GPUs, in MiB. None: the driver does not tell."""

    index: int
    uuid: t.Optional[str]
    used_mib: t.Optional[int]
    free_mib: t.Optional[int]
    total_mib: t.Optional[int]


@dataclass(frozen=True)
class MemoryEvidence:
    """Host memory. ``cgroup_oom_kills`` and ``host_oom_kills``: since the watch began; None: not known."""

    available_mib: t.Optional[int] = None
    shm_free_mib: t.Optional[int] = None
    cgroup_oom_kills: t.Optional[int] = None
    host_oom_kills: t.Optional[int] = None


@dataclass(frozen=True)
class Closeup:
    """One close look. ``gpus`` None: not looked at, or no answer (``gpus_problem``)."""

    processes: tuple[ProcessEvidence, ...] = ()
    gpus: t.Optional[tuple[GpuEvidence, ...]] = None
    gpus_problem: t.Optional[str] = None
    memory: MemoryEvidence = field(default_factory=MemoryEvidence)


@dataclass(frozen=True)
class Evidence:
    """``log_error``: the log's own, in one sentence. ``port``: who listens, in words."""

    log_error: t.Optional[str]
    last_lines: tuple[str, ...]
    processes: tuple[ProcessEvidence, ...]
    gpus: t.Optional[tuple[GpuEvidence, ...]]
    gpus_problem: t.Optional[str]
    memory: MemoryEvidence
    port: str


def activity_word(state: str, cpu_percent: t.Optional[float]) -> str:
    """A state for people."""
    if state in ("T", "t"):
        return "stopped"
    if state in ("Z", "X"):
        return "dead"
    if state == "D":
        return "waiting"
    return "busy" if (cpu_percent or 0) >= _BUSY_PERCENT else "sleeping"


def parse_py_spy(text: str) -> list[str]:
    """The threads with their frames, the main thread first, of `py-spy dump`."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("Thread "):
            threads.append([line.rstrip()])
        elif threads and line.strip():
            threads[-1].append(line.rstrip())
    threads.sort(key=lambda lines: _MAIN.match(lines[0]) is None)
    return [line for lines in threads for line in lines][:MAX_STACK_LINES]


def kernel_line(line: str) -> t.Optional[str]:
    """A line of /proc/PID/stack, `[<0>] futex_wait_queue+0x60/0x90`, as it is shown; None for one that tells nothing.
    """
    words = line.split("] ", 1)[-1].strip()
    return f"{_KERNEL}{words}" if words and not words.startswith("0x") else None


def top_frames(stack: t.Sequence[str], count: int = 3) -> t.Optional[str]:
    """The innermost frames of the first thread in a line, `recv (connection.py:250) < wait (engine.py:1370)`; of a
    kernel stack the innermost functions. None where there are none."""
    frames: list[str] = []
    for line in stack:
        found = _FRAME.match(line[:MAX_LINE])
        if found:
            place = os.path.basename(found.group("file")) + (f":{found.group('line')}" if found.group("line") else "")
            frames.append(f"{found.group('function')} ({place})")
        elif frames:
            break
    if not frames:
        frames = [line[len(_KERNEL) :] for line in stack if line.startswith(_KERNEL)]
    return " < ".join(frames[:count]) or None


def telling(processes: t.Sequence[ProcessEvidence], pid: t.Optional[int] = None) -> t.Optional[ProcessEvidence]:
    """The process that tells most: the one that is accused, else a stopped one, else the busiest rank, else the first.
    """
    living = [process for process in processes if process.activity != "dead"]
    for process in living:
        if process.pid == pid:
            return process
    stopped = [process for process in living if process.activity == "stopped"]
    if stopped:
        return stopped[0]
    ranks = [process for process in living if process.role == "scheduler"]
    ranks = ranks or [process for process in living if process.role == "other"] or living
    return max(ranks, key=lambda process: process.cpu_percent or 0.0, default=None)


def words_of(process: ProcessEvidence) -> str:
    """`scheduler pid 812 is busy (CPU 99 %), its stack: ...`."""
    name = "the server itself" if process.role == "leader" else "a process" if process.role == "other" else process.role
    words = f"{name} pid {process.pid} is {process.activity}"
    if process.activity == "waiting":
        words += f" in the kernel ({process.wchan or 'at an unknown place'})"
    elif process.cpu_percent is not None and process.activity in ("busy", "sleeping"):
        words += f" (CPU {process.cpu_percent:.0f} %)"
    frames = top_frames(process.stack)
    if frames is not None:
        return f"{words}, its {'kernel ' if process.stack_source == 'kernel' else ''}stack: {frames}"
    return words if process.wchan is None or process.activity == "waiting" else f"{words} in {process.wchan}"
