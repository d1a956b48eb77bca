# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The verdict on one container, from its node: its own processes count, foreign ones are named."""

from __future__ import annotations

import dataclasses
import typing as t

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.assess import _sample
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.clean import Limits, judge
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import CgroupLimit, Problem, Reason, Verdict
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Snapshot, Stuck
from ansible_collections.cleanslate.sglang.tests.unit.builders import (
    LEADER,
    facts,
    gpu,
    holds,
    leader,
    process,
    shm,
    snapshot,
    visits,
)
from ansible_collections.cleanslate.sglang.tests.unit.guest_builders import INIT, OTHER, inside, node

WORKER = "sglang::scheduler_TP0"
SERVER = inside(100, LEADER)
RANK = inside(101, WORKER, ppid=100)


def verdict(seen: Snapshot | None = None, limits: Limits | None = None, **changes: t.Any) -> Verdict:
    seen = seen or node(gpus=[gpu(0)])
    return judge(facts(seen, **{"samples": (_sample(seen, 0.0),) * 3, **changes}), limits or Limits())


def codes(found: Verdict) -> tuple[str, list[str]]:
    return found.state, [reason.code for reason in found.reasons]


def state(name: str, **changes: t.Any) -> Snapshot:
    return node(gpus=[gpu(0)], guest_changes={"state": name, **changes})


# --- the container itself ---


def test_an_idle_container_is_clean_and_says_from_where() -> None:
    assert codes(verdict()) == ("clean", [])
    assert verdict().summary == (
        "clean: 1 GPU free, 400000 MiB of host memory available, seen from the node of container 129"
    )


def test_a_container_that_lost_its_init() -> None:
    found = verdict(state("broken", init_pid=None))
    assert codes(found) == ("dirty", ["container_broken"])
    assert "rung container_stop" in found.summary and found.reasons[0].subject == "container 129"


def test_a_stopped_container_is_not_clean() -> None:
    found = verdict(state("stopped", members=frozenset(), root_pid=None))
    assert codes(found) == ("dirty", ["container_stopped"])
    assert "pct start 129" in found.summary


def test_a_container_of_which_nothing_is_known_is_unknown() -> None:
    assert codes(verdict(state("unknown"))) == ("unknown", ["container_unknown"])


def test_whatever_could_not_be_seen_of_it_leaves_it_unknown() -> None:
    problem = Problem("read /sys/fs/cgroup/lxc/129", None, "who is in this cgroup can't be read")
    found = verdict(state("running", problems=(problem,)))
    assert codes(found) == ("unknown", ["container_unknown"])
    assert "who is in this cgroup can't be read" in found.summary


def test_what_proxmox_says_counts() -> None:
    said = Reason("container_not_here", "there is no container 129 on this node", "container 129")
    assert codes(verdict(guest_reasons=(said,))) == ("dirty", ["container_not_here"])
    said = dataclasses.replace(said, means="unknown")
    assert codes(verdict(guest_reasons=(said,))) == ("unknown", ["container_not_here"])


def test_whoever_cannot_be_killed_is_named_with_what_it_waits_in() -> None:
    dead_nfs = inside(120, ("cat", "/mnt/x"), state="D", kill_pending=True)
    seen = node(dead_nfs, gpus=[gpu(0)], guest_changes={"stuck": (Stuck(120, "D", "nfs_wait"), Stuck(121, "R", None))})
    found = verdict(seen)
    assert codes(found) == ("dirty", ["unkillable", "unkillable"])
    assert "pid 120 cat of container 129 can't be killed: state D, SIGKILL pending, waits in nfs_wait" in found.summary
    assert "reboot of the node" in found.summary
    assert "pid 121 ? of container 129" in found.reasons[1].message


# --- who holds its GPUs ---


@pytest.mark.parametrize(
    ("holder", "place"),
    [
        (inside(110), "in container 129"),
        (inside(110, vmid=OTHER), "in container 130"),
        (process(110), "a process of the node itself"),
    ],
)
def test_a_holder_is_named_with_its_place(holder: t.Any, place: str) -> None:
    found = verdict(node(holder, gpus=[gpu(0, 900)], uses=[holds(110)]))
    assert codes(found) == ("dirty", ["memory_in_use", "held"])
    assert all(f"{place})" in one.message or one.message.endswith(f", {place}") for one in found.reasons)
    assert verdict(node(holder, gpus=[gpu(0)], uses=[visits(110)])).state == "clean"


def test_a_service_by_its_name_holds_by_right_on_the_node_and_not_in_a_container() -> None:
    """Anybody can call a program of his container so; on the node its own package does."""
    xorg = process(110, ("Xorg",), exe="/usr/lib/xorg/Xorg")
    assert codes(verdict(node(xorg, gpus=[gpu(0)], uses=[holds(110)]))) == ("clean", [])
    for vmid in ("129", OTHER):
        named = inside(110, ("Xorg",), vmid=vmid, exe="/usr/lib/xorg/Xorg")
        assert codes(verdict(node(named, gpus=[gpu(0)], uses=[holds(110)]))) == ("dirty", ["held"])


def test_a_service_by_its_name_that_cannot_be_looked_into() -> None:
    xorg = process(110, ("Xorg",), exe="/usr/lib/xorg/Xorg")
    assert codes(verdict(node(xorg, gpus=[gpu(0)], unreadable=[110]))) == ("clean", [])
    named = inside(110, ("Xorg",), exe="/usr/lib/xorg/Xorg")
    assert codes(verdict(node(named, gpus=[gpu(0)], unreadable=[110]))) == ("unknown", ["scan_incomplete"])


def test_a_holder_by_its_services_name_that_came_and_went() -> None:
    named = inside(110, ("Xorg",), exe="/usr/lib/xorg/Xorg")
    earlier = _sample(node(named, gpus=[gpu(0)], uses=[holds(110)]), 0.0)
    now = node(gpus=[gpu(0)])
    assert codes(verdict(now, samples=(earlier, _sample(now, 1.0)))) == ("dirty", ["unstable"])


# --- which GPUs ---


def test_without_a_single_gpu_of_its_own_it_is_not_known_to_be_free() -> None:
    """Its nodes were removed from its /dev, say: then nothing of the node's GPUs was judged."""
    seen = node(gpus=[gpu(0, 900)], chosen=[], guest_changes={"device_minors": frozenset()})
    assert codes(verdict(seen)) == ("unknown", ["no_gpus"])
    assert "container 129 has no GPU of this node in its /dev" in verdict(seen).summary
    assert codes(verdict(seen, Limits(expected_gpus=1))) == ("unknown", ["gpu_count"])
    assert codes(verdict(seen, Limits(expected_gpus=0))) == ("clean", [])


def test_its_own_gpus_are_counted_and_not_the_nodes() -> None:
    seen = node(gpus=[gpu(0), gpu(1, 900)], chosen=[0], guest_changes={"device_minors": frozenset({0})})
    assert codes(verdict(seen, Limits(expected_gpus=1))) == ("clean", [])
    assert codes(verdict(seen, Limits(expected_gpus=2))) == ("unknown", ["gpu_count"])


@pytest.mark.parametrize(
    ("changes", "minors", "expected"),
    [
        ({"visible_devices": "1"}, {0, 1}, "dirty"),
        ({"visible_devices": "0"}, {0, 1}, "clean"),
        ({"visible_devices": "0"}, {1}, "unknown"),  # its GPU 0 is the node's GPU 1
        ({"visible_devices": "GPU-0"}, {1}, "clean"),
        ({"first_gpu": 0, "gpu_count": 1}, {0, 1}, "clean"),
        ({"first_gpu": 0, "gpu_count": 1}, {1}, "dirty"),
        ({"first_gpu": 0, "gpu_count": 10**12}, {0, 1}, "dirty"),  # no list of that many
    ],
)
def test_a_launcher_that_still_imports(changes: dict[str, t.Any], minors: set[int], expected: str) -> None:
    seen = node(
        SERVER,
        gpus=[gpu(0), gpu(1)],
        chosen=[1],
        leaders=[leader(SERVER, 30001, **changes)],
        guest_changes={"device_minors": frozenset(minors)},
    )
    assert verdict(seen, Limits(ports=(30000,))).state == expected


# --- servers and orphans ---


def test_only_the_containers_own_servers_and_orphans_count() -> None:
    def of(*everybody: t.Any) -> tuple[str, list[str]]:
        leaders = [leader(one) for one in everybody if one.argv == LEADER]
        return codes(verdict(node(*everybody, gpus=[gpu(0)], leaders=leaders), Limits(ports=(30000,))))

    assert of(SERVER, RANK) == ("dirty", ["server_running"])
    assert of(RANK) == ("dirty", ["orphan"])
    assert of(inside(200, LEADER, vmid=OTHER), inside(201, WORKER, vmid=OTHER)) == ("clean", [])
    assert of(process(300, LEADER), process(301, WORKER)) == ("clean", [])


def test_an_orphan_outside_of_the_pid_namespace_counts() -> None:
    attached = inside(101, WORKER, nspid=(101,), ppid=30)
    assert codes(verdict(node(attached, gpus=[gpu(0)]))) == ("dirty", ["orphan"])


# --- its other readings ---


def test_what_it_has_of_its_own_can_be_unknown() -> None:
    assert codes(verdict(shm=shm(None))) == ("unknown", ["shm_unknown"])
    assert codes(verdict(None, Limits(ports=(30000,)), ports=None)) == ("unknown", ["ports_unknown"])
    unreadable = CgroupLimit(None, None, None, None, None, False)
    found = verdict(None, Limits(required_available_mib=1), cgroup=unreadable)
    assert codes(found) == ("unknown", ["host_memory_unknown"])


# --- for any container ---


@st.composite
def containers(draw: st.DrawFn) -> Snapshot:
    titles = st.sampled_from([LEADER, WORKER, ("bash",), ("Xorg",)])
    everybody = [
        inside(
            pid,
            draw(titles),
            vmid=draw(st.sampled_from(["129", "129", OTHER])),
            ppid=draw(st.sampled_from([INIT, 100])),
        )
        for pid in range(100, 104)
        if draw(st.booleans())
    ]
    problem = Problem("read", None, "x")
    return node(
        *everybody,
        gpus=[gpu(0, draw(st.sampled_from([0, 0, 900]))), gpu(1)],
        uses=[holds(pid, 0) for pid in draw(st.sets(st.integers(100, 103), max_size=1))],
        leaders=[leader(one) for one in everybody if one.argv == LEADER],
        chosen=draw(st.sampled_from([[0], [0, 1], []])),
        guest_changes={
            "state": draw(st.sampled_from(["running", "running", "broken", "stopped", "unknown"])),
            "stuck": draw(st.sampled_from([(), (), (Stuck(100, "D", None),)])),
            "problems": draw(st.sampled_from([(), (), (problem,)])),
        },
    )


@pytest.mark.hypothesis
def test_clean_means_that_it_runs_and_nobody_of_it_is_left_over() -> None:
    clean: list[Snapshot] = []

    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(containers())
    def check(seen: Snapshot) -> None:
        guest = seen.guest
        assert guest is not None
        found = verdict(seen, Limits(ports=(30000,)))
        if found.state != "clean":
            assert found.reasons
            return
        clean.append(seen)
        assert (guest.state, guest.stuck, guest.problems) == ("running", (), ())
        assert seen.gpus
        assert not any(seen.holders[one.index].holders for one in seen.gpus)
        for member in guest.members:
            assert seen.processes[member].argv not in (LEADER, (WORKER,))

    check()
    assert len(clean) > 10


def test_without_a_container_nothing_of_this_is_said() -> None:
    assert codes(verdict(snapshot(gpus=[gpu(0)]))) == ("clean", [])
