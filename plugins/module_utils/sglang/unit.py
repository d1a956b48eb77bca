# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The text of the systemd unit that runs a server.

SIGTERM goes to the leader only (KillMode=mixed: a SIGTERM to the whole group makes SGLang think that it crashed),
nothing restarts unless
chosen, pinned memory is not limited, temporary files go away with the unit, and no secret is in it. The unit is written
anew for each launch, since it names that launch's configuration file; it is not enabled at boot unless chosen.
"""

from __future__ import annotations

import re
import typing as t
from dataclasses import dataclass, field

from ..errors import CleanSlateError

Value = t.Union[str, int, float, bool, t.Sequence[t.Union[str, int]]]

_UNIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9:_.@-]{0,199}\.service")  # no "-" first: that would be an option
_SECTION = re.compile(r"[A-Z][A-Za-z]*")
_KEY = re.compile(r"[A-Z][A-Za-z0-9]*")
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@+-]+")
_OWNED = {"Service": ("ExecStart", "User", "Group", "EnvironmentFile", "Type")}
MARK = "# Written by cleanslate.sglang.server_launch at each launch; changes belong into unit_overrides."


@dataclass(frozen=True)
class UnitPlan:
    """What the unit says. Times in seconds. ``log``: "journal" or the path of a file."""

    server: str
    argv: t.Sequence[str]
    user: str
    group: str
    environment_file: str
    working_directory: str = "/"
    stop_timeout_s: int = 60
    restart: str = "no"
    restart_delay_s: int = 15
    start_limit_interval_s: int = 1800
    start_limit_burst: int = 3
    limit_memlock: str = "infinity"
    limit_nofile: int = 1048576
    log: str = "journal"
    wanted_by: t.Optional[str] = None
    exec_start_pre: t.Sequence[t.Sequence[str]] = ()
    overrides: t.Mapping[str, t.Mapping[str, t.Any]] = field(default_factory=dict)


def check_unit_name(name: str) -> str:
    """A unit's file name, safe as such. Raises CleanSlateError."""
    if not _UNIT_NAME.fullmatch(name):
        raise CleanSlateError(f"unit: {name!r} is no name of a service; write it like 'sglang-main.service'")
    return name


def unit_text(plan: UnitPlan) -> str:
    """The unit file. Raises CleanSlateError for a value that would break out of its line."""
    sections = _sections(plan)
    for section, values in plan.overrides.items():
        if not _SECTION.fullmatch(str(section)):
            raise CleanSlateError(f"unit_overrides: {section!r} is no section of a unit")
        if not isinstance(values, t.Mapping):
            raise CleanSlateError(f"unit_overrides: {section} must be a mapping of settings")
        target = sections.setdefault(str(section), {})
        for key, value in values.items():
            if not _KEY.fullmatch(str(key)):
                raise CleanSlateError(f"unit_overrides: {section}.{key} is no name of a setting")
            if key in _OWNED.get(str(section), ()):
                raise CleanSlateError(
                    f"unit_overrides: {section}.{key} is set by its own option and can't be overridden"
                )
            target[str(key)] = value
    lines = [MARK]
    for section, values in sections.items():
        lines += ["", f"[{section}]"]
        for key, value in values.items():
            lines += [f"{key}={_one_line(f'{section}.{key}', item)}" for item in _items(value)]
    return "\n".join(lines) + "\n"


def _sections(plan: UnitPlan) -> dict[str, dict[str, t.Any]]:
    runtime = f"sglang-{plan.server}"
    log = "journal" if plan.log == "journal" else f"append:{escape(plan.log)}"
    unit: dict[str, t.Any] = {
        "Description": f"SGLang server {escape(plan.server)}",
        "Wants": "network-online.target",
        "After": "network-online.target",
    }
    service: dict[str, t.Any] = {
        "Type": "exec",
        "User": plan.user,
        "Group": plan.group,
        "WorkingDirectory": escape(plan.working_directory),
        "EnvironmentFile": escape(plan.environment_file),
        "RuntimeDirectory": escape(runtime),
        "RuntimeDirectoryMode": "0700",
        "Environment": f"TMPDIR=%t/{escape(runtime)}",
    }
    if plan.exec_start_pre:
        service["ExecStartPre"] = [f"+{command_line(argv)}" for argv in plan.exec_start_pre]
    service.update(
        {
            "ExecStart": command_line(plan.argv),
            "KillMode": "mixed",
            "KillSignal": "SIGTERM",
            "TimeoutStopSec": plan.stop_timeout_s,
            "Restart": plan.restart,
            "LimitMEMLOCK": plan.limit_memlock,
            "LimitNOFILE": plan.limit_nofile,
            "UMask": "0027",
            "StandardInput": "null",
            "StandardOutput": log,
            "StandardError": log,
        }
    )
    if plan.restart != "no":
        service["RestartSec"] = plan.restart_delay_s
        unit["StartLimitIntervalSec"] = plan.start_limit_interval_s
        unit["StartLimitBurst"] = plan.start_limit_burst
    sections = {"Unit": unit, "Service": service}
    if plan.wanted_by is not None:
        sections["Install"] = {"WantedBy": plan.wanted_by}
    return sections


def _items(value: t.Any) -> t.Sequence[t.Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _one_line(where: str, value: t.Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (str, int, float)):
        raise CleanSlateError(f"unit: {where} must be text, a number, a boolean or a list of these")
    text = str(value)
    if any(ord(character) < 0x20 and character != "\t" or ord(character) == 0x7F for character in text):
        raise CleanSlateError(f"unit: {where} holds a line break or another control character: {text!r}")
    if text.endswith("\\"):
        raise CleanSlateError(f"unit: {where} ends with a backslash, which would join the next line to it")
    return text


def escape(text: str) -> str:
    """Text in which systemd shall expand nothing: % is a specifier."""
    return text.replace("%", "%%")


def command_line(argv: t.Sequence[str]) -> str:
    """Words of a command as systemd splits them: quoted where needed, with $ and % taken literally."""
    return " ".join(_word(word) for word in argv)


def _word(word: str) -> str:
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in word):
        raise CleanSlateError(f"unit: a word of the command holds a control character: {word!r}")
    if _PLAIN.fullmatch(word):
        return word
    quoted = word.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escape(quoted).replace("$", "$$") + '"'


def environment_text(environment: t.Mapping[str, str]) -> str:
    """Lines of an EnvironmentFile. systemd strips quotes and reads backslashes in double quotes: both are escaped."""
    lines = []
    for name in sorted(environment):
        value = environment[name]
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise CleanSlateError(f"environment: {name!r} is no name of a variable")
        if "\n" in value or "\r" in value or "\0" in value:
            raise CleanSlateError(f"environment: {name} holds a line break; it can't be handed to a server")
        escaped = "".join("\\" + character if character in '"\\`$' else character for character in value)
        lines.append(f'{name}="{escaped}"\n')
    return "".join(lines)
