# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Proxmox node in short: processes of its containers by their cgroups, the container that is looked at, a snapshot of
all.
"""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.sglang.plugins.module_utils.cgroups import guest_of
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Guest, Snapshot
from ansible_collections.cleanslate.sglang.tests.unit.builders import process, snapshot

VMID = "129"
OTHER = "130"
UNIT = "sglang-main.service"
UNIT_PATH = f"/lxc/{VMID}/ns/system.slice/{UNIT}"
INIT = 50


def inside(
    pid: int, argv: str | t.Sequence[str] = ("python3", "x.py"), below: str = "/ns", vmid: str = VMID, **changes: t.Any
) -> Process:
    """A process of a container. Its pid there is its pid here less 40; ``below``: its cgroup below the container's."""
    values: dict[str, t.Any] = {"cgroups": (f"/lxc/{vmid}{below}",), "nspid": (pid, pid - 40), "ppid": INIT}
    return process(pid, argv, **{**values, **changes})


def guest_init(pid: int = INIT, vmid: str = VMID, **changes: t.Any) -> Process:
    values: dict[str, t.Any] = {"exe": "/usr/lib/systemd/systemd", "nspid": (pid, 1), "ppid": 40}
    return inside(pid, "/sbin/init", "/ns/init.scope", vmid, **{**values, **changes})


def guest(*members: Process, **changes: t.Any) -> Guest:
    values: dict[str, t.Any] = {
        "vmid": VMID,
        "state": "running",
        "members": frozenset(one.pid for one in members),
        "inits": frozenset({INIT}),
        "init_pid": INIT,
        "root_pid": INIT,
        "uid_base": 100_000,
        "device_minors": frozenset({0, 1}),
    }
    return Guest(**{**values, **changes})


def node(*processes: Process, guest_changes: t.Mapping[str, t.Any] | None = None, **options: t.Any) -> Snapshot:
    """A look from the node at container 129, which has an init; the others are whoever is given."""
    everybody = (guest_init(), *processes)
    members = [one for one in everybody if guest_of(one) == VMID]
    return snapshot(*everybody, guest=guest(*members, **(guest_changes or {})), **options)
