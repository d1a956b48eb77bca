# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a soak's rounds are held to: what has grown since the first one, and whether a claim is true.

It trusts nothing of the product: a census (tests/fixtures/census.py) is taken past sshd, and everything is counted by
the kind of its name, digits removed.
"""

from __future__ import annotations

import fnmatch
import re
import typing as t
from collections import Counter
from dataclasses import dataclass, field

Json = t.Mapping[str, t.Any]
Counts = t.Mapping[tuple[str, str], int]

_LAUNCH = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{4}")
_VARIABLE = re.compile(r"(?<![A-Za-z])[0-9a-f]{4,}(?![A-Za-z])|[0-9]+")
_RANDOM = re.compile(r"^tmp[A-Za-z0-9_]{8}$")
TITLE = 60
MIB = 1 << 20

# What may be there though it was not after the first round: what -> pattern of the kind -> how many. A login's manager
# stays ten seconds longer than the login.
PASSING: t.Mapping[tuple[str, str], int] = {
    ("process", "/lib/systemd/systemd --user"): 2,
    ("process", "/usr/lib/systemd/systemd --user"): 2,
    ("process", "(sd-pam)"): 2,
    ("process", "/usr/bin/dbus-daemon --session*"): 2,
    ("unit", "user@N.service"): 2,
    ("unit", "user-runtime-dir@N.service"): 2,
    ("unit", "user-N.slice"): 2,
    ("unit", "user.slice"): 1,
    ("unit", "system-*.slice"): 1,
    ("unit", "run-user-N.mount"): 2,
    ("mount", "/run/user/N"): 2,
    ("cgroup", "user.slice*"): 2,
    ("cgroup", "*/user.slice*"): 2,
    ("/run", "nologin"): 1,
    ("/run/systemd/transient", "user*"): 2,
    ("/run", "sglang-chat"): 1,  # the server's own, while it runs
    ("unit", "sglang-chat.service"): 1,
    ("state", "chat/*"): 1,
}
# Of numbers: so much more than after the first round.
SLACK: t.Mapping[str, int] = {"fds": 6, "bytes": 2 * MIB}


def kind(name: str) -> str:
    """A name without what differs between two of its kind."""
    parts = ["tmpN" if _RANDOM.match(part) else _VARIABLE.sub("N", _LAUNCH.sub("N", part)) for part in name.split("/")]
    return re.sub(r"N(?:[-_.]?N)+", "N", "/".join(parts))


def counts(census: Json) -> dict[tuple[str, str], int]:
    """How many of each kind there are: (what, kind) -> number."""
    found: Counter[tuple[str, str]] = Counter()
    for one in census["processes"]:
        if one["state"] in "ZX":
            found["zombie", kind(one["comm"])] += 1
            continue
        found["process", kind(one["title"] or f"[{one['comm']}]")[:TITLE]] += 1
        if one["pid"] == 1 or (one["parent"] == 1 and one["comm"] in ("sshd", "dbus-daemon", "systemd-logind")):
            found["fds", one["comm"]] += one["fds"]
    for what in ("shm", "state"):
        for name, size in census[what].items():
            found[what, kind(name)] += 1
            found["bytes", what] += size
    for folder, names in census["folders"].items():
        for name in names:
            found[folder, kind(name)] += 1
    for what in ("units", "mounts", "cgroups"):
        for name in census[what]:
            found[what[:-1], kind(name)] += 1
    return dict(found)


@dataclass(frozen=True)
class Growth:
    """More of a kind than there may be."""

    what: str
    name: str
    number: int
    most: int

    def __str__(self) -> str:
        return f"{self.what}: {self.number} x {self.name}, at most {self.most}"


@dataclass(frozen=True)
class Bounds:
    """``base``: what there was after the first round; ``most``: what the product promises of a kind, whatever that was.
    """

    base: Counts
    most: t.Mapping[tuple[str, str], int] = field(default_factory=dict)

    def of(self, what: str, name: str) -> int:
        """How many of a kind there may be."""
        rules = [*PASSING.items(), *self.most.items()]
        allowed = [number for (group, pattern), number in rules if group == what and _like(name, pattern)]
        return max(self.base.get((what, name), 0) + SLACK.get(what, 0), *allowed, 0)

    def grown(self, now: Counts) -> list[Growth]:
        """What is beyond its bound, the most first."""
        over = [Growth(*key, number, self.of(*key)) for key, number in now.items() if number > self.of(*key)]
        return sorted(over, key=lambda one: (one.most - one.number, one.what, one.name))


def _like(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def totals(now: Counts) -> dict[str, int]:
    """The sums that a round's line shows."""
    found: Counter[str] = Counter()
    for (what, name), number in now.items():
        found[f"{name} bytes" if what == "bytes" else what] += number
    return dict(found)


# --- claims -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """What a run said of the server. ``state``: ``serves`` (with this many tokens as its flag), ``nobody`` (nothing of
    it runs), ``open`` (nothing was said). ``pid``: it must be this one.
    """

    state: str
    tokens: int | None = None
    pid: int | None = None


def untrue(claim: Claim, census: Json, record: Json | None, holders: t.Collection[int]) -> list[str]:
    """What of a claim is not so. ``record``: the host's current record; ``holders``: who maps the GPU readable."""
    server = census["server"]
    living = {one["pid"]: one for one in census["processes"] if one["state"] not in "ZX"}
    if claim.state == "open":
        return []
    if claim.state == "nobody":
        heard = [(pid, living[pid]["title"]) for pid in server["listeners"] if pid in living]
        return [f"nobody should serve, but pid {pid} listens: {title}" for pid, title in heard if "sglang" in title]
    if record is None:
        return ["there is no record"]
    pid = record.get("pid")
    found = []
    if pid not in living or living[pid]["ticks"] != record.get("start_ticks"):
        found.append(f"pid {pid} of the record does not live")
    if claim.pid not in (None, pid):
        found.append(f"pid {claim.pid} was there, the record has {pid}")
    if pid not in server["listeners"]:
        found.append(f"pid {pid} of the record does not listen: {server['listeners']} do")
    if server["health"] != 200:
        found.append(f"/health says {server['health']}")
    if not server["text"]:
        found.append("it gives no tokens")
    if claim.tokens is not None and server["info"].get("max_total_tokens") != claim.tokens:
        found.append(f"it runs with {server['info'].get('max_total_tokens')}, wanted {claim.tokens}")
    if not holders:
        found.append("nobody holds its GPU")
    strangers = [one for one in holders if not _below(one, pid, living)]
    if strangers:
        found.append(f"{strangers} hold its GPU and are not of its tree")
    return found


def _below(pid: int, top: t.Any, living: t.Mapping[int, Json]) -> bool:
    while pid in living and pid != top:
        pid = living[pid]["parent"]
    return pid == top
