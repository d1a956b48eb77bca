# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Does a start still make progress? Pure: one look after the other is added to what was seen before.

What was seen is a plain value that goes from one call of the module to the next (`to_data`, `from_data`), so a watch in
slices judges as one in one piece. Times are the host's monotonic clock, which all processes of a boot share.

Progress is what a start that comes forward can't avoid: phases, percentages, new kinds of log lines, bytes read,
memory, processes. Processor time is none: a server once spun for 87 minutes and never listened.
"""

from __future__ import annotations

import dataclasses
import math
import typing as t
from dataclasses import dataclass, field

from ..errors import CleanSlateError

HUNG_AFTER_S: t.Mapping[str, float] = {
    "imports": 180.0,
    "distributed": 180.0,
    "weights": 300.0,
    "kv_cache": 180.0,
    "graphs": 600.0,
    "warm_up": 300.0,
}
"""After how long without progress a start is hung, per phase."""

STOPPED_AFTER_S = 10.0
DEAD_AFTER_S = 10.0
STUCK_AFTER_S = 60.0
READ_STEP_BYTES = 16 * 2**20
MEMORY_STEP_MIB = 64
_RATE_WINDOW_S = 15.0
_SAMPLES = 20
_VERSION = 1
_READING = ("imports", "weights")  # phases that read files, so that bytes tell

_STOPPED, _STUCK, _DEAD = "stopped", "stuck", "dead"


@dataclass(frozen=True)
class Member:
    """A process of the server's tree. ``role``: leader, scheduler, detokenizer, controller, worker, or other (helpers,
    compilers, and ranks that still import)."""

    pid: int
    start_ticks: int
    role: str
    state: str
    wchan: t.Optional[str] = None

    @property
    def dead(self) -> bool:
        return self.state in ("Z", "X")

    @property
    def key(self) -> str:
        return f"{self.pid}:{self.start_ticks}"

    @property
    def words(self) -> str:
        """How people name it."""
        name = "the server itself" if self.role == "leader" else "a process" if self.role == "other" else self.role
        return f"{name} (pid {self.pid})"


@dataclass(frozen=True)
class Activity:
    """The tree at one moment. ``read_bytes`` and ``resident_mib`` are sums; None: can't be read."""

    members: tuple[Member, ...] = ()
    read_bytes: t.Optional[int] = None
    resident_mib: t.Optional[int] = None


@dataclass(frozen=True)
class Sight:
    """One look. ``gpus``: used MiB by GPU; None: not looked at this time. ``log_known`` False: it can't be
    read. ``fatal``: the log says that the server is about to end itself."""

    now: float
    phase: str = "imports"
    percent: t.Optional[int] = None
    steps: int = 0
    kinds: int = 0
    log_known: bool = True
    fatal: bool = False
    listening: bool = False
    activity: t.Optional[Activity] = None
    gpus: t.Optional[t.Mapping[str, int]] = None


@dataclass(frozen=True)
class Limits:
    """When it is hung. ``hung_after_s``: per phase."""

    hung_after_s: t.Mapping[str, float] = field(default_factory=lambda: dict(HUNG_AFTER_S))
    stopped_after_s: float = STOPPED_AFTER_S
    dead_after_s: float = DEAD_AFTER_S
    stuck_after_s: float = STUCK_AFTER_S


@dataclass(frozen=True)
class Odd:
    """A process that is not as it should be, since when: stopped, stuck (state D at one place) or dead."""

    pid: int
    role: str
    kind: str
    since: float
    wchan: t.Optional[str] = None


@dataclass(frozen=True)
class Watch:
    """What was seen so far. ``began``: the first look. ``progressed_at``/``progressed_by``: the last progress.
    ``ranks``: workers that were seen alive, `pid:start_ticks` -> role. ``samples``: (time, bytes read) for the rate.
    ``oom``: the OOM killer's counts at the beginning, ``cgroups``: where the server's is counted. ``answered_at``: when
    /health said 200; the proof is next."""

    launch_id: str
    boot_id: t.Optional[str]
    began: float
    progressed_at: float
    progressed_by: str = "the watch began"
    pid: t.Optional[int] = None
    start_ticks: t.Optional[int] = None
    phase: str = "imports"
    percent: t.Optional[int] = None
    steps: int = 0
    kinds: int = 0
    read_bytes: t.Optional[int] = None
    resident_mib: t.Optional[int] = None
    tree: tuple[str, ...] = ()
    gpus: t.Mapping[str, int] = field(default_factory=dict)
    odd: t.Mapping[str, Odd] = field(default_factory=dict)
    ranks: t.Mapping[str, str] = field(default_factory=dict)
    samples: tuple[tuple[float, int], ...] = ()
    oom: t.Mapping[str, t.Optional[int]] = field(default_factory=dict)
    cgroups: tuple[str, ...] = ()
    gpus_next_at: float = 0.0
    fatal_since: t.Optional[float] = None
    answered_at: t.Optional[float] = None


@dataclass(frozen=True)
class Trouble:
    """Why it won't become ready: ``verdict`` failed or hung, in words, and whose pid is the evidence."""

    verdict: str
    words: str
    pid: t.Optional[int] = None


def thresholds(given: t.Optional[t.Mapping[str, t.Any]]) -> dict[str, float]:
    """The thresholds with those that were given.

    Raises:
        CleanSlateError: a phase that is not known, or no number of seconds.
    """
    result = dict(HUNG_AFTER_S)
    for name, value in (given or {}).items():
        if name not in HUNG_AFTER_S:
            raise CleanSlateError(f"hung_after: {name!r} is no phase; there are {', '.join(HUNG_AFTER_S)}")
        try:
            seconds = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise CleanSlateError(f"hung_after: {name} is {value!r}; it must be a number of seconds greater than 0")
        result[name] = seconds
    return result


def advance(watch: Watch, sight: Sight) -> Watch:
    """Add one look to what was seen."""
    activity = sight.activity
    read = watch.read_bytes if activity is None else activity.read_bytes
    news, marks = _progress(watch, sight)
    changes: dict[str, t.Any] = dict(marks)
    if news is not None:
        changes.update(progressed_at=sight.now, progressed_by=news)
    if activity is not None:
        changes.update(odd=_odd(watch, activity, sight.now), ranks=_ranks(watch, activity))
        if read is not None:
            changes["samples"] = (*watch.samples, (sight.now, read))[-_SAMPLES:]
    if sight.fatal and watch.fatal_since is None:
        changes["fatal_since"] = sight.now
    return dataclasses.replace(watch, **changes)


def _progress(watch: Watch, sight: Sight) -> tuple[t.Optional[str], dict[str, t.Any]]:
    """What is new, in words (None: nothing), and the marks that the next look is compared with."""
    news: list[str] = []
    marks: dict[str, t.Any] = {"phase": sight.phase, "percent": sight.percent}
    if sight.phase != watch.phase:
        news.append(f"phase {sight.phase}")
    elif sight.percent is not None and sight.percent != watch.percent:
        news.append(f"{sight.phase} {sight.percent} %")
    for name, words in (("steps", "a progress bar moved"), ("kinds", "a new kind of log line")):
        seen = getattr(sight, name)
        if seen > getattr(watch, name):
            news.append(words)
            marks[name] = seen
    if sight.activity is not None:
        _by_activity(watch, sight.phase, sight.activity, news, marks)
    if sight.gpus is not None:
        changed = [
            name
            for name, used in sight.gpus.items()
            if name in watch.gpus and abs(used - watch.gpus[name]) > MEMORY_STEP_MIB
        ]
        if changed:
            news.append(f"memory of GPU {changed[0]}")
        if changed or set(sight.gpus) != set(watch.gpus):
            marks["gpus"] = dict(sight.gpus)
    return (news[0] if news else None), marks


def _by_activity(watch: Watch, phase: str, activity: Activity, news: list[str], marks: dict[str, t.Any]) -> None:
    tree = tuple(sorted(member.key for member in activity.members if not member.dead))
    if tree != watch.tree:
        if watch.tree:
            news.append("other processes")
        marks["tree"] = tree
    for name, step, words in (
        ("read_bytes", READ_STEP_BYTES, "bytes read"),
        ("resident_mib", MEMORY_STEP_MIB, "more memory"),
    ):
        seen, before = getattr(activity, name), getattr(watch, name)
        if seen is None:
            continue
        if before is None or seen < before:
            # The first figure, or a process took its part along: count from here on.
            marks[name] = seen
        elif seen - before > step:
            marks[name] = seen
            if name != "read_bytes" or phase in _READING:
                news.append(words)


def _odd(watch: Watch, activity: Activity, now: float) -> dict[str, Odd]:
    """Who is stopped, stuck or dead, each since it was first seen so without a break."""
    result: dict[str, Odd] = {}
    present = {member.key: member for member in activity.members}
    for key, member in present.items():
        kind = _kind(member, watch)
        if kind is None:
            continue
        before = watch.odd.get(key)
        same = before is not None and before.kind == kind and (kind != _STUCK or before.wchan == member.wchan)
        since = before.since if before is not None and same else now
        result[key] = Odd(member.pid, watch.ranks.get(key, member.role), kind, since, member.wchan)
    for key, role in watch.ranks.items():
        if key not in present:
            before = watch.odd.get(key)
            since = before.since if before is not None and before.kind == _DEAD else now
            result[key] = Odd(int(key.partition(":")[0]), role, _DEAD, since)
    return result


def _kind(member: Member, watch: Watch) -> t.Optional[str]:
    if member.state in ("T", "t"):
        return _STOPPED
    if member.state == "D":
        return _STUCK
    if member.dead and (member.role not in ("leader", "other") or member.key in watch.ranks):
        return _DEAD
    return None


def _ranks(watch: Watch, activity: Activity) -> dict[str, str]:
    seen = {member.key: member.role for member in activity.members if member.role not in ("leader", "other")}
    return {**watch.ranks, **seen}


def judge(watch: Watch, sight: Sight, limits: Limits) -> t.Optional[Trouble]:
    """Whether what was seen is enough for a verdict. Direct evidence goes before the absence of progress."""
    now = sight.now
    for odd in sorted(watch.odd.values(), key=lambda one: one.since):
        who = Member(odd.pid, 0, odd.role, "").words
        age = now - odd.since
        if odd.kind == _DEAD and age >= limits.dead_after_s:
            return Trouble("failed", f"{who} is dead for {age:.0f} s, and the server lives on without it", odd.pid)
        if odd.kind == _STOPPED and age >= limits.stopped_after_s:
            return Trouble("hung", f"{who} is stopped (state T) for {age:.0f} s", odd.pid)
        if odd.kind == _STUCK and age >= limits.stuck_after_s and now - watch.progressed_at >= limits.stuck_after_s:
            place = odd.wchan or "an unknown place"
            return Trouble("hung", f"{who} waits in the kernel (state D, in {place}) for {age:.0f} s", odd.pid)
    if watch.fatal_since is not None and now - watch.fatal_since >= limits.dead_after_s:
        return Trouble("failed", f"the server reported its end {now - watch.fatal_since:.0f} s ago and lives on")
    return _without_progress(watch, sight, limits)


def limit_of(sight: Sight, limits: Limits) -> float:
    """The threshold that counts at this moment."""
    if sight.listening:
        return limits.hung_after_s["warm_up"]
    if not sight.log_known:
        return max(limits.hung_after_s.values())
    return limits.hung_after_s.get(sight.phase, limits.hung_after_s["warm_up"])


def _without_progress(watch: Watch, sight: Sight, limits: Limits) -> t.Optional[Trouble]:
    quiet = sight.now - watch.progressed_at
    if quiet < limit_of(sight, limits):
        return None
    how = "listens, but does not answer" if sight.listening else "does not listen"
    return Trouble("hung", f"the server has made no progress for {quiet:.0f} s in phase {sight.phase} and {how}")


def read_rate(watch: Watch) -> t.Optional[float]:
    """Bytes per second that the tree read lately; None where two figures are missing."""
    if len(watch.samples) < 2:
        return None
    last_at, last = watch.samples[-1]
    window = [(at, size) for at, size in watch.samples[:-1] if last_at - at <= _RATE_WINDOW_S and size <= last]
    if not window or last_at - window[0][0] <= 0:
        return None
    return (last - window[0][1]) / (last_at - window[0][0])


def rate_words(bytes_per_s: t.Optional[float]) -> t.Optional[str]:
    """`1.3 GB/s`, `240 MB/s`; None below what is worth telling."""
    if bytes_per_s is None or bytes_per_s < 1e6:
        return None
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"


# --- from one call to the next ----------------------------------------------------------------------------------------


def to_data(watch: Watch) -> dict[str, t.Any]:
    """Plain data for the result."""
    return {"version": _VERSION, **dataclasses.asdict(watch)}


def from_data(data: t.Mapping[str, t.Any], launch_id: str, boot_id: t.Optional[str], now: float) -> Watch:
    """What an earlier call returned, for the same launch in the same boot.

    Raises:
        CleanSlateError: it is of another launch or boot, or nothing that `to_data` made.
    """
    try:
        if data["version"] != _VERSION:
            raise ValueError(f"version {data['version']!r}")
        watch = _parsed(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CleanSlateError(
            f"watch is not what an earlier call of server_ready returned ({type(error).__name__}: {error})"
        ) from error
    if watch.launch_id != launch_id:
        raise CleanSlateError(
            f"watch is of the launch {watch.launch_id}, and {launch_id} is the current one: the server was launched "
            "anew meanwhile"
        )
    if watch.boot_id != boot_id or watch.began > now:
        raise CleanSlateError("watch is of another boot of this host: the server that was watched is gone")
    return watch


def _parsed(data: t.Mapping[str, t.Any]) -> Watch:
    return Watch(
        launch_id=str(data["launch_id"]),
        boot_id=_optional(data["boot_id"], str),
        began=_number(data["began"]),
        progressed_at=_number(data["progressed_at"]),
        progressed_by=str(data["progressed_by"]),
        pid=_optional(data["pid"], int),
        start_ticks=_optional(data["start_ticks"], int),
        phase=str(data["phase"]),
        percent=_optional(data["percent"], int),
        steps=int(data["steps"]),
        kinds=int(data["kinds"]),
        read_bytes=_optional(data["read_bytes"], int),
        resident_mib=_optional(data["resident_mib"], int),
        tree=tuple(str(key) for key in data["tree"]),
        gpus={str(name): int(used) for name, used in data["gpus"].items()},
        odd={str(key): _odd_of(value) for key, value in data["odd"].items()},
        ranks={str(key): str(role) for key, role in data["ranks"].items()},
        samples=tuple((_number(at), int(size)) for at, size in data["samples"])[-_SAMPLES:],
        oom={str(name): _optional(value, int) for name, value in data["oom"].items()},
        cgroups=tuple(str(path) for path in data["cgroups"]),
        gpus_next_at=_number(data["gpus_next_at"]),
        fatal_since=_optional(data["fatal_since"], _number),
        answered_at=_optional(data["answered_at"], _number),
    )


def _odd_of(data: t.Mapping[str, t.Any]) -> Odd:
    if data["kind"] not in (_STOPPED, _STUCK, _DEAD):
        raise ValueError(f"kind {data['kind']!r}")
    wchan = _optional(data["wchan"], str)
    return Odd(int(data["pid"]), str(data["role"]), str(data["kind"]), _number(data["since"]), wchan)


def _optional(value: t.Any, kind: t.Callable[[t.Any], t.Any]) -> t.Any:
    return None if value is None else kind(value)


def _number(value: t.Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is no time")
    return number
