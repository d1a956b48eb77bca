# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From the launch record to what an eviction, and a plan before it, take for evidence of who the server is."""

from __future__ import annotations

import os
import pwd
import typing as t

from .decide.targets import RecordedLaunch
from .model import Process
from .sglang.record import Record, recorded_process


def launch_of(found: Process, record: Record, boot_id: t.Optional[str]) -> RecordedLaunch:
    """The launch of a leader that lives."""
    return RecordedLaunch(
        found.pid,
        found.start_ticks,
        found.sid,
        boot_id,
        record.unit,
        record.port,
        found.exe,
        own_session=found.sid == found.pid,
        config=record.config,
    )


def launch_by(record: Record) -> RecordedLaunch:
    """The launch as it was written down: its leader is gone, or not looked for yet."""
    return RecordedLaunch(
        record.pid,
        record.start_ticks,
        record.sid,
        record.boot_id,
        record.unit,
        record.port,
        os.path.realpath(record.python) if record.python else None,
        own_session=record.sid is not None and record.sid == record.pid,
        config=record.config,
    )


def recorded_death(
    record: t.Optional[Record], processes: t.Mapping[int, Process], boot_id: t.Optional[str], looked_at: float
) -> t.Optional[tuple[int, float]]:
    """(the server's user, a moment at which its leader was dead) of a launch whose leader had died before anybody
    evicted it; ``looked_at``: before ``processes`` were seen. None: it lives, or there is nothing to go by.
    """
    if record is None or record.user is None or recorded_process(record, processes, boot_id) is not None:
        return None
    try:
        return pwd.getpwnam(record.user).pw_uid, looked_at
    except KeyError:
        return None
