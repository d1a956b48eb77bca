# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The document: what was not seen stays in it as unknown, times go on from run to run, and its schema holds."""

from __future__ import annotations

import copy
import json
import typing as t

import jsonschema
import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import drift_document
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_document import fleet_verdict, iso, moment_of
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.unit.drift_builders import (
    FRESH_S,
    NOW,
    answer,
    document,
    event,
    ok,
    row,
    server,
)

GONE = {"unreachable": True, "msg": "no route to host"}
SCHEMA = json.loads((ROOT / "docs" / "drift.schema.json").read_text())
HOUR = 3600.0


def host_of(found: dict[str, t.Any], name: str = "a") -> dict[str, t.Any]:
    return next(host for host in found["hosts"] if host["name"] == name)


def valid(found: dict[str, t.Any]) -> dict[str, t.Any]:
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(found, allow_nan=False)))
    return found


@pytest.mark.parametrize(
    ("verdicts", "word"),
    [
        ([], "unknown"),
        (["in_sync", "in_sync"], "in_sync"),
        (["in_sync", "drifted"], "drifted"),
        (["drifted", "unknown", "in_sync"], "unknown"),
    ],
)
def test_a_host_that_was_not_seen_may_hide_anything(verdicts: list[str], word: str) -> None:
    assert fleet_verdict(verdicts) == word


def test_verdicts_counts_and_exit_codes() -> None:
    drifted = answer([server("chat", [row("user")]), server("embed")], [row("leftovers", None, severity="warning")])
    found = valid(document(ok("a", answer([server()])), ok("b", drifted), expected=["a", "b"]))
    assert (found["verdict"], found["run"]["exit_code"]) == ("drifted", 10)
    assert found["counts"] == {
        "hosts": {"in_sync": 1, "drifted": 1, "unknown": 0},
        "servers": {"in_sync": 2, "drifted": 1, "unknown": 0},
        "rows": {"critical": 1, "warning": 1, "note": 0, "unknown": 0, "accepted": 0},
    }
    assert found["summary"] == "2 hosts: 1 in sync, 1 drifted; b: chat/user, leftovers"
    assert found["last_success_at"] == iso(NOW)
    found = valid(document(ok("a", answer()), event("runner_on_unreachable", "b", GONE), expected=["a", "b"]))
    assert (found["verdict"], found["run"]["exit_code"], found["last_success_at"]) == ("unknown", 20, None)
    found = valid(document(ok("a", answer()), expected=["a"]))
    assert (found["verdict"], found["run"]["exit_code"]) == ("in_sync", 0)


def test_no_host_at_all_is_unknown() -> None:
    found = valid(document(problems=("no host to check",)))
    assert (found["verdict"], found["run"]["exit_code"], found["summary"]) == ("unknown", 20, "no host was checked")


def test_a_host_that_is_gone_keeps_its_servers_and_its_last_answer() -> None:
    before = document(ok("a", answer([server("chat", [row("user")])])), expected=["a"], finished=NOW - HOUR)
    before_since = host_of(before)["servers"][0]["drift"][0]["since"]
    found = valid(document(event("runner_on_unreachable", "a", GONE), expected=["a"], previous=before))
    host = host_of(found)
    assert (host["state"], host["verdict"], host["problem"]) == ("unreachable", "unknown", "no route to host")
    assert [(each["name"], each["verdict"]) for each in host["servers"]] == [("chat", "unknown")]
    assert host["last_answer"]["verdict"] == "drifted"
    assert host["last_answer"]["at"] < host["checked_at"]
    assert found["counts"]["servers"]["unknown"] == 1
    # It is still so an hour later, and the last success is the old one.
    again = valid(document(expected=["a"], previous=found, finished=NOW + HOUR))
    assert [(row["item"], row["since"]) for row in host["last_answer"]["rows"]] == [("user", before_since)]
    # What it says then is as old as before the silence, and only what has come or gone meanwhile is new.
    both = ok("a", answer([server("chat", [row("user"), row("env:X")])]))
    back = valid(document(both, expected=["a"], previous=again, finished=NOW + 2 * HOUR))
    since = {each["item"]: each["since"] for each in host_of(back)["servers"][0]["drift"]}
    assert since["user"] == before_since and since["env:X"] > before_since
    assert [(each["what"], each["item"]) for each in back["changes"]] == [("verdict", None), ("new", "env:X")]
    assert host_of(back)["last_answer"]["rows"] == []
    assert host_of(again)["last_answer"] == host["last_answer"]
    assert host_of(again)["verdict_since"] == iso(NOW)
    assert again["last_success_at"] == before["last_success_at"] == iso(NOW - HOUR)


def test_a_row_is_as_old_as_its_first_sight() -> None:
    def seen(finished: float, previous: t.Any, *items: str) -> dict[str, t.Any]:
        rows = [row(item) for item in items]
        moment = ok("a", answer([server("chat", rows)]))
        moment["created"] = iso(finished).replace("Z", "+00:00")
        return valid(document(moment, expected=["a"], previous=previous, finished=finished))

    first = seen(NOW - 2 * HOUR, None, "user")
    second = seen(NOW - HOUR, first, "user", "env:X")
    since = {each["item"]: each["since"] for each in host_of(second)["servers"][0]["drift"]}
    assert since == {"user": iso(NOW - 2 * HOUR), "env:X": iso(NOW - HOUR)}
    assert host_of(second)["verdict_since"] == iso(NOW - 2 * HOUR)
    third = seen(NOW, second, "env:X")
    assert [(each["what"], each["item"]) for each in third["changes"]] == [("gone", "user")]
    assert [(each["what"], each["item"]) for each in second["changes"]] == [("new", "env:X")]


def test_changes_of_verdicts_and_hosts() -> None:
    before = document(ok("a", answer()), ok("b", answer()), ok("c", answer()), expected=["a", "b", "c"])
    now = valid(
        document(
            ok("a", answer([server("chat", [row("user")])])),
            event("runner_on_unreachable", "b", GONE),
            ok("d", answer()),
            expected=["a", "b", "d"],
            previous=before,
            gone=frozenset({"c"}),
        )
    )
    found = [(each["host"], each["what"], each["before"], each["now"]) for each in now["changes"]]
    assert found == [
        ("a", "verdict", "in_sync", "drifted"),
        ("a", "new", None, "drift"),
        ("b", "verdict", "in_sync", "unknown"),
        ("d", "verdict", None, "in_sync"),
        ("c", "verdict", "in_sync", None),
    ]


def test_rows_of_a_host_that_was_not_seen_have_neither_come_nor_gone() -> None:
    before = document(ok("a", answer([server("chat", [row("user")])])), expected=["a"])
    gone = document(event("runner_on_unreachable", "a", GONE), expected=["a"], previous=before)
    assert [each["what"] for each in gone["changes"]] == ["verdict"]


def test_many_changes_are_counted_beyond_the_limit() -> None:
    before = document(ok("a", answer()), expected=["a"])
    servers = [server(name, [row(f"env:X{number}", name) for number in range(150)]) for name in ("chat", "embed")]
    now = valid(document(ok("a", answer(servers)), expected=["a"], previous=before))
    assert (len(now["changes"]), now["changes_cut"]) == (drift_document.CHANGE_LIMIT, 101)


def test_a_limit_replaces_its_own_hosts_only() -> None:
    before = document(ok("a", answer([server("chat", [row("user")])])), ok("b", answer()), expected=["a", "b"])
    found = valid(
        document(ok("b", answer()), expected=["b"], previous=before, finished=NOW + HOUR, limit="b")
    )
    assert [(host["name"], host["verdict"], host["in_this_run"]) for host in found["hosts"]] == [
        ("a", "drifted", False),
        ("b", "in_sync", True),
    ]
    # What was asked is in sync; the fleet is not.
    assert (found["verdict"], found["run"]["verdict"], found["run"]["exit_code"]) == ("drifted", "in_sync", 0)


def test_a_host_vanishes_only_where_it_is_known_to_be_gone() -> None:
    """Also without a limit: a target, or what follows --, can narrow a run as well."""
    before = document(ok("a", answer([server("chat", [row("user")])])), ok("b", answer()), expected=["a", "b"])
    found = valid(document(ok("b", answer()), expected=["b"], previous=before, finished=NOW + HOUR))
    assert [(host["name"], host["verdict"]) for host in found["hosts"]] == [("a", "drifted"), ("b", "in_sync")]
    assert found["verdict"] == "drifted" and found["changes"] == []
    gone = frozenset({"a"})
    found = valid(document(ok("b", answer()), expected=["b"], previous=before, finished=NOW + HOUR, gone=gone))
    assert [host["name"] for host in found["hosts"]] == ["b"]
    # Who was asked is there, whatever else is said.
    found = document(ok("a", answer()), expected=["a"], gone=gone, previous=before)
    assert [host["name"] for host in found["hosts"]] == ["a", "b"]


def test_a_kept_answer_that_is_too_old_is_unknown() -> None:
    before = document(ok("a", answer([server()])), ok("b", answer()), expected=["a", "b"])
    at = NOW + FRESH_S + HOUR
    found = valid(document(ok("b", answer()), expected=["b"], previous=before, finished=at, limit="b"))
    stale = host_of(found)
    assert (stale["state"], stale["verdict"], found["verdict"]) == ("stale", "unknown", "unknown")
    assert "27.0 h ago" in stale["problem"] and "limit 26.0 h" in stale["problem"]
    assert stale["servers"][0]["verdict"] == "unknown"


def test_another_run_that_saw_the_host_later_counts() -> None:
    later = ok("a", answer([server("chat", [row("user")])]))
    later["created"] = iso(NOW + 20).replace("Z", "+00:00")
    other = document(later, expected=["a"], finished=NOW + 30)
    mine = valid(document(ok("a", answer()), expected=["a"], previous=other, finished=NOW))
    assert (host_of(mine)["verdict"], host_of(mine)["in_this_run"]) == ("drifted", True)
    # Unless that is a time to come, since the clock was set back: that must not stay for ever.
    wrong = document(later, expected=["a"], finished=NOW + 30)
    host_of(wrong)["checked_at"] = iso(NOW + 1000 * HOUR)
    assert host_of(document(ok("a", answer()), expected=["a"], previous=wrong, finished=NOW))["verdict"] == "in_sync"


@pytest.mark.parametrize("lost", ["verdict_since", "last_answer", "name", "servers"])
def test_a_document_that_lost_a_part_is_not_used(lost: str) -> None:
    good = document(ok("a", answer([server("chat", [row("user")])])), expected=["a"])
    assert drift_document.is_whole(good)
    bad = copy.deepcopy(good)
    del bad["hosts"][0][lost]
    assert not drift_document.is_whole(bad)
    bad = copy.deepcopy(good)
    del bad["hosts"][0]["servers"][0]["drift"][0]["since"]
    assert not drift_document.is_whole(bad)


def test_the_schema_refuses_what_it_should() -> None:
    good = document(ok("a", answer([server("chat", [row("user")])])), expected=["a"])
    for change in ({"verdict": "fine"}, {"schema_version": 2}, {"extra": 1}, {"generated_at": "yesterday"}):
        with pytest.raises(jsonschema.ValidationError):
            valid({**good, **change})


def test_times() -> None:
    assert moment_of(iso(NOW)) == NOW
    assert moment_of("2026-01-31T23:59:59.5+00:00") == moment_of("2026-01-31T23:59:59.5")
    assert moment_of("yesterday") is None and moment_of(None) is None
