# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One plan from request to result: what is installed, the model, GPUs and memory as they will be after the eviction,
the budget, the guardrails. It looks only; nothing is touched, and nothing of SGLang is imported.
"""

from __future__ import annotations

import os
import time
import typing as t
from dataclasses import dataclass, field

from .decide.budget import budget
from .decide.budget_findings import judge_budget
from .decide.flags_plan import judge_flags
from .decide.gpus import baseline_for
from .decide.guardrails import Rule, facts_tree, judge, parse_rules
from .decide.targets import RecordedLaunch, Request, select
from .decide.topology import judge_port_wishes, plan_topology
from .errors import CleanSlateError
from .model import CgroupLimit, Gpu, HostMemory, PortUse, Process, to_json
from .observe.bounded import fetch_sources
from .observe.look import LookOptions, look
from .observe.memory import read_cgroup_limit, read_meminfo
from .observe.ports import read_ports
from .observe.procfs import parse_status, read_text
from .plan_model import (
    Budget,
    Figure,
    Finding,
    GpuFacts,
    HostFacts,
    Learned,
    ModelFacts,
    PlanResult,
    Topology,
    verdict_of,
    waive,
)
from .recorded import launch_by, launch_of
from .sglang.flags import canonical as canonical_name
from .sglang.flags import same_value
from .sglang.learned import learned_from_log
from .sglang.logs import read_ends
from .sglang.model_config import read_model
from .sglang.record import Record, find_recorded, recorded_process
from .snapshot import Snapshot
from .spawn import fetch_bounded

READ_DEADLINE_S = 20.0
MODEL_DEADLINE_S = 20.0
KIB_PER_MIB = 1024
HIDDEN_MIB = 1024  # memory without a visible holder that is worth a word
MOST_RESERVED_MIB = 1024  # of an idle GPU; an H200 reserves 615 MiB
# The ranks of two launches load the same weights only if all of these are the same.
WEIGHT_FLAGS = (
    "model-path", "quantization", "dtype", "load-format", "tp-size", "pp-size", "dp-size", "enable-dp-attention",
    "ep-size", "speculative-algorithm", "speculative-draft-model-path", "nnodes", "device", "attention-backend",
    "chunked-prefill-size", "max-running-requests",
)  # fmt: skip


@dataclass(frozen=True)
class PlanRequest:
    """A wanted server, as the inventory has it. ``rules``: guardrails as data; ``waivers``: reasons by rule.

    ``node_available_mib`` and ``node_headroom_mib``: of the Proxmox node and the container's limit there, where known.
    """

    look: LookOptions
    flags: t.Mapping[str, t.Any]
    python: str
    name: t.Optional[str] = None
    port: t.Optional[int] = None
    unit: t.Optional[str] = None
    device: str = "gpu"
    environment: t.Mapping[str, str] = field(default_factory=dict)
    server: t.Mapping[str, t.Any] = field(default_factory=dict)
    rules: t.Sequence[t.Any] = ()
    waivers: t.Mapping[str, str] = field(default_factory=dict)
    state_dir: str = "/var/lib/cleanslate"
    scope: str = "server"
    baselines: t.Mapping[str, int] = field(default_factory=dict)
    node_available_mib: t.Optional[int] = None
    node_headroom_mib: t.Optional[int] = None
    min_gpu_headroom_mib: int = 2048
    shm_dir: str = "/dev/shm"


@dataclass(frozen=True)
class Plan:
    """The result with all that it was made of."""

    result: PlanResult
    topology: Topology
    model: ModelFacts
    host: HostFacts
    learned: t.Optional[Learned]
    device: str = "gpu"
    simulated: bool = False

    @property
    def gpu_figures(self) -> tuple[Figure, ...]:
        """On the CPU there is no GPU to tell of."""
        return () if self.device == "cpu" else self.result.budget.gpu


def plan(request: PlanRequest) -> Plan:
    """Judge a wanted configuration on this host.

    Raises:
        CleanSlateError: the request makes no sense (a rule that can't be read, a GPU that isn't there).
    """
    started = time.monotonic()
    rules, wrong = parse_rules(list(request.rules))
    if wrong:
        raise CleanSlateError("; ".join(wrong))
    findings: list[Finding] = []
    install, table, checks = fetch_sources(request.python, request.environment.get("PYTHONPATH", ""))
    version = install.version if install else None
    found, canonical = judge_flags(request.flags, table, version, checks)
    findings += found
    snapshot = look(request.look)
    record, log, found_record = _last_launch(request)
    findings += found_record
    going = _who_goes(snapshot, request, record)
    model = _model(canonical, install.package if install else None)
    gpus, found_gpus = _gpus(snapshot, request, going)
    findings += found_gpus
    # The port is the server's own setting and no flag; the ports of attention-DP are counted from it.
    wanted = canonical if request.port is None else {**canonical, "port": request.port}
    topology, found_topology = plan_topology(wanted, gpus, model, version)
    findings += found_topology
    host, uses = _host(request, topology, going)
    learned = _learned(record, log, canonical)
    figures = budget(canonical, model, topology, host, learned, version)
    findings += _port_findings(topology, uses, snapshot, going)
    findings += judge_budget(figures, canonical, model, topology, host, version, request.min_gpu_headroom_mib)
    # What the rules say is waived by them.
    findings = waive(findings, request.waivers)
    findings += _by_rules(rules, request, canonical, model, topology, host, figures, version)
    result = PlanResult(
        verdict_of(findings), _sorted(findings), figures, canonical, version, round(time.monotonic() - started, 3)
    )
    return Plan(result, topology, model, host, learned, request.device, snapshot.simulated)


def to_result(planned: Plan) -> dict[str, t.Any]:
    """A plan as a module returns it."""
    result = planned.result
    return {
        "verdict": result.verdict,
        "summary": summary(result),
        "findings": to_json(result.findings),
        "budget": {"gpu": to_json(planned.gpu_figures), "host": to_json(result.budget.host)},
        "topology": to_json(planned.topology),
        "model": to_json(planned.model),
        "host": to_json(planned.host),
        "learned": to_json(planned.learned),
        "sglang_version": result.sglang_version,
        "simulated": planned.simulated,
        "seconds": result.seconds,
    }


def summary(result: PlanResult) -> str:
    """The verdict and its first reason in one sentence."""
    worst = [one for one in result.findings if one.severity in ("deny", "unknown") and one.waived is None]
    warned = sum(one.severity == "warn" for one in result.findings)
    if not worst:
        tail = f", {warned} warning{'s' if warned != 1 else ''}" if warned else ""
        return f"{result.verdict}{tail}"
    more = f" (and {len(worst) - 1} more)" if len(worst) > 1 else ""
    return f"{result.verdict}: {worst[0].message} [{worst[0].id}]{more}"


# --- what is there ----------------------------------------------------------------------------------------------------


def _last_launch(
    request: PlanRequest,
) -> tuple[t.Optional[Record], t.Optional[str], t.Iterable[Finding]]:
    """The record of this server's last launch on this host and the text of its log, None where there is none."""
    name = request.name
    if not name:
        return None, None, ()

    def read() -> tuple[t.Optional[Record], t.Optional[str]]:
        record = find_recorded(request.state_dir, name)
        return record, read_ends(record.log) if record and record.log and record.log.startswith("/") else None

    called = fetch_bounded(read, READ_DEADLINE_S)
    if called.ok:
        record, text = t.cast("tuple[t.Optional[Record], t.Optional[str]]", called.value)
        return record, text, ()
    why = called.error or f"no answer within {READ_DEADLINE_S:g} s"
    message = f"the last launch can't be read: {why}. What its log would teach is assumed instead"
    return None, None, [Finding("last_launch_unread", "warn", f"server {name}", message)]


def _who_goes(snapshot: Snapshot, request: PlanRequest, record: t.Optional[Record]) -> tuple[Process, ...]:
    """The processes that the eviction before this launch would end: what they use will be free by then."""
    wanted = Request(
        scope="server" if request.look.without_gpus else request.scope,
        name=request.name,
        port=request.port,
        unit=request.unit,
        record=None if record is None else _recorded(record, snapshot),
        protect=request.look.protect,
        devices=request.look.devices,
    )
    return tuple(target.process for target in select(snapshot, wanted).everybody)


def _recorded(record: Record, snapshot: Snapshot) -> RecordedLaunch:
    found = recorded_process(record, snapshot.processes, snapshot.boot_id)
    return launch_by(record) if found is None else launch_of(found, record, snapshot.boot_id)


def _gpus(
    snapshot: Snapshot, request: PlanRequest, going: t.Sequence[Process]
) -> tuple[t.Optional[list[GpuFacts]], list[Finding]]:
    """The chosen GPUs, and what is to be said of their memory; None where they can't be read."""
    if request.device == "cpu":
        return [], []
    if snapshot.reading.gpus is None:
        return None, []
    facts, findings = [], []
    for gpu in snapshot.gpus:
        returned, hidden = _returned_mib(gpu, snapshot, request, going)
        facts.append(
            GpuFacts(
                index=gpu.index,
                uuid=gpu.uuid,
                name=gpu.name,
                total_mib=gpu.memory.total_mib if gpu.memory else None,
                free_mib=gpu.memory.free_mib if gpu.memory else None,
                compute_capability=gpu.compute_capability,
                returned_mib=returned,
            )
        )
        if hidden:
            message = (
                f"GPU {gpu.index} has {returned:,} MiB in use, and nobody who can be seen holds them; they count as"
                " free here, since nothing is started before a verdict of clean"
            )
            remedy = "playbook inspect; from within a container only its node sees everybody"
            findings.append(Finding("gpu_holder_unknown", "warn", f"GPU {gpu.index}", message, remedy))
    return facts, findings


def _returned_mib(gpu: Gpu, snapshot: Snapshot, request: PlanRequest, going: t.Sequence[Process]) -> tuple[int, bool]:
    """What becomes free before the start, and whether nobody is to be seen who holds it.

    A launch follows a verdict of clean, so that memory without a visible holder is gone by then, or there is no launch.
    What somebody holds who stays is not: where others share the GPU, only what the driver counts for those that go.
    """
    memory = gpu.memory
    if memory is None or memory.used_mib is None:
        return 0, False
    reserved = 0 if memory.used_excludes_reserved else memory.reserved_mib or MOST_RESERVED_MIB
    room = max(0, memory.used_mib - reserved - baseline_for(gpu, request.baselines))
    holders = [one for one in snapshot.holders[gpu.index].holders if one.process is not None]
    keys = {process.key for process in going}
    if all(one.process is not None and one.process.key in keys for one in holders):
        return room, not holders and room > HIDDEN_MIB
    pids = {process.pid for process in going}
    return min(room, sum(row.used_mib or 0 for row in gpu.processes or () if row.pid in pids)), False


def _model(canonical: t.Mapping[str, t.Any], package: t.Optional[str]) -> ModelFacts:
    given = {canonical_name(str(name)): value for name, value in canonical.items()}
    path = str(given.get("model-path") or "")
    called = fetch_bounded(lambda: read_model(path, package), MODEL_DEADLINE_S)
    if called.ok:
        return t.cast(ModelFacts, called.value)
    why = called.error or f"no answer within {MODEL_DEADLINE_S:g} s; a file server may be down"
    return ModelFacts(path, "unreadable", (f"{path} can't be read: {why}",))


Readings = tuple[HostMemory, CgroupLimit, t.Optional[int], t.Optional[tuple[PortUse, ...]], int]


def _host(
    request: PlanRequest, topology: Topology, going: t.Sequence[Process]
) -> tuple[HostFacts, t.Optional[tuple[PortUse, ...]]]:
    proc, sys = request.look.proc, request.look.sys
    ports = tuple(wish.port for wish in topology.ports)

    def read() -> Readings:
        kib = sum(_resident_kib(process.pid, proc) for process in going)
        room, uses = _shm_free_mib(request.shm_dir), read_ports(proc, ports)
        return read_meminfo(proc), read_cgroup_limit(proc, sys), room, uses, kib // KIB_PER_MIB

    called = fetch_bounded(read, READ_DEADLINE_S)
    if not called.ok:
        return HostFacts(node_available_mib=request.node_available_mib, ranks_here=topology.ranks_here), None
    memory, limit, shm_free, uses, comes_back = t.cast(Readings, called.value)
    headroom = [value for value in (limit.headroom_mib, request.node_headroom_mib) if value is not None]
    return (
        HostFacts(
            mem_available_mib=memory.mem_available_mib,
            cgroup_headroom_mib=min(headroom) if headroom else None,
            cgroup_limited=bool(headroom) if limit.readable else None,
            node_available_mib=request.node_available_mib,
            shm_free_mib=shm_free,
            ranks_here=topology.ranks_here,
            returned_mib=min(comes_back, _in_use_mib(memory)),
        ),
        uses,
    )


def _in_use_mib(memory: HostMemory) -> int:
    """No more than this can come back: several processes may show the same shared memory as theirs."""
    total, available = memory.mem_total_mib, memory.mem_available_mib
    return 0 if total is None or available is None else max(0, total - available)


def _resident_kib(pid: int, proc: str) -> int:
    """Anonymous and shared memory that comes back when the process ends; 0 of one that is gone."""
    status = parse_status(read_text(f"{proc}/{pid}/status") or "")
    total = 0
    for name in ("RssAnon", "RssShmem"):
        words = status.get(name, "").split()
        total += int(words[0]) if words and words[0].isdecimal() else 0
    return total


def _shm_free_mib(path: str) -> t.Optional[int]:
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize // 2**20


def _learned(record: t.Optional[Record], log: t.Optional[str], canonical: t.Mapping[str, t.Any]) -> t.Optional[Learned]:
    """What the log of this server's last launch on this host says."""
    if record is None or log is None:
        return None
    return learned_from_log(log, f"the log of launch {record.launch_id}", _same_weights(record.flags, canonical))


def _same_weights(launched: t.Mapping[str, t.Any], wanted: t.Mapping[str, t.Any]) -> bool:
    """Whether both load the same weights in the same way, and capture the same graphs."""
    one, other = ({canonical_name(str(name)): value for name, value in flags.items()} for flags in (launched, wanted))
    names = {name for name in (*one, *other) if name in WEIGHT_FLAGS or "cuda-graph" in name}
    return all(same_value(one.get(name), other.get(name)) for name in names)


# --- what stands against it -------------------------------------------------------------------------------------------


def _port_findings(
    topology: Topology, uses: t.Optional[tuple[PortUse, ...]], snapshot: Snapshot, going: t.Sequence[Process]
) -> t.Iterable[Finding]:
    """Ports that somebody who stays listens on."""
    pids = {process.pid for process in going}
    left = None if uses is None else tuple(use for use in uses if not use.pids or not set(use.pids) <= pids)
    return judge_port_wishes(topology.ports, left, snapshot.processes)


def _by_rules(
    rules: t.Sequence[Rule],
    request: PlanRequest,
    canonical: t.Mapping[str, t.Any],
    model: ModelFacts,
    topology: Topology,
    host: HostFacts,
    figures: Budget,
    version: t.Optional[str],
) -> list[Finding]:
    server = {"device": request.device, "port": request.port, "unit": request.unit, **request.server}
    facts = facts_tree(
        canonical,
        model=model,
        topology=topology,
        host=host,
        budget=figures,
        version=version,
        environment=request.environment,
        server=server,
    )
    return judge(rules, facts, request.waivers)


def _sorted(findings: t.Iterable[Finding]) -> tuple[Finding, ...]:
    order = {"deny": 0, "unknown": 1, "warn": 2, "note": 3}
    return tuple(sorted(findings, key=lambda one: order.get(one.severity, 4)))
