# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Servers over several hosts (nnodes above 1): which entries of the inventory belong together.

Pure functions. A unit is one server with its members, one per host. They belong together by the server's name and its
dist_init_addr: two different servers of one name have different addresses. What happens to all of them from what became
of each is in together.py.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from ..module_utils.decide.topology import Flags
from ..module_utils.sglang.flags import Difference, differences

JSON = dict[str, t.Any]
Settings = t.Mapping[str, t.Any]
# Per host the complete settings of its servers.
Fleet = t.Mapping[str, t.Sequence[Settings]]
NODE_RANK = "node-rank"
MOST_NODES = 1000


@dataclass(frozen=True)
class Member:
    """One node of a unit. ``rank`` is None where its entry has no usable one."""

    host: str
    server: str
    rank: t.Optional[int]

    @property
    def name(self) -> str:
        return f"{self.host}/{self.server}"


@dataclass(frozen=True)
class Unit:
    """One server over several hosts. ``members`` are those in play, in the order of their ranks; ``problems``: why they
    are no whole server, each as one sentence; ``missing``: ranks of nobody in play."""

    server: str
    address: str
    nodes: int
    members: tuple[Member, ...]
    problems: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(member.host for member in self.members)

    @property
    def name(self) -> str:
        """How people call it: its first host's name stands for all of them."""
        return f"{self.server} over {', '.join(self.hosts)}"


def nodes_of(settings: Settings) -> t.Optional[int]:
    """Over how many hosts a server is spread; None where its flags say something that is no number."""
    flags = settings.get("flags")
    return Flags(flags).whole("nnodes", 1) if isinstance(flags, t.Mapping) else 1


def is_spread(settings: Settings) -> bool:
    return (nodes_of(settings) or 1) > 1


def rank_of(settings: Settings) -> t.Optional[int]:
    """The node's own rank; None where its flags say something that is no number from 0."""
    rank = Flags(settings.get("flags") or {}).whole(NODE_RANK, 0)
    return rank if rank is not None and rank >= 0 else None


def address_of(settings: Settings) -> str:
    return (Flags(settings.get("flags") or {}).text("dist-init-addr") or "").strip()


def units_of(fleet: Fleet, in_play: t.Sequence[str]) -> tuple[Unit, ...]:
    """All units with a member in play, in the order of the inventory. ``fleet`` may have hosts beyond those."""
    found: dict[tuple[str, str], list[tuple[str, Settings]]] = {}
    for host, servers in fleet.items():
        for settings in servers:
            if is_spread(settings):
                key = (str(settings.get("name")), address_of(settings))
                found.setdefault(key, []).append((host, settings))
    return tuple(
        _unit(server, address, entries, in_play, {other for name, other in found if name == server} - {address})
        for (server, address), entries in found.items()
        if any(host in in_play for host, _settings in entries)
    )


def _unit(
    server: str,
    address: str,
    entries: t.Sequence[tuple[str, Settings]],
    in_play: t.Sequence[str],
    others: t.Collection[str],
) -> Unit:
    ours = [(host, settings) for host, settings in entries if host in in_play]
    ours.sort(key=lambda entry: _order(rank_of(entry[1])))
    nodes = max(nodes_of(settings) or 1 for _host, settings in ours)
    members = tuple(Member(host, server, rank_of(settings)) for host, settings in ours)
    taken = {member.rank for member in members}
    missing = tuple(rank for rank in range(min(nodes, MOST_NODES)) if rank not in taken)
    away = {rank_of(settings): host for host, settings in entries if host not in in_play}
    unit = Unit(server, address, nodes, members, (), missing)
    problems = [*_count_problems(unit), *_address_problems(unit), *_rank_problems(unit)]
    problems += _missing_problems(unit, away, others)
    problems += _flag_problems(unit, ours)
    return Unit(server, address, nodes, members, tuple(problems), missing)


def _order(rank: t.Optional[int]) -> int:
    return rank if rank is not None else 1 << 30


def _head(unit: Unit) -> str:
    return f"server '{unit.server}' over several hosts ({', '.join(unit.hosts)}; nnodes {unit.nodes})"


def _count_problems(unit: Unit) -> list[str]:
    if unit.nodes <= MOST_NODES:
        return []
    return [f"{_head(unit)}: nnodes must be at most {MOST_NODES}; correct it"]


def _address_problems(unit: Unit) -> list[str]:
    if unit.address:
        return []
    return [
        f"{_head(unit)}: dist_init_addr is missing; give all of them the same one, the address of node 0 with a free "
        "port"
    ]


_EXAMPLE = "for example \"{{ groups['big'].index(inventory_hostname) }}\""


def _rank_problems(unit: Unit) -> list[str]:
    """Ranks that are none, or that several hosts have."""
    wrong = [
        member.host for member in unit.members if member.rank is None or not 0 <= member.rank < unit.nodes
    ]
    problems = [
        f"{_head(unit)}: node_rank of {host} is no number from 0 to {unit.nodes - 1}; correct it" for host in wrong
    ]
    for rank in sorted({member.rank for member in unit.members if member.rank is not None}):
        hosts = [member.host for member in unit.members if member.rank == rank]
        if len(hosts) > 1 and rank < unit.nodes:
            problems.append(
                f"{_head(unit)}: {', '.join(hosts)} all have node_rank {rank}; each host needs its own, {_EXAMPLE}"
            )
    return problems


def _missing_problems(unit: Unit, away: t.Mapping[t.Optional[int], str], others: t.Collection[str]) -> list[str]:
    """Ranks that nobody in play has: all nodes of a server go and come together."""
    problems = []
    out = [f"{rank} ({away[rank]})" for rank in unit.missing if rank in away]
    if out:
        problems.append(
            f"{_head(unit)}: node rank {', '.join(out)} is not in this run, and its hosts go and come together; run it "
            "without --limit, or with a limit and a target that have all of them"
        )
    nowhere = [str(rank) for rank in unit.missing if rank not in away]
    if len(nowhere) > 20:
        nowhere = [*nowhere[:20], f"and {len(nowhere) - 20} more"]
    if nowhere:
        elsewhere = f" (another '{unit.server}' has dist_init_addr {', '.join(sorted(others))})" if others else ""
        problems.append(
            f"{_head(unit)}: no host of the inventory has node rank {', '.join(nowhere)} with dist_init_addr "
            f"{unit.address or '(none)'}{elsewhere}; give it to a host, or correct nnodes"
        )
    return problems


def _flag_problems(unit: Unit, entries: t.Sequence[tuple[str, Settings]]) -> list[str]:
    """Flags that are not the same as on the first node. Secrets are not among the flags."""
    if not entries:
        return []
    first, settings = entries[0]
    return [
        f"{_head(unit)}: flag {each.item} is {_shown(each.wanted)} on {first} and {_shown(each.found)} on {host}; all "
        "nodes need the same flags but node_rank"
        for host, other in entries[1:]
        for each in _differing(settings, other)
    ]


def _differing(one: Settings, other: Settings) -> list[Difference]:
    found = differences(one.get("flags") or {}, other.get("flags") or {})
    return [each for each in found if each.item != NODE_RANK]


def _shown(value: t.Any) -> str:
    return "not set" if value is None else str(value)


def to_data(unit: Unit) -> JSON:
    """A unit for playbooks: {"server", "name", "address", "nodes", "hosts", "members": [{"host", "server", "rank"}],
    "missing", "problems"}."""
    return {
        "server": unit.server,
        "name": unit.name,
        "address": unit.address,
        "nodes": unit.nodes,
        "hosts": list(unit.hosts),
        "members": [{"host": each.host, "server": each.server, "rank": each.rank} for each in unit.members],
        "missing": list(unit.missing),
        "problems": list(unit.problems),
    }


def unit_with(units: t.Sequence[Unit], host: str, server: str) -> t.Optional[Unit]:
    """The unit that this server of this host belongs to; None: it is a server of one host."""
    return next((unit for unit in units if unit.server == server and host in unit.hosts), None)


def chosen_units(units: t.Sequence[Unit], chosen: t.Mapping[str, t.Sequence[str]]) -> tuple[Unit, ...]:
    """The units of which a member is chosen. ``chosen``: names of servers per host."""
    return tuple(
        unit for unit in units if any(unit.server in (chosen.get(member.host) or ()) for member in unit.members)
    )
