# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan for people: what it shows of figures and findings, in which words; and the filters over guardrails."""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.filter.plans import FilterModule
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import guardrails, serve_report
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.plan_report import plan_lines, plan_why


def figure(name: str, value: float | None, unit: str = "bytes", **changes: t.Any) -> dict[str, t.Any]:
    return {"name": name, "label": name.replace("_", " "), "unit": unit, "value": value, "formula": "", **changes}


DENIED = {
    "id": "hicache_too_large",
    "severity": "deny",
    "subject": "hicache-size",
    "message": "HiCache would pin 2,400.0 GB",
    "remedy": "hicache-size 53 is the largest that fits",
    "source": "founding case 1",
    "waivable": False,
    "waived": None,
}
WAIVABLE = {**DENIED, "id": "our_rule", "message": "Not so.", "remedy": "Do it otherwise.", "waivable": True}
UNSURE = {**DENIED, "id": "model_problem", "severity": "unknown", "message": "config.json is not there", "remedy": ""}
WARNED = {**WAIVABLE, "id": "accepted", "severity": "warn", "message": "Not so. Waived: tested", "waived": "tested"}
NOTED = {**UNSURE, "id": "a_note", "severity": "note", "message": "It is worth knowing."}
PLAN = {
    "verdict": "denied",
    "summary": "denied: HiCache would pin 2,400.0 GB [hicache_too_large] (and 1 more)",
    "findings": [DENIED, WAIVABLE, UNSURE, WARNED, NOTED],
    "budget": {
        "gpu": [
            figure("gpu_free", 102_000_000_000, formula="GPU 0: 97,247 MiB"),
            figure("kv_pool", None, reason="the model is not known"),
            figure("mem_fraction_static", 0.88, "fraction"),
            figure("max_total_num_tokens", 254_280.0, "tokens"),
        ],
        "host": [figure("hicache_total", 384_000_000_000), figure("unpin_together_s", 12.96, "s")],
    },
    "sglang_version": "0.5.12",
    "seconds": 0.4,
}


def shown(**changes: t.Any) -> str:
    return "\n".join(plan_lines({"host": "ct129", "server": "kimi", "plan": {**PLAN, **changes}}))


def test_a_whole_plan() -> None:
    text = shown()
    assert text.splitlines()[0] == "kimi on ct129: DENIED (SGLang 0.5.12, 0.4 s)"
    rows = [" ".join(line.split()) for line in text.splitlines()]
    for row in (
        "gpu free 102.00 GB 94.99 GiB GPU 0: 97,247 MiB",
        "kv pool unknown the model is not known",
        "mem fraction static 0.880 fraction",
        "max total num tokens 254,280 tokens",
        "hicache total 384.00 GB 357.63 GiB",
        "unpin together s 13.0 s",
        "DENIED hicache-size: HiCache would pin 2,400.0 GB [hicache_too_large]",
        "remedy: hicache-size 53 is the largest that fits",
        "source: founding case 1",
        "to accept it: waivers: {our_rule: a written reason}",
        "UNKNOWN hicache-size: config.json is not there [model_problem]",
        "warning hicache-size: Not so. Waived: tested [accepted]",
        "note hicache-size: It is worth knowing. [a_note]",
    ):
        assert row in rows, text
    assert text.count("to accept it") == 1
    assert "GPU, per rank" in text and "GPU (SIMULATED), per rank" in shown(simulated=True)


def test_it_fits_a_terminal() -> None:
    long = "a word and another " * 30
    wide = [figure("gpu_free", 10**15, label=long, formula=long)]
    text = shown(findings=[{**DENIED, "message": long, "remedy": long}], budget={"gpu": wide, "host": []})
    assert max(map(len, text.splitlines())) <= 100


def test_what_is_off_is_not_shown() -> None:
    host = [figure(name, 0) for name in ("hicache_total", "sglang_reserve", "host_margin")]
    text = shown(budget={"gpu": [], "host": [*host, figure("unpin_one_by_one_s", 0, "s")]}, findings=[])
    assert "host margin" in text and "0.00 GB" in text
    assert "hicache" not in text and "unpin" not in text and "reserve" not in text and "GPU" not in text


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({}, "no plan"),
        (None, "no plan"),
        ({"failed": True, "msg": "there is no GPU 7"}, "no plan: there is no GPU 7"),
        ({"failed": True, "verdict": "unknown", "msg": "rule 'x': severity is 'no'"}, "no plan: rule 'x'"),
        ({"verdict": "allowed", "findings": [], "budget": None}, "ALLOWED (SGLang unknown, 0 s)"),
    ],
)
def test_where_there_is_no_plan_the_reason_is_told(plan: t.Any, words: str) -> None:
    assert words in "\n".join(plan_lines({"host": "h", "server": "s", "plan": plan}))


def test_why_names_every_deny_with_its_remedy_and_nothing_else() -> None:
    assert plan_why(PLAN) == (
        "HiCache would pin 2,400.0 GB (hicache-size 53 is the largest that fits) [hicache_too_large]; "
        "Not so. (Do it otherwise.) [our_rule]"
    )
    assert plan_why({**PLAN, "findings": [WARNED], "summary": "allowed, 1 warning"}) == "allowed, 1 warning"
    assert plan_why({"failed": True, "msg": "no such GPU"}) == "no such GPU"


def test_in_a_relaunch_it_is_told_in_short() -> None:
    allowed = {**PLAN, "summary": "allowed, 1 warning", "findings": [UNSURE, WARNED, NOTED]}
    text = "\n".join(serve_report.planned_lines(allowed))
    assert text.splitlines() == [
        "Planned   allowed, 1 warning",
        "          unknown: config.json is not there [model_problem]",
        "          warning: Not so. Waived: tested [accepted]",
    ]
    for nothing in (None, {}, {"skipped": True}, {"summary": "", "findings": []}):
        assert serve_report.planned_lines(nothing) == []


# --- filters ----------------------------------------------------------------------------------------------------------

OWN = {
    "id": "our_rule",
    "when": {"fact": "flags.page_size", "is": 64},
    "severity": "deny",
    "reason": "Slow.",
    "remedy": "Take it away.",
    "source": "our ticket",
    "waivable": True,
}


def test_the_filters_give_all_rules_and_their_mistakes() -> None:
    filters = FilterModule().filters()
    assert filters["guardrails"]([OWN]) == [*guardrails.shipped(), OWN]
    assert filters["guardrail_problems"]([OWN], {"our_rule": "needed for one more week"}, "gpu01") == []
    wrong = filters["guardrail_problems"]([{**OWN, "severity": "no"}], {"nothing_like_it": "x"}, "gpu01: server 'chat'")
    assert len(wrong) == 2
    assert "severity" in wrong[0] and "nothing_like_it" in wrong[1]
    assert filters["plan_lines"] is plan_lines and filters["plan_why"] is plan_why


def test_the_filter_names_the_mistakes_of_a_hosts_servers() -> None:
    """A server without waivers has those of the defaults; those of other servers are not asked for."""
    servers = [
        {"name": "chat", "waivers": {"weights_do_not_fit": "the last release did fit"}},
        {"name": "embed", "waivers": {"our_rule": "x"}},
        {"name": "other", "waivers": {"nothing": "needed for one more week"}},
        {"name": "plain"},
    ]
    problems = FilterModule().filters()["server_guardrail_problems"]
    assert problems([OWN], ["chat"], servers, {}, "gpu01") == []
    (wrong,) = problems([OWN], ["chat", "embed"], servers, {}, "gpu01")
    assert wrong.startswith("gpu01: server 'embed': waivers: the reason for 'our_rule' is 'x'")
    defaults = {"waivers": {"nowhere": "needed for one more week"}}
    both = problems(["none.yml"], ["chat", "plain"], servers, defaults, "gpu01")
    assert len(both) == 2
    assert both[0].startswith("gpu01: sglang_guardrails[0]: the file none.yml is not there")
    assert both[1].startswith("gpu01: server 'plain': waivers: there is no rule 'nowhere'")
