# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An eviction as a whole: orders that make no sense, and a report that outlives a look that fails."""

from __future__ import annotations

import math

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils import evict as evict_module
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.climb import Climber, Deadlines, Rung
from ansible_collections.cleanslate.sglang.plugins.module_utils.assess import Wanted, assess
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.clean import Limits
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.evict import Order, evict
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.look import LookOptions

WITHOUT_GPUS = LookOptions(expected_gpus=0)
STUCK = "the processes below /proc can't be read: no answer within 30 s"


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("rung", ["stop", "term", "term_hung", "kill", "holders"])
def test_a_deadline_that_never_comes_is_refused(rung: str, seconds: float) -> None:
    order = Order(WITHOUT_GPUS, port=1, deadlines=Deadlines(**{rung: seconds}))
    with pytest.raises(CleanSlateError, match=f"deadlines.{rung}"):
        evict(order)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_wait_without_an_end_is_refused(seconds: float) -> None:
    for wanted in (
        Wanted(WITHOUT_GPUS, Limits(expected_gpus=0), settle_s=seconds),
        Wanted(WITHOUT_GPUS, Limits(expected_gpus=0), interval_s=seconds),
        Wanted(WITHOUT_GPUS, Limits(expected_gpus=0), cuda_deadline_s=seconds),
    ):
        with pytest.raises(CleanSlateError, match="must have an end"):
            assess(wanted)


@pytest.mark.parametrize("scope", ["sglang", "gpu"])
def test_a_wide_scope_without_gpus_is_refused(scope: str) -> None:
    """No chosen GPUs means all of them, which is not what somebody without GPUs asks for."""
    with pytest.raises(CleanSlateError, match="without GPUs"):
        evict(Order(WITHOUT_GPUS, scope=scope, port=1))


def test_a_look_that_fails_after_somebody_was_asked_keeps_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def climb(self: Climber) -> None:
        self.report.rungs.append(Rung("term", ({"pid": 4711, "what": "SIGTERM"},), (4711,), (), 0.1))
        self.report.ended.append({"pid": 4711, "title": "sglang", "rung": "term"})
        raise CleanSlateError(STUCK)

    monkeypatch.setattr(Climber, "climb", climb)
    result = evict(Order(WITHOUT_GPUS, port=1))
    assert (result["changed"], result["verdict"]) == (True, "unknown")
    assert [one["pid"] for one in result["ended"]] == [4711]
    assert STUCK in result["summary"]
    assert result["leftovers"] == {"removed": [], "kept": []}


def test_a_look_that_fails_before_anybody_was_asked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def climb(self: Climber) -> None:
        raise CleanSlateError(STUCK)

    monkeypatch.setattr(Climber, "climb", climb)
    monkeypatch.setattr(evict_module, "remove_leftover", lambda *_args: pytest.fail("something was removed"))
    with pytest.raises(CleanSlateError, match="can't be read"):
        evict(Order(WITHOUT_GPUS, port=1))


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 30), (1 << 16, 1 << 30)),  # a program that we start may close all of them, one by one
        ((1024, -1), (1 << 16, -1)),
        ((1 << 20, 1 << 30), None),
        ((-1, -1), None),
    ],
)
def test_many_descriptors_and_not_without_end(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: tuple[int, int] | None
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(evict_module.resource, "getrlimit", lambda _which: limits)
    monkeypatch.setattr(evict_module.resource, "setrlimit", lambda _which, pair: given.append(pair))
    evict_module._allow_many_descriptors()
    assert given == ([] if wanted is None else [wanted])
