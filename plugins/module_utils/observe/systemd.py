# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Owners of processes: systemd units and containers, asked with a deadline."""

from __future__ import annotations

import os
import re
import typing as t
from dataclasses import dataclass

from ..model import Process
from ..spawn import run_bounded

UNIT_PATTERN = re.compile(r"/([^/]+\.(?:service|scope))(?=/|$)")
DOCKER_PATTERN = re.compile(r"(?:/docker/|docker-|libpod-|/libpod/|cri-containerd-|crio-)([0-9a-f]{12,64})")
LXC_PATTERN = re.compile(r"(?:/lxc/|/lxc\.payload[./])([A-Za-z0-9_.-]+)")


@dataclass(frozen=True)
class Unit:
    """What systemd says of a unit. ``main_pid`` 0: it has no running main process."""

    name: str
    main_pid: int
    restart: str
    active_state: str
    load_state: str
    control_group: str = ""


def has_systemd(run: str = "/run") -> bool:
    """Whether systemd is this machine's (or container's) init: sd_booted(3)."""
    return os.path.isdir(f"{run}/systemd/system")


def unit_of(process: Process) -> t.Optional[str]:
    """The innermost system service or scope in the process's cgroup; None outside of any, or below a user manager."""
    for path in process.cgroups:
        if "/user@" in path:
            continue
        names = UNIT_PATTERN.findall(path)
        if names:
            return str(names[-1])
    return None


def user_unit_of(process: Process) -> t.Optional[str]:
    """The unit below a user's own manager, which only that user may stop."""
    for path in process.cgroups:
        names = UNIT_PATTERN.findall(path)
        if "/user@" in path and names and not names[-1].startswith("user@"):
            return str(names[-1])
    return None


def container_of(process: Process) -> t.Optional[str]:
    """``docker:<id>`` or ``lxc:<vmid>`` by the cgroup path, as seen from here."""
    for path in process.cgroups:
        found = DOCKER_PATTERN.search(path)
        if found:
            return f"docker:{found.group(1)}"
    for path in process.cgroups:
        found = LXC_PATTERN.search(path)
        if found:
            return f"lxc:{found.group(1)}"
    return None


def read_unit(name: str, deadline_s: float = 10.0, systemctl: str = "systemctl") -> t.Optional[Unit]:
    """A unit's state; None where systemd can't be asked. An absent unit has load_state ``not-found``."""
    fields = "Id,MainPID,Restart,ActiveState,LoadState,ControlGroup"
    done = run_bounded([systemctl, "show", f"--property={fields}", "--", name], deadline_s)
    if not done.ok:
        return None
    return parse_unit(done.stdout)


def parse_unit(text: str) -> t.Optional[Unit]:
    """The ``key=value`` lines of ``systemctl show``."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    main_pid = values.get("MainPID", "0")
    if "LoadState" not in values or not main_pid.isdigit():
        return None
    return Unit(
        values.get("Id", ""),
        int(main_pid),
        values.get("Restart", ""),
        values.get("ActiveState", ""),
        values["LoadState"],
        values.get("ControlGroup", ""),
    )
