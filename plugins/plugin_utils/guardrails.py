# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The guardrails of a run, on the controller: shipped rules, an inventory's own ones, and waivers.

Everything wrong comes back as one sentence that names rule, field, value and what is allowed; nothing raises. What a
module gets is plain data, which it reads again for itself (module_utils/decide/guardrails.py).
"""

from __future__ import annotations

import functools
import os
import stat
import typing as t
from pathlib import Path

import yaml

from ..module_utils.decide.conditions import named, nearest, shown
from ..module_utils.decide.guardrails import MAX_RULES, Rule, parse_rules
from ..module_utils.plan_model import WAIVABLE

Raw = dict[str, t.Any]

SHIPPED = Path(__file__).resolve().parents[2] / "roles" / "plan" / "files" / "guardrails.yml"
VARIABLE = "sglang_guardrails"
_MAX_BYTES = 1 << 20
_FEWEST_WORDS = 3
_LONGEST_REASON = 500


@functools.lru_cache(maxsize=1)
def _shipped_text() -> str:
    return SHIPPED.read_text(encoding="utf-8")


def shipped() -> list[Raw]:
    """The rules that come with the collection, as data."""
    return t.cast("list[Raw]", yaml.safe_load(_shipped_text()))


def all_rules(own: t.Any = None, bases: t.Sequence[str] = ()) -> tuple[list[Raw], list[str]]:
    """The shipped rules with an inventory's own ones, as a module takes them, and what is wrong with the latter.

    ``own``: the variable ``sglang_guardrails``, a list of rules and of paths of YAML files that hold lists of rules.
    Relative paths are looked for below each of ``bases``. A rule of the same id replaces a shipped one only if it says
    ``override: true``.
    """
    rules = shipped()
    if own is None:
        return rules, []
    if not isinstance(own, (list, tuple)):
        return rules, [f"{VARIABLE} is {shown(own)}; allowed is a list of rules and of paths of files with rules"]
    problems: list[str] = []
    for position, item in enumerate(own):
        where = f"{VARIABLE}[{position}]"
        if isinstance(item, str):
            found, wrong = _from_file(item, bases, where)
            where = f"{where} ({item[:200]})"
        elif isinstance(item, t.Mapping):
            found, wrong = [item], []
        else:
            found, wrong = [], [f"{where} is {shown(item)}; allowed are a rule and a path of a file with rules"]
        problems += wrong
        for raw in found:
            problems += _add(rules, raw, where)
    if len(rules) > MAX_RULES:
        problems.append(f"{VARIABLE}: there are {len(rules)} rules with the shipped ones; allowed are {MAX_RULES}")
    return rules, problems


def _add(rules: list[Raw], raw: t.Any, where: str) -> list[str]:
    """Puts one rule where it belongs: over the one of its id, or at the end."""
    override = raw.get("override", False) if isinstance(raw, t.Mapping) else False
    if isinstance(raw, t.Mapping):
        raw = {key: value for key, value in raw.items() if key != "override"}
    parsed, problems = parse_rules([raw], where)
    if not isinstance(override, bool):
        problems.append(f"{where}: override is {shown(override)}; allowed are true and false")
    if problems or not parsed:
        return problems
    name = parsed[0].id
    at = next((position for position, rule in enumerate(rules) if rule["id"] == name), None)
    if at is None and override:
        known = [rule["id"] for rule in rules]
        return [f"{where}: rule '{name}' says override, but there is no such rule{nearest(name, known)}"]
    if at is None:
        rules.append(dict(raw))
    elif override:
        rules[at] = dict(raw)
    else:
        return [f"{where}: rule '{name}' is there already; say 'override: true' in it, or give it another id"]
    return []


def _from_file(path: str, bases: t.Sequence[str], where: str) -> tuple[t.Sequence[t.Any], list[str]]:
    if "\0" in path or not path.strip():
        return [], [f"{where} is {shown(path)}; allowed is the path of a file"]
    places = [path] if os.path.isabs(path) else [os.path.join(base, path) for base in bases]
    for place in places:
        if os.path.lexists(place):
            return _read(place, f"{where}: {place}")
    looked = f" in {', '.join(bases)}" if bases and not os.path.isabs(path) else ""
    return [], [f"{where}: the file {path[:200]} is not there{looked}"]


def _read(place: str, where: str) -> tuple[t.Sequence[t.Any], list[str]]:
    try:
        # Not blocking: what lies there may be a pipe.
        descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return [], [f"{where} is no regular file"]
            with os.fdopen(descriptor, "rb", closefd=False) as stream:
                text = stream.read(_MAX_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(text) > _MAX_BYTES:
            return [], [f"{where} is larger than {_MAX_BYTES} bytes"]
        data = yaml.safe_load(text.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        return [], [f"{where} can't be read: {error}"]
    # A broken date or a nesting without an end is no YAMLError.
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        return [], [f"{where} is no YAML: {' '.join(str(error).split())[:300]}"]
    if not isinstance(data, list):
        return [], [f"{where} holds {shown(data)}; allowed is a list of rules"]
    return data, []


def waiver_problems(where: str, waivers: t.Any, rules: t.Sequence[Raw]) -> list[str]:
    """What is wrong with the waivers of a server, ``{id: written reason}``: of rules, and of what a plan computes.

    ``rules``: from `all_rules`.
    """
    if waivers is None:
        return []
    if not isinstance(waivers, t.Mapping):
        return [f"{where}: waivers is {shown(waivers)}; allowed is a mapping of a rule's id to the reason"]
    parsed: dict[str, Rule] = {rule.id: rule for rule in parse_rules(rules)[0]}
    problems: list[str] = []
    for key, reason in waivers.items():
        name = named(key)
        rule = parsed.get(name)
        if rule is None and name not in WAIVABLE:
            waivable = [*WAIVABLE, *(each.id for each in parsed.values() if each.waivable)]
            problems.append(f"{where}: waivers: there is no rule '{name}'{nearest(name, waivable)}")
        elif rule is not None and not rule.waivable:
            problems.append(
                f"{where}: waivers: rule '{name}' can't be waived ({rule.severity}): {rule.title or rule.reason}"
            )
        elif not isinstance(reason, str) or len(reason.split()) < _FEWEST_WORDS or len(reason) > _LONGEST_REASON:
            problems.append(
                f"{where}: waivers: the reason for '{name}' is {shown(reason)}; allowed is a text of at least "
                f"{_FEWEST_WORDS} words and at most {_LONGEST_REASON} characters: it is kept in the launch's record"
            )
    return problems
