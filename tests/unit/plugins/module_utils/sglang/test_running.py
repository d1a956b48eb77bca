# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Flags as running against flags as wanted. /server_info is a real one (tests/fixtures/answers)."""

from __future__ import annotations

import dataclasses
import json
import pickle
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.model import to_json
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.cmdline import launched_flags
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.option_table import Option, OptionTable
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.redact import MASK
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.rewritten import REWRITTEN
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.running import (
    FlagsJudgement,
    RunningFlags,
    judge_flags,
)

INFO: dict[str, t.Any] = json.loads(
    (Path(__file__).resolve().parents[4] / "fixtures" / "answers" / "server_info.json").read_text()
)["body"]
# As that server was started.
WANTED = {
    "model-path": "/models/tiny",
    "load-format": "dummy",
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "xgrammar",
    "disable-overlap-schedule": True,
    "mem-fraction-static": "0.30",
    "max-total-tokens": "4k",
    "reasoning-parser": "kimi_k2",
    "tool-call-parser": "kimi_k2",
    "api-key": MASK,
}


def running(config: str | None, *words: str) -> RunningFlags:
    argv = ("/opt/v/bin/python", "-m", "sglang.launch_server", "--config", "/c.yaml", *words)
    return RunningFlags(launched_flags(argv, lambda _path: config))


def config_of(flags: t.Mapping[str, t.Any]) -> str:
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in flags.items())


def judged(changes: t.Mapping[str, t.Any], info: dict[str, t.Any] | None = None, **options: t.Any) -> FlagsJudgement:
    wanted = {**WANTED, **changes}
    started = {**wanted, "api-key": "sk-running-Secret"}
    return judge_flags(wanted, running(config_of(started)), INFO if info is None else info, **options)


def test_the_real_server_runs_as_wanted() -> None:
    result = judged({})
    assert (result.matches, result.differences, result.resolved, result.problem) == (True, (), (), None)
    assert result.compared == len(WANTED) - 1


@pytest.mark.parametrize(
    ("started", "words", "item", "row"),
    [
        ({"mem-fraction-static": 0.5}, (), "mem-fraction-static", ("0.30", 0.5)),
        ({}, ("--tp-size", "2"), "tp-size", (None, "2")),
        ({}, ("--mem-frac", "0.4"), "mem-fraction-static", ("0.30", "0.4")),
        ({}, ("--tool-call-parser=qwen",), "tool-call-parser", ("kimi_k2", "qwen")),
        ({"disable-overlap-schedule": False}, (), "disable-overlap-schedule", (True, None)),
    ],
)
def test_a_start_that_differs_is_a_failure(
    started: dict[str, t.Any], words: tuple[str, ...], item: str, row: tuple[t.Any, t.Any]
) -> None:
    result = judge_flags(WANTED, running(config_of({**WANTED, **started}), *words), None)
    (found,) = result.differences
    assert (found.item, (found.wanted, found.found), found.seen) == (item, row, "launched")
    assert result.matches is False


def test_the_same_in_other_words_is_the_same() -> None:
    words = ("--mem-fraction-static=0.3", "--max-total-tokens", "4000", "--host", "0.0.0.0", "--port", "31000")
    assert judge_flags(WANTED, running(config_of(WANTED), *words), None).differences == ()


def test_host_and_port_count_where_they_are_wanted() -> None:
    wanted = {**WANTED, "port": 30000}
    (row,) = judge_flags(wanted, running(config_of(WANTED), "--port", "30001"), None).differences
    assert (row.item, row.wanted, row.found) == ("port", 30000, "30001")


def test_what_sglang_did_not_take_is_a_failure_and_what_it_sets_itself_none() -> None:
    result = judged({"tool-call-parser": "qwen", "page-size": 64, "dtype": "auto", "kv-cache-dtype": "fp8_e4m3"})
    assert [(row.item, row.seen) for row in result.differences] == [("tool-call-parser", "resolved")]
    assert {row.item: row.note for row in result.resolved} == {
        "page-size": REWRITTEN["page_size"],
        "kv-cache-dtype": REWRITTEN["kv_cache_dtype"],
    }


def test_auto_may_become_anything() -> None:
    result = judged({"tool-call-parser": "auto"})
    assert (result.matches, [row.item for row in result.resolved]) == (True, ["tool-call-parser"])


def test_keys_never_show_and_never_count() -> None:
    info = {**INFO, "api_key": "sk-other-Secret"}
    result = judged({"ssl-keyfile-password": MASK, "hicache-storage-backend-extra-config": {"secret_key": MASK}}, info)
    assert result.matches is True
    text = json.dumps(dataclasses.asdict(result))
    assert "Secret" not in text


def test_a_value_with_a_key_in_it_is_masked_on_both_sides() -> None:
    name = "hicache-storage-backend-extra-config"
    started = {**WANTED, name: {"secret_key": "s3cr3t-Value", "a": 1}}
    result = judge_flags({**WANTED, name: {"secret_key": MASK, "a": 1}}, running(config_of(started)), None)
    assert "s3cr3t" not in json.dumps(dataclasses.asdict(result))


def test_an_unreadable_file_makes_it_unknown_and_no_difference() -> None:
    result = judge_flags(WANTED, running(None), None)
    assert (result.matches, result.differences) == (None, ())
    assert "can't be read" in str(result.problem)
    both = judge_flags(WANTED, running(None, "--device", "cuda"), None)
    assert [row.item for row in both.differences] == ["device"]


def test_nothing_known_is_unknown() -> None:
    assert judge_flags(WANTED, None, None).matches is None
    told = judge_flags(WANTED, RunningFlags(None, problem="pid 7 has ended"), None, "HTTP 500")
    assert told.problem == "pid 7 has ended; /server_info: HTTP 500"


def test_an_ignored_configuration_in_one_word_is_noted() -> None:
    argv = ("python", "-m", "sglang.launch_server", "--config=/c.yaml", "--device", "cpu")
    result = judge_flags({"device": "cpu"}, RunningFlags(launched_flags(argv, lambda _path: None)), None)
    assert "ignores the file" in result.notes[0]


@pytest.mark.parametrize(
    ("option", "flags", "info", "failures", "notes"),
    [
        (Option(("x-y",), dest="other"), {"x-y": 3}, {"other": 3, "x_y": 4}, 0, 0),
        (Option(("x-y",), dest="other"), {"x-y": 3}, {"other": 4}, 1, 0),
        (Option(("x",), toggle=True, action="toggle"), {"x": False}, {"x": True}, 1, 0),
        (Option(("x",), toggle=True, action="toggle"), {"x": False}, {"x": False}, 0, 0),
        (Option(("no-x",), values="none", nargs=0, action="store_false", dest="x"), {"no-x": True}, {"x": False}, 0, 0),
        (Option(("no-x",), values="none", nargs=0, action="store_false", dest="x"), {"no-x": True}, {"x": True}, 1, 0),
        (Option(("x",), values="optional", nargs="?", const="on"), {"x": True}, {"x": "on"}, 0, 0),
        (Option(("x",), values="optional", nargs="?"), {"x": True}, {"x": "on"}, 0, 0),
        (Option(("old",), nargs=0, action="DeprecatedStoreTrueAction", dest="new"), {"old": True}, {"new": 3}, 0, 0),
        (Option(("old",), action="DeprecatedAliasStoreAction", dest="new"), {"old": 1}, {"new": {"a": 1}}, 0, 1),
        (Option(("x",)), {"x": 1}, {}, 0, 0),
    ],
)
@pytest.mark.parametrize("sent", [False, True], ids=["read here", "sent by a process below"])
def test_an_option_is_found_by_the_field_that_it_sets(
    option: Option, flags: dict[str, t.Any], info: dict[str, t.Any], failures: int, notes: int, sent: bool
) -> None:
    table = OptionTable([option], "test")
    result = judge_flags(flags, RunningFlags(None, pickle.loads(pickle.dumps(table)) if sent else table), info)
    assert (len(result.differences), len(result.resolved)) == (failures, notes)
    json.dumps(to_json(result))  # no value of our own is left in it


def test_the_table_has_no_name_that_keeps_what_it_is_given() -> None:
    kept = {"model_path", "tp_size", "host", "port", "context_length", "max_total_tokens", "hicache_size", "api_key"}
    assert not kept & set(REWRITTEN)
    known = [name for name in REWRITTEN if name in INFO]
    assert len(known) > 100  # of 0.5.15; the others are older or newer names
