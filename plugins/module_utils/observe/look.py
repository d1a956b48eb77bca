# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One look at a host: processes, GPUs, device nodes and the SGLang servers among the processes, taken together."""

from __future__ import annotations

import os
import typing as t
from dataclasses import dataclass, field

from ..cgroups import container_of, unit_of
from ..decide.gpus import choose_gpus
from ..decide.holders import find_holders
from ..errors import CleanSlateError
from ..model import DeviceScan, DeviceUse, GpuReading, Process, to_json
from ..sglang.cmdline import is_leader, launched_flags
from ..snapshot import Leader, Snapshot, Unit
from ..spawn import call_bounded
from . import nvml, procfs
from .devices import NVIDIA_MAJOR, scan_devices
from .systemd import has_systemd, read_unit

SCAN_DEADLINE_S = 30.0
DEFAULT_PORT = 30000


@dataclass(frozen=True)
class LookOptions:
    """How to look: which GPUs, with which deadline and roots, and whom the operator protects."""

    devices: tuple[str, ...] = ()
    expected_gpus: t.Optional[int] = None
    nvml_deadline_s: float = 10.0
    device_major: int = NVIDIA_MAJOR
    proc: str = "/proc"
    protect: tuple[str, ...] = ()
    systemctl_deadline_s: float = 10.0
    extra: t.Mapping[str, t.Any] = field(default_factory=dict)

    @property
    def without_gpus(self) -> bool:
        """A host that is declared to have no GPUs: none is asked for, and none is missed."""
        return self.expected_gpus == 0


NO_GPUS = GpuReading(source="none", gpus=())


def look(options: LookOptions) -> Snapshot:
    """Take one snapshot.

    Raises:
        UnknownDevice: a chosen GPU is not among those that the host shows.
    """
    reading = NO_GPUS if options.without_gpus else nvml.read_gpus(options.nvml_deadline_s, options.proc)
    return look_with(options, reading)


def look_with(options: LookOptions, reading: GpuReading) -> Snapshot:
    """Like look, with a reading of the GPUs that was taken before."""
    processes, scan = bounded_view(options)
    gpus = reading.gpus or ()
    chosen = () if options.without_gpus or reading.gpus is None else choose_gpus(gpus, options.devices)
    units = {pid: unit for pid, process in processes.items() if (unit := unit_of(process))}
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
        leaders=find_leaders(processes, options),
        units=units,
        own_pids=own,
        boot_id=procfs.read_boot_id(options.proc),
        own_container=container_of(me) if me else None,
    )


def bounded_view(options: LookOptions) -> tuple[dict[int, Process], DeviceScan]:
    """All processes and their GPU nodes, read in a child: a process that hangs in the kernel with its memory map locked
    blocks everybody who reads its command line or mappings.

    Raises:
        CleanSlateError: there was no answer in time; what runs here is then unknown.
    """
    called = call_bounded(lambda: _view(options), SCAN_DEADLINE_S)
    if not called.ok:
        detail = called.error or f"no answer within {SCAN_DEADLINE_S:g} s (waits in {called.stuck_wchan or 'an unknown place'})"
        raise CleanSlateError(
            f"the processes below {options.proc} can't be read: {detail}. Nothing was touched after that. Look for a process "
            f"in state D (ps -eo pid,stat,wchan,comm); where it can't be ended, a reboot is the next step."
        )
    processes = {row["pid"]: process_from_json(row) for row in called.value["processes"]}
    data = called.value["scan"]
    uses = tuple(DeviceUse(**use) for use in data["uses"])
    return processes, DeviceScan(uses, tuple(data["unreadable"]), data["processes"], data["seconds"])


def _view(options: LookOptions) -> dict[str, t.Any]:
    processes = procfs.read_processes(options.proc)
    scan = scan_devices(processes, options.proc, options.device_major)
    return {"processes": [to_json(process) for process in processes.values()], "scan": to_json(scan)}


def process_from_json(row: t.Mapping[str, t.Any]) -> Process:
    """A process back from what to_json made of it."""
    return Process(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})


def own_pids(processes: t.Mapping[int, Process]) -> frozenset[int]:
    """This process and all its ancestors: ending one of them ends the run, or the operator's session."""
    return frozenset([os.getpid(), *procfs.ancestors(os.getpid(), processes)])


def find_leaders(processes: t.Mapping[int, Process], options: LookOptions) -> tuple[Leader, ...]:
    """All SGLang launchers, with their port as launched and their unit as systemd knows it."""
    systemd = options.proc == "/proc" and has_systemd()
    units: dict[str, t.Optional[Unit]] = {}
    result = []
    for process in processes.values():
        if process.dead or not is_leader(process.argv):
            continue
        name = unit_of(process)
        if name is not None and systemd and name not in units:
            units[name] = read_unit(name, options.systemctl_deadline_s)
        result.append(_leader(process, units.get(name) if name else None, options))
    return tuple(result)


def _leader(process: Process, unit: t.Optional[Unit], options: LookOptions) -> Leader:
    launched = launched_flags(process.argv, _config_reader(process, options.proc))
    flags = launched.flags if launched else {}
    environment = procfs.read_environment(process.pid, options.proc) or {}
    port = flags.get("port", DEFAULT_PORT if launched and launched.complete else None)
    return Leader(
        process=process,
        port=int(port) if str(port).isdigit() else None,
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
        same_network=_same_network(process.pid, options.proc),
        unit=unit,
        container=container_of(process),
        pinned_gb_by_flags=_pinned_by_flags(flags),
    )


def _pinned_by_flags(flags: t.Mapping[str, t.Any]) -> float:
    """GB (1e9) of host memory that the flags ask to pin: hicache-size counts for each rank (facts of SGLang >= 0.5.0)."""
    try:
        ranks = int(flags.get("tp-size", 1)) * int(flags.get("pp-size", 1))
        return float(flags.get("hicache-size", 0)) * ranks if flags.get("enable-hierarchical-cache") else 0.0
    except (TypeError, ValueError):
        return 0.0


def _config_reader(process: Process, proc: str) -> t.Callable[[str], t.Optional[str]]:
    def read(path: str) -> t.Optional[str]:
        absolute = path if path.startswith("/") else f"{_cwd(process.pid, proc)}/{path}"
        return procfs.read_text(f"{proc}/{process.pid}/root{absolute}")

    return read


def _cwd(pid: int, proc: str) -> str:
    try:
        return os.readlink(f"{proc}/{pid}/cwd")
    except OSError:
        return ""


def _same_network(pid: int, proc: str) -> t.Optional[bool]:
    try:
        return os.readlink(f"{proc}/{pid}/ns/net") == os.readlink(f"{proc}/self/ns/net")
    except OSError:
        return None
