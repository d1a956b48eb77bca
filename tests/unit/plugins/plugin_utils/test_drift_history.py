# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The history: a line a run, a day a line after a week, bounded after years, whatever was killed in between."""

from __future__ import annotations

import json
import typing as t

import jsonschema
import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import drift_history
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_document import iso
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_history import Limits
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.unit.drift_builders import (
    NOW,
    answer,
    document,
    event,
    ok,
    row,
    server,
)

DAY = 86400
SCHEMA = json.loads((ROOT / "docs" / "drift.schema.json").read_text())
LINE_SCHEMA = {"$defs": SCHEMA["$defs"], **SCHEMA["$defs"]["history_line"]}
LIMITS = Limits(400, 64)


def line(at: float, **hosts: str) -> bytes:
    entries = {name: {"verdict": verdict} for name, verdict in hosts.items()}
    return drift_history.dump(
        {
            "v": 1,
            "at": iso(at),
            "run": f"r{at:.0f}",
            "verdict": "in_sync",
            "status": "successful",
            "seconds": 1.5,
            "hosts": entries,
        }
    )


def parsed(lines: t.Iterable[bytes]) -> list[dict[str, t.Any]]:
    found = [json.loads(each) for each in lines]
    for each in found:
        jsonschema.Draft202012Validator(LINE_SCHEMA).validate(each)
    return found


def test_a_line_tells_of_this_run_s_hosts_only() -> None:
    before = document(ok("a", answer()), ok("b", answer()), expected=["a", "b"])
    drifted = answer([server("chat", [row("user"), row("x", state="unknown")])], [row("leftovers", None)])
    events = (ok("b", drifted), event("runner_on_unreachable", "c", {"msg": "no route"}))
    found = document(*events, expected=["b", "c"], previous=before, limit="b,c")
    (written,) = parsed([drift_history.dump(drift_history.line_of(found))])
    assert written["hosts"] == {
        "b": {"verdict": "drifted", "critical": 2, "unknown": 1, "items": ["chat/user", "chat/x", "leftovers"]},
        "c": {"verdict": "unknown", "unknown": 1, "why": "unreachable (no route)"},
    }


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"v": 1, "at": "2026-01-01T00:00:00Z", "hosts": {"a": {"verdict": "dr',
        b'{"v": 2, "at": "2026-01-01T00:00:00Z", "hosts": {}}',
        b'{"v": 1, "at": "yesterday", "hosts": {}}',
        b'{"v": 1, "at": "2026-01-01T00:00:00Z", "hosts": {"a": {"verdict": "fine"}}}',
        b'{"v": 1, "at": "2026-01-01T00:00:00Z", "hosts": {"a": []}}',
        b"[1]",
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_line_that_is_none_is_skipped(raw: bytes) -> None:
    assert drift_history.parse(raw) is None
    good = line(NOW, a="in_sync")
    assert drift_history.compact([raw, good], NOW, LIMITS) == [good]
    assert drift_history.of_hosts([raw, good], ["a"], NOW, 3, 5)["a"].days == [None, None, "in_sync"]


def test_days_become_a_line_each_after_a_week_with_each_host_s_worst() -> None:
    old = NOW - 20 * DAY
    lines = [
        line(old, a="in_sync", b="in_sync"),
        line(old + 60, a="drifted"),
        line(old + 120, a="unknown", b="unknown", c="in_sync"),
        line(old + DAY, a="in_sync"),
        *(line(NOW - age * DAY, a="in_sync") for age in (6, 5, 4, 2, 1)),
        line(NOW - 3 * DAY, a="in_sync"),
        line(NOW - 3 * DAY + 60, a="drifted"),
    ]
    found = parsed(drift_history.compact(lines, NOW, LIMITS))
    assert [each.get("runs") for each in found] == [3, 1, *[None] * 7]
    assert found[0]["hosts"] == {"a": {"verdict": "drifted"}, "b": {"verdict": "unknown"}, "c": {"verdict": "in_sync"}}
    assert found[0]["verdict"] == "unknown"
    # Once more changes nothing.
    again = drift_history.compact(drift_history.compact(lines, NOW, LIMITS), NOW, LIMITS)
    assert parsed(again) == found


def test_what_is_older_than_the_days_to_keep_goes() -> None:
    lines = [line(NOW - age * DAY, a="in_sync") for age in range(20, 0, -1)]
    found = parsed(drift_history.compact(lines, NOW, Limits(10, 64)))
    assert [each["at"] for each in found] == [iso(NOW - age * DAY) for age in range(9, 0, -1)]


def test_a_clock_that_is_wrong_makes_nothing_old() -> None:
    """800 days ahead for a run, or for some on two days, or back by as much, and right again."""
    lines = [line(NOW - age * DAY, a="in_sync") for age in range(30, 0, -1)]
    for jump in (800 * DAY, -800 * DAY):
        kept = drift_history.compact(lines, NOW + jump, LIMITS)
        assert [each["at"] for each in parsed(kept)] == [json.loads(each)["at"] for each in lines]
        for moment in (NOW + jump, NOW + jump + DAY, NOW, NOW + DAY):
            kept = [*drift_history.compact(kept, moment, LIMITS), line(moment, a="in_sync")]
        assert len(kept) == len(lines) + 4


def test_a_file_that_is_too_large_loses_its_oldest_lines() -> None:
    lines = [line(NOW - 3600 * (100 - age), **{f"h{number}": "in_sync" for number in range(100)}) for age in range(100)]
    limits = Limits(400, 0.1)
    kept = drift_history.compact(lines, NOW, limits)
    assert sum(map(len, kept)) <= limits.size and kept[-1] == lines[-1]
    assert drift_history.needs_compaction(lines[0], lines[-1], limits.size + 1, NOW, limits)
    # One line alone stays however large it is: the newest is never lost.
    assert drift_history.compact(lines[:1], NOW, Limits(400, 0.0001)) == lines[:1]


def test_it_is_compacted_once_a_day() -> None:
    morning = NOW // DAY * DAY + 3600
    first, last = line(morning - 30 * DAY, a="in_sync"), line(morning, a="in_sync")
    assert not drift_history.needs_compaction(first, last, 1000, morning + 7200, LIMITS)
    assert drift_history.needs_compaction(first, last, 1000, morning + DAY, LIMITS)
    assert not drift_history.needs_compaction(None, None, 0, morning, LIMITS)


def test_the_history_of_a_host_for_the_page() -> None:
    lines = [
        line(NOW - 100 * DAY, a="unknown"),
        line(NOW - 2 * DAY, a="in_sync"),
        line(NOW - 2 * DAY + 60, a="drifted"),
        line(NOW - 2 * DAY + 120, a="in_sync", b="in_sync"),
        line(NOW, a="unknown", gone="drifted"),
    ]
    found = drift_history.of_hosts(reversed(lines), ["a", "b"], NOW, 4, 3)
    assert found["a"].days == [None, "drifted", None, "unknown"]
    assert [turn.verdict for turn in found["a"].turns] == ["drifted", "in_sync", "unknown"]
    assert found["b"].days == [None, "in_sync", None, None]
    assert set(found) == {"a", "b"}
