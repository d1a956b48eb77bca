# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real server behind the real router: a request that /v1/loads does not tell is waited for all the same."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.routing import parse_url
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.inflight import LOADS_PATH, Loads, loads_of
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.routed import WorkerCounter, counter_of
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.router import Access, ask
from ansible_collections.cleanslate.sglang.tests.engine.real import (
    PORT,
    READY_LINE,
    SCHEDULER,
    START_DEADLINE_S,
    RealServer,
)
from ansible_collections.cleanslate.sglang.tests.harness.modules import ModuleResult, run_module
from ansible_collections.cleanslate.sglang.tests.harness.router import start_router, why_not
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

pytestmark = [
    pytest.mark.ns,
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
URL = f"http://127.0.0.1:{PORT}"
# Over before a scheduler tells of it, which it does after each 15th token.
BODY = {
    "input_ids": [5 + number % 90 for number in range(1200)],
    "sampling_params": {"max_new_tokens": 12, "ignore_eos": True},
}
STILL_S = 6.0


@dataclasses.dataclass(frozen=True)
class Seen:
    """``told``: by /v1/loads while the request waited; ``counted``: by ours, in order, until it was none."""

    told: Loads | str
    counted: list[int | None]
    status: int | None
    answered_first: bool


def look(scheduler: int) -> Seen:
    """Inside the namespace: the scheduler stands still as in one long step, a request is sent, and it is counted."""
    access = Access(parse_url(URL))
    counter = counter_of(access)
    assert isinstance(counter, WorkerCounter), counter
    answers: list[int | None] = []
    os.kill(scheduler, signal.SIGSTOP)
    sender = threading.Thread(target=lambda: answers.append(ask(access, "POST", "/generate", 120, BODY).status))
    sender.start()
    goes_on = threading.Timer(STILL_S, os.kill, (scheduler, signal.SIGCONT))
    goes_on.start()
    time.sleep(1)
    told = loads_of(ask(access, "GET", LOADS_PATH, 5, None))
    counted: list[int | None] = []
    while not counted or counted[-1] != 0:
        counted.append(counter.count())
        assert len(counted) < 100
    answered_first = bool(answers)
    sender.join(120)
    goes_on.join(30)
    return Seen(told, counted, answers[0] if answers else None, answered_first)


def test_a_request_that_is_not_told_is_counted_and_an_idle_server_is_drained_at_once(server: RealServer) -> None:
    server.start()
    wait_for("the server is up", lambda: READY_LINE in server.log(), START_DEADLINE_S)
    router = start_router(server.ns, 41000, URL)

    def module(state: str, **more: t.Any) -> ModuleResult:
        arguments = {
            "state": state,
            "routers": [{"url": router.url}],
            "workers": [{"url": URL}],
            "leave_healthy": 0,
            "healthy_deadline_s": 60,
            **more,
        }
        return run_module("router_worker", arguments, 180, ns=server.ns)

    idle = module("drained")
    assert not idle.failed and idle.json["drained"]["cut"] == 0, idle.json
    assert idle.json["drained"]["seconds"] < 30, idle.json
    back = module("present")
    assert not back.failed, back.json
    status, answer = router.call("POST", "/generate", BODY, 120)
    assert status == 200, answer

    scheduler = server.wait_titled(SCHEDULER)
    seen = server.ns.call(lambda: look(scheduler), 200)
    print(seen)
    assert isinstance(seen.told, Loads) and seen.told.total == 0, "told after all: then this shows nothing"
    assert seen.status == 200 and seen.answered_first, seen
    assert module("drained").json["drained"]["cut"] == 0, "and idle again, with the prompt in the cache"
