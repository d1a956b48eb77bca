# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait for a condition, always with a deadline."""

from __future__ import annotations

import time
import typing as t

T = t.TypeVar("T")
INTERVAL_S = 0.02


def wait_for(what: str, condition: t.Callable[[], T], deadline_s: float = 10) -> T:
    """The first true value of ``condition()``; AssertionError that names ``what`` after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not after {deadline_s:g} s: {what} (last: {value!r})"
        time.sleep(INTERVAL_S)
