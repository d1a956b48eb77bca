# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waiting for requests in flight: how long, and what is called cut off."""

from __future__ import annotations

import json
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.act.drain import DrainWish, count_once, drain
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import inflight
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import http


class Counts:
    """Tells these numbers one after the other, the last one for ever."""

    def __init__(self, *numbers: t.Optional[int], source: str = "loads", note: str = "") -> None:
        self.numbers = list(numbers)
        self.source = source
        self.note = note

    def count(self) -> t.Optional[int]:
        return self.numbers.pop(0) if len(self.numbers) > 1 else self.numbers[0]


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def run(*counters: Counts, deadline_s: float = 10, lives: t.Callable[[], bool] = lambda: True) -> t.Any:
    time = Time()
    return drain(DrainWish(True), counters, deadline_s, lives, time, time.sleep)


def test_it_waits_until_nothing_is_in_flight_twice_in_a_row() -> None:
    done = run(Counts(3, 2, 0, 1, 0, 0))
    assert (done.in_flight_before, done.in_flight_after, done.cut_off) == (3, 0, 0)
    assert done.waited_s == 2.5 and done.asked and done.source == "loads" and done.note == ""


def test_the_limit_is_kept_and_what_is_left_is_cut_off() -> None:
    done = run(Counts(3, 2), deadline_s=4)
    assert (done.in_flight_before, done.in_flight_after, done.cut_off, done.waited_s) == (3, 2, 2, 4)
    assert "2 were in flight when the 4 s were over" in done.note


def test_a_limit_of_nothing_waits_for_nothing() -> None:
    assert run(Counts(2), deadline_s=0).cut_off == 2


@pytest.mark.parametrize("numbers", [(None,), (2, None)])
def test_what_can_not_be_counted_is_not_zero(numbers: tuple[t.Optional[int], ...]) -> None:
    done = run(Counts(*numbers))
    assert (done.in_flight_after, done.cut_off) == (None, None) and "can't be read" in done.note


def test_several_servers_are_added_and_one_unknown_makes_all_unknown() -> None:
    done = run(Counts(1, 0), Counts(2, 0, source="connections"))
    assert (done.in_flight_before, done.cut_off, done.source) == (3, 0, "connections and loads")
    assert "upper bound" in done.note
    assert run(Counts(1), Counts(None)).in_flight_before is None


def test_a_server_that_goes_meanwhile_cut_off_by_nobody() -> None:
    left = iter([True, False])
    done = run(Counts(3), lives=lambda: next(left))
    assert done.cut_off is None and "went meanwhile" in done.note


def test_without_a_wait_all_are_cut_off() -> None:
    done = count_once(DrainWish(), [Counts(4, source="connections")], "nothing was waited for")
    assert (done.asked, done.waited_s, done.cut_off) == (False, 0.0, 4)


@pytest.mark.parametrize(
    ("wish", "waits"),
    [
        (DrainWish(), False),
        (DrainWish(True), True),
        (DrainWish(False, "auto"), True),
        (DrainWish(True, "none"), False),
        (DrainWish(False, "none"), False),
    ],
)
def test_it_is_climbed_where_somebody_said_so(wish: DrainWish, waits: bool) -> None:
    assert wish.waits is waits


# --- counting ---


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (
            b'{"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}, '
            b'{"num_running_reqs": 1, "num_waiting_reqs": 0}]}',
            4,
        ),
        (b'{"loads": []}', "names no rank"),
        (b'{"loads": [{"num_running_reqs": null, "num_waiting_reqs": 1}]}', "does not count"),
        (b'{"loads": [{"num_running_reqs": -1, "num_waiting_reqs": 1}]}', "does not count"),
        (b"nonsense", "names no rank"),
    ],
)
def test_loads(body: bytes, found: t.Union[int, str]) -> None:
    seen = inflight.loads_of(http.Response(200, body, 0.1))
    assert seen == inflight.Loads(found, (0, 0)) if isinstance(found, int) else found in str(seen)


def test_loads_that_are_refused_say_so() -> None:
    assert inflight.loads_of(http.Response(401, b"", 0.1)) == "/v1/loads says HTTP 401"


Look = tuple[int, int]  # requests, tokens in use


def watch(*looks: Look, settles: t.Optional[t.Sequence[bool]] = None) -> tuple[inflight.LoadsWatch, list[Look]]:
    """A watch over a server that tells these, one after another."""
    left, ends = list(looks), list(settles or ())

    def ask() -> http.Response:
        requests, tokens = left.pop(0)
        row = {"num_running_reqs": requests, "num_waiting_reqs": 0, "num_used_tokens": tokens}
        other = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}
        return http.Response(200, json.dumps({"loads": [other, row]}).encode(), 0.1)

    return inflight.LoadsWatch(ask, None if settles is None else lambda: ends.pop(0)), left


@pytest.mark.parametrize(("look", "counted"), [((0, 0), 0), ((2, 60), 2), ((0, 1200), 1), ((1, 0), 1)])
def test_tokens_in_use_are_a_request(look: Look, counted: int) -> None:
    assert watch(look)[0].count() == counted


def test_tokens_that_stay_in_use_are_none() -> None:
    """Of a session, say; a request's own grow, and are told after 15 tokens."""
    found, left = watch(*[(0, 500)] * 21)
    assert [found.count() for _unused in range(21)] == [1] * 20 + [0]
    found, _left = watch(*[(0, 500)] * 15, *[(0, 515)] * 15)
    assert [found.count() for _unused in range(30)] == [1] * 30
    assert not left


def test_a_prompt_that_is_read_is_waited_for_where_that_can_be_done() -> None:
    found, left = watch((0, 0), (0, 1200), settles=[True])
    assert found.count() == 1 and not left
    found, left = watch((0, 0), (1, 1215), settles=[True])
    assert found.count() == 1 and not left
    found, left = watch((0, 0), (0, 0), settles=[True])
    assert found.count() == 0 and not left
    found, left = watch((0, 0), settles=[False])
    assert found.count() == 1 and not left
    found, left = watch((3, 90), settles=[])
    assert found.count() == 3, "a server that tells requests is asked nothing else"


def test_a_connection_may_be_a_request_on_its_way_as_long_as_the_server_would_keep_an_idle_one() -> None:
    time, number = Time(), [2]
    underway = inflight.Underway(lambda: number[0], time)

    def at(seconds: float, rests: bool = True) -> bool:
        time.now = seconds
        return underway.is_any(rests)

    assert at(0) and at(5.9) and not at(6) and not at(60)
    assert not at(61, rests=False), "what runs is counted elsewhere"
    assert at(62) and at(67.9) and not at(68), "the rest begins anew"
    assert not at(70, rests=False)
    number[0] = 0
    assert not at(71), "nobody is connected"


def test_connections_that_can_not_be_counted_may_be_requests() -> None:
    assert inflight.Underway(lambda: None, Time()).is_any(True)


def test_it_is_told_where_a_one_stands_for_no_rest() -> None:
    found, _left = watch((0, 0), settles=[False])
    assert (found.count(), found.unrested) == (1, True)
    found, _left = watch((0, 0), (0, 0), settles=[True])
    assert (found.count(), found.unrested) == (0, False)
