# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A drift check's document as one HTML page: no script, no reference to anything outside of it.

What is shown is worked out here, as plain values; drift_page.html.j2 beside this file only lays it out, and escapes
everything.
"""

from __future__ import annotations

import math
import re
import typing as t
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined

from . import drift_history
from .drift_answers import JSON
from .drift_document import accepted_of, moment_of, rows_of
from .drift_junit import shown

TEMPLATE = Path(__file__).with_name("drift_page.html.j2")
HISTORY_DAYS = 45
TURNS = 8
NAMED_TILES = 24  # with more hosts the overview is of small squares
FILTER_FROM = 8
SHOWN_CHANGES = 12
SHOWN_LAST = 6
VALUE_LIMIT = 600
_NBSP = "\N{NO-BREAK SPACE}"
CELL, HEIGHT = 4, 18
BAR, BAR_GAP, BAR_HEIGHT = 5, 2, 18

WORDS = {"in_sync": "in sync", "drifted": "drifted", "unknown": "unknown"}
SIGNS = {"in_sync": "\N{CHECK MARK}", "drifted": "!", "unknown": "?"}
_ORDER = ("drifted", "unknown", "in_sync")
_COLOURS = {"in_sync": "#1f7a4d", "drifted": "#c0281e", "unknown": "#9a6400"}
# Of a strip: how tall a day is, so that it is read without colours too.
_TALL = {"in_sync": 6, "unknown": 12, "drifted": 18}
_SEVERITY_ORDER = {"critical": 0, "warning": 1, "note": 3}


def render(document: t.Mapping[str, t.Any], history: t.Iterable[bytes], now: float) -> str:
    """The page's text."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(view(document, history, now))


def view(document: t.Mapping[str, t.Any], history: t.Iterable[bytes], now: float) -> JSON:
    """All that the template shows."""
    names = [host["name"] for host in document["hosts"]]
    past = drift_history.of_hosts(history, names, now, HISTORY_DAYS, TURNS)
    new = {
        (change["host"], change["server"], change["item"]) for change in document["changes"] if change["what"] == "new"
    }
    ordered = sorted(document["hosts"], key=lambda host: (_ORDER.index(host["verdict"]), _natural(host["name"])))
    hosts = [_host(host, f"h{index}", past[host["name"]], new, now) for index, host in enumerate(ordered)]
    run = document["run"]
    counts = document["counts"]
    return {
        "title": _title(counts["hosts"]),
        "headline": headline(counts["hosts"]),
        "verdict": document["verdict"],
        "icon": _icon(document["verdict"]),
        "signs": SIGNS,
        "words": WORDS,
        "order": _ORDER,
        "checked": _when(document["generated_at"]),
        "facts": _facts(document, run),
        "alerts": _alerts(document, run),
        "notes": run["notes"],
        "counts": counts,
        "hosts": hosts,
        "named": len(hosts) <= NAMED_TILES,
        "filter": len(hosts) >= FILTER_FROM,
        "changes": [_change(each) for each in document["changes"][:SHOWN_CHANGES]],
        "more_changes": max(0, len(document["changes"]) - SHOWN_CHANGES) + document["changes_cut"],
        "days": HISTORY_DAYS,
        "cell": CELL,
        "height": HEIGHT,
    }


def headline(hosts: t.Mapping[str, int]) -> str:
    """The fleet in one line."""
    total = sum(hosts.values())
    plural = "hosts" if total != 1 else "host"
    if not total:
        return "No host was checked"
    if hosts["in_sync"] == total:
        return f"All {total} {plural} in sync" if total > 1 else "The host is in sync"
    parts = [f"{hosts[verdict]} {WORDS[verdict]}" for verdict in ("drifted", "unknown") if hosts[verdict]]
    return f"{' and '.join(parts)} of {total} {plural}"


def _title(hosts: t.Mapping[str, int]) -> str:
    return f"Drift: {headline(hosts)}"


def _icon(verdict: str) -> str:
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
        f'<circle cx="8" cy="8" r="7" fill="{_COLOURS[verdict]}"/></svg>'
    )
    return "data:image/svg+xml," + quote(svg)


def _facts(document: t.Mapping[str, t.Any], run: t.Mapping[str, t.Any]) -> list[str]:
    facts = [f"took {_duration(run['seconds'])}"]
    if run["limit"] is not None:
        facts.append(f"this run asked {run['hosts']} of the hosts (limit {run['limit']})")
    if run["inventory"]:
        facts.append("inventory " + ", ".join(run["inventory"]))
    success = document["last_success_at"]
    if document["verdict"] == "unknown":
        facts.append(f"every host was last seen {_when(success)}" if success else "never yet was every host seen")
    told = document["notification"]
    if told is not None and told["ok"]:
        facts.append(f"last notified {_when(told['at'])}")
    return facts


def _alerts(document: t.Mapping[str, t.Any], run: t.Mapping[str, t.Any]) -> list[str]:
    alerts = [f"The run could not do its work: {problem}" for problem in run["problems"]]
    told = document["notification"]
    if told is not None and not told["ok"]:
        alerts.append(f"Nobody was notified: {told['command']}: {told['problem']}")
    return alerts


def _change(change: t.Mapping[str, t.Any]) -> JSON:
    if change["what"] == "verdict":
        before = WORDS.get(change["before"], "not checked")
        words = f"{before} \N{RIGHTWARDS ARROW} {WORDS.get(change['now'], 'no longer checked')}"
        sign = SIGNS.get(change["now"], "\N{MINUS SIGN}")
        return {"host": change["host"], "words": words, "sign": sign, "kind": change["now"] or "gone"}
    name = f"{change['server']}: {change['item']}" if change["server"] else change["item"]
    sign, kind = ("+", "new") if change["what"] == "new" else ("\N{MINUS SIGN}", "gone")
    return {"host": change["host"], "words": name, "sign": sign, "kind": kind}


def _host(
    host: t.Mapping[str, t.Any], anchor: str, past: drift_history.HostHistory, new: set[tuple[t.Any, ...]], now: float
) -> JSON:
    own = host["host"]
    rows = sorted(rows_of(host), key=_weight)
    gpus = [] if own is None else [_gpu(gpu) for gpu in own["gpus"]]
    last = host["last_answer"]
    return {
        "anchor": anchor,
        "name": host["name"],
        "verdict": host["verdict"],
        "state": host["state"].replace("_", " "),
        "problem": host["problem"],
        "since": _since(host["verdict_since"], now),
        "checked": _when(host["checked_at"]),
        "in_this_run": host["in_this_run"],
        "last_answer": None if last is None else _last(last),
        "rows": [_row(row, (host["name"], row["server"], row["item"]) in new, now) for row in rows],
        "accepted": [_row(row, False, now) for row in accepted_of(host)],
        "line": _line(host),
        "servers": [_server(server) for server in host["servers"]],
        "gpus": gpus,
        "gpu_line": _gpu_line(gpus),
        "bars": bars([gpu["share"] for gpu in gpus]),
        "bars_width": len(gpus) * (BAR + BAR_GAP),
        "driver": None if own is None else own["driver_version"],
        "memory": None if own is None else _memory(own["memory"]),
        "simulated": own is not None and own["simulated"],
        "strip": strip(past.days),
        "strip_words": _strip_words(past.days),
        "turns": [{"at": _when(turn.at), "verdict": turn.verdict} for turn in reversed(past.turns)],
    }


def _last(last: t.Mapping[str, t.Any]) -> str:
    """When a host answered last, with what."""
    names = [
        f"{row['server']}: {row['item']}" if row["server"] else row["item"]
        for row in last["rows"]
        if row["state"] != "accepted" and row["severity"] != "note"
    ]
    more = f" and {len(names) - SHOWN_LAST} more" if len(names) > SHOWN_LAST else ""
    rows = f" ({', '.join(names[:SHOWN_LAST])}{more})" if names else ""
    return f"{_when(last['at'])}: {WORDS[last['verdict']]}{rows}"


def _weight(row: t.Mapping[str, t.Any]) -> tuple[t.Any, ...]:
    unknown = row["state"] == "unknown" and row["severity"] != "note"
    return 2 if unknown else _SEVERITY_ORDER[row["severity"]], row["server"] or "", row["item"]


def _row(row: t.Mapping[str, t.Any], new: bool, now: float) -> JSON:
    unknown = row["state"] == "unknown"
    return {
        "server": row["server"],
        "item": row["item"],
        "wanted": None if unknown else _value(row["wanted"]),
        "found": _value(row["found"]),
        "unset": row["found"] is None,
        "wanted_unset": row["wanted"] is None,
        "where": " + ".join((row["where"], *row["also"])),
        "kind": "unknown" if unknown else row["severity"],
        "label": "unknown" if unknown else row["severity"],
        "expired": row["state"] == "expired_acceptance",
        "reason": row["reason"],
        "remedy": row["remedy"],
        "since": _since(row["since"], now),
        "new": new,
    }


def _value(value: t.Any) -> str:
    words = shown(value)
    return words if len(words) <= VALUE_LIMIT else words[: VALUE_LIMIT - 4] + " ..."


def _line(host: t.Mapping[str, t.Any]) -> str:
    """A host in sync in one line."""
    servers = [server["name"] for server in host["servers"]]
    accepted = host["counts"]["accepted"]
    words = ", ".join(servers[:4]) + (f" and {len(servers) - 4} more" if len(servers) > 4 else "")
    return " \N{MIDDLE DOT} ".join(part for part in (words, f"{accepted} accepted" if accepted else "") if part)


def _server(server: t.Mapping[str, t.Any]) -> JSON:
    facts = []
    if server["running"] is True:
        facts.append(f"pid {server['pid']}")
        facts.append(f"up {_duration(server['uptime_s'])}" if server["uptime_s"] is not None else "")
    elif server["running"] is False:
        facts.append("does not run")
    if server["health"] is not None:
        facts.append(f"health {server['health']}")
    if server["launch_id"]:
        facts.append(f"launch {server['launch_id']}")
    if server["engine_keys_compared"]:
        facts.append(f"{server['engine_keys_compared']} resolved values compared")
    return {
        "name": server["name"],
        "verdict": server["verdict"],
        "facts": " \N{MIDDLE DOT} ".join(filter(None, facts)) or "not seen",
    }


def _gpu(gpu: t.Mapping[str, t.Any]) -> JSON:
    used, total = gpu["used_mib"], gpu["total_mib"]
    known = used is not None and total
    holders = [f"{each['title'] or '?'} (pid {each['pid']})" for each in gpu["holders"]]
    return {
        "label": "GPU ?" if gpu["index"] is None else f"GPU {gpu['index']}",
        "name": gpu["name"],
        "share": min(100.0, 100.0 * used / total) if known else None,
        "words": f"{used / 1024:,.1f} of {total / 1024:,.1f} GiB" if known else "memory could not be read",
        "holders": ", ".join(holders[:8]) + (f" and {len(holders) - 8} more" if len(holders) > 8 else ""),
    }


def _gpu_line(gpus: t.Sequence[JSON]) -> str:
    shares = [gpu["share"] for gpu in gpus]
    unread = sum(share is None for share in shares)
    text = ", ".join("?" if share is None else f"{share:.0f} %" for share in shares)
    return f"memory of {len(gpus)} GPUs in use: {text}" + (f"; {unread} could not be read" if unread else "")


def _memory(memory: t.Mapping[str, t.Any]) -> t.Optional[str]:
    total, free = memory["total_mib"], memory["available_mib"]
    if total is None or free is None:
        return None
    return f"{free / 1024:,.1f} of {total / 1024:,.1f} GiB available"


def bars(shares: t.Sequence[t.Optional[float]]) -> JSON:
    """Small bars, as paths of an SVG: the tracks, what is in use, and what is not known."""
    paths: dict[str, list[str]] = {"track": [], "used": [], "unread": []}
    for index, share in enumerate(shares):
        x = index * (BAR + BAR_GAP)
        box = f"M{x} 0h{BAR}v{BAR_HEIGHT}h-{BAR}z"
        paths["track"].append(box)
        if share is None:
            paths["unread"].append(f"M{x} {BAR_HEIGHT}l{BAR} -{BAR_HEIGHT}")
        elif share > 0:
            tall = max(1, math.ceil(share / 100 * BAR_HEIGHT))
            paths["used"].append(f"M{x} {BAR_HEIGHT}v-{tall}h{BAR}v{tall}z")
    return {name: "".join(parts) for name, parts in paths.items()}


def strip(days: t.Sequence[t.Optional[str]]) -> JSON:
    """Days as one path for each verdict; days of the same verdict that follow each other are one box."""
    paths: dict[str, list[str]] = {verdict: [] for verdict in _TALL}
    index = 0
    while index < len(days):
        verdict = days[index]
        end = index
        while end < len(days) and days[end] == verdict:
            end += 1
        if verdict is not None:
            wide, tall = (end - index) * CELL, _TALL[verdict]
            paths[verdict].append(f"M{index * CELL} {HEIGHT}v-{tall}h{wide}v{tall}z")
        index = end
    return {verdict: "".join(parts) for verdict, parts in paths.items()}


def _strip_words(days: t.Sequence[t.Optional[str]]) -> str:
    parts = [f"{days.count(verdict)} {WORDS[verdict]}" for verdict in _ORDER if verdict in days]
    unseen = days.count(None)
    parts += [f"{unseen} not checked"] if unseen else []
    return f"last {len(days)} days, by the worst of each: {', '.join(parts)}"


def _since(text: str, now: float) -> str:
    moment = moment_of(text)
    if moment is None:
        return "?"
    age = now - moment
    return _when(text) if age < 60 else f"{_when(text)} ({_duration(age)})"


def _when(text: str) -> str:
    return f"{text[:10]} {text[11:16]}{_NBSP}UTC"


def _duration(seconds: float) -> str:
    """In one unit, which stays on the line of its number."""
    if seconds < 60:
        words = f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    elif seconds < 3600:
        words = f"{seconds / 60:.0f} min"
    elif seconds < 2 * 86400:
        words = f"{seconds / 3600:.0f} h"
    else:
        words = f"{seconds / 86400:.0f} d"
    return words.replace(" ", _NBSP)


def _natural(name: str) -> list[tuple[int, t.Any]]:
    """gpu2 before gpu10."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part]
