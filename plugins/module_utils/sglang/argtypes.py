# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What argparse makes of one word, by the kind of an option's type: Python's own conversions and SGLang's functions.

SGLang's functions are recognised by the text of their source (`KNOWN_FUNCTIONS`): one that was changed is not known,
and then its values are not judged.
"""

from __future__ import annotations

import json
import re
import typing as t
from decimal import Decimal

BUILTIN_TYPES = ("str", "int", "float")
KNOWN_FUNCTIONS: t.Mapping[str, str] = {
    "c96e43d5bea7b9ff": "size",  # human_readable_int
    "9151c912374b02f8": "nullable_str",
    "5cd44f1ff402b372": "json_strict",  # json_list_type: any JSON, by orjson
    "79296a873e032ffc": "cuda_graph_config",  # parse_cuda_graph_config_arg, 0.5.14 to 0.5.21
    "51d2a9cf11405406": "cuda_graph_config_2",  # since 0.5.22 it refuses a removed backend
    "868f8ebaef93c009": "cuda_graph_backend",  # parse_cuda_graph_backend_arg
    "f3b563749bc38339": "lora_path",  # LoRAPathAction
}
"""Fingerprint of a function's text (`Module.fingerprint`) -> kind of type. Of SGLang 0.5.10 to 0.5.23."""

_SI = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_IEC = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)")
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "size": "a whole number, or one with k, M, G, T (1000) or Ki, Mi, Gi, Ti (1024; no decimals)",
    "json": "JSON",
    "json_strict": "JSON",
    "cuda_graph_config": "a JSON object: phase -> settings",
    "cuda_graph_config_2": "a JSON object: phase -> settings",
    "cuda_graph_backend": "a backend that this version has",
    "lora_path": "a path, NAME=PATH, or JSON with lora_name and lora_path",
}


class NotThisType(ValueError):
    """The word can't be converted; the message says what is wanted."""


def expected(kind: str) -> str:
    """What a kind of type wants, for people."""
    return _EXPECTED.get(kind, "text")


def convert(kind: str, word: str, detail: t.Optional[t.Mapping[str, t.Sequence[str]]] = None) -> t.Any:
    """The value of a word; raises NotThisType. ``detail``: of cuda_graph_config, the keys that each phase takes."""
    try:
        return _convert(kind, word, detail)
    except NotThisType:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise NotThisType(f"{word!r} is not {expected(kind)}") from error


def _convert(kind: str, word: str, detail: t.Optional[t.Mapping[str, t.Sequence[str]]]) -> t.Any:
    if kind == "int":
        return int(word)
    if kind == "float":
        return float(word)
    if kind == "size":
        return _size(word)
    if kind == "nullable_str":
        return None if not word or word == "None" else word
    if kind == "json":
        return json.loads(word)
    if kind == "json_strict":
        return _strict_json(word)
    if kind in ("cuda_graph_config", "cuda_graph_config_2"):
        return _cuda_graph_config(word, detail or {}, kind)
    if kind == "cuda_graph_backend":
        return _cuda_graph_backend(word)
    if kind == "lora_path":
        return _lora_path(word)
    return word


def _size(word: str) -> int:
    text = word.strip()
    match = _SIZE.fullmatch(text)
    if match is None:
        return int(text)
    number, suffix = match.groups()
    if suffix in _SI:
        return int(Decimal(number) * _SI[suffix])
    if "." in number:
        raise NotThisType(f"{word!r} is not {expected('size')}")
    return int(number) * _IEC[suffix]


def _strict_json(word: str) -> t.Any:
    """As orjson reads it: no NaN and Infinity, no lone surrogates."""

    def refuse(name: str) -> t.Any:
        raise ValueError(name)

    value = json.loads(word, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _cuda_graph_backend(value: t.Any) -> t.Any:
    if value == "tc_piecewise":
        raise NotThisType("'tc_piecewise' was removed; take breakable, full or disabled")
    return value


def _cuda_graph_config(word: str, detail: t.Mapping[str, t.Sequence[str]], kind: str) -> t.Any:
    parsed = json.loads(word)
    if not isinstance(parsed, dict):
        raise NotThisType(f"{word!r} is not a JSON object")
    for phase, settings in parsed.items():
        if phase not in detail:
            raise NotThisType(f"unknown phase {phase!r}; there are {', '.join(sorted(detail))}")
        if not isinstance(settings, dict):
            raise NotThisType(f"the settings of phase {phase!r} are not a JSON object")
        if kind == "cuda_graph_config_2":
            _cuda_graph_backend(settings.get("backend"))
        unknown = sorted(set(settings) - set(detail[phase]))
        if unknown:
            raise NotThisType(f"phase {phase!r} has no setting {unknown[0]!r}; it has {', '.join(detail[phase])}")
    return parsed


def _lora_path(word: str) -> t.Any:
    text = word.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return text
    value = json.loads(text)
    if "lora_path" not in value or "lora_name" not in value:
        raise NotThisType("a JSON that names a LoRA adapter needs lora_name and lora_path")
    return value
