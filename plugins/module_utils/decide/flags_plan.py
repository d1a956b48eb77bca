# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wanted flags against the SGLang that is installed: would its argument parser take them, and would they mean that?

Everything is judged by the words that a launch would really hand to SGLang (`flags.render`, then SGLang's own
`--config` rules), so a flag passes here exactly if argparse takes it. Without a table of options nothing is guessed.
"""

from __future__ import annotations

import difflib
import json
import typing as t

from ..errors import CleanSlateError
from ..plan_model import Finding
from ..sglang import flags as flag_tools
from ..sglang.install import version_tuple
from ..sglang.option_table import Option, OptionTable
from ..sglang.redact import is_secret_flag
from ..sglang.retired import RETIRED, RETIRED_CHOICES, Retired
from ..sglang.rules import Rule, broken
from . import argv

_SOURCE = "argument parser of the installed SGLang"
_OURS = "launch by configuration file"
_NEAREST = 3


def judge_flags(
    flags: t.Mapping[str, t.Any],
    table: t.Optional[OptionTable],
    version: t.Optional[str],
    rules: t.Sequence[Rule] = (),
    required: bool = True,
) -> tuple[list[Finding], dict[str, t.Any]]:
    """Findings, and the flags under their canonical names (underscores), with values as SGLang converts them.

    ``rules``: what the installed version's own checks refuse (`sglang.rules.read_rules`). ``required``: whether
    options that argparse demands are missed.
    """
    findings: list[Finding] = []
    checked = _checked(flags, findings)
    if table is None:
        findings.append(
            Finding(
                "flags-unread",
                "unknown",
                "flags",
                "the options of the installed SGLang can't be read from its sources: names, values and conflicts of "
                "flags are not judged",
                "Name the interpreter that runs SGLang; check that its package is readable",
                _SOURCE,
            )
        )
        return findings, _plain(checked)
    judged = _Judged(table, version, findings)
    for name, (key, value) in checked.items():
        judged.flag(name, key, value)
    if required:
        judged.required()
    for rule, sure in broken(rules, judged.values, table):
        findings.append(_rule_finding(rule, sure))
    return findings, judged.canonical


def words_of(flags: t.Mapping[str, t.Any], table: t.Optional[OptionTable]) -> list[str]:
    """The words that argparse gets of a launch: SGLang's reading of the `--config` file, then the command line."""
    rendered = flag_tools.render(flags, table)
    words: list[str] = []
    for name in sorted(rendered.config):
        words += _config_words(name, rendered.config[name], table)
    return [*words, *rendered.argv]


def _config_words(name: str, value: t.Any, table: t.Optional[OptionTable]) -> list[str]:
    """As SGLang's ConfigArgumentMerger turns an entry into words."""
    option = table.get(name) if table is not None else None
    if isinstance(value, bool):
        if option is not None and option.values == "none" and name in option.names:
            return [f"--{name}"] if value else []
        return [f"--{name}", str(value).lower()]
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *map(str, value)] if value else []
    return [f"--{name}", json.dumps(value) if isinstance(value, t.Mapping) else str(value)]


def _checked(flags: t.Mapping[str, t.Any], findings: list[Finding]) -> dict[str, tuple[str, t.Any]]:
    """Normal name -> (key as written, value) of what can be written at all; the rest becomes findings."""
    result: dict[str, tuple[str, t.Any]] = {}
    for key, value in flags.items():
        name = flag_tools.normalise(str(key))
        if name.partition("=")[0] == "config":
            findings.append(_config_finding(str(key)))
            continue
        if is_secret_flag(name):
            findings.append(
                Finding(
                    "flags-secret",
                    "deny",
                    name,
                    f"{name} is a secret: as a flag it would stand in the inventory, in logs and on the command line",
                    "Give it by the variable of that name, from a vault; it then only stands in a file of mode 0600",
                    _OURS,
                )
            )
            continue
        try:
            flag_tools.check({key: value})
        except CleanSlateError as error:
            findings.append(Finding("flags-value", "deny", name, str(error), "", _OURS))
            continue
        if name in result:
            findings.append(_twice(result[name][0], str(key)))
            continue
        result[name] = (str(key), value)
    return result


def _config_finding(key: str) -> Finding:
    return Finding(
        "flags-config",
        "deny",
        "config",
        f"{key!r}: the flags become SGLang's configuration file themselves; SGLang takes --config=FILE in one word and "
        "abbreviations of it without a word, and ignores the file",
        "Put the settings of that file into the flags",
        _OURS,
    )


def _twice(one: str, other: str) -> Finding:
    return Finding("flags-twice", "deny", one, f"{one!r} and {other!r} name the same option", "Keep one of them", _OURS)


def _plain(checked: t.Mapping[str, tuple[str, t.Any]]) -> dict[str, t.Any]:
    """Canonical names by our own list of aliases alone, values as they were given."""
    return {
        flag_tools.canonical(name).replace("-", "_"): value
        for name, (_key, value) in checked.items()
        if value is not False and value not in ([], ())
    }


class _Judged:
    """The flags that could be resolved so far. ``values`` by SGLang's own field names."""

    def __init__(self, table: OptionTable, version: t.Optional[str], findings: list[Finding]) -> None:
        self.table = table
        self.version = version
        self.findings = findings
        self.values: dict[str, t.Any] = {}
        self.canonical: dict[str, t.Any] = {}
        self._used: dict[tuple[str, ...], str] = {}
        self._dests: dict[str, str] = {}

    def add(self, identity: str, severity: str, name: str, message: str, remedy: str = "") -> None:
        self.findings.append(Finding(identity, severity, name, message, remedy, _SOURCE))

    def flag(self, name: str, key: str, value: t.Any) -> None:
        names = argv.candidates(name, self.table)
        retired = self._retired(name) if name not in self.table.names else None
        if len(names) != 1:
            self._no_option(name, names, retired, "warn" if value is False or value in ([], ()) else "deny")
            return
        option = argv.option_of(names[0], self.table)
        if option is argv.HELP:
            self.add("flags-help", "deny", name, "--help makes SGLang print a text and end", "Leave it away")
            return
        if "config" in option.names:
            self.findings.append(_config_finding(key))
            return
        if any(is_secret_flag(each) for each in option.names):
            self.add("flags-secret", "deny", name, f"{name} is short for {names[0]}, which is a secret")
            return
        if option.names in self._used:
            self.findings.append(_twice(self._used[option.names], key))
            return
        self._used[option.names] = key
        if names[0] != name:
            self._abbreviated(name, names[0], retired)
        self._value(names[0], option, value)

    def required(self) -> None:
        for option in self.table.options:
            if option.required and option.names not in self._used:
                name = option.names[0]
                self.add("flags-required", "deny", name, f"--{name} is not given, and SGLang demands it")

    def _retired(self, name: str) -> t.Optional[Retired]:
        entry = RETIRED.get(name)
        installed = version_tuple(self.version)
        removed = version_tuple(entry.removed) if entry is not None else None
        if installed is not None and removed is not None and installed < removed:
            return None
        return entry

    def _no_option(self, name: str, names: tuple[str, ...], retired: t.Optional[Retired], severity: str) -> None:
        """A name that is no option. One that is false or an empty list never reaches SGLang: a warning then."""
        if retired is not None:
            could = f"; argparse calls it ambiguous ({_dashed(names)})" if names else ""
            message = f"--{name} was removed in SGLang {retired.removed}{could}"
            self.add("flags-removed", severity, name, message, _instead(retired))
        elif names:
            message = f"--{name} is no option, and as an abbreviation it could be {_dashed(names)}"
            self.add("flags-ambiguous", severity, name, message, "Write the option's full name")
        else:
            near = difflib.get_close_matches(name, sorted(self.table.names), _NEAREST, 0.7)
            message = f"--{name} is no option of SGLang {self.version or '(version not known)'}"
            nearest = f"Nearest: {_dashed(tuple(near))}" if near else "No option has a similar name"
            self.add("flags-unknown", severity, name, message, nearest)

    def _abbreviated(self, name: str, full: str, retired: t.Optional[Retired]) -> None:
        if retired is not None:
            self.add(
                "flags-removed",
                "warn",
                name,
                f"--{name} was removed in SGLang {retired.removed}; argparse now takes it for --{full}",
                _instead(retired),
            )
        elif name not in flag_tools.ALIASES:
            self.add(
                "flags-abbreviated",
                "note",
                name,
                f"--{name} is no option; argparse takes it for --{full}",
                f"Write {full}: another version may have a second option that begins so",
            )

    def _value(self, name: str, option: Option, value: t.Any) -> None:
        words = words_of({name: value}, self.table)
        parsed = argv.parse(words, self.table, required=False)
        for problem in parsed.problems:
            self._problem(name, option, value, problem)
        for unjudged in dict.fromkeys(each.names for each in parsed.unjudged):
            self.add(
                "flags-unjudged", "unknown", unjudged[0], f"--{name}: SGLang's sources don't tell which values it takes"
            )
        if parsed.problems or not words:
            return
        if option.deprecated:
            instead = f"Use {option.successor}" if option.successor else ""
            self.add("flags-deprecated", "warn", name, f"--{name} is deprecated in this version", instead)
        if isinstance(value, bool) and len(words) > 1 and option.type in ("str", "nullable_str"):
            self.add(
                "flags-shape", "warn", name, f"--{name} takes a value; SGLang gets the text {str(value).lower()!r}"
            )
        for dest, found in parsed.values.items():
            self._store(name, option, dest, found)

    def _store(self, name: str, option: Option, dest: str, value: t.Any) -> None:
        if dest in self._dests:
            self.add(
                "flags-overlap",
                "warn",
                name,
                f"--{self._dests[dest]} and --{name} set the same field {dest}; the last one counts",
                "Keep one of them",
            )
        self._dests[dest] = name
        self.values[dest] = value
        own = option.names[0].replace("-", "_")
        full = flag_tools.canonical(option.names[0] if option.toggle else name, self.table).replace("-", "_")
        # A renamed option counts under its successor's name; else one name in all versions.
        self.canonical[dest if option.deprecated and dest != own else full] = value

    def _problem(self, name: str, option: Option, value: t.Any, problem: argv.Problem) -> None:
        identity, remedy = f"flags-{problem.kind}", ""
        message = problem.message
        if problem.kind in ("extra", "missing", "unknown", "ambiguous"):
            identity, message, remedy = "flags-shape", *_shape(name, option, value, problem)
        elif problem.kind == "choice":
            removed = RETIRED_CHOICES.get((option.names[0], str(value)))
            near = difflib.get_close_matches(str(value), [str(each) for each in option.choices or ()], 1, 0.6)
            if removed is not None and (version_tuple(self.version) or ()) >= (version_tuple(removed[0]) or ()):
                message = f"--{name}: {value!r} was removed in SGLang {removed[0]}; there are {_listed(option)}"
                remedy = f"Use {removed[1]}" if removed[1] else ""
            elif near:
                remedy = f"Did you mean {near[0]}?"
        elif problem.kind == "refused":
            identity = "flags-removed"
        shown = (identity, name, message)
        if all((each.id, each.subject, each.message) != shown for each in self.findings):
            self.add(identity, "deny", name, message, remedy)


def _shape(name: str, option: Option, value: t.Any, problem: argv.Problem) -> tuple[str, str]:
    """A value of the wrong shape, in terms of the inventory rather than of words."""
    if problem.kind == "ambiguous" or (problem.kind == "unknown" and problem.word.startswith("-")):
        return (
            f"--{name}: the value {problem.word!r} begins with a dash, and argparse takes it for an option",
            "SGLang can't be given this value",
        )
    if option.values == "none":
        return f"--{name} is a bare flag and takes no value, not {value!r}", "Write true or false"
    if isinstance(value, (list, tuple)) and option.values in ("one", "optional"):
        return f"--{name} takes one value, not a list of {len(value)}", "Write one value"
    return problem.message, ""


def _dashed(names: tuple[str, ...]) -> str:
    shown = ", ".join(f"--{name}" for name in names[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown


def _listed(option: Option) -> str:
    return ", ".join(map(str, option.choices or ()))


def _instead(retired: Retired) -> str:
    return f"Use {retired.use}" if retired.use else "It has no successor; leave it away"


def _rule_finding(rule: Rule, sure: bool) -> Finding:
    names = ", ".join(dest.replace("_", "-") for dest in rule.dests)
    unless = "" if sure else " (unless it changes one of them itself before that check)"
    return Finding(
        "flags-conflict",
        "deny" if sure else "warn",
        rule.dests[0].replace("_", "-"),
        f"SGLang refuses this combination of {names}{unless}: {rule.message}",
        "Change one of them",
        f"{rule.place} of the installed SGLang",
        waivable=True,
    )
