# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What Proxmox VE's files say of a container: configuration, HA resources, the answer of ``pct status``. Pure text; no
parser here raises, whatever it is given.
"""

from __future__ import annotations

import re
import typing as t
from dataclasses import dataclass

from .model import Problem

NVIDIA_NODE = re.compile(r"/dev/nvidia[A-Za-z0-9_./-]*\Z")
SECTION = re.compile(r"\[[A-Za-z][A-Za-z0-9_:-]*\]\s*\Z")
SETTING = re.compile(r"([a-z][a-z_]*[0-9]*):\s*(\S.*)\Z")
RAW_SETTING = re.compile(r"(lxc\.[A-Za-z0-9_.-]+)\s*[:=]\s*(.*)\Z")
RESOURCE = re.compile(r"([A-Za-z0-9_-]+):\s*(\S+)\s*\Z")
VMID = re.compile(r"[1-9][0-9]{0,9}\Z")


@dataclass(frozen=True)
class LxcConfig:
    """The current part of a container's configuration file; snapshots and pending changes are not in it."""

    settings: t.Mapping[str, str]
    raw: tuple[tuple[str, str], ...]

    @property
    def lock(self) -> t.Optional[str]:
        return self.settings.get("lock")

    @property
    def unprivileged(self) -> t.Optional[bool]:
        """Whether its root is another user here; None for a value that means nothing. Unset is privileged."""
        return {"0": False, "1": True}.get(self.settings.get("unprivileged", "0"))

    @property
    def device_nodes(self) -> tuple[str, ...]:
        """The NVIDIA nodes of this host that it is given: by ``devN`` or by a bind mount of its own."""
        paths = [_device_path(value) for name, value in self.settings.items() if re.fullmatch("dev[0-9]+", name)]
        mounts = (value.split() for name, value in self.raw if name == "lxc.mount.entry")
        paths += [words[0] for words in mounts if words]
        return tuple(dict.fromkeys(path for path in paths if NVIDIA_NODE.match(path)))

    @property
    def device_rules(self) -> tuple[str, ...]:
        """What its device cgroup lets it open, word for word."""
        return tuple(value for name, value in self.raw if name == "lxc.cgroup2.devices.allow")


@dataclass(frozen=True)
class GuestConfig:
    """A container as this node's configuration has it. None: not known; ``problems`` then says why.

    ``ha_managed`` False: the HA manager has no such resource, or is told to ignore it. ``exists`` False: the
    configuration file system answers, and has no container of that number on this node.
    """

    vmid: str
    exists: t.Optional[bool]
    lock: t.Optional[str] = None
    ha_managed: t.Optional[bool] = None
    unprivileged: t.Optional[bool] = None
    hostname: t.Optional[str] = None
    device_nodes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    ha_state: t.Optional[str] = None
    device_rules: tuple[str, ...] = ()


@dataclass(frozen=True)
class GuestStatus:
    """``state``: running, stopped or unknown; ``words``: what pct said."""

    state: str
    words: str
    timed_out: bool = False
    stuck_pid: t.Optional[int] = None


def parse_config(text: str) -> LxcConfig:
    """The lines before the first ``[section]``: what is below belongs to a snapshot or is pending. The last one of a
    name counts, as in Proxmox; lines that make no sense are passed over.
    """
    settings: dict[str, str] = {}
    raw: list[tuple[str, str]] = []
    for line in text.split("\n"):
        line = line.rstrip()
        if SECTION.match(line):
            break
        own = RAW_SETTING.match(line)
        found = SETTING.match(line)
        if own:
            raw.append((own.group(1), own.group(2).strip()))
        elif found:
            settings[found.group(1)] = found.group(2).strip()
    return LxcConfig(settings, tuple(raw))


def parse_resources(text: str) -> dict[str, str]:
    """HA resources (``ct:129``) and the state each is to have. No ``state`` line means started, as in Proxmox."""
    result: dict[str, str] = {}
    current: t.Optional[str] = None
    for line in text.split("\n"):
        head = RESOURCE.match(line)
        if head and not line[:1].isspace() and not line.startswith("#"):
            current = f"{head.group(1)}:{head.group(2)}"
            result[current] = "started"
            continue
        words = line.split()
        if current is not None and line[:1].isspace() and len(words) == 2 and words[0] == "state":
            result[current] = words[1]
        elif line.strip() and not line[:1].isspace():
            current = None
    return result


def parse_status(text: str) -> str:
    """``status: running`` or ``status: stopped``; anything else is unknown."""
    found = re.search(r"^status:[ \t]*(running|stopped)[ \t]*$", text, re.MULTILINE)
    return found.group(1) if found else "unknown"


def _device_path(value: str) -> str:
    """``/dev/nvidia0``, ``path=/dev/nvidia0,mode=0666`` and ``mode=0666,path=/dev/nvidia0`` name the same node."""
    for part in value.split(","):
        name, found, path = part.strip().partition("=")
        if not found or name == "path":
            return path if found else name
    return ""
