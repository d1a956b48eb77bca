# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Telling somebody: a command gets what is new as JSON on its standard input. Bounded in time and size."""

from __future__ import annotations

import json
import os
import typing as t
from dataclasses import dataclass

from ansible_collections.cleanslate.sglang.plugins.module_utils.spawn import run_bounded

from .drift_answers import JSON, text
from .drift_document import rows_of

WHEN = ("change", "problem", "always")
SCHEMA = "cleanslate.drift.notification"
SIZE_LIMIT = 60_000  # what a pipe takes at once, so that a command which reads nothing holds nobody
_CHANGES = 50
_ROWS = 20
_VALUE = 200


@dataclass(frozen=True)
class Hook:
    """The command, when it is called, and how long it may take."""

    argv: tuple[str, ...]
    when: str = "change"
    deadline_s: float = 30.0

    @property
    def name(self) -> str:
        return os.path.basename(self.argv[0])


def is_due(hook: Hook, document: t.Mapping[str, t.Any], previous: t.Optional[t.Mapping[str, t.Any]]) -> bool:
    """Whether somebody is to be told now. What could not be delivered is told again."""
    if hook.when == "always":
        return True
    told = (previous or {}).get("notification")
    if told is not None and not told["ok"]:
        return True
    problem = document["verdict"] != "in_sync"
    if hook.when == "problem":
        return problem
    return bool(document["changes"]) or (previous is None and problem)


def message(document: t.Mapping[str, t.Any], directory: str) -> bytes:
    """What the command reads: the verdict, what is new, and the hosts that are not in sync, as many as fit."""
    found: JSON = {
        "schema": SCHEMA,
        "schema_version": document["schema_version"],
        "verdict": document["verdict"],
        "summary": text(document["summary"], 4000),
        "run": {**document["run"], "inventory": document["run"]["inventory"][:20]},
        "counts": document["counts"],
        "directory": directory,
        "changes": document["changes"][:_CHANGES],
        "changes_cut": document["changes_cut"] + max(0, len(document["changes"]) - _CHANGES),
        "hosts": [],
        "hosts_cut": 0,
    }
    hosts = [_host(host) for host in document["hosts"] if host["verdict"] != "in_sync"]
    size = len(_dump(found))
    for index, host in enumerate(hosts):
        size += len(_dump(host)) + 1
        if size > SIZE_LIMIT:
            found["hosts_cut"] = len(hosts) - index
            break
        found["hosts"].append(host)
    return _dump(found)


def _dump(value: t.Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()


def _host(host: t.Mapping[str, t.Any]) -> JSON:
    rows = rows_of(host)
    return {
        "name": host["name"],
        "verdict": host["verdict"],
        "state": host["state"],
        "problem": host["problem"],
        "rows": [
            {
                "server": row["server"],
                "item": row["item"],
                "wanted": _short(row["wanted"]),
                "found": _short(row["found"]),
                "severity": row["severity"],
                "state": row["state"],
                "since": row["since"],
            }
            for row in rows[:_ROWS]
        ],
        "rows_cut": max(0, len(rows) - _ROWS),
    }


def _short(value: t.Any) -> t.Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return text(value if isinstance(value, str) else json.dumps(value), _VALUE)


def tell(hook: Hook, document: t.Mapping[str, t.Any], directory: str, at: str) -> JSON:
    """Call the command. Never raises for what it does: how it went is what is returned."""
    environment = {**os.environ, "CLEANSLATE_DRIFT_VERDICT": document["verdict"]}
    done = run_bounded(hook.argv, hook.deadline_s, environment, message(document, directory))
    problem = None
    if done.timed_out:
        problem = f"no end within {hook.deadline_s:g} s; it was ended"
    elif done.error is not None:
        problem = done.error
    elif not done.ok:
        # Not what it wrote: a command that calls somebody's web hook names its address, which is a secret.
        problem = f"exit status {done.rc}"
    return {
        "at": at,
        "command": text(hook.name, 200),
        "ok": problem is None,
        "rc": done.rc,
        "problem": None if problem is None else text(problem, 500),
    }
