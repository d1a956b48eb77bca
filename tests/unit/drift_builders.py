# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Answers of server_drift, events of ansible-runner and whole documents, for the tests of the reports."""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_answers import Collector
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_document import Run, build, iso

NOW = 1_790_000_000.0
FRESH_S = 93600.0
JSON = dict[str, t.Any]


def row(item: str, server: str | None = "chat", **changes: t.Any) -> JSON:
    """A row as server_drift returns it."""
    return {
        "server": server,
        "item": item,
        "wanted": "4",
        "found": "2",
        "where": "process",
        "also": ["file"],
        "severity": "critical",
        "remedy": "relaunch it: playbooks/relaunch.yml -e server=chat",
        "state": "drift",
        "reason": None,
        **changes,
    }


def gpu(index: int, used: int | None = 76_109, **changes: t.Any) -> JSON:
    """A GPU as server_drift returns it."""
    holders = [{"pid": 812 + index, "title": f"sglang::scheduler_TP{index}", "lxc": None}]
    return {
        "index": index,
        "uuid": f"GPU-{index:08d}",
        "name": "NVIDIA H200",
        "used_mib": used,
        "total_mib": 143_771,
        "holders": holders if used else [],
        **changes,
    }


def server(name: str = "chat", drift: t.Sequence[JSON] = (), **changes: t.Any) -> JSON:
    """A server of an answer; its verdict follows its rows, as in the module."""
    return {
        "name": name,
        "verdict": verdict_of(drift),
        "running": True,
        "pid": 4711,
        "started_at": "2026-09-20T10:00:00+00:00",
        "uptime_s": 86_400.5,
        "launch_id": "20260920T095900Z-1a2b",
        "config_hash": "sha256:9f86d081884c7d65",
        "health": "ok",
        "engine_keys_compared": 12,
        "drift": list(drift),
        "accepted": [],
        **changes,
    }


def answer(servers: t.Sequence[JSON] = (), drift: t.Sequence[JSON] = (), gpus: int = 2, **changes: t.Any) -> JSON:
    """A whole answer."""
    verdicts = [verdict_of(drift), *(each["verdict"] for each in servers)]
    verdict = next((word for word in ("drifted", "unknown") if word in verdicts), "in_sync")
    return {
        "changed": False,
        "verdict": verdict,
        "summary": f"{verdict}: as it is",
        "servers": list(servers),
        "host": {
            "verdict": verdict_of(drift),
            "drift": list(drift),
            "accepted": [],
            "gpus": [gpu(index) for index in range(gpus)],
            "driver_version": "580.95.05",
            "memory": {"total_mib": 1_031_000, "available_mib": 980_000},
        },
        "seconds": 1.4,
        **changes,
    }


def verdict_of(rows: t.Sequence[JSON]) -> str:
    """As the module has it."""
    states = {each["state"] for each in rows if each["severity"] != "note"}
    if states & {"drift", "expired_acceptance"}:
        return "drifted"
    return "unknown" if "unknown" in states else "in_sync"


def event(kind: str, host: str, result: t.Any, action: str = "cleanslate.sglang.server_drift", **data: t.Any) -> JSON:
    """An event as ansible-runner hands it over."""
    return {
        "event": kind,
        "created": iso(NOW - 5).replace("Z", "+00:00"),
        "event_data": {"host": host, "res": result, "task_action": action, "resolved_action": action, **data},
    }


def ok(host: str, result: t.Any) -> JSON:
    """The event of an answer."""
    return event("runner_on_ok", host, result)


def collected(*events: JSON) -> Collector:
    """A collector that has seen these events."""
    collector = Collector()
    for each in events:
        assert collector.take(each) is True
    return collector


def run(finished: float = NOW, **changes: t.Any) -> Run:
    """A run that ended now."""
    given: JSON = {
        "run_id": f"run-{finished:.0f}",
        "started": finished - 12.5,
        "finished": finished,
        "status": "successful",
        "rc": 0,
        "inventory": ("/etc/fleet",),
        "limit": None,
        **changes,
    }
    return Run(**given)


def document(*events: JSON, expected: t.Sequence[str] = (), previous: JSON | None = None, **changes: t.Any) -> JSON:
    """The document of a run with these events."""
    return build(run(**changes), collected(*events).hosts(expected), previous, FRESH_S, "0.2.0")
