# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Taking samples until they stay in bounds or the time is up, and judging what was seen. Looks only; changes nothing.
"""

from __future__ import annotations

import math
import pwd
import time
import typing as t
from dataclasses import dataclass

from .decide.clean import Facts, Limits, Sample, counts_as_holder, judge
from .decide.devicerules import device_rule_problems
from .decide.guests import judge_absence, judge_nodes
from .decide.leftovers import Leftover, judge_leftover
from .errors import CleanSlateError
from .model import CgroupLimit, HostMemory, PortUse, Reason, ShmFile, ShmReading, to_json
from .observe.cuda import probe_cuda
from .observe.guest import outsiders, shm_opener, uid_outside, uids_of
from .observe.inside import device_numbers
from .observe.kernel_log import KMSG, read_kernel_log
from .observe.look import LookOptions, look
from .observe.memory import available_mib, read_cgroup_limit, read_guest_limit, read_meminfo
from .observe.nvml import kernel_gpu_count
from .observe.ports import read_ports
from .observe.procfs import read_text
from .observe.pve import read_guest as read_guest_config
from .observe.shm import read_shm
from .observe.vantage import vantage
from .results import driver_row, gpu_rows, guest_row
from .snapshot import Guest, Snapshot
from .spawn import fetch_bounded

MAX_SAMPLES = 60
READINGS_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Wanted:
    """How to look and what counts as clean."""

    look: LookOptions
    limits: Limits
    samples: int = 3
    interval_s: float = 1.0
    settle_s: float = 0.0
    shm_dir: str = "/dev/shm"
    user: t.Optional[str] = None
    cuda_deadline_s: t.Optional[float] = None
    vantage: t.Optional[str] = None
    kmsg: str = KMSG
    pve_dir: str = "/etc/pve"


def assess(wanted: Wanted) -> dict[str, t.Any]:
    """Sample, judge, and return the verdict with its evidence as plain data.

    Raises:
        CleanSlateError: an argument makes no sense, or a chosen GPU is not on this host.
    """
    if not 1 <= wanted.samples <= MAX_SAMPLES:
        raise CleanSlateError(f"samples is {wanted.samples}; it must be between 1 and {MAX_SAMPLES}.")
    for name, value in (
        ("interval_s", wanted.interval_s),
        ("settle_s", wanted.settle_s),
        ("cuda_deadline_s", wanted.cuda_deadline_s or 0.0),
    ):
        if not math.isfinite(value) or value < 0:
            raise CleanSlateError(f"{name} is {value:g}; it is seconds, 0 or more, and must have an end.")
    started = time.monotonic()
    uid = None if wanted.look.container else _uid_of(wanted.user)
    series: list[Sample] = []
    guest_reasons: tuple[Reason, ...] = ()
    while True:
        snapshot = look(wanted.look)
        if snapshot.guest is not None:
            uid = _uid_inside(snapshot.guest, wanted)
        series.append(_sample(snapshot, time.monotonic() - started))
        if len(series) == 1:
            guest_reasons = _guest_reasons(wanted, snapshot.guest)
        facts = _facts(wanted, snapshot, tuple(series[-wanted.samples :]), uid, guest_reasons)
        enough = len(series) >= wanted.samples or wanted.look.without_gpus
        verdict = judge(facts, wanted.limits)
        late = time.monotonic() - started >= wanted.settle_s
        if enough and (verdict.state == "clean" or late):
            break
        time.sleep(wanted.interval_s)
    if wanted.cuda_deadline_s is not None and verdict.state == "clean" and snapshot.gpus:
        facts = _with_cuda(facts, probe_cuda(snapshot.gpus, wanted.cuda_deadline_s))
        verdict = judge(facts, wanted.limits)
    return {
        "verdict": verdict.state,
        "summary": verdict.summary,
        "reasons": to_json(verdict.reasons),
        "warnings_found": to_json(verdict.warnings),
        "vantage": facts.vantage,
        "container": guest_row(snapshot.guest),
        "simulated": snapshot.simulated,
        "samples_taken": to_json(facts.samples),
        "facts_seen": _raw(facts, wanted),
        "seconds": round(time.monotonic() - started, 3),
    }


def _sample(snapshot: Snapshot, at_s: float) -> Sample:
    used = {gpu.index: gpu.memory.used_mib if gpu.memory else None for gpu in snapshot.gpus}
    holders = {
        gpu.index: tuple(
            one.pid for one in snapshot.holders[gpu.index].holders if counts_as_holder(one, snapshot)
        )
        for gpu in snapshot.gpus
    }
    return Sample(round(at_s, 3), used, holders)


def _facts(
    wanted: Wanted,
    snapshot: Snapshot,
    samples: tuple[Sample, ...],
    uid: t.Optional[int],
    guest_reasons: tuple[Reason, ...],
) -> Facts:
    proc = wanted.look.proc
    memory, cgroup, shm, ports = _host_readings(wanted, snapshot)
    seen_from = wanted.vantage or vantage(proc)
    look_at_log = seen_from == "host" and wanted.limits.xid_window_s > 0
    return Facts(
        vantage=seen_from,
        snapshot=snapshot,
        samples=samples,
        memory=memory,
        cgroup=cgroup,
        available_mib=available_mib(memory, cgroup),
        shm=shm,
        leftovers=_leftovers(shm, uid, None if snapshot.guest is None else uids_of(snapshot.guest, proc)),
        ports=ports,
        kernel_gpu_count=kernel_gpu_count(proc),
        kernel_log=read_kernel_log(wanted.kmsg) if look_at_log else None,
        guest_reasons=guest_reasons,
    )


HostReadings = tuple[HostMemory, CgroupLimit, ShmReading, t.Optional[tuple[PortUse, ...]]]


def _host_readings(wanted: Wanted, snapshot: Snapshot) -> HostReadings:
    """Memory, its cgroup, shared memory and ports, read in a child: lxcfs and a stuck process's mappings can hang. Of a
    container the memory is the node's, all the rest its own.

    Raises:
        CleanSlateError: there was no answer in time.
    """
    proc, sys, ports = wanted.look.proc, wanted.look.sys, wanted.limits.ports
    guest = snapshot.guest
    creators = outsiders(guest, snapshot.processes) if guest else None

    def read() -> HostReadings:
        memory = read_meminfo(proc)
        if guest is None:
            uses = read_ports(proc, ports) if ports else ()
            return memory, read_cgroup_limit(proc, sys), read_shm(wanted.shm_dir, proc), uses
        shm = read_shm(wanted.shm_dir, proc, shm_opener(guest, wanted.shm_dir, proc), creators)
        of = guest.root_pid
        uses = () if not ports else None if of is None else read_ports(proc, ports, of)
        return memory, read_guest_limit(guest.vmid, proc, sys), shm, uses

    called = fetch_bounded(read, READINGS_DEADLINE_S)
    if called.ok:
        return t.cast(HostReadings, called.value)
    waits = called.stuck_wchan or "an unknown place"
    why = called.error or f"no answer within {READINGS_DEADLINE_S:g} s (waits in {waits})"
    raise CleanSlateError(f"memory, {wanted.shm_dir} and ports can't be read: {why}. What is there is unknown.")


def _with_cuda(facts: Facts, errors: t.Mapping[int, t.Optional[str]]) -> Facts:
    import dataclasses

    return dataclasses.replace(facts, cuda_errors=errors)


def _leftovers(
    shm: ShmReading, uid: t.Optional[int], owners: t.Optional[t.Sequence[range]]
) -> tuple[tuple[str, Leftover], ...]:
    def judged(file: ShmFile) -> Leftover:
        complete = shm.scan_complete
        return judge_leftover(file, server_uid=uid, leader_died_at=None, scan_complete=complete, owners=owners)

    return tuple((file.name, judged(file)) for file in shm.files or ())


def _uid_of(user: t.Optional[str]) -> t.Optional[int]:
    if user is None:
        return None
    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise CleanSlateError(f"user {user!r} does not exist on this host.") from None


def _guest_reasons(wanted: Wanted, guest: t.Optional[Guest]) -> tuple[Reason, ...]:
    """What Proxmox's configuration says against a container: that it is not of this node, or that its device rules are
    of an earlier boot. Looked at once: the configuration's file system can hang.
    """
    if guest is None:
        return ()
    config = read_guest_config(guest.vmid, wanted.pve_dir)
    wanting = [] if wanted.look.without_gpus else judge_nodes(guest, config, bool(wanted.look.devices))
    if guest.state in ("stopped", "unknown"):
        return tuple(judge_absence(guest, config))
    root_pid, start, proc = guest.root_pid, guest.root_start, wanted.look.proc
    called = fetch_bounded(
        lambda: device_numbers(root_pid, "/dev", proc, start) if root_pid else None, READINGS_DEADLINE_S
    )
    if config.exists is not True or not called.ok or called.value is None:
        return tuple(wanting)
    nodes = [f"/dev/{name} {major}:{minor}" for name, major, minor in called.value if name.startswith("nvidia")]
    devices = read_text(f"{proc}/devices")
    return (*wanting, *device_rule_problems(devices, config.device_rules, nodes, guest.vmid))


def _uid_inside(guest: Guest, wanted: Wanted) -> t.Optional[int]:
    """The uid on the node of the server's user in the container; None where it can't be told: then its files in shared
    memory count as anybody's, and none is called a leftover.
    """
    user = wanted.user
    if user is None:
        return None
    called = fetch_bounded(lambda: uid_outside(guest, user, wanted.look.proc), READINGS_DEADLINE_S)
    return t.cast("t.Optional[int]", called.value) if called.ok else None


def _raw(facts: Facts, wanted: Wanted) -> dict[str, t.Any]:
    return {
        "driver": driver_row(facts.snapshot),
        "gpus": gpu_rows(facts.snapshot, wanted.look.proc),
        "memory": to_json(facts.memory),
        "cgroup": to_json(facts.cgroup),
        "available_mib": facts.available_mib,
        "shm": {
            "path": facts.shm.path,
            "total_mib": facts.shm.total_mib,
            "free_mib": facts.shm.free_mib,
            "files": None if facts.shm.files is None else len(facts.shm.files),
            "leftovers": [name for name, leftover in facts.leftovers if leftover.removable],
        },
        "ports": to_json(facts.ports),
        "xids": None if facts.kernel_log is None else to_json(facts.kernel_log.xids),
        "cuda": {str(index): text for index, text in (facts.cuda_errors or {}).items()},
    }
