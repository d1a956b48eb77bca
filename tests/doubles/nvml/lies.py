# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ways in which NVML misleads, each as the state lines that make it, with the report that it stems from.

"Measured" is one or two H200s with driver 580.159.04. "Not seen" marks what follows from documentation or source only.
GPU lines come from the caller; these lines are added after them.
"""

from __future__ import annotations

import typing as t

from .double import NA, Fault, Field, Gpu, Hold, Line, Mig, System

SUCCESS = 0
NOT_SUPPORTED = 3
NO_PERMISSION = 4
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
UNKNOWN = 999

Lines = tuple[Line, ...]


# ---- the whole driver ----


def init_fails(code: int) -> Lines:
    """9 not loaded, 12 library missing, 4 no permission, 999 unknown.

    999 in a container while the host is fine: the device cgroup was lost (nvidia-container-toolkit#48, #1227).
    """
    return (Fault("nvmlInit*", code=code),)


def version_mismatch(client: str = "580.159.04") -> Lines:
    """The library is newer than the loaded kernel module (nvidia-docker#182: client 367.44, module 367.35)."""
    return (System(driver=client, nvml=f"13.{client}"), Fault("nvmlInit*", code=LIB_RM_VERSION_MISMATCH))


def hangs(call: str = "*", gpu: t.Optional[int] = None) -> Lines:
    """Every call blocks, in state D in the field (open-gpu-kernel-modules#1333); here it sleeps and can be killed."""
    return (Fault(call, gpu=gpu, hang=True),)


def slow(milliseconds: int, call: str = "*") -> Lines:
    """GSP calls that each take their timeout, one after the other (open-gpu-kernel-modules#446: 45 s)."""
    return (Fault(call, slow_ms=milliseconds),)


# ---- one GPU ----


def no_handle(gpu: int, code: int = UNKNOWN) -> Lines:
    """Counted, but without a handle: 999 (nvidia-docker#1553), 15 lost (Xid 79), 16 reset required (not seen)."""
    return (Fault("nvmlDeviceGetHandleBy*", gpu=gpu, code=code),)


def falls_off(gpu: int) -> Lines:
    """Everything about this GPU says that it is lost (Xid 79, 'GPU is lost')."""
    return (Fault("nvmlDevice*", gpu=gpu, code=GPU_IS_LOST, until_reset=True),)


def unified_memory(gpu: int) -> Lines:
    """GB10 and Jetson share the host's RAM: no memory figures, v1 or v2 (gpud#1170)."""
    return (Fault("nvmlDeviceGetMemoryInfo*", gpu=gpu, code=NOT_SUPPORTED),)


def without_memory_v2(gpu: t.Optional[int] = None) -> Lines:
    """The call answers Function Not Found. Where the symbol is missing altogether: Variant.WITHOUT_MEMORY_V2."""
    return (Fault("nvmlDeviceGetMemoryInfo_v2", gpu=gpu, code=FUNCTION_NOT_FOUND),)


def processes_forbidden(gpu: int) -> Lines:
    """The parent of MIG instances lists processes only for privileged callers (driver source; not seen)."""
    return (Fault("nvmlDeviceGet*RunningProcesses*", gpu=gpu, code=NO_PERMISSION),)


def list_grows_meanwhile(gpu: int, times: int = 1) -> Lines:
    """More processes came between the two calls: the second says Insufficient Size again (nvidia-ml-py raises it)."""
    call = "nvmlDeviceGetComputeRunningProcesses_v3"
    return (Fault(call, gpu=gpu, code=INSUFFICIENT_SIZE, after=1, times=times),)


def busy_when_idle(index: int) -> Gpu:
    """100 % utilisation, 0 MiB, no process, after a kill in mid-kernel on Blackwell (lium-io#1142)."""
    return Gpu(index, util=100, cc="12.0")


def pending_retirement(index: int) -> Gpu:
    """Pages wait for a reset to be retired: chips before Ampere (nvml.h)."""
    return Gpu(index, cc="7.0", retired_pending=1, remap_cor=NA, remap_unc=NA, remap_pending=NA, remap_failure=NA)


def remap_failed(index: int) -> Gpu:
    """A row could not be remapped: the board must go back (gpud's remapped rows component)."""
    return Gpu(index, remap_unc=1, remap_failure=1)


def remap_pending(index: int) -> Gpu:
    """A row waits for a reset to be remapped."""
    return Gpu(index, remap_unc=1, remap_pending=1)


def wants(index: int, recovery: int) -> Gpu:
    """Recovery action: 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset (field 230)."""
    return Gpu(index, recovery=recovery)


def field_fails(gpu: int, field: int, code: int = UNKNOWN) -> Lines:
    """The call succeeds, this one field doesn't (each field value carries its own code)."""
    return (Field(gpu, field, code=code),)


def rebounds(index: int, *mib: int) -> Gpu:
    """Memory that comes back between samples: a crash-looping server caught between respawns (imp#1529)."""
    return Gpu(index, extra_mib_seq=mib)


# ---- processes ----


def dead_pid(gpu: int, pid: int, mib: int) -> Lines:
    """The listed pid does not exist and the memory stays (VisEdit#5: 10,151 MiB, 'no such process')."""
    return (Hold(gpu, mib=mib, always=True, pid=pid),)


def forked_orphan(gpu: int, parent: int, child: int, mib: int) -> Lines:
    """The child keeps what its dead parent allocated; NVML lists the parent, not the child (measured; EgoVerse#682)."""
    return (Hold(gpu, mib=mib, pid=parent, kept_by=(child,)),)


def held_elsewhere(gpu: int, mib: int) -> Lines:
    """Memory in use, nobody listed: the process is in another PID namespace (measured; drivers from 535.113)."""
    return (Hold(gpu, mib=mib, always=True, listed="no"),)


def foreign_pids(gpu: int, mib: int, *pids: int) -> Lines:
    """Inside a container: the host's pids, somebody else here (nvidia-docker#1483; drivers up to 535.104)."""
    return (Hold(gpu, mib=mib, always=True, list_pid=pids),)


def no_figure(gpu: int, pid: int, mib: int) -> Lines:
    """The row's memory is N/A (2^64-1): Windows' WDDM, MIG without rights (nvml.h)."""
    return (Hold(gpu, mib=mib, pid=pid, listed="na"),)


def managed_memory(gpu: int, pid: int, mib: int, list_mib: int) -> Lines:
    """cudaMallocManaged is missing from the rows: 60 GB show as 5 (pynvml#63)."""
    return (Hold(gpu, mib=mib, pid=pid, list_mib=list_mib),)


def listed_twice(gpu: int, pid: int, mib: int) -> Lines:
    """Inside a container the same pid may come twice (driver source; not seen)."""
    return (Hold(gpu, mib=mib, pid=pid, list_pid=(pid, pid)),)


def unpins_slowly(gpu: int, pid: int, mib: int, release_s: float) -> Lines:
    """Memory stays while the kernel unpins host memory, 0.22-0.24 s per GB (measured: 9.6 s for 40 GB)."""
    return (Hold(gpu, mib=mib, pid=pid, release_s=release_s, id=f"unpins-{gpu}-{pid}"),)


def mps_server(gpu: int, pid: int, mib: int) -> Lines:
    """The MPS server owns its clients' context and is listed as compute and MPS (sglang-omni#1635)."""
    return (Hold(gpu, mib=mib, pid=pid, type="compute,mps"),)


# ---- MIG ----


def mig_with_a_mute_instance(gpu: int, instances: int, mute: int) -> Lines:
    """Dead pids hold memory over MIG instances, and one query fails: null, never 0 (vllm-dashboard#182)."""
    parts: list[Line] = [Mig(gpu, number) for number in range(instances)]
    parts.append(Fault("nvmlDeviceGetMemoryInfo*", gpu=gpu, mig=mute, code=UNKNOWN))
    return tuple(parts)
