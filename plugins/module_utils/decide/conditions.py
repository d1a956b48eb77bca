# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The language of a guardrail's condition: is it true of these facts, false, or not known?

A condition is plain data (YAML): ``all``, ``any`` and ``not`` of conditions, and comparisons such as
``{fact: flags.tp_size, at_least: 2}``. It is read once into small objects, so that a mistake is a sentence before
anything is judged. The logic is Kleene's: what is not known stays so unless the rest decides, and learning a fact never
turns true into false or false into true.
"""

from __future__ import annotations

import difflib
import math
import re
import typing as t
from dataclasses import dataclass

from ..sglang.install import version_tuple
from ..sglang.redact import is_secret_name, is_secret_variable

MAX_DEPTH = 12
MAX_PARTS = 300  # comparisons, groups and values of lists together
MAX_TEXT = 200

SETTINGS = ("flags", "environment")
"""Facts that a person gives. What is absent there is *not set*, which is known; everywhere else it is *not known*."""

_PATH = re.compile(r"[a-z][a-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)+\Z")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\Z")

Known = t.Mapping[str, t.Optional[t.Collection[str]]]
"""The names of facts by their first part; None where any name may stand."""


@dataclass(frozen=True)
class Fact:
    """What is known of one fact: ``known`` False: nothing; ``value`` None with ``known``: it is not set."""

    known: bool
    value: t.Any = None


class Facts:
    """The tree of facts, e.g. ``{"flags": {"tp_size": 8}, "model": {...}}``. A part that is None is not known."""

    def __init__(self, tree: t.Mapping[str, t.Any]) -> None:
        self.tree = tree

    def get(self, path: str) -> Fact:
        first, _dot, rest = path.partition(".")
        part = self.tree.get(first)
        if not isinstance(part, t.Mapping):
            return Fact(False)
        if first in SETTINGS:
            return Fact(True, part.get(rest))
        value: t.Any = part
        for name in rest.split("."):
            value = value.get(name) if isinstance(value, t.Mapping) else None
        return Fact(value is not None, value)


@dataclass(frozen=True)
class Answer:
    """``truth`` None: not known, because of the facts in ``missing``."""

    truth: t.Optional[bool]
    missing: tuple[str, ...] = ()


class Condition:
    """Anything that can be asked of facts."""

    def ask(self, facts: Facts) -> Answer:
        raise NotImplementedError

    def paths(self) -> tuple[str, ...]:
        """The facts that it looks at, in the order in which they are written."""
        raise NotImplementedError


@dataclass(frozen=True)
class All(Condition):
    parts: tuple[Condition, ...]

    def ask(self, facts: Facts) -> Answer:
        return _joined([part.ask(facts) for part in self.parts], decides=False)

    def paths(self) -> tuple[str, ...]:
        return _unique(path for part in self.parts for path in part.paths())


@dataclass(frozen=True)
class AnyOf(Condition):
    parts: tuple[Condition, ...]

    def ask(self, facts: Facts) -> Answer:
        return _joined([part.ask(facts) for part in self.parts], decides=True)

    def paths(self) -> tuple[str, ...]:
        return _unique(path for part in self.parts for path in part.paths())


@dataclass(frozen=True)
class Not(Condition):
    part: Condition

    def ask(self, facts: Facts) -> Answer:
        answer = self.part.ask(facts)
        return Answer(None if answer.truth is None else not answer.truth, answer.missing)

    def paths(self) -> tuple[str, ...]:
        return self.part.paths()


@dataclass(frozen=True)
class FactTimes:
    """Another fact as what is compared with, times a number."""

    path: str
    times: float = 1.0


@dataclass(frozen=True)
class Compare(Condition):
    """One fact and one operator. A fact with several values (architectures) fits if one of them does."""

    path: str
    operator: str
    operand: t.Any

    def ask(self, facts: Facts) -> Answer:
        fact = facts.get(self.path)
        if not fact.known:
            return Answer(None, (self.path,))
        if self.operator in ("set", "unset"):
            return Answer((fact.value is not None) == (self.operator == "set"))
        operand, missing = self._operand(facts)
        # "not" is the exact opposite of "is", also for what is not set and for several values.
        opposite = _OPPOSITES.get(self.operator)
        compare = _OPERATORS[opposite or self.operator]
        if fact.value is None:
            truth: t.Optional[bool] = False
        elif missing:
            return Answer(None, missing)
        else:
            values = fact.value if isinstance(fact.value, (list, tuple)) else (fact.value,)
            truth = _any([compare(value, operand) for value in values])
        if truth is None:
            return Answer(None, (self.path,))
        return Answer(truth is not bool(opposite))

    def _operand(self, facts: Facts) -> tuple[t.Any, tuple[str, ...]]:
        if not isinstance(self.operand, FactTimes):
            return self.operand, ()
        other = facts.get(self.operand.path)
        number = _number(other.value) if other.known else None
        return (None, (self.operand.path,)) if number is None else (number * self.operand.times, ())

    def paths(self) -> tuple[str, ...]:
        return (self.path, self.operand.path) if isinstance(self.operand, FactTimes) else (self.path,)


def _unique(paths: t.Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(paths))


def _joined(answers: t.Sequence[Answer], decides: bool) -> Answer:
    """One answer that is ``decides`` decides all; else one that is not known leaves the whole not known."""
    if any(answer.truth is decides for answer in answers):
        return Answer(decides)
    missing = _unique(path for answer in answers for path in answer.missing)
    return Answer(None, missing) if any(answer.truth is None for answer in answers) else Answer(not decides)


def _any(truths: t.Sequence[t.Optional[bool]]) -> t.Optional[bool]:
    if any(truth is True for truth in truths):
        return True
    return None if any(truth is None for truth in truths) else False


def _number(value: t.Any) -> t.Optional[float]:
    """A number, or a text that is one (a flag may be written either way); a boolean is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = float(value) if len(value) <= 40 and _NUMBER.match(value.strip()) else None
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _same(value: t.Any, wanted: t.Any) -> bool:
    if isinstance(value, bool) or isinstance(wanted, bool):
        # A flag's true may be written as text; 1 is no boolean.
        return isinstance(value, (bool, str)) and str(value).lower() == str(wanted).lower()
    numbers = _number(value), _number(wanted)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return isinstance(value, str) and value == wanted


def _numeric(compare: t.Callable[[float, float], bool]) -> t.Callable[[t.Any, t.Any], t.Optional[bool]]:
    def apply(value: t.Any, limit: t.Any) -> t.Optional[bool]:
        number = _number(value)
        return None if number is None else compare(number, float(limit))

    return apply


def _versions(compare: t.Callable[[tuple[int, ...], tuple[int, ...]], bool]) -> t.Callable[..., t.Optional[bool]]:
    def apply(value: t.Any, wanted: str) -> t.Optional[bool]:
        found, limit = version_tuple(value if isinstance(value, str) else None), version_tuple(wanted)
        if found is None or limit is None:
            return None
        width = max(len(found), len(limit))
        return compare(*[each + (0,) * (width - len(each)) for each in (found, limit)])

    return apply


def fits(text: str, pattern: str) -> bool:
    """Whether the whole text fits a pattern of ``*`` and ``?``, in any case of letters.

    No regular expression: some of those take for ever on the wrong text, and rules are anybody's.
    """
    text, pattern = text.lower(), pattern.lower()
    at = position = mark = 0
    star = -1
    while position < len(text):
        if at < len(pattern) and pattern[at] == "*":
            star, mark, at = at, position, at + 1
        elif at < len(pattern) and pattern[at] in ("?", text[position]):
            at, position = at + 1, position + 1
        elif star >= 0:
            mark += 1
            at, position = star + 1, mark
        else:
            return False
    return all(left == "*" for left in pattern[at:])


_OPERATORS: dict[str, t.Callable[[t.Any, t.Any], t.Optional[bool]]] = {
    "is": _same,
    "in": lambda value, wanted: any(_same(value, each) for each in wanted),
    "at_least": _numeric(lambda value, limit: value >= limit),
    "at_most": _numeric(lambda value, limit: value <= limit),
    "above": _numeric(lambda value, limit: value > limit),
    "below": _numeric(lambda value, limit: value < limit),
    "matches": lambda value, wanted: any(fits(str(value)[:1000], pattern) for pattern in wanted),
    "version_at_least": _versions(lambda value, limit: value >= limit),
    "version_below": _versions(lambda value, limit: value < limit),
}
_OPPOSITES = {"not": "is", "not_in": "in"}
NUMERIC = ("at_least", "at_most", "above", "below")
OPERATORS = tuple(sorted([*_OPERATORS, *_OPPOSITES, "set", "unset"]))
_GROUPS = ("all", "any", "not")


class Wrong(Exception):
    """A mistake in a condition: where it is in it, and what is wrong."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")


def nearest(word: str, valid: t.Iterable[str]) -> str:
    """``; did you mean 'x'?``, else the valid words."""
    known = sorted(valid)
    close = difflib.get_close_matches(word[:100], known, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; allowed are {', '.join(known)}"


def shown(value: t.Any) -> str:
    """A wrong value in a message, short and in one line."""
    # A list may hold itself, so nothing of its inside is written out.
    if isinstance(value, (dict, list, tuple, set)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'}"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number out of all bounds"  # Python refuses to write the largest ones
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def named(key: t.Any) -> str:
    """A key of a mapping as text."""
    return key[:60] if isinstance(key, str) else shown(key)


class Reader:
    """Reads conditions as data. Raises `Wrong` at the first mistake of one, also where data is endless or nested."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._parts = 0

    def read(self, raw: t.Any, where: str = "when", depth: int = 0) -> Condition:
        self._parts += 1
        if depth > MAX_DEPTH or self._parts > MAX_PARTS:
            raise Wrong(where, f"more than {MAX_DEPTH} levels or {MAX_PARTS} parts; write several rules")
        if not isinstance(raw, t.Mapping) or not raw:
            raise Wrong(where, f"is {shown(raw)}; allowed are mappings like {{fact: flags.tp_size, at_least: 2}}")
        names = [named(name) for name in raw]
        if "fact" in raw:
            return self._compare(raw, where)
        if len(names) != 1 or names[0] not in _GROUPS:
            wrong = next((name for name in names if name not in _GROUPS), names[-1])
            if wrong in OPERATORS and wrong != "not":
                raise Wrong(where, f"'{wrong}' has no fact beside it; write {{fact: NAME, {wrong}: VALUE}}")
            raise Wrong(
                where,
                f"has {', '.join(names[:4])}; allowed is one of 'all', 'any', 'not', or a 'fact' with its operator",
            )
        name, value = names[0], next(iter(raw.values()))
        if name == "not":
            return Not(self.read(value, f"{where}.not", depth + 1))
        if not isinstance(value, (list, tuple)) or not value:
            raise Wrong(f"{where}.{name}", f"is {shown(value)}; allowed is a list of at least one condition")
        parts = tuple(self.read(each, f"{where}.{name}[{at}]", depth + 1) for at, each in enumerate(value))
        return All(parts) if name == "all" else AnyOf(parts)

    def _compare(self, raw: t.Mapping[t.Any, t.Any], where: str) -> Condition:
        path = self.path(raw["fact"], where)
        operators = [named(name) for name in raw if name != "fact"]
        if not operators:
            raise Wrong(where, f"fact '{path}' has no operator; allowed are {', '.join(OPERATORS)}")
        for name in operators:
            if name not in OPERATORS:
                raise Wrong(where, f"unknown operator '{name}'{nearest(name, OPERATORS)}")
        parts = tuple(Compare(path, name, self._operand(name, raw[name], where)) for name in operators)
        if is_secret_path(path) and not set(operators) <= {"set", "unset"}:
            raise Wrong(where, f"'{path}' is a secret; allowed are only 'set' and 'unset'")
        return parts[0] if len(parts) == 1 else All(parts)

    def path(self, path: t.Any, where: str) -> str:
        if not isinstance(path, str) or not _PATH.match(path):
            raise Wrong(where, f"fact {shown(path)} is no name of a fact; allowed are names like 'flags.tp_size'")
        first, _dot, rest = path.partition(".")
        if first not in self._known:
            raise Wrong(where, f"unknown fact '{path}'{nearest(first, self._known)}")
        names = self._known[first]
        if (
            names is not None
            and rest not in names
            and not any(rest.startswith(name[:-1]) for name in names if name.endswith(".*"))
        ):
            raise Wrong(where, f"unknown fact '{path}'{nearest(path, (f'{first}.{name}' for name in names))}")
        if first in SETTINGS and "." in rest:
            raise Wrong(where, f"unknown fact '{path}'; allowed is one name behind '{first}.'")
        return path

    def _operand(self, name: str, value: t.Any, where: str) -> t.Any:
        where = f"{where}.{name}"
        if name in ("set", "unset"):
            if value is not True:
                raise Wrong(where, f"is {shown(value)}; allowed is only true")
            return True
        if name in NUMERIC:
            return self._limit(value, where)
        if name in ("version_at_least", "version_below"):
            if not isinstance(value, str) or version_tuple(value) is None or len(value) > 40:
                raise Wrong(where, f"is {shown(value)}; allowed is a version in quotes, like '0.5.15'")
            return value
        if name in ("is", "not"):
            return _scalar(value, where)
        if name == "matches" and isinstance(value, str):
            value = [value]
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_PARTS:
            raise Wrong(where, f"is {shown(value)}; allowed is a list of 1 to {MAX_PARTS} values")
        self._parts += len(value)
        values = tuple(_scalar(each, f"{where}[{at}]") for at, each in enumerate(value))
        if name == "matches" and not all(isinstance(each, str) for each in values):
            raise Wrong(where, "has a value that is no text; allowed are patterns with * and ?")
        return values

    def _limit(self, value: t.Any, where: str) -> t.Any:
        if isinstance(value, t.Mapping):
            if not set(value) <= {"fact", "times"} or "fact" not in value:
                raise Wrong(where, "has other keys; allowed are 'fact' and 'times'")
            times = value.get("times", 1)
            if isinstance(times, (bool, str)) or _number(times) is None:
                raise Wrong(f"{where}.times", f"is {shown(times)}; allowed is a number")
            return FactTimes(self.path(value["fact"], where), float(times))
        if isinstance(value, (bool, str)) or _number(value) is None:
            raise Wrong(where, f"is {shown(value)}; allowed is a number, or {{fact: NAME, times: NUMBER}}")
        return float(value)


def _scalar(value: t.Any, where: str) -> t.Any:
    fine = isinstance(value, (str, bool)) or (isinstance(value, (int, float)) and _number(value) is not None)
    if not fine or (isinstance(value, str) and len(value) > MAX_TEXT):
        raise Wrong(where, f"is {shown(value)}; allowed is a text of up to {MAX_TEXT}, a number or a boolean")
    return value


def is_secret_path(path: str) -> bool:
    """Whether a fact of this name holds a secret: no condition compares it and no text quotes it."""
    first, _dot, rest = path.partition(".")
    if first == "environment":
        return is_secret_variable(rest)
    # `set` is asked of `server.has_api_key`, which is no secret.
    return first == "flags" and is_secret_name(rest)
