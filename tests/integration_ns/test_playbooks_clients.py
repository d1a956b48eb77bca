# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What keeps sending is held before the eviction, and goes on only into a server that serves."""

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
HOLD, RELEASE = "client_hold held", "client_hold released"
PATH = ["gpu_evict", "clean_state", "server_launch", "server_ready"]
TRIED = {"changed": True, "config_hash": "sha256:aa"}
READY = {"ready": True, "verdict": "ready", "pid": 9, "port": 31000, "tokens": []}
LOAD = {"name": "load", "kind": "unit", "action": "stop", "unit": "load.service"}
HELD = {"changed": True, "verdict": "held", "clients": [{**LOAD, "result": "held"}], "held": [LOAD], "problems": []}
RELEASED = {"changed": True, "verdict": "released", "clients": [{**LOAD, "result": "released"}], "held": []}


@pytest.fixture
def fleet(tmp_path: Path) -> Scripted:
    one = Scripted(tmp_path)
    one.variables = {}
    one.server["clients"] = [{"name": "load", "unit": "load.service"}]
    one.script("client_hold@inside", HELD, RELEASED)
    one.script("server_launch@inside", TRIED, launched("new-1"), kept("old-1"), launched("again-1", "sha256:bb"))
    return one


def last_error(run: PlaybookRun) -> str:
    failed = [task for task in run.tasks if task.status == "failed" and not task.ignored]
    assert run.rc == 2, f"rc {run.rc}\n{run.stdout}\n{run.stderr}"
    return str(failed[-1].result["msg"])


def test_they_are_held_first_and_go_on_last(fleet: Scripted) -> None:
    text = summary_of(fleet.run("relaunch").check())
    assert fleet.whole() == [TAKE, HOLD, *PATH, RELEASE, GIVE_BACK]
    assert "Client    load: released" in text
    assert fleet.arguments("gpu_evict@inside")["drained_clients"] is True
    assert fleet.arguments("client_hold@inside", 0)["clients"][0]["unit"] == "load.service"
    assert fleet.arguments("client_hold@inside")["held"][0]["name"] == "load"
    # Until the eviction renews it.
    assert float(fleet.arguments("server_lease@inside", 0)["ttl_s"]) == 100


def test_drain_without_clients_is_asked_for_by_the_entry(fleet: Scripted) -> None:
    fleet.server["clients"] = []
    fleet.server["drain"] = {"deadline_s": 7}
    fleet.run("relaunch").check()
    told = fleet.arguments("gpu_evict@inside")
    assert told["drain"] == {"in_flight": "auto"}
    assert told["deadlines"]["drain"] == 7
    assert told["drained_clients"] is False
    assert HOLD not in fleet.whole()


def test_they_go_on_where_the_old_launch_serves_again(fleet: Scripted) -> None:
    fleet.script("server_ready@inside", unproved(), READY)
    last_error(fleet.run("relaunch"))
    assert fleet.whole()[-2:] == [RELEASE, GIVE_BACK]
    assert fleet.arguments("gpu_evict@inside")["drained_clients"] is False


@pytest.mark.parametrize("on_failure", ["stop", "leave"])
def test_they_stay_held_where_nothing_serves(fleet: Scripted, on_failure: str) -> None:
    fleet.script("server_ready@inside", unproved())
    run = fleet.run("relaunch", on_failure=on_failure)
    last_error(run)
    assert RELEASE not in fleet.whole()
    assert fleet.whole()[-1] == GIVE_BACK
    assert "Client    load on ct129: still stopped" in summary_of(run)


def test_they_stay_held_where_going_back_evicted_nobody_and_did_not_start(fleet: Scripted) -> None:
    fleet.script("server_ready@inside", unproved())
    fleet.script("gpu_evict@inside", evicted("evicted", "term"), evicted("failed"))
    last_error(fleet.run("relaunch"))
    assert RELEASE not in fleet.whole()


@pytest.mark.parametrize(
    ("key", "answer", "go_on"),
    [
        ("gpu_evict@inside", {"failed": True, "msg": "no such option"}, True),
        ("gpu_evict@inside", evicted("failed", "kill"), False),
        ("gpu_evict@inside", {"kill": True}, False),
        ("clean_state@inside", dirty("container", "held"), False),
    ],
    ids=["nothing touched", "somebody was asked", "not known", "evicted"],
)
def test_they_go_on_where_nothing_was_touched(
    fleet: Scripted, key: str, answer: dict[str, t.Any], go_on: bool
) -> None:
    fleet.script(key, answer)
    last_error(fleet.run("relaunch"))
    assert (RELEASE in fleet.whole()) is go_on
    assert fleet.whole()[-1] == GIVE_BACK


def test_where_one_can_not_be_held_nothing_is_evicted(fleet: Scripted) -> None:
    problem = "load: pid 7 of /run/load.pid runs another program"
    fleet.script("client_hold@inside", {"failed": True, "msg": problem, "verdict": "failed", "problems": [problem]})
    message = last_error(fleet.run("relaunch"))
    assert problem in message
    assert fleet.whole() == [TAKE, HOLD, GIVE_BACK]
    fleet.run("relaunch", hold_clients=False).check()
    assert fleet.whole() == [TAKE, *PATH, GIVE_BACK]


def test_one_that_does_not_go_on_is_told_and_fails_nothing(fleet: Scripted) -> None:
    problem = "load.service: systemd did not start it"
    fleet.script("client_hold@inside", HELD, {"msg": problem, "verdict": "failed", "problems": [problem]})
    text = summary_of(fleet.run("relaunch").check())
    assert "SERVING" in text
    assert f"warning: {problem}" in text


def test_a_teardown_holds_them_and_lets_none_go_on(fleet: Scripted) -> None:
    text = summary_of(fleet.run("teardown").check())
    assert fleet.whole() == [TAKE, HOLD, "gpu_evict", GIVE_BACK]
    assert fleet.arguments("gpu_evict@inside")["drained_clients"] is True
    assert "Client    load on ct129: still stopped" in text


def test_clients_of_other_hosts_are_held_there(fleet: Scripted) -> None:
    """Also for a container that can't be reached, whose own clients are out of reach."""
    fleet.variables = {"sglang_proxmox_host": "pve1", "sglang_vmid": 129}
    fleet.unreachable()
    fleet.server["clients"] = [
        {"name": "load", "unit": "load.service", "host": "pve1"},
        {"name": "own", "unit": "own.service"},
    ]
    run = fleet.run("teardown").check()
    (row,) = [row for row in fleet.rows() if row["key"].startswith("client_hold")]
    assert [each["name"] for each in row["arguments"]["clients"]] == ["load"]
    assert "load on pve1: still stopped" in summary_of(run)


@pytest.mark.parametrize(
    ("client", "words"),
    [
        ({"name": "a"}, "server 'chat': client 'a': how is it known? Give its unit, or a pid_file and a program"),
        ({"name": "a", "pid_file": "/run/a"}, "program is missing: a pid alone may be another process by now"),
        ({"name": "a", "unit": "a.service", "program": "a"}, "it has a unit and program; say one of both"),
        ({"name": "a", "unit": "a.service", "hots": "pve1"}, "unknown key 'hots'; did you mean 'host'?"),
        ({"name": "a", "unit": "a.service", "host": "pve7"}, "its host 'pve7' is no host of the inventory"),
        ({"name": "a", "unit": "a.service", "action": "kill"}, "action"),
    ],
)
def test_mistakes_are_named_before_any_host_is_looked_at(
    fleet: Scripted, client: dict[str, t.Any], words: str
) -> None:
    fleet.server["clients"] = [client]
    message = refusal_of(fleet.run("relaunch"))
    assert words in message, message
    assert fleet.rows() == []
