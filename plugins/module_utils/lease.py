# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lease on a server: which run works on it, until when, and which module of it runs at this moment.

    <state_dir>/<server>/lease.json     0644, no secret in it
    <state_dir>/<server>/.lease.lock    flock, held only while the file is looked at and written

It is somebody else's as long as it has not expired, or as the process of its module lives. Only when both are over may
another run break it. Where the boot is the same, time is the kernel's own clock since boot, which nobody can set and
which goes on in a suspend; the times of day in the file are for people. After a reboot the lease has expired: nothing
of that run lives here any more.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import math
import os
import re
import time
import typing as t
from dataclasses import asdict, dataclass, replace

from .errors import CleanSlateError, NotPermitted
from .observe.procfs import read_boot_id, read_identity
from .sglang.record import create_server_dir, opened_folder, read_small, server_dir, write_file

LEASE = "lease.json"
LOCK = ".lease.lock"
LOCK_WAIT_S = 10.0  # the lock is held for milliseconds; whoever keeps it longer is stuck
POLL_S = 0.5
SLACK_S = 60.0  # between two modules of a run, and beyond a module's own deadline
LONGEST_S = 7 * 86400.0  # no module works that long: a longer one is no lease that we wrote
_TEXT_LIMIT = 200
_RUN_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")


@dataclass(frozen=True)
class Clock:
    """What time it is: of day (UTC, seconds since 1970) and since boot, and which boot that is."""

    epoch: float
    since_boot: float
    boot_id: t.Optional[str]


@dataclass(frozen=True)
class Lease:
    """Who works on a server. ``pid`` and ``start_ticks`` name the process of ``module``; None between two modules.

    ``renewed_since_boot`` and ``expires_since_boot`` count on the clock of the boot ``boot_id``. ``ttl_s``: how long
    the run may take between two of its modules.
    """

    name: str
    run_id: str
    taken_at: float
    renewed_at: float
    expires_at: float
    renewed_since_boot: float
    expires_since_boot: float
    ttl_s: float = SLACK_S
    boot_id: t.Optional[str] = None
    controller: t.Optional[str] = None
    operator: t.Optional[str] = None
    module: t.Optional[str] = None
    pid: t.Optional[int] = None
    start_ticks: t.Optional[int] = None


@dataclass(frozen=True)
class Standing:
    """How a lease stands at this moment. ``held``: another run may not break it; ``why`` says so for people."""

    expired: bool
    running: bool
    why: str

    @property
    def held(self) -> bool:
        return self.running or not self.expired


@dataclass(frozen=True)
class Taken:
    """A lease that is ours. ``broken``: whose was broken for it, and ``broken_why``; ``fresh``: it was not ours before.
    """

    lease: Lease
    broken: t.Optional[Lease] = None
    broken_why: t.Optional[str] = None
    waited_s: float = 0.0
    fresh: bool = True


Alive = t.Callable[[int, int], bool]


# --- decisions --------------------------------------------------------------------------------------------------------


def standing(lease: Lease, clock: Clock, alive: Alive) -> Standing:
    """Whether a lease has expired and whether its module runs. ``alive`` is asked for (pid, start time) of this boot.
    """
    same_boot = None not in (lease.boot_id, clock.boot_id) and lease.boot_id == clock.boot_id
    other_boot = None not in (lease.boot_id, clock.boot_id) and not same_boot
    if other_boot:
        return Standing(True, False, "it is of an earlier boot of this machine")
    left = lease.expires_since_boot - clock.since_boot if same_boot else lease.expires_at - clock.epoch
    running = lease.pid is not None and lease.start_ticks is not None and alive(lease.pid, lease.start_ticks)
    process = f"its {lease.module or 'module'} (pid {lease.pid})" if lease.pid is not None else "no module of it"
    if running:
        return Standing(left <= 0, True, f"{process} runs")
    ended = f"{process} has ended" if lease.pid is not None else f"{process} runs"
    if left > 0:
        return Standing(False, False, f"{ended}, {left:.0f} s are left")
    return Standing(True, False, f"it expired {-left:.0f} s ago, and {ended}")


def renewed(
    lease: Lease, clock: Clock, ttl_s: float, module: t.Optional[str], process: t.Optional[tuple[int, int]]
) -> Lease:
    """The same lease for another ``ttl_s``, of the process (pid, start time) that works now, or of none."""
    pid, start_ticks = process or (None, None)
    return replace(
        lease,
        renewed_at=round(clock.epoch, 3),
        expires_at=round(clock.epoch + ttl_s, 3),
        renewed_since_boot=round(clock.since_boot, 3),
        expires_since_boot=round(clock.since_boot + ttl_s, 3),
        boot_id=clock.boot_id,
        module=module,
        pid=pid,
        start_ticks=start_ticks,
    )


def fresh_lease(
    name: str, run_id: str, clock: Clock, controller: t.Optional[str] = None, operator: t.Optional[str] = None
) -> Lease:
    """A lease that begins now and has no length yet."""
    now = round(clock.epoch, 3)
    since_boot = round(clock.since_boot, 3)
    return Lease(
        name=name,
        run_id=run_id,
        taken_at=now,
        renewed_at=now,
        expires_at=now,
        renewed_since_boot=since_boot,
        expires_since_boot=since_boot,
        boot_id=clock.boot_id,
        controller=_plain(controller),
        operator=_plain(operator),
    )


def who(lease: Lease) -> str:
    """The holder in words: run, operator and controller."""
    operator = f" of {lease.operator}" if lease.operator else ""
    controller = f" on {lease.controller}" if lease.controller else ""
    return f"run {lease.run_id}{operator}{controller}"


def holder_row(lease: Lease, state: Standing) -> dict[str, t.Any]:
    """A lease for a module's result: times in words, and how it stands."""
    return {
        **asdict(lease),
        "taken_at": when(lease.taken_at),
        "renewed_at": when(lease.renewed_at),
        "expires_at": when(lease.expires_at),
        "expired": state.expired,
        "running": state.running,
        "held": state.held,
        "why": state.why,
    }


def when(epoch: float) -> str:
    """A time of day, ISO 8601 in UTC."""
    try:
        moment = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc)
    except (OverflowError, ValueError, OSError):
        return f"{epoch:g}"
    return moment.replace(microsecond=0).isoformat()


def _held_words(name: str, lease: Lease, state: Standing) -> str:
    running = f", its {lease.module or 'module'} (pid {lease.pid}) runs now" if state.running else ""
    return f"{who(lease)} works on {name!r} since {when(lease.taken_at)} (until {when(lease.expires_at)}{running})"


def _plain(text: t.Optional[str]) -> t.Optional[str]:
    """What a person gave as a name, without what could disturb a terminal, and not endless."""
    if text is None:
        return None
    return "".join(sign if sign.isprintable() else "?" for sign in str(text))[:_TEXT_LIMIT] or None


# --- the file ---------------------------------------------------------------------------------------------------------


def parse(text: str) -> Lease:
    """A lease from JSON; raises ValueError that says what is wrong with it."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("is not a JSON object")
    values: dict[str, t.Any] = {}
    for field in ("name", "run_id"):
        values[field] = _typed(data, field, (str,))
    for field in ("taken_at", "renewed_at", "expires_at", "renewed_since_boot", "expires_since_boot"):
        values[field] = float(_typed(data, field, (int, float)))
        if not math.isfinite(values[field]):
            raise ValueError(f"has {field} {values[field]}")
    values["ttl_s"] = float(_typed({"ttl_s": SLACK_S, **data}, "ttl_s", (int, float)))
    if not 0 < values["ttl_s"] <= LONGEST_S:
        raise ValueError(f"has ttl_s {values['ttl_s']}")
    for field in ("boot_id", "controller", "operator", "module"):
        values[field] = _plain(_typed(data, field, (str, type(None))))
    for field in ("pid", "start_ticks"):
        values[field] = _typed(data, field, (int, type(None)))
        if values[field] is not None and not 0 < values[field] < 1 << 63:
            raise ValueError(f"has {field} {values[field]}")
    if not _RUN_ID.fullmatch(values["run_id"]):
        raise ValueError("has no usable run_id")
    for clock in ("at", "since_boot"):
        length = values[f"expires_{clock}"] - values[f"renewed_{clock}"]
        if not 0 <= length <= LONGEST_S:
            raise ValueError(f"says that it lasts {length:g} s")
    return Lease(**values)


def _typed(data: t.Mapping[str, t.Any], name: str, kinds: tuple[type, ...]) -> t.Any:
    value = data.get(name)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ValueError(f"has {name} of type {type(value).__name__}")
    return value


def read_lease(state_dir: str, name: str) -> t.Optional[Lease]:
    """The lease as it stands in the file; None where there is none.

    Raises:
        CleanSlateError: there is something, and it can't be understood: then nobody knows whether a run works there.
    """
    folder = server_dir(state_dir, name)
    path = os.path.join(folder, LEASE)
    try:
        with opened_folder(folder) as dir_fd:
            text = read_small(LEASE, dir_fd)
    except FileNotFoundError:
        return None
    except (OSError, CleanSlateError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise CleanSlateError(_unusable(path, name, f"can't be read: {words}")) from error
    try:
        lease = parse(text)
        if lease.name != name:
            raise ValueError(f"is of the server {lease.name[:64]!r}")
    except (ValueError, RecursionError) as error:
        no_json = isinstance(error, (json.JSONDecodeError, RecursionError))
        words = "is no JSON" if no_json else str(error)
        raise CleanSlateError(_unusable(path, name, f"can't be used: it {words}")) from None
    return lease


def _unusable(path: str, name: str, problem: str) -> str:
    return (
        f"the lease {path} {problem}; whether a run works on {name!r} is therefore not known. Make sure that none does "
        f"(no gpu_evict, server_launch or server_ready of another operator), then remove it: rm -- {path}"
    )


def read_clock() -> Clock:
    """This machine's clocks."""
    return Clock(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), read_boot_id())


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether this very process lives: a pid that was used again is another one, and a zombie works no more."""
    process = read_identity(pid)
    return process is not None and process.start_ticks == start_ticks and not process.dead


def our_process() -> tuple[int, int]:
    """This process as others will recognize it."""
    me = read_identity(os.getpid())
    if me is None:
        raise CleanSlateError("/proc does not show this process itself, so its lease could not name it")
    return me.pid, me.start_ticks


@contextlib.contextmanager
def _locked(folder: str, name: str) -> t.Iterator[None]:
    """The right to look at the lease and change it. The kernel gives it back when this process ends, however it does.
    """
    path = os.path.join(folder, LOCK)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NotPermitted(f"can't open {path}: {error.strerror}; the lease on {name!r} needs it") from error
    try:
        end = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise CleanSlateError(
                        f"{path} has been locked by another process for {LOCK_WAIT_S:g} s (fuser {path} names it); the "
                        f"lease on {name!r} can't be looked at"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _write(folder: str, lease: Lease) -> None:
    data = json.dumps(asdict(lease), indent=2, sort_keys=True) + "\n"
    write_file(folder, LEASE, data.encode(), mode=0o644)


def check_run_id(run_id: str) -> str:
    """Raise for what is no name of a run."""
    if not _RUN_ID.fullmatch(run_id):
        raise CleanSlateError(
            f"run_id is {run_id[:64]!r}; it must be letters, digits, '.', '_', ':', '-', at most 128, a letter or "
            "digit first"
        )
    return run_id


# --- what modules call ------------------------------------------------------------------------------------------------


def look(state_dir: str, name: str) -> t.Optional[tuple[Lease, Standing]]:
    """The lease and how it stands; None where there is none. Writes nothing."""
    lease = read_lease(state_dir, name)
    return None if lease is None else (lease, standing(lease, read_clock(), is_alive))


def take(
    state_dir: str,
    name: str,
    run_id: str,
    ttl_s: float = SLACK_S,
    wait_s: float = 0.0,
    controller: t.Optional[str] = None,
    operator: t.Optional[str] = None,
) -> Taken:
    """Take the lease, or renew it where it is this run's already; wait up to ``wait_s`` for another run's.

    Raises:
        CleanSlateError: another run has it, or the file can't be understood or written.
    """
    check_run_id(run_id)
    if not os.path.isabs(state_dir):
        raise CleanSlateError(f"state_dir: {state_dir!r} must be an absolute path")
    folder = create_server_dir(state_dir, name)
    started = time.monotonic()
    while True:
        with _locked(folder, name):
            clock = read_clock()
            found = read_lease(state_dir, name)
            state = None if found is None else standing(found, clock, is_alive)
            if found is None or state is None or found.run_id == run_id or not state.held:
                ours = found is not None and found.run_id == run_id
                base = found if found is not None and ours else fresh_lease(name, run_id, clock, controller, operator)
                base = replace(base, ttl_s=ttl_s)
                if state is not None and ours and state.running:
                    # A module of ours still works (its connection broke): the lease must go on naming it.
                    lease = _longer(base, clock, ttl_s)
                else:
                    lease = renewed(base, clock, ttl_s, None, None)
                _write(folder, lease)
                waited = round(time.monotonic() - started, 3)
                if found is None or ours or state is None:
                    return Taken(lease, None, None, waited, fresh=not ours)
                return Taken(lease, found, state.why, waited)
        waited = time.monotonic() - started
        if waited >= wait_s:
            raise CleanSlateError(
                f"{_held_words(name, found, state)}; waited {waited:.0f} s for it. Wait for that run to end; it may be "
                "broken only when it has expired and its module has ended"
            )
        time.sleep(min(POLL_S, max(0.01, wait_s - waited)))


def _longer(lease: Lease, clock: Clock, ttl_s: float) -> Lease:
    """The lease of a module that still runs, never shortened by somebody else of the run."""
    process = (lease.pid, lease.start_ticks) if lease.pid is not None and lease.start_ticks is not None else None
    left = lease.expires_since_boot - clock.since_boot if lease.boot_id == clock.boot_id else 0.0
    return renewed(lease, clock, max(ttl_s, left), lease.module, process)


def release(state_dir: str, name: str, run_id: str) -> tuple[bool, t.Optional[Lease]]:
    """Give the lease back: (whether it was ours, what is there now).

    A module of ours that still runs keeps it until it ends: the lease then expires at once, but stays.
    """
    check_run_id(run_id)
    folder = server_dir(state_dir, name)
    if not os.path.isdir(folder):
        return False, None
    with _locked(folder, name):
        found = read_lease(state_dir, name)
        if found is None or found.run_id != run_id:
            return False, found
        clock = read_clock()
        if found.pid is not None and standing(found, clock, is_alive).running:
            process = (found.pid, found.start_ticks or 0)
            kept = renewed(found, clock, 0.0, found.module, process)
            _write(folder, kept)
            return True, kept
        try:
            with opened_folder(folder) as dir_fd:
                os.unlink(LEASE, dir_fd=dir_fd)
        except OSError as error:
            raise NotPermitted(f"can't remove {os.path.join(folder, LEASE)}: {error.strerror}") from error
    return True, None


@dataclass(frozen=True)
class Kept:
    """A lease that a module works under; without a run nobody's, and then nothing is checked on the way."""

    state_dir: str
    name: str
    run_id: t.Optional[str]
    process: t.Optional[tuple[int, int]] = None

    def lost(self) -> t.Optional[str]:
        """Why this module must not act any more, None where it may. Asked before each step that changes something."""
        if self.run_id is None or self.process is None:
            return None
        try:
            found = read_lease(self.state_dir, self.name)
        except CleanSlateError as error:
            return str(error)
        if found is not None and found.run_id == self.run_id and (found.pid, found.start_ticks) == self.process:
            return None
        return _lost_words(self.name, self.run_id, found)

    def check(self) -> None:
        """Raise CleanSlateError where the lease is no longer ours."""
        why = self.lost()
        if why is not None:
            raise CleanSlateError(why)


def _lost_words(name: str, run_id: str, found: t.Optional[Lease]) -> str:
    if found is None:
        return (
            f"the lease on {name!r} is no longer ours (run {run_id}): nobody holds it now, so another run may have "
            "begun and ended meanwhile. Nothing more was done; start the run anew"
        )
    if found.run_id == run_id:
        return (
            f"the lease on {name!r} is held by another module of this run, {found.module} (pid {found.pid}), since "
            f"{when(found.renewed_at)}: two must not act at once. Wait for it to end"
        )
    return (
        f"the lease on {name!r} is no longer ours (run {run_id}): {who(found)} holds it since {when(found.taken_at)}. "
        "Nothing more was done; start the run anew when that one has ended"
    )


@contextlib.contextmanager
def keep(
    state_dir: str,
    name: str,
    run_id: t.Optional[str],
    module: str,
    deadline_s: float,
    check_mode: bool = False,
    acts: bool = True,
) -> t.Iterator[Kept]:
    """Work under the lease: the body of a module that changes something on the host.

    With ``run_id`` the lease must be this run's. It is renewed for ``deadline_s`` and a minute more in this process's
    name, and on the way out for the lease's own length (a minute at least) in nobody's. Without one the module goes on
    only if nobody else holds the server. ``acts`` False: a module that only looks; without a run it asks for nothing.
    In check mode nothing is demanded and nothing written.

    Raises:
        CleanSlateError: another run holds the server, this run's lease is lost, or the file can't be understood.
    """
    if check_mode or (run_id is None and not acts):
        yield Kept(state_dir, name, None)
        return
    if run_id is None:
        _refuse_held(state_dir, name)
        yield Kept(state_dir, name, None)
        return
    kept = _begin(state_dir, name, check_run_id(run_id), module, deadline_s)
    try:
        yield kept
    finally:
        _end(kept)


def _refuse_held(state_dir: str, name: str) -> None:
    found = look(state_dir, name)
    if found is not None and found[1].held:
        raise CleanSlateError(
            f"{_held_words(name, *found)}, and this task has no run_id. Wait for that run to end, or give its run_id"
        )


def _begin(state_dir: str, name: str, run_id: str, module: str, deadline_s: float) -> Kept:
    folder = server_dir(state_dir, name)
    process = our_process()
    if not os.path.isdir(folder):
        raise CleanSlateError(_lost_words(name, run_id, None))
    with _locked(folder, name):
        found = read_lease(state_dir, name)
        if found is None or found.run_id != run_id:
            raise CleanSlateError(_lost_words(name, run_id, found))
        clock = read_clock()
        if (found.pid, found.start_ticks) != process and standing(found, clock, is_alive).running:
            raise CleanSlateError(_lost_words(name, run_id, found))
        length = min(deadline_s + SLACK_S, LONGEST_S)
        _write(folder, renewed(found, clock, length, module, process))
    return Kept(state_dir, name, run_id, process)


def _end(kept: Kept) -> None:
    """Between two modules the run has its time. A lease that is not ours by now is left as it is; what can't be written
    is no reason to fail a module that has done its work."""
    folder = server_dir(kept.state_dir, kept.name)
    with contextlib.suppress(OSError, CleanSlateError), _locked(folder, kept.name):
        found = read_lease(kept.state_dir, kept.name)
        if found is not None and found.run_id == kept.run_id and (found.pid, found.start_ticks) == kept.process:
            clock = read_clock()
            # Where the run was released meanwhile, this module was all that kept the lease.
            if found.expires_at <= found.renewed_at:
                with opened_folder(folder) as dir_fd:
                    os.unlink(LEASE, dir_fd=dir_fd)
                return
            _write(folder, renewed(found, clock, max(SLACK_S, found.ttl_s), None, None))
