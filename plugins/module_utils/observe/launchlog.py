# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The output of one launch: from its file, or from the journal since the launch began."""

from __future__ import annotations

import re
import typing as t

from ..sglang.logs import read_ends
from ..sglang.record import Record
from ..spawn import fetch_bounded, run_bounded

JOURNAL_DEADLINE_S = 15.0
LOG_DEADLINE_S = 15.0
_JOURNAL_LINES = 8000
_ID = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z-.*")


def read_launch_log(record: Record) -> t.Optional[str]:
    """The launch's log so far, its middle left out where it is long; None if it can't be read. Not redacted."""
    if record.log is None:
        return None
    if record.log != "journal":
        path = record.log  # it may lie on a file server
        called = fetch_bounded(lambda: read_ends(path), LOG_DEADLINE_S)
        return called.value if called.ok and isinstance(called.value, str) else None
    if record.unit is None:
        return None
    argv = ["journalctl", "--unit", record.unit, "--output", "cat", "--no-pager", "--lines", str(_JOURNAL_LINES)]
    # The launch's id holds the time of its beginning, in UTC.
    began = _ID.fullmatch(record.launch_id)
    if began is not None:
        year, month, day, hour, minute, second = began.groups()
        argv += ["--since", f"{year}-{month}-{day} {hour}:{minute}:{second} UTC"]
    done = run_bounded(argv, JOURNAL_DEADLINE_S)
    return done.stdout if done.ok else None
