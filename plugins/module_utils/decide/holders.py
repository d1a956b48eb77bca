# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who holds a GPU, who merely has it open, and where the evidence disagrees. Pure functions over what was seen.

Measured on H200s (driver 580.159): every CUDA process that sees a GPU has it open and maps two write-only doorbells;
only a process with a context there, and so with memory, has a readable mapping of the node as well. NVML lists a dead
parent while its forked child keeps the memory. So a holder has a readable mapping, or is listed by NVML, lives, is
visible and has the device open; anything less is a visitor, and is never ended for it.
"""

from __future__ import annotations

import typing as t

from ..model import DeviceScan, DeviceUse, Gpu, Holder, Process
from ..snapshot import GpuHolders
from .protected import protected_why

READABLE_MAPPING = "readable mapping"
NVML_AND_OPEN = "listed by the driver with the device open"
NVML_SIMULATED = "listed by the simulated driver"


def find_holders(
    gpu: Gpu,
    scan: DeviceScan,
    processes: t.Mapping[int, Process],
    own_pids: t.Collection[int] = (),
    protect: t.Sequence[str] = (),
    units: t.Optional[t.Mapping[int, str]] = None,
    simulated: bool = False,
) -> GpuHolders:
    """Sort everybody who has to do with ``gpu`` into holders, visitors and suspects, each with its evidence.

    ``rule_holds`` compares the mapping rule with the driver's own list on this machine: True where every listed, living
    and readable pid has a readable mapping, False where one has not, None where there was nothing to compare.
    """
    uses = {use.pid: use for use in scan.uses if gpu.minor is not None and use.minor == gpu.minor}
    listed = {row.pid: row for row in _listed(gpu)}
    groups: dict[str, list[Holder]] = {"holder": [], "visitor": [], "suspect": []}
    stale = []
    for pid in sorted(set(uses) | set(listed)):
        process = processes.get(pid)
        if process is None or process.dead:
            if pid in listed:
                stale.append(pid)
            continue
        role, evidence = _judge(uses.get(pid), pid in listed, simulated)
        if pid in scan.unreadable and role != "holder":
            role, evidence = "suspect", (*evidence, "its open files and mappings can't be read")
        why = protected_why(process, own_pids, protect, units or {})
        groups[role].append(Holder(gpu.index, process, pid, role, evidence, why))
    return GpuHolders(
        gpu.index,
        tuple(groups["holder"]),
        tuple(groups["visitor"]),
        tuple(groups["suspect"]),
        tuple(stale),
        _rule_holds(uses, listed, processes, scan),
    )


def killable(holder: Holder) -> bool:
    """Whether the evidence is enough to end this process for holding the GPU; a simulated driver's word never is."""
    solid = any(text.startswith((READABLE_MAPPING, NVML_AND_OPEN)) for text in holder.evidence)
    return holder.role == "holder" and holder.protected is None and solid


def _listed(gpu: Gpu) -> tuple[t.Any, ...]:
    rows = list(gpu.processes or ())
    for instance in gpu.mig:
        rows.extend(instance.processes or ())
    return tuple(rows)


def _judge(use: t.Optional[DeviceUse], listed: bool, simulated: bool) -> tuple[str, tuple[str, ...]]:
    evidence = []
    if use is not None and use.readable_kib:
        evidence.append(f"{READABLE_MAPPING} {use.readable_kib} KiB")
    if listed and use is not None:
        evidence.append(NVML_AND_OPEN)
    if listed and use is None:
        evidence.append(NVML_SIMULATED if simulated else "listed by the driver, but the device is not open here")
    if use is not None and use.fds:
        evidence.append(f"{use.fds} open descriptors")
    if use is not None and use.write_only_kib:
        evidence.append(f"doorbells {use.write_only_kib} KiB write-only")
    if use is not None and (use.readable_kib or listed):
        return "holder", tuple(evidence)
    if use is not None:
        return "visitor", tuple(evidence)
    return ("holder" if simulated else "suspect"), tuple(evidence)


def _rule_holds(
    uses: t.Mapping[int, DeviceUse],
    listed: t.Mapping[int, t.Any],
    processes: t.Mapping[int, Process],
    scan: DeviceScan,
) -> t.Optional[bool]:
    compared = [
        uses[pid].readable_kib > 0
        for pid, row in listed.items()
        if row.kind == "compute" and pid in processes and pid in uses and pid not in scan.unreadable
    ]
    return all(compared) if compared else None
