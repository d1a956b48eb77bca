# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stop a Proxmox container and start it again, by ``pct``. Nothing is signalled here but our own helpers.

``pct stop`` may block on the container's command socket for ever, and its exit status is no proof: whether the
container has ended is told by its cgroup, which has no process then. A container that was stopped is started again,
even where the command that stopped it hung; one that did not end is not: what is left of it would be in the way.
"""

from __future__ import annotations

import functools
import re
import time
import typing as t
from dataclasses import dataclass, field

from ..decide.ports import program_of
from ..errors import CleanSlateError
from ..model import Process, Reason
from ..observe.procfs import read_identity, read_process, read_processes, read_wchan
from ..observe.pve import read_status
from ..spawn import Completed, fetch_bounded, run_bounded

POLL_S = 0.2
AFTER_S = 3.0  # how long an ended or refused command's effect may lag behind it
RETRY_PAUSE_S = 1.0
READ_S = 5.0
STATUS_S = 10.0
START_TRIES = 2
CONTENDED_TRIES = 10
# Another pct holds the container's lock file at this moment; a lock in its configuration reads "CT is locked (backup)".
CONTENDED = re.compile(r"can't lock file|got timeout", re.IGNORECASE)

Members = t.Callable[[], t.Optional[t.Sequence[int]]]
Row = t.Mapping[str, t.Any]


@dataclass(frozen=True)
class Blocker:
    """A process that keeps a container from ending, and in what it is stuck."""

    process: Process
    why: str
    wchan: t.Optional[str] = None


@dataclass(frozen=True)
class GuestOutcome:
    """What became of the container. ``stopped``: all of it ended; ``started``: it runs again. Stopped and not started
    means that it is down now, and a reason says so.
    """

    vmid: str
    stopped: bool
    started: bool
    steps: tuple[Row, ...]
    blockers: tuple[Blocker, ...] = ()
    reasons: tuple[Reason, ...] = ()
    seconds: float = 0.0


@dataclass
class _Restart:
    """One restart while it goes on."""

    vmid: str
    members: Members
    pct: str
    proc: str
    retry_pause_s: float
    steps: list[Row] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    blockers: tuple[Blocker, ...] = ()
    trouble: str = ""

    def present(self) -> t.Optional[list[int]]:
        """The container's processes. Whatever goes wrong with looking is 'unknown' (and told): once the container is
        down, an exception must not keep it from being started.
        """
        try:
            found = self.members()
        except Exception as exc:
            self.trouble = f"{type(exc).__name__}: {exc}"
            return None
        return None if found is None else list(found)

    def reason(self, code: str, message: str, means: str = "dirty") -> None:
        self.reasons.append(Reason(code, message, f"container {self.vmid}", means=means))

    def command(self, verb: str, deadline_s: float) -> Completed:
        done = run_bounded([self.pct, verb, self.vmid], deadline_s)
        result = "accepted" if done.ok else "no answer" if done.timed_out else "refused"
        self.steps.append({"what": f"pct {verb}", "pid": None, "result": result, "detail": _words(done, deadline_s)})
        return done

    def stop(self, deadline_s: float) -> bool:
        """Stop it; True where all of it has ended."""
        end = time.monotonic() + deadline_s
        done = self.command("stop", deadline_s)
        soon = time.monotonic() + AFTER_S
        left = self._wait_until_empty(max(end, soon) if done.ok else soon)
        if left and end > time.monotonic() and any(one.process.kill_pending for one in self._find_blockers(left)):
            left = self._wait_until_empty(end)  # pct gave up, yet they were killed: they get the time that is left
        if left is None and read_status(self.vmid, STATUS_S, self.pct).state == "stopped":
            return True  # its cgroup can't be read, but its monitor is gone
        if left is None:
            text = (
                f"whether container {self.vmid} has ended is not known: its processes can't be read"
                f"{f' ({self.trouble})' if self.trouble else ''}. It was not started again; look with `pct status "
                f"{self.vmid}`, and start it with `pct start {self.vmid}`"
            )
            self.reason("container_state_unknown", text, "unknown")
        elif left:
            self._explain_stop(done, left, deadline_s)
        return left == []

    def _wait_until_empty(self, end: float) -> t.Optional[list[int]]:
        while True:
            left = self.present()
            if left == [] or time.monotonic() >= end:
                return left
            time.sleep(POLL_S)

    def _explain_stop(self, done: Completed, left: t.Sequence[int], deadline_s: float) -> None:
        blockers = self._find_blockers(left)
        refused = done.error is not None or done.rc not in (0, None)
        if refused and not any(one.process.kill_pending for one in blockers):
            text = f"container {self.vmid} was not stopped and still runs: pct stop: {_words(done, deadline_s)}"
            self.reason("container_stop_failed", text)
            return
        self.blockers = blockers
        rows = (f"pid {one.process.pid} ({program_of(one.process)}): {one.why}" for one in blockers[:6])
        named = "; ".join(rows) or self.trouble
        more = f" and {len(self.blockers) - 6} more" if len(self.blockers) > 6 else ""
        hung = "pct stop gave no answer and " if done.timed_out else ""
        hung = f"pct stop failed ({_words(done, deadline_s)}) and " if refused else hung
        text = (
            f"{hung}container {self.vmid} did not end within {deadline_s:g} s: {named or 'its processes come and go'}"
            f"{more}. It was not started again. Free what they wait on, then `pct stop {self.vmid}` and `pct start "
            f"{self.vmid}`; else a reboot of the node is the next step"
        )
        self.reason("container_stop_hung", text)

    def start(self, deadline_s: float) -> bool:
        """Start it, trying twice; True where it runs."""
        words: list[str] = []
        end = time.monotonic() + START_TRIES * deadline_s
        contended = False
        while len(words) < START_TRIES or (contended and len(words) < CONTENDED_TRIES and time.monotonic() < end):
            if words:
                time.sleep(self.retry_pause_s)
            done = self.command("start", min(deadline_s, max(1.0, end - time.monotonic())))
            if self._runs(done):
                return True
            words.append(_words(done, deadline_s))
            contended = bool(CONTENDED.search(done.stderr + done.stdout))
        text = (
            f"container {self.vmid} is stopped now and did not start again: pct start: "
            f"{' / '.join(dict.fromkeys(words))}{self._tasks_in_the_way()}. Start it by hand: pct start {self.vmid}"
        )
        self.reason("container_start_failed", text)
        return False

    def _tasks_in_the_way(self) -> str:
        """Proxmox's workers for this container, for people: one of a ``pct`` that hung has a session of its own, so it
        outlives that ``pct`` and may keep the lock. It is not ours to end.
        """
        called = fetch_bounded(lambda: find_tasks(self.vmid, self.proc), READ_S)
        tasks = t.cast("list[tuple[int, str]]", called.value) if called.ok else []
        named = ", ".join(f"pid {pid} (task {kind})" for pid, kind in tasks)
        return f". Still at work for it, perhaps with its lock: {named}" if named else ""

    def _find_blockers(self, pids: t.Sequence[int]) -> tuple[Blocker, ...]:
        try:
            return find_blockers(pids, self.proc)
        except CleanSlateError as error:
            self.trouble = str(error)
            return ()

    def _runs(self, done: Completed) -> bool:
        """Whether it runs. A command that failed or hung may have started it all the same: then pct has to say so."""
        end = time.monotonic() + (AFTER_S if done.ok else 0)
        while True:
            present = self.present()
            if present and done.ok:
                return True
            if time.monotonic() >= end:
                break
            time.sleep(POLL_S)
        if present == []:
            return False
        return read_status(self.vmid, STATUS_S, self.pct).state == "running"


def restart_container(
    vmid: str,
    stop_deadline_s: float,
    start_deadline_s: float,
    members: Members,
    pct: str = "pct",
    proc: str = "/proc",
    retry_pause_s: float = RETRY_PAUSE_S,
) -> GuestOutcome:
    """Stop container ``vmid`` and start it again.

    ``members`` gives the host pids in the container's cgroup now, without waiting for them: empty where it has ended,
    None where that can't be told. Takes the stop's deadline and twice the start's at most, and a few seconds to look.
    """
    began = time.monotonic()
    run = _Restart(vmid, members, pct, proc, retry_pause_s)
    stopped = started = False
    before = run.present()
    if before is None:
        text = f"container {vmid} was not stopped: its processes can't be read, so nobody could tell whether it ended"
        run.reason("container_state_unknown", f"{text}{f' ({run.trouble})' if run.trouble else ''}", "unknown")
    elif not before:
        run.reason(
            "container_not_running", f"container {vmid} was not restarted: it has no process, so it does not run"
        )
    elif run.stop(stop_deadline_s):
        stopped = True
        started = run.start(start_deadline_s)
    seconds = round(time.monotonic() - began, 3)
    return GuestOutcome(vmid, stopped, started, tuple(run.steps), run.blockers, tuple(run.reasons), seconds)


def find_tasks(vmid: str, proc: str = "/proc") -> list[tuple[int, str]]:
    """Pid and kind (vzstop, vzstart, ...) of the tasks of Proxmox VE that work on this container."""
    pattern = re.compile(rf"task UPID:[^:]*:(?:[0-9A-Fa-f]+:){{3}}([a-z]+):{re.escape(vmid)}:")
    found = ((one.pid, pattern.match(one.title)) for one in read_processes(proc).values())
    return [(pid, match.group(1)) for pid, match in found if match]


def find_blockers(pids: t.Sequence[int], proc: str = "/proc") -> tuple[Blocker, ...]:
    """Those of ``pids`` that still live, with what they are stuck in. A process that is locked in the kernel blocks
    whoever reads its command line: then it is named by its comm, which never blocks.
    """
    words = ""
    for read in (read_process, read_identity):
        called = fetch_bounded(functools.partial(_read_blockers, pids, read, proc), READ_S)
        if called.ok:
            return t.cast("tuple[Blocker, ...]", called.value)
        words = called.error or f"no answer within {READ_S:g} s"
    raise CleanSlateError(f"what pid {', '.join(map(str, pids[:6]))} are can't be read: {words}")


def _read_blockers(
    pids: t.Sequence[int], read: t.Callable[[int, str], t.Optional[Process]], proc: str
) -> tuple[Blocker, ...]:
    result = []
    for pid in pids:
        process = read(pid, proc)
        if process is None or process.dead:
            continue
        wchan = read_wchan(pid, proc)
        pending = ", SIGKILL pending" if process.kill_pending else ""
        where = f", waits in {wchan}" if wchan else ""
        result.append(Blocker(process, f"state {process.state}{pending}{where}", wchan))
    return tuple(result)


def _words(done: Completed, deadline_s: float) -> str:
    if done.timed_out:
        stuck = f"; its pid {done.stuck_pid} can't be ended" if done.stuck_pid is not None else ""
        return f"no answer within {deadline_s:g} s{stuck}"
    if done.error is not None:
        return done.error
    words = " ".join((done.stderr + " " + done.stdout).split())[:300]
    return words if done.ok else f"exit {done.rc}: {words or 'failed without a word'}"
