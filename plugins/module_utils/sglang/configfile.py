# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads a `--config` file of SGLang: by PyYAML where it is installed, else the plain subset that people and we
write."""

from __future__ import annotations

import json
import re
import typing as t

_LINE = re.compile(r"""^(?P<key>[A-Za-z][\w-]*|"[^"\\]+"|'[^'\\]+')\s*:(?:\s+(?P<value>\S.*))?$""")
_ITEM = re.compile(r"^\s*-\s+(?P<value>\S.*)$")
_COMMENT = re.compile(r"(?<!\s)\s+#.*$")  # bound to the first blank: else a row of them is read from each
_WIDE = re.compile(r"(?<!\\)((?:\\\\)*)\\U([0-9a-fA-F]{8})")
_INTEGER = re.compile(r"^[-+]?\d{1,300}$")
_FLOAT = re.compile(r"^[-+]?(?:\d+\.\d*|\.\d+)(?:[eE][-+]\d+)?$")
_DEEPEST = 32
_LONGEST_INTEGER_BITS = 1024


class NotUnderstood(ValueError):
    """The text is more than the subset that is read here."""


def read_config(text: str) -> t.Optional[dict[str, t.Any]]:
    """The mapping in the file; None when it can't be understood (then what it sets is unknown, not nothing)."""
    try:
        yaml = _pyyaml()
        data = read_subset(text) if yaml is None else _read_yaml(yaml, text)
        _check_size(data)
    except Exception:
        # Foreign text can make a YAML parser fail in any way (IndexError for an empty !!int, RecursionError for a
        # thousand brackets): then what it sets is unknown, and the caller says so.
        return None
    if data is None:
        return {}
    return {str(key): value for key, value in data.items()} if isinstance(data, dict) else None


def _pyyaml() -> t.Any:
    """PyYAML, or None where it is not installed. Loaded with the first file to be read: it is 20 ms of CPU time."""
    try:
        import yaml
    except ImportError:
        return None
    return yaml


def _read_yaml(yaml: t.Any, text: str) -> t.Any:
    """Without aliases: a file of 330 bytes can stand for 10^9 values, or hold itself, and whoever looks at its values
    then never comes to an end. (A merge key is as bad already while it is read.)"""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
        raise NotUnderstood("an alias")
    return yaml.safe_load(text)


def _check_size(value: t.Any, depth: int = 0) -> None:
    """Nothing that can't be written as text or compared: too deep for recursion, or an integer that Python refuses to
    write."""
    if depth > _DEEPEST:
        raise NotUnderstood("too deep")
    if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER_BITS:
        raise NotUnderstood("an integer of too many digits")
    if isinstance(value, (dict, list, tuple, set)):
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_size(each, depth + 1)


def read_subset(text: str) -> dict[str, t.Any]:
    """`key: <JSON or plain scalar>` a line, and lists of `- item` lines below a key. Raises NotUnderstood for the
    rest."""
    result: dict[str, t.Any] = {}
    open_key: t.Optional[str] = None
    for line in map(str.rstrip, text.splitlines()):
        if not line.strip() or line.lstrip().startswith("#") or line.strip() == "---":
            continue
        item = _ITEM.match(line)
        if item is not None and open_key is not None:
            if result[open_key] is None:
                result[open_key] = []
            result[open_key].append(_scalar(item.group("value")))
            continue
        match = _LINE.match(line)
        if match is None:
            match = _LINE.match(_COMMENT.sub("", line))
        if match is None:
            raise NotUnderstood(line)
        key = match.group("key").strip("\"'")
        value = match.group("value")
        empty = value is None or value.startswith("#")
        open_key = key if empty else None
        result[key] = None if value is None or empty else _scalar(value)
    return result


def _scalar(text: str) -> t.Any:
    if text[0] in '"{[':
        for candidate in (text, _COMMENT.sub("", text)):
            try:
                # The backslash pair before \U is kept; json knows no \U, so it becomes the character itself.
                return json.loads(_WIDE.sub(lambda m: m.group(1) + chr(int(m.group(2), 16)), candidate))
            except (ValueError, OverflowError, RecursionError):
                continue
        raise NotUnderstood(text)
    plain = _COMMENT.sub("", text)
    if plain.startswith("'"):
        if len(plain) < 2 or not plain.endswith("'") or "'" in plain[1:-1].replace("''", ""):
            raise NotUnderstood(text)
        return plain[1:-1].replace("''", "'")
    if plain[0] in "&*!|>%@`,}]?" or ": " in plain or plain.startswith("- "):
        raise NotUnderstood(text)
    lowered = plain.lower()
    if lowered in ("true", "yes", "on", "false", "no", "off"):
        return lowered in ("true", "yes", "on")
    if lowered in ("null", "~"):
        return None
    if _INTEGER.match(plain):
        return int(plain)
    if plain.lstrip("-+").isdecimal():
        raise NotUnderstood("an integer of too many digits")
    return float(plain) if _FLOAT.match(plain) else plain
