# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""gpu_evict with scope gpu: whoever holds the chosen GPUs goes, on evidence that holds at the moment of the signal."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Hold
from ansible_collections.cleanslate.sglang.tests.harness.namespace import NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import (
    DEADLINES,
    Host,
    bounded,
    codes,
    rung,
    rungs,
    sent,
)

pytestmark = pytest.mark.ns


def started(host: Host, holder: NsProcess, node: Path) -> int:
    """The pid, once it has mapped the node."""
    maps = host.ns.proc / str(holder.pid) / "maps"
    wait_for("the mapping", lambda: str(node) in maps.read_text())
    return holder.pid


def test_a_holder_of_the_chosen_gpu_goes_and_one_of_another_gpu_stays(host: Host) -> None:
    ours = started(host, host.hold("--map", str(host.nodes[0])), host.nodes[0])
    other = started(host, host.hold("--map", str(host.nodes[1])), host.nodes[1])
    result = host.evict(scope="gpu", devices=["0"])
    assert not result.failed, result.json
    assert sent(result) == {(ours, "SIGTERM")}
    assert rungs(result) == ["holders"]
    assert host.alive([other])


def test_a_holder_is_no_target_of_a_narrower_scope(host: Host) -> None:
    holder = started(host, host.hold("--map", str(host.nodes[0])), host.nodes[0])
    result = host.evict(scope="sglang", devices=["0"])
    assert result.signals == ()
    (row,) = [row for row in result.json["spared"] if row["pid"] == holder]
    assert "holds GPU 0" in row["why"]


def test_a_holder_that_ignores_sigterm_is_killed(host: Host) -> None:
    holder = started(host, host.hold("--map", "--ignore-term", str(host.nodes[0])), host.nodes[0])
    result = host.evict(scope="gpu", devices=["0"])
    assert not result.failed, result.json
    assert sent(result) == {(holder, "SIGTERM"), (holder, "SIGKILL")}
    bounded(result)


def test_orphaned_children_that_the_driver_does_not_list_are_found_by_their_mapping(host: Host) -> None:
    """NVML lists the dead parent; its forked children hold the memory."""
    output = host.ns.directory / "pids"
    host.hold("--map", "--fork", "2", str(host.nodes[0]), output=output)
    wait_for("three pids", lambda: output.exists() and len(output.read_text().split()) == 3)
    parent, *children = map(int, output.read_text().split())
    host.gone([parent])
    host.nvml.write(*host.gpus(), Hold(0, mib=20_998, pid=parent, kept_by=tuple(children)))
    info = host.module("gpu_info", devices=["0"]).json["gpus"][0]
    assert [row["pid"] for row in info["processes"]] == [parent]
    assert info["stale_pids"] == [parent]
    assert [row["pid"] for row in info["holders"]] == children
    result = host.evict(scope="gpu", devices=["0"])
    assert not result.failed, result.json
    assert {pid for pid, _unused in sent(result)} == set(children)
    assert result.json["after"][0]["used_mib"] == 0


@pytest.mark.parametrize("kind", ["persistenced", "dcgm", "hostengine"])
def test_gpu_services_are_left_alone_even_when_the_driver_lists_them(host: Host, kind: str) -> None:
    """Listed, alive, with the device open: a holder by evidence, and protected all the same."""
    pid = host.bystanders(kind)[kind]
    wait_for("its doorbells", lambda: str(host.nodes[0]) in (host.ns.proc / str(pid) / "maps").read_text())
    host.memory_follows_mappings(Hold(0, mib=3, pid=pid))
    result = host.evict(scope="gpu", devices=["0"])
    assert (result.json["verdict"], result.signals) == ("nothing_to_do", ())
    (row,) = [row for row in result.json["spared"] if row["pid"] == pid]
    assert row["why"].startswith("GPU service")


@pytest.mark.parametrize("how", ["pid", "program"])
def test_a_protected_holder_is_left_alone(host: Host, how: str) -> None:
    holder = started(host, host.hold("--map", str(host.nodes[0])), host.nodes[0])
    word = str(holder) if how == "pid" else Path(sys.executable).resolve().name
    result = host.evict(scope="gpu", devices=["0"], protect=[word])
    assert (result.json["verdict"], result.signals) == ("nothing_to_do", ())


def test_a_foreign_pid_in_the_drivers_list_means_nobody_here(host: Host) -> None:
    """Older drivers list the host's pids in a container, where they mean somebody else."""
    stranger = host.ns.popen(["sleep", "600"], detached=True)
    host.nvml.write(*host.gpus(), Hold(0, mib=5000, always=True, list_pid=(stranger.pid,)))
    result = host.evict(scope="gpu", devices=["0"])
    assert result.signals == ()
    assert host.alive([stranger.pid])


def test_a_zombie_leader_whose_thread_lives_is_found_and_ended(host: Host) -> None:
    """Its own maps and descriptors show nothing; those of its thread do."""
    node = host.nodes[0]
    zombie = host.fixture("zombie_leader.py", str(node))
    wait_for("a zombie", lambda: " Z " in (host.ns.proc / str(zombie.pid) / "stat").read_text())
    host.nvml.write(*host.gpus(), Hold(0, mib=5000, pid=zombie.pid))
    result = host.evict(scope="gpu", devices=["0"])
    assert not result.failed, result.json
    assert {pid for pid, _unused in sent(result)} == {zombie.pid}
    wait_for("gone", lambda: zombie.pid not in host.ns.pids())


def test_a_driver_that_hangs_makes_the_result_unknown(host: Host) -> None:
    from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Fault

    host.nvml.write(*host.gpus(), Fault("*", hang=True))
    holder = started(host, host.hold("--map", str(host.nodes[0])), host.nodes[0])
    result = host.evict(scope="gpu", nvml_deadline_s=1)
    assert result.failed
    assert (result.json["verdict"], codes(result)) == ("unknown", {"gpus_unknown"})
    assert "no answer within 1 s" in result.json["reasons"][0]["message"]
    assert sent(result) == set()
    assert host.alive([holder])
    bounded(result)


def test_check_mode_names_the_holders_and_touches_nobody(host: Host) -> None:
    holder = started(host, host.hold("--map", str(host.nodes[0])), host.nodes[0])
    planned = host.evict(scope="gpu", devices=["0"], check=True)
    assert planned.signals == ()
    (row,) = planned.json["plan"]
    assert row["rung"] == "holders"
    assert row["targets"][0].startswith(f"pid {holder} ")
    assert "readable mapping" in row["targets"][0]
    assert host.alive([holder])


def test_rungs_that_are_not_allowed_are_not_climbed(host: Host) -> None:
    server = host.server(gpus=(0,), faults={"IGNORE_TERM": "1"})
    result = host.evict(port=30000, rungs=["term"], deadlines={**DEADLINES, "term": 1})
    assert result.failed
    assert result.json["verdict"] == "failed"
    assert "still_there" in codes(result)
    assert sent(result) == {(server.leader.pid, "SIGTERM")}
    assert {row["pid"] for row in rung(result, "term")["stayed"]} == set(server.tree())


def test_who_stopped_the_scheduler_gets_no_signal(host: Host) -> None:
    """A stopped bystander that only has the GPU open stays stopped."""
    visitor = host.hold("--map", "--write-only", str(host.nodes[0]))
    started(host, visitor, host.nodes[0])
    host.kill(visitor.pid, signal.SIGSTOP)
    result = host.evict(scope="gpu", devices=["0"])
    assert (result.json["verdict"], result.signals) == ("nothing_to_do", ())
