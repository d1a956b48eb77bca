# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Owners of a process by its cgroup paths: a systemd unit, a docker scope, an LXC container. Pure text."""

from __future__ import annotations

import re
import typing as t

from .model import Process

UNIT_PATTERN = re.compile(r"/([^/]+\.(?:service|scope))(?=/|$)")
DOCKER_PATTERN = re.compile(r"(?:/docker/|docker-|libpod-|/libpod/|cri-containerd-|crio-)([0-9a-f]{12,64})")
LXC_PATTERN = re.compile(r"(?:/lxc/|/lxc\.payload[./])([A-Za-z0-9_.-]+)")
# Anchored: a container may make any cgroup below its own, also one that is called lxc/130.
GUEST_PATTERN = re.compile(r"^(?:/lxc/|/lxc\.payload[./])([A-Za-z0-9_.-]+)")


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


def guest_of(process: Process) -> t.Optional[str]:
    """The LXC container (on Proxmox its vmid) that a process belongs to, as its node sees it; None for a process of the
    host, and where two hierarchies disagree.

    The outermost name counts: whatever runs in a container, nested ones included, is the container's.
    """
    names = {found.group(1) for path in process.cgroups if (found := GUEST_PATTERN.match(path))}
    return names.pop() if len(names) == 1 else None


def unit_path_of(process: Process) -> t.Optional[str]:
    """The cgroup path, down to the innermost system service or scope that unit_of names."""
    for path in process.cgroups:
        if "/user@" in path:
            continue
        ends = [found.end(1) for found in UNIT_PATTERN.finditer(path)]
        if ends:
            return path[: ends[-1]]
    return None
