# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
import typing as t
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.model_config import (
    read_model,
    served_architectures,
)

LLAMA: dict[str, t.Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
# The shape of Kimi-K2.5: everything of the language model is nested.
KIMI: dict[str, t.Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": 1536,
        "n_routed_experts": 384,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
        "quantization_config": {"quant_method": "compressed-tensors"},
    },
    "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
}


def model(place: Path, config: t.Any, files: t.Mapping[str, int] | None = None, index: t.Any = None) -> str:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, size in (files or {}).items():
        with (place / name).open("wb") as stream:
            stream.truncate(size)  # sparse
    if index is not None:
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(place)


def test_a_plain_model(tmp_path: Path) -> None:
    facts = read_model(model(tmp_path / "m", LLAMA, {"model-00001-of-00002.safetensors": 10, "x.bin": 99}))
    assert (facts.source, facts.problems) == ("local", ())
    assert facts.architectures == ("LlamaForCausalLM",)
    assert (facts.dtype, facts.quantization, facts.is_mla, facts.is_multimodal) == ("bfloat16", None, False, False)
    assert (facts.layers, facts.attention_heads, facts.kv_heads, facts.head_dim, facts.v_head_dim) == (
        32,
        32,
        8,
        128,
        128,
    )
    assert (facts.max_positions, facts.vocab_size, facts.tie_word_embeddings) == (8192, 128256, False)
    assert (facts.weight_bytes, facts.weight_source) == (10, "files")


def test_a_nested_text_config_with_mla(tmp_path: Path) -> None:
    facts = read_model(model(tmp_path / "m", KIMI, index={"metadata": {"total_size": 595_000_000_000}}))
    assert facts.problems == ()
    assert (facts.is_mla, facts.kv_lora_rank, facts.qk_rope_head_dim, facts.layers) == (True, 512, 64, 61)
    assert (facts.dtype, facts.quantization, facts.is_multimodal) == ("bfloat16", "compressed-tensors", True)
    assert (facts.weight_bytes, facts.weight_source) == (595_000_000_000, "index")
    assert facts.max_positions == 262144  # the scaling counts from original_max_position_embeddings
    assert facts.extra["q_lora_rank"] == 1536 and facts.extra["vision_layers"] == 27


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 8192),
        ({"rope_type": "linear", "factor": 4}, 32768),
        ({"rope_type": "llama3", "factor": 8}, 8192),
        ({"rope_type": "linear", "factor": "x"}, 8192),
        ("x", 8192),
    ],
)
def test_the_context_length_that_sglang_derives(tmp_path: Path, scaling: t.Any, positions: int) -> None:
    assert read_model(model(tmp_path / "m", {**LLAMA, "rope_scaling": scaling})).max_positions == positions


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"model.safetensors": 5, "pytorch_model.bin": 7}, 5),
        ({"model-1.safetensors": 5, "model-2.safetensors": 6, "consolidated.safetensors": 11}, 11),
        ({"consolidated.safetensors": 11}, 11),
        ({"pytorch_model-00001.bin": 3, "training_args.bin": 90, "optimizer.bin": 90}, 3),
        ({"model.safetensors": 700 * 10**9}, 700 * 10**9),
    ],
)
def test_the_files_that_sglang_would_load(tmp_path: Path, files: dict[str, int], expected: int) -> None:
    facts = read_model(model(tmp_path / "m", LLAMA, files))
    assert (facts.weight_bytes, facts.weight_source) == (expected, "files")


def test_no_weights_are_named(tmp_path: Path) -> None:
    facts = read_model(model(tmp_path / "m", LLAMA))
    assert facts.weight_bytes is None
    assert "no weights" in facts.problems[0]


@pytest.mark.parametrize("total", [None, "12", -1, True, 1 << 70])
def test_an_index_without_a_size_is_named_and_the_files_count(tmp_path: Path, total: t.Any) -> None:
    index = {"metadata": {"total_size": total}}
    facts = read_model(model(tmp_path / "m", LLAMA, {"model.safetensors": 5}, index))
    assert (facts.weight_bytes, facts.weight_source) == (5, "files")
    assert "total_size" in facts.problems[0]


def test_a_size_that_a_tool_wrote_as_a_float_counts(tmp_path: Path) -> None:
    assert (
        read_model(model(tmp_path / "m", LLAMA, None, {"metadata": {"total_size": 1.5e11}})).weight_bytes == 150 * 10**9
    )


def test_links_of_a_hubs_cache_are_followed_and_a_broken_one_is_named(tmp_path: Path) -> None:
    place = model(tmp_path / "m", LLAMA)
    (tmp_path / "blob").write_bytes(b"12345")
    os.symlink(tmp_path / "blob", Path(place) / "model.safetensors")
    assert read_model(place).weight_bytes == 5
    (tmp_path / "blob").unlink()
    facts = read_model(place)
    assert facts.weight_bytes is None
    assert "model.safetensors: No such file" in facts.problems[0]


# --- what isn't there, or isn't what it should be ---------------------------------------------------------------------


def test_the_name_of_a_model_in_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("meta-llama/Llama-3.1-8B", "gpt2"):
        facts = read_model(name)
        assert facts.source == "remote" and "hub" in facts.problems[0]
        assert facts.layers is None and facts.is_mla is None and facts.weight_bytes is None


@pytest.mark.parametrize("path", ["", "/no/such/model", "a/b/c", "../x", "a\0b", "s3://bucket/model"])
def test_a_path_where_nothing_is(path: str) -> None:
    facts = read_model(path)
    assert facts.source == "unreadable" and facts.problems


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[1]", "no mapping"),
        ("[" * 100_000, "no JSON"),
        ("\ufeff{}", "no JSON"),
    ],
)
def test_a_config_that_is_garbage(tmp_path: Path, text: str, words: str) -> None:
    facts = read_model(model(tmp_path / "m", text))
    assert facts.source == "unreadable"
    assert words in facts.problems[0]


def test_a_config_that_is_no_text_too_large_a_pipe_a_directory_or_a_file(tmp_path: Path) -> None:
    place = Path(model(tmp_path / "m", "{}"))
    config = place / "config.json"
    config.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in read_model(str(place)).problems[0]
    with config.open("wb") as stream:
        stream.truncate(1 << 33)
    assert "larger than 4 MiB" in read_model(str(place)).problems[0]
    config.unlink()
    os.mkfifo(config)
    assert "no regular file" in read_model(str(place)).problems[0]
    config.unlink()
    config.mkdir()
    assert "no regular file" in read_model(str(place)).problems[0]
    config.rmdir()
    assert "No such file" in read_model(str(place)).problems[0]
    (tmp_path / "file").write_text("")
    assert "is a file" in read_model(str(tmp_path / "file")).problems[0]


@pytest.mark.parametrize(
    "name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "architectures"]
)
def test_a_missing_field_is_none_and_named(tmp_path: Path, name: str) -> None:
    facts = read_model(model(tmp_path / "m", {key: value for key, value in LLAMA.items() if key != name}))
    assert any(f"{name} is missing" in problem for problem in facts.problems)


@pytest.mark.parametrize("value", ["32", 3.5, -1, 0, True, [32], {}, 1 << 62])
def test_a_field_of_the_wrong_kind_is_none_and_named(tmp_path: Path, value: t.Any) -> None:
    facts = read_model(model(tmp_path / "m", {**LLAMA, "num_hidden_layers": value}))
    assert facts.layers is None
    assert any("num_hidden_layers is" in problem for problem in facts.problems)


def test_kv_heads_are_the_heads_only_where_sglang_would_take_them(tmp_path: Path) -> None:
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert read_model(model(tmp_path / "m", without)).kv_heads == 32
    facts = read_model(model(tmp_path / "m", {**without, "model_type": "mistral"}))
    assert facts.kv_heads is None and "default of its own" in facts.problems[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_lora_rank": 512}, None),  # a class that isn't known, with a latent rank
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, True),
        ({"architectures": ["PixtralForConditionalGeneration"]}, False),
        ({"architectures": ["PixtralForConditionalGeneration"], "kv_lora_rank": 512}, True),
        ({"architectures": ["DeepseekVL2ForCausalLM"], "kv_lora_rank": 512, "use_mla": False}, False),
        ({"architectures": None}, None),
    ],
)
def test_whether_a_model_uses_mla(tmp_path: Path, changes: dict[str, t.Any], expected: bool | None) -> None:
    base = {**LLAMA, "architectures": ["SomethingForCausalLM"]}
    assert read_model(model(tmp_path / "m", {**base, **changes})).is_mla is expected


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["GptOssForCausalLM"]},
        {"layer_types": ["linear_attention", "full_attention"]},
        {"hybrid_override_pattern": "M-M*"},
        {"architectures": ["DeepseekV4ForCausalLM"]},
        {"block_configs": [{}]},
        {"architectures": ["Lfm2ForCausalLM"]},
        {"architectures": ["NewForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]},
        {"architectures": ["NewForCausalLM"], "mamba_d_state": 16},
        {"architectures": ["LongcatFlashForCausalLM"]},
    ],
)
def test_models_whose_layers_differ_say_so(tmp_path: Path, changes: dict[str, t.Any]) -> None:
    assert read_model(model(tmp_path / "m", {**LLAMA, **changes})).extra["kv_differs"]
    for alike in ({}, {"layer_types": ["sliding_attention"]}, {"architectures": ["Gemma3ForCausalLM"]}):
        assert "kv_differs" not in read_model(model(tmp_path / "n", {**LLAMA, **alike})).extra


def test_the_classes_of_an_installed_sglang(tmp_path: Path) -> None:
    models = tmp_path / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    (models / "a.py").write_text("class X: pass\nEntryClass = [\n    LlamaForCausalLM,\n    OtherForCausalLM,\n]\n")
    (models / "b.py").write_text("EntryClass = OneForCausalLM\n")
    (models / "c.txt").write_text("EntryClass = No\n")
    os.mkfifo(models / "d.py")
    found = served_architectures(str(tmp_path / "sglang"))
    assert found == frozenset({"LlamaForCausalLM", "OtherForCausalLM", "OneForCausalLM"})
    place = model(tmp_path / "m", LLAMA)
    assert read_model(place, str(tmp_path / "sglang")).extra["served"] is True
    place = model(tmp_path / "n", {**LLAMA, "architectures": ["NewForCausalLM"]})
    assert read_model(place, str(tmp_path / "sglang")).extra["served"] is False
    assert read_model(place, str(tmp_path / "gone")).extra["served"] is None


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
FIELDS = sorted({*LLAMA, *KIMI, *KIMI["text_config"], "rope_parameters", "layer_types", "head_dim", "llm_config"})


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), nested=st.booleans(), index=JSON)
def test_no_config_brings_a_traceback(tmp_path: Path, changes: dict[str, t.Any], nested: bool, index: t.Any) -> None:
    config = {**KIMI, "text_config": {**KIMI["text_config"], **changes}} if nested else {**LLAMA, **changes}
    facts = read_model(model(tmp_path / "m", json.dumps(config), {"model.safetensors": 5}, index))
    assert facts.source == "local"
