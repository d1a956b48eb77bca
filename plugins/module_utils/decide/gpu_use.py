# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a server uses each GPU that was planned for it, and whether somebody else holds one of them. Pure."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from ..model import Gpu
from ..snapshot import GpuHolders
from .topology import Flags, plan_topology


@dataclass(frozen=True)
class GpuUse:
    """One planned GPU. ``ours``: pids of the server's tree that hold it; ``strangers``: other holders and suspects, as
    words. ``used`` None: can't be told from here (``note`` says why): in a container the driver may list nobody.
    ``absent``: there is no such GPU, so that nobody uses it."""

    gpu: str
    index: t.Optional[int]
    used: t.Optional[bool]
    ours: tuple[int, ...] = ()
    strangers: tuple[str, ...] = ()
    note: t.Optional[str] = None
    absent: bool = False


def planned_gpus(flags: t.Mapping[str, t.Any], chosen: t.Sequence[str]) -> tuple[str, ...]:
    """Those of the GPUs that the server sees which its ranks on this host take, in their order (base-gpu-id,
    gpu-id-step)."""
    wanted = Flags(flags)
    topology, _findings = plan_topology(flags, None)
    base, step = wanted.whole("base-gpu-id", 0) or 0, wanted.whole("gpu-id-step", 1) or 1
    if topology.ranks_here is None or base < 0 or step < 1:
        return tuple(chosen)
    return tuple(chosen[base::step][: topology.ranks_here])


def gpu_use(
    planned: t.Sequence[str],
    gpus: t.Sequence[Gpu],
    holders: t.Mapping[int, GpuHolders],
    tree: t.Collection[int],
    unreadable: t.Collection[int] = (),
) -> tuple[GpuUse, ...]:
    """``planned``: UUIDs or indices. ``tree``: the server's living pids. ``unreadable``: pids whose open files and
    mappings could not be read."""
    return tuple(_use(name, gpus, holders, tree, unreadable) for name in planned)


def _use(
    name: str,
    gpus: t.Sequence[Gpu],
    holders: t.Mapping[int, GpuHolders],
    tree: t.Collection[int],
    unreadable: t.Collection[int],
) -> GpuUse:
    gpu = next((gpu for gpu in gpus if name in _names(gpu)), None)
    found = None if gpu is None else holders.get(gpu.index)
    if gpu is None:
        return GpuUse(name, None, False, note="the driver does not show it", absent=True)
    if found is None:
        return GpuUse(name, gpu.index, None, note="who holds it could not be looked at")
    ours = tuple(holder.pid for holder in found.holders if holder.pid in tree)
    others = [
        f"pid {holder.pid} ({holder.process.title if holder.process else '?'})"
        for holder in (*found.holders, *found.suspects)
        if holder.pid not in tree and holder.protected is None
    ]
    if ours:
        return GpuUse(name, gpu.index, True, ours, tuple(others))
    hidden = [pid for pid in tree if pid in unreadable]
    note = None
    if hidden:
        note = f"pid {hidden[0]} of the server can't be looked into (run it as root)"
    elif any(holder.pid in tree for holder in found.suspects):
        note = "whether a process of the server holds it can't be told by the evidence"
    return GpuUse(name, gpu.index, None if note else False, (), tuple(others), note)


def _names(gpu: Gpu) -> set[str]:
    return {str(gpu.index), *filter(None, (gpu.uuid, gpu.bus_id)), *filter(None, (one.uuid for one in gpu.mig))}
