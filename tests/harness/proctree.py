# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A recorded /proc: a directory that says what the kernel would, written from a short description.

    write_proc(tmp_path / "proc", [
        Proc(1, "/sbin/init"),
        Proc(700, "sglang::scheduler_TP0", ppid=1, maps=[Mapping(node, "rw-s", 2048)], fds=[node]),
    ])

It is for modules with the option ``proc_root``, and for what can't be made alive (state R with SIGKILL pending, a
driver's wait channel, another PID namespace's numbers). Device nodes are real ones (devices.py), so that stat shows
their numbers.
"""

from __future__ import annotations

import dataclasses
import os
import typing as t
from pathlib import Path

BOOT_ID = "0c61c2ec-0000-4000-8000-00000000c1ea"
UPTIME_S = 100_000.0
FIRST_ADDRESS = 0x7F0000000000
PAGE_KIB = 4
PF_KTHREAD = 0x00200000
STATES = {"R": "running", "S": "sleeping", "D": "disk sleep", "Z": "zombie", "T": "stopped", "I": "idle"}
MEMINFO_KIB = {
    "MemTotal": 461 * 1024 * 1024,
    "MemFree": 400 * 1024 * 1024,
    "MemAvailable": 440 * 1024 * 1024,
    "Buffers": 1024,
    "Cached": 30 * 1024 * 1024,
    "Shmem": 1024,
    "Unevictable": 0,
    "Mlocked": 0,
    "SwapTotal": 0,
    "SwapFree": 0,
}
DEVICES = "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n234 nvidia-caps\n510 nvidia-uvm\n\nBlock devices:\n"


@dataclasses.dataclass(frozen=True)
class Mapping:
    """A line of maps: ``permissions`` as there (``rw-s``), of a file that exists. ``offset`` in bytes."""

    path: Path
    permissions: str = "rw-s"
    size_kib: int = 2048
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class Proc:
    """One process. ``title`` is its command line: a string is one word (as a rewritten title is), a sequence is argv.

    ``kill_pending`` sets SIGKILL's bit in ShdPnd; ``nspid`` defaults to the pid alone; ``tids`` are further threads.
    """

    pid: int
    title: str | t.Sequence[str] = ""
    ppid: int = 1
    comm: str | None = None
    state: str = "S"
    uid: int = 0
    start_ticks: int = 5000
    pgid: int | None = None
    sid: int | None = None
    exe: str = "/usr/bin/python3.11"
    cgroup: str = "0::/user.slice/user-0.slice/session-1.scope\n"
    environ: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    maps: t.Sequence[Mapping] = ()
    fds: t.Sequence[Path | str] = ()
    tids: t.Sequence[int] = ()
    nspid: t.Sequence[int] = ()
    wchan: str = "0"
    kill_pending: bool = False
    rss_shmem_kib: int = 0
    kernel_thread: bool = False
    status: t.Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def argv(self) -> tuple[str, ...]:
        if isinstance(self.title, str):
            return (self.title,) if self.title else ()
        return tuple(self.title)

    @property
    def name(self) -> str:
        words = self.argv
        chosen = self.comm if self.comm is not None else os.path.basename(words[0]) if words else "kthread"
        return chosen[:15]


def write_proc(
    root: Path,
    processes: t.Sequence[Proc],
    *,
    self_pid: int = 1,
    meminfo_kib: t.Mapping[str, int] | None = None,
    tcp: str = "",
    files: t.Mapping[str, str] | None = None,
) -> Path:
    """Write the tree; returns ``root``. ``tcp``: net/tcp below its header; ``files``: any others by path."""
    for process in processes:
        _write_process(root, process)
    (root / "self").symlink_to(str(self_pid))
    header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    memory = {**MEMINFO_KIB, **(meminfo_kib or {})}
    texts = {
        "uptime": f"{UPTIME_S:.2f} {UPTIME_S:.2f}\n",
        "stat": "btime 1700000000\n",
        "devices": DEVICES,
        "meminfo": "".join(f"{name + ':':<16}{size:>8} kB\n" for name, size in memory.items()),
        "sys/kernel/random/boot_id": BOOT_ID + "\n",
        "net/tcp": header + tcp,
        "net/tcp6": header,
        **(files or {}),
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _write_process(root: Path, process: Proc) -> None:
    base = root / str(process.pid)
    zombie = process.state == "Z"
    _write_task(base, process, process.pid, hollow=zombie)
    (base / "cmdline").write_bytes(b"" if zombie else b"".join(word.encode() + b"\0" for word in process.argv))
    (base / "environ").write_bytes(
        b"".join(f"{name}={value}".encode() + b"\0" for name, value in process.environ.items())
    )
    (base / "cgroup").write_text(process.cgroup)
    if not zombie and not process.kernel_thread:
        (base / "exe").symlink_to(process.exe)
        (base / "root").symlink_to("/")
    (base / "map_files").mkdir()
    for address, mapping in _addresses(process.maps):
        if not zombie:
            (base / "map_files" / address).symlink_to(mapping.path)
    for tid in (process.pid, *process.tids):
        # The threads of a zombie leader live: they show what the leader no longer does.
        _write_task(base / "task" / str(tid), process, tid, hollow=zombie and tid == process.pid)


def _write_task(base: Path, process: Proc, tid: int, *, hollow: bool) -> None:
    """What both a process's and a task's directory hold; ``hollow``: neither mappings nor descriptors."""
    (base / "fd").mkdir(parents=True)
    state = process.state if tid == process.pid else "S"
    (base / "stat").write_text(_stat(process, tid, state))
    (base / "status").write_text(_status(process, tid, state))
    (base / "comm").write_text(process.name + "\n")
    (base / "wchan").write_text(process.wchan)
    lines = "" if hollow else "".join(_maps_line(address, mapping) for address, mapping in _addresses(process.maps))
    (base / "maps").write_text(lines)
    if not hollow:
        for number, target in enumerate(process.fds, start=3):
            (base / "fd" / str(number)).symlink_to(target)


def _stat(process: Proc, tid: int, state: str) -> str:
    pgid = process.pid if process.pgid is None else process.pgid
    sid = process.pid if process.sid is None else process.sid
    flags = 0x400040 | (PF_KTHREAD if process.kernel_thread else 0)
    threads = 1 + len(process.tids)
    before = (
        f"{tid} ({process.name}) {state} {process.ppid} {pgid} {sid} 0 -1 {flags} 0 0 0 0 10 5 0 0 20 0 {threads} 0"
    )
    return f"{before} {process.start_ticks} 1000000 2000 18446744073709551615" + " 0" * 27 + "\n"


def _status(process: Proc, tid: int, state: str) -> str:
    pending = f"{1 << 8 if process.kill_pending else 0:016x}"
    fields = {
        "Name": process.name,
        "State": f"{state} ({STATES.get(state, 'unknown')})",
        "Tgid": str(process.pid),
        "Pid": str(tid),
        "PPid": str(process.ppid),
        "Uid": "\t".join([str(process.uid)] * 4),
        "NSpid": "\t".join(map(str, process.nspid or (tid,))),
        "VmPin": "0 kB",
        "VmLck": "0 kB",
        "RssShmem": f"{process.rss_shmem_kib} kB",
        "Threads": str(1 + len(process.tids)),
        "SigPnd": f"{0:016x}",
        "ShdPnd": pending,
        **process.status,
    }
    if state == "Z" or process.kernel_thread:
        for name in ("VmPin", "VmLck", "RssShmem"):
            fields.pop(name)
    return "".join(f"{name}:\t{value}\n" for name, value in fields.items())


def _addresses(maps: t.Sequence[Mapping]) -> t.Iterator[tuple[str, Mapping]]:
    start = FIRST_ADDRESS
    for mapping in maps:
        end = start + mapping.size_kib * 1024
        yield f"{start:x}-{end:x}", mapping
        start = end + PAGE_KIB * 1024


def _maps_line(address: str, mapping: Mapping) -> str:
    info = os.stat(mapping.path)
    device = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}"
    return f"{address} {mapping.permissions} {mapping.offset:08x} {device} {info.st_ino}    {mapping.path}\n"


def tcp_line(port: int, state: str = "0A", address: str = "0100007F", inode: int = 4711, uid: int = 0) -> str:
    """A line of net/tcp: 0A is LISTEN, 06 TIME_WAIT (whose inode is 0), 01 ESTABLISHED."""
    return (
        f"   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {uid:5} 0 {inode} 1\n"
    )
