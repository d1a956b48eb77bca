# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a server uses each GPU that was planned for it, and whether somebody else holds one of them. Pure."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from ..model import Gpu
from ..snapshot import GpuHolders


@dataclass(frozen=True)
class GpuUse:
    """One planned GPU. ``ours``: pids of the server's tree that hold it; ``strangers``: other holders and suspects, as
    words. ``used`` None: can't be seen from here (``note`` says why)."""

    gpu: str
    index: t.Optional[int]
    used: t.Optional[bool]
    ours: tuple[int, ...] = ()
    strangers: tuple[str, ...] = ()
    note: t.Optional[str] = None


def gpu_use(
    planned: t.Optional[t.Sequence[str]],
    gpus: t.Sequence[Gpu],
    holders: t.Mapping[int, GpuHolders],
    tree: t.Collection[int],
    complete: bool,
) -> tuple[GpuUse, ...]:
    """``planned``: UUIDs or indices; None: all. ``tree``: the server's pids. ``complete``: every process could be
    looked into."""
    raise NotImplementedError
