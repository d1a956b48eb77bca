# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What stands against the two rungs that reach beyond one server: stopping its container, resetting its GPUs. Pure.

Both need the operator's word for exactly this container or GPU, and both are refused for whatever is not known.
Stopping a container ends everybody in it, so each other server and GPU holder in it has to be acknowledged by a name. A
reset takes the GPU away from everybody, so it is refused while anybody but the persistence daemon has to do with it.
"""

from __future__ import annotations

import os
import re
import typing as t
from dataclasses import dataclass

from ..cgroups import container_of
from ..model import Gpu, Process, Reason
from ..proxmox import GuestConfig
from ..sglang.cmdline import is_leader, worker_role
from ..snapshot import GpuHolders, Leader, Snapshot
from .gpus import names_gpu
from .ports import program_of
from .protected import program_name, protected_why
from .targets import nearest_leaders

PERSISTENCE_DAEMON = "nvidia-persistenced"
BY_OPERATOR = "protected by the operator"
# Names that say nothing of what runs: acknowledging them would acknowledge everybody.
INTERPRETER = re.compile(r"(python|perl|ruby|node|java|bash|dash|zsh|busybox|sh\Z|-|\[)")


@dataclass(frozen=True)
class Other:
    """Somebody whom the stop of a container would take down with it. ``names``: by any of them it is acknowledged."""

    pid: int
    names: tuple[str, ...]
    what: str


# --- the container ----------------------------------------------------------------------------------------------------


def others_in_container(
    snapshot: Snapshot,
    members: t.Collection[int],
    selection_keys: t.Collection[tuple[int, int]],
    protect: t.Sequence[str] = (),
) -> tuple[Other, ...]:
    """Everybody in the container (``members``: host pids) whom its stop would hit and who was not asked for.

    These are: every SGLang server that is not selected, every other process that holds a GPU or may hold one, whoever
    the operator protects, and whoever can't be looked into. A server's ranks count with their launcher.
    """
    present = {pid: one for pid in members if (one := snapshot.processes.get(pid)) is not None and not one.dead}
    mine = {pid for pid, one in present.items() if one.key in set(selection_keys)}
    leaders = {one.process.pid: one for one in snapshot.leaders if one.process.pid in present}
    family = nearest_leaders(snapshot)
    uses = _gpu_uses(snapshot)
    result = []
    for pid, leader in leaders.items():
        if pid not in mine:
            ranks = {one for one, above in family.items() if above == pid}
            held = sorted({gpu for one in ranks | {pid} for gpu in uses.get(one, ())})
            result.append(_server(leader, held, snapshot.units))
    for pid, process in present.items():
        above = family.get(pid)
        if pid in mine or pid in leaders or (above in leaders and above not in mine):
            continue
        why = _why_it_counts(process, snapshot, uses, protect)
        if why:
            result.append(Other(pid, _names(process, snapshot.units), f"{_who(process)}, {why}"))
    return tuple(sorted(result, key=lambda one: one.pid))


def refuse_container_stop(
    vmid: str,
    confirm: t.Optional[str],
    config: GuestConfig,
    others: t.Sequence[Other],
    acknowledge: t.Sequence[str],
) -> tuple[Reason, ...]:
    """Every reason not to stop container ``vmid``; none where it may be stopped."""
    given = " ".join((confirm or "").split())
    subject = f"container {vmid}"
    reasons = []
    if given != vmid:
        said = f"confirm_container_stop is {given!r}" if given else "nobody confirmed it"
        text = (
            f"container {vmid} is not stopped: {said}. A stop ends everything in it; to allow it: "
            f"-e confirm_container_stop={vmid}"
        )
        reasons.append(Reason("container_stop_unconfirmed", text, subject))
    reasons += _refuse_by_config(vmid, config, subject)
    known = {_plain(name) for name in acknowledge}
    for other in others:
        if not known & {_plain(name) for name in other.names}:
            text = (
                f"container {vmid} is not stopped: it also holds {other.what}, which would go down with it. To allow "
                f"that: -e acknowledge={_for_a_shell(other.names[0])} (or one of: {', '.join(other.names[1:])})"
            )
            reasons.append(Reason("container_unacknowledged", text, f"pid {other.pid}"))
    return tuple(reasons)


def _refuse_by_config(vmid: str, config: GuestConfig, subject: str) -> list[Reason]:
    why = "; ".join(f"{one.call}: {one.message}" for one in config.problems) or "its configuration was not read"
    if config.exists is None or config.vmid != vmid:
        text = f"container {vmid} is not stopped: whether it is locked is not known ({why})"
        return [Reason("container_config_unknown", text, subject, means="unknown")]
    if not config.exists:
        text = (
            f"container {vmid} is not stopped: this node has no configuration of it. `pvesh get /nodes` and `pct list`"
        )
        return [Reason("container_not_here", f"{text} tell where it lives; name that node", subject)]
    reasons = []
    if config.lock is not None:
        text = (
            f"container {vmid} is not stopped: it is locked ({config.lock}). Wait until that is done; if nothing of "
            f"the kind runs any more: pct unlock {vmid}"
        )
        reasons.append(Reason("container_locked", text, subject))
    if config.ha_managed is None:
        text = f"container {vmid} is not stopped: whether the HA manager looks after it is not known ({why})"
        reasons.append(Reason("container_ha_unknown", text, subject, means="unknown"))
    elif config.ha_managed:
        text = (
            f"container {vmid} is not stopped: the HA manager looks after it (state {config.ha_state or 'unknown'}) "
            f"and would act on its own. Hand it over for the while: ha-manager set ct:{vmid} --state ignored"
        )
        reasons.append(Reason("container_ha_managed", text, subject))
    return reasons


def _gpu_uses(snapshot: Snapshot) -> dict[int, tuple[str, ...]]:
    """Who holds a GPU or may hold one: labels of the GPUs by pid.

    A process that merely has a GPU open counts where nothing better is known: the driver's list is missing, it
    contradicts the mappings, or the node belongs to no GPU that the driver shows.
    """
    result: dict[int, list[str]] = {}
    minors = {gpu.minor: gpu for gpu in snapshot.reading.gpus or () if gpu.minor is not None}
    for gpu in snapshot.reading.gpus or ():
        found = snapshot.holders.get(gpu.index)
        if found is None:
            continue
        loose = found.visitors if gpu.processes is None or found.rule_holds is False else ()
        for holder in found.holders + found.suspects + loose:
            result.setdefault(holder.pid, []).append(f"GPU {gpu.index}")
    for use in snapshot.scan.uses:
        if use.minor not in minors:
            result.setdefault(use.pid, []).append(f"/dev/nvidia{use.minor}")
    return {pid: tuple(dict.fromkeys(labels)) for pid, labels in result.items()}


def _why_it_counts(
    process: Process, snapshot: Snapshot, uses: t.Mapping[int, tuple[str, ...]], protect: t.Sequence[str]
) -> t.Optional[str]:
    held = uses.get(process.pid)
    if held:
        return f"which uses {', '.join(held)}"
    if process.pid in snapshot.scan.unreadable:
        return "which can't be looked into, so whether it holds a GPU is not known"
    shield = protected_why(process, (), protect, snapshot.units) or ""
    return f"which is {shield}" if shield.startswith(BY_OPERATOR) else None


def _server(leader: Leader, held: t.Sequence[str], units: t.Mapping[int, str]) -> Other:
    names = list(_names(leader.process, units))
    if leader.owns_unit and leader.unit is not None:
        names.append(leader.unit.name)
    if leader.port is not None:
        names = [f"port:{leader.port}", f"port {leader.port}", *names]
    port = "unknown port" if leader.port is None else f"port {leader.port}"
    gpus = f", which uses {', '.join(held)}" if held else ""
    what = f"the SGLang server of {port}: {_who(leader.process)}{gpus}"
    return Other(leader.process.pid, tuple(dict.fromkeys(names)), what)


def _names(process: Process, units: t.Mapping[int, str]) -> tuple[str, ...]:
    """Names for an acknowledgement. The inner pid is none of them: it may be another one's pid on the host. Of SGLang's
    own processes a program's name is none either, since every server has the same.
    """
    names = [str(process.pid), f"pid {process.pid}"]
    unit = units.get(process.pid, "")
    if unit.endswith(".service"):
        names.append(unit)
    if not is_leader(process.argv) and worker_role(process.title) is None:
        words = program_of(process).split()
        programs = [program_name(process), os.path.basename(words[-1]) if words else ""]
        names += [name for name in programs if name and not INTERPRETER.match(name)]
    return tuple(dict.fromkeys(names))


def _who(process: Process) -> str:
    inner = f", {process.nspid[-1]} inside" if len(process.nspid) > 1 else ""
    return f"pid {process.pid}{inner} ({program_of(process)})"


def _plain(name: str) -> str:
    """One spelling for ``port 30001``, ``port:30001`` and ``port=30001``; the same for pids."""
    text = " ".join(str(name).split())
    found = re.fullmatch(r"(port|pid) ?[ :=] ?([0-9]+)", text)
    if found is None:
        return text
    return found.group(2) if found.group(1) == "pid" else f"port {found.group(2)}"


def _for_a_shell(name: str) -> str:
    return f"'{name}'" if " " in name else name


# --- the GPUs ---------------------------------------------------------------------------------------------------------


def refuse_gpu_reset(
    snapshot: Snapshot, gpus: t.Sequence[Gpu], confirm: t.Collection[str], vantage: str
) -> tuple[Reason, ...]:
    """Every reason not to reset ``gpus``; none where all of them may be reset.

    ``confirm`` names GPUs as this host counts them. Whoever has the GPU open at all is somebody: a reset is no way to
    end a process. A pid that only the driver lists is dead and keeps nobody, as everybody is visible from the host.
    """
    if vantage != "host":
        text = (
            "no GPU is reset from inside a container, where its other users can't be seen: name the Proxmox node "
            "(sglang_proxmox_host), or run this on the host"
        )
        return (Reason("gpu_reset_not_host", text, "vantage"),)
    if snapshot.reading.gpus is None:
        words = snapshot.reading.problems[-1].message if snapshot.reading.problems else "no answer"
        text = f"no GPU is reset: the driver can't be asked who uses which ({words})"
        return (Reason("gpu_reset_users_unknown", text, "driver", means="unknown"),)
    reasons = []
    if snapshot.scan.unreadable:
        pids = ", ".join(map(str, snapshot.scan.unreadable[:6]))
        text = (
            f"no GPU is reset: {len(snapshot.scan.unreadable)} processes can't be looked into (pid {pids}), so who "
            "uses the GPUs is not known. Run as root"
        )
        reasons.append(Reason("gpu_reset_users_unknown", text, "processes", means="unknown"))
    for gpu in gpus:
        reasons += _refuse_one(gpu, snapshot, confirm)
    return tuple(reasons)


def _refuse_one(gpu: Gpu, snapshot: Snapshot, confirm: t.Collection[str]) -> list[Reason]:
    reasons = []

    def refuse(code: str, why: str, means: str = "dirty") -> None:
        reasons.append(Reason(code, f"{gpu.label} is not reset: {why}", gpu.label, means=means))

    if not any(names_gpu(gpu, name) for name in confirm):
        said = f"confirm_gpu_reset names {', '.join(map(str, confirm))}" if confirm else "nobody confirmed it"
        refuse(
            "gpu_reset_unconfirmed", f"{said}. To allow it: -e confirm_gpu_reset={gpu.index} (or its UUID or bus id)"
        )
    found = snapshot.holders.get(gpu.index)
    if found is None or gpu.processes is None or gpu.minor is None or not gpu.bus_id or not gpu.uuid:
        missing = [
            words
            for words, absent in (
                ("its processes", gpu.processes is None),
                ("its device node", gpu.minor is None),
                ("its bus id", not gpu.bus_id),
                ("its UUID", not gpu.uuid),
            )
            if absent
        ]
        why = f"the driver does not tell {', '.join(missing) or 'who holds it'}, so who uses it is not known"
        refuse("gpu_reset_users_unknown", f"{why}. Reboot the host where this stays", "unknown")
    if found is not None:
        for who in _users(found, snapshot):
            refuse("gpu_reset_in_use", f"{who}. End it first (scope gpu), or reset by hand")
    if gpu.mig_enabled or gpu.mig:
        refuse(
            "gpu_reset_mig", f"MIG is on ({len(gpu.mig)} instances), and a reset takes every slice. Reset it by hand"
        )
    if gpu.health.persistence_mode is None:
        why = "whether persistence mode is on is not known, so it could not be restored"
        refuse("gpu_reset_persistence_unknown", f"{why}. Look at `nvidia-smi -q -i {gpu.bus_id}`", "unknown")
    return reasons


def _users(found: GpuHolders, snapshot: Snapshot) -> list[str]:
    result = []
    for holder in found.holders + found.visitors + found.suspects:
        process = holder.process
        if process is not None and _is_persistence_daemon(process):
            continue
        words = {"holder": "holds it", "visitor": "has it open", "suspect": "may hold it"}.get(holder.role, "uses it")
        who = f"pid {holder.pid}" if process is None else _who(process)
        result.append(f"{who}{_owner(process, snapshot)} {words}")
    return result


def _is_persistence_daemon(process: Process) -> bool:
    """The host's own daemon, which lets go when persistence mode is turned off; one in a container can't be reached."""
    return program_name(process) == PERSISTENCE_DAEMON and container_of(process) is None


def _owner(process: t.Optional[Process], snapshot: Snapshot) -> str:
    if process is None:
        return ""
    container = (container_of(process) or "").replace("lxc:", "container ")
    owners = [text for text in (container, snapshot.units.get(process.pid, "")) if text]
    return f" of {', '.join(owners)}" if owners else ""
