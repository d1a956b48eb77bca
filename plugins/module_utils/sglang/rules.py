# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Combinations of flags that the installed SGLang refuses, read from its own checks without running them.

Read are `if A and B: raise ...` and `assert not (A and B), ...` in server_args.py and arg_groups/*.py, if every
condition on the way there is a plain one about options (set, not set, equal to a constant). SGLang changes many of its
options itself before it checks them: then the value that was asked for is not surely the one that is checked. Only
functions count that every start runs: those that `__post_init__`, `check_server_args` and the resolution pipeline call
without a condition, and what these call in turn.
"""

from __future__ import annotations

import ast
import os
import re
import typing as t
from dataclasses import dataclass

from .option_table import NOT_KNOWN, OptionTable
from .sources import Package, name_of, read_source

_RECORDS = ("self", "server_args", "args", "cfg", "view", "sa")
_NO_WRITERS = (
    "getattr",
    "hasattr",
    "isinstance",
    "get",
    "print",
    "info",
    "warning",
    "error",
    "debug",
    "join",
    "format",
)
_MOST_TERMS = 6
_BODIES = ("body", "orelse", "finalbody")
_NAMED = re.compile(
    r"(?:\b(\w+)\s*=(?!=)|[\"'](\w+)[\"']\s*(?:[:,]|\]\s*=(?!=)))\s*(?:(True|False|None)\b(?! *(?:if|or)\b))?"
)
_LITERALS = {"True": True, "False": False, "None": None}
_ROOTS = ("__post_init__", "check_server_args", "run_resolution_pipeline")


@dataclass(frozen=True)
class Term:
    """One condition about a field. ``test``: true, false, none, set; with ``value``: eq, ne, in, not_in."""

    dest: str
    test: str
    value: t.Any = None

    def holds(self, value: t.Any) -> bool:
        """Whether it holds for a value."""
        if self.test in ("true", "false"):
            return bool(value) == (self.test == "true")
        if self.test in ("none", "set"):
            return (value is None) == (self.test == "none")
        if self.test in ("eq", "ne"):
            return bool(value == self.value) == (self.test == "eq")
        return bool(value in self.value) == (self.test == "in")


@dataclass(frozen=True)
class Change:
    """A value that SGLang itself may put into a field, if all ``guards`` hold; each with whether SGLang may make it
    hold itself. What the sources don't tell of a condition is left out: then the change is taken for possible."""

    value: t.Any
    guards: tuple[tuple[Term, bool], ...] = ()

    def possible(self, values: t.Mapping[str, t.Any], defaults: t.Mapping[t.Optional[str], t.Any]) -> bool:
        """Whether it may happen with these values."""
        for term, made in self.guards:
            value = values.get(term.dest, defaults.get(term.dest, NOT_KNOWN))
            if not made and value is not NOT_KNOWN and not term.holds(value):
                return False
        return True


@dataclass(frozen=True)
class Rule:
    """All ``terms`` together are refused with ``message``. ``place``: file and line. ``changes``: for each term, what
    SGLang itself may do to the field before so that the term no longer holds."""

    terms: tuple[Term, ...]
    message: str
    place: str
    changes: tuple[tuple[Change, ...], ...] = ()

    @property
    def dests(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(term.dest for term in self.terms))


_OPPOSITE = {
    "true": "false",
    "false": "true",
    "none": "set",
    "set": "none",
    "eq": "ne",
    "ne": "eq",
    "in": "not_in",
    "not_in": "in",
}


def read_rules(sglang_dir: str, table: OptionTable, package: t.Optional[Package] = None) -> tuple[Rule, ...]:
    """The combinations that are refused; none where the sources can't be read. ``package``: as for read_options."""
    srt = os.path.join(sglang_dir, "srt")
    paths = [os.path.join(srt, "server_args.py")]
    groups = os.path.join(srt, "arg_groups")
    package = package or Package(sglang_dir)
    trees: list[tuple[str, ast.Module]] = []
    try:
        if os.path.isdir(groups):
            paths += sorted(os.path.join(groups, name) for name in os.listdir(groups) if name.endswith(".py"))
        for path in paths:
            trees.append((os.path.relpath(path, srt), t.cast(ast.Module, package.parse(path).tree)))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()
    reader = _Reader({option.dest or "" for option in table.options})
    for _path, tree in trees:
        reader.note_writes(tree.body, [])
    reader.note_names(_texts(os.path.join(groups, "model_overrides")))
    functions = [(path, function) for path, tree in trees for function in _functions(tree.body)]
    always = _always_run([function for _path, function in functions])
    return tuple(
        rule for path, function in functions if function.name in always for rule in reader.rules(path, function)
    )


def _texts(folder: str) -> t.Iterator[str]:
    """Overrides by models: only searched for names of fields."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if name.endswith(".py"):
            try:
                yield read_source(os.path.join(folder, name))
            except (OSError, ValueError):
                continue


def _functions(body: t.Sequence[ast.stmt]) -> t.Iterator[ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body)


def _always_run(functions: t.Sequence[ast.FunctionDef]) -> frozenset[str]:
    """Names of the functions that every start runs. A function that is handed to another counts as called there."""
    names = {function.name for function in functions}
    called: dict[str, set[str]] = {}
    for function in functions:
        called.setdefault(function.name, set()).update(_called(function.body, names))
    found = {name for name in _ROOTS if name in names}
    fresh = set(found)
    while fresh:
        fresh = {callee for name in fresh for callee in called.get(name, ())} - found
        found |= fresh
    return frozenset(found)


def _called(body: t.Sequence[ast.stmt], names: t.Collection[str]) -> t.Iterator[str]:
    """Functions that these statements name where they surely get to."""
    for statement in body:
        if isinstance(statement, ast.If):
            dummy = any(name_of(node) == "model_path" for node in ast.walk(statement.test))
            if _leaves(statement.body) and not _raises(statement.body) and not dummy:
                return
        elif isinstance(statement, (ast.With, ast.Try)):
            yield from _called(statement.body, names)
        elif isinstance(statement, (ast.Expr, ast.Assign, ast.AnnAssign, ast.Return)):
            yield from (name for name in map(name_of, ast.walk(statement)) if name in names)


def broken(rules: t.Sequence[Rule], values: t.Mapping[str, t.Any], table: OptionTable) -> t.Iterator[tuple[Rule, bool]]:
    """The rules that these values (by field) break, each with whether that is sure."""
    defaults = {option.dest: option.default for option in table.options}
    seen: set[tuple[tuple[str, ...], str]] = set()
    for rule in rules:
        found = _holds(rule, values, defaults)
        if found is not None and (rule.dests, rule.message) not in seen:
            seen.add((rule.dests, rule.message))
            yield rule, found


def _holds(rule: Rule, values: t.Mapping[str, t.Any], defaults: t.Mapping[t.Optional[str], t.Any]) -> t.Optional[bool]:
    """None: not broken, or not known. True: surely broken; False: SGLang may still change a value before it checks."""
    sure = True
    if not any(term.dest in values for term in rule.terms):
        return None
    for term, changes in zip(rule.terms, rule.changes):
        stays = not any(change.possible(values, defaults) for change in changes)
        value = values.get(term.dest, defaults.get(term.dest, NOT_KNOWN))
        if value is NOT_KNOWN or not term.holds(value) or (term.dest not in values and not stays):
            return None
        sure = sure and stays
    return sure


def _written(statement: ast.AST) -> t.Iterator[tuple[str, t.Any]]:
    """(field, value) of assignments, and of calls and dictionaries that may become some; NOT_KNOWN values too."""
    for node in ast.walk(statement):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.value if isinstance(node, ast.Assign) else None
            for target in targets:
                yield from (
                    (each.attr, _literal(value)) for each in ast.walk(target) if isinstance(each, ast.Attribute)
                )
        elif isinstance(node, ast.Call) and name_of(node.func) not in _NO_WRITERS:
            yield from ((str(_literal(each)), NOT_KNOWN) for each in node.args if isinstance(_literal(each), str))
            yield from (
                (keyword.arg, _literal(keyword.value))
                for keyword in node.keywords
                # `f(pp_size=cfg.pp_size)` hands a field on as it is.
                if keyword.arg and not (isinstance(keyword.value, ast.Attribute) and keyword.value.attr == keyword.arg)
            )
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(_literal(node.elts[0]), str):
            yield _literal(node.elts[0]), _literal(node.elts[1])
        elif isinstance(node, ast.Dict):
            pairs = [(_literal(key), value) for key, value in zip(node.keys, node.values)]
            yield from ((key, _literal(value)) for key, value in pairs if isinstance(key, str))


def _literal(node: t.Optional[ast.expr]) -> t.Any:
    return node.value if isinstance(node, ast.Constant) else NOT_KNOWN


class _Reader:
    def __init__(self, known: t.Collection[str]) -> None:
        self.known = known
        self.written: dict[str, list[tuple[t.Any, tuple[Term, ...]]]] = {}

    def note_writes(self, body: t.Sequence[ast.stmt], above: t.Sequence[Term]) -> None:
        """What these statements may put into fields; ``above``: conditions that surely hold there."""
        guards = list(above)
        for statement in body:
            for head in _heads(statement):
                self._note(head, guards)
            if isinstance(statement, ast.If):
                self.note_writes(statement.body, [*guards, *self._known_terms(statement.test)])
                otherwise = self._known_terms(statement.test, negated=True)
                self.note_writes(statement.orelse, [*guards, *otherwise])
                if _leaves(statement.body):
                    guards += otherwise
                continue
            inner = [part for name in _BODIES for part in getattr(statement, name, ())]
            handlers = [part for handler in getattr(statement, "handlers", ()) for part in handler.body]
            if inner or handlers:
                apart = isinstance(statement, (ast.FunctionDef, ast.ClassDef))
                self.note_writes([*inner, *handlers], () if apart else guards)
                continue
            self._note(statement, guards)

    def _note(self, node: ast.AST, guards: t.Sequence[Term]) -> None:
        for dest, value in _written(node):
            if dest in self.known:
                self.written.setdefault(dest, []).append((value, tuple(guards)))

    def note_names(self, texts: t.Iterable[str]) -> None:
        """Fields that are named where something may be put into them, whatever the condition."""
        for text in texts:
            for match in _NAMED.finditer(text):
                name = match.group(1) or match.group(2)
                if name in self.known:
                    value = _LITERALS.get(match.group(3) or "", NOT_KNOWN)
                    self.written.setdefault(name, []).append((value, ()))

    def _changes(self, term: Term) -> tuple[Change, ...]:
        return tuple(
            Change(value, tuple((guard, self._made(guard)) for guard in guards))
            for value, guards in self.written.get(term.dest, ())
            if value is NOT_KNOWN or not term.holds(value)
        )

    def _made(self, guard: Term) -> bool:
        return any(value is NOT_KNOWN or guard.holds(value) for value, _guards in self.written.get(guard.dest, ()))

    def rules(self, path: str, function: ast.FunctionDef) -> t.Iterator[Rule]:
        yield from self._block(path, function.body, [])

    def _block(self, path: str, body: t.Sequence[ast.stmt], above: list[Term]) -> t.Iterator[Rule]:
        """``above``: what holds when this block is reached."""
        terms = list(above)
        for statement in body:
            if isinstance(statement, ast.Assert):
                refused = self._terms(statement.test, negated=True)
                if refused is not None:
                    yield from self._rule(path, statement, [*terms, *refused], statement.msg)
            elif isinstance(statement, ast.If):
                yield from self._if(path, statement, terms)
                if _leaves(statement.body):
                    passed = self._terms(statement.test, negated=True)
                    if passed is None and not _raises(statement.body):
                        return  # whether the rest is reached is not known
                    terms += passed or []
            elif isinstance(statement, (ast.Return, ast.Raise)):
                return

    def _if(self, path: str, statement: ast.If, above: list[Term]) -> t.Iterator[Rule]:
        inside = self._terms(statement.test)
        if inside is not None:
            if _raises(statement.body):
                error = t.cast(ast.Raise, statement.body[0]).exc
                message = error.args[0] if isinstance(error, ast.Call) and error.args else None
                yield from self._rule(path, statement, [*above, *inside], message)
            else:
                yield from self._block(path, statement.body, [*above, *inside])
        outside = self._terms(statement.test, negated=True)
        if outside is not None and statement.orelse:
            yield from self._block(path, statement.orelse, [*above, *outside])

    def _rule(self, path: str, node: ast.stmt, terms: list[Term], message: t.Optional[ast.expr]) -> t.Iterator[Rule]:
        unique = tuple(dict.fromkeys(terms))
        rule = Rule(unique, _text(message), f"{path}:{node.lineno}", tuple(map(self._changes, unique)))
        if len(rule.dests) > 1 and len(rule.terms) <= _MOST_TERMS:
            yield rule

    def _terms(self, node: ast.expr, negated: bool = False) -> t.Optional[list[Term]]:
        """The conditions that all hold when this is true (or false); None where that isn't a plain conjunction."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._terms(node.operand, not negated)
        if isinstance(node, ast.BoolOp):
            if isinstance(node.op, ast.And) == negated:
                return None  # an alternative
            parts = [self._terms(each, negated) for each in node.values]
            return None if None in parts else [term for part in parts for term in part or ()]
        term = self._term(node)
        if term is None:
            return None
        return [Term(term.dest, _OPPOSITE[term.test], term.value) if negated else term]

    def _known_terms(self, node: ast.expr, negated: bool = False) -> list[Term]:
        """Of a conjunction, the conditions that can be read."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._known_terms(node.operand, not negated)
        if isinstance(node, ast.BoolOp):
            if isinstance(node.op, ast.And) == negated:
                return []
            return [term for each in node.values for term in self._known_terms(each, negated)]
        return self._terms(node, negated) or []

    def _term(self, node: ast.expr) -> t.Optional[Term]:
        dest = self._dest(node)
        if dest:
            return Term(dest, "true")
        if not (isinstance(node, ast.Compare) and len(node.ops) == 1):
            return None
        dest, operator, right = self._dest(node.left), node.ops[0], node.comparators[0]
        if not dest:
            return None
        if isinstance(right, ast.Constant):
            if right.value is None:
                return (
                    Term(dest, "none" if isinstance(operator, (ast.Is, ast.Eq)) else "set")
                    if isinstance(operator, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq))
                    else None
                )
            if isinstance(operator, (ast.Eq, ast.NotEq)):
                return Term(dest, "eq" if isinstance(operator, ast.Eq) else "ne", right.value)
            return None
        if isinstance(operator, (ast.In, ast.NotIn)) and isinstance(right, (ast.List, ast.Tuple, ast.Set)):
            values = [each.value for each in right.elts if isinstance(each, ast.Constant)]
            if len(values) == len(right.elts):
                return Term(dest, "in" if isinstance(operator, ast.In) else "not_in", tuple(values))
        return None

    def _dest(self, node: ast.expr) -> str:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _RECORDS:
            return node.attr if node.attr in self.known else ""
        return ""


def _heads(statement: ast.stmt) -> list[ast.AST]:
    """The expressions of a compound statement, apart from its blocks."""
    if isinstance(statement, (ast.If, ast.While)):
        return [statement.test]
    if isinstance(statement, ast.For):
        return [statement.target, statement.iter]
    return list(statement.items) if isinstance(statement, ast.With) else []


def _raises(body: t.Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[0], ast.Raise)


def _leaves(body: t.Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _text(node: t.Optional[ast.expr]) -> str:
    """The sentence of an error; what is put in at run time is shown as dots."""
    if isinstance(node, ast.Constant):
        return " ".join(str(node.value).split())
    if isinstance(node, ast.JoinedStr):
        parts = [str(each.value) if isinstance(each, ast.Constant) else "..." for each in node.values]
        return " ".join("".join(parts).split())
    return "no reason is given"
