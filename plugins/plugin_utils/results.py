# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Registered results, read for people: what failed, in one sentence; who a process is."""

from __future__ import annotations

import math
import re
import typing as t

from .tables import cell, shortened

Result = t.Mapping[str, t.Any]
INDENT = 10
# Ansible's and sudo's own words, so that a module's message about some password is left as it is.
_NO_SUDO = re.compile(r"sudo: (?:command )?not found|sudo: No such file")
_NO_PASSWORD = re.compile(r"(?:Missing|Incorrect) \w+ password|sudo: a password is required")


def label(word: str) -> str:
    return word.ljust(INDENT)


def ran(result: t.Any) -> t.TypeGuard[Result]:
    """Whether a module's registered result is one: not skipped, not empty."""
    return isinstance(result, t.Mapping) and bool(result) and not result.get("skipped")


def items(result: Result, key: str) -> list[t.Any]:
    value = result.get(key)
    return list(value) if isinstance(value, (list, tuple)) else []


def rows(result: t.Any, key: str) -> list[Result]:
    """Those of a list that are mappings: what comes from a host may be anything."""
    return [each for each in items(result, key) if isinstance(each, t.Mapping)] if isinstance(result, t.Mapping) else []


def mapping(result: Result, key: str) -> Result:
    value = result.get(key)
    return value if isinstance(value, t.Mapping) else {}


def seconds(result: t.Any) -> t.Optional[float]:
    return figure(result.get("seconds")) if isinstance(result, t.Mapping) else None


def figure(value: t.Any) -> t.Optional[float]:
    """A finite number, or None."""
    try:
        found = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def failure(result: t.Any) -> str:
    """Why a task failed, in one sentence: Ansible's own errors are put into words that name the way out."""
    if not isinstance(result, t.Mapping) or not result:
        return "it did not run"
    text = " ".join(str(result.get("msg") or "").split()).removeprefix("Task failed: ")
    output = " ".join(str(result.get(key) or "") for key in ("module_stderr", "module_stdout", "stderr")).strip()
    everything = f"{text} {output}"
    if result.get("unreachable"):
        return f"unreachable: {text}"
    if cut_off(result):
        return (
            "the connection was lost while it ran, or it was killed there; what it did is not known, and it may "
            "still run on the host. Run the same again"
        )
    if _NO_SUDO.search(everything):
        return "there is no sudo to become root with; connect as root and set sglang_become: false, or install sudo"
    if _NO_PASSWORD.search(everything):
        return f"no permission to become root: {shortened(text or output, 200)}; see --ask-become-pass"
    if "The module interpreter" in text or result.get("rc") == 127:
        said = shortened(text or output, 200)
        return f"the Python interpreter for Ansible's modules is missing: {said}; see ansible_python_interpreter"
    return text or shortened(output, 300) or "it failed without a message"


def cut_off(result: t.Any) -> bool:
    """Whether a module's answer never came: Ansible got nothing that it could read, not even an error's text."""
    if not isinstance(result, t.Mapping) or "deserialization failed: No start of json" not in str(result.get("msg")):
        return False
    return not any(str(result.get(key) or "").strip() for key in ("module_stderr", "module_stdout"))


def reason_text(reason: t.Any) -> str:
    if not isinstance(reason, t.Mapping):
        return cell(reason)
    seen_from = f" (seen from {reason['seen_from']})" if reason.get("seen_from") else ""
    return f"{reason.get('message')} [{reason.get('code')}]{seen_from}"


def reasons(result: t.Any) -> list[str]:
    """The sentences of a result's reasons, each with its code."""
    return [reason_text(each) for each in items(result, "reasons")] if isinstance(result, t.Mapping) else []


def why(result: t.Any) -> str:
    """The reasons of a result in one line; where it has none, what failed."""
    return "; ".join(reasons(result)) or failure(result)


def launch_problem(result: t.Any) -> str:
    """Why a server was not started, or would not be; empty where all is well."""
    return "" if isinstance(result, t.Mapping) and result.get("config_hash") else failure(result)


def who(target: t.Any) -> str:
    """One process, unit or container as people name it."""
    if not isinstance(target, t.Mapping):
        return f"pid {target}" if isinstance(target, int) else cell(target)
    name = (
        target.get("title")
        or target.get("unit")
        or target.get("container")
        or target.get("name")
        or target.get("subject")
    )
    pid, inner = target.get("pid"), target.get("inner_pid")
    text = f"pid {pid}" if pid is not None else ""
    # Seen from the node: the pid inside the container is the one that its own tools show.
    text += f" ({inner} inside)" if text and inner is not None and inner != pid else ""
    return " ".join(part for part in (text, shortened(name, 48) if name else "") if part) or cell(str(dict(target)))


def who_and_why(target: t.Any) -> str:
    reason = target.get("why") if isinstance(target, t.Mapping) else None
    return f"{who(target)}: {reason}" if reason else who(target)
