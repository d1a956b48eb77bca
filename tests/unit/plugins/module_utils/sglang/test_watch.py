# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What counts as progress, and when the want of it is hung."""

from __future__ import annotations

import dataclasses
import json
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.watch import (
    HUNG_AFTER_S,
    Activity,
    Limits,
    Member,
    Sight,
    Trouble,
    Watch,
    advance,
    from_data,
    judge,
    limit_of,
    rate_words,
    read_rate,
    thresholds,
    to_data,
)

MIB = 2**20
LIMITS = Limits()


def members(state: str = "S", role: str = "scheduler", wchan: str | None = None) -> tuple[Member, ...]:
    return (Member(1, 5, "leader", "S"), Member(2, 6, role, state, wchan))


HELPER = Member(9, 9, "other", "R")
TREE = Activity(members(), read_bytes=100 * MIB, resident_mib=1000)


def sight(now: float, **changes: t.Any) -> Sight:
    return Sight(now, **{"phase": "weights", "activity": TREE, "gpus": {"0": 500}, **changes})


def started() -> Watch:
    """A watch that has seen everything once, at 0 s."""
    return advance(Watch("l", "b", began=0.0, progressed_at=0.0), sight(0.0))


def through_json(watch: Watch, now: float = 1e6) -> Watch:
    return from_data(json.loads(json.dumps(to_data(watch))), "l", "b", now)


def watched(
    look: t.Callable[[float], Sight], limits: Limits = LIMITS, end: float = 1000.0, in_slices: bool = False
) -> tuple[Trouble | None, float]:
    """Look every second until there is a verdict."""
    watch, now = started(), 0.0
    while now < end:
        now += 1.0
        if in_slices:
            watch = through_json(watch)
        watch = advance(watch, look(now))
        trouble = judge(watch, look(now), limits)
        if trouble is not None:
            return trouble, now
    return None, now


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phase": "kv_cache"}, "phase kv_cache"),
        ({"percent": 3}, "weights 3 %"),
        ({"steps": 1}, "a progress bar moved"),
        ({"kinds": 1}, "a new kind of log line"),
        ({"gpus": {"0": 565}}, "memory of GPU 0"),
        ({"gpus": {"0": 435}}, "memory of GPU 0"),
        ({"activity": dataclasses.replace(TREE, read_bytes=117 * MIB)}, "bytes read"),
        ({"activity": dataclasses.replace(TREE, resident_mib=1065)}, "more memory"),
        ({"activity": dataclasses.replace(TREE, members=(*TREE.members, HELPER))}, "other processes"),
        ({"activity": dataclasses.replace(TREE, members=TREE.members[:1])}, "other processes"),
    ],
)
def test_progress(changes: dict[str, t.Any], words: str) -> None:
    watch = advance(started(), sight(50.0, **changes))
    assert (watch.progressed_at, watch.progressed_by) == (50.0, words)
    again = advance(watch, sight(60.0, **changes))
    assert again.progressed_at == 50.0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gpus": None},
        {"gpus": {"0": 564}},
        {"gpus": {"0": 500, "1": 90000}},
        {"activity": None},
        {"activity": dataclasses.replace(TREE, read_bytes=116 * MIB)},
        {"activity": dataclasses.replace(TREE, resident_mib=1064)},
        {"activity": dataclasses.replace(TREE, resident_mib=None, read_bytes=None)},
        {"activity": dataclasses.replace(TREE, resident_mib=10, read_bytes=1)},
        {"activity": dataclasses.replace(TREE, members=members("R"))},
        {"activity": dataclasses.replace(TREE, members=members("T"))},
    ],
)
def test_no_progress(changes: dict[str, t.Any]) -> None:
    assert advance(started(), sight(50.0, **changes)).progressed_at == 0.0


@pytest.mark.parametrize(("phase", "counts"), [("imports", True), ("weights", True), ("graphs", False)])
def test_bytes_read_count_where_files_are_read(phase: str, counts: bool) -> None:
    first = advance(started(), sight(1.0, phase=phase))
    more = dataclasses.replace(TREE, read_bytes=900 * MIB)
    assert (advance(first, sight(50.0, phase=phase, activity=more)).progressed_at == 50.0) is counts


def test_many_small_steps_are_progress_too() -> None:
    """Compared with the last mark, not with the look before."""
    trouble, _watch = watched(lambda now: sight(now, gpus={"0": 500 + int(now)}))
    assert trouble is None


def test_case_09_a_busy_processor_is_no_progress() -> None:
    """State R in each look, figures that wobble, and nothing comes forward."""
    spinning = dataclasses.replace(TREE, members=members("R"))

    def look(now: float) -> Sight:
        wobble = int(now) % 7
        activity = dataclasses.replace(spinning, resident_mib=1000 + wobble, read_bytes=100 * MIB + wobble)
        return sight(now, activity=activity, gpus={"0": 500 + wobble})

    trouble, at = watched(look)
    assert (trouble and trouble.verdict, at) == ("hung", HUNG_AFTER_S["weights"])


@pytest.mark.parametrize("in_slices", [False, True])
@pytest.mark.parametrize("phase", HUNG_AFTER_S)
def test_each_phase_has_its_threshold(phase: str, in_slices: bool) -> None:
    def look(now: float) -> Sight:
        return sight(now, phase=phase)

    trouble, at = watched(look, in_slices=in_slices)
    began = 0.0 if phase == "weights" else 1.0  # the change of phase is progress
    assert (trouble and trouble.verdict, at) == ("hung", HUNG_AFTER_S[phase] + began)
    assert trouble is not None
    assert f"in phase {phase} and does not listen" in trouble.words
    limits = Limits(thresholds({phase: 20}))
    assert watched(look, limits)[1] == 20 + began


def test_a_listener_is_judged_by_the_warm_up_and_a_log_that_is_not_known_by_the_longest() -> None:
    assert limit_of(sight(0.0, listening=True), LIMITS) == HUNG_AFTER_S["warm_up"]
    assert limit_of(sight(0.0, log_known=False), LIMITS) == max(HUNG_AFTER_S.values())
    assert limit_of(sight(0.0, phase="ready"), LIMITS) == HUNG_AFTER_S["warm_up"]
    trouble, _watch = watched(lambda now: sight(now, listening=True))
    assert trouble is not None
    assert "listens, but does not answer" in trouble.words


@pytest.mark.parametrize("given", [None, {}])
def test_thresholds_by_default(given: dict[str, t.Any] | None) -> None:
    assert thresholds(given) == HUNG_AFTER_S


def test_thresholds_may_be_words() -> None:
    assert thresholds({"weights": "900"}) == {**HUNG_AFTER_S, "weights": 900.0}


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "long", None, True, [1]])
def test_a_threshold_that_is_none_is_refused(value: t.Any) -> None:
    with pytest.raises(CleanSlateError, match="hung_after: weights is .* number of seconds greater than 0"):
        thresholds({"weights": value})


@pytest.mark.parametrize("name", ["ready", "weight", 3])
def test_a_threshold_of_no_phase_is_refused_with_those_there_are(name: t.Any) -> None:
    with pytest.raises(CleanSlateError, match=r"is no phase; there are imports, distributed, weights"):
        thresholds({name: 5})


@pytest.mark.parametrize("in_slices", [False, True])
@pytest.mark.parametrize(
    ("later", "verdict", "words"),
    [
        (members("T"), "hung", "scheduler (pid 2) is stopped (state T) for 10 s"),
        (members("t"), "hung", "scheduler (pid 2) is stopped (state T) for 10 s"),
        (members("Z"), "failed", "scheduler (pid 2) is dead for 10 s, and the server lives on without it"),
        (members("X"), "failed", "scheduler (pid 2) is dead for 10 s, and the server lives on without it"),
        (members("S")[:1], "failed", "scheduler (pid 2) is dead for 10 s, and the server lives on without it"),
        ((Member(1, 5, "leader", "T"), members()[1]), "hung", "the server itself (pid 1) is stopped"),
        (members("Z", "detokenizer"), "failed", "detokenizer (pid 2) is dead"),
    ],
)
def test_case_28_direct_evidence_needs_ten_seconds(
    later: tuple[Member, ...], verdict: str, words: str, in_slices: bool
) -> None:
    """Also while others come forward: the percentage moves with each look."""

    def look(now: float) -> Sight:
        return sight(now, percent=int(now) % 100, activity=Activity(later))

    trouble, at = watched(look, in_slices=in_slices)
    assert trouble is not None
    assert (trouble.verdict, at) == (verdict, 11.0)
    assert trouble.words.startswith(words)
    assert trouble.pid == (1 if later[0].state == "T" else 2)


def test_a_pause_in_between_begins_anew() -> None:
    """Stopped by a debugger for a moment, again and again."""
    trouble, _watch = watched(
        lambda now: sight(now, percent=int(now), activity=Activity(members("T" if now % 9 else "S"))), end=200
    )
    assert trouble is None


def test_helpers_may_end() -> None:
    """Compilers do, and wait as zombies for who reads them."""
    ended = Activity((*TREE.members, dataclasses.replace(HELPER, state="Z")))
    trouble, _watch = watched(lambda now: sight(now, percent=int(now), activity=ended), end=90)
    assert trouble is None


def test_state_d_is_stuck_after_a_minute_at_one_place_without_progress() -> None:
    def stuck(now: float) -> Sight:
        return sight(now, activity=Activity(members("D", wchan="nvidia_wait")))

    trouble, at = watched(stuck)
    assert (trouble and trouble.verdict, at) == ("hung", 61.0)
    assert trouble is not None
    assert trouble.words == "scheduler (pid 2) waits in the kernel (state D, in nvidia_wait) for 60 s"


def test_state_d_at_changing_places_or_with_progress_is_a_disk_that_works() -> None:
    moving, _watch = watched(lambda now: sight(now, activity=Activity(members("D", wchan=f"w{int(now) % 2}"))), end=200)
    working, _watch = watched(
        lambda now: sight(now, percent=int(now), activity=Activity(members("D", wchan="io_schedule"))), end=200
    )
    assert (moving, working) == (None, None)


def test_the_limits_of_direct_evidence_are_options() -> None:
    limits = Limits(stopped_after_s=3.0, dead_after_s=5.0)
    assert watched(lambda now: sight(now, activity=Activity(members("T"))), limits)[1] == 4.0
    assert watched(lambda now: sight(now, activity=Activity(members("Z"))), limits)[1] == 6.0


def test_an_end_that_was_reported_is_failed_after_ten_seconds() -> None:
    trouble, at = watched(lambda now: sight(now, fatal=True), in_slices=True)
    assert (trouble and trouble.verdict, at) == ("failed", 11.0)


def test_the_rate_is_that_of_the_last_quarter_minute() -> None:
    watch = started()
    for now in range(1, 31):
        speed = 10 if now <= 10 else 100
        seen = dataclasses.replace(TREE, read_bytes=int(100 * MIB + now * speed * 1e6))
        watch = advance(watch, sight(float(now), activity=seen))
    rate = read_rate(watch)
    assert rate is not None
    assert abs(rate - 100e6) < 1e6
    assert read_rate(started()) is None


@pytest.mark.parametrize(
    ("rate", "words"), [(1.34e9, "1.3 GB/s"), (240e6, "240 MB/s"), (5000.0, None), (None, None)]
)
def test_a_rate_in_words(rate: float | None, words: str | None) -> None:
    assert rate_words(rate) == words


def full() -> Watch:
    watch = advance(started(), sight(3.0, percent=5, activity=Activity(members("T"), 5 * MIB, 7), fatal=True))
    return dataclasses.replace(
        watch, pid=1, start_ticks=5, oom={"cgroup": 1, "host": None}, cgroups=("/c",), answered_at=3.5, gpus_next_at=9.0
    )


def test_a_watch_goes_through_json_unchanged() -> None:
    assert through_json(full()) == full()
    assert through_json(started()) == started()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"launch_id": "other"}, "launched anew meanwhile"),
        ({"boot_id": "other"}, "another boot"),
        ({"began": 1e9}, "another boot"),
        ({"version": 99}, "not what an earlier call"),
        ({"progressed_at": float("nan")}, "not what an earlier call"),
        ({"steps": "many"}, "not what an earlier call"),
        ({"odd": {"1:1": {"pid": 1, "role": "x", "kind": "sad", "since": 1.0, "wchan": None}}}, "not what an earlier"),
        ({"odd": []}, "not what an earlier call"),
        ({"samples": [[1.0]]}, "not what an earlier call"),
    ],
)
def test_a_watch_that_does_not_fit_is_refused(changes: dict[str, t.Any], words: str) -> None:
    with pytest.raises(CleanSlateError, match=words):
        from_data({**to_data(full()), **changes}, "l", "b", 100.0)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Watch)])
def test_a_watch_with_a_part_missing_is_refused(name: str) -> None:
    data = to_data(full())
    del data[name]
    with pytest.raises(CleanSlateError, match="not what an earlier call"):
        from_data(data, "l", "b", 100.0)
