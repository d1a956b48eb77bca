# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Workers in and out of routers, with routers and workers that are made up."""

from __future__ import annotations

import json
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.act.routing import Hook, run_hook
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.tests.unit.fake_routers import (
    LATE,
    REFUSED,
    FakeSite,
    FakeWorker,
    answer,
    worker,
)

W1, W2 = "http://w1:30000", "http://w2:30000"


@pytest.fixture
def site() -> FakeSite:
    """Two routers in front of two idle workers."""
    site = FakeSite()
    for name in ("r1", "r2"):
        site.router(name, W1, W2)
    site.workers = {"w1": FakeWorker(), "w2": FakeWorker()}
    return site


def states(result: dict[str, t.Any], when: str = "after") -> list[str]:
    return [row[when]["state"] for router in result["routers"] for row in router["workers"]]


def touched(site: FakeSite) -> bool:
    return any(router.changed for router in site.routers.values()) or bool(site.hooks_run)


# --- out ---


def test_drained_everywhere(site: FakeSite) -> None:
    site.workers["w1"].loads = [3, 3, 2, 0]
    result = site.run("drained")
    assert (result["verdict"], result["changed"], result["problems"]) == ("drained", True, []), result
    assert (states(result, "before"), states(result)) == (["healthy", "healthy"], ["absent", "absent"])
    drained = result["drained"]
    assert (drained["in_flight_at_start"], drained["in_flight_at_end"], drained["cut"]) == (3, 0, 0)
    assert drained["source"] == "loads" and drained["seconds"] >= 1.5
    assert site.routers["r1"].urls() == [W2]
    assert all(router.keys == {f"k-{name}"} for name, router in site.routers.items())
    assert "sk-of-the-server" not in json.dumps(result)


def test_a_second_time_changes_nothing_and_still_waits(site: FakeSite) -> None:
    site.run("drained")
    site.workers["w1"].loads = [1, 1, 0]
    result = site.run("drained")
    assert (result["verdict"], result["changed"]) == ("drained", False)
    assert result["drained"]["in_flight_at_start"] == 1


def test_one_zero_between_two_requests_is_not_idle(site: FakeSite) -> None:
    site.workers["w1"].loads = [1, 1, 0, 1, 0, 0]
    assert site.run("drained")["drained"]["cut"] == 0
    assert len(site.workers["w1"].loads) == 1


def test_what_is_cut_is_counted_and_fails_unless_that_is_accepted(site: FakeSite) -> None:
    site.workers["w1"].loads = [4]
    result = site.run("drained", drain_deadline_s=20)
    assert result["verdict"] == "failed" and result["drained"]["cut"] == 4
    assert "4 requests were in flight after 20 s" in result["problems"][0] and states(result) == ["absent", "absent"]
    site.run("present")
    accepted = site.run("drained", drain_deadline_s=20, allow_cut=True)
    assert (accepted["verdict"], accepted["drained"]["cut"], accepted["problems"]) == ("drained", 4, [])


def test_a_worker_that_dies_with_requests_loses_them(site: FakeSite) -> None:
    site.workers["w1"].loads = [5, 5, 5, "gone"]
    result = site.run("drained")
    assert result["verdict"] == "failed" and result["drained"]["cut"] == 5 and "went while" in result["problems"][0]


def test_a_worker_that_nobody_runs_has_nothing_in_flight(site: FakeSite) -> None:
    site.workers["w1"] = FakeWorker(["gone"], health=REFUSED)
    result = site.run("drained")
    assert (result["verdict"], result["drained"]["cut"]) == ("drained", 0)
    assert "nobody accepts connections" in result["drained"]["note"]


def test_an_answer_that_is_late_once_is_no_end(site: FakeSite) -> None:
    site.workers["w1"].loads = [2, 2, None, 2, None, 0]
    assert site.run("drained")["verdict"] == "drained"


def test_a_worker_that_stops_telling_is_unknown(site: FakeSite) -> None:
    site.workers["w1"].loads = [2, 2, None]
    result = site.run("drained")
    assert (result["verdict"], result["drained"]["cut"]) == ("unknown", None)
    assert "could not be told to the end" in result["problems"][0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (FakeWorker(health=answer(503)), "its /health says HTTP 503"),
        (FakeWorker(health=LATE), "no whole answer"),
        (FakeWorker(version="0.5.12"), "its version is 0.5.12"),
        (FakeWorker(version="main"), "its version is main"),
        (FakeWorker([None]), "no whole answer"),
    ],
)
def test_a_worker_that_can_t_tell_its_requests_is_not_taken_out(site: FakeSite, given: FakeWorker, words: str) -> None:
    site.workers["w1"] = given
    result = site.run("drained")
    assert result["verdict"] == "unknown" and words in result["problems"][0] and not touched(site)
    assert "nothing was changed" in result["problems"][-1]
    if not given.health.ok:
        assert given.asked == ["/health"], "nothing else is asked of a server that is not well"
    # It can be taken out without waiting.
    assert site.run("absent")["verdict"] == "absent"
    site.run("present")
    assert site.run("drained", in_flight="none")["drained"] is None


@pytest.mark.parametrize("said", [REFUSED, LATE, answer(401), answer(500), answer(200, "<html>")])
@pytest.mark.parametrize("state", ["absent", "drained"])
def test_one_router_that_does_not_answer_and_nothing_is_touched(site: FakeSite, state: str, said: t.Any) -> None:
    site.routers["r2"].down[""] = said
    result = site.run(state)
    assert (result["verdict"], result["changed"]) == ("unknown", False) and not touched(site)
    assert "router r2" in result["problems"][0]
    assert result["problems"][-1] == f"nothing was changed; now {W1}: healthy at r1, {W1}: unknown at r2"
    assert [router["reachable"] for router in result["routers"]] == [True, False]


def test_a_router_that_fails_in_the_middle_is_named_with_the_others(site: FakeSite) -> None:
    site.routers["r2"].down["DELETE"] = answer(500, "queue full")
    result = site.run("drained", hooks=[{"name": "edge", "out": ["x"], "back": ["x"], "deadline_s": 5}])
    assert (result["verdict"], result["changed"]) == ("failed", True)
    assert "router r2" in result["problems"][0] and "queue full" in result["problems"][0]
    assert result["problems"][-1] == f"now {W1}: absent at r1, {W1}: healthy at r2"
    assert result["drained"] is None and not site.hooks_run, "it was not waited for what still gets requests"


def test_a_promise_that_is_not_kept_is_a_failure(site: FakeSite) -> None:
    site.routers["r1"].removes = False
    result = site.run("absent", removed_deadline_s=5)
    assert result["verdict"] == "failed" and "router r1 still lists it after 5 s" in result["problems"][0]
    site.routers["r1"].job = {"job_type": "RemoveWorker", "status": "failed", "message": "no such worker"}
    result = site.run("absent")
    assert "router r1 could not remove it: no such worker" in result["problems"][0]
    site.routers["r1"].job = {"job_type": "RemoveWorker", "status": "paused", "message": None}
    assert "status 'paused', which is none of" in site.run("absent")["problems"][0]


def test_who_comes_back_by_itself_is_found_by_the_last_look(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = {"name": "edge", "out": ["x"], "back": ["x"], "deadline_s": 5}

    def again(*_words: t.Any) -> dict[str, t.Any]:
        site.routers["r1"].put(f"{W1}/")
        return {"name": "edge", "action": "out", "result": "done", "detail": "", "seconds": 0.1}

    monkeypatch.setattr(site, "run_hook", again)
    result = site.run("drained", hooks=[hook])
    assert result["verdict"] == "failed" and f"router r1 lists {W1} again (healthy)" in result["problems"][0]


def test_an_addition_that_is_pending_is_warned_of(site: FakeSite) -> None:
    site.routers["r1"].job = {"job_type": "AddWorker", "status": "processing", "message": None}
    result = site.run("absent")
    assert result["verdict"] == "absent" and "r1 is still adding" in result["warnings"][0]


def test_all_spellings_go_and_one_that_is_not_named_is_a_failure(site: FakeSite) -> None:
    site.routers["r1"].put(f"{W1}/").put("https://W1:30000")
    site.routers["r2"].put("http://10.0.0.1:30000")
    site.addresses = {"w1": ["10.0.0.1"], "w2": ["10.0.0.2"]}
    result = site.run("drained")
    assert result["verdict"] == "failed" and not touched(site)
    assert "router r2 lists http://10.0.0.1:30000, which leads to the same address" in result["problems"][0]
    result = site.run("drained", workers=[worker(aliases=["10.0.0.1:30000"])])
    assert result["verdict"] == "drained" and site.routers["r1"].urls() == site.routers["r2"].urls() == [W2]


def test_what_nobody_lists_and_names_that_can_t_be_looked_up_are_told(site: FakeSite) -> None:
    site.workers["w9"] = FakeWorker()
    result = site.run("drained", workers=[worker("http://w9:30000")])
    assert (result["verdict"], result["changed"]) == ("drained", False)
    assert result["warnings"] == [f"no router lists http://w9:30000; if it should be there, compare: {W1}, {W2}"]
    site.addresses = {"w2": []}
    result = site.run("drained")
    assert result["verdict"] == "drained" and ["w2" in warning for warning in result["warnings"]] == [True]
    assert "could not be looked up" in result["warnings"][0]


def test_the_last_healthy_one_stays_unless_that_is_meant(site: FakeSite) -> None:
    site.routers["r2"].rows[1]["is_healthy"] = False
    result = site.run("drained")
    assert result["verdict"] == "failed" and "router r2 would have 0 healthy" in result["problems"][0]
    assert not touched(site)
    assert site.run("drained", leave_healthy=0)["verdict"] == "drained"


def test_several_workers_go_together(site: FakeSite) -> None:
    site.workers["w2"].loads = [2, 2, 2, 0]
    both = [worker(W1), worker(W2)]
    assert "would have 0 healthy" in site.run("drained", workers=both)["problems"][0]
    result = site.run("drained", workers=both, leave_healthy=0)
    assert result["verdict"] == "drained" and states(result) == ["absent"] * 4
    assert result["drained"]["in_flight_at_start"] == 2


# --- in ---


def test_present_adds_where_it_is_missing_and_waits_for_health(site: FakeSite) -> None:
    first = site.routers["r1"]
    first.rows.pop(0)
    first.heals_at = site.clock.time + 40
    result = site.run("present", workers=[worker("W1:30000", api_key="wk", settings={"priority": 7, "cost": None})])
    assert (result["verdict"], result["changed"]) == ("present", True)
    assert [row["workers"][0]["action"] for row in result["routers"]] == ["added", "none"]
    assert first.bodies == [{"url": W1, "priority": 7}], "no key unless it is meant"
    assert 39 < result["routers"][0]["workers"][0]["seconds"] < 45
    again = site.run("present")
    assert (again["changed"], site.routers["r2"].changed) == (False, False)


def test_a_key_is_given_only_where_that_is_meant(site: FakeSite) -> None:
    site.routers["r1"].rows.pop(0)
    site.run("present", workers=[worker(api_key="wk", give_key=True)])
    assert site.routers["r1"].bodies == [{"url": W1, "api_key": "wk"}]


def test_what_is_listed_as_unhealthy_is_waited_for_not_added(site: FakeSite) -> None:
    for router in site.routers.values():
        router.rows[0]["is_healthy"] = False
        router.heals_at = site.clock.time + 120
    result = site.run("present")
    assert (result["verdict"], result["changed"]) == ("present", False)
    assert [row["workers"][0]["action"] for row in result["routers"]] == ["waited", "waited"]
    assert not touched(site) and result["seconds"] < 130, "both within one deadline"


def test_a_router_that_is_silent_for_a_while_is_asked_again(site: FakeSite) -> None:
    first = site.routers["r1"]
    first.rows.pop(0)
    first.heals_at = site.clock.time + 30
    first.silent = (site.clock.time + 5, site.clock.time + 20)
    assert site.run("present")["verdict"] == "present"


def test_an_old_failure_of_what_is_listed_is_not_believed(site: FakeSite) -> None:
    first = site.routers["r1"]
    first.rows.pop(0)
    first.heals_at = site.clock.time + 20
    first.job = {"job_type": "AddWorker", "status": "failed", "message": "no answer from it"}
    assert site.run("present")["verdict"] == "present"


def test_never_healthy_is_a_failure_that_says_what_the_router_says(site: FakeSite) -> None:
    first = site.routers["r1"]
    first.rows.pop(0)
    first.adds = False
    first.job = {"job_type": "AddWorker", "status": "processing", "message": None}
    result = site.run("present", healthy_deadline_s=60)
    assert result["verdict"] == "failed" and states(result) == ["absent", "healthy"]
    assert "router r1 does not call it healthy after 60 s" in result["problems"][0]
    assert "AddWorker processing" in result["problems"][0]
    first.job = {"job_type": "AddWorker", "status": "failed", "message": "no answer from it"}
    assert "router r1 could not add it: no answer from it" in site.run("present")["problems"][0]


def test_present_goes_as_far_as_it_can(site: FakeSite) -> None:
    site.routers["r1"].down[""] = REFUSED
    site.routers["r2"].rows.pop(0)
    hook = {"name": "edge", "out": ["x"], "back": ["x"], "deadline_s": 5}
    result = site.run("present", hooks=[hook])
    assert (result["verdict"], result["changed"]) == ("unknown", True)
    assert states(result) == ["unknown", "healthy"] and site.hooks_run == [("edge", "back")]
    assert result["problems"][-1] == f"now {W1}: unknown at r1, {W1}: healthy at r2"


def test_what_no_router_calls_healthy_is_not_given_to_others(site: FakeSite) -> None:
    for router in site.routers.values():
        router.rows[0]["is_healthy"] = False
    hook = {"name": "edge", "out": ["x"], "back": ["x"], "deadline_s": 5}
    assert site.run("present", hooks=[hook], healthy_deadline_s=5)["verdict"] == "failed" and not site.hooks_run


def test_present_does_not_add_it_under_a_second_name(site: FakeSite) -> None:
    for router in site.routers.values():
        router.rows[0]["url"] = "http://10.0.0.1:30000"
    site.addresses = {"w1": ["10.0.0.1"]}
    result = site.run("present")
    assert result["verdict"] == "failed" and not touched(site)


# --- hooks, looks, plans ---


def test_hooks_alone(site: FakeSite) -> None:
    hooks = [{"name": name, "out": ["x"], "back": ["x"], "deadline_s": 5} for name in ("a", "b")]
    result = site.run("drained", routers=[], hooks=hooks)
    assert result["verdict"] == "drained" and result["drained"]["cut"] == 0
    assert site.hooks_run == [("a", "out"), ("b", "out")]
    site.hook_results["a"] = "timeout"
    result = site.run("drained", routers=[], hooks=hooks)
    assert result["verdict"] == "unknown" and result["problems"][0] == "hook a (out): it timeout"
    assert result["drained"] is None


def test_a_hook_without_a_command_is_found_before_anything_is_touched(site: FakeSite) -> None:
    hook = {"name": "edge", "out": None, "back": ["x"], "deadline_s": 5}
    assert site.run("absent", hooks=[hook])["problems"][0] == "hook edge has no command for 'out'" and not touched(site)


def test_listed_only_looks(site: FakeSite) -> None:
    result = site.run("listed", workers=[])
    assert (result["verdict"], result["changed"], result["plan"]) == ("listed", False, [])
    assert [row["url"] for row in result["routers"][0]["listed"]] == [W1, W2] and not touched(site)
    site.routers["r1"].down[""] = REFUSED
    assert site.run("listed")["verdict"] == "unknown"


def test_other_load_balancers_are_asked_where_they_can_tell(site: FakeSite) -> None:
    command = {"out": ["x"], "back": ["x"], "deadline_s": 5}
    hooks = [{"name": "edge", "list": ["x"], **command}, {"name": "mute", **command}]
    site.hook_lists["edge"] = ["http://w2:30000", "HTTP://W1:30000/"]
    result = site.run("listed", hooks=hooks)
    assert (result["verdict"], result["changed"], site.hooks_run) == ("listed", False, [("edge", "list")])
    assert (result["hooks"][0]["listed"], result["hooks"][0]["missing"]) == (site.hook_lists["edge"], [])
    site.hook_lists["edge"] = [W2, "no url at all:"]
    assert site.run("listed", routers=[], hooks=hooks)["hooks"][0]["missing"] == [W1]
    site.hook_results["edge"] = "failed"
    result = site.run("listed", routers=[], hooks=hooks)
    assert (result["verdict"], result["hooks"][0]["missing"]) == ("unknown", None)
    assert result["problems"] == ["hook edge (list): it failed"]


@pytest.mark.parametrize(
    ("said", "listed"),
    [
        ('{"workers": [{"url": "http://w1:1"}, {"url": "http://w2:1", "weight": 3}]}', ["http://w1:1", "http://w2:1"]),
        ('{"workers": []}', []),
        ('{"workers": [{"url": 7}]}', None),
        ('{"workers": ["http://w1:1"]}', None),
        ('{"workers": {"url": "http://w1:1"}}', None),
        ("[]", None),
        ("", None),
        ("all fine", None),
    ],
)
def test_what_a_list_command_answers(said: str, listed: list[str] | None) -> None:
    hook = Hook("edge", (), (), 10, ("printf", "%s", said))
    row = run_hook(hook, "list", [W1])
    assert row["listed"] == listed
    assert row["result"] == ("failed" if listed is None else "done")
    assert listed is not None or "its answer is not" in row["detail"]


def test_a_list_command_that_fails_has_told_nothing() -> None:
    row = run_hook(Hook("edge", (), (), 10, ("sh", "-c", "exit 3")), "list", [W1])
    assert (row["result"], row["listed"]) == ("failed", None)
    assert "status 3" in row["detail"]


def test_check_mode_says_what_would_be(site: FakeSite) -> None:
    site.routers["r2"].rows.pop(0)
    out = site.run("drained", check=True)
    assert (out["verdict"], out["changed"]) == ("planned", True) and not touched(site)
    assert out["plan"] == [f"remove {W1} at router r1", "wait until nothing is in flight, at most 120 s"]
    assert f"r1 {W1}: absent\n" in out["diff"]["after"] and f"r1 {W1}: healthy\n" in out["diff"]["before"]
    back = site.run("present", check=True)
    assert (back["changed"], back["plan"]) == (True, [f"add {W1} at router r2"]) and not touched(site)
    site.routers["r1"].rows.pop(1)
    refused = site.run("drained", check=True)
    assert (refused["verdict"], refused["changed"]) == ("failed", False)
    assert refused["diff"]["before"] == refused["diff"]["after"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": []}, "workers is empty"),
        ({"routers": []}, "neither routers nor hooks"),
        ({"routers": [{"url": "ftp://r1"}]}, r"routers\[0\]: .*ftp"),
        ({"routers": [{"url": "r1"}, {"url": "http://R1/"}]}, "given twice"),
        ({"workers": [worker(), worker(f"{W1}/")]}, "given twice"),
        ({"workers": [worker(aliases=["x:y"])]}, r"workers\[0\]: aliases"),
        ({"leave_healthy": -1}, "leave_healthy is -1"),
        ({"drain_deadline_s": float("nan")}, "drain_deadline_s is nan"),
        ({"request_deadline_s": 0.0}, "request_deadline_s is 0"),
        ({"hooks": [{"name": "e", "out": ["x"], "back": ["x"], "deadline_s": 0.0}]}, "deadline_s is 0"),
    ],
)
def test_what_makes_no_sense_is_named(site: FakeSite, changes: dict[str, t.Any], words: str) -> None:
    with pytest.raises(CleanSlateError, match=words):
        site.run("drained", **changes)
    assert not touched(site)


def test_a_hook_gets_json_and_its_end_is_told() -> None:
    def run(*argv: str, deadline_s: float = 20) -> dict[str, t.Any]:
        return run_hook(Hook("edge", argv, (), deadline_s), "out", [W1])

    done = run("sh", "-c", "cat >&2")
    assert done["result"] == "done"
    assert json.loads(done["detail"]) == {"action": "out", "hook": "edge", "workers": [{"url": W1}]}
    failed = run("sh", "-c", "echo no pool --api-key sesame-1 >&2; exit 3")
    assert failed["result"] == "failed" and "status 3: no pool" in failed["detail"] and "sesame" not in failed["detail"]
    assert run("/no/such/command")["result"] == "failed"
    late = run("sleep", "600", deadline_s=0.3)
    assert late["result"] == "timeout" and "0.3 s" in late["detail"]
