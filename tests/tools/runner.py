# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run steps, each a command with a deadline, a log file and a place in the closing table.

A step ends with everything that it started: it leads a process group, and this process adopts (PR_SET_CHILD_SUBREAPER)
what left the group, so that nothing survives a broken or interrupted run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
TAIL_LINES = 40
PYTEST_CLOSING = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in [0-9.]+s.*$", re.MULTILINE)
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
SKIP_REASON = re.compile(r"^SKIPPED \[(\d+)\] (.*)$|^(skipped: .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """One command.  ``alone``: it wants both cores, so nothing runs beside it.  ``skip``: why it can't run here, else
    None.
    """

    name: str
    argv: tuple[str, ...]
    deadline_s: float
    alone: bool = False
    skip: str | None = None
    cwd: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    ok_codes: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Result:
    """How a step ended: ``passed``, ``failed`` or ``skipped``."""

    step: Step
    outcome: str
    seconds: float
    detail: str
    log: Path | None


@dataclass
class _Running:
    step: Step
    process: subprocess.Popen[bytes]
    started: float
    log: Path


class Stopped(Exception):
    """SIGTERM arrived; the running steps are ended like on Ctrl-C."""


def adopt_orphans() -> None:
    """Make this process the parent of descendants that lose theirs; without Linux's prctl they go to pid 1 as usual."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """The direct children of ``pid`` by the kernel's own list; empty where it has none."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def end_orphans(spared: Sequence[int], deadline_s: float = 20.0) -> list[str]:
    """Kill and reap adopted processes, except ``spared``; returns what they were, for the log."""
    names: list[str] = []
    limit = time.monotonic() + deadline_s
    while time.monotonic() < limit:
        orphans = [pid for pid in children_of(os.getpid()) if pid not in spared]
        if not orphans:
            break
        for pid in orphans:
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if title:
                    names.append(f"{pid} {title[:100]}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)
    return sorted(set(names))


def end_step(running: _Running) -> None:
    """End a step's process group: politely, so that its own clean-up runs, then for good."""
    for sig, grace_s in ((signal.SIGINT, 20.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(timeout=grace_s)
            return


def closing_counts(text: str) -> str:
    """The counts of pytest's closing line (``3 failed, 10 passed``), or nothing."""
    found = PYTEST_CLOSING.findall(text)
    return found[-1] if found else ""


def telling_lines(text: str) -> list[str]:
    """What of a failed step's log goes to the screen: its lines marked as errors (ansible-test buries them), else its
    end.
    """
    lines = text.splitlines()
    marked = [line for line in lines if line.startswith(("ERROR:", "FATAL:"))]
    return marked[-TAIL_LINES:] or lines[-TAIL_LINES:]


def skip_reasons(text: str) -> list[str]:
    """Reasons of skipped tests in a log (pytest's -ra, our own ``skipped:`` lines), once each."""
    return sorted({f"{match[1]}x {match[2]}" if match[1] else match[3] for match in SKIP_REASON.finditer(text)})


class Runner:
    """Runs steps two at a time (those marked ``alone`` by themselves) and prints what happens."""

    def __init__(self, logs: Path, jobs: int = 2, budget_s: float | None = None) -> None:
        """``budget_s``: all steps together; a step gets what is left of it where that is less than its own deadline."""
        self.logs = logs
        self.jobs = jobs
        self._ends = time.monotonic() + budget_s if budget_s else None
        self.results: list[Result] = []
        self._running: list[_Running] = []
        self._last_line = 0.0
        self._terminal = sys.stdout.isatty()

    def run(self, steps: Sequence[Step]) -> list[Result]:
        """Run all steps; returns the results in the order in which they ended."""
        adopt_orphans()
        self.logs.mkdir(parents=True, exist_ok=True)
        waiting = list(steps)
        previous = signal.signal(signal.SIGTERM, _raise_stopped)
        # A shell starts background jobs with SIGINT ignored, and the steps would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while waiting or self._running:
                while waiting and self._may_start(waiting[0]):
                    self._start(waiting.pop(0))
                self._collect()
                self._progress(len(waiting))
                time.sleep(0.2)
        finally:
            for running in list(self._running):
                end_step(running)
                self._finish(running, "failed", "ended: the run was interrupted")
            end_orphans(spared=())
            signal.signal(signal.SIGTERM, previous)
        return self.results

    def _may_start(self, step: Step) -> bool:
        if step.skip is not None or not self._running:
            return True
        return len(self._running) < self.jobs and not step.alone and not any(each.step.alone for each in self._running)

    def _start(self, step: Step) -> None:
        if step.skip is not None:
            self._report(Result(step, "skipped", 0.0, step.skip, None))
            return
        if self._ends is not None and time.monotonic() >= self._ends:
            self._report(Result(step, "failed", 0.0, "not started: the time for the whole run is used up", None))
            return
        log = self.logs / f"{step.name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                step.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=step.cwd,
                env={**os.environ, **step.env},
            )
        self._running.append(_Running(step, process, time.monotonic(), log))

    def _collect(self) -> None:
        for running in list(self._running):
            if running.process.poll() is not None:
                code = running.process.returncode
                self._finish(running, "passed" if code in running.step.ok_codes else "failed", f"exit status {code}")
                continue
            elapsed_s = time.monotonic() - running.started
            if elapsed_s > running.step.deadline_s or (self._ends is not None and time.monotonic() > self._ends):
                end_step(running)
                self._finish(running, "failed", f"no end after {elapsed_s:.0f} s")

    def _finish(self, running: _Running, outcome: str, why: str) -> None:
        self._running.remove(running)
        seconds = time.monotonic() - running.started
        text = running.log.read_text(errors="replace")
        if not self._running:
            left = end_orphans(spared=())
            if left:
                text += "\nended what the step had left running:\n" + "\n".join(left) + "\n"
                running.log.write_text(text)
        detail = closing_counts(text) or ("" if outcome == "passed" else why)
        if outcome == "failed" and why not in detail and not why.startswith("exit status"):
            detail = f"{detail}; {why}"
        self._report(Result(running.step, outcome, seconds, detail, running.log))
        if outcome == "failed":
            print(f"---- from {running.log}")
            print("\n".join(telling_lines(text)))
            print("----", flush=True)

    def _report(self, result: Result) -> None:
        self.results.append(result)
        self._clear()
        print(f"{result.outcome:8} {result.step.name:24} {result.seconds:6.0f} s  {result.detail}", flush=True)

    def _clear(self) -> None:
        if self._terminal:
            sys.stdout.write("\r\033[K")

    def _progress(self, waiting: int) -> None:
        every_s = 1.0 if self._terminal else 30.0
        now = time.monotonic()
        if not self._running or now - self._last_line < every_s:
            return
        self._last_line = now
        parts = [f"{each.step.name} {now - each.started:.0f} s" for each in self._running]
        line = f"  running: {', '.join(parts)}; {waiting} more to come"
        if self._terminal:
            sys.stdout.write(f"\r\033[K{line}")
            sys.stdout.flush()
        else:
            print(line, flush=True)


def _raise_stopped(signum: int, frame: object) -> None:
    raise Stopped(f"signal {signum}")


def counts_of(result: Result) -> Counter[str]:
    """Passed, failed and skipped tests of a step; a step without pytest's counts is one test itself."""
    counts: Counter[str] = Counter()
    for number, word in COUNT.findall(result.detail):
        counts["failed" if word.startswith("error") else word] += int(number)
    if not counts or (result.outcome == "failed" and not counts["failed"]):
        counts[result.outcome] += 1
    return counts


def summary(results: Sequence[Result], seconds: float) -> int:
    """Print the table, what was skipped and why, and the counts; returns the exit status."""
    print(f"\n{'step':26} {'seconds':>7}  {'result':8} detail")
    for result in results:
        print(f"{result.step.name:26} {result.seconds:7.0f}  {result.outcome:8} {result.detail}")
    for result in results:
        for reason in skip_reasons(result.log.read_text(errors="replace")) if result.log else []:
            print(f"skipped in {result.step.name}: {reason}")
    totals: Counter[str] = Counter()
    for result in results:
        totals += counts_of(result)
        if result.outcome == "failed":
            print(f"failed: {result.step.name}: {result.detail}; log: {result.log}")
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped in {seconds:.0f} s")
    return 1 if totals["failed"] or not totals["passed"] else 0
