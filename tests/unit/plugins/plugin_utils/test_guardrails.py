# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An inventory's own rules join the shipped ones, and every mistake in them or in a waiver is a sentence."""

from __future__ import annotations

import os
import typing as t
from pathlib import Path

import pytest
import yaml

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.conditions import Facts
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.guardrails import judge, parse_rules
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import guardrails

OWN: dict[str, t.Any] = {
    "id": "our_context",
    "when": {"fact": "flags.context_length", "above": 100000},
    "severity": "deny",
    "reason": "{flags.context_length} tokens are too many for us.",
    "remedy": "Lower it.",
    "source": "team",
}
ALL = guardrails.shipped()


def problem(own: t.Any, bases: t.Sequence[str] = ()) -> str:
    rules, problems = guardrails.all_rules(own, bases)
    assert rules == ALL
    assert len(problems) == 1, problems
    return problems[0]


def test_the_shipped_rules_alone() -> None:
    rules, problems = guardrails.all_rules()
    assert problems == [] and rules == ALL and rules is not guardrails.all_rules()[0]
    assert guardrails.all_rules([]) == (ALL, [])


def test_an_own_rule_is_added_and_judged() -> None:
    rules, problems = guardrails.all_rules([OWN])
    assert problems == [] and rules == [*ALL, OWN]
    (finding,) = judge(parse_rules(rules[-1:])[0], Facts({"flags": {"context_length": 131072}}))
    assert finding.message == "131,072 tokens are too many for us."


def test_rules_from_files(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "a.yml").write_text(yaml.safe_dump([OWN]))
    for own, bases in (([str(tmp_path / "rules" / "a.yml")], []), (["rules/a.yml"], ["/nowhere", str(tmp_path)])):
        rules, problems = guardrails.all_rules(own, bases)
        assert problems == [] and rules[-1] == OWN


def test_only_a_rule_that_says_so_replaces_another() -> None:
    changed = {**OWN, "id": "warmup_skipped"}
    assert "rule 'warmup_skipped' is there already; say 'override: true' in it" in problem([changed])
    rules, problems = guardrails.all_rules([{**changed, "override": True}])
    assert problems == [] and len(rules) == len(ALL)
    assert changed in rules and not any("override" in rule for rule in rules)
    assert next(rule for rule in guardrails.shipped() if rule["id"] == "warmup_skipped") != changed
    rules, problems = guardrails.all_rules([OWN, {**OWN, "severity": "warn", "override": True}])
    assert problems == [] and rules[-1]["severity"] == "warn"
    assert "there is no such rule; did you mean 'warmup_skipped'?" in problem(
        [{**changed, "id": "warmup_skiped", "override": True}]
    )
    assert "override is 'yes'; allowed are true and false" in problem([{**OWN, "override": "yes"}])


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ("x.yml", "sglang_guardrails is 'x.yml'; allowed is a list"),
        ({"id": "x"}, "sglang_guardrails is a mapping; allowed is a list"),
        ([5], "sglang_guardrails[0] is 5; allowed are a rule and a path"),
        ([[OWN]], "sglang_guardrails[0] is a list; allowed are"),
        (["nowhere.yml"], "sglang_guardrails[0]: the file nowhere.yml is not there"),
        (["\0"], "allowed is the path of a file"),
        ([" "], "allowed is the path of a file"),
        (
            [{**OWN, "severity": "denied"}],
            "sglang_guardrails[0]: rule 'our_context': severity is 'denied'; did you mean",
        ),
        ([{**OWN, "when": {"fact": "budget.host_marginn_gb", "below": 1}}], "did you mean 'budget.host_margin_gb'?"),
    ],
)
def test_mistakes_of_the_variable(own: t.Any, words: str) -> None:
    assert words in problem(own)


def test_mistakes_of_files(tmp_path: Path) -> None:
    def file(text: t.Union[str, bytes]) -> list[str]:
        path = tmp_path / "rules.yml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return [str(path)]

    assert "is no YAML" in problem(file("- {a: ["))
    assert "is no YAML" in problem(file("- 2026-99-99"))
    assert "is no YAML" in problem(file("[" * 5000))
    assert "is no YAML" in problem(file("- !!python/object:os.system {}"))
    assert "can't be read" in problem(file(b"\xff\xfe\xff"))
    assert "holds a mapping; allowed is a list of rules" in problem(file("id: x"))
    assert "holds null" in problem(file(""))
    assert "is larger than" in problem(file("#" * (2 << 20)))
    assert "rules.yml): rule number 1: is 'x'; allowed is a mapping" in problem(file("[x]"))
    assert "is no regular file" in problem([str(tmp_path)])
    os.mkfifo(tmp_path / "pipe")
    assert "is no regular file" in problem([str(tmp_path / "pipe")])
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert "can't be read" in problem([str(tmp_path / "link")])


def test_a_rule_that_holds_itself(tmp_path: Path) -> None:
    (tmp_path / "loop.yml").write_text(yaml.safe_dump([OWN]).replace("when:", "when: &x\n    not: *x\n  old:"))
    rules, problems = guardrails.all_rules([str(tmp_path / "loop.yml")])
    assert rules == ALL and len(problems) >= 1


def test_too_many_rules() -> None:
    own = [{**OWN, "id": f"rule_{number}"} for number in range(500)]
    rules, problems = guardrails.all_rules(own)
    assert len(rules) > 500 and "allowed are 500" in problems[0]


# Waivers


GOOD = "answers tested on 400 questions, see ticket 12"


@pytest.mark.parametrize("waivers", [None, {}, {"fp8_kv_on_int4_mla_moe": GOOD, "warmup_skipped": "a probe waits"}])
def test_good_waivers(waivers: t.Any) -> None:
    assert guardrails.waiver_problems("gpu01: server 'chat'", waivers, ALL) == []


@pytest.mark.parametrize(
    ("waivers", "words"),
    [
        ("all", "waivers is 'all'; allowed is a mapping"),
        ({"fp8_kv_on_int4_mla": GOOD}, "there is no rule 'fp8_kv_on_int4_mla'; did you mean 'fp8_kv_on_int4_mla_moe'?"),
        ({5: GOOD}, "there is no rule '5'; allowed are "),
        ({"trtllm_mla_on_sm120": GOOD}, "rule 'trtllm_mla_on_sm120' can't be waived (deny): trtllm_mla on a GPU"),
        ({"keys_in_log": GOOD}, "rule 'keys_in_log' can't be waived (note)"),
        ({"warmup_skipped": ""}, "the reason for 'warmup_skipped' is ''; allowed is a text of at least 3 words"),
        ({"warmup_skipped": "because"}, "is 'because'; allowed is a text"),
        ({"warmup_skipped": True}, "is true; allowed is a text"),
        ({"warmup_skipped": None}, "is null; allowed is a text"),
        ({"warmup_skipped": ["a b c"]}, "is a list; allowed is a text"),
        ({"warmup_skipped": "a b " * 300}, "at most 500 characters"),
    ],
)
def test_bad_waivers(waivers: t.Any, words: str) -> None:
    (found,) = guardrails.waiver_problems("gpu01: server 'chat'", waivers, ALL)
    assert found.startswith("gpu01: server 'chat': waivers") and words in found
    assert "\n" not in found


def test_a_waiver_of_an_own_rule() -> None:
    rules, _problems = guardrails.all_rules([{**OWN, "waivable": True}])
    assert guardrails.waiver_problems("x", {"our_context": "long documents this week"}, rules) == []
