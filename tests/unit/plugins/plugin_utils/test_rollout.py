# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Batches, what is left to do, limits, the stop rule."""

from __future__ import annotations

import typing as t
from dataclasses import replace

import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import rollout
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.rollout import Unit

DEFAULT = list(rollout.RAMP)


def fleet(count: int, **changes: t.Any) -> list[Unit]:
    return [Unit(f"h{number:02}", "chat", **changes) for number in range(1, count + 1)]


def sizes(count: int, ramp: t.Sequence[t.Any]) -> list[int]:
    return [len(batch) for batch in rollout.batches_of(fleet(count), ramp, count, 1)]


# --- what was asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, "3", "10%", "100%", "0.5%", "7 %"])
def test_a_step(step: t.Any) -> None:
    assert rollout.step_problem(step) == ""


@pytest.mark.parametrize("step", [0, -1, "0", "0%", "101%", "1.5", 1.5, "", "ten", True, None, [1], "nan%", "-5%"])
def test_no_step(step: t.Any) -> None:
    assert "rollout_ramp has" in rollout.step_problem(step)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ramp": []}, "rollout_ramp is empty"),
        ({"ramp": ""}, "rollout_ramp is empty"),
        ({"ramp": "1,0"}, "rollout_ramp has '0'"),
        ({"per_node": 0}, "rollout_per_node is '0'"),
        ({"per_node": True}, "rollout_per_node is 'True'"),
        ({"per_node": "1.5"}, "rollout_per_node is '1.5'"),
        ({"leave_healthy": "-1"}, "router_leave_healthy is '-1'"),
        ({"leave_healthy": "one"}, "router_leave_healthy is 'one'"),
        ({"min_throughput": -0.1}, "rollout_min_throughput is '-0.1'"),
        ({"min_throughput": "nan"}, "rollout_min_throughput is 'nan'"),
        ({"min_throughput": True}, "rollout_min_throughput is 'True'"),
        ({"max_latency": "inf"}, "rollout_max_latency is 'inf'"),
        ({"max_latency": None}, "rollout_max_latency is 'None'"),
    ],
)
def test_options_that_are_refused(options: dict[str, t.Any], words: str) -> None:
    found = rollout.option_problems(options)
    assert len(found) == 1
    assert words in found[0]
    assert rollout.plan(fleet(3), options)["batches"] == []


def test_options_as_people_type_them() -> None:
    assert rollout.option_problems({}) == []
    typed = {"ramp": "1, 10%,25%", "per_node": "2", "min_throughput": "0.5", "max_latency": "0"}
    assert rollout.option_problems(typed) == []
    assert [rollout.ramp_of(ramp) for ramp in ("1, 10%", 3, ["5%"], (2,))] == [["1", "10%"], [3], ["5%"], [2]]


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "ramp", "expected"),
    [
        (1, DEFAULT, [1]),
        (2, DEFAULT, [1, 1]),
        (10, DEFAULT, [1, 1, 2, 2, 2, 2]),
        (40, DEFAULT, [1, 4, 10, 10, 10, 5]),
        (5, ["100%"], [5]),
        (5, [2], [2, 2, 1]),
        (5, [99], [5]),
        (3, ["1%"], [1, 1, 1]),
        (10, ["1", "29%"], [1, 2, 2, 2, 2, 1]),
        (0, DEFAULT, []),
    ],
)
def test_sizes_of_batches(count: int, ramp: t.Sequence[t.Any], expected: list[int]) -> None:
    """Parts are of all servers, rounded down, and never nobody."""
    assert sizes(count, ramp) == expected


@pytest.mark.parametrize("count", [1, 2, 7, 23])
@pytest.mark.parametrize("per_node", [1, 2, 3])
@pytest.mark.parametrize("ramp", [[1, "50%"], [99]])
def test_every_server_comes_once_and_no_node_has_too_many_guests(
    count: int, per_node: int, ramp: list[t.Any]
) -> None:
    units = [
        Unit(f"h{number // 2}", f"s{number % 2}", node=("", "pve1", "pve2")[number // 2 % 3]) for number in range(count)
    ]
    batches = rollout.batches_of(units, ramp, count, per_node)
    assert sorted(unit.name for batch in batches for unit in batch) == sorted(unit.name for unit in units)
    assert all(batches)
    for batch in batches:
        for node in ("pve1", "pve2"):
            assert len({unit.host for unit in batch if unit.node == node}) <= per_node
    assert len(batches[0]) <= (1 if ramp[0] == 1 else 99)


def test_a_guest_waits_for_its_neighbour_and_others_go_on() -> None:
    units = [Unit("a", "x", "pve1"), Unit("b", "x", "pve1"), Unit("c", "x", "pve2"), Unit("d", "x"), Unit("d", "y")]
    batches = rollout.batches_of(units, [3], 5, 1)
    assert [[unit.name for unit in batch] for batch in batches] == [["a/x", "c/x", "d/x"], ["b/x", "d/y"]]


def test_two_servers_of_one_guest_are_one_guest() -> None:
    units = [Unit("a", "x", "pve1"), Unit("a", "y", "pve1"), Unit("b", "x", "pve1")]
    batches = rollout.batches_of(units, ["100%"], 3, 1)
    assert [[unit.name for unit in batch] for batch in batches] == [["a/x", "a/y"], ["b/x"]]


# --- the plan ---------------------------------------------------------------------------------------------------------


def names(rows: t.Sequence[t.Mapping[str, t.Any]]) -> list[str]:
    return [f"{row['host']}/{row['server']}" for row in rows]


def test_the_canary_comes_first_and_the_rest_keeps_its_order() -> None:
    made = rollout.plan(fleet(4), {"canary": "h03/chat", "ramp": [1, 2]})
    assert [names(batch) for batch in made["batches"]] == [["h03/chat"], ["h01/chat", "h02/chat"], ["h04/chat"]]
    assert (made["canary"], made["slots"], made["most"], made["problems"]) == ("h03/chat", [1, 1, 1], 1, [])


def test_what_is_done_is_left_out_and_still_counts_for_parts() -> None:
    units = [Unit(f"h{number}", "chat", done=number <= 10) for number in range(1, 21)]
    made = rollout.plan(units, {"ramp": ["25%"], "canary": "h1/chat"})
    assert [len(batch) for batch in made["batches"]] == [5, 5]
    assert (len(made["done"]), made["total"], made["canary"]) == (10, 20, "h11/chat")


def test_nothing_to_do_is_no_problem() -> None:
    made = rollout.plan(fleet(2, done=True), {})
    assert (made["batches"], made["slots"], made["problems"], made["canary"]) == ([], [], [], "")
    assert rollout.plan([], {})["most"] == 0


def test_servers_of_one_host_have_slots() -> None:
    units = [Unit("a", "x"), Unit("a", "y"), Unit("b", "x")]
    made = rollout.plan(units, {"ramp": ["100%"]})
    assert (made["slots"], made["most"]) == ([2], 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"canary": "h09/chat"}, "rollout_canary is h09/chat, which is none"),
        ({"canary": "chat"}, "stands for several servers: h01/chat, h02/chat"),
        ({"canary": "h01/chat", "except": ["h01/chat"]}, "left out by rollout_except"),
        ({"except": "h09/chat, h01/chat"}, "rollout_except names h09/chat"),
    ],
)
def test_names_of_nobody(options: dict[str, t.Any], words: str) -> None:
    made = rollout.plan(fleet(2), options)
    assert words in made["problems"][0]
    assert made["batches"] == []


def test_what_is_left_out_is_told_and_in_no_batch() -> None:
    made = rollout.plan(fleet(3), {"except": "h02/chat", "ramp": ["100%"]})
    assert names(made["left_out"]) == ["h02/chat"]
    assert names(made["batches"][0]) == ["h01/chat", "h03/chat"]


def test_units_come_from_what_each_host_found() -> None:
    variables = {
        "a": {"preflight_chosen": ["x", "y"], "rollout_seen": {"x": {"done": True, "routed": True}}},
        "b": {"preflight_chosen": []},
        "c": {"preflight_chosen": ["x"], "rollout_seen": {"x": {"done": "yes", "routed": False}},
              "sglang_proxmox_host": "pve1"},
    }  # fmt: skip
    units, problems = rollout.units_of(["a", "b", "c"], variables)
    assert units == [Unit("a", "x", "", True, True), Unit("c", "x", "pve1", False)]
    assert problems == ["a: server 'y': nothing is known of it"]


# --- servers over several hosts ---------------------------------------------------------------------------------------


def big(*hosts: str, server: str = "big", **changes: t.Any) -> Unit:
    others = tuple(Unit(host, server, **changes) for host in hosts[1:])
    return Unit(hosts[0], server, others=others, label=f"{server} over {', '.join(hosts)}", **changes)


def test_a_server_over_several_hosts_counts_once_and_its_members_come_together() -> None:
    units = [Unit("a", "x"), big("a", "b"), Unit("b", "x"), Unit("c", "x")]
    made = rollout.plan(units, {"ramp": [1, 2]})
    assert [names(batch) for batch in made["batches"]] == [["a/x"], ["a/big", "b/big", "b/x"], ["c/x"]]
    assert (made["total"], made["most"], made["slots"]) == (4, 2, [1, 2, 1])
    second = made["batches"][1]
    assert [(row["slot"], row["unit"]) for row in second] == [(0, "big over a, b")] * 2 + [(1, "")]
    assert [rollout.mine(second, host) for host in "abc"] == [["big", ""], ["big", "x"], ["", ""]]
    assert rollout.mine([], "a") == []


def test_all_members_have_the_same_slot_and_no_host_two_servers_at_one() -> None:
    units = [Unit("a", "x"), Unit("a", "y"), Unit("b", "x"), Unit("c", "x")]
    units[3:3] = [big("b", "a"), big("c", "b", server="huge")]
    batch = rollout.plan(units, {"ramp": ["100%"]})["batches"][0]
    for name in ("big over b, a", "huge over c, b"):
        assert len({row["slot"] for row in batch if row["unit"] == name}) == 1
    places = [(row["host"], row["slot"]) for row in batch]
    assert len(places) == len(set(places)) == 8
    for host in "abc":
        own = [row["server"] for row in batch if row["host"] == host]
        assert sorted(filter(None, rollout.mine(batch, host))) == sorted(own)


def test_parts_are_of_servers_and_not_of_hosts() -> None:
    units = [big(*(f"h{number}{part}" for part in "abcd"), server=f"s{number}") for number in range(4)]
    assert [len(batch) for batch in rollout.plan(units, {"ramp": ["50%"]})["batches"]] == [8, 8]


@pytest.mark.parametrize("name", ["a/big", "b/big", "big"])
def test_any_member_names_the_whole(name: str) -> None:
    units = [Unit("a", "x"), big("a", "b")]
    made = rollout.plan(units, {"canary": name, "ramp": [1]})
    assert [names(batch) for batch in made["batches"]] == [["a/big", "b/big"], ["a/x"]]
    assert made["canary"] == "a/big"
    made = rollout.plan(units, {"except": f"{name},a/big", "ramp": [1]})
    assert (names(made["left_out"]), names(made["batches"][0])) == (["a/big", "b/big"], ["a/x"])
    assert "left out" in rollout.plan(units, {"except": "b/big", "canary": name})["problems"][0]


def test_a_whole_is_done_only_if_all_of_it_is() -> None:
    half = replace(big("a", "b"), done=True)
    assert names(rollout.plan([half], {})["batches"][0]) == ["a/big", "b/big"]
    assert names(rollout.plan([big("a", "b", done=True)], {})["done"]) == ["a/big", "b/big"]


def test_guests_of_a_node_are_counted_for_each_member() -> None:
    spread = Unit("a", "big", "pve1", others=(Unit("b", "big", "pve2"),), label="big over a, b")
    units = [spread, Unit("c", "x", "pve2"), Unit("d", "x", "pve3")]
    made = rollout.plan(units, {"ramp": [3]})
    assert [names(batch) for batch in made["batches"]] == [["a/big", "b/big", "d/x"], ["c/x"]]


def test_a_whole_on_one_node_can_not_be_taken_apart_and_comes_alone_there() -> None:
    units = [Unit("c", "x", "pve1"), big("a", "b", node="pve1"), Unit("d", "x", "pve1")]
    made = rollout.plan(units, {"ramp": [3]})
    assert [names(batch) for batch in made["batches"]] == [["c/x"], ["a/big", "b/big"], ["d/x"]]


def spread_host(done: bool = True, **more: t.Any) -> dict[str, t.Any]:
    members = [{"host": host, "server": "big", "rank": rank} for rank, host in enumerate(("b", "a"))]
    units = {"big": {"name": "big over b, a", "members": members}}
    seen = {"big": {"done": done, "routed": False}, "x": {"done": True, "routed": True}}
    return {"preflight_chosen": ["x", "big"], "preflight_units": units, "rollout_seen": seen, **more}


def test_a_whole_comes_from_what_each_of_its_hosts_found() -> None:
    variables = {"a": spread_host(False), "b": spread_host(sglang_proxmox_host="pve1")}
    units, problems = rollout.units_of(["a", "b"], variables)
    assert problems == []
    assert [(unit.name, unit.hosts, unit.label) for unit in units] == [
        ("a/x", ("a",), ""), ("b/big", ("b", "a"), "big over b, a"), ("b/x", ("b",), ""),
    ]  # fmt: skip
    assert units[1].node == "pve1"
    assert not units[1].all_done


def test_a_whole_with_a_member_that_nothing_is_known_of_is_refused() -> None:
    variables = {"a": spread_host(), "b": spread_host(rollout_seen={"x": {"done": True, "routed": True}})}
    units, problems = rollout.units_of(["a", "b"], variables)
    assert problems == ["b: server 'big': nothing is known of it"]
    assert [unit.name for unit in units] == ["a/x", "b/x"]
    assert "nothing is known" in rollout.units_of(["a"], {"a": spread_host()})[1][0]


def test_requests_are_sent_to_node_0_alone() -> None:
    units = spread_host()["preflight_units"]
    assert rollout.answers_requests(units, "b", "big")
    assert not rollout.answers_requests(units, "a", "big")
    assert rollout.answers_requests(units, "a", "x")
    assert rollout.answers_requests(None, "a", "x")


@pytest.mark.parametrize(("key", "value", "nodes"), [("nnodes", 2, 2), ("--nnodes", "4", 4), ("tp_size", 2, 1)])
def test_a_node_whose_other_hosts_are_not_known_is_refused(key: str, value: t.Any, nodes: int) -> None:
    assert rollout.nodes_of({"flags": {key: value}}) == nodes
    made = rollout.plan(fleet(1), {})
    variables = {"h01": {"rollout_seen": {"chat": {"nodes": nodes}}}}
    problems = rollout.spread_problems(made, variables)
    assert len(problems) == (1 if nodes > 1 else 0)
    assert not problems or "h01: server 'chat' is spread over several hosts" in problems[0]
    done = rollout.plan(fleet(1, done=True), {})
    assert rollout.spread_problems(done, variables) == []
    whole = rollout.plan([big("h01", "h02", server="chat")], {})
    variables["h02"] = variables["h01"]
    assert rollout.spread_problems(whole, variables) == []


# --- what is left to do -----------------------------------------------------------------------------------------------

SERVER = {"name": "chat", "flags": {}}
SOAK = {"requests": 8.0, "concurrency": 4.0, "tokens": 256.0, "tokens_per_s": 100.0, "latency_p50_s": 1.0}
GOOD: dict[str, t.Any] = {
    "launch_id": "one", "config_hash": "sha256:a", "verdict": "ready", "current": True, "last_good": True, "soak": SOAK,
}  # fmt: skip
SAME = {"config_changed": False, "secrets_changed": False, "config_hash": "sha256:a"}


def info(matches: t.Any = True, **launch: t.Any) -> dict[str, t.Any]:
    rows = [] if matches else [{"item": "flag:x", "found": 1, "wanted": 2}]
    return {"servers": [{"name": "chat", "matches": matches, "differences": rows, "launches": [{**GOOD, **launch}]}]}


def found(**changes: t.Any) -> dict[str, t.Any]:
    results = {"current": info(), "trial": SAME, "verify": {"ready": True}, "routers": {}, **changes}
    return rollout.seen(SERVER, results, {"when": "changed"})


def test_what_runs_as_wanted_was_proved_and_serves_is_done() -> None:
    assert found()["done"] is True
    assert found()["why"] == "it serves as wanted"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"current": {}}, "no launch of it is known"),
        ({"current": {"msg": "no answer"}}, "no launch of it is known"),
        ({"current": info(False)}, "its configuration differs, or is not known"),
        ({"current": info(None)}, "its configuration differs, or is not known"),
        ({"trial": {**SAME, "config_changed": True}}, "its configuration differs, or is not known"),
        ({"trial": {**SAME, "config_changed": None}}, "its configuration differs, or is not known"),
        ({"trial": {**SAME, "secrets_changed": True}}, "its configuration differs, or is not known"),
        ({"trial": {}}, "its configuration differs, or is not known"),
        ({"current": info(verdict=None)}, "its launch one was never proved"),
        ({"current": info(verdict="failed")}, "its launch one was never proved"),
        ({"current": info(current=False)}, "no launch of it is known"),
        ({"verify": {}}, "it does not serve"),
        ({"verify": {"ready": "yes"}}, "it does not serve"),
        ({"verify": {"skipped": True, "ready": True}}, "it does not serve"),
    ],
)
def test_everything_else_is_to_be_changed(changes: dict[str, t.Any], why: str) -> None:
    row = found(**changes)
    assert (row["done"], row["why"]) == (False, why)


def test_all_are_changed_where_that_is_asked_for() -> None:
    results = {"current": info(), "trial": SAME, "verify": {"ready": True}}
    row = rollout.seen(SERVER, results, {"when": "always"})
    assert (row["done"], row["why"]) == (False, "relaunch_when is always")


def test_a_server_that_does_not_run_still_has_its_launches() -> None:
    stopped = {"servers": [], "records": [{"name": "chat", "launches": [GOOD]}]}
    row = found(current=stopped, verify={})
    assert row["old"] == {"launch_id": "one", "config_hash": "sha256:a"}
    assert row["limits"]["min_tokens_per_s"] == 80.0


def test_what_changes_is_told_and_keys_are_not() -> None:
    trial = {**SAME, "config_changed": True, "secrets_changed": True, "config_hash": "sha256:b"}
    row = found(current=info(False), trial=trial)
    assert row["differences"][0] == {"item": "flag:x", "old": 1, "new": 2}
    assert row["differences"][1]["item"] == "keys or secret environment"
    assert row["config_hash"] == "sha256:b"


@pytest.mark.parametrize(
    ("launch", "soak", "options", "limits", "note"),
    [
        (GOOD, {}, {}, (80.0, 1.5), ""),
        (GOOD, {}, {"min_throughput": "0.5", "max_latency": 2}, (50.0, 2.0), ""),
        (GOOD, {}, {"min_throughput": 0}, (None, 1.5), ""),
        (GOOD, {}, {"min_throughput": 0, "max_latency": 0}, (None, None), "no limit was asked for"),
        (GOOD, {"requests": 0}, {}, (None, None), "its soak has no requests"),
        (GOOD, {"requests": 16}, {}, (None, None), "the soak of launch one was another load"),
        (GOOD, {"tokens": 64}, {}, (None, None), "the soak of launch one was another load"),
        (GOOD, {"concurrency": 8}, {}, (None, None), "the soak of launch one was another load"),
        ({**GOOD, "soak": None}, {}, {}, (None, None), "launch one was proved without a soak"),
        ({**GOOD, "last_good": False}, {}, {}, (None, None), "no launch of it was proved before"),
        ({**GOOD, "problem": "broken"}, {}, {}, (None, None), "no launch of it was proved before"),
        ({**GOOD, "soak": {**SOAK, "latency_p50_s": None}}, {}, {}, (80.0, None), ""),
    ],
)
def test_how_slow_the_new_one_may_be(
    launch: dict[str, t.Any],
    soak: dict[str, t.Any],
    options: dict[str, t.Any],
    limits: tuple[t.Any, t.Any],
    note: str,
) -> None:
    made = rollout.soak_limits([launch], {"soak": soak}, options)
    assert ((made["min_tokens_per_s"], made["max_latency_s"]), made["note"]) == (limits, note)
    assert (made["baseline"] is None) == bool(note)


def test_more_at_a_time_than_there_are_is_as_many_as_there_are() -> None:
    """The soak tells how many there really were."""
    soak = {**SOAK, "requests": 2.0, "concurrency": 2.0, "tokens": 64.0}
    made = rollout.soak_limits([{**GOOD, "soak": soak}], {"soak": {"requests": 2}}, {})
    assert made["min_tokens_per_s"] == 80.0


# --- the stop rule ----------------------------------------------------------------------------------------------------

BATCH = [{"host": "a", "server": "x"}, {"host": "b", "server": "x"}]
PROVED = {"x": {"proved": True}}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"x": {"proved": False, "error": "no such model"}}, "b/x: no such model"),
        ({"x": {"proved": None}}, "b/x: there is no word"),
        ({"x": {"proved": "true"}}, "b/x: there is no word"),
        ({"y": {"proved": True}}, "b/x: there is no word"),
        ({}, "b/x: there is no word"),
        (None, "b/x: there is no word"),
    ],
)
def test_only_what_says_that_it_is_proved_is(told: t.Any, words: str) -> None:
    problems = rollout.judge_batch(BATCH, {"a": PROVED, "b": told})
    assert len(problems) == 1
    assert words in problems[0]


def test_a_host_that_vanished_is_not_proved() -> None:
    assert rollout.judge_batch(BATCH, {"a": PROVED, "b": PROVED}) == []
    assert len(rollout.judge_batch(BATCH, {"a": PROVED})) == 1
    assert len(rollout.judge_batch(BATCH, {})) == 2


# --- routers ----------------------------------------------------------------------------------------------------------


def router(*listed: str, mine: str, sick: t.Sequence[str] = (), models: t.Mapping[str, str] | None = None) -> t.Any:
    rows = [
        {"id": each, "healthy": each not in sick, "model_id": (models or {}).get(each, "chat")} for each in listed
    ]
    own = [row for row in rows if row["id"] == mine]
    return {"routers": [{"url": "http://r:1", "listed": rows, "workers": [{"after": {"entries": own}}]}]}


def asked(*hosts: str, **settings: t.Any) -> dict[str, t.Any]:
    return {host: {"x": router("a", "b", "c", mine=host, **settings)} for host in hosts}


def test_a_batch_must_leave_somebody_in_each_router() -> None:
    batch = [{"host": host, "server": "x"} for host in ("a", "b", "c")]
    assert rollout.too_few_left(batch[:2], asked("a", "b"), 1) == []
    assert "would have 0 healthy workers for model chat" in rollout.too_few_left(batch, asked("a", "b", "c"), 1)[0]
    assert "would have 1 healthy" in rollout.too_few_left(batch[:2], asked("a", "b"), 2)[0]
    assert rollout.too_few_left(batch, asked("a", "b", "c"), 0) == []


def test_a_server_over_several_hosts_is_one_worker() -> None:
    """Its other hosts are in no router, or are given the same URL."""
    batch = [{"host": "a", "server": "x"}, {"host": "z", "server": "x"}]
    answers = {**asked("a"), "z": asked("a")["a"]}
    assert rollout.too_few_left(batch, answers, 2) == []
    assert rollout.too_few_left(batch, asked("a"), 2) == []
    assert "without the 1 of this batch" in rollout.too_few_left(batch, answers, 3)[0]


def test_the_sick_and_those_of_another_model_are_no_others() -> None:
    batch = [{"host": "a", "server": "x"}]
    assert len(rollout.too_few_left(batch, asked("a", sick=["b", "c"]), 1)) == 1
    assert len(rollout.too_few_left(batch, asked("a", models={"b": "other", "c": "other"}), 1)) == 1
    assert rollout.too_few_left(batch, asked("a", models={"b": "other"}), 1) == []
    # One that nobody sends to takes nothing away.
    assert rollout.too_few_left(batch, asked("a", sick=["a", "b", "c"]), 1) == []
    assert rollout.too_few_left(batch, {"a": {}}, 1) == []
