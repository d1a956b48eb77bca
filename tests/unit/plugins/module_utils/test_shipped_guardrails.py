# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every shipped rule speaks where it must, is silent where it must, and says what it does not know."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import typing as t
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide import guardrails
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.conditions import Facts
from ansible_collections.cleanslate.sglang.plugins.module_utils.plan_model import Finding

ROOT = Path(__file__).resolve().parents[4]
SHIPPED = ROOT / "roles" / "plan" / "files" / "guardrails.yml"

# A launch that no rule has anything to say about; everything is known.
HARMLESS: dict[str, t.Any] = {
    "flags": {"model_path": "/models/llama", "tp_size": 2, "mem_fraction_static": 0.85},
    "environment": {"NCCL_DEBUG": "WARN"},
    "model": {
        "path": "/models/llama",
        "source": "local",
        "architectures": ("LlamaForCausalLM",),
        "model_type": "llama",
        "quantization": "none",
        "is_mla": False,
        "experts": 0,
        "extra": {},
    },
    "gpu": {"count": 2, "names": ("NVIDIA H200",), "all_same_model": True, "compute_capability": "9.0"},
    "host": {"cgroup_limited": False},
    "topology": {"tp": 2, "pp": 1, "dp": 1, "nnodes": 1, "node_rank": 0, "ranks_here": 2},
    "budget": {},
    "server": {"has_api_key": False, "has_admin_api_key": False},
    "sglang": {"version": "0.5.15"},
}
KIMI = {
    "model.path": "/models/kimi",
    "model.architectures": ("KimiK25ForConditionalGeneration",),
    "model.model_type": "kimi_k25",
    "model.quantization": "compressed-tensors",
    "model.is_mla": True,
    "model.experts": 384,
    "model.extra": {"weight_format": "int4"},
    "flags.reasoning_parser": "kimi_k2",
    "flags.tool_call_parser": "kimi_k2",
}
BLACKWELL = {"gpu.names": ("NVIDIA RTX PRO 6000 Blackwell Server Edition",), "gpu.compute_capability": "12.0"}
BLACKWELL["environment.NCCL_P2P_DISABLE"] = "1"
HICACHE = {"flags.enable_hierarchical_cache": True, "flags.hicache_size": 48, "sglang.version": "0.5.23"}


@dataclass(frozen=True)
class Case:
    """``positive``: changes to the harmless launch with which the rule speaks. On top of them it still speaks with each
    of ``also``, each of ``negatives`` silences it, and each of ``unknowns`` leaves it open."""

    positive: t.Mapping[str, t.Any]
    negatives: t.Sequence[t.Mapping[str, t.Any]]
    unknowns: t.Sequence[str]
    also: t.Sequence[t.Mapping[str, t.Any]] = ()


def model(architecture: str, **more: t.Any) -> dict[str, t.Any]:
    return {"model.architectures": (architecture,), **{f"model.{name}": value for name, value in more.items()}}


def without_parser(architecture: str, parser: str, path: str = "/models/m") -> Case:
    return Case(
        model(architecture, path=path),
        [{"flags.reasoning_parser": parser}, {"flags.reasoning_parser": "auto"}, model("LlamaForCausalLM")],
        ["model.architectures", "flags"],
    )


def backend(
    name: str,
    good: t.Sequence[str],
    bad: t.Sequence[str] = ("12.0", "12.1"),
    flags: t.Sequence[str] = ("attention_backend", "decode_attention_backend"),
) -> Case:
    """An attention backend that does not fit the GPU, by each of the flags that choose one."""
    nothing = {f"flags.{flag}": None for flag in flags}
    return Case(
        {f"flags.{flags[0]}": name, "gpu.compute_capability": bad[0]},
        [
            {f"flags.{flags[0]}": "triton"},
            nothing,
            *({"gpu.compute_capability": capability} for capability in good),
        ],
        ["gpu.compute_capability", "flags", "gpu"],
        [
            *({**nothing, f"flags.{flag}": name} for flag in flags),
            *({"gpu.compute_capability": capability} for capability in bad),
        ],
    )


ANY_BACKEND = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


FA3 = backend("fa3", ("9.0",), ("12.0", "10.0", "7.5"), ANY_BACKEND)
HOPPER = {"gpu.compute_capability": "9.0"}

CASES: dict[str, Case] = {
    "very_high_static_fraction": Case(
        {"flags.mem_fraction_static": 0.93},
        [{"flags.mem_fraction_static": 0.92}, {"flags.mem_fraction_static": None}],
        ["flags"],
    ),
    "hicache_with_very_high_fraction": Case(
        {**HICACHE, "flags.mem_fraction_static": "0.95"},
        [{"flags.mem_fraction_static": 0.94}, {"flags.enable_hierarchical_cache": None}],
        ["flags"],
    ),
    "hicache_without_radix_cache": Case(
        {**HICACHE, "flags.disable_radix_cache": True},
        [{"flags.disable_radix_cache": None}, {"flags.enable_hierarchical_cache": False}],
        ["flags"],
    ),
    "hicache_pins_until_exit": Case(
        {**HICACHE, "sglang.version": "0.5.15.post1"},
        [{"sglang.version": "0.5.16"}, {"flags.enable_hierarchical_cache": None}],
        ["sglang.version"],
    ),
    "hicache_blind_to_container_limit": Case(
        {**HICACHE, "sglang.version": "0.5.20", "host.cgroup_limited": True},
        [{"sglang.version": "0.5.21"}, {"host.cgroup_limited": False}, {"flags.enable_hierarchical_cache": None}],
        ["sglang.version", "host.cgroup_limited"],
    ),
    "kimi_k2_reasoning_parser": Case(
        {**KIMI, "flags.reasoning_parser": None},
        [
            {"flags.reasoning_parser": "kimi_k2"},
            {"flags.reasoning_parser": "auto"},
            {"model.path": "/models/Kimi-K2-Instruct-0905", "model.model_type": "kimi_k2"},
            {"model.path": "/models/Kimi-K2-Base", "model.model_type": "kimi_k2"},
            {**model("LlamaForCausalLM", model_type="llama")},
        ],
        ["flags", "model.path"],
        [
            {"flags.reasoning_parser": "kimi"},
            model("X", model_type="kimi_k2"),
            model("X", model_type="kimi_k25"),
            model("KimiK25ForConditionalGeneration", model_type="x"),
            model("X", model_type="x", path="moonshotai/Kimi-K2-Thinking"),
            model("X", model_type="x", path="/models/kimi_k2.5"),
        ],
    ),
    "reasoning_parser_of_another_family": Case(
        {**KIMI, "flags.reasoning_parser": "qwen3"},
        [
            {"flags.reasoning_parser": "kimi_k2"},
            {"flags.reasoning_parser": None},
            {"flags.reasoning_parser": "kimi"},
            {"flags.reasoning_parser": "auto"},
            {**model("LlamaForCausalLM", model_type="llama")},
        ],
        ["flags"],
        [
            model("X", model_type="kimi_k2"),
            model("X", model_type="kimi_k25"),
            model("KimiK25ForConditionalGeneration", model_type="x"),
        ],
    ),
    "gpt_oss_reasoning_parser": without_parser("GptOssForCausalLM", "gpt-oss"),
    "minimax_reasoning_parser": without_parser("MiniMaxM2ForCausalLM", "minimax"),
    "minimax_append_think": Case(
        {"flags.reasoning_parser": "minimax-append-think"}, [{"flags.reasoning_parser": "minimax"}], ["flags"]
    ),
    "deepseek_r1_reasoning_parser": Case(
        {"model.path": "/models/DeepSeek-R1-0528"},
        [{"flags.reasoning_parser": "deepseek-r1"}, {"model.path": "/models/DeepSeek-V3.1"}],
        ["model.path", "flags"],
    ),
    "glm_reasoning_parser": without_parser("Glm4MoeForCausalLM", "glm45"),
    "qwen3_reasoning_parser": Case(
        model("Qwen3MoeForCausalLM", path="/models/Qwen3-235B-A22B"),
        [
            {"flags.reasoning_parser": "qwen3"},
            {"model.path": "/models/Qwen3-Coder-30B"},
            {"model.path": "Qwen/Qwen3-235B-A22B-Instruct-2507"},
            {"model.path": "Qwen/Qwen3-8B-Base"},
            {"model.path": "Qwen/Qwen3-Embedding-8B"},
            {"model.path": "Qwen/Qwen3-Reranker-8B"},
            model("Qwen2ForCausalLM"),
        ],
        ["model.architectures", "model.path", "flags"],
    ),
    "other_reasoning_parser": without_parser("DeepseekV32ForCausalLM", "deepseek-v3"),
    "tool_call_parser_unset": Case(
        model("GptOssForCausalLM"),
        [{"flags.tool_call_parser": "gpt-oss"}, model("LlamaForCausalLM")],
        ["model.architectures", "flags"],
    ),
    "fp8_kv_on_int4_mla_moe": Case(
        {**KIMI, "flags.kv_cache_dtype": "fp8_e4m3"},
        [
            {"flags.kv_cache_dtype": None},
            {"flags.kv_cache_dtype": "bf16"},
            {"model.is_mla": False},
            {"model.experts": 0},
            {"model.quantization": "fp8"},
            {"model.quantization": "none"},
            {"model.extra": {"weight_format": "float8"}},
        ],
        ["model.is_mla", "model.quantization", "model.extra", "model.experts", "model", "flags"],
        [
            *({"model.quantization": name} for name in ("gptq", "gptq_marlin", "auto-round", "moe_wna16")),
            *({"model.quantization": name, "model.extra": {}} for name in ("awq", "W4A16", "int4")),
        ],
    ),
    "fp8_kv_on_glm_dsa": Case(
        {**model("GlmMoeDsaForCausalLM"), "flags.kv_cache_dtype": "fp8_e4m3", "flags.reasoning_parser": "glm45"},
        [{"flags.kv_cache_dtype": "bf16"}, model("Glm4MoeForCausalLM")],
        ["model.architectures"],
    ),
    "trtllm_mla_on_sm120": backend("trtllm_mla", ("9.0", "10.0", "10.3", "13.0"), flags=ANY_BACKEND),
    "trtllm_mla_needs_blackwell": backend("trtllm_mla", ("10.0", "10.3", "12.0"), ("9.0", "8.6")),
    "flashinfer_mla_on_sm120": Case(
        {**KIMI, **BLACKWELL, "flags.attention_backend": "flashinfer"},
        [
            {"flags.attention_backend": "triton"},
            {"model.is_mla": False},
            {"gpu.compute_capability": "10.0"},
            {"gpu.compute_capability": "13.0"},
        ],
        ["model.is_mla", "gpu.compute_capability", "gpu", "model"],
        [
            {"flags.attention_backend": None, "flags.prefill_attention_backend": "flashinfer"},
            {"flags.attention_backend": "triton", "flags.decode_attention_backend": "flashinfer"},
            {"gpu.compute_capability": "12.1"},
        ],
    ),
    "cutedsl_mla_needs_sm100": backend("cutedsl_mla", ("10.0", "10.3"), ("12.0", "9.0")),
    "tokenspeed_mla_on_sm120": backend("tokenspeed_mla", ("10.0", "13.0")),
    "trtllm_mha_prefill_needs_sm100": Case(
        {"flags.attention_backend": "trtllm_mha"},
        [
            {"flags.prefill_attention_backend": "fa3"},
            {"gpu.compute_capability": "10.3"},
            {"sglang.version": "0.5.19"},
            {"flags.attention_backend": None, "flags.decode_attention_backend": "trtllm_mha"},
        ],
        ["gpu.compute_capability", "sglang.version"],
        [
            {"flags.attention_backend": None, "flags.prefill_attention_backend": "trtllm_mha"},
            {"gpu.compute_capability": "12.0"},
        ],
    ),
    "fa3_on_blackwell": dataclasses.replace(
        FA3,
        negatives=[*FA3.negatives, {"gpu.compute_capability": "8.0"}, {"model.is_mla": True, **HOPPER}],
        also=[*FA3.also, {"gpu.compute_capability": "8.9", "model.is_mla": True}],
    ),
    "flashmla_on_sm120": backend("flashmla", ("10.0", "13.0")),
    "nvfp4_kv_needs_blackwell": Case(
        {"flags.kv_cache_dtype": "nvfp4"},
        [{"flags.kv_cache_dtype": "bf16"}, {"gpu.compute_capability": "12.0"}],
        ["gpu.compute_capability"],
    ),
    "deepseek_v4_on_sm120": Case(
        {**model("DeepseekV4ForCausalLM"), **BLACKWELL},
        [{"gpu.compute_capability": "10.0"}, {"gpu.compute_capability": "13.0"}, model("DeepseekV32ForCausalLM")],
        ["model.architectures", "gpu.compute_capability"],
    ),
    "p2p_hang": Case(
        {**BLACKWELL, "environment.NCCL_P2P_DISABLE": None},
        [{"environment.NCCL_P2P_DISABLE": "0"}, {"gpu.names": ("NVIDIA H200",)}, {"gpu.count": 1}],
        ["gpu.names", "gpu.count", "environment"],
        [{"gpu.names": ("NVIDIA H200", "NVIDIA RTX 6000 Ada Generation")}],
    ),
    "data_parallel_not_watched": Case({"topology.dp": 4}, [{"topology.dp": 1}], ["topology.dp", "topology"]),
    "multi_node_stop_order": Case(
        {"topology.nnodes": 2, "sglang.version": "0.5.21"},
        [{"topology.nnodes": 1}, {"sglang.version": "0.5.20"}],
        ["topology.nnodes", "sglang.version"],
    ),
    "multi_node_constant_health": Case({"topology.node_rank": 1}, [{"topology.node_rank": 0}], ["topology.node_rank"]),
    "multi_node_one_dead": Case({"topology.nnodes": 2}, [{"topology.nnodes": 1}], ["topology.nnodes"]),
    "disaggregation_bootstrap_port": Case(
        {"flags.disaggregation_mode": "prefill"},
        [{"flags.disaggregation_mode": "null"}, {"flags.disaggregation_bootstrap_port": 8999}],
        ["flags"],
        [{"flags.disaggregation_mode": "decode"}],
    ),
    "attention_dp_open_sockets": Case(
        {"flags.enable_dp_attention": True},
        [{"flags.enable_dp_attention": None}, {"environment.SGLANG_ZMQ_ALLOWED_PEERS": "10.0.0.0/8"}],
        ["flags", "environment"],
        [{"flags.enable_dp_attention": None, "flags.attn_dp_size": 4}],
    ),
    "tokenizer_workers_keep_port": Case(
        {"flags.tokenizer_worker_num": 4}, [{"flags.tokenizer_worker_num": 1}], ["flags"]
    ),
    "api_key_with_tokenizer_workers": Case(
        {"flags.tokenizer_worker_num": 4, "server.has_api_key": True},
        [{"flags.tokenizer_worker_num": None}, {"server.has_api_key": False}],
        ["server.has_api_key"],
    ),
    "admin_key_with_tokenizer_workers": Case(
        {"flags.tokenizer_worker_num": 4, "server.has_admin_api_key": True},
        [{"flags.tokenizer_worker_num": None}, {"server.has_admin_api_key": False}],
        ["server.has_admin_api_key"],
    ),
    "keys_in_log": Case(
        {"server.has_api_key": True},
        [{"server.has_api_key": False}],
        ["server.has_api_key"],
        [{"server.has_api_key": False, "server.has_admin_api_key": True}],
    ),
    "metrics_without_key": Case(
        {"flags.enable_metrics": True, "server.has_admin_api_key": True},
        [{"flags.enable_metrics": None}, {"server.has_admin_api_key": False}],
        ["flags"],
        [{"server.has_admin_api_key": False, "server.has_api_key": True}],
    ),
    "warmup_skipped": Case({"flags.skip_server_warmup": True}, [{"flags.skip_server_warmup": False}], ["flags"]),
    "health_without_generation": Case(
        {"environment.SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"},
        [{"environment.SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "1"}, {"sglang.version": "0.5.5"}],
        ["environment", "sglang.version"],
        [{"environment.SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}],
    ),
}


@functools.lru_cache(maxsize=1)
def shipped() -> tuple[guardrails.Rule, ...]:
    rules, problems = guardrails.parse_rules(yaml.safe_load(SHIPPED.read_text(encoding="utf-8")), "guardrails.yml")
    assert problems == []
    return tuple(rules)


def by_id(name: str) -> guardrails.Rule:
    return next(rule for rule in shipped() if rule.id == name)


def tree(*changes: t.Mapping[str, t.Any]) -> Facts:
    """The harmless launch with changes, the later ones over the earlier ones. A whole part can be taken out."""
    result = copy.deepcopy(HARMLESS)
    for change in changes:
        for path, value in change.items():
            first, _dot, rest = path.partition(".")
            if rest:
                result[first][rest] = value
            else:
                result[first] = value
    return Facts(result)


def said(facts: Facts, *rules: guardrails.Rule) -> list[Finding]:
    return guardrails.judge(rules or shipped(), facts)


def test_every_rule_has_its_cases() -> None:
    assert sorted(CASES) == sorted(rule.id for rule in shipped())
    assert all(case.positive and case.negatives and case.unknowns for case in CASES.values())


def test_nothing_is_said_of_a_harmless_launch() -> None:
    assert said(tree()) == []


@pytest.mark.parametrize("name", CASES)
def test_positive(name: str) -> None:
    rule = by_id(name)
    (finding,) = said(tree(CASES[name].positive), rule)
    assert (finding.id, finding.severity, finding.source) == (name, rule.severity, rule.source)
    for text in (finding.message, finding.remedy):
        assert text and "{" not in text and "not known" not in text


@pytest.mark.parametrize(("name", "number"), [(name, at) for name in CASES for at in range(len(CASES[name].also))])
def test_further_positives(name: str, number: int) -> None:
    (finding,) = said(tree(CASES[name].positive, CASES[name].also[number]), by_id(name))
    assert finding.severity == by_id(name).severity


@pytest.mark.parametrize(("name", "number"), [(name, at) for name in CASES for at in range(len(CASES[name].negatives))])
def test_negative(name: str, number: int) -> None:
    assert said(tree(CASES[name].positive, CASES[name].negatives[number]), by_id(name)) == []


@pytest.mark.parametrize(("name", "path"), [(name, path) for name in CASES for path in CASES[name].unknowns])
def test_unknown(name: str, path: str) -> None:
    """A deny says so and names it; a warning is one note for all; a note is silent."""
    rule = by_id(name)
    found = said(tree(CASES[name].positive, {path: None}), rule)
    if rule.severity == "note":
        assert found == []
        return
    (finding,) = found
    assert finding.id == (name if rule.severity == "deny" else guardrails.NOT_JUDGED)
    assert finding.severity == ("unknown" if rule.severity == "deny" else "note")
    assert path in finding.message


@pytest.mark.parametrize("rule", shipped(), ids=lambda rule: rule.id)
def test_knowing_less_never_silences_a_deny(rule: guardrails.Rule) -> None:
    """Whatever single fact is hidden from a launch that is denied, the rule still denies or says it does not know."""
    if rule.severity != "deny":
        return
    changes = CASES[rule.id].positive
    for path in rule.condition.paths():
        hidden = path if path.startswith(("model.", "gpu.", "server.", "sglang.")) else path.partition(".")[0]
        if hidden == "model.extra.weight_format":
            hidden = "model.extra"
        (finding,) = said(tree(changes, {hidden: None}), rule)
        assert finding.severity in ("deny", "unknown"), path


def parts_left_out(when: t.Any) -> t.Iterator[t.Any]:
    """The condition without one of its parts, operators or values, once for each of them."""
    for group in ("all", "any"):
        for at, part in enumerate(when.get(group, [])):
            before, after = when[group][:at], when[group][at + 1 :]
            if before or after:
                yield {group: [*before, *after]}
            yield from ({group: [*before, changed, *after]} for changed in parts_left_out(part))
    if "fact" not in when:
        if "not" in when:
            yield from ({"not": changed} for changed in parts_left_out(when["not"]))
        return
    operators = [name for name in when if name != "fact"]
    if len(operators) > 1:
        yield from ({key: value for key, value in when.items() if key != name} for name in operators)
    for name in operators:
        values = when[name] if isinstance(when[name], list) else []
        if len(values) > 1:
            yield from ({**when, name: [*values[:at], *values[at + 1 :]]} for at in range(len(values)))


def answers(rule: guardrails.Rule, case: Case) -> list[t.Optional[bool]]:
    """What the rule's condition says in each of its cases, and for each architecture that any rule names."""
    changes = [{}, *case.also, *case.negatives, *({path: None} for path in case.unknowns)]
    changes += [model(name) for name in architectures()]
    return [rule.condition.ask(tree(case.positive, change)).truth for change in changes]


@functools.lru_cache(maxsize=1)
def architectures() -> tuple[str, ...]:
    text = SHIPPED.read_text(encoding="utf-8")
    return tuple(sorted(set(re.findall(r"[A-Za-z0-9_]+(?:CausalLM|ConditionalGeneration)", text))))


@pytest.mark.parametrize("name", CASES)
def test_every_part_of_a_rule_matters(name: str) -> None:
    """Whatever is left out of a rule changes an answer in its cases: so the cases would see it go."""
    raw = next(each for each in yaml.safe_load(SHIPPED.read_text(encoding="utf-8")) if each["id"] == name)
    expected = answers(by_id(name), CASES[name])
    changed = [{**raw, "when": when} for when in parts_left_out(raw["when"])]
    changed += [
        {key: value for key, value in raw.items() if key != field} for field in ("since", "until") if field in raw
    ]
    for each in changed:
        (rule,), _problems = guardrails.parse_rules([each])
        assert answers(rule, CASES[name]) != expected, each["when"]


@pytest.mark.parametrize("rule", shipped(), ids=lambda rule: rule.id)
def test_every_rule_is_complete(rule: guardrails.Rule) -> None:
    assert rule.title and not rule.title.endswith(".")
    assert rule.reason.endswith((".", ")")) and rule.remedy.endswith("."), rule.id
    assert len(rule.source) > 4
    # A note needs no waiver; what SGLang itself refuses can't be waived.
    assert not (rule.severity == "note" and rule.waivable)


def test_nothing_known_is_neither_denied_nor_allowed() -> None:
    """Of a launch of which only the flags are known, only what flags alone decide is said."""
    flags = {"attention_backend": "trtllm_mla", "kv_cache_dtype": "fp8_e4m3", "model_path": "org/model"}
    found = said(guardrails.facts_tree(flags))
    unknown = {finding.id for finding in found if finding.severity == "unknown"}
    assert {"trtllm_mla_on_sm120", "fp8_kv_on_int4_mla_moe", "kimi_k2_reasoning_parser"} <= unknown
    assert not [finding for finding in found if finding.severity in ("deny", "warn")]
