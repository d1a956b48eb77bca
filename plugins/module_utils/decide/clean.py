# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Is it clean? A pure judgement over facts: clean, dirty or unknown, with a reason for everything that is not clean.

Dirty outranks unknown, and both fail. A fact that could not be had is a reason of its own; nothing is clean by default.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field

from ..cgroups import guest_of
from ..model import CgroupLimit, Gpu, Holder, HostMemory, PortUse, Process, Reason, ShmReading, Verdict
from ..sglang.cmdline import worker_role
from ..snapshot import GpuHolders, Leader, Snapshot
from ..xid import KernelLog
from .gpus import baseline_for
from .guests import elsewhere, place_of
from .kinship import descendants
from .leftovers import Leftover
from .ports import judge_ports, program_of
from .protected import protected_why
from .targets import SPAWN_MARK
from .visible import given_gpus, gpus_by_flags
from .xids import judge_xids

BENIGN_THROTTLE = ("idle", "software power cap", "sw power cap")
NVML_MISMATCH = 18
# What a GPU that does not have it answers is no failure of the call, and not among a GPU's errors.
HEALTH_CALLS = ("nvmlDeviceGetRemappedRows", "nvmlDeviceGetRetiredPagesPendingStatus", "nvmlDeviceGetFieldValues")
DRIVER_CODES = {
    4: ("driver_no_permission", "no permission to ask the driver: run as root"),
    9: ("driver_not_loaded", "the kernel module is not loaded: load it on the host (modprobe nvidia)"),
    12: ("driver_library_missing", "libnvidia-ml.so.1 is missing: install the driver's libraries here"),
    15: ("gpu_lost", "the GPU is lost (off the bus): reset or reboot the host"),
    16: ("gpu_reset_required", "the GPU must be reset"),
    999: (
        "driver_unknown_error",
        "the driver answers Unknown Error: if the host's own nvidia-smi works, this container has lost its device "
        "permissions (device cgroup); restart the container",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One look at the memory: MiB used by GPU index (None: no answer) and the pids that hold it."""

    at_s: float
    used_mib: t.Mapping[int, t.Optional[int]]
    holder_pids: t.Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Limits:
    """What counts as clean. ``required_available_mib`` is what the next launch needs of host memory."""

    max_used_mib: int = 64
    baselines: t.Mapping[str, int] = field(default_factory=dict)
    required_available_mib: int = 0
    ports: tuple[int, ...] = ()
    shm_required_mib: int = 64
    expected_gpus: t.Optional[int] = None
    allow_simulated: bool = False
    xid_window_s: float = 0.0
    gpu_resets: t.Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """Everything that the judgement looks at. None: could not be had."""

    vantage: str
    snapshot: Snapshot
    samples: tuple[Sample, ...]
    memory: HostMemory
    cgroup: CgroupLimit
    available_mib: t.Optional[int]
    shm: ShmReading
    leftovers: tuple[tuple[str, Leftover], ...]
    ports: t.Optional[tuple[PortUse, ...]]
    kernel_gpu_count: t.Optional[int] = None
    cuda_errors: t.Optional[t.Mapping[int, t.Optional[str]]] = None
    kernel_log: t.Optional[KernelLog] = None
    guest_reasons: tuple[Reason, ...] = ()


def judge(facts: Facts, limits: Limits) -> Verdict:
    """The verdict with all its reasons, the worst first."""
    reasons: list[Reason] = []
    if limits.expected_gpus != 0:
        reasons += _driver(facts, limits)
        for gpu in facts.snapshot.gpus:
            reasons += _gpu(gpu, facts, limits)
        reasons += _scan(facts)
        reasons += judge_xids(
            facts.snapshot.gpus,
            facts.kernel_log,
            facts.kernel_log.now_s if facts.kernel_log else 0.0,
            limits.xid_window_s,
            facts.vantage,
            limits.gpu_resets,
        )
    reasons += _hidden(facts)
    reasons += _guest(facts)
    reasons += facts.guest_reasons
    reasons += _host_memory(facts, limits)
    reasons += _ports(facts, limits)
    reasons += _shm(facts, limits)
    reasons += _orphans(facts)
    reasons += _servers(facts, limits)
    reasons += _not_visible(facts, limits)
    required = [reason for reason in reasons if reason.severity == "required"]
    warnings = tuple(reason for reason in reasons if reason.severity != "required")
    required.sort(key=lambda reason: reason.means != "dirty")
    state = "clean" if not required else required[0].means
    return Verdict(state, tuple(required), warnings, _summary(state, required, facts, limits))


def _summary(state: str, required: t.Sequence[Reason], facts: Facts, limits: Limits) -> str:
    if state == "clean":
        count = len(facts.snapshot.gpus)
        what = "no GPUs declared" if limits.expected_gpus == 0 else f"{count} GPU{'s' if count != 1 else ''} free"
        available = "unknown" if facts.available_mib is None else f"{facts.available_mib} MiB"
        label = " (simulated driver)" if facts.snapshot.simulated else ""
        guest = facts.snapshot.guest
        where = f"the {facts.vantage}" if guest is None else f"the node of {guest.label}"
        return f"clean: {what}{label}, {available} of host memory available, seen from {where}"
    more = f" (and {len(required) - 1} more)" if len(required) > 1 else ""
    return f"{state}: {required[0].message}{more}"


# --- the driver -------------------------------------------------------------------------------------------------------


def _driver(facts: Facts, limits: Limits) -> list[Reason]:
    reading = facts.snapshot.reading
    if reading.gpus is None:
        return [_driver_silent(facts)]
    result = []
    guest = facts.snapshot.guest
    shown = len(reading.gpus) if guest is None else len(facts.snapshot.gpus)
    if reading.simulated and not limits.allow_simulated:
        text = f"the driver is simulated ({reading.library}); that proves nothing of a GPU (allow_simulated is off)"
        result.append(Reason("simulated", text, "driver", means="unknown"))
    if limits.expected_gpus is not None and shown != limits.expected_gpus:
        who = "the driver" if guest is None else guest.label
        text = f"{limits.expected_gpus} GPUs are expected, {who} shows {shown}"
        result.append(Reason("gpu_count", text, "driver", means="unknown"))
    elif shown == 0 and guest is not None:
        text = f"{guest.label} has no GPU of this node in its /dev; one without GPUs must say so (expected_gpus: 0)"
        result.append(Reason("no_gpus", text, "driver", means="unknown"))
    elif shown == 0:
        text = "the driver shows no GPU; a host without GPUs must say so (expected_gpus: 0)"
        result.append(Reason("no_gpus", text, "driver", means="unknown"))
    kernel = facts.kernel_gpu_count
    if kernel is not None and kernel > len(reading.gpus) and facts.vantage == "host":
        text = f"the kernel module drives {kernel} GPUs, the driver's library shows {len(reading.gpus)}"
        result.append(Reason("gpu_count", text, "driver", means="unknown"))
    return result


def _driver_silent(facts: Facts) -> Reason:
    reading = facts.snapshot.reading
    problem = reading.problems[-1] if reading.problems else None
    code = problem.code if problem else None
    words = problem.message if problem else "no answer"
    if code == NVML_MISMATCH or "version mismatch" in words.lower():
        text = (
            f"driver/library version mismatch (NVML 18): library {reading.nvml_version or 'unknown'}, kernel module "
            f"{reading.kernel_module_version or 'unknown'} ({words}). On a host: reload the module or reboot; in a "
            "container: install the host's driver version"
        )
        return Reason("driver_mismatch", text, "driver", means="unknown")
    if reading.source == "nvml" and code in DRIVER_CODES:
        name, advice = DRIVER_CODES[code]
        return Reason(name, f"NVML error {code}: {words}; {advice}", "driver", means="unknown")
    name = "driver_hung" if "no answer within" in words else "driver_silent"
    return Reason(name, f"the GPUs can't be read: {words}", "driver", means="unknown")


# --- one GPU ----------------------------------------------------------------------------------------------------------


def _gpu(gpu: Gpu, facts: Facts, limits: Limits) -> list[Reason]:
    label = gpu.label
    if gpu.memory is None:
        words = "; ".join(f"{problem.call}: {problem.message}" for problem in gpu.errors) or "no answer"
        return [Reason("gpu_no_answer", f"{label} gives no memory figure: {words}", label, means="unknown")]
    result = _gpu_memory(gpu, facts, limits)
    result += _mig(gpu, limits)
    result += _gpu_holders(gpu, facts.snapshot.holders[gpu.index], facts)
    result += _health(gpu, facts)
    error = (facts.cuda_errors or {}).get(gpu.index)
    if error:
        means = "unknown" if "no answer" in error else "dirty"
        result.append(Reason("cuda_fails", f"{label}: {error}", label, means=means))
    return result


def _gpu_memory(gpu: Gpu, facts: Facts, limits: Limits) -> list[Reason]:
    label, memory = gpu.label, gpu.memory
    if memory is None:
        return []
    if memory.unified:
        return _unified(gpu, limits)
    limit = limits.max_used_mib + baseline_for(gpu, limits.baselines)
    used = [sample.used_mib.get(gpu.index) for sample in facts.samples]
    if not used or any(value is None for value in used):
        return [Reason("memory_unknown", f"{label}: a memory query failed between samples", label, means="unknown")]
    known = [value for value in used if value is not None]
    above = [value > limit for value in known]
    if not any(above):
        return []
    if not memory.used_excludes_reserved:
        text = (
            f"{label} shows {known[-1]} MiB by the old memory call, which counts the driver's reserved part; without "
            f"nvidia-smi's figure that can't be told from memory in use (limit {limit} MiB)"
        )
        return [Reason("reserved_unknown", text, label, means="unknown")]
    if not all(above):
        series = ", ".join(str(value) for value in known)
        text = f"{label} is unstable: {series} MiB in the last {len(known)} samples, limit {limit} MiB"
        return [Reason("unstable", text, label)]
    return [_memory_in_use(gpu, known[-1], limit, facts)]


def _memory_in_use(gpu: Gpu, used_mib: int, limit: int, facts: Facts) -> Reason:
    label = gpu.label
    found = facts.snapshot.holders[gpu.index]
    figure = f"{label} has {used_mib} MiB in use, limit {limit} MiB"
    if found.holders:
        return Reason("memory_in_use", f"{figure}: held by {_names(found, facts.snapshot)}", label)
    if found.stale_pids:
        pids = ", ".join(map(str, found.stale_pids))
        text = f"{figure}: the driver lists pid {pids}, which is dead (stale pid), and no living holder is visible"
        return Reason("stale_pid", text, label)
    if found.suspects:
        names = "; ".join(f"pid {one.pid} ({'; '.join(one.evidence)})" for one in found.suspects)
        return Reason("suspect", f"{figure}: the evidence disagrees: {names}", label)
    if facts.vantage == "container":
        text = (
            f"{figure}: held elsewhere (or still unpinning, if a server was just killed): nobody here holds "
            "it; look from "
            "the host"
        )
        return Reason("held_elsewhere", text, label)
    text = (
        f"{figure}: holder unknown, nobody has it mapped and the driver lists nobody. If a server was just killed its "
        "pinned memory may still be unpinning; else the next step is the opt-in rung gpu_reset"
    )
    return Reason("holder_unknown", text, label)


def _names(found: GpuHolders, snapshot: Snapshot) -> str:
    return ", ".join(_holder_name(one, snapshot) for one in found.holders[:4])


def _holder_name(holder: Holder, snapshot: Snapshot) -> str:
    if holder.process is None:
        return f"pid {holder.pid} ({holder.evidence[0]})"
    place = place_of(holder.process, snapshot)
    return f"pid {holder.pid} {program_of(holder.process)} ({holder.evidence[0]}{f', {place}' if place else ''})"


def _unified(gpu: Gpu, limits: Limits) -> list[Reason]:
    label = gpu.label
    text = f"{label} has no memory of its own (unified memory): host memory decides"
    if limits.required_available_mib > 0:
        return [Reason("unified_memory", text, label, "warning")]
    text += "; say how much must be available (required_available_mib)"
    return [Reason("unified_memory", text, label, means="unknown")]


def _mig(gpu: Gpu, limits: Limits) -> list[Reason]:
    result = []
    for number, instance in enumerate(gpu.mig):
        label = f"{gpu.label} MIG {instance.uuid or number}"
        used = instance.memory.used_mib if instance.memory else None
        if used is None or instance.processes is None:
            words = "; ".join(problem.message for problem in instance.errors) or "no answer"
            result.append(Reason("mig_no_answer", f"{label} gives no answer: {words}", label, means="unknown"))
        elif used > limits.max_used_mib and not (instance.memory and instance.memory.used_excludes_reserved):
            text = f"{label} shows {used} MiB by the old memory call, which counts the driver's reserved part"
            result.append(Reason("reserved_unknown", text, label, means="unknown"))
        elif used > limits.max_used_mib:
            result.append(
                Reason("memory_in_use", f"{label} has {used} MiB in use, limit {limits.max_used_mib} MiB", label)
            )
    return result


def counts_as_holder(holder: Holder, snapshot: Snapshot) -> bool:
    """A GPU service holds its GPU by right. In a container anybody may bear such a name, so there it counts all the
    same; it is not signalled, but the GPU is not free.
    """
    if holder.protected is None:
        return True
    guest = guest_of(holder.process) if holder.process is not None else None
    return guest is not None and guest != snapshot.own_guest


def _gpu_holders(gpu: Gpu, found: GpuHolders, facts: Facts) -> list[Reason]:
    label = gpu.label
    result = []
    for one in found.holders:
        if counts_as_holder(one, facts.snapshot):
            title = program_of(one.process) if one.process else "?"
            place = place_of(one.process, facts.snapshot) if one.process else ""
            text = f"{label} is held by pid {one.pid} {title} ({'; '.join(one.evidence)})"
            text += f", {place}" if place else ""
            result.append(Reason("held", text, label))
    seen = [sample.holder_pids.get(gpu.index, ()) for sample in facts.samples]
    current = {one.pid for one in found.holders}
    came_and_went = {pid for pids in seen for pid in pids} - current
    if came_and_went:
        text = f"{label} is unstable: pid {', '.join(map(str, sorted(came_and_went)))} held it during the samples"
        result.append(Reason("unstable", text, label))
    unprotected = [one for one in found.visitors if one.protected is None]
    if gpu.minor is None and not gpu.mig:
        text = f"{label}: the driver does not tell its device node, so nobody can be found by what they have open"
        result.append(Reason("minor_unknown", text, label, means="unknown"))
    if gpu.processes is None and not gpu.mig:
        # With the list one of those that have it open could turn out to be a holder.
        pids = ", ".join(str(one.pid) for one in unprotected[:4])
        text = f"{label}: the driver gives no process list" + (f", and pid {pids} has it open" if pids else "")
        severity = "required" if unprotected else "warning"
        result.append(Reason("processes_unknown", text, label, severity, means="unknown"))
    if found.rule_holds is False and unprotected:
        text = (
            f"{label}: on this driver a listed process has no readable mapping, so holders can't be told from visitors "
            f"(pid {', '.join(str(one.pid) for one in unprotected[:4])})"
        )
        result.append(Reason("holder_rule_unproved", text, label, means="unknown"))
    if found.stale_pids and not any(value for sample in facts.samples for value in [sample.used_mib.get(gpu.index)]):
        text = f"{label}: the driver lists dead pid {', '.join(map(str, found.stale_pids))} without memory"
        result.append(Reason("stale_pid", text, label, "warning"))
    if found.suspects:
        text = (
            f"{label}: the driver lists pid {', '.join(str(one.pid) for one in found.suspects)}, which does not "
            "have it open"
        )
        result.append(Reason("suspect", text, label, "warning"))
    return result


def _health(gpu: Gpu, facts: Facts) -> list[Reason]:
    label, health = gpu.label, gpu.health
    result = []
    failed = [problem for problem in gpu.errors if problem.call in HEALTH_CALLS and problem.code is not None]
    if failed:
        words = "; ".join(f"{problem.call}: {problem.message}" for problem in failed)
        text = f"{label}: whether it waits for a reset or for repair is not known ({words})"
        result.append(Reason("health_unknown", text, label, means="unknown"))
    if health.remap_failure:
        result.append(Reason("remap_failure", f"{label}: row remapping failed; the GPU needs repair", label))
    if health.retired_pages_pending:
        result.append(Reason("retirement_pending", f"{label}: pages wait for retirement; reset the GPU", label))
    if health.recovery_action not in (None, "none"):
        text = f"{label}: the driver asks for recovery action '{health.recovery_action}'"
        result.append(Reason("recovery_action", text, label))
    if health.remap_pending:
        text = f"{label}: a row remapping waits for the next reset"
        result.append(Reason("remap_pending", text, label, "warning"))
    for reason in health.throttle_reasons:
        if reason not in BENIGN_THROTTLE:
            result.append(Reason("throttled", f"{label} is throttled: {reason}", label, "warning"))
    used = gpu.memory.used_mib if gpu.memory else None
    idle = used == 0 and not gpu.processes and not facts.snapshot.holders[gpu.index].holders
    if health.utilization_percent == 100 and idle:
        text = (
            f"{label} reports 100 % utilisation with nothing on it (a latch after a kill in mid-kernel); a new "
            "context clears it"
        )
        result.append(Reason("utilization_latched", text, label, "warning"))
    return result


def _hidden(facts: Facts) -> list[Reason]:
    """Processes that are not even listed: a server, an orphan or a holder may be among them, GPUs or not."""
    return [
        Reason("scan_failed", f"{problem.call}: {problem.message}", "processes", means="unknown")
        for problem in facts.snapshot.problems
    ]


def _scan(facts: Facts) -> list[Reason]:
    scan = facts.snapshot.scan
    result = []
    processes = facts.snapshot.processes
    blind = [pid for pid in scan.unreadable if pid in processes and not _shielded(processes[pid], facts.snapshot)]
    if blind:
        pids = ", ".join(map(str, blind[:6]))
        text = f"{len(blind)} processes can't be looked into (pid {pids}): run as root to see whether they hold a GPU"
        result.append(Reason("scan_incomplete", text, "processes", means="unknown"))
    return result


def _shielded(process: Process, snapshot: Snapshot) -> bool:
    """Protected processes never make a host dirty by holding a GPU, so not seeing into them is no gap."""
    inside = guest_of(process) not in (None, snapshot.own_guest)
    return not inside and protected_why(process, snapshot.own_pids, (), snapshot.units) is not None


def _guest(facts: Facts) -> list[Reason]:
    """A container that is looked at from its node must run, and nobody in it may be beyond SIGKILL."""
    guest = facts.snapshot.guest
    if guest is None:
        return []
    result = []
    if guest.state == "broken":
        text = (
            f"{guest.label} has lost its init: {len(guest.members)} processes are left in its cgroup, nobody can "
            "attach; it has to be stopped and started (rung container_stop), or the node rebooted where that can't end"
        )
        result.append(Reason("container_broken", text, guest.label))
    elif guest.state == "unknown":
        text = f"whether {guest.label} runs can't be told: it has a cgroup without processes"
        result.append(Reason("container_unknown", text, guest.label, means="unknown"))
    elif guest.state == "stopped":
        text = f"{guest.label} does not run on this node (it has no cgroup). To start it: pct start {guest.vmid}"
        result.append(Reason("container_stopped", text, guest.label))
    for problem in guest.problems:
        text = f"not all of {guest.label} can be seen: {problem.call}: {problem.message}"
        result.append(Reason("container_unknown", text, guest.label, means="unknown"))
    for stuck in guest.stuck:
        process = facts.snapshot.processes.get(stuck.pid)
        title = program_of(process) if process else "?"
        waits = f", waits in {stuck.wchan}" if stuck.wchan else ""
        text = (
            f"pid {stuck.pid} {title} of {guest.label} can't be killed: state {stuck.state}, SIGKILL pending{waits}. "
            "Free what it waits on; else a reboot of the node is the next step"
        )
        result.append(Reason("unkillable", text, f"pid {stuck.pid}"))
    return result


# --- the host ---------------------------------------------------------------------------------------------------------


def _host_memory(facts: Facts, limits: Limits) -> list[Reason]:
    needed, available = limits.required_available_mib, facts.available_mib
    if needed <= 0:
        return []
    if available is None or not facts.cgroup.readable:
        what = "MemAvailable" if available is None else "the cgroup's memory limit"
        return [
            Reason(
                "host_memory_unknown", f"{what} can't be read; {needed} MiB are needed", "host memory", means="unknown"
            )
        ]
    if available >= needed:
        return []
    memory = facts.memory
    parts = [f"MemAvailable {memory.mem_available_mib} MiB"]
    if facts.cgroup.limit_mib is not None:
        parts.append(f"cgroup headroom {facts.cgroup.headroom_mib} of {facts.cgroup.limit_mib} MiB")
    if memory.hugepages_mib:
        parts.append(f"{memory.hugepages_mib} MiB are set aside as hugepages")
    text = f"{available} MiB of host memory are available, {needed} MiB are needed ({', '.join(parts)})"
    return [Reason("host_memory_short", text, "host memory")]


def _ports(facts: Facts, limits: Limits) -> list[Reason]:
    if not limits.ports:
        return []
    if facts.ports is None:
        text = "the sockets of this host can't be read"
        return [Reason("ports_unknown", text, f"port {limits.ports[0]}", means="unknown")]
    return list(judge_ports(facts.ports, limits.ports, facts.snapshot.processes))


def _shm(facts: Facts, limits: Limits) -> list[Reason]:
    shm = facts.shm
    if shm.free_mib is None:
        words = "; ".join(problem.message for problem in shm.problems) or "no answer"
        return [Reason("shm_unknown", f"{shm.path} can't be read: {words}", shm.path, means="unknown")]
    result = []
    removable = [name for name, leftover in facts.leftovers if leftover.removable]
    if shm.free_mib < limits.shm_required_mib:
        count = len(shm.files) if shm.files is not None else "unknown"
        text = (
            f"{shm.path} has {shm.free_mib} MiB free of {shm.total_mib}, {limits.shm_required_mib} are "
            "needed: the next "
            f"start would die of SIGBUS (exit code -7). {count} files, {len(removable)} of them leftovers "
            "of dead servers"
        )
        result.append(Reason("shm_full", text, shm.path))
    elif removable:
        text = f"{shm.path} holds {len(removable)} leftovers of dead servers ({', '.join(removable[:3])})"
        result.append(Reason("leftovers", text, shm.path, "warning"))
    return result


def _orphans(facts: Facts) -> list[Reason]:
    snapshot = facts.snapshot
    result = []
    leaders = {leader.process.pid for leader in snapshot.leaders}
    for process in snapshot.processes.values():
        if process.dead or elsewhere(process, snapshot):
            continue
        subject = f"pid {process.pid}"
        if worker_role(process.title) and not _has_leader(process, leaders, snapshot):
            text = f"{subject} {program_of(process)} is an orphan: no SGLang launcher is above it"
            result.append(Reason("orphan", text, subject))
        elif SPAWN_MARK in process.argv and process.ppid == 1:
            text = (
                f"{subject} is a Python worker whose parent died ({program_of(process)}); it may be a server's "
                "that still loads"
            )
            result.append(Reason("possible_orphan", text, subject, "warning"))
    return result


def _has_leader(process: Process, leaders: t.Collection[int], snapshot: Snapshot) -> bool:
    seen = set()
    current: t.Optional[Process] = process
    while current is not None and current.pid not in seen:
        if current.pid in leaders:
            return True
        seen.add(current.pid)
        current = snapshot.processes.get(current.ppid)
    return False


def _servers(facts: Facts, limits: Limits) -> list[Reason]:
    """A launcher for one of our ports counts before it listens: it may have come back between two samples."""
    result = []
    for leader in facts.snapshot.leaders:
        if elsewhere(leader.process, facts.snapshot):
            continue
        subject = f"pid {leader.process.pid}"
        title = program_of(leader.process)
        if leader.port in limits.ports and leader.same_network:
            text = f"{subject} is an SGLang launcher for port {leader.port}: {title}"
            result.append(Reason("server_running", text, subject))
        elif limits.ports and None in (leader.port, leader.same_network) and leader.same_network is not False:
            text = f"{subject} is an SGLang launcher whose port can't be told ({title}); it may be for one of ours"
            result.append(Reason("server_port_unknown", text, subject, means="unknown"))
        elif limits.expected_gpus != 0:
            result += _starting(leader, facts)
    return result


def _starting(leader: Leader, facts: Facts) -> list[Reason]:
    """A server that is still importing holds no GPU yet, for up to a minute; then it takes those that it was given.

    One that holds any GPU has taken its own: it is just another server.
    """
    snapshot = facts.snapshot
    if leader.device == "cpu" or _has_taken(leader, snapshot):
        return []
    ours = {gpu.index: gpu.label for gpu in snapshot.gpus}
    given, by_flags = given_gpus(leader, snapshot), gpus_by_flags(leader, snapshot)
    known = given.indices if given is not None else by_flags
    aimed = [label for index, label in ours.items() if known is None or index in known]
    unresolved = given.unresolved if given is not None else ()
    if not aimed and not unresolved:
        return []
    subject = f"pid {leader.process.pid}"
    text = f"{subject} is an SGLang launcher that holds no GPU yet and may take "
    title = program_of(leader.process)
    if not aimed:
        words = ", ".join(unresolved)
        text += f"ours: CUDA_VISIBLE_DEVICES names {words}, which can't be told to be one of the host's GPUs ({title})"
        return [Reason("server_starting", text, subject, means="unknown")]
    return [Reason("server_starting", text + f"{', '.join(aimed)} ({title})", subject)]


def _has_taken(leader: Leader, snapshot: Snapshot) -> bool:
    """Whether it or a process below it has a GPU. The driver's word is enough, and so is having a node open where this
    driver's holders can't be told from visitors: another server's own GPUs must not count against ours.
    """
    family = {leader.process.pid, *descendants(leader.process.pid, snapshot.processes)}
    for found in snapshot.holders.values():
        rows = found.holders + found.suspects + (found.visitors if found.rule_holds is False else ())
        if any(one.pid in family for one in rows):
            return True
    return False


def _not_visible(facts: Facts, limits: Limits) -> list[Reason]:
    if facts.vantage != "container" or limits.expected_gpus == 0:
        return []
    text = "not visible from inside a container: holders in other PID namespaces, and the host's kernel log (Xid)"
    return [Reason("not_visible", text, "vantage", "advisory")]
