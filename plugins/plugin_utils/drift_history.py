# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The history of drift checks, history.jsonl: one JSON object a line, pure functions over lines.

Each run adds a line. After ``FINE_DAYS`` the lines of a day become one, with each host's worst verdict of that day;
beyond the days to keep the oldest go, and where the file is still too large more of them. So years of checks stay a
few megabytes. Only days with checks are counted: a clock that once was wrong makes nothing old.
"""

from __future__ import annotations

import itertools
import json
import typing as t
from dataclasses import dataclass

from .drift_answers import JSON, worst
from .drift_document import fleet_verdict, iso, lead, moment_of, rows_of

VERSION = 1
FINE_DAYS = 7
ITEM_LIMIT = 20
DAY_S = 86400
_ROOM = 0.8  # a file that was too large is cut to this part of its limit, lest each run cuts it again
_ORDER = {"in_sync": 0, "unknown": 1, "drifted": 2}
_COUNTS = ("critical", "warning", "note", "unknown", "accepted")


@dataclass(frozen=True)
class Limits:
    """How long and how much is kept."""

    days: int
    megabytes: float

    @property
    def size(self) -> int:
        return int(self.megabytes * 1e6)


@dataclass(frozen=True)
class Turn:
    """A host's verdict became another one."""

    at: str
    verdict: str


@dataclass
class HostHistory:
    """One host: the worst verdict of each of the last days (None: not checked), the newest last, and its turns."""

    days: list[t.Optional[str]]
    turns: list[Turn]


def line_of(document: t.Mapping[str, t.Any]) -> JSON:
    """The line of a run: its own hosts only. What is zero is left out."""
    run = document["run"]
    return {
        "v": VERSION,
        "at": run["finished_at"],
        "run": run["id"],
        "verdict": run["verdict"],
        "status": run["status"],
        "seconds": run["seconds"],
        "hosts": {host["name"]: _entry(host) for host in document["hosts"] if host["in_this_run"]},
    }


def _entry(host: t.Mapping[str, t.Any]) -> JSON:
    entry: JSON = {"verdict": host["verdict"]}
    entry.update({name: host["counts"][name] for name in _COUNTS if host["counts"][name]})
    if host["verdict"] != "in_sync":
        if host["state"] != "answered":
            entry["why"] = lead(host)[:200]
        names = [f"{row['server']}/{row['item']}" if row["server"] else row["item"] for row in rows_of(host)]
        if names:
            entry["items"] = names[:ITEM_LIMIT]
    return entry


def dump(line: t.Mapping[str, t.Any]) -> bytes:
    """A line as it stands in the file. ASCII, so that no reader can cut a character in two."""
    return json.dumps(line, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode() + b"\n"


def parse(raw: bytes) -> t.Optional[JSON]:
    """A line of the file, or None for one that is none of ours: cut short, edited, of a later version."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or line.get("v") != VERSION or not isinstance(line.get("hosts"), dict):
        return None
    if moment_of(line.get("at")) is None:
        return None
    hosts = line["hosts"].values()
    return line if all(isinstance(each, dict) and str(each.get("verdict")) in _ORDER for each in hosts) else None


def needs_compaction(first: t.Optional[bytes], last: t.Optional[bytes], size: int, now: float, limits: Limits) -> bool:
    """Whether the file is to be written anew: it is too large, or a new day has begun since its last line."""
    if size > limits.size:
        return True
    lines = [line for line in (parse(raw) for raw in (first, last) if raw) if line]
    return len(lines) == 2 and _day(lines[1]) != _day_of(now)


def compact(raw_lines: t.Iterable[bytes], now: float, limits: Limits, reserve: int = 0) -> list[bytes]:
    """The lines that stay, the oldest first, as bytes. ``reserve``: bytes of the line that is added after them, at
    the time ``now``."""
    kept = []
    for raw in raw_lines:
        line = parse(raw)
        if line is not None:
            kept.append((_moment(line), raw if raw.endswith(b"\n") else raw + b"\n", line))
    kept.sort(key=lambda each: each[0])
    days = sorted({_day_of(moment) for moment, _raw, _line in kept} | {_day_of(now)})
    oldest, fine = days[-limits.days :][0], days[-FINE_DAYS:][0]
    kept = [each for each in kept if _day_of(each[0]) >= oldest]
    written: list[bytes] = []
    for day, group in itertools.groupby(kept, key=lambda each: _day_of(each[0])):
        of_day = list(group)
        if day >= fine or (len(of_day) == 1 and "runs" in of_day[0][2]):
            written += [raw for _moment_of_line, raw, _line in of_day]
        else:
            written.append(dump(merge_day([line for _moment_of_line, _raw, line in of_day])))
    total = sum(map(len, written)) + reserve
    if total <= limits.size:
        return written
    first = 0
    while first < len(written) - 1 and total > limits.size * _ROOM:
        total -= len(written[first])
        first += 1
    return written[first:]


def merge_day(lines: t.Sequence[JSON]) -> JSON:
    """One line for a day: for each host the entry of its worst verdict, and of those the one with the most rows."""
    hosts: dict[str, JSON] = {}
    for line in lines:
        for name, entry in line["hosts"].items():
            if name not in hosts or _weight(entry) > _weight(hosts[name]):
                hosts[name] = entry
    last = lines[-1]
    return {
        "v": VERSION,
        "at": last["at"],
        "run": last["run"],
        "runs": sum(_whole(line.get("runs"), 1) for line in lines),
        "verdict": fleet_verdict(entry["verdict"] for entry in hosts.values()),
        "status": last.get("status"),
        "seconds": last.get("seconds"),
        "hosts": hosts,
    }


def _weight(entry: t.Mapping[str, t.Any]) -> tuple[int, int]:
    return _ORDER[entry["verdict"]], sum(_whole(entry.get(name), 0) for name in _COUNTS)


def _whole(value: t.Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _moment(line: t.Mapping[str, t.Any]) -> float:
    return moment_of(line["at"]) or 0.0


def _day_of(moment: float) -> int:
    return int(moment // DAY_S)


def _day(line: t.Mapping[str, t.Any]) -> int:
    return _day_of(_moment(line))


def of_hosts(lines: t.Iterable[bytes], names: t.Iterable[str], now: float, days: int, turns: int) -> dict[
    str, HostHistory
]:
    """The history of each of these hosts, for the page."""
    found = {name: HostHistory([None] * days, []) for name in names}
    first = _day_of(now) - days + 1
    last: dict[str, str] = {}
    for line in sorted((line for line in map(parse, lines) if line is not None), key=_moment):
        place = _day(line) - first
        for name, entry in line["hosts"].items():
            if name not in found:
                continue
            verdict = entry["verdict"]
            if last.get(name) != verdict:
                last[name] = verdict
                found[name].turns.append(Turn(line["at"], verdict))
            if 0 <= place < days:
                was = found[name].days[place]
                found[name].days[place] = verdict if was is None else worst([was, verdict])
    for history in found.values():
        history.turns = history.turns[-turns:]
    return found


def day_names(now: float, days: int) -> list[str]:
    """The dates of the last days, the newest last."""
    return [iso(now - back * DAY_S)[:10] for back in range(days - 1, -1, -1)]
