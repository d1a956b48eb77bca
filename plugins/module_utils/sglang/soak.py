# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A short load on a server that just became ready: N requests, C at a time. Its speed is the configuration's
baseline."""

from __future__ import annotations

import math
import threading
import time
import typing as t
from dataclasses import dataclass

from .http import Response
from .proof import judge_tokens

Call = t.Callable[[], t.Any]
# A request is over by its own deadline; so much later its thread has ended, or nothing can be said of it.
_JOIN_S = 5.0
_LEAST_S = 0.1


@dataclass(frozen=True)
class SoakWants:
    """``requests`` 0: no soak. ``tokens`` of each answer. ``deadline_s``: for all of it; ``request_deadline_s``: for
    one. ``min_tokens_per_s``, ``max_latency_s`` (the median's): how slow it may be; None: not judged."""

    requests: int = 8
    concurrency: int = 4
    tokens: int = 32
    deadline_s: float = 120.0
    request_deadline_s: float = 60.0
    min_tokens_per_s: t.Optional[float] = None
    max_latency_s: t.Optional[float] = None


@dataclass(frozen=True)
class Latency:
    """Seconds of the answers that came."""

    p50: float
    p95: float
    max: float


@dataclass(frozen=True)
class Soak:
    """``requests``: how many were wanted. ``failed``: those that failed and those that there was no time for.
    ``tokens_per_s``: of all answers over the whole time; None: no answer came. ``silent``: a request had its whole time
    and got no answer."""

    requests: int
    failed: int
    concurrency: int
    tokens: int
    seconds: float
    tokens_per_s: t.Optional[float]
    latency_s: t.Optional[Latency]
    first_error: t.Optional[str] = None
    silent: bool = False


class _Tally:
    """What the threads share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.next_index = 0
        self.latencies: list[float] = []
        self.tokens = 0
        self.failed = 0
        self.first_error: t.Optional[str] = None
        self.silent = False
        self.out_of_time = False

    def take(self, wants: SoakWants) -> t.Optional[int]:
        """The next request's number; None: there is none, or one got no answer, and more would only queue behind it."""
        with self.lock:
            if self.next_index >= wants.requests or self.silent or self.out_of_time:
                return None
            self.next_index += 1
            return self.next_index - 1

    def fail(self, words: str, silent: bool = False) -> None:
        with self.lock:
            self.failed += 1
            self.first_error = self.first_error or words
            self.silent = self.silent or silent

    def succeed(self, tokens: int, seconds: float) -> None:
        with self.lock:
            self.tokens += tokens
            self.latencies.append(seconds)


def run_soak(
    send: t.Callable[[int, int, float], Response], wants: SoakWants, now: t.Callable[[], float], ranks: int = 1
) -> Soak:
    """Send them, ``concurrency`` at a time, and count. Over within ``deadline_s`` (and a moment), whatever the server
    does. ``send`` gets number, tokens and deadline, and is called by several threads at once."""
    start = now()
    end = start + wants.deadline_s
    tally = _Tally()

    def work() -> None:
        while True:
            left = end - now()
            if left < _LEAST_S:
                tally.out_of_time = True
                return
            index = tally.take(wants)
            if index is None:
                return
            _one(send, index, wants, left, ranks, tally)

    count = min(wants.concurrency, wants.requests)
    ended = together([work] * count, wants.deadline_s + _JOIN_S)
    seconds = now() - start
    with tally.lock:
        return _summary(tally, wants, seconds, ended)


def _one(
    send: t.Callable[[int, int, float], Response],
    index: int,
    wants: SoakWants,
    left: float,
    ranks: int,
    tally: _Tally,
) -> None:
    deadline_s = min(wants.request_deadline_s, left)
    try:
        answer = send(index, wants.tokens, deadline_s)
    except Exception as error:
        # A thread that dies without a word would count as a request that never failed.
        tally.fail(f"{type(error).__name__}: {error}")
        return
    judged = judge_tokens(index % max(ranks, 1), ranks, answer)
    if judged.problem is None and judged.count is not None:
        tally.succeed(judged.count, answer.seconds)
        return
    # One that was cut short by the end of the whole time may only have been slow.
    tally.fail(str(judged.problem), judged.silent and deadline_s >= wants.request_deadline_s)


def _summary(tally: _Tally, wants: SoakWants, seconds: float, ended: bool) -> Soak:
    done = len(tally.latencies)
    failed = wants.requests - done
    first_error = tally.first_error
    if failed and first_error is None:
        first_error = f"{done} of {wants.requests} requests were answered within {wants.deadline_s:g} s"
    return Soak(
        requests=wants.requests,
        failed=failed,
        concurrency=min(wants.concurrency, wants.requests),
        tokens=tally.tokens,
        seconds=round(seconds, 3),
        tokens_per_s=round(tally.tokens / seconds, 1) if done and seconds > 0 else None,
        latency_s=_latency(tally.latencies),
        first_error=first_error,
        silent=tally.silent or not ended,
    )


def too_slow(soak: Soak, wants: SoakWants) -> t.Optional[str]:
    """What of it is slower than it may be, in one sentence; None: nothing, or nothing is judged.

    Of the latencies the median counts: with a handful of requests every higher percentile is a single one of them.
    """
    rate, limit = soak.tokens_per_s, wants.min_tokens_per_s
    found = []
    if limit is not None and (rate is None or rate < limit):
        found.append(f"{'no' if rate is None else f'{rate:g}'} tokens/s, at least {limit:g} are demanded")
    middle = None if soak.latency_s is None else soak.latency_s.p50
    longest = wants.max_latency_s
    if longest is not None and (middle is None or middle > longest):
        told = "no latency" if middle is None else f"a median latency of {middle:g} s"
        found.append(f"{told}, at most {longest:g} s are allowed")
    return f"the soak is too slow: {'; '.join(found)}" if found else None


def _latency(values: t.Sequence[float]) -> t.Optional[Latency]:
    if not values:
        return None
    ordered = sorted(values)
    return Latency(*(round(value, 3) for value in (_rank(ordered, 0.50), _rank(ordered, 0.95), ordered[-1])))


def _rank(ordered: t.Sequence[float], part: float) -> float:
    """The nearest-rank percentile."""
    return ordered[max(math.ceil(part * len(ordered)) - 1, 0)]


def together(calls: t.Sequence[Call], deadline_s: float) -> bool:
    """Run them at once, each in a thread of its own; whether all ended in time. Each call is bounded by itself."""
    if len(calls) == 1:
        calls[0]()
        return True
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in threads)
