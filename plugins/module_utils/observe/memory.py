# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Host memory: /proc/meminfo, the memory cgroup above us, and what processes keep pinned.

Three figures are easily mixed up and are kept apart here:

- MemAvailable counts page cache that can be dropped, so a big ``cached_mib`` takes nothing from it.
- Reserved hugepages are missing from MemAvailable even while nobody uses them, and HugePages_Free serves only those
  who ask for hugepages.
- In a container lxcfs computes MemAvailable from the container's limit and knows nothing of the host's pressure, while
  some of its lines (Shmem) are the host's own: a shared figure above the total is normal there.
"""

from __future__ import annotations

import os
import re
import typing as t
from dataclasses import dataclass

from ..model import CgroupLimit, HostMemory, Process
from .cgroupfs import CgroupMount, guest_paths, parse_mounts

_MIB = 1024 * 1024
# More than a petabyte in kB is not a size but a wrapped or broken counter.
_LINE = re.compile(rb"^([A-Za-z0-9_()]{1,40}):[ \t]*(\d{1,12})(?:[ \t]+(kB))?[ \t\r]*$")
# cgroup v1 writes "no limit" as the largest number of pages; nobody limits to an exbibyte.
_NO_LIMIT_BYTES = 1 << 60


def _read(path: str) -> t.Optional[bytes]:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except (OSError, ValueError):  # ValueError: a NUL byte in a path that came out of a broken file
        return None


def _counters(data: bytes) -> dict[str, tuple[int, bool]]:
    """``{name: (number, has unit kB)}`` of the lines ``Name:  123 kB``; of a name that comes twice, the first."""
    found: dict[str, tuple[int, bool]] = {}
    for line in data.splitlines():
        match = _LINE.match(line)
        if match:
            found.setdefault(match.group(1).decode("ascii"), (int(match.group(2)), match.group(3) is not None))
    return found


def parse_meminfo(data: bytes) -> HostMemory:
    """Turn the text of /proc/meminfo into MiB. A missing, wrapped or garbled line is None."""
    counters = _counters(data)

    def mib(name: str) -> t.Optional[int]:
        number, unit = counters.get(name, (0, False))
        return number // 1024 if unit else None

    def kib(name: str) -> t.Optional[int]:
        number, unit = counters.get(name, (0, False))
        return number if unit else None

    def pages(name: str) -> t.Optional[int]:
        if name not in counters or counters[name][1]:
            return None
        return counters[name][0]

    hugepages_total = pages("HugePages_Total")
    hugepage_size_kib = kib("Hugepagesize")
    # Hugetlb (4.20+) counts hugepages of every size; HugePages_Total only those of the default size.
    hugepages_mib = mib("Hugetlb")
    if hugepages_mib is None and hugepages_total is not None and hugepage_size_kib is not None:
        hugepages_mib = hugepages_total * hugepage_size_kib // 1024
    return HostMemory(
        mem_total_mib=mib("MemTotal"),
        mem_available_mib=mib("MemAvailable"),
        mem_free_mib=mib("MemFree"),
        buffers_mib=mib("Buffers"),
        cached_mib=mib("Cached"),
        shmem_mib=mib("Shmem"),
        sreclaimable_mib=mib("SReclaimable"),
        unevictable_mib=mib("Unevictable"),
        mlocked_mib=mib("Mlocked"),
        swap_total_mib=mib("SwapTotal"),
        swap_free_mib=mib("SwapFree"),
        hugepages_total=hugepages_total,
        hugepages_free=pages("HugePages_Free"),
        hugepage_size_kib=hugepage_size_kib,
        hugepages_mib=hugepages_mib,
    )


def read_meminfo(proc: str = "/proc") -> HostMemory:
    """Read ``<proc>/meminfo``. Never raises: of a file that can't be read every field is None."""
    return parse_meminfo(_read(os.path.join(proc, "meminfo")) or b"")


def _plausible_available(memory: HostMemory) -> t.Optional[int]:
    """MemAvailable, or, like procps, MemFree where it exceeds the total (half-virtualised containers)."""
    available, total, free = memory.mem_available_mib, memory.mem_total_mib, memory.mem_free_mib
    if available is None or total is None:
        return None  # without the total nobody can tell whether 'available' is one of the host's figures
    if available <= total:
        return available
    return None if free is None else min(free, total)


def available_mib(memory: HostMemory, cgroup: CgroupLimit) -> t.Optional[int]:
    """What a new process can get, in MiB: the smaller of MemAvailable and the cgroup's headroom.

    None when MemAvailable or MemTotal is not known. A cgroup that could not be read (``cgroup.readable`` is False) sets
    no bound here: whoever decides must look at that flag.
    """
    available = _plausible_available(memory)
    if available is None or cgroup.headroom_mib is None:
        return available
    return min(available, cgroup.headroom_mib)


def free_table(memory: HostMemory) -> str:
    """What ``free -g`` of procps 4 would print: GiB, rounded down, ``used`` being total - available.

    A figure that is not known is ``-``. The figures come from whole MiB, so one that lies within 3 MiB of a full GiB
    can differ from procps by 1.
    """

    def total_of(*parts: t.Optional[int]) -> t.Optional[int]:
        return sum(part for part in parts if part is not None) if None not in parts else None

    def less(total: t.Optional[int], part: t.Optional[int]) -> t.Optional[int]:
        return None if total is None or part is None else max(total - part, 0)

    def row(name: str, figures: t.Sequence[t.Optional[int]]) -> str:
        cells = ["-" if figure is None else str(figure // 1024) for figure in figures]
        return f"{name:<9}{cells[0]:>11}" + "".join(f" {cell:>11}" for cell in cells[1:])

    available = _plausible_available(memory)
    header = f"{'':<9}{'total':>11}" + "".join(
        f" {column:>11}" for column in ("used", "free", "shared", "buff/cache", "available")
    )
    ram = (
        memory.mem_total_mib,
        less(memory.mem_total_mib, available),
        memory.mem_free_mib,
        memory.shmem_mib,
        total_of(memory.buffers_mib, memory.cached_mib, memory.sreclaimable_mib),
        available,
    )
    swap = (memory.swap_total_mib, less(memory.swap_total_mib, memory.swap_free_mib), memory.swap_free_mib)
    return "\n".join((header, row("Mem:", ram), row("Swap:", swap)))


# --- the memory cgroup ---


@dataclass(frozen=True)
class _Level:
    """One cgroup on the way up. ``limit`` None: this level sets none. ``known`` False: it could not be read."""

    limit: t.Optional[int]
    current: t.Optional[int]
    headroom: t.Optional[int]
    known: bool


def _by_version(mounts: t.Sequence[CgroupMount]) -> tuple[list[CgroupMount], list[CgroupMount]]:
    """The cgroup2 mounts, and the cgroup v1 mounts that carry the memory controller."""
    unified = [mount for mount in mounts if mount.version == 2]
    return unified, [mount for mount in mounts if mount.version == 1 and "memory" in mount.controllers]


def _own_paths(cgroup: bytes) -> tuple[t.Optional[str], t.Optional[str]]:
    """Our cgroup in the unified and in v1's memory hierarchy, from /proc/self/cgroup (``id:controllers:path``)."""
    unified = memory = None
    for line in cgroup.split(b"\n"):
        parts = line.split(b":", 2)
        if len(parts) != 3:
            continue
        if parts[0] == b"0" and not parts[1]:
            unified = os.fsdecode(parts[2])
        elif b"memory" in parts[1].split(b","):
            memory = os.fsdecode(parts[2])
    return unified, memory


def _levels(mount: CgroupMount, path: str) -> t.Optional[list[str]]:
    """Our cgroup's path below the mount and those of its ancestors, ours first, the mount's root (``/``) last.

    A bind mount shows one cgroup as its root (Docker with v1: root ``/docker/ID``). None: our cgroup lies outside of
    what is mounted (``/../other`` after entering a container from outside), so that it can't be found.
    """
    below = path
    if mount.root != "/":
        if path != mount.root and not path.startswith(mount.root.rstrip("/") + "/"):
            return None
        below = path[len(mount.root) :]
    parts = [part for part in below.split("/") if part]
    if not path.startswith("/") or ".." in parts or ".." in mount.root.split("/"):
        return None
    return ["/" + "/".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _limit_file(directory: str, name: str) -> tuple[t.Optional[int], bool]:
    """``(bytes or None, readable)``. Absent, as in the root or without the controller, is no limit."""
    try:
        with open(os.path.join(directory, name), "rb") as stream:
            text = stream.read(64).strip()
    except FileNotFoundError:
        return None, True
    except (OSError, ValueError):
        return None, False
    if text == b"max":
        return None, True
    if not re.fullmatch(rb"\d{1,20}", text):
        return None, False
    number = int(text)
    return (None if number >= _NO_LIMIT_BYTES else number), True


def _stat_numbers(directory: str) -> t.Optional[dict[bytes, int]]:
    data = _read(os.path.join(directory, "memory.stat"))
    if data is None:
        return None
    return {match.group(1): int(match.group(2)) for match in re.finditer(rb"(?m)^(\w{1,60}) (\d{1,20})$", data)}


def _level(directory: str, version: int) -> _Level:
    """The limit of one cgroup in bytes, what it uses, and what it could still give (file pages can be reclaimed)."""
    limit_files = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    current_file, prefix = ("memory.current", b"") if version == 2 else ("memory.usage_in_bytes", b"total_")
    readings = [_limit_file(directory, name) for name in limit_files]
    current, _readable = _limit_file(directory, current_file)
    limits = [limit for limit, _readable in readings if limit is not None]
    known = all(readable for _limit, readable in readings)
    stat = _stat_numbers(directory)
    if version == 1 and stat is not None:
        # v1 also tells the tightest limit of the ancestors, even of those that a cgroup namespace hides.
        inherited = stat.get(b"hierarchical_memory_limit")
        if inherited is not None and inherited < _NO_LIMIT_BYTES:
            limits.append(inherited)
    if not limits:
        return _Level(None, current, None, known)
    limit = min(limits)
    if current is None or stat is None:
        return _Level(limit, current, None, False)
    reclaimable = 0
    for name in (b"active_file", b"inactive_file"):
        reclaimable += stat.get(prefix + name, stat.get(name, 0))
    return _Level(limit, current, min(max(limit - current + reclaimable, 0), limit), known)


def read_cgroup_limit(proc: str = "/proc", sys: str = "/sys") -> CgroupLimit:
    """The memory limit that binds the calling process first, of all levels above it that can be seen.

    cgroup v2 (the lower of memory.max and memory.high), v1's memory controller, and hybrid hosts, where the controller
    is in one of the two. ``headroom`` is limit - current + active_file + inactive_file. Of several limits the one with
    the least headroom is told: a wide limit of a slice that is shared can bind before a narrow one.

    Inside a cgroup namespace the levels above its root are hidden (in an LXC container of Proxmox the limit sits one
    level higher): no limit seen is not a promise, and lxcfs then tells it through MemTotal and MemAvailable.
    """
    membership = _read(os.path.join(proc, "self", "cgroup"))
    mountinfo = _read(os.path.join(proc, "self", "mountinfo"))
    if membership is None or mountinfo is None:
        return CgroupLimit(None, None, None, None, None, readable=False)
    unified_path, memory_path = _own_paths(membership)
    unified_mounts, memory_mounts = _by_version(parse_mounts(mountinfo, sys))
    if memory_path is not None:
        version, path, mounts = 1, memory_path, memory_mounts
    elif unified_path is not None:
        version, path, mounts = 2, unified_path, unified_mounts
    else:
        # A file without any usable line says nothing; without the v1 controller and v2 there is no memory cgroup.
        return CgroupLimit(None, None, None, None, None, readable=re.match(rb"\d+:[^:\n]+:/", membership) is not None)
    return _tightest(version, path, mounts)


def read_guest_limit(vmid: str, proc: str = "/proc", sys: str = "/sys") -> CgroupLimit:
    """The memory limit that binds an LXC container of this node, of all levels from its own cgroup up."""
    mountinfo = _read(os.path.join(proc, "self", "mountinfo"))
    if mountinfo is None:
        return CgroupLimit(None, None, None, None, None, readable=False)
    unified, memory = _by_version(parse_mounts(mountinfo, sys))
    for version, mounts in ((1, memory), (2, unified)):
        for path in guest_paths(vmid):
            for mount in mounts:
                names = _levels(mount, path)
                if names is not None and _is_directory(mount.point + names[0]):
                    return _least_headroom(version, path, mount, names)
    return CgroupLimit(None, None, None, None, None, readable=False)


def _tightest(version: int, path: str, mounts: t.Sequence[CgroupMount]) -> CgroupLimit:
    for mount in mounts:
        names = _levels(mount, path)
        if names is not None and _is_directory(mount.point + names[0]):
            return _least_headroom(version, path, mount, names)
    # Our own cgroup is out of sight; what is mounted is at least the root of the container that we look at.
    for mount in mounts:
        root = _least_headroom(version, path, mount, ["/"])
        if root.limit_mib is not None:
            return root
    return CgroupLimit(version, path, None, None, None, readable=False)


def _is_directory(path: str) -> bool:
    try:
        return os.path.isdir(path)
    except ValueError:
        return False


def _least_headroom(version: int, own: str, mount: CgroupMount, names: t.Sequence[str]) -> CgroupLimit:
    levels = [(name, _level(mount.point + name, version)) for name in names]
    known = all(level.known for _name, level in levels)
    limited = [(name, level) for name, level in levels if level.limit is not None]
    if not limited:
        return CgroupLimit(version, own, None, _mib(levels[0][1].current), None, readable=known)

    def tightness(item: tuple[str, _Level]) -> tuple[int, int]:
        level = item[1]
        limit = level.limit or 0
        return (limit if level.headroom is None else level.headroom, limit)

    name, level = min(limited, key=tightness)
    return CgroupLimit(
        version=version,
        path=name,
        limit_mib=_mib(level.limit),
        current_mib=_mib(level.current),
        headroom_mib=_mib(level.headroom),
        readable=known,
    )


def _mib(size: t.Optional[int]) -> t.Optional[int]:
    return None if size is None else size // _MIB


# --- memory that processes keep pinned ---


@dataclass(frozen=True)
class PinnedMemory:
    """What one process keeps in RAM, in MiB; None where /proc/PID/status does not tell.

    SGLang's host pool (HiCache) is registered with CUDA: it shows as RssShmem, while VmPin and VmLck stay 0 (measured
    on an H200: 9,819,8xx kB of RssShmem per rank for a pool of 10 GB). Other ways of pinning show in the other two.
    """

    pid: int
    title: str
    rss_shmem_mib: t.Optional[int]
    vm_pin_mib: t.Optional[int]
    vm_lck_mib: t.Optional[int]

    @property
    def pinned_mib(self) -> t.Optional[int]:
        """The largest of the three, since the same pages can count in each; None if none is known."""
        known = [size for size in (self.rss_shmem_mib, self.vm_pin_mib, self.vm_lck_mib) if size is not None]
        return max(known) if known else None


def parse_status_memory(pid: int, title: str, data: bytes) -> PinnedMemory:
    """Take RssShmem, VmPin and VmLck from the text of /proc/PID/status."""
    counters = _counters(data)

    def mib(name: str) -> t.Optional[int]:
        number, unit = counters.get(name, (0, False))
        return number // 1024 if unit else None

    return PinnedMemory(pid, title, mib("RssShmem"), mib("VmPin"), mib("VmLck"))


def read_pinned(
    processes: t.Iterable[Process],
    proc: str = "/proc",
    title_of: t.Callable[[Process], str] = lambda process: process.title,
) -> tuple[PinnedMemory, ...]:
    """Pinned memory of these processes, by pid. One that ended meanwhile is left out; an unreadable one has None."""
    found = []
    for process in processes:
        try:
            with open(os.path.join(proc, str(process.pid), "status"), "rb") as stream:
                data = stream.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            data = b""
        found.append(parse_status_memory(process.pid, title_of(process), data))
    return tuple(sorted(found, key=lambda pins: pins.pid))
