# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rows of drift: acceptances and waivers with their ends, places joined, verdicts."""

from __future__ import annotations

import dataclasses
import datetime
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.drift import (
    Acceptance,
    Row,
    accept,
    expired_waivers,
    lost,
    merge,
    note,
    parse_acceptance,
    settle,
    unknown,
    verdict_of,
)

TODAY = datetime.date(2026, 1, 31)
ROW = Row("chat", "flag:tp-size", 1, 2, "process", "critical", "relaunch it")


def acceptance(**changes: t.Any) -> Acceptance:
    return dataclasses.replace(Acceptance("chat", "flag:*", "ticket 12", TODAY), **changes)


def test_an_acceptance_holds_on_its_last_day_and_not_on_the_next() -> None:
    standing, fine = accept([ROW], [acceptance()], TODAY)
    assert standing == () and (fine[0].state, fine[0].reason) == ("accepted", "ticket 12")
    standing, fine = accept([ROW], [acceptance()], TODAY + datetime.timedelta(days=1))
    assert fine == () and [row.state for row in standing] == ["expired_acceptance"]
    assert verdict_of(standing) == "drifted"


def test_an_expired_acceptance_of_nothing_is_a_note_that_changes_no_verdict() -> None:
    standing, _fine = accept([], [acceptance()], TODAY + datetime.timedelta(days=1))
    assert [row.item for row in standing] == ["waiver_expired:flag:*"]
    assert verdict_of(standing) == "in_sync"


@pytest.mark.parametrize("changes", [{"server": "other"}, {"item": "env:*"}])
def test_an_acceptance_of_something_else_covers_nothing(changes: dict[str, str]) -> None:
    assert accept([ROW], [acceptance(**changes)], TODAY) == ((ROW,), ())


def test_unknown_is_never_accepted_away() -> None:
    row = dataclasses.replace(ROW, state="unknown")
    assert accept([row], [acceptance(server="*")], TODAY) == ((row,), ())


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"server": "*", "item": "gpus", "until": "2026-01-31"}, "reason is missing"),
        ({"server": "*", "item": "gpus", "reason": "x", "until": "soon"}, "until is 'soon'"),
        *(
            ({"server": "*", "item": item, "reason": "x", "until": "2026-01-31"}, "would accept everything")
            for item in ("*", "[!_]*", "*:*", "?[a-z]*", "f*", "*_version", " *", "**")
        ),
    ],
)
def test_an_acceptance_needs_a_reason_an_end_and_a_subject(raw: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("*", "[*]")):
        parse_acceptance(raw, 0)


@pytest.mark.parametrize("item", ["env:NCCL_*", "holder:*/python train.py", "flag:*", "unit_*", "gpus", "gpu:[01]"])
def test_a_pattern_with_a_subject_is_fine(item: str) -> None:
    raw = {"server": "*", "item": item, "reason": "x", "until": "2026-01-31"}
    assert parse_acceptance(raw, 0).item == item


def test_drifted_outranks_unknown_and_unknown_in_sync() -> None:
    hidden = dataclasses.replace(ROW, state="unknown")
    assert verdict_of([hidden, ROW]) == "drifted"
    assert verdict_of([hidden]) == "unknown"
    assert verdict_of([dataclasses.replace(ROW, severity="note")]) == verdict_of([]) == "in_sync"


def test_an_acceptance_of_a_server_that_is_not_there_is_a_note_and_covers_nothing() -> None:
    one = acceptance(server="chet")
    assert accept([ROW], [one], TODAY) == ((ROW,), ())
    (row,) = lost([one, acceptance(), acceptance(server="*")], ["chat"])
    assert (row.item, row.severity) == ("acceptance:chet/flag:*", "note")
    assert "chat" in row.found
    assert verdict_of([row]) == "in_sync"


# --- waivers of a plan ------------------------------------------------------------------------------------------------


def waived(reason: str, today: datetime.date = TODAY) -> list[tuple[str, str]]:
    return [(row.item, row.state) for row in expired_waivers("chat", {"fp8_kv": reason}, today, "relaunch it")]


def test_a_waiver_holds_on_its_last_day_and_not_on_the_next() -> None:
    reason = "tested on 400 questions, ticket 12, until 2026-01-31"
    assert waived(reason) == []
    assert waived(reason, TODAY + datetime.timedelta(days=1)) == [("waiver_expired:fp8_kv", "expired_acceptance")]


@pytest.mark.parametrize("words", ["Until 2026-01-01", "until: 2026-01-01", "UNTIL:2026-01-01", "until  2026-01-01"])
def test_an_end_is_an_end_however_it_is_written(words: str) -> None:
    assert waived(f"tested, {words}") == [("waiver_expired:fp8_kv", "expired_acceptance")]


def test_of_several_ends_the_last_counts() -> None:
    assert waived("ticket 1, until 2025-01-31, extended until 2099-01-31") == []
    assert waived("ticket 1, until 2099-01-31, cut to until 2025-01-31") != []
    assert waived("until 2025-02-30, then until 2099-01-31") == []


def test_a_waiver_without_an_end_never_expires() -> None:
    assert waived("tested on 400 questions since 2020-01-01, ticket 12") == []


def test_an_end_that_is_no_day_is_unknown() -> None:
    assert waived("tested by us until 2026-02-30") == [("waiver_expired:fp8_kv", "unknown")]


def test_an_expired_waiver_is_drift() -> None:
    rows = expired_waivers("chat", {"fp8_kv": "tested, until 2026-01-01"}, TODAY, "relaunch it")
    assert verdict_of(rows) == "drifted"


# --- places -----------------------------------------------------------------------------------------------------------


def test_one_row_for_each_item_of_the_deepest_place_with_the_gravest_severity() -> None:
    rows = [
        dataclasses.replace(ROW, where="engine", severity="warning", found=4),
        dataclasses.replace(ROW, where="file", severity="critical"),
        dataclasses.replace(ROW, server="other"),
    ]
    first, second = merge(rows)
    assert (first.where, first.also, first.severity, first.found) == ("engine", ("file",), "critical", 4)
    assert second.server == "other"


def test_what_was_seen_outranks_what_could_not_be_seen() -> None:
    (row,) = merge([unknown("chat", ROW.item, "refused", "engine"), ROW])
    assert (row.state, row.where) == ("drift", "process")


def test_what_could_not_be_seen_stands_beside_what_is_accepted() -> None:
    """The acceptance speaks of the difference that was seen; in the other place there may be another."""
    hidden = unknown("chat", ROW.item, "refused", "engine")
    standing, fine = settle([hidden, ROW], [acceptance()], TODAY)
    assert (standing, [row.state for row in fine]) == ((hidden,), ["accepted"])
    assert verdict_of(standing) == "unknown"
    # Where the difference stands itself, it says enough.
    standing, fine = settle([hidden, ROW], [], TODAY)
    assert (standing, fine) == ((ROW,), ())
    assert settle([unknown("embed", ROW.item, "refused"), ROW], [acceptance()], TODAY)[0][0].server == "embed"


def test_a_note_hides_nothing_that_could_not_be_seen() -> None:
    seen = note("chat", "fingerprint", "kept", "none", "file", "relaunch it")
    rows = merge([seen, unknown("chat", "fingerprint", "x")])
    assert [(row.severity, row.state) for row in rows] == [("note", "drift"), ("warning", "unknown")]
    assert verdict_of(rows) == "unknown"
