# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A check for drift for people: one host with each difference, one sentence of it, and a fleet in a few lines."""

from __future__ import annotations

import typing as t

from .results import Result, failure, items, mapping, ran, seconds
from .tables import UNKNOWN, Column, cell, duration, paragraph, shortened, table

WORDS = {"in_sync": "in sync", "drifted": "DRIFTED", "unknown": "UNKNOWN"}
HOST = "(host)"
ABSENT = "(absent)"
# What a cell, and what a sentence may show of one value.
_WIDTH = 240
_SENTENCE = 100
# Items that the inventory is to be mended for.
_NOT_BY_RELAUNCH = ("waiver_expired:",)
_COLUMNS = [
    Column("", 8),
    Column("Server", 14),
    Column("Item", 36),
    Column("Wanted", 18),
    Column("Found", 24),
    Column("Where", 21),
]


def verdict_of(result: t.Any) -> str:
    """in_sync, drifted or unknown; what is no answer of the module is unknown."""
    verdict = result.get("verdict") if isinstance(result, t.Mapping) else None
    return verdict if isinstance(verdict, str) and verdict in WORDS else "unknown"


def rows_of(result: t.Any, key: str = "drift") -> list[Result]:
    """The rows of the servers, then those of the host. ``key``: drift or accepted."""
    if not isinstance(result, t.Mapping):
        return []
    places = [*items(result, "servers"), mapping(result, "host")]
    return [row for place in places if isinstance(place, t.Mapping) for row in items(place, key) if _is_row(row)]


def _is_row(row: t.Any) -> t.TypeGuard[Result]:
    return isinstance(row, t.Mapping)


def _plain(value: t.Any) -> str:
    """A text without control characters: what a host says must not drive a terminal."""
    text = value if isinstance(value, str) else cell(value)
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


def _value(value: t.Any, absent: str = ABSENT) -> str:
    if value is None:
        return absent
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(_value(each) for each in value) or "(none)"
    if isinstance(value, t.Mapping):
        return ",".join(f"{key}={_value(each)}" for key, each in value.items()) or "(none)"
    # As it is written in an inventory: without thousands.
    return shortened(_plain(str(value)), _WIDTH)


def _mark(row: Result) -> str:
    state, severity = row.get("state"), row.get("severity")
    if severity == "note":
        return "note"
    if state == "unknown":
        return UNKNOWN
    if state == "expired_acceptance":
        return "expired"
    return "CRITICAL" if severity == "critical" else _plain(severity or UNKNOWN)


def _where(row: Result) -> str:
    return ", ".join(_plain(each) for each in [row.get("where") or UNKNOWN, *items(row, "also")])


def _table_row(row: Result) -> list[str]:
    unknown = row.get("state") == "unknown"
    return [
        _mark(row),
        _plain(row.get("server") or HOST),
        _plain(row.get("item") or UNKNOWN),
        _value(row.get("wanted"), "" if unknown else ABSENT),
        _value(row.get("found"), UNKNOWN if unknown else ABSENT),
        _where(row),
    ]


def _subject(row: Result) -> str:
    server = row.get("server")
    return f"{_plain(server)}: {_plain(row.get('item'))}" if server else _plain(row.get("item"))


def _remedies(rows: t.Sequence[Result]) -> list[str]:
    """Each remedy once, with what it is for."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.get("remedy"):
            found.setdefault(_plain(row["remedy"]), []).append(_subject(row))
    lines = []
    for remedy, subjects in found.items():
        lines += paragraph(f"{remedy} ({', '.join(subjects)})", "remedy: ", indent=2)
    return lines


def _reasons(rows: t.Sequence[Result]) -> list[str]:
    lines = []
    for row in rows:
        if row.get("state") == "expired_acceptance" and row.get("reason"):
            lines += paragraph(f"{_subject(row)}: {_plain(row['reason'])}", "expired: ", indent=2)
    return lines


def _accepted(rows: t.Sequence[Result]) -> list[str]:
    lines = []
    for row in rows:
        values = f"wanted {_value(row.get('wanted'))}, found {_value(row.get('found'))}"
        lines += paragraph(f"{_subject(row)}: {values}: {_plain(row.get('reason') or '')}", "accepted: ", indent=2)
    return lines


def _server_line(server: Result) -> list[str]:
    if server.get("running"):
        facts = [f"pid {cell(server.get('pid')).replace(',', '')}", f"up {duration(server.get('uptime_s'))}"]
        facts.append(f"health {_plain(server.get('health') or 'not asked')}")
        compared = server.get("engine_keys_compared")
        if compared:
            facts.append(f"{compared} of its flags as SGLang has them")
    else:
        facts = ["does not run" if server.get("running") is False else "whether it runs could not be seen"]
    if server.get("launch_id"):
        facts.append(f"launch {_plain(server['launch_id'])}")
    word = WORDS.get(str(server.get("verdict")), WORDS["unknown"])
    return paragraph(", ".join(facts), f"  {_plain(server.get('name') or UNKNOWN)}: {word}: ")


def _host_line(host: Result) -> list[str]:
    gpus = host.get("gpus")
    simulated = " (SIMULATED)" if host.get("simulated") else ""
    shown = f"{len(gpus)} GPUs{simulated}" if isinstance(gpus, (list, tuple)) else "GPUs unknown"
    facts = [shown]
    if host.get("driver_version"):
        facts.append(f"driver {_plain(host['driver_version'])}")
    available = mapping(host, "memory").get("available_mib")
    if available is not None:
        facts.append(f"{cell(available)} MiB of memory available")
    word = WORDS.get(str(host.get("verdict")), WORDS["unknown"])
    return paragraph(", ".join(facts), f"  {HOST}: {word}: ")


def drift_lines(result: t.Any, host: str) -> list[str]:
    """One host. ``result``: of server_drift as registered, or of a task that failed in its place."""
    word = WORDS[verdict_of(result)]
    if not isinstance(result, t.Mapping) or "verdict" not in result:
        return paragraph(f"{host}: {word}: {_plain(failure(result))}")
    took = seconds(result)
    summary = _plain(result.get("summary") or "").partition(": ")[2]
    lines = paragraph(f"{host}: {word}" + (f" ({summary})" if summary else "") + f", {took or 0:.1f} s")
    for server in items(result, "servers"):
        lines += _server_line(server) if isinstance(server, t.Mapping) else []
    lines += _host_line(mapping(result, "host"))
    rows, fine = rows_of(result), rows_of(result, "accepted")
    if rows:
        lines += [f"  {line}" for line in table(_COLUMNS, [_table_row(row) for row in rows])]
    return lines + _reasons(rows) + _remedies(rows) + _accepted(fine)


def drift_why(result: t.Any, host: str, shown: int = 5) -> str:
    """One sentence that says what differs, or why nothing is known."""
    verdict = verdict_of(result)
    if not isinstance(result, t.Mapping) or "verdict" not in result:
        return f"{host} is unknown: {_plain(failure(result))}"
    rows = [row for row in rows_of(result) if row.get("severity") != "note"]
    words = [_sentence(row) for row in rows[:shown]]
    if len(rows) > shown:
        words.append(f"and {len(rows) - shown} more")
    names = {"drifted": "has drifted", "unknown": "is unknown", "in_sync": "is in sync"}
    return f"{host} {names[verdict]}" + (f": {'; '.join(words)}" if words else "")


def _sentence(row: Result) -> str:
    if row.get("state") == "unknown":
        return f"{_subject(row)} is unknown: {_value(row.get('found'), UNKNOWN)}"
    wanted, found = (shortened(_value(row.get(key)), _SENTENCE) for key in ("wanted", "found"))
    return f"{_subject(row)}: wanted {wanted}, found {found}"


def calls_for_relaunch(result: t.Any, server: str) -> bool:
    """Whether a relaunch of it is called for. What is not known is a reason; what a relaunch would not mend is none."""
    if not isinstance(result, t.Mapping):
        return True
    found = [each for each in items(result, "servers") if _is_row(each) and each.get("name") == server]
    if len(found) != 1 or str(found[0].get("verdict")) not in WORDS:
        return True
    rows = [row for row in items(found[0], "drift") if not _is_row(row) or row.get("severity") != "note"]
    mended = [row for row in rows if not _is_row(row) or not str(row.get("item")).startswith(_NOT_BY_RELAUNCH)]
    return bool(mended) or (found[0]["verdict"] != "in_sync" and not rows)


def drift_overview(results: t.Mapping[str, t.Any]) -> list[str]:
    """A fleet in a few lines. ``results``: host -> the registered result, {} where the task did not run at all."""
    groups: dict[str, list[str]] = {}
    for host, result in results.items():
        groups.setdefault(_group(result), []).append(host)
    counts = [f"{len(groups[word])} {word}" for word in _ORDER if word in groups]
    lines = paragraph(f"{len(results)} hosts: {', '.join(counts)}" if results else "no host was checked")
    for word in _ORDER[1:]:
        for host in groups.get(word, ()):
            lines += paragraph(_short(results[host], host, word), indent=2)
    return lines


def was_asked(variables: t.Mapping[str, t.Any]) -> bool:
    """Whether a host's variables hold an answer, or why it could not be asked; drift.yml shows each of these."""
    refused = variables.get("drift_refused")
    return ran(variables.get("drift_result")) or (isinstance(refused, t.Mapping) and bool(refused.get("failed")))


_ORDER = ("in sync", "drifted", "unknown", "unreachable", "not checked")


def _group(result: t.Any) -> str:
    if not ran(result):
        return "not checked"
    if result.get("unreachable"):
        return "unreachable"
    return {"in_sync": "in sync"}.get(verdict_of(result), verdict_of(result))


def _short(result: t.Any, host: str, word: str) -> str:
    if word in ("drifted", "unknown"):
        return drift_why(result, host, shown=3)
    return f"{host} {_plain(failure(result))}" if word == "unreachable" else f"{host}: {word}, see its error above"
