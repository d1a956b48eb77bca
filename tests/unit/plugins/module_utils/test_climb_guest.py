# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ladder from a Proxmox node over a scripted one: one container's server is asked, and nobody else is touched; the
two last rungs come last, and only where they help.
"""

from __future__ import annotations

import dataclasses
import stat
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.act import climb, lastrungs
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.climb import Climber, Deadlines
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.lastrungs import LastRung
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.optin import OptIn
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.owners import Asked, ask_to_stop
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide import optin
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.targets import Owner, Request, Selection
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Gpu, GpuReading, Process, Reason
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.look import LookOptions
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Guest, Snapshot, Unit
from ansible_collections.cleanslate.sglang.tests.unit.builders import LEADER, OWN, gpu, holds, leader, process
from ansible_collections.cleanslate.sglang.tests.unit.guest_builders import (
    INIT,
    OTHER,
    UNIT,
    UNIT_PATH,
    VMID,
    guest_init,
    inside,
    node,
)
from ansible_collections.cleanslate.sglang.tests.unit.plugins.module_utils.test_climb import World

SERVICE = f"/ns/system.slice/{UNIT}"
LADDER = ("stop", "term", "kill", "holders")
ALL = (*LADDER, "container_stop", "gpu_reset")
SERVER = inside(100, LEADER, SERVICE)
RANK = inside(101, "sglang::scheduler", SERVICE, ppid=100, sid=100, pgid=100)
# Servers of the same port and the same unit's name, on the same GPU.
THEIRS = inside(200, LEADER, SERVICE, OTHER, ppid=190)
THEIR_RANK = inside(201, "sglang::scheduler", SERVICE, OTHER, ppid=200, sid=200, pgid=200)
NODES = process(300, LEADER, cgroups=(f"/system.slice/{UNIT}",))
BYSTANDERS = (THEIRS, THEIR_RANK, NODES)
REFUSED = Reason("container_stop_unconfirmed", "container 129 is not stopped: nobody confirmed it", "container 129")
STUCK_IN_R = {100: {"SIGTERM", "SIGKILL"}, 101: {"SIGKILL"}}


class NodeWorld(World):
    """A node in memory with container 129, whose last rungs are scripted: what they did is in ``log`` as well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *processes: Process) -> None:
        super().__init__(monkeypatch, *processes)
        self.guest_changes: dict[str, t.Any] = {}
        self.limits: tuple[float, float] | None = None
        self.stop_refused: tuple[Reason, ...] = ()
        self.reset_refused: tuple[Reason, ...] = ()
        self.reset_gpus: list[int] = []
        self.attach_s: float | None = None
        self.health: dict[str, t.Any] = {}
        monkeypatch.setattr(climb, "read_identity", lambda pid, _proc="/proc": self.processes.get(pid))
        monkeypatch.setattr(lastrungs, "stop_container", self._stop_container)
        monkeypatch.setattr(lastrungs, "container_stop_refusals", lambda *_unused: self.stop_refused)
        monkeypatch.setattr(lastrungs, "reset_stuck_gpus", self._reset)
        monkeypatch.setattr(optin, "refuse_gpu_reset", lambda *_unused: self.reset_refused)
        monkeypatch.setattr(climb, "vantage", lambda _proc: "host")

    def gpu(self) -> Gpu:
        one = gpu(0, self.used_mib())
        return dataclasses.replace(one, health=dataclasses.replace(one.health, **self.health))

    def look(self) -> Snapshot:
        everybody = self.processes.values()
        leaders = [leader(one, unit=self.units.get(one.pid)) for one in everybody if one.argv == LEADER]
        return node(
            *everybody, uses=self.holders(), leaders=leaders, reading=self.read(), guest_changes=self.guest_changes
        )

    def _stop(self, owner: Owner, deadline_s: float, attach_deadline_s: float) -> Asked:
        assert owner.guest == VMID
        self.attach_s = attach_deadline_s
        return super()._stop(owner, deadline_s, attach_deadline_s)

    def _stop_container(
        self,
        _snapshot: Snapshot,
        _selection: Selection,
        looked_at: Guest,
        _optin: OptIn,
        limits: tuple[float, float],
        _roots: tuple[str, str],
    ) -> LastRung:
        assert looked_at.vmid == VMID
        self.log.append(("container_stop", VMID))
        self.limits = limits
        if self.stop_refused:
            return LastRung(False, reasons=self.stop_refused, note="refused: " + self.stop_refused[0].message)
        self.now += 30
        for pid in [one.pid for one in self.processes.values() if one.cgroups[:1] and "/lxc/129/" in one.cgroups[0]]:
            del self.processes[pid]
        self.processes[INIT] = guest_init(start_ticks=99_999)
        self.guest_changes = {}
        return LastRung(True, ({"what": "pct stop"}, {"what": "pct start"}), note="stopped and started again")

    def _reset(self, _snapshot: Snapshot, gpus: t.Sequence[Gpu], *_unused: t.Any) -> LastRung:
        self.log.append(("gpu_reset", tuple(one.index for one in gpus)))
        if self.reset_refused:
            return LastRung(False, reasons=self.reset_refused, note="refused: " + self.reset_refused[0].message)
        self.used_mib = lambda: 0
        self.health = {}
        return LastRung(True, ({"what": "nvidia-smi --gpu-reset"},), resets={"00000000:01:00.0": 12.5})

    def climber(self, **changes: t.Any) -> Climber:
        values: dict[str, t.Any] = {
            "options": LookOptions(container=VMID),
            "request": Request(port=30000),
            "rungs": ALL,
            "deadlines": Deadlines(),
        }
        return Climber(**{**values, **changes})

    def climb(self, **changes: t.Any) -> Climber:
        climber = self.climber(**changes)
        climber.climb()
        assert self.open == set(), "a pidfd was left open"
        return climber

    @property
    def touched(self) -> set[t.Any]:
        return {who for what, who in self.log if what.startswith("SIG")}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> NodeWorld:
    return NodeWorld(monkeypatch, SERVER, RANK, *BYSTANDERS)


def codes(climber: Climber) -> list[str]:
    return [reason.code for reason in climber.report.reasons]


def rungs(climber: Climber) -> list[str]:
    return [rung.rung for rung in climber.report.rungs]


# --- the ladder ---


def test_one_containers_server_goes_and_its_neighbours_stay(world: NodeWorld) -> None:
    climber = world.climb()
    assert world.log == [("SIGTERM", 100)]
    assert (rungs(climber), codes(climber)) == (["term"], [])
    assert {200, 201, 300} <= set(world.processes)
    assert {one.process.pid for one in climber.report.spared} >= {200, 300}


@pytest.mark.parametrize("scope", ["server", "sglang", "gpu"])
@pytest.mark.parametrize("hung", [False, True])
def test_whatever_it_takes_nobody_else_is_signalled(world: NodeWorld, scope: str, hung: bool) -> None:
    world.uses += [holds(200), holds(201), holds(300)]
    world.deaf = dict(STUCK_IN_R)
    world.units = {pid: Unit(UNIT, pid, "", "active", "loaded", UNIT_PATH) for pid in (100, 200, 300)}
    world.stop_works = False
    climber = world.climb(request=Request(scope=scope, port=30000), hung=hung)
    assert world.touched == {100, 101}
    assert [entry for entry in world.log if not entry[0].startswith("SIG")] == [
        ("stop", UNIT),
        ("container_stop", VMID),
    ]
    assert {200, 201, 300} <= set(world.processes)
    assert {row["pid"] for row in climber.report.ended} == {100, 101, INIT}


def test_its_unit_is_asked_for_within_the_deadline_of_an_attach(world: NodeWorld) -> None:
    world.units[100] = Unit(UNIT, 100, "", "active", "loaded", UNIT_PATH)
    climber = world.climb(deadlines=Deadlines(attach=7.0))
    assert (world.log, world.attach_s) == ([("stop", UNIT)], 7.0)
    assert climber.report.rungs[0].asked[0]["what"] == f"stop systemd {UNIT} in container 129"


def test_an_attach_that_hangs_is_named_and_the_ladder_goes_on(world: NodeWorld) -> None:
    world.units[100] = Unit(UNIT, 100, "", "active", "loaded", UNIT_PATH)
    world.stop_works = False
    climber = world.climb()
    assert world.log == [("stop", UNIT), ("SIGTERM", 100)]
    assert climber.report.rungs[0].note == "Unit is masked"


def test_our_own_systemd_is_never_asked_for_a_containers_unit(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have a unit of the same name."""
    monkeypatch.setattr(climb, "has_systemd", lambda: True)
    monkeypatch.setattr(climb, "read_unit", lambda *_unused: pytest.fail("systemd was asked"))
    world.processes = {one.pid: one for one in BYSTANDERS}
    assert world.climber(request=Request(unit=UNIT))._own_unit() is None
    climber = world.climb(request=Request(unit=UNIT))
    assert (world.log, codes(climber)) == ([], [])


def test_a_supervisor_in_the_container_is_named_with_it() -> None:
    one = inside(100, LEADER, SERVICE)
    assert climb.supervisor_of(one, node(one)) == f"systemd unit {UNIT} in container 129"


def test_an_unkillable_process_asks_for_a_reboot_of_the_node(world: NodeWorld) -> None:
    world.deaf = dict(STUCK_IN_R)
    world.processes[100] = dataclasses.replace(SERVER, state="D", kill_pending=True)
    climber = world.climb(rungs=LADDER)
    (reason,) = [one for one in climber.report.reasons if one.code == "unkillable"]
    assert "SIGKILL pending, waits in uvm_wait" in reason.message
    assert "A reboot of the node" in reason.message


# --- a cgroup as a whole ---


def object_to(world: NodeWorld, **changes: t.Any) -> t.Callable[[int], str | None]:
    climber = world.climber(**changes)
    return climber._kill_objection(world.look())


def test_a_cgroup_is_only_killed_with_known_members_in_it(world: NodeWorld) -> None:
    helper = inside(102, ("bash",), SERVICE, exe="/usr/bin/bash")
    ssh = inside(103, ("sshd",), SERVICE, exe="/usr/sbin/sshd")
    ours = inside(OWN, ("python3",), SERVICE)
    world.processes.update({one.pid: one for one in (helper, ssh, ours)})
    objection = object_to(world)
    assert [objection(pid) for pid in (100, 101, 102)] == [None, None, None]
    for pid in (200, 201, 300):
        assert objection(pid) == "it is out of bounds"
    assert objection(INIT) == "it is the init of container 129"
    assert "sshd" in (objection(103) or "")
    assert objection(OWN) is not None
    for name in ("102", "bash"):
        assert "protected by the operator" in (object_to(world, request=Request(protect=(name,)))(102) or "")


def test_whoever_was_forked_since_counts_as_its_parent(world: NodeWorld) -> None:
    objection = object_to(world)
    world.processes[500] = inside(500, ("x",), SERVICE, ppid=101)
    world.processes[501] = inside(501, ("x",), SERVICE, ppid=500)
    world.processes[600] = process(600, ("x",), ppid=300)
    world.processes[601] = inside(601, ("x",), SERVICE, OTHER, ppid=200)
    for pid in range(700, 706):
        world.processes[pid] = inside(pid, ("x",), SERVICE, ppid=pid + 1)
    assert [objection(pid) for pid in (500, 501)] == [None, None]
    assert [objection(pid) for pid in (600, 601)] == ["it is out of bounds"] * 2
    assert objection(700) == "who it is is not known"
    assert objection(999) is None  # it has ended


# --- the last rungs ---


def test_the_container_is_stopped_after_all_else(world: NodeWorld) -> None:
    world.deaf = dict(STUCK_IN_R)
    climber = world.climb(deadlines=Deadlines(container_stop=50.0, container_start=40.0))
    assert world.log[-1] == ("container_stop", VMID)
    assert rungs(climber) == ["term", *["kill"] * (len(climber.report.rungs) - 2), "container_stop"]
    last = climber.report.rungs[-1]
    assert (last.note, last.left) == ("stopped and started again", (INIT, 100, 101))
    assert (codes(climber), world.limits) == ([], (50.0, 40.0))
    assert {row["pid"]: row["rung"] for row in climber.report.ended}[100] == "container_stop"


def test_not_without_its_rung(world: NodeWorld) -> None:
    world.deaf = dict(STUCK_IN_R)
    climber = world.climb(rungs=LADDER)
    assert "container_stop" not in {what for what, _who in world.log}
    assert codes(climber).count("still_there") == 2


def test_a_refusal_keeps_what_was_said_before(world: NodeWorld) -> None:
    world.deaf = dict(STUCK_IN_R)
    world.stop_refused = (REFUSED,)
    climber = world.climb()
    assert codes(climber) == ["still_there", "still_there", "container_stop_unconfirmed"]
    last = climber.report.rungs[-1]
    assert (last.rung, last.left, last.note) == ("container_stop", (), "refused: " + REFUSED.message)
    assert {100, 101} <= set(world.processes)


def test_where_nobody_is_in_the_way_nothing_is_stopped_or_reset(world: NodeWorld) -> None:
    climber = world.climb()
    assert rungs(climber) == ["term"]
    world.log.clear()
    again = world.climb()
    assert (world.log, rungs(again)) == ([], [])


def test_a_broken_container_is_in_the_way_with_nobody_of_the_server_left(world: NodeWorld) -> None:
    world.processes = {one.pid: one for one in (*BYSTANDERS, inside(120, ("cat",), state="D"))}
    world.guest_changes = {"state": "broken", "init_pid": None}
    climber = world.climb()
    assert (world.log, codes(climber)) == ([("container_stop", VMID)], [])


def test_memory_that_somebody_elsewhere_holds_is_no_ground(world: NodeWorld) -> None:
    world.processes = {one.pid: one for one in BYSTANDERS}
    world.uses = [holds(201)]
    climber = world.climb()
    assert (world.log, rungs(climber)) == ([], [])


def test_memory_that_a_member_out_of_scope_holds_is_a_ground_to_stop_and_none_to_reset(world: NodeWorld) -> None:
    world.processes = {120: inside(120)}
    world.uses = [holds(120)]
    world.stop_refused = (REFUSED,)
    world.climb()
    assert world.log == [("container_stop", VMID)]


def test_memory_of_nobody_is_reset_only_after_the_container_was_stopped(world: NodeWorld) -> None:
    world.used_mib = lambda: 20_000
    climber = world.climb()
    assert world.log == [("SIGTERM", 100), ("container_stop", VMID), ("gpu_reset", (0,))]
    assert (codes(climber), climber.report.resets) == ([], {"00000000:01:00.0": 12.5})
    assert climber.report.pinned is not None and climber.report.pinned.freed is True
    assert climber.after is not None and climber.after.gpus[0].memory is not None
    assert climber.after.gpus[0].memory.used_mib == 0


def test_a_reset_that_is_refused_leaves_the_memory_a_reason(world: NodeWorld) -> None:
    world.used_mib = lambda: 20_000
    world.reset_refused = (Reason("gpu_reset_unconfirmed", "GPU 0 is not reset: nobody confirmed it", "GPU 0"),)
    climber = world.climb(rungs=(*LADDER, "gpu_reset"))
    assert codes(climber) == ["memory_held", "gpu_reset_unconfirmed"]
    assert climber.report.resets == {}


def test_what_was_stuck_before_a_reset_is_not_said_after_it(world: NodeWorld) -> None:
    world.used_mib = lambda: 20_000
    climber = world.climb(rungs=(*LADDER, "gpu_reset"))
    assert world.log[-1] == ("gpu_reset", (0,))
    assert codes(climber) == []


def test_a_gpu_that_asks_for_a_reset_gets_it_though_it_is_empty(world: NodeWorld) -> None:
    world.health = {"recovery_action": "reset"}
    world.processes = {}
    world.climb()
    assert world.log == [("gpu_reset", (0,))]


@pytest.mark.parametrize("reading", [GpuReading("nvml", None), GpuReading("nvml", (gpu(0, memory=None),))])
def test_memory_that_cannot_be_told_is_no_ground(world: NodeWorld, reading: GpuReading) -> None:
    world.processes = {}
    world.read = lambda: reading
    world.climb()
    assert world.log == []


def test_after_a_restart_the_memory_gets_its_time_anew(world: NodeWorld) -> None:
    """It is unpinned from the moment on at which the container's processes ended, not from an earlier end."""
    world.deaf = {101: {"SIGKILL"}}  # the leader goes at once, a rank stays
    freed_at: list[float] = []

    def used() -> int:
        if not any(what == "container_stop" for what, _who in world.log):
            return 20_000
        freed_at.append(freed_at[0] if freed_at else world.now + 6)
        return 20_000 if world.now < freed_at[0] else 0

    world.used_mib = used
    climber = world.climb(rungs=(*LADDER, "container_stop"))
    assert [rung.rung for rung in climber.report.rungs][-1] == "container_stop"
    assert codes(climber) == []
    assert climber.report.pinned is not None and climber.report.pinned.freed is True


def test_who_came_back_with_the_container_is_still_there(world: NodeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.deaf = dict(STUCK_IN_R)
    really = world._stop_container

    def stop_and_start(*arguments: t.Any) -> LastRung:
        done = really(*arguments)
        world.processes[150] = inside(150, LEADER, SERVICE)
        return done

    monkeypatch.setattr(lastrungs, "stop_container", stop_and_start)
    climber = world.climb()
    assert [(one.code, one.subject) for one in climber.report.reasons] == [("still_there", "pid 150")]


def test_a_rung_is_told_though_the_look_after_it_fails(world: NodeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.deaf = dict(STUCK_IN_R)
    really = world._stop_container

    def blind() -> Snapshot:
        raise CleanSlateError("no answer within 30 s")

    def stop_and_go_blind(*arguments: t.Any) -> LastRung:
        done = really(*arguments)
        monkeypatch.setattr(world, "look", blind)
        return done

    monkeypatch.setattr(lastrungs, "stop_container", stop_and_go_blind)
    climber = world.climber()
    with pytest.raises(CleanSlateError, match="no answer within 30 s"):
        climber.climb()
    last = climber.report.rungs[-1]
    assert (last.rung, last.note) == ("container_stop", "stopped and started again")


def test_later_looks_keep_to_the_gpus_of_the_first(world: NodeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...] | None] = []
    really = world.look
    climber = world.climber()

    def look() -> Snapshot:
        asked.append(climber.options.pinned)
        return really()

    monkeypatch.setattr(world, "look", look)
    climber.climb()
    assert asked[0] is None and len(asked) > 2
    assert set(asked[1:]) == {("GPU-0",)}


# --- check mode ---


def test_a_plan_names_the_rungs_and_touches_nobody(world: NodeWorld) -> None:
    climber = world.climber(request=Request(scope="gpu", port=30000))
    plan = dict(climber.plan())
    assert list(plan) == ["term", "kill", "container_stop"]
    assert [text.split()[1] for text in plan["term"] + plan["kill"]] == ["100", "100", "101"]
    assert "container 129 with its 3 processes is stopped and started again" in plan["container_stop"][0]
    assert (world.log, {100, 101, 200, 201, 300} <= set(world.processes)) == ([], True)


def test_a_plan_tells_what_would_be_refused(world: NodeWorld) -> None:
    world.stop_refused = (REFUSED,)
    assert dict(world.climber().plan())["container_stop"] == (f"refused: {REFUSED.message}",)
    world.processes = {}
    world.used_mib = lambda: 20_000
    world.reset_refused = (Reason("gpu_reset_unconfirmed", "GPU 0 is not reset: nobody confirmed it", "GPU 0"),)
    plan = dict(world.climber(rungs=("gpu_reset",)).plan())
    assert plan == {"gpu_reset": ("refused: GPU 0 is not reset: nobody confirmed it",)}


def test_a_plan_for_nobody_is_empty(world: NodeWorld) -> None:
    world.processes = {one.pid: one for one in BYSTANDERS}
    assert world.climber().plan() == ()


# --- asking a container's systemd ---

OWNER = Owner("systemd", UNIT, 100, "", VMID)


@pytest.fixture
def pct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> t.Callable[[str], Path]:
    """A ``pct`` in front of all others, which writes its words down and then does what it is told."""

    def write(body: str) -> Path:
        log = tmp_path / "log"
        script = tmp_path / "pct"
        script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {log}\n{body}\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return log

    return write


def test_the_words_of_an_attach(pct: t.Callable[[str], Path]) -> None:
    log = pct("exit 0")
    assert ask_to_stop(OWNER, 5.0, 5.0) == Asked(OWNER, True)
    words = ["exec", VMID, "--", "systemctl", "stop", "--no-block", "--"]
    assert log.read_text().splitlines() == [*words, UNIT]
    odd = dataclasses.replace(OWNER, name="--force x;reboot.service")
    assert ask_to_stop(odd, 5.0, 5.0).accepted
    assert log.read_text().splitlines() == [*words, odd.name]


def test_an_attach_that_hangs_costs_its_own_deadline(pct: t.Callable[[str], Path]) -> None:
    pct("exec sleep 300")
    started = time.monotonic()
    asked = ask_to_stop(OWNER, 200.0, 0.5)
    assert time.monotonic() - started < 5
    assert (asked.accepted, asked.detail) == (False, "pct exec 129 gave no answer within 0.5 s")


def test_an_attach_that_fails_says_why(pct: t.Callable[[str], Path]) -> None:
    pct('echo "CT 129 not running" >&2; exit 255')
    assert ask_to_stop(OWNER, 5.0, 5.0).detail == "pct exec 129: CT 129 not running"


def test_a_node_without_pct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = ask_to_stop(OWNER, 5.0, 5.0)
    assert not asked.accepted and "pct" in asked.detail
