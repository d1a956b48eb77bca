# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Everything that one look at a host found, and the parts of it that name servers and their owners. Plain values."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from .model import DeviceScan, Gpu, GpuReading, Holder, Problem, Process


@dataclass(frozen=True)
class GpuHolders:
    """What is known of one GPU's users. ``stale_pids``: listed by the driver, but no such living process."""

    gpu_index: int
    holders: tuple[Holder, ...]
    visitors: tuple[Holder, ...]
    suspects: tuple[Holder, ...]
    stale_pids: tuple[int, ...]
    rule_holds: t.Optional[bool]


@dataclass(frozen=True)
class Unit:
    """What systemd says of a unit. ``main_pid`` 0: it has no running main process."""

    name: str
    main_pid: int
    restart: str
    active_state: str
    load_state: str
    control_group: str = ""


@dataclass(frozen=True)
class Stuck:
    """A process that SIGKILL does not end: state D, or R with SIGKILL pending, and the kernel function it waits in."""

    pid: int
    state: str
    wchan: t.Optional[str]


@dataclass(frozen=True)
class Guest:
    """An LXC container as its Proxmox node sees it, by its cgroup.

    ``state``: running, broken (processes without an init: nobody can attach), stopped or unknown. ``inits``: pid 1 of
    it, also of an earlier run that could not end. ``root_pid``: a living member through whose /proc/PID/root its files
    are found, and ``root_start`` its start time; ``depth``: at which place of NSpid its own pids stand; ``boot_id``:
    what its processes take for this boot (LXC gives each container one). ``device_minors``: the GPU nodes in its /dev;
    None: not known. ``uid_base``: what its uid 0 is outside. ``problems``: what could not be seen of it.
    """

    vmid: str
    state: str
    members: frozenset[int] = frozenset()
    inits: frozenset[int] = frozenset()
    init_pid: t.Optional[int] = None
    root_pid: t.Optional[int] = None
    root_start: t.Optional[int] = None
    depth: int = 2
    boot_id: t.Optional[str] = None
    uid_base: t.Optional[int] = None
    device_minors: t.Optional[frozenset[int]] = None
    stuck: tuple[Stuck, ...] = ()
    directories: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def label(self) -> str:
        return f"container {self.vmid}"

    def pid_inside(self, numbers: t.Sequence[int]) -> t.Optional[int]:
        """The container's own number among those of NSpid or NSsid; None for somebody outside of its PID namespace."""
        return numbers[self.depth - 1] if len(numbers) >= self.depth else None

    @property
    def unprivileged(self) -> t.Optional[bool]:
        return None if self.uid_base is None else self.uid_base != 0


@dataclass(frozen=True)
class Leader:
    """A running SGLang launcher and what ties it to a port, GPUs and an owner. None: could not be read.

    ``wrapper_pid``: the unit's main process where that is only a shell around this launcher. ``pci_bus_order``: whether
    it was told to count GPUs as the driver does (CUDA_DEVICE_ORDER=PCI_BUS_ID). ``device``, ``first_gpu`` and
    ``gpu_count``: what its flags say of the GPUs that it will take, counted among those that it sees.
    """

    process: Process
    port: t.Optional[int]
    visible_devices: t.Optional[str]
    same_network: t.Optional[bool]
    unit: t.Optional[Unit]
    container: t.Optional[str]
    pinned_gb_by_flags: float = 0.0
    wrapper_pid: t.Optional[int] = None
    pci_bus_order: bool = False
    device: t.Optional[str] = None
    first_gpu: t.Optional[int] = None
    gpu_count: t.Optional[int] = None

    @property
    def owns_unit(self) -> bool:
        """Whether systemd runs this very process, or a mere shell around it: only then is the unit (and its cgroup) the
        server's own.
        """
        return self.unit is not None and self.unit.main_pid in (self.process.pid, self.wrapper_pid or self.process.pid)


@dataclass(frozen=True)
class Snapshot:
    """What was seen at one moment. ``gpus`` are the chosen ones; ``holders`` covers every GPU by its index.

    ``guest``: the container that was asked for, seen from its node; None where the look is at our own surroundings.
    """

    processes: t.Mapping[int, Process]
    reading: GpuReading
    gpus: tuple[Gpu, ...]
    scan: DeviceScan
    holders: t.Mapping[int, GpuHolders]
    leaders: tuple[Leader, ...]
    units: t.Mapping[int, str]
    own_pids: frozenset[int]
    boot_id: t.Optional[str]
    own_container: t.Optional[str] = None
    own_guest: t.Optional[str] = None
    guest: t.Optional[Guest] = None
    problems: tuple[Problem, ...] = ()

    @property
    def simulated(self) -> bool:
        return self.reading.simulated
