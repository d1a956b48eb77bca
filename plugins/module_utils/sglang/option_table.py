# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of one SGLang as a table, and those that people use most. Without what reads them from the sources
(`options`), so that whoever only looks at command lines need not load that.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from ..sentinels import Sentinel

NOT_KNOWN: t.Any = Sentinel("NOT_KNOWN", __name__)
"""A default that the source doesn't give as a literal."""


@dataclass(frozen=True)
class Option:
    """One option. ``names`` with the primary one first, without leading dashes.

    ``values``: "none" (bare), "one", or "many" (nargs + or *), "optional" (nargs ?).
    ``toggle``: BooleanOptionalAction: `--x` and `--no-x`.
    ``in_config``: whether SGLang takes it from a `--config` file (custom actions it refuses there: "Unsupported
    config option", and with them every option that sets the same field).

    ``dest``: the field that it sets. ``nargs`` as argparse has it (None: one value, 0: bare). ``action``: store,
    store_true, toggle, or the class of SGLang's own.
    ``type``: the kind of its values (`argtypes`); None for bare options, and where the source doesn't tell.
    ``choices``: None where every value is taken, or where the source doesn't tell; ``conditional`` are choices that
    exist only under a condition (an environment variable).
    ``unread``: which of type, choices, nargs, action the source doesn't tell: nothing is judged by these.
    ``default``: a literal, else NOT_KNOWN. ``required``: argparse demands it.
    ``deprecated``: SGLang warns; ``successor`` is what it says to use instead; ``refusal``: it stops with this message.
    ``const``: what it stores without a value, where that isn't True.
    """

    names: tuple[str, ...]
    values: str = "one"
    toggle: bool = False
    in_config: bool = True
    dest: t.Optional[str] = None
    nargs: t.Union[int, str, None] = None
    action: t.Optional[str] = None
    type: t.Optional[str] = None
    type_detail: t.Optional[t.Mapping[str, t.Sequence[str]]] = None
    choices: t.Optional[tuple[t.Any, ...]] = None
    conditional: tuple[t.Any, ...] = ()
    unread: tuple[str, ...] = ()
    default: t.Any = NOT_KNOWN
    const: t.Any = NOT_KNOWN
    required: bool = False
    deprecated: bool = False
    successor: t.Optional[str] = None
    refusal: t.Optional[str] = None


class OptionTable:
    """The options of one SGLang, and how argparse completes a name: exact, else the only option that starts so."""

    def __init__(self, options: t.Iterable[Option], source: str) -> None:
        self.source = source
        self._by_name: dict[str, Option] = {}
        for option in options:
            for name in option.names:
                # Some options are declared in an annotation and again by hand; the hand-made one is what the parser
                # has.
                self._by_name[name] = option
                if option.toggle:
                    self._by_name[f"no-{name}"] = option

    @property
    def options(self) -> tuple[Option, ...]:
        """Each option once, in the order of the sources."""
        return tuple({option.names: option for option in self._by_name.values()}.values())

    @property
    def names(self) -> frozenset[str]:
        """Every name that the parser takes, `no-` forms of toggles included."""
        return frozenset(self._by_name)

    def candidates(self, name: str) -> tuple[str, ...]:
        """The option names that a name on the command line may stand for: one is right, none unknown, more
        ambiguous."""
        if name in self._by_name:
            return (name,)
        return tuple(sorted(known for known in self._by_name if known.startswith(name))) if name else ()

    def get(self, name: str) -> t.Optional[Option]:
        """The option that argparse would take for this name; None if there is none or more than one."""
        candidates = self.candidates(name)
        options = {self._by_name[candidate].names for candidate in candidates}
        return self._by_name[candidates[0]] if len(options) == 1 and len(candidates) == 1 else None


def _common() -> OptionTable:
    """Options that people use most, for hosts where the installed SGLang can't be read.

    From 0.5.15 and 0.5.23. `--tp`, `--dp`, `--pp` are no options of SGLang but argparse's abbreviations.
    """
    one = (
        "model-path,model tokenizer-path tokenizer-mode load-format context-length host port api-key "
        "admin-api-key dtype quantization kv-cache-dtype mem-fraction-static max-running-requests "
        "max-queued-requests max-total-tokens chunked-prefill-size max-prefill-tokens schedule-policy "
        "schedule-conservativeness page-size device random-seed stream-interval watchdog-timeout "
        "soft-watchdog-timeout download-dir base-gpu-id gpu-id-step log-level served-model-name chat-template "
        "reasoning-parser tool-call-parser load-balance-method dist-init-addr,nccl-init-addr nnodes node-rank "
        "attention-backend decode-attention-backend prefill-attention-backend sampling-backend grammar-backend "
        "moe-runner-backend moe-a2a-backend hicache-ratio hicache-size hicache-write-policy hicache-io-backend "
        "hicache-mem-layout hicache-storage-backend speculative-algorithm "
        "speculative-draft-model-path,speculative-draft-model speculative-num-steps speculative-eagle-topk "
        "speculative-num-draft-tokens nccl-port tokenizer-worker-num preferred-sampling-params "
        "tp-size,tensor-parallel-size dp-size,data-parallel-size pp-size,pipeline-parallel-size "
        "ep-size,expert-parallel-size,ep attn-dp-size,attention-data-parallel-size "
        "attn-cp-size,attention-context-parallel-size moe-dp-size,moe-data-parallel-size "
        "dcp-size,decode-context-parallel-size ssl-keyfile ssl-certfile ssl-keyfile-password disaggregation-mode "
        "disaggregation-bootstrap-port json-model-override-args revision config"
    )
    bare = (
        "trust-remote-code skip-server-warmup enable-metrics enable-hierarchical-cache disable-radix-cache "
        "disable-overlap-schedule enable-mixed-chunk enable-dp-lm-head enable-torch-compile enable-two-batch-overlap "
        "enable-cache-report log-requests disable-custom-all-reduce skip-tokenizer-init is-embedding enable-multimodal"
    )
    many = "lora-target-modules"
    # Plain options once, retired by actions of SGLang's own later: on the command line all versions that know them
    # take them.
    retired = "disable-cuda-graph enable-dp-attention"
    return OptionTable(
        [Option(tuple(word.split(","))) for word in one.split()]
        + [Option((word,), values="none") for word in bare.split()]
        + [Option((word,), values="many") for word in many.split()]
        + [Option((word,), values="none", in_config=False) for word in retired.split()]
        + [Option(("cuda-graph-max-bs",), in_config=False), Option(("cuda-graph-bs",), values="many", in_config=False)],
        source="a built-in list of common options",
    )


COMMON_OPTIONS = _common()
