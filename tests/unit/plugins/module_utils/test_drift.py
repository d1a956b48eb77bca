# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Drift as rows: each difference once, acceptances with their end, verdicts."""

from __future__ import annotations

import dataclasses
import datetime
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.drift import (
    Acceptance,
    Row,
    accept,
    join_verdicts,
    merge,
    parse_acceptance,
    verdict_of,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.drift_server import (
    Place,
    SeenServer,
    WantedServer,
    judge_server,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.cmdline import launched_flags

TODAY = datetime.date(2026, 1, 31)
WANTED = WantedServer(
    "chat",
    {"model_path": "/m", "tp_size": 1, "mem_fraction_static": 0.9, "max_total_tokens": "128k"},
    port=30000,
    environment={"NCCL_DEBUG": "INFO"},
    gpus=("GPU-1",),
    python="/venv/bin/python",
    user="sglang",
)


def place(extra: str = "", drop: str = "", **changes: t.Any) -> Place:
    words = f"--model /m --tp 1 --mem-fraction-static=0.90 --max-total-tokens 128000 --port 30000 {extra}".split()
    argv = ["python3", "-m", "sglang.launch_server", *[word for word in words if not drop or drop not in word]]
    seen = Place(
        launched_flags(argv, lambda path: None),
        {"NCCL_DEBUG": "INFO", "PATH": "/bin"},
        True,
        ("GPU-1",),
        "/venv/bin/python",
        "sglang",
    )
    return dataclasses.replace(seen, **changes)


def seen(**changes: t.Any) -> SeenServer:
    info = {"model_path": "/m", "tp_size": 1, "mem_fraction_static": 0.7, "max_total_tokens": 128000, "port": 30000}
    fine = SeenServer(
        place(), place(), 812, True, None, None, info, None, "ok", None, True, versions=("0.5.15", "0.5.15", "0.5.15")
    )
    return dataclasses.replace(fine, **changes)


def rows(**changes: t.Any) -> list[Row]:
    return list(merge(judge_server(WANTED, seen(**changes))[0]))


def test_the_same_by_meaning_is_no_drift_and_what_sglang_sets_itself_neither() -> None:
    found, compared = judge_server(WANTED, seen())
    assert found == ()
    assert compared == 5


KINDS: list[tuple[str, dict[str, t.Any]]] = [
    ("flag:max-total-tokens", {"process": place(drop="max-total"), "file": place(drop="max-total")}),
    ("flag:tp-size", {"process": place("--tp=2"), "file": place()}),
    ("flag:enable-metrics", {"process": place("--enable-metrics")}),
    ("flag:max-total-tokens", {"info": {"max_total_tokens": 64000}}),
    ("env:NCCL_DEBUG", {"process": place(environment={"NCCL_DEBUG": "WARN"})}),
    ("env:NCCL_ALGO", {"process": place(environment={"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"})}),
    ("gpus", {"process": place(gpus=("GPU-2",)), "file": place(gpus=("GPU-2",))}),
    ("python", {"process": place(python="/other/python")}),
    ("user", {"process": place(user="root")}),
    ("unit_file", {"units": (("unit_file", "as launched", "edited"),)}),
    ("unit_override", {"units": (("unit_override", "none", "x.conf"),)}),
    ("not_running", {"process": None, "pid": None, "info": None, "health": None}),
    ("not_ours", {"process": None, "pid": None, "info": None, "health": None, "stranger": "pid 7 (nginx)"}),
    ("restarted_by_hand", {"by_record": False}),
    ("started_before_change", {"changed_after_start": ("config.yaml",)}),
    ("hung", {"stopped": ("scheduler pid 9 is stopped",), "health": None, "info": None}),
    ("hung", {"health": "timeout", "health_words": "no answer", "info": None}),
    ("unhealthy", {"health": "unhealthy", "health_words": "HTTP 503", "info": None}),
    ("sglang_version", {"versions": ("0.5.15", "0.5.16", None)}),
]


@pytest.mark.parametrize(("item", "changes"), KINDS)
def test_each_kind_is_named_exactly_once(item: str, changes: dict[str, t.Any]) -> None:
    found = rows(**changes)
    assert [row.item for row in found] == [item]
    assert verdict_of(found) == "drifted"


def test_a_flag_that_differs_in_all_places_is_one_row_of_the_deepest() -> None:
    (row,) = rows(file=place("--tp 2"), process=place("--tp 2"), info={"tp_size": 2})
    assert (row.item, row.wanted, row.where, row.also) == ("flag:tp-size", 1, "engine", ("file", "process"))


@pytest.mark.parametrize(
    "changes",
    [
        {"process": place(flags=None, problem="refused")},
        {"process": place(environment=None)},
        {"health": "broken", "info": None},
        {"info": None, "info_problem": "the API key is missing or wrong"},
        {"problems": ("the record can't be used",)},
    ],
)
def test_what_cannot_be_seen_is_unknown_and_no_drift(changes: dict[str, t.Any]) -> None:
    found = rows(**changes)
    assert found and all(row.state == "unknown" for row in found)
    assert verdict_of(found) == "unknown"


def test_secrets_are_neither_compared_nor_shown() -> None:
    wanted = dataclasses.replace(WANTED, environment={**WANTED.environment, "HF_TOKEN": "hf_wanted"})
    found, _compared = judge_server(
        dataclasses.replace(wanted, secret_names=frozenset({"MY_KEY"})),
        seen(
            file=None,
            process=place("--api-key sk-1", environment={"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_other", "MY_KEY": "k"}),
            info={"api_key": "sk-2", "tp_size": 1},
        ),
    )
    assert [row.item for row in found] == ["env:HF_TOKEN"]
    for secret in ("hf_", "sk-"):
        assert secret not in repr(found)


# --- acceptances ------------------------------------------------------------------------------------------------------

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
        ({"server": "*", "item": "*", "reason": "x", "until": "2026-01-31"}, "would accept everything"),
    ],
)
def test_an_acceptance_needs_a_reason_an_end_and_a_subject(raw: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("*", "[*]")):
        parse_acceptance(raw, 0)


def test_drifted_outranks_unknown_and_unknown_in_sync() -> None:
    assert join_verdicts(["in_sync", "unknown", "drifted"]) == "drifted"
    assert join_verdicts(["in_sync", "unknown"]) == "unknown"
    assert join_verdicts([]) == "in_sync"
