# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How far a start has come, by SGLang's own log. Pure.

The lines are those of SGLang 0.5.1 to 0.5.23; each begins with `[2026-01-31 23:59:59 DP0 TP0 EP0] ` (ranks only where
there are more than one), in the server's own time zone. Progress bars are tqdm's: separated by carriage returns, and
without a time.
"""

from __future__ import annotations

import calendar
import dataclasses
import re
import time
import typing as t
from dataclasses import dataclass

PHASES = ("imports", "distributed", "weights", "kv_cache", "graphs", "warm_up", "ready")
"""A start's phases in their order. A log may jump over some (no graphs on a CPU)."""

_PREFIX = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)((?: [A-Z_]+\d+)*)\]")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_UNBOUND = re.compile(r"error while attempting to bind on address")
_BEGINS = (
    ("distributed", re.compile(r"Init torch distributed begin")),
    ("weights", re.compile(r"Load weight begin|^(?:Loading [\w ]+ checkpoint shards|Multi-thread loading shards):")),
    ("kv_cache", re.compile(r"Load weight end|KV Cache is allocated|Memory pool end")),
    ("graphs", re.compile(r"(?i)\bCapture .*?graph begin")),
    ("warm_up", re.compile(r"Uvicorn running on|Application startup complete|Started server process")),
    ("ready", re.compile(r"The server is fired up and ready to roll!")),
)
_BAR = re.compile(
    r"(?P<label>[^|\r\n]*?):?\s*(?P<percent>\d{1,3})%(?: Completed \||\|[^|\r\n]*\|)\s*"
    r"(?P<done>\d+)/(?P<total>\d+) \[[\d:]+<[\d:?]+(?:,\s*(?P<rate>[\d.]+\s?\S+?))?(?:,[^\]]*)?\]"
)
_WEIGHT_BAR = re.compile(r"(?i)shards|safetensor")
_GRAPH_BAR = re.compile(r"(?i)^\s*capturing\b")
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")
_ID = re.compile(r"^(\d{8}T\d{6}Z)-")
_QUARTER_HOUR_S = 900
_LONGEST_LABEL = 60
_LINE_HEAD, _LINE_TAIL = 1200, 300
"""What is read of a line. A log holds whatever was asked of the server, and patterns take the square of a line's length
where they don't fit: a line of a megabyte would be hours."""
_LONGEST_NUMBER = 15


@dataclass(frozen=True)
class Phase:
    """A phase that was seen. ``seconds``: until the next one began, by the log's own times; of the last one until now.
    None where that is not known, and for ``ready``. ``percent``, ``rate`` and ``detail`` are those of its progress bar.
    """

    name: str
    seconds: t.Optional[int] = None
    percent: t.Optional[int] = None
    rate: t.Optional[str] = None
    detail: t.Optional[str] = None


@dataclass(frozen=True)
class Progress:
    """How far a start has come. ``steps`` and ``kinds`` only grow while a log does: moves of progress bars, and kinds
    of lines (digits removed)."""

    phase: str
    phases: tuple[Phase, ...]
    steps: int = 0
    kinds: int = 0

    @property
    def current(self) -> Phase:
        return self.phases[-1]


@dataclass(frozen=True)
class Clock:
    """How the log's times are read. ``started_at``: of the launch, UTC seconds. ``now``: UTC seconds while it lives;
    None: it ended with the log's last line. ``utc_offset_s``: of this host's time zone."""

    started_at: t.Optional[float] = None
    now: t.Optional[float] = None
    utc_offset_s: int = 0


@dataclass(frozen=True)
class _Bar:
    label: str
    percent: int
    done: int
    total: int
    rate: t.Optional[str]


def plain(line: str) -> str:
    """A line without terminal colours."""
    return _COLOURS.sub("", line).rstrip()


def short_lines(text: str) -> list[str]:
    """The lines of a log, each cut to what is read of it. Progress bars end by a carriage return."""
    return [
        line if len(line) <= _LINE_HEAD + _LINE_TAIL else f"{line[:_LINE_HEAD]} [...] {line[-_LINE_TAIL:]}"
        for line in re.split(r"[\r\n]+", text)
    ]


def without_time(line: str) -> str:
    """A line without its time stamp and ranks."""
    return _PREFIX.sub("", line).strip()


def rank_of(line: str) -> t.Optional[str]:
    """The ranks that a line's prefix names, ` DP0 TP1` or nothing; None where it has no prefix."""
    match = _PREFIX.match(line)
    return match.group(2) if match else None


def utc_seconds(text: t.Optional[str]) -> t.Optional[float]:
    """A launch's time as seconds: ISO 8601 in UTC, or a launch id, which begins with it. None if it is neither."""
    match = _ID.match(text or "")
    words = match.group(1) if match else re.sub(r"[-:]|\.\d+|\+00:?00$", "", text or "").rstrip("Z") + "Z"
    try:
        return float(calendar.timegm(time.strptime(words, "%Y%m%dT%H%M%SZ")))
    except ValueError:
        return None


def progress(text: str, clock: t.Optional[Clock] = None) -> Progress:
    """The phases in the log so far. A log without any known line is one of a process that imports."""
    clock = clock or Clock()
    begins: dict[str, t.Optional[int]] = {"imports": None}
    bars: dict[str, _Bar] = {}
    moves: dict[str, int] = {}
    kinds: set[str] = set()
    first = last = None
    steps = 0
    for line in short_lines(_COLOURS.sub("", text)):
        at = _time_of(line)
        last = last if at is None else at
        first = last if first is None else first
        for name, pattern in _BEGINS:
            if name not in begins and pattern.search(line):
                begins[name] = last
        shown = _bar_of(line)
        if shown is None:
            kinds.add(kind_of(line))
            continue
        steps += moves.get(shown.label) != shown.done
        moves[shown.label] = shown.done
        bars[_phase_of(shown, begins)] = shown
    shift = _shift(first, last, clock)
    if _UNBOUND.search(text):
        # The warm-up of a server that did not get its port asks whoever has it: "fired up" is then somebody else's.
        begins.pop("ready", None)
    begins["imports"] = first if clock.started_at is None else int(clock.started_at) + shift
    end = last if clock.now is None else int(clock.now) + shift
    return Progress(_newest(begins), _phases(begins, bars, end), steps, len(kinds - {""}))


def kind_of(line: str) -> str:
    """What a line says, whatever its figures: two lines of a kind differ in numbers, ranks and times alone."""
    return " ".join(_VARIABLE.sub("#", without_time(line)).split())


def _newest(begins: t.Mapping[str, t.Any]) -> str:
    return [name for name in PHASES if name in begins][-1]


def _phases(
    begins: t.Mapping[str, t.Optional[int]], bars: t.Mapping[str, _Bar], end: t.Optional[int]
) -> tuple[Phase, ...]:
    names = [name for name in PHASES if name in begins]
    result = []
    for index, name in enumerate(names):
        begin = begins[name]
        until = begins[names[index + 1]] if index + 1 < len(names) else end
        seconds = None if begin is None or until is None or name == "ready" else max(until - begin, 0)
        result.append(_with_bar(Phase(name, seconds), bars.get(name)))
    return tuple(result)


def _with_bar(phase: Phase, shown: t.Optional[_Bar]) -> Phase:
    if shown is None:
        return phase
    unit = "shards" if phase.name == "weights" else "batches" if phase.name == "graphs" else shown.label
    detail = f"{shown.done}/{shown.total} {unit}".strip()
    return dataclasses.replace(phase, percent=min(shown.percent, 100), rate=_rate(shown.rate, unit), detail=detail)


def _rate(rate: t.Optional[str], unit: str) -> t.Optional[str]:
    """tqdm's `1.20s/it` and `3.20it/s` in words: `1.2 s/shard`, `3.2 shards/s`."""
    match = re.fullmatch(r"([\d.]+)\s?(s/\w+|\w+/s)", rate or "")
    if match is None:
        return None
    many = unit if unit in ("shards", "batches") else "steps"
    one = {"shards": "shard", "batches": "batch"}.get(many, "step")
    try:
        figure = f"{float(match.group(1)):g}"
    except ValueError:
        return None
    return f"{figure} s/{one}" if match.group(2).startswith("s/") else f"{figure} {many}/s"


def _bar_of(line: str) -> t.Optional[_Bar]:
    found = _BAR.search(line) if "%" in line else None
    if found is None:
        return None
    done, total = found.group("done"), found.group("total")
    if len(done) > _LONGEST_NUMBER or len(total) > _LONGEST_NUMBER:
        return None
    label = kind_of(found.group("label"))[:_LONGEST_LABEL]
    return _Bar(label, int(found.group("percent")), int(done), int(total), found.group("rate"))


def _phase_of(shown: _Bar, begins: t.Mapping[str, t.Any]) -> str:
    if _WEIGHT_BAR.search(shown.label) and "weights" in begins:
        return "weights"
    if _GRAPH_BAR.search(shown.label) and "graphs" in begins:
        return "graphs"
    return _newest(begins)


def _time_of(line: str) -> t.Optional[int]:
    match = _PREFIX.match(line)
    if match is None:
        return None
    try:
        return calendar.timegm(time.strptime(match.group(1), "%Y-%m-%d %H:%M:%S"))
    except ValueError:
        return None


def _shift(first: t.Optional[int], last: t.Optional[int], clock: Clock) -> int:
    """Seconds from UTC to the log's times. This host's own zone, unless the log can't be in it: then the server's
    environment names another one, and all zones differ by quarters of an hour."""
    if first is None or last is None or clock.started_at is None:
        return clock.utc_offset_s
    latest = last if clock.now is None else int(clock.now) + clock.utc_offset_s + 2
    if int(clock.started_at) + clock.utc_offset_s - 2 <= first and last <= latest:
        return clock.utc_offset_s
    return round((first - clock.started_at) / _QUARTER_HOUR_S) * _QUARTER_HOUR_S


def line_of(phases: t.Sequence[Phase], rate: t.Optional[str] = None) -> str:
    """One line for people: `weights 62 %, 1.3 GB/s, 84 s (imports 12 s, distributed 3 s)`. ``rate``: instead of the
    bar's own."""
    current = phases[-1]
    head = current.name if current.percent is None else f"{current.name} {current.percent} %"
    parts = [head]
    speed = rate or current.rate
    if speed is not None and (current.percent or 0) < 100:
        parts.append(speed)
    if current.seconds is not None:
        parts.append(f"{current.seconds} s")
    before = [f"{phase.name} {phase.seconds} s" for phase in phases[:-1] if phase.seconds is not None]
    return ", ".join(parts) + (f" ({', '.join(before)})" if before else "")
