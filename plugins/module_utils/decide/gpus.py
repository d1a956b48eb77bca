# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Choosing GPUs by index, UUID or bus id."""

from __future__ import annotations

import re
import typing as t

from ..errors import UnknownDevice
from ..model import Gpu


def same_bus_id(left: str, right: str) -> bool:
    """Compare bus ids by meaning: 00000000:3B:00.0, 0000:3b:00.0 and 3b:00.0 are one GPU."""
    return _plain_bus_id(left) == _plain_bus_id(right)


def choose_gpus(gpus: t.Sequence[Gpu], wanted: t.Sequence[str]) -> tuple[Gpu, ...]:
    """The GPUs named by ``wanted`` in that order; all of them when it is empty.

    Raises:
        UnknownDevice: a name fits no GPU, or two names mean the same one.
    """
    if not wanted:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for name in wanted:
        found = next((gpu for gpu in gpus if names_gpu(gpu, name)), None)
        if found is None:
            shown = ", ".join(f"{gpu.index} ({gpu.uuid or gpu.bus_id or 'no handle'})" for gpu in gpus) or "none"
            raise UnknownDevice(f"GPU {name!r} is not on this host; it shows: {shown}. Correct 'devices' or 'gpus'.")
        if found in chosen:
            raise UnknownDevice(f"GPU {name!r} is named twice (it is GPU {found.index}). Name each GPU once.")
        chosen.append(found)
    return tuple(chosen)


def names_gpu(gpu: Gpu, name: str) -> bool:
    """Whether ``name`` (index, UUID or bus id) means this GPU."""
    text = str(name).strip()
    if re.fullmatch("[0-9]{1,9}", text):
        return gpu.index == int(text)
    if gpu.uuid and text.lower() == gpu.uuid.lower():
        return True
    return bool(gpu.bus_id and ":" in text and same_bus_id(text, gpu.bus_id))


def baseline_for(gpu: Gpu, baselines: t.Mapping[str, int]) -> int:
    """The memory in MiB that belongs to this GPU's ordinary day (a desktop), by the inventory; 0 where none is named.
    """
    return next((int(value) for name, value in baselines.items() if names_gpu(gpu, name)), 0)


def _plain_bus_id(text: str) -> str:
    found = re.match(r"^(?:([0-9a-fA-F]+):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])$", text.strip())
    if not found:
        return text.strip().lower()
    return f"{int(found.group(1) or '0', 16):x}:{found.group(2)}:{found.group(3)}.{found.group(4)}".lower()
