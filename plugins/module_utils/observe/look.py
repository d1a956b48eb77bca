# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One look at a host: processes, GPUs, device nodes and the SGLang servers among the processes, taken together."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import typing as t
from dataclasses import dataclass

from ..cgroups import container_of, guest_of, unit_of, user_unit_of
from ..decide.gpus import choose_gpus
from ..decide.guests import choose_for_guest, guest_unit, refuse_indices
from ..decide.holders import find_holders
from ..decide.kinship import descendants
from ..decide.wrappers import wrapper_pid
from ..errors import CleanSlateError
from ..model import DeviceScan, Gpu, GpuReading, Holder, NvmlProcess, Problem, Process
from ..sglang.cmdline import is_leader, launched_flags
from ..snapshot import Guest, Leader, Snapshot, Unit
from ..spawn import fetch_bounded
from . import nvml, procfs
from .devices import NVIDIA_MAJOR, scan_devices
from .inside import read_inside
from .systemd import has_systemd, read_unit

SCAN_DEADLINE_S = 30.0
CONFIG_DEADLINE_S = 3.0
DEFAULT_PORT = 30000


@dataclass(frozen=True)
class LookOptions:
    """How to look: which GPUs, with which deadline and roots, and whom the operator protects.

    ``container``: look from the node at this LXC container. ``baseline_names``: GPUs that have a baseline.
    ``pinned``: the GPUs that an earlier look chose, by UUID or bus id: what the container says of them may be gone.
    """

    devices: tuple[str, ...] = ()
    expected_gpus: t.Optional[int] = None
    nvml_deadline_s: float = 10.0
    device_major: int = NVIDIA_MAJOR
    proc: str = "/proc"
    protect: tuple[str, ...] = ()
    systemctl_deadline_s: float = 10.0
    container: t.Optional[str] = None
    baseline_names: tuple[str, ...] = ()
    pinned: t.Optional[tuple[str, ...]] = None
    sys: str = "/sys"

    @property
    def without_gpus(self) -> bool:
        """A host that is declared to have no GPUs: none is asked for, and none is missed."""
        return self.expected_gpus == 0


NO_GPUS = GpuReading(source="none", gpus=())


def look(options: LookOptions) -> Snapshot:
    """Take one snapshot.

    Raises:
        UnknownDevice: a chosen GPU is not among those that the host shows.
        CleanSlateError: the processes can't be read, or a container is asked for where none can be seen.
    """
    if options.container is not None:
        from .guest import check_container

        check_container(options.container, options.proc)
    reading = NO_GPUS if options.without_gpus else nvml.read_gpus(options.nvml_deadline_s, options.proc)
    return look_with(options, reading)


def look_with(options: LookOptions, reading: GpuReading) -> Snapshot:
    """Like look, with a reading of the GPUs that was taken before."""
    processes, scan, leaders, guest = bounded_view(options)
    gpus = reading.gpus or ()
    chosen = () if options.without_gpus or reading.gpus is None else _choose(gpus, options, guest)
    units = {pid: unit for pid, one in processes.items() if (unit := unit_of(one) or user_unit_of(one))}
    own = own_pids(processes)
    holders = {
        gpu.index: find_holders(gpu, scan, processes, own, options.protect, units, reading.simulated) for gpu in gpus
    }
    me = processes.get(os.getpid())
    return Snapshot(
        processes=processes,
        reading=reading,
        gpus=chosen,
        scan=scan,
        holders=holders,
        leaders=leaders,
        units=units,
        own_pids=own,
        boot_id=procfs.read_boot_id(options.proc),
        own_container=container_of(me) if me else None,
        own_guest=guest_of(me) if me else None,
        guest=guest,
        problems=_hidden(processes, options.proc),
    )


def _hidden(processes: t.Mapping[int, Process], proc: str) -> tuple[Problem, ...]:
    """Every PID namespace has a process 1. Where it is not even listed, the mount option hidepid keeps the processes of
    others from us: they are in no list of those that can't be looked into, and whatever they hold is not seen.
    """
    if 1 in processes:
        return ()
    text = f"{proc} hides the processes of others (hidepid): run as root, or as a member of the group that sees them"
    return (Problem("list processes", None, text),)


def _choose(gpus: tuple[Gpu, ...], options: LookOptions, guest: t.Optional[Guest]) -> tuple[Gpu, ...]:
    if options.pinned is not None:
        return choose_gpus(gpus, options.pinned) if options.pinned else ()
    if guest is None:
        return choose_gpus(gpus, options.devices)
    refuse_indices("baselines", options.baseline_names, gpus, guest)
    return choose_for_guest(gpus, options.devices, guest)


View = tuple[dict[int, Process], DeviceScan, tuple[Leader, ...], t.Optional[Guest]]


def bounded_view(options: LookOptions) -> View:
    """All processes, their GPU nodes and the SGLang launchers among them, read in a child: a process that hangs in the
    kernel with its memory map locked blocks everybody who reads its command line or mappings.

    Raises:
        CleanSlateError: there was no answer in time; what runs here is then unknown.
    """
    called = fetch_bounded(lambda: _view(options), SCAN_DEADLINE_S)
    if called.ok:
        return t.cast(View, called.value)
    waits = called.stuck_wchan or "an unknown place"
    detail = called.error or f"no answer within {SCAN_DEADLINE_S:g} s (waits in {waits})"
    advice = "" if called.error else (
        " Look for a process in state D (ps -eo pid,stat,wchan,comm); where it can't be ended, a reboot is next."
    )  # fmt: skip
    raise CleanSlateError(
        f"the processes below {options.proc} can't be read: {detail}. Nothing was touched after that.{advice}"
    )


def _view(options: LookOptions) -> View:
    processes = procfs.read_processes(options.proc)
    scan = scan_devices(processes, options.proc, options.device_major)
    guest = None
    if options.container is not None:
        from .guest import read_guest  # every module that starts compiles what it loads

        guest = read_guest(options.container, processes, options.device_major, options.proc, options.sys)
    return processes, scan, find_leaders(processes, options, guest), guest


def still_listed(reading: GpuReading, then: t.Mapping[int, Process], proc: str = "/proc") -> GpuReading:
    """The reading without those rows of its process lists whose pid was given to another process since.

    ``then``: the processes as they were when the reading was taken. A row of a dead pid stays: it tells of memory.
    """

    def same(row: NvmlProcess) -> bool:
        stat = procfs.parse_stat(procfs.read_text(f"{proc}/{row.pid}/stat") or "")
        known = then.get(row.pid)
        return stat is None or (known is not None and known.start_ticks == stat["start_ticks"])

    def rows(found: t.Optional[tuple[NvmlProcess, ...]]) -> t.Optional[tuple[NvmlProcess, ...]]:
        return None if found is None else tuple(row for row in found if same(row))

    def prune(gpu: Gpu) -> Gpu:
        mig = tuple(dataclasses.replace(one, processes=rows(one.processes)) for one in gpu.mig)
        return dataclasses.replace(gpu, processes=rows(gpu.processes), mig=mig)

    return dataclasses.replace(reading, gpus=None if reading.gpus is None else tuple(map(prune, reading.gpus)))


def holds_now(process: Process, options: LookOptions, snapshot: Snapshot, reading: GpuReading) -> tuple[Holder, ...]:
    """What this one process holds of the snapshot's chosen GPUs at this moment. Nothing, where that can't be seen."""
    alone = {process.pid: process}
    called = fetch_bounded(lambda: scan_devices(alone, options.proc, options.device_major), SCAN_DEADLINE_S)
    if not called.ok:
        return ()
    scan: DeviceScan = called.value
    chosen = {gpu.index for gpu in snapshot.gpus}
    found = (
        find_holders(gpu, scan, alone, snapshot.own_pids, options.protect, snapshot.units, reading.simulated)
        for gpu in reading.gpus or ()
        if gpu.index in chosen
    )
    return tuple(holder for one in found for holder in one.holders)


def own_pids(processes: t.Mapping[int, Process]) -> frozenset[int]:
    """This process and all its ancestors: ending one of them ends the run, or the operator's session."""
    return frozenset([os.getpid(), *procfs.ancestors(os.getpid(), processes)])


def find_leaders(
    processes: t.Mapping[int, Process], options: LookOptions, guest: t.Optional[Guest] = None
) -> tuple[Leader, ...]:
    """All SGLang launchers, with their port as launched and their unit as systemd knows it; in a container that is
    looked at from outside, as its cgroup tells it. Our systemd knows nothing of a container's unit of the same name.
    """
    systemd = options.proc == "/proc" and has_systemd()
    configs = _Configs(options.proc)
    me = processes.get(os.getpid())
    own_guest = guest_of(me) if me else None
    units: dict[str, t.Optional[Unit]] = {}
    result = []
    for process in processes.values():
        if process.dead or not is_leader(process.argv):
            continue
        name = unit_of(process)
        if guest is not None and process.pid in guest.members:
            below = descendants(process.pid, processes)
            unit = guest_unit(process, processes, guest.inits, below)
            result.append(_leader(process, unit, None, options, configs, guest.init_pid or guest.root_pid))
            continue
        ours = guest is None and guest_of(process) == own_guest
        if name is not None and systemd and ours and name not in units:
            units[name] = read_unit(name, options.systemctl_deadline_s)
        unit = units.get(name) if name and ours else None
        wrapper = wrapper_pid(process, unit, processes)
        # Nobody of another place is ever selected, so its configuration file is none of our business.
        result.append(_leader(process, unit, wrapper, options, configs, with_config=ours))
    return tuple(result)


def _leader(
    process: Process,
    unit: t.Optional[Unit],
    wrapper: t.Optional[int],
    options: LookOptions,
    configs: _Configs,
    network_of: t.Optional[int] = None,
    with_config: bool = True,
) -> Leader:
    """``network_of``: whose network namespace the wanted ports are in; None: ours."""
    reader = configs.reader(process) if with_config else (lambda path: None)
    launched = launched_flags(process.argv, reader, cut=process.argv_cut)
    flags = launched.flags if launched else {}
    environment = procfs.read_environment(process.pid, options.proc) or {}
    complete = launched is not None and launched.complete
    port = flags.get("port", DEFAULT_PORT if complete else None)
    device = flags.get("device")
    first, count = _gpus_by_flags(flags) if complete else (None, None)
    return Leader(
        process=process,
        port=_port(port),
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
        same_network=_same_network(process.pid, options.proc, "self" if network_of is None else str(network_of)),
        unit=unit,
        container=container_of(process),
        pinned_gb_by_flags=_pinned_by_flags(flags),
        wrapper_pid=wrapper,
        pci_bus_order=environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID",
        device=device if isinstance(device, str) else None,
        first_gpu=first,
        gpu_count=count,
    )


def _port(value: t.Any) -> t.Optional[int]:
    """Never made a text of: a configuration may hold structures that grow without end, and endless numbers."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value <= 65535 else None
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,5}", value) else None


def _gpus_by_flags(flags: t.Mapping[str, t.Any]) -> tuple[t.Optional[int], t.Optional[int]]:
    """The first GPU that a launcher with these flags takes, and how many from there on; both None where they don't
    tell. Counted among the GPUs that it sees. With a step, the GPUs that it steps over are in the count.

    Each data parallel replica has GPUs of its own, unless only attention is data parallel (SGLang's
    data_parallel_controller.py: base_gpu_id += tp_size * gpu_id_step). Servers that generate images count by num-gpus.
    """
    if "num-gpus" in flags:
        return None, None
    try:
        first, step = int(flags.get("base-gpu-id", 0)), int(flags.get("gpu-id-step", 1))
        ranks = int(flags.get("tp-size", 1)) * int(flags.get("pp-size", 1))
        if not flags.get("enable-dp-attention"):
            ranks *= int(flags.get("dp-size", 1))
        nodes = int(flags.get("nnodes", 1))
    except (TypeError, ValueError, OverflowError):
        return None, None
    if first < 0 or min(step, ranks, nodes) < 1:
        return None, None
    return first, -(-ranks // nodes) * step


def _pinned_by_flags(flags: t.Mapping[str, t.Any]) -> float:
    """GB (1e9) of host memory that the flags ask to pin: hicache-size counts for each rank (facts of SGLang >= 0.5.0).
    """
    try:
        ranks = int(flags.get("tp-size", 1)) * int(flags.get("pp-size", 1))
        size = float(flags.get("hicache-size", 0)) * ranks if flags.get("enable-hierarchical-cache") else 0.0
        return size if math.isfinite(size) else 0.0
    except (TypeError, ValueError, OverflowError):
        return 0.0


class _Configs:
    """Launchers' configuration files, each read in a child with a deadline of its own: one on a dead file server must
    not hide the processes. After a hang nobody's is read any more; what they set is then not known.
    """

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._hung = False

    def reader(self, process: Process) -> t.Callable[[str], t.Optional[str]]:
        read = _config_reader(process, self._proc)

        def bounded(path: str) -> t.Optional[str]:
            if self._hung:
                return None
            called = fetch_bounded(lambda: read(path), CONFIG_DEADLINE_S)
            self._hung = called.timed_out
            return t.cast("t.Optional[str]", called.value) if called.ok else None

        return bounded


def _config_reader(process: Process, proc: str) -> t.Callable[[str], t.Optional[str]]:
    def read(path: str) -> t.Optional[str]:
        absolute = path if path.startswith("/") else f"{_cwd(process.pid, proc)}/{path}"
        return read_inside(process.pid, absolute, proc, start_ticks=process.start_ticks)

    return read


def _cwd(pid: int, proc: str) -> str:
    try:
        return os.readlink(f"{proc}/{pid}/cwd")
    except OSError:
        return ""


def _same_network(pid: int, proc: str, other: str) -> t.Optional[bool]:
    try:
        return os.readlink(f"{proc}/{pid}/ns/net") == os.readlink(f"{proc}/{other}/ns/net")
    except OSError:
        return None
