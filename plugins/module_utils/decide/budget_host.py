# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The host's part of the budget: HiCache's pinned pools of all ranks here, against what the host can give.

``--hicache-size`` is GB (1e9) per rank; ``free``, /proc and cgroups count in powers of two. Both are carried as bytes.
"""

from __future__ import annotations

import typing as t

from ..plan_model import GB, GIB, MIB, Figure, HostFacts, ModelFacts, Topology
from .topology import Flags

# HICACHE_HOST_MEMORY_RESERVE_BYTES in mem_cache: what SGLang itself leaves of psutil's available memory.
SGLANG_RESERVE_BYTES = 10 * GIB
# "384 GB + about 40 GB for loading" of 8 ranks is what the operator of founding case 3 saw: 5 GB per rank. A rank that
# loads less than that needs its weights' size and its own process.
LOADING_SLACK_BYTES = 5 * GB
PROCESS_BYTES = 1 * GB
# Measured on an H200, 40 GB: 7.9 s and 10.9 s from SIGKILL to free memory; 0.22 s per GB for the kernel alone.
UNPIN_S_PER_GB_LEAST = 0.22
UNPIN_S_PER_GB = 0.27
_DEFAULT_RATIO = 2.0
_POOL = "mem_cache/pool_host (HostKVCache)"


def host_figures(
    wanted: Flags,
    model: ModelFacts,
    topology: Topology,
    host: t.Optional[HostFacts],
    tokens: Figure,
    cell: Figure,
    weights: Figure,
    page: int,
    version: t.Optional[tuple[int, ...]],
) -> tuple[Figure, ...]:
    """The figures of the host, in the order of the arithmetic."""
    ranks = host.ranks_here if host is not None and host.ranks_here is not None else topology.ranks_here
    figures: list[Figure] = []

    def put(
        name: str,
        label: str,
        unit: str,
        value: t.Optional[float],
        formula: str = "",
        inputs: t.Optional[t.Mapping[str, t.Any]] = None,
        source: str = "",
        reason: t.Optional[str] = None,
    ) -> t.Optional[float]:
        why = None if value is not None else reason or "not known"
        figures.append(
            Figure(name, label, unit, value, formula if value is not None else "", inputs or {}, source, why)
        )
        return value

    available = _available(host, put)
    put("hicache_ranks", "ranks on this host", "ranks", ranks, "one scheduler per GPU", {}, "", "see the topology")
    per_rank, extra, extra_reason = _per_rank(wanted, model, tokens, cell, page, version, put)
    total: t.Optional[float] = None
    if per_rank is not None and ranks is not None and extra is not None:
        total = (per_rank + extra) * ranks
    put(
        "hicache_total",
        "HiCache, all ranks here",
        "bytes",
        total,
        f"{ranks} ranks x {((per_rank or 0) + (extra or 0)) / GB:,.2f} GB",
        {"ranks": ranks, "per_rank": per_rank, "extra_pools": extra},
        "facts of the topology",
        extra_reason or ("how many ranks run here is not known" if per_rank is not None else "see HiCache per rank"),
    )
    slack = _slack(ranks, weights, put)
    enabled = wanted.has("enable-hierarchical-cache")
    reserve = SGLANG_RESERVE_BYTES if enabled else 0
    put(
        "sglang_reserve",
        "SGLang's own reserve",
        "bytes",
        reserve,
        "10 GiB" if enabled else "HiCache is off",
        {"hicache": enabled},
        _POOL,
    )
    margin: t.Optional[float] = None
    missing = next(
        (
            name
            for name, value in (
                ("what the host can give", available),
                ("HiCache's size", total),
                ("the slack for loading", slack),
            )
            if value is None
        ),
        None,
    )
    if available is not None and total is not None and slack is not None:
        margin = available - total - slack
    inputs = {"available": available, "hicache_total": total, "loading_slack": slack}
    put(
        "host_margin",
        "left of the host's memory",
        "bytes",
        margin,
        "available - HiCache - slack for loading",
        inputs,
        "",
        f"without {missing}",
    )
    put(
        "host_margin_after_reserve",
        "left after SGLang's reserve",
        "bytes",
        None if margin is None else margin - reserve,
        "left - SGLang's own reserve",
        {"host_margin": margin, "sglang_reserve": reserve},
        "",
        f"without {missing}",
    )
    _largest(available, slack, ranks, per_rank, extra, extra_reason, put)
    _unpin(total, per_rank, extra, ranks, put)
    put(
        "shm_free",
        "room in /dev/shm",
        "bytes",
        None if host is None or host.shm_free_mib is None else host.shm_free_mib * MIB,
        "statvfs",
        {},
        "/dev/shm",
        "could not be read",
    )
    return tuple(figures)


_Put = t.Callable[..., t.Optional[float]]


def _available(host: t.Optional[HostFacts], put: _Put) -> t.Optional[float]:
    """The smallest of what the host, our cgroup and the Proxmox node below can give."""
    label = "available to a new server"
    if host is None or host.mem_available_mib is None:
        return put("host_available", label, "bytes", None, reason="MemAvailable could not be read")
    bounds = {"MemAvailable": host.mem_available_mib}
    if host.cgroup_headroom_mib is not None:
        bounds["the cgroup's headroom"] = host.cgroup_headroom_mib
    elif host.cgroup_limited:
        return put(
            "host_available", label, "bytes", None, reason="there is a memory limit, and its headroom is not known"
        )
    if host.node_available_mib is not None:
        bounds["the Proxmox node's MemAvailable"] = host.node_available_mib
    least = min(bounds, key=lambda name: bounds[name])
    value = (bounds[least] + host.returned_mib) * MIB
    formula = f"{least}: {bounds[least] * MIB / GB:,.1f} GB" + (
        f" + {host.returned_mib * MIB / GB:,.1f} GB that the server gives back" if host.returned_mib else ""
    )
    inputs = {
        "mem_available_mib": host.mem_available_mib,
        "cgroup_headroom_mib": host.cgroup_headroom_mib,
        "cgroup_limited": host.cgroup_limited,
        "node_available_mib": host.node_available_mib,
        "returned_mib": host.returned_mib,
    }
    return put("host_available", label, "bytes", value, formula, inputs, "/proc/meminfo and cgroups")


def _per_rank(
    wanted: Flags,
    model: ModelFacts,
    tokens: Figure,
    cell: Figure,
    page: int,
    version: t.Optional[tuple[int, ...]],
    put: _Put,
) -> tuple[t.Optional[float], t.Optional[float], t.Optional[str]]:
    """``(pool, further pools, why those are not known)`` of one rank, in bytes."""
    label = "HiCache per rank"
    if not wanted.has("enable-hierarchical-cache"):
        return put("hicache_per_rank", label, "bytes", 0, "HiCache is off", {}, "the flags"), 0, None
    if wanted.has("hicache-size") and wanted.whole("hicache-size") is None:
        reason = "hicache-size is no whole number"
        return put("hicache_per_rank", label, "bytes", None, reason=reason), None, reason
    size_gb = wanted.whole("hicache-size", 0) or 0
    per_token = None if cell.value is None else cell.value - _indexer_bytes(model)
    if size_gb > 0:
        rounded = size_gb * GB
        formula = f"hicache-size {size_gb} GB"
        inputs: dict[str, t.Any] = {"hicache_size_gb": size_gb, "page_size": page}
        if per_token:  # one page more than fits, as SGLang rounds
            count = (int(size_gb * GB // per_token) // page + 1) * page
            rounded = int(count * per_token)
            formula += f" = {count:,} tokens of {per_token:,.0f} bytes"
            inputs.update({"tokens": count, "kv_bytes_per_token": per_token})
        pool = put("hicache_per_rank", label, "bytes", rounded, formula, inputs, _POOL)
    else:
        pool = _by_ratio(wanted, tokens, per_token, page, version, put)
    extra, why = _extra_pools(wanted, model, pool, per_token)
    return pool, extra, why if pool is not None else "see HiCache per rank"


def _by_ratio(
    wanted: Flags,
    tokens: Figure,
    per_token: t.Optional[float],
    page: int,
    version: t.Optional[tuple[int, ...]],
    put: _Put,
) -> t.Optional[float]:
    label = "HiCache per rank"
    given = wanted.number("hicache-ratio")
    if given is None and wanted.has("hicache-ratio"):
        return put("hicache_per_rank", label, "bytes", None, reason="hicache-ratio is no number")
    if given is None and version is not None and version >= (0, 5, 21):
        return put(
            "hicache_per_rank",
            label,
            "bytes",
            None,
            reason="without hicache-size and hicache-ratio, SGLang 0.5.21 and later fits the pool to the host itself",
        )
    if tokens.value is None or per_token is None:
        reason = f"it is a multiple of the KV cache, which is not known: {tokens.reason or 'bytes per token'}"
        return put("hicache_per_rank", label, "bytes", None, reason=reason)
    ratio = _DEFAULT_RATIO if given is None else float(given)
    count = (int(tokens.value * ratio) // page + 1) * page
    return put(
        "hicache_per_rank",
        label,
        "bytes",
        count * per_token,
        f"ratio {ratio:g} x {tokens.value:,.0f} tokens x {per_token:,.0f} bytes",
        {"hicache_ratio": ratio, "tokens": count, "kv_bytes_per_token": per_token},
        _POOL,
    )


def _indexer_bytes(model: ModelFacts) -> int:
    """The indexer's share of the GPU's cell (DSA); its host pool comes on top of the main one."""
    index, layers = model.extra.get("index_head_dim"), model.layers
    if not model.extra.get("is_dsa") or index is None or layers is None:
        return 0
    return int((index + index // 128 * 4) * layers)


def _extra_pools(
    wanted: Flags, model: ModelFacts, pool: t.Optional[float], per_token: t.Optional[float]
) -> tuple[t.Optional[float], t.Optional[str]]:
    """Pools that SGLang allocates beside the main one, with the same number of tokens or the same size."""
    if pool is None:
        return None, None
    differs = str(model.extra.get("kv_differs", ""))
    if "linear-attention" in differs:
        return pool, None  # the state's pool takes hicache-size once more (#29034)
    if differs:
        return None, f"HiCache has further pools for this model ({differs})"
    extra = 0.0
    if model.extra.get("is_dsa"):
        if not per_token:
            return None, "the indexer's pool comes on top, and its size is not known"
        extra += pool / per_token * _indexer_bytes(model)
    algorithm = (wanted.text("speculative-algorithm") or "").upper()
    if algorithm and algorithm != "NGRAM":
        return None, "the draft model's pool comes on top, and its size is not known"
    return extra, None


def _slack(ranks: t.Optional[float], weights: Figure, put: _Put) -> t.Optional[float]:
    label = "slack for loading"
    if ranks is None:
        return put("loading_slack", label, "bytes", None, reason="how many ranks run here is not known")
    each = LOADING_SLACK_BYTES
    if weights.value is not None:
        each = min(each, int(PROCESS_BYTES + weights.value))
    return put(
        "loading_slack",
        label,
        "bytes",
        each * ranks,
        f"assumed: {ranks:.0f} ranks x {each / GB:,.1f} GB",
        {"ranks": ranks, "per_rank_assumed": each},
        "founding case 3: about 40 GB for 8 ranks",
    )


def _largest(
    available: t.Optional[float],
    slack: t.Optional[float],
    ranks: t.Optional[float],
    per_rank: t.Optional[float],
    extra: t.Optional[float],
    extra_reason: t.Optional[str],
    put: _Put,
) -> None:
    """The largest whole --hicache-size that leaves SGLang's reserve and the slack, as bytes per rank."""
    label = "largest hicache-size that fits, per rank"
    if available is None or slack is None or not ranks:
        reason = "what the host can give is not known" if available is None else "how many ranks run here is not known"
        put("hicache_largest", label, "bytes", None, reason=reason)
        return
    factor = 1.0
    if per_rank:
        if extra is None:
            put("hicache_largest", label, "bytes", None, reason=extra_reason)
            return
        factor = 1 + extra / per_rank
    room = (available - slack - SGLANG_RESERVE_BYTES) / ranks / factor
    put(
        "hicache_largest",
        label,
        "bytes",
        max(int(room // GB), 0) * GB,
        f"({available / GB:,.1f} GB - {slack / GB:,.1f} GB - {SGLANG_RESERVE_BYTES / GB:,.1f} GB) / {ranks:.0f} ranks"
        + (f" / {factor:.3f} for further pools" if factor > 1 else "")
        + ", whole GB",
        {"available": available, "loading_slack": slack, "sglang_reserve": SGLANG_RESERVE_BYTES, "ranks": ranks},
        _POOL,
    )


def _unpin(
    total: t.Optional[float], per_rank: t.Optional[float], extra: t.Optional[float], ranks: t.Optional[float], put: _Put
) -> None:
    """Seconds that the kernel needs at the next teardown to unpin the pools, rank after rank and all at once."""
    each = None if per_rank is None or extra is None else per_rank + extra
    for name, label, size in (
        ("unpin_one_by_one_s", "unpinning at the next teardown, one rank after the other", total),
        ("unpin_together_s", "unpinning at the next teardown, all ranks at once", each),
    ):
        put(
            name,
            label,
            "s",
            None if size is None else round(size / GB * UNPIN_S_PER_GB, 1),
            f"{(size or 0) / GB:,.1f} GB x {UNPIN_S_PER_GB} s (at least {UNPIN_S_PER_GB_LEAST})",
            {
                "bytes": size,
                "ranks": ranks,
                "least_s": None if size is None else round(size / GB * UNPIN_S_PER_GB_LEAST, 1),
            },
            "measured on an H200, docs/measured.md",
            "HiCache's size is not known",
        )
