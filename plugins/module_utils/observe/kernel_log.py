# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel log, for what the NVIDIA driver reports of GPUs (Xid lines). Read in a child, within a deadline.

Each read of /dev/kmsg returns one record, ``priority,sequence,microseconds,flags;text`` and lines that begin with a
blank; the descriptor is our own, so nobody else loses anything by it. A file with such records does as well.
"""

from __future__ import annotations

import collections
import errno
import os
import re
import stat
import time
import typing as t

from ..model import Problem
from ..spawn import fetch_bounded
from ..xid import KernelLog, Xid, normal_bus_id

KMSG = "/dev/kmsg"
KMSG_NUMBERS = (1, 11)
RECORD_BYTES = 16 * 1024  # the kernel's longest record is 8 KiB; a smaller buffer is refused (EINVAL)
MAX_BYTES = 64 * 2**20
MAX_XIDS = 20_000
MAX_TEXT = 200
READ_DEADLINE_S = 10.0
_RECORD = re.compile(rb"(\d{1,10}),(\d{1,20}),(\d{1,20}),[^;]*;(.*)", re.DOTALL)
_XID = re.compile(
    r"NVRM:\s*Xid\s*\((?:PCI:)?([0-9a-fA-F:]+(?:\.[0-7])?)(?:\s[^)]*)?\)\s*:\s*(\d{1,6})\b[,:\s]*(.*)", re.DOTALL
)
_ANY_XID = re.compile(r"NVRM:\s*Xid\b")
_PID = re.compile(r"pid='?(\d{1,10})\b")


def read_kernel_log(path: str = KMSG, deadline_s: float = READ_DEADLINE_S) -> KernelLog:
    """All Xids that the kernel log still holds. Never raises for what the log is or says."""
    # The child stops in time by itself: what it has read by then is worth more than nothing.
    called = fetch_bounded(lambda: _read(path, time.monotonic() + deadline_s / 2), deadline_s)
    if called.timed_out:
        return _unreadable(path, None, f"no answer within {deadline_s:g} s")
    if called.error is not None:
        return _unreadable(path, None, called.error)
    return t.cast(KernelLog, called.value)


def log_clock_s() -> float:
    """The time by the kernel log's clock, in seconds since boot.

    printk stamps by the CPU's counter, which follows one of these two clocks: which one depends on the machine, and
    they part by minutes after months. The earlier one is right or makes a report look younger than it is, so that none
    is missed. None of the three counts the time that the machine slept.
    """
    return min(time.clock_gettime(time.CLOCK_MONOTONIC), time.clock_gettime(time.CLOCK_MONOTONIC_RAW))


def _unreadable(path: str, code: t.Optional[int], words: str) -> KernelLog:
    return KernelLog(None, False, (Problem(path, code, words),), log_clock_s())


def _read(path: str, end: float) -> KernelLog:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as exc:
        return _unreadable(path, exc.errno, os.strerror(exc.errno or 0))
    try:
        status = os.fstat(fd)
        device = stat.S_ISCHR(status.st_mode)
        if device and (os.major(status.st_rdev), os.minor(status.st_rdev)) != KMSG_NUMBERS:
            # Containers put /dev/null or their console in its place.
            return _unreadable(path, None, "this device is not the kernel log")
        if not device and not stat.S_ISREG(status.st_mode):
            return _unreadable(path, None, "neither the kernel log nor a file")
        records = KmsgRecords()
        try:
            _feed(fd, records, end)
        except OSError as exc:
            return _unreadable(path, exc.errno, os.strerror(exc.errno or 0))
        return records.log(path, log_clock_s(), may_be_empty=not device)
    finally:
        os.close(fd)


def _feed(fd: int, records: KmsgRecords, end: float) -> None:
    total = 0
    while True:
        if time.monotonic() >= end or total >= MAX_BYTES:
            records.problems.append(f"reading stopped after {total} bytes; what came later was not read")
            return
        try:
            data = os.read(fd, RECORD_BYTES)
        except BlockingIOError:
            return
        except OSError as exc:
            if exc.errno != errno.EPIPE:
                raise
            records.lost += 1  # records were overwritten before they were read; the next read goes on behind them
            continue
        if not data:
            return
        total += len(data)
        records.feed(data)


class KmsgRecords:
    """Kmsg records as they come in, in pieces of any size; keeps the Xids alone. Takes any bytes."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.lost = 0
        self._rest = b""
        self._xids: collections.deque[Xid] = collections.deque(maxlen=MAX_XIDS)
        self._found = 0
        self._records = 0
        self._foreign = 0
        self._unclear: t.Optional[str] = None
        self._since_s = 0.0

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._rest) > RECORD_BYTES:  # no record is that long
            self._line(self._rest)
            self._rest = b""

    def log(self, path: str, now_s: float, may_be_empty: bool) -> KernelLog:
        """What was read, once all of it has been fed."""
        self._line(self._rest)
        self._rest = b""
        problems = list(self.problems)
        if not self._records and (self._foreign or not may_be_empty):
            words = "its lines are no kmsg records" if self._foreign else "it gave no record at all"
            return KernelLog(None, False, (Problem(path, None, words),), now_s)
        if self.lost:
            problems.append("records were overwritten while they were read")
        if self._foreign:
            problems.append(f"{self._foreign} lines are no kmsg records")
        if self._unclear is not None:
            problems.append(f"a report of the driver can't be understood: {self._unclear}")
        if self._found > MAX_XIDS:
            problems.append(f"{self._found} Xids, of which only the last {MAX_XIDS} were kept")
        return KernelLog(
            tuple(self._xids),
            not problems,
            tuple(Problem(path, None, words) for words in problems),
            now_s,
            self._since_s,
        )

    def _line(self, line: bytes) -> None:
        if not line or line[:1] == b" ":  # a record's properties
            return
        record = _RECORD.fullmatch(line)
        if record is None:
            self._foreign += 1
            return
        at_s = int(record.group(3)) / 1e6
        if not self._records and int(record.group(2)) > 0:  # the boot's first records are gone
            self._since_s = at_s
        self._records += 1
        # Programs may write into this log too; the kernel stamps them with another facility than its own, which is 0.
        if int(record.group(1)) >> 3 == 0 and b"Xid" in record.group(4):
            self._report(record.group(4), at_s)

    def _report(self, raw: bytes, at_s: float) -> None:
        text = raw.decode("utf-8", "replace")
        found = _XID.search(text)
        bus_id = normal_bus_id(found.group(1)) if found else None
        if found is None or bus_id is None:
            if _ANY_XID.search(text):
                self._unclear = _shown(text)
            return
        pid = _PID.match(found.group(3))
        self._found += 1
        self._xids.append(
            Xid(bus_id, int(found.group(2)), at_s, int(pid.group(1)) if pid else None, _shown(found.group(3)))
        )


def _shown(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_TEXT]).strip()
