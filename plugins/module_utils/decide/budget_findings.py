# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a budget says for or against a start, with the arithmetic in each sentence."""

from __future__ import annotations

import math
import typing as t

from ..plan_model import GB, GIB, MIB, Budget, Figure, Finding, HostFacts, ModelFacts, Topology
from ..sglang.install import version_tuple
from .topology import Flags

# Founding case 2 had 0.82 GiB after its start and died in its first large prefill; the example inventory demands 2 GiB.
DEFAULT_HEADROOM_MIB = 2048
# NCCL and SGLang's message queues need tens of MiB per rank; Docker gives 64 MiB in all unless it is told otherwise.
_SHM_TOO_SMALL_MIB = 64
_SHM_SMALL_MIB = 1024
# An idle GPU has some hundred MiB less than its total; what goes beyond that belongs to somebody.
_IDLE_SHARE = 0.02
_HOST_SOURCE = "SGLang mem_cache/pool_host; founding cases 1 and 3"


def judge_budget(
    budget: Budget,
    flags: t.Mapping[str, t.Any],
    model: ModelFacts,
    topology: Topology,
    host: t.Optional[HostFacts] = None,
    version: t.Optional[str] = None,
    headroom_mib: t.Optional[int] = None,
) -> tuple[Finding, ...]:
    """The findings of a budget. ``headroom_mib``: GPU memory that has to be left after the start (readiness asks for it
    too); 0 asks for none."""
    wanted = Flags(flags)
    judge = _Judge(budget, wanted, model, topology, host, version_tuple(version))
    judge.model_findings()
    if wanted.text("device") != "cpu":
        judge.gpu_findings(DEFAULT_HEADROOM_MIB if headroom_mib is None else headroom_mib)
    judge.host_findings()
    judge.shm_findings()
    return tuple(judge.findings)


def amount(value: float) -> str:
    """Bytes in both units: `384.0 GB (357.6 GiB)`."""
    return f"{value / GB:,.1f} GB ({value / GIB:,.1f} GiB)"


class _Judge:
    def __init__(
        self,
        budget: Budget,
        wanted: Flags,
        model: ModelFacts,
        topology: Topology,
        host: t.Optional[HostFacts],
        version: t.Optional[tuple[int, ...]],
    ) -> None:
        self.budget, self.wanted, self.model = budget, wanted, model
        self.topology, self.host, self.version = topology, host, version
        self.findings: list[Finding] = []

    def _say(
        self,
        code: str,
        severity: str,
        subject: str,
        message: str,
        remedy: str = "",
        source: str = "",
        waivable: bool = False,
    ) -> None:
        self.findings.append(Finding(code, severity, subject, message, remedy, source, waivable))

    def _value(self, name: str) -> t.Optional[float]:
        return self.budget.value(name)

    # --- the model ---

    def model_findings(self) -> None:
        model = self.model
        if model.source != "local":
            self._say(
                "model_unknown",
                "unknown",
                model.path,
                "; ".join(model.problems) or f"the model is {model.source}",
                "give the path of a directory on the target to have its memory planned",
                "the model's directory",
            )
            return
        missing = [
            figure.label
            for figure in (self.budget.figure(name) for name in ("weights_per_rank", "kv_bytes_per_token"))
            if figure is not None and figure.value is None
        ]
        for problem in model.problems:
            self._say(
                "model_problem", "unknown" if missing else "note", model.path, problem, "", "the model's directory"
            )
        if model.extra.get("served") is False:
            self._say(
                "architecture_unknown",
                "unknown",
                ", ".join(model.architectures or ()),
                f"the installed SGLang has no model class {' or '.join(model.architectures or ())}: it would fall back"
                " to transformers, or refuse",
                "install an SGLang that serves it",
                "sglang/srt/models",
            )
        derived, wished = model.max_positions, self.wanted.whole("context-length")
        if derived is not None and wished is not None and wished > derived:
            self._say(
                "context_too_long",
                "deny",
                "context-length",
                f"context-length {wished:,} is more than the model's {derived:,}, and SGLang refuses that",
                "lower it, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 in the server's environment and waive it",
                "SGLang configs/model_config.py _derive_context_length",
                True,
            )

    # --- the GPU ---

    def gpu_findings(self, headroom_mib: int) -> None:
        fraction = self._value("mem_fraction_static")
        if fraction is not None and not 0 < fraction < 1:
            self._say(
                "fraction_range",
                "deny",
                "mem-fraction-static",
                f"mem-fraction-static is {fraction:g}: a fraction of the free memory lies between 0 and 1",
                "correct it",
                "SGLang server_args.py",
            )
            return
        self._used_before()
        for name in ("free_before_load", "weights_per_rank", "kv_bytes_per_token"):
            figure = self.budget.figure(name)
            if figure is not None and figure.value is None and self.model.source == "local":
                self._unknown(figure)
        room, tokens = self._value("kv_room"), self._value("max_total_num_tokens")
        if room is not None and (room <= 0 or tokens == 0):
            self._no_room(room)
            return
        self._tokens(tokens)
        self._headroom(headroom_mib)

    def _unknown(self, figure: Figure) -> None:
        self._say(
            "budget_unknown",
            "unknown",
            figure.label,
            f"{figure.label} is not known: {figure.reason}",
            "",
            figure.source,
        )

    def _used_before(self) -> None:
        """Memory that somebody holds: the fraction is one of what is free, so it silently shrinks the KV cache."""
        for gpu in self.topology.gpus:
            if gpu.total_mib is None or gpu.free_mib is None:
                continue
            held = gpu.total_mib - gpu.free_mib - gpu.returned_mib
            if held > max(_IDLE_SHARE * gpu.total_mib, 1024):
                self._say(
                    "gpu_not_idle",
                    "warn",
                    f"GPU {gpu.index}",
                    f"GPU {gpu.index} would have {held:,} MiB in use before the start; mem-fraction-static is a"
                    " fraction of what is free, so the KV cache shrinks with it",
                    "look who holds it (playbook inspect), free it first (playbook teardown)",
                    "SGLang model_runner_kv_cache_mixin.py",
                )

    def _no_room(self, room: float) -> None:
        weights, before = self._value("weights_per_rank") or 0, self._value("free_before_load") or 0
        after = self._value("free_after_load") or 0
        least = 1 - after / before if before else 1.0
        fits = after > 0 and least < 0.99
        self._say(
            "weights_do_not_fit",
            "deny",
            "mem-fraction-static" if fits else "GPUs",
            f"no memory is left for the KV cache: of {amount(before)} free, {amount(weights)} are weights, and"
            f" mem-fraction-static {self._value('mem_fraction_static'):g} leaves {amount(room)}",
            f"raise mem-fraction-static above {math.ceil(least * 1000) / 1000:.3f}"
            if fits
            else "use more GPUs (tp-size), or a smaller model",
            "SGLang model_runner_kv_cache_mixin.py _profile_available_bytes",
            True,
        )

    def _tokens(self, tokens: t.Optional[float]) -> None:
        context = self.wanted.whole("context-length", self.model.max_positions)
        cap, figure = self.wanted.whole("max-total-tokens"), self.budget.figure("max_total_num_tokens")
        if tokens is None or figure is None:
            return
        profiled = figure.inputs.get("profiled")
        if cap is not None and profiled is not None and cap > profiled:
            self._say(
                "max_total_tokens_large",
                "note",
                "max-total-tokens",
                f"max-total-tokens {cap:,} is more than fits: SGLang will take {tokens:,.0f}",
                "",
                "SGLang _apply_token_constraints",
            )
        if context is not None and tokens < context:
            self._say(
                "context_larger_than_pool",
                "warn",
                "context-length",
                f"the KV cache holds {tokens:,.0f} tokens, and one request may have {context:,}: one that is longer"
                " than the cache is refused",
                "raise mem-fraction-static, or lower context-length",
                "SGLang model_executor",
            )

    def _headroom(self, demanded_mib: int) -> None:
        figure, reserve = self.budget.figure("headroom_after_start"), self.budget.figure("start_reserve")
        if figure is None or figure.value is None or reserve is None or demanded_mib <= 0:
            return
        left = figure.value
        if left >= demanded_mib * MIB:
            return
        assumed = "assumed" in reserve.formula and len(reserve.inputs) > 1
        certain = left <= 0 and not assumed
        parts = [self._value(name) or 0 for name in ("free_after_load", "kv_pool", "side_buffers", "start_reserve")]
        self._say(
            "headroom_small",
            "deny" if certain else "warn",
            "mem-fraction-static",
            f"about {left / GIB:,.2f} GiB of GPU memory would be left after the start, and"
            f" {demanded_mib / 1024:,.1f} GiB are asked for:"
            f" {parts[0] / GIB:,.1f} GiB free after load - {parts[1] / GIB:,.1f} GiB KV cache -"
            f" {parts[2] / GIB:,.1f} GiB tables and buffers - {parts[3] / GIB:,.1f} GiB graphs and workspaces"
            f" ({'assumed' if assumed else reserve.source}); too little dies in the first large prefill",
            self._lower_fraction(demanded_mib * MIB - left),
            "founding case 2",
            certain,
        )

    def _lower_fraction(self, lacking: float) -> str:
        before, fraction = self._value("free_before_load"), self._value("mem_fraction_static")
        if not before or fraction is None:
            return "lower mem-fraction-static"
        lower = int((fraction - lacking / before) * 100) / 100
        return f"lower mem-fraction-static to {lower:.2f} or less" if lower > 0 else "use more GPUs, or a smaller model"

    # --- the host ---

    def host_findings(self) -> None:
        enabled = self.wanted.has("enable-hierarchical-cache")
        if not enabled and (self.wanted.has("hicache-size") or self.wanted.has("hicache-ratio")):
            self._say(
                "hicache_off",
                "warn",
                "hicache-size",
                "hicache-size and hicache-ratio do nothing without enable-hierarchical-cache",
                "set enable-hierarchical-cache, or take them away",
                "SGLang server_args.py",
            )
        margin = self.budget.figure("host_margin_after_reserve")
        if margin is None:
            return
        if margin.value is None:
            if enabled:
                self._unknown_host(margin)
            return
        if margin.value < 0:
            self._too_large(margin.value, enabled)
        elif enabled:
            self._fits(margin.value)

    def _unknown_host(self, margin: Figure) -> None:
        for name in ("host_available", "hicache_per_rank", "hicache_total"):
            figure = self.budget.figure(name)
            if figure is not None and figure.value is None:
                self._unknown(figure)
                return
        self._unknown(margin)

    def _too_large(self, margin: float, enabled: bool) -> None:
        values = {
            name: self._value(name) or 0
            for name in ("host_available", "hicache_total", "loading_slack", "sglang_reserve", "hicache_ranks")
        }
        if not enabled:
            self._say(
                "host_memory_small",
                "warn",
                "host memory",
                f"{amount(values['host_available'])} are available, and loading takes about"
                f" {amount(values['loading_slack'])}",
                "free host memory first",
                _HOST_SOURCE,
            )
            return
        pools = self.budget.figure("hicache_total")
        largest = self._value("hicache_largest")
        size = int((largest or 0) // GB)
        self._say(
            "hicache_too_large",
            "deny",
            "hicache-size" if self.wanted.has("hicache-size") else "hicache-ratio",
            f"HiCache would pin {amount(values['hicache_total'])}: {pools.formula if pools else ''}"
            f" (hicache-size is GB per rank). Available are {amount(values['host_available'])}; with"
            f" {values['loading_slack'] / GB:,.1f} GB for loading and SGLang's own reserve of"
            f" {values['sglang_reserve'] / GB:,.1f} GB, {-margin / GB:,.1f} GB are missing",
            f"hicache-size {size} is the largest that fits" if size > 0 else "no HiCache fits: switch it off",
            _HOST_SOURCE,
        )

    def _fits(self, margin: float) -> None:
        values = {
            name: self._value(name) or 0
            for name in ("host_available", "hicache_total", "loading_slack", "hicache_ranks")
        }
        before = self._value("host_margin") or 0
        seconds, together = self._value("unpin_one_by_one_s") or 0, self._value("unpin_together_s") or 0
        self._say(
            "hicache_fits",
            "note",
            "HiCache",
            f"{values['hicache_total'] / GB:,.1f} GB of HiCache and {values['loading_slack'] / GB:,.1f} GB for loading,"
            f" of {values['host_available'] / GB:,.1f} GB available: {before / GB:,.1f} GB are left,"
            f" {margin / GB:,.1f} GB after SGLang's own reserve. Unpinning it at the next teardown takes"
            f" {together:,.0f} s (all ranks at once) to {seconds:,.0f} s (one by one)",
            "",
            _HOST_SOURCE,
        )
        self._late_ranks(values)
        self._smaller_than_gpu()

    def _late_ranks(self, values: t.Mapping[str, float]) -> None:
        """0.5.19 and later divide what is free by the ranks while others have theirs already (#38156)."""
        ranks, reserve = values["hicache_ranks"], self._value("sglang_reserve") or 0
        if self.version is None or self.version < (0, 5, 19) or ranks < 2:
            return
        each = values["hicache_total"] / ranks
        if (values["host_available"] - (ranks - 1) * each - reserve) / ranks < each:
            self._say(
                "hicache_late_rank",
                "warn",
                "hicache-size",
                f"this SGLang divides the host's free memory by {ranks:.0f} ranks in each of them: a late rank may"
                " refuse a pool that fits ('Not enough host memory available')",
                "if it does, lower hicache-size",
                "sgl-project/sglang#38156",
            )

    def _smaller_than_gpu(self) -> None:
        per_rank, pool = self.budget.figure("hicache_per_rank"), self._value("max_total_num_tokens")
        tokens = None if per_rank is None else per_rank.inputs.get("tokens")
        if tokens is None or pool is None or tokens > pool:
            return
        fatal = self.version is not None and self.version < (0, 5, 15)
        self._say(
            "hicache_smaller_than_gpu",
            "deny" if fatal else "warn",
            "hicache-size",
            f"HiCache holds {tokens:,} tokens per rank and the KV cache on the GPU {pool:,.0f}: "
            + ("this SGLang refuses that" if fatal else "it brings little"),
            "raise hicache-size, or lower mem-fraction-static or max-total-tokens",
            "SGLang mem_cache/pool_host",
            fatal,
        )

    # --- /dev/shm ---

    def shm_findings(self) -> None:
        free = None if self.host is None else self.host.shm_free_mib
        ranks = self.topology.ranks_here or 0
        if free is None:
            return
        # No denial: what fills it may be leftovers, which the eviction before the start removes; the verdict after that
        # judges the room again.
        if free < 1 or (ranks > 1 and free < _SHM_TOO_SMALL_MIB):
            words = "the start dies of SIGBUS (exit code -7) if it stays so"
        elif ranks > 1 and free < _SHM_SMALL_MIB:
            words = "NCCL and SGLang's message queues live there"
        else:
            return
        self._say(
            "shm_small",
            "warn",
            "/dev/shm",
            f"{free:,} MiB are free in /dev/shm for {ranks} ranks: {words}",
            "remove what dead servers left (playbook teardown), or give the container a larger /dev/shm",
            "sgl-project/sglang#28089, #40723",
            True,
        )
