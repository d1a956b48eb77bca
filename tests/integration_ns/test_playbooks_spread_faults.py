# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Servers over several hosts, with scripted modules: who is asked what in which order, and what follows for all."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.integration_ns.spreading import FIRST, NEW, Spread, errors

pytestmark = [pytest.mark.ns, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def pair(tmp_path: Path) -> Spread:
    return Spread(tmp_path, {"gpu01": ["big"], "gpu02": ["big"]})


BOTH_EVICTED = ["evict gpu01/big", "evict gpu02/big"]
JUDGED = {"judge gpu01/big", "judge gpu02/big"}
STARTED = {"start gpu01/big", "start gpu02/big"}
AGAIN = {"start gpu01/big again", "start gpu02/big again"}


def times(pair: Spread, key: str, node: str, number: int = 0) -> tuple[float, float]:
    """Begin and end of a call that changed something."""
    rows = [row for row in pair.rows() if row["key"] == key and row["unit"] == node and not row["check"]]
    return rows[number]["at"], rows[number]["until"]


def test_the_nodes_go_one_after_another_and_come_together(pair: Spread) -> None:
    """Node 0 is evicted first; nothing is started before both are clean; both are started and proved side by side."""
    for node in pair.nodes():
        pair.fault(node, gpu_evict_s=1, clean_state_s=1, server_launch_s=2, server_ready_s=2)
    pair.fault("gpu02/big", gpu_evict_s=1, clean_state_s=3, server_launch_s=2, server_ready_s=2)
    pair.play("relaunch", server="big").check()
    assert pair.story()[:2] == BOTH_EVICTED
    assert times(pair, "gpu_evict", "gpu01/big")[1] <= times(pair, "gpu_evict", "gpu02/big")[0]
    clean_at = max(times(pair, "clean_state", node)[1] for node in pair.nodes())
    starts = [times(pair, "server_launch", node) for node in pair.nodes()]
    assert clean_at <= min(begin for begin, _end in starts)
    assert max(begin for begin, _end in starts) < min(end for _begin, end in starts)
    proofs = [times(pair, "server_ready", node) for node in pair.nodes()]
    assert max(begin for begin, _end in proofs) < min(end for _begin, end in proofs)
    assert set(pair.serving().values()) == {"new"}
    assert pair.leases() == []
    assert {pair.state(node)["last_good"] for node in pair.nodes()} != {FIRST}
    held = [row for row in pair.rows() if row["key"] == "server_lease:held" and not row["check"]]
    assert [row["unit"] for row in held[:2]] == pair.nodes()


@pytest.mark.parametrize("guilty", ["gpu01/big", pytest.param("gpu02/big", marks=pytest.mark.promise)])
def test_one_node_that_is_not_clean_keeps_both_from_being_started(pair: Spread, guilty: str) -> None:
    pair.fault(guilty, clean="dirty")
    found = errors(pair.play("relaunch", server="big"))
    assert pair.story()[:2] == BOTH_EVICTED
    assert set(pair.story()[2:]) == JUDGED
    assert pair.leases() == []
    host = guilty.split("/")[0]
    last = found[-2:]
    assert all(f"({host}): {host} is not " in message and "held_elsewhere" in message for message in last), last
    assert last[0] == last[1]


def test_a_first_node_that_does_not_go_leaves_the_other_one_alone(pair: Spread) -> None:
    pair.fault("gpu01/big", evict=True)
    found = errors(pair.play("relaunch", server="big"))
    assert pair.story() == ["evict gpu01/big"]
    assert "node 0 (gpu01): The eviction of big on gpu01 did not succeed" in found[-1]
    assert pair.leases() == []


@pytest.mark.parametrize("guilty", ["gpu01/big", "gpu02/big"])
def test_one_node_that_is_not_proved_takes_both_back(pair: Spread, guilty: str) -> None:
    pair.fault(guilty, proof="hung")
    found = errors(pair.play("relaunch", server="big"))
    story = pair.story()
    assert set(story[4:6]) == STARTED
    assert story[8:10] == BOTH_EVICTED
    assert set(story[10:12]) == JUDGED
    assert set(story[12:14]) == AGAIN
    assert set(pair.serving().values()) == {"old"}
    rank = pair.nodes().index(guilty)
    host = guilty.split("/")[0]
    said = f"big on gpu01, gpu02: the new configuration failed (node {rank} ({host}): hung: it does not serve (hung))"
    assert found[-1] == found[-2] == f"{said}; rolled back to {FIRST}: serving"
    # The other node was proved, and its launch is nothing to go back to all the same.
    for node in pair.nodes():
        state = pair.state(node)
        again = state["launches"][0]
        assert (state["last_good"], again["from_launch"]) == (again["launch_id"], FIRST)
    assert pair.leases() == []


def test_a_start_that_fails_on_one_node_is_not_waited_for_on_the_other_one(pair: Spread) -> None:
    pair.fault("gpu02/big", launch="no such user")
    found = errors(pair.play("relaunch", server="big"))
    first = pair.story()[: pair.story().index("evict gpu01/big", 1)]
    assert not [each for each in first if each.startswith("prove")]
    assert set(pair.serving().values()) == {"old"}
    assert "node 1 (gpu02): it was not started: no such user" in found[-1]
    assert "rolled back to" in found[-1]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other run", "no launch of it was proved on all of its hosts in one run"),
        ("never proved", "no launch of it was proved on all of its hosts in one run"),
        ("broken", "node 1 (gpu02): its files are gone"),
    ],
)
def test_without_a_way_back_on_one_node_both_are_stopped_and_clean(pair: Spread, case: str, words: str) -> None:
    pair.fault("gpu01/big", proof="failed")
    if case == "other run":
        pair.put("gpu02/big", run_id="another")
    elif case == "never proved":
        pair.put("gpu02/big", verdict=None)
    else:
        pair.fault("gpu02/big", broken=True)
    found = errors(pair.play("relaunch", server="big"))
    story = pair.story()
    assert story[8:10] == BOTH_EVICTED
    assert set(story[10:]) == JUDGED
    assert set(pair.serving().values()) == {"new!"}
    assert words in found[-1]
    assert found[-1].endswith("all nodes: stopped, the host is clean")
    assert pair.leases() == []


def test_a_way_back_that_fails_on_one_node_ends_with_both_stopped(pair: Spread) -> None:
    pair.fault("gpu01/big", proof="failed")
    pair.fault("gpu02/big", back_proof="hung")
    found = errors(pair.play("relaunch", server="big"))
    story = pair.story()
    assert story[-4:-2] == BOTH_EVICTED
    assert set(story[-2:]) == JUDGED
    assert set(pair.serving().values()) == {"old!"}
    said = f"the rollback to {FIRST} failed too (node 1 (gpu02): hung: it does not serve (hung)): all nodes: stopped"
    assert said in found[-1]
    assert pair.leases() == []


def test_a_launch_that_only_one_node_was_proved_with_is_no_way_back(pair: Spread) -> None:
    """The first failure leaves a launch that node 1 alone was proved with; the next one must not go back to it."""
    pair.fault("gpu01/big", proof="failed", back_proof="failed")
    errors(pair.play("relaunch", server="big"))
    assert [each["verdict"] for each in pair.state("gpu02/big")["launches"]] == ["ready", "ready", "ready"]
    pair.fault("gpu01/big", proof="failed")
    found = errors(pair.play("relaunch", server="big"))
    assert f"rolled back to {FIRST}: serving" in found[-1]
    assert {pair.state(node)["launches"][0]["from_launch"] for node in pair.nodes()} == {FIRST}


@pytest.mark.parametrize("choice", ["stop", "leave"])
def test_the_other_choices_hold_for_both(pair: Spread, choice: str) -> None:
    """The first node's entry says what follows; the other one's does not count."""
    pair.entries = {"gpu01/big": {"on_failure": choice}}
    pair.fault("gpu02/big", proof="failed")
    found = errors(pair.play("relaunch", server="gpu02/big"))
    evicted = [each for each in pair.story() if each.startswith("evict")]
    assert evicted == (BOTH_EVICTED * 2 if choice == "stop" else BOTH_EVICTED)
    end = "stopped, the host is clean" if choice == "stop" else "it was left as it is"
    assert found[-1].endswith(f"all nodes: {end}")


@pytest.mark.parametrize("step", ["evict", "launch", "proof"])
def test_a_node_that_is_gone_in_the_middle(pair: Spread, step: str) -> None:
    """Before the start nothing is started. After it nobody knows what became of it: if no node failed all is left."""
    pair.fault("gpu02/big", down=step)
    run = pair.play("relaunch", server="big")
    assert run.rc in (2, 4)
    found = [str(task.result["msg"]) for task in run.tasks if task.status == "failed" and not task.ignored]
    starts = [each for each in pair.story() if each.startswith("start")]
    if step == "evict":
        assert starts == []
    else:
        assert "start gpu01/big" in starts
        assert not [each for each in starts if each.endswith("again")]
        assert pair.story().count("evict gpu01/big") == 1
        assert "what became of node 1 (gpu02) is not known, and no node is known to have failed" in found[-1]
    assert [node for node in pair.leases() if node != "gpu02/big"] == []


def test_a_node_that_is_gone_and_another_one_that_failed(pair: Spread) -> None:
    """What was started on the one that answers is stopped: it is worth nothing alone."""
    pair.fault("gpu02/big", down="proof", server_ready_s=0)
    pair.fault("gpu01/big", proof="hung")
    run = pair.play("relaunch", server="big")
    found = [str(task.result["msg"]) for task in run.tasks if task.status == "failed" and not task.ignored]
    assert pair.story().count("evict gpu01/big") == 2
    assert pair.story().count("evict gpu02/big") == 1
    assert "node 0 (gpu01): stopped, the host is clean" in found[-1], found[-1]
    assert "node 1 (gpu02): " in found[-1]


@pytest.mark.parametrize("guilty", ["gpu01/big", "gpu02/big"])
def test_without_the_lease_on_one_node_nothing_is_touched(pair: Spread, guilty: str) -> None:
    pair.fault(guilty, lease="run b works on it")
    found = errors(pair.play("relaunch", server="big"))
    assert pair.touched() == []
    assert pair.leases() == []
    assert any("run b works on it. Nothing was touched." in message for message in found)
    if guilty == "gpu01/big":
        asked = [row for row in pair.rows() if row["key"] == "server_lease:held" and not row["check"]]
        assert [row["unit"] for row in asked] == ["gpu01/big"]


def test_a_lease_that_one_node_lost_ends_all(pair: Spread) -> None:
    pair.fault("gpu02/big", lost=True)
    found = errors(pair.play("relaunch", server="big"))
    # The other node goes on until the barrier, and starts nothing.
    assert pair.story() == [*BOTH_EVICTED, "judge gpu01/big"]
    assert "node 1 (gpu02)" in found[-1]


Change = t.Callable[[Spread], None]


def _flag(pair: Spread) -> None:
    pair.flags["gpu02/big"] = {"mem_fraction_static": 0.8}


def _rank(pair: Spread) -> None:
    pair.flags["gpu02/big"] = {"node_rank": 0}


def _address(pair: Spread) -> None:
    pair.flags["gpu02/big"] = {"dist_init_addr": "192.0.2.7:5000"}


def _plan(pair: Spread) -> None:
    pair.fault("gpu02/big", plan="denied")


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        (_flag, (), "flag mem-fraction-static is not set on gpu01 and 0.8 on gpu02"),
        (_rank, (), "gpu01, gpu02 all have node_rank 0"),
        (_address, (), "another 'big' has dist_init_addr"),
        (lambda _pair: None, ("--limit", "gpu01"), "node rank 1 (gpu02) is not in this run"),
        (_plan, (), "gpu02: "),
    ],
)
def test_what_is_no_whole_server_is_refused_untouched(
    pair: Spread, change: Change, arguments: tuple[str, ...], words: str
) -> None:
    change(pair)
    found = errors(pair.play("relaunch", *arguments, server="gpu01/big"))
    assert any(words in message for message in found), found
    assert pair.touched() == []
    assert [row for row in pair.rows() if row["key"] == "server_lease:held"] == []


def test_check_mode_says_what_would_be_and_touches_nothing(pair: Spread) -> None:
    run = pair.play("relaunch", server="big", check=True).check()
    assert pair.story() == []
    assert pair.leases() == []
    texts = [str(task.result["msg"]) for task in run.named("Summary of big")]
    assert [text.splitlines()[1].split() for text in texts] == [
        ["Unit", "node", str(rank), "of", "2:", "big", "over", "gpu01,", "gpu02"] for rank in (0, 1)
    ]
    assert all(f"go back to launch {FIRST}, if it does not serve" in text for text in texts)


@pytest.mark.parametrize("running", [NEW, None])
def test_as_wanted_is_a_word_of_all_nodes(pair: Spread, running: str | None) -> None:
    """None: node 1 has another configuration."""
    pair.put("gpu01/big", NEW)
    if running:
        pair.put("gpu02/big", NEW)
    pair.play("relaunch", server="big", relaunch_when="changed").check()
    assert pair.touched()[:2] == ([] if running else BOTH_EVICTED)
    assert set(pair.touched()[2:]) == (set() if running else STARTED)
    assert set(pair.serving().values()) == {"new"}


def test_one_of_one_host_and_one_of_two_in_one_run(tmp_path: Path) -> None:
    """The single ones first, one at a time; the first failure ends the run before the big one is touched."""
    fleet = Spread(tmp_path, {"gpu01": ["big", "chat"], "gpu02": ["big"], "gpu03": ["chat"]})
    fleet.play("relaunch", all=True).check()
    evicted = [each for each in fleet.story() if each.startswith("evict")]
    assert evicted == ["evict gpu01/chat", "evict gpu03/chat", *BOTH_EVICTED]
    assert set(fleet.serving().values()) == {"new"}

    fleet.fault("gpu03/chat", proof="failed")
    errors(fleet.play("relaunch", all=True, on_failure="stop"))
    assert not [each for each in fleet.story() if "big" in each and each.startswith(("evict", "start"))]


def test_clients_are_held_once(pair: Spread) -> None:
    for node in pair.nodes():
        pair.entries[node] = {"clients": [{"name": "load", "unit": "load.service"}]}
    pair.play("relaunch", server="big").check()
    assert len([row for row in pair.rows() if row["key"].startswith("client_hold")]) == 1
    story = [row["key"] for row in pair.rows() if row["key"] in ("client_hold", "gpu_evict")]
    assert story == ["client_hold", "gpu_evict", "gpu_evict"]


def test_teardown_takes_the_first_node_first_and_goes_on_without_it(pair: Spread) -> None:
    pair.play("teardown", server="gpu02/big").check()
    assert pair.touched() == BOTH_EVICTED
    assert pair.leases() == []
    pair.fault("gpu01/big", evict=True)
    errors(pair.play("teardown", server="big"))
    assert pair.touched() == BOTH_EVICTED
    pair.fault("gpu01/big")
    pair.play("teardown", "--limit", "gpu02", server="big").check()
    assert pair.touched() == ["evict gpu02/big"]
    pair.fault("gpu02/big", lease="run b works on it")
    errors(pair.play("teardown", server="big"))
    assert pair.touched() == []


def test_going_back_by_hand_is_for_all_nodes(pair: Spread) -> None:
    pair.play("relaunch", server="big").check()
    pair.play("rollback", server="big").check()
    assert [each for each in pair.story() if each.startswith("evict")] == BOTH_EVICTED
    assert set(pair.serving().values()) == {"old"}
    assert {pair.state(node)["launches"][0]["from_launch"] for node in pair.nodes()} == {FIRST}
    newest = pair.state("gpu01/big")["launches"][1]["launch_id"]
    errors(pair.play("rollback", server="big", launch="20270101T000000Z-0001"))
    assert pair.touched() == []
    pair.put("gpu02/big", run_id="another")
    found = errors(pair.play("rollback", server="big", launch=newest))
    assert pair.touched() == []
    assert "was not proved on all of its hosts, or is not kept" in found[0]
