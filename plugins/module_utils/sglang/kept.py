# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""request.json: what was asked of a launch, kept so that the same can be started again. Pure.

It holds no secret. What the server got lies word for word in config.yaml, env and unit of the same folder; here are the
settings around them, and fingerprints that show a later change of these files. A line that holds a secret counts in no
fingerprint by its value, only by its name: a hash of a short secret would tell it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing as t
from dataclasses import dataclass, field

from .redact import Redactor, is_secret_flag, is_secret_variable

REQUEST = "request.json"
UNIT = "unit"
_FORMAT = 1
_ENV_LINE = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\`$]|\\["\\`$])*)"')
_ESCAPE = re.compile(r'\\(["\\`$])')


@dataclass(frozen=True)
class KeptRequest:
    """Settings of a launch. ``gpus``: (index, UUID) in the server's order; None: all.

    ``argv``: the whole command line; ``argv_masked``: a part of it looked like a secret and is not kept.
    ``secret_environment``: variables that were given as secrets.
    ``secret_flags``, ``secret_variables``: names of lines in config.yaml and env that hold secrets.
    ``prints``: fingerprints of config.yaml, env and unit. ``version``: the SGLang that was there.
    """

    name: str
    launch_id: str
    python: str
    user: str
    group: str
    launcher: str
    unit: t.Optional[str] = None
    unit_dir: t.Optional[str] = None
    unit_overrides: t.Mapping[str, t.Any] = field(default_factory=dict)
    limit_memlock: str = "infinity"
    stop_timeout_s: int = 60
    restart: str = "no"
    start_check: tuple[str, ...] = ()
    enabled: bool = False
    log: t.Optional[str] = None
    workdir: t.Optional[str] = None
    flags: t.Mapping[str, t.Any] = field(default_factory=dict)
    environment: t.Mapping[str, t.Any] = field(default_factory=dict)
    gpus: t.Optional[tuple[tuple[int, t.Optional[str]], ...]] = None
    waivers: t.Mapping[str, t.Any] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    argv_masked: bool = False
    secret_environment: tuple[str, ...] = ()
    secret_flags: tuple[str, ...] = ()
    secret_variables: tuple[str, ...] = ()
    prints: t.Mapping[str, str] = field(default_factory=dict)
    version: t.Optional[str] = None


def request_text(request: KeptRequest) -> str:
    """The JSON that is written."""
    return json.dumps({"format": _FORMAT, **dataclasses.asdict(request)}, indent=1, sort_keys=True) + "\n"


def parse_request(text: str) -> KeptRequest:
    """From JSON; raises ValueError that says what is wrong. Keys that are not known are passed over."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("is no JSON object")
    if data.get("format") != _FORMAT:
        raise ValueError(f"has the format {data.get('format')!r}; this version reads {_FORMAT}")
    values = {name: _typed(data, name, kinds) for name, kinds in _KINDS.items()}
    for name in _LISTS:
        values[name] = _words(name, values[name])
    values["gpus"] = _gpus(values["gpus"])
    if not all(isinstance(one, str) for one in values["prints"].values()):
        raise ValueError("has prints that are no text")
    return KeptRequest(**values)


_LISTS = ("start_check", "argv", "secret_environment", "secret_flags", "secret_variables")
_TEXT, _MAYBE, _BOOL, _MAPPING, _LIST = (str,), (str, type(None)), (bool,), (dict,), (list,)
_KINDS: t.Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "launch_id", "python", "user", "group", "launcher", "limit_memlock", "restart"), _TEXT),
    **dict.fromkeys(("unit", "unit_dir", "log", "workdir", "version"), _MAYBE),
    **dict.fromkeys(("enabled", "argv_masked"), _BOOL),
    **dict.fromkeys(("unit_overrides", "flags", "environment", "waivers", "prints"), _MAPPING),
    **dict.fromkeys(_LISTS, _LIST),
    "stop_timeout_s": (int,),
    "gpus": (list, type(None)),
}


def _typed(data: t.Mapping[str, t.Any], name: str, kinds: tuple[type, ...]) -> t.Any:
    if name not in data:
        raise ValueError(f"lacks {name}")
    value = data[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"has {name} of type {type(value).__name__}")
    return value


def _words(name: str, values: t.Sequence[t.Any]) -> tuple[str, ...]:
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"has {name} with what is no text")
    return tuple(values)


def _gpus(rows: t.Optional[t.Sequence[t.Any]]) -> t.Optional[tuple[tuple[int, t.Optional[str]], ...]]:
    if rows is None:
        return None
    result = []
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or isinstance(row[0], bool) or not isinstance(row[0], int):
            raise ValueError("has gpus that are no pairs of index and UUID")
        if not isinstance(row[1], (str, type(None))):
            raise ValueError("has a GPU whose UUID is no text")
        result.append((row[0], row[1]))
    return tuple(result)


# --- the files around it ----------------------------------------------------------------------------------------------


def environment_of(text: str) -> dict[str, str]:
    """The variables in an env file of ours. Raises ValueError for a line that we do not write."""
    result: dict[str, str] = {}
    for number, line in enumerate(text.split("\n")[:-1] if text.endswith("\n") else text.split("\n"), 1):
        match = _ENV_LINE.fullmatch(line)
        if match is None and not line and number == 1:
            continue
        if match is None or match.group(1) in result:
            raise ValueError(f"its line {number} is not one that a launch writes")
        result[match.group(1)] = _ESCAPE.sub(r"\1", match.group(2))
    return result


def secret_lines(text: str, separator: str, given: t.Iterable[str], redactor: Redactor) -> tuple[str, ...]:
    """Names of the lines (``name`` + separator + value) whose value is a secret, or is masked when it is shown."""
    secrets = set(given)
    found = []
    for line in text.split("\n"):
        name = line.partition(separator)[0]
        named = is_secret_flag(name) if separator == ":" else is_secret_variable(name)
        if name in secrets or named or redactor.text(line) != line:
            found.append(name)
    return tuple(sorted(set(found)))


def print_of(text: str, separator: str = "", secret: t.Collection[str] = ()) -> str:
    """A fingerprint; lines of secrets count by their names alone."""
    lines = text.split("\n")
    if secret:
        lines = [name if (name := line.partition(separator)[0]) in secret else line for line in lines]
    return "sha256:" + hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
