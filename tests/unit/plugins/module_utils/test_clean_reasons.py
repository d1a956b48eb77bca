# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each reason by itself: its code, whom it is about, how severe it is, what it means, and the figures in its sentence.
Programs read the first four, and a person who is called at night the last.
"""

from __future__ import annotations

import dataclasses
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.clean import Facts, Limits, Sample, judge
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.leftovers import Leftover
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import (
    CgroupLimit,
    GpuHealth,
    GpuReading,
    MigInstance,
    PortUse,
    Problem,
    ShmFile,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.xid import KernelLog, Xid, normal_bus_id
from ansible_collections.cleanslate.sglang.tests.unit.builders import (
    LEADER,
    facts,
    gpu,
    holds,
    leader,
    memory,
    process,
    shm,
    snapshot,
    visits,
)

GPU0 = gpu(0).label
SPAWNED = ("python3", "-c", "x", "--multiprocessing-fork")
SERVER = process(100, LEADER)
OLD = memory(500, used_excludes_reserved=False)
# (code, subject, severity, means)
Row = tuple[str, str, str, str]


def of(one: t.Any, *more: t.Any, **options: t.Any) -> Facts:
    return facts(snapshot(*more, gpus=[one], **options))


def silent(problem: Problem | None, source: str = "nvml", **changes: t.Any) -> Facts:
    reading = GpuReading(source, None, problems=(problem,) if problem else (), **changes)
    return facts(snapshot(reading=reading))


def sampled(seen: Facts, *used: int | None, pids: t.Sequence[tuple[int, ...]] = ()) -> Facts:
    held = list(pids) or [()] * len(used)
    return dataclasses.replace(seen, samples=tuple(Sample(0.0, {0: mib}, {0: who}) for mib, who in zip(used, held)))


def unknown(code: str, subject: str = "driver") -> Row:
    return (code, subject, "required", "unknown")


def dirty(code: str, subject: str = GPU0) -> Row:
    return (code, subject, "required", "dirty")


def warning(code: str, subject: str = GPU0) -> Row:
    return (code, subject, "warning", "dirty")


def mig(*instances: MigInstance) -> Facts:
    return of(gpu(0, mig_enabled=True, processes=None, mig=instances))


def health(**changes: t.Any) -> Facts:
    return of(gpu(0, health=GpuHealth(**changes)))


NVML = "nvmlDeviceGetMemoryInfo"
NO_LIMIT = CgroupLimit(2, "/", None, None, None, True)
FILES = tuple((f"sgl_shm_mm_{pid}_x", Leftover(True, "dead")) for pid in range(5))
KEPT = (("psm_1", Leftover(False, "alive")),)
PORTS = Limits(ports=(30000,))
NEEDS = Limits(required_available_mib=500_000)

CASES: dict[str, tuple[Facts, Limits, list[Row], tuple[str, ...]]] = {
    # the driver
    "simulated": (
        facts(snapshot(reading=GpuReading("nvml", (gpu(),), simulated=True, library="/x/libnvidia-ml.so.1"))),
        Limits(),
        [unknown("simulated")],
        ("/x/libnvidia-ml.so.1", "allow_simulated is off"),
    ),
    "another number": (facts(), Limits(expected_gpus=8), [unknown("gpu_count")], ("8 GPUs", "the driver shows 1")),
    "none": (facts(snapshot()), Limits(), [unknown("no_gpus")], ("the driver shows no GPU", "expected_gpus: 0")),
    "the kernel has more": (
        facts(kernel_gpu_count=2),
        Limits(),
        [unknown("gpu_count")],
        ("drives 2 GPUs", "library shows 1"),
    ),
    "mismatch by code": (
        silent(Problem("init", 18, "x"), nvml_version="12.580", kernel_module_version="570.1"),
        Limits(),
        [unknown("driver_mismatch")],
        ("library 12.580", "module 570.1", "(x)"),
    ),
    "mismatch by words": (
        silent(Problem("run", None, "Driver/library Version Mismatch"), "nvidia-smi"),
        Limits(),
        [unknown("driver_mismatch")],
        ("library unknown", "module unknown"),
    ),
    "a code with advice": (
        silent(Problem("init", 9, "Driver Not Loaded")),
        Limits(),
        [unknown("driver_not_loaded")],
        ("NVML error 9: Driver Not Loaded", "modprobe nvidia"),
    ),
    "the same number of another source": (
        silent(Problem("run", 9, "it broke"), "nvidia-smi"),
        Limits(),
        [unknown("driver_silent")],
        ("the GPUs can't be read: it broke",),
    ),
    "hung": (silent(Problem("init", None, "no answer within 10 s")), Limits(), [unknown("driver_hung")], ("10 s",)),
    "nothing": (silent(None), Limits(), [unknown("driver_silent")], ("the GPUs can't be read: no answer",)),
    # a GPU
    "no figure": (
        of(gpu(0, memory=None, errors=(Problem(NVML, 15, "GPU is lost"), Problem("b", 1, "c")))),
        Limits(),
        [unknown("gpu_no_answer", GPU0)],
        (f"{GPU0} gives no memory figure: {NVML}: GPU is lost; b: c",),
    ),
    "no figure and no word": (
        of(gpu(0, memory=None)),
        Limits(),
        [unknown("gpu_no_answer", GPU0)],
        ("figure: no answer",),
    ),
    "cuda fails": (facts(cuda_errors={0: "error 46"}), Limits(), [dirty("cuda_fails")], (f"{GPU0}: error 46",)),
    "cuda hangs": (
        facts(cuda_errors={0: "no answer within 5 s"}),
        Limits(),
        [unknown("cuda_fails", GPU0)],
        ("no answer within 5 s",),
    ),
    "cuda of another GPU": (facts(cuda_errors={1: "error 46", 0: None}), Limits(), [], ()),
    "a sample is missing": (sampled(facts(), 0, None, 0), Limits(), [unknown("memory_unknown", GPU0)], ()),
    "no samples": (sampled(facts()), Limits(), [unknown("memory_unknown", GPU0)], ()),
    "the old call": (
        sampled(of(gpu(0, memory=OLD)), 500, 501),
        Limits(),
        [unknown("reserved_unknown", GPU0)],
        ("501 MiB", "limit 64 MiB"),
    ),
    "flickering": (
        sampled(of(gpu(0, 9)), 9, 900, 10),
        Limits(),
        [dirty("unstable")],
        ("9, 900, 10 MiB in the last 3 samples", "limit 64 MiB"),
    ),
    "at the limit": (sampled(of(gpu(0, 64)), 64, 64), Limits(), [], ()),
    "nobody": (
        sampled(of(gpu(0, 900)), 800, 900),
        Limits(max_used_mib=70),
        [dirty("holder_unknown")],
        ("900 MiB in use, limit 70 MiB", "gpu_reset"),
    ),
    "elsewhere": (
        dataclasses.replace(sampled(of(gpu(0, 900)), 900), vantage="container"),
        Limits(),
        [dirty("held_elsewhere"), ("not_visible", "vantage", "advisory", "dirty")],
        ("900 MiB in use", "look from the host"),
    ),
    "stale": (sampled(of(gpu(0, 900, listed=[777])), 900), Limits(), [dirty("stale_pid")], ("lists pid 777",)),
    "stale without memory": (of(gpu(0, listed=[777])), Limits(), [warning("stale_pid")], ("dead pid 777",)),
    "held": (
        sampled(of(gpu(0, 900), process(7, ("vim",)), uses=[holds(7)]), 900, pids=[(7,)]),
        Limits(),
        [dirty("memory_in_use"), dirty("held")],
        (f"{GPU0} has 900 MiB in use, limit 64 MiB: held by pid 7 vim (", f"{GPU0} is held by pid 7 vim ("),
    ),
    "came and went": (
        sampled(facts(), 0, 0, pids=[(9, 8), ()]),
        Limits(),
        [dirty("unstable")],
        ("pid 8, 9 held it during the samples",),
    ),
    "no node": (of(gpu(0, minor=None)), Limits(), [unknown("minor_unknown", GPU0)], ()),
    "no list": (
        of(gpu(0, processes=None)),
        Limits(),
        [("processes_unknown", GPU0, "warning", "unknown")],
        ("no process list",),
    ),
    "no list and visitors": (
        of(
            gpu(0, processes=None),
            *(process(pid, ("vim",)) for pid in range(11, 17)),
            uses=[visits(pid) for pid in range(11, 17)],
        ),
        Limits(),
        [unknown("processes_unknown", GPU0)],
        ("pid 11, 12, 13, 14 has it open",),
    ),
    "unified": (
        of(gpu(0, memory=memory(None, unified=True))),
        Limits(),
        [unknown("unified_memory", GPU0)],
        ("say how much must be available (required_available_mib)",),
    ),
    "unified with a figure": (
        of(gpu(0, memory=memory(None, unified=True))),
        Limits(required_available_mib=1),
        [warning("unified_memory")],
        ("host memory decides",),
    ),
    # slices
    "a slice in use": (
        mig(MigInstance("MIG-b", memory(500), ())),
        Limits(),
        [dirty("memory_in_use", f"{GPU0} MIG MIG-b")],
        (f"{GPU0} MIG MIG-b has 500 MiB in use, limit 64 MiB",),
    ),
    "a slice at the limit": (mig(MigInstance("MIG-b", memory(64), ())), Limits(), [], ()),
    "a slice by the old call": (
        mig(MigInstance("MIG-b", OLD, ())),
        Limits(),
        [unknown("reserved_unknown", f"{GPU0} MIG MIG-b")],
        ("shows 500 MiB",),
    ),
    "a slice by the old call, at the limit": (
        mig(MigInstance("MIG-b", memory(64, used_excludes_reserved=False), ())),
        Limits(),
        [],
        (),
    ),
    "a slice without a name": (
        mig(MigInstance(None, None, (), (Problem("a", 1, "lost"), Problem("b", 1, "gone")))),
        Limits(),
        [unknown("mig_no_answer", f"{GPU0} MIG 0")],
        ("gives no answer: lost; gone",),
    ),
    # its health
    "repair": (health(remap_failure=True), Limits(), [dirty("remap_failure")], ("needs repair",)),
    "retired": (health(retired_pages_pending=True), Limits(), [dirty("retirement_pending")], ("reset the GPU",)),
    "recovery": (health(recovery_action="reset"), Limits(), [dirty("recovery_action")], ("'reset'",)),
    "no recovery": (health(recovery_action="none"), Limits(), [], ()),
    "remap": (health(remap_pending=True), Limits(), [warning("remap_pending")], ("next reset",)),
    "throttled": (
        health(throttle_reasons=("idle", "hw slowdown")),
        Limits(),
        [warning("throttled")],
        ("is throttled: hw slowdown",),
    ),
    "latched": (health(utilization_percent=100), Limits(), [warning("utilization_latched")], ("100 %",)),
    "busy": (
        of(gpu(0, 10, health=GpuHealth(utilization_percent=100))),
        Limits(),
        [],
        (),
    ),
    # processes
    "blind": (
        facts(snapshot(*(process(pid) for pid in range(31, 39)), gpus=[gpu()], unreadable=range(31, 39))),
        Limits(),
        [unknown("scan_incomplete", "processes")],
        ("8 processes", "(pid 31, 32, 33, 34, 35, 36)", "run as root"),
    ),
    "orphan": (
        of(gpu(), process(7, "sglang::scheduler_TP0")),
        Limits(),
        [dirty("orphan", "pid 7")],
        ("pid 7 sglang::scheduler_TP0 is an orphan",),
    ),
    "possible orphan": (
        of(gpu(), process(7, SPAWNED), process(8, SPAWNED, ppid=9), process(9)),
        Limits(),
        [warning("possible_orphan", "pid 7")],
        ("pid 7 is a Python worker whose parent died",),
    ),
    "orphans in a circle": (
        of(gpu(), process(7, "sglang::scheduler_TP0", ppid=8), process(8, ("sh",), ppid=7)),
        Limits(),
        [dirty("orphan", "pid 7")],
        (),
    ),
    "our server": (
        of(gpu(), SERVER, leaders=[leader(SERVER, device="cpu")]),
        PORTS,
        [dirty("server_running", "pid 100")],
        ("for port 30000",),
    ),
    "a server of some port": (
        of(gpu(), SERVER, leaders=[leader(SERVER, None, device="cpu")]),
        PORTS,
        [unknown("server_port_unknown", "pid 100")],
        ("whose port can't be told",),
    ),
    "a server in another network": (
        of(gpu(), SERVER, leaders=[leader(SERVER, None, same_network=False, device="cpu")]),
        PORTS,
        [],
        (),
    ),
    "a server that starts": (
        of(gpu(), SERVER, leaders=[leader(SERVER, 1)]),
        PORTS,
        [dirty("server_starting", "pid 100")],
        (f"holds no GPU yet and may take {GPU0} (",),
    ),
    "a server that starts on something": (
        of(gpu(), SERVER, leaders=[leader(SERVER, 1, visible_devices="GPU-zzz")]),
        PORTS,
        [unknown("server_starting", "pid 100")],
        ("CUDA_VISIBLE_DEVICES names GPU-zzz",),
    ),
    "where no GPUs are declared": (
        facts(snapshot(SERVER, leaders=[leader(SERVER, 1)])),
        Limits(expected_gpus=0, ports=(30000,)),
        [],
        (),
    ),
    # the host
    "no figure of memory": (
        facts(available_mib=None),
        NEEDS,
        [unknown("host_memory_unknown", "host memory")],
        ("MemAvailable can't be read; 500000 MiB are needed",),
    ),
    "no figure of the cgroup": (
        facts(cgroup=dataclasses.replace(NO_LIMIT, readable=False)),
        NEEDS,
        [unknown("host_memory_unknown", "host memory")],
        ("the cgroup's memory limit can't be read",),
    ),
    "too little memory": (
        facts(cgroup=CgroupLimit(2, "/", 1000, 300, 700, True)),
        NEEDS,
        [dirty("host_memory_short", "host memory")],
        ("400000 MiB of host", "500000 MiB are needed (MemAvailable 400000 MiB, cgroup headroom 700 of 1000 MiB)"),
    ),
    "too little without a limit": (
        facts(),
        NEEDS,
        [dirty("host_memory_short", "host memory")],
        ("are needed (MemAvailable 400000 MiB)",),
    ),
    "just enough": (facts(), Limits(required_available_mib=400_000), [], ()),
    "no sockets": (facts(ports=None), PORTS, [unknown("ports_unknown", "port 30000")], ("can't be read",)),
    "a port": (
        facts(snapshot(process(7, ("vim",)), gpus=[gpu()]), ports=(PortUse(30000, "0.0.0.0", "LISTEN", 1, (7,)),)),
        PORTS,
        [dirty("port_busy", "port 30000")],
        ("pid 7",),
    ),
    "no figure of shm": (
        facts(shm=shm(None, problems=(Problem("a", 5, "broken"), Problem("b", 5, "gone")))),
        Limits(),
        [unknown("shm_unknown", "/dev/shm")],
        ("can't be read: broken; gone",),
    ),
    "full": (
        facts(shm=shm(63, files=(ShmFile("a", 1.0, 0, 1.0, None, None, (), ()),)), leftovers=FILES + KEPT),
        Limits(),
        [dirty("shm_full", "/dev/shm")],
        ("63 MiB free of 16000, 64 are needed", "1 files, 5 of them leftovers"),
    ),
    "full of what is not known": (
        facts(shm=shm(63, files=None)),
        Limits(),
        [dirty("shm_full", "/dev/shm")],
        ("unknown files, 0 of them",),
    ),
    "room enough": (facts(shm=shm(64), leftovers=KEPT), Limits(), [], ()),
    "leftovers": (
        facts(leftovers=FILES + KEPT),
        Limits(),
        [warning("leftovers", "/dev/shm")],
        ("5 leftovers", "(sgl_shm_mm_0_x, sgl_shm_mm_1_x, sgl_shm_mm_2_x)"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_reason(name: str) -> None:
    seen, limits, rows, words = CASES[name]
    found = judge(seen, limits)
    told = [*found.reasons, *found.warnings]
    assert [(one.code, one.subject, one.severity, one.means) for one in told] == rows
    for word in words:
        assert any(word in one.message for one in told), (word, told)
    states = {row[3] for row in rows if row[2] == "required"}
    assert found.state == ("dirty" if "dirty" in states else "unknown" if states else "clean")


def test_a_summary_has_the_worst_and_how_many_more() -> None:
    found = judge(facts(available_mib=None, cuda_errors={0: "error 46"}), NEEDS)
    assert found.summary == f"dirty: {GPU0}: error 46 (and 1 more)"
    assert judge(facts(cuda_errors={0: "error 46"}), Limits()).summary == f"dirty: {GPU0}: error 46"
    assert judge(facts(snapshot(gpus=[gpu(0), gpu(1)]), available_mib=None), Limits()).summary == (
        "clean: 2 GPUs free, unknown of host memory available, seen from the host"
    )
    assert judge(facts(snapshot()), Limits(expected_gpus=0)).summary.startswith("clean: no GPUs declared, 400000 MiB")


def rows_of(seen: Facts, limits: Limits) -> list[tuple[str, str]]:
    found = judge(seen, limits)
    return [(one.code, one.subject) for one in [*found.reasons, *found.warnings]]


def test_an_xid_counts_within_its_window_and_until_the_gpu_was_reset() -> None:
    bus = normal_bus_id(gpu(0).bus_id or "")
    assert bus
    log = KernelLog((Xid(bus, 79, 100.0, None, "GPU has fallen off the bus"),), True, (), 200.0)
    seen, hour = facts(kernel_log=log), Limits(xid_window_s=3600.0)
    assert [code for code, _subject in rows_of(seen, hour)] == ["xid_host_restart"]
    assert rows_of(seen, dataclasses.replace(hour, gpu_resets={bus: 150.0})) == []
    assert rows_of(seen, dataclasses.replace(hour, gpu_resets={bus: 50.0})) != []
    assert rows_of(seen, Limits(xid_window_s=99.0)) == []
    assert rows_of(facts(kernel_log=dataclasses.replace(log, xids=())), hour) == []


def test_as_many_gpus_as_the_kernel_has() -> None:
    assert rows_of(facts(kernel_gpu_count=1), Limits()) == []


def test_each_launcher_is_judged_whoever_else_is_there() -> None:
    """One of a container is none of ours, and hides nobody; each that starts is told."""
    theirs = process(100, LEADER, cgroups=("/lxc/105/init.scope",))
    ours = [process(pid, LEADER) for pid in (200, 300)]
    leaders = [leader(theirs), *(leader(one) for one in ours)]
    seen = facts(snapshot(theirs, *ours, gpus=[gpu()], leaders=leaders))
    both = [("pid 200", "pid 300")]
    starting = [(limits, "server_starting") for limits in (Limits(), Limits(expected_gpus=1))]
    for limits, code in ((PORTS, "server_running"), *starting):
        found = rows_of(seen, limits)
        assert [tuple(subject for one, subject in found if one == code)] == both, limits
        assert not [subject for _code, subject in found if subject == "pid 100"]


def test_a_container_says_what_it_cannot_see_also_where_its_gpus_are_counted() -> None:
    for limits in (Limits(), Limits(expected_gpus=1)):
        assert ("not_visible", "vantage") in rows_of(facts(vantage="container"), limits)
    assert ("not_visible", "vantage") not in rows_of(facts(snapshot(), vantage="container"), Limits(expected_gpus=0))
