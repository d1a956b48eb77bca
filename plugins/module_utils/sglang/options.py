# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which options the installed SGLang knows, read from its sources without importing them.

Importing `sglang.srt.server_args` takes seconds, a GB of memory and code that root must not run; the abstract syntax
tree of the same files takes 0.1 s. Two forms are read (SGLang 0.5.10 to 0.5.23): `parser.add_argument(...)`, and
annotations `field: A[type, "help"]` or `A[type, Arg(aliases=..., cli_name=..., no_cli=..., action=..., nargs=...)]` in
server_args.py and, since 0.5.20, in arg_groups/fields/*.py. The second form becomes arguments by the rules of SGLang's
`add_cli_args_from_dataclass`.
"""

from __future__ import annotations

import ast
import os
import re
import typing as t
from dataclasses import dataclass, replace

from .argtypes import BUILTIN_TYPES, KNOWN_FUNCTIONS
from .option_table import NOT_KNOWN, Option, OptionTable
from .sources import Evaluator, Module, NotKnown, Package, Scope, function_scope, name_of

_BARE_ACTIONS = ("store_true", "store_false", "store_const", "help", "version")
_RETIRED_ACTIONS = (
    "DeprecatedAction",
    "DeprecatedStoreTrueAction",
    "DeprecatedStoreConstAction",
    "DeprecatedAliasStoreAction",
)
_BARE_RETIRED = _RETIRED_ACTIONS[:3]
_SUCCESSOR_HELP = re.compile(
    r"\b(?:use|alias for) (--[a-z][a-z0-9-]+(?:=[a-z0-9_]+|[ ](?!instead\b|for\b|to\b|and\b|or\b)[a-z0-9_]+)?)",
    re.IGNORECASE,
)
_DEPRECATED_HELP = re.compile(r"\W*deprecated\b", re.IGNORECASE)


def read_options(sglang_dir: str, package: t.Optional[Package] = None) -> t.Optional[OptionTable]:
    """The options of the SGLang whose package directory this is; None if its sources can't be read or understood.

    ``package``: its sources, where somebody else reads them as well.
    """
    srt = os.path.join(sglang_dir, "srt")
    paths = [os.path.join(srt, "server_args.py")]
    fields = os.path.join(srt, "arg_groups", "fields")
    package = package or Package(sglang_dir)
    try:
        if os.path.isdir(fields):
            paths += sorted(os.path.join(fields, name) for name in os.listdir(fields) if name.endswith(".py"))
        found = _options([package.parse(path) for path in paths])
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    return OptionTable(_with_config(found), source=sglang_dir) if found else None


def _options(modules: t.Sequence[Module]) -> list[Option]:
    defaults = {name: default for module in modules for name, default in _field_defaults(module)}
    # Annotations first: an option that is also added by hand gets the hand-made form.
    found = [option for module in modules for option in _annotated(module)]
    return found + [option for module in modules for option in _added(module, defaults)]


def option_names(sglang_dir: str) -> t.Optional[frozenset[str]]:
    """Only the names, without dashes in front; None if they can't be had."""
    table = read_options(sglang_dir)
    return None if table is None else table.names


def _with_config(options: t.Sequence[Option]) -> list[Option]:
    """What SGLang's ConfigArgumentMerger takes: it looks at the fields that arguments set, by the names of keys."""
    refused = {option.dest for option in options if option.action not in ("store", "store_true")}
    bare = {option.dest for option in options if option.action == "store_true"}

    def taken(option: Option) -> bool:
        keys = {name.replace("-", "_") for name in option.names}
        return (
            option.action in ("store", "store_true")
            and not keys & refused
            and (option.action == "store" or keys <= bare)
        )

    return [replace(option, in_config=taken(option)) for option in options]


@dataclass
class _Reader:
    """What the keywords of one argument say; ``unread`` gathers what they don't."""

    module: Module
    scope: Scope
    keywords: t.Mapping[str, ast.expr]

    def __post_init__(self) -> None:
        self.unread: list[str] = []
        self.conditional: tuple[t.Any, ...] = ()

    def constant(self, name: str) -> t.Any:
        return _constant(self.keywords.get(name))

    def value(self, name: str, otherwise: t.Any) -> t.Any:
        node = self.keywords.get(name)
        if node is None:
            return otherwise
        try:
            return Evaluator().value(node, self.scope)
        except NotKnown:
            return NOT_KNOWN

    def text(self, name: str) -> t.Optional[str]:
        found = self.value(name, None)
        return found if isinstance(found, str) else None

    def nargs(self, otherwise: t.Union[int, str, None]) -> t.Union[int, str, None]:
        found = self.value("nargs", otherwise)
        if found is None or found in ("?", "*", "+") or (isinstance(found, int) and not isinstance(found, bool)):
            return t.cast("t.Union[int, str, None]", found)
        self.unread.append("nargs")
        return None

    def choices(self) -> t.Optional[tuple[t.Any, ...]]:
        node = self.keywords.get("choices")
        if node is None or (isinstance(node, ast.Constant) and node.value is None):
            return None
        evaluator = Evaluator()
        try:
            found = evaluator.value(node, self.scope)
        except NotKnown:
            found = None
        if not isinstance(found, (list, dict)):
            self.unread.append("choices")
            return None
        self.conditional = tuple(evaluator.conditional)
        return tuple(found)

    def type_of(self, node: t.Optional[ast.expr]) -> tuple[t.Optional[str], t.Optional[t.Mapping[str, t.Any]]]:
        """The kind of a `type=` expression; None means str to argparse."""
        if node is None or (isinstance(node, ast.Constant) and node.value is None):
            return "str", None
        if isinstance(node, ast.Name) and node.id in BUILTIN_TYPES:
            return node.id, None
        if isinstance(node, ast.Attribute) and name_of(node.value) == "json" and node.attr == "loads":
            return "json", None
        kind, module = self._known(name_of(node))
        if kind is None or module is None:
            self.unread.append("type")
            return None, None
        if not kind.startswith("cuda_graph_config"):
            return kind, None
        try:
            name = ast.Name(id="ALLOWED_KEYS_PER_PHASE", ctx=ast.Load())
            return kind, Evaluator().value(name, Scope(module))
        except NotKnown:
            self.unread.append("type")
            return None, None

    def _known(self, name: str) -> tuple[t.Optional[str], t.Optional[Module]]:
        try:
            located = self.module.package.locate(self.module, name) if name else None
        except NotKnown:
            located = None
        if located is None:
            return None, None
        return KNOWN_FUNCTIONS.get(located[0].fingerprint(located[1]) or ""), located[0]

    def build(self, names: tuple[str, ...], dest: str, otherwise: t.Union[int, str, None] = None) -> Option:
        """An option that stores values, or has an action. ``otherwise``: its nargs where none are given."""
        action = self.keywords.get("action")
        plain = _constant(action)
        called = name_of(action) if action is not None else ""
        if called == "BooleanOptionalAction":
            return self._bare(names, dest, "toggle")
        if plain in _BARE_ACTIONS:
            return self._bare(names, dest, str(plain))
        retired = called in _RETIRED_ACTIONS
        known = retired or (not called and plain in ("store", None))
        nargs = self.nargs(0 if called in _BARE_RETIRED else otherwise)
        choices = self.choices()
        if nargs == 0:
            kind, detail = None, None
        else:
            kind, detail = self.type_of(self.keywords.get("type"))
        if not known:
            special = self._known(called)[0] if called else None
            kind = special if special is not None and kind == "str" else kind
            if special is None:
                self.unread.append("action")
        const = self.value("const_value" if called == "DeprecatedStoreConstAction" else "const", NOT_KNOWN)
        return Option(
            names,
            values=_arity(nargs),
            dest=dest,
            nargs=nargs,
            action=called or "store",
            type=kind,
            type_detail=detail,
            choices=choices,
            conditional=self.conditional,
            unread=tuple(self.unread),
            default=self.value("default", False if called == "DeprecatedStoreTrueAction" else None),
            const=const,
            required=self.constant("required") is True,
            deprecated=retired or self._deprecated_by_help(),
            successor=self.text("new_flag") or self._successor_by_help(),
            refusal=self.text("error_message"),
        )

    def _bare(self, names: tuple[str, ...], dest: str, action: str) -> Option:
        return Option(
            names,
            values="none",
            toggle=action == "toggle",
            dest=dest,
            nargs=0,
            action=action,
            default=self.value("default", False if action == "store_true" else None),
            deprecated=self._deprecated_by_help(),
            successor=self._successor_by_help(),
        )

    def _deprecated_by_help(self) -> bool:
        found = self.constant("help")
        return isinstance(found, str) and _DEPRECATED_HELP.match(found) is not None

    def _successor_by_help(self) -> t.Optional[str]:
        found = _SUCCESSOR_HELP.search(self.constant("help")) if self._deprecated_by_help() else None
        return found.group(1) if found else None


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _constant(node: t.Optional[ast.expr]) -> t.Any:
    return node.value if isinstance(node, ast.Constant) else None


def _arity(nargs: t.Any) -> str:
    if nargs in ("+", "*") or isinstance(nargs, int):
        return "none" if nargs == 0 and not isinstance(nargs, bool) else "many"
    return "optional" if nargs == "?" else "one"


def _added(module: Module, defaults: t.Mapping[str, ast.expr]) -> t.Iterator[Option]:
    """`parser.add_argument("--x", "--y", ...)`."""
    for call, scope in _calls(module, t.cast(ast.Module, module.tree), Scope(module)):
        words = [word for word in map(_constant, call.args) if isinstance(word, str)]
        names = tuple(word[2:] for word in words if word.startswith("--"))
        if not names:
            continue
        keywords = _keywords(call)
        if "default" in keywords:
            keywords["default"] = _declared_default(keywords["default"], defaults)
        dest = _constant(keywords.get("dest"))
        yield _Reader(module, scope, keywords).build(
            names, dest if isinstance(dest, str) else names[0].replace("-", "_")
        )


def _calls(module: Module, node: ast.AST, scope: Scope) -> t.Iterator[tuple[ast.Call, Scope]]:
    """Calls of `add_argument`, each with the variables of the function that it stands in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and not module.mentions("add_argument", child):
            continue
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr == "add_argument":
            yield child, scope
        inner = function_scope(module, child.body) if isinstance(child, ast.FunctionDef) else scope
        yield from _calls(module, child, inner)


def _fields(body: t.Sequence[ast.stmt]) -> t.Iterator[ast.AnnAssign]:
    """Annotated fields of classes, wherever these stand outside of functions."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from (each for each in node.body if isinstance(each, ast.AnnAssign))
            yield from _fields(node.body)
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _fields(node.body)


def _declared_default(node: ast.expr, defaults: t.Mapping[str, ast.expr]) -> ast.expr:
    """`ServerArgs.field` and `_declared_default("field")` are what the field's declaration says."""
    field = ""
    if isinstance(node, ast.Attribute) and name_of(node.value) == "ServerArgs":
        field = node.attr
    elif isinstance(node, ast.Call) and name_of(node.func) == "_declared_default" and node.args:
        field = str(_constant(node.args[0]))
    return defaults.get(field, node)


def _field_defaults(module: Module) -> t.Iterator[tuple[str, ast.expr]]:
    for node in _fields(t.cast(ast.Module, module.tree).body):
        if isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _annotated(module: Module) -> t.Iterator[Option]:
    """`field: A[type, "help"]` and `field: A[type, Arg(...)]`."""
    for node in _fields(t.cast(ast.Module, module.tree).body):
        annotation = node.annotation
        if not (
            isinstance(node.target, ast.Name)
            and isinstance(annotation, ast.Subscript)
            and name_of(annotation.value) == "A"
        ):
            continue
        parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        meta = next((part for part in parts[1:] if _is_meta(part)), None)
        if meta is not None:
            option = _field_option(module, node.target.id, parts[0], meta, node.value)
            if option is not None:
                yield option


def _is_meta(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return name_of(node.func) == "Arg"
    return isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp))


def _field_option(
    module: Module, field: str, kind: ast.expr, meta: ast.expr, default: t.Optional[ast.expr]
) -> t.Optional[Option]:
    """The argument that SGLang's `add_cli_args_from_dataclass` makes of a field."""
    names = [field.replace("_", "-")]
    keywords = _keywords(meta) if isinstance(meta, ast.Call) else {"help": meta}
    if _constant(keywords.get("no_cli")) is True:
        return None
    cli_name = _constant(keywords.get("cli_name"))
    if isinstance(cli_name, str):
        names = [cli_name.lstrip("-")]
    aliases = keywords.get("aliases")
    if isinstance(aliases, (ast.List, ast.Tuple)):
        names += [alias.lstrip("-") for alias in map(_constant, aliases.elts) if isinstance(alias, str)]
    needed = default is None
    if default is not None:
        keywords["default"] = default
    if _constant(keywords.get("action")) is None and isinstance(keywords.get("action"), ast.Constant):
        del keywords["action"]
    extra = keywords.get("action_kwargs")
    if isinstance(extra, ast.Dict) and "action" in keywords:
        named = {_constant(key): value for key, value in zip(extra.keys, extra.values)}
        keywords.update({str(key): value for key, value in named.items() if key is not None})
    reader = _Reader(module, Scope(module), keywords)
    if "action" in keywords:
        return reader.build(tuple(names), field)
    return _typed_field(reader, tuple(names), field, _without_none(kind), needed)


def _typed_field(reader: _Reader, names: tuple[str, ...], field: str, kind: ast.expr, needed: bool) -> Option:
    keywords = dict(reader.keywords)
    parser = keywords.pop("type_parser", None)
    if isinstance(parser, ast.Constant) and parser.value is None:
        parser = None
    shape = _generic(kind)
    if shape == "Literal":
        words = t.cast(ast.Subscript, kind).slice
        literals = words.elts if isinstance(words, ast.Tuple) else [words]
        keywords.pop("nargs", None)
        if not _truthy(keywords.get("choices")):
            keywords["choices"] = ast.List(elts=list(literals), ctx=ast.Load())
        element = type(_constant(literals[0])).__name__ if literals else "str"
        keywords["type"] = parser or _type_name(element)
    elif shape in ("List", "list") and parser is None:
        inner = kind.slice if isinstance(kind, ast.Subscript) else None
        keywords["type"] = _type_name(name_of(inner))
        if not _truthy(keywords.get("nargs")):
            keywords["nargs"] = ast.Constant(value="+")
    elif name_of(kind) == "bool":
        return _Reader(reader.module, reader.scope, {**keywords, "action": ast.Constant(value="store_true")}).build(
            names, field
        )
    else:
        keywords["type"] = parser or _type_name(name_of(kind))
        required = _constant(keywords.get("required"))
        keywords["required"] = ast.Constant(value=required is True or (required is None and needed))
        return _Reader(reader.module, reader.scope, keywords).build(names, field)
    keywords.pop("required", None)
    return _Reader(reader.module, reader.scope, keywords).build(names, field)


def _type_name(name: str) -> ast.expr:
    """SGLang infers int and float by the annotation; everything else is str."""
    return ast.Name(id=name if name in ("int", "float") else "str", ctx=ast.Load())


def _truthy(node: t.Optional[ast.expr]) -> bool:
    return node is not None and not (isinstance(node, ast.Constant) and not node.value)


def _generic(node: ast.expr) -> str:
    return name_of(node.value) if isinstance(node, ast.Subscript) else ""


def _without_none(node: ast.expr) -> ast.expr:
    """Optional[X], X | None and Union[X, None] are X, if X is one type."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        sides = [side for side in _sides(node) if not (isinstance(side, ast.Constant) and side.value is None)]
        return sides[0] if len(sides) == 1 else node
    if isinstance(node, ast.Subscript) and _generic(node) == "Optional":
        return node if _generic(node.slice) == "Union" else _without_none(node.slice)
    if isinstance(node, ast.Subscript) and _generic(node) == "Union" and isinstance(node.slice, ast.Tuple):
        inner = [each for each in node.slice.elts if not (isinstance(each, ast.Constant) and each.value is None)]
        return inner[0] if len(inner) == 1 else node
    return node


def _sides(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_sides(node.left), *_sides(node.right)]
    return [node]
