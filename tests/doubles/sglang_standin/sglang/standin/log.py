# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Log lines in SGLang's format, on stderr: ``[YYYY-MM-DD HH:MM:SS DP0 TP0] text``."""

from __future__ import annotations

import sys
import time

_prefix = ""


def set_prefix(prefix: str) -> None:
    """Set this process's rank prefix, for example `` DP0 TP1`` (with the leading space) or nothing."""
    global _prefix
    _prefix = prefix


def log(text: str) -> None:
    """Write one entry; one write call, so that lines of several processes do not mix."""
    sys.stderr.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}{_prefix}] {text}\n")
    sys.stderr.flush()
