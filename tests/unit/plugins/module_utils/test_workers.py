# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.workers import (
    Expected,
    Worker,
    expected_workers,
    judge_workers,
    lost_ranks,
    workers_of,
)
from ansible_collections.cleanslate.sglang.tests.unit.builders import LEADER, process


def worker(role: str = "scheduler", pid: int = 10, state: str = "S", **ranks: int) -> Worker:
    title = f"sglang::{role}" + "".join(f"_{name}{number}" for name, number in ranks.items())
    return Worker(pid, title, role, state, ranks)


LEADS, DETOKENIZES = worker("leader", 1), worker("detokenizer", 2)
CONTROLS = worker("data_parallel_controller", 3)


@pytest.mark.parametrize(
    ("flags", "count", "labels"),
    [
        ({}, 1, [""]),
        ({"tp_size": 2}, 2, ["TP0", "TP1"]),
        ({"tp": "2", "pp-size": 2}, 4, ["PP0 TP0", "PP0 TP1", "PP1 TP0", "PP1 TP1"]),
        ({"dp_size": 2}, 2, ["DP0", "DP1"]),
        ({"dp_size": 2, "tp_size": 2}, 4, ["DP0 TP0", "DP0 TP1", "DP1 TP0", "DP1 TP1"]),
        (
            {"dp_size": 2, "tp_size": 4, "enable_dp_attention": True},
            4,
            ["DP0 TP0", "DP0 TP1", "DP1 TP2", "DP1 TP3"],
        ),
        ({"attn_dp_size": 2, "tp_size": 2}, 2, ["DP0 TP0", "DP1 TP1"]),
        ({"tp_size": 4, "nnodes": 2, "node_rank": 0}, 2, ["TP0", "TP1"]),
        ({"tp_size": 4, "nnodes": 2, "node_rank": 1}, 2, ["TP2", "TP3"]),
        ({"tp_size": 2, "pp_size": 2, "nnodes": 2, "node_rank": 1}, 2, ["PP1 TP0", "PP1 TP1"]),
        ({"tp_size": 4, "pp_size": 2, "nnodes": 4, "node_rank": 3}, 2, ["PP1 TP2", "PP1 TP3"]),
    ],
)
def test_expected_ranks_are_dealt_out_as_sglang_does(
    flags: dict[str, t.Any], count: int, labels: list[str]
) -> None:
    expected = expected_workers(flags)
    assert expected.schedulers == count
    assert expected.ranks is not None
    assert [" ".join(f"{name}{number}" for name, number in ranks) for ranks in expected.ranks] == labels


def test_what_else_is_expected() -> None:
    assert (expected_workers({}).first_node, expected_workers({}).controller) == (True, False)
    assert expected_workers({"nnodes": 2, "tp_size": 2, "node_rank": 1}).first_node is False
    assert expected_workers({"dp_size": 2}).controller is True


@pytest.mark.parametrize("flags", [{"tp_size": "many"}, {"tp_size": 3, "nnodes": 2}, {"encoder_only": True}])
def test_flags_that_do_not_tell(flags: dict[str, t.Any]) -> None:
    assert expected_workers(flags).schedulers is None


def test_a_number_that_somebody_knows_better_wins_and_names_nobody() -> None:
    expected = expected_workers({"tp_size": 2}, schedulers=3)
    assert (expected.schedulers, expected.ranks) == (3, None)
    assert expected_workers({"tp_size": 2}, schedulers=2).ranks is not None


def test_all_there() -> None:
    judged = judge_workers([LEADS, worker(TP=0), worker(TP=1), DETOKENIZES], expected_workers({"tp_size": 2}))
    assert (judged.problem, judged.missing, judged.schedulers, judged.expected) == (None, (), 2, 2)
    assert lost_ranks(judged, 1) == frozenset()


def test_dimensions_beyond_the_three_do_not_matter() -> None:
    judged = judge_workers(
        [LEADS, worker(TP=0, EP=0), worker(MOE_DP=0, TP=1, EP=1), DETOKENIZES], expected_workers({"tp_size": 2})
    )
    assert judged.problem is None


def test_a_data_parallel_rank_that_was_reaped_is_missing() -> None:
    judged = judge_workers([LEADS, CONTROLS, worker(DP=0), DETOKENIZES], expected_workers({"dp_size": 2}))
    assert judged.problem == "1 of 2 schedulers run: DP1 is missing"
    assert judged.hung is False
    assert lost_ranks(judged, 2) == {1}


def test_a_zombie_is_dead_and_its_rank_is_lost() -> None:
    zombie = Worker(11, "[sglang::schedul]", "scheduler", "Z", {}, True)
    judged = judge_workers([LEADS, CONTROLS, worker(DP=0), zombie, DETOKENIZES], expected_workers({"dp_size": 2}))
    assert str(judged.problem).startswith("pid 11 ([sglang::schedul]) is dead (a zombie); 1 of 2 schedulers run")
    assert (judged.dead, judged.hung) == ((zombie,), False)
    assert lost_ranks(judged, 2) == {1}


def test_a_stopped_scheduler_is_hung_and_one_under_a_debugger_is_not() -> None:
    stopped = worker(pid=12, state="T", DP=1)
    tree = [LEADS, CONTROLS, worker(DP=0), DETOKENIZES]
    judged = judge_workers([*tree, stopped], expected_workers({"dp_size": 2}))
    assert judged.problem == "pid 12 (sglang::scheduler_DP1) is stopped by a signal (state T)"
    assert (judged.hung, judged.stopped) == (True, (stopped,))
    assert lost_ranks(judged, 2) == {1}
    assert judge_workers([*tree, worker(state="t", DP=1)], expected_workers({"dp_size": 2})).problem is None


def test_a_helper_that_is_a_zombie_is_nobody_s_business() -> None:
    helper = Worker(20, "[nvcc]", "other", "Z", {}, True)
    assert judge_workers([LEADS, worker(), DETOKENIZES, helper], expected_workers({})).problem is None


@pytest.mark.parametrize(
    ("flags", "tree", "words"),
    [
        ({}, [LEADS, worker()], "the detokenizer is gone"),
        ({"dp_size": 2}, [LEADS, worker(DP=0), worker(DP=1), DETOKENIZES], "the data parallel controller is gone"),
        ({}, [LEADS, DETOKENIZES], "0 of 1 schedulers run"),
        ({}, [], "0 of 1 schedulers run"),
        ({"tp_size": 2}, [LEADS, worker(TP=0), worker(TP=3), DETOKENIZES], "no scheduler runs for TP1"),
    ],
)
def test_what_is_not_there_is_named(flags: dict[str, t.Any], tree: list[Worker], words: str) -> None:
    judged = judge_workers(tree, expected_workers(flags))
    assert words in str(judged.problem)
    assert lost_ranks(judged, 1) == {0}


def test_a_detokenizer_that_is_stopped_costs_every_rank() -> None:
    stopped = worker("detokenizer", state="T")
    judged = judge_workers([LEADS, CONTROLS, worker(DP=0), worker(DP=1), stopped], expected_workers({"dp_size": 2}))
    assert judged.hung is True
    assert lost_ranks(judged, 2) == {0, 1}


def test_a_router_stands_for_the_detokenizer() -> None:
    tree = [LEADS, worker(), worker("detokenizer_router")]
    assert judge_workers(tree, expected_workers({})).problem is None


def test_a_later_node_has_neither_detokenizer_nor_http() -> None:
    expected = expected_workers({"tp_size": 4, "nnodes": 2, "node_rank": 1})
    assert judge_workers([LEADS, worker(TP=2), worker(TP=3)], expected).problem is None
    assert judge_workers([LEADS, worker(TP=2)], expected).problem == "1 of 2 schedulers run: TP3 is missing"


def test_a_number_that_is_not_known_is_a_note_and_none_at_all_a_problem() -> None:
    judged = judge_workers([LEADS, worker(), DETOKENIZES], Expected(None))
    assert judged.problem is None
    assert "not known" in str(judged.note)
    assert judge_workers([LEADS, DETOKENIZES], Expected(None)).problem == "0 of 1 schedulers run"


def test_more_than_expected_is_a_note() -> None:
    judged = judge_workers([LEADS, worker(), worker(pid=11), DETOKENIZES], expected_workers({}))
    assert (judged.problem, judged.note) == (None, "2 schedulers run, 1 are expected by the flags")


def test_what_can_t_be_read_is_unknown_and_no_problem() -> None:
    judged = judge_workers(None, expected_workers({}))
    assert judged.problem is None
    assert judged.unknown is not None


def test_many_are_named_in_short() -> None:
    judged = judge_workers([LEADS, DETOKENIZES], expected_workers({"tp_size": 16}))
    assert "TP7 and 8 more are missing" in str(judged.problem)


def test_workers_by_titles_and_tree() -> None:
    processes = {
        1: process(1, LEADER),
        2: process(2, "sglang::scheduler_TP0", ppid=1),
        3: process(3, "", ppid=1, comm="sglang::schedul", state="Z"),
        4: process(4, ("python", "-c", "spawn_main", "--multiprocessing-fork"), ppid=1),
        5: process(5, "sglang::scheduler_TP0", ppid=99),
        6: process(6, "", ppid=1, comm="sglang::detoken", state="Z"),
    }
    found = {one.pid: one for one in workers_of(processes[1], processes)}
    assert {pid: one.role for pid, one in found.items()} == {
        1: "leader",
        2: "scheduler",
        3: "scheduler",
        4: "starting",
        6: "detokenizer",
    }
    assert [pid for pid, one in found.items() if one.zombie] == [3, 6]
    assert found[2].ranks == {"TP": 0}
    judged = judge_workers(tuple(found.values()), expected_workers({"tp_size": 2}))
    assert (judged.starting, [one.pid for one in judged.dead]) == (1, [3, 6])


@pytest.mark.parametrize("role", ["scheduler", "detokenizer", "data_parallel_controller"])
@pytest.mark.parametrize("state", ["S", "Z"])
def test_what_a_worker_forks_is_no_worker(role: str, state: str) -> None:
    """It bears its parent's title until it executes something, and its comm as a zombie that nobody reaps."""
    title = f"sglang::{role}"
    fork = process(3, "" if state == "Z" else title, ppid=2, comm=title[:15], state=state)
    processes = {
        1: process(1, LEADER),
        2: process(2, title, ppid=1, comm=title[:15]),
        3: fork,
    }
    found = {one.pid: one.role for one in workers_of(processes[1], processes)}
    assert found == {1: "leader", 2: role, 3: "other"}


def test_flags_that_ask_for_a_billion_ranks_name_nobody() -> None:
    for flags in ({"tp-size": 10**9}, {"dp-size": 10**9}, {"pp-size": 10**9, "tp-size": 10**9}):
        expected = expected_workers(flags)
        assert expected.ranks is None
        assert judge_workers([], expected).problem is not None
