# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whom an eviction may touch that looks at one container from its node: members of that container, and nobody else."""

from __future__ import annotations

import dataclasses
import typing as t

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.cgroups import guest_of
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.targets import (
    Memory,
    Owner,
    RecordedLaunch,
    Request,
    Selection,
    select,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Leader, Snapshot, Unit
from ansible_collections.cleanslate.sglang.tests.unit.builders import (
    BOOT,
    LEADER,
    OWN,
    PYTHON,
    gpu,
    holds,
    leader,
    process,
    visits,
)
from ansible_collections.cleanslate.sglang.tests.unit.guest_builders import (
    INIT,
    OTHER,
    UNIT,
    UNIT_PATH,
    VMID,
    guest_init,
    inside,
    node,
)

SERVICE = f"/ns/system.slice/{UNIT}"
WORKER = "sglang::scheduler_TP0"
OURS = inside(100, LEADER, SERVICE)
RANK = inside(101, WORKER, SERVICE, ppid=100, pgid=100, sid=100)
THEIRS = inside(200, LEADER, SERVICE, OTHER, ppid=190)
THEIR_RANK = inside(201, WORKER, SERVICE, OTHER, ppid=200, pgid=200, sid=200)
NODES = process(300, LEADER, cgroups=(f"/system.slice/{UNIT}",))
NODES_RANK = process(301, WORKER, ppid=300, pgid=300, sid=300, cgroups=(f"/system.slice/{UNIT}",))
EVERYBODY = (OURS, RANK, THEIRS, THEIR_RANK, NODES, NODES_RANK)
SCOPES = ("server", "sglang", "gpu")


def three(*more: Process, unit: bool = False, **options: t.Any) -> Snapshot:
    """One server in our container, one in another, one on the node: same port, same unit's name, same GPU."""
    seen = options.pop("everybody", EVERYBODY)
    leaders = [
        leader(one, unit=Unit(UNIT, one.pid, "", "active", "loaded") if unit else None)
        for one in seen
        if one.argv == LEADER
    ]
    uses = options.pop("uses", [holds(101), holds(201), holds(301)])
    return node(*seen, *more, gpus=[gpu(0)], uses=uses, leaders=leaders, **options)


def pids(selection: Selection) -> list[int]:
    return sorted(target.process.pid for target in selection.everybody)


def record(**changes: t.Any) -> RecordedLaunch:
    values: dict[str, t.Any] = {
        "pid": None,
        "start_ticks": 1100,
        "sid": None,
        "boot_id": BOOT,
        "unit": None,
        "port": None,
        "program": PYTHON,
        "own_session": True,
    }
    return RecordedLaunch(**{**values, **changes})


# --- members only ---


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("unit", [False, True])
def test_by_port_and_by_unit_only_the_containers_own(scope: str, unit: bool) -> None:
    for request in (Request(scope=scope, port=30000), Request(scope=scope, port=30000, unit=UNIT, devices=("GPU-0",))):
        selection = select(three(unit=unit), request)
        assert pids(selection) == [100, 101]
        spared = {one.process.pid: one.why for one in selection.spared}
        assert spared[200] == "another SGLang server (port 30000), in container 130"
        assert spared[300] == "another SGLang server (port 30000), a process of the node itself"
        assert spared[201].endswith("outside of the scope: in container 130")
        assert spared[301].endswith("outside of the scope: a process of the node itself")


@pytest.mark.parametrize("scope", SCOPES)
def test_a_record_reaches_nobody_outside(scope: str) -> None:
    """Whatever it says: another's pid, session, unit."""
    for outside, pid in ((THEIRS, 200), (NODES, 300)):
        seen = three(everybody=[one for one in EVERYBODY if one not in (OURS, RANK)])
        wanted = record(pid=pid, start_ticks=outside.start_ticks, sid=pid, unit=UNIT, port=30000)
        assert pids(select(seen, Request(scope=scope, name="a", record=wanted))) == []
        orphans = three(everybody=[THEIR_RANK, NODES_RANK])
        wanted = record(sid=pid, start_ticks=1, unit=UNIT, port=30000)
        assert pids(select(orphans, Request(scope=scope, name="a", record=wanted))) == []


@pytest.mark.parametrize("scope", SCOPES)
def test_what_was_seen_before_reaches_nobody_outside(scope: str) -> None:
    seen = three(everybody=[THEIRS, THEIR_RANK, NODES, NODES_RANK])
    members = {one.key: "seen before" for one in (THEIRS, THEIR_RANK, NODES, NODES_RANK)}
    memory = Memory(members, (THEIRS, NODES))
    assert pids(select(seen, Request(scope=scope, port=1), memory)) == []


def test_whoever_descends_from_the_server_and_left_the_container_is_not_its() -> None:
    """A parent link is no membership: pct's own helpers, or somebody that the node moved away."""
    moved = process(102, WORKER, ppid=100, sid=100, pgid=100)
    below = inside(103, WORKER, "/ns", OTHER, ppid=101, sid=100)
    selection = select(three(moved, below), Request(port=30000))
    assert pids(selection) == [100, 101]


def test_who_is_outside_of_the_containers_pid_namespace_is_its_all_the_same() -> None:
    """As the list of its cgroup tells: attached by the node, with a pid of the node alone."""
    attached = inside(104, WORKER, "/ns", nspid=(104,), ppid=30)
    selection = select(three(attached, uses=[holds(104)]), Request(scope="gpu"))
    assert 104 in pids(selection)


def test_the_containers_other_holders_only_with_scope_gpu() -> None:
    ours, theirs, nodes = inside(110), inside(210, vmid=OTHER), process(310)
    seen = three(ours, theirs, nodes, everybody=(), uses=[holds(110), holds(210), holds(310)])
    assert pids(select(seen, Request(scope="gpu"))) == [110]
    assert pids(select(seen, Request(scope="sglang"))) == []


def test_orphans_of_the_container_alone() -> None:
    orphans = (inside(105, WORKER), inside(205, WORKER, vmid=OTHER), process(305, WORKER))
    seen = three(*orphans, everybody=(), uses=[holds(105), holds(205), holds(305)])
    assert pids(select(seen, Request(scope="sglang"))) == [105]
    assert pids(select(seen, Request(scope="sglang", devices=("GPU-0",)))) == [105]
    assert pids(select(seen, Request(scope="server", port=30000))) == []


# --- inits ---


@pytest.mark.parametrize("scope", SCOPES)
def test_an_init_of_the_container_is_never_selected(scope: str) -> None:
    """Also one that is a server itself, and one of an earlier run."""
    server = dataclasses.replace(guest_init(60), argv=LEADER, exe=PYTHON)
    earlier = dataclasses.replace(guest_init(61), argv=(WORKER,), exe=PYTHON)
    seen = three(
        everybody=(server, earlier), uses=[holds(60), holds(61)], guest_changes={"inits": frozenset({INIT, 60, 61})}
    )
    selection = select(seen, Request(scope=scope, port=30000, devices=("GPU-0",)))
    assert pids(selection) == []
    assert {one.process.pid: one.why for one in selection.spared}[60] == "init of container 129"


# --- owners ---


def test_its_unit_is_asked_for_in_the_container() -> None:
    selection = select(three(unit=True), Request(unit=UNIT))
    assert selection.owners == (Owner("systemd", UNIT, 100, "", VMID),)


def test_the_unit_of_somebody_else_is_not_asked() -> None:
    strangers = Unit(UNIT, 0, "", "active", "loaded")
    seen = node(OURS, leaders=[leader(OURS, unit=strangers)])
    assert select(seen, Request(port=30000)).owners == ()
    assert pids(select(seen, Request(unit=UNIT))) == []


def test_docker_of_the_node_is_not_asked_for_a_container_within() -> None:
    inner = inside(100, LEADER, "/ns/docker/" + "ab" * 32, nspid=(100, 60, 1))
    seen = node(inner, leaders=[leader(inner, container="docker:" + "ab" * 32)])
    selection = select(seen, Request(port=30000))
    assert (pids(selection), selection.owners) == ([100], ())


def test_the_cgroup_of_the_leaders_own_unit() -> None:
    own = Unit(UNIT, 100, "", "active", "loaded", UNIT_PATH)
    helper = inside(102, ("bash",), SERVICE + "/sub", exe="/usr/bin/bash")
    same_name = process(302, ("bash",), cgroups=(f"/system.slice/{UNIT}",), exe="/usr/bin/bash")
    elsewhere = inside(202, ("bash",), SERVICE, OTHER, exe="/usr/bin/bash")
    seen = node(OURS, helper, same_name, elsewhere, leaders=[leader(OURS, unit=own)])
    assert pids(select(seen, Request(unit=UNIT))) == [100, 102]


# --- a leader that died before ---


def test_orphans_in_the_recorded_unit() -> None:
    """Out of sight of the container's systemd: it can't end who is in another PID namespace."""
    orphan = inside(111, WORKER, SERVICE, nspid=(111,))
    forked = inside(112, ("python3", "x"), SERVICE)
    job = inside(113, ("python3", "x"), SERVICE)
    older = inside(114, WORKER, SERVICE, start_ticks=3)
    beside = inside(115, WORKER, "/ns/system.slice/other.service")
    other = process(116, ("tee",), cgroups=(UNIT_PATH,), exe="/usr/bin/tee")
    seen = three(orphan, forked, job, older, beside, other, everybody=(), uses=[holds(112), holds(116)])
    assert pids(select(seen, Request(name="a", record=record(unit=UNIT)))) == [111, 112]
    for changes in ({"boot_id": "older"}, {"boot_id": None}, {"start_ticks": None}, {"unit": "no.service"}):
        assert pids(select(seen, Request(name="a", record=record(**{"unit": UNIT, **changes})))) == []


def test_orphans_of_the_recorded_session() -> None:
    orphan, stranger = inside(111, WORKER, sid=90), inside(112, ("tee",), sid=90, exe="/usr/bin/tee")
    seen = three(orphan, stranger, inside(113, WORKER, sid=91), everybody=())
    assert pids(select(seen, Request(name="a", record=record(sid=90)))) == [111]
    assert pids(select(seen, Request(name="a", record=record(sid=90, own_session=False)))) == []
    assert pids(select(seen, Request(name="a", record=record(sid=None)))) == []


# --- for any node ---

PIDS = st.integers(100, 112)
PLACES: tuple[tuple[str, ...], ...] = (
    (UNIT_PATH,),
    (UNIT_PATH,),
    (f"/lxc/{VMID}/ns",),
    (f"/lxc/{VMID}/ns/lxc/{OTHER}/ns",),
    (f"/lxc/{OTHER}{SERVICE}",),
    (f"/lxc/{OTHER}/ns/lxc/{VMID}/ns/system.slice/{UNIT}",),
    (f"/system.slice/{UNIT}",),
    (f"/user.slice/lxc/{VMID}/x",),
    (f"/lxc/{VMID}/ns", f"/lxc/{OTHER}/ns"),
    ("/",),
    (),
)
TITLES: tuple[t.Any, ...] = (LEADER, LEADER, WORKER, WORKER, ("python3", "-c", "x", "--multiprocessing-fork"), ("vim",))


@st.composite
def nodes(draw: st.DrawFn) -> tuple[Snapshot, Request, Memory]:
    """Anybody anywhere, tied to each other by every link there is; any order; any memory of earlier looks."""
    everybody: list[Process] = []
    for pid in range(100, 113):
        if draw(st.booleans()):
            everybody.append(
                process(
                    pid,
                    draw(st.sampled_from(TITLES)),
                    ppid=draw(st.sampled_from([1, INIT, *range(100, 113)])),
                    pgid=draw(PIDS),
                    sid=draw(PIDS),
                    exe=draw(st.sampled_from([PYTHON, PYTHON, "/usr/bin/vim", None])),
                    state=draw(st.sampled_from("SSRDZT")),
                    start_ticks=draw(st.integers(1, 3)),
                    cgroups=draw(st.sampled_from(PLACES)),
                    nspid=draw(st.sampled_from([(pid,), (pid, pid - 40), (pid, 1)])),
                )
            )
    leaders: list[Leader] = [
        leader(
            one,
            draw(st.sampled_from([30000, 30001, None])),
            same_network=draw(st.sampled_from([True, True, False, None])),
            unit=draw(
                st.sampled_from([None, *(Unit(UNIT, pid, "", "active", "loaded") for pid in (0, one.pid, one.pid))])
            ),
        )
        for one in everybody
        if one.argv == LEADER and not one.dead
    ]
    kinds = st.sampled_from([None, None, holds, holds, visits])
    uses = [kind(one.pid, draw(st.integers(0, 1))) for one in everybody if (kind := draw(kinds))]
    protect = tuple(draw(st.lists(st.sampled_from(["103", "vim", UNIT]), max_size=1)))
    seen = node(
        *everybody,
        gpus=[gpu(0, listed=draw(st.lists(PIDS, max_size=3))), gpu(1)],
        uses=uses,
        leaders=leaders,
        chosen=draw(st.sampled_from([None, None, [0], []])),
        own_pids=frozenset({1, OWN, draw(PIDS)}),
        protect=protect,
        guest_changes={"inits": frozenset({INIT, draw(PIDS)})},
    )
    wanted = st.sampled_from([None, 100, 104])
    request = Request(
        scope=draw(st.sampled_from(SCOPES)),
        port=draw(st.sampled_from([None, 30000])),
        unit=draw(st.sampled_from([None, UNIT])),
        record=draw(
            st.sampled_from(
                [
                    None,
                    record(pid=draw(wanted), start_ticks=draw(st.integers(1, 2)), sid=draw(wanted), unit=UNIT),
                    record(pid=draw(wanted), start_ticks=1, sid=draw(wanted), port=30000),
                ]
            )
        ),
        protect=protect,
        devices=draw(st.sampled_from([(), ("GPU-0",)])),
    )
    known = draw(st.sets(PIDS, max_size=2))
    remembered = {one.key: "seen before" for one in everybody if one.pid in known}
    return seen, request, Memory(remembered, tuple(one for one in everybody if draw(st.integers(0, 5)) == 0))


LINKS = (
    "command line says port",
    "launch record names this process",
    "main process of",
    "all GPUs were asked for",
    "descends from",
    "seen before",
    "which runs the leader and nothing else",
    "that leader",
    "the launch record made for this server",
    "without a leader",
    "holds a chosen GPU",
    "readable mapping",
)


@pytest.mark.hypothesis
def test_nobody_outside_of_the_container_is_ever_selected() -> None:
    links: set[str] = set()

    @settings(max_examples=800, deadline=None, derandomize=True)
    @given(nodes())
    def check(world: tuple[Snapshot, Request, Memory]) -> None:
        seen, request, memory = world
        assert seen.guest is not None
        selection = select(seen, request, memory)
        for target in selection.everybody:
            one = target.process
            assert one.pid in seen.guest.members
            assert guest_of(one) == VMID
            assert one.pid not in seen.guest.inits and one.pid not in seen.own_pids and not one.dead
            assert str(one.pid) not in request.protect
            links.update(link for link in LINKS for why in target.why if link in why)
        for owner in selection.owners:
            assert owner.leader_pid in {target.process.pid for target in selection.leaders}
            assert (owner.kind, owner.guest) == ("systemd", VMID)
        touched = {target.process.key for target in selection.everybody}
        assert not touched & {one.process.key for one in selection.spared}

    check()
    assert links == set(LINKS), "it would hold as well if nobody were ever selected"
