# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over a server on several hosts: how far its nodes are, and what follows for all of them."""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.sglang.plugins.filter.inventory import plain_value
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import together
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.results import items, mapping

JSON = dict[str, t.Any]
HostVars = t.Mapping[str, t.Any]


def _fact(hostvars: HostVars, host: str, name: str) -> t.Any:
    """One fact of a host; None where it is not set, or the host is not known."""
    if host not in hostvars or name not in hostvars[host]:
        return None
    return plain_value(hostvars[host][name])


def _facts(hostvars: HostVars, unit: t.Mapping[str, t.Any], names: t.Mapping[str, str]) -> dict[str, JSON]:
    """These facts of each host of the server under other names, each absent where it is not set."""
    found = {host: {key: _fact(hostvars, host, name) for key, name in names.items()} for host in unit["hosts"]}
    return {host: {key: value for key, value in row.items() if value is not None} for host, row in found.items()}


def spread_behind(hostvars: HostVars, unit: t.Mapping[str, t.Any], at: str) -> list[str]:
    """The nodes that did not come to this point."""
    return together.behind(plain_value(unit), _facts(hostvars, unit, {"at": "spread_at"}), at)


def spread_next(hostvars: HostVars, unit: t.Mapping[str, t.Any], host: str, path: str = "first") -> JSON:
    """What follows for this host after a path failed on one of them."""
    if path == "first":
        names = {"next": "relaunch_alone", "first": "relaunch_first", "choice": "relaunch_choice"}
        rows = _facts(hostvars, unit, names)
    else:
        seen = _facts(hostvars, unit, {"second": "relaunch_second"})
        rows = {
            name: {"next": mapping(mapping(row, "second"), "alone"), "first": mapping(row, "second")}
            for name, row in seen.items()
        }
    return together.next_steps(plain_value(unit), rows)[host]


def spread_start(hostvars: HostVars, unit: t.Mapping[str, t.Any], wanted: str = "", not_run: str = "") -> JSON:
    """The launches to go back to, one per host, that were proved together."""
    rows = _facts(hostvars, unit, {"launches": "spread_launches"})
    launches = {host: items(mapping(row, "launches"), unit["server"]) for host, row in rows.items()}
    return together.choose_start(plain_value(unit), launches, wanted, not_run)


def spread_trials(hostvars: HostVars, unit: t.Mapping[str, t.Any]) -> JSON:
    """Whether all go back, after the kept launch of each host was tried."""
    rows = _facts(hostvars, unit, {"trial": "rollback_result"})
    return together.after_trials(plain_value(unit), {host: row.get("trial") or {} for host, row in rows.items()})


_OF_OUTCOME = {
    "failed": "relaunch_failed",
    "first": "relaunch_first",
    "second": "relaunch_second",
    "stopped": "relaunch_stopped",
    "next": "relaunch_next",
    "trial": "rollback_result",
}


def spread_outcome(hostvars: HostVars, unit: t.Mapping[str, t.Any], from_launch: str = "") -> str:
    """What became of all nodes, in one sentence."""
    rows = {}
    for host, row in _facts(hostvars, unit, _OF_OUTCOME).items():
        failed, second = mapping(row, "failed"), mapping(row, "second")
        told = {"message": failed.get("message"), "held_first": failed.get("held"), "held_second": second.get("held")}
        rest = {key: value for key, value in row.items() if key != "failed"}
        rows[host] = {**rest, **told, "from_launch": from_launch} if failed else {}
    return together.unit_outcome(plain_value(unit), rows)


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "spread_behind": spread_behind,
            "spread_next": spread_next,
            "spread_outcome": spread_outcome,
            "spread_start": spread_start,
            "spread_trials": spread_trials,
        }
