# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The document of a drift check, latest.json: pure, from the hosts' answers and the document before.

Its schema is docs/drift.schema.json. A host that was not seen is ``unknown`` and stays in the document with the servers
that it had; nothing vanishes because nobody could look.
"""

from __future__ import annotations

import datetime
import typing as t
from dataclasses import dataclass, field

from .drift_answers import JSON, SEVERITIES, HostAnswer

SCHEMA = "cleanslate.drift"
SCHEMA_VERSION = 1
EXIT_CODES = {"in_sync": 0, "drifted": 10, "unknown": 20}
CHANGE_LIMIT = 200
LEAD_LIMIT = 5
CLOCK_SLACK_S = 90.0  # two runs write within the time that one waits for the other
_OF_HOST = (
    *("name", "verdict", "state", "problem", "in_this_run", "checked_at"),
    *("verdict_since", "last_answer", "counts"),
)
_OF_ROW = ("server", "item", "state", "severity", "since")


@dataclass(frozen=True)
class Run:
    """One run. ``status``: successful, failed, timeout, canceled or error; ``problems``: why not every host could be
    asked (each makes the run unknown); ``notes``: worth knowing, no more. ``gone``: hosts of the document before that
    the inventory no longer has."""

    run_id: str
    started: float
    finished: float
    status: str
    rc: t.Optional[int]
    inventory: tuple[str, ...]
    limit: t.Optional[str]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    gone: frozenset[str] = frozenset()


@dataclass
class _Sums:
    """Counts of rows."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*SEVERITIES, "unknown", "accepted"), 0))

    def add(self, rows: t.Iterable[t.Mapping[str, t.Any]]) -> None:
        for row in rows:
            self.counts[row["state"] if row["state"] in ("unknown", "accepted") else row["severity"]] += 1


def iso(moment: float) -> str:
    """Seconds since 1970 as UTC text, to the second."""
    return datetime.datetime.fromtimestamp(int(moment), datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment_of(text: t.Any) -> t.Optional[float]:
    """The reverse; None for what is no time."""
    try:
        found = datetime.datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
    aware = found if found.tzinfo is not None else found.replace(tzinfo=datetime.timezone.utc)
    return aware.timestamp()


def fleet_verdict(verdicts: t.Iterable[str]) -> str:
    """One word for many hosts: a host that was not seen may hide anything, so unknown outranks drifted here. None at
    all is unknown: nothing was checked."""
    found = set(verdicts)
    if not found or "unknown" in found:
        return "unknown"
    return "drifted" if "drifted" in found else "in_sync"


def build(
    run: Run,
    answers: t.Sequence[HostAnswer],
    previous: t.Optional[t.Mapping[str, t.Any]],
    fresh_s: float,
    collection_version: t.Optional[str] = None,
) -> JSON:
    """The new document. ``previous`` is the one that it replaces, where there is one.

    A run replaces its own hosts, and those that are gone leave; the others stay, since it may have asked a part of
    the fleet only. A host that another run has seen later than this one keeps that answer. A kept answer that is older
    than ``fresh_s`` is unknown.
    """
    before = {host["name"]: host for host in (previous or {}).get("hosts", ())}
    mine = [_host(answer, before.get(answer.name), run) for answer in answers]
    hosts = {host["name"]: host for host in mine}
    for name, old in before.items():
        seen = moment_of(old.get("checked_at")) or 0.0
        if name in hosts and _is_later(seen, hosts[name], run) and old["state"] == "answered":
            hosts[name] = {**old, "in_this_run": True}
        elif name not in hosts and name not in run.gone:
            hosts[name] = _kept(old, run, fresh_s)
    ordered = [hosts[name] for name in sorted(hosts)]
    verdict = fleet_verdict([host["verdict"] for host in ordered] + ["unknown"] * bool(run.problems))
    own = "unknown" if run.problems else fleet_verdict(host["verdict"] for host in mine)
    document: JSON = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "generated_at": iso(run.finished),
        "collection_version": collection_version,
        "verdict": verdict,
        "summary": "",
        "run": {
            "id": run.run_id,
            "started_at": iso(run.started),
            "finished_at": iso(run.finished),
            "seconds": round(max(0.0, run.finished - run.started), 1),
            "status": run.status,
            "rc": run.rc,
            "inventory": list(run.inventory),
            "limit": run.limit,
            "verdict": own,
            "exit_code": EXIT_CODES[own],
            "hosts": len(mine),
            "problems": list(run.problems),
            "notes": list(run.notes),
        },
        "counts": _counts(ordered),
        "last_success_at": iso(run.finished) if verdict != "unknown" else (previous or {}).get("last_success_at"),
        "changes": [] if previous is None else changes(previous, ordered),
        "changes_cut": 0,
        "notification": None,
        "hosts": ordered,
    }
    document["changes_cut"] = max(0, len(document["changes"]) - CHANGE_LIMIT)
    document["changes"] = document["changes"][:CHANGE_LIMIT]
    document["summary"] = summary(document)
    return document


def _is_later(seen: float, mine: t.Mapping[str, t.Any], run: Run) -> bool:
    """Whether another run saw the host after this one. A time to come is none: the clock has been set since."""
    return (moment_of(mine["checked_at"]) or 0.0) < seen <= run.finished + CLOCK_SLACK_S


def _host(answer: HostAnswer, old: t.Optional[t.Mapping[str, t.Any]], run: Run) -> JSON:
    at = iso(min(run.finished, moment_of(answer.at) or run.finished))
    if answer.answer is None:
        return _unseen(answer.name, answer.state, answer.problem or "it gave no answer", iso(run.finished), old, True)
    found = answer.answer
    sums = _Sums()
    since = _since(old)
    blocks = [*found["servers"], found["host"]]
    for block in blocks:
        block["drift"] = [{**row, "since": since.get(row_key(row), at)} for row in block["drift"]]
        block["accepted"] = [{**row, "since": since.get(row_key(row), at)} for row in block["accepted"]]
        sums.add(block["drift"])
        sums.add(block["accepted"])
    return {
        "name": answer.name,
        "verdict": found["verdict"],
        "state": "answered",
        "problem": None,
        "in_this_run": True,
        "checked_at": at,
        "verdict_since": old["verdict_since"] if old and old["verdict"] == found["verdict"] else at,
        "last_answer": {"at": at, "verdict": found["verdict"], "counts": sums.counts, "rows": []},
        "summary": found["summary"],
        "seconds": found["seconds"],
        "counts": sums.counts,
        "servers": found["servers"],
        "host": found["host"],
    }


def _unseen(
    name: str, state: str, problem: str, at: str, old: t.Optional[t.Mapping[str, t.Any]], in_this_run: bool
) -> JSON:
    """A host without an answer: its servers, as far as they are known, are unknown too."""
    servers = [] if old is None else [server["name"] for server in old["servers"]]
    return {
        "name": name,
        "verdict": "unknown",
        "state": state,
        "problem": problem,
        "in_this_run": in_this_run,
        "checked_at": at,
        "verdict_since": old["verdict_since"] if old and old["verdict"] == "unknown" else at,
        "last_answer": None if old is None or old["last_answer"] is None else _remembered(old),
        "summary": None,
        "seconds": None,
        "counts": {**_Sums().counts, "unknown": 1},
        "servers": [_unseen_server(each) for each in servers],
        "host": None,
    }


def _remembered(old: t.Mapping[str, t.Any]) -> JSON:
    """The last answer of a host that is silent now, with its rows in short: their age goes on when it speaks again."""
    if old["state"] != "answered":
        return dict(old["last_answer"])
    rows = [{name: row[name] for name in _OF_ROW} for row in (*rows_of(old), *accepted_of(old))]
    return {**old["last_answer"], "rows": rows}


def _unseen_server(name: str) -> JSON:
    nothing = dict.fromkeys(
        ("running", "pid", "started_at", "uptime_s", "launch_id", "config_hash", "health", "engine_keys_compared")
    )
    return {"name": name, "verdict": "unknown", **nothing, "drift": [], "accepted": []}


def _kept(old: t.Mapping[str, t.Any], run: Run, fresh_s: float) -> JSON:
    """A host that this run did not ask, as it was; too old an answer is unknown."""
    answered = moment_of((old.get("last_answer") or {}).get("at"))
    age = None if answered is None else run.finished - answered
    if old["state"] == "answered" and (age is None or age > fresh_s):
        hours = "at an unknown time" if age is None else f"{age / 3600:.1f} h ago"
        problem = f"it answered {hours}, and no run has asked it since (limit {fresh_s / 3600:.1f} h)"
        return _unseen(old["name"], "stale", problem, iso(run.finished), old, False)
    return {**old, "in_this_run": False}


def row_key(row: t.Mapping[str, t.Any]) -> tuple[t.Any, ...]:
    """What makes a row the same row in two runs: server, item, and whether it is accepted or unknown."""
    return (row["server"], row["item"], row["state"])


def rows_of(host: t.Mapping[str, t.Any]) -> list[JSON]:
    """All rows of a host that stand, the servers' first."""
    blocks = [*host["servers"], *([host["host"]] if host["host"] else [])]
    return [row for block in blocks for row in block["drift"]]


def accepted_of(host: t.Mapping[str, t.Any]) -> list[JSON]:
    """All accepted rows of a host."""
    blocks = [*host["servers"], *([host["host"]] if host["host"] else [])]
    return [row for block in blocks for row in block["accepted"]]


def _since(old: t.Optional[t.Mapping[str, t.Any]]) -> dict[tuple[t.Any, ...], str]:
    if old is None or old["last_answer"] is None:
        return {}
    return {row_key(row): row["since"] for row in _remembered(old)["rows"]}


def _counts(hosts: t.Sequence[t.Mapping[str, t.Any]]) -> JSON:
    def by_verdict(verdicts: t.Iterable[str]) -> dict[str, int]:
        found = dict.fromkeys(EXIT_CODES, 0)
        for verdict in verdicts:
            found[verdict] += 1
        return found

    rows = dict.fromkeys((*SEVERITIES, "unknown", "accepted"), 0)
    for host in hosts:
        for name, count in host["counts"].items():
            rows[name] += count
    return {
        "hosts": by_verdict(host["verdict"] for host in hosts),
        "servers": by_verdict(server["verdict"] for host in hosts for server in host["servers"]),
        "rows": rows,
    }


def is_whole(document: t.Mapping[str, t.Any]) -> bool:
    """Whether a document that was read has what the next one takes from it. Somebody may have edited it."""
    try:
        told = document["notification"]
        hosts = document["hosts"]
        remembered = [row for host in hosts if host["last_answer"] is not None for row in host["last_answer"]["rows"]]
        rows = [row for host in hosts for row in (*rows_of(host), *accepted_of(host))]
        return (
            (told is None or isinstance(told["ok"], bool))
            and isinstance(document["last_success_at"], (str, type(None)))
            and all(_is_host(host) for host in hosts)
            and all(_is_row(row) for row in [*rows, *remembered])
        )
    except (KeyError, TypeError, AttributeError):
        return False


def _is_host(host: t.Mapping[str, t.Any]) -> bool:
    blocks = [host, *host["servers"]]
    counted = (*SEVERITIES, "unknown", "accepted")
    return (
        all(name in host for name in _OF_HOST)
        and all(isinstance(block["name"], str) and block["verdict"] in EXIT_CODES for block in blocks)
        and all(name in counted and isinstance(count, int) for name, count in host["counts"].items())
    )


def _is_row(row: t.Mapping[str, t.Any]) -> bool:
    known = all(isinstance(row[name], (str, type(None))) for name in _OF_ROW)
    return known and row["severity"] in SEVERITIES


def changes(previous: t.Mapping[str, t.Any], hosts: t.Sequence[t.Mapping[str, t.Any]]) -> list[JSON]:
    """What is different from the document before: verdicts of hosts, rows that came, rows that went."""
    before = {host["name"]: host for host in previous["hosts"]}
    found: list[JSON] = []
    for host in hosts:
        old = before.pop(host["name"], None)
        was = None if old is None else old["verdict"]
        if was != host["verdict"]:
            found.append(_change(host["name"], None, None, "verdict", was, host["verdict"]))
        if host["state"] != "answered" or old is None or old["last_answer"] is None:
            continue  # what could not be seen has neither come nor gone
        was_rows = {row_key(row): row for row in _remembered(old)["rows"] if row["state"] != "accepted"}
        now_rows = {row_key(row): row for row in rows_of(host)}
        for key, row in now_rows.items():
            if key not in was_rows:
                found.append(_change(host["name"], row["server"], row["item"], "new", None, row["state"]))
        for key, row in was_rows.items():
            if key not in now_rows:
                found.append(_change(host["name"], row["server"], row["item"], "gone", row["state"], None))
    found += [_change(name, None, None, "verdict", old["verdict"], None) for name, old in before.items()]
    return found


def _change(
    host: str, server: t.Any, item: t.Any, what: str, before: t.Optional[str], now: t.Optional[str]
) -> JSON:
    return {"host": host, "server": server, "item": item, "what": what, "before": before, "now": now}


def summary(document: t.Mapping[str, t.Any]) -> str:
    """One sentence for a person."""
    hosts = document["counts"]["hosts"]
    total = sum(hosts.values())
    if not total:
        return "no host was checked"
    words = {"in_sync": "in sync", "drifted": "drifted", "unknown": "unknown"}
    parts = [f"{count} {words[verdict]}" for verdict, count in hosts.items() if count]
    leading = [f"{host['name']}: {lead(host)}" for host in document["hosts"] if host["verdict"] != "in_sync"]
    text = f"{total} host{'s' if total != 1 else ''}: {', '.join(parts)}"
    if leading:
        more = len(leading) - LEAD_LIMIT
        text += "; " + "; ".join(leading[:LEAD_LIMIT]) + (f"; and {more} more" if more > 0 else "")
    return text


def lead(host: t.Mapping[str, t.Any]) -> str:
    """A host in a few words: why it was not seen, or its rows."""
    if host["problem"]:
        return " ".join(f"{host['state'].replace('_', ' ')} ({host['problem']})".split())
    names = [
        f"{row['server']}/{row['item']}" if row["server"] else str(row["item"])
        for row in sorted(rows_of(host), key=lambda row: SEVERITIES.index(row["severity"]))
        if row["severity"] != "note"
    ]
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
