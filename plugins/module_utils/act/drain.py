# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The first rung: wait, within a limit, until no request is in flight, and count what is cut off where that is not so.

Nobody is asked or signalled here. That nothing new is sent is the work of whoever holds the clients before; the rung is
climbed only where somebody said that this was done, or how to count.
"""

from __future__ import annotations

import time
import typing as t
from dataclasses import dataclass

POLL_S = 0.5
QUIET_SAMPLES = 2  # a request may be between the tokenizer and a scheduler, where nobody counts it
HOW = ["auto", "connections", "loads", "none"]


@dataclass(frozen=True)
class DrainWish:
    """What was declared: whether the clients are held already, and how to count. ``in_flight`` None: not said."""

    clients_held: bool = False
    in_flight: t.Optional[str] = None

    @property
    def waits(self) -> bool:
        """Whether the rung is climbed."""
        return self.in_flight != "none" and (self.clients_held or self.in_flight is not None)

    @property
    def how(self) -> str:
        return self.in_flight or "auto"


@dataclass(frozen=True)
class Drained:
    """What became of the requests in flight. ``cut_off``: how many there were when the server was asked to go; an upper
    bound where connections were counted. None: not known. ``asked``: whether the clients were held before.
    """

    asked: bool
    waited_s: float
    in_flight_before: t.Optional[int]
    in_flight_after: t.Optional[int]
    cut_off: t.Optional[int]
    source: str
    note: str = ""


class Counts(t.Protocol):
    """Counts the requests of one server."""

    note: str

    @property
    def source(self) -> str: ...

    def count(self) -> t.Optional[int]: ...


def total(counters: t.Sequence[Counts]) -> t.Optional[int]:
    """The requests of all of them; None where one is not known."""
    numbers = [one.count() for one in counters]
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def count_once(wish: DrainWish, counters: t.Sequence[Counts], why: str) -> Drained:
    """Nothing is waited for: only tell how many are cut off."""
    number = total(counters)
    return Drained(wish.clients_held, 0.0, number, number, number, _sources(counters), _notes(why, counters))


def drain(
    wish: DrainWish,
    counters: t.Sequence[Counts],
    deadline_s: float,
    lives: t.Callable[[], bool],
    now: t.Callable[[], float] = time.monotonic,
    sleep: t.Callable[[float], None] = time.sleep,
) -> Drained:
    """Wait until nothing is in flight, at most ``deadline_s``. ``lives``: whether the server is still there; what is
    gone has nothing in flight any more, and nobody cut it off."""
    started = now()
    before = last = total(counters)
    quiet = 0
    why = ""
    while True:
        quiet = quiet + 1 if last == 0 else 0
        if quiet >= QUIET_SAMPLES:
            break
        if not lives():
            return _result(wish, counters, now() - started, before, (last, None), "the server went meanwhile")
        if last is None:
            why = "how many are in flight can't be read"
            break
        left = started + deadline_s - now()
        if left <= 0:
            why = f"{last} were in flight when the {deadline_s:g} s were over" if last else ""
            break
        sleep(min(POLL_S, left))
        last = total(counters)
    return _result(wish, counters, now() - started, before, (last, last), why)


def _result(
    wish: DrainWish,
    counters: t.Sequence[Counts],
    waited: float,
    before: t.Optional[int],
    end: tuple[t.Optional[int], t.Optional[int]],
    why: str,
) -> Drained:
    after, cut_off = end
    note = _notes(why, counters)
    return Drained(wish.clients_held, round(waited, 3), before, after, cut_off, _sources(counters), note)


def _sources(counters: t.Sequence[Counts]) -> str:
    return " and ".join(sorted({one.source for one in counters})) or "none"


def _notes(why: str, counters: t.Sequence[Counts]) -> str:
    """The reasons in one line; where connections were counted, what that means."""
    words = [why, *dict.fromkeys(one.note for one in counters)]
    if any(one.source == "connections" for one in counters):
        words.append("connections are an upper bound of the requests: one may be open without any")
    return "; ".join(word for word in words if word)
