# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which options the installed SGLang knows, read from its sources without importing them.

Importing `sglang.srt.server_args` takes seconds, a GB of memory and code that root must not run; the abstract syntax
tree of
the same files takes 0.1 s. Two forms are read (SGLang 0.5.10 to 0.5.23): `parser.add_argument(...)`, and annotations
`field: A[type, "help"]` or `A[type, Arg(aliases=..., cli_name=..., no_cli=..., action=..., nargs=...)]` in
server_args.py and, since
0.5.20, in arg_groups/fields/*.py.
"""

from __future__ import annotations

import ast
import os
import typing as t
from dataclasses import dataclass

from .files import open_regular

_MAX_SOURCE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Option:
    """One option. ``names`` with the primary one first, without leading dashes.

    ``values``: "none" (bare), "one", or "many" (nargs + or *), "optional" (nargs ?).
    ``toggle``: BooleanOptionalAction: `--x` and `--no-x`.
    ``in_config``: whether SGLang takes it from a `--config` file (custom actions it refuses there: "Unsupported
    config option").
    """

    names: tuple[str, ...]
    values: str = "one"
    toggle: bool = False
    in_config: bool = True


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


def read_options(sglang_dir: str) -> t.Optional[OptionTable]:
    """The options of the SGLang whose package directory this is; None if its sources can't be read or understood."""
    srt = os.path.join(sglang_dir, "srt")
    paths = [os.path.join(srt, "server_args.py")]
    fields = os.path.join(srt, "arg_groups", "fields")
    try:
        if os.path.isdir(fields):
            paths += sorted(os.path.join(fields, name) for name in os.listdir(fields) if name.endswith(".py"))
        trees = [_parse(path) for path in paths]
    except (OSError, SyntaxError, ValueError):
        return None
    # Annotations first: an option that is also added by hand gets the hand-made form.
    found = [option for tree in trees for option in _annotated(tree)]
    found += [option for tree in trees for option in _added(tree)]
    return OptionTable(found, source=sglang_dir) if found else None


def option_names(sglang_dir: str) -> t.Optional[frozenset[str]]:
    """Only the names, without dashes in front; None if they can't be had."""
    table = read_options(sglang_dir)
    return None if table is None else table.names


def _parse(path: str) -> ast.Module:
    # A virtual environment may hold its packages as links.
    with os.fdopen(open_regular(path, follow=True), "rb") as stream:
        source = stream.read(_MAX_SOURCE_BYTES + 1)
    if len(source) > _MAX_SOURCE_BYTES:
        raise ValueError(f"{path} is larger than {_MAX_SOURCE_BYTES} bytes")
    return ast.parse(source)


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _constant(node: t.Optional[ast.expr]) -> t.Any:
    return node.value if isinstance(node, ast.Constant) else None


def _name(node: t.Optional[ast.AST]) -> str:
    """The last part of a dotted name: `argparse.BooleanOptionalAction` and `BooleanOptionalAction` are the same."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _arity(nargs: t.Any) -> str:
    if nargs in ("+", "*") or isinstance(nargs, int):
        return "none" if nargs == 0 and not isinstance(nargs, bool) else "many"
    return "optional" if nargs == "?" else "one"


def _with_action(names: tuple[str, ...], action: ast.expr, keywords: t.Mapping[str, ast.expr]) -> Option:
    plain = _constant(action)
    if plain in ("store_true", "store_false", "store_const", "help", "version"):
        return Option(names, values="none", in_config=plain == "store_true")
    if plain in ("store", None) and not _name(action):
        return Option(names, values=_arity(_constant(keywords.get("nargs"))))
    called = _name(action)
    if called == "BooleanOptionalAction":
        return Option(names, values="none", toggle=True, in_config=False)
    # SGLang's own actions for retired flags: DeprecatedStoreTrueAction and the like are bare, the others take a value.
    extra = keywords.get("action_kwargs")
    if isinstance(extra, ast.Dict):
        named = {_constant(key): value for key, value in zip(extra.keys, extra.values) if key is not None}
        keywords = {**keywords, **named}
    bare = called in ("DeprecatedStoreTrueAction", "DeprecatedAction") or (
        called == "DeprecatedStoreConstAction" and "nargs" not in keywords
    )
    return Option(names, values="none" if bare else _arity(_constant(keywords.get("nargs"))), in_config=False)


def _added(tree: ast.Module) -> t.Iterator[Option]:
    """`parser.add_argument("--x", "--y", ...)`."""
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        ):
            continue
        words = [word for word in map(_constant, node.args) if isinstance(word, str)]
        names = tuple(word[2:] for word in words if word.startswith("--"))
        if not names:
            continue
        keywords = _keywords(node)
        action = keywords.get("action")
        if action is not None:
            yield _with_action(names, action, keywords)
        else:
            yield Option(names, values=_arity(_constant(keywords.get("nargs"))))


def _annotated(tree: ast.Module) -> t.Iterator[Option]:
    """`field: A[type, "help"]` and `field: A[type, Arg(...)]`."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        annotation = node.annotation
        if not (isinstance(annotation, ast.Subscript) and _name(annotation.value) == "A"):
            continue
        parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        meta = next((part for part in parts[1:] if _is_meta(part)), None)
        if meta is not None:
            option = _field_option(node.target.id, parts[0], meta)
            if option is not None:
                yield option


def _is_meta(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return _name(node.func) == "Arg"
    return isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp))


def _field_option(field: str, kind: ast.expr, meta: ast.expr) -> t.Optional[Option]:
    names = [field.replace("_", "-")]
    keywords = _keywords(meta) if isinstance(meta, ast.Call) else {}
    if _constant(keywords.get("no_cli")) is True:
        return None
    cli_name = _constant(keywords.get("cli_name"))
    if isinstance(cli_name, str):
        names = [cli_name.lstrip("-")]
    aliases = keywords.get("aliases")
    if isinstance(aliases, (ast.List, ast.Tuple)):
        names += [alias.lstrip("-") for alias in map(_constant, aliases.elts) if isinstance(alias, str)]
    action = keywords.get("action")
    if action is not None and _constant(action) is None or isinstance(_constant(action), str):
        return _with_action(tuple(names), t.cast(ast.expr, action), keywords)
    nargs = _constant(keywords.get("nargs"))
    if nargs is None and "type_parser" not in keywords:
        shape = _type_shape(kind)
        if shape == "bool":
            return Option(tuple(names), values="none")
        if shape == "list":
            return Option(tuple(names), values="many")
    return Option(tuple(names), values=_arity(nargs))


def _type_shape(node: ast.expr) -> str:
    """ "bool", "list" or "" for anything that takes one value; Optional[...] and `| None` are looked through."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        sides = [
            side for side in (node.left, node.right) if not (isinstance(side, ast.Constant) and side.value is None)
        ]
        return _type_shape(sides[0]) if len(sides) == 1 else ""
    if isinstance(node, ast.Subscript):
        outer = _name(node.value)
        if outer == "Optional":
            return _type_shape(node.slice)
        return "list" if outer in ("List", "list") else ""
    return "bool" if _name(node) == "bool" else ""


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
