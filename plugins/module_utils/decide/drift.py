# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where what runs differs from what was chosen. Pure: what was seen comes in as values, and rows go out.

A difference is one row, by its item, however many places show it: ``where`` is the deepest place, ``also`` the others.
What could not be looked at is a row of the state ``unknown``, never silence. A row of the severity ``note`` tells
something and changes no verdict.
"""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import re
import typing as t
from dataclasses import dataclass

PLACES = ("host", "file", "process", "engine")
"""The deeper a place, the nearer it is to what really answers."""

_SEVERITIES = ("note", "warning", "critical")
_UNTIL = re.compile(r"\buntil:? *(\d{4}-\d\d-\d\d)\b", re.IGNORECASE)
_WILDCARD = re.compile(r"[*?\[]")
_SUBJECT = re.compile(r"\w{3}")
LOOK = "look at it as root; nothing was changed"


@dataclass(frozen=True)
class Row:
    """One difference. ``state``: drift, unknown, accepted or expired_acceptance. ``reason``: of the acceptance."""

    server: t.Optional[str]
    item: str
    wanted: t.Any
    found: t.Any
    where: str
    severity: str
    remedy: str
    state: str = "drift"
    also: tuple[str, ...] = ()
    reason: t.Optional[str] = None


def unknown(server: t.Optional[str], item: str, why: str, where: str = "host", remedy: str = LOOK) -> Row:
    """What could not be looked at, and why."""
    return Row(server, item, None, why, where, "warning", remedy, "unknown")


def note(server: t.Optional[str], item: str, wanted: t.Any, found: t.Any, where: str, remedy: str) -> Row:
    """What is worth knowing and changes no verdict."""
    return Row(server, item, wanted, found, where, "note", remedy)


@dataclass(frozen=True)
class Acceptance:
    """Drift that is accepted: of one server (or `*`), by item (a pattern), until the end of a day (UTC)."""

    server: str
    item: str
    reason: str
    until: datetime.date

    def covers(self, row: Row) -> bool:
        """Whether it speaks of this row. Rows of the host are covered by `*` alone."""
        return self.server in ("*", row.server) and fnmatch.fnmatchcase(row.item, self.item)


def merge(rows: t.Iterable[Row]) -> tuple[Row, ...]:
    """One row for each server and item: that of the deepest place, with the other places beside it. What was seen
    outranks what could not be seen; only a note does not, since it changes no verdict."""
    found: dict[tuple[t.Optional[str], str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.server, row.item), []).append(row)
    return tuple(row for same in found.values() for row in _merged(same))


def _merged(rows: t.Sequence[Row]) -> t.Iterator[Row]:
    seen = [row for row in rows if row.state != "unknown"]
    hidden = [row for row in rows if row.state == "unknown"]
    if seen:
        yield _deepest(seen)
    if hidden and all(row.severity == "note" for row in seen):
        yield _deepest(hidden)


def _deepest(rows: t.Sequence[Row]) -> Row:
    deepest = max(rows, key=lambda row: PLACES.index(row.where))
    severity = max((row.severity for row in rows), key=_SEVERITIES.index)
    others = {row.where for row in rows} - {deepest.where}
    return dataclasses.replace(deepest, severity=severity, also=tuple(place for place in PLACES if place in others))


def settle(
    rows: t.Iterable[Row], accepted: t.Sequence[Acceptance], today: datetime.date
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """(what stands, what is accepted) of rows that are not merged yet. Where a difference is accepted, what could not
    be seen of the same item stands beside it: the acceptance speaks of what was seen."""
    given = tuple(rows)
    standing, fine = accept(merge(given), accepted, today)
    items = {(row.server, row.item) for row in fine}
    hidden = [row for row in given if row.state == "unknown" and (row.server, row.item) in items]
    return (*standing, *merge(hidden)), fine


def accept(
    rows: t.Iterable[Row], accepted: t.Sequence[Acceptance], today: datetime.date
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """(what stands, what is accepted). Unknown is never accepted away: nobody knows what it hides. An acceptance that
    has expired makes its row stand again; one that has expired and covers nothing is a note of its own."""
    standing, fine = [], []
    used: set[int] = set()
    for row in rows:
        covering = [(number, one) for number, one in enumerate(accepted) if one.covers(row)]
        used.update(number for number, _one in covering)
        valid = [one for _number, one in covering if one.until >= today]
        if row.state != "drift" or row.severity == "note" or not covering:
            standing.append(row)
        elif valid:
            fine.append(dataclasses.replace(row, state="accepted", reason=valid[0].reason))
        else:
            last = max((one for _number, one in covering), key=lambda one: one.until)
            reason = f"{last.reason} (accepted until {last.until.isoformat()})"
            standing.append(dataclasses.replace(row, state="expired_acceptance", reason=reason))
    for number, one in enumerate(accepted):
        if one.until < today and number not in used:
            standing.append(_expired(one))
    return tuple(standing), tuple(fine)


def lost(accepted: t.Sequence[Acceptance], servers: t.Collection[str]) -> tuple[Row, ...]:
    """Notes of acceptances for servers that are not there: a name may be misspelt."""
    rows = []
    for one in accepted:
        if one.server != "*" and one.server not in servers:
            known = ", ".join(sorted(servers)) or "none"
            found = f"there is no server {one.server!r} (there are: {known})"
            remedy = "correct or remove the acceptance in the inventory"
            item = f"acceptance:{one.server}/{one.item}"
            rows.append(note(None, item, "a server of this host", found, "host", remedy))
    return tuple(rows)


def _expired(one: Acceptance) -> Row:
    return Row(
        server=None if one.server == "*" else one.server,
        item=f"waiver_expired:{one.item}",
        wanted=f"accepted until {one.until.isoformat()}: {one.reason}",
        found="nothing that it covers",
        where="host",
        severity="note",
        remedy="remove the acceptance from the inventory",
        state="expired_acceptance",
    )


def expired_waivers(
    server: str, waivers: t.Mapping[str, str], today: datetime.date, remedy: str
) -> tuple[Row, ...]:
    """Waivers of a server's plan whose reason names an end ("... until 2026-01-31"), the last day on which they hold,
    that has passed. Of several ends the last in the text counts: it was written when the waiver was extended."""
    rows = []
    for name, reason in sorted(waivers.items()):
        days = _UNTIL.findall(reason)
        if not days:
            continue
        item = f"waiver_expired:{name}"
        try:
            until = datetime.date.fromisoformat(days[-1])
        except ValueError:
            rows.append(unknown(server, item, f"its reason ends with no day of a calendar: until {days[-1]}", "file"))
            continue
        if until < today:
            found = f"it ended on {until.isoformat()}"
            rows.append(Row(server, item, reason, found, "file", "warning", remedy, "expired_acceptance"))
    return tuple(rows)


def verdict_of(rows: t.Iterable[Row]) -> str:
    """drifted outranks unknown, which outranks in_sync. Notes change nothing."""
    states = {row.state for row in rows if row.severity != "note"}
    if states & {"drift", "expired_acceptance"}:
        return "drifted"
    return "unknown" if "unknown" in states else "in_sync"


def parse_acceptance(raw: t.Mapping[str, t.Any], number: int) -> Acceptance:
    """From the inventory. Raises ValueError that says what is wrong with which one."""
    where = f"accepted[{number}]"
    for name in ("server", "item", "reason"):
        if not isinstance(raw.get(name), str) or not raw[name].strip():
            raise ValueError(f"{where}: {name} is missing; say which drift is accepted, where and why")
    try:
        until = datetime.date.fromisoformat(str(raw.get("until")))
    except ValueError as error:
        raise ValueError(f"{where}: until is {raw.get('until')!r}; write the last day like 2026-01-31") from error
    if _WILDCARD.search(raw["item"]) and not _SUBJECT.match(_WILDCARD.split(raw["item"])[0]):
        raise ValueError(
            f"{where}: item {raw['item']!r} would accept everything, or nearly so; name what is accepted, "
            f"with a word before the first wildcard, like env:NCCL_*"
        )
    return Acceptance(raw["server"], raw["item"], raw["reason"], until)
