# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""server_ready's proof on stand-in servers: cases 2, 7, 28 and 29, tools, flags, the soak."""

from __future__ import annotations

import json
import os
import signal
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.modules import ModuleResult, run_module
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.standin import STANDIN
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

pytestmark = pytest.mark.ns

PORT = 30000
KEY = "sk-proof-Secret-1"


class Site:
    """One launched server in one namespace."""

    def __init__(self, ns: Namespace, tmp_path: Path) -> None:
        self.ns = ns
        self.state = tmp_path / "state"
        self.model = tmp_path / "model"
        self.model.mkdir()
        self.pid = 0

    def start(self, flags: t.Mapping[str, t.Any] | None = None, **faults: str) -> None:
        result = run_module(
            "server_launch",
            {
                "name": "main",
                "python": sys.executable,
                "user": "root",
                "launcher": "detached",
                "state_dir": str(self.state),
                "port": PORT,
                "api_key": KEY,
                "flags": {"model_path": str(self.model), "device": "cpu", **(flags or {})},
                "environment": {
                    "PYTHONPATH": str(STANDIN),
                    **{f"SGLANG_STANDIN_{name}": value for name, value in faults.items()},
                },
            },
            60,
            ns=self.ns,
        )
        assert not result.failed, result.json
        self.pid = result.json["pid"]

    def ready(self, **changes: t.Any) -> ModuleResult:
        arguments = {
            "name": "main",
            "state_dir": str(self.state),
            "api_key": KEY,
            "deadline_s": 40,
            "token_deadline_s": 5,
            **changes,
        }
        result = run_module("server_ready", arguments, 150, ns=self.ns)
        assert KEY not in json.dumps(result.json)
        return result

    def served(self, **changes: t.Any) -> dict[str, t.Any]:
        result = self.ready(**changes)
        assert not result.failed, result.json
        return result.json

    def refused(self, **changes: t.Any) -> dict[str, t.Any]:
        result = self.ready(**changes)
        assert result.failed, result.json
        assert result.json["ready"] is False
        return result.json

    def scheduler(self, title: str) -> int:
        return next(pid for pid, name in self.ns.titles().items() if name == title)

    def signal(self, pid: int, number: signal.Signals) -> None:
        self.ns.call(lambda: os.kill(pid, number))


@pytest.fixture
def site(ns: Namespace, tmp_path: Path) -> Site:
    return Site(ns, tmp_path)


def test_the_whole_proof_of_a_server_that_serves(site: Site) -> None:
    site.start({"tp_size": 2, "dp_size": 2, "reasoning_parser": "kimi_k2", "tool_call_parser": "kimi_k2"})
    found = site.served(soak_requests=12, soak_concurrency=3, soak_tokens=5)
    assert (found["verdict"], found["error"]) == ("ready", None)
    assert (found["workers"]["expected"], found["workers"]["schedulers"]) == (4, 4)
    assert [row["count"] for row in found["tokens"]] == [4, 4]
    assert (found["reasoning"]["verdict"], found["tools"]["verdict"]) == ("separated", "called")
    assert (found["flags_differ"]["matches"], found["flags_differ"]["differences"]) == (True, [])
    assert found["flags_differ"]["compared"] >= 6
    soak = found["soak"]
    assert (soak["requests"], soak["failed"], soak["concurrency"], soak["tokens"]) == (12, 0, 3, 60)
    assert soak["tokens_per_s"] > 0
    assert soak["latency_s"]["p50"] <= soak["latency_s"]["p95"] <= soak["latency_s"]["max"]


# --- case 7: by the body alone ----------------------------------------------------------------------------------------


def test_case_07_a_server_without_a_reasoning_parser(site: Site) -> None:
    site.start()
    found = site.refused(reasoning_parser="kimi_k2")
    assert found["reasoning"]["verdict"] == "missing"
    assert "the chain of thought stands in content" in found["error"]
    assert found["soak"] is None


def test_case_07_the_same_server_where_nothing_is_demanded(site: Site) -> None:
    site.start()
    found = site.served()
    assert (found["reasoning"], found["tools"]) == (None, None)


def test_a_server_without_a_tool_parser(site: Site) -> None:
    site.start()
    found = site.refused(tool_call_parser="kimi_k2")
    assert found["tools"]["verdict"] == "missing"
    assert "the call stands in content" in found["error"]


def test_a_model_that_calls_nothing_proves_nothing_and_is_no_failure(site: Site) -> None:
    site.start({"tool_call_parser": "kimi_k2"}, CALLS_TOOLS="0")
    found = site.served()
    assert found["tools"]["verdict"] == "not_called"
    assert any("not proved" in words for words in found["proof"]["warnings"])


# --- case 2 -----------------------------------------------------------------------------------------------------------


def test_case_02_the_log_s_headroom(site: Site) -> None:
    site.start({"device": "cuda"}, AVAILABLE_GPU_MEM_GB="0.82")
    found = site.refused()
    assert found["headroom_mib"] == 839
    blind, little = found["proof"]["problems"]
    assert "can't be seen from here" in blind, "this namespace has no GPU that anybody could look at"
    assert "only 839 MiB of GPU memory are left by the log, 2048 MiB are demanded" in little


# --- case 28 ----------------------------------------------------------------------------------------------------------


def test_case_28_a_rank_that_is_killed_after_the_proof(site: Site) -> None:
    site.start({"dp_size": 2})
    assert site.served(soak_requests=0)["verdict"] == "ready"
    pid = site.scheduler("sglang::scheduler_DP1")
    site.signal(pid, signal.SIGKILL)
    wait_for("the rank to be dead", lambda: "sglang::scheduler_DP1" not in site.ns.titles().values(), 10)
    found = site.refused()
    assert found["verdict"] == "failed"
    assert "DP1" in found["error"] or f"pid {pid}" in found["error"]
    assert all(row["count"] is None for row in found["tokens"] if row["dp_rank"] == 1)


def test_what_a_rank_forked_and_never_reaped_is_no_dead_rank(site: Site) -> None:
    """Seen with the real SGLang: the zombie has the comm of a scheduler, and the start was called failed for it."""
    site.start({"tp_size": 2}, UNREAPED="1", LOAD_S="14")
    found = site.served()
    zombies = site.ns.pids() - {pid for pid, _ticks in site.ns.living()}
    assert len(zombies) == 2, "nobody forked"
    assert (found["workers"]["schedulers"], found["workers"]["dead"], found["workers"]["problem"]) == (2, [], None)


def test_case_28_a_rank_that_is_stopped(site: Site) -> None:
    site.start({"dp_size": 2})
    assert site.served(soak_requests=0)["verdict"] == "ready"
    pid = site.scheduler("sglang::scheduler_DP1")
    site.signal(pid, signal.SIGSTOP)
    try:
        found = site.refused()
    finally:
        site.signal(pid, signal.SIGCONT)
    assert found["verdict"] == "hung"
    assert f"pid {pid}" in found["error"]


def test_case_28_generation_that_hangs_after_some_requests_is_found_by_the_soak(site: Site) -> None:
    site.start(HANG_AFTER="6")
    found = site.refused(soak_requests=20, soak_concurrency=2)
    assert found["verdict"] == "hung"
    assert [row["count"] for row in found["tokens"]] == [4]
    assert "requests of the soak failed" in found["error"]
    assert found["soak"]["silent"] is True


def test_a_soak_with_failing_requests(site: Site) -> None:
    site.start(FAIL_EVERY="5")
    found = site.refused(soak_requests=8, soak_concurrency=1)
    assert found["verdict"] == "failed"
    assert (found["soak"]["failed"], found["soak"]["silent"]) == (1, False)
    assert "HTTP 500" in found["soak"]["first_error"]


def test_a_soak_that_is_slower_than_its_time_is_failed_and_not_hung(site: Site) -> None:
    site.start(TOKEN_S="0.05")
    found = site.refused(soak_requests=40, soak_concurrency=2, soak_tokens=20, soak_deadline_s=4)
    assert found["verdict"] == "failed"
    assert 0 < found["soak"]["failed"] < 40


# --- case 29 ----------------------------------------------------------------------------------------------------------

NODE = {"tp_size": 4, "nnodes": 2, "node_rank": 1, "dist_init_addr": "127.0.0.1:20000"}


def test_case_29_a_later_node_is_judged_by_its_processes(site: Site) -> None:
    site.start(NODE)
    found = site.served()
    assert (found["workers"]["expected"], found["workers"]["schedulers"]) == (2, 2)
    assert (found["tokens"], found["soak"]) == ([], None)


def test_case_29_a_later_node_says_200_with_a_dead_scheduler(site: Site) -> None:
    site.start(NODE)
    assert site.served()["verdict"] == "ready"
    site.signal(site.scheduler("sglang::scheduler_TP3"), signal.SIGKILL)
    wait_for("the rank to be dead", lambda: "sglang::scheduler_TP3" not in site.ns.titles().values(), 10)
    found = site.refused()
    assert found["verdict"] == "failed"
    assert "scheduler" in found["error"]


# --- flags ------------------------------------------------------------------------------------------------------------


def test_a_configuration_that_was_changed_behind_the_record_is_a_failure(site: Site) -> None:
    site.start({"max_running_requests": 16, "context_length": 4096})
    (config,) = site.state.glob("main/launches/*/config.yaml")
    config.write_text(config.read_text().replace("4096", "8192"))
    found = site.refused()
    assert found["verdict"] == "failed"
    assert "context-length is 8192, 4096 is wanted" in found["error"]


def test_what_sglang_resolves_itself_is_told_and_no_failure(site: Site) -> None:
    site.start({"random_seed": 7, "page_size": 1, "kv_cache_dtype": "auto"})
    found = site.served()
    assert found["flags_differ"]["matches"] is True
