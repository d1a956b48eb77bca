# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ladder over a scripted host: who is asked when, what is waited for, when it stops."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import time
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.act import climb
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.climb import Climber, Deadlines, supervisor_of
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.owners import Asked
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.signals import Grip, Sent
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.targets import Owner, Request
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import DeviceUse, Gpu, GpuReading, Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.look import LookOptions
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Snapshot, Unit
from ansible_collections.cleanslate.sglang.plugins.module_utils.spawn import Called
from ansible_collections.cleanslate.sglang.tests.unit.builders import (
    LEADER,
    gpu,
    holds,
    leader,
    memory,
    process,
    snapshot,
)

ALL = ("stop", "term", "kill", "holders")
SERVER = process(100, LEADER)
RANK = process(101, "sglang::scheduler", ppid=100, sid=100, pgid=100)
Key = tuple[int, int]


class World:
    """A host in memory, and a clock that only waits move. ``deaf``: pid -> the signals that it survives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *processes: Process) -> None:
        self.processes = {one.pid: one for one in processes}
        self.uses: list[DeviceUse] = [holds(101)]
        self.deaf: dict[int, set[str]] = {}
        self.units: dict[int, Unit] = {}
        self.respawn: t.Callable[[], Process] | None = None
        self.log: list[tuple[str, t.Any]] = []
        self.now = 1000.0
        self.read: t.Callable[[], GpuReading] = lambda: GpuReading("nvml", (self.gpu(),))
        self.used_mib: t.Callable[[], int] = lambda: 20_000 if self.holders() else 0
        self.stop_works = True
        self.descriptors = itertools.count(50)
        self.open: set[int] = set()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)
        monkeypatch.setattr(climb, "look", lambda _options: self.look())
        monkeypatch.setattr(climb, "look_with", lambda _options, _reading: self.look())
        monkeypatch.setattr(climb.nvml, "read_gpus", lambda *_unused: self.read())
        monkeypatch.setattr(climb, "grip", self._grip)
        monkeypatch.setattr(Grip, "close", lambda held: self.open.discard(held.fd))
        monkeypatch.setattr(climb, "send", self._send)
        monkeypatch.setattr(climb, "wait_ended", self._wait)
        monkeypatch.setattr(climb, "ask_to_stop", self._stop)
        monkeypatch.setattr(climb, "read_identity", self.processes.get)
        monkeypatch.setattr(climb, "read_process", self.processes.get)
        monkeypatch.setattr(climb, "call_bounded", lambda function, _deadline_s: Called(value=function()))
        monkeypatch.setattr(climb, "read_wchan", lambda pid: "uvm_wait")
        monkeypatch.setattr(climb, "holds_now", self._holds_now)
        monkeypatch.setattr(Climber, "_waiting_unit", lambda _self: None)

    def holders(self) -> list[DeviceUse]:
        return [use for use in self.uses if use.pid in self.processes]

    def gpu(self) -> Gpu:
        return gpu(0, self.used_mib())

    def look(self) -> Snapshot:
        leaders = [
            leader(one, unit=self.units.get(one.pid)) for one in self.processes.values() if one.argv[1:3] == LEADER[1:3]
        ]
        return snapshot(*self.processes.values(), uses=self.holders(), leaders=leaders, reading=self.read())

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _grip(self, one: Process) -> Grip | None:
        if self.processes.get(one.pid) != one:
            return None
        held = Grip(one, next(self.descriptors))
        self.open.add(held.fd)
        return held

    def _send(self, held: Grip, number: signal.Signals, objection: t.Callable[[Process], str | None]) -> Sent:
        pid, name = held.process.pid, number.name
        current = self.processes.get(pid)
        if current is None:
            return Sent(pid, name, "gone")
        reason = objection(current)
        if reason:
            return Sent(pid, name, "changed", reason)
        self.log.append((name, pid))
        if name not in self.deaf.get(pid, set()):
            self._end(pid)
        return Sent(pid, name, "sent")

    def _end(self, pid: int) -> None:
        del self.processes[pid]
        if pid == 100:  # its ranks follow their leader
            for below in [one.pid for one in self.processes.values() if one.ppid == pid and one.pid not in self.deaf]:
                del self.processes[below]
        if self.respawn is not None and pid >= 100 and not any(one.argv == LEADER for one in self.processes.values()):
            fresh = self.respawn()
            self.processes[fresh.pid] = fresh

    def _wait(self, grips: t.Sequence[Grip], deadline: float) -> set[Key]:
        ended = {held.process.key for held in grips if self.processes.get(held.process.pid) != held.process}
        if len(ended) < len(grips):
            self.now = max(self.now, deadline)
        return ended

    def _stop(self, owner: Owner, _deadline_s: float, _attach_deadline_s: float) -> Asked:
        self.log.append(("stop", owner.name))
        if self.stop_works:
            self._end(owner.leader_pid)
        return Asked(owner, self.stop_works, "" if self.stop_works else "Unit is masked")

    def _holds_now(self, one: Process, *_: t.Any) -> tuple[t.Any, ...]:
        return tuple(holder for holder in self.look().holders[0].holders if holder.pid == one.pid)

    def climb(self, **changes: t.Any) -> Climber:
        values: dict[str, t.Any] = {
            "options": LookOptions(),
            "request": Request(port=30000),
            "rungs": ALL,
            "deadlines": Deadlines(),
        }
        climber = Climber(**{**values, **changes})
        climber.climb()
        assert self.open == set(), "a pidfd was left open"
        return climber


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch, SERVER, RANK)


def codes(climber: Climber) -> list[str]:
    return [reason.code for reason in climber.report.reasons]


def test_term_is_enough(world: World) -> None:
    climber = world.climb()
    assert world.log == [("SIGTERM", 100)]
    assert [rung.rung for rung in climber.report.rungs] == ["term"]
    assert codes(climber) == []
    assert [row["pid"] for row in climber.report.ended] == [100, 101]


def test_nobody_is_there(world: World) -> None:
    world.processes.clear()
    climber = world.climb()
    assert (world.log, climber.report.rungs, climber.report.pinned) == ([], [], None)


def test_the_owner_is_asked_first_and_then_nobody_else(world: World) -> None:
    world.units[100] = Unit("x.service", 100, "always", "active", "loaded")
    climber = world.climb()
    assert world.log == [("stop", "x.service")]
    assert [rung.rung for rung in climber.report.rungs] == ["stop"]
    # An owner that stopped it does not start it again, so nobody watches for that.
    assert world.now == 1000.0


def test_an_owner_that_refuses_is_named_and_the_leader_is_asked(world: World) -> None:
    world.units[100] = Unit("x.service", 100, "always", "active", "loaded")
    world.stop_works = False
    climber = world.climb()
    assert world.log == [("stop", "x.service"), ("SIGTERM", 100)]
    assert climber.report.rungs[0].asked[0]["detail"] == "Unit is masked"
    assert climber.report.rungs[0].seconds == 0


def test_a_server_without_an_owner_is_not_waited_for_while_another_stops(world: World) -> None:
    other = process(200, LEADER)
    world.processes[200] = other
    world.units[100] = Unit("x.service", 100, "always", "active", "loaded")
    climber = world.climb(request=Request(scope="sglang"))
    assert world.log == [("stop", "x.service"), ("SIGTERM", 200)]
    assert climber.report.rungs[0].seconds == 0


@pytest.mark.parametrize(("hung", "state", "seconds"), [(False, "S", 45), (True, "S", 10), (False, "T", 10)])
def test_how_long_the_leader_gets(world: World, hung: bool, state: str, seconds: float) -> None:
    world.processes[101] = dataclasses.replace(RANK, state=state)
    world.deaf = {100: {"SIGTERM"}, 101: set()}
    climber = world.climb(hung=hung)
    assert climber.report.rungs[0].seconds == seconds
    assert [name for name, _pid in world.log] == ["SIGTERM", "SIGKILL", "SIGKILL"]
    note = climber.report.rungs[0].note
    assert ("short deadline" in note) == (seconds == 10)
    assert ("state T" in note) == (state == "T")


def test_who_became_another_program_is_neither_signalled_nor_awaited(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the signal the leader becomes an editor (same pid, same start time)."""

    def grip_and_change(one: Process) -> Grip | None:
        if one.pid == 100:
            world.processes[100] = dataclasses.replace(SERVER, argv=("vim",))
        return Grip(one, 1)

    monkeypatch.setattr(climb, "grip", grip_and_change)
    climber = world.climb(rungs=("term",))
    assert world.log == []
    assert climber.report.rungs[0].asked[0]["result"] == "changed"
    assert climber.report.rungs[0].seconds < 5


@pytest.mark.parametrize("state", ["D", "R"])
def test_unkillable_ends_the_climb_and_is_named(world: World, state: str) -> None:
    world.deaf = {100: {"SIGTERM", "SIGKILL"}}
    world.processes[100] = dataclasses.replace(SERVER, state=state, kill_pending=True)
    climber = world.climb()
    assert "unkillable" in codes(climber)
    reason = next(one for one in climber.report.reasons if one.code == "unkillable")
    assert "SIGKILL pending, waits in uvm_wait" in reason.message
    assert [rung.rung for rung in climber.report.rungs] == ["term", "kill"]
    assert codes(climber).count("still_there") == 0
    assert world.now - 1000 < 45 + 10 + 30


def test_who_survives_sigkill_in_an_ordinary_state_does_not_hold_us(world: World) -> None:
    world.deaf = {100: {"SIGTERM", "SIGKILL"}}
    climber = world.climb()
    assert "still_there" in codes(climber)
    assert world.now - 1000 < 45 + 10 + 30


def returning(world: World) -> t.Callable[[], Process]:
    numbers = itertools.count(300)
    return lambda: process(next(numbers), LEADER, ppid=50)


def test_a_server_that_comes_back_is_counted_and_left_after_three_rounds(world: World) -> None:
    world.processes[50] = process(50, ("supervisord",), exe="/usr/bin/supervisord")
    world.respawn = returning(world)
    climber = world.climb()
    assert len(climber.report.respawns) == 3
    assert climber.report.respawns[0]["supervisor"] == "pid 50 (supervisord)"
    assert codes(climber).count("respawn") == 1
    assert ("SIGKILL", 50) not in world.log
    assert [pid for name, pid in world.log if name == "SIGKILL"] == [300, 301]


def test_a_server_that_comes_back_late_is_noticed(world: World) -> None:
    """The supervisor needs a second; nobody is there when the rung looks."""
    world.processes[50] = process(50, ("supervisord",), exe="/usr/bin/supervisord")
    world.processes[100] = dataclasses.replace(world.processes[100], ppid=50)
    left_at: list[float] = []
    real = world.look

    def look() -> Snapshot:
        if 100 not in world.processes and not left_at:
            left_at.append(world.now)
        if left_at and world.now > left_at[0] + 1 and 300 not in world.processes and not world.log[1:]:
            world.processes[300] = process(300, LEADER, ppid=50)
        return real()

    world.look = look  # type: ignore[method-assign]
    climber = world.climb()
    assert [row["pid"] for row in climber.report.respawns] == [300]
    assert world.log == [("SIGTERM", 100), ("SIGKILL", 300)]
    assert codes(climber) == []


def test_nobody_is_waited_for_where_nobody_could_start_it_again(world: World) -> None:
    """Process 1 has adopted it, as all that is started detached: the end of the server and its memory is enough."""
    began = world.now
    climber = world.climb()
    assert climber.restarter == ""
    ended = world.now - began
    world.processes = {100: process(100, LEADER, ppid=50), 50: process(50, ("supervisord",))}
    began = world.now
    assert world.climb().restarter == "pid 50 (supervisord)"
    assert world.now - began >= ended + climb.RETURN_S - climb.SETTLE_S


def test_a_fork_of_the_leader_is_nobody_who_could_start_it_again(world: World) -> None:
    """It has the leader's command line, so it counts as a leader too; its parent goes with it."""
    world.processes[102] = process(102, LEADER, ppid=100)
    climber = world.climb(rungs=("kill",))
    assert climber.restarter == ""
    assert world.processes == {}


def test_a_kill_is_followed_by_one_look_where_the_memory_is_free_by_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One before, one after; and a third where the memory came free later, so that what is told was seen last."""
    looks: list[str] = []
    before = dict(world.processes)
    for name in ("look", "look_with"):
        real = getattr(climb, name)

        def counted(*words: t.Any, name: str = name, real: t.Any = real) -> t.Any:
            looks.append(name)
            return real(*words)

        monkeypatch.setattr(climb, name, counted)
    assert codes(world.climb(rungs=("kill",))) == []
    assert looks == ["look", "look_with"]
    looks.clear()
    world.processes.update(before)
    until = world.now + 1
    world.used_mib = lambda: 20_000 if world.now < until else 0
    assert codes(world.climb(rungs=("kill",))) == []
    assert looks == ["look", "look_with", "look_with"]


def test_without_the_rung_kill_a_returned_server_is_only_named(world: World) -> None:
    world.respawn = returning(world)
    climber = world.climb(rungs=("term",))
    assert world.log == [("SIGTERM", 100)]
    assert [row["pid"] for row in climber.report.respawns] == [300]
    assert "still_there" in codes(climber)


def test_other_holders_only_on_evidence_of_the_moment(world: World) -> None:
    train = process(400, ("python3", "train.py"))
    world.processes = {400: train}
    world.uses = [holds(400)]
    climber = world.climb(request=Request(scope="gpu"))
    assert world.log == [("SIGTERM", 400)]
    assert [rung.rung for rung in climber.report.rungs] == ["holders"]


def test_a_holder_that_let_go_meanwhile_is_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.processes = {400: process(400, ("python3", "train.py"))}
    world.uses = [holds(400)]
    monkeypatch.setattr(climb, "holds_now", lambda *_: ())
    climber = world.climb(request=Request(scope="gpu"))
    assert world.log == []
    assert climber.report.rungs[0].asked[0]["detail"] == "it holds none of the chosen GPUs any more"


@pytest.mark.parametrize("links", [1, 1000], ids=["a last one", "a chain"])
def test_who_forks_faster_than_we_look_is_not_gone(world: World, links: int) -> None:
    """Each look meets another one, and by the time of a signal it is gone."""
    numbers = iter(range(400, 400 + links))

    def look() -> Snapshot:
        number = next(numbers, None)
        world.processes = {} if number is None else {number: process(number, ("python3", "x.py"))}
        world.uses = [] if number is None else [holds(number)]
        seen = plain()
        world.processes = {}
        return seen

    plain, world.look = world.look, look  # type: ignore[method-assign]
    world.used_mib = lambda: 0
    climber = world.climb(request=Request(scope="gpu"))
    assert world.log == []
    assert codes(climber) == (["still_there"] if links > 1 else [])
    if links > 1:
        assert "forks faster" in climber.report.reasons[0].message


# --- memory ---


def test_memory_is_awaited_as_long_as_the_pinned_size_makes_plausible(world: World) -> None:
    world.processes[101] = dataclasses.replace(RANK, rss_shmem_mib=38_147)  # 40 GB
    free_at = 1000 + 9.6
    world.used_mib = lambda: 20_000 if world.now < free_at else 0
    climber = world.climb()
    pinned = climber.report.pinned
    assert pinned is not None
    assert pinned.expected_s == 20.0
    assert pinned.freed is True
    assert 9.5 <= pinned.waited_s <= 10.5
    assert "40.0 GB of host memory was pinned" in pinned.note
    assert codes(climber) == []


def test_memory_that_stays_is_a_reason(world: World) -> None:
    world.used_mib = lambda: 20_000
    climber = world.climb()
    assert codes(climber) == ["memory_held"]
    assert climber.report.pinned is not None
    assert 10 <= climber.report.pinned.waited_s < 12


def test_what_flags_ask_for_is_no_wait_without_a_bound(world: World) -> None:
    world.processes[101] = dataclasses.replace(RANK, rss_shmem_mib=10**9)
    world.used_mib = lambda: 20_000
    climber = world.climb()
    assert climber.report.pinned is not None
    assert climber.report.pinned.expected_s <= 610


@pytest.mark.parametrize(
    "reading",
    [
        GpuReading("nvml", None),
        GpuReading("nvml", (gpu(0, memory=None),)),
        GpuReading("nvml", (gpu(0, memory=memory(615, api="v1", used_excludes_reserved=False)),)),
    ],
    ids=["no answer", "no figure", "old call above the limit"],
)
def test_memory_that_cannot_be_told_is_unknown(world: World, reading: GpuReading) -> None:
    real = world.read
    world.read = lambda: real() if 100 in world.processes else reading
    climber = world.climb()
    assert codes(climber) == ["memory_unknown"]
    assert climber.report.pinned is not None
    assert climber.report.pinned.freed is None


def test_a_gpu_that_a_bystander_holds_is_not_awaited(world: World) -> None:
    world.processes[400] = process(400, ("python3", "train.py"))
    world.uses.append(holds(400))
    climber = world.climb()
    assert codes(climber) == []
    pinned = climber.report.pinned
    assert pinned is not None and pinned.freed is None, "nobody has seen that memory free"
    assert pinned.note == "memory not waited for, since others hold it: GPU 0 (00000000:01:00.0) by pid 400"


def test_what_is_said_of_the_memory_names_the_gpus_that_others_hold() -> None:
    others = "not waited for, since others hold it: GPU 1 by pid 7"
    said = [climb._memory_note(used, 0, 10.0, 1.0, others, True) for used in (None, {}, {0: 5000})]
    assert all(others in text for text in said), said
    assert climb._memory_note({}, 0, 10.0, 1.0, "", True) == "memory free after 1.0 s"
    assert "free" not in climb._memory_note({}, 0, 10.0, 1.0, others, False)


def test_a_host_without_gpus_has_no_memory_to_wait_for(world: World) -> None:
    world.read = lambda: GpuReading("none", ())
    climber = world.climb(options=LookOptions(expected_gpus=0))
    assert (codes(climber), climber.report.pinned) == ([], None)


# --- what can't be seen ---


def test_not_having_seen_the_holders_is_no_success(world: World) -> None:
    world.processes.clear()
    world.read = lambda: GpuReading("nvml", None)
    assert codes(world.climb(request=Request(scope="gpu"))) == ["gpus_unknown"]
    assert codes(world.climb(request=Request(scope="sglang", devices=("0",)))) == ["gpus_unknown"]
    assert codes(world.climb(request=Request(scope="server", port=1))) == []
    world.read = lambda: GpuReading("nvml", (gpu(0, minor=None),))
    assert codes(world.climb(request=Request(scope="gpu"))) == ["gpus_unknown"]


def test_processes_that_cannot_be_looked_into_are_no_success(world: World) -> None:
    world.processes = {400: process(400), 401: process(401, exe="/usr/sbin/sshd")}
    world.look = lambda: snapshot(*world.processes.values(), gpus=[gpu(0)], unreadable=[400, 401])  # type: ignore[method-assign]
    climber = world.climb(request=Request(scope="gpu"))
    assert codes(climber) == ["scan_incomplete"]
    assert "pid 400)" in climber.report.reasons[0].message


# --- who restarts it ---


@pytest.mark.parametrize(
    ("cgroups", "words"),
    [
        (("/system.slice/x.service",), "systemd unit x.service"),
        (("/user.slice/user-0.slice/user@0.service/app.slice/y.service",), "user unit y.service (systemctl --user)"),
        (("/user.slice/session-1.scope",), "pid 50 (supervisord)"),
    ],
)
def test_supervisor(cgroups: tuple[str, ...], words: str) -> None:
    one = process(100, LEADER, ppid=50, cgroups=cgroups)
    assert supervisor_of(one, snapshot(one, process(50, ("supervisord",)))) == words
    if "session" in cgroups[0]:
        assert supervisor_of(one, snapshot(one)) == "pid 50 (gone)"


# --- our own unit at the moment of an exec ---


UNIT = Unit("sglang-a.service", main_pid=100, restart="always", active_state="active", load_state="loaded")


def test_a_main_process_that_is_just_being_execed_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash-looping server met between fork and exec: it has no command line, and is no launcher yet."""
    world = World(monkeypatch, dataclasses.replace(SERVER, argv=()))
    world.units[100] = UNIT
    monkeypatch.setattr(Climber, "_own_unit", lambda _self: UNIT if 100 in world.processes else None)

    def sleep(seconds: float) -> None:
        world.now += seconds
        if 100 in world.processes:
            world.processes[100] = SERVER

    monkeypatch.setattr(time, "sleep", sleep)
    climber = world.climb(request=Request(unit=UNIT.name))
    assert ("stop", UNIT.name) in world.log
    assert climber.report.respawns == [] and climber.report.reasons == []


def test_a_unit_that_runs_something_else_is_left_alone_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, process(100, ("postgres",)))
    monkeypatch.setattr(Climber, "_own_unit", lambda _self: UNIT)
    climber = world.climb(request=Request(unit=UNIT.name))
    assert world.log == []
    assert [(one.code, one.means) for one in climber.report.reasons] == [("unit_runs_something_else", "unknown")]
    assert "postgres" in climber.report.reasons[0].message
