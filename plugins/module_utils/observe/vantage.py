# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From where we look: the host, or inside a container that can't see everybody."""

from __future__ import annotations

import os

INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h


def vantage(proc: str = "/proc") -> str:
    """``host`` where this is the kernel's first PID namespace, else ``container``: holders may then be invisible."""
    try:
        return "host" if os.readlink(f"{proc}/self/ns/pid") == INITIAL_PID_NAMESPACE else "container"
    except OSError:
        return "container"
