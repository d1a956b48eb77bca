# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who has a GPU's device node open or mapped, by device number.

Paths and inodes lie: a node made by mknod elsewhere (Proxmox ``devN:``) has its own inode and escapes fuser and lsof.
So every look compares ``st_rdev``: through /proc/PID/fd for open files, through /proc/PID/map_files for mappings. In an
unprivileged container map_files refuses (EPERM); there the device:inode of the maps line is compared with a stat of its
path below /proc/PID/root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
import typing as t
from dataclasses import dataclass, field

from ..exhausted import is_exhausted
from ..model import DeviceScan, DeviceUse, Process
from .procfs import read_bytes
from .statx import Kind, kind_of

NVIDIA_MAJOR = 195
CONTROL_MINORS = (254, 255)  # nvidia-modeset and nvidiactl belong to no GPU
MAPS_LIMIT_BYTES = 64 * 2**20
KCMP_FILES = 2
KCMP_NUMBERS = {"x86_64": 312, "aarch64": 272}


@dataclass(frozen=True)
class MapsLine:
    """One line of /proc/PID/maps that is backed by a file. Addresses are as map_files names them."""

    address: str
    readable: bool
    kib: int
    device: tuple[int, int]
    inode: int
    path: str


@dataclass
class _Tally:
    fds: int = 0
    readable_kib: int = 0
    write_only_kib: int = 0


@dataclass
class _Scanner:
    """One pass over all processes; remembers which files turned out to be no GPU node."""

    proc: str
    major: int
    known: dict[tuple[tuple[int, int], int], t.Optional[int]] = field(default_factory=dict)

    def minor_of(self, kind: Kind) -> t.Optional[int]:
        # NVIDIA's nodes are character devices; another major (a lab's) may be a block device, such as a loop device.
        device = kind.character_device or (self.major != NVIDIA_MAJOR and kind.block_device)
        if not device or kind.major != self.major or kind.minor in CONTROL_MINORS:
            return None
        return kind.minor


def scan_devices(
    processes: t.Mapping[int, Process], proc: str = "/proc", major: int = NVIDIA_MAJOR
) -> DeviceScan:
    """Look through all processes for GPU nodes (``major``); a process that refuses is listed in ``unreadable``."""
    started = time.monotonic()
    scanner = _Scanner(proc, major)
    uses: list[DeviceUse] = []
    unreadable: list[int] = []
    for process in processes.values():
        if process.kernel_thread or process.dead:
            continue
        tallies: dict[int, _Tally] = {}
        complete = _scan_process(scanner, process, tallies)
        if not complete and _is_alive(process, proc):
            unreadable.append(process.pid)
        uses.extend(
            DeviceUse(process.pid, minor, tally.fds, tally.readable_kib, tally.write_only_kib)
            for minor, tally in sorted(tallies.items())
        )
    return DeviceScan(tuple(uses), tuple(unreadable), len(processes), round(time.monotonic() - started, 3))


def parse_maps(text: str) -> list[MapsLine]:
    """The file-backed lines of a maps file. Lines that make no sense are passed over."""
    result = []
    for line in text.split("\n"):  # a file's name may hold every other sign that ends a line
        parts = line.split(None, 5)
        if len(parts) < 6 or parts[4] == "0":
            continue
        low, _dash, high = parts[0].partition("-")
        major, _colon, minor = parts[3].partition(":")
        try:
            start, end = int(low, 16), int(high, 16)
            entry = MapsLine(
                f"{start:x}-{end:x}",
                parts[1].startswith("r"),
                (end - start) // 1024,
                (int(major, 16), int(minor, 16)),
                int(parts[4]),
                parts[5],
            )
        except ValueError:
            continue
        result.append(entry)
    return result


def _scan_process(scanner: _Scanner, process: Process, tallies: dict[int, _Tally]) -> bool:
    """Fill ``tallies``; False where something of this process could not be read."""
    base = f"{scanner.proc}/{process.pid}"
    # A zombie leader with living threads shows nothing of its own; its threads still have all of it.
    tids = _tids(base) if process.threads > 1 else []
    zombie = process.state == "Z"
    roots = [f"{base}/task/{tid}" for tid in tids if tid != process.pid][:1] if zombie else [base]
    complete = bool(roots)
    for root in roots:
        complete = _scan_maps(scanner, base, root, tallies) and complete
        complete = _scan_fds(scanner, root, tallies) and complete
    for tid in _own_file_tables(process.pid, tids, scanner.proc):
        complete = _scan_fds(scanner, f"{base}/task/{tid}", tallies) and complete
    return complete


def _scan_fds(scanner: _Scanner, root: str, tallies: dict[int, _Tally]) -> bool:
    try:
        names = os.listdir(f"{root}/fd")
    except OSError as exc:
        if is_exhausted(exc):
            raise
        return exc.errno not in (errno.EACCES, errno.EPERM)
    for name in names:
        try:
            kind = kind_of(f"{root}/fd/{name}")
        except OSError as exc:
            if exc.errno in (errno.EACCES, errno.EPERM):
                return False
            continue  # closed meanwhile, or a target that is gone
        minor = scanner.minor_of(kind)
        if minor is not None:
            tallies.setdefault(minor, _Tally()).fds += 1
    return True


def _scan_maps(scanner: _Scanner, base: str, root: str, tallies: dict[int, _Tally]) -> bool:
    data = read_bytes(f"{root}/maps", MAPS_LIMIT_BYTES)
    if data is None:
        return not os.path.exists(f"{root}/maps")
    complete = len(data) < MAPS_LIMIT_BYTES
    for line in parse_maps(data.decode("utf-8", "replace")):
        minor, known = _minor_of_mapping(scanner, base, root, line)
        complete = complete and known
        if minor is None:
            continue
        tally = tallies.setdefault(minor, _Tally())
        if line.readable:
            tally.readable_kib += line.kib
        else:
            tally.write_only_kib += line.kib
    return complete


def _minor_of_mapping(
    scanner: _Scanner, base: str, root: str, line: MapsLine
) -> tuple[t.Optional[int], bool]:
    """(GPU minor or None, whether that is known). Only files outside /dev are remembered as harmless."""
    key = (line.device, line.inode)
    suspicious = "/dev/" in line.path or "nvidia" in line.path
    if key in scanner.known and not suspicious:
        return scanner.known[key], True
    try:
        kind = kind_of(f"{base}/map_files/{line.address}")
    except OSError as exc:
        if exc.errno == errno.ENOENT and os.path.isdir(f"{base}/map_files"):
            return _minor_by_path(scanner, root, line, suspicious)
        if exc.errno in (errno.EPERM, errno.EACCES, errno.ENOENT):
            return _minor_by_path(scanner, root, line, suspicious)
        if exc.errno == errno.ESRCH and root != base:  # a zombie leader has no map_files; its threads have the mapping
            return _minor_by_path(scanner, root, line, suspicious)
        return None, True  # the process is gone
    minor = scanner.minor_of(kind)
    scanner.known[key] = minor
    return minor, True


def _minor_by_path(
    scanner: _Scanner, root: str, line: MapsLine, suspicious: bool
) -> tuple[t.Optional[int], bool]:
    """The way of the unprivileged container: same device and inode at the mapping's path means the same node."""
    path = line.path[: -len(" (deleted)")] if line.path.endswith(" (deleted)") else line.path
    try:
        info = os.stat(f"{root}/root{path}")
    except OSError:
        return None, not suspicious
    same = (os.major(info.st_dev), os.minor(info.st_dev)) == line.device and info.st_ino == line.inode
    if same:
        return scanner.minor_of(Kind(info.st_mode, os.major(info.st_rdev), os.minor(info.st_rdev))), True
    return None, not suspicious


def _tids(base: str) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(f"{base}/task") if name.isdigit())
    except OSError as exc:
        if is_exhausted(exc):
            raise
        return []


def _own_file_tables(pid: int, tids: t.Sequence[int], proc: str) -> list[int]:
    """Threads whose file table is not the leader's (CLONE_FILES left out): their open files are seen nowhere else."""
    number = KCMP_NUMBERS.get(platform.machine())
    if len(tids) < 2 or number is None or proc != "/proc":
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    reference = tids[0] if tids[0] != pid else pid
    different = []
    for tid in tids:
        if tid == reference:
            continue
        answer = libc.syscall(number, reference, tid, KCMP_FILES, 0, 0)
        if answer > 0:
            different.append(tid)
    return different


def _is_alive(process: Process, proc: str) -> bool:
    return os.path.exists(f"{proc}/{process.pid}/stat")
