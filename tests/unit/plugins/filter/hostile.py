# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Values that nobody means, at every place of a value that somebody does."""

from __future__ import annotations

import copy
import datetime
import math
import typing as t
from collections.abc import Iterator

DEEP = 10_000
LONG = 10 * 1024 * 1024


def nested(depth: int) -> list[t.Any]:
    """Lists within lists."""
    value: list[t.Any] = []
    for _level in range(depth):
        value = [value]
    return value


def nested_mappings(depth: int) -> dict[str, t.Any]:
    value: dict[str, t.Any] = {}
    for _level in range(depth):
        value = {"flags": value}
    return value


def circle() -> list[t.Any]:
    """A list that holds itself, as YAML's anchors can make one."""
    value: list[t.Any] = []
    value.append(value)
    return value


def laughs(levels: int = 9) -> list[t.Any]:
    """A billion leaves of a few aliases."""
    value: list[t.Any] = ["ha"] * 10
    for _level in range(levels - 1):
        value = [value] * 10
    return value


# What JSON can say: so may any host.
PLAIN: dict[str, t.Any] = {
    **{"null": None, "true": True, "false": False, "zero": 0, "minus one": -1, "a half": 0.5, "a number": 4711},
    **{"huge": 10**25, "longest": int("9" * 4000)},
    **{"inf": math.inf, "minus inf": -math.inf, "nan": math.nan, "1e308": 1e308},
    **{"no text": "", "a text": "so", "a half of a pair": "\ud800", "signs": "\0\n\x1b[31m{{ x }}\u2028'\"%s{}"},
    **{"digits": "9" * 5000, "other digits": "\u0663", "superscript": "\u00b2", "percent": "1e400%"},
    **{"no list": [], "list of null": [None], "list of texts": ["a", "b"], "list of lists": [[], [1]]},
    **{"list of all": [None, 1, "a", [], {}, math.nan], "no mapping": {}, "a mapping": {"a": {"b": [1]}}},
    **{"list of mappings": [{}, {"name": 1}], "mapping of null": {"name": None}, "long list": list(range(3000))},
}
# What is large, and may take its time but not for ever.
LARGE: dict[str, t.Any] = {
    **{"deep": nested(DEEP), "deep mappings": nested_mappings(DEEP), "deep by a bit": nested(300)},
    **{"long": "a" * LONG, "long with lines": "a \n" * (LONG // 3)},
}
# What YAML can say as well: an inventory may.
OF_YAML: dict[str, t.Any] = {
    **{"day": datetime.date(2026, 1, 31), "time": datetime.datetime(2026, 1, 31, 1, 2), "bytes": b"\xff"},
    **{"set": {"a", "b"}, "other keys": {None: 1, 2: 3, True: 4, 1.5: 5}, "endless key": {16**5000: 1}},
    **{"endless": 16**5000, "minus endless": -(16**5000)},  # Python reads no more than 4,300 decimal digits
    **{"tuple": (1, "a"), "circle": circle(), "laughs": laughs()},
}


def places(value: t.Any, at: tuple[t.Any, ...] = ()) -> Iterator[tuple[t.Any, ...]]:
    """The way to each place of a value, itself first."""
    yield at
    if isinstance(value, dict):
        for key, each in value.items():
            yield from places(each, (*at, key))
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from places(each, (*at, number))


def replaced(value: t.Any, at: tuple[t.Any, ...], by: t.Any) -> t.Any:
    """The value with another thing at one place."""
    if not at:
        return by
    made = copy.copy(value) if isinstance(value, dict) else list(value)
    made[at[0]] = replaced(value[at[0]], at[1:], by)
    return made


def without(value: t.Any, at: tuple[t.Any, ...]) -> t.Any:
    """The value without one of its parts."""
    if len(at) > 1:
        return replaced(value, at[:1], without(value[at[0]], at[1:]))
    made = copy.copy(value) if isinstance(value, dict) else list(value)
    del made[at[0]]
    return made


def spoiled(value: t.Any, by: t.Mapping[str, t.Any]) -> Iterator[tuple[str, t.Any]]:
    """(what was done, the value after it), for each place and each thing."""
    for at in places(value):
        where = ".".join(map(str, at)) or "all of it"
        for name, each in by.items():
            yield f"{where} is {name}", replaced(value, at, each)
        if at:
            yield f"{where} is missing", without(value, at)
