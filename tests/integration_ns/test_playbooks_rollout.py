# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rollout over several hosts: order, stop rule, report, resuming. The modules act on a small world (rolling.py)."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.rolling import KEY, NEW, OLD, Fleet, killed, shown

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # up to three whole runs in one test

THREE = {"gpu01": ["chat"], "gpu02": ["chat"], "gpu03": ["chat"]}
CHANGING = ("gpu_evict", "server_launch", "client_hold")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path, THREE)


def last_error(run: PlaybookRun, rc: int = 2) -> str:
    assert run.rc == rc, f"rc {run.rc}\n{run.stdout}\n{run.stderr}"
    failed = [str(task.result["msg"]) for task in run.tasks if task.status == "failed" and not task.ignored]
    assert failed, run.stdout
    return failed[-1]


def report_of(directory: Path) -> dict[str, t.Any]:
    """The newest report in a directory."""
    newest = max(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    return t.cast("dict[str, t.Any]", json.loads(newest.read_text()))


def states(report: dict[str, t.Any]) -> dict[str, str]:
    return {f"{row['host']}/{row['server']}": row["state"] for row in report["servers"]}


def untouched(fleet: Fleet) -> bool:
    """No module that changes a host ran but in check mode, and no lease was taken."""
    return not [row for row in fleet.rows() if row["key"] in (*CHANGING, "server_lease") and not row["check"]]


# --- the order --------------------------------------------------------------------------------------------------------


def test_the_canary_then_batches_and_a_report(fleet: Fleet, tmp_path: Path) -> None:
    """One batch at a time, hosts of a batch side by side; what was done is kept without secrets."""
    fleet.servers["gpu04"] = ["chat"]
    fleet.host_variables["gpu04"] = {}
    fleet.put("gpu04/chat", NEW)
    run = fleet.roll(rollout_ramp="1,2", rollout_canary="gpu02/chat", rollout_report_dir=str(tmp_path / "kept")).check()
    assert fleet.touched()[0] == "gpu02/chat"
    assert sorted(fleet.touched()[1:]) == ["gpu01/chat", "gpu03/chat"]
    assert set(fleet.configurations().values()) == {"new"}
    rows = [row for row in fleet.rows() if row["key"] == "gpu_evict" and not row["check"]]
    proofs = [row for row in fleet.rows() if row["key"] == "server_ready" and row["arguments"].get("record")]
    assert rows[1]["at"] > proofs[0]["at"], "the second batch began before the canary was proved"
    assert max(row["at"] for row in rows[1:]) < proofs[1]["at"], "the hosts of a batch did not work side by side"
    limits = proofs[0]["arguments"]
    assert (float(limits["soak_min_tokens_per_s"]), float(limits["soak_max_latency_s"])) == (80.0, 1.5)

    text = shown(run, "Show the report")
    assert "Rollout DONE: 1 as wanted, 3 changed" in text, text
    assert "Change: flag:mem-fraction-static: 0.8 -> 0.9 (gpu02/chat, gpu01/chat, gpu03/chat)" in text
    report = report_of(tmp_path / "kept")
    assert (report["verdict"], report["canary"], report["begun"]) == ("done", "gpu02/chat", 2)
    assert states(report) == {
        "gpu04/chat": "as wanted", "gpu02/chat": "changed", "gpu01/chat": "changed", "gpu03/chat": "changed",
    }  # fmt: skip
    row = next(row for row in report["servers"] if row["host"] == "gpu01")
    assert (row["old"]["config_hash"], row["new"]["config_hash"]) == (OLD, NEW)
    assert row["drain"] == {"in_flight_before": 3, "in_flight_after": 0, "cut_off": 0}
    assert row["down_s"] > 0
    assert row["proof"]["tokens_per_s"] == row["baseline"]["tokens_per_s"] == 100.0
    page = next((tmp_path / "kept").glob("*.html")).read_text()
    assert "gpu01/chat" in page
    assert "Rollout DONE" in page
    for path in (tmp_path / "kept").iterdir():
        assert KEY not in path.read_text()
    assert KEY not in run.stdout

    again = fleet.roll(rollout_report_dir=str(tmp_path / "kept")).check()
    assert untouched(fleet)
    assert "Nothing to do: 4 of 4 servers are as wanted" in shown(again, "Show the batches")
    assert set(states(report_of(tmp_path / "kept")).values()) == {"as wanted"}


def test_check_mode_shows_the_batches_and_touches_nothing(tmp_path: Path) -> None:
    """Two servers of one host are two; of the guests of one node one at a time."""
    fleet = Fleet(tmp_path, {"gpu01": ["chat", "embed"], "gpu02": ["chat"], "gpu03": ["chat"], "gpu04": ["chat"]})
    for host in ("gpu02", "gpu03"):
        fleet.host_variables[host] = {"sglang_proxmox_host": "gpu04", "sglang_vmid": int(host[-1]) + 100}
        fleet.host_variables[host]["sglang_host_rungs"] = False
    fleet.put("gpu01/embed", NEW)
    run = fleet.roll(check=True, rollout_ramp=[1, "50%", "100%"], rollout_report_dir=str(tmp_path / "kept")).check()
    assert untouched(fleet)
    lines = [line.split()[:3] for line in shown(run, "Show the batches").splitlines() if line.strip()[:1].isdigit()]
    assert lines[1:] == [
        ["1", "gpu01/chat", "-"],
        ["2", "gpu02/chat", "gpu04"],
        ["2", "gpu04/chat", "-"],
        ["3", "gpu03/chat", "gpu04"],
    ], shown(run, "Show the batches")
    assert "As wanted: gpu01/embed" in shown(run, "Show the batches")
    assert not (tmp_path / "kept").exists()
    assert set(fleet.configurations().values()) == {"old", "new"}


def test_two_servers_of_a_host_are_changed_one_after_another(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, {"gpu01": ["chat", "embed"], "gpu02": ["chat"]})
    fleet.fault("gpu01/embed", proof="failed")
    run = fleet.roll(rollout_ramp="3")
    assert "gpu01/embed (rolled back)" in last_error(run)
    assert fleet.touched().index("gpu01/chat") < fleet.touched().index("gpu01/embed")
    assert fleet.configurations() == {"gpu01/chat": "new", "gpu01/embed": "old", "gpu02/chat": "new"}


# --- before anything is touched ---------------------------------------------------------------------------------------


@pytest.mark.promise
def test_a_plan_that_is_denied_for_the_last_host_touches_none(fleet: Fleet) -> None:
    fleet.fault("gpu03/chat", plan="denied")
    run = fleet.roll()
    assert run.rc == 2
    assert "hicache_too_large" in run.stdout
    assert untouched(fleet)
    assert set(fleet.configurations().values()) == {"old"}


def test_what_is_no_rollout_is_refused_before_any_host_is_asked(fleet: Fleet) -> None:
    error = last_error(fleet.roll(rollout_ramp="0,10%", rollout_per_node="none", rollout_min_throughput="fast"))
    for words in ("rollout_ramp has '0'", "rollout_per_node is 'none'", "rollout_min_throughput is 'fast'"):
        assert words in error, error
    assert fleet.rows() == []


def test_names_of_nobody_and_servers_that_are_not_whole_are_refused(fleet: Fleet) -> None:
    error = last_error(fleet.roll(rollout_except="gpu09/chat"))
    assert "rollout_except names gpu09/chat" in error
    assert "Nothing was touched" in error
    run = fleet.roll(check=True, rollout_except="gpu02/chat", rollout_canary="gpu03/chat").check()
    assert "Left out: gpu02/chat" in shown(run, "Show the batches")
    flags = {"model_path": str(fleet.directory), "nnodes": 2, "node_rank": 0, "dist_init_addr": "192.0.2.9:5000"}
    fleet.entries["gpu02/chat"] = {"flags": flags}
    error = last_error(fleet.roll())
    assert "has node rank 1" in error
    assert "Nothing was touched" in error
    assert untouched(fleet)


# --- the stop rule ----------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[dict[str, t.Any], str, str, str]] = {
    # fault, state in the report, words of the error, what the canary has in the end
    "failed": ({"proof": "failed"}, "rolled back", "it does not serve (failed)", "old"),
    "hung": ({"proof": "hung"}, "rolled back", "it does not serve (hung)", "old"),
    "slower": ({"slow": True}, "rolled back", "50 tokens/s, at least 80", "old"),
    "no way back": ({"proof": "failed", "old_proof": "hung"}, "rollback failed", "the rollback to", "old!"),
    "unreachable": ({"down": "evict"}, "failed", "unreachable", "old!"),
    "unreachable in the start": ({"down": "launch"}, "left as it is", "unreachable", "new!"),
    "lease": ({"lease": "run 7 of bob works on it"}, "not touched", "run 7 of bob works on it", "old"),
}


@pytest.mark.parametrize("kind", list(FAULTS))
def test_a_canary_that_is_not_proved_stops_the_ramp(fleet: Fleet, tmp_path: Path, kind: str) -> None:
    fault, state, words, configuration = FAULTS[kind]
    fleet.fault("gpu01/chat", **fault)
    run = fleet.roll(rollout_ramp="1,2", rollout_report_dir=str(tmp_path / "kept"))
    error = last_error(run)
    assert f"gpu01/chat ({state})" in error, error
    assert words in error, error
    assert "not begun: gpu02/chat, gpu03/chat" in error
    assert set(fleet.touched()) <= {"gpu01/chat"}
    assert fleet.configurations() == {"gpu01/chat": configuration, "gpu02/chat": "old", "gpu03/chat": "old"}
    report = report_of(tmp_path / "kept")
    assert (report["verdict"], report["begun"]) == ("stopped", 1)
    assert states(report) == {"gpu01/chat": state, "gpu02/chat": "not begun", "gpu03/chat": "not begun"}
    assert report["servers"][0]["error"], report
    assert "Rollout STOPPED" in shown(run, "Show the report")


@pytest.mark.promise
def test_a_second_run_goes_on_with_what_is_left(fleet: Fleet, tmp_path: Path) -> None:
    """One of the second batch can't be reached any more: its neighbour is done to the end, the rest is not begun."""
    fleet.servers["gpu04"] = ["chat"]
    fleet.host_variables["gpu04"] = {}
    fleet.put("gpu04/chat", OLD)
    fleet.fault("gpu02/chat", down="evict")
    stopped = fleet.roll(rollout_ramp="1,2", rollout_report_dir=str(tmp_path / "kept"))
    assert "gpu02/chat (failed)" in last_error(stopped)
    assert fleet.configurations() == {
        "gpu01/chat": "new", "gpu02/chat": "old!", "gpu03/chat": "new", "gpu04/chat": "old",
    }  # fmt: skip
    assert states(report_of(tmp_path / "kept"))["gpu02/chat"] == "failed"
    fleet.mended()
    fleet.roll(rollout_ramp="1,2", rollout_report_dir=str(tmp_path / "kept")).check()
    assert fleet.touched() == ["gpu02/chat", "gpu04/chat"]
    assert set(fleet.configurations().values()) == {"new"}
    report = report_of(tmp_path / "kept")
    assert report["verdict"] == "done"
    assert list(states(report).values()) == ["as wanted", "as wanted", "changed", "changed"]


def test_a_launch_that_was_never_proved_is_not_done(fleet: Fleet) -> None:
    """A controller that was killed between start and proof left it so. It serves, and is changed all the same."""
    fleet.put("gpu02/chat", NEW, verdict=None)
    for host in ("gpu01", "gpu03"):
        fleet.put(f"{host}/chat", NEW)
    fleet.roll().check()
    assert fleet.touched() == ["gpu02/chat"]
    fleet.roll(relaunch_when="always", rollout_ramp="100%").check()
    assert sorted(fleet.touched()) == fleet.units()


def test_a_limited_run_fails_as_well_and_tells_of_its_hosts(fleet: Fleet) -> None:
    """--limit leaves localhost out, and nothing depends on it."""
    fleet.fault("gpu02/chat", proof="failed")
    error = last_error(fleet.roll("--limit", "gpu02,gpu03", on_failure="stop"))
    assert "gpu02/chat (stopped)" in error
    assert fleet.touched() == ["gpu02/chat", "gpu02/chat"]


def test_what_fails_for_all_hosts_beside_their_servers_is_reported(fleet: Fleet, tmp_path: Path) -> None:
    """A task for all of them fails between two batches: no host is left in the play, and all of it is still told."""
    needed = tmp_path / "leave_healthy"
    needed.write_text("1")
    for host in THREE:
        fleet.host_variables[host]["router_leave_healthy"] = f"{{{{ lookup('ansible.builtin.file', '{needed}') }}}}"
    fleet.fault("gpu01/chat", loses=str(needed))
    run = fleet.roll(rollout_ramp="1", rollout_report_dir=str(tmp_path / "kept"))
    error = last_error(run)
    assert "the rollout stopped before batch 2 of 3: it broke off on gpu01: " in error, error
    assert "leave_healthy" in error and "gpu02, gpu03: a task for all hosts failed" in error, error
    assert "not begun: gpu02/chat, gpu03/chat; 1 changed" in error, error
    assert "Rollout STOPPED: 1 changed, 2 not begun" in shown(run, "Show the report")
    report = report_of(tmp_path / "kept")
    assert (report["verdict"], report["begun"], len(report["broken"])) == ("stopped", 1, 2)
    assert fleet.touched() == ["gpu01/chat"]
    needed.write_text("1")
    fleet.mended()
    fleet.roll().check()
    assert fleet.touched() == ["gpu02/chat", "gpu03/chat"]


# --- routers ----------------------------------------------------------------------------------------------------------


def test_each_is_out_of_its_routers_while_it_is_changed(fleet: Fleet, tmp_path: Path) -> None:
    fleet.behind_a_router()
    fleet.roll(rollout_report_dir=str(tmp_path / "kept")).check()
    assert fleet.story() == [
        f"{step} {unit}" for unit in fleet.units() for step in ("out", "evict", "start", "back")
    ]  # fmt: skip
    moved = [row for row in fleet.rows() if row["key"] in ("router_worker:present", "router_worker:drained")]
    assert all(row["serving"] for row in moved)
    assert fleet.routed() == fleet.units()
    row = report_of(tmp_path / "kept")["servers"][0]
    assert row["router"]["out"]["drained"]["in_flight_at_start"] == 4
    assert KEY not in json.dumps(report_of(tmp_path / "kept"))


def test_a_batch_never_empties_a_router(fleet: Fleet) -> None:
    """Alone each would find two others left."""
    fleet.behind_a_router()
    error = last_error(fleet.roll(rollout_ramp="3"))
    assert "router http://router:1 would have 0 healthy workers for model chat" in error
    assert fleet.story() == []
    assert fleet.routed() == fleet.units()


def test_what_its_routers_do_not_let_go_of_is_not_evicted(fleet: Fleet) -> None:
    fleet.behind_a_router()
    fleet.fault("gpu01/chat", drained="7 requests are still in flight after 120 s")
    error = last_error(fleet.roll())
    assert "gpu01/chat (not touched)" in error
    assert "7 requests are still in flight" in error
    assert fleet.touched() == []
    assert fleet.routed() == fleet.units()


def test_a_server_that_its_routers_do_not_take_back_stops_the_ramp(fleet: Fleet) -> None:
    fleet.behind_a_router()
    fleet.fault("gpu01/chat", present="router east never called it healthy")
    error = last_error(fleet.roll())
    assert "gpu01/chat (changed): it serves, but" in error
    assert "router east never called it healthy" in error
    assert "not begun: gpu02/chat, gpu03/chat" in error
    assert fleet.state("gpu01/chat")["config"] == NEW
    fleet.mended()
    fleet.roll(rollout_ramp="100%", router_leave_healthy=0).check()
    assert fleet.story()[0] == "back gpu01/chat", "the first thing is to put back what was left out"
    assert fleet.routed() == fleet.units()


def test_a_rolled_back_server_is_back_in_its_routers_and_a_dead_one_is_not(fleet: Fleet) -> None:
    fleet.behind_a_router()
    fleet.fault("gpu01/chat", proof="failed")
    fleet.roll()
    assert fleet.routed() == fleet.units()
    fleet.fault("gpu01/chat", proof="failed", old_proof="failed")
    run = fleet.roll()
    assert "gpu01/chat (rollback failed)" in last_error(run)
    assert fleet.routed() == ["gpu02/chat", "gpu03/chat"]
    assert "gpu01/chat: not in its routers" in shown(run, "Show the report")


def test_a_router_that_can_not_be_asked_ends_the_run_before_anything_is_touched(fleet: Fleet) -> None:
    fleet.behind_a_router()
    fleet.fault("gpu03/chat", listed="router east does not answer")
    run = fleet.roll()
    assert run.rc == 2
    assert "router east does not answer" in run.stdout
    assert fleet.story() == []
    assert untouched(fleet)


# --- servers over several hosts ---------------------------------------------------------------------------------------


@pytest.fixture
def wide(tmp_path: Path) -> Fleet:
    """big is one server over gpu01 and gpu02, where it is the second of two."""
    fleet = Fleet(tmp_path, {"gpu01": ["big"], "gpu02": ["embed", "big"], "gpu03": ["chat"]})
    fleet.spread("big")
    return fleet


BIG = ["gpu01/big", "gpu02/big"]


def test_a_server_over_several_hosts_is_one_of_its_batch(wide: Fleet, tmp_path: Path) -> None:
    """Named by any member; stopped, started and proved together; only its first node is in the routers."""
    wide.behind_a_router()
    shown_plan = shown(wide.roll(check=True, rollout_ramp="1", rollout_canary="gpu02/big").check(), "Show the batches")
    assert "3 servers in 3 batches" in shown_plan
    assert "One server: big over gpu01, gpu02" in shown_plan
    run = wide.roll(rollout_ramp="1,2", rollout_canary="gpu02/big", rollout_report_dir=str(tmp_path / "kept")).check()
    story = wide.story()
    assert story[:3] == ["out gpu01/big", "evict gpu01/big", "evict gpu02/big"]
    assert sorted(story[3:5]) == ["start gpu01/big", "start gpu02/big"]
    assert story[5] == "back gpu01/big"
    assert not [step for step in story if step.split()[0] in ("out", "back") and step.endswith("gpu02/big")]
    assert {step.split()[1] for step in story[6:]} == {"gpu02/embed", "gpu03/chat"}
    assert set(wide.configurations().values()) == {"new"}
    assert "Rollout DONE: 3 changed" in shown(run, "Show the report")
    report = report_of(tmp_path / "kept")
    assert [row["unit"] for row in report["servers"]] == ["big over gpu01, gpu02"] * 2 + [None] * 2
    assert [row["batch"] for row in report["servers"]] == [1, 1, 2, 2]
    assert wide.roll().check() and untouched(wide)


def test_members_come_together_where_their_hosts_have_other_servers_in_the_batch(wide: Fleet) -> None:
    wide.roll(rollout_ramp="100%").check()
    touched = wide.touched()
    assert sorted(touched) == sorted(wide.units())
    # Both nodes before either is started.
    assert max(map(wide.story().index, map("evict {}".format, BIG))) < min(
        map(wide.story().index, map("start {}".format, BIG))
    )
    assert set(wide.configurations().values()) == {"new"}


@pytest.mark.parametrize("failed", BIG)
def test_where_one_node_fails_all_are_rolled_back_and_the_next_run_goes_on(
    wide: Fleet, tmp_path: Path, failed: str
) -> None:
    wide.fault(failed, proof="failed")
    run = wide.roll(rollout_ramp="1", rollout_report_dir=str(tmp_path / "kept"))
    error = last_error(run)
    assert "gpu01/big, gpu02/big (rolled back): " in error, error
    assert "it does not serve (failed)" in error
    assert "not begun: gpu02/embed, gpu03/chat; 0 changed" in error
    assert sorted(wide.started()) == sorted([*BIG, *(f"{node} again" for node in BIG)])
    assert wide.configurations() == dict.fromkeys(wide.units(), "old")
    assert {state for unit, state in states(report_of(tmp_path / "kept")).items() if unit in BIG} == {"rolled back"}
    wide.mended()
    wide.roll().check()
    assert wide.touched()[:2] == BIG
    assert set(wide.configurations().values()) == {"new"}


def test_no_node_is_rolled_back_where_another_one_does_not_serve(wide: Fleet, tmp_path: Path) -> None:
    wide.fault("gpu02/big", proof="failed", old_proof="failed")
    error = last_error(wide.roll(rollout_ramp="1", rollout_report_dir=str(tmp_path / "kept")))
    assert "(rollback failed)" in error and "(rolled back)" not in error, error
    assert "not begun: gpu02/embed, gpu03/chat" in error
    rows = {row["host"]: row for row in report_of(tmp_path / "kept")["servers"] if row["server"] == "big"}
    assert {row["state"] for row in rows.values()} == {"rollback failed"}
    assert not any(row["serving"] for row in rows.values())


@pytest.mark.parametrize("step", ["evict", "launch"])
def test_a_node_that_is_lost_stops_the_ramp(wide: Fleet, tmp_path: Path, step: str) -> None:
    wide.fault("gpu02/big", down=step)
    error = last_error(wide.roll(rollout_ramp="1", rollout_report_dir=str(tmp_path / "kept")))
    assert "gpu02/big" in error and "not begun: gpu02/embed, gpu03/chat" in error, error
    told = states(report_of(tmp_path / "kept"))
    assert {told[node] for node in BIG} <= {"failed", "stopped", "left as it is"}, told
    assert set(wide.touched()) == set(BIG)
    wide.mended()
    wide.roll().check()
    assert set(wide.configurations().values()) == {"new"}


def test_what_is_left_out_by_one_node_is_left_out_as_a_whole(wide: Fleet) -> None:
    wide.roll(rollout_except="gpu02/big", rollout_ramp="100%").check()
    assert sorted(wide.touched()) == ["gpu02/embed", "gpu03/chat"]
    error = last_error(wide.roll(rollout_except="gpu01/big", rollout_canary="gpu02/big"))
    assert "rollout_canary gpu02/big is left out by rollout_except" in error


def test_a_killed_controller_between_two_nodes(wide: Fleet) -> None:
    """One is evicted, nothing is started: the next run begins with all of them."""
    wide.fault("gpu02/big", evict_s=60)
    controller = wide.begin("1")
    try:
        wait_for("the first node is evicted", lambda: not wide.state("gpu01/big")["serving"], 200)
    finally:
        killed(controller)
    assert wide.configurations() == {**dict.fromkeys(wide.units(), "old"), "gpu01/big": "old!"}
    wide.mended()
    wide.roll(rollout_ramp="1").check()
    assert wide.touched()[:2] == BIG
    assert set(wide.configurations().values()) == {"new"}
