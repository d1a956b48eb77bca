# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What belongs to a container, seen from its node, and which of its units and GPUs are meant. Pure."""

from __future__ import annotations

import re
import typing as t

from ..cgroups import guest_of, unit_of, unit_path_of
from ..errors import UnknownDevice
from ..model import Gpu, Process, Reason
from ..sglang.cmdline import worker_role
from ..snapshot import Guest, Snapshot, Unit
from .gpus import choose_gpus, names_gpu

if t.TYPE_CHECKING:
    from ..proxmox import GuestConfig


def elsewhere(process: Process, snapshot: Snapshot) -> bool:
    """Whether this process is out of bounds: not of the container that was asked for; or, where none was asked for, of
    a container that we look into from outside.
    """
    if snapshot.guest is not None:
        return process.pid not in snapshot.guest.members
    guest = guest_of(process)
    return guest is not None and guest != snapshot.own_guest


def place_of(process: Process, snapshot: Snapshot) -> str:
    """Where a process lives, for people; empty for one of our own surroundings."""
    if snapshot.guest is not None and process.pid in snapshot.guest.members:
        return f"in {snapshot.guest.label}"
    guest = guest_of(process)
    if snapshot.guest is not None and guest is None:
        return "a process of the node itself"
    if guest is None or guest == snapshot.own_guest:
        return ""
    return f"in container {guest}"


def guest_unit(
    leader: Process, processes: t.Mapping[int, Process], inits: t.Collection[int], below: t.Collection[int]
) -> t.Optional[Unit]:
    """The unit of a launcher in a container, as far as its cgroup tells; its systemd is not asked.

    The launcher is the unit's main process if the container's init is its parent and everybody else in the unit
    descends from it (``below``) or is an SGLang worker. Else main_pid is 0: then the unit is somebody else's.
    """
    name, path = unit_of(leader), unit_path_of(leader)
    if name is None or path is None or not name.endswith(".service") or not _below_slices(path):
        return None
    family = {leader.pid, *below}
    alone = all(
        process.pid in family or process.dead or worker_role(process.title) is not None
        for process in processes.values()
        if any(one == path or one.startswith(path + "/") for one in process.cgroups)
    )
    main_pid = leader.pid if alone and leader.ppid in inits else 0
    return Unit(name, main_pid, "", "active", "loaded", path)


def _below_slices(path: str) -> bool:
    """Whether this is a unit of the container's systemd: a delegated service may make any cgroup below its own."""
    names = path.strip("/").split("/")
    start = 1 if names[0].startswith("lxc.payload.") else 2
    between = names[start:-1]
    return all(name.endswith(".slice") for name in (between[1:] if between[:1] == ["ns"] else between))


def judge_absence(guest: Guest, config: GuestConfig) -> list[Reason]:
    """What it means that a container has no processes here. Nothing, where this node has it and it is stopped."""
    if config.exists is False:
        text = (
            f"there is no {guest.label} on this node: no cgroup, and no configuration of it. `pct list` and `pvesh get "
            "/nodes` tell where it lives; name that node (sglang_proxmox_host)"
        )
        return [Reason("container_not_here", text, guest.label)]
    if config.exists is None or guest.state == "unknown":
        problems = guest.problems + config.problems
        words = "; ".join(f"{one.call}: {one.message}" for one in problems) or "it has a cgroup without processes"
        text = f"{guest.label} has no processes here, and whether it is this node's can't be told: {words}"
        return [Reason("container_unknown", text, guest.label, means="unknown")]
    return []


def judge_nodes(guest: Guest, config: GuestConfig, named: bool = True) -> list[Reason]:
    """Fewer GPU nodes in the container's /dev than it was given: then 'all of its GPUs' are not all."""
    if config.exists is None and not named:
        words = "; ".join(f"{one.call}: {one.message}" for one in config.problems) or "it was not read"
        text = (
            f"which GPUs {guest.label} was given is not known ({words}), and its own /dev may lack some: name them by "
            "UUID (devices)"
        )
        return [Reason("container_config_unknown", text, guest.label, means="unknown")]
    given = [path for path in config.device_nodes if re.fullmatch(r"/dev/nvidia[0-9]+", path)]
    if guest.device_minors is None or len(given) <= len(guest.device_minors):
        return []
    text = (
        f"{guest.label} is configured with {len(given)} GPUs ({', '.join(given)}), but has {len(guest.device_minors)} "
        "GPU nodes in its /dev: some were removed or not made, so not all are judged. Name them by UUID (devices)"
    )
    return [Reason("container_nodes_missing", text, guest.label, means="unknown")]


def same_gpus(guest: Guest, gpus: t.Sequence[Gpu]) -> bool:
    """Whether the container has all GPUs of the node, so that an index means the same inside and outside."""
    minors = {gpu.minor for gpu in gpus}
    return guest.device_minors is not None and None not in minors and guest.device_minors == minors


def refuse_indices(option: str, names: t.Sequence[str], gpus: t.Sequence[Gpu], guest: Guest) -> None:
    """An index is only taken where it means the same GPU inside and outside.

    Raises:
        UnknownDevice: it may mean another one.
    """
    numbers = [name for name in names if name.isdecimal()]
    if not numbers or same_gpus(guest, gpus):
        return
    nodes = ", ".join(f"nvidia{one}" for one in sorted(guest.device_minors or ())) or "none"
    raise UnknownDevice(
        f"{option} names GPU {', '.join(numbers)} by index, which may be another one inside {guest.label} (its nodes: "
        f"{'not known' if guest.device_minors is None else nodes}) than on the node ({len(gpus)} GPUs): name it "
        "by UUID or bus id."
    )


def choose_for_guest(gpus: t.Sequence[Gpu], wanted: t.Sequence[str], guest: Guest) -> tuple[Gpu, ...]:
    """The GPUs that are meant, by UUID or bus id; by index only where that is the same inside and outside; without any
    name those that the container has a node of.

    Raises:
        UnknownDevice: a GPU is not on this node or not in the container, or an index could mean another one here.
    """
    if not wanted:
        if guest.device_minors is None:
            raise UnknownDevice(
                f"which GPUs {guest.label} has can't be told (its /dev can't be read); name them by UUID or bus id "
                "(devices)."
            )
        return tuple(gpu for gpu in gpus if gpu.minor is not None and gpu.minor in guest.device_minors)
    refuse_indices("devices", wanted, gpus, guest)
    chosen = choose_gpus(gpus, wanted)
    if guest.device_minors is not None:
        for gpu in chosen:
            if gpu.minor is not None and gpu.minor not in guest.device_minors:
                name = next((one for one in wanted if names_gpu(gpu, one)), gpu.label)
                raise UnknownDevice(
                    f"{name} is {gpu.label} (nvidia{gpu.minor}) of the node, of which {guest.label} has no device node."
                )
    return chosen
