# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the operator must say before a rung may reach beyond one server."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

OPT_IN = ("container_stop", "gpu_reset")


@dataclass(frozen=True)
class OptIn:
    """What the operator confirmed, and whom else in the container he gave up."""

    pve_dir: str = "/etc/pve"
    confirm_container_stop: t.Optional[str] = None
    confirm_gpu_reset: tuple[str, ...] = ()
    acknowledge: tuple[str, ...] = ()
    protect: tuple[str, ...] = ()
