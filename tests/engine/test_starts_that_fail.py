# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real server that never serves: the verdict, the cause in one sentence, and how soon after its death it is there."""

from __future__ import annotations

import time
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.tests.engine.real import SCHEDULER, SPAWNED, START_DEADLINE_S, RealServer
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

pytestmark = [pytest.mark.ns, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
# From the end of the leader to the module's result.
VERDICT_S = 5.0
STOPPED_AFTER_S = 4.0
# What a look, its evidence and a busy machine may add to a threshold.
LOOKS_S = 20.0


def check_one_sentence(server: RealServer, answer: dict[str, t.Any], *words: str) -> None:
    """Failed, with a cause that a person can read at a glance, and with the evidence."""
    assert (answer["ready"], answer["verdict"]) == (False, "failed"), answer
    error = answer["error"]
    for word in words:
        assert word in error, error
    assert "\n" not in error, error
    assert len(error) < 600, error
    assert "Traceback" not in error, error
    # A server that imports has said nothing yet.
    if server.log():
        assert answer["log_tail"], answer
        assert answer["evidence"]["last_lines"], answer["evidence"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"flags": {"tp_size": 2}}, ["SGLANG_CPU_OMP_THREADS_BIND"], id="tp-2-without-thread-binding"),
        pytest.param({"flags": {"model_path": "acme/nowhere"}}, ["acme/nowhere"], id="model-not-in-the-hub"),
        pytest.param({"flags": {"model_path": "/usr/share"}}, ["/usr/share"], id="model-folder-without-a-model"),
        pytest.param({"flags": {"no_such_option": 3}}, ["--no-such-option"], id="unknown-flag"),
        pytest.param({"flags": {"cuda_graph": 8}}, ["ambiguous", "--cuda-graph"], id="ambiguous-flag"),
    ],
)
def test_it_dies_by_itself(server: RealServer, changes: dict[str, t.Any], words: list[str]) -> None:
    server.start(**changes)
    with server.watched() as watch:
        died = server.wait_dead(server.pid)
        timed = watch.result()
    check_one_sentence(server, timed.result, *words)
    assert timed.ended - died < VERDICT_S, timed.ended - died


def test_a_model_folder_that_is_not_there_is_refused_before_the_start(server: RealServer) -> None:
    result = server.launch(flags={"model_path": "/nowhere/model"})
    assert result["failed"]
    assert "/nowhere/model is missing" in result["msg"], result["msg"]
    assert not server.state.exists()


def test_the_port_is_taken_by_a_stranger(server: RealServer, engine_ns: Namespace) -> None:
    """Somebody who is no server at all: it is named while SGLang still loads, and when it can't have the port.

    SGLang then lives on for two minutes with a scheduler that is ready, until its own warm-up gives up.
    """
    argv = ["python3", "-m", "http.server", str(server.port), "--bind", "127.0.0.1"]
    stranger = engine_ns.popen(argv, detached=True)
    wait_for("the stranger listens", lambda: server.request("GET", "/").status == 200, 20)
    server.start()
    before = time.monotonic()
    early = server.ready()
    assert time.monotonic() - before < LOOKS_S
    check_one_sentence(server, early, f"pid {stranger.pid}", "http.server")
    wait_for("it can't bind the port", lambda: "address already in use" in server.log(), START_DEADLINE_S)
    assert server.alive(server.pid)
    check_one_sentence(server, server.ready(), f"pid {stranger.pid}")
    server.signal("KILL", server.pid)
    server.wait_dead(server.pid, 20)
    check_one_sentence(server, server.ready(), "in use")


@pytest.mark.parametrize("who", ["scheduler", "leader", "leader-while-importing"])
def test_killed_while_loading(server: RealServer, engine_ns: Namespace, who: str) -> None:
    server.start()
    with server.watched() as watch:
        if who == "leader-while-importing":
            server.wait_titled(SPAWNED)
            victim = server.pid
        else:
            scheduler = server.wait_titled(SCHEDULER)
            victim = scheduler if who == "scheduler" else server.pid
        server.signal("KILL", victim)
        # With one data parallel rank the leader sees that its scheduler is gone, and ends as well.
        died = server.wait_dead(server.pid, 60)
        timed = watch.result()
    assert (timed.result["ready"], timed.result["verdict"]) == (False, "failed"), timed.result
    assert "\n" not in timed.result["error"]
    if who == "scheduler":
        assert "-9" in timed.result["error"] or "SIGKILL" in timed.result["error"], timed.result["error"]
    else:
        assert f"pid {server.pid}" in timed.result["error"], timed.result["error"]
    assert timed.ended - died < VERDICT_S, timed.ended - died


def test_a_scheduler_that_is_stopped_during_the_start_is_hung(server: RealServer) -> None:
    server.start()
    with server.watched(stopped_after_s=STOPPED_AFTER_S) as watch:
        scheduler = server.wait_titled(SCHEDULER)
        server.signal("STOP", scheduler)
        stopped = time.monotonic()
        timed = watch.result()
    assert (timed.result["ready"], timed.result["verdict"]) == (False, "hung"), timed.result
    assert str(scheduler) in timed.result["error"], timed.result["error"]
    assert STOPPED_AFTER_S - 1 < timed.ended - stopped < STOPPED_AFTER_S + LOOKS_S, timed.ended - stopped
    row = next(row for row in timed.result["evidence"]["processes"] if row["pid"] == scheduler)
    assert row["state"] == "T", row


def test_a_node_that_waits_for_its_peer_makes_no_progress(server: RealServer) -> None:
    """Nobody is stopped or dead here: it sleeps in the distributed initialisation, and only time tells."""
    threshold = 8.0
    peerless = {"tp_size": 2, "nnodes": 2, "node_rank": 0, "dist_init_addr": "127.0.0.1:25000"}
    server.start(flags=peerless, environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})
    with server.watched(hung_after={"distributed": threshold}) as watch:
        wait_for("it waits for its peer", lambda: "Init torch distributed begin" in server.log(), 120)
        began = time.monotonic()
        timed = watch.result()
    assert (timed.result["verdict"], timed.result["phase"]) == ("hung", "distributed"), timed.result
    assert "distributed" in timed.result["error"], timed.result["error"]
    assert threshold - 1 < timed.ended - began < threshold + LOOKS_S, timed.ended - began
    processes = timed.result["evidence"]["processes"]
    assert any(SCHEDULER in row["title"] for row in processes), processes
    assert server.alive(server.pid), "it is judged, not touched"
