# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Random command lines and mappings of flags, half of them meant to be wrong; the same for the same seed."""

from __future__ import annotations

import random
import typing as t

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.option_table import Option, OptionTable
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.redact import is_secret_flag
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.rules import Rule, Term

_WORDS = {
    "int": [
        "1",
        "0",
        "-1",
        "8",
        "1_000",
        " 7 ",
        "0x10",
        "1.0",
        "",
        "k",
        "1e3",
        "-5",
        "٣",
        "1_",
        "-0",
        "+3",
        "--1",
        "-1_0x",
    ],
    "float": [
        "0.9",
        "1",
        "nan",
        "-inf",
        "inf",
        "1e-5",
        "-1e-5",
        ".5",
        "-.5",
        "-0.5",
        "1,5",
        "",
        "0.9x",
        "1_0.5",
        "-1.",
    ],
    "size": [
        "128k",
        "1M",
        "1.5k",
        "1.5Ki",
        "1Ki",
        "64",
        "128K",
        "1_0",
        "k",
        "",
        " 2k ",
        "0.1234k",
        "-1",
        "-1k",
        "1e3",
        "٣k",
    ],
    "json": ["{}", '{"a": 1}', "[1]", "null", "{a}", "NaN", "", "1", "{'a': 1}", "-1", '"x"', "[1,]"],
    "cuda_graph_config": [
        '{"decode": {"max_bs": 8}}',
        '{"prefill": {"backend": "disabled"}}',
        '{"decode": {"backend": "tc_piecewise"}}',
        '{"decode": {"nothing": 1}}',
        '{"other": {}}',
        '{"decode": []}',
        "[]",
        "{}",
        "{",
    ],
    "lora_path": ["/a", "n=/a", '{"lora_name": "a", "lora_path": "/a"}', '{"lora_name": "a"}', "{x}", "{", "-x", ""],
    "str": [
        "a",
        "",
        "None",
        "-a",
        "--a",
        "-1",
        "a b",
        "-a b",
        "--a b",
        "-",
        "--",
        "tp",
        "-h",
        "--help",
        "--tp",
        "/x=y",
        "é",
    ],
}
_VALUES: tuple[t.Any, ...] = (
    *(
        True,
        False,
        0,
        1,
        -1,
        8,
        10**20,
        0.9,
        -0.5,
        1e-05,
        -1e-05,
        1e22,
        8.0,
        "true",
        "false",
        "",
        "128k",
        "1.5Ki",
        "-1",
    ),
    *(
        "a b",
        "-x",
        "--x",
        "--",
        "[1, 2]",
        [],
        ["a"],
        [1, 2],
        ["1", "x"],
        [True],
        ["-1", "-x"],
        {},
        {"a": 1},
        [{"a": 1}],
    ),
    *([""], "yes", "2024-01-01", "1_0", "0o7", "~", "null", "é", "😀", "a: b # c", "'", '"'),
)


def command_lines(table: OptionTable, seed: str, count: int) -> t.Iterator[list[str]]:
    """Words as somebody might type them."""
    chance = random.Random(f"lines {seed}")
    names = sorted(table.names)
    for _number in range(count):
        words: list[str] = ["--model-path", "/m"] if chance.random() < 0.9 else []
        for _each in range(chance.randint(1, 5)):
            name = chance.choice(names)
            option = table.get(name)
            assert option is not None
            words += _typed(_spelt(name, chance), option, chance)
        if chance.random() < 0.05:
            words.insert(chance.randint(0, len(words)), chance.choice(["--", "x", "-h", "-x", "--help", "-", "", "-1"]))
        yield words


def _spelt(name: str, chance: random.Random) -> str:
    roll = chance.random()
    if roll < 0.75:
        return name
    if roll < 0.9:
        return name[: chance.randint(max(1, len(name) - 6), len(name))]
    position = chance.randrange(len(name))
    return name[:position] + chance.choice("abz-_") + name[position + 1 :]


def _typed(name: str, option: Option, chance: random.Random) -> list[str]:
    roll = chance.random()
    if option.values == "none":
        return (
            [f"--{name}"]
            if roll < 0.9
            else [f"--{name}={chance.choice(['', 'x'])}"]
            if roll < 0.95
            else [f"--{name}", "x"]
        )
    if roll < 0.04:
        return [f"--{name}"]
    count = 1 if option.values != "many" and roll < 0.96 else chance.randint(0, 3)
    values = [_word(option, chance) for _each in range(count)]
    # `--x=--` breaks argparse itself before Python 3.13 ("not enough values to unpack").
    if count == 1 and chance.random() < 0.25 and values[0] != "--":
        return [f"--{name}={values[0]}"]
    return [f"--{name}", *values]


def _word(option: Option, chance: random.Random) -> str:
    if option.choices and chance.random() < 0.75:
        return str(chance.choice(option.choices))
    kind = option.type or "str"
    kind = {"json_strict": "json", "cuda_graph_config_2": "cuda_graph_config"}.get(kind, kind)
    return chance.choice(_WORDS.get(kind, _WORDS["str"]) if chance.random() < 0.85 else _WORDS["str"])


def mappings(table: OptionTable, seed: str, count: int) -> t.Iterator[dict[str, t.Any]]:
    """Flags as an inventory may have them. Secrets, --config and two names of one option are left out: those we
    refuse on purpose where argparse doesn't."""
    chance = random.Random(f"flags {seed}")
    names = sorted(name for name in table.names if not is_secret_flag(name) and name != "config")
    for _number in range(count):
        flags: dict[str, t.Any] = {"model-path": "/m"} if chance.random() < 0.95 else {}
        used = {option.names for name in flags if (option := table.get(name))}
        for _each in range(chance.randint(1, 4)):
            name = chance.choice(names)
            option = table.get(name)
            assert option is not None
            spelt = _spelt(name, chance) if chance.random() < 0.3 else name
            other = table.get(spelt)
            if option.names in used or is_secret_flag(spelt) or (other is not None and other.names in used):
                continue
            if spelt in ("config", "help") or any("config".startswith(each) for each in (spelt,)):
                continue
            used |= {option.names, *([other.names] if other else [])}
            flags[spelt] = _flag(option, chance)
        yield flags


def _flag(option: Option, chance: random.Random) -> t.Any:
    roll = chance.random()
    if roll < 0.35:
        return chance.choice(_VALUES)
    if option.values == "none":
        return chance.random() < 0.8
    if option.values == "many":
        return [_word(option, chance) for _each in range(chance.randint(0, 3))]
    return _word(option, chance)


def conflict(rule: Rule, table: OptionTable) -> t.Optional[list[str]]:
    """Words that break a rule; None where no value for it can be made up."""
    by_dest = {option.dest: option for option in table.options}
    words: dict[str, list[str]] = {}
    for term in rule.terms:
        if term.test in ("false", "none") or term.dest in words:
            continue
        option = by_dest[term.dest]
        value = _breaking(term, option)
        if value is None:
            return None
        words[term.dest] = [f"--{option.names[0]}", *([] if option.values == "none" else [value])]
    return [word for each in words.values() for word in each]


def _breaking(term: Term, option: Option) -> t.Optional[str]:
    if term.test in ("eq", "in"):
        return str(term.value if term.test == "eq" else term.value[0])
    if option.choices:
        others = [each for each in option.choices if each not in ("auto", "none", None) and term.holds(each)]
        return str(others[0]) if others else None
    if option.type is None or option.type.startswith("json"):
        return '["a"]'
    value: t.Any = {"int": 3, "float": 0.77}.get(option.type, "zz")
    return str(value) if term.holds(value) else None
