# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an inventory says of a server's clients, and what is wrong with it."""

from __future__ import annotations

import typing as t

from .words import nearest, spec_problems, unknown_keys


def client_problems(where: str, clients: t.Any, options: t.Mapping[str, t.Any]) -> list[str]:
    """Each mistake in one server's ``clients``. ``options``: their argument specification."""
    if clients is None:
        return []
    if not isinstance(clients, (list, tuple)) or not all(isinstance(each, t.Mapping) for each in clients):
        return [f"{where}: clients must be a list of mappings, each with name, and unit or pid_file and program"]
    problems = []
    names = [str(each.get("name")) for each in clients]
    for position, client in enumerate(clients):
        said = client.get("name")
        place = f"{where}: client '{said}'" if isinstance(said, str) else f"{where}: clients[{position}]"
        problems += _one(place, client, options)
    twice = sorted({name for name in names if names.count(name) > 1})
    return problems + [f"{where}: client '{name}' is listed twice" for name in twice]


def _one(where: str, client: t.Mapping[str, t.Any], options: t.Mapping[str, t.Any]) -> list[str]:
    problems = unknown_keys(where, map(str, client), options, "key")
    known = {key: value for key, value in client.items() if key in options and value is not None}
    problems += [f"{where}: {text}" for text in spec_problems(options, known)]
    unit, process = known.get("unit"), [key for key in ("pid_file", "program") if known.get(key)]
    if unit and process:
        problems.append(f"{where}: it has a unit and {' and '.join(process)}; say one of both")
    elif not unit and len(process) < 2:
        lacks = "pid_file" if process == ["program"] else "program"
        problems.append(
            f"{where}: {lacks} is missing: a pid alone may be another process by now"
            if process
            else f"{where}: how is it known? Give its unit, or a pid_file and a program"
        )
    return problems


def client_host_problems(where: str, clients: t.Any, known_hosts: t.Collection[str]) -> list[str]:
    """Clients on hosts that the inventory does not have. ``known_hosts``: all of its hosts."""
    each = [one for one in clients if isinstance(one, t.Mapping)] if isinstance(clients, (list, tuple)) else []
    return [
        f"{where}: client '{one.get('name')}': its host '{one['host']}' is no host of the inventory"
        f"{nearest(str(one['host']), known_hosts)}"
        for one in each
        if one.get("host") and str(one["host"]) not in known_hosts
    ]
