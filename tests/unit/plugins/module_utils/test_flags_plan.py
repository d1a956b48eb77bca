# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.flags_plan import judge_flags, words_of
from ansible_collections.cleanslate.sglang.plugins.module_utils.plan_model import Finding
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.option_table import Option, OptionTable
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.options import read_options
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.rules import Change, Rule, Term
from ansible_collections.cleanslate.sglang.tests.unit.plugins.module_utils.sglang import fixture_sglang

MODEL = {"model_path": "/m"}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> OptionTable:
    found = read_options(fixture_sglang.old(tmp_path_factory.mktemp("old")))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> OptionTable:
    found = read_options(fixture_sglang.new(tmp_path_factory.mktemp("new")))
    assert found is not None
    return found


def judged(flags: t.Mapping[str, t.Any], table: OptionTable, version: str | None = "0.5.12") -> list[Finding]:
    return judge_flags({**MODEL, **flags}, table, version)[0]


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


@pytest.mark.parametrize(
    "flags",
    [
        {"tp": 8, "dtype": "half", "mem-fraction-static": 0.9, "lora_rank": 16},
        {"tensor_parallel_size": "1_0", "mem_fraction_static": "1e-1"},
        {"cuda-graph-bs": [1, 2, 4], "lora-target-modules": "all", "pair": [1, "2"]},
        {"cuda-graph-bs": 4, "tp": [2], "lora-target-modules": []},
        {"enable-metrics": True, "strict": False},
        {"enable-metrics": False, "no-strict": True},
        {"checksum": True},
        {"limits": {"image": 2}, "draft-attention": "None"},
        {"limits": '{"image": 2}', "reasoning-parser": "kimi_k2"},
    ],
)
def test_flags_that_sglang_takes(table: OptionTable, flags: dict[str, t.Any]) -> None:
    assert [each for each in judged(flags, table) if each.severity != "note"] == []


@pytest.mark.parametrize(
    ("flags", "identity", "message", "remedy"),
    [
        ({"mem-fracton-static": 1}, "flags-unknown", "is no option of SGLang 0.5.12", "Nearest: --mem-fraction-static"),
        ({"zzz": 1}, "flags-unknown", "--zzz is no option", "No option has a similar name"),
        (
            {"m": 1},
            "flags-ambiguous",
            "--m is no option, and as an abbreviation it could be --max-total-tokens",
            "full",
        ),
        ({"dtype": "haf"}, "flags-choice", "'haf' is not one of auto, half", "Did you mean half?"),
        ({"reasoning-parser": "kimi-k2"}, "flags-choice", "not one of auto, kimi_k2", "Did you mean kimi_k2?"),
        ({"lora-rank": 17}, "flags-choice", "'17' is not one of 16, 32", ""),
        ({"tp-size": 1.0}, "flags-type", "--tp-size takes a whole number, not '1.0'", ""),
        ({"mem-fraction-static": "0,9"}, "flags-type", "takes a number, not '0,9'", ""),
        ({"limits": "{x}"}, "flags-type", "takes JSON, not '{x}'", ""),
        ({"cuda-graph-bs": "1 2"}, "flags-type", "takes a whole number, not '1 2'", ""),
        ({"tp-size": [1, 2]}, "flags-shape", "--tp-size takes one value, not a list of 2", "one value"),
        ({"pair": [1]}, "flags-shape", "--pair needs 2 values", ""),
        ({"pair": 1}, "flags-shape", "--pair needs 2 values", ""),
        ({"enable-metrics": "yes"}, "flags-shape", "is a bare flag and takes no value, not 'yes'", "true or false"),
        ({"enable-metrics": 1}, "flags-shape", "is a bare flag", "true or false"),
        ({"strict": "x"}, "flags-shape", "is a bare flag", "true or false"),
        ({"lora-target-modules": "-x"}, "flags-shape", "the value '-x' begins with a dash", "can't be given"),
        ({"help": True}, "flags-help", "makes SGLang print a text and end", ""),
        ({"tp-size": None}, "flags-value", "has no value", ""),
        ({"tp-size": float("nan")}, "flags-value", "not a number", ""),
        ({"tp size": 1}, "flags-value", "is no name of an option", ""),
        ({"tp": 1, "tensor-parallel-size": 1}, "flags-twice", "name the same option", "Keep one"),
        ({"model": "/x"}, "flags-twice", "name the same option", "Keep one"),
        ({"enable_metrics": True, "enable-metrics": True}, "flags-twice", "name the same option", "Keep one"),
    ],
)
def test_flags_that_sglang_refuses(
    table: OptionTable, flags: dict[str, t.Any], identity: str, message: str, remedy: str
) -> None:
    denied = [each for each in judged(flags, table) if each.severity == "deny"]
    assert {each.id for each in denied} == {identity}
    assert message in denied[-1].message and remedy in denied[-1].remedy and not denied[-1].waivable


@pytest.mark.parametrize("name", ["api_key", "admin-api-key", "ssl_keyfile_password", "api"])
@pytest.mark.parametrize("known", [True, False])
def test_secrets_are_refused_and_not_shown(table: OptionTable, name: str, known: bool) -> None:
    findings, canonical = judge_flags({**MODEL, name: "s3cret"}, table if known else None, "0.5.12")
    assert [each.id for each in findings if each.severity == "deny"] == ["flags-secret"]
    assert "s3cret" not in repr(findings) and list(canonical) == ["model_path"]


def test_without_a_table_nothing_is_guessed() -> None:
    findings, canonical = judge_flags({"tp": 8, "nothing": 1, "cuda-graph-max-bs": "x", "off": False}, None, "0.5.23")
    assert (only(findings).id, only(findings).severity) == ("flags-unread", "unknown")
    assert canonical == {"tp_size": 8, "nothing": 1, "cuda_graph_max_bs": "x"}


def test_values_come_back_converted_under_one_name_in_all_versions(table: OptionTable, newer: OptionTable) -> None:
    flags = {
        **{"model": "/m", "tensor-parallel-size": "8", "mem-frac": "0.9", "strict": False, "enable-metrics": False},
        **{"limits": '{"a": 1}', "cuda-graph-bs": 4, "lora-target-modules": []},
    }
    assert judge_flags(flags, table, "0.5.12")[1] == {
        **{"model_path": "/m", "tp_size": 8, "mem_fraction_static": 0.9, "strict": False},
        **{"limits": {"a": 1}, "cuda_graph_bs": [4]},
    }
    # The primary name differs between versions; a retired option counts as its successor.
    flags = {"tp": 2, "cuda-graph-bs": [1, 2], "forced": True}
    assert judge_flags(flags, newer, "0.5.15")[1] == {"tp_size": 2, "cuda_graph_bs_decode": [1, 2], "backend": "full"}


def test_an_abbreviation_is_a_note(table: OptionTable) -> None:
    finding = only(judged({"mem-frac": 0.9}, table))
    assert (finding.id, finding.severity) == ("flags-abbreviated", "note")
    assert "--mem-fraction-static" in finding.message


def test_deprecated_options_are_warnings_with_their_successor(newer: OptionTable) -> None:
    findings = judged({"cuda-graph-bs": [1], "retired": True, "noop": True, "wanted": "x"}, newer)
    assert {(each.id, each.severity) for each in findings} == {("flags-deprecated", "warn")}
    assert [each.remedy for each in findings] == ["Use --cuda-graph-bs-decode", "Use --fraction", ""]


def test_an_option_that_stops_sglang_is_denied_with_its_own_sentence(newer: OptionTable) -> None:
    finding = only(judged({"stopped": True, "wanted": "x"}, newer))
    assert (finding.id, finding.severity, finding.message) == (
        "flags-removed",
        "deny",
        "--stopped is gone. Use --going.",
    )


def test_two_options_of_one_field_are_a_warning(newer: OptionTable) -> None:
    finding = only(
        [each for each in judged({"forced": True, "backend": "disabled", "wanted": "x"}, newer) if "over" in each.id]
    )
    assert finding.severity == "warn" and "set the same field backend" in finding.message


def test_required_options(table: OptionTable) -> None:
    assert [each.id for each in judge_flags({}, table, None)[0]] == ["flags-required"]
    assert judge_flags({}, table, None, required=False)[0] == []


def test_what_the_sources_do_not_tell_is_unknown(table: OptionTable) -> None:
    for flags in ({"max-total-tokens": "x"}, {"grown": "c"}, {"sampling-backend": "token_oracle"}):
        finding = only(judged(flags, table))
        assert (finding.id, finding.severity) == ("flags-unjudged", "unknown")


def test_a_text_for_true_is_a_warning(table: OptionTable) -> None:
    finding = only(judged({"draft-attention": True}, table))
    assert finding.severity == "warn" and "SGLang gets the text 'true'" in finding.message


def test_a_flag_that_is_off_and_no_option_never_reaches_sglang(table: OptionTable) -> None:
    assert [(each.id, each.severity) for each in judged({"zzz": False, "yyy": []}, table)] == [
        ("flags-unknown", "warn"),
        ("flags-unknown", "warn"),
    ]


def test_combinations_that_sglangs_own_checks_refuse(table: OptionTable) -> None:
    rule = Rule(
        (Term("strict", "true"), Term("dtype", "ne", "half")), "strict wants half", "server_args.py:1", ((), ())
    )
    unsure = Rule(rule.terms, "perhaps", "server_args.py:2", ((), (Change("half"),)))
    findings, _canonical = judge_flags({**MODEL, "strict": True}, table, None, (rule, unsure))
    finding = only(findings)  # the default of dtype counts only where SGLang doesn't change it
    assert (finding.id, finding.severity, finding.waivable) == ("flags-conflict", "deny", True)
    assert finding.message.endswith("strict, dtype: strict wants half") and "server_args.py:1" in finding.source
    findings, _canonical = judge_flags({**MODEL, "strict": True, "dtype": "auto"}, table, None, (unsure,))
    assert only(findings).severity == "warn" and "unless it changes one of them" in only(findings).message
    assert judge_flags({**MODEL, "strict": True, "dtype": "half"}, table, None, (rule, unsure))[0] == []


def test_the_words_are_those_that_sglang_makes_of_the_file_and_the_command_line(table: OptionTable) -> None:
    flags = {
        **{"model": "/a b", "tp": 8, "enable-met": True, "cuda-graph-bs": [1, 2], "limits": {"a": 1}, "strict": False},
        **{"checksum": True, "dtype": True},
    }
    assert words_of(flags, table) == [
        *(
            "--cuda-graph-bs",
            "1",
            "2",
            "--dtype",
            "true",
            "--enable-metrics",
            "--limits",
            '{"a": 1}',
            "--model",
            "/a b",
        ),
        *("--tp-size", "8", "--no-strict", "--checksum"),
    ]


@pytest.mark.parametrize("value", [object(), {1: object()}, [[1]], [None], b"x", "\0", "\ud800", {"a": float("inf")}])
def test_no_value_is_a_traceback(table: OptionTable, value: t.Any) -> None:
    for known in (table, None):
        findings, _canonical = judge_flags({**MODEL, "dtype": value}, known, None)
        assert "flags-value" in {each.id for each in findings}


def test_an_option_of_a_table_without_details_is_not_judged_by_them() -> None:
    table = OptionTable([Option(("dtype",)), Option(("fast",), values="none")], "test")
    assert [each.severity for each in judge_flags({"dtype": 1, "fast": True}, table, None)[0]] == ["unknown"]
