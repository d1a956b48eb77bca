# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Words of a command line as argparse would take them, with a table of options instead of a parser.

Python's argparse as it is in 3.9 to 3.13, for a parser without positional arguments, and all of its complaints instead
of the first one only. What the table doesn't know of an option is not judged.
"""

from __future__ import annotations

import re
import typing as t
from dataclasses import dataclass, field

from ..sglang.argtypes import NotThisType, convert, expected
from ..sglang.option_table import NOT_KNOWN, Option, OptionTable

_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
HELP = Option(("help",), values="none", nargs=0, action="help", dest="help")


@dataclass(frozen=True)
class Problem:
    """Why argparse would refuse. ``kind``: unknown, ambiguous, help, value, missing, extra, type, choice, refused,
    required. ``names``: the candidates of an ambiguous name."""

    kind: str
    word: str
    message: str
    option: t.Optional[Option] = None
    names: tuple[str, ...] = ()


@dataclass
class Parsed:
    """``values`` by the field that is set; ``used``: (name as written without dashes, option) in order; ``unjudged``:
    options with values that the sources don't let judge."""

    values: dict[str, t.Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    used: list[tuple[str, Option]] = field(default_factory=list)
    unjudged: list[Option] = field(default_factory=list)


@dataclass(frozen=True)
class _Word:
    """A word that begins an option: what it may stand for, and the value behind its `=`."""

    names: tuple[str, ...]
    explicit: t.Optional[str] = None


def candidates(name: str, table: OptionTable) -> tuple[str, ...]:
    """The names that argparse sees in one on the command line, its own --help among them."""
    if name in table.names or name == "help":
        return (name,)
    found = table.candidates(name)
    return tuple(sorted((*found, "help"))) if name and "help".startswith(name) else found


def option_of(name: str, table: OptionTable) -> Option:
    """The option of a full name."""
    found = table.get(name)
    return HELP if found is None else found


def parse(words: t.Sequence[str], table: OptionTable, required: bool = True) -> Parsed:
    """What argparse would make of the words. ``required``: whether options that must be there are missed."""
    result = Parsed()
    kinds = _classify(words, table)
    index = 0
    while index < len(words):
        kind = kinds[index]
        word = words[index]
        index += 1
        if not isinstance(kind, _Word):
            result.problems.append(Problem("extra", word, f"the word {word!r} belongs to no option"))
            continue
        if len(kind.names) != 1:
            result.problems.append(_not_one(word, kind))
            continue
        name = kind.names[0]
        option = option_of(name, table)
        values = [] if kind.explicit is None else [kind.explicit]
        limit = 0 if kind.explicit is not None else _most(option)
        while len(values) < limit and index < len(words) and kinds[index] == "A":
            values.append(words[index])
            index += 1
        result.used.append((name, option))
        _take(result, name, option, values, kind.explicit is not None)
    if required:
        given = {id(option) for _name, option in result.used}
        for option in table.options:
            if option.required and id(option) not in given:
                result.problems.append(Problem("required", option.names[0], f"--{option.names[0]} is required", option))
    return result


def _classify(words: t.Sequence[str], table: OptionTable) -> list[t.Union[str, _Word]]:
    """ "A" for a value, "-" for the word `--`, a _Word for what begins an option."""
    kinds: list[t.Union[str, _Word]] = []
    for word in words:
        if "-" in kinds:
            kinds.append("A")
        elif word == "--":
            kinds.append("-")
        else:
            kinds.append(_option_word(word, table) or "A")
    return kinds


def _option_word(word: str, table: OptionTable) -> t.Optional[_Word]:
    if not word.startswith("-") or word == "-":
        return None
    if not word.startswith("--"):
        if word.startswith("-h"):
            return _Word(("help",))
        return None if _NEGATIVE.fullmatch(word) or " " in word else _Word(())
    name, equals, value = word[2:].partition("=")
    found = candidates(name, table) if name else tuple(sorted({*table.names, "help"}))
    if found:
        return _Word(found, value if equals else None)
    return None if " " in word else _Word(())


def _not_one(word: str, kind: _Word) -> Problem:
    if not kind.names:
        return Problem("unknown", word, f"{word.partition('=')[0]} is no option")
    shown = ", ".join(f"--{name}" for name in kind.names[:6])
    more = f" and {len(kind.names) - 6} more" if len(kind.names) > 6 else ""
    return Problem("ambiguous", word, f"{word.partition('=')[0]} could be {shown}{more}", None, kind.names)


def _most(option: Option) -> int:
    """How many words an option takes at most."""
    if "nargs" in option.unread or option.nargs in ("*", "+"):
        return 10**9
    if isinstance(option.nargs, int):
        return option.nargs
    if option.nargs is None and option.action is None:  # a table that only knows the shape
        return {"none": 0, "many": 10**9}.get(option.values, 1)
    return 1


def _fewest(option: Option) -> int:
    if "nargs" in option.unread or option.nargs in ("*", "?"):
        return 0
    if option.action is None:
        return 0 if option.values in ("none", "optional") else 1
    return option.nargs if isinstance(option.nargs, int) else 1


def _take(result: Parsed, name: str, option: Option, words: list[str], explicit: bool) -> None:
    def problem(kind: str, message: str) -> None:
        result.problems.append(Problem(kind, name, message, option))

    if option.action in ("help", "version"):
        problem("help", f"--{name} makes SGLang print a text and end")
        return
    if option.refusal is not None:
        problem("refused", option.refusal)
        return
    if explicit and _most(option) == 0:
        problem("extra", f"--{name} takes no value")
        return
    if len(words) < _fewest(option):
        problem("missing", f"--{name} needs {_demand(option)}")
        return
    dest = option.dest or option.names[0].replace("-", "_")
    if _most(option) == 0:
        bare = not name.startswith("no-") if option.toggle else True
        result.values[dest] = bare if option.const is NOT_KNOWN else option.const
        return
    if not words and option.nargs == "?":
        words = [option.const] if isinstance(option.const, str) else []
        if not words:
            result.values[dest] = None
            return
    values = [_value(result, name, option, word) for word in words]
    many = option.nargs in ("*", "+") or (isinstance(option.nargs, int) and option.nargs > 0) or option.values == "many"
    result.values[dest] = values if many else values[0]


def _demand(option: Option) -> str:
    if isinstance(option.nargs, int):
        return f"{option.nargs} values"
    return "at least one value" if option.values == "many" else "a value"


def _value(result: Parsed, name: str, option: Option, word: str) -> t.Any:
    """The value of a word. A word that is refused is reported, and returned as it is."""
    if option.type is None or "action" in option.unread:
        result.unjudged.append(option)
        return word
    try:
        value = convert(option.type, word, option.type_detail)
    except NotThisType as error:
        message = f"--{name}: {error}" if option.type.startswith("cuda") else _wants(name, word, option)
        result.problems.append(Problem("type", name, message, option))
        return word
    if "choices" in option.unread or value in option.conditional:
        result.unjudged.append(option)
    elif option.choices is not None and value not in option.choices:
        message = f"--{name}: {word!r} is not one of {', '.join(map(str, option.choices))}"
        result.problems.append(Problem("choice", name, message, option))
    return value


def _wants(name: str, word: str, option: Option) -> str:
    return f"--{name} takes {expected(option.type or 'str')}, not {word!r}"
