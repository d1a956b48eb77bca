# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 28, a dead data parallel rank, and case 29, a second node whose /health is always 200."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.engine.real import BOUND, PORT, READY_LINE, SCHEDULER, RealServer
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

pytestmark = [pytest.mark.ns, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_case_28_a_dead_data_parallel_rank_behind_a_leader_that_lives(server: RealServer) -> None:
    """SGLang's leader never notices: /health says 200 or, when its turn is the dead rank's, 503 after 20 s."""
    server.start(flags={"dp_size": 2})
    answer = server.ready()
    assert answer["verdict"] == "ready", answer["error"]
    assert [(row["dp_rank"], row["problem"]) for row in answer["tokens"]] == [(0, None), (1, None)]
    victim = server.wait_titled(f"{SCHEDULER}_DP1")
    server.signal("KILL", victim)
    time.sleep(1)
    assert server.request("GET", "/v1/models").status == 200
    before = time.monotonic()
    dead = server.ready(deadline_s=60, token_deadline_s=5)
    assert time.monotonic() - before < 30
    assert (dead["ready"], dead["verdict"]) == (False, "failed"), dead
    assert "DP1" in dead["error"], dead["error"]
    assert server.alive(server.pid), "the leader goes on as if nothing had happened"


def test_case_29_a_second_node_without_a_living_scheduler(engine_ns: Namespace, tmp_path: Path) -> None:
    """Two nodes of one server on this machine, one rank each; node 1's HTTP is SGLang's own constant 200."""
    shared = {"tp_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:25000"}
    first, second = (RealServer(engine_ns, tmp_path, f"node{rank}", PORT + rank) for rank in (0, 1))
    for rank, node in enumerate((first, second)):
        node.start(flags={**shared, "node_rank": rank}, environment=BOUND)
    answers = [first.ready(), second.ready()]
    assert [answer["verdict"] for answer in answers] == ["ready", "ready"], [answer["error"] for answer in answers]
    assert READY_LINE in first.log()
    assert answers[1]["tokens"] == [], "node 1 has no HTTP that could prove anything"

    (scheduler,) = second.titled(SCHEDULER)
    second.signal("STOP", scheduler)
    assert second.request("GET", "/health").status == 200, "it says so whatever its schedulers do"
    hung = second.ready(deadline_s=60, stopped_after_s=3)
    assert (hung["ready"], hung["verdict"]) == (False, "hung"), hung
    assert str(scheduler) in hung["error"], hung["error"]

    # Some seconds after the kill SGLang ends this node's leader as well; until then it goes on to answer.
    second.signal("KILL", scheduler)
    wait_for("the scheduler of node 1 is gone", lambda: not second.titled(SCHEDULER), 20)
    dead = second.ready(deadline_s=60)
    assert (dead["ready"], dead["verdict"]) == (False, "failed"), dead
    assert "scheduler" in dead["error"] or "-9" in dead["error"] or "ended" in dead["error"], dead["error"]
