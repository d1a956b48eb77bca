# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Short ways to make the values that decisions are made of: processes, GPUs, snapshots, facts. Everything is idle and
clean unless said otherwise.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.clean import Facts, Sample
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.holders import find_holders
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import (
    CgroupLimit,
    DeviceScan,
    DeviceUse,
    Gpu,
    GpuMemory,
    GpuReading,
    HostMemory,
    NvmlProcess,
    Process,
    ShmReading,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Leader, Snapshot

BOOT = "boot-1"
OWN = 9000
PYTHON = "/usr/bin/python3.11"
LEADER = ("/usr/bin/python3", "-m", "sglang.launch_server", "--port", "30000")


def process(pid: int, argv: str | t.Sequence[str] = ("python3", "x.py"), **changes: t.Any) -> Process:
    """A sleeping Python process that leads its own session; ``argv`` a string: a rewritten title."""
    words = (argv,) if isinstance(argv, str) else tuple(argv)
    values: dict[str, t.Any] = {
        "pid": pid,
        "start_ticks": 1000 + pid,
        "ppid": 1,
        "pgid": pid,
        "sid": pid,
        "state": "S",
        "comm": (words[0].rsplit("/", 1)[-1] if words else "x")[:15],
        "argv": words,
        "uid": 1000,
        "exe": PYTHON,
        "nspid": (pid,),
    }
    return Process(**{**values, **changes})


def init() -> Process:
    return process(1, "/sbin/init", ppid=0, exe="/sbin/init")


def memory(used_mib: int | None = 0, **changes: t.Any) -> GpuMemory:
    values: dict[str, t.Any] = {
        "total_mib": 143_771,
        "used_mib": used_mib,
        "reserved_mib": 615,
        "free_mib": None if used_mib is None else 143_156 - used_mib,
        "api": "v2",
        "used_excludes_reserved": True,
    }
    return GpuMemory(**{**values, **changes})


def gpu(index: int = 0, used_mib: int | None = 0, listed: t.Sequence[int] = (), **changes: t.Any) -> Gpu:
    """A GPU whose driver lists ``listed``."""
    values: dict[str, t.Any] = {
        "index": index,
        "uuid": f"GPU-{index}",
        "bus_id": f"00000000:{index + 1:02X}:00.0",
        "minor": index,
        "name": "NVIDIA H200",
        "memory": memory(used_mib),
        "processes": tuple(NvmlProcess(pid, "compute", 100) for pid in listed),
        "mig_enabled": False,
    }
    return Gpu(**{**values, **changes})


def holds(pid: int, minor: int = 0) -> DeviceUse:
    return DeviceUse(pid, minor, fds=3, readable_kib=2048, write_only_kib=128)


def visits(pid: int, minor: int = 0) -> DeviceUse:
    return DeviceUse(pid, minor, fds=3, write_only_kib=128)


def leader(process: Process, port: int | None = 30000, **changes: t.Any) -> Leader:
    values: dict[str, t.Any] = {
        "process": process,
        "port": port,
        "visible_devices": None,
        "same_network": True,
        "unit": None,
        "container": None,
    }
    return Leader(**{**values, **changes})


def snapshot(
    *processes: Process,
    gpus: t.Sequence[Gpu] = (),
    uses: t.Sequence[DeviceUse] = (),
    leaders: t.Sequence[Leader] = (),
    chosen: t.Sequence[int] | None = None,
    unreadable: t.Sequence[int] = (),
    protect: t.Sequence[str] = (),
    units: t.Mapping[int, str] | None = None,
    **changes: t.Any,
) -> Snapshot:
    """What one look found; ``chosen``: the indices of the chosen GPUs (all)."""
    everybody = {one.pid: one for one in (init(), *processes)}
    scan = DeviceScan(tuple(uses), tuple(unreadable), len(everybody), 0.0)
    own = frozenset({OWN, 1})
    reading = changes.pop("reading", GpuReading("nvml", tuple(gpus)))
    values: dict[str, t.Any] = {
        "processes": everybody,
        "reading": reading,
        "gpus": tuple(one for one in reading.gpus or () if chosen is None or one.index in chosen),
        "scan": scan,
        "holders": {
            one.index: find_holders(one, scan, everybody, own, protect, units or {}, reading.simulated)
            for one in reading.gpus or ()
        },
        "leaders": tuple(leaders),
        "units": units or {},
        "own_pids": own,
        "boot_id": BOOT,
    }
    return Snapshot(**{**values, **changes})


def host_memory(available_mib: int | None = 400_000) -> HostMemory:
    fields: dict[str, t.Any] = {field.name: 0 for field in dataclasses.fields(HostMemory)}
    return HostMemory(**{**fields, "mem_total_mib": 460_000, "mem_available_mib": available_mib})


def shm(free_mib: int | None = 10_000, **changes: t.Any) -> ShmReading:
    return ShmReading(
        **{"path": "/dev/shm", "total_mib": 16_000, "free_mib": free_mib, "free_inodes": 9, "files": (), **changes}
    )


def facts(seen: Snapshot | None = None, **changes: t.Any) -> Facts:
    """Facts of an idle host (or of ``seen``), with three samples that say what the snapshot says."""
    seen = seen or snapshot(gpus=[gpu()])
    sample = Sample(
        0.0,
        {one.index: one.memory.used_mib if one.memory else None for one in seen.gpus},
        {one.index: tuple(x.pid for x in seen.holders[one.index].holders if not x.protected) for one in seen.gpus},
    )
    values: dict[str, t.Any] = {
        "vantage": "host",
        "snapshot": seen,
        "samples": (sample, sample, sample),
        "memory": host_memory(),
        "cgroup": CgroupLimit(2, "/", None, None, None, True),
        "available_mib": 400_000,
        "shm": shm(),
        "leftovers": (),
        "ports": (),
    }
    return Facts(**{**values, **changes})
