# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One run at a time: the lease is taken before anything is touched, and given back but for a lost one."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import refusal_of, summary_of
from ansible_collections.cleanslate.sglang.tests.integration_ns.scripted import (
    Scripted,
    dirty,
    evicted,
    kept,
    launched,
    unproved,
)

TAKE, GIVE_BACK = "server_lease held", "server_lease released"
PATH = ["gpu_evict", "clean_state", "server_launch", "server_ready"]
TRIED = {"changed": True, "config_hash": "sha256:aa"}
LOST_WORDS = "the lease on 'chat' is no longer ours: run b of bob on ops2 holds it since 2026-01-31T23:59:59+00:00"
LOST: dict[str, t.Any] = {"failed": True, "msg": LOST_WORDS, "lease_lost": True}
HELD_BY_BOB: dict[str, t.Any] = {
    "failed": True,
    "msg": "run b of bob on ops2 works on 'chat' since 2026-01-31T23:59:59+00:00; waited 90 s for it",
    "lease": None,
    "holder": {"run_id": "b", "operator": "bob", "controller": "ops2", "held": True},
    "broken": None,
    "waited_s": 90,
}


@pytest.fixture
def fleet(tmp_path: Path) -> Scripted:
    one = Scripted(tmp_path)
    one.variables = {}
    one.script("server_launch@inside", TRIED, launched("new-1"), kept("old-1"), launched("again-1", "sha256:bb"))
    return one


def last_error(run: PlaybookRun) -> str:
    failed = [task for task in run.tasks if task.status == "failed" and not task.ignored]
    assert run.rc == 2, f"rc {run.rc}\n{run.stdout}\n{run.stderr}"
    return str(failed[-1].result["msg"])


@pytest.mark.promise
@pytest.mark.parametrize("playbook", ["relaunch", "teardown"])
def test_without_the_lease_nothing_is_touched(fleet: Scripted, playbook: str) -> None:
    fleet.server["clients"] = [{"name": "load", "unit": "load.service"}]
    fleet.script("server_lease@inside", HELD_BY_BOB)
    message = refusal_of(fleet.run(playbook, lease_wait_s=3))
    assert "run b of bob on ops2 works on 'chat' since 2026-01-31" in message
    assert "Nothing was touched" in message
    assert fleet.whole() == [TAKE]
    asked = fleet.arguments("server_lease@inside")
    assert float(asked["wait_s"]) == 3
    assert {"run_id", "operator", "controller"} <= set(asked)


def test_all_servers_and_hosts_of_a_run_bear_one_name(fleet: Scripted) -> None:
    fleet.variables = {"sglang_servers": [fleet.server, {**fleet.server, "name": "draft", "port": 31001, "gpus": [1]}]}
    fleet.script("server_launch@inside", TRIED, TRIED, launched("new-1"), launched("new-2"))
    fleet.run("relaunch", all=True).check()
    rows = [row["arguments"] for row in fleet.rows() if row["key"].startswith("server_lease")]
    assert [(row["name"], row["state"]) for row in rows] == [
        ("chat", "held"), ("chat", "released"), ("draft", "held"), ("draft", "released")
    ]  # fmt: skip
    assert len({row["run_id"] for row in rows}) == 1


@pytest.mark.promise
@pytest.mark.parametrize(
    ("key", "answers", "calls"),
    [
        ("gpu_evict@inside", [LOST], PATH[:1]),
        ("server_launch@inside", [TRIED, LOST], PATH[:3]),
        ("server_ready@inside", [{**LOST, "verdict": "starting"}], PATH),
    ],
    ids=["eviction", "start", "proof"],
)
@pytest.mark.parametrize("node", [False, True], ids=["no node", "with its node"])
def test_a_run_that_lost_its_lease_starts_and_ends_nothing_more(
    fleet: Scripted, key: str, answers: list[dict[str, t.Any]], calls: list[str], node: bool
) -> None:
    """No way back, no eviction of what was started, no eviction by the node."""
    if node:
        fleet.variables = {"sglang_proxmox_host": "pve1", "sglang_vmid": 129}
    fleet.script(key, *answers)
    run = fleet.run("relaunch")
    assert "is no longer ours" in last_error(run)
    assert [call for call in fleet.whole() if call != "clean_state@node"] == [TAKE, *calls]


def test_a_lease_that_is_lost_on_the_way_back_ends_it_there(fleet: Scripted) -> None:
    reason = {"code": "lease_lost", "message": LOST_WORDS, "severity": "required"}
    fleet.script("server_ready@inside", unproved())
    fleet.script("gpu_evict@inside", evicted("evicted", "term"), {**evicted("failed", "term"), "reasons": [reason]})
    message = last_error(fleet.run("relaunch"))
    assert "this run no longer has the lease" in message
    assert fleet.whole() == [TAKE, *PATH, "server_launch from last_good (check)", "gpu_evict"]


def test_the_node_does_not_act_for_a_run_that_lost_its_lease(fleet: Scripted) -> None:
    fleet.variables = {"sglang_proxmox_host": "pve1", "sglang_vmid": 129}
    taken = {"changed": False, "echo": True, "holder": None, "broken": None, "waited_s": 0.0}
    fleet.script("gpu_evict@inside", evicted("failed", "term"))
    fleet.script("server_lease@inside", taken, HELD_BY_BOB)
    message = last_error(fleet.run("relaunch"))
    assert "is no longer ours" in message
    assert fleet.whole() == [TAKE, "gpu_evict", TAKE]


def test_a_lease_that_had_to_be_taken_anew_was_lost(fleet: Scripted) -> None:
    fleet.variables = {"sglang_proxmox_host": "pve1", "sglang_vmid": 129}
    taken = {"changed": False, "echo": True, "holder": None, "broken": None, "waited_s": 0.0}
    fleet.script("gpu_evict@inside", evicted("failed", "term"))
    fleet.script("server_lease@inside", taken, {**taken, "changed": True})
    assert "is no longer ours" in last_error(fleet.run("relaunch"))
    assert "gpu_evict@node" not in fleet.whole()


def test_a_container_that_hangs_does_not_hold_up_its_node(fleet: Scripted) -> None:
    """The lease can't be renewed in it then, and nobody else can take it there either."""
    fleet.variables = {"sglang_proxmox_host": "pve1", "sglang_vmid": 129}
    taken = {"changed": False, "echo": True, "holder": None, "broken": None, "waited_s": 0.0}
    fleet.script("gpu_evict@inside", {"failed": True, "msg": "Timed out after 700 second(s)."})
    fleet.script("server_lease@inside", taken, {"failed": True, "msg": "Timed out after 60 second(s)."})
    fleet.run("relaunch").check()
    assert fleet.whole()[:4] == [TAKE, "gpu_evict", TAKE, "gpu_evict@node"]


@pytest.mark.parametrize(
    ("key", "answer"),
    [("gpu_evict@inside", evicted("failed", "kill")), ("clean_state@inside", dirty("container", "held"))],
)
def test_it_is_given_back_where_a_step_fails(fleet: Scripted, key: str, answer: dict[str, t.Any]) -> None:
    fleet.script(key, answer)
    last_error(fleet.run("relaunch"))
    assert fleet.whole()[-1] == GIVE_BACK
    assert fleet.arguments("server_lease@inside", 0)["run_id"] == fleet.arguments("server_lease@inside")["run_id"]


def test_what_is_told_of_a_lease(fleet: Scripted) -> None:
    bob = {"run_id": "b", "operator": "bob", "controller": "ops2", "taken_at": "2026-01-31", "why": "it expired"}
    taken = {"changed": True, "echo": True, "holder": None, "broken": bob, "waited_s": 12.5}
    fleet.script("server_lease@inside", taken, {"failed": True, "msg": "no room"})
    text = " ".join(summary_of(fleet.run("relaunch").check()).split())
    for words in (
        "waited 12.5 s for another run",
        "broken: that of run b of bob on ops2, which works on it since 2026-01-31 (it expired)",
        "not given back (no room); it ends by itself",
    ):
        assert words in text, text


def test_long_waits_for_memory_renew_it(fleet: Scripted) -> None:
    fleet.server["settle_s"] = 120
    fleet.run("relaunch").check()
    assert fleet.whole() == [TAKE, "gpu_evict", TAKE, *PATH[1:], GIVE_BACK]
    assert float(fleet.arguments("server_lease@inside", 1)["ttl_s"]) == 180


def test_check_mode_looks_at_it_and_has_none(fleet: Scripted) -> None:
    bob = {"run_id": "b", "operator": "bob", "controller": "ops2", "taken_at": "2026-01-31", "held": True}
    fleet.script("server_lease@inside", {"changed": True, "lease": None, "holder": bob, "waited_s": 0.0})
    fleet.script("gpu_evict@inside", evicted("planned", "term"))
    text = " ".join(summary_of(fleet.run("relaunch", check=True).check()).split())
    assert "wait for run b of bob on ops2" in text
    assert GIVE_BACK not in fleet.whole()
    assert "run_id" not in fleet.arguments("gpu_evict@inside")


def test_a_server_that_is_left_alone_gives_it_back_too(fleet: Scripted) -> None:
    fleet.script("server_info@inside", {"servers": [{"name": "chat", "matches": True}], "orphans": []})
    same = {**TRIED, "config_changed": False, "secrets_changed": False}
    fleet.script("server_launch@inside", same)
    assert "left alone" in summary_of(fleet.run("relaunch", relaunch_when="changed").check())
    assert fleet.whole() == [TAKE, "server_info", "server_launch (check)", "server_ready", GIVE_BACK]
    asked = fleet.arguments("server_ready@inside")
    assert (asked["soak_requests"], asked["record"]) == (0, False)


def test_a_teardown_takes_it_gives_it_back_and_needs_none_of_an_unreachable_container(fleet: Scripted) -> None:
    fleet.run("teardown").check()
    assert fleet.whole() == [TAKE, "gpu_evict", GIVE_BACK]
    assert fleet.arguments("gpu_evict@inside")["run_id"] == fleet.arguments("server_lease@inside")["run_id"]
    fleet.variables = {"sglang_proxmox_host": "pve1", "sglang_vmid": 129}
    fleet.unreachable()
    text = summary_of(fleet.run("teardown").check())
    assert not [row for row in fleet.rows() if row["key"].startswith("server_lease")]
    assert "Lease     none: it lies in the container" in text


def test_a_teardown_that_lost_it_lets_no_node_act(fleet: Scripted) -> None:
    fleet.variables = {"sglang_proxmox_host": "pve1", "sglang_vmid": 129}
    fleet.script("gpu_evict@inside", LOST)
    assert "is no longer ours" in last_error(fleet.run("teardown"))
    assert fleet.whole() == [TAKE, "gpu_evict"]
