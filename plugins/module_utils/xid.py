# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The driver's error reports (Xids) in the kernel log, as plain values."""

from __future__ import annotations

import re
import typing as t
from dataclasses import dataclass

from .model import Problem

_BUS_ID = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.([0-7]))?")


@dataclass(frozen=True)
class Xid:
    """One report. ``at_s``: seconds since boot by the kernel log's clock. ``pid``: as the host counts, where named."""

    bus_id: str
    code: int
    at_s: float
    pid: t.Optional[int]
    text: str


@dataclass(frozen=True)
class KernelLog:
    """What the kernel log says of GPUs. ``xids`` None: it could not be read, which is not 'no Xids'.

    ``now_s`` is the log's clock when it was read; it stands still while the machine sleeps. ``since_s`` is where the
    log begins (0: with the boot). ``complete`` False: there may be more Xids than these; ``problems`` say why.
    """

    xids: t.Optional[tuple[Xid, ...]]
    complete: bool
    problems: tuple[Problem, ...]
    now_s: float
    since_s: float = 0.0


def normal_bus_id(text: str) -> t.Optional[str]:
    """NVML's form of a bus id (00000000:61:00.0) for any usual one (0000:61:00, 61:00.0); None if it is none."""
    found = _BUS_ID.fullmatch(text.strip())
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):08X}:{int(bus, 16):02X}:{int(device, 16):02X}.{function or '0'}"
