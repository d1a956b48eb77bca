# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two rungs that reach beyond one server, from the node: restart its container, reset its GPUs. Each needs the
operator's word for exactly that container or GPU, and what stands against it is judged on a fresh look.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field

from ..decide.optin import others_in_container, refuse_container_stop, refuse_gpu_reset
from ..decide.ports import program_of
from ..decide.targets import Selection
from ..model import Gpu, Process, Reason
from ..observe.cgroupfs import guest_directories, pids_below, read_mounts
from ..observe.kernel_log import log_clock_s
from ..observe.pve import read_guest
from ..snapshot import Guest, Snapshot
from .guest import restart_container
from .optin import OptIn
from .reset import reset_gpus


@dataclass(frozen=True)
class LastRung:
    """What became of such a rung. ``acted``: anything was done at all; ``stuck``: who kept it from succeeding;
    ``resets``: when a GPU (bus id) was reset, by the kernel log's clock: what was reported before counts no more.
    """

    acted: bool
    steps: tuple[t.Mapping[str, t.Any], ...] = ()
    stuck: tuple[tuple[Process, str], ...] = ()
    reasons: tuple[Reason, ...] = ()
    seconds: float = 0.0
    note: str = ""
    resets: t.Mapping[str, float] = field(default_factory=dict)


def container_stop_refusals(
    snapshot: Snapshot, selection: Selection, guest: Guest, optin: OptIn
) -> tuple[Reason, ...]:
    """What stands against a restart of the container now."""
    keys = [target.process.key for target in selection.everybody]
    others = others_in_container(snapshot, guest.members, keys, optin.protect)
    config = read_guest(guest.vmid, optin.pve_dir)
    return refuse_container_stop(guest.vmid, optin.confirm_container_stop, config, others, optin.acknowledge)


def stop_container(
    snapshot: Snapshot,
    selection: Selection,
    guest: Guest,
    optin: OptIn,
    deadlines_s: tuple[float, float],
    roots: tuple[str, str] = ("/proc", "/sys"),
) -> LastRung:
    """Restart the container, unless something stands against it. ``deadlines_s``: for the stop and for the start."""
    refused = container_stop_refusals(snapshot, selection, guest, optin)
    if refused:
        return LastRung(False, reasons=refused, note="refused: " + refused[0].message)
    outcome = restart_container(
        guest.vmid, deadlines_s[0], deadlines_s[1], lambda: members_now(guest.vmid, *roots), proc=roots[0]
    )
    note = "" if not outcome.stopped else "stopped and started again" if outcome.started else "stopped, not started"
    return LastRung(
        acted=bool(outcome.steps),
        steps=outcome.steps,
        stuck=tuple((one.process, one.why) for one in outcome.blockers),
        reasons=outcome.reasons,
        seconds=outcome.seconds,
        note=note,
    )


def members_now(vmid: str, proc: str = "/proc", sys: str = "/sys") -> t.Optional[list[int]]:
    """Who is in the container's cgroups at this moment; None: not known. Reads kernel files only, which never wait."""
    mounts = read_mounts(proc, sys)
    if not mounts:
        return None
    found: set[int] = set()
    for directory in guest_directories(vmid, mounts):
        pids = pids_below(directory)
        if pids is None:
            return None
        found |= pids
    return sorted(found)


def reset_stuck_gpus(
    snapshot: Snapshot, gpus: t.Sequence[Gpu], optin: OptIn, vantage: str, deadline_s: float
) -> LastRung:
    """Reset the GPUs whose memory nobody explains, unless something stands against it."""
    refused = refuse_gpu_reset(snapshot, gpus, optin.confirm_gpu_reset, vantage)
    if refused:
        return LastRung(False, reasons=refused, note="refused: " + refused[0].message)
    outcome = reset_gpus(gpus, deadline_s)
    note = ", ".join(f"GPU {one.index} {'reset' if one.done else 'not reset'}" for one in outcome.gpus)
    acted = bool(outcome.steps)
    now = log_clock_s()
    resets = {one.bus_id: now for one in outcome.gpus if one.done and one.bus_id}
    return LastRung(acted, outcome.steps, (), outcome.reasons, outcome.seconds, note, resets)


def planned_for_container(guest: Guest, refused: t.Sequence[Reason], snapshot: Snapshot) -> tuple[str, ...]:
    """What the rung would do, for check mode."""
    if refused:
        return tuple(f"refused: {reason.message}" for reason in refused)
    count = len(guest.members)
    leaders = [one.process for one in snapshot.leaders if one.process.pid in guest.members]
    servers = "".join(f", pid {one.pid} {program_of(one)}" for one in leaders[:4])
    what = f"{guest.label} with its {count} processes is stopped and started again"
    return (f"{what}, if it is still in the way{servers}",)
