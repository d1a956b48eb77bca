# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two looks of a row: who lives before the entry point runs and after it, and what that says. Every world has them.

A world says by ``Eyes`` where its processes are: a test's namespace, or all that belongs to a container, seen from its
node. Whoever it sees before and not after died, whoever comes and stays was left behind.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.faults.model import Answer, Facts
from ansible_collections.cleanslate.sglang.tests.harness.command import DeadlinePassed
from ansible_collections.cleanslate.sglang.tests.harness.trace import Signal, parse_trace

Key = tuple[int, int]  # pid, start ticks
GRACE_S = 3.0  # beyond a row's bound, so that what is late is seen to be late and not cut off at the bound
SETTLE_S = 3.0  # how long a helper of the run may take to be reaped
TITLE = 60


class Eyes(t.Protocol):
    """Where the processes of a world are. A Namespace is one."""

    @property
    def proc(self) -> Path:
        """The /proc in which the pids are meant."""

    @property
    def root(self) -> Path:
        """The root directory whose /dev/shm they use."""

    def living(self) -> set[Key]:
        """All of them, without zombies."""

    def start_ticks(self, pid: int) -> int | None:
        """None: it is gone."""

    def cmdline(self, pid: int) -> list[str]:
        """[]: it is gone, or has none."""


class Looking:
    """What the worlds of rows have in common; its subclasses add what a scene makes its fault with."""

    def __init__(self, directory: Path, eyes: Eyes, bound_s: float) -> None:
        self.directory = directory
        self.eyes = eyes
        self.deadline_s = bound_s + GRACE_S
        self.later = contextlib.ExitStack()
        self.facts: Facts | None = None
        self.settle_s = SETTLE_S
        self._names: dict[Key, str] = {}
        self._arrived: dict[Key, str] = {}
        self._departed: set[Key] = set()
        self._restless: set[int] = set()
        self._newcomers: t.Callable[[str], bool] | None = None

    # --- who is who -------------------------------------------------------------------------------------------------

    def name(self, name: str, *pids: int) -> None:
        """Call these processes so; a row's ``may_die`` speaks of names."""
        for pid in pids:
            ticks = self.eyes.start_ticks(pid)
            assert ticks is not None, f"{name}: pid {pid} is gone"
            self._names[pid, ticks] = name

    def arrives(self, name: str, pid: int) -> None:
        """A bystander that came during the run: it must live afterwards too."""
        ticks = self.eyes.start_ticks(pid)
        assert ticks is not None, f"{name}: pid {pid} is gone"
        self._arrived[pid, ticks] = name

    def departs(self, key: Key) -> None:
        """The scene itself ends this one during the run."""
        self._departed.add(key)

    def restless(self, group: int) -> None:
        """The processes of this group come and go all the time: who of them dies is nobody's deed."""
        self._restless.add(group)

    def brings_newcomers(self, which: t.Callable[[str], bool] = lambda title: True) -> None:
        """Processes may be there afterwards that were not there before: those of such a command line."""
        self._newcomers = which

    # --- the looks ----------------------------------------------------------------------------------------------------

    def look(
        self,
        run: t.Callable[[], Answer],
        record: Path | None = None,
        meanwhile: t.Callable[[], None] | None = None,
    ) -> None:
        """Run it between two looks at who lives, and keep what was seen."""
        before, files = self.eyes.living(), self._shm()
        names = {key: self._called(key) for key in before}
        groups = {key: self._stat(key[0])[2] for key in before} if self._restless else {}
        answer: Answer | None = None
        problems: list[str] = []
        beside = threading.Thread(target=self._beside, args=(meanwhile, problems))
        timed_out = False
        started = time.monotonic()
        if meanwhile is not None:
            beside.start()
        try:
            answer = run()
        except DeadlinePassed as passed:
            timed_out = True
            problems.append(str(passed))
        except Exception:  # a fact like others: the row's result is `error`, unless something worse was seen
            problems.append(traceback.format_exc())
        seconds = time.monotonic() - started
        if meanwhile is not None:
            beside.join(30)
        died = self._died(before, groups)
        signals = parse_trace(record.read_text(errors="replace")) if record is not None and record.exists() else []
        self.facts = Facts(
            answer=answer,
            seconds=round(seconds, 1),
            died=tuple(sorted({names.get(key) or self._arrived[key] for key in died})),
            signalled=tuple(sorted(self._signalled(signals, before, names))),
            stayed=() if timed_out else tuple(self._stayed(before)),
            missing=tuple(self._robbed(files - self._shm())),
            timed_out=timed_out,
            problem="\n".join(problems),
        )

    @staticmethod
    def _beside(meanwhile: t.Callable[[], None] | None, problems: list[str]) -> None:
        try:
            if meanwhile is not None:
                meanwhile()
        except Exception:  # told with the facts
            problems.append(traceback.format_exc())

    def _called(self, key: Key) -> str:
        title = " ".join(self.eyes.cmdline(key[0]))[:TITLE]
        return self._names.get(key) or f"pid {key[0]} {title}"

    def _died(self, before: set[Key], groups: t.Mapping[Key, int]) -> set[Key]:
        expected = (before | set(self._arrived)) - self._departed
        gone = expected - self.eyes.living()
        # A group that could not be told belongs to one that was gone before it could be looked at.
        return {key for key in gone if not self._restless or groups.get(key, 0) not in {*self._restless, -1}}

    def _stat(self, pid: int) -> tuple[str, int, int]:
        """(state, parent, group) of a process inside; parent -1 where it is gone."""
        try:
            fields = (self.eyes.proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return "", -1, -1
        return fields[0], int(fields[1]), int(fields[2])

    def _signalled(self, signals: t.Sequence[Signal], before: set[Key], names: t.Mapping[Key, str]) -> set[str]:
        """Names of those who were there and got a signal through a pidfd, as the product sends them."""
        there = {key[0]: names[key] for key in before if key not in self._departed}
        there.update({key[0]: name for key, name in self._arrived.items()})
        sent = {one.target for one in signals if one.call == "pidfd_send_signal" and one.result == 0}
        return {there[pid] for pid in sent if pid in there}

    def _stayed(self, before: set[Key]) -> list[str]:
        """Processes that the run left behind: new ones that are nobody's children but process 1's."""
        known = {key[0] for key in before} | {key[0] for key in self._arrived}

        def left() -> list[str]:
            found = []
            for key in self.eyes.living() - before - set(self._arrived):
                if not self._belongs(key[0], known) and not self._expected(key):
                    found.append(self._called(key))
            return found

        end = time.monotonic() + self.settle_s
        while (found := left()) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _expected(self, key: Key) -> bool:
        """Whether it is one of those that the run may bring, or gone by now."""
        title = " ".join(self.eyes.cmdline(key[0]))
        return self._newcomers is not None and (self._newcomers(title) or key not in self.eyes.living())

    def _belongs(self, pid: int, known: t.Collection[int]) -> bool:
        """Whether one of those who were there brought this one up, or it is restless, or gone."""
        while pid > 1 and pid not in known:
            _state, parent, group = self._stat(pid)
            if parent == -1 or group in self._restless:
                return True
            pid = parent
        return pid in known

    def _robbed(self, gone: t.Collection[str]) -> list[str]:
        """Those of the removed files of /dev/shm that somebody who lives has still mapped."""
        mapped = ""
        for pid in (key[0] for key in self.eyes.living()) if gone else ():
            with contextlib.suppress(OSError):
                mapped += (self.eyes.proc / str(pid) / "maps").read_text(errors="replace")
        return sorted(name for name in gone if f"/dev/shm/{name} (deleted)" in mapped)

    def _shm(self) -> set[str]:
        return {path.name for path in (self.eyes.root / "dev" / "shm").iterdir()}
