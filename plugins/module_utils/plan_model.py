# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a plan is made of, as plain values: facts of model, GPUs and host, the budget, and what stands against a start.

``None`` means "not known" everywhere and is never turned into a number. Sizes are bytes, or MiB (2**20) where the name
ends in ``_mib``, GB (1e9) in ``_gb``, GiB (2**30) in ``_gib``. SGLang's ``--hicache-size`` is GB; what its log calls GB
is GiB.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field, replace

MIB = 2**20
GIB = 2**30
GB = 10**9


@dataclass(frozen=True)
class Finding:
    """One thing that a plan says. ``severity``: deny, warn, note or unknown. ``source``: where the rule comes from.

    ``waived`` is the written reason of who accepted it: such a deny is a warning.
    """

    id: str
    severity: str
    subject: str
    message: str
    remedy: str = ""
    source: str = ""
    waivable: bool = False
    waived: t.Optional[str] = None


WAIVABLE = (
    "context_too_long",
    "flags-conflict",
    "gpus_unbalanced",
    "headroom_small",
    "heads_divide",
    "hicache_smaller_than_gpu",
    "shm_small",
    "weights_do_not_fit",
)
"""What is computed and may be waived all the same, by the finding's id: an SGLang may think otherwise."""


def waive(findings: t.Iterable[Finding], waivers: t.Mapping[str, str]) -> list[Finding]:
    """The computed findings with what was accepted in writing; a waived deny is a warning, a waived warning a note."""
    softer = {"deny": "warn", "warn": "note"}
    return [
        replace(
            one,
            severity=softer[one.severity],
            message=f"{one.message}. Waived: {waivers[one.id]}",
            waived=waivers[one.id],
        )
        if one.waivable and one.waived is None and one.id in waivers and one.severity in softer
        else one
        for one in findings
    ]


@dataclass(frozen=True)
class GpuFacts:
    """One of the GPUs that were chosen. ``free_mib`` is free now; ``returned_mib`` more becomes free before the start,
    because the server that is replaced holds it."""

    index: int
    uuid: t.Optional[str] = None
    name: t.Optional[str] = None
    total_mib: t.Optional[int] = None
    free_mib: t.Optional[int] = None
    compute_capability: t.Optional[str] = None
    returned_mib: int = 0


@dataclass(frozen=True)
class HostFacts:
    """Memory of the host where the ranks will run, now; ``returned_mib`` more is available before the start, because
    the server that is replaced gives it back.

    ``cgroup_headroom_mib`` None with ``cgroup_limited`` False: no limit; with True or None: not known.
    ``node_available_mib``: of the Proxmox node below a container, where it could be asked.
    """

    mem_available_mib: t.Optional[int] = None
    cgroup_headroom_mib: t.Optional[int] = None
    cgroup_limited: t.Optional[bool] = None
    node_available_mib: t.Optional[int] = None
    shm_free_mib: t.Optional[int] = None
    ranks_here: t.Optional[int] = None
    returned_mib: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """What a model's directory tells. ``source``: local, remote (a name in a hub: nothing was read) or unreadable."""

    path: str
    source: str
    problems: tuple[str, ...] = ()
    architectures: t.Optional[tuple[str, ...]] = None
    model_type: t.Optional[str] = None
    dtype: t.Optional[str] = None
    quantization: t.Optional[str] = None
    hidden_size: t.Optional[int] = None
    layers: t.Optional[int] = None
    attention_heads: t.Optional[int] = None
    kv_heads: t.Optional[int] = None
    head_dim: t.Optional[int] = None
    v_head_dim: t.Optional[int] = None
    kv_lora_rank: t.Optional[int] = None
    qk_rope_head_dim: t.Optional[int] = None
    vocab_size: t.Optional[int] = None
    max_positions: t.Optional[int] = None
    tie_word_embeddings: t.Optional[bool] = None
    weight_bytes: t.Optional[int] = None
    weight_source: t.Optional[str] = None  # index | files
    is_mla: t.Optional[bool] = None
    is_multimodal: t.Optional[bool] = None
    # What else counts in some formula; its names are those of sglang/model_config.py.
    extra: t.Mapping[str, t.Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Topology:
    """How the ranks lie on the GPUs. ``ranks_here``: scheduler processes on this host, one per GPU."""

    tp: t.Optional[int]
    pp: t.Optional[int]
    dp: t.Optional[int]
    attention_dp: bool
    nnodes: t.Optional[int]
    node_rank: t.Optional[int]
    ranks_here: t.Optional[int]
    gpus: tuple[GpuFacts, ...] = ()
    attention_tp: t.Optional[int] = None  # ranks that share one KV cache: tp, or tp / dp with attention-DP
    ports: tuple[PortWish, ...] = ()


@dataclass(frozen=True)
class PortWish:
    """A TCP port that the server will want, and for what."""

    port: int
    purpose: str


@dataclass(frozen=True)
class Figure:
    """One number of the budget. ``unit``: bytes, bytes/token, tokens, fraction, s, ranks.

    ``value`` None: not known, and ``reason`` says why. ``formula`` is the arithmetic in words, ``inputs`` its numbers,
    ``source`` where the formula or the number comes from.
    """

    name: str
    label: str
    unit: str
    value: t.Optional[float]
    formula: str = ""
    inputs: t.Mapping[str, t.Any] = field(default_factory=dict)
    source: str = ""
    reason: t.Optional[str] = None


@dataclass(frozen=True)
class Budget:
    """Memory of one GPU rank (the one with the least), and of the host. Names of figures: docs/plan.md."""

    gpu: tuple[Figure, ...] = ()
    host: tuple[Figure, ...] = ()

    def figure(self, name: str) -> t.Optional[Figure]:
        return next((figure for figure in (*self.gpu, *self.host) if figure.name == name), None)

    def value(self, name: str) -> t.Optional[float]:
        figure = self.figure(name)
        return None if figure is None else figure.value

    def facts(self) -> dict[str, t.Optional[float]]:
        """``budget.*`` of a guardrail's condition: sizes as ``NAME_gb`` and ``NAME_gib``, all else as ``NAME``."""
        found: dict[str, t.Optional[float]] = {}
        for figure in (*self.gpu, *self.host):
            if figure.unit == "bytes":
                known = figure.value is not None
                found[f"{figure.name}_gb"] = t.cast(float, figure.value) / GB if known else None
                found[f"{figure.name}_gib"] = t.cast(float, figure.value) / GIB if known else None
            else:
                found[figure.name] = figure.value
        return found


@dataclass(frozen=True)
class Learned:
    """What the log of an earlier launch of this server on this host says; it replaces what would be assumed.

    ``source`` names the launch. The figures are those of the rank with the least. ``same_weights``: the launch had the
    same model, quantization and ranks, so that its weights and its overheads are this launch's too.
    """

    source: str
    free_before_load_bytes: t.Optional[int] = None
    free_after_load_bytes: t.Optional[int] = None
    free_after_pool_bytes: t.Optional[int] = None
    free_after_start_bytes: t.Optional[int] = None
    graph_bytes: t.Optional[int] = None
    kv_pool_bytes: t.Optional[int] = None
    max_total_num_tokens: t.Optional[int] = None
    same_weights: bool = False


@dataclass(frozen=True)
class PlanResult:
    """``verdict``: allowed, denied or unknown. Denied goes before unknown, and unknown before allowed."""

    verdict: str
    findings: tuple[Finding, ...]
    budget: Budget
    flags: t.Mapping[str, t.Any]
    sglang_version: t.Optional[str]
    seconds: float


def verdict_of(findings: t.Iterable[Finding]) -> str:
    """The verdict of all findings together. Warnings, notes and what was waived change nothing."""
    severities = {finding.severity for finding in findings if finding.waived is None}
    if "deny" in severities:
        return "denied"
    return "unknown" if "unknown" in severities else "allowed"
