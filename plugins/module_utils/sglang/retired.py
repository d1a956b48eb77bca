# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options and choices that SGLang had once: the first version without them, and what does their work now.

Read off the wheels 0.5.10 to 0.5.23 (the successors are what the last version that had them said); older ones from the
wheels 0.5.0 to 0.5.9. An option that the installed version has is never looked up here.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass


@dataclass(frozen=True)
class Retired:
    """``removed``: the first version that no longer has it. ``use``: what to write instead, in words; None: nothing.

    ``value``: whether the old value goes to the successor unchanged (then ``use`` is that option's name alone).
    """

    name: str
    removed: str
    use: t.Optional[str] = None
    value: bool = False


_GONE: t.Mapping[str, str] = {
    "0.5.2": "pdlb-url",
    "0.5.4": "max-micro-batch-size",
    "0.5.5": "enable-beta-spec oltp-traces-endpoint",
    "0.5.7": "enable-flashinfer-autotune dllm-block-size load-watch-interval",
    "0.5.9": "disaggregation-decode-enable-fake-auto",
    "0.5.10": (
        "disable-hicache-numa-detect disaggregation-decode-dp disaggregation-decode-tp disaggregation-prefill-pp"
    ),
    "0.5.11": (
        "enable-double-sparsity ds-channel-config-path ds-heavy-channel-num ds-heavy-channel-type ds-heavy-token-num "
        "ds-sparse-decode-threshold"
    ),
    "0.5.13": "record-nolora-graph no-record-nolora-graph",
    "0.5.14": "custom-sigquit-handler debug-tensor-dump-inject",
    "0.5.16": "optimistic-prefill-retries",
    "0.5.18": "torchao-config",
    "0.5.20": "prefill-round-robin-balance",
    "0.5.22": "cuda-graph-tc-compiler",
    "0.5.23": "speculative-skip-dp-mlp-sync",
}
_RENAMED: t.Mapping[str, t.Mapping[str, str]] = {
    "0.5.4": {"nsa-prefill": "nsa-prefill-backend", "nsa-decode": "nsa-decode-backend"},
    "0.5.16": {"enable-deepep-waterfill": "enable-waterfill"},
    "0.5.20": {
        "cuda-graph-max-bs": "cuda-graph-max-bs-decode",
        "cuda-graph-bs": "cuda-graph-bs-decode",
        "piecewise-cuda-graph-max-tokens": "cuda-graph-max-bs-prefill",
        "piecewise-cuda-graph-tokens": "cuda-graph-bs-prefill",
        "enable-gdn-replayssm-spec": "enable-linear-replayssm-spec",
        "mamba-scheduler-strategy": "mamba-radix-cache-strategy",
        "nsa-prefill-backend": "dsa-prefill-backend",
        "nsa-decode-backend": "dsa-decode-backend",
        "speculative-dflash-draft-window-size": "speculative-draft-window-size",
        "stream-output": "incremental-streaming-output",
    },
}
_REPLACED: t.Mapping[str, t.Mapping[str, str]] = {
    "0.5.5": {
        "enable-ep-moe": "moe-runner-backend and moe-a2a-backend, with ep-size",
        "enable-deepep-moe": "moe-a2a-backend: deepep",
        "enable-flashinfer-cutlass-moe": "moe-runner-backend: flashinfer_cutlass",
        "enable-flashinfer-trtllm-moe": "moe-runner-backend: flashinfer_trtllm",
        "enable-flashinfer-cutedsl-moe": "moe-runner-backend: flashinfer_cutedsl",
        "enable-flashinfer-mxfp4-moe": "moe-runner-backend: flashinfer_mxfp4",
        "enable-triton-kernel-moe": "moe-runner-backend: triton_kernel",
    },
    "0.5.11": {"multi-item-scoring-delimiter": "enable-mis: true (the delimiter is chosen by SGLang)"},
    "0.5.13": {
        "enable-nan-detection": (
            "the environment variables SGLANG_SPEC_NAN_DETECTION=1 and SGLANG_SPEC_OOB_DETECTION=1"
        )
    },
    "0.5.14": {
        "enable-piecewise-cuda-graph": "nothing: it is the default; cuda-graph-backend-prefill chooses the backend",
        "hybrid-kvcache-ratio": "swa-full-tokens-ratio",
    },
    "0.5.20": {
        "collect-tokens-histogram": "enable-metrics: true, which collects them",
        "disable-piecewise-cuda-graph": "cuda-graph-backend-prefill: disabled",
        "enable-breakable-cuda-graph": "cuda-graph-backend-prefill: breakable",
        "enforce-piecewise-cuda-graph": "cuda-graph-backend-prefill (tc_piecewise until 0.5.21, breakable since)",
        "piecewise-cuda-graph-compiler": "cuda-graph-tc-compiler until 0.5.21, nothing since",
        "enable-prefill-context-parallel": "enable-prefill-cp: true",
        "enable-dsa-prefill-context-parallel": "enable-prefill-cp: true",
        "enable-nsa-prefill-context-parallel": "enable-prefill-cp: true",
        "prefill-cp-mode": "cp-strategy: zigzag (for in-seq-split) or interleave (for round-robin-split)",
        "dsa-prefill-cp-mode": "cp-strategy: zigzag (for in-seq-split) or interleave (for round-robin-split)",
        "nsa-prefill-cp-mode": "cp-strategy: zigzag (for in-seq-split) or interleave (for round-robin-split)",
        "enable-expert-distribution-metrics": "expert-balancedness-report-mode: off, server_log, prometheus or both",
    },
    "0.5.21": {
        "elastic-ep-rejoin": "elastic-ep-join-mode: recover",
        "keep-mm-feature-on-device": "mm-feature-transport: cuda_ipc",
    },
}

RETIRED: t.Mapping[str, Retired] = {
    **{name: Retired(name, version) for version, names in _GONE.items() for name in names.split()},
    **{
        old: Retired(old, version, new, value=True) for version, pairs in _RENAMED.items() for old, new in pairs.items()
    },
    **{old: Retired(old, version, use) for version, pairs in _REPLACED.items() for old, use in pairs.items()},
}
"""By name, without dashes in front."""

RETIRED_CHOICES: t.Mapping[tuple[str, str], tuple[str, t.Optional[str]]] = {
    ("attention-backend", "cutlass_mla"): ("0.5.20", None),
    ("attention-backend", "dual_chunk_flash_attn"): ("0.5.20", None),
    ("prefill-attention-backend", "cutlass_mla"): ("0.5.20", None),
    ("prefill-attention-backend", "dual_chunk_flash_attn"): ("0.5.20", None),
    ("decode-attention-backend", "cutlass_mla"): ("0.5.20", None),
    ("decode-attention-backend", "dual_chunk_flash_attn"): ("0.5.20", None),
    ("kv-cache-dtype", "fp4_e2m1"): ("0.5.21", "nvfp4 or fp4_mx_block16"),
    ("quantization", "qoq"): ("0.5.16", None),
    ("quantization", "marlin"): ("0.5.20", "gptq_marlin or awq_marlin"),
    ("fp4-gemm-backend", "cutlass"): ("0.5.16", "flashinfer_cutlass"),
    ("cuda-graph-backend-decode", "tc_piecewise"): ("0.5.22", "breakable, full or disabled"),
    ("cuda-graph-backend-prefill", "tc_piecewise"): ("0.5.22", "breakable, full or disabled"),
}
"""(option, choice) -> (first version without it, what to take instead)."""
