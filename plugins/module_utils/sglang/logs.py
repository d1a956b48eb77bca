# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A launch's log as a file, and the figures in it: how much GPU memory a start left, how large its KV cache is.

How far a start has come is phases.py's, why it failed causes.py's. SGLang's "GB" are GiB.
"""

from __future__ import annotations

import math
import os
import re
import typing as t

from .files import open_regular
from .phases import plain, rank_of, short_lines

_CAPTURE_END = re.compile(r"(?i)Capture .*?graph end\..*?avail mem=([\d.]+) GB")
_AVAILABLE = re.compile(r"available_gpu_mem=([\d.]+) GB")
_TOKENS = re.compile(r"max_total_num_tokens=(\d{1,15})(?!\d)")
_MIB_PER_GB = 1024


def read_ends(path: str, head_bytes: int = 1 << 20, tail_bytes: int = 1 << 20) -> t.Optional[str]:
    """The beginning and the end of a log, however large it is; None if it can't be read. No links, no FIFOs."""
    try:
        fd = open_regular(path)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as stream:
        status = os.fstat(fd)
        if status.st_size <= head_bytes + tail_bytes:
            return stream.read(head_bytes + tail_bytes).decode("utf-8", errors="replace")
        head = stream.read(head_bytes)
        stream.seek(-tail_bytes, os.SEEK_END)
        tail = stream.read(tail_bytes)
    # Whole lines only.
    text = head[: head.rfind(b"\n") + 1] + b"[... left out ...]\n" + tail[tail.find(b"\n") + 1 :]
    return text.decode("utf-8", errors="replace")


def tail_lines(text: str, count: int) -> list[str]:
    """The last lines, without terminal colours."""
    return [plain(line) for line in text.splitlines()[-count:]]


def headroom_mib(text: str) -> t.Optional[int]:
    """GPU memory left after the start, in MiB, on the rank with the least: after the last graph capture, else as the
    scheduler reports it. None if the log doesn't say."""
    least: dict[str, float] = {}
    for line in short_lines(text):
        found = _CAPTURE_END.search(line) or _AVAILABLE.search(line)
        if found:
            try:
                figure = float(found.group(1))
            except ValueError:
                continue
            if math.isfinite(figure):
                least[rank_of(line) or ""] = figure
    return int(min(least.values()) * _MIB_PER_GB) if least else None


def total_tokens(text: str) -> t.Optional[int]:
    """Size of the KV cache in tokens, as the scheduler reports it."""
    found = _TOKENS.findall(text)
    return int(found[-1]) if found else None
