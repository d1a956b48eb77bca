# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/guardrails.md shows the shipped rules as they are, and its examples work."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide import conditions
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.guardrails import GPU_FACTS, KNOWN, SERVER_FACTS
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import guardrails

PAGE = Path(__file__).resolve().parents[4] / "docs" / "guardrails.md"


def rule_table() -> str:
    """The table as it has to stand in the page, between its two marks."""
    lines = ["| rule | severity | SGLang | what it is about | where it was seen |", "|---|---|---|---|---|"]
    for rule in guardrails.shipped():
        severity = rule["severity"] + (", waivable" if rule.get("waivable") else "")
        versions = " ".join(
            f"{word} {rule[name]}" for name, word in (("since", "from"), ("until", "before")) if name in rule
        )
        cells = (f"`{rule['id']}`", severity, versions or "all", rule["title"], rule["source"])
        lines.append("| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |")
    return "<!-- rules -->\n" + "\n".join(lines) + "\n<!-- end of rules -->\n"


def test_the_table_is_that_of_the_file() -> None:
    page = PAGE.read_text(encoding="utf-8")
    found = re.search(r"<!-- rules -->\n.*<!-- end of rules -->\n", page, re.S)
    assert found is not None and found.group(0) == rule_table()


def test_every_operator_and_every_fact_is_told() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = set(re.findall(r"`([a-z_0-9.]+)`", page))
    assert set(conditions.OPERATORS) <= names
    assert {f"gpu.{name}" for name in GPU_FACTS} | {f"server.{name}" for name in SERVER_FACTS} <= names
    assert set(KNOWN) <= {name.partition(".")[0] for name in re.findall(r"`([a-z_]+\.[A-Za-z_.]+)`", page)}


def test_the_examples_work() -> None:
    page = PAGE.read_text(encoding="utf-8")
    examples = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.S)]
    own = [rule for example in examples for rule in example.get("sglang_guardrails", []) if isinstance(rule, dict)]
    assert len(own) >= 3
    rules, problems = guardrails.all_rules(own)
    assert problems == []
    waivers = [server["waivers"] for example in examples for server in example.get("sglang_servers", [])]
    assert waivers
    for each in waivers:
        assert guardrails.waiver_problems("x", each, rules) == []
