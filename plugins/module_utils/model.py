# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What was seen on a host, as plain values.

Sizes are MiB (2**20 bytes) where the name ends in ``_mib``. A field that could not be read is ``None``, never zero: a
decision that needs it then says ``unknown``. Times ending in ``_s`` are seconds; ``start_ticks`` is field 22 of
/proc/PID/stat (clock ticks since boot), which together with the pid names one process for the life of a boot.
"""

from __future__ import annotations

import dataclasses
import typing as t
from dataclasses import dataclass, field

Severity = str  # "required" | "advisory" | "warning"


def to_json(value: t.Any) -> t.Any:
    """Turn dataclasses, tuples and sets into what a module can return; shapes are kept, ``None`` stays ``None``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, t.Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(to_json(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


@dataclass(frozen=True)
class Problem:
    """One query that failed: which call, the library's code, and its words."""

    call: str
    code: t.Optional[int]
    message: str


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU. ``api`` says who spoke: v2, v1, nvidia-smi or none.

    v1's ``used`` includes the driver's reserved part (615 MiB on an idle H200); ``used_excludes_reserved`` tells them
    apart. ``unified`` marks GPUs without memory of their own (GB10, Jetson), where the host's RAM counts.
    """

    total_mib: t.Optional[int]
    used_mib: t.Optional[int]
    reserved_mib: t.Optional[int]
    free_mib: t.Optional[int]
    api: str
    used_excludes_reserved: bool
    unified: bool = False


@dataclass(frozen=True)
class NvmlProcess:
    """A row of the driver's process list. ``used_mib`` is None where the driver answers N/A."""

    pid: int
    kind: str
    used_mib: t.Optional[int]
    gpu_instance: t.Optional[int] = None
    compute_instance: t.Optional[int] = None


@dataclass(frozen=True)
class GpuHealth:
    """What the driver says of a GPU's health; None where this GPU or driver does not answer."""

    retired_pages_pending: t.Optional[bool] = None
    remap_pending: t.Optional[bool] = None
    remap_failure: t.Optional[bool] = None
    recovery_action: t.Optional[str] = None
    throttle_reasons: tuple[str, ...] = ()
    utilization_percent: t.Optional[int] = None
    persistence_mode: t.Optional[bool] = None


@dataclass(frozen=True)
class MigInstance:
    """One MIG slice of a GPU, with its own memory and its own errors."""

    uuid: t.Optional[str]
    memory: t.Optional[GpuMemory]
    processes: t.Optional[tuple[NvmlProcess, ...]]
    errors: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver tells it. ``processes`` is None when the list could not be had: that is not 'none'."""

    index: int
    uuid: t.Optional[str] = None
    bus_id: t.Optional[str] = None
    minor: t.Optional[int] = None
    name: t.Optional[str] = None
    compute_capability: t.Optional[str] = None
    memory: t.Optional[GpuMemory] = None
    processes: t.Optional[tuple[NvmlProcess, ...]] = None
    health: GpuHealth = field(default_factory=GpuHealth)
    mig_enabled: t.Optional[bool] = None
    mig: tuple[MigInstance, ...] = ()
    errors: tuple[Problem, ...] = ()

    @property
    def label(self) -> str:
        """How people name this GPU in a message."""
        return f"GPU {self.index}" + (f" ({self.bus_id})" if self.bus_id else "")


@dataclass(frozen=True)
class GpuReading:
    """One look at all GPUs. ``source``: nvml, nvidia-smi or none. ``gpus`` is None when not even the count was had."""

    source: str
    gpus: t.Optional[tuple[Gpu, ...]]
    driver_version: t.Optional[str] = None
    nvml_version: t.Optional[str] = None
    cuda_driver_version: t.Optional[str] = None
    kernel_module_version: t.Optional[str] = None
    library: t.Optional[str] = None
    simulated: bool = False
    problems: tuple[Problem, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Process:
    """One process as /proc shows it. Unreadable parts are None."""

    pid: int
    start_ticks: int
    ppid: int
    pgid: int
    sid: int
    state: str
    comm: str
    argv: tuple[str, ...]
    uid: t.Optional[int] = None
    exe: t.Optional[str] = None
    threads: int = 1
    cgroups: tuple[str, ...] = ()
    nspid: tuple[int, ...] = ()
    nssid: tuple[int, ...] = ()
    kill_pending: bool = False
    rss_shmem_mib: t.Optional[int] = None
    kernel_thread: bool = False
    task_states: tuple[str, ...] = ()
    argv_cut: bool = False  # its command line is longer than what was read of it

    @property
    def title(self) -> str:
        """The command line as people see it in ps; the comm in brackets where there is none."""
        text = " ".join(part for part in self.argv if part).strip()
        return text if text else f"[{self.comm}]"

    @property
    def key(self) -> tuple[int, int]:
        """Names this very process: a reused pid has another start time."""
        return (self.pid, self.start_ticks)

    @property
    def inner_pid(self) -> t.Optional[int]:
        """Its pid in its own PID namespace, where that lies below ours."""
        return self.nspid[-1] if len(self.nspid) > 1 else None

    @property
    def dead(self) -> bool:
        """A zombie without living threads: it holds nothing and can't be signalled."""
        return self.state in ("Z", "X") and self.threads <= 1


@dataclass(frozen=True)
class DeviceUse:
    """How one process uses one GPU's device node."""

    pid: int
    minor: int
    fds: int = 0
    readable_kib: int = 0
    write_only_kib: int = 0


@dataclass(frozen=True)
class DeviceScan:
    """All uses of GPU nodes that could be seen. ``unreadable`` lists live pids whose fds or maps were refused."""

    uses: tuple[DeviceUse, ...]
    unreadable: tuple[int, ...]
    processes: int
    seconds: float

    @property
    def complete(self) -> bool:
        return not self.unreadable


@dataclass(frozen=True)
class Holder:
    """A process tied to a GPU, with the evidence. ``role``: holder, visitor or suspect."""

    gpu_index: int
    process: t.Optional[Process]
    pid: int
    role: str
    evidence: tuple[str, ...]
    protected: t.Optional[str] = None


@dataclass(frozen=True)
class Reason:
    """Why a verdict is what it is: a code for programs, a sentence for people.

    A ``required`` reason fails the verdict: ``means`` says whether as dirty or as unknown. ``warning`` and ``advisory``
    reasons only come along.
    """

    code: str
    message: str
    subject: str
    severity: Severity = "required"
    means: str = "dirty"


@dataclass(frozen=True)
class Verdict:
    """``state``: clean, dirty or unknown. Dirty outranks unknown; both fail."""

    state: str
    reasons: tuple[Reason, ...]
    warnings: tuple[Reason, ...]
    summary: str


@dataclass(frozen=True)
class HostMemory:
    """/proc/meminfo in MiB; hugepages apart, since HugePages_Free is not MemAvailable."""

    mem_total_mib: t.Optional[int]
    mem_available_mib: t.Optional[int]
    mem_free_mib: t.Optional[int]
    buffers_mib: t.Optional[int]
    cached_mib: t.Optional[int]
    shmem_mib: t.Optional[int]
    sreclaimable_mib: t.Optional[int]
    unevictable_mib: t.Optional[int]
    mlocked_mib: t.Optional[int]
    swap_total_mib: t.Optional[int]
    swap_free_mib: t.Optional[int]
    hugepages_total: t.Optional[int]
    hugepages_free: t.Optional[int]
    hugepage_size_kib: t.Optional[int]
    hugepages_mib: t.Optional[int]


@dataclass(frozen=True)
class CgroupLimit:
    """The tightest memory limit above this process. ``limit_mib`` None: no limit; ``readable`` False: not known."""

    version: t.Optional[int]
    path: t.Optional[str]
    limit_mib: t.Optional[int]
    current_mib: t.Optional[int]
    headroom_mib: t.Optional[int]
    readable: bool


@dataclass(frozen=True)
class ShmFile:
    """One file below /dev/shm, with who made it and who maps it. ``device`` and ``inode`` name it for a later removal.
    """

    name: str
    size_mib: float
    uid: int
    mtime: float
    creator_pid: t.Optional[int]
    creator_alive: t.Optional[bool]
    mapped_by: tuple[int, ...]
    opened_by: tuple[int, ...]
    device: t.Optional[int] = None
    inode: t.Optional[int] = None


@dataclass(frozen=True)
class ShmReading:
    """/dev/shm: room, files, and files that are unlinked but still mapped. None: could not be read."""

    path: str
    total_mib: t.Optional[int]
    free_mib: t.Optional[int]
    free_inodes: t.Optional[int]
    files: t.Optional[tuple[ShmFile, ...]]
    deleted_mapped: tuple[tuple[str, int], ...] = ()
    scan_complete: bool = True
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class PortUse:
    """One socket on a local TCP port. ``state`` as the kernel names it: LISTEN, ESTABLISHED, TIME_WAIT, ...

    ``peer`` is the other end (``address:port``) of a connection. No ``pids``: no owner, or none that could be seen.
    """

    port: int
    address: str
    state: str
    inode: int
    pids: tuple[int, ...] = ()
    uid: t.Optional[int] = None
    peer: t.Optional[str] = None
