# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real sglang-router at its worst: dead, hung, with keys, with ranks, with workers that are gone or never come."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.router import RouterProcess, start_router, why_not
from ansible_collections.cleanslate.sglang.tests.harness.standin import start_standin
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

from .routed import ROUTER_PORT, WORKER_PORTS, Fleet, router_worker, states, url_of

pytestmark = [pytest.mark.ns, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
FIRST, SECOND, THIRD = WORKER_PORTS
W1, W2 = url_of(FIRST), url_of(SECOND)
KEY = "sesame-admin-4e1"
ALL_UP = {W1: True, W2: True}


@pytest.fixture
def fleet(ns: Namespace) -> Fleet:
    fleet = Fleet(ns)
    for port in (FIRST, SECOND):
        fleet.start(port)
    return fleet


def two_routers(ns: Namespace) -> list[RouterProcess]:
    return [start_router(ns, port, W1, W2) for port in (ROUTER_PORT, ROUTER_PORT + 100)]


# --- routers ---


def test_a_dead_router_stops_the_way_out_and_not_the_way_back(ns: Namespace, fleet: Fleet) -> None:
    living, dead = two_routers(ns)
    fleet.signal(dead.process, signal.SIGKILL)
    dead.process.wait_gone()
    result = router_worker(ns, "drained", [living, dead], FIRST)
    assert result.failed and (result.json["verdict"], result.json["changed"]) == ("unknown", False)
    assert f"nobody accepts connections on 127.0.0.1:{dead.port}" in result.json["msg"]
    places = f"{W1}: healthy at r{living.port}, {W1}: unknown at r{dead.port}"
    assert f"nothing was changed; now {places}" in result.json["msg"]
    assert living.states() == ALL_UP

    assert not router_worker(ns, "absent", [living], FIRST).failed
    result = router_worker(ns, "present", [living, dead], FIRST)
    assert result.failed and (result.json["verdict"], states(result)) == ("unknown", ["healthy", "unknown"])
    assert living.states() == ALL_UP


@pytest.mark.parametrize("named", ["by address", "by name"])
def test_a_hung_router_is_named_in_time(ns: Namespace, fleet: Fleet, named: str) -> None:
    living, hung = two_routers(ns)
    fleet.signal(hung.process, signal.SIGSTOP)
    host = "127.0.0.1" if named == "by address" else "localhost"
    routers = [{"url": living.url, "name": "living"}, {"url": f"http://{host}:{hung.port}", "name": "hung"}]
    started = time.monotonic()
    result = router_worker(ns, "drained", [], FIRST, routers=routers, request_deadline_s=2)
    assert time.monotonic() - started < 30
    assert result.failed and result.json["verdict"] == "unknown" and not result.json["changed"]
    assert "router hung" in result.json["msg"] and "within 2 s" in result.json["msg"]
    assert living.states() == ALL_UP
    fleet.signal(hung.process, signal.SIGCONT)
    assert not router_worker(ns, "drained", [], FIRST, routers=routers).failed
    assert living.states() == hung.states() == {W2: True}


def test_the_key_of_the_control_plane(ns: Namespace, fleet: Fleet) -> None:
    keys = (f"ops:ops:admin:{KEY}", "eye:eye:user:sesame-user-1")
    router = start_router(ns, ROUTER_PORT, W1, W2, flags=("--control-plane-api-keys", *keys), key=KEY)
    for given, words in (
        (None, "is missing or wrong"),
        ("sesame-wrong", "is missing or wrong"),
        ("sesame-user-1", "has no admin role"),
    ):
        result = router_worker(ns, "drained", [], FIRST, routers=[{"url": router.url, "api_key": given}])
        assert result.failed and words in result.json["msg"], result.json
        assert "sesame" not in json.dumps({**result.json, "invocation": None})
    assert router.states() == ALL_UP
    result = router_worker(ns, "drained", [router], FIRST, diff=True)
    assert not result.failed and states(result) == ["absent"], result.json
    assert KEY not in json.dumps(result.json)
    assert KEY not in "".join(ns.titles().values()), "the router renames itself; the module never has it there"
    back = router_worker(ns, "present", [router], FIRST)
    assert not back.failed and router.states() == ALL_UP


def test_no_router_at_all(ns: Namespace, fleet: Fleet) -> None:
    """A server answers on that port, which is no router."""
    result = router_worker(ns, "absent", [], FIRST, routers=[{"url": W2}])
    assert result.failed and "HTTP 404" in result.json["msg"] and "sglang-router of 0.3" in result.json["msg"]


def test_ranks_of_their_own_are_refused(ns: Namespace) -> None:
    fleet = Fleet(ns)
    fleet.start(FIRST, "--dp-size", "2")
    router = start_router(ns, ROUTER_PORT, flags=("--dp-aware",))
    assert router.call("POST", "/workers", {"url": W1})[0] == 202
    wait_for("both ranks", lambda: len(router.workers()) == 2, 30)
    result = router_worker(ns, "absent", [router], FIRST, leave_healthy=0)
    assert result.failed and "--dp-aware" in result.json["msg"] and len(router.workers()) == 2


# --- spellings ---


def test_every_spelling_goes_and_a_foreign_one_is_named(ns: Namespace, fleet: Fleet) -> None:
    router = start_router(ns, ROUTER_PORT, W1, f"{W1}/", f"http://localhost:{FIRST}", W2)
    result = router_worker(ns, "drained", [router], FIRST)
    assert result.failed and f"lists http://localhost:{FIRST}, which leads to the same address" in result.json["msg"]
    assert len(router.workers()) == 4
    known = [{"url": f"HTTP://127.0.0.1:{FIRST}/", "aliases": [f"localhost:{FIRST}"]}]
    result = router_worker(ns, "drained", [router], workers=known)
    assert not result.failed and router.states() == {W2: True}, result.json
    assert len(result.json["routers"][0]["workers"][0]["before"]["entries"]) == 3


# --- workers ---


def test_the_last_one_stays_check_mode_changes_nothing_and_twice_is_once(ns: Namespace, fleet: Fleet) -> None:
    router = start_router(ns, ROUTER_PORT, W1, W2)
    planned = router_worker(ns, "drained", [router], FIRST, check=True, diff=True)
    assert (planned.json["verdict"], planned.json["changed"]) == ("planned", True) and router.states() == ALL_UP
    assert planned.json["diff"]["after"] == f"r{router.port} {W1}: absent\n"
    assert router_worker(ns, "drained", [router], FIRST).json["changed"]
    assert not router_worker(ns, "drained", [router], FIRST).json["changed"]
    last = router_worker(ns, "drained", [router], SECOND)
    assert last.failed and "leave_healthy is 1" in last.json["msg"] and router.states() == {W2: True}
    assert router_worker(ns, "present", [router], FIRST).json["changed"]
    assert not router_worker(ns, "present", [router], FIRST).json["changed"]


def test_settings_come_back_where_they_are_given(ns: Namespace, fleet: Fleet) -> None:
    router = start_router(ns, ROUTER_PORT, W2)
    router.add(W1, priority=70, cost=2.5)
    plain = [{"url": W1}]
    seen = router_worker(ns, "drained", [router], workers=plain, check=True)
    warned = json.dumps(seen.json.get("warnings"))
    assert "priority 70" in warned and "cost 2.5" in warned, seen.json
    whole = [{"url": W1, "settings": {"priority": 70, "cost": 2.5}}]
    assert "warnings" not in router_worker(ns, "drained", [router], workers=whole).json
    router_worker(ns, "present", [router], workers=whole)
    (found,) = [row for row in router.workers() if row["url"] == W1]
    assert (found["priority"], found["cost"]) == (70, 2.5)


def test_requests_that_last_too_long_are_counted(ns: Namespace, fleet: Fleet) -> None:
    router = start_router(ns, ROUTER_PORT, W1, W2)
    body = {"model": "/models/tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3000}

    def send() -> None:
        with contextlib.suppress(AssertionError):  # they are cut, all of them in the end
            router.call("POST", "/v1/chat/completions", body, 90)

    threads = [threading.Thread(target=send) for _unused in range(4)]
    for thread in threads:
        thread.start()
    wait_for("two at each", lambda: fleet.in_flight(FIRST) == 2 == fleet.in_flight(SECOND), 30)
    result = router_worker(ns, "drained", [router], FIRST, drain_deadline_s=2)
    drained = result.json["drained"]
    assert result.failed and result.json["verdict"] == "failed", result.json
    assert (drained["in_flight_at_start"], drained["in_flight_at_end"], drained["cut"]) == (2, 2, 2)
    assert "2 requests were in flight after 2 s" in result.json["msg"] and router.states() == {W2: True}
    accepted = router_worker(ns, "drained", [router], FIRST, drain_deadline_s=2, allow_cut=True)
    assert not accepted.failed and accepted.json["drained"]["cut"] == 2
    fleet.stop(FIRST, patience_s=0.5)
    gone = router_worker(ns, "drained", [router], FIRST)
    assert not gone.failed and "nobody accepts connections" in gone.json["drained"]["note"]
    fleet.stop(SECOND, patience_s=0.5)
    for thread in threads:
        thread.join(90)


def test_a_hung_server_is_not_drained_but_can_be_taken_out(ns: Namespace, fleet: Fleet) -> None:
    router = start_router(ns, ROUTER_PORT, W2, health=("--health-check-interval-secs", "60"))
    fleet.stop(FIRST)
    fleet.servers[FIRST] = start_standin(ns, port=FIRST, faults={"HEALTH_TIMEOUT_S": "2"})
    router.add(W1)
    ns.run(["kill", "-STOP", str(fleet.servers[FIRST].find("sglang::scheduler"))], 10).check()
    result = router_worker(ns, "drained", [router], FIRST)
    assert result.failed and result.json["verdict"] == "unknown" and router.states() == ALL_UP
    assert "its /health says HTTP 503" in result.json["msg"] and "state=absent" in result.json["msg"]
    assert not router_worker(ns, "absent", [router], FIRST).failed and router.states() == {W2: True}


def test_present_waits_for_what_comes_back_and_says_what_does_not(ns: Namespace, fleet: Fleet) -> None:
    router = start_router(ns, ROUTER_PORT, W1, W2)
    fleet.stop(FIRST)
    wait_for("the router notices", lambda: router.states() == {W1: False, W2: True}, 30)
    result = router_worker(ns, "present", [router], FIRST, healthy_deadline_s=2)
    assert result.failed and "does not call it healthy after 2 s" in result.json["msg"]
    assert states(result) == ["unhealthy"] and not result.json["changed"]
    timer = threading.Timer(2, fleet.start, [FIRST])
    timer.start()
    result = router_worker(ns, "present", [router], FIRST)
    timer.join()
    assert not result.failed and states(result, "before") == ["unhealthy"] and states(result) == ["healthy"]
    assert result.json["routers"][0]["workers"][0]["action"] == "waited" and not result.json["changed"]

    never = router_worker(ns, "present", [router], THIRD, healthy_deadline_s=3)
    assert never.failed and "it does not list it yet; AddWorker processing" in never.json["msg"], never.json
    assert states(never) == ["absent"]


def test_an_addition_that_was_pending_brings_it_back_and_that_is_seen(ns: Namespace, fleet: Fleet) -> None:
    """Asked to add what does not serve yet, the router goes on trying, whatever is removed meanwhile."""
    router = start_router(ns, ROUTER_PORT, W1, W2)
    fleet.stop(FIRST)
    assert router.call("POST", "/workers", {"url": W1})[0] == 202
    result = router_worker(ns, "absent", [router], FIRST)
    assert not result.failed, result.json
    assert f"is still adding {W1}" in json.dumps(result.json["warnings"])
    fleet.start(FIRST)
    wait_for("it is back by itself", lambda: router.states() == ALL_UP, 60)
    assert t.cast(bool, router_worker(ns, "absent", [router], FIRST).json["changed"])
    assert router.states() == {W2: True}
