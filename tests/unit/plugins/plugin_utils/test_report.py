# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Summaries say no more than the results do."""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import evict_report, inspect_report, report, results
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.tables import Column, cell, duration, paragraph, table

TEARDOWN: dict[str, t.Any] = {
    "verdict": "evicted",
    "before": [{"index": 0, "used_mib": 76109, "holders": [{"pid": 4790, "title": "sglang::scheduler_TP0"}]}],
    "after": [{"index": 0, "used_mib": 0, "holders": []}],
    "rungs": [{"rung": "term", "asked": [{"pid": 4711}], "left": [4711], "stayed": [], "seconds": 7.25}],
    "ended": [{"pid": 4711, "title": "python -m sglang.launch_server", "rung": "term"}],
    "spared": [{"pid": 900, "title": "nvidia-persistenced", "why": "GPU service"}],
    "leftovers": {"removed": ["sglang_loads_x.shm"], "kept": [{"path": "/dev/shm/psm_1", "why": "made by any Python"}]},
    "reasons": [],
    "seconds": 9.9,
}
CLEAN: dict[str, t.Any] = {
    "verdict": "clean",
    "summary": "clean: 1 GPU free",
    "reasons": [],
    "vantage": "host",
    "seconds": 2.0,
}
LAUNCH: dict[str, t.Any] = {"launch_id": "20260131T235959Z-1a2b", "pid": 5000, "config_hash": "sha256:9f86d081884c7d65"}
READY: dict[str, t.Any] = {
    "ready": True,
    "verdict": "ready",
    "pid": 5000,
    "port": 30000,
    "tokens": [{"dp_rank": 0, "count": 4, "seconds": 0.2}],
    "reasoning": {"verdict": "separated"},
    "headroom_mib": 6656,
}
WHOLE = {
    "host": "gpu01",
    "server": "chat",
    "teardown": TEARDOWN,
    "clean": CLEAN,
    "launch": LAUNCH,
    "verify": READY,
    "total_s": 60,
}


def relaunch(**changes: t.Any) -> str:
    return "\n".join(report.relaunch_lines({**WHOLE, **changes}))


def test_a_whole_relaunch() -> None:
    text = relaunch()
    for words in (
        "chat on gpu01: SERVING",
        "76,109",
        "pid 4790 sglang::scheduler_TP0",
        "ended: pid 4711 python -m sglang.launch_server (rung term)",
        "left alone: pid 900 nvidia-persistenced: GPU service",
        "removed: sglang_loads_x.shm",
        "kept: /dev/shm/psm_1: made by any Python",
        "launch 20260131T235959Z-1a2b, pid 5000",
        "4 tokens from DP rank 0 in 0.2 s, reasoning separated,",
        "GPU headroom 6,656 MiB",
        "total 60.0 s",
    ):
        assert words in text, text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"verify": {}}, "FAILED: it was started, not proved"),
        ({"verify": {"skipped": True}}, "FAILED: it was started, not proved"),
        ({"verify": {"msg": "Timed out"}}, "FAILED: it does not serve"),
        ({"verify": {"ready": "true"}}, "FAILED: it does not serve"),
        ({"verify": {}, "launch": {"msg": "no such user"}}, "FAILED: it was not started"),
        (
            {"verify": {}, "launch": {"msg": "Module result deserialization failed: No start of json char found"}},
            "FAILED: broken off in the start; whether it was started is not known",
        ),
        (
            {"verify": {}, "launch": {"msg": "deserialization failed: No start of json", "module_stderr": "bad"}},
            "FAILED: it was not started",
        ),
        ({"verify": {}, "launch": {}}, "FAILED: broken off before the start"),
        ({"verify": {}, "launch": {}, "clean": {"verdict": "unknown"}}, "FAILED: not clean (unknown)"),
        ({"verify": {}, "launch": {}, "clean": {"msg": "Timed out"}}, "FAILED: not clean (unknown)"),
        ({"verify": {}, "launch": {}, "clean": {}}, "FAILED: the eviction did not succeed"),
        ({"verify": {}, "launch": {}, "clean": {}, "teardown": {}}, "FAILED: nothing was done"),
    ],
)
def test_only_proof_is_serving(changes: dict[str, t.Any], outcome: str) -> None:
    assert relaunch(**changes).splitlines()[0] == f"chat on gpu01: {outcome}"


def test_a_verdict_comes_with_its_reasons_and_warnings() -> None:
    dirty = {
        "verdict": "dirty",
        "vantage": "container",
        "simulated": True,
        "reasons": [{"code": "held_elsewhere", "message": "GPU 0 has 602 MiB in use"}],
        "warnings_found": [{"code": "throttled", "message": "GPU 1 is throttled"}],
    }
    lines = evict_report.verdict_lines(dirty)
    assert lines[0] == "Verdict   dirty (seen from the container, GPUs SIMULATED)"
    assert "- GPU 0 has 602 MiB in use [held_elsewhere]" in lines[1]
    assert "warning: GPU 1 is throttled [throttled]" in lines[2]
    assert "no verdict: Timed out" in evict_report.verdict_lines({"msg": "Timed out"})[0]


def test_a_figure_that_could_not_be_read_is_unknown_not_zero() -> None:
    teardown = {**TEARDOWN, "after": [{"index": 0, "used_mib": None}]}
    assert "unknown" in evict_report.gpu_lines(teardown, {})[1]
    info = {"gpus": None, "problems": [{"message": "Driver Not Loaded"}]}
    assert "GPUs unknown: Driver Not Loaded" in inspect_report.inspect_lines({"host": "h", "gpu_info": info})[0]
    assert any(line.startswith("RAM: unknown") for line in inspect_report.inspect_lines({"host": "h"}))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"msg": "/bin/sh: 1: sudo: not found"}, "there is no sudo"),
        ({"msg": "Missing sudo password"}, "no permission to become root"),
        ({"unreachable": True, "msg": "Connection refused"}, "unreachable: Connection refused"),
        (
            {"rc": 127, "module_stderr": "/usr/bin/python9: not found"},
            "the Python interpreter for Ansible's modules is missing",
        ),
        ({"msg": "sudo: a password is required"}, "no permission to become root"),
        ({"msg": "The module interpreter '/x' was not found."}, "the Python interpreter for Ansible's modules"),
        ({"msg": "python: /x is no interpreter"}, "python: /x is no interpreter"),
        ({"msg": "ssl_keyfile_password is required"}, "ssl_keyfile_password is required"),
        ({"msg": "GPU 9 is not there"}, "GPU 9 is not there"),
        ({}, "it did not run"),
        ({"failed": True}, "it failed without a message"),
    ],
)
def test_failures_in_words(result: dict[str, t.Any], words: str) -> None:
    assert results.failure(result).startswith(words)


def test_tables() -> None:
    lines = table(
        [Column("A"), Column("Number", right=True), Column("Text", 10)],
        [["x", 1200, "one two three"], ["yy", None, ""]],
    )
    assert lines == ["A    Number  Text", "x     1,200  one two", "             three", "yy  unknown"]
    assert cell([1, None, True]) == "1, unknown, yes"
    assert paragraph("one two three", "label: ", width=14) == ["label: one two", "       three"]
    assert [duration(value) for value in (None, 59, 3599, 86399, 90000)] == [
        "unknown", "59 s", "59 min 59 s", "23 h 59 min", "1 d 1 h",
    ]  # fmt: skip


BY_NODE: dict[str, t.Any] = {
    "verdict": "failed",
    "rungs": [
        {"rung": "stop", "asked": [], "left": [], "stayed": [], "seconds": 20.0, "note": "pct exec 129 hung for 20 s"},
        {
            "rung": "kill",
            "asked": [{"pid": 21352}],
            "left": [],
            "stayed": [
                {"pid": 21352, "inner_pid": 2604, "title": "sglang::scheduler_TP0", "why": "state D in fuse_wait"}
            ],
            "seconds": 0.2,
        },
    ],
    "ended": [{"pid": 21353, "inner_pid": 2605, "title": "sglang::detokenizer", "rung": "kill"}],
    "reasons": [{"code": "container_stop_unconfirmed", "message": "container 129 is not stopped: nobody confirmed it"}],
    "container": {"vmid": "129", "state": "broken", "problems": [{"message": "no init"}]},
    "seconds": 21.0,
}


def test_what_the_node_did_is_shown_with_its_seconds_who_stayed_and_what_blocks() -> None:
    text = relaunch(teardown_host=BY_NODE, node="pve1", verify={}, launch={}, clean={})
    for words in (
        "FAILED: the eviction did not succeed",
        "Escalated node pve1: stop 20.0 s, kill 0.2 s; failed, 21.0 s",
        "state: container 129 is broken",
        "problem: no init",
        "pid 21352 (2604 inside) sglang::scheduler_TP0: state D",
        "stop: pct exec 129 hung for 20 s",
        "ended: pid 21353 (2605 inside) sglang::detokenizer (rung kill)",
        "- container 129 is not stopped: nobody confirmed it [container_stop_unconfirmed]",
        "node 21.0 s",
    ):
        assert words in text, text
    assert max(map(len, text.splitlines())) <= 100
    assert text.index("Evicted") < text.index("Escalated") < text.index("Verdict")


def test_nothing_is_said_of_a_node_that_did_not_act() -> None:
    for nothing in ({}, {"skipped": True}):
        text = relaunch(teardown_host=nothing, node="pve1")
        assert "pve1" not in text
        assert text == relaunch()


def test_a_node_that_failed_without_a_report_is_named() -> None:
    lines = evict_report.node_lines({"failed": True, "msg": "Timed out after 900 second(s)."}, "pve1")
    assert lines == ["Escalated node pve1: Timed out after 900 second(s)."]


def test_a_joint_verdict_shows_each_view_and_says_from_where_a_reason_is() -> None:
    joint: dict[str, t.Any] = {
        "verdict": "dirty",
        "reasons": [{"code": "held", "message": "GPU 0 is held", "seen_from": "node pve1"}],
        "views": {
            "container": {"where": "inside ct129", "verdict": "clean", "available_mib": 80000},
            "host": {"where": "node pve1", "verdict": "dirty", "available_mib": None},
        },
    }
    lines = [line.strip() for line in evict_report.verdict_lines(joint)]
    assert lines == [
        "Verdict   dirty",
        "inside ct129: clean, 80,000 MiB of host memory available",
        "node pve1: dirty",
        "- GPU 0 is held [held] (seen from node pve1)",
    ]
    joint["views"]["container"]["verdict"] = None
    assert any("inside ct129: no view" in line for line in evict_report.verdict_lines(joint))
    assert results.why(joint) == "GPU 0 is held [held] (seen from node pve1)"


def test_check_mode_shows_the_nodes_plan_below_the_containers() -> None:
    plan = {"verdict": "planned", "plan": [{"rung": "term", "targets": ["pid 7 inside"]}]}
    by_node = {**plan, "plan": [{"rung": "kill", "targets": ["pid 21352 outside"]}], "reasons": BY_NODE["reasons"]}
    for text in (
        relaunch(check=True, teardown=plan, teardown_host=by_node, node="pve1"),
        "\n".join(report.teardown_lines({"check": True, "teardown": plan, "teardown_host": by_node, "node": "pve1"})),
    ):
        assert text.index("pid 7 inside") < text.index("then, by node pve1") < text.index("pid 21352 outside"), text
        assert "- container 129 is not stopped" in text
    nobody = {"verdict": "nothing_to_do", "plan": []}
    ends = relaunch(check=True, teardown=nobody, teardown_host=nobody, node="pve1", clean={"verdict": "dirty"})
    assert "end here and start nothing" in ends
    goes_on = relaunch(check=True, teardown=nobody, teardown_host=by_node, node="pve1", clean={"verdict": "dirty"})
    assert "end here" not in goes_on


def test_a_teardown_by_the_node_alone_shows_its_gpus() -> None:
    unreachable = {"unreachable": True, "msg": "Connection refused"}
    by_node = {**TEARDOWN, "container": {"vmid": "129", "state": "running"}}
    lines = report.teardown_lines(
        {"host": "ct129", "server": "chat", "teardown": unreachable, "teardown_host": by_node, "node": "pve1"}
    )
    text = "\n".join(lines)
    for words in (
        "76,109",
        "Evicted   unreachable: Connection refused",
        "Escalated node pve1: term 7.2 s; evicted, 9.9 s",
    ):
        assert words in text, text


def test_a_container_is_shown_from_its_node_as_well() -> None:
    """Also with nobody inside to ask: then by its node alone."""
    holder = {"pid": 21352, "inner_pid": 2604, "title": "sglang::scheduler_TP0", "evidence": ["mapped"]}
    gpu = {"index": 4, "name": "H200", "memory": {"used_mib": 602, "total_mib": 143771}, "holders": [holder]}
    stuck = {"pid": 21360, "state": "D", "wchan": "fuse_wait"}
    by_node = {"gpus": [gpu], "container": {"vmid": "129", "state": "broken", "stuck": [stuck], "problems": []}}
    inside: dict[str, t.Any] = {"gpus": [], "problems": []}
    results = {"host": "ct129", "node": "pve1", "node_info": by_node}
    both = "\n".join(inspect_report.inspect_lines({**results, "gpu_info": inside}))
    alone = "\n".join(inspect_report.inspect_lines({**results, "gpu_info": {"skipped": True}}))
    for text in (both, alone):
        for words in ("ct129 seen from node pve1: 1 GPUs", "21352 (2604 inside)", "container 129 is broken", "21360"):
            assert words in text, text
        assert "SIGKILL does not end it (state D, waits in fuse_wait)" in text
    assert "RAM: " in both
    assert "RAM: " not in alone
    assert "ct129: it can't be reached" in alone
    skipped = inspect_report.inspect_lines({"host": "h", "node_info": {"skipped": True}})
    assert skipped == inspect_report.inspect_lines({"host": "h"})
