# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What somebody may have meant: spelling, and values of a wrong kind."""

from __future__ import annotations

import difflib
import typing as t

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from ..module_utils.decide.conditions import shown


def nearest(word: str, valid: t.Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the valid word most like this one, or nothing."""
    close = difflib.get_close_matches(word[:100], list(valid), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def unknown_keys(where: str, given: t.Iterable[str], valid: t.Iterable[str], kind: str) -> list[str]:
    """One sentence for each key that is not valid."""
    known = list(valid)
    return [
        f"{where}: unknown {kind} '{key}'{nearest(key, known) or '; valid are ' + ', '.join(sorted(known))}"
        for key in given
        if key not in known
    ]


def said(value: t.Any) -> str:
    """A value in a sentence: a text as it is, all else short."""
    return value if isinstance(value, str) else shown(value)


_KINDS = {"dict": "a mapping", "list": "a list", "str": "a text", "int": "a whole number", "float": "a number"}


def spec_problems(options: t.Mapping[str, t.Any], values: t.Mapping[str, t.Any]) -> list[str]:
    """What Ansible's validation says. It refuses most values of a wrong kind, and stumbles over some: a mapping with
    options of its own that is but `true`, a number without end. Those are told in our words.
    """
    strange = [key for key in values if key in options and not _bears(options[key], values[key])]
    problems = []
    for key in strange:
        kind = options[key].get("type", "str")
        problems.append(f"{key} is {shown(values[key])}, but must be {_KINDS.get(kind, kind)}")
    rest = {key: option for key, option in options.items() if key not in strange}
    fine = {key: value for key, value in values.items() if key not in strange}
    return problems + list(ArgumentSpecValidator(rest).validate(fine).error_messages)


def _bears(option: t.Mapping[str, t.Any], value: t.Any) -> bool:
    """Whether Ansible's validation comes back with this value."""
    alone = {name: each for name, each in option.items() if name not in ("aliases", "removed_in_version")}
    try:
        ArgumentSpecValidator({"it": alone}).validate({"it": value})
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return False
    return True
