# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real server that comes up: its phases and the proof; then a rank that stops, and what only a body can tell."""

from __future__ import annotations

import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.engine.real import PORT, SCHEDULER, START_DEADLINE_S, RealServer
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

pytestmark = [pytest.mark.ns, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
STOPPED_AFTER_S = 4.0


def check_proof(answer: dict[str, t.Any]) -> None:
    """What a server that is ready has shown: who it is, what it generates, with which workers, under load."""
    assert (answer["ready"], answer["verdict"], answer["error"]) == (True, "ready", None), answer
    assert answer["port_owner"]["pid"] == answer["pid"]
    assert [(row["dp_rank"], row["problem"]) for row in answer["tokens"]] == [(0, None)]
    assert answer["flags_differ"]["matches"] is True, answer["flags_differ"]
    assert answer["flags_differ"]["compared"] > 5, answer["flags_differ"]
    soak = answer["soak"]
    assert (soak["requests"], soak["failed"]) == (2, 0), soak
    assert soak["tokens_per_s"] > 0, soak
    assert 0 < soak["latency_s"]["p50"] <= soak["latency_s"]["max"], soak


@pytest.mark.promise
def test_ready_with_its_phases_then_a_stopped_scheduler_behind_a_port_that_answers(server: RealServer) -> None:
    """One start for both: /health, /v1/models and the open port say nothing of a scheduler that stands still."""
    server.start(flags={"reasoning_parser": "kimi_k2"})
    answer = server.ready(tool_call_parser="false")
    check_proof(answer)
    # With random weights the reasoning never ends: an empty content with reasoning filled is how it should be here.
    assert answer["reasoning"]["verdict"] == "separated", answer["reasoning"]
    assert server.chat()["reasoning_content"]
    phases = {row["name"]: row for row in answer["phases"]}
    order = ["imports", "distributed", "weights", "kv_cache", "warm_up", "ready"]
    assert [name for name in phases if name in order] == order, answer["phases"]
    assert phases["imports"]["seconds"] > 0, answer["phases"]
    assert all(row["seconds"] is not None and row["seconds"] >= 0 for name, row in phases.items() if name != "ready")
    assert "ready" in answer["progress_line"], answer["progress_line"]

    scheduler = server.wait_titled(SCHEDULER)
    server.signal("STOP", scheduler)
    assert server.request("GET", "/v1/models").status == 200
    before = time.monotonic()
    hung = server.ready(deadline_s=60, stopped_after_s=STOPPED_AFTER_S, token_deadline_s=5)
    took = time.monotonic() - before
    assert (hung["ready"], hung["verdict"]) == (False, "hung"), hung
    assert str(scheduler) in hung["error"], hung["error"]
    assert took < 30, took
    row = next(row for row in hung["evidence"]["processes"] if row["pid"] == scheduler)
    assert row["state"] == "T", row
    assert row["stack"] or row["stack_problem"], row

    server.signal("CONT", scheduler)
    again = server.ready(deadline_s=60, tool_call_parser="false")
    assert again["verdict"] == "ready", again["error"]


def test_case_7_a_missing_parser_is_seen_in_the_body_and_a_stale_server_is_never_the_new_one(
    server: RealServer, engine_ns: Namespace, tmp_path: Path
) -> None:
    """The record and the flags know of no parser, so that only the answer's body can tell."""
    server.start()
    answer = server.ready(reasoning_parser="kimi_k2")
    assert (answer["ready"], answer["verdict"]) == (False, "failed"), answer
    assert "reasoning_content" in answer["error"], answer["error"]
    assert answer["reasoning"]["verdict"] == "missing", answer["reasoning"]
    assert server.ready()["verdict"] == "ready", "without the demand it serves"

    # The server above now plays the stale one: it answers on the port of a new one that loads, can't bind, and dies.
    new = RealServer(engine_ns, tmp_path, "new", PORT)
    new.start()
    while_it_loads = new.ready(deadline_s=60)
    wait_for("the new one can't bind", lambda: "address already in use" in new.log(), START_DEADLINE_S)
    unbound = new.ready(deadline_s=60)
    new.signal("KILL", new.pid)
    new.wait_dead(new.pid, 20)
    dead = new.ready(deadline_s=60)
    assert server.request("GET", "/health").status == 200, "the stale one answers all the while"
    for answer in (while_it_loads, unbound, dead):
        assert (answer["ready"], answer["verdict"], answer["tokens"]) == (False, "failed", []), answer
        assert f"pid {server.pid}" in answer["error"] or "in use" in answer["error"], answer["error"]
        assert answer["phase"] != "ready", answer["phases"]
