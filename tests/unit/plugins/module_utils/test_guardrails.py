# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules: what they say when they hold, when they don't and when nobody knows; waivers; mistakes in rules."""

from __future__ import annotations

import typing as t

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide import guardrails
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.conditions import Facts
from ansible_collections.cleanslate.sglang.plugins.module_utils.plan_model import (
    Budget,
    Figure,
    Finding,
    GpuFacts,
    HostFacts,
    ModelFacts,
    Topology,
    verdict_of,
)

RULE: dict[str, t.Any] = {
    "id": "too_many",
    "title": "Too many ranks",
    "when": {"fact": "topology.tp", "above": 4},
    "severity": "deny",
    "waivable": True,
    "reason": "tp is {topology.tp}, flag {flags.tp_size}.",
    "remedy": "Lower it.",
    "source": "a test",
}


def rules(**changes: t.Any) -> list[guardrails.Rule]:
    found, problems = guardrails.parse_rules([{**RULE, **changes}])
    assert not problems
    return found


def judge(tree: t.Mapping[str, t.Any], waivers: t.Optional[dict[str, str]] = None, **changes: t.Any) -> list[Finding]:
    return guardrails.judge(rules(**changes), Facts(tree), waivers)


def test_a_rule_that_holds() -> None:
    (finding,) = judge({"topology": {"tp": 8}, "flags": {"tp_size": 8}})
    assert finding == Finding(
        "too_many", "deny", "too_many", "tp is 8, flag 8.", "Lower it.", "a test", waivable=True, waived=None
    )
    assert verdict_of([finding]) == "denied"


@pytest.mark.parametrize("severity", guardrails.SEVERITIES)
def test_a_rule_that_does_not_hold_is_silent(severity: str) -> None:
    assert judge({"topology": {"tp": 4}, "flags": {}}, severity=severity) == []


def test_an_unknown_deny_names_what_is_missing() -> None:
    (finding,) = judge({"topology": {"tp": None}, "flags": {}})
    assert (finding.severity, finding.id) == ("unknown", "too_many")
    assert "topology.tp is not known" in finding.message
    assert verdict_of([finding]) == "unknown"


def test_an_unknown_warning_is_one_note_and_an_unknown_note_is_silence() -> None:
    (finding,) = judge({"topology": {}}, severity="warn")
    assert (finding.severity, finding.id) == ("note", guardrails.NOT_JUDGED)
    assert "too_many (topology.tp)" in finding.message
    assert judge({"topology": {}}, severity="note") == []


def test_a_waiver_is_quoted() -> None:
    waivers = {"too_many": "measured on 3 March, is fine"}
    (finding,) = judge({"topology": {"tp": 8}, "flags": {}}, waivers)
    assert (finding.severity, finding.waived) == ("warn", waivers["too_many"])
    assert finding.message.endswith("Waived: measured on 3 March, is fine")
    assert verdict_of([finding]) == "allowed"
    (finding,) = judge({"topology": {}}, waivers)
    assert (finding.severity, finding.waived) == ("warn", waivers["too_many"])
    assert "not known" in finding.message
    (finding,) = judge({"topology": {"tp": 8}, "flags": {}}, waivers, severity="warn")
    assert finding.severity == "note"


def test_a_rule_that_is_not_waivable_takes_no_waiver() -> None:
    (finding,) = judge({"topology": {"tp": 8}, "flags": {}}, {"too_many": "it is fine here"}, waivable=False)
    assert (finding.severity, finding.waived) == ("deny", None)


@pytest.mark.parametrize(
    ("version", "severity"),
    [
        ("0.5.12", None),
        ("0.5.14", "deny"),
        ("0.5.15.post1", "deny"),
        ("0.5.16", None),
        (None, "unknown"),
        ("?", "unknown"),
    ],
)
def test_versions_of_a_rule(version: t.Optional[str], severity: t.Optional[str]) -> None:
    tree = {"topology": {"tp": 8}, "flags": {}, "sglang": {"version": version}}
    found = judge(tree, since="0.5.14", until="0.5.16")
    assert [finding.severity for finding in found] == ([severity] if severity else [])


def test_another_version_needs_no_facts() -> None:
    assert judge({"topology": {}, "sglang": {"version": "0.5.20"}}, until="0.5.16") == []


def test_the_subject_is_the_flags() -> None:
    when = {"all": [{"fact": "flags.tp_size", "above": 1}, {"fact": "flags.dp_size", "above": 1}]}
    (finding,) = judge({"flags": {"tp_size": 2, "dp_size": 2}, "topology": {}}, when=when)
    assert finding.subject == "tp-size, dp-size"
    assert finding.message == "tp is (topology.tp not known), flag 2."


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{flags.a}", "not set"),
        ("{flags.n}", "2,400"),
        ("{flags.f}", "0.93"),
        ("{flags.b}", "true"),
        ("{flags.l}", "x, 1"),
        ("{flags.d}", "a mapping"),
        ("{flags.big}", "a number out of all bounds"),
        ("{host.mem_available_mib:gb}", "476.7 GB"),
        ("{host.mem_available_mib:gib}", "444.0 GiB"),
        ("{budget.kv_gb:gib}", "1.0 GiB"),
        ("{host.shm_free_mib:gb}", "(host.shm_free_mib not known)"),
    ],
)
def test_facts_in_texts(text: str, shown: str) -> None:
    tree = {
        "flags": {"n": 2400, "f": 0.93, "b": True, "l": ["x", 1], "d": {"a": 1}, "big": 10**5000},
        "host": {"mem_available_mib": 454_656},
        "budget": {"kv_gb": 1.073741824},
    }
    assert guardrails.filled(f"<{text}>", Facts(tree)) == f"<{shown}>"


def test_no_text_shows_a_secret() -> None:
    tree = guardrails.facts_tree(
        {"api_key": "sk-1", "tp_size": 2}, environment={"HF_TOKEN": "hf-1", "NCCL_DEBUG": "INFO", "EMPTY_KEY": None}
    )
    for path in ("flags.api_key", "environment.HF_TOKEN"):
        text = guardrails.filled(f"{{{path}}}", tree)
        assert "sk-1" not in text and "hf-1" not in text
        assert tree.get(path).value not in ("sk-1", "hf-1")
        (problem,) = guardrails.parse_rules([{**RULE, "reason": f"It is {{{path}}}."}])[1]
        assert "is a secret, which no text may quote" in problem
    assert tree.get("environment.NCCL_DEBUG").value == "INFO"
    assert tree.get("environment.EMPTY_KEY").value is None
    when = {"fact": "flags.url", "set": True}
    (finding,) = judge({"flags": {"url": "--api-key sk-2"}}, when=when, reason="It is {flags.url}", waivable=False)
    assert "sk-2" not in finding.message


# The tree


def gpu(index: int, **values: t.Any) -> GpuFacts:
    given: dict[str, t.Any] = {"name": "H200", "total_mib": 1000, "free_mib": 900, "compute_capability": "9.0"}
    return GpuFacts(index, **{**given, **values})


def topology(*gpus: GpuFacts) -> Topology:
    return Topology(tp=2, pp=1, dp=1, attention_dp=False, nnodes=1, node_rank=0, ranks_here=2, gpus=gpus)


def test_gpus_together() -> None:
    tree = guardrails.facts_tree({}, topology=topology(gpu(0), gpu(1, total_mib=500, compute_capability="12.0")))
    assert tree.tree["gpu"] == {
        "count": 2,
        "names": ("H200",),
        "all_same_model": True,
        "min_total_mib": 500,
        "max_total_mib": 1000,
        "min_free_mib": 900,
        "compute_capability": "9.0",
    }
    assert set(tree.tree["gpu"]) == set(guardrails.GPU_FACTS)


def test_capabilities_are_compared_as_numbers() -> None:
    gpus = (gpu(0, compute_capability="12.0"), gpu(1, compute_capability="9.0"))
    assert guardrails.facts_tree({}, topology=topology(*gpus)).get("gpu.compute_capability").value == "9.0"


def test_one_gpu_that_does_not_say_leaves_all_unknown() -> None:
    gpus = (gpu(0), gpu(1, name=None, total_mib=None, free_mib=None, compute_capability=None))
    tree = guardrails.facts_tree({}, topology=topology(*gpus))
    assert {name for name in guardrails.GPU_FACTS if not tree.get(f"gpu.{name}").known} == {*guardrails.GPU_FACTS} - {
        "count"
    }
    assert not guardrails.facts_tree({}, topology=topology()).get("gpu.count").known


def test_a_model_that_was_read_and_one_that_was_not() -> None:
    read = ModelFacts("/m", "local", architectures=("LlamaForCausalLM",))
    tree = guardrails.facts_tree({}, model=read)
    assert (tree.get("model.quantization").value, tree.get("model.experts").value) == ("none", 0)
    moe = ModelFacts("/m", "local", architectures=("X",), quantization="fp8", extra={"n_routed_experts": 384})
    tree = guardrails.facts_tree({}, model=moe)
    assert (tree.get("model.quantization").value, tree.get("model.experts").value) == ("fp8", 384)
    for model in (ModelFacts("org/m", "remote"), ModelFacts("/m", "unreadable"), ModelFacts("/m", "local"), None):
        tree = guardrails.facts_tree({}, model=model)
        assert not tree.get("model.quantization").known and not tree.get("model.experts").known


def test_nothing_known_at_all() -> None:
    tree = guardrails.facts_tree({"--tp-size": 2})
    assert tree.get("flags.tp_size").value == 2
    for path in (
        "host.ranks_here",
        "budget.x",
        "environment.X",
        "gpu.count",
        "server.port",
        "sglang.version",
        "model.path",
    ):
        assert not tree.get(path).known


def test_every_known_name_is_in_a_full_tree() -> None:
    budget = Budget(gpu=(Figure("weights", "Weights", "bytes", 10.0**9), Figure("tokens", "Tokens", "tokens", None)))
    tree = guardrails.facts_tree(
        {},
        model=ModelFacts("/m", "local"),
        topology=topology(gpu(0)),
        host=HostFacts(),
        budget=budget,
        environment={},
        server={"port": 1, "api_key": "sk", "unit": "u"},
        version="0.5.15",
    )
    for root in ("model", "gpu", "host", "topology", "sglang"):
        names = {name for name in guardrails.KNOWN[root] or () if not name.endswith(".*")}
        assert names <= set(tree.tree[root]), root
    assert tree.get("budget.weights_gb").value == 1.0
    assert not tree.get("budget.tokens").known
    assert tree.tree["server"] == {"port": 1, "unit": "u"}


# Mistakes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": None}, "rule number 1: 'id' is missing"),
        ({"id": "A b"}, "id is 'A b'; allowed are 3 to 64 small letters"),
        ({"id": 5}, "rule number 1: id is 5"),
        ({"when": None}, "'when' is missing"),
        ({"when": {"fact": "topology.tp", "atleast": 1}}, "when: unknown operator 'atleast'; did you mean"),
        ({"when": {"fact": "topology.tpp", "is": 1}}, "did you mean 'topology.tp'?"),
        ({"when": {"fact": "topology.gpus", "is": 1}}, "unknown fact 'topology.gpus'"),
        ({"severity": "denied"}, "severity is 'denied'; did you mean 'deny'?"),
        ({"severity": ["deny"]}, "severity is a list; allowed are deny, note, warn"),
        ({"severity": "fatal"}, "severity is 'fatal'; allowed are deny, note, warn"),
        ({"waivable": "yes"}, "waivable is 'yes'; allowed are true and false"),
        ({"since": 0.5}, "since is 0.5; allowed is a version in quotes"),
        ({"until": "soon"}, "until is 'soon'; allowed is a version in quotes"),
        ({"reason": ""}, "reason is ''; allowed is a text"),
        ({"reason": ["x"]}, "reason is a list"),
        ({"remedy": "x" * 3000}, "allowed is a text of up to 2000 characters"),
        ({"remedy": "See {topology.tpp}"}, "remedy: {topology.tpp}: unknown fact 'topology.tpp'; did you mean"),
        ({"remedy": "See {}"}, "remedy: {}: fact '' is no name of a fact"),
        ({"reason": "{topology.tp:gb}"}, "'gb' is no unit for 'topology.tp'; allowed are gb and gib behind sizes"),
        ({"reason": "{host.shm_free_mib:mb}"}, "'mb' is no unit for 'host.shm_free_mib'"),
        ({"sevrity": "deny"}, "unknown field 'sevrity'; did you mean 'severity'?"),
        ({10**5000: 1}, "unknown field 'a number out of all bounds'"),
        ({None: 1}, "unknown field 'null'"),
    ],
)
def test_each_mistake_names_rule_field_value_and_what_is_allowed(change: dict[t.Any, t.Any], words: str) -> None:
    found, problems = guardrails.parse_rules([{**RULE, **change}], "mine.yml")
    assert found == []
    assert len(problems) == 1 and words in problems[0], problems
    assert problems[0].startswith("mine.yml: rule ")


def test_all_mistakes_at_once() -> None:
    _found, problems = guardrails.parse_rules([{"id": "x1"}, "deny", {**RULE, "severity": "no"}])
    assert len(problems) == 8
    assert "guardrails: rule number 2: is 'deny'; allowed is a mapping" in problems[6]


def test_a_good_rule_beside_a_bad_one_counts() -> None:
    found, problems = guardrails.parse_rules([{**RULE, "id": "bad", "when": 5}, RULE])
    assert [rule.id for rule in found] == ["too_many"] and len(problems) == 1


def test_twice_the_same_id() -> None:
    found, problems = guardrails.parse_rules([RULE, RULE])
    assert len(found) == 1
    assert problems == ["guardrails: rule 'too_many' is there twice; give one of them another id"]


@pytest.mark.parametrize("raw", [None, {}, "x", 5, [RULE] * 501])
def test_no_list_of_rules(raw: t.Any) -> None:
    found, problems = guardrails.parse_rules(raw)
    assert found == [] and len(problems) == 1


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.fixed_dictionaries({}, optional={name: _JUNK | st.just(RULE[name]) for name in RULE}) | _JUNK))
def test_junk_is_judged_or_refused(raw: t.Any) -> None:
    found, problems = guardrails.parse_rules(raw)
    assert len(found) + len(problems) >= len(raw)
    guardrails.judge(found, Facts({"topology": {"tp": 8}}), {"too_many": "it is fine here"})


# --- what a finding has, whole ---


def test_an_unknown_deny_whole() -> None:
    (finding,) = judge({"topology": {}, "flags": {}}, when={"fact": "topology.tp", "above": {"fact": "flags.tp_size"}})
    assert finding == Finding(
        "too_many",
        "unknown",
        "tp-size",
        "Whether this holds is not known, because topology.tp is not known: Too many ranks",
        "Make it known, or change what decides it: topology.tp, flags.tp_size",
        "a test",
        True,
        None,
    )


def test_warnings_that_could_not_be_judged_are_one_note_whole() -> None:
    found = guardrails.judge(
        [*rules(severity="warn"), *rules(id="another", severity="warn", when={"fact": "topology.pp", "is": 1})],
        Facts({"topology": {}}),
    )
    assert found == [
        Finding(
            guardrails.NOT_JUDGED,
            "note",
            "guardrails",
            "Not judged, because facts are not known: too_many (topology.tp); another (topology.pp)",
            source="guardrails",
        )
    ]


def test_one_rule_that_is_silent_or_not_known_does_not_end_the_judgement() -> None:
    silent = rules(id="false", when={"fact": "topology.tp", "is": 1})
    unsure = rules(id="open", when={"fact": "topology.pp", "is": 1})
    found = guardrails.judge([*silent, *unsure, *rules()], Facts({"topology": {"tp": 8}, "flags": {}}))
    assert [(one.id, one.severity) for one in found] == [("open", "unknown"), ("too_many", "deny")]


def test_the_subject_is_the_first_three_flags() -> None:
    names = ["a_b", "c", "d", "e"]
    when = {"all": [{"fact": f"flags.{name}", "is": 1} for name in names]}
    (finding,) = judge({"flags": dict.fromkeys(names, 1), "topology": {"tp": 1}}, when=when)
    assert finding.subject == "a-b, c, d"


@pytest.mark.parametrize("name", ["n_routed_experts", "num_experts", "num_local_experts"])
def test_experts_by_each_of_their_names(name: str) -> None:
    model = ModelFacts("/m", "local", architectures=("X",), extra={name: 64})
    assert guardrails.facts_tree({}, model=model).get("model.experts").value == 64


def test_a_mistake_names_its_rule() -> None:
    def first(*raw: t.Any) -> str:
        return guardrails.parse_rules(list(raw))[1][0]

    assert first({**RULE, "severity": "no"}).startswith("guardrails: rule 'too_many': severity")
    assert first({**RULE, "id": None}).startswith("guardrails: rule number 1: ")
    assert first(RULE, "x").startswith("guardrails: rule number 2: is 'x'")


def test_each_wrong_quote_of_a_text_is_named() -> None:
    _rules, problems = guardrails.parse_rules([{**RULE, "reason": "{topology.zz} {flags.api_key} {topology.tp:gb}"}])
    assert len(problems) == 3
    assert all(word in problem for word, problem in zip(("zz", "secret", "no unit"), problems))


def test_as_many_rules_and_as_long_texts_as_are_allowed() -> None:
    many = [{**RULE, "id": f"rule_{number}"} for number in range(guardrails.MAX_RULES)]
    assert len(guardrails.parse_rules(many)[0]) == guardrails.MAX_RULES
    assert guardrails.parse_rules([*many, RULE])[0] == []
    assert guardrails.parse_rules([{**RULE, "title": "x" * 2000}])[1] == []
    assert guardrails.parse_rules([{**RULE, "title": "x" * 2001}])[1] != []
    version = "1." + "0" * 38
    assert guardrails.parse_rules([{**RULE, "since": version}])[1] == []
    assert guardrails.parse_rules([{**RULE, "since": version + "0"}])[1] != []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (2.0, "2"),
        (100.0, "100"),
        (2.5, "2.5"),
        (1234.567, "1,234.57"),
        (10.0**15, "1.000e+15"),
        (9.0 * 10**14, "900,000,000,000,000"),
        (12345, "12,345"),
        (10**20 - 1, "99,999,999,999,999,999,999"),
        (10**20, "a number out of all bounds"),
        ([*range(1, 12), [5]], "1, 2, 3, 4, 5, 6, 7, 8"),
        ("x" * 300, "x" * 200),
    ],
)
def test_a_quoted_value(value: t.Any, text: str) -> None:
    assert guardrails.filled("{flags.a}", Facts({"flags": {"a": value}})) == text


def test_a_size_in_another_unit_only_where_one_is_asked_for() -> None:
    facts = Facts({"host": {"mem_available_mib": 2048}})
    assert guardrails.filled("{host.mem_available_mib:gib} {host.mem_available_mib}", facts) == "2.0 GiB 2,048"
