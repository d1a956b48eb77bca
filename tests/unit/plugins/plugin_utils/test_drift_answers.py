# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Events in, one answer for each host out: nobody is silent, and an answer is never better than its rows."""

from __future__ import annotations

import json
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import drift_answers
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_answers import Collector
from ansible_collections.cleanslate.sglang.tests.unit.drift_builders import (
    answer,
    collected,
    event,
    gpu,
    ok,
    row,
    server,
)

SSH = {"unreachable": True, "msg": "Failed to connect to the host via ssh"}


def states(collector: Collector, *expected: str) -> dict[str, tuple[str, str | None]]:
    return {host.name: (host.state, host.problem) for host in collector.hosts(expected)}


def test_each_expected_host_has_a_state() -> None:
    collector = collected(
        ok("a", answer([server()])),
        event("runner_on_unreachable", "b", SSH),
        event("runner_on_failed", "c", {"msg": "servers[0] has no name."}),
        {"event": "playbook_on_stats", "event_data": {"ok": {"a": 1}}},
    )
    assert states(collector, "a", "b", "c", "d") == {
        "a": ("answered", None),
        "b": ("unreachable", "Failed to connect to the host via ssh"),
        "c": ("failed", "servers[0] has no name."),
        "d": ("no_answer", "it gave no answer"),
    }
    assert collector.finished


def test_a_failure_after_the_answer_is_the_playbook_judging_it() -> None:
    judged = event("runner_on_failed", "a", {"msg": "a is drifted"}, action="ansible.builtin.fail")
    assert states(collected(ok("a", answer([server(drift=[row("user")])])), judged), "a")["a"] == ("answered", None)


def test_the_first_failure_is_the_reason() -> None:
    first = event("runner_on_failed", "a", {"msg": "not checked: port is missing"}, action="ansible.builtin.fail")
    second = event("runner_on_failed", "a", {"msg": "a is unknown"}, action="ansible.builtin.fail")
    assert states(collected(first, second), "a")["a"] == ("failed", "not checked: port is missing")


def test_an_ignored_failure_counts_only_where_it_is_the_module_s() -> None:
    elsewhere = event("runner_on_failed", "a", {"msg": "no"}, action="ansible.builtin.stat", ignore_errors=True)
    assert states(collected(elsewhere), "a")["a"][0] == "no_answer"
    module = event("runner_on_failed", "a", {"msg": "Timed out"}, ignore_errors=True)
    assert states(collected(module), "a")["a"] == ("failed", "Timed out")


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (None, "its answer has no verdict"),
        ({"censored": "the output has been hidden"}, "its answer was hidden by no_log"),
        ({"verdict": "fine"}, "its answer has no verdict"),
        ({"verdict": "in_sync"}, "its answer names neither servers nor the host"),
        ({"verdict": "in_sync", "servers": "none", "host": {}}, "its answer names neither servers nor the host"),
    ],
)
def test_what_is_no_answer_is_never_in_sync(result: t.Any, why: str) -> None:
    assert states(collected(ok("a", result)), "a")["a"] == ("failed", why)


def test_a_handler_never_raises_and_always_keeps_the_event() -> None:
    hostile: list[t.Any] = [
        {},
        {"event": "runner_on_ok"},
        {"event": "runner_on_ok", "event_data": None},
        {"event": "runner_on_ok", "event_data": {"host": ["x"]}},
        ok("a", {**answer(), "servers": [{"name": {"x": 1}, "drift": [{"item": ["x"], "severity": [], "also": 3}]}]}),
        ok("b", {**answer(), "host": {"gpus": [{"holders": "x"}, 3], "memory": 3, "drift": 5}}),
        event("runner_on_failed", "c", 3),
    ]
    collector = Collector()
    assert [collector.take(each) for each in hostile] == [True] * len(hostile)
    assert {name: state for name, (state, _why) in states(collector, "c").items()} == {
        "a": "answered",
        "b": "answered",
        "c": "failed",
    }


def test_a_verdict_is_never_better_than_its_rows() -> None:
    lying = {**answer([server(drift=[row("user")], verdict="in_sync")]), "verdict": "in_sync"}
    (host,) = collected(ok("a", lying)).hosts(["a"])
    assert host.answer is not None
    assert (host.answer["verdict"], host.answer["servers"][0]["verdict"]) == ("drifted", "drifted")
    unseen = {**answer([], [row("gpu_count", None, state="unknown", severity="warning")]), "verdict": "in_sync"}
    (host,) = collected(ok("a", unseen)).hosts(["a"])
    assert host.answer is not None and host.answer["verdict"] == "unknown"


def test_a_note_changes_no_verdict() -> None:
    (host,) = collected(ok("a", answer([server(drift=[row("sglang_version", severity="note")])]))).hosts(["a"])
    assert host.answer is not None and host.answer["verdict"] == "in_sync"


def test_values_are_bounded() -> None:
    deep: t.Any = "x"
    for _level in range(5000):
        deep = [deep]
    raw = answer(
        [server(drift=[row("a", wanted="x" * 100_000, found=deep), row("b", wanted=list(range(1000)), found=10**400)])],
        [row(f"holder:{pid}", None) for pid in range(1000)],
        gpus=500,
    )
    (host,) = collected(ok("a", raw)).hosts(["a"])
    assert host.answer is not None
    text = json.dumps(host.answer, allow_nan=False)
    assert len(text) < 200_000
    first, second = host.answer["servers"][0]["drift"]
    assert first["wanted"].endswith("(cut)") and len(first["wanted"]) == drift_answers.TEXT_LIMIT
    assert second["wanted"][-1] == "936 more" and second["found"] == "a huge number"
    rows = host.answer["host"]["drift"]
    assert len(rows) == drift_answers.ROW_LIMIT + 1 and rows[-1]["found"] == "800 more rows"


def test_numbers_that_json_has_not_are_null() -> None:
    raw = answer([server(uptime_s=float("nan"), pid=True)], seconds=float("inf"))
    raw["host"]["gpus"] = [gpu(0, None), gpu(1, 10**40)]
    (host,) = collected(ok("a", raw)).hosts(["a"])
    assert host.answer is not None
    assert (host.answer["servers"][0]["uptime_s"], host.answer["servers"][0]["pid"]) == (None, None)
    assert host.answer["seconds"] is None
    assert [each["used_mib"] for each in host.answer["host"]["gpus"]] == [None, None]


def test_texts_are_printable() -> None:
    assert drift_answers.text("a\x00b\x1b[31mc\ud800d\uffff\te") == "a\ufffdb\ufffd[31mc\ufffdd\ufffd\te"


def test_secrets_are_masked_once_more() -> None:
    rows = [
        row("a", wanted={"api_key": "sk-secret-1", "x": ["--admin-api-key", "sk-secret-2"]}),
        row("b", found="python -m sglang.launch_server --api-key sk-secret-3", remedy="HF_TOKEN=sk-secret-4 run it"),
        row("c", found=["--ssl-keyfile-password", "sk-secret-5"], reason="password: sk-secret-6"),
    ]
    (host,) = collected(ok("a", answer([server(drift=rows)]))).hosts(["a"])
    assert "sk-secret" not in json.dumps(host.answer)
    failed = event("runner_on_failed", "b", {"msg": "bad: {'api_key': 'sk-secret-7'}"})
    assert "sk-secret" not in str(collected(failed).hosts(["b"]))


def test_the_reason_of_a_module_that_died_is_its_last_words() -> None:
    result = {"msg": "MODULE FAILURE\nSee stdout/stderr", "module_stderr": "Traceback\n  x\nMemoryError: too much\n"}
    assert drift_answers.failure_text(result) == "MODULE FAILURE See stdout/stderr: MemoryError: too much"
    assert drift_answers.failure_text({}) == "it failed without a reason"
