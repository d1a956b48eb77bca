# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The founding incidents that a plan would have stopped, with their host: 8 x 96 GB, 449 GiB RAM, Kimi-K2.5 INT4, TP 8.

Topology, budget and guardrails together judge one launch, from the model's config.json to the verdict.
"""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.budget import budget
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.budget_findings import judge_budget
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.guardrails import facts_tree, judge, parse_rules
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.topology import plan_topology
from ansible_collections.cleanslate.sglang.plugins.module_utils.plan_model import (
    Finding,
    GpuFacts,
    HostFacts,
    verdict_of,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.model_config import read_model
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import guardrails

# Of moonshotai/Kimi-K2.5: what counts for the plan.
CONFIG: dict[str, t.Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "vision_config": {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27},
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "dtype": "bfloat16",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "tie_word_embeddings": False,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
            },
        },
    },
}
WEIGHT_BYTES = 595_000_000_000
FLAGS = {
    "tp_size": 8,
    "mem_fraction_static": 0.88,
    "enable_hierarchical_cache": True,
    "hicache_size": 48,
    "reasoning_parser": "kimi_k2",
    "tool_call_parser": "kimi_k2",
    "context_length": 131072,
    "trust_remote_code": True,
}
HOST = HostFacts(mem_available_mib=444 * 1024, cgroup_limited=False, shm_free_mib=200_000, ranks_here=8)
VERSION = "0.5.12"


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    index = {"metadata": {"total_size": WEIGHT_BYTES}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(tmp_path)


def plan(model: str, waivers: t.Optional[dict[str, str]] = None, **changes: t.Any) -> tuple[str, dict[str, Finding]]:
    """The verdict and the findings by their id."""
    flags = {name: value for name, value in {**FLAGS, "model_path": model, **changes}.items() if value is not None}
    facts = read_model(model)
    gpus = [
        GpuFacts(number, f"GPU-{number}", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, 97247, "12.0")
        for number in range(8)
    ]
    topology, found = plan_topology(flags, gpus, facts, VERSION)
    figures = budget(flags, facts, topology, HOST, None, VERSION)
    found += judge_budget(figures, flags, facts, topology, HOST, VERSION)
    raw, problems = guardrails.all_rules()
    assert problems == []
    assert guardrails.waiver_problems("ct129: server 'kimi'", waivers, raw) == []
    tree = facts_tree(
        flags,
        model=facts,
        topology=topology,
        host=HOST,
        budget=figures,
        version=VERSION,
        environment={"NCCL_P2P_DISABLE": "1"},
        server={"has_api_key": False, "has_admin_api_key": False, "port": 8000},
    )
    found += tuple(judge(parse_rules(raw)[0], tree, waivers))
    return verdict_of(found), {finding.id: finding for finding in found}


def denied(findings: t.Mapping[str, Finding]) -> list[str]:
    return [name for name, finding in findings.items() if finding.severity == "deny"]


def test_case_1_hicache_size_is_gb_per_rank(model: str) -> None:
    verdict, findings = plan(model, hicache_size=300, mem_fraction_static=0.93)
    assert verdict == "denied"
    assert denied(findings) == ["hicache_too_large"]
    finding = findings["hicache_too_large"]
    for words in ("2,400.0 GB", "8 ranks x 300", "GB per rank", "476.7 GB"):
        assert words in finding.message
    # (476.7 - 40 for loading - 10.7 of SGLang's own) / 8
    assert "hicache-size 53 is the largest that fits" in finding.remedy


def test_case_2_too_little_is_left_for_the_first_large_prefill(model: str) -> None:
    verdict, findings = plan(model, mem_fraction_static=0.93)
    assert verdict == "allowed"
    assert findings["very_high_static_fraction"].severity == "note"
    assert "0.82 GB left" in findings["very_high_static_fraction"].message
    assert findings["headroom_small"].severity == "warn"


def test_case_3_is_allowed_with_its_margin(model: str) -> None:
    verdict, findings = plan(model)
    assert verdict == "allowed"
    assert denied(findings) == []
    message = findings["hicache_fits"].message
    for words in (
        "384.0 GB of HiCache",
        "40.0 GB for loading",
        "476.7 GB available",
        "52.7 GB are left",
        "42.0 GB after",
    ):
        assert words in message
    assert not [name for name, finding in findings.items() if finding.severity in ("warn", "unknown")]


@pytest.mark.parametrize("parser", [None, "kimi"])
def test_case_7_thoughts_inside_content(model: str, parser: t.Optional[str]) -> None:
    verdict, findings = plan(model, reasoning_parser=parser)
    assert verdict == "denied" and denied(findings) == ["kimi_k2_reasoning_parser"]
    assert findings["kimi_k2_reasoning_parser"].remedy == "Set reasoning_parser: kimi_k2."
    assert "reasoning_content is null" in findings["kimi_k2_reasoning_parser"].message


def test_case_8_fp8_cache_on_int4_mla(model: str) -> None:
    verdict, findings = plan(model, kv_cache_dtype="fp8_e4m3")
    assert verdict == "denied" and denied(findings) == ["fp8_kv_on_int4_mla_moe"]
    reason = "answers tested on 400 questions, see ticket 12"
    verdict, findings = plan(model, {"fp8_kv_on_int4_mla_moe": reason}, kv_cache_dtype="fp8_e4m3")
    assert verdict == "allowed"
    finding = findings["fp8_kv_on_int4_mla_moe"]
    assert (finding.severity, finding.waived) == ("warn", reason)
    assert finding.message.endswith(f"Waived: {reason}")


def test_case_8_is_about_int4(model: str) -> None:
    config = json.loads(json.dumps(CONFIG))
    config["text_config"]["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (Path(model) / "config.json").write_text(json.dumps(config))
    assert "fp8_kv_on_int4_mla_moe" not in plan(model, kv_cache_dtype="fp8_e4m3")[1]


def test_case_9_flashinfer_with_mla(model: str) -> None:
    verdict, findings = plan(model, attention_backend="flashinfer")
    assert verdict == "denied" and denied(findings) == ["flashinfer_mla_on_sm120"]
    assert "87 minutes" in findings["flashinfer_mla_on_sm120"].message
    waivers = {"flashinfer_mla_on_sm120": "tested here with flashinfer 0.7 and one rank"}
    assert plan(model, waivers, attention_backend="flashinfer")[0] == "allowed"


def test_case_9_trtllm_mla_can_not_be_waived(model: str) -> None:
    verdict, findings = plan(model, attention_backend="trtllm_mla")
    assert verdict == "denied" and denied(findings) == ["trtllm_mla_on_sm120"]
    raw = guardrails.shipped()
    (problem,) = guardrails.waiver_problems("x", {"trtllm_mla_on_sm120": "we would like to try"}, raw)
    assert "can't be waived" in problem


def test_the_backend_that_works(model: str) -> None:
    assert plan(model, attention_backend="triton")[0] == "allowed"


def test_a_model_that_can_not_be_read(tmp_path: Path) -> None:
    """Whether the rules about Kimi hold is not known, and each says why."""
    verdict, findings = plan(
        str(tmp_path / "gone"), reasoning_parser=None, kv_cache_dtype="fp8_e4m3", attention_backend="flashinfer"
    )
    assert verdict == "unknown"
    for name, fact in (
        ("kimi_k2_reasoning_parser", "model.architectures"),
        ("fp8_kv_on_int4_mla_moe", "model.quantization"),
        ("flashinfer_mla_on_sm120", "model.is_mla"),
    ):
        assert findings[name].severity == "unknown" and fact in findings[name].message
    assert denied(findings) == []
