# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What belongs to a container, and which unit and GPUs are meant by its names."""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.guests import (
    choose_for_guest,
    elsewhere,
    guest_unit,
    judge_absence,
    place_of,
    refuse_indices,
    same_gpus,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import UnknownDevice
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Problem, Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.proxmox import GuestConfig
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Unit
from ansible_collections.cleanslate.sglang.tests.unit.builders import LEADER, gpu, process, snapshot
from ansible_collections.cleanslate.sglang.tests.unit.guest_builders import (
    INIT,
    OTHER,
    UNIT,
    UNIT_PATH,
    guest,
    guest_init,
    inside,
    node,
)

OURS, THEIRS, NODES = inside(100), inside(200, vmid=OTHER), process(300)
SERVICE = f"/ns/system.slice/{UNIT}"


# --- out of bounds ---


def test_from_the_node_only_the_containers_own_are_in_bounds() -> None:
    seen = node(OURS, THEIRS, NODES)
    assert [elsewhere(one, seen) for one in (OURS, THEIRS, NODES)] == [False, True, True]
    assert [place_of(one, seen) for one in (OURS, THEIRS, NODES)] == [
        "in container 129",
        "in container 130",
        "a process of the node itself",
    ]


def test_without_a_container_only_containers_are_out_of_bounds() -> None:
    seen = snapshot(OURS, THEIRS, NODES)
    assert [elsewhere(one, seen) for one in (OURS, THEIRS, NODES)] == [True, True, False]
    assert [place_of(one, seen) for one in (OURS, THEIRS, NODES)] == ["in container 129", "in container 130", ""]


def test_in_a_container_without_a_cgroup_namespace_ones_own_is_in_bounds() -> None:
    seen = snapshot(OURS, THEIRS, NODES, own_guest="129")
    assert [elsewhere(one, seen) for one in (OURS, THEIRS, NODES)] == [False, True, False]
    assert [place_of(one, seen) for one in (OURS, THEIRS)] == ["", "in container 130"]


def test_two_hierarchies_that_disagree_are_out_of_bounds() -> None:
    torn = process(100, cgroups=("/lxc/129/ns", "/lxc/130/ns"))
    assert elsewhere(torn, node(torn))


# --- units ---


def unit_of_launcher(*others: Process, below: t.Sequence[int] = (), **changes: t.Any) -> Unit | None:
    launcher = inside(100, LEADER, SERVICE, **changes)
    everybody = {one.pid: one for one in (guest_init(), launcher, *others)}
    return guest_unit(launcher, everybody, {INIT}, below)


def test_a_launcher_below_the_init_alone_in_its_unit_is_its_main_process() -> None:
    assert unit_of_launcher() == Unit(UNIT, 100, "", "active", "loaded", UNIT_PATH)
    rank = inside(101, ("python3", "spawned"), SERVICE + "/ranks", ppid=100)
    assert unit_of_launcher(rank, below=[101]) == Unit(UNIT, 100, "", "active", "loaded", UNIT_PATH)


def test_workers_that_lost_their_parent_and_the_dead_are_no_strangers() -> None:
    orphan = inside(101, "sglang::scheduler_TP0", SERVICE)
    dead = inside(102, ("bash",), SERVICE, state="Z")
    unit = unit_of_launcher(orphan, dead)
    assert unit is not None and unit.main_pid == 100


@pytest.mark.parametrize(
    "stranger",
    [
        inside(101, ("cron",), SERVICE),
        inside(101, ("cron",), SERVICE + "/sub"),
        process(101, ("cron",), cgroups=("/", UNIT_PATH)),
    ],
)
def test_a_unit_with_somebody_else_in_it_is_somebody_elses(stranger: Process) -> None:
    unit = unit_of_launcher(stranger)
    assert unit is not None and unit.main_pid == 0


def test_a_unit_of_a_similar_name_is_another_one() -> None:
    unit = unit_of_launcher(inside(101, ("cron",), SERVICE + "2"))
    assert unit is not None and unit.main_pid == 100


def test_a_launcher_with_another_parent_is_not_the_main_process() -> None:
    unit = unit_of_launcher(ppid=77)
    assert unit is not None and unit.main_pid == 0


@pytest.mark.parametrize(
    "below", ["/ns", "/ns/user.slice/session-3.scope", "/ns/user.slice/user@1000.service/a.service"]
)
def test_no_service_no_unit(below: str) -> None:
    launcher = inside(100, LEADER, below)
    assert guest_unit(launcher, {100: launcher}, {INIT}, ()) is None


# --- absence ---


def test_nobody_there_is_only_fine_where_the_container_is_this_nodes() -> None:
    stopped = guest(state="stopped", root_pid=None, init_pid=None)
    assert judge_absence(stopped, GuestConfig("129", True)) == []
    (reason,) = judge_absence(stopped, GuestConfig("129", False))
    assert (reason.code, reason.severity, reason.means) == ("container_not_here", "required", "dirty")
    config = GuestConfig("129", None, problems=(Problem("/etc/pve", None, "not read within 10 s"),))
    (reason,) = judge_absence(stopped, config)
    assert (reason.code, reason.severity, reason.means) == ("container_unknown", "required", "unknown")
    assert "not read within 10 s" in reason.message


def test_an_unknown_state_stays_unknown_though_the_container_is_known() -> None:
    unknown = guest(state="unknown", problems=(Problem("read mountinfo", None, "can't be read"),))
    (reason,) = judge_absence(unknown, GuestConfig("129", True))
    assert (reason.code, reason.means) == ("container_unknown", "unknown")
    assert "can't be read" in reason.message
    (reason,) = judge_absence(guest(state="unknown"), GuestConfig("129", True))
    assert "a cgroup without processes" in reason.message


# --- GPUs ---

TWO = (gpu(0), gpu(1))


@pytest.mark.parametrize(
    ("minors", "gpus", "same"),
    [
        (frozenset({0, 1}), TWO, True),
        (frozenset({1}), TWO, False),
        (frozenset({0, 1, 2}), TWO, False),
        (frozenset(), TWO, False),
        (None, TWO, False),
        (frozenset({0}), (gpu(0), gpu(1, minor=None)), False),
    ],
)
def test_an_index_means_the_same_only_with_all_of_the_nodes_gpus(
    minors: frozenset[int] | None, gpus: tuple[t.Any, ...], same: bool
) -> None:
    looked_at = guest(device_minors=minors)
    assert same_gpus(looked_at, gpus) is same
    if same:
        refuse_indices("devices", ["0", "GPU-1"], gpus, looked_at)
        return
    with pytest.raises(UnknownDevice, match="by index"):
        refuse_indices("devices", ["GPU-0", "1"], gpus, looked_at)
    refuse_indices("devices", ["GPU-0", "00000000:02:00.0"], gpus, looked_at)


def chosen(wanted: t.Sequence[str], minors: t.Collection[int] | None) -> list[int]:
    looked_at = guest(device_minors=None if minors is None else frozenset(minors))
    return [one.index for one in choose_for_guest(TWO, wanted, looked_at)]


def test_without_a_name_those_that_the_container_has() -> None:
    assert chosen([], {0, 1}) == [0, 1]
    assert chosen([], {1}) == [1]
    with pytest.raises(UnknownDevice, match="can't be told"):
        chosen([], None)
    assert [one.index for one in choose_for_guest((gpu(0, minor=None),), [], guest())] == []


def test_by_uuid_or_bus_id_only_what_the_container_has() -> None:
    assert chosen(["GPU-1"], {1}) == [1]
    assert chosen(["0000:02:00.0"], {1}) == [1]
    with pytest.raises(UnknownDevice, match=r"GPU-0 is GPU 0 .*\(nvidia0\) of the node.*no device node"):
        chosen(["GPU-0"], {1})
    with pytest.raises(UnknownDevice, match="not on this host"):
        chosen(["GPU-7"], {1})


def test_a_broken_container_may_be_told_its_gpus_by_their_own_names_alone() -> None:
    assert chosen(["GPU-0"], None) == [0]
    with pytest.raises(UnknownDevice, match="not known"):
        chosen(["0"], None)


def test_an_index_is_never_taken_for_the_containers_own() -> None:
    assert chosen(["1"], {0, 1}) == [1]
    with pytest.raises(UnknownDevice, match="its nodes: nvidia1"):
        chosen(["0"], {1})
