# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes as /proc shows them. Every function takes the proc root, so that a recorded tree reads like a live one."""

from __future__ import annotations

import os
import typing as t

from ..exhausted import is_exhausted
from ..model import Process

CMDLINE_LIMIT_BYTES = 1 << 17
PLAIN_CMDLINE_BYTES = 1 << 13  # of programs that can't be SGLang: a look must not drown in foreign command lines
KILL_BIT = 1 << 8  # SIGKILL is signal 9, bit 8 of SigPnd and ShdPnd
PF_KTHREAD = 0x00200000  # include/linux/sched.h; pid 2 is an ordinary process inside a container


def list_pids(proc: str = "/proc") -> list[int]:
    """All process ids below ``proc``, ascending."""
    return sorted(int(name) for name in os.listdir(proc) if name.isdigit())


def read_bytes(path: str, limit: int = 1 << 20) -> t.Optional[bytes]:
    """A file's bytes (1 MiB at most), or None where it vanished or may not be read.

    Raises:
        OSError: we have no descriptor or memory left to read anything; that says nothing of the file.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as exc:
        if is_exhausted(exc):
            raise
        return None
    try:
        parts = []
        left = limit
        while left > 0:
            data = os.read(fd, min(left, 65536))
            if not data:
                break
            parts.append(data)
            left -= len(data)
        return b"".join(parts)
    except OSError as exc:  # ESRCH: the process ended while we read
        if is_exhausted(exc):
            raise
        return None
    finally:
        os.close(fd)


def read_text(path: str, limit: int = 1 << 20) -> t.Optional[str]:
    """Like read_bytes, decoded with replacement: hostile command lines are no reason to stop."""
    data = read_bytes(path, limit)
    return None if data is None else data.decode("utf-8", "replace")


def parse_stat(text: str) -> t.Optional[dict[str, t.Any]]:
    """The fields of /proc/PID/stat that we use. The comm may hold spaces and parentheses, so the last ')' counts."""
    head, found, tail = text.rpartition(")")
    fields = tail.split()
    if not found or len(fields) < 20:
        return None
    try:
        return {
            "pid": int(head.partition("(")[0]),
            "comm": head.partition("(")[2],
            "state": fields[0],
            "ppid": int(fields[1]),
            "pgid": int(fields[2]),
            "sid": int(fields[3]),
            "flags": int(fields[6]),
            "threads": int(fields[17]),
            "start_ticks": int(fields[19]),
        }
    except ValueError:
        return None


def parse_status(text: str) -> dict[str, str]:
    """/proc/PID/status as a mapping; lines without a colon are passed over."""
    result: dict[str, str] = {}
    for line in text.split("\n"):  # nothing else ends a line here: a comm may hold \r, \v, U+2028
        name, found, value = line.partition(":")
        if found and name not in result:
            result[name] = value.strip()
    return result


def parse_cmdline(data: bytes) -> tuple[str, ...]:
    """argv from /proc/PID/cmdline. A rewritten title comes as one word padded with NULs."""
    words = data.rstrip(b"\0").split(b"\0") if data.rstrip(b"\0") else []
    return tuple(word.decode("utf-8", "replace") for word in words)


def parse_cgroups(text: str) -> tuple[str, ...]:
    """The paths of /proc/PID/cgroup: v2 first, then systemd's named v1 hierarchy, then the others."""
    v2: list[str] = []
    named: list[str] = []
    rest: list[str] = []
    for line in text.split("\n"):  # a cgroup's name may hold anything but that and a slash
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        where = v2 if parts[0] == "0" else named if parts[1] == "name=systemd" else rest
        if parts[2] not in where:
            where.append(parts[2])
    return tuple(dict.fromkeys(v2 + named + rest))


def _integer(text: t.Optional[str], base: int = 10) -> t.Optional[int]:
    try:
        return int((text or "").split()[0], base)
    except (ValueError, IndexError):
        return None


def read_process(pid: int, proc: str = "/proc") -> t.Optional[Process]:
    """One process, or None when it is gone (or was never there)."""
    base = f"{proc}/{pid}"
    stat_text = read_text(f"{base}/stat")
    stat = parse_stat(stat_text) if stat_text else None
    if stat is None:
        return None
    status = parse_status(read_text(f"{base}/status") or "")
    cmdline = _words_of(read_bytes(f"{base}/cmdline", CMDLINE_LIMIT_BYTES))
    rss_shmem_kib = _integer(status.get("RssShmem"))
    threads = stat["threads"]
    return Process(
        pid=pid,
        start_ticks=stat["start_ticks"],
        ppid=stat["ppid"],
        pgid=stat["pgid"],
        sid=stat["sid"],
        state=stat["state"],
        comm=stat["comm"],
        argv=parse_cmdline(cmdline) if cmdline else (),
        argv_cut=cmdline is not None and len(cmdline) >= CMDLINE_LIMIT_BYTES,
        uid=_integer(status.get("Uid")),
        exe=_link(f"{base}/exe"),
        threads=threads,
        cgroups=parse_cgroups(read_text(f"{base}/cgroup") or ""),
        nspid=_numbers(status.get("NSpid")),
        nssid=_numbers(status.get("NSsid")),
        kill_pending=_kill_pending(status),
        rss_shmem_mib=None if rss_shmem_kib is None else rss_shmem_kib // 1024,
        kernel_thread=bool(stat["flags"] & PF_KTHREAD),
        task_states=_task_states(base) if stat["state"] == "Z" and threads > 1 else (),
    )


def _words_of(cmdline: t.Optional[bytes]) -> t.Optional[bytes]:
    if cmdline is None or len(cmdline) <= PLAIN_CMDLINE_BYTES or b"sglang" in cmdline:
        return cmdline
    return cmdline[:PLAIN_CMDLINE_BYTES]


def _numbers(text: t.Optional[str]) -> tuple[int, ...]:
    return tuple(int(word) for word in (text or "").split() if word.isdecimal())


def _kill_pending(status: t.Mapping[str, str]) -> bool:
    pending = (_integer(status.get("SigPnd"), 16) or 0) | (_integer(status.get("ShdPnd"), 16) or 0)
    return bool(pending & KILL_BIT)


def read_identity(pid: int, proc: str = "/proc") -> t.Optional[Process]:
    """Who it is and its state, by stat and status alone: these never wait for the process, as its command line can."""
    stat = parse_stat(read_text(f"{proc}/{pid}/stat") or "")
    if stat is None:
        return None
    status = parse_status(read_text(f"{proc}/{pid}/status") or "")
    return Process(
        pid=pid,
        start_ticks=stat["start_ticks"],
        ppid=stat["ppid"],
        pgid=stat["pgid"],
        sid=stat["sid"],
        state=stat["state"],
        comm=stat["comm"],
        argv=(),
        uid=_integer(status.get("Uid")),
        threads=stat["threads"],
        kill_pending=_kill_pending(status),
    )


def read_processes(proc: str = "/proc") -> dict[int, Process]:
    """All processes that can be seen; those that vanish while we read are left out."""
    result = {}
    for pid in list_pids(proc):
        process = read_process(pid, proc)
        if process is not None:
            result[pid] = process
    return result


def read_environment(pid: int, proc: str = "/proc") -> t.Optional[dict[str, str]]:
    """The environment a process was started with; None where it can't be read, empty where a title wiped it."""
    data = read_bytes(f"{proc}/{pid}/environ")
    if data is None:
        return None
    pairs = (word.decode("utf-8", "replace").partition("=") for word in data.split(b"\0") if b"=" in word)
    return {name: value for name, _found, value in pairs}


def read_wchan(pid: int, proc: str = "/proc") -> t.Optional[str]:
    """The kernel function a task sleeps in; None where the kernel doesn't tell."""
    text = (read_text(f"{proc}/{pid}/wchan") or "").strip()
    return text if text and text != "0" else None


def read_uptime_s(proc: str = "/proc") -> t.Optional[float]:
    """Seconds since boot, on the clock that start_ticks counts."""
    try:
        return float((read_text(f"{proc}/uptime") or "").split()[0])
    except (ValueError, IndexError):
        return None


def read_boot_id(proc: str = "/proc") -> t.Optional[str]:
    """The kernel's id of this boot: start times of two boots can't be compared."""
    return (read_text(f"{proc}/sys/kernel/random/boot_id") or "").strip() or None


def age_s(process: Process, uptime_s: t.Optional[float]) -> t.Optional[float]:
    """How long a process has run, by the boot clock, which no clock change can move."""
    if uptime_s is None:
        return None
    return max(0.0, uptime_s - process.start_ticks / os.sysconf("SC_CLK_TCK"))


def ancestors(pid: int, processes: t.Mapping[int, Process]) -> list[int]:
    """The pids above ``pid``, nearest first; cycles in a torn snapshot end the walk."""
    result: list[int] = []
    current = processes.get(pid)
    while current is not None and current.ppid > 0 and current.ppid not in result:
        result.append(current.ppid)
        current = processes.get(current.ppid)
    return result


def _link(path: str) -> t.Optional[str]:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _task_states(base: str) -> tuple[str, ...]:
    try:
        tids = os.listdir(f"{base}/task")
    except OSError as exc:
        if is_exhausted(exc):
            raise
        return ()
    stats = (parse_stat(read_text(f"{base}/task/{tid}/stat") or "") for tid in tids)
    return tuple(sorted(stat["state"] for stat in stats if stat))
