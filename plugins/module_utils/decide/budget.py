# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory budget of a wanted configuration: what SGLang will compute once it runs, before it runs.

The formulas are SGLang's own (0.5.10 to 0.5.23; docs/plan.md names the places). The figures are those of one rank, on
the GPU with the least memory. What SGLang takes from the running process and nobody can know before (a CUDA context,
kernels, graphs) is a named assumption, or what the last launch's log says. A figure that can't be known is None with a
reason, and so is all that follows from it.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field

from ..plan_model import GIB, MIB, Budget, Figure, HostFacts, Learned, ModelFacts, Topology
from ..sglang.install import version_tuple
from ..sglang.model_config import PLAIN_ARCHITECTURES
from .budget_host import host_figures
from .topology import Flags, smallest_free_bytes

# Measured on an H200 (driver 580, torch 2.11 for CUDA 13, SGLang 0.5.15): NVML told 143,155 MiB free, and SGLang had
# 139.19 GiB before load. The difference is the CUDA context and what initialising torch.distributed takes.
CONTEXT_BYTES = 623 * MIB
# There, 139.19 GiB were 139.12 GiB after loading a model of 3 MB: modules of kernels that importing the models loads.
LOAD_OVERHEAD_BYTES = 73 * MIB
# There, with triton's attention and without graphs: cuBLAS, the attention backend, and a forward pass to warm up.
RUNTIME_BYTES = 103 * MIB
# "Constant meta data (e.g., from attention backend)" of SGLang's own reserve: flashinfer and others have a workspace.
BACKEND_BYTES = 512 * MIB
# The runners' static input buffers (since 0.5.14): input ids, positions and cache locations of 8 bytes each, and three
# rows of mrope positions, per token of the pool.
STATIC_BUFFER_BYTES_PER_TOKEN = 8 + 8 + 8 + 3 * 8
_ALLOCATOR_BYTES_PER_PAGE = 8
_REQUEST_TABLE_BYTES = 4
_REQUEST_EXTRA_TOKENS = 4
_PREFILL_GRAPH_MLA_MIB = 1536

_ITEM_SIZES: t.Mapping[str, int] = {
    "half": 2,
    "float16": 2,
    "fp16": 2,
    "bf16": 2,
    "bfloat16": 2,
    "float": 4,
    "float32": 4,
    "fp32": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
_PAGE_OF_BACKEND: t.Mapping[str, int] = {"flashmla": 64, "cutlass_mla": 128, "trtllm_mla": 64, "dsa": 64, "nsa": 64}

_ARGS = "server_args.py _handle_gpu_memory_settings"
_POOL = "model_executor/pool_configurator.py"
_PROFILE = "model_executor/model_runner_kv_cache_mixin.py _profile_available_bytes"
_MEASURED = "measured on an H200, docs/plan.md"


@dataclass(frozen=True)
class _Known:
    """A number or the reason why there is none, with where it comes from."""

    value: t.Optional[float]
    reason: t.Optional[str] = None
    formula: str = ""
    inputs: t.Mapping[str, t.Any] = field(default_factory=dict)
    source: str = ""


def budget(
    flags: t.Mapping[str, t.Any],
    model: ModelFacts,
    topology: Topology,
    host: t.Optional[HostFacts] = None,
    learned: t.Optional[Learned] = None,
    version: t.Optional[str] = None,
) -> Budget:
    """The budget of one rank's GPU and of the host. ``flags`` by any spelling; unset ones take SGLang's defaults."""
    wanted = Flags(flags)
    rank = _Rank(wanted, model, topology, learned, version_tuple(version))
    gpu = rank.figures()
    tokens = next(figure for figure in gpu if figure.name == "max_total_num_tokens")
    weights = next(figure for figure in gpu if figure.name == "weights_per_rank")
    cell = next(figure for figure in gpu if figure.name == "kv_bytes_per_token")
    return Budget(gpu, host_figures(wanted, model, topology, host, tokens, cell, weights, rank.page, rank.version))


class _Rank:
    """The GPU part. Each method gives one figure; ``_put`` keeps it for those that need it."""

    def __init__(
        self,
        wanted: Flags,
        model: ModelFacts,
        topology: Topology,
        learned: t.Optional[Learned],
        version: t.Optional[tuple[int, ...]],
    ) -> None:
        self.wanted, self.model, self.topology = wanted, model, topology
        self.learned, self.version = learned, version
        self.page, self.page_source = _page_size(wanted, model)
        self._figures: dict[str, Figure] = {}

    def figures(self) -> tuple[Figure, ...]:
        self._before_load()
        self._fraction()
        self._weights()
        self._after_load()
        self._cell()
        self._room()
        self._tokens()
        self._pool()
        self._side_buffers()
        self._graphs()
        self._headroom()
        return tuple(self._figures.values())

    def _put(self, name: str, label: str, unit: str, known: _Known) -> None:
        reason = None if known.value is not None else known.reason or "not known"
        self._figures[name] = Figure(
            name, label, unit, known.value, known.formula, dict(known.inputs), known.source, reason
        )

    def _get(self, *names: str) -> tuple[t.Optional[list[float]], t.Optional[str]]:
        """``(values, None)`` if all are known, else ``(None, the first reason)``."""
        values = []
        for name in names:
            figure = self._figures[name]
            if figure.value is None:
                reason = figure.reason or "not known"
                return None, reason if reason.startswith("without ") else f"without {figure.label}: {reason}"
            values.append(figure.value)
        return values, None

    # --- memory before and after the weights ---

    def _before_load(self) -> None:
        gpus = self.topology.gpus
        free = smallest_free_bytes(gpus)
        if free is None:
            why = "no GPU is chosen" if not gpus else "the driver doesn't tell the free memory of every GPU"
            self._put("gpu_free", "memory that is free", "bytes", _Known(None, why))
            self._put("free_before_load", "free before load", "bytes", _Known(None, why))
            return
        least = min(gpus, key=lambda gpu: (gpu.free_mib or 0) + gpu.returned_mib)
        inputs = {"gpu": least.index, "free_mib": least.free_mib, "returned_mib": least.returned_mib}
        told = f"GPU {least.index}: {least.free_mib:,} MiB" + (
            f" + {least.returned_mib:,} MiB that the server gives back" if least.returned_mib else ""
        )
        self._put("gpu_free", "memory that is free", "bytes", _Known(free, None, told, inputs, "NVML"))
        learned = self.learned.free_before_load_bytes if self.learned else None
        # A log's figure is this GPU's only if it is just a context below what the driver tells now.
        if self.learned is not None and learned is not None and 0 <= free - learned <= 3 * GIB:
            known = _Known(
                learned, None, "as the last launch's log says", {"free_before_load": learned}, self.learned.source
            )
        else:
            known = _Known(
                max(free - CONTEXT_BYTES, 0),
                None,
                f"free - {CONTEXT_BYTES // MIB:,} MiB for the CUDA context (assumed)",
                {"free": free, "context_assumed": CONTEXT_BYTES},
                _MEASURED,
            )
        self._put("free_before_load", "free before load", "bytes", known)

    def _fraction(self) -> None:
        given = self.wanted.number("mem-fraction-static")
        if given is not None:
            known = _Known(float(given), None, "as wanted", {"mem_fraction_static": float(given)}, "the flags")
        elif self.wanted.has("mem-fraction-static"):
            known = _Known(None, "mem-fraction-static is no number")
        else:
            known = self._auto_fraction()
        self._put("mem_fraction_static", "mem_fraction_static", "fraction", known)

    def _auto_fraction(self) -> _Known:
        """SGLang's own choice when the flag is unset, in MiB as there."""
        total = _least(gpu.total_mib for gpu in self.topology.gpus)
        tp, pp, dp = self.topology.tp, self.topology.pp, self.topology.dp
        if not total or tp is None or pp is None or dp is None:
            return _Known(None, "SGLang chooses it by the GPUs' memory and tp-size, which are not known")
        if self.wanted.text("disaggregation-mode", "null") != "null":
            return _Known(None, "SGLang chooses it by the kind of disaggregation, which is not computed here")
        chunk, max_bs = self._chunk(), self._decode_max_bs()
        if chunk is None or max_bs is None:
            return _Known(None, "SGLang chooses it by chunked-prefill-size and the graphs' batch sizes; one is unclear")
        parts: dict[str, float] = {"constant": 512}
        rows = chunk if chunk > 0 else (self.wanted.whole("max-prefill-tokens", 16384) or 16384)
        parts["activations"] = max(rows, 2048) * 1.5
        if not self._graphs_off("decode") or (self.version is not None and self.version < (0, 5, 15)):
            parts["decode_graphs"] = max_bs * 2
        parts["parallel"] = tp * pp / 8 * 1024
        if self.topology.attention_dp:
            parts["attention_dp"] = max_bs * dp * (3 + (1.5 if max_bs > 300 else 0))
        parts["prefill_graphs"] = self._prefill_graph_mib(chunk)
        reserved = sum(parts.values())
        if total > 60 * 1024:
            reserved = max(reserved, 10 * 1024)
        algorithm = self.wanted.text("speculative-algorithm")
        if algorithm and self.version is not None and self.version < (0, 5, 14):
            extra = {"STANDALONE": 6 * 1024, "NGRAM": 0}.get(algorithm.upper(), 4 * 1024)
            parts["speculative"] = extra
            reserved += extra
        if self.wanted.text("moe-a2a-backend") == "deepep" and not self._graphs_off("decode"):
            parts["deepep"] = 2048
            reserved += 2048
        value = round((total - reserved) / total, 3)
        formula = f"({total:,} MiB - {reserved:,.0f} MiB reserved) / {total:,} MiB"
        if self.model.is_multimodal and not self.wanted.has("language-only"):
            factor = _vision_factor(self.model)
            value *= factor
            formula += f" x {factor:.3f} for the vision tower"
        return _Known(value, None, formula, {"total_mib": total, **parts}, _ARGS)

    def _chunk(self) -> t.Optional[int]:
        total = _least(gpu.total_mib for gpu in self.topology.gpus)
        if self.wanted.has("chunked-prefill-size"):
            return self.wanted.whole("chunked-prefill-size")
        return None if total is None else _tier(total, self.topology.tp or 1, self.version)[0]

    def _decode_max_bs(self) -> t.Optional[int]:
        for name in ("cuda-graph-max-bs-decode", "cuda-graph-max-bs"):
            if self.wanted.has(name):
                return self.wanted.whole(name)
        if any(self.wanted.has(name) for name in ("cuda-graph-bs", "cuda-graph-bs-decode", "cuda-graph-config")):
            return None
        total = _least(gpu.total_mib for gpu in self.topology.gpus)
        if total is None:
            return None
        value = _tier(total, self.topology.tp or 1, self.version)[1]
        limit = self.wanted.whole("max-running-requests")
        if limit and self.version is not None and self.version >= (0, 5, 22):
            value = min(value, limit)
        return value

    def _graphs_off(self, phase: str) -> bool:
        if self.wanted.has("disable-cuda-graph"):
            return True
        if self.wanted.text(f"cuda-graph-backend-{phase}") == "disabled":
            return True
        return phase == "prefill" and self.wanted.has("disable-piecewise-cuda-graph")

    def _prefill_graph_mib(self, chunk: int) -> float:
        if self._graphs_off("prefill"):
            return 0
        if self.model.is_mla:
            return _PREFILL_GRAPH_MLA_MIB
        largest = chunk
        for name in ("max-total-tokens", "context-length"):
            limit = self.wanted.whole(name)
            if limit is not None:
                largest = min(largest, limit)
        return 8 * _prefill_sizes(largest)

    # --- weights ---

    def _weights(self) -> None:
        learned = self.learned
        if learned is not None and learned.same_weights:
            before, after = learned.free_before_load_bytes, learned.free_after_load_bytes
            if before is not None and after is not None and before >= after:
                known = _Known(
                    before - after,
                    None,
                    "free before load - free after load, in the last launch's log",
                    {"free_before_load": before, "free_after_load": after},
                    learned.source,
                )
                self._put("weights_per_rank", "weights per rank", "bytes", known)
                return
        self._put("weights_per_rank", "weights per rank", "bytes", self._weights_by_files())

    def _weights_by_files(self) -> _Known:
        model, topology = self.model, self.topology
        if model.source != "local":
            return _Known(None, "; ".join(model.problems) or f"the model is {model.source}")
        tp, pp = topology.tp, topology.pp
        if not tp or not pp:
            return _Known(None, "tp-size or pp-size is not known")
        for name, why in (
            ("cpu-offload-gb", "a part of the weights stays in the host's memory"),
            ("speculative-draft-model-path", "the draft model's weights come on top and are not known"),
            ("lora-paths", "the adapters' weights come on top and are not known"),
        ):
            if self.wanted.has(name):
                return _Known(None, f"{name} is set: {why}")
        quantization = self.wanted.text("quantization")
        if quantization is not None and model.quantization is None:
            return _Known(None, f"the weights are quantized while they load ({quantization})")
        if topology.attention_dp:
            return _Known(
                None, "with attention-DP each rank holds whole attention layers; how large they are isn't known"
            )
        total, source = model.weight_bytes, f"the model's {model.weight_source}"
        if total is None:
            total = _plain_parameters_bytes(model)
            if total is None:
                return _Known(None, "no weights lie in the model's directory, and its shapes don't tell their size")
            source = "the shapes in config.json (no weights lie there)"
        factor = self._cast_factor()
        share = total * factor / (tp * pp)
        replicated = _replicated_bytes(model, tp, pp)
        inputs = {
            "tp": tp,
            "pp": pp,
            "weight_bytes": total,
            "cast_factor": factor,
            "replicated_per_rank": round(replicated),
        }
        formula = f"{total / 1e9:,.1f} GB / ({tp} tp x {pp} pp)"
        if replicated:
            formula += f" + {replicated / 1e9:,.2f} GB that every rank holds whole"
        return _Known(round(share + replicated), None, formula, inputs, source)

    def _cast_factor(self) -> float:
        """float32 files are loaded as 16 bits (and the other way round) unless they are quantized."""
        stored = _ITEM_SIZES.get(self.model.dtype or "")
        loaded = _load_item_size(self.wanted, self.model)
        if self.model.quantization is not None or stored is None or loaded is None or self.model.weight_bytes is None:
            return 1.0
        return loaded / stored

    def _after_load(self) -> None:
        values, reason = self._get("free_before_load", "weights_per_rank")
        if values is None:
            self._put("free_after_load", "free after load", "bytes", _Known(None, reason))
            return
        learned = "free_after_load" in self._figures["weights_per_rank"].inputs  # the log's figure holds all of it
        overhead = 0 if learned else LOAD_OVERHEAD_BYTES
        known = _Known(
            values[0] - values[1] - overhead,
            None,
            "free before load - weights"
            + ("" if learned else f" - {overhead // MIB} MiB of kernels that load with them (assumed)"),
            {"free_before_load": values[0], "weights_per_rank": values[1], "overhead_assumed": overhead},
            "the log" if learned else _MEASURED,
        )
        self._put("free_after_load", "free after load", "bytes", known)

    # --- the KV cache ---

    def _cell(self) -> None:
        self._put(
            "kv_bytes_per_token", "KV cache per token", "bytes/token", kv_cell(self.wanted, self.model, self.topology)
        )

    def _room(self) -> None:
        values, reason = self._get("free_after_load", "free_before_load", "mem_fraction_static")
        if values is None:
            self._put("kv_room", "room for the KV cache", "bytes", _Known(None, reason))
            return
        after, before, fraction = values
        known = _Known(
            int(after - before * (1 - fraction)),
            None,
            f"free after load - free before load x (1 - {fraction:g})",
            {"free_after_load": after, "free_before_load": before, "mem_fraction_static": fraction},
            _PROFILE,
        )
        self._put("kv_room", "room for the KV cache", "bytes", known)

    def _tokens(self) -> None:
        label = "KV cache, tokens"
        cap, cell = self.wanted.whole("max-total-tokens"), self._figures["kv_bytes_per_token"]
        values, reason = self._get("kv_room", "kv_bytes_per_token")
        if self.wanted.has("max-total-tokens") and cap is None:
            self._put("max_total_num_tokens", label, "tokens", _Known(None, "max-total-tokens is no whole number"))
            return
        if values is None:
            why = f"{reason}" + (f" (at most {cap:,} by max-total-tokens)" if cap else "")
            self._put("max_total_num_tokens", label, "tokens", _Known(None, why))
            return
        profiled = max(int(values[0] // values[1]), 0) // self.page * self.page
        tokens = profiled if cap is None else min(profiled, cap // self.page * self.page)
        formula = f"room / {cell.value:,.0f} bytes per token, in pages of {self.page}"
        if cap is not None:
            formula = f"the smaller of max-total-tokens {cap:,} and {profiled:,} ({formula})"
        inputs: dict[str, t.Any] = {"kv_room": values[0], "kv_bytes_per_token": values[1], "page_size": self.page}
        inputs.update({"profiled": profiled, "max_total_tokens": cap, "page_size_source": self.page_source})
        self._put("max_total_num_tokens", label, "tokens", _Known(tokens, None, formula, inputs, _POOL))

    def _pool(self) -> None:
        values, reason = self._get("max_total_num_tokens", "kv_bytes_per_token")
        if values is None:
            self._put("kv_pool", "KV cache", "bytes", _Known(None, reason))
            return
        known = _Known(
            (values[0] + self.page) * values[1],
            None,
            f"({values[0]:,.0f} tokens + 1 page) x {values[1]:,.0f} bytes",
            {"tokens": values[0], "page_size": self.page, "kv_bytes_per_token": values[1]},
            "mem_cache/memory_pool.py",
        )
        self._put("kv_pool", "KV cache", "bytes", known)

    # --- what else is on the GPU once it runs ---

    def _side_buffers(self) -> None:
        """The allocator's list of free pages, the table of requests, and (since 0.5.14) the static input buffers."""
        label = "tables and input buffers"
        values, reason = self._get("max_total_num_tokens")
        context = self.wanted.whole("context-length", self.model.max_positions)
        if values is None or context is None:
            why = reason or "the context length is not known"
            self._put("side_buffers", label, "bytes", _Known(None, why))
            return
        tokens = int(values[0])
        requests = _max_requests(self.wanted, self.topology, tokens, context)
        if requests is None:
            self._put("side_buffers", label, "bytes", _Known(None, "max-running-requests is no whole number"))
            return
        extra = _REQUEST_EXTRA_TOKENS + (self.wanted.whole("speculative-num-draft-tokens", 0) or 0)
        table = (requests + 1) * (context + extra) * _REQUEST_TABLE_BYTES
        allocator = tokens // self.page * _ALLOCATOR_BYTES_PER_PAGE
        ceiling = 0
        if self.version is None or self.version >= (0, 5, 15):
            ceiling = max(tokens, self._chunk() or 0, requests)
        elif self.version >= (0, 5, 14):
            chunk = self._chunk() or 0
            ceiling = max(chunk if chunk > 0 else tokens, requests)
        buffers = ceiling * STATIC_BUFFER_BYTES_PER_TOKEN
        known = _Known(
            table + allocator + buffers,
            None,
            f"table of {requests + 1:,} requests x {context + extra:,} x 4 bytes, 8 bytes per page of the pool,"
            f" {STATIC_BUFFER_BYTES_PER_TOKEN} bytes of input buffers x {ceiling:,} tokens",
            {"request_table": table, "allocator": allocator, "input_buffers": buffers, "requests": requests},
            "mem_cache/memory_pool.py ReqToTokenPool, model_executor/runner/eager_runner.py",
        )
        self._put("side_buffers", label, "bytes", known)

    def _graphs(self) -> None:
        """Graphs and workspaces: measured without graphs on one GPU, else estimated by SGLang's own reserve."""
        label = "graphs and workspaces"
        learned = self._learned_start()
        if learned is not None:
            self._put("start_reserve", label, "bytes", learned)
            return
        parts: dict[str, float] = {"runtime": RUNTIME_BYTES}
        tp, pp = self.topology.tp, self.topology.pp
        if self.wanted.text("attention-backend") != "triton":
            parts["backend"] = BACKEND_BYTES
        if tp is None or pp is None:
            self._put("start_reserve", label, "bytes", _Known(None, "tp-size or pp-size is not known"))
            return
        if tp * pp > 1:
            parts["parallel"] = tp * pp / 8 * GIB
        if not self._graphs_off("decode") or not self._graphs_off("prefill"):
            chunk, max_bs = self._chunk(), self._decode_max_bs()
            if chunk is None or max_bs is None:
                self._put("start_reserve", label, "bytes", _Known(None, "the graphs' batch sizes are not known"))
                return
            if not self._graphs_off("decode"):
                parts["decode_graphs"] = max_bs * 2 * MIB
                if self.topology.attention_dp:
                    parts["attention_dp"] = max_bs * (self.topology.dp or 1) * (4.5 if max_bs > 300 else 3) * MIB
            parts["prefill_graphs"] = self._prefill_graph_mib(chunk) * MIB
        known = _Known(
            round(sum(parts.values())),
            None,
            "assumed: " + " + ".join(f"{name.replace('_', ' ')} {size / MIB:,.0f} MiB" for name, size in parts.items()),
            parts,
            f"{_MEASURED}; {_ARGS}",
        )
        self._put("start_reserve", label, "bytes", known)

    def _learned_start(self) -> t.Optional[_Known]:
        """What the last launch lost between its pools and readiness, without the part that grows with the tokens."""
        learned = self.learned
        if learned is None or not learned.same_weights:
            return None
        after_pool, started, tokens = (
            learned.free_after_pool_bytes,
            learned.free_after_start_bytes,
            learned.max_total_num_tokens,
        )
        if after_pool is None or started is None or tokens is None or started > after_pool:
            return None
        buffers = tokens * STATIC_BUFFER_BYTES_PER_TOKEN if (self.version or (0, 5, 15)) >= (0, 5, 15) else 0
        return _Known(
            max(after_pool - started - buffers, 0),
            None,
            "free after the pools - free after the start - input buffers, in the last launch's log",
            {"free_after_pool": after_pool, "free_after_start": started, "input_buffers": buffers},
            learned.source,
        )

    def _headroom(self) -> None:
        label = "free after the start"
        values, reason = self._get("free_after_load", "kv_pool", "side_buffers", "start_reserve")
        if values is None:
            self._put("headroom_after_start", label, "bytes", _Known(None, reason))
            return
        known = _Known(
            values[0] - values[1] - values[2] - values[3],
            None,
            "free after load - KV cache - tables and input buffers - graphs and workspaces",
            dict(zip(("free_after_load", "kv_pool", "side_buffers", "start_reserve"), values)),
            self._figures["start_reserve"].source,
        )
        self._put("headroom_after_start", label, "bytes", known)


# --- KV bytes per token -----------------------------------------------------------------------------------------------


def kv_cell(wanted: Flags, model: ModelFacts, topology: Topology) -> _Known:
    """Bytes of KV cache per token on one rank, as SGLang's pool configurator computes them."""
    reason = _no_cell(wanted, model)
    if reason is not None:
        return _Known(None, reason)
    pp, share = topology.pp, topology.attention_tp
    if pp is None or share is None:
        return _Known(None, "how many ranks share the heads is not known (tp-size, pp-size, dp-size)")
    size, dtype, fp4 = kv_item_size(wanted, model)
    if size is None:
        return _Known(None, dtype)
    if model.layers is None:
        return _Known(None, "config.json doesn't tell the number of layers")
    layers = -(-model.layers // pp)
    inputs: dict[str, t.Any] = {"layers": layers, "kv_cache_dtype": dtype, "bytes_per_value": size}
    if model.is_mla:
        rank, rope = model.kv_lora_rank, model.qk_rope_head_dim
        if rank is None or rope is None:
            return _Known(None, "config.json doesn't tell kv_lora_rank or qk_rope_head_dim")
        width = rank + rope
        cell = width * layers * size
        formula = f"({rank} + {rope}) x {layers} layers x {size} bytes ({dtype}), whole on every rank (MLA)"
        if fp4:
            cell = cell // 2 + width // 16 * layers * size
        if model.extra.get("is_dsa"):
            index = model.extra.get("index_head_dim")
            if index is None:
                return _Known(None, "config.json doesn't tell index_head_dim")
            cell += (index + index // 128 * 4) * layers
            formula += f" + {index + index // 128 * 4} bytes x {layers} layers for the indexer"
        inputs.update({"kv_lora_rank": rank, "qk_rope_head_dim": rope})
    else:
        heads, key, value = model.kv_heads, model.head_dim, model.v_head_dim
        if heads is None or key is None or value is None:
            return _Known(None, "config.json doesn't tell the KV heads or their size")
        here = max(1, heads // share)
        cell = here * (key + value) * layers * size
        formula = f"{here} KV heads x ({key} + {value}) x {layers} layers x {size} bytes ({dtype})"
        if fp4:
            cell = cell // 2 + here * key * layers * 2 * size // 16
        inputs.update({"kv_heads": heads, "kv_heads_per_rank": here, "head_dim": key, "v_head_dim": value})
    draft = _draft_layers(wanted, model)
    if draft is None:
        return _Known(None, "the draft model has a KV cache too, and how many layers it has is not known")
    if draft:
        cell = int(cell * (1 + draft / layers))
        formula += f" x (1 + {draft} / {layers}) for the draft layers"
        inputs["draft_layers"] = draft
    return _Known(cell, None, formula, inputs, f"{_POOL} DefaultPoolConfigurator")


def _no_cell(wanted: Flags, model: ModelFacts) -> t.Optional[str]:
    if model.source != "local":
        return "; ".join(model.problems) or f"the model is {model.source}"
    if wanted.has("json-model-override-args"):
        return "json-model-override-args changes the model's shapes"
    if wanted.whole("dcp-size", 1) != 1:
        return "decode context parallelism spreads the KV cache"
    differs = model.extra.get("kv_differs")
    if differs and not ("sliding window" in differs and wanted.has("disable-hybrid-swa-memory")):
        return f"this model's KV cache has more than one pool: {differs}"
    if model.extra.get("served") is False:
        return f"this SGLang has no model class {' or '.join(model.architectures or ('?',))}"
    if model.is_mla is None:
        return f"whether {' or '.join(model.architectures or ('an unnamed architecture',))} uses MLA is not known"
    if model.extra.get("served") is None and not model.is_mla and not _is_plain(model):
        return f"the architecture {' or '.join(model.architectures or ('?',))} is not known here"
    return None


def _is_plain(model: ModelFacts) -> bool:
    return any(name in PLAIN_ARCHITECTURES for name in model.architectures or ())


def kv_item_size(wanted: Flags, model: ModelFacts) -> tuple[t.Optional[int], str, bool]:
    """``(bytes per value or None, dtype or the reason, whether it is FP4)`` of the KV cache."""
    dtype = (wanted.text("kv-cache-dtype", "auto") or "auto").lower()
    if dtype == "auto":
        if model.extra.get("is_dsa"):
            return None, "kv-cache-dtype auto depends on the GPU for sparse attention (DSA); set it", False
        if str(model.extra.get("kv_cache_quant_algo", "")).upper() == "FP8":
            return 1, "fp8_e4m3", False
        size = _load_item_size(wanted, model)
        return size, "16 bits" if size == 2 else f"{wanted.text('dtype', 'auto')}", False
    if dtype == "fp4_e2m1":
        return 1, dtype, True
    size = _ITEM_SIZES.get(dtype)
    return (size, dtype, False) if size else (None, f"how many bytes kv-cache-dtype {dtype} takes is not known", False)


def _load_item_size(wanted: Flags, model: ModelFacts) -> t.Optional[int]:
    """Bytes per value of the loaded model: auto is 16 bits, also for float32 files and for configs without a dtype."""
    dtype = (wanted.text("dtype", "auto") or "auto").lower()
    if dtype == "auto":
        return 2 if model.dtype in (None, "float32", "float", "float16", "half", "bfloat16") else None
    return _ITEM_SIZES.get(dtype)


def _draft_layers(wanted: Flags, model: ModelFacts) -> t.Optional[int]:
    algorithm = (wanted.text("speculative-algorithm") or "").upper()
    if not algorithm or algorithm == "NGRAM":
        return 0
    if algorithm in ("NEXTN", "EAGLE") and not wanted.has("speculative-draft-model-path"):
        return model.extra.get("num_nextn_predict_layers")
    return None


def _page_size(wanted: Flags, model: ModelFacts) -> tuple[int, str]:
    given = wanted.whole("page-size")
    backends = [wanted.text(name) for name in ("attention-backend", "decode-attention-backend")]
    forced = [_PAGE_OF_BACKEND[name] for name in backends if name is not None and name in _PAGE_OF_BACKEND]
    if model.extra.get("is_dsa"):
        forced.append(64)
    if forced and not (given and given > 0 and given % min(forced) == 0):
        return max(forced), "the attention backend"
    if given is not None and given > 0:
        return given, "the flags"
    return 1, "SGLang's default"


# --- small formulas ---------------------------------------------------------------------------------------------------


def _least(values: t.Iterable[t.Optional[int]]) -> t.Optional[int]:
    found = list(values)
    return None if not found or None in found else min(t.cast("list[int]", found))


def _tier(total_mib: int, tp: int, version: t.Optional[tuple[int, ...]]) -> tuple[int, int]:
    """``(chunked prefill size, largest decode graph)`` that SGLang takes for a GPU of this size."""
    small = tp < 4
    if total_mib < 20 * 1024:
        return 2048, 8
    if total_mib < 35 * 1024:
        if version is not None and version >= (0, 5, 20):
            return 4096, 48 if small else 160
        return 2048, 24 if small else 80
    if total_mib < 60 * 1024:
        return 4096, 32 if small else 160
    if total_mib < 160 * 1024:
        return 8192, 256 if small else 512
    return 16384, 512


def _prefill_sizes(largest: int) -> int:
    """How many sizes of prefill graphs SGLang captures; it lists them up to ``largest``."""
    steps = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256), (4608, largest, 512))
    return sum(max((min(last, largest) - first) // step + 1, 0) for first, last, step in steps)


def _vision_factor(model: ModelFacts) -> float:
    """adjust_mem_fraction_for_vlm: 0.95, less for a vision tower that is larger than ViT-L/14."""
    layers, hidden = model.extra.get("vision_layers"), model.extra.get("vision_hidden_size")
    if not layers or not hidden:
        return 1.0  # no vision_config: SGLang leaves the fraction alone
    ratio = layers * hidden**2 / (24 * 1024**2)
    return float(0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (ratio - 1.0))))


def _max_requests(wanted: Flags, topology: Topology, tokens: int, context: int) -> t.Optional[int]:
    """_resolve_max_num_reqs."""
    if wanted.has("max-running-requests"):
        given = wanted.whole("max-running-requests")
        return None if given is None else max(min(given // max(topology.dp or 1, 1), tokens // 2), 0)
    return min(max(min(int(tokens / max(context, 1) * 512), 4096), 2048), tokens // 2)


def _replicated_bytes(model: ModelFacts, tp: int, pp: int) -> float:
    """What every rank holds whole of weights that the share counts once: MLA's down projections and the router.

    They are 16 bits wide in the known checkpoints. KV projections of fewer heads than ranks are held more than once.
    """
    hidden, layers = model.hidden_size, model.layers
    if hidden is None or layers is None or tp == 1:
        return 0.0
    per_layer = 0
    if model.is_mla and model.kv_lora_rank and model.qk_rope_head_dim:
        down = (model.extra.get("q_lora_rank") or 0) + model.kv_lora_rank + model.qk_rope_head_dim
        per_layer += hidden * down * 2
    elif model.kv_heads and model.head_dim and model.kv_heads < tp:
        per_layer += round(2 * hidden * model.head_dim * model.kv_heads * 2 * (tp / model.kv_heads - 1) / (tp - 1))
    experts = next(
        (model.extra[name] for name in ("n_routed_experts", "num_experts", "num_local_experts") if name in model.extra),
        0,
    )
    per_layer += hidden * experts * 2
    return per_layer * -(-layers // pp) * (1 - 1 / tp)


def _plain_parameters_bytes(model: ModelFacts) -> t.Optional[int]:
    """The size of a plain decoder (Llama and its like) from its shapes; for models without weights (dummy)."""
    intermediate = model.extra.get("intermediate_size")
    parts = (model.hidden_size, model.layers, model.attention_heads, model.kv_heads, model.head_dim, model.vocab_size)
    names = set(model.architectures or ())
    if not names & {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}:
        return None
    if None in parts or intermediate is None or model.quantization is not None:
        return None
    hidden, layers, heads, kv_heads, head_dim, vocabulary = t.cast("tuple[int, ...]", parts)
    per_layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * int(intermediate) + 2 * hidden
    embeddings = vocabulary * hidden * (1 if model.tie_word_embeddings else 2)
    return (per_layer * layers + embeddings + hidden) * 2
