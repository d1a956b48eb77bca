# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Signals by pidfd. This file holds the only calls of the product that signal a process it did not start.

A pid can be reused between the look and the signal. So a pidfd is opened first, then the process is read again: its
start time must be the one that was seen, and the evidence that selected it must still hold. Only then is the signal
sent through the pidfd, which can't mean anybody else.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
import typing as t
from dataclasses import dataclass

from ..errors import CleanSlateError
from ..exhausted import exhausted_by
from ..model import Process
from ..observe.procfs import read_identity


@dataclass(frozen=True)
class Grip:
    """An open pidfd of a process whose identity was checked after opening."""

    process: Process
    fd: int

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True)
class Sent:
    """What became of one signal: ``result`` is sent, gone, changed (another process or no evidence) or refused."""

    pid: int
    signal: str
    result: str
    detail: str = ""


def grip(process: Process) -> t.Optional[Grip]:
    """Hold on to a process; None when it is gone or its pid names somebody else by now.

    Raises:
        CleanSlateError: this kernel or Python has no pidfd, or no file descriptor is left.
    """
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        raise CleanSlateError(
            "this Python has no os.pidfd_open (Python 3.9 built on Linux 5.3 or newer has): a pid could mean another "
            "process by the time it is signalled, so nothing was signalled. Set ansible_python_interpreter "
            "to a newer one."
        )
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as exc:
        if exc.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            return None
        why = exhausted_by(exc) or os.strerror(exc.errno or 0)
        raise CleanSlateError(f"pid {process.pid} ({process.comm}) can't be held by a pidfd: {why}") from exc
    try:
        now = read_identity(process.pid)
    except OSError as exc:
        os.close(fd)
        why = exhausted_by(exc) or str(exc)
        raise CleanSlateError(f"pid {process.pid} ({process.comm}) can't be looked at again: {why}") from exc
    if now is None or now.key != process.key:
        os.close(fd)
        return None
    return Grip(process, fd)


def send(held: Grip, number: signal.Signals, objection: t.Callable[[Process], t.Optional[str]]) -> Sent:
    """Signal the gripped process, if it is still what it was.

    ``objection`` re-checks the evidence on which it was selected; a text stops us. Only /proc/PID/stat is read here,
    which never blocks on the process itself.
    """
    name = number.name
    pid = held.process.pid
    now = read_identity(pid)
    if now is None or now.dead:
        return Sent(pid, name, "gone")
    if now.key != held.process.key:
        return Sent(pid, name, "changed", "the pid names another process by now")
    reason = objection(held.process)
    if reason:
        return Sent(pid, name, "changed", reason)
    try:
        signal.pidfd_send_signal(held.fd, number)
    except ProcessLookupError:
        return Sent(pid, name, "gone")
    except PermissionError:
        return Sent(pid, name, "refused", f"not permitted to signal a process of uid {now.uid}: run as root")
    return Sent(pid, name, "sent")


def wait_ended(grips: t.Sequence[Grip], deadline: float) -> set[tuple[int, int]]:
    """Wait until all have ended or the monotonic clock shows ``deadline``; return the keys of those that ended.

    A pidfd becomes readable when the last thread is gone, so a zombie leader with living threads is not 'ended'.
    """
    poller = select.poll()
    waiting = {held.fd: held.process.key for held in grips}
    for fd in waiting:
        poller.register(fd, select.POLLIN)
    ended: set[tuple[int, int]] = set()
    while waiting:
        left = deadline - time.monotonic()
        ready = poller.poll(max(0.0, min(left, 1.0)) * 1000)
        for fd, _event in ready:
            poller.unregister(fd)
            ended.add(waiting.pop(fd))
        if left <= 0 and not ready:
            break
    return ended
