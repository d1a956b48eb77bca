# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a model's directory says about the model: config.json, and how many bytes of weights lie there.

Nothing is downloaded: the name of a model in a hub is ``remote``, and nothing is known of it. A field that is missing
or is not what it should be is None and named in ``problems``; defaults of transformers' classes are used only where
SGLang itself fills the gap in the same way. Bound the call (a file system can hang): see ``spawn.fetch_bounded``.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import typing as t

from ..plan_model import ModelFacts
from .files import open_regular

_MAX_CONFIG_BYTES = 4 << 20
_MAX_INDEX_BYTES = 64 << 20  # the index of a model of a trillion parameters has 8 MB
_MAX_SOURCE_BYTES = 2 << 20
_MAX_FILES = 5000
_REMOTE = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_ENTRY = re.compile(r"^EntryClass\b[^=\n]*=\s*(\[[^\]]*\]|\w+)", re.M)
# From configs/model_config.py of 0.5.15 and 0.5.23: `_derive_model_shapes`, `is_hybrid_swa_model`, `is_deepseek_dsa`.
MLA_ARCHITECTURES = frozenset(
    {
        "BailingMoeForCausalLMNextN",
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "BailingMoeV3VLForConditionalGeneration",
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV3ForCausalLMNextN",
        "Dots3NoteForCausalLM",
        "Dots3NoteForCausalLMNextN",
        "DotsVLMForCausalLM",
        "Eagle3DeepseekV2ForCausalLM",
        "GigaChat35ForCausalLM",
        "GigaChat35ForCausalLMNextN",
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteForCausalLMNextN",
        "Glm5NextForConditionalGeneration",
        "Glm5NextForConditionalGenerationNextN",
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaForCausalLMNextN",
        "HYV4ForCausalLM",
        "HYV4ForCausalLMNextN",
        "KimiK25ForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "KimiK3LinearForCausalLM",
        "KimiLinearForCausalLM",
        "KimiVLForConditionalGeneration",
        "LongcatFlashForCausalLM",
        "LongcatFlashForCausalLMNextN",
        "MiniCPM3ForCausalLM",
        "MistralLarge3ForCausalLM",
        "MistralLarge3ForCausalLMEagle",
        "SarvamMLAForCausalLM",
    }
)
# Of these the config decides.
_MAYBE_MLA = frozenset({"DeepseekVL2ForCausalLM", "PixtralForConditionalGeneration"})
# Known to have one KV cache of one shape for all layers; SGLang's own list of models is asked for everything else.
PLAIN_ARCHITECTURES = frozenset(
    {
        "InternLM2ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
_HYBRID_SWA = frozenset(
    {
        "BeamForCausalLM",
        "DiffusionGemmaForBlockDiffusion",
        "EmbeddingGemma2Model",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "GptOssForCausalLM",
        "InklingForConditionalGeneration",
        "InklingForConditionalGenerationMTP",
        "LagunaForCausalLM",
        "Llama4ForConditionalGeneration",
        "MellumForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MiMoV2MTP",
        "MuseGlimmerForCausalLM",
        "MuseGlimmerForConditionalGeneration",
        "Step3p5ForCausalLM",
        "Step3p5MTP",
        "Step3p7ForConditionalGeneration",
        "UnlimitedOCRForCausalLM",
    }
)
_DSA = frozenset(
    {
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV3ForCausalLMNextN",
        "Dots3NoteForCausalLM",
        "Dots3NoteForCausalLMNextN",
        "Glm5NextForConditionalGeneration",
        "Glm5NextForConditionalGenerationNextN",
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaForCausalLMNextN",
        "HYV4ForCausalLM",
        "HYV4ForCausalLMNextN",
        "LongcatFlashForCausalLM",
        "LongcatFlashForCausalLMNextN",
        "MistralLarge3ForCausalLM",
        "PixtralForConditionalGeneration",
    }
)
# Classes with a sliding window that SGLang keeps in one pool all the same.
_ONE_POOL = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"})
# What their state's pool takes goes off the KV cache's room (`mambaish_config`).
_WITH_STATE = (
    "BailingMoeLinear",
    "BailingMoeV2_5",
    "BailingMoeV3",
    "FalconH1",
    "InternS2",
    "JetNemotron",
    "JetVLM",
    "KimiK3",
    "KimiLinear",
    "Lfm2",
    "NemotronH",
    "Qwen3Next",
    "Qwen3_5",
    "Zaya",
)
_STATE_FIELDS = (
    "mamba",
    "ssm_",
    "linear_attn",
    "linear_num",
    "lightning",
    "delta_net",
    "conv_l_cache",
    "attn_layer_period",
)
# Here SGLang counts layers in a way of its own.
_OWN_COUNT = ("LongcatFlash", "IQuestLoopCoder", "Nanbeige", "Whisper")
# Classes of transformers that fill in a head_dim or a number of KV heads of their own.
_OWN_DEFAULTS = ("gemma", "glm4", "qwen3", "mistral", "mixtral", "gpt_oss", "phi3small", "nemotron")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_POSITIONS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
_EXTRA_NUMBERS = (
    "index_head_dim",
    "index_topk",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "num_nextn_predict_layers",
    "q_lora_rank",
    "qk_nope_head_dim",
)

Config = t.Mapping[str, t.Any]


def read_model(path: str, sglang_dir: t.Optional[str] = None) -> ModelFacts:
    """The facts of the model at ``path``. With ``sglang_dir``, ``extra["served"]`` tells whether that SGLang has it.

    Never raises for what lies there, or doesn't.
    """
    if "\0" in path or not path:
        return ModelFacts(path, "unreadable", ("the model's path is empty or holds a NUL byte",))
    if not os.path.lexists(path):
        if _REMOTE.match(path):
            return ModelFacts(path, "remote", (f"{path} is no directory here: of a model in a hub nothing is known",))
        return ModelFacts(path, "unreadable", (f"{path} does not exist",))
    if os.path.isfile(path):
        return ModelFacts(path, "unreadable", (f"{path} is a file: a directory with a config.json is wanted",))
    config, problem = _json(os.path.join(path, "config.json"), _MAX_CONFIG_BYTES)
    if config is None:
        return ModelFacts(path, "unreadable", (problem or "config.json: not known",))
    return _facts(path, config, sglang_dir)


def served_architectures(sglang_dir: str) -> t.Optional[frozenset[str]]:
    """The model classes of an installed SGLang (`EntryClass` in srt/models), without importing; None: unreadable."""
    place = os.path.join(sglang_dir, "srt", "models")
    found: set[str] = set()
    try:
        names = sorted(os.listdir(place))
    except OSError:
        return None
    for name in names[:_MAX_FILES]:
        if not name.endswith(".py"):
            continue
        source, _problem = _text(os.path.join(place, name), _MAX_SOURCE_BYTES)
        for match in _ENTRY.finditer(source or ""):
            found.update(re.findall(r"[A-Za-z_]\w*", match.group(1)))
    return frozenset(found) or None


# --- files ------------------------------------------------------------------------------------------------------------


def _text(path: str, limit: int) -> tuple[t.Optional[str], t.Optional[str]]:
    """``(text, problem)``. Links are followed: a hub's cache is made of links."""
    name = os.path.basename(path)
    try:
        fd = open_regular(path, follow=True)
    except OSError as exc:
        return None, f"{name}: {'is no regular file' if exc.errno == errno.EINVAL else exc.strerror or exc}"
    try:
        with os.fdopen(fd, "rb") as stream:
            data = stream.read(limit + 1)
    except OSError as exc:
        return None, f"{name}: {exc.strerror or exc}"
    if len(data) > limit:
        return None, f"{name}: is larger than {limit >> 20} MiB"
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError:
        return None, f"{name}: is no UTF-8 text"


def _json(path: str, limit: int) -> tuple[t.Optional[Config], t.Optional[str]]:
    text, problem = _text(path, limit)
    if text is None:
        return None, problem
    name = os.path.basename(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        return None, f"{name}: is no JSON ({' '.join(str(exc).split())[:120]})"
    if not isinstance(value, dict):
        return None, f"{name}: holds no mapping"
    return value, None


def _weights(path: str) -> tuple[t.Optional[int], t.Optional[str], list[str]]:
    """``(bytes, index or files, problems)``: what an index says, else the sizes of the files that SGLang would load."""
    problems: list[str] = []
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        index_path = os.path.join(path, name)
        if not os.path.lexists(index_path):
            continue
        index, problem = _json(index_path, _MAX_INDEX_BYTES)
        metadata = index.get("metadata") if index else None
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        size = _count(total)
        if isinstance(total, float) and total.is_integer() and total > 0:
            size = int(total)  # some tools write it as 1.2e11
        if size:
            return size, "index", problems
        problems.append(problem or f"{name}: metadata.total_size is missing or is no size")
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for _number, entry in zip(range(_MAX_FILES), entries))
    except OSError as exc:
        return None, None, [*problems, f"{path}: {exc.strerror or exc}"]
    # As SGLang: safetensors first, .bin only where there are none; `consolidated` is a second copy beside shards.
    safetensors = [name for name in names if name.endswith(".safetensors")]
    shards = [name for name in safetensors if not name.startswith("consolidated")] or safetensors
    chosen = shards or [
        name for name in names if name.endswith(".bin") and name.startswith(("pytorch_model", "model", "consolidated"))
    ]
    total_bytes = 0
    for name in chosen:
        try:
            status = os.stat(os.path.join(path, name))
        except OSError as exc:
            return None, None, [*problems, f"{name}: {exc.strerror or exc}"]
        if not stat.S_ISREG(status.st_mode):
            return None, None, [*problems, f"{name}: is no regular file"]
        total_bytes += status.st_size
    if not total_bytes:
        return None, None, [*problems, "no weights (*.safetensors, *.bin) lie in the directory"]
    return total_bytes, "files", problems


# --- fields -----------------------------------------------------------------------------------------------------------


def _count(value: t.Any) -> t.Optional[int]:
    """A whole number above 0 of a sane size; None for everything else (true is 1 in Python, but no number here)."""
    number = isinstance(value, int) and not isinstance(value, bool)
    return value if number and 0 < value < 1 << 60 else None


def _word(value: t.Any) -> t.Optional[str]:
    return value if isinstance(value, str) and 0 < len(value) <= 200 else None


def _text_config(config: Config) -> Config:
    """The part that describes the language model, in SGLang's order; what it lacks is the whole config's."""
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    if isinstance(first, str) and first.startswith("Llava") and first.endswith("ForCausalLM"):
        return config
    for name in ("thinker_config", "llm_config", "language_config", "text_config"):
        part = config.get(name)
        if isinstance(part, dict):
            inner = part.get("text_config") if name == "thinker_config" else None
            return inner if isinstance(inner, dict) else part
    return config


def _facts(path: str, config: Config, sglang_dir: t.Optional[str]) -> ModelFacts:
    text = _text_config(config)
    problems: list[str] = []

    def number(*names: str, needed: bool = False) -> t.Optional[int]:
        for name in names:
            if text.get(name) is None:
                continue
            value = _count(text[name])
            if value is None:
                problems.append(f"config.json: {name} is {json.dumps(text[name])[:60]}, not a whole number above 0")
            return value
        if needed:
            problems.append(f"config.json: {names[0]} is missing")
        return None

    architectures = _architectures(config, text, problems)
    model_type = _word(config.get("model_type"))
    own_defaults = (_word(text.get("model_type")) or model_type or "").startswith(_OWN_DEFAULTS)
    hidden = number("hidden_size", "n_embd", "d_model", needed=True)
    heads = number("num_attention_heads", "n_head", "n_heads", needed=True)
    kv_heads = number(*_KV_HEADS)
    if kv_heads is None and not any(text.get(name) is not None for name in _KV_HEADS):
        if own_defaults:
            problems.append("config.json: num_key_value_heads is missing, and this class has a default of its own")
        else:
            kv_heads = heads  # as get_total_num_kv_heads
    head_dim = number("head_dim")
    if head_dim is None and text.get("head_dim") is None:
        if own_defaults and not (model_type or "").startswith(("mistral", "mixtral")):
            problems.append("config.json: head_dim is missing, and this class has a default of its own")
        elif hidden is not None and heads is not None:
            head_dim = hidden // heads  # as _derive_model_shapes
    v_head_dim = number("v_head_dim")
    if v_head_dim is None and text.get("v_head_dim") is None:
        v_head_dim = head_dim
    weight_bytes, weight_source, weight_problems = _weights(path)
    problems += weight_problems
    kv_lora_rank = number("kv_lora_rank")
    rope_dim = number("qk_rope_head_dim")
    extra = _extra(config, text, architectures)
    if sglang_dir is not None and architectures:
        served = served_architectures(sglang_dir)
        extra["served"] = None if served is None else any(name in served for name in architectures)
    return ModelFacts(
        path=path,
        source="local",
        architectures=architectures,
        model_type=model_type,
        dtype=_dtype(text, config),
        quantization=_quantization(config, text),
        hidden_size=hidden,
        layers=number("num_hidden_layers", "n_layer", "n_layers", "num_layers", needed=True),
        attention_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=rope_dim,
        vocab_size=number("vocab_size", needed=True),
        max_positions=_positions(text),
        tie_word_embeddings=_flag(text, config, "tie_word_embeddings"),
        weight_bytes=weight_bytes,
        weight_source=weight_source,
        is_mla=_is_mla(architectures, text, extra),
        is_multimodal=isinstance(config.get("vision_config"), dict) or isinstance(config.get("audio_config"), dict),
        extra=extra,
        problems=tuple(problems),
    )


def _architectures(config: Config, text: Config, problems: list[str]) -> t.Optional[tuple[str, ...]]:
    value = config.get("architectures") or text.get("architectures")
    names = [name for name in value if _word(name)] if isinstance(value, list) else []
    if not names:
        problems.append("config.json: architectures is missing")
        return None
    return tuple(names[:8])


def _positions(text: Config) -> t.Optional[int]:
    """The context length that SGLang derives, without the factor of a rope scaling that it would apply."""
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    factor: t.Any = 1
    if isinstance(scaling, dict):
        # get_rope_scaling / get_context_length: a factor counts unless original_max_position_embeddings or llama3.
        kind = scaling.get("rope_type") or scaling.get("type")
        if "original_max_position_embeddings" not in scaling and kind != "llama3":
            factor = scaling.get("factor", 1)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor <= 1024:
        factor = 1
    for name in _POSITIONS:
        value = _count(text.get(name))
        if value is not None:
            return int(value * factor)
    return None


def _dtype(text: Config, config: Config) -> t.Optional[str]:
    for part in (text, config):
        for name in ("dtype", "torch_dtype"):
            word = _word(part.get(name))
            if word is not None:
                return word.rpartition(".")[2]
    return None


def _flag(text: Config, config: Config, name: str) -> t.Optional[bool]:
    for part in (text, config):
        if isinstance(part.get(name), bool):
            return bool(part[name])
    return None


def _quantization(config: Config, text: Config) -> t.Optional[str]:
    for part in (config, text):
        for name in ("quantization_config", "compression_config"):
            value = part.get(name)
            if isinstance(value, dict):
                return _word(value.get("quant_method")) or _word(value.get("quant_algo")) or "unknown"
    return None


def _is_mla(architectures: t.Optional[tuple[str, ...]], text: Config, extra: Config) -> t.Optional[bool]:
    if architectures is None:
        return None
    if any(name in MLA_ARCHITECTURES for name in architectures):
        return True
    has_rank = _count(text.get("kv_lora_rank")) is not None
    if any(name in _MAYBE_MLA for name in architectures):
        return has_rank and text.get("use_mla", True) is not False
    # A class that isn't known and has a latent rank may be either.
    return None if has_rank else False


def _extra(config: Config, text: Config, architectures: t.Optional[tuple[str, ...]]) -> dict[str, t.Any]:
    """What else some formula needs. ``kv_differs``: why the layers' KV caches are not all alike."""
    extra: dict[str, t.Any] = {
        name: _count(text[name]) for name in _EXTRA_NUMBERS if _count(text.get(name)) is not None
    }
    names = set(architectures or ())
    extra["is_dsa"] = bool(names & _DSA) and "index_topk" in extra
    reason = _kv_differs(names, text)
    if reason:
        extra["kv_differs"] = reason
    vision = config.get("vision_config")
    if isinstance(vision, dict):
        layers, hidden = _count(vision.get("num_hidden_layers")), _count(vision.get("hidden_size"))
        # adjust_mem_fraction_for_vlm takes these where the vision config lacks them.
        extra["vision_layers"], extra["vision_hidden_size"] = layers or 24, hidden or 1024
    for part in (config, text):
        for name in ("quantization_config", "compression_config"):
            value = part.get(name)
            algorithm = value.get("kv_cache_quant_algo") if isinstance(value, dict) else None
            if _word(algorithm):
                extra["kv_cache_quant_algo"] = algorithm
            weights = _weight_format(value) if isinstance(value, dict) else None
            if weights is not None:
                extra.setdefault("weight_format", weights)
    return extra


def _weight_format(quantization: Config) -> t.Optional[str]:
    """``int4``, ``float8``, ...: what most weights are stored as, where the quantization says it in one of two ways."""
    groups = quantization.get("config_groups")
    found = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    kinds = [(each.get("num_bits"), each.get("type")) for each in found if isinstance(each, dict)]
    if not kinds and isinstance(quantization.get("bits"), int):
        kinds = [(quantization["bits"], "int")]  # GPTQ, AWQ, auto-round
    known = [(bits, kind) for bits, kind in kinds if _count(bits) is not None and kind in ("int", "float")]
    if not known or len(known) != len(kinds):
        return None
    bits, kind = min(known)
    return f"{kind}{bits}"


def _kv_differs(names: set[str], text: Config) -> t.Optional[str]:
    if any(name.startswith("DeepseekV4") for name in names):
        return "DeepSeek V4 compresses its KV cache in several pools"
    kinds = text.get("layer_types")
    words = {str(kind) for kind in kinds} if isinstance(kinds, list) else set()
    known = names & (PLAIN_ARCHITECTURES | _ONE_POOL)
    if names & _HYBRID_SWA or text.get("is_hybrid_swa") is True or ("sliding_attention" in words and not known):
        return "some layers have a sliding window, and may have a pool of their own"
    if isinstance(text.get("block_configs"), list):
        return "its layers differ in their attention (block_configs)"
    if any(name.startswith(_WITH_STATE) for name in names) or words - {"full_attention", "sliding_attention"}:
        return "it has linear-attention or Mamba layers, whose state has a pool of its own"
    for name in text:
        if text[name] is not None and any(part in str(name).lower() for part in _STATE_FIELDS):
            return f"it has linear-attention or Mamba layers ({name}), whose state has a pool of its own"
    for name in ("full_attention_interval", "hybrid_override_pattern", "loop_num", "num_loops"):
        if text.get(name) is not None:
            return f"its layers are not all alike ({name})"
    if any(name.startswith(_OWN_COUNT) for name in names):
        return "SGLang counts the layers of this class in a way of its own"
    if any("Mamba" in name or "MiniMaxM3" in name or "SparseForCausalLM" in name for name in names):
        return "its attention has pools of its own"
    return None
