# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Flags as data: a mapping of the inventory becomes SGLang's `--config` file and command line, and two mappings are
compared.

Names with `-` or `_` are the same. Values: text, integers, floats, booleans, lists, mappings. True is a bare flag,
false (and
an empty list) leaves the flag away. What SGLang refuses in a `--config` file (toggles, retired options with an action
of their
own: "Unsupported config option") goes onto the command line; none of those is a secret.
"""

from __future__ import annotations

import json
import math
import re
import typing as t
from dataclasses import dataclass
from decimal import Decimal

from ..errors import CleanSlateError
from .option_table import OptionTable
from .redact import SECRET_FLAGS, is_secret_flag

ALIASES: t.Mapping[str, str] = {
    "model": "model-path",
    "nccl-init-addr": "dist-init-addr",
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
    "pp": "pp-size",
    "pipeline-parallel-size": "pp-size",
    "ep": "ep-size",
    "expert-parallel-size": "ep-size",
    "attention-data-parallel-size": "attn-dp-size",
    "attention-context-parallel-size": "attn-cp-size",
    "moe-data-parallel-size": "moe-dp-size",
    "decode-context-parallel-size": "dcp-size",
    "speculative-draft-model": "speculative-draft-model-path",
    "enable-hicache": "enable-hierarchical-cache",
}
"""Other spellings of one option; which of them is the primary one differs between versions, so the name here is
ours."""

_FALSE = "false"
_PORT = re.compile("[0-9]{1,5}")
_DEEPEST = 32
_NAME = re.compile(r"^[a-z][a-z0-9-]*$")
_SI = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_NUMBER = re.compile(r"^([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?$")


@dataclass(frozen=True)
class Rendered:
    """``config`` goes into the `--config` file, ``argv`` behind it on the command line."""

    config: t.Mapping[str, t.Any]
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """One setting that isn't as wanted; None: not set."""

    item: str
    wanted: t.Any
    found: t.Any


def normalise(name: str) -> str:
    """`--Mem_Fraction_Static` -> `mem-fraction-static`; aliases are left as they are."""
    return name.strip().lstrip("-").replace("_", "-").lower()


def canonical(name: str, options: t.Optional[OptionTable] = None) -> str:
    """The one name under which an option is compared: abbreviations completed as argparse does, aliases followed."""
    plain = normalise(name)
    if plain in ALIASES:
        return ALIASES[plain]
    if options is not None:
        candidates = options.candidates(plain)
        if len({ALIASES.get(candidate, candidate) for candidate in candidates}) == 1:
            plain = candidates[0]
    return ALIASES.get(plain, plain)


def check(flags: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The mapping with normal names; raises where it can't become a configuration, before anything is written."""
    result: dict[str, t.Any] = {}
    first: dict[str, str] = {}
    for key, value in flags.items():
        name = normalise(str(key))
        if not _NAME.fullmatch(name):
            raise CleanSlateError(f"flags: {key!r} is no name of an option; write it like 'mem-fraction-static'")
        if name == "config":
            raise CleanSlateError(
                "flags: 'config' is not taken: the flags become SGLang's configuration file themselves. Put the "
                f"settings of {value!r} into flags (SGLang would even ignore `--config=FILE` without a word)"
            )
        if is_secret_flag(name):
            option = next((flag for flag in SECRET_FLAGS if flag.startswith(name)), name).replace("-", "_")
            raise CleanSlateError(
                f"flags: {name!r} is a secret and would be shown; give it by the option {option}, from a vault"
            )
        known = ALIASES.get(name, name)
        if known in first:
            raise CleanSlateError(f"flags: {first[known]!r} and {key!r} name the same option; keep one of them")
        first[known] = str(key)
        _check_value(name, value)
        result[name] = value
    return result


def _check_value(name: str, value: t.Any) -> None:
    if value is None:
        raise CleanSlateError(
            f"flags: {name!r} has no value; give one, or true for a bare flag, or leave the flag away"
        )
    if isinstance(value, str):
        if "\0" in value or any(0xD800 <= ord(character) <= 0xDFFF for character in value):
            raise CleanSlateError(f"flags: {name!r} has a character that no command line can hold")
    elif isinstance(value, float) and not math.isfinite(value):
        raise CleanSlateError(f"flags: {name!r} is {value}: not a number")
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_value(name, item)
            if isinstance(item, (list, tuple)):
                raise CleanSlateError(
                    f"flags: {name!r} is a list in a list; SGLang takes plain values or mappings there"
                )
    elif isinstance(value, t.Mapping):
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CleanSlateError(f"flags: {name!r} can't be written as JSON: {error}") from error
    elif not isinstance(value, (bool, int, float)):
        raise CleanSlateError(
            f"flags: {name!r} is a {type(value).__name__}; text, numbers, booleans, lists, mappings are taken"
        )


def render(flags: t.Mapping[str, t.Any], options: t.Optional[OptionTable] = None) -> Rendered:
    """Split into what the `--config` file takes and what must stand on the command line.

    With the installed version's options unknown, true and values go into the file, `no-x: true` onto the command line.
    """
    config: dict[str, t.Any] = {}
    argv: list[str] = []
    for name, value in check(flags).items():
        option = options.get(name) if options is not None else None
        if option is not None and options is not None:
            # SGLang looks at the keys of the file before argparse completes them: an abbreviated bare flag fails there.
            name = options.candidates(name)[0]
        if option is not None and option.toggle:
            if isinstance(value, bool):
                argv.append(f"--{name}" if value else _opposite(name))
                continue
        elif isinstance(value, bool) and (option is None or option.values == "none"):
            if not value:
                continue
            if name.startswith("no-") and (option is None or not option.in_config):
                argv.append(f"--{name}")
                continue
        if isinstance(value, (list, tuple)) and not value:
            continue
        if value is True and option is not None and option.values == "optional":
            # In the file it would become the text `true`; without a value it can stand on the command line alone.
            argv.append(f"--{name}")
            continue
        if option is None or option.in_config:
            config[name] = _config_value(value)
        else:
            argv.extend(_words(name, value))
    return Rendered(config, tuple(argv))


def _opposite(name: str) -> str:
    return f"--{name[3:]}" if name.startswith("no-") else f"--no-{name}"


def _config_value(value: t.Any) -> t.Any:
    """SGLang turns values and a list's items into words by str() (mappings by JSON since 0.5.14): JSON already here."""
    if isinstance(value, t.Mapping):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return [json.dumps(item) if isinstance(item, t.Mapping) else item for item in value]
    return value


def _words(name: str, value: t.Any) -> list[str]:
    if value is True:
        return [f"--{name}"]
    items = value if isinstance(value, (list, tuple)) else [value]
    return [f"--{name}", *(json.dumps(item) if isinstance(item, t.Mapping) else str(item) for item in items)]


def to_argv(flags: t.Mapping[str, t.Any]) -> list[str]:
    """All flags as words of a command line (for shows and plans; a launch uses `render`)."""
    words: list[str] = []
    for name, value in check(flags).items():
        if value is not False and value != []:
            words += _words(name, value)
    return words


def to_yaml(config: t.Mapping[str, t.Any]) -> str:
    """The text of a `--config` file: one `name: <JSON>` a line, which every YAML reader takes, in the order of the
    names."""
    return "".join(f"{name}: {_json(config[name])}\n" for name in sorted(config))


def _json(value: t.Any) -> str:
    """JSON in ASCII. Characters beyond the BMP are written as YAML's \\UXXXXXXXX: YAML doesn't join JSON's surrogate
    pairs."""
    if isinstance(value, str):
        return '"' + "".join(_escaped(character) for character in value) + '"'
    if isinstance(value, t.Mapping):
        return "{" + ", ".join(f"{_json(str(key))}: {_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_json(item) for item in value) + "]"
    return json.dumps(value, allow_nan=False)


def _escaped(character: str) -> str:
    code = ord(character)
    if character in '"\\':
        return "\\" + character
    if 0x20 <= code < 0x7F:
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def effective(flags: t.Mapping[str, t.Any], options: t.Optional[OptionTable] = None) -> dict[str, t.Any]:
    """What the mapping sets, under canonical names: false flags and empty lists dropped, secrets left out."""
    result: dict[str, t.Any] = {}
    for key, value in flags.items():
        name = canonical(str(key), options)
        option = options.get(name) if options is not None else None
        if option is not None and option.toggle and meaning(value) == _FALSE:
            name, value = _opposite(name)[2:], True
        if is_secret_flag(name) or meaning(value) == _FALSE or value in ([], ()) or value is None:
            continue
        result[name] = value
    return result


def differences(
    wanted: t.Mapping[str, t.Any], found: t.Mapping[str, t.Any], options: t.Optional[OptionTable] = None
) -> list[Difference]:
    """Flags that differ by meaning, in the order of their names. Secrets are never compared here."""
    left, right = effective(wanted, options), effective(found, options)
    return [
        Difference(name, left.get(name), right.get(name))
        for name in sorted({*left, *right})
        if name not in left or name not in right or not same_value(left[name], right[name])
    ]


def same_value(one: t.Any, other: t.Any) -> bool:
    """Whether SGLang would understand both alike: 0.9 and '0.90', 128000 and '128k', True and 'true', ['a'] and 'a'."""
    try:
        return bool(meaning(one) == meaning(other))
    except RecursionError:
        return False  # too deep to be compared: nobody can say that they are alike


def port_number(value: t.Any) -> t.Optional[int]:
    """A port as anybody wrote it; None for what is none. `isdigit` is not enough: it takes a superscript two, and a
    thousand digits, which no number can be made of."""
    text = "" if isinstance(value, bool) else str(value)
    return int(text) if _PORT.fullmatch(text) and 0 < int(text) < 65536 else None


def meaning(value: t.Any) -> t.Any:
    """A value in a form that can be compared. Suffixes as SGLang reads them: k is 1000, Ki is 1024.

    What is no sensible number or JSON (`1e9999999`, a thousand brackets) is compared as the text that it is: foreign
    command lines come here.
    """
    return _meaning(value, 0)


def _meaning(value: t.Any, depth: int) -> t.Any:
    if isinstance(value, bool):
        return "true" if value else "false"  # not bool: in Python True equals 1
    if isinstance(value, (int, float)):
        return _number(value)
    if depth > _DEEPEST:
        return value
    if isinstance(value, t.Mapping):
        return {str(key): _meaning(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_meaning(item, depth + 1) for item in value]
        return items[0] if len(items) == 1 else items
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower()
    number = _NUMBER.match(text)
    if number is not None:
        try:
            return Decimal(number.group(1)) * _SI.get(number.group(2) or "", 1)
        except ArithmeticError:
            return text
    if text[:1] in ("{", "["):
        try:
            return _meaning(json.loads(text), depth + 1)
        except (ValueError, RecursionError):
            return text
    return text


def _number(value: t.Union[int, float]) -> t.Any:
    try:
        return Decimal(str(value))
    except (ArithmeticError, ValueError):  # Python writes no integer of more than 4300 digits
        return hex(value) if isinstance(value, int) else str(value)
