# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host's variables as the options of server_drift: settings and secrets apart, acceptances, the net above it all."""

from __future__ import annotations

import json
import typing as t

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.apart import apart

from . import drift_accepted, inventory

Servers = t.Sequence[t.Mapping[str, t.Any]]
# Above the module's own deadlines, in seconds: for the look at the host, and for each server.
_HOST_S = 180
_SERVER_S = 120
_NVML_LOOKS = 3


def secret_keys() -> tuple[str, ...]:
    """The keys of a server that no log may show."""
    return tuple(key for key, option in inventory.server_options().items() if option.get("no_log"))


def settings_of(servers: Servers, defaults: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """The complete settings of a host's servers, without their secrets: also without those within values."""
    return [_parts(inventory.complete(server, defaults))[0] for server in servers]


def secrets_of(servers: Servers, defaults: t.Mapping[str, t.Any]) -> dict[str, dict[str, t.Any]]:
    """The secrets by the servers' names; a server without any is left out.

    Settings that hold a secret are one text, ``settings_json``: Ansible hides each value of ``secrets`` wherever it
    stands in a result, and among these settings is many a `1` or `no`.
    """
    found: dict[str, dict[str, t.Any]] = {}
    for server in servers:
        complete = inventory.complete(server, defaults)
        given = {key: complete[key] for key in secret_keys() if complete.get(key)}
        hidden = _parts(complete)[1]
        if hidden:
            given["settings_json"] = json.dumps(hidden)
        if given:
            found[complete["name"]] = given
    return found


def _parts(complete: t.Mapping[str, t.Any]) -> tuple[dict[str, t.Any], dict[str, t.Any]]:
    """(what may be shown, what may not), both without what is a secret by its key."""
    secret = secret_keys()
    return apart({key: value for key, value in complete.items() if key not in secret}, _values(complete, secret))


def _values(complete: t.Mapping[str, t.Any], secret: t.Sequence[str]) -> t.Iterator[str]:
    for key in secret:
        given = complete.get(key)
        yield from (str(each) for each in (given.values() if isinstance(given, t.Mapping) else (given,)) if each)


def accepted_of(accepted: t.Sequence[t.Mapping[str, t.Any]], servers: Servers) -> list[dict[str, t.Any]]:
    """What is accepted on this host. A list that many hosts share may speak of servers that are elsewhere."""
    names = {"*", *(str(server.get("name")) for server in servers)}
    return [each for each in map(drift_accepted.plain, accepted) if each["server"] in names]


def expected_gpus(given: t.Any, servers: Servers, defaults: t.Mapping[str, t.Any]) -> t.Optional[int]:
    """How many GPUs the host must show; 0, which asks for none, where all its servers compute on the CPU."""
    if given is not None:
        return int(given)
    devices = {inventory.complete(server, defaults)["device"] for server in servers}
    return 0 if devices == {"cpu"} else None


def left_out(arguments: t.Mapping[str, t.Any]) -> t.Optional[str]:
    """Why tasks of drift.yml would be left out; ``arguments``: of ansible-playbook. All its tasks have the tag always.
    """
    if arguments.get("start_at_task"):
        return "--start-at-task would leave out what comes before it: a check runs as a whole"
    skipped = sorted({"always", "tagged"}.intersection(arguments.get("skip_tags") or ()))
    if skipped:
        return f"--skip-tags {','.join(skipped)} would leave out everything: a check runs as a whole"
    return None


def timeout_s(servers: Servers, nvml_deadline_s: float = 10) -> int:
    """The net above the module's own deadlines, in seconds."""
    return int(nvml_deadline_s * _NVML_LOOKS) + _HOST_S + _SERVER_S * len(servers)
