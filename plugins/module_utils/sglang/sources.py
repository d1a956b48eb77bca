# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Constants of a Python package, worked out from its sources without importing or running any of them.

Only what can be followed for sure: literals, names of module and class constants (through imports inside of the
package), lists that are added, `list(...)`, keys of dictionaries, members of enums, functions without arguments that
end in a `return`. Everything else raises `NotKnown`. Files other than the ones asked for are not parsed as a whole:
the one definition that is needed is cut out of their text.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import typing as t
from dataclasses import dataclass, field

from ..sentinels import Sentinel
from .files import open_regular

MAX_SOURCE_BYTES = 4 * 1024 * 1024
_DEEPEST = 24
_NEXT_STATEMENT = re.compile(r"^[^\s)\]}#]", re.MULTILINE)
_IMPORT = re.compile(r"^from ([\w.]+) import (?:\(([^)]*)\)|([^\n(]+)$)", re.MULTILINE)
_IMPORTED = re.compile(r"(\w+)(?:\s+as\s+(\w+))?\s*(?:,|$)")
_COMMENT = re.compile(r"#.*")
_COLLECTIONS = ("list", "tuple", "set", "frozenset", "sorted")
_ADDERS = ("add", "append", "extend", "update")

UNKNOWN: t.Any = Sentinel("UNKNOWN", __name__)
"""A value in a dictionary that is not known; its key is."""


class NotKnown(Exception):
    """The source doesn't tell."""


@dataclass(frozen=True)
class ClassRef:
    """A class, and the module where its names are looked up."""

    module: Module
    node: ast.ClassDef

    @property
    def is_enum(self) -> bool:
        return any(name_of(base).endswith("Enum") for base in self.node.bases)

    def assigned(self, name: str) -> ast.expr:
        found = [value for target, value in _assignments(self.node.body) if target == name]
        if len(found) != 1:
            raise NotKnown(name)
        return found[0]

    def members(self) -> list[Member]:
        return [Member(name) for name, _value in _assignments(self.node.body) if not name.startswith("_")]


@dataclass(frozen=True)
class Member:
    """A member of an enum; only its name is of use here."""

    name: str


@dataclass
class Scope:
    """Where a name is looked up: local variables, then the module. ``conditional``: values that a variable gets only
    under a condition (`if ...: choices.add("x")`)."""

    module: Module
    local: dict[str, t.Any] = field(default_factory=dict)
    conditional: dict[str, list[ast.expr]] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)


class Module:
    """One source file. ``tree`` is given for files that are read as a whole anyway."""

    def __init__(self, package: Package, path: str, text: str, tree: t.Optional[ast.Module] = None) -> None:
        self.package = package
        self.path = path
        self.text = text
        self.tree = tree
        self._imports: t.Optional[dict[str, tuple[str, str]]] = None
        self._defined: t.Optional[dict[str, list[ast.stmt]]] = None
        self._cut: dict[str, list[ast.stmt]] = {}
        self._lines: dict[str, list[int]] = {}

    def definition(self, name: str) -> t.Optional[ast.stmt]:
        """The one top-level statement that defines a name; None if there is none. Raises NotKnown for more."""
        if self.tree is not None:
            if self._defined is None:
                self._defined = {}
                for node in self.tree.body:
                    for defined in _defined_by(node):
                        self._defined.setdefault(defined, []).append(node)
            found = self._defined.get(name, [])
        else:
            if name not in self._cut:
                self._cut[name] = [node for chunk in self._chunks(name) for node in _parsed(chunk).body]
            found = self._cut[name]
        if len(found) > 1:
            raise NotKnown(f"{name} is defined more than once")
        return found[0] if found else None

    def additions(self, name: str) -> tuple[list[ast.expr], bool]:
        """What module-level statements add to a collection under a condition; and whether one does so always."""
        if self.tree is None:
            return [], re.search(rf"(?m)^{re.escape(name)}\.(?:{'|'.join(_ADDERS)})\(", self.text) is not None
        always = any(_added_to(node) == name for node in self.tree.body)
        return conditional_additions(self.tree.body).get(name, []), always

    def mentions(self, word: str, node: ast.stmt) -> bool:
        """Whether a word stands in the lines of a statement; a cheap look before a deep one."""
        if word not in self._lines:
            self._lines[word] = [number for number, line in enumerate(self.text.split("\n"), 1) if word in line]
        return any(node.lineno <= number <= (node.end_lineno or node.lineno) for number in self._lines[word])

    def fingerprint(self, name: str) -> t.Optional[str]:
        """A hash of the text of one top-level function or class, white space aside; None if there isn't just one."""
        chunks = [chunk for chunk in self._chunks(name) if chunk.startswith(("def ", "class "))]
        if len(chunks) != 1:
            return None
        return hashlib.sha256("".join(chunks[0].split()).encode()).hexdigest()[:16]

    def imported(self, name: str) -> t.Optional[tuple[str, str]]:
        """(module, name there) of `from module import name`."""
        if self._imports is None:
            if self.tree is not None:
                self._imports = imports_in(self.tree.body)
            else:
                self._imports = {
                    (name.group(2) or name.group(1)): (head.group(1), name.group(1))
                    for head in _IMPORT.finditer(self.text)
                    for name in _IMPORTED.finditer(_COMMENT.sub("", head.group(2) or head.group(3)))
                }
        return self._imports.get(name)

    def _chunks(self, name: str) -> list[str]:
        start = re.compile(
            rf"^(?:(?:def|class) {re.escape(name)}\b|{re.escape(name)}\s*(?::[^=\n]*)?=(?!=))", re.MULTILINE
        )
        chunks = []
        for match in start.finditer(self.text):
            following = _NEXT_STATEMENT.search(self.text, match.end())
            chunks.append(self.text[match.start() : following.start() if following else len(self.text)])
        return chunks


class Package:
    """The sources below one package directory, read at most once each."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.name = os.path.basename(directory.rstrip("/"))
        self._modules: dict[str, t.Optional[Module]] = {}

    def parse(self, path: str) -> Module:
        """A file as a whole, parsed once. Raises OSError, SyntaxError, ValueError."""
        known = self._modules.get(path)
        if known is not None and known.tree is not None:
            return known
        text = read_source(path)
        module = Module(self, path, text, ast.parse(text))
        self._modules[path] = module
        return module

    def find(self, dotted: str) -> t.Optional[Module]:
        """A module of this package by its dotted name, read but not parsed."""
        parts = dotted.split(".")
        if parts[0] != "sglang" or len(parts) < 2 or not all(part.isidentifier() for part in parts):
            return None
        base = os.path.join(self.directory, *parts[1:])
        for path in (f"{base}.py", os.path.join(base, "__init__.py")):
            if path not in self._modules:
                try:
                    self._modules[path] = Module(self, path, read_source(path))
                except (OSError, ValueError):
                    self._modules[path] = None
            found = self._modules[path]
            if found is not None:
                return found
        return None

    def locate(self, module: Module, name: str, deep: int = 0) -> t.Optional[tuple[Module, str]]:
        """The module where a name is really defined, through `from ... import`."""
        if deep > _DEEPEST:
            return None
        if module.definition(name) is not None:
            return module, name
        source = module.imported(name)
        target = None if source is None else self.find(source[0])
        return None if source is None or target is None else self.locate(target, source[1], deep + 1)


def name_of(node: t.Optional[ast.AST]) -> str:
    """The last part of a dotted name: `argparse.BooleanOptionalAction` and `BooleanOptionalAction` are the same."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def function_scope(module: Module, body: t.Sequence[ast.stmt]) -> Scope:
    """The variables of a function that are assigned once and plainly, and its own imports."""
    assigned = list(_assignments(body))
    names = [name for name, _value in assigned]
    local = {name: value for name, value in assigned if names.count(name) == 1}
    return Scope(module, local, conditional_additions(body), imports_in(body))


def conditional_additions(body: t.Sequence[ast.stmt]) -> dict[str, list[ast.expr]]:
    """`if ...: NAME.add(x)`: name -> what may be added."""
    result: dict[str, list[ast.expr]] = {}
    for statement in body:
        if isinstance(statement, ast.If):
            for node in ast.walk(statement):
                name = _added_to(node)
                if name:
                    result.setdefault(name, []).append(t.cast(ast.Call, t.cast(ast.Expr, node).value).args[0])
    return result


def imports_in(body: t.Sequence[ast.stmt]) -> dict[str, tuple[str, str]]:
    """`from module import name as other`: other -> (module, name); absolute ones only."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }


class Evaluator:
    """Works out expressions. ``conditional`` collects values that are there only under a condition."""

    def __init__(self) -> None:
        self.conditional: list[t.Any] = []

    def value(self, node: ast.AST, scope: Scope, deep: int = 0) -> t.Any:
        """The value of an expression; raises NotKnown."""
        if deep > _DEEPEST:
            raise NotKnown("too deep")
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [found for item in node.elts for found in self._elements(item, scope, deep)]
        if isinstance(node, ast.Dict):
            return self._dict(node, scope, deep)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self.value(node.operand, scope, deep + 1)
            if isinstance(number, (int, float)):
                return -number
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.value(node.left, scope, deep + 1), self.value(node.right, scope, deep + 1)
            if isinstance(left, list) and isinstance(right, list):
                return [*left, *right]
            if isinstance(left, str) and isinstance(right, str):
                return left + right
        if isinstance(node, ast.Name):
            return self._name(node.id, scope, deep)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope, deep)
        if isinstance(node, ast.Call):
            return self._call(node, scope, deep)
        if isinstance(node, ast.ListComp):
            return self._comprehension(node, scope, deep)
        raise NotKnown(type(node).__name__)

    def _elements(self, node: ast.expr, scope: Scope, deep: int) -> list[t.Any]:
        if isinstance(node, ast.Starred):
            return _items(self.value(node.value, scope, deep + 1))
        return [self.value(node, scope, deep + 1)]

    def _dict(self, node: ast.Dict, scope: Scope, deep: int) -> dict[t.Any, t.Any]:
        result: dict[t.Any, t.Any] = {}
        for key, item in zip(node.keys, node.values):
            if key is None:
                merged = self.value(item, scope, deep + 1)
                if not isinstance(merged, dict):
                    raise NotKnown("**")
                result.update(merged)
                continue
            # Names of classes, mostly: only the keys are of use then.
            plain = isinstance(item, (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict))
            try:
                found = self.value(item, scope, deep + 1) if plain else UNKNOWN
            except NotKnown:
                found = UNKNOWN
            name = self.value(key, scope, deep + 1)
            if isinstance(name, (list, dict)):
                raise NotKnown("key")
            result[name] = found
        return result

    def _name(self, name: str, scope: Scope, deep: int) -> t.Any:
        if name in scope.local:
            found = scope.local[name]
            self._conditionally(scope.conditional.get(name, []), scope, deep)
            return self.value(found, scope, deep + 1) if isinstance(found, ast.AST) else found
        module = scope.module
        source = scope.imports.get(name)
        if source is not None:
            target = module.package.find(source[0])
            if target is None:
                raise NotKnown(name)
            module, name = target, source[1]
        located = module.package.locate(module, name)
        if located is None:
            raise NotKnown(name)
        module, name = located
        statement = module.definition(name)
        here = Scope(module)
        if isinstance(statement, ast.ClassDef):
            return ClassRef(module, statement)
        if isinstance(statement, ast.FunctionDef):
            return statement, module
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            added, always = module.additions(name)
            if always:
                raise NotKnown(f"{name} grows")
            self._conditionally(added, here, deep)
            return self.value(statement.value, here, deep + 1)
        raise NotKnown(name)

    def _conditionally(self, nodes: t.Sequence[ast.expr], scope: Scope, deep: int) -> None:
        for node in nodes:
            value = self.value(node, scope, deep + 1)
            self.conditional += value if isinstance(value, list) else [value]

    def _attribute(self, node: ast.Attribute, scope: Scope, deep: int) -> t.Any:
        base = self.value(node.value, scope, deep + 1)
        if isinstance(base, Member) and node.attr == "name":
            return base.name
        if isinstance(base, ClassRef) and not base.is_enum:
            inside = Scope(base.module, dict(_assignments(base.node.body)))
            return self.value(base.assigned(node.attr), inside, deep + 1)
        raise NotKnown(node.attr)

    def _call(self, node: ast.Call, scope: Scope, deep: int) -> t.Any:
        called = name_of(node.func)
        if isinstance(node.func, ast.Attribute) and not node.args and not node.keywords:
            base = self.value(node.func.value, scope, deep + 1)
            if called == "keys" and isinstance(base, dict):
                return list(base)
            if called == "lower" and isinstance(base, str):
                return base.lower()
        elif isinstance(node.func, ast.Name) and called in _COLLECTIONS and len(node.args) == 1 and not node.keywords:
            return _items(self.value(node.args[0], scope, deep + 1))
        elif isinstance(node.func, ast.Name) and not node.args and not node.keywords:
            found = self._name(called, scope, deep)
            if isinstance(found, tuple):
                function, module = found
                last = function.body[-1]
                if isinstance(last, ast.Return) and last.value is not None:
                    return self.value(last.value, function_scope(module, function.body), deep + 1)
        raise NotKnown(called)

    def _comprehension(self, node: ast.ListComp, scope: Scope, deep: int) -> list[t.Any]:
        generator = node.generators[0]
        if len(node.generators) != 1 or generator.ifs or not isinstance(generator.target, ast.Name):
            raise NotKnown("comprehension")
        result = []
        for item in _items(self.value(generator.iter, scope, deep + 1)):
            inner = Scope(scope.module, {**scope.local, generator.target.id: item}, scope.conditional, scope.imports)
            result.append(self.value(node.elt, inner, deep + 1))
        return result


def _items(value: t.Any) -> list[t.Any]:
    if isinstance(value, ClassRef) and value.is_enum:
        return list(value.members())
    if isinstance(value, (list, dict)):
        return list(value)
    raise NotKnown("not a collection")


def read_source(path: str) -> str:
    """The text of a source file of bounded size. Raises OSError, ValueError."""
    # A virtual environment may hold its packages as links.
    with os.fdopen(open_regular(path, follow=True), "rb") as stream:
        source = stream.read(MAX_SOURCE_BYTES + 1)
    if len(source) > MAX_SOURCE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_SOURCE_BYTES} bytes")
    return source.decode("utf-8")


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise NotKnown(str(error)) from error


def _defined_by(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    return [target for target, _value in _assignments([node])]


def _assignments(body: t.Sequence[ast.stmt]) -> t.Iterator[tuple[str, ast.expr]]:
    for node in body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _added_to(node: ast.AST) -> str:
    """NAME of a statement `NAME.add(x)` and the like."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and len(node.value.args) == 1):
        return ""
    function = node.value.func
    if isinstance(function, ast.Attribute) and function.attr in _ADDERS and isinstance(function.value, ast.Name):
        return function.value.id
    return ""
