# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a server runs with the flags that were wanted: as it was started, and as SGLang resolved them. Pure."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from . import flags as flag_tools
from .cmdline import LaunchedFlags
from .option_table import NOT_KNOWN, Option, OptionTable
from .redact import MASK, Redactor, is_secret_name
from .rewritten import AUTO, REWRITTEN

_BY_OPTIONS = ("host", "port")
_PLAIN_ACTIONS = (None, "store", "store_true", "store_false", "toggle")
_MISSING = object()


@dataclass(frozen=True)
class RunningFlags:
    """How the leader was started, by its command line and its configuration file. ``launched`` None: not readable, and
    ``problem`` says why. ``options``: those of the installed SGLang."""

    launched: t.Optional[LaunchedFlags]
    options: t.Optional[OptionTable] = None
    problem: t.Optional[str] = None


@dataclass(frozen=True)
class FlagDifference:
    """A flag that is not as wanted. ``seen``: launched (command line and configuration file) or resolved
    (/server_info). ``note``: why SGLang sets such a flag itself, where it is known to."""

    item: str
    wanted: t.Any
    found: t.Any
    seen: str
    note: t.Optional[str] = None


@dataclass(frozen=True)
class FlagsJudgement:
    """``matches`` None: not known (``problem`` says why; no failure). ``differences`` are failures; ``resolved`` are
    wanted flags that SGLang set to something else itself: reported, no failure. ``compared``: how many wanted flags
    were found in /server_info. ``notes``: what the command line itself does oddly."""

    matches: t.Optional[bool]
    differences: tuple[FlagDifference, ...] = ()
    resolved: tuple[FlagDifference, ...] = ()
    compared: int = 0
    problem: t.Optional[str] = None
    notes: tuple[str, ...] = ()


def judge_flags(
    wanted: t.Mapping[str, t.Any],
    running: t.Optional[RunningFlags],
    info: t.Optional[t.Mapping[str, t.Any]],
    info_problem: t.Optional[str] = None,
) -> FlagsJudgement:
    """``wanted``: the record's flags (secrets masked). ``info``: the answer of /server_info; None: not asked, or no
    answer (``info_problem``). No secret is in the result."""
    options = None if running is None else running.options
    plain = {name: value for name, value in wanted.items() if not _secret(str(name), value)}
    launched = None if running is None else running.launched
    problems = []
    if launched is None:
        problems.append((running.problem if running is not None else None) or "how it was started can't be read")
    elif not launched.complete:
        problems.append("; ".join(launched.problems) or "the configuration file can't be read")
    if info_problem is not None:
        problems.append(f"/server_info: {info_problem}")
    differing = () if launched is None else _launched(plain, launched, options)
    resolved, compared = ([], 0) if info is None else _resolved(plain, info, options)
    failures = (*differing, *(row for row in resolved if row.note is None))
    matches = False if failures else (None if launched is None or not launched.complete else True)
    return FlagsJudgement(
        matches,
        failures,
        tuple(row for row in resolved if row.note is not None),
        compared,
        "; ".join(problems) or None,
        () if launched is None or not launched.complete else launched.problems,
    )


def _secret(name: str, value: t.Any) -> bool:
    """A secret by its name, or a value that holds one: the record has it masked, so it can't be compared."""
    return is_secret_name(flag_tools.normalise(name)) or MASK in str(value)


def _launched(
    wanted: t.Mapping[str, t.Any], launched: LaunchedFlags, options: t.Optional[OptionTable]
) -> tuple[FlagDifference, ...]:
    """Flags that are given and not wanted are differences too, apart from host and port: a server may get those by
    options of its own. What an unreadable file may set is no difference."""
    names = {flag_tools.canonical(str(name), options) for name in wanted}
    found = {
        name: value
        for name, value in launched.flags.items()
        if not _secret(name, value) and (name in names or name not in _BY_OPTIONS)
    }
    rows = flag_tools.differences(wanted, found, options)
    return tuple(
        _shown(FlagDifference(row.item, row.wanted, row.found, "launched"))
        for row in rows
        if launched.complete or row.found is not None
    )


def _resolved(
    wanted: t.Mapping[str, t.Any], info: t.Mapping[str, t.Any], options: t.Optional[OptionTable]
) -> tuple[list[FlagDifference], int]:
    rows, compared = [], 0
    for name, value in sorted(flag_tools.effective(wanted, options).items()):
        option = None if options is None else options.get(name)
        field, expected = _field(name, value, option)
        found = info.get(field, _MISSING)
        if expected is _MISSING or found is _MISSING or is_secret_name(field):
            continue
        compared += 1
        if flag_tools.same_value(expected, found):
            continue
        note = AUTO if flag_tools.meaning(expected) == "auto" else REWRITTEN.get(field)
        if note is None and option is not None and option.action not in _PLAIN_ACTIONS:
            note = f"by the option's own action ({option.action})"
        # "yes, but yes" tells nobody anything: then what the flag was to make of that field is shown.
        shown = expected if flag_tools.same_value(value, found) else value
        rows.append(_shown(FlagDifference(name, shown, found, "resolved", note)))
    return rows, compared


def _field(name: str, value: t.Any, option: t.Optional[Option]) -> tuple[str, t.Any]:
    """(the field of /server_info, the value that it then holds or _MISSING where that isn't known)."""
    if option is None:
        return name.replace("-", "_"), value
    field = (option.dest or option.names[0]).replace("-", "_")
    if option.toggle:
        return field, not name.startswith("no-") if value is True else value
    if value is True and option.nargs is not None and option.action != "store_true":
        # Bare, and what it stores is no plain True.
        if option.action == "store_false":
            return field, False
        return field, _MISSING if option.const is NOT_KNOWN else option.const
    return field, value


def _shown(row: FlagDifference) -> FlagDifference:
    """Masked by its name and by what it holds."""
    redactor = Redactor()
    return FlagDifference(
        row.item, redactor.data(row.wanted, row.item), redactor.data(row.found, row.item), row.seen, row.note
    )
