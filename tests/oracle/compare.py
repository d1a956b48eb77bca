# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Our table of options against the description of SGLang's own parser, and against a second, cruder reading."""

from __future__ import annotations

import re
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.option_table import (
    NOT_KNOWN,
    Option,
    OptionTable,
)

_TYPES = {
    "int": "int",
    "float": "float",
    "size": "human_readable_int",
    "nullable_str": "nullable_str",
    "json": "loads",
    "json_strict": "json_list_type",
    "cuda_graph_config": "parse_cuda_graph_config_arg",
    "cuda_graph_config_2": "parse_cuda_graph_config_arg",
    "cuda_graph_backend": "parse_cuda_graph_backend_arg",
}
_ACTIONS = {"_StoreAction": "store", "_StoreTrueAction": "store_true", "BooleanOptionalAction": "toggle"}
ASPECTS = ("names", "dest", "nargs", "type", "choices", "required", "action", "default", "config")


def differences(table: OptionTable, runtime: t.Mapping[str, t.Any]) -> tuple[dict[str, int], list[str]]:
    """How often each aspect was equal, and every difference as a line. An aspect that we say we don't know counts
    neither way, but is listed."""
    ours = {_strings(option): option for option in table.options}
    equal = dict.fromkeys((*ASPECTS, "unread"), 0)
    found: list[str] = []
    for action in runtime["actions"]:
        if action["action"] == "_HelpAction":
            continue
        option = ours.pop(frozenset(action["names"]), None)
        if option is None:
            found.append(f"names: {action['names']} are not an option of ours")
            continue
        equal["names"] += 1
        for aspect, mine, theirs in _aspects(option, action, runtime):
            if mine is NOT_KNOWN:
                equal["unread"] += aspect != "default"
            elif mine == theirs:
                equal[aspect] += 1
            else:
                found.append(f"{aspect} of --{option.names[0]}: ours {mine!r}, its own {theirs!r}")
    found += [f"names: ours {sorted(names)} are not its own" for names in ours]
    return equal, found


def _strings(option: Option) -> frozenset[str]:
    names = {f"--{name}" for name in option.names}
    return frozenset(names | ({f"--no-{name}" for name in option.names} if option.toggle else set()))


def _aspects(
    option: Option, action: t.Mapping[str, t.Any], runtime: t.Mapping[str, t.Any]
) -> t.Iterator[tuple[str, t.Any, t.Any]]:
    def known(aspect: str, value: t.Any) -> t.Any:
        return NOT_KNOWN if aspect in option.unread else value

    yield "dest", option.dest, action["dest"]
    yield "nargs", known("nargs", option.nargs), action["nargs"]
    kind = option.type if option.type != "lora_path" or action["action"] != "LoRAPathAction" else "str"
    yield "type", known("type", None if kind == "str" else _TYPES.get(kind or "")), _plain_type(action["type"])
    yield "choices", known("choices", _members(option.choices)), _members(action["choices"])
    yield "required", option.required, action["required"]
    yield "action", option.action, _ACTIONS.get(action["action"], action["action"])
    default = list(option.default) if isinstance(option.default, tuple) else option.default
    yield "default", default, action["default"]
    if option.in_config:  # only what we do put into the file must be taken there
        keys = {name.replace("-", "_") for name in option.names}
        refused = keys & set(runtime["refused"]) or (option.action == "store_true" and not keys <= set(runtime["bare"]))
        yield "config", True, not refused


def _plain_type(name: t.Optional[str]) -> t.Optional[str]:
    return None if name == "str" else name


def _members(choices: t.Optional[t.Sequence[t.Any]]) -> t.Optional[list[str]]:
    return None if choices is None else sorted({f"{type(each).__name__}:{each}" for each in choices})


_FIELD = re.compile(r"^    (\w+): A\[", re.MULTILINE)
_ADDED = re.compile(r"add_argument\(\s*((?:\"--[\w-]+\",?\s*)+)")
_QUOTED = re.compile(r"\"--([\w-]+)\"")


def names_by_text(package: Path) -> frozenset[str]:
    """The options' names by regular expressions over the sources' text: shares nothing with the reader."""
    sources = [package / "srt/server_args.py", *sorted((package / "srt/arg_groups/fields").glob("*.py"))]
    names: set[str] = set()
    for source in sources:
        text = source.read_text(encoding="utf-8")
        for match in _ADDED.finditer(text):
            block = _bracketed(text, text.index("(", match.start()))
            names |= _with_opposites(_QUOTED.findall(match.group(1)), block)
        for match in _FIELD.finditer(text):
            block = _bracketed(text, match.end() - 1)
            if "no_cli=True" in block or not ("Arg(" in block or '"' in re.sub(r"NS\([^)]*\)", "", _after_type(block))):
                continue
            if "Derived(" in block:
                continue
            renamed = re.search(r"cli_name=\"--([\w-]+)\"", block)
            aliases = re.search(r"aliases=\[([^\]]*)\]", block)
            found = [renamed.group(1) if renamed else match.group(1).replace("_", "-")]
            names |= _with_opposites(found + (_QUOTED.findall(aliases.group(1)) if aliases else []), block)
    return frozenset(names)


def _after_type(block: str) -> str:
    return re.sub(r"Literal\[[^\]]*\]", "", block)


def _with_opposites(names: t.Sequence[str], block: str) -> set[str]:
    toggles = "BooleanOptionalAction" in block
    return {*names, *(f"no-{name}" for name in names if toggles)}


def _bracketed(text: str, start: int) -> str:
    """From an opening bracket to its closing one; strings are skipped."""
    depth, index = 0, start
    while index < len(text):
        character = text[index]
        if character in "\"'":
            quote = text[index : index + 3] if text[index : index + 3] in ('"""', "'''") else character
            index = text.index(quote, index + len(quote))
            while text[index - 1] == "\\":
                index = text.index(quote, index + 1)
            index += len(quote)
            continue
        if character == "#":
            index = text.index("\n", index)
        depth += character in "([{"
        depth -= character in ")]}"
        index += 1
        if depth == 0:
            break
    return text[start:index]
