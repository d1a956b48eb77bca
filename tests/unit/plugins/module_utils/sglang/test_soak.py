# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import threading
import time
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.http import Response
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.soak import (
    Latency,
    Soak,
    SoakWants,
    run_soak,
    together,
    too_slow,
)


def answer(count: int = 32, seconds: float = 0.5) -> Response:
    return Response(200, json.dumps({"meta_info": {"completion_tokens": count}}).encode(), seconds)


SILENT = Response(None, b"", 60.0, "no whole answer within 60 s", "timeout")
Send = t.Callable[[int, int, float], Response]


def soak(send: Send, ranks: int = 1, **wants: t.Any) -> Soak:
    return run_soak(send, SoakWants(**wants), time.monotonic, ranks)


def test_all_are_sent_once_and_counted() -> None:
    indices: list[int] = []

    def send(index: int, tokens: int, _deadline_s: float) -> Response:
        indices.append(index)
        return answer(tokens)

    result = soak(send, requests=20)
    assert sorted(indices) == list(range(20))
    assert (result.requests, result.failed, result.concurrency, result.tokens) == (20, 0, 4, 640)
    assert result.first_error is None
    assert result.tokens_per_s is not None and result.tokens_per_s > 0


def test_so_many_at_a_time_and_no_more() -> None:
    lock, running, most = threading.Lock(), [0], [0]
    gate = threading.Barrier(3, timeout=10)

    def send(index: int, _tokens: int, _deadline: float) -> Response:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        if index < 3:
            gate.wait()  # three are in flight at once, or this breaks
        with lock:
            running[0] -= 1
        return answer()

    result = soak(send, requests=9, concurrency=3)
    assert (result.failed, most[0]) == (0, 3)


def test_latencies_are_ranks_of_what_was_seen() -> None:
    result = soak(lambda index, _tokens, _deadline: answer(1, float(index + 1)), requests=20, concurrency=1)
    assert result.latency_s is not None
    assert (result.latency_s.p50, result.latency_s.p95, result.latency_s.max) == (10.0, 19.0, 20.0)


def test_one_failure_is_a_failure_and_the_rest_goes_on() -> None:
    result = soak(lambda index, *_: Response(500, b"boom", 0.1) if index == 3 else answer(), requests=10)
    assert (result.failed, result.silent) == (1, False)
    assert result.first_error == "HTTP 500: boom"
    assert result.tokens == 9 * 32


def test_an_answer_without_tokens_is_a_failure() -> None:
    assert soak(lambda *_: answer(0), requests=1).first_error == "no token was generated (completion_tokens is 0)"


def test_after_silence_nothing_more_is_sent() -> None:
    sent: list[int] = []

    def send(index: int, _tokens: int, _deadline_s: float) -> Response:
        sent.append(index)
        return SILENT

    result = soak(send, requests=10, concurrency=1)
    assert sent == [0]
    assert (result.failed, result.silent, result.tokens_per_s, result.latency_s) == (10, True, None, None)


def test_the_end_of_the_whole_time_is_slow_and_not_silent() -> None:
    clock = [0.0]

    def send(_index: int, _tokens: int, deadline_s: float) -> Response:
        clock[0] += min(deadline_s, 40.0)
        return answer() if deadline_s >= 40.0 else Response(None, b"", deadline_s, "no whole answer", "timeout")

    result = run_soak(send, SoakWants(requests=8, concurrency=1, deadline_s=100.0), lambda: clock[0])
    assert (result.failed, result.silent) == (6, False)
    assert clock[0] == 100.0


def test_time_that_is_over_between_requests_is_told() -> None:
    clock = [0.0]

    def send(_index: int, _tokens: int, _deadline_s: float) -> Response:
        clock[0] += 50.0
        return answer()

    result = run_soak(send, SoakWants(requests=8, concurrency=1, deadline_s=100.0), lambda: clock[0])
    assert (result.failed, result.first_error) == (6, "2 of 8 requests were answered within 100 s")


def test_an_exception_in_a_request_is_a_failure() -> None:
    def send(*_: t.Any) -> Response:
        raise OSError("no more files")

    assert soak(send, requests=2).first_error == "OSError: no more files"


def test_a_rank_that_another_one_answers_for_is_a_failure() -> None:
    body = json.dumps({"meta_info": {"completion_tokens": 1, "dp_rank": 0}}).encode()
    result = soak(lambda *_: Response(200, body, 0.1), ranks=2, requests=4)
    assert (result.failed, result.first_error) == (2, "rank 0 answered instead")


@pytest.mark.parametrize("count", [1, 3])
def test_together_waits_for_all(count: int) -> None:
    done: list[int] = []
    assert together([lambda: done.append(1)] * count, 10) is True
    assert len(done) == count


def test_together_does_not_wait_for_ever() -> None:
    held = threading.Event()
    try:
        assert together([held.wait, lambda: None], 0.2) is False
    finally:
        held.set()


@pytest.mark.parametrize(
    ("least", "longest", "words"),
    [
        (None, None, None),
        (80.0, 1.5, None),
        (100.0, 1.0, None),
        (100.1, None, "100 tokens/s, at least 100.1 are demanded"),
        (None, 0.9, "a median latency of 1 s, at most 0.9 s are allowed"),
        (200.0, 0.5, "100 tokens/s, at least 200 are demanded; a median latency of 1 s"),
    ],
)
def test_how_slow_it_may_be(least: float | None, longest: float | None, words: str | None) -> None:
    """The limits themselves are fast enough. The tail of a few requests is not judged."""
    seen = Soak(8, 0, 4, 256, 2.56, 100.0, Latency(1.0, 9.0, 9.0))
    found = too_slow(seen, SoakWants(min_tokens_per_s=least, max_latency_s=longest))
    assert found is None if words is None else words in str(found)


def test_what_is_not_known_is_not_fast_enough() -> None:
    seen = Soak(8, 8, 4, 0, 60.0, None, None)
    found = str(too_slow(seen, SoakWants(min_tokens_per_s=0.0, max_latency_s=9.0)))
    assert "no tokens/s" in found
    assert "no latency" in found
