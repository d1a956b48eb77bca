# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The verdict. Properties: clean means that all required facts are known and in bounds; knowing less never cleans."""

from __future__ import annotations

import dataclasses
import typing as t

import pytest
from hypothesis import example, find, given, settings
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.clean import (
    HEALTH_CALLS,
    Facts,
    Limits,
    Sample,
    judge,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.leftovers import Leftover
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import (
    CgroupLimit,
    GpuHealth,
    GpuReading,
    MigInstance,
    NvmlProcess,
    PortUse,
    Problem,
    ShmFile,
    Verdict,
)
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


def verdict(seen: t.Any = None, limits: Limits | None = None, **changes: t.Any) -> Verdict:
    return judge(facts(seen, **changes), limits or Limits())


def codes(found: Verdict) -> tuple[str, list[str]]:
    return found.state, [reason.code for reason in found.reasons]


def warned(found: Verdict) -> list[str]:
    return [reason.code for reason in found.warnings if reason.severity == "warning"]


def of_gpu(one: t.Any, **options: t.Any) -> Verdict:
    return verdict(snapshot(*options.pop("processes", ()), gpus=[one], **options))


def test_an_idle_host_is_clean() -> None:
    assert codes(verdict()) == ("clean", [])
    assert verdict().summary == "clean: 1 GPU free, 400000 MiB of host memory available, seen from the host"


# --- the driver ---


def test_no_gpus_is_clean_only_where_that_was_declared() -> None:
    empty = snapshot(gpus=[])
    assert codes(verdict(empty)) == ("unknown", ["no_gpus"])
    assert codes(verdict(empty, Limits(expected_gpus=0))) == ("clean", [])


def test_a_gpu_that_fell_off_is_missed() -> None:
    seen = snapshot(gpus=[gpu(0)])
    assert codes(verdict(seen, Limits(expected_gpus=2))) == ("unknown", ["gpu_count"])
    assert codes(verdict(seen, kernel_gpu_count=2)) == ("unknown", ["gpu_count"])
    assert codes(verdict(seen, kernel_gpu_count=2, vantage="container")) == ("clean", [])


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (Problem("nvmlInit", 18, "Driver/library version mismatch"), "driver_mismatch"),
        (Problem("nvmlInit", 9, "Driver Not Loaded"), "driver_not_loaded"),
        (Problem("nvmlInit", 999, "Unknown Error"), "driver_unknown_error"),
        (Problem("nvmlInit", 77, "Something New"), "driver_silent"),
        (Problem("nvml", None, "NVML gave no answer within 10 s: the driver hangs"), "driver_hung"),
    ],
)
def test_a_driver_without_answer_is_unknown(problem: Problem, code: str) -> None:
    seen = snapshot(reading=GpuReading("nvml", None, problems=(problem,)))
    assert codes(verdict(seen)) == ("unknown", [code])


def test_a_simulated_driver() -> None:
    seen = snapshot(reading=GpuReading("nvml", (gpu(0),), simulated=True))
    assert codes(verdict(seen)) == ("unknown", ["simulated"])
    assert codes(verdict(seen, Limits(allow_simulated=True))) == ("clean", [])


# --- memory ---


@pytest.mark.parametrize(("used", "state"), [(0, "clean"), (64, "clean"), (65, "dirty")])
def test_the_limit(used: int, state: str) -> None:
    assert of_gpu(gpu(0, used)).state == state


def test_a_baseline_is_added_to_the_limit() -> None:
    assert verdict(snapshot(gpus=[gpu(0, 200)]), Limits(baselines={"0": 150})).state == "clean"
    assert verdict(snapshot(gpus=[gpu(0, 215)]), Limits(baselines={"0": 150})).state == "dirty"


def test_memory_in_use_names_its_holder_or_says_what_is_known() -> None:
    train = process(30, ("python3", "train.py"))
    one = of_gpu(gpu(0, 900, listed=[30]), processes=[train], uses=[holds(30)])
    assert codes(one) == ("dirty", ["memory_in_use", "held"])
    assert "pid 30 python3 train.py (readable mapping 2048 KiB)" in one.reasons[0].message
    assert codes(of_gpu(gpu(0, 900, listed=[77]))) == ("dirty", ["stale_pid"])
    assert codes(of_gpu(gpu(0, 900, listed=[30]), processes=[train])) == ("dirty", ["suspect"])
    assert codes(of_gpu(gpu(0, 900))) == ("dirty", ["holder_unknown"])
    elsewhere = verdict(snapshot(gpus=[gpu(0, 900)]), vantage="container")
    assert codes(elsewhere) == ("dirty", ["held_elsewhere"])


def samples(*used: int | None) -> tuple[Sample, ...]:
    return tuple(Sample(float(at), {0: mib}, {0: ()}) for at, mib in enumerate(used))


def test_samples() -> None:
    assert codes(verdict(samples=samples(0, 0, 900))) == ("dirty", ["unstable"])
    assert codes(verdict(samples=samples(900, 0, 0))) == ("dirty", ["unstable"])
    assert codes(verdict(samples=samples(0, None, 0))) == ("unknown", ["memory_unknown"])
    assert codes(verdict(samples=())) == ("unknown", ["memory_unknown"])
    assert codes(verdict(samples=samples(900, 901, 902))) == ("dirty", ["holder_unknown"])


@pytest.mark.parametrize("seen", [[(7,), (), ()], [(), (7,), ()], [(7,), (7,), ()]])
def test_a_holder_that_came_and_went_makes_it_unstable(seen: list[tuple[int, ...]]) -> None:
    series = tuple(Sample(0.0, {0: 0}, {0: pids}) for pids in seen)
    assert codes(verdict(samples=series)) == ("dirty", ["unstable"])


def test_the_old_memory_call() -> None:
    def old(used: int) -> Verdict:
        return of_gpu(gpu(0, memory=memory(used, api="v1", used_excludes_reserved=False)))

    assert codes(old(64)) == ("clean", [])
    assert codes(old(308)) == ("unknown", ["reserved_unknown"])


def test_no_memory_figure() -> None:
    broken = gpu(0, memory=None, errors=(Problem("nvmlDeviceGetMemoryInfo", 999, "Unknown Error"),))
    found = of_gpu(broken)
    assert codes(found) == ("unknown", ["gpu_no_answer"])
    assert "nvmlDeviceGetMemoryInfo: Unknown Error" in found.summary


def test_mig() -> None:
    def sliced(*instances: MigInstance) -> Verdict:
        return of_gpu(gpu(0, mig_enabled=True, processes=None, mig=instances))

    free = MigInstance("MIG-a", memory(0), ())
    assert codes(sliced(free)) == ("clean", [])
    assert codes(sliced(free, MigInstance("MIG-b", memory(500), ()))) == ("dirty", ["memory_in_use"])
    assert codes(sliced(free, MigInstance("MIG-b", None, ()))) == ("unknown", ["mig_no_answer"])
    assert codes(sliced(free, MigInstance("MIG-b", memory(0), None))) == ("unknown", ["mig_no_answer"])
    old = memory(500, api="v1", used_excludes_reserved=False)
    assert codes(sliced(MigInstance("MIG-b", old, ()))) == ("unknown", ["reserved_unknown"])


# --- holders and what can't be seen ---


def test_a_holder_within_the_limit_is_dirty_all_the_same() -> None:
    assert codes(of_gpu(gpu(0), processes=[process(30)], uses=[holds(30)])) == ("dirty", ["held"])


def test_visitors_and_protected_holders_are_no_reason() -> None:
    xorg = process(30, exe="/usr/lib/xorg/Xorg")
    assert codes(of_gpu(gpu(0), processes=[xorg, process(31)], uses=[holds(30), visits(31)])) == ("clean", [])


def test_a_driver_on_which_the_mapping_rule_does_not_hold() -> None:
    """A listed process without a readable mapping: then the other visitor may be a holder too."""
    persistenced = process(30, exe="/usr/bin/nvidia-persistenced")
    found = of_gpu(gpu(0, listed=[30]), processes=[persistenced, process(31)], uses=[visits(30), visits(31)])
    assert codes(found) == ("unknown", ["holder_rule_unproved"])


def test_no_process_list() -> None:
    alone = of_gpu(gpu(0, processes=None))
    assert (codes(alone), warned(alone)) == (("clean", []), ["processes_unknown"])
    found = of_gpu(gpu(0, processes=None), processes=[process(30)], uses=[visits(30)])
    assert codes(found) == ("unknown", ["processes_unknown"])


def test_no_minor() -> None:
    assert codes(of_gpu(gpu(0, minor=None))) == ("unknown", ["minor_unknown"])


def test_processes_that_cannot_be_looked_into() -> None:
    assert codes(of_gpu(gpu(0), processes=[process(30)], unreadable=[30])) == ("unknown", ["scan_incomplete"])
    sshd = process(31, exe="/usr/sbin/sshd")
    assert codes(of_gpu(gpu(0), processes=[sshd], unreadable=[31])) == ("clean", [])
    failed = of_gpu(gpu(0), problems=(Problem("device scan", None, "no answer"),))
    assert codes(failed) == ("unknown", ["scan_failed"])


# --- health ---


@pytest.mark.parametrize(
    ("health", "state", "code"),
    [
        ({"remap_failure": True}, "dirty", "remap_failure"),
        ({"retired_pages_pending": True}, "dirty", "retirement_pending"),
        ({"recovery_action": "reset"}, "dirty", "recovery_action"),
        ({"recovery_action": "none"}, "clean", None),
        ({"remap_pending": True}, "clean", "remap_pending"),
        ({"throttle_reasons": ("hardware thermal slowdown",)}, "clean", "throttled"),
        ({"throttle_reasons": ("idle", "software power cap")}, "clean", None),
        ({"utilization_percent": 100}, "clean", "utilization_latched"),
        ({"utilization_percent": 99}, "clean", None),
    ],
)
def test_health(health: dict[str, t.Any], state: str, code: str | None) -> None:
    found = of_gpu(gpu(0, health=GpuHealth(**health)))
    assert found.state == state
    assert (found.reasons or found.warnings or (None,))[0] == (
        None if code is None else next(one for one in found.reasons + found.warnings if one.code == code)
    )


@pytest.mark.parametrize("call", HEALTH_CALLS)
def test_health_that_could_not_be_asked_is_not_health(call: str) -> None:
    assert codes(of_gpu(gpu(0, errors=(Problem(call, 999, "Unknown Error"),)))) == ("unknown", ["health_unknown"])
    # A client library that does not know the call is an old one, and no failing GPU.
    assert codes(of_gpu(gpu(0, errors=(Problem(call, None, "AttributeError"),)))) == ("clean", [])
    assert codes(of_gpu(gpu(0, errors=(Problem("nvmlDeviceGetUtilizationRates", 999, "x"),)))) == ("clean", [])


# --- the host ---


def test_host_memory() -> None:
    need = Limits(required_available_mib=1000)
    assert codes(verdict(None, need, available_mib=1000)) == ("clean", [])
    assert codes(verdict(None, need, available_mib=999)) == ("dirty", ["host_memory_short"])
    assert codes(verdict(None, need, available_mib=None)) == ("unknown", ["host_memory_unknown"])
    unreadable = CgroupLimit(None, None, None, None, None, False)
    assert codes(verdict(None, need, cgroup=unreadable)) == ("unknown", ["host_memory_unknown"])
    assert codes(verdict(None, Limits(), available_mib=None)) == ("clean", [])


def test_unified_memory() -> None:
    seen = snapshot(gpus=[gpu(0, memory=memory(None, api="none", unified=True))])
    assert codes(verdict(seen)) == ("unknown", ["unified_memory"])
    assert codes(verdict(seen, Limits(required_available_mib=1))) == ("clean", [])


def test_ports() -> None:
    wanted = Limits(ports=(30000,))
    assert codes(verdict(None, wanted, ports=(PortUse(30000, "0.0.0.0", "LISTEN", 5),))) == ("dirty", ["port_busy"])
    assert codes(verdict(None, wanted, ports=(PortUse(30000, "0.0.0.0", "TIME_WAIT", 0),))) == ("clean", [])
    assert codes(verdict(None, wanted, ports=None)) == ("unknown", ["ports_unknown"])


def test_shared_memory() -> None:
    assert codes(verdict(shm=shm(63))) == ("dirty", ["shm_full"])
    assert codes(verdict(shm=shm(None))) == ("unknown", ["shm_unknown"])
    file = ShmFile("sgl_shm_mq_1_a", 1.0, 0, 0.0, 1, False, (), ())
    found = verdict(shm=shm(files=(file,)), leftovers=((file.name, Leftover(True, "dead")),))
    assert (codes(found), warned(found)) == (("clean", []), ["leftovers"])


def test_orphans() -> None:
    rank = process(30, "sglang::scheduler_TP0")
    assert codes(verdict(snapshot(rank, gpus=[gpu(0)]))) == ("dirty", ["orphan"])
    zombie = process(30, "sglang::scheduler_TP0", state="Z")
    assert codes(verdict(snapshot(zombie, gpus=[gpu(0)]))) == ("clean", [])
    spawned = process(31, ("python3", "-c", "x", "--multiprocessing-fork"))
    found = verdict(snapshot(spawned, gpus=[gpu(0)]))
    assert (codes(found), warned(found)) == (("clean", []), ["possible_orphan"])


def test_a_router_is_no_orphan() -> None:
    """It names itself like a worker, and other servers live behind it."""
    router = process(101, "sglang::router", ppid=1)
    assert codes(verdict(snapshot(router, gpus=[gpu(0)]))) == ("clean", [])


def test_ranks_of_a_running_server_are_no_orphans() -> None:
    server = process(30, LEADER)
    rank = process(31, "sglang::scheduler", ppid=30)
    seen = snapshot(server, rank, gpus=[gpu(0), gpu(1)], uses=[holds(31, 1)], leaders=[leader(server)], chosen=[0])
    assert codes(verdict(seen)) == ("clean", [])
    assert codes(verdict(seen, Limits(ports=(30000,)))) == ("dirty", ["server_running"])


def starting(
    names: t.Sequence[str] = ("NVIDIA H200", "NVIDIA H200"), container: str | None = None, **changes: t.Any
) -> tuple[str, list[str]]:
    """The verdict on GPU 1 of two, while another server's launcher imports."""
    server = process(30, LEADER)
    gpus = [gpu(index, name=name) for index, name in enumerate(names)]
    seen = snapshot(server, gpus=gpus, chosen=[1], leaders=[leader(server, 30001, container=container, **changes)])
    return codes(verdict(seen, Limits(ports=(30000,))))


CLEAN: tuple[str, list[str]] = ("clean", [])
DIRTY, UNKNOWN = ("dirty", ["server_starting"]), ("unknown", ["server_starting"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, DIRTY),  # no flags could be read: it may take any
        ({"first_gpu": 0, "gpu_count": 1}, CLEAN),
        ({"first_gpu": 0, "gpu_count": 2}, DIRTY),
        ({"first_gpu": 1, "gpu_count": 1}, DIRTY),
        ({"first_gpu": 2, "gpu_count": 8}, CLEAN),
        ({"device": "cpu"}, CLEAN),
        ({"device": "cuda"}, DIRTY),
        ({"first_gpu": 0, "gpu_count": 1, "container": "docker:abc"}, DIRTY),  # its GPU 0 may be our GPU 1
        ({"first_gpu": 0, "gpu_count": 1, "names": ("NVIDIA H200", "NVIDIA L4")}, DIRTY),
        ({"first_gpu": 0, "gpu_count": 1, "names": ("NVIDIA H200", "NVIDIA L4"), "pci_bus_order": True}, CLEAN),
        ({"visible_devices": "0"}, CLEAN),
        ({"visible_devices": "1"}, DIRTY),
        ({"visible_devices": ""}, CLEAN),
        ({"visible_devices": "-1"}, CLEAN),
        ({"visible_devices": "0", "container": "docker:abc"}, UNKNOWN),
        ({"visible_devices": "GPU-0", "container": "docker:abc"}, CLEAN),
        ({"visible_devices": "0,7"}, UNKNOWN),
        ({"visible_devices": "MIG-1,1"}, DIRTY),
    ],
)
def test_a_launcher_that_still_imports(changes: dict[str, t.Any], expected: tuple[str, list[str]]) -> None:
    assert starting(**changes) == expected


@pytest.mark.parametrize("visible", [None, "0,1", "7", "MIG-x"])
def test_a_server_that_serves_on_other_gpus_never_counts_against_ours(visible: str | None) -> None:
    server = process(30, LEADER)
    rank = process(31, "sglang::scheduler", ppid=30)
    other = [leader(server, 30001, visible_devices=visible)]
    limits = Limits(ports=(30000,))
    mapped = snapshot(server, rank, gpus=[gpu(0), gpu(1)], uses=[holds(31), visits(30)], leaders=other, chosen=[1])
    assert codes(verdict(mapped, limits)) == CLEAN
    listed = snapshot(server, rank, gpus=[gpu(0, listed=[31]), gpu(1)], leaders=other, chosen=[1])
    assert codes(verdict(listed, limits)) == CLEAN
    unproved = snapshot(
        server, rank, gpus=[gpu(0, listed=[31]), gpu(1)], uses=[visits(31)], leaders=other, chosen=[1]
    )
    assert codes(verdict(unproved, limits)) == CLEAN


@pytest.mark.parametrize("changes", [{"port": None}, {"same_network": None}])
def test_a_server_whose_port_is_not_known(changes: dict[str, t.Any]) -> None:
    server = process(30, LEADER)
    seen = snapshot(server, gpus=[gpu(0)], leaders=[dataclasses.replace(leader(server), **changes)])
    assert codes(verdict(seen, Limits(ports=(30000,)))) == ("unknown", ["server_port_unknown"])


def test_dirty_outranks_unknown_and_comes_first() -> None:
    found = verdict(snapshot(gpus=[gpu(0, memory=None), gpu(1, 900)]))
    assert codes(found) == ("dirty", ["holder_unknown", "gpu_no_answer"])
    assert found.summary.endswith("(and 1 more)")


# --- properties ---

LIMITS = Limits(required_available_mib=1000, ports=(30000,), expected_gpus=2, baselines={"1": 5})


def mostly(good: t.Any, *others: t.Any) -> st.SearchStrategy[t.Any]:
    """Nearly always ``good``, so that hosts with one or two faults, and clean ones, are common."""
    return st.sampled_from([*[good] * (10 * len(others)), *others])


@st.composite
def hosts(draw: st.DrawFn) -> Facts:
    use = draw(st.sampled_from([None, None, None, holds, visits, visits]))
    pid, minor_in_use = draw(st.sampled_from([30, 31])), draw(st.integers(0, 1))
    uses = [] if use is None else [use(pid, minor_in_use)]
    gpus = []
    for index in range(2):
        used = draw(mostly(0, None, 10, 64, 65, 69, 70, 900))
        excludes = draw(mostly(True, False))
        kind = None if used is None else memory(used, used_excludes_reserved=excludes, api="v2" if excludes else "v1")
        listed = draw(st.sampled_from([(), (pid,)]) if uses and index == minor_in_use else mostly((), None, (99,)))
        rows = None if listed is None else tuple(NvmlProcess(pid, "compute", None) for pid in listed)
        health = GpuHealth(remap_failure=draw(mostly(False, None, True)))
        minor = draw(mostly(index, None))
        gpus.append(gpu(index, memory=kind, processes=rows, health=health, minor=minor))
    server = process(30, LEADER)
    port = draw(mostly(0, None, 30000, 30001))
    leaders = [] if port == 0 else [leader(server, port)]
    seen = snapshot(
        server if leaders else process(30),
        process(31, draw(mostly("python3", "sglang::scheduler"))),
        reading=GpuReading("nvml", draw(mostly(tuple(gpus), None, tuple(gpus[:1])))),
        uses=uses,
        leaders=leaders,
        unreadable=draw(mostly((), (31,))),
    )
    ports: t.Any = draw(mostly((), None, (PortUse(30000, "::", "LISTEN", 1),)))
    return dataclasses.replace(
        facts(seen),
        available_mib=draw(mostly(1000, None, 999)),
        shm=shm(draw(mostly(64, None, 1))),
        ports=ports,
        cgroup=CgroupLimit(2, "/", None, None, None, draw(mostly(True, False))),
    )


@pytest.mark.hypothesis
def test_the_property_tests_see_clean_hosts_too() -> None:
    seen = hosts().filter(lambda one: judge(one, LIMITS).state == "clean")
    find(seen, lambda _one: True, settings=settings(max_examples=200, deadline=None, database=None))


@settings(max_examples=300, deadline=None)
@given(hosts())
def test_clean_means_that_everything_required_is_known_and_in_bounds(seen: Facts) -> None:
    if judge(seen, LIMITS).state != "clean":
        return
    snap = seen.snapshot
    assert snap.reading.gpus is not None
    assert len(snap.reading.gpus) == 2
    for one in snap.gpus:
        assert one.memory is not None
        assert one.memory.used_mib is not None
        assert one.memory.used_mib <= 64 + (5 if one.index == 1 else 0)
        assert one.minor is not None
        assert not one.health.remap_failure
        assert [x for x in snap.holders[one.index].holders if x.protected is None] == []
    for sample in seen.samples:
        assert all(value is not None and value <= 69 for value in sample.used_mib.values())
    assert seen.available_mib is not None
    assert seen.available_mib >= 1000
    assert seen.cgroup.readable
    assert seen.shm.free_mib is not None
    assert seen.shm.free_mib >= 64
    assert seen.ports == ()
    assert snap.scan.complete
    assert all(one.port == 30001 for one in snap.leaders)
    assert not any(one.title == "sglang::scheduler" for one in snap.processes.values())


FORGETTABLE = (
    "gpus",
    "memory",
    "processes",
    "minor",
    "scan",
    "port of a server",
    "available",
    "cgroup",
    "shm",
    "ports",
    "samples",
)


def forget(seen: Facts, what: str) -> Facts:
    """The same host, of which less is known."""
    snap = seen.snapshot

    def again(**changes: t.Any) -> Facts:
        values: dict[str, t.Any] = {
            "reading": snap.reading,
            "uses": snap.scan.uses,
            "leaders": snap.leaders,
            "unreadable": snap.scan.unreadable,
        }
        others = [one for pid, one in snap.processes.items() if pid != 1]
        less = facts(snapshot(*others, **{**values, **changes}))
        return dataclasses.replace(seen, snapshot=less.snapshot, samples=less.samples)

    def each(**changes: t.Any) -> Facts:
        gpus = tuple(dataclasses.replace(one, **changes) for one in snap.reading.gpus or ())
        return again(reading=dataclasses.replace(snap.reading, gpus=gpus)) if snap.reading.gpus is not None else seen

    return {
        "gpus": lambda: again(reading=GpuReading("nvml", None)),
        "memory": lambda: each(memory=None),
        "processes": lambda: each(processes=None),
        "minor": lambda: each(minor=None),
        "scan": lambda: again(uses=(), unreadable=tuple(pid for pid in snap.processes if pid != 1)),
        "port of a server": lambda: again(leaders=[dataclasses.replace(one, port=None) for one in snap.leaders]),
        "available": lambda: dataclasses.replace(seen, available_mib=None),
        "cgroup": lambda: dataclasses.replace(seen, cgroup=CgroupLimit(None, None, None, None, None, False)),
        "shm": lambda: dataclasses.replace(seen, shm=shm(None, total_mib=None, files=None)),
        "ports": lambda: dataclasses.replace(seen, ports=None),
        "samples": lambda: dataclasses.replace(seen, samples=()),
    }[what]()


LISTED_VISITOR = snapshot(process(30), gpus=[gpu(0, listed=[30]), gpu(1)], uses=[visits(30)])
MAPPED_HOLDER = snapshot(process(30), gpus=[gpu(0), gpu(1)], uses=[holds(30)])
OUR_SERVER = snapshot(process(30, LEADER), gpus=[gpu(0), gpu(1)], leaders=[leader(process(30, LEADER))])


@settings(max_examples=200, deadline=None)
@example(facts(LISTED_VISITOR, available_mib=1000))
@example(facts(MAPPED_HOLDER, available_mib=1000))
@example(facts(OUR_SERVER, available_mib=1000))
@given(hosts())
def test_knowing_less_never_makes_a_host_clean(seen: Facts) -> None:
    if judge(seen, LIMITS).state != "clean":
        for what in FORGETTABLE:
            assert judge(forget(seen, what), LIMITS).state != "clean", what
