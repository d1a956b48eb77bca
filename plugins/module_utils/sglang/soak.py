# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A short load on a server that just became ready: N requests, C at a time. Its speed is the configuration's
baseline."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from .http import Response


@dataclass(frozen=True)
class SoakWants:
    """``requests`` 0: no soak. ``tokens`` of each answer. ``deadline_s``: for all of it; ``request_deadline_s``: for
    one."""

    requests: int = 8
    concurrency: int = 4
    tokens: int = 32
    deadline_s: float = 120.0
    request_deadline_s: float = 60.0


@dataclass(frozen=True)
class Latency:
    """Seconds of the answers that came."""

    p50: float
    p95: float
    max: float


@dataclass(frozen=True)
class Soak:
    """``requests``: how many were sent. ``tokens_per_s``: of all answers over the whole time; None: no answer came.
    ``silent``: a request got no answer in time."""

    requests: int
    failed: int
    concurrency: int
    tokens: int
    seconds: float
    tokens_per_s: t.Optional[float]
    latency_s: t.Optional[Latency]
    first_error: t.Optional[str] = None
    silent: bool = False


def run_soak(
    send: t.Callable[[int, float], Response], wants: SoakWants, now: t.Callable[[], float], ranks: int = 1
) -> Soak:
    """Send them, ``concurrency`` at a time, and count. Over within ``deadline_s`` whatever the server does."""
    raise NotImplementedError
