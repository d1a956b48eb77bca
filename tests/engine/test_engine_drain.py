# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The eviction's drain at a real server: while the first prompt after a rest is read /v1/loads tells nothing."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import shutil
import signal
import threading
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.inflight import LOADS_PATH, LoadsWatch
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.rests import REST_S, Rests
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import http
from ansible_collections.cleanslate.sglang.tests.engine.real import (
    PORT,
    READY_LINE,
    SCHEDULER,
    START_DEADLINE_S,
    RealServer,
    model_path,
)
from ansible_collections.cleanslate.sglang.tests.harness.modules import run_module
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

pytestmark = [pytest.mark.ns, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
ENDPOINT = http.Endpoint("127.0.0.1", PORT)
STILL_S = 6.0
# Read in one piece, so that nothing is told until the end of it.
LONG_PROMPT = 24_000
CONTEXT = 32_768


def prompt(length: int, first: int = 5) -> dict[str, t.Any]:
    """Shorter than what a scheduler tells of: it does so after each 15th token."""
    tokens = [first + number % 90 for number in range(length)]
    return {"input_ids": tokens, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}


def loads() -> http.Response:
    return http.request(ENDPOINT, "GET", LOADS_PATH, 5)


@dataclasses.dataclass(frozen=True)
class Seen:
    """``idle_s``: until a server at rest was found so; ``blind``: counted by the loads alone while a request waited;
    ``counted``: by ours, in order, until it was none."""

    idle_s: float
    blind: int | str
    counted: list[int | str]
    status: int | None
    answered_first: bool


def look(family: list[int], scheduler: int) -> Seen:
    """Inside the namespace: the scheduler stands still as in one long step, a request is sent, and it is counted."""
    rests = Rests(family, loads)
    assert rests.start() == ""
    watch = LoadsWatch(loads, rests)
    started = time.monotonic()
    assert [watch.count(), watch.count()] == [0, 0], "at rest"
    idle_s = time.monotonic() - started
    answers: list[int | None] = []
    os.kill(scheduler, signal.SIGSTOP)

    def send() -> None:
        answers.append(http.request(ENDPOINT, "POST", "/generate", 120, prompt(1200)).status)

    sender = threading.Thread(target=send)
    sender.start()
    goes_on = threading.Timer(STILL_S, os.kill, (scheduler, signal.SIGCONT))
    goes_on.start()
    time.sleep(1)
    blind = LoadsWatch(loads).count()
    counted: list[int | str] = []
    while not counted or counted[-1] != 0:
        counted.append(watch.count())
        assert len(counted) < 100
    answered_first = bool(answers)
    sender.join(120)
    goes_on.join(30)
    return Seen(idle_s, blind, counted, answers[0] if answers else None, answered_first)


@pytest.fixture
def long_model(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    shutil.copytree(model_path(), model)
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT}))
    return model


def test_a_prompt_that_nothing_tells_of_is_waited_for_and_a_server_at_rest_is_found_so(
    server: RealServer, long_model: Path
) -> None:
    flags = {"model_path": str(long_model), "max_total_tokens": CONTEXT + 4096, "chunked_prefill_size": -1}
    server.start(flags={**flags, "max_prefill_tokens": CONTEXT})
    wait_for("the server is up", lambda: READY_LINE in server.log(), START_DEADLINE_S)
    scheduler = server.wait_titled(SCHEDULER)
    family = list(server.tree())

    seen = server.ns.call(lambda: look(family, scheduler), 200)
    print(seen)
    assert seen.idle_s < 2 * REST_S, "a server at rest"
    assert seen.blind == 0, "told after all: then this shows nothing"
    assert seen.counted[0] == 1 and seen.status == 200 and seen.answered_first, seen

    # Now the eviction itself, in the middle of a prompt that is read for many seconds.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        asked = pool.submit(server.request, "POST", "/generate", prompt(LONG_PROMPT, 7), 300)
        time.sleep(1)
        arguments = {
            "name": server.name,
            "state_dir": str(server.state),
            "scope": "server",
            "expected_gpus": 0,
            "drain": {"in_flight": "loads"},
            "deadlines": {"drain": 280},
        }
        evicted = run_module("gpu_evict", arguments, 400, ns=server.ns).json
        answer = asked.result()
        print(answer.status, time.monotonic() - started, evicted["drain"])
    assert answer.status == 200, answer
    drained = evicted["drain"]
    assert (drained["source"], drained["in_flight_after"], drained["cut_off"]) == ("loads", 0, 0), drained
    assert drained["in_flight_before"] == 1, "the prompt was read through too soon: then this shows nothing"
    assert not server.tree()
