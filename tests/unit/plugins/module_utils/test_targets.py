# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whom an eviction may touch. The properties at the end hold for any snapshot."""

from __future__ import annotations

import typing as t

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.targets import (
    Memory,
    Owner,
    RecordedLaunch,
    Request,
    Selection,
    descendants,
    nearest_leaders,
    select,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Snapshot, Unit
from ansible_collections.cleanslate.sglang.tests.unit.builders import (
    BOOT,
    LEADER,
    OWN,
    PYTHON,
    gpu,
    holds,
    leader,
    process,
    snapshot,
    visits,
)

SPAWNED = ("/usr/bin/python3", "-c", "from multiprocessing.spawn import spawn_main; ...", "--multiprocessing-fork")
A, B = process(100, LEADER), process(200, (*LEADER[:-1], "30001"))
RANK = process(101, "sglang::scheduler_TP0", ppid=100, pgid=100, sid=100)
OTHER_RANK = process(201, "sglang::scheduler_TP0", ppid=200, pgid=200, sid=200)


def two_servers(**options: t.Any) -> Snapshot:
    """Server A (port 30000) on GPU 0, server B (30001) on GPU 1; each sees both."""
    uses = [holds(101, 0), visits(101, 1), holds(201, 1), visits(201, 0), visits(100), visits(200)]
    leaders = options.pop("leaders", [leader(A), leader(B, 30001)])
    return snapshot(
        A, B, RANK, OTHER_RANK, *options.pop("more", ()), gpus=[gpu(0), gpu(1)], uses=uses, leaders=leaders, **options
    )


def pids(selection: Selection) -> list[int]:
    return sorted(target.process.pid for target in selection.everybody)


def record(**changes: t.Any) -> RecordedLaunch:
    values: dict[str, t.Any] = {
        "pid": 100,
        "start_ticks": 1100,
        "sid": 100,
        "boot_id": BOOT,
        "unit": None,
        "port": None,
        "program": PYTHON,
    }
    values.update(changes)
    return RecordedLaunch(**{"own_session": values["sid"] == values["pid"], **values})


# --- the server asked for ---


def test_by_port_and_nobody_else() -> None:
    selection = select(two_servers(), Request(port=30000))
    assert pids(selection) == [100, 101]
    assert [target.part for target in selection.everybody] == ["leader", "member"]
    spared = {one.process.pid: one.why for one in selection.spared}
    assert spared[200] == "another SGLang server (port 30001)"
    assert "only has open GPU 0" in spared[201]


def test_a_port_in_another_network_namespace_is_another_port() -> None:
    for same in (False, None):
        assert pids(select(two_servers(leaders=[leader(A, same_network=same)]), Request(port=30000))) == []


def test_by_the_record_of_this_boot() -> None:
    assert pids(select(two_servers(), Request(name="a", record=record()))) == [100, 101]


@pytest.mark.parametrize(
    "changes", [{"boot_id": "older"}, {"boot_id": None}, {"start_ticks": 1}, {"pid": None}, {"start_ticks": None}]
)
def test_a_record_of_another_process_means_nobody(changes: dict[str, t.Any]) -> None:
    assert pids(select(two_servers(), Request(name="a", record=record(**changes)))) == []


def test_two_unknown_boots_are_not_the_same_boot() -> None:
    seen = two_servers(boot_id=None)
    assert pids(select(seen, Request(name="a", record=record(boot_id=None)))) == []


def test_by_unit_only_if_it_runs_this_leader() -> None:
    ours = Unit("x.service", 100, "always", "active", "loaded")
    request = Request(unit="x.service")
    selection = select(two_servers(leaders=[leader(A, unit=ours)]), request)
    assert pids(selection) == [100, 101]
    assert selection.owners == (Owner("systemd", "x.service", 100, "always"),)
    other = Unit("x.service", 99, "always", "active", "loaded")
    assert pids(select(two_servers(leaders=[leader(A, unit=other)]), request)) == []


def test_a_unit_of_a_session_is_no_owner() -> None:
    """A server of ``ssh host 'nohup ...'`` lives in a session scope with sshd and the operator."""
    scope = Unit("session-3.scope", 0, "", "active", "loaded")
    sshd = process(50, "sshd: root@pts/0", exe="/usr/sbin/sshd", cgroups=("/user.slice/session-3.scope",))
    shell = process(51, ("bash",), exe="/usr/bin/bash", ppid=50, cgroups=("/user.slice/session-3.scope",))
    selection = select(two_servers(more=[sshd, shell], leaders=[leader(A, unit=scope)]), Request(port=30000))
    assert pids(selection) == [100, 101]
    assert selection.owners == ()


def test_the_cgroup_of_the_leaders_own_unit() -> None:
    unit = Unit("x.service", 100, "no", "active", "loaded")
    path = "/system.slice/x.service"
    own = process(100, LEADER, cgroups=(path,))
    inside = process(300, ("python3", "helper.py"), cgroups=(path + "/sub",))
    beside = process(301, ("python3", "helper.py"), cgroups=("/system.slice/x.service2",))
    seen = snapshot(own, inside, beside, leaders=[leader(own, unit=unit)])
    assert pids(select(seen, Request(port=30000))) == [100, 300]


def test_whoever_forks_in_the_leaders_own_cgroup_is_its_after_its_end() -> None:
    """However often: by the time of a look nobody of an earlier one needs to be there."""
    path = "/system.slice/x.service"
    late = process(400, ("python3",), ppid=1, cgroups=(path,))
    below = process(401, ("sglang::scheduler_TP0",), ppid=1, cgroups=(path + "/sub",))
    beside = process(402, ("python3",), ppid=1, cgroups=("/system.slice/x.service2",))
    sshd = process(403, ("sshd",), exe="/usr/sbin/sshd", ppid=1, cgroups=(path,))
    seen = snapshot(late, below, beside, sshd)
    assert not select(seen, Request(port=30000), Memory()).everybody
    selection = select(seen, Request(port=30000), Memory(cgroups={path: "x.service"}))
    assert {one.process.pid for one in selection.members} == {400, 401}
    assert "which ran the leader" in selection.members[0].why[0]
    assert Memory(cgroups={path: "x.service"}).with_selection(selection).cgroups == {path: "x.service"}


def test_a_docker_container_is_asked_where_the_leader_is_its_main_process() -> None:
    inner = process(100, LEADER, nspid=(100, 1))
    seen = snapshot(inner, leaders=[leader(inner, container="docker:abc")])
    assert select(seen, Request(port=30000)).owners == (Owner("container", "abc", 100),)
    second = process(100, LEADER, nspid=(100, 7))
    seen = snapshot(second, leaders=[leader(second, container="docker:abc")])
    assert select(seen, Request(port=30000)).owners == ()


# --- its tree ---


def test_session_mates_need_more_than_the_session() -> None:
    worker = process(300, "sglang::detokenizer", sid=100, pgid=100)
    spawned = process(301, SPAWNED, sid=100, pgid=100)
    tee = process(302, ("tee", "log"), exe="/usr/bin/tee", sid=100, pgid=100)
    job = process(303, ("python3", "train.py"), sid=100, pgid=303)
    older = process(304, "sglang::scheduler", sid=100, start_ticks=5)
    selection = select(two_servers(more=[worker, spawned, tee, job, older]), Request(port=30000))
    assert pids(selection) == [100, 101, 300, 301]


def test_who_was_seen_below_the_leader_stays_its_when_the_leader_is_gone() -> None:
    first = select(two_servers(), Request(port=30000))
    memory = Memory().with_selection(first)
    orphan = process(101, "sglang::scheduler_TP0", ppid=1)
    grandchild = process(102, ("python3", "x"), ppid=101)
    reused = process(101, ("python3", "x"), start_ticks=99_999)
    later = snapshot(B, OTHER_RANK, orphan, grandchild, leaders=[leader(B, 30001)])
    assert pids(select(later, Request(port=30000), memory)) == [101, 102]
    assert pids(select(snapshot(reused), Request(port=30000), memory)) == []


def test_orphans_of_the_recorded_session() -> None:
    orphans = [process(301, SPAWNED, sid=100), process(302, "sglang::scheduler", sid=100), process(303, SPAWNED)]
    request = Request(name="a", record=record())
    assert pids(select(snapshot(*orphans), request)) == [301, 302]
    older = process(304, SPAWNED, sid=100, start_ticks=3)
    stranger = process(305, ("vim",), exe="/usr/bin/vim", sid=100)
    other_python = process(306, ("python3", "x"), exe="/opt/other/python3", sid=100)
    assert pids(select(snapshot(older, stranger, other_python), request)) == []


def test_a_reused_session_with_the_same_python_is_not_enough() -> None:
    job = process(301, ("python3", "train.py"), sid=100)
    keeps = process(302, ("python3", "x"), sid=100)
    looks = process(303, ("python3", "y"), sid=100)
    seen = snapshot(job, keeps, looks, gpus=[gpu(0)], uses=[holds(302), visits(303)])
    assert pids(select(seen, Request(name="a", record=record()))) == [302]
    for program in (None, "/opt/other/python3"):
        assert pids(select(seen, Request(name="a", record=record(program=program)))) == []
    unreadable = process(304, SPAWNED, sid=100, exe=None)
    assert pids(select(snapshot(unreadable), Request(name="a", record=record(program=None)))) == []


def test_a_session_number_that_was_given_away_is_not_ours() -> None:
    new_owner = process(100, ("python3", "jupyter"), start_ticks=9999)
    child = process(301, ("python3", "kernel"), sid=100, ppid=100)
    assert pids(select(snapshot(new_owner, child), Request(name="a", record=record()))) == []


def test_weak_evidence_does_not_reach_into_another_servers_tree() -> None:
    inner = process(300, (*LEADER[:-1], "30002"), ppid=100, sid=100, pgid=100)
    rank = process(301, "sglang::scheduler", ppid=300, sid=100, pgid=100)
    seen = two_servers(more=[inner, rank], leaders=[leader(A), leader(inner, 30002)])
    assert pids(select(seen, Request(port=30000))) == [100, 101]


def test_a_launcher_that_is_pid_1_does_not_own_the_orphans_of_others() -> None:
    entry = process(1, LEADER, ppid=0, sid=1, pgid=1)
    own_rank = process(10, "sglang::scheduler", sid=1, pgid=1)
    other = process(200, (*LEADER[:-1], "30001"))
    other_rank = process(201, "sglang::scheduler", ppid=200, sid=200)
    daemon = process(300, ("python3", "jupyter"))
    seen = snapshot(entry, own_rank, other, other_rank, daemon, leaders=[leader(entry), leader(other, 30001)])
    assert nearest_leaders(seen) == {1: 1, 10: 1, 200: 200, 201: 200}
    assert pids(select(seen, Request(port=30001))) == [200, 201]
    selection = select(seen, Request(port=30000))
    assert pids(selection) == []
    assert {one.process.pid: one.why for one in selection.spared}[1] == "pid 1"


def test_descendants_survive_a_torn_snapshot() -> None:
    cycle = {5: process(5, ppid=6), 6: process(6, ppid=5), 7: process(7, ppid=6)}
    assert sorted(descendants(5, cycle)) == [6, 7]


# --- wider scopes ---


def test_scope_sglang_without_devices_takes_all_servers_and_orphans() -> None:
    orphan = process(300, "sglang::scheduler_TP3")
    vim = process(301, "sglang::scheduler", exe="/usr/bin/vim")
    selection = select(two_servers(more=[orphan, vim]), Request(scope="sglang"))
    assert pids(selection) == [100, 101, 200, 201, 300]


@pytest.mark.parametrize("scope", ["sglang", "gpu"])
def test_chosen_gpus_choose_the_servers_that_hold_them(scope: str) -> None:
    seen = two_servers(chosen=[1])
    assert pids(select(seen, Request(scope=scope, devices=("1",)))) == [200, 201]


def test_a_server_that_starts_is_chosen_by_the_gpus_it_was_given() -> None:
    def start(visible: str | None) -> list[int]:
        seen = snapshot(A, gpus=[gpu(0), gpu(1)], chosen=[1], leaders=[leader(A, visible_devices=visible)])
        return pids(select(seen, Request(scope="sglang", devices=("1",))))

    assert start("1") == [100]
    assert start("GPU-1") == [100]
    assert start("0") == []
    assert start(None) == []
    assert start("") == []


def chosen_by(visible: str, **changes: t.Any) -> list[int]:
    """Whether a launcher with this CUDA_VISIBLE_DEVICES is on GPU 1."""
    uuids = ["GPU-8932f937-d72c", "GPU-89aa0000-d72c"]
    names = changes.pop("names", ["NVIDIA H200", "NVIDIA H200"])
    gpus = [gpu(index, uuid=uuids[index], name=names[index]) for index in range(2)]
    own = changes.pop("own_container", None)
    starts = leader(A, visible_devices=visible, **changes)
    seen = snapshot(A, gpus=gpus, chosen=[1], leaders=[starts], own_container=own)
    return pids(select(seen, Request(scope="sglang", devices=("1",))))


def test_a_number_in_another_container_is_that_containers_own() -> None:
    assert chosen_by("1") == [100]
    assert chosen_by("1", container="docker:abc") == []
    assert chosen_by("1", container="docker:abc", own_container="docker:abc") == [100]
    assert chosen_by("1", own_container="docker:abc") == []
    assert chosen_by("GPU-89aa0000-d72c", container="docker:abc") == [100]


def test_a_number_means_the_drivers_only_where_cuda_counts_alike() -> None:
    assert chosen_by("1", names=["NVIDIA H200", "NVIDIA L4"]) == []
    assert chosen_by("1", names=[None, None]) == []
    assert chosen_by("1", names=["NVIDIA H200", "NVIDIA L4"], pci_bus_order=True) == [100]
    assert chosen_by("GPU-89aa0000-d72c", names=["NVIDIA H200", "NVIDIA L4"]) == [100]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("GPU-89a", [100]),
        ("gpu-89AA", [100]),
        ("GPU-893", []),
        ("GPU-89", []),  # both begin so
        ("GPU-", []),
        ("GPU-89aa0000-d72c-1", []),
        ("GPU-893, GPU-89a", [100]),
        ("-1,1", []),  # CUDA stops there
        ("MIG-89aa", []),
        ("\u0661", []),
    ],
)
def test_the_beginning_of_a_uuid_names_a_gpu_where_it_is_the_only_one(visible: str, expected: list[int]) -> None:
    assert chosen_by(visible) == expected


def test_other_holders_only_with_scope_gpu() -> None:
    train = process(300, ("python3", "train.py"))
    seen = snapshot(train, gpus=[gpu(0)], uses=[holds(300)])
    assert pids(select(seen, Request(scope="gpu"))) == [300]
    assert pids(select(seen, Request(scope="sglang"))) == []
    assert [one.process.pid for one in select(seen, Request(scope="sglang")).spared] == [300]


def test_what_lives_in_another_container_is_left_to_its_host() -> None:
    inside = {"cgroups": ("/lxc/129/ns/x.scope",)}
    remote = process(100, LEADER, **inside)
    rank = process(101, "sglang::scheduler", ppid=100, **inside)
    orphan = process(102, "sglang::scheduler", **inside)
    holder = process(103, ("python3", "x"), **inside)
    seen = snapshot(
        remote,
        rank,
        orphan,
        holder,
        gpus=[gpu(0)],
        uses=[holds(101), holds(102), holds(103)],
        leaders=[leader(remote, container="lxc:129")],
    )
    assert pids(select(seen, Request(scope="gpu"))) == []
    assert pids(select(seen, Request(port=30000))) == []


# --- protection ---


@pytest.mark.parametrize("scope", ["server", "sglang", "gpu"])
def test_protecting_a_leader_protects_its_ranks(scope: str) -> None:
    selection = select(two_servers(), Request(scope=scope, port=30000, protect=("100",)))
    assert not {100, 101} & set(pids(selection))
    spared = {one.process.pid: one.why for one in selection.spared}
    assert spared[100] == "protected by the operator (100)"
    if scope == "gpu":
        assert "part of the server of pid 100, which is left alone" in spared[101]


def test_protecting_a_rank_protects_the_rank() -> None:
    assert pids(select(two_servers(), Request(port=30000, protect=("101",)))) == [100]


def test_nobody_is_spared_twice() -> None:
    selection = select(two_servers(), Request(scope="gpu", protect=("100", "201")))
    spared = [one.process.pid for one in selection.spared]
    assert len(spared) == len(set(spared))


# --- for any snapshot ---

TITLES: tuple[t.Any, ...] = (
    LEADER,
    (*LEADER[:-1], "30001"),
    SPAWNED,
    "sglang::scheduler_TP0",
    "sglang::detokenizer",
    ("python3", "train.py"),
    ("vim", "/opt/sglang/launch_server.py"),
    ("/usr/bin/nvidia-persistenced",),
)
EXES = (PYTHON, "/usr/bin/vim", "/usr/bin/nvidia-persistenced", "/usr/sbin/sshd", None)
PIDS = st.integers(2, 12)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Snapshot, Request, Memory]:
    """Any processes with any parents, sessions, mappings, lists; any order and any memory of earlier looks."""
    everybody: list[Process] = []
    for pid in range(2, 13):
        if draw(st.booleans()):
            everybody.append(
                process(
                    pid,
                    draw(st.sampled_from(TITLES)),
                    ppid=draw(st.sampled_from([1, *range(2, 13)])),
                    pgid=draw(PIDS),
                    sid=draw(PIDS),
                    exe=draw(st.sampled_from(EXES)),
                    state=draw(st.sampled_from("SRDZT")),
                    threads=draw(st.sampled_from([1, 2])),
                    start_ticks=draw(st.integers(1, 3)),
                    cgroups=draw(st.sampled_from([(), ("/lxc/7/x",), ("/system.slice/x.service",)])),
                )
            )
    launchers = [one for one in everybody if one.argv[1:3] == LEADER[1:3] and not one.dead]
    leaders = [
        leader(
            one,
            draw(st.sampled_from([30000, 30001, None])),
            same_network=draw(st.sampled_from([True, False, None])),
            visible_devices=draw(st.sampled_from([None, "0", "1", ""])),
            unit=draw(st.sampled_from([None, Unit("x.service", one.pid, "", "active", "loaded")])),
        )
        for one in launchers
    ]
    uses = [
        draw(st.sampled_from([holds, visits]))(draw(PIDS), draw(st.integers(0, 1)))
        for _unused in range(draw(st.integers(0, 5)))
    ]
    protect = tuple(draw(st.lists(st.sampled_from(["3", "5", "vim", "x.service"]), max_size=2)))
    units = {one.pid: "x.service" for one in everybody if "x.service" in "".join(one.cgroups)}
    seen = snapshot(
        *everybody,
        gpus=[gpu(0, listed=draw(st.lists(PIDS, max_size=3))), gpu(1)],
        uses=list({(use.pid, use.minor): use for use in uses}.values()),
        leaders=leaders,
        chosen=draw(st.sampled_from([None, [0], [1]])),
        own_pids=frozenset({1, draw(PIDS), OWN}),
        protect=protect,
        units=units,
    )
    request = Request(
        scope=draw(st.sampled_from(["server", "sglang", "gpu"])),
        port=draw(st.sampled_from([None, 30000])),
        unit=draw(st.sampled_from([None, "x.service"])),
        record=draw(st.sampled_from([None, record(pid=4, start_ticks=2, sid=4)])),
        protect=protect,
        devices=draw(st.sampled_from([(), ("0",)])),
    )
    members = {(draw(PIDS), draw(st.integers(1, 3))): "seen before" for _unused in range(draw(st.integers(0, 2)))}
    return seen, request, Memory(members)


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_nobody_protected_and_nobody_without_evidence_is_ever_selected(world: tuple[Snapshot, Request, Memory]) -> None:
    seen, request, memory = world
    selection = select(seen, request, memory)
    keys = [target.process.key for target in selection.everybody]
    assert len(keys) == len(set(keys))
    spared = {one.process.key for one in selection.spared}
    launchers = {one.process.key for one in seen.leaders}
    for target in selection.everybody:
        one = target.process
        assert seen.processes[one.pid] == one
        assert target.why
        assert not one.dead
        assert one.pid != 1
        assert one.pid not in seen.own_pids
        assert one.key not in spared
        assert str(one.pid) not in request.protect
        assert seen.units.get(one.pid) not in request.protect or seen.units.get(one.pid) is None
        assert one.exe not in ("/usr/bin/nvidia-persistenced", "/usr/sbin/sshd")
        if target.part == "leader":
            assert one.key in launchers
        elif target.part == "holder":
            assert request.scope == "gpu"
            chosen = {gpu.minor for gpu in seen.gpus}
            assert any(use.pid == one.pid and use.minor in chosen for use in seen.scan.uses)
    if request.scope == "server" and not (request.port or request.unit or request.record or memory.members):
        assert selection.everybody == ()
    for owner in selection.owners:
        assert owner.leader_pid in {target.process.pid for target in selection.leaders}


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_a_server_order_never_reaches_a_server_that_was_not_asked_for(world: tuple[Snapshot, Request, Memory]) -> None:
    seen, request, memory = world
    if request.scope != "server":
        return
    selection = select(seen, request, Memory())
    asked = {target.process.pid for target in selection.leaders}
    nearest = nearest_leaders(seen)
    for target in selection.members:
        assert nearest.get(target.process.pid) in {None, *asked}


def test_memory_keeps_whom_it_saw_with_the_first_reason_and_each_leader_once() -> None:
    seen = two_servers()
    selection = select(seen, Request(scope="sglang"))
    assert selection.leaders and selection.members
    memory = Memory().with_selection(selection)
    assert memory.members == {target.process.key: target.why[0] for target in selection.members}
    assert memory.leaders == tuple(target.process for target in selection.leaders)
    again = memory.with_selection(selection)
    assert again == memory
    fewer = Selection(leaders=selection.leaders[:1])
    assert Memory().with_selection(fewer).with_selection(selection).leaders[:1] == memory.leaders[:1]
    assert set(Memory().with_selection(fewer).with_selection(selection).leaders) == set(memory.leaders)
