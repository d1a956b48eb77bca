# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A worker put into routers and taken out of them, and commands for other load balancers.

A router queues what it is asked, so everything is asked first and then waited for, at all routers within one deadline.
What is believed is the router's list, not its promise.
"""

from __future__ import annotations

import json
import time
import typing as t
from dataclasses import dataclass, field

from ..decide.routing import (
    ABSENT,
    ADDING,
    HEALTHY,
    Entry,
    Wanted,
    adding_failed,
    entries_of,
    removing_failed,
    state_of,
)
from ..errors import CleanSlateError
from ..sglang.redact import Redactor
from ..sglang.router import Router, RouterError
from ..spawn import run_bounded

POLL_S = 0.5
_SAID_LIMIT = 500
# Errors that may pass: the router may be busy for a moment. Others will be the same the next time.
_MAY_PASS = ("refused", "timeout", "broken")


@dataclass(frozen=True)
class Clock:
    now: t.Callable[[], float] = time.monotonic
    sleep: t.Callable[[float], None] = time.sleep


@dataclass
class Seat:
    """One worker at one router, and what is done about it. ``action``: none, added, waited or removed."""

    router: Router
    wanted: Wanted
    before: tuple[Entry, ...]
    api_key: t.Optional[str] = None
    settings: t.Mapping[str, t.Any] = field(default_factory=dict)
    action: str = "none"
    new_id: t.Optional[str] = None
    done: bool = False
    problem: t.Optional[str] = None
    seconds: float = 0.0
    last: str = ""
    warning: str = ""

    @property
    def open(self) -> bool:
        return not self.done and self.problem is None


def take_out(seats: t.Sequence[Seat], deadline_s: float, clock: Clock) -> None:
    """Have every router remove the worker, and wait until none of them lists it."""
    for seat in seats:
        if not seat.before:
            seat.done = True
            continue
        try:
            for entry in seat.before:
                _note_pending(seat, entry)
                # What was asked may have arrived even where no answer came.
                seat.action = "removed"
                seat.router.remove(entry.id)
        except RouterError as error:
            seat.problem = str(error)
    _wait(seats, deadline_s, clock, _is_gone, "still lists it")


def _note_pending(seat: Seat, entry: Entry) -> None:
    """An addition that the router has not done yet can't be called back, and brings the worker in again."""
    found = seat.router.worker(entry.id)
    job = None if found is None else found.job
    if job is not None and job.kind == ADDING and job.status in ("pending", "processing"):
        seat.warning = f"router {seat.router.name} is still adding {entry.url} ({job}), and may list it again by itself"


def put_in(seats: t.Sequence[Seat], deadline_s: float, clock: Clock) -> None:
    """Have every router add the worker where it is missing, and wait until each calls it healthy.

    A worker that is listed and not healthy is not added again: the router's own check finds it.
    """
    for seat in seats:
        state = state_of(seat.before)
        if state == HEALTHY:
            seat.done = True
            continue
        seat.action = "added" if state == ABSENT else "waited"
        if state == ABSENT:
            try:
                seat.new_id = seat.router.add(str(seat.wanted.url), seat.api_key, seat.settings)
            except RouterError as error:
                seat.problem = str(error)
    _wait(seats, deadline_s, clock, _is_healthy, "does not call it healthy")


def _wait(
    seats: t.Sequence[Seat], deadline_s: float, clock: Clock, reached: t.Callable[[Seat], bool], late: str
) -> None:
    started = clock.now()
    while True:
        for seat in seats:
            if seat.open:
                _look(seat, reached)
                seat.seconds = round(clock.now() - started, 3)
        left = started + deadline_s - clock.now()
        waiting = [seat for seat in seats if seat.open]
        if not waiting:
            return
        if left <= 0:
            for seat in waiting:
                more = f" ({seat.last})" if seat.last else ""
                seat.problem = f"router {seat.router.name} {late} after {deadline_s:g} s{more}"
            return
        clock.sleep(min(POLL_S, left))


def _look(seat: Seat, reached: t.Callable[[Seat], bool]) -> None:
    try:
        seat.done = reached(seat)
    except RouterError as error:
        seat.last = str(error)
        if error.kind not in _MAY_PASS:
            seat.problem = str(error)
    except CleanSlateError as error:
        seat.problem = f"router {seat.router.name}: {error}"


def _is_gone(seat: Seat) -> bool:
    if not entries_of(seat.wanted, seat.router.workers()):
        return True
    for entry in seat.before:
        found = seat.router.worker(entry.id)
        seat.last = str(found.job) if found is not None and found.job else ""
        failed = removing_failed(None if found is None else found.job)
        if failed:
            seat.problem = f"router {seat.router.name} could not remove it: {failed}"
    return False


def _is_healthy(seat: Seat) -> bool:
    entries = entries_of(seat.wanted, seat.router.workers())
    if state_of(entries) == HEALTHY:
        return True
    seat.last = "it lists it as not healthy" if entries else "it does not list it yet"
    found = seat.router.worker(seat.new_id) if seat.new_id else None
    if found is not None and found.job is not None:
        seat.last += f"; {found.job}"
        failed = adding_failed(found.job)
        if failed and not entries:
            seat.problem = f"router {seat.router.name} could not add it: {failed}"
    return False


@dataclass(frozen=True)
class Hook:
    """Commands for another load balancer. ``list`` tells what it has, and changes nothing."""

    name: str
    out: tuple[str, ...]
    back: tuple[str, ...]
    deadline_s: float
    list: tuple[str, ...] = ()

    def argv(self, action: str) -> tuple[str, ...]:
        return {"out": self.out, "back": self.back, "list": self.list}[action]


def run_hook(hook: Hook, action: str, urls: t.Sequence[str]) -> dict[str, t.Any]:
    """Run the command with what is asked as JSON on its standard input; status 0 means that it is done.

    Of the action list the result also has ``listed``, the URLs that it answered; None where it gave no such answer.
    """
    given = {"action": action, "hook": hook.name, "workers": [{"url": url} for url in urls]}
    started = time.monotonic()
    ended = run_bounded(list(hook.argv(action)), hook.deadline_s, stdin=json.dumps(given).encode() + b"\n")
    said = Redactor().text((ended.stderr.strip() or ended.stdout.strip())[-_SAID_LIMIT:])
    if ended.ok:
        result, detail = "done", said
    elif ended.timed_out:
        stuck = f"; pid {ended.stuck_pid} could not be ended" if ended.stuck_pid else ""
        result, detail = "timeout", f"it did not end within {hook.deadline_s:g} s{stuck}"
    else:
        result = "failed"
        detail = ended.error or f"it ended with status {ended.rc}" + (f": {said}" if said else "")
    seconds = round(time.monotonic() - started, 3)
    row = {"name": hook.name, "action": action, "result": result, "detail": detail, "seconds": seconds}
    if action != "list":
        return row
    listed = urls_in(ended.stdout) if ended.ok else None
    if ended.ok and listed is None:
        row.update(result="failed", detail=f"its answer is not {_LISTING}, but: {said}")
    return {**row, "listed": listed}


_LISTING = '{"workers": [{"url": "http://HOST:PORT"}]}'


def urls_in(text: str) -> t.Optional[list[str]]:
    """The URLs that a hook's command listed; None where its answer is not what was asked for."""
    try:
        workers = json.loads(text)["workers"]
        urls = [each["url"] for each in workers] if isinstance(workers, list) else None
    except (ValueError, KeyError, TypeError):
        return None
    return urls if urls is not None and all(isinstance(url, str) for url in urls) else None
