# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""gpu_evict takes one server off its GPUs: which signals, to whom, and nobody else."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import (
    DEADLINES,
    NAME,
    Host,
    bounded,
    plain_signals,
    rung,
    rungs,
    sent,
)

pytestmark = pytest.mark.ns


def test_a_serving_server_leaves_after_sigterm_to_its_leader(host: Host) -> None:
    server = host.server(gpus=(0, 1))
    pids = set(server.tree())
    result = host.evict(port=30000)
    assert not result.failed, result.json
    assert result.json["verdict"] == "evicted"
    assert sent(result) == {(server.leader.pid, "SIGTERM")}
    assert plain_signals(result) == []
    assert rungs(result) == ["term"]
    assert {row["pid"] for row in result.json["ended"]} == pids
    assert [row["used_mib"] for row in result.json["before"]] == [20_000, 20_000]
    assert [row["used_mib"] for row in result.json["after"]] == [0, 0]
    host.gone(pids)
    bounded(result)


def test_check_mode_signals_nobody_and_plans_what_the_real_run_then_asks(host: Host) -> None:
    server = host.server(gpus=(0, 1))
    before = host.ns.living()
    planned = host.evict(port=30000, check=True)
    assert not planned.failed, planned.json
    assert (planned.json["verdict"], planned.json["changed"]) == ("planned", True)
    assert planned.signals == ()
    assert host.ns.living() == before
    plan = {row["rung"]: row["targets"] for row in planned.json["plan"]}
    (asked,) = plan["term"]
    assert asked.startswith(f"pid {server.leader.pid} ")
    result = host.evict(port=30000)
    assert sent(result) == {(server.leader.pid, "SIGTERM")}
    ended = {row["pid"] for row in result.json["ended"]}
    assert {int(text.split()[1]) for text in plan["kill"]} == ended


def test_nobody_is_there(host: Host) -> None:
    result = host.evict(port=30000)
    assert (result.json["verdict"], result.json["changed"], result.signals) == ("nothing_to_do", False, ())


def test_a_leader_that_ignores_sigterm_is_killed_with_its_tree(host: Host) -> None:
    server = host.server(gpus=(0, 1), faults={"IGNORE_TERM": "1"})
    pids = set(server.tree())
    result = host.evict(port=30000, deadlines={**DEADLINES, "term": 1})
    assert not result.failed, result.json
    assert rungs(result) == ["term", "kill"]
    (stayed,) = [row for row in rung(result, "term")["stayed"] if row["pid"] == server.leader.pid]
    assert stayed["why"].startswith("state S")
    signals = sent(result)
    assert (server.leader.pid, "SIGTERM") in signals
    assert {pid for pid, _unused in signals} <= pids
    assert {name for pid, name in signals if pid != server.leader.pid} <= {"SIGKILL"}
    host.gone(pids)
    bounded(result)


def test_a_stopped_scheduler_gets_the_short_deadline(host: Host) -> None:
    server = host.server(gpus=(0, 1))
    pids = set(server.tree())
    hung = server.find("sglang::scheduler_TP1")
    host.kill(hung, signal.SIGSTOP)
    result = host.evict(port=30000, deadlines={**DEADLINES, "term": 60, "term_hung": 1})
    assert not result.failed, result.json
    assert "state T" in rung(result, "term")["note"]
    assert rung(result, "term")["seconds"] < 30
    # It is on the kill rung's list; the kernel may end it with its leader before its own signal is sent.
    assert hung in {one["pid"] for one in rung(result, "kill")["asked"]}
    assert hung in {one["pid"] for one in result.json["ended"]}
    assert {pid for pid, _unused in sent(result)} <= pids
    host.gone(pids)


def test_orphans_of_a_leader_killed_in_its_spawn_phase_are_known_by_the_record(host: Host) -> None:
    """They have neither sglang in their command line nor a parent; the launch's own session names them."""
    server = host.server(gpus=(0, 1), faults={"SPAWN_S": "60"}, wait=False)
    wait_for("spawned children", lambda: len(_spawned(host)) == 3)
    host.record(server)
    orphans = _spawned(host)
    other = [sys.executable, "-c", "import time; time.sleep(600)", "--multiprocessing-fork"]
    bystander = host.ns.popen(other, detached=True)
    host.kill(server.leader.pid, signal.SIGKILL)
    host.gone([server.leader.pid])
    result = host.evict(name=NAME)
    assert not result.failed, result.json
    assert orphans <= {pid for pid, name in sent(result) if name == "SIGKILL"}
    assert bystander.pid not in {pid for pid, _unused in sent(result)}
    host.gone(orphans)
    assert host.alive([bystander.pid])


def _spawned(host: Host) -> set[int]:
    return {pid for pid, title in host.ns.titles().items() if "--multiprocessing-fork" in title}


def test_a_server_in_its_spawn_phase_loses_its_children_too(host: Host) -> None:
    """The leader dies of SIGTERM at once; its children, which nobody ties to it any more, were seen before."""
    server = host.server(gpus=(0, 1), faults={"SPAWN_S": "60"}, wait=False)
    wait_for("spawned children", lambda: len(_spawned(host)) == 3)
    orphans = _spawned(host)
    result = host.evict(port=30000, deadlines={**DEADLINES, "term": 3})
    assert not result.failed, result.json
    assert rungs(result)[:2] == ["term", "kill"]
    assert (server.leader.pid, "SIGTERM") in sent(result)
    assert orphans <= {row["pid"] for row in result.json["ended"]}
    host.gone(orphans)


def test_orphans_in_the_recorded_session_keep_their_memory_and_are_ended(host: Host) -> None:
    """A forked child of a rank holds the GPU; leader and ranks are dead, and the record tells the session."""
    server = host.server(gpus=(0, 1), faults={"ORPHAN": "1"})
    host.record(server)
    tree = set(server.tree())
    orphans = {pid for pid, title in server.tree().items() if title == "python3"}
    assert len(orphans) == 2
    host.kill(server.leader.pid, signal.SIGKILL)
    host.gone(tree - orphans)
    assert host.alive(orphans)
    result = host.evict(name=NAME)
    assert not result.failed, result.json
    assert {row["pid"] for row in result.json["before"][0]["holders"]} <= orphans
    assert sent(result) == {(pid, "SIGKILL") for pid in orphans}
    assert [row["used_mib"] for row in result.json["after"]] == [0, 0]


def test_a_record_whose_session_number_was_given_to_somebody_else_selects_nobody(host: Host) -> None:
    server = host.server(gpus=(0,))
    ticks = host.ns.start_ticks(server.leader.pid)
    assert ticks is not None
    other = host.ns.popen([sys.executable, "-c", "import time; time.sleep(600)"], detached=True)
    host.record(server, pid=other.pid, sid=other.pid, start_ticks=ticks - 1000, port=None)
    result = host.evict(name=NAME)
    assert (result.json["verdict"], result.signals) == ("nothing_to_do", ())
    assert host.alive([other.pid, server.leader.pid])


def test_another_server_on_another_port_and_gpu_is_left_alone(host: Host) -> None:
    ours = host.server(gpus=(0,), see=(1,))
    other = host.server(gpus=(1,), see=(0,), port=30001)
    others = set(other.tree())
    result = host.evict(port=30000)
    assert not result.failed, result.json
    assert sent(result) == {(ours.leader.pid, "SIGTERM")}
    assert host.alive(others)
    assert any(row["pid"] == other.leader.pid and "30001" in row["why"] for row in result.json["spared"])
    assert other.request("GET", "/health").status == 200


def test_scope_sglang_takes_the_servers_of_the_chosen_gpus_only(host: Host) -> None:
    ours = host.server(gpus=(0,), see=(1,))
    other = host.server(gpus=(1,), see=(0,), port=30001)
    others = set(other.tree())
    result = host.evict(scope="sglang", devices=["0"])
    assert not result.failed, result.json
    assert sent(result) == {(ours.leader.pid, "SIGTERM")}
    assert host.alive(others)


@pytest.mark.parametrize("by", ["pid", "program"])
def test_a_protected_leader_keeps_its_whole_tree(host: Host, by: str) -> None:
    server = host.server(gpus=(0, 1))
    pids = set(server.tree())
    word = str(server.leader.pid) if by == "pid" else os.path.basename(os.path.realpath(sys.executable))
    result = host.evict(scope="gpu", protect=[word])
    assert result.signals == ()
    assert host.alive(pids)
    spared = {row["pid"]: row["why"] for row in result.json["spared"]}
    assert "protected by the operator" in spared[server.leader.pid]
    assert result.json["verdict"] == "nothing_to_do"


@pytest.mark.promise
def test_never_kill_a_bystander(host: Host) -> None:
    """Case 33 and more: whoever sees GPU 1, has it open, or bears a telling name lives on when its server goes."""
    ours = host.server(gpus=(1,), see=(0,))
    other = host.server(gpus=(0,), see=(1,), port=30001)
    bystanders = {*host.bystanders().values(), *other.tree()}
    result = host.evict(scope="gpu", devices=["1"])
    assert not result.failed, result.json
    assert sent(result) == {(ours.leader.pid, "SIGTERM")}
    assert plain_signals(result) == []
    assert host.alive(bystanders)
    assert other.request("GET", "/health").status == 200
    assert other.find("sglang::scheduler") in {row["pid"] for row in result.json["spared"]}


@pytest.mark.parametrize("again", [False, True])
def test_files_of_a_server_that_died_before_the_eviction_are_removed(host: Host, again: bool) -> None:
    """Its loads file bears no pid: that it is the dead launch's is known by the record. ``again``: another
    server of that user runs meanwhile, and its file stays; so does what is no name of SGLang's."""
    server = host.server(gpus=(0,))
    pids = set(server.tree())
    host.record(server, user="root")
    shm = host.ns.root / "dev" / "shm"
    left = {path.name for path in shm.glob("sglang_loads_*")}
    (shm / "dataset.bin").write_bytes(b"1")
    host.kill(server.leader.pid, signal.SIGKILL)
    host.gone(pids)
    used: set[str] = set()
    if again:
        other = host.server(gpus=(1,), port=30009)
        used = {path.name for path in shm.glob("sglang_loads_*")} - left
        assert other.tree() and len(used) == 1
    result = host.evict(name=NAME, port=30000)
    assert not result.failed, result.json
    assert len(left) == 1 and left <= set(result.json["leftovers"]["removed"])
    kept = {path.name for path in shm.iterdir()}
    assert "dataset.bin" in kept and not left & kept
    assert used <= kept


def test_files_stay_where_no_record_says_whose_they_were(host: Host) -> None:
    server = host.server(gpus=(0,))
    pids = set(server.tree())
    shm = host.ns.root / "dev" / "shm"
    left = {path.name for path in shm.glob("sglang_loads_*")}
    host.kill(server.leader.pid, signal.SIGKILL)
    host.gone(pids)
    result = host.evict(name=NAME, port=30000)
    assert not result.failed, result.json
    assert left and left <= {path.name for path in shm.iterdir()}
    assert left <= {row["name"] for row in result.json["leftovers"]["kept"]}
