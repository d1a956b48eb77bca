# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The schedule of the check for drift: its command, in the words of systemd and of cron, and why it would not run."""

from __future__ import annotations

import re
import shlex
import typing as t

from ..module_utils.sglang.unit import command_line
from .results import failure

RUNNER = "scripts/drift.py"
PREFIX = "drift_schedule_"
# What is given to the runner with a value, by the role's variable without its prefix.
_VALUES = {
    "vault_password_file": "--vault-password-file",
    "forks": "--forks",
    "out": "--out",
    "timeout_s": "--timeout",
    "metrics": "--metrics",
    "keep_days": "--keep-days",
    "keep_mb": "--keep-mb",
    "fresh_s": "--fresh-s",
    "notify": "--notify",
    "notify_when": "--notify-when",
}
# The unit gets so long beyond the runner's own deadline: a runner that was told to end still writes its reports.
GRACE_S = 180
STOP_S = 90
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}\Z")
_CRON = re.compile(r"(?:@(?:hourly|daily|midnight|weekly|monthly)|\S+(?:[ \t]+\S+){4})\Z")
Settings = t.Mapping[str, t.Any]


def command(settings: Settings) -> list[str]:
    """The command's words. ``settings``: the role's variables without their prefix, and ``host``, whom it is for."""
    words = [str(settings["python"]), f"{str(settings['collection']).rstrip('/')}/{RUNNER}"]
    for source in _listed(settings["inventory"]):
        words += ["-i", source]
    if settings.get("pull"):
        # A variable of the inventory outranks --connection; an extra variable outranks both.
        words += ["--limit", str(settings["host"]), "-e", "ansible_connection=local"]
    elif settings.get("limit"):
        words += ["--limit", str(settings["limit"])]
    if settings.get("target"):
        words += ["-e", f"target={settings['target']}"]
    for name, option in _VALUES.items():
        if settings.get(name) not in (None, "", 0, []):
            words += [option, str(settings[name])]
    return words + [str(word) for word in settings.get("arguments") or ()]


def _listed(value: t.Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, (list, tuple)) else [str(value)]


def systemd_words(words: t.Sequence[str]) -> str:
    """A command as ExecStart= takes it. Raises CleanSlateError for a control character."""
    return command_line(words)


def systemd_environment(environment: t.Mapping[str, t.Any]) -> list[str]:
    """The values of Environment=, one for each variable. There % is a specifier, and $ is nothing special."""
    lines = []
    for name, value in sorted(environment.items()):
        text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
        lines.append(f'"{name}={text}"')
    return lines


def cron_command(words: t.Sequence[str], environment: t.Mapping[str, t.Any], timeout_s: int, tag: str) -> str:
    """A command as a line of cron takes it: with a deadline, its output to syslog, and % taken literally."""
    whole = ["timeout", f"--kill-after={STOP_S}", str(timeout_s + GRACE_S)]
    if environment:
        whole += ["env", *(f"{name}={value}" for name, value in sorted(environment.items()))]
    line = f"{shlex.join([*whole, *words])} 2>&1 | {shlex.join(['logger', '-t', tag])}"
    return line.replace("%", "\\%")


def problems(settings: Settings, looked: Settings) -> list[str]:
    """Why it would not run, each as a sentence. ``looked``: the registered results of the role's questions."""
    found = variable_problems(settings)
    user = str(settings["user"])
    if not _well(looked.get("user")):
        return [*found, f"user: there is no account '{user}' on this host; make it, or name another one"]
    if settings["kind"] == "systemd":
        if not (looked.get("systemd") or {}).get("stat", {}).get("exists"):
            found.append(f"kind: no systemd runs on this host; say {PREFIX}kind: cron")
        for each in (looked.get("calendar") or {}).get("results", ()):
            if not each.get("skipped") and not _well(each):
                found.append(f"on_calendar: systemd does not understand '{each.get('item')}': {_last(each)}")
    if not _well(looked.get("packages")):
        found.append(
            f"python: {settings['python']} can't be used by {user} with ansible-runner and Jinja2: "
            f"{_last(looked.get('packages'))}; install requirements/drift.txt there, or name another Python"
        )
    elif not _well(looked.get("runner")):
        found.append(
            f"collection: {settings['collection']}/{RUNNER} can't be run by {user}: {_last(looked.get('runner'))}"
        )
    for each in (looked.get("files") or {}).get("results", ()):
        if not each.get("skipped") and not _well(each):
            found.append(f"{each['item'][0]}: {user} can't read {each['item'][1]} on this host")
    return found


def variable_problems(settings: Settings) -> list[str]:
    """What is wrong with the values themselves."""
    found = []
    if not _NAME.match(str(settings["name"])):
        found.append(f"name: '{settings['name']}' is no name of a unit; take letters, digits, '.', '_' and '-'")
    if not str(settings["out"]).startswith("/"):
        found.append(f"out: '{settings['out']}' must be an absolute path")
    if int(settings["timeout_s"]) <= 0:
        found.append(f"timeout_s: {settings['timeout_s']} must be above 0 seconds")
    if not _CRON.match(str(settings["cron"]).strip()):
        found.append(f"cron: '{settings['cron']}' is no time of cron; write it like '7 * * * *'")
    if not _listed(settings["inventory"]) or "" in _listed(settings["inventory"]):
        found.append("inventory: say which inventory is checked, with its path on this host")
    for name in settings["environment"]:
        if not _VARIABLE.match(str(name)):
            found.append(f"environment: '{name}' is no name of a variable")
    texts = [*command(settings), *map(str, settings["environment"].values()), *_listed(settings["on_calendar"])]
    texts += [str(settings["random_delay"]), *_listed(settings["on_failure"]), str(settings["cron"])]
    if any(ord(one) < 0x20 or ord(one) == 0x7F for text in texts for one in text):
        found.append("a value holds a line break or another control character")
    return found


def files(settings: Settings) -> list[list[str]]:
    """(variable, path) of what the user must be able to read. An inventory that is a list of hosts is no file."""
    found = [["inventory", source] for source in _listed(settings["inventory"]) if "," not in source]
    vault = settings.get("vault_password_file")
    return found + ([["vault_password_file", str(vault)]] if vault else [])


def _well(result: t.Any) -> bool:
    return isinstance(result, t.Mapping) and result.get("rc") == 0


def _last(result: t.Any) -> str:
    """The last line of what a command said."""
    if not isinstance(result, t.Mapping):
        return failure(result)
    lines = f"{result.get('stdout') or ''}\n{result.get('stderr') or ''}".strip().splitlines()
    return lines[-1].strip() if lines else failure(result)
