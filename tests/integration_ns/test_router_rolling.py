# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A server restarted behind the real sglang-router while clients send: nothing fails with a drain, some does without.

Nobody sends a request twice: the router runs with --disable-retries, and the clients try once.
"""

from __future__ import annotations

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.router import start_router, why_not

from .routed import ROUTER_PORT, WORKER_PORTS, Fleet, router_worker, start_load, states, url_of

pytestmark = [pytest.mark.ns, pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
LONG = ("--long-tokens", "1100")  # 22 s
FIRST, SECOND = WORKER_PORTS[:2]
KEY = "sesame-admin-7d0"


def roll(ns: Namespace, polite: bool) -> dict[str, object]:
    """Restart one of two servers under load; the clients' report."""
    fleet = Fleet(ns)
    for port in (FIRST, SECOND):
        fleet.start(port)
    router = start_router(ns, ROUTER_PORT, url_of(FIRST), url_of(SECOND))
    load = start_load(ns, router, "load", *LONG)
    assert fleet.in_flight(FIRST) >= 1
    if polite:
        result = router_worker(ns, "drained", [router], FIRST)
        assert not result.failed, result.json
        drained = result.json["drained"]
        assert result.json["verdict"] == "drained" and states(result) == ["absent"]
        # Half of the long streams are here, and each is waited for; how much of them is left depends on the machine.
        assert drained["in_flight_at_start"] >= 1 and drained["cut"] == 0 and drained["seconds"] > 2, drained
        assert fleet.in_flight(FIRST) == 0
    fleet.stop(FIRST)
    load.goes_on()
    fleet.start(FIRST)
    if polite:
        result = router_worker(ns, "present", [router], FIRST)
        assert not result.failed, result.json
        assert (states(result, "before"), states(result)) == (["absent"], ["healthy"])
    load.goes_on()
    report = load.end()
    assert router.states() == {url_of(FIRST): True, url_of(SECOND): True}
    return report


def test_out_and_back_without_one_failed_request(ns: Namespace) -> None:
    report = roll(ns, polite=True)
    print(report)
    assert report["failed"] == 0, report
    answered = report["answered"]
    assert isinstance(answered, dict) and sum(answered.values()) > 500 and answered["long"] >= 4, report
    assert isinstance(report["longest_s"], float) and report["longest_s"] > 20, report


def test_through_two_routers_one_of_them_with_a_key(ns: Namespace) -> None:
    fleet = Fleet(ns)
    for port in (FIRST, SECOND):
        fleet.start(port)
    urls = (url_of(FIRST), url_of(SECOND))
    keyed = ("--control-plane-api-keys", f"ops:ops:admin:{KEY}")
    routers = [
        start_router(ns, ROUTER_PORT, *urls, flags=keyed, key=KEY),
        start_router(ns, ROUTER_PORT + 100, *urls),
    ]
    few = ("--long", "2", "--long-tokens", "300", "--short", "3", "--plain", "3")
    loads = [start_load(ns, router, f"load{router.port}", *few) for router in routers]
    for port in (FIRST, SECOND):
        out = router_worker(ns, "drained", routers, port)
        assert not out.failed and states(out) == ["absent", "absent"] and out.json["drained"]["cut"] == 0, out.json
        fleet.stop(port)
        fleet.start(port)
        back = router_worker(ns, "present", routers, port)
        assert not back.failed and states(back) == ["healthy", "healthy"], back.json
        for load in loads:
            load.goes_on(30)
    for load in loads:
        report = load.end()
        print(report)
        assert report["failed"] == 0 and sum(report["answered"].values()) > 100, report


def test_without_a_drain_requests_fail(ns: Namespace) -> None:
    report = roll(ns, polite=False)
    print(report)
    assert isinstance(report["failed"], int) and report["failed"] > 0, report
