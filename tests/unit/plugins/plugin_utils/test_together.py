# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What follows for all nodes of a server over several hosts, and what is said of it."""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import report, together

UNIT = {
    "server": "big",
    "name": "big over gpu01, gpu02",
    "nodes": 2,
    "hosts": ["gpu01", "gpu02"],
    "members": [{"host": "gpu01", "rank": 0}, {"host": "gpu02", "rank": 1}],
}
STARTED = {"launch_id": "new", "config_hash": "sha256:aa", "pid": 9}
READY = {"ready": True, "verdict": "ready", "pid": 9}
FAILED = {"ready": False, "verdict": "failed", "error": "no memory"}
PEER = {**FAILED, "error": "another node of it failed", "peer_failed": True}
GONE = {"unreachable": True, "msg": "Connection timed out"}
NOTHING: dict[str, t.Any] = {"step": "nothing", "why": ""}
BACK: dict[str, t.Any] = {"step": "rollback", "why": ""}
LOST = {"step": "nothing", "why": "this run no longer has the lease", "lost": True}
LEFT = {"step": "leave", "why": "the connection was lost in the proof"}


def row(launch: t.Any, verify: t.Any, follow: t.Mapping[str, t.Any], choice: str = "rollback") -> dict[str, t.Any]:
    return {"first": {"launch": launch, "verify": verify}, "next": follow, "choice": choice}


def test_who_is_behind() -> None:
    rows = {"gpu01": {"at": "big: clean"}, "gpu02": {"at": "big: evicted"}}
    assert together.behind(UNIT, rows, "big: clean") == ["node 1 (gpu02)"]
    assert together.behind(UNIT, {"gpu01": {"at": "x"}}, "x") == ["node 1 (gpu02)"]
    assert together.behind(UNIT, {"gpu01": {"at": "x"}, "gpu02": {"at": "x"}}, "x") == []


@pytest.mark.parametrize(
    ("first", "second", "steps"),
    [
        (row(STARTED, FAILED, BACK), row(STARTED, PEER, BACK), ("rollback", "rollback")),
        (row(STARTED, READY, BACK), row(STARTED, FAILED, BACK), ("rollback", "rollback")),
        (row(STARTED, {}, BACK), row({"msg": "no such user"}, {}, BACK), ("rollback", "rollback")),
        # Only one was started: the other one is evicted as well, though it has nothing.
        (row(STARTED, {}, BACK), row({}, {}, NOTHING), ("rollback", "rollback")),
        (row({}, {}, NOTHING), row({}, {}, NOTHING), ("nothing", "nothing")),
        (row({"skipped": True}, {}, NOTHING), row({}, {}, NOTHING), ("nothing", "nothing")),
        # The first node's choice counts.
        (row(STARTED, FAILED, BACK, "stop"), row(STARTED, PEER, BACK), ("stop", "stop")),
        (row(STARTED, FAILED, BACK, "leave"), row(STARTED, PEER, BACK, "stop"), ("leave", "leave")),
        # A node that nobody can see: with a failure elsewhere what answers is stopped, else all is left.
        (row(STARTED, FAILED, BACK), row(STARTED, GONE, LEFT), ("stop", "leave")),
        (row(STARTED, READY, BACK), row(STARTED, GONE, LEFT), ("leave", "leave")),
        (row(STARTED, PEER, BACK), row(STARTED, GONE, LEFT), ("leave", "leave")),
        (row(STARTED, FAILED, BACK), row(STARTED, {}, {}), ("stop", "leave")),
        (row(STARTED, FAILED, BACK), {}, ("stop", "leave")),
        # What is another run's by now is not touched, and what is still ours is stopped.
        (row(STARTED, FAILED, BACK), row(STARTED, FAILED, LOST), ("stop", "nothing")),
        (row(STARTED, FAILED, LOST), row(STARTED, FAILED, LOST), ("nothing", "nothing")),
    ],
)
def test_what_follows_for_all(first: dict[str, t.Any], second: dict[str, t.Any], steps: tuple[str, str]) -> None:
    found = together.next_steps(UNIT, {"gpu01": first, "gpu02": second})
    assert (found["gpu01"]["step"], found["gpu02"]["step"]) == steps
    assert all("why" in each for each in found.values())


# --- launches that belong together ------------------------------------------------------------------------------------


def launch(launch_id: str, run_id: str | None, verdict: str | None = "ready", **more: t.Any) -> dict[str, t.Any]:
    return {"launch_id": launch_id, "run_id": run_id, "from_launch": None, "verdict": verdict, "problem": None, **more}


def choose(one: list[dict[str, t.Any]], other: list[dict[str, t.Any]], wanted: str = "") -> dict[str, t.Any]:
    return together.choose_start(UNIT, {"gpu01": one, "gpu02": other}, wanted)


def test_the_last_start_that_was_proved_on_both() -> None:
    one = [launch("a3", "r3", "failed", current=True), launch("a2", "r2"), launch("a1", "r1")]
    other = [launch("b3", "r3", current=True), launch("b2", "r2"), launch("b1", "r1")]
    assert choose(one, other) == {"launches": {"gpu01": "a2", "gpu02": "b2"}, "problem": ""}


def test_a_launch_that_one_node_alone_was_proved_with_is_none() -> None:
    one = [launch("a2", "r2", "failed"), launch("a1", "r1")]
    other = [launch("b2", "r2", last_good=True), launch("b1", "r1")]
    assert choose(one, other)["launches"] == {"gpu01": "a1", "gpu02": "b1"}


def test_both_starts_of_one_run_are_apart() -> None:
    """In the first one node 1 was proved, in the way back node 0: together nothing was."""
    one = [launch("a3", "r2", from_launch="a1"), launch("a2", "r2", "failed"), launch("a1", "r1")]
    other = [launch("b3", "r2", "failed", from_launch="b1"), launch("b2", "r2"), launch("b1", "r1")]
    assert choose(one, other)["launches"] == {"gpu01": "a1", "gpu02": "b1"}


def test_the_current_start_is_none_to_go_back_to_but_by_name() -> None:
    one, other = [launch("a1", "r1", current=True)], [launch("b1", "r1", current=True)]
    assert "no other launch of it was proved on all of its hosts" in choose(one, other)["problem"]
    assert choose(one, other, "last_good")["launches"] == {"gpu01": "a1", "gpu02": "b1"}
    assert choose(one, other, "b1")["launches"] == {"gpu01": "a1", "gpu02": "b1"}


def test_after_a_failure_the_starts_of_this_run_do_not_count() -> None:
    """Where no node came as far as to note its start the current one is to go back to; so it is in check mode."""
    one, other = [launch("a1", "r1", current=True)], [launch("b1", "r1", current=True)]
    unit_launches = {"gpu01": one, "gpu02": other}
    assert together.choose_start(UNIT, unit_launches, "last_good", "r2")["launches"] == {"gpu01": "a1", "gpu02": "b1"}
    assert together.choose_start(UNIT, unit_launches, "last_good", "r1")["launches"] == {}


def test_a_start_that_was_noted_on_one_node_only_leaves_the_other_ones_current() -> None:
    one = [launch("a2", "r2", None, current=True), launch("a1", "r1")]
    assert choose(one, [launch("b1", "r1", current=True)])["launches"] == {"gpu01": "a1", "gpu02": "b1"}


@pytest.mark.parametrize(
    "other",
    [[], [launch("b1", "r9")], [launch("b1", None)], [launch("b1", "r1", problem="it is damaged")]],
)
def test_without_a_common_start_there_is_no_way_back(other: list[dict[str, t.Any]]) -> None:
    found = choose([launch("a1", "r1")], other)
    assert found["launches"] == {}
    assert "gpu01: a1 (ready)" in found["problem"]


def test_an_id_that_is_not_kept() -> None:
    assert "launch 'zz' was not proved on all" in choose([launch("a1", "r1")], [launch("b1", "r1")], "zz")["problem"]


SAME = {"step": "stop", "why": "there is nothing else to go back to: launch a1 has the configuration that just failed"}


@pytest.mark.parametrize(
    ("one", "other", "step", "words"),
    [
        ({"problem": "", "next": BACK}, {"problem": "", "next": BACK}, "rollback", ""),
        ({"problem": "", "next": SAME}, {"problem": "", "next": BACK}, "rollback", ""),
        ({"problem": "", "next": SAME}, {"problem": "", "next": SAME}, "stop", "nothing else to go back to"),
        ({"problem": "", "next": BACK}, {"problem": "gone", "next": {"step": "stop"}}, "stop", "node 1 (gpu02): gone"),
        ({"problem": "", "next": BACK}, {}, "stop", "node 1 (gpu02): its kept launch was not tried"),
        ({"problem": "", "next": BACK}, {"problem": "x", "next": LOST}, "stop", "the lease on node 1 (gpu02)"),
    ],
)
def test_all_go_back_or_none(one: dict[str, t.Any], other: dict[str, t.Any], step: str, words: str) -> None:
    found = together.after_trials(UNIT, {"gpu01": one, "gpu02": other})
    assert found["step"] == step
    assert words in found["why"]


# --- sentences --------------------------------------------------------------------------------------------------------

CLEAN = {"verdict": "clean", "reasons": []}
DIRTY = {"verdict": "dirty", "reasons": [{"code": "gpu_busy", "message": "GPU 0 is held"}]}


def story(one: dict[str, t.Any], other: dict[str, t.Any]) -> str:
    return together.unit_outcome(UNIT, {"gpu01": one, "gpu02": other})


def ended(verify: t.Any, step: str, held: bool = False, **more: t.Any) -> dict[str, t.Any]:
    first = {"launch": STARTED, "verify": verify}
    return {"message": "m", "first": first, "held_first": held, "next": {"step": step, "why": ""}, **more}


def test_the_node_that_failed_is_named_and_not_the_one_that_waited() -> None:
    stopped: dict[str, t.Any] = {"stopped": {"clean": CLEAN}}
    text = story(ended(READY, "stop", True, **stopped), ended(FAILED, "stop", **stopped))
    why = "big on gpu01, gpu02: the new configuration failed (node 1 (gpu02): failed: no memory)"
    assert text == f"{why}; all nodes: stopped, the host is clean"


def test_what_became_of_each_where_it_differs() -> None:
    text = story(ended(FAILED, "stop", stopped={"clean": DIRTY}), ended(PEER, "stop", stopped={"clean": CLEAN}))
    assert "(node 0 (gpu01): failed: no memory)" in text
    assert "node 0 (gpu01): stopped, the host is not proved clean (dirty: GPU 0 is held [gpu_busy])" in text
    assert "node 1 (gpu02): stopped, the host is clean" in text


def test_a_way_back_of_both_and_of_one() -> None:
    back: dict[str, t.Any] = {"trial": {"launch_id": "a1"}, "second": {"launch": STARTED, "verify": READY}}
    other: dict[str, t.Any] = {"trial": {"launch_id": "b1"}, "second": {"launch": STARTED, "verify": READY}}
    assert story(ended(FAILED, "rollback", **back), ended(PEER, "rollback", **other)).endswith(
        "; rolled back to a1, b1: serving"
    )
    follow = {"message": "m", "next": {"step": "stop", "why": ""}}
    back["second"] = {"launch": STARTED, "verify": READY, **follow}
    other["second"] = {"launch": STARTED, "verify": FAILED, **follow}
    one = ended(FAILED, "rollback", held_second=True, stopped={"clean": CLEAN}, **back)
    text = story(one, ended(PEER, "rollback", stopped={"clean": CLEAN}, **other))
    assert "the rollback to a1, b1 failed too (node 1 (gpu02): failed: no memory): all nodes: stopped" in text


def test_nothing_was_started() -> None:
    first = {"clean": DIRTY}
    one = {"message": "gpu01 is not clean", "first": first, "held_first": False, "next": NOTHING}
    other = {"message": "node 0 did not come", "first": {}, "held_first": True, "next": NOTHING}
    assert story(one, other) == "big on gpu01, gpu02: node 0 (gpu01): gpu01 is not clean"


def test_a_node_without_a_word() -> None:
    text = story(ended(READY, "leave", True), {})
    assert "node 1 (gpu02)" in text
    assert "there is no word of what became of it" in text


def test_the_summary_of_a_node_never_says_serving_where_its_server_does_not() -> None:
    results: dict[str, t.Any] = {
        "server": "big",
        "host": "gpu01",
        "unit": UNIT,
        "first": {"launch": STARTED, "verify": READY},
        "next": {"step": "stop"},
        "outcome": {"outcome": "a sentence"},
    }
    lines = report.relaunch_lines(results)
    assert lines[0] == "big on gpu01: FAILED: another node of it does not serve; stopped"
    assert lines[1].split() == ["Unit", "node", "0", "of", "2:", "big", "over", "gpu01,", "gpu02"]
    results.update(second={"verify": READY, "message": "another one failed"}, trial={"launch_id": "a1"})
    assert report.relaunch_lines(results)[0].endswith("the rollback failed too")
