# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over an inventory: its mistakes, the choice of servers, one server's complete settings."""

from __future__ import annotations

import itertools
import typing as t

from ansible.errors import AnsibleError, AnsibleFilterError
from jinja2 import TemplateError, Undefined

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import inventory, spread

Problems = list[str]


def inventory_problems(hostvars: t.Mapping[str, t.Any], hosts: t.Sequence[str], needs_servers: bool = True) -> Problems:
    """Every mistake in the variables of these hosts, each as one sentence."""
    problems: Problems = []
    unreadable: Problems = []
    containers = {}
    for host in hosts:
        # Once: each hostvars[...] gathers all variables of the host anew.
        variables = hostvars[host]
        names = [str(name) for name in variables]
        values = {}
        before = len(unreadable)
        for name in names:
            if not name.startswith("sglang_"):
                continue
            try:
                values[name] = plain_value(variables[name])
            except (AnsibleError, TemplateError) as error:
                unreadable.append(f"{host}: {name}: {_cause(error)}")
        # A host with an unreadable variable would be said to lack it.
        if len(unreadable) == before:
            problems += inventory.host_problems(host, names, values, needs_servers, list(hostvars))
            containers[host] = values
    problems += inventory.shared_container_problems(containers)
    if any(problem.endswith(" is undefined") for problem in unreadable):
        unreadable.append(
            "define what is undefined in the inventory, and keys in its vault, as in "
            "inventory/example/group_vars/sglang/vault.yml.example"
        )
    return problems + unreadable


def _cause(error: BaseException) -> str:
    """The message in one line, without the excerpts of files that Ansible adds below it."""
    return str(error).strip().split("\n", 1)[0]


# Far beyond what anybody writes. Beyond them a value is a slip, or a trap: YAML's aliases make a list that holds
# itself, or a billion texts, of a few lines.
MAX_DEPTH = 100
MAX_VALUES = 1_000_000
_ENDLESS = 10**1000  # Python refuses to write numbers of some more digits


def plain_value(value: t.Any) -> t.Any:
    """The value as plain Python, with every template in it resolved: an undefined variable shows here, not in mid-run.

    (Ansible's lazy containers can be read as they are, but a deep copy of one copies its whole template engine.)
    """
    return _plain(value, itertools.count(1), 0)


def _plain(value: t.Any, counted: t.Iterator[int], depth: int) -> t.Any:
    if depth > MAX_DEPTH:
        raise AnsibleFilterError(f"it has lists or mappings within each other over more than {MAX_DEPTH} levels")
    if next(counted) > MAX_VALUES:
        raise AnsibleFilterError(f"it has more than {MAX_VALUES} values (aliases of YAML count each time)")
    if isinstance(value, Undefined):
        str(value)  # raises what went wrong
    if isinstance(value, t.Mapping):
        return {str(_written(key)): _plain(value[key], counted, depth + 1) for key in value}
    if isinstance(value, (list, tuple)):
        return [_plain(each, counted, depth + 1) for each in value]
    return _written(value)


def _written(value: t.Any) -> t.Any:
    if isinstance(value, int) and abs(value) >= _ENDLESS:
        raise AnsibleFilterError("it has a number of more than 1000 digits")
    return value


def choice_problems(given: t.Mapping[str, t.Any], choices: t.Mapping[str, t.Sequence[str]]) -> Problems:
    """Values that are none of their variable's choices."""
    return inventory.choice_problems(given, choices)


def choose_servers(
    hostvars: t.Mapping[str, t.Any], hosts: t.Sequence[str], wanted: str = "", every: bool = False
) -> dict[str, t.Any]:
    """The chosen servers of each host, why none were chosen, and those over several hosts."""
    settings = {host: _merged(hostvars[host]) for host in hosts}
    fleet = {host: [str(server["name"]) for server in servers] for host, servers in settings.items()}
    units: tuple[spread.Unit, ...] = ()
    if any(spread.is_spread(server) for servers in settings.values() for server in servers):
        units = spread.units_of({**settings, **_others(hostvars, hosts)}, hosts)
    together = [[(member.host, member.server) for member in unit.members] for unit in units]
    chosen, problem = inventory.choose(fleet, wanted, every, together)
    meant = spread.chosen_units(units, chosen)
    return {
        "chosen": chosen,
        "problem": problem or "",
        "units": [spread.to_data(unit) for unit in meant],
        "unit_problems": [each for unit in meant for each in unit.problems],
    }


def _merged(variables: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """The servers of one host with its defaults."""
    defaults = plain_value(variables.get("sglang_server_defaults") or {})
    return [inventory.merge(defaults, server) for server in plain_value(variables.get("sglang_servers") or [])]


def _others(hostvars: t.Mapping[str, t.Any], hosts: t.Sequence[str]) -> dict[str, list[dict[str, t.Any]]]:
    """The same of the hosts outside of the play, where it can be read: a node of a server may have been left out."""
    found = {}
    for host in hostvars:
        if host in hosts:
            continue
        try:
            found[host] = _merged(hostvars[host])
        except (AnsibleError, TemplateError, TypeError, ValueError, AttributeError):
            continue  # nobody works on it
    return found


def server_settings(
    servers: t.Sequence[t.Mapping[str, t.Any]], name: str, defaults: t.Mapping[str, t.Any] | None = None
) -> dict[str, t.Any]:
    """The complete settings of one server."""
    try:
        return inventory.find(plain_value(servers), name, plain_value(defaults or {}))
    except KeyError:
        raise AnsibleFilterError(f"sglang_servers has no server '{name}'") from None


def gpu_problems(
    gpu_info: t.Mapping[str, t.Any],
    host: str,
    chosen: t.Sequence[str],
    servers: t.Sequence[t.Mapping[str, t.Any]],
    defaults: t.Mapping[str, t.Any] | None = None,
    expected: int | None = None,
) -> Problems:
    """What the GPUs that the host shows say against the chosen servers."""
    complete = [inventory.complete(server, plain_value(defaults or {})) for server in plain_value(servers)]
    return inventory.gpu_problems(host, chosen, complete, gpu_info, None if expected is None else int(expected))


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "choice_problems": choice_problems,
            "choose_servers": choose_servers,
            "gpu_problems": gpu_problems,
            "inventory_problems": inventory_problems,
            "server_settings": server_settings,
        }
