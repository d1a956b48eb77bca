# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What follows after a failure, and what is said of it."""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import going_back, inspect_report, runs, serve_report

UNREACHABLE = {"unreachable": True, "msg": "Connection timed out"}
CUT_OFF = {"msg": "Module result deserialization failed: No start of json char found"}
STARTED = {"launch_id": "new", "config_hash": "sha256:aa", "pid": 9}
FAILED = {"verdict": "failed", "error": "no such model", "pid": None}
LOST = {"msg": "the lease on 'chat' is no longer ours: run b holds it", "lease_lost": True}
LOST_REASON = {"verdict": "failed", "reasons": [{"code": "lease_lost", "message": "gone"}]}


@pytest.mark.parametrize("choice", ["rollback", "stop", "leave"])
@pytest.mark.parametrize(
    ("results", "step"),
    [
        ({"launch": STARTED, "verify": FAILED}, None),
        ({"launch": STARTED, "verify": {"msg": "Timed out after 900 second(s)."}}, None),
        ({"launch": {"msg": "no such user"}, "verify": {}}, None),
        ({"launch": {}, "verify": {}}, "nothing"),
        ({"launch": {"skipped": True}}, "nothing"),
        ({"launch": UNREACHABLE}, "leave"),
        ({"launch": CUT_OFF}, "leave"),
        ({"launch": STARTED, "verify": UNREACHABLE}, "leave"),
        ({"launch": STARTED, "verify": CUT_OFF}, "leave"),
        ({"launch": STARTED, "verify": LOST}, "nothing"),
        ({"teardown": LOST_REASON, "launch": STARTED, "verify": FAILED}, "nothing"),
    ],
)
def test_what_follows(results: dict[str, t.Any], step: str | None, choice: str) -> None:
    """None: the choice."""
    assert going_back.after_failure(results, choice)["step"] == (step or choice)


@pytest.mark.parametrize(
    ("failed_hash", "trial", "step"),
    [
        ("sha256:aa", {"config_hash": "sha256:bb", "from_launch": "old"}, "rollback"),
        ("", {"config_hash": "sha256:bb", "from_launch": "old"}, "rollback"),
        ("sha256:aa", {"config_hash": "sha256:aa", "from_launch": "old"}, "stop"),
        ("sha256:aa", {"config_hash": "sha256:aa", "from_launch": "old", "secrets_changed": None}, "stop"),
        ("sha256:aa", {"config_hash": "sha256:aa", "from_launch": "old", "secrets_changed": True}, "rollback"),
        ("sha256:aa", {"msg": "no launch was ever proved"}, "stop"),
        ("sha256:aa", UNREACHABLE, "stop"),
        ("sha256:aa", {}, "stop"),
        ("sha256:aa", LOST, "nothing"),
    ],
)
def test_whether_there_is_a_way_back(failed_hash: str, trial: dict[str, t.Any], step: str) -> None:
    assert going_back.after_trial(failed_hash, trial)["step"] == step


def test_the_settings_of_a_way_back_are_the_records() -> None:
    server = {
        "name": "chat", "port": 1, "gpus": ["0"], "flags": {"x": 1}, "api_key": "Sesame", "python": "/p",
        "model": "new", "device": "gpu", "settle_s": 5, "user": "new", "clients": [],
    }  # fmt: skip
    record = {"port": 2, "gpus": ["GPU-b"], "device": "cpu", "user": "old", "host": None}
    settings = going_back.old_settings(server, {"record": record})
    assert settings == {
        "name": "chat", "port": 2, "gpus": ["GPU-b"], "device": "gpu", "settle_s": 5, "user": "old", "clients": [],
    }  # fmt: skip
    on_cpu = going_back.old_settings({**server, "device": "cpu"}, {"record": {**record, "gpus": None}})
    assert (on_cpu["device"], on_cpu["gpus"]) == ("cpu", [])


@pytest.mark.parametrize(
    ("verify", "teardown", "node", "launch", "go_on"),
    [
        ({"ready": True}, {"changed": True}, {}, STARTED, True),
        ({"ready": "true"}, {"changed": True}, {}, STARTED, False),
        ({}, {}, {}, {}, True),
        ({}, {"changed": False, "verdict": "failed"}, {}, {}, True),
        ({}, {"changed": True}, {}, {}, False),
        ({}, UNREACHABLE, {}, {}, False),
        ({}, CUT_OFF, {}, {}, False),
        ({}, {}, {"verdict": "evicted"}, {}, False),
        ({}, {}, {}, STARTED, False),
    ],
)
def test_when_clients_go_on(verify: t.Any, teardown: t.Any, node: t.Any, launch: t.Any, go_on: bool) -> None:
    assert going_back.clients_go_on(verify, teardown, node, launch) is go_on


@pytest.mark.parametrize(
    ("result", "renewal", "words"),
    [
        ({"lease": {"run_id": "a", "name": "chat"}}, False, ""),
        ({"lease": {"run_id": "a", "name": "chat"}, "changed": True}, False, ""),
        ({"lease": {"run_id": "a", "name": "chat"}, "changed": True}, True, "no longer ours"),
        ({"lease": {"run_id": "b", "name": "chat"}}, True, "no longer ours"),
        ({"lease": None, "msg": "run b works on it"}, False, "run b works on it"),
        ({"lease": None, "msg": "run b works on it"}, True, "run b works on it"),
        ({"msg": "Timed out"}, True, ""),
        ({"msg": "Timed out"}, False, "Timed out"),
        (UNREACHABLE, True, ""),
        (UNREACHABLE, False, "unreachable"),
        ({}, False, "it did not run"),
        (LOST, True, "no longer ours"),
    ],
)
def test_why_a_run_has_no_lease(result: dict[str, t.Any], renewal: bool, words: str) -> None:
    problem = runs.lease_problem(result, "a", renewal)
    assert (problem == "") is (words == "")
    assert words in problem


def test_a_start_that_hangs_is_told_with_its_evidence() -> None:
    verify = {
        "ready": False, "verdict": "hung", "phase": "kv_cache", "error": "no progress for 181 s",
        "phases": [{"name": "imports", "seconds": 12.0}, {"name": "weights", "seconds": 84.0, "percent": 62}],
        "evidence": {
            "processes": [
                {"pid": 812, "title": "sglang::scheduler", "state": "R", "cpu_percent": 99.0, "wchan": None,
                 "stack": ["frame one", "frame two"], "stack_source": "py-spy"},
                {"pid": 813, "title": "sglang::detokenizer", "state": "S", "stack": [],
                 "stack_problem": "no permission"},
            ],
            "gpus": [{"index": 0, "used_mib": 20000, "total_mib": 143771}],
            "memory": {"available_mib": 8000, "cgroup_oom_kills": 1},
        },
        "proof": {"problems": ["no progress for 181 s", "GPU 1 is not in use"]},
        "log_tail": [f"line {number}" for number in range(20)],
    }  # fmt: skip
    text = "\n".join(serve_report.proof_lines(verify))
    for words in (
        "not serving: hung in phase 'kv_cache': no progress for 181 s",
        "also: GPU 1 is not in use",
        "pid 812 sglang::scheduler: state R, 99.0 % CPU, stack (py-spy): frame one; frame two",
        "no stack: no permission",
        "GPU 0 20,000 of 143,771 MiB in use; 8,000 MiB of host memory available; 1 processes killed",
        "phases: imports 12 s, weights 84 s (62 %)",
        "| line 19",
    ):
        assert words in " ".join(text.split()), text
    assert "line 9\n" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_proof_is_told_with_all_that_it_found() -> None:
    verify = {
        "ready": True, "pid": 9, "port": 30000, "tokens": [], "tools": {"verdict": "called"},
        "workers": {"expected": 2, "schedulers": 2},
        "gpus_used": [{"gpu": "GPU-a", "index": 0, "used": True, "strangers": ["pid 7 (python)"]},
                      {"gpu": "GPU-b", "index": 1, "used": None}],
        "flags_differ": {"matches": True, "differences": [], "resolved": [
            {"item": "attention_backend", "wanted": "auto", "found": "fa3"}]},
        "soak": {"requests": 8, "failed": 0, "concurrency": 4, "tokens_per_s": 1450.25,
                 "latency_s": {"p50": 0.1, "p95": 0.2, "max": 0.3}},
        "proof": {"warnings": ["the model answered in words"]},
    }  # fmt: skip
    text = "\n".join(serve_report.proof_lines(verify))
    for words in (
        "tool calls called",
        "ranks: 2 of 2 schedulers live; GPUs in use 0, not visible 1",
        "warning: GPU 0 is also held by pid 7 (python)",
        "set by SGLang: attention_backend: wanted auto, runs with fa3",
        "load: 8 requests, 4 at a time: 0 failed, 1,450.2 tokens/s, latency 0.1 s, 95 % within 0.2 s",
        "warning: the model answered in words",
    ):
        assert words in " ".join(text.split()), text


def test_history_names_broken_entries_and_servers_that_do_not_run() -> None:
    launches: list[dict[str, t.Any]] = [
        {"launch_id": f"20260131T00000{number}Z-1a2b", "verdict": "ready", "config_hash": "sha256:0123456789"}
        for number in range(9)
    ]
    launches[0].update(current=True, last_good=True, seconds_to_ready=63.0, tokens_per_s=1450.0, operator="anna")
    launches[1].update(problem="record.json is no JSON")
    launches += launches[2:5]
    lines = inspect_report.history_lines({"servers": [], "records": [{"name": "chat", "launches": launches}]})
    assert lines[0] == "Launches of chat (the newest 10 of 12)"
    text = "\n".join(lines)
    for words in ("current good", "01234567 ready", "1,450.0", "anna", "broken", "record.json is no JSON"):
        assert words in " ".join(text.split()), text
    assert max(map(len, lines)) <= 100
    assert inspect_report.history_lines({"servers": [{"name": "chat", "launches": []}]}) == []
