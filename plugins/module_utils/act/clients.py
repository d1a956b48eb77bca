# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Holding clients and letting them go: systemd is asked, processes are signalled by pidfd. Nothing is ever killed."""

from __future__ import annotations

import contextlib
import signal
import time
import typing as t

from ..model import Process
from ..observe.clients import read_client_unit
from ..observe.procfs import read_identity
from ..spawn import run_bounded
from .signals import grip, send

COMMAND_DEADLINE_S = 20.0
POLL_S = 0.1
STOP_ROUNDS = 5  # a client that forks while it is paused is caught within a few looks; this bounds it
_STOPPED = ("T", "t")

Key = tuple[int, int]
Objection = t.Callable[[Process], t.Optional[str]]


def ask_systemd(verb: str, unit: str, deadline_s: float) -> t.Optional[str]:
    """One systemctl command; None, or why it was refused. stop and start return at once: the caller waits."""
    flags = ["--no-block"] if verb in ("stop", "start") else []
    done = run_bounded(["systemctl", verb, *flags, "--", unit], min(COMMAND_DEADLINE_S, max(deadline_s, 1.0)))
    if done.ok:
        return None
    if done.timed_out:
        return f"systemctl {verb} {unit} gave no answer in time"
    return f"systemctl {verb} {unit}: {done.error or ' '.join(done.stderr.split())[:300] or 'failed without a word'}"


def freeze(unit: str, deadline_s: float) -> t.Optional[str]:
    """Freeze a unit (cgroup v2); None, or why that was not possible. What was half done is undone."""
    refused = ask_systemd("freeze", unit, deadline_s)
    view = read_client_unit(unit)
    if refused is None and not isinstance(view, str) and view.frozen:
        return None
    ask_systemd("thaw", unit, deadline_s)
    return refused or f"systemd says that {unit} is not frozen"


def terminate(process: Process, objection: Objection) -> tuple[str, str]:
    """SIGTERM by pidfd to a process that is still the one that was seen: (sent, gone, changed or refused; why)."""
    held = grip(process)
    if held is None:
        return "gone", ""
    try:
        sent = send(held, signal.SIGTERM, objection)
    finally:
        held.close()
    return sent.result, sent.detail


def pause(family: t.Callable[[], t.Sequence[Process]], objection: Objection) -> tuple[list[Key], t.Optional[str]]:
    """SIGSTOP to everybody that ``family`` names, again while new ones turn up: (who is paused by us, what failed).

    Those who were stopped already are not ours to wake.
    """
    paused: dict[Key, None] = {}
    for _round in range(STOP_ROUNDS):
        fresh = [one for one in family() if one.state not in _STOPPED and one.key not in paused and not one.dead]
        if not fresh:
            return list(paused), None
        for one in fresh:
            result, detail = _signal(one, signal.SIGSTOP, objection)
            if result == "sent":
                paused[one.key] = None
            elif result != "gone":
                return list(paused), f"pid {one.pid}: {detail}"
    return list(paused), "it starts new processes faster than they are paused"


def resume(keys: t.Sequence[Key]) -> tuple[list[int], list[str]]:
    """SIGCONT to those that we paused and that are still there: (who goes on, what failed)."""
    woken, problems = [], []
    for pid, start_ticks in keys:
        seen = read_identity(pid)
        if seen is None or seen.start_ticks != start_ticks:
            continue
        result, detail = _signal(seen, signal.SIGCONT, lambda _process: None)
        if result == "sent":
            woken.append(pid)
        elif result != "gone":
            problems.append(f"pid {pid}: {detail}")
    return woken, problems


def _signal(process: Process, number: signal.Signals, objection: Objection) -> tuple[str, str]:
    held = grip(process)
    if held is None:
        return "gone", ""
    try:
        sent = send(held, number, objection)
    finally:
        with contextlib.suppress(OSError):
            held.close()
    return sent.result, sent.detail


def still_there(keys: t.Iterable[Key]) -> list[int]:
    """Those of these processes that live."""
    found = ((read_identity(pid), ticks) for pid, ticks in keys)
    return [one.pid for one, ticks in found if one is not None and one.start_ticks == ticks and not one.dead]


def wait_until(done: t.Callable[[], bool], deadline: float) -> bool:
    """Ask again and again until it is done, or the monotonic clock shows ``deadline``."""
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
