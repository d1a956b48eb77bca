# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the host shows of a running server, for its proof: its processes, its GPUs, the flags that it was started with.
Nothing here asks the server itself, and every reading is bounded."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from ..decide.gpu_use import GpuUse, gpu_use, planned_gpus
from ..decide.kinship import descendants
from ..decide.workers import Worker, workers_of
from ..errors import CleanSlateError
from ..model import Process
from ..sglang.running import RunningFlags
from .bounded import fetch_launched, fetch_process, fetch_processes
from .devices import NVIDIA_MAJOR
from .look import LookOptions, look


@dataclass(frozen=True)
class Served:
    """The server that is looked at. ``gpus``: those of its record, by UUID or index; None: all that it sees.
    ``environment``: of the record, for CUDA_VISIBLE_DEVICES where no GPUs are recorded."""

    pid: int
    start_ticks: int
    flags: t.Mapping[str, t.Any]
    gpus: t.Optional[tuple[str, ...]] = None
    environment: t.Optional[t.Mapping[str, str]] = None


def look_at_workers(pid: int, start_ticks: int) -> t.Optional[tuple[Worker, ...]]:
    """The leader's tree. None: it can't be read. Empty: the leader is gone."""
    try:
        processes = fetch_processes()
    except CleanSlateError:
        return None
    leader = _leader(pid, start_ticks, processes)
    return () if leader is None else workers_of(leader, processes)


def look_at_gpus(
    served: Served, nvml_deadline_s: float, device_major: int = NVIDIA_MAJOR
) -> t.Optional[tuple[GpuUse, ...]]:
    """Who holds each planned GPU. None: the GPUs or the processes can't be read, or which ones were planned isn't
    known."""
    try:
        seen = look(LookOptions(nvml_deadline_s=nvml_deadline_s, device_major=device_major))
    except CleanSlateError:
        return None
    gpus = seen.reading.gpus
    leader = _leader(served.pid, served.start_ticks, seen.processes)
    if not gpus or leader is None:
        return None
    chosen = served.gpus
    if chosen is None:
        chosen = _visible(served.environment or {}, [gpu.uuid or str(gpu.index) for gpu in gpus])
    if chosen is None:
        return None
    tree = {leader.pid, *descendants(leader.pid, seen.processes)}
    return gpu_use(planned_gpus(served.flags, chosen), gpus, seen.holders, tree, seen.scan.unreadable)


def look_at_flags(pid: int, start_ticks: int) -> RunningFlags:
    """How the leader was started."""
    try:
        process = fetch_process(pid)
    except CleanSlateError as error:
        return RunningFlags(None, problem=str(error))
    if process is None or process.start_ticks != start_ticks:
        return RunningFlags(None, problem=f"pid {pid} has ended")
    launched, unknown = fetch_launched(process)
    problem = unknown or (None if launched.flags is not None else f"pid {pid} is no SGLang launcher")
    return RunningFlags(launched.flags, launched.options, problem)


def _leader(pid: int, start_ticks: int, processes: t.Mapping[int, Process]) -> t.Optional[Process]:
    process = processes.get(pid)
    return process if process is not None and process.start_ticks == start_ticks and not process.dead else None


def _visible(environment: t.Mapping[str, str], every: t.Sequence[str]) -> t.Optional[tuple[str, ...]]:
    """The GPUs that the variables leave, where they tell; CUDA's own order of numbers is not the driver's."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return tuple(every)
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    if all(name.startswith(("GPU-", "MIG-")) for name in names):
        return names
    return names if environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" else None
