# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Our budget against SGLang's own code for random configurations: the fraction it chooses, its pools, its host pools.

usage: sglang_budget.py [COUNT]      with a Python that can import SGLang 0.5.15; no GPU is needed

SGLang's methods are called on stand-ins that have the fields which they read. Prints what was compared and how often
we differ; exits with 1 if we do.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import sys
import typing as t
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ["CUDA_VISIBLE_DEVICES"] = ""
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".collections"))

import torch
from sglang.srt.arg_groups import overrides
from sglang.srt.mem_cache.pool_host import base as pool_host
from sglang.srt.model_executor import pool_configurator
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin
from sglang.srt.server_args import ServerArgs

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.budget import budget
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.topology import plan_topology
from ansible_collections.cleanslate.sglang.plugins.module_utils.plan_model import (
    Budget,
    GpuFacts,
    HostFacts,
    ModelFacts,
)

VERSION = "0.5.15"
MEMORY_MIB = (16384, 24564, 32607, 46068, 81559, 97887, 143771, 183359, 294896)
DTYPES = {
    "auto": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
MHA = ModelFacts(
    "/model",
    "local",
    architectures=("LlamaForCausalLM",),
    dtype="bfloat16",
    hidden_size=4096,
    layers=40,
    attention_heads=32,
    kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    vocab_size=1000,
    max_positions=8192,
    weight_bytes=10**10,
    weight_source="index",
    is_mla=False,
    is_multimodal=False,
)
MLA = dataclasses.replace(
    MHA, architectures=("DeepseekV3ForCausalLM",), kv_lora_rank=512, qk_rope_head_dim=64, is_mla=True
)

Flags = dict[str, t.Any]


def plan(flags: Flags, model: ModelFacts, total_mib: int) -> Budget:
    count = flags.get("tp-size", 1) * flags.get("pp-size", 1)
    gpus = [GpuFacts(index, total_mib=total_mib, free_mib=total_mib - 600) for index in range(count)]
    topology, _findings = plan_topology(flags, gpus, model, VERSION)
    return budget(flags, model, topology, HostFacts(10**6), None, VERSION)


# --- mem_fraction_static ----------------------------------------------------------------------------------------------


def some_flags(dice: random.Random) -> Flags:
    flags: Flags = {"tp-size": dice.choice([1, 2, 4, 8, 16]), "pp-size": dice.choice([1, 2])}
    for name, values in (
        ("chunked-prefill-size", [-1, 1024, 2048, 4096, 16384]),
        ("cuda-graph-max-bs", [8, 64, 301, 512]),
        ("disable-cuda-graph", [True]),
        ("max-total-tokens", [1000, 100_000]),
        ("context-length", [1000, 8192]),
    ):
        if dice.random() < 0.35:
            flags[name] = dice.choice(values)
    if flags["tp-size"] > 1 and dice.random() < 0.3:
        flags.update({"enable-dp-attention": True, "dp-size": 2})
    return flags


def their_fraction(flags: Flags, model: ModelFacts, total_mib: int) -> float:
    attention_dp = "enable-dp-attention" in flags
    off = Backend.DISABLED if "disable-cuda-graph" in flags else None
    arguments = ServerArgs.__new__(ServerArgs)
    fields = {
        "chunked_prefill_size": flags.get("chunked-prefill-size"),
        "tp_size": flags["tp-size"],
        "pp_size": flags["pp-size"],
        "dp_size": flags.get("dp-size", 1),
        "enable_dp_attention": attention_dp,
        "max_total_tokens": flags.get("max-total-tokens"),
        "context_length": flags.get("context-length"),
        "device": "cuda",
        "model_path": "/model",
        "mem_fraction_static": None,
        "disaggregation_mode": "null",
        "max_running_requests": None,
        "speculative_algorithm": None,
        "speculative_num_draft_tokens": None,
        "max_prefill_tokens": 16384,
        "moe_a2a_backend": "none",
        "enable_symm_mem": False,
        "language_only": False,
        "disable_cuda_graph_padding": False,
        "cuda_graph_config": SimpleNamespace(
            decode=SimpleNamespace(max_bs=flags.get("cuda-graph-max-bs"), bs=None, backend=off or Backend.FULL),
            prefill=SimpleNamespace(max_bs=None, bs=None, backend=off or Backend.TC_PIECEWISE),
        ),
        "use_mla_backend": lambda: model.is_mla,
        "_resolved": lambda: SimpleNamespace(enable_dp_attention=attention_dp),
        "get_model_config": lambda: SimpleNamespace(
            is_multimodal=model.is_multimodal,
            hf_config=SimpleNamespace(vision_config=SimpleNamespace(num_hidden_layers=27, hidden_size=1152)),
        ),
    }
    for name, value in fields.items():
        object.__setattr__(arguments, name, value)
    with mock.patch.object(overrides, "resolved_view", lambda _args: SimpleNamespace(moe_a2a_backend="none")):
        arguments._handle_gpu_memory_settings(total_mib)
    return float(arguments.mem_fraction_static)


def fraction_differs(dice: random.Random) -> str | None:
    flags, total_mib = some_flags(dice), dice.choice(MEMORY_MIB)
    model = dice.choice([MHA, MLA])
    if dice.random() < 0.3:
        model = dataclasses.replace(model, is_multimodal=True, extra={"vision_layers": 27, "vision_hidden_size": 1152})
    ours = plan(flags, model, total_mib).value("mem_fraction_static")
    theirs = their_fraction(flags, model, total_mib)
    same = ours is not None and abs(ours - theirs) < 1e-9
    return None if same else f"{flags} {total_mib} MiB MLA={model.is_mla}: ours {ours}, theirs {theirs}"


# --- pools ------------------------------------------------------------------------------------------------------------


class HostPool(pool_host.HostKVCache):
    """A host pool that allocates nothing."""

    def get_size_per_token(self) -> int:
        return int(self.device_pool.cell)

    def get_ksize_per_token(self) -> int:
        return self.get_size_per_token()

    def init_kv_buffer(self) -> None:
        return None

    def clear(self) -> None:
        return None


HostPool.__abstractmethods__ = frozenset()  # what else is abstract is never called


def pool_differs(dice: random.Random) -> str | None:
    model = dataclasses.replace(
        dice.choice([MHA, MLA]),
        kv_heads=dice.choice([1, 2, 4, 8, 32]),
        head_dim=dice.choice([64, 96, 128, 256]),
        v_head_dim=dice.choice([64, 128]),
        layers=dice.choice([1, 2, 40, 61]),
    )
    tp, page, dtype = dice.choice([1, 2, 4, 8, 16]), dice.choice([1, 16, 64, 128]), dice.choice(list(DTYPES))
    flags: Flags = {
        "tp-size": tp,
        "kv-cache-dtype": dtype,
        "page-size": page,
        "mem-fraction-static": dice.choice([0.3, 0.5, 0.88]),
        "enable-hierarchical-cache": True,
    }
    for name, values in (
        ("max-total-tokens", [1000, 10**6]),
        ("max-running-requests", [1, 16, 10_000]),
        ("hicache-size", [1, 48, 300]),
        ("hicache-ratio", [1.2, 2.0, 3.5]),
    ):
        if dice.random() < 0.4:
            flags[name] = dice.choice(values)
    ours = plan(flags, model, dice.choice(MEMORY_MIB[4:]))
    cell, tokens, requests, host = their_pools(flags, model, ours)
    side, host_figure = ours.figure("side_buffers"), ours.figure("hicache_per_rank")
    assert side is not None and host_figure is not None
    found: tuple[t.Any, ...] = (
        ours.value("kv_bytes_per_token"),
        ours.value("max_total_num_tokens"),
        side.inputs.get("requests"),
        host_figure.value,
    )
    theirs: tuple[t.Any, ...] = (cell, tokens, requests, host)
    return None if found == theirs else f"{flags} {model}: ours {found}, theirs {theirs}"


def their_pools(flags: Flags, model: ModelFacts, ours: Budget) -> tuple[int, int, int, int]:
    """SGLang's bytes per token, tokens, requests and bytes of the host pool, for the room that we found."""
    kv_heads = model.kv_heads or 1
    config = SimpleNamespace(
        kv_lora_rank=model.kv_lora_rank,
        qk_rope_head_dim=model.qk_rope_head_dim,
        head_dim=model.head_dim,
        v_head_dim=model.v_head_dim,
        context_len=model.max_positions,
        get_num_kv_heads=lambda size: max(1, kv_heads // size),
        hf_config=SimpleNamespace(architectures=list(model.architectures or ()), index_topk=None),
    )
    runner = SimpleNamespace(
        model_config=config,
        kv_cache_dtype=DTYPES[flags["kv-cache-dtype"]],
        dtype=torch.bfloat16,
        use_mla_backend=model.is_mla,
        mambaish_config=None,
        num_effective_layers=model.layers,
        is_draft_worker=False,
        dp_size=1,
        pp_size=1,
        spec_algorithm=mock.Mock(**{f"is_{kind}.return_value": False for kind in ("eagle", "standalone", "dflash")}),
        server_args=SimpleNamespace(
            max_running_requests=flags.get("max-running-requests"), max_total_tokens=flags.get("max-total-tokens")
        ),
    )
    with mock.patch.object(pool_configurator, "get_attention_tp_size", lambda: flags["tp-size"]):
        configurator = pool_configurator.DefaultPoolConfigurator(runner)
    room, page = int(ours.value("kv_room") or 0), flags["page-size"]
    tokens = configurator.calculate_pool_sizes(room, page).max_total_num_tokens
    constrained = ModelRunnerKVCacheMixin._apply_token_constraints(runner, tokens)
    if constrained != tokens:
        tokens = configurator.calculate_pool_sizes_from_max_tokens(constrained, page).max_total_num_tokens
    requests = ModelRunnerKVCacheMixin._resolve_max_num_reqs(runner, tokens)
    cell = configurator._cell_size
    device = SimpleNamespace(size=tokens, store_dtype=runner.kv_cache_dtype, start_layer=0, end_layer=1, cell=cell)
    memory = SimpleNamespace(available=1 << 60)
    with mock.patch.object(pool_host.psutil, "virtual_memory", lambda: memory):
        pool = HostPool(
            device, flags.get("hicache-ratio", 2.0), flags.get("hicache-size", 0), page, "page_first", False, "cpu"
        )
    return cell, tokens, requests, pool.size * cell


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    logging.disable(logging.WARNING)
    wrong = 0
    for name, differs in (("mem_fraction_static", fraction_differs), ("pools", pool_differs)):
        dice = random.Random(20261130)
        found = [text for text in (differs(dice) for _number in range(count)) if text is not None]
        for text in found[:5]:
            print(text)
        print(f"{name}: {count} configurations compared with SGLang {VERSION}'s own code, {len(found)} differ")
        wrong += len(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
