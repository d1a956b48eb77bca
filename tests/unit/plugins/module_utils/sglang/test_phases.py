# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How far a start has come, by real logs and by the lines of starts with GPUs."""

from __future__ import annotations

import calendar
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.phases import (
    Clock,
    Phase,
    kind_of,
    line_of,
    progress,
    utc_seconds,
)
from ansible_collections.cleanslate.sglang.tests.unit.plugins.module_utils.sglang.test_logs import START

LOGS = next(parent for parent in Path(__file__).parents if (parent / "fixtures").is_dir()) / "fixtures" / "logs"
BEGAN = float(calendar.timegm((2026, 2, 23, 10, 0, 0)))
LOADING = "[2026-02-23 10:00:25 TP0] Load weight begin. avail mem=94.10 GB\n"
GRAPHS = "[2026-02-23 10:01:50 TP0] Capture cuda graph begin. avail mem=3.99 GB\n"


def real(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def test_the_phases_of_a_start_with_their_seconds() -> None:
    seen = progress(START)
    assert seen.phase == "ready"
    assert [(phase.name, phase.seconds) for phase in seen.phases] == [
        ("imports", 20),
        ("distributed", 5),
        ("weights", 80),
        ("kv_cache", 5),
        ("graphs", 125),
        ("warm_up", 10),
        ("ready", None),
    ]


@pytest.mark.parametrize(
    ("lines", "phase", "percent"),
    [
        (0, "imports", None),
        (1, "imports", None),
        (3, "distributed", None),
        (5, "weights", 25),
        (7, "kv_cache", None),
        (9, "graphs", None),
    ],
)
def test_a_start_under_way(lines: int, phase: str, percent: int | None) -> None:
    seen = progress("".join(START.splitlines(keepends=True)[:lines]))
    assert (seen.phase, seen.current.percent) == (phase, percent)


@pytest.mark.parametrize("name", ["ready-tp1", "ready-dp2"])
def test_real_logs_of_healthy_starts(name: str) -> None:
    """Those are of a CPU, where no graph is captured."""
    seen = progress(real(name))
    assert seen.phase == "ready"
    assert [phase.name for phase in seen.phases] == [
        "imports",
        "distributed",
        "weights",
        "kv_cache",
        "warm_up",
        "ready",
    ]
    assert all(phase.seconds is not None for phase in seen.phases[:-1])


@pytest.mark.parametrize(
    "name", ["flag-unknown", "flag-ambiguous", "model-folder-without-config", "model-hub-offline", "port-taken"]
)
def test_real_logs_of_failed_starts_are_not_ready(name: str) -> None:
    assert progress(real(name)).phase != "ready"


def test_a_log_only_grows_and_so_do_the_steps() -> None:
    text = real("ready-dp2")
    lines = text.splitlines(keepends=True)
    seen = [progress("".join(lines[:count])) for count in range(len(lines) + 1)]
    assert [one.kinds for one in seen] == sorted(one.kinds for one in seen)
    assert [one.steps for one in seen] == sorted(one.steps for one in seen)


@pytest.mark.parametrize(
    ("text", "percent", "rate", "detail"),
    [
        (
            f"{LOADING}Loading safetensors checkpoint shards:  50% Completed | 4/8 [00:10<00:10,  2.50s/it]\n",
            50,
            "2.5 s/shard",
            "4/8 shards",
        ),
        (
            f"{LOADING}Multi-thread loading shards:  62% Completed | 5/8 [00:01<00:01,  3.20it/s]\n",
            62,
            "3.2 shards/s",
            "5/8 shards",
        ),
        (f"{LOADING}Loading pt checkpoint shards:   0% Completed | 0/8 [00:00<?, ?it/s]\n", 0, None, "0/8 shards"),
        (
            f"{GRAPHS}\rCapturing batches (bs=8 avail_mem=3.10 GB):  75%|###   | 27/36 [00:12<00:04,  2.20it/s]",
            75,
            "2.2 batches/s",
            "27/36 batches",
        ),
    ],
)
def test_progress_bars(text: str, percent: int, rate: str | None, detail: str) -> None:
    phase = progress(text).current
    assert (phase.percent, phase.rate, phase.detail) == (percent, rate, detail)


def test_bars_are_split_by_carriage_returns_and_each_move_is_a_step() -> None:
    bars = [f"Loading pt checkpoint shards: {n * 25}% Completed | {n}/4 [00:01<00:01, 1.0it/s]" for n in (1, 2)]
    once = progress(LOADING + bars[0])
    twice = progress(LOADING + "\r".join(bars))
    again = progress(LOADING + "\r".join([*bars, bars[1]]))
    assert (once.steps, twice.steps, again.steps) == (1, 2, 2)
    assert twice.current.percent == 50


def test_lines_that_differ_in_figures_alone_are_one_kind() -> None:
    one, two = (f"[2026-02-23 10:00:0{n} TP{n}] still at step {n}, 0x{n}f, {n}.5 s" for n in (1, 2))
    assert kind_of(one) == kind_of(two)
    assert progress(f"{one}\n{two}\n").kinds == 1
    assert progress(f"{one}\nanother line\n").kinds == 2


def test_the_running_phase_lasts_until_now_and_imports_since_the_launch() -> None:
    text = START[: START.index("Loading safe")]
    seen = progress(text, Clock(BEGAN - 7, BEGAN + 60))
    assert [(phase.name, phase.seconds) for phase in seen.phases] == [
        ("imports", 27),
        ("distributed", 5),
        ("weights", 35),
    ]
    assert progress(text, Clock(BEGAN - 7)).current.seconds == 0
    assert progress("", Clock(BEGAN, BEGAN + 42)).current.seconds == 42


@pytest.mark.parametrize("hours", [-8.0, 0.0, 1.0, 5.75])
def test_a_log_in_another_zone_than_this_host_s_gives_the_same_seconds(hours: float) -> None:
    shift = hours * 3600
    text = START[: START.index("Loading safe")]
    here = progress(text, Clock(BEGAN - 7 - shift, BEGAN + 60 - shift, int(shift)))
    elsewhere = progress(text, Clock(BEGAN - 7 - shift, BEGAN + 60 - shift, 0))
    assert [phase.seconds for phase in here.phases] == [27, 5, 35]
    assert elsewhere.phases == here.phases


def test_a_server_that_did_not_get_its_port_is_not_ready_by_its_log() -> None:
    """Its warm-up asks whoever has the port."""
    bound = "ERROR: [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use\n"
    last = "[2026-02-23 10:04:05] The server is fired up and ready to roll!\n"
    assert progress(START.replace(last, bound + last)).phase == "warm_up"


def test_the_line_for_people() -> None:
    phases = [Phase("imports", 12), Phase("distributed", 3), Phase("weights", 84, 62, "2.5 s/shard", "5/8 shards")]
    assert line_of(phases) == "weights 62 %, 2.5 s/shard, 84 s (imports 12 s, distributed 3 s)"
    assert line_of(phases, "1.3 GB/s") == "weights 62 %, 1.3 GB/s, 84 s (imports 12 s, distributed 3 s)"
    assert line_of([Phase("weights", None, 100, "2.5 s/shard")]) == "weights 100 %"
    assert line_of([Phase("imports")]) == "imports"


@pytest.mark.parametrize(
    "text",
    ["2026-02-23T10:00:00Z", "2026-02-23T10:00:00+00:00", "2026-02-23T10:00:00.123456Z", "20260223T100000Z-1a2b"],
)
def test_the_time_of_a_launch(text: str) -> None:
    assert utc_seconds(text) == BEGAN


@pytest.mark.parametrize("text", [None, "", "yesterday", "2026-02-31T10:00:00Z"])
def test_no_time(text: str | None) -> None:
    assert utc_seconds(text) is None
