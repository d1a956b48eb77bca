# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ladder: ask the owner, ask the leader, end the tree, end other holders; stop at the first rung that was enough.

Each rung looks anew, acts on fresh evidence, and waits on events with a deadline of its own. After the last rung the
memory of the GPUs is waited for, as long as the pinned host memory makes plausible. What happened is a report; whether
the host is clean is not decided here.
"""

from __future__ import annotations

import dataclasses
import signal
import time
import typing as t
from dataclasses import dataclass, field

from ..cgroups import guest_of, unit_of, unit_path_of, user_unit_of
from ..decide.gpus import baseline_for
from ..decide.guests import elsewhere
from ..decide.holders import killable
from ..decide.ports import program_of
from ..decide.protected import protected_why
from ..decide.restarters import restarter_of
from ..decide.targets import Memory, Owner, Request, Selection, Spared, Target, nearest_leaders, select
from ..model import Gpu, GpuReading, Process, Reason
from ..observe import nvml
from ..observe.look import LookOptions, holds_now, look, look_with, still_listed
from ..observe.procfs import read_identity, read_process, read_wchan
from ..observe.systemd import has_systemd, read_unit
from ..observe.vantage import vantage
from ..sglang.cmdline import is_leader
from ..snapshot import Guest, Snapshot, Unit
from ..spawn import call_bounded
from .cgroup_kill import kill_cgroup
from .drain import Drained, DrainWish, count_once, drain
from .optin import OPT_IN, OptIn
from .owners import Asked, ask_to_stop
from .signals import Grip, Sent, grip, send, wait_ended

# What only some rungs need is loaded by them: every module that starts compiles what it loads.
if t.TYPE_CHECKING:
    from ..observe.inflight import Counter
    from .lastrungs import LastRung

# Reasons that say how things stood before a rung that changed them.
STATE_CODES = frozenset(
    {"still_there", "unkillable", "memory_held", "memory_unknown", "not_permitted", "respawn"}
)
MAX_RESPAWNS = 3
REREAD_DEADLINE_S = 5.0
KILL_ROUNDS = 8  # a fork storm is caught within a few looks; this bounds it
UNPIN_S_PER_GB = 0.25  # measured on an H200: 0.22-0.24 s per GB of pinned host memory
UNPIN_LIMIT_S = 600.0  # 2.4 TB: what flags ask for is no figure to wait on without a bound
RETURN_S = 2.0  # a supervisor starts its server again within a second (systemd 0.1 s, docker 0.1 s)
QUICK_S = 2.0  # a driver that answers within this is asked anew at every look
SETTLE_S = 0.3
NEWCOMER_LOOKS = 3
EXEC_S = 2.0  # how long our own unit's main process gets to show what it is
GB_PER_MIB = 2**20 / 1e9
FOLLOW_S = (
    5.0  # how long ranks get to follow their leader (it ends them in 0.1-0.2 s; on an old kernel by its watchdog)
)


@dataclass(frozen=True)
class Deadlines:
    """Seconds for each rung. ``term_hung`` holds where a process of the server is stopped (state T): it can't answer.

    On a Proxmox node: ``attach`` is for one ``pct exec``, ``container_stop`` and ``container_start`` for ``pct stop``
    and ``pct start``, ``gpu_reset`` for the reset of one GPU.
    """

    drain: float = 60.0
    stop: float = 45.0
    term: float = 45.0
    term_hung: float = 10.0
    kill: float = 10.0
    holders: float = 10.0
    attach: float = 20.0
    container_stop: float = 60.0
    container_start: float = 60.0
    gpu_reset: float = 90.0


@dataclass(frozen=True)
class Stayed:
    """Who is still there after a rung, and why."""

    process: Process
    why: str


@dataclass(frozen=True)
class Rung:
    """What one rung did. ``asked``: who was asked and how; ``left``: who went; ``stayed``: who did not."""

    rung: str
    asked: tuple[t.Mapping[str, t.Any], ...]
    left: tuple[int, ...]
    stayed: tuple[Stayed, ...]
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class PinnedWait:
    """The wait for GPU memory after the last process went. ``expected_s`` is what the pinned host memory makes
    plausible.
    """

    pinned_mib: int
    expected_s: float
    waited_s: float
    freed: t.Optional[bool]
    note: str


@dataclass
class Report:
    """The whole climb, filled as it goes, so that a failure still tells what was done."""

    rungs: list[Rung] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    respawns: list[t.Mapping[str, t.Any]] = field(default_factory=list)
    ended: list[t.Mapping[str, t.Any]] = field(default_factory=list)
    pinned: t.Optional[PinnedWait] = None
    drained: t.Optional[Drained] = None
    spared: tuple[Spared, ...] = ()
    resets: dict[str, float] = field(default_factory=dict)
    leader_died_at: t.Optional[float] = None
    server_uid: t.Optional[int] = None


@dataclass
class Climber:
    """One eviction. ``rungs`` are the allowed ones, in their order.

    ``fence`` says, before each step that changes something, why this run must not act any more; None: it may.
    ``config``: the launch's configuration file, for the key that counting requests may need.
    """

    options: LookOptions
    request: Request
    rungs: t.Sequence[str]
    deadlines: Deadlines
    optin: OptIn = field(default_factory=OptIn)
    drain: DrainWish = field(default_factory=DrainWish)
    config: t.Optional[str] = None
    fence: t.Callable[[], t.Optional[str]] = lambda: None
    hung: bool = False
    max_used_mib: int = 64
    baselines: t.Mapping[str, int] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    memory: Memory = field(default_factory=Memory)
    pinned_mib: int = 0
    asked_by_owner: set[tuple[int, int]] = field(default_factory=set)
    before: t.Optional[Snapshot] = None
    after: t.Optional[Snapshot] = None
    latest: t.Optional[Snapshot] = None
    leaders_seen: set[tuple[int, int]] = field(default_factory=set)
    own_cgroups: dict[str, str] = field(default_factory=dict)
    last_end: t.Optional[float] = (
        None  # when, by the monotonic clock, somebody that we asked was last seen to have ended
    )
    leader_end: t.Optional[float] = None  # the same for a leader, and only where no owner stopped it
    restarter: str = ""  # who may start a leader again by itself; empty while nobody has a tie to one
    asked: t.Optional[nvml.PendingReading] = None  # the GPUs, for the first look
    unseen: bool = False  # something was done since the last look
    fresh: t.Optional[GpuReading] = None  # what the last look had read of the GPUs just before, if it had

    def look(self, reading: t.Optional[GpuReading] = None) -> tuple[Snapshot, Selection]:
        """Look, select, and remember who was selected: when a leader is gone, its tree can still be told.

        A leader that was not there at the first look has come back, and is noted with who brought it back.
        ``reading``: of the GPUs, where it was just taken.
        """
        if reading is None and self.latest is not None and self._reads_anew(self.latest):
            reading = self._read_gpus()
        if reading is not None:
            snapshot = look_with(self.options, reading)
        elif self.latest is not None:
            known = still_listed(self.latest.reading, self.latest.processes, self.options.proc)
            snapshot = look_with(self.options, known)
        else:
            snapshot = look(self.options)
        selection = select(snapshot, self.request, self.memory)
        self.memory = self.memory.with_selection(selection)
        self.latest, self.unseen, self.fresh = snapshot, False, reading
        if self.before is None:
            self.before = snapshot
            self.options = pinned_to(self.options, snapshot)
        else:
            self._note_respawns(snapshot, selection)
        self.leaders_seen |= {one.process.key for one in selection.leaders}
        family = {one.process.pid for one in selection.everybody}
        for one in selection.leaders:
            # A leader's fork has its command line and goes with it: a parent that is ended too restarts nobody.
            if one.process.ppid not in family:
                self.restarter = self.restarter or restarter_of(one.process, snapshot.processes)
        self._note(snapshot, selection)
        if snapshot.guest is not None:
            # Our own systemd ends what a unit leaves behind, and runs its ExecStopPost there; a container's may not.
            self.memory = dataclasses.replace(self.memory, cgroups=dict(self.own_cgroups))
        return snapshot, selection

    def _reads_anew(self, last: Snapshot) -> bool:
        """Whether a later look reads the GPUs again: where the driver's list selects anybody, and where somebody was
        ended since, whose memory may be free by now. Else the last reading does, of which only those rows count whose
        pid still means the same process."""
        quick = last.reading.gpus is not None and last.reading.seconds < QUICK_S
        wanted = self.request.scope != "server" or (self.unseen and not self._may_return)
        return wanted and quick and not self.options.without_gpus

    @property
    def _may_return(self) -> bool:
        """Whether a leader was ended that somebody may start again by himself."""
        return self.leader_end is not None and bool(self.restarter)

    def _read_gpus(self) -> GpuReading:
        return nvml.read_gpus(self.options.nvml_deadline_s, self.options.proc)

    def climb(self) -> Report:
        """Climb until nobody wanted gone is left, the rungs are used up, or something unkillable ends it."""
        snapshot, selection = self._first_look()
        acted = bool(selection.everybody) or bool(self._waiting_unit())
        for rung in self.rungs:
            action = self._actions().get(rung)
            if action is None:
                continue
            if not selection.everybody and not (rung == "stop" and self._waiting_unit()):
                continue
            if rung == "drain" and not self.drain.waits:
                self._count_in_flight(snapshot, selection, "nothing was waited for")
                continue
            if self._fenced_off():
                break
            go_on = action(snapshot, selection)
            if self.unseen:
                snapshot, selection = self.look()
            elif self.latest is not None:  # nothing was done since the last look
                snapshot, selection = self.latest, select(self.latest, self.request, self.memory)
            if not go_on:
                break
        else:
            snapshot, selection = self._watch_for_return(snapshot, selection)
        self._report_stayed(selection)
        reading = None
        if acted or self.pinned_mib:
            known = None if self.unseen else self.fresh
            reading = self._wait_for_memory(snapshot, known)
            if reading is None or reading is not known:
                snapshot, selection = self.look(reading)
                self._report_stayed(selection)
        last = self._last_rungs(snapshot, selection)
        self._report_blind(last)
        # What was read after the end of everybody, and before nothing else was done, is the last look.
        self.after = last if reading is not None and last is snapshot else self._final_look()
        self._report_newcomers()
        return self.report

    def plan(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """What climbing would do now: (rung, who would be asked), for check mode and for people."""
        snapshot, selection = self._first_look()
        self._report_blind(snapshot)
        rows: list[tuple[str, tuple[str, ...]]] = []
        waiting = self._waiting_unit()
        if "drain" in self.rungs and self.drain.waits and selection.leaders:
            rows.append(("drain", self._planned_drain(selection)))
        owners = tuple(f"{one.kind} {one.name} (leader {one.leader_pid})" for one in selection.owners)
        words = {
            "stop": owners or ((f"systemd {waiting.name}",) if waiting else ()),
            "term": _named(selection.leaders),
            "kill": _named(selection.leaders + selection.members),
            "holders": _named(selection.holders),
        }
        for rung in self.rungs:
            if words.get(rung):
                rows.append((rung, words[rung]))
        rows += self._plan_last_rungs(snapshot, selection)
        self.after = self.before
        return tuple(rows)

    # --- rungs --------------------------------------------------------------------------------------------------------

    def _actions(self) -> dict[str, t.Callable[[Snapshot, Selection], bool]]:
        return {
            "drain": self._drain,
            "stop": self._stop,
            "term": self._term,
            "kill": self._kill,
            "holders": self._end_holders,
        }

    def _fenced_off(self) -> bool:
        """Whether somebody else works on this server by now: then nobody is signalled any more."""
        why = self.fence()
        if why is not None and not any(reason.code == "lease_lost" for reason in self.report.reasons):
            self._reason("lease_lost", why, self.request.name or "the lease")
        return why is not None

    def _drain(self, snapshot: Snapshot, selection: Selection) -> bool:
        """Wait until no request is in flight. A server that hangs finishes none, so it is not waited for."""
        if not selection.leaders:
            return True
        hung = self._hangs(selection)
        if hung:
            self._count_in_flight(snapshot, selection, f"{hung}, so nothing was waited for")
            return True
        started = time.monotonic()
        grips = _grip_all(selection.leaders)
        try:
            counters = self._counters(snapshot, selection, self.drain.how)
            done = drain(self.drain, counters, self.deadlines.drain, lambda: not wait_ended(grips, time.monotonic()))
        finally:
            _close_all(grips)
        self.report.drained = done
        self.unseen = True  # time went by
        self.report.rungs.append(Rung("drain", (), (), (), round(time.monotonic() - started, 3), _drain_note(done)))
        return True

    def _hangs(self, selection: Selection) -> str:
        """How it is known that the server hangs; empty where it is not."""
        if self.hung:
            return "known to hang"
        stopped = any(one.process.state in ("T", "t") for one in selection.everybody)
        return "a process of the server is stopped (state T)" if stopped else ""

    def _count_in_flight(self, snapshot: Snapshot, selection: Selection, why: str) -> None:
        """What will be cut off, as far as connections tell; the server itself is not asked."""
        if selection.leaders:
            self.report.drained = count_once(self.drain, self._counters(snapshot, selection, "connections"), why)

    def _counters(self, snapshot: Snapshot, selection: Selection, how: str) -> list[Counter]:
        from ..observe.inflight import Counter

        chosen = {one.process.key for one in selection.leaders}
        family = [one.process.pid for one in selection.leaders + selection.members]
        wanted = self.request.port or (self.request.record.port if self.request.record else None)
        found = [(one, one.port or wanted) for one in snapshot.leaders if one.process.key in chosen]
        proc = self.options.proc
        return [Counter(one, port, family, how, self.config, proc) for one, port in found if port is not None]

    def _planned_drain(self, selection: Selection) -> tuple[str, ...]:
        hung = self._hangs(selection)
        if hung:
            return (f"not waited for: {hung}",)
        return (f"at most {self.deadlines.drain:g} s until no request is in flight ({self.drain.how})",)

    def _stop(self, snapshot: Snapshot, selection: Selection) -> bool:
        waiting = self._waiting_unit()
        owners = selection.owners or ((waiting,) if waiting else ())
        if not owners:
            return True
        started = time.monotonic()
        deadline = started + self.deadlines.stop
        grips = _grip_all(selection.leaders + selection.members)
        family = nearest_leaders(snapshot)
        others = {one.process.pid for one in selection.leaders} - {owner.leader_pid for owner in owners}
        try:
            asked = [ask_to_stop(owner, self.deadlines.stop, self.deadlines.attach) for owner in owners]
            accepted = {one.owner.leader_pid for one in asked if one.accepted}
            others |= {one.owner.leader_pid for one in asked if not one.accepted}
            self.asked_by_owner |= {held.process.key for held in grips if held.process.pid in accepted}
            awaited = [held for held in grips if family.get(held.process.pid) not in others]
            ended = wait_ended(awaited, deadline) if accepted else set()
        finally:
            _close_all(grips)
        note = "; ".join(one.detail for one in asked if not one.accepted)
        self._finish("stop", [_asked_row(one) for one in asked], grips, ended, started, note)
        return True

    def _term(self, snapshot: Snapshot, selection: Selection) -> bool:
        leaders = [one for one in selection.leaders if one.process.key not in self.asked_by_owner]
        if not leaders:
            return True
        started = time.monotonic()
        hung = self._hangs(selection)
        limit = self.deadlines.term_hung if hung else self.deadlines.term
        grips = _grip_all(leaders)
        rest = _grip_all(selection.members)
        try:
            sent = [send(held, signal.SIGTERM, self._objection(leaders)) for held in grips]
            reached = [held for held, one in zip(grips, sent) if one.result in ("sent", "gone")]
            ended = wait_ended(reached, started + limit)
            follow = min(started + limit, time.monotonic() + FOLLOW_S)
            ended |= wait_ended(rest, follow) if reached and len(ended) == len(reached) else set()
        finally:
            _close_all(grips + rest)
        note = f"{hung}, so the short deadline holds" if hung else ""
        self._finish("term", [_sent_row(one) for one in sent], grips + rest, ended, started, note)
        return self._permitted(sent)

    def _kill(self, _snapshot: Snapshot, selection: Selection) -> bool:
        """SIGKILL the tree, look again, and again: a fork or a respawn may have happened in between."""
        end = time.monotonic() + self.deadlines.kill + self._unpin_s()
        for attempt in range(KILL_ROUNDS):
            targets = selection.leaders + selection.members
            if not targets:
                return True
            if self._fenced_off():
                return False
            if not self._kill_once(targets, max(end, time.monotonic() + 1)):
                return False
            if attempt:
                self._kill_cgroups(_snapshot)
            if self.restarter:
                time.sleep(SETTLE_S)
            _snapshot, selection = self.look()
            if self._returns_too_often():
                return False
            if time.monotonic() > end:
                break
        return True

    def _kill_once(self, targets: t.Sequence[Target], end: float) -> bool:
        started = time.monotonic()
        grips = _grip_all(targets)
        try:
            sent = [send(held, signal.SIGKILL, self._objection(targets)) for held in grips]
            reached = {one.pid for one in sent if one.result in ("sent", "gone")}
            ended = wait_ended([held for held in grips if held.process.pid in reached], end)
        finally:
            _close_all(grips)
        rung = self._finish("kill", [_sent_row(one) for one in sent], grips, ended, started)
        return self._permitted(sent) and not self._unkillable(rung)

    def _kill_cgroups(self, snapshot: Snapshot) -> None:
        """Signals one by one were not enough (somebody forks faster than we look): the server's own cgroups as a whole.
        """
        for path, name in self.own_cgroups.items():
            inside = [one for one in snapshot.processes.values() if path in one.cgroups and not one.dead]
            if not inside:
                continue
            refused = kill_cgroup(path, self._kill_objection(look(self.options)), self.options.proc)
            row = {"what": f"cgroup.kill of {name}", "pid": None, "result": "refused" if refused else "sent"}
            self.report.rungs.append(Rung("kill", ({**row, "detail": refused or ""},), (), (), 0.0))

    def _kill_objection(self, snapshot: Snapshot) -> t.Callable[[int], t.Optional[str]]:
        """Why a pid in a server's own cgroup must not be killed with it. Only a process that is known, unprotected and
        within bounds may; and one that was forked since this look, if its parent may, or if it has none left but the
        container's init: only the server itself, or systemd for it, forks into its cgroup.
        """
        inits = snapshot.guest.inits if snapshot.guest else frozenset()

        def object_to(pid: int, depth: int = 0) -> t.Optional[str]:
            process = snapshot.processes.get(pid)
            if process is None:
                now = read_identity(pid, self.options.proc)
                if now is None or now.ppid in inits:
                    return None
                return object_to(now.ppid, depth + 1) if depth < 3 else "who it is is not known"
            if elsewhere(process, snapshot):
                return "it is out of bounds"
            if pid in inits and snapshot.guest is not None:
                return f"it is the init of {snapshot.guest.label}"
            return protected_why(process, snapshot.own_pids, self.request.protect, snapshot.units)

        return object_to

    def _end_holders(self, _snapshot: Snapshot, selection: Selection) -> bool:
        targets = selection.holders
        if not targets:
            return True
        started = time.monotonic()
        grips = _grip_all(targets)
        try:
            sent = [send(held, signal.SIGTERM, self._still_holds) for held in grips]
            reached = [held for held, one in zip(grips, sent) if one.result in ("sent", "gone")]
            ended = wait_ended(reached, started + self.deadlines.holders / 2)
            rest = [held for held in reached if held.process.key not in ended]
            sent += [send(held, signal.SIGKILL, self._still_holds) for held in rest]
            ended |= wait_ended(rest, started + self.deadlines.holders + self._unpin_s())
        finally:
            _close_all(grips)
        rung = self._finish("holders", [_sent_row(one) for one in sent], grips, ended, started)
        return self._permitted(sent) and not self._unkillable(rung)

    # --- the opt-in rungs ---------------------------------------------------------------------------------------------

    def _last_rungs(self, snapshot: Snapshot, selection: Selection) -> Snapshot:
        """Where all that was not enough: restart the container, reset the GPUs; only with the operator's word."""
        if self._fenced_off() or not any(rung in self.rungs for rung in OPT_IN):
            return snapshot
        from .lastrungs import reset_stuck_gpus, stop_container

        guest = snapshot.guest
        if "container_stop" in self.rungs and guest is not None and self._in_the_way(snapshot, selection, guest):
            limits = (self.deadlines.container_stop + self._unpin_s(), self.deadlines.container_start)
            done = stop_container(
                snapshot, selection, guest, self.optin, limits, (self.options.proc, self.options.sys)
            )
            snapshot, selection = self._finish_last("container_stop", done, snapshot)
        stuck = self._stuck_gpus(snapshot) if "gpu_reset" in self.rungs else ()
        if stuck:
            where = vantage(self.options.proc)
            reset = reset_stuck_gpus(snapshot, stuck, self.optin, where, self.deadlines.gpu_reset)
            snapshot, selection = self._finish_last("gpu_reset", reset, snapshot)
        elif "gpu_reset" in self.rungs and self.optin.confirm_gpu_reset:
            self._say_why_no_reset(snapshot)
        return snapshot

    def _say_why_no_reset(self, snapshot: Snapshot) -> None:
        """A confirmed reset that was not even considered is told: its GPU has memory that somebody holds."""
        for index in self._above_limit(snapshot):
            label = next(gpu.label for gpu in snapshot.gpus if gpu.index == index)
            pids = ", ".join(str(one.pid) for one in snapshot.holders[index].holders[:4])
            text = f"{label} was not considered for a reset: pid {pids} holds it; end it first (scope gpu)"
            self._reason("gpu_reset_not_considered", text, label, "warning")

    def _plan_last_rungs(self, snapshot: Snapshot, selection: Selection) -> list[tuple[str, tuple[str, ...]]]:
        if not any(rung in self.rungs for rung in OPT_IN):
            return []
        from ..decide.optin import refuse_gpu_reset
        from .lastrungs import container_stop_refusals, planned_for_container

        rows = []
        guest = snapshot.guest
        if "container_stop" in self.rungs and guest is not None and self._in_the_way(snapshot, selection, guest):
            refused = container_stop_refusals(snapshot, selection, guest, self.optin)
            rows.append(("container_stop", planned_for_container(guest, refused, snapshot)))
        stuck = self._stuck_gpus(snapshot) if "gpu_reset" in self.rungs else ()
        if stuck:
            refused = refuse_gpu_reset(snapshot, stuck, self.optin.confirm_gpu_reset, vantage(self.options.proc))
            words = tuple(f"refused: {reason.message}" for reason in refused)
            rows.append(("gpu_reset", words or tuple(f"{gpu.label} is reset, if it still has memory" for gpu in stuck)))
        return rows

    def _in_the_way(self, snapshot: Snapshot, selection: Selection, guest: Guest) -> bool:
        """Whether stopping the container could help: somebody of it stayed, it is broken, or it holds the memory."""
        if selection.everybody or guest.state == "broken":
            return True
        for index in self._above_limit(snapshot):
            holders = {one.pid for one in snapshot.holders[index].holders}
            if not holders or holders & guest.members:
                return True
        return False

    def _stuck_gpus(self, snapshot: Snapshot) -> tuple[Gpu, ...]:
        """Chosen GPUs with memory in use that nobody holds, and those for which the driver asks for a reset."""
        above = self._above_limit(snapshot)
        return tuple(
            gpu
            for gpu in snapshot.gpus
            if (gpu.index in above and not snapshot.holders[gpu.index].holders)
            or gpu.health.recovery_action in ("reset", "drain and reset")
        )

    def _above_limit(self, snapshot: Snapshot) -> dict[int, int]:
        """What is known to be above the limit now; a GPU that gives no answer is no ground for a last rung."""
        if self.options.without_gpus:
            return {}
        reading = nvml.read_gpus(self.options.nvml_deadline_s, self.options.proc)
        return self._used_above_limit(reading, {gpu.index for gpu in snapshot.gpus}) or {}

    def _finish_last(self, name: str, done: LastRung, snapshot: Snapshot) -> tuple[Snapshot, Selection]:
        """Write the rung down. What was said of the state before it no longer holds once it has acted."""
        stayed = tuple(Stayed(process, why) for process, why in done.stuck)
        if done.acted:
            self.report.resets.update(done.resets)
            self.last_end = time.monotonic()
            self.report.reasons[:] = [one for one in self.report.reasons if one.code not in STATE_CODES]
        self.report.reasons.extend(done.reasons)
        # Written down before the next look, which may fail: then it is still told what was done.
        rung = Rung(name, done.steps, (), stayed, done.seconds, done.note)
        self.report.rungs.append(rung)
        before = dict(snapshot.processes)
        after, selection = self.look()
        members = snapshot.guest.members if snapshot.guest and done.acted else frozenset()
        left = tuple(sorted(pid for pid in members if pid in before and _has_ended(before[pid], after)))
        self.report.rungs[self.report.rungs.index(rung)] = dataclasses.replace(rung, left=left)
        for pid in left:
            self.report.ended.append({"pid": pid, "title": program_of(before[pid]), "rung": name})
        if done.acted:
            self._report_stayed(selection)
            self._wait_for_memory(after)
            after, selection = self.look()
        return after, selection

    # --- evidence at the moment of the signal
    # -----------------------------------------------------------------------------

    def _objection(self, targets: t.Sequence[Target]) -> t.Callable[[Process], t.Optional[str]]:
        """A leader must still be an SGLang launcher; a member's start time, already checked, is its identity."""
        parts = {target.process.key: target.part for target in targets}

        def object_to(seen: Process) -> t.Optional[str]:
            if parts.get(seen.key) != "leader":
                return None
            called = call_bounded(lambda: list(now.argv) if (now := read_process(seen.pid)) else [], REREAD_DEADLINE_S)
            if not called.ok:
                return "its command line can't be read again"
            return None if is_leader(called.value) else "it runs another program by now"

        return object_to

    def _still_holds(self, now: Process) -> t.Optional[str]:
        """A holder is ended for what it holds, so it must hold it now."""
        if self.latest is not None:
            reading = still_listed(self.latest.reading, self.latest.processes, self.options.proc)
            holding = holds_now(now, self.options, self.latest, reading)
            if any(killable(holder) for holder in holding):
                return None
        return "it holds none of the chosen GPUs any more"

    # --- what stays ---------------------------------------------------------------------------------------------------

    def _note(self, snapshot: Snapshot, selection: Selection) -> None:
        ranks = sum(one.process.rss_shmem_mib or 0 for one in selection.leaders + selection.members)
        chosen = {one.process.key for one in selection.leaders}
        by_flags = sum(one.pinned_gb_by_flags for one in snapshot.leaders if one.process.key in chosen)
        self.pinned_mib = max(self.pinned_mib, ranks, int(by_flags / GB_PER_MIB) if ranks else 0)
        self.report.spared = selection.spared
        for owner in (one for one in snapshot.leaders if one.process.key in chosen and one.owns_unit):
            path = unit_path_of(owner.process)
            if path is not None and owner.unit is not None:
                self.own_cgroups[path] = owner.unit.name
        for leader in selection.leaders:
            self.report.server_uid = leader.process.uid

    def _unpin_s(self) -> float:
        return min(UNPIN_LIMIT_S, self.pinned_mib * GB_PER_MIB * UNPIN_S_PER_GB)

    def _own_unit(self) -> t.Optional[Unit]:
        """The unit that the request or the launch record names, as systemd knows it now; None where there is none."""
        record = self.request.record
        name = self.request.unit or (record.unit if record else None)
        if not name or self.options.container or self.options.proc != "/proc" or not has_systemd():
            return None  # a container's systemd is not asked: an attach can hang
        unit = read_unit(name, self.options.systemctl_deadline_s)
        return unit if unit is not None and unit.load_state == "loaded" else None

    def _waiting_unit(self) -> t.Optional[Owner]:
        """Our own unit between two respawns: nobody runs at this moment, yet systemd will start it again."""
        unit = self._own_unit()
        if unit is None or unit.main_pid != 0 or unit.active_state != "activating":
            return None
        return Owner("systemd", unit.name, 0, unit.restart)

    def _first_look(self) -> tuple[Snapshot, Selection]:
        """The first look; a second one where our own unit runs something that shows no command line yet.

        A process has none for a moment while it is exec'ed: a crash-looping server can be met in just that moment.
        """
        snapshot, selection = self.look(self.asked.reading() if self.asked is not None else None)
        end = time.monotonic() + EXEC_S
        unit = self._own_unit() if not selection.everybody else None
        while unit is not None and unit.main_pid != 0 and unit.main_pid not in _pids_of(selection):
            if time.monotonic() > end:
                self._unit_runs_something_else(unit, snapshot)
                break
            time.sleep(SETTLE_S / 3)
            snapshot, selection = self.look()
            self.report.respawns.clear()  # it is the first time that it can be seen, not a return
            unit = self._own_unit() if not selection.everybody else None
        return snapshot, selection

    def _unit_runs_something_else(self, unit: Unit, snapshot: Snapshot) -> None:
        process = snapshot.processes.get(unit.main_pid)
        what = program_of(process) if process is not None else "not visible from here"
        text = (
            f"the unit {unit.name} runs pid {unit.main_pid} ({what}), which is no SGLang launcher; it was left alone. "
            "Name the server's own unit, or its port"
        )
        self.report.reasons.append(Reason("unit_runs_something_else", text, unit.name, means="unknown"))

    def _finish(
        self,
        name: str,
        asked: t.Sequence[t.Mapping[str, t.Any]],
        grips: t.Sequence[Grip],
        ended: set[tuple[int, int]],
        started: float,
        note: str = "",
    ) -> Rung:
        left = tuple(sorted(key[0] for key in ended))
        stayed = tuple(
            stay for held in grips if held.process.key not in ended and (stay := _why_still_there(held.process))
        )
        rung = Rung(name, tuple(asked), left, stayed, round(time.monotonic() - started, 3), note)
        self.report.rungs.append(rung)
        self.unseen = True
        for held in grips:
            if held.process.key in ended:
                self.report.ended.append({"pid": held.process.pid, "title": program_of(held.process), "rung": name})
                self.last_end = time.monotonic()
                if is_leader(held.process.argv):
                    self.report.leader_died_at = time.time()
                    self.leader_end = None if name == "stop" else self.last_end
        return rung

    def _permitted(self, sent: t.Sequence[Sent]) -> bool:
        refused = [one for one in sent if one.result == "refused"]
        for one in refused:
            self._reason("not_permitted", f"pid {one.pid}: {one.detail}", f"pid {one.pid}")
        return not refused

    def _unkillable(self, rung: Rung) -> bool:
        """State D, or R with SIGKILL pending, after the deadline: nothing more that we send can help."""
        stuck = [one for one in rung.stayed if one.process.kill_pending or one.process.state == "D"]
        for one in stuck:
            text = (
                f"pid {one.process.pid} ({program_of(one.process)}) can't be killed: {one.why}. A reboot of "
                f"{'the node' if self.options.container else 'the host'} is the next step."
            )
            self._reason("unkillable", text, f"pid {one.process.pid}")
        return bool(stuck)

    def _watch_for_return(self, snapshot: Snapshot, selection: Selection) -> tuple[Snapshot, Selection]:
        """A leader that was ended is watched for a moment: a supervisor may start it again, and then it goes again.

        Not where nobody has a tie to it, as with a server that process 1 has adopted.
        """
        while self.leader_end is not None and self._may_return:
            while not selection.leaders and time.monotonic() < self.leader_end + RETURN_S:
                time.sleep(SETTLE_S)
                snapshot, selection = self.look()
            if not selection.leaders or "kill" not in self.rungs or self._returns_too_often():
                break
            known = self.leader_end
            go_on = self._kill(snapshot, selection)
            snapshot, selection = self.look()
            if not go_on or self.leader_end == known:
                break
        return snapshot, selection

    def _note_respawns(self, snapshot: Snapshot, selection: Selection) -> None:
        """Write down who came back and who brought it back."""
        for process in (one.process for one in selection.leaders if one.process.key not in self.leaders_seen):
            self.report.respawns.append(
                {"pid": process.pid, "title": program_of(process), "supervisor": supervisor_of(process, snapshot)}
            )

    def _returns_too_often(self) -> bool:
        """Whether a supervisor brought the server back so often that killing it again leads nowhere."""
        if len(self.report.respawns) < MAX_RESPAWNS:
            return False
        if any(reason.code == "respawn" for reason in self.report.reasons):
            return True
        last = self.report.respawns[-1]
        text = (
            f"the server came back {len(self.report.respawns)} times after it was killed; "
            f"{last['supervisor']} restarts "
            f"it. Stop that first."
        )
        self._reason("respawn", text, str(last["supervisor"]))
        return True

    def _report_blind(self, snapshot: Snapshot) -> None:
        """Where a server or holders were to be found, not having seen them is no success."""
        scope = self.request.scope
        self._report_unplaced(snapshot)
        for problem in snapshot.problems:
            self._reason("scan_incomplete", f"{problem.call}: {problem.message}", "processes")
        if snapshot.guest is not None and not snapshot.gpus and not self.options.without_gpus and scope != "server":
            text = f"{snapshot.guest.label} has no GPU of this node in its /dev, so nobody could be found by its GPUs"
            self._reason("gpus_unknown", f"{text}: name them by UUID (devices)", snapshot.guest.label)
        if self.options.without_gpus or scope == "server" or (scope == "sglang" and not self.request.devices):
            return
        if snapshot.reading.gpus is None:
            words = snapshot.reading.problems[-1].message if snapshot.reading.problems else "no answer"
            self._reason(
                "gpus_unknown", f"who holds the GPUs is not known, since they can't be read: {words}", "driver"
            )
        for gpu in snapshot.gpus:
            if gpu.minor is None:
                text = f"who holds {gpu.label} is not known: the driver does not tell its device node"
                self._reason("gpus_unknown", text, gpu.label)
            visitors = [one for one in snapshot.holders[gpu.index].visitors if one.protected is None]
            if gpu.processes is None and not gpu.mig and visitors:
                pids = ", ".join(str(one.pid) for one in visitors[:4])
                text = f"who holds {gpu.label} is not known: the driver gives no process list; open in pid {pids}"
                self._reason("gpus_unknown", text, gpu.label)
        blind = [pid for pid in snapshot.scan.unreadable if not _protected(pid, snapshot)]
        if blind:
            pids = ", ".join(map(str, blind[:6]))
            text = (
                f"{len(blind)} processes can't be looked into (pid {pids}): run as root to see whether they hold a GPU"
            )
            self._reason("scan_incomplete", text, "processes")

    def _report_unplaced(self, snapshot: Snapshot) -> None:
        """Launchers of which it can't be told whether they are the server of the wanted port."""
        port = self.request.port or (self.request.record.port if self.request.record else None)
        selected = {process.key for process in self.memory.leaders}
        for leader in snapshot.leaders:
            unknown = None in (leader.port, leader.same_network) and leader.same_network is not False
            if port is None or not unknown or leader.port not in (None, port):
                continue
            if leader.process.key in selected or elsewhere(leader.process, snapshot):
                continue
            what = "its port can't be read" if leader.port is None else "its network namespace can't be read"
            subject = f"pid {leader.process.pid}"
            text = (
                f"{subject} ({program_of(leader.process)}) may be the server of port {port}: {what}. Run as "
                "root, or name "
                f"its unit"
            )
            self._reason("server_unknown", text, subject)

    def _report_newcomers(self) -> None:
        """Who forks faster than we look is met by no signal, and by no look twice: each time somebody else is there.
        Who ends a moment after the last look is no such one.
        """
        if any(reason.severity == "required" for reason in self.report.reasons):
            return
        met: list[Process] = []
        for _unused in range(NEWCOMER_LOOKS):
            known = {one.key for one in met}
            fresh = [one for one in self._unwanted(self.after) if one.key not in known]
            if not fresh:
                return
            met.append(fresh[0])
            time.sleep(SETTLE_S)
            self.after = self._final_look()
        named = ", ".join(f"pid {one.pid} ({program_of(one)})" for one in met)
        text = (
            f"at each of the last {len(met)} looks somebody was there who should not be, and was gone then: {named}. "
            "It forks faster than it can be signalled; end what runs it (its unit, its container)"
        )
        self._reason("still_there", text, f"pid {met[-1].pid}")

    def _unwanted(self, snapshot: t.Optional[Snapshot]) -> list[Process]:
        """Who is meant by the request, and who was seen too shortly to be signalled for the GPU that he has."""
        if snapshot is None:
            return []
        found = [one.process for one in select(snapshot, self.request, self.memory).everybody]
        if self.request.scope != "gpu":
            return found
        holders = [one for gpu in snapshot.gpus for one in snapshot.holders[gpu.index].holders if one.protected is None]
        return found + [one.process for one in holders if one.process and not elsewhere(one.process, snapshot)]

    def _report_stayed(self, selection: Selection) -> None:
        stated = {reason.subject for reason in self.report.reasons}
        for target in selection.everybody:
            subject = f"pid {target.process.pid}"
            stay = _why_still_there(target.process)
            if stay is not None and subject not in stated:
                self._reason(
                    "still_there", f"{subject} ({program_of(target.process)}) is still there: {stay.why}", subject
                )

    def _reason(self, code: str, message: str, subject: str, severity: str = "required") -> None:
        self.report.reasons.append(Reason(code, message, subject, severity))

    # --- memory -------------------------------------------------------------------------------------------------------

    def _wait_for_memory(
        self, snapshot: Snapshot, known: t.Optional[GpuReading] = None
    ) -> t.Optional[GpuReading]:
        """Wait until the chosen GPUs are down to their limit; longer where host memory was pinned, and say so.

        ``known``: what was read of them after the last deed. The last reading; None where there is nothing to read.
        """
        if self.options.without_gpus:
            return None
        started = self.last_end or time.monotonic()
        expected = 10.0 + self._unpin_s()
        waited_for = [gpu for gpu in snapshot.gpus if not snapshot.holders[gpu.index].holders]
        indices = {gpu.index for gpu in waited_for}
        while True:
            reading = self._read_gpus() if known is None else known
            known = None
            used = self._used_above_limit(reading, indices)
            waited = time.monotonic() - started
            if used is None or not used or waited >= expected:
                break
            time.sleep(0.25)
        held = [gpu for gpu in snapshot.gpus if gpu.index not in indices]
        note = _memory_note(used, self.pinned_mib, expected, waited, _held_note(held, snapshot), bool(indices))
        freed = None if used is None or held or not indices else not used
        self.report.pinned = PinnedWait(self.pinned_mib, round(expected, 1), round(waited, 2), freed, note)
        if used:
            self._reason("memory_held", note, ", ".join(f"GPU {index}" for index in sorted(used)))
        elif used is None:
            self._reason("memory_unknown", note, "GPU memory")
        return reading

    def _used_above_limit(self, reading: GpuReading, indices: t.Collection[int]) -> t.Optional[dict[int, int]]:
        """MiB used by GPU, where it is above the limit; None where it can't be told.

        The old memory call counts the driver's own part, which nobody here can tell apart: above the limit it tells
        nothing.
        """
        if reading.gpus is None:
            return None
        result = {}
        for gpu in reading.gpus:
            if gpu.index not in indices:
                continue
            memory = gpu.memory
            if memory is not None and memory.unified:
                continue
            if memory is None or memory.used_mib is None:
                return None
            if memory.used_mib > self.max_used_mib + baseline_for(gpu, self.baselines):
                if not memory.used_excludes_reserved:
                    return None
                result[gpu.index] = memory.used_mib
        return result

    def _final_look(self) -> Snapshot:
        return look(self.options)


def _pids_of(selection: Selection) -> set[int]:
    """Everybody that a selection speaks of, to be asked or to be left alone."""
    return {one.process.pid for one in selection.everybody} | {one.process.pid for one in selection.spared}


def supervisor_of(process: Process, snapshot: Snapshot) -> str:
    """Who most likely started this process: its unit, or its parent by title."""
    unit = unit_of(process)
    guest = guest_of(process)
    where = f" in container {guest}" if guest is not None and guest != snapshot.own_guest else ""
    if unit and unit.endswith(".service"):
        return f"systemd unit {unit}{where}"
    user_unit = user_unit_of(process)
    if user_unit:
        return f"user unit {user_unit} (systemctl --user)"
    parent = snapshot.processes.get(process.ppid)
    return f"pid {process.ppid} ({program_of(parent) if parent else 'gone'})"


def _held_note(gpus: t.Sequence[Gpu], snapshot: Snapshot) -> str:
    """Which GPUs were not waited for, since somebody who was left alone holds them; empty where there is none."""
    rows = []
    for gpu in gpus:
        pids = [str(one.pid) for one in snapshot.holders[gpu.index].holders]
        more = f" and {len(pids) - 4} more" if len(pids) > 4 else ""
        rows.append(f"{gpu.label} by pid {', '.join(pids[:4])}{more}")
    return f"not waited for, since others hold it: {'; '.join(rows)}" if rows else ""


def _memory_note(
    used: t.Optional[t.Mapping[int, int]], pinned_mib: int, expected: float, waited: float, others: str, any_left: bool
) -> str:
    """``others``: the GPUs that were not waited for; ``any_left``: there were some that were."""
    pinned_gb = pinned_mib * GB_PER_MIB
    pinned = f"; {pinned_gb:.1f} GB of host memory was pinned" if pinned_mib else ""
    rest = f"; {others}" if others else ""
    if used is None:
        return f"the memory of the GPUs could not be read after {waited:.1f} s{pinned}{rest}"
    if not any_left:
        return f"memory {others}{pinned}" if others else f"no GPU's memory to wait for{pinned}"
    if not used:
        return f"memory free after {waited:.1f} s{pinned}{rest}"
    held = ", ".join(f"GPU {index} {mib} MiB" for index, mib in sorted(used.items()))
    return f"still in use after {waited:.1f} s of {expected:.1f} s: {held}{pinned}, nobody visible holds it{rest}"


def _why_still_there(process: Process) -> t.Optional[Stayed]:
    now = read_identity(process.pid)
    if now is None or now.key != process.key or now.dead:
        return None
    wchan = read_wchan(process.pid)
    where = f", waits in {wchan}" if wchan else ""
    pending = ", SIGKILL pending" if now.kill_pending else ""
    seen = dataclasses.replace(process, state=now.state, kill_pending=now.kill_pending)
    return Stayed(seen, f"state {now.state}{pending}{where}")


def pinned_to(options: LookOptions, snapshot: Snapshot) -> LookOptions:
    """The same options for later looks: the GPUs are those of the first one, whatever becomes of their container."""
    if snapshot.guest is None or snapshot.reading.gpus is None:
        return options
    names = tuple(gpu.uuid or gpu.bus_id or str(gpu.index) for gpu in snapshot.gpus)
    return dataclasses.replace(options, pinned=names)


def _drain_note(done: Drained) -> str:
    """The drain in words, for the table of rungs."""
    before = "an unknown number" if done.in_flight_before is None else str(done.in_flight_before)
    cut = "" if not done.cut_off else f", {done.cut_off} cut off"
    return f"{before} in flight before ({done.source}){cut}" + (f"; {done.note}" if done.note else "")


def _has_ended(process: Process, after: Snapshot) -> bool:
    now = after.processes.get(process.pid)
    return not process.dead and (now is None or now.key != process.key)


def _protected(pid: int, snapshot: Snapshot) -> bool:
    process = snapshot.processes.get(pid)
    return process is None or protected_why(process, snapshot.own_pids, (), snapshot.units) is not None


def _grip_all(targets: t.Sequence[Target]) -> list[Grip]:
    grips: list[Grip] = []
    try:
        for target in targets:
            held = grip(target.process)
            if held is not None:
                grips.append(held)
    except BaseException:
        _close_all(grips)
        raise
    return grips


def _close_all(grips: t.Sequence[Grip]) -> None:
    for held in grips:
        held.close()


def _named(targets: t.Sequence[Target]) -> tuple[str, ...]:
    return tuple(f"pid {one.process.pid} {program_of(one.process)} ({one.why[0]})" for one in targets)


def _asked_row(asked: Asked) -> t.Mapping[str, t.Any]:
    return {
        "what": f"stop {asked.owner.kind} {asked.owner.name}"
        + (f" in container {asked.owner.guest}" if asked.owner.guest else ""),
        "pid": asked.owner.leader_pid,
        "result": "accepted" if asked.accepted else "refused",
        "detail": asked.detail,
    }


def _sent_row(sent: Sent) -> t.Mapping[str, t.Any]:
    return {"what": sent.signal, "pid": sent.pid, "result": sent.result, "detail": sent.detail}
