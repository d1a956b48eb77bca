# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a container's device rules still fit the node: the driver's dynamic majors change from boot to boot.

NVIDIA's GPUs have major 195 for ever; nvidia-uvm and nvidia-caps get whatever is free when their module is loaded. A
rule with yesterday's number lets NVML work and CUDA fail.
"""

from __future__ import annotations

import re
import typing as t
from dataclasses import dataclass

from ..model import Reason

GPU_MAJOR = 195
UVM, CAPS = "nvidia-uvm", "nvidia-caps"
# Majors that the kernel gives out by itself (Documentation/admin-guide/devices.txt): a rule for one of them names a
# driver of some boot.
_DYNAMIC = (range(234, 255), range(384, 512))
_RULE = re.compile(
    r"(?:lxc\.cgroup2?\.devices\.allow\s*[:=]\s*)?(?:(a)\b.*|c\s+(\d{1,10}|\*):(?:\d{1,10}|\*)(?:\s+[rwm]+)?)\s*"
)
_OWN_NODE = re.compile(r"dev\d{1,3}\s*[:=]\s*(?:path=)?([^,\s]+).*")
_BIND = re.compile(r"lxc\.mount\.entry\s*[:=]\s*(\S+).*")
_NODE = re.compile(r"(/\S+)(?:\s+(\d{1,10}):(\d{1,10}))?")


@dataclass(frozen=True)
class _Node:
    """A device node of the container. ``own_rule``: Proxmox makes it at each start, with its rule (devN)."""

    path: str
    major: t.Optional[int] = None
    own_rule: t.Optional[bool] = None

    @property
    def driver(self) -> t.Optional[str]:
        name = self.path.rstrip("/").rpartition("/")[2]
        if name.startswith(UVM):
            return UVM
        if name.startswith("nvidia-cap"):
            return CAPS
        return "nvidia" if re.fullmatch(r"nvidia(\d{1,5}|ctl)", name) else None


def device_rule_problems(
    proc_devices_text: t.Optional[str],
    allow_lines: t.Sequence[str],
    nodes: t.Sequence[str],
    vmid: str = "<vmid>",
) -> list[Reason]:
    """Warnings where rules or nodes of the container carry another major than the driver has on this node now.

    ``allow_lines``: values of lxc.cgroup2.devices.allow, with or without the key. ``nodes``: lines ``devN: ...`` and
    ``lxc.mount.entry: ...``, paths, or ``PATH MAJOR:MINOR`` of a node as it is in the container.
    """
    allowed = [(line.strip(), major) for line in allow_lines for major in _majors(line)]
    found = [node for node in map(_node, nodes) if node is not None and node.driver]
    if not any(major in (GPU_MAJOR, None) for _line, major in allowed) and not found:
        return []
    majors = _character_majors(proc_devices_text or "")
    if majors is None:
        text = "/proc/devices can't be read: whether the container's device rules fit the driver is not known"
        return [Reason("device_rules_unknown", text, _subject(vmid), "warning")]
    if not any(name.startswith("nvidia") for name in majors):
        return []  # no driver is loaded at all; that has a reason of its own
    result = [reason for node in found for reason in _stale_node(node, majors, vmid)]
    wanted = [UVM] + ([CAPS] if any(node.driver == CAPS for node in found) else [])
    own = {node.driver for node in found if node.own_rule}
    # Of a mere path it is not known whether Proxmox made its rule: then only a rule that is out of date counts.
    unclear = {node.driver for node in found if node.own_rule is None}
    for driver in wanted:
        if driver not in majors:
            result += _not_loaded(driver, vmid)
        elif allowed and driver not in own:
            result += _missing_rule(driver, majors, allowed, vmid, driver in unclear)
    return result


def _missing_rule(
    driver: str,
    majors: t.Mapping[str, int],
    allowed: t.Sequence[tuple[str, t.Optional[int]]],
    vmid: str,
    may_have_own: bool,
) -> list[Reason]:
    real = majors[driver]
    if any(major in (None, real) for _line, major in allowed):
        return []
    # The rule that was meant: a dynamic major that none of the driver's parts has now.
    current = {major for name, major in majors.items() if name.startswith("nvidia")}
    stale = [(line, major) for line, major in allowed if _dynamic(major) and major not in current]
    key = "lxc.cgroup2.devices.allow: "
    if stale:
        rules = ", ".join(str(major) for _line, major in stale)
        change = f"change the line that was for {driver} to '{key}c {real}:* rwm'"
        if len(stale) == 1:
            line = stale[0][0] if stale[0][0].startswith("lxc.") else key + stale[0][0]
            change = f"change the line '{line}' to '{key}c {real}:* rwm'"
        what = f"the container's rules allow {rules}, which is none of the driver's now"
    elif may_have_own:
        return []
    else:
        what = "no rule of the container allows it"
        change = f"add the line '{key}c {real}:* rwm'"
    effect = "NVML works and CUDA fails" if driver == UVM else "MIG instances can't be used"
    text = f"{driver} has major {real} on this node, {what}: {effect}. In {_conf(vmid)} {change}, and restart it"
    return [Reason("device_rule_stale", text, _subject(vmid), "warning")]


def _stale_node(node: _Node, majors: t.Mapping[str, int], vmid: str) -> list[Reason]:
    real = GPU_MAJOR if node.driver == "nvidia" else majors.get(node.driver or "")
    if node.major is None or real is None or node.major == real:
        return []
    text = (
        f"{node.path} in the container has major {node.major}, {node.driver} has {real} on this node: it is of an "
        "earlier boot or load of the driver, and opening it fails. Let the node give it (devN: or lxc.mount.entry in "
        f"{_conf(vmid)}), then restart the container"
    )
    return [Reason("device_rule_stale", text, _subject(vmid), "warning")]


def _not_loaded(driver: str, vmid: str) -> list[Reason]:
    if driver != UVM:
        return []
    text = (
        "nvidia-uvm is not loaded on this node: NVML works and CUDA fails. Load it before the container starts "
        "(nvidia-modprobe -u -c=0), then compare its major with the container's rules"
    )
    return [Reason("device_rule_stale", text, _subject(vmid), "warning")]


def _character_majors(text: str) -> t.Optional[dict[str, int]]:
    """Driver name: major, of /proc/devices' character devices. None: this is no /proc/devices."""
    if "Character devices:" not in text:
        return None
    part = text.partition("Character devices:")[2].partition("Block devices:")[0]
    return {
        name: int(major) for major, name in re.findall(r"^[ \t]*([0-9]{1,10})[ \t]+(\S+)[ \t]*$", part, re.MULTILINE)
    }


def _majors(line: str) -> list[t.Optional[int]]:
    """The major that a rule for character devices allows, None for all; nothing where it is no such rule."""
    found = _RULE.fullmatch(line.strip())
    if found is None:
        return []
    return [None if found.group(1) or found.group(2) == "*" else int(found.group(2))]


def _node(text: str) -> t.Optional[_Node]:
    text = text.strip()
    for pattern, own_rule in ((_OWN_NODE, True), (_BIND, False)):
        found = pattern.fullmatch(text)
        if found:
            return _Node(found.group(1), own_rule=own_rule)
    found = _NODE.fullmatch(text)
    return _Node(found.group(1), int(found.group(2)) if found.group(2) else None) if found else None


def _dynamic(major: t.Optional[int]) -> bool:
    return major is not None and any(major in part for part in _DYNAMIC)


def _conf(vmid: str) -> str:
    return f"/etc/pve/lxc/{vmid}.conf"


def _subject(vmid: str) -> str:
    return f"container {vmid}"
