# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is said of a rollout: of each server, as data, as a table, as a page."""

from __future__ import annotations

import html.parser
import json
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import rollout_report
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.rollout_report import unit_result

READY = {"ready": True, "verdict": "ready", "seconds": 5.0, "tokens": [{"count": 4}], "soak": {"tokens_per_s": 90.0}}
FAILED = {"ready": False, "verdict": "failed", "error": "no such model"}
STARTED = {"launch_id": "new", "config_hash": "sha256:b", "pid": 9}
EVICTED = {"verdict": "evicted", "drain": {"in_flight_before": 3, "in_flight_after": 1, "cut_off": 1, "other": 0}}
PATH = {"teardown": EVICTED, "launch": STARTED, "verify": READY}
FIRST = {**PATH, "verify": FAILED}
UNREACHABLE = {"unreachable": True, "msg": "Connection timed out"}


def test_one_that_is_changed() -> None:
    row = unit_result({**PATH, "gone_at": 100.0, "back_at": "160.25"})
    assert (row["proved"], row["state"], row["serving"], row["error"]) == (True, "changed", True, "")
    assert (row["launch_id"], row["config_hash"], row["down_s"]) == ("new", "sha256:b", 60.2)
    assert row["drain"] == {"in_flight_before": 3, "in_flight_after": 1, "cut_off": 1}
    assert row["proof"]["tokens_per_s"] == 90.0


@pytest.mark.parametrize(
    ("results", "state", "serving"),
    [
        ({"first": FIRST, "second": PATH, "next": {"step": "rollback"}}, "rolled back", True),
        ({"first": FIRST, "second": FIRST, "next": {"step": "rollback"}}, "rollback failed", False),
        ({"first": FIRST, "second": {**PATH, "message": "no"}, "next": {"step": "x"}}, "rollback failed", None),
        ({"first": FIRST, "second": {"next": {"step": "stop"}}, "next": {"step": "x"}}, "rollback failed", False),
        ({"first": FIRST, "next": {"step": "stop"}, "stopped": {"clean": {}}}, "stopped", False),
        ({"first": FIRST, "next": {"step": "leave"}}, "left as it is", False),
        ({"first": {"launch": STARTED, "verify": UNREACHABLE}, "next": {"step": "leave"}}, "left as it is", None),
        ({"first": {"teardown": EVICTED}, "next": {"step": "nothing"}}, "failed", None),
        ({"teardown": EVICTED}, "failed", None),
        ({"first": {}, "next": {"step": "nothing"}}, "not touched", None),
        ({}, "not touched", None),
    ],
)
def test_one_that_is_not(results: dict[str, t.Any], state: str, serving: bool | None) -> None:
    row = unit_result({**results, "error": "it failed", "trial": {"launch_id": "old"}})
    assert (row["proved"], row["state"], row["serving"], row["error"]) == (False, state, serving, "it failed")
    assert row["rolled_back_to"] == ("old" if "second" in results and results["second"] else None)


def test_a_proof_that_was_not_there_is_none() -> None:
    for verify in ({}, {"ready": "yes"}, {"ready": None}, {"skipped": True, "ready": True}):
        assert unit_result({**PATH, "verify": verify})["proved"] is False


def test_an_error_after_the_proof_is_an_error() -> None:
    """It serves; what was noted against it still stops the ramp."""
    row = unit_result({**PATH, "error": "the run broke off"})
    assert (row["proved"], row["state"], row["serving"]) == (False, "changed", True)
    row = unit_result({**PATH, "router_problem": "router east does not answer"})
    assert (row["proved"], row["state"], row["serving"]) == (False, "changed", True)
    assert row["error"] == "it serves, but router east does not answer"


def test_of_the_routers_only_what_became_of_it() -> None:
    seat = {"url": "http://a:1", "before": {"state": "healthy", "entries": [{}]}, "after": {"state": "absent"}}
    answer = {"verdict": "drained", "drained": {"cut": 0}, "problem": "", "seconds": 2.0, "present": False}
    answer["routers"] = [{"name": "east", "workers": [seat], "listed": [{"url": "http://b:1"}]}]
    row = unit_result({**PATH, "router_out": answer, "router_back": {}})
    assert row["router"]["out"] == {
        "verdict": "drained", "drained": {"cut": 0}, "problem": "", "seconds": 2.0,
        "workers": [{"router": "east", "url": "http://a:1", "before": "healthy", "after": "absent"}],
    }  # fmt: skip
    assert row["router"]["back"] == {}


@pytest.mark.parametrize("times", [{}, {"gone_at": 5}, {"back_at": 5}, {"gone_at": 9, "back_at": 5}, {"gone_at": "x"}])
def test_how_long_it_was_down_is_not_guessed(times: dict[str, t.Any]) -> None:
    assert unit_result({**PATH, **times})["down_s"] is None


# --- the whole --------------------------------------------------------------------------------------------------------

PLAN = {
    "batches": [[{"host": "a", "server": "x", "node": "pve1"}], [{"host": "b", "server": "x", "node": ""}]],
    "done": [{"host": "c", "server": "x", "node": ""}],
    "left_out": [{"host": "d", "server": "x", "node": ""}],
    "ramp": [1, "25%"],
    "canary": "a/x",
    "total": 4,
}
SEEN = {
    "old": {"launch_id": "old", "config_hash": "sha256:a"},
    "config_hash": "sha256:b",
    "differences": [{"item": "flag:mem-fraction-static", "old": 0.8, "new": None}],
    "limits": {"baseline": {"tokens_per_s": 100.0}, "note": ""},
    "why": "its configuration differs",
}


def hosts(**results: t.Any) -> dict[str, t.Any]:
    """Per host the result of its server, None for no word; the first batch, or both, were begun."""
    values: dict[str, t.Any] = {host: {"rollout_seen": {"x": SEEN}} for host in "abcd"}
    for host, result in results.items():
        values[host]["rollout_begun"] = "1" if host == "a" else 2
        if result is not None:
            values[host]["rollout_results"] = {"x": result}
    return values


def made(variables: dict[str, t.Any], stopped: t.Sequence[str] = ()) -> dict[str, t.Any]:
    run = {"run_id": "r-1", "operator": "anna", "controller": "ops1"}
    return rollout_report.document(PLAN, variables, run, {"started_at": "then", "ended_at": "now"}, stopped)


def states(report: dict[str, t.Any]) -> dict[str, str]:
    return {row["host"]: row["state"] for row in report["servers"]}


def test_all_is_done() -> None:
    report = made(hosts(a=unit_result(PATH), b=unit_result(PATH)))
    assert (report["verdict"], report["begun"]) == ("done", 2)
    assert states(report) == {"c": "as wanted", "d": "left out", "a": "changed", "b": "changed"}
    assert rollout_report.why_stopped(report) == ""
    assert rollout_report.report_lines(report)[0] == "Rollout DONE: 1 as wanted, 1 left out, 2 changed"
    json.dumps(report)


def test_what_changes_shows_as_it_is_written() -> None:
    variables = hosts(a=unit_result(PATH))
    changes = [{"item": "flags.mem-fraction-static", "old": 0.52, "new": 0.53}]
    variables["a"]["rollout_seen"] = {"x": {**SEEN, "differences": changes}}
    report = made(variables)
    assert "mem-fraction-static: 0.52 -> 0.53" in " ".join(rollout_report.report_lines(report))
    assert "mem-fraction-static: 0.52 -&gt; 0.53" in rollout_report.report_html(report)


def test_a_failure_and_what_was_not_begun() -> None:
    report = made(hosts(a=unit_result({"first": FIRST, "second": PATH, "error": "no such model; rolled back"})))
    assert (report["verdict"], report["begun"]) == ("stopped", 1)
    assert states(report)["b"] == "not begun"
    why = rollout_report.why_stopped(report)
    assert "stopped in batch 1 of 2: a/x (rolled back): no such model; rolled back" in why
    assert "not begun: b/x" in why
    assert why.endswith("it goes on with what is left")


def test_a_host_without_a_word_is_not_done() -> None:
    report = made(hosts(a=unit_result(PATH), b=None))
    assert (report["verdict"], states(report)["b"]) == ("stopped", "unknown")
    assert "b/x (unknown): there is no word" in rollout_report.why_stopped(report)
    nobody = rollout_report.document(PLAN, {}, {}, {})
    assert (nobody["verdict"], states(nobody)["a"]) == ("stopped", "not begun")


def test_a_reason_to_stop_is_no_success() -> None:
    report = made(hosts(a=unit_result(PATH), b=unit_result(PATH)), ["router east would be empty"])
    assert report["verdict"] == "stopped"
    assert "router east would be empty" in "\n".join(rollout_report.report_lines(report))


def test_what_failed_beside_the_servers_is_told_once_for_all_hosts() -> None:
    good = {"state": "changed", "proved": True}
    variables = hosts(a=good)
    for values in variables.values():
        values["rollout_broke"] = "no such file"
    variables["a"]["rollout_begun"] = 1
    report = made(variables)
    assert report["broken"] == ["it broke off on a, b, c, d: no such file"]
    assert (report["verdict"], states(report)["a"]) == ("stopped", "changed")
    words = "before batch 2 of 2: it broke off on a, b, c, d: no such file; not begun: b/x"
    assert words in rollout_report.why_stopped(report)
    assert "Stopped: it broke off on a, b, c" in "\n".join(rollout_report.report_lines(report))
    assert "it broke off on a" in rollout_report.report_html(report)
    many = {f"h{number}": {"rollout_broke": "no such file"} for number in range(200)}
    assert made({**variables, **many})["broken"] == ["it broke off on a, b, c, d, h0 and 199 others: no such file"]
    variables["b"]["rollout_begun"] = 2
    report = made(variables)
    assert states(report)["b"] == "unknown"
    assert "in batch 2 of 2" in rollout_report.why_stopped(report)
    assert "b/x (unknown): there is no word of what became of it: no such file" in rollout_report.why_stopped(report)


def test_what_a_person_sees() -> None:
    result = unit_result({**PATH, "gone_at": 10, "back_at": 75})
    lines = rollout_report.report_lines(made(hosts(a=result, b=result)))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 120
    row = next(line for line in lines if "a/x" in line)
    for words in ("changed", "a -> b", "65.0", "1", "90.0 (was 100.0)"):
        assert words in row, row
    assert "Change: flag:mem-fraction-static: 0.8 -> not set (a/x, b/x)" in text


def test_what_was_put_back_is_told() -> None:
    variables = hosts(a=unit_result(PATH), b=unit_result(PATH))
    variables["c"]["rollout_restored"] = {"x": {"back": True, "why": ""}}
    variables["b"]["rollout_restored"] = {"x": {"back": False, "why": "it is not proved to serve"}}
    text = "\n".join(rollout_report.report_lines(made(variables)))
    assert "c/x: put back into its routers" in text
    assert "b/x: not in its routers: it is not proved to serve" in text


class Page(html.parser.HTMLParser):
    """The tags of a page, and whether each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, _attrs: t.Any) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_nothing_in_it_is_markup() -> None:
    evil = '<script>alert("x")</script>'
    variables = hosts(a={**unit_result({"error": evil}), "state": evil}, b=unit_result(PATH))
    variables["b"]["rollout_seen"] = {"x": {**SEEN, "differences": [{"item": evil, "old": evil, "new": [evil]}]}}
    text = rollout_report.report_html(made(variables, [evil]))
    page = Page()
    page.feed(text)
    assert page.open == []
    assert "script" not in page.tags
    assert page.tags.count("tr") == 5
    assert "&lt;script&gt;" in text


def test_no_secret_is_in_it() -> None:
    values = {
        "sglang_server_defaults": {"secret_environment": {"HF_TOKEN": "hf_abcdef"}},
        "sglang_servers": [{"name": "x", "api_key": "sk-1234"}, {"api_key": "ab", "admin_api_key": None}, 5],
    }
    secrets = rollout_report.secrets_of(values)
    assert sorted(secrets) == ["hf_abcdef", "hf_abcdef", "sk-1234"]
    row = unit_result({**PATH, "error": "bad key sk-1234, and hf_abcdef"})
    shown = json.dumps(rollout_report.without_secrets(made(hosts(a=row, b=row)), secrets))
    assert "sk-1234" not in shown
    assert "hf_abcdef" not in shown
    assert "bad key ***" in shown


# --- before -----------------------------------------------------------------------------------------------------------


def test_the_batches_before_they_begin() -> None:
    lines = rollout_report.plan_lines(PLAN, hosts())
    text = "\n".join(lines)
    assert lines[0] == "2 servers in 2 batches, ramp 1, 25%"
    assert [line.split()[:3] for line in lines[2:4]] == [["1", "a/x", "pve1"], ["2", "b/x", "-"]]
    assert "its configuration differs" in text
    assert "As wanted: c/x" in text
    assert "Left out: d/x" in text


def test_nothing_to_do() -> None:
    lines = rollout_report.plan_lines({**PLAN, "batches": []}, {})
    assert lines == ["Nothing to do: 1 of 4 servers are as wanted"]


# --- servers over several hosts ---------------------------------------------------------------------------------------

BIG = "big over a, b"


def big_row(host: str, slot: int = 0) -> dict[str, t.Any]:
    return {"host": host, "server": "big", "node": "", "unit": BIG, "slot": slot}


def whole(first: dict[str, t.Any] | None, second: dict[str, t.Any] | None) -> dict[str, t.Any]:
    """A report on one server over two hosts, whose parts say this."""
    plan = {"batches": [[big_row("a"), big_row("b")]], "done": [], "left_out": [], "ramp": [1], "total": 1}
    told = {"a": first, "b": second}
    results = {host: {"big": result} if result else {} for host, result in told.items()}
    variables = {host: {"rollout_begun": 1, "rollout_results": result} for host, result in results.items()}
    return rollout_report.document(plan, variables, {}, {})


CHANGED: dict[str, t.Any] = {"state": "changed", "proved": True, "serving": True, "error": ""}
ALONE: dict[str, t.Any] = {**CHANGED, "state": "as wanted"}
BACK: dict[str, t.Any] = {"state": "rolled back", "proved": False, "serving": True, "error": "node 1 failed"}


def part(state: str, serving: bool | None = None, error: str = "it failed") -> dict[str, t.Any]:
    return {"state": state, "proved": False, "serving": serving, "error": error}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (CHANGED, CHANGED, ("changed", "changed")),
        (BACK, BACK, ("rolled back", "rolled back")),
        (BACK, part("rollback failed", False), ("rollback failed", "rollback failed")),
        (part("failed"), BACK, ("failed", "failed")),
        (CHANGED, None, ("unknown", "unknown")),
        (CHANGED, part("left as it is"), ("left as it is", "left as it is")),
        (BACK, part("not touched"), ("failed", "not touched")),
        (part("stopped", False), part("failed"), ("stopped", "failed")),
        (ALONE, CHANGED, ("as wanted", "changed")),
    ],
)
def test_no_part_is_better_than_its_whole(
    first: dict[str, t.Any], second: dict[str, t.Any] | None, expected: tuple[str, str]
) -> None:
    report = whole(first, second)
    rows = report["servers"]
    assert tuple(row["state"] for row in rows) == expected
    good = first in (CHANGED, ALONE) and second == CHANGED
    assert [row["proved"] for row in rows] == [good, good]
    assert report["verdict"] == ("done" if good else "stopped")
    for row, own in zip(rows, (first, second)):
        assert row["unit"] == BIG
        if own is not None and row["state"] != own["state"]:
            assert f"of {BIG}" in row["error"]
            assert row["serving"] in (None, False)


def test_a_whole_is_counted_and_told_once() -> None:
    report = whole(BACK, BACK)
    assert "Rollout STOPPED: 1 rolled back" in rollout_report.report_lines(report)[0]
    assert f"One server: {BIG}" in "\n".join(rollout_report.report_lines(report))
    assert "a/big, b/big (rolled back): node 1 failed" in rollout_report.why_stopped(report)
    assert f"of {BIG}" in rollout_report.report_html(report)
    plan = {"batches": [[big_row("a"), big_row("b")]], "total": 2, "ramp": [1], "done": [], "left_out": []}
    lines = rollout_report.plan_lines(plan, {})
    assert "1 servers in 1 batches" in lines[0]
    assert f"One server: {BIG}" in "\n".join(lines)
    done = {"batches": [], "total": 1, "done": [big_row("a"), big_row("b")]}
    assert rollout_report.plan_lines(done, {}) == ["Nothing to do: 1 of 1 servers are as wanted"]
