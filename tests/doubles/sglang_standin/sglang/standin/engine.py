# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The leader's view of its workers: requests that need an answer from every rank of one data parallel group."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence

from sglang.standin.settings import Settings
from sglang.standin.worker import SHUTDOWN, Connection

HEALTH_TOKENS = 1


class Channel:
    """One worker's connection: sends request numbers, and lets callers wait for the answer to theirs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._waiting: dict[int, threading.Event] = {}

    def read_ready(self) -> dict[str, int]:
        """Block until the worker is ready. EOFError if it died before."""
        kind, info = self._connection.recv()
        assert kind == "ready"
        threading.Thread(target=self._read_answers, daemon=True).start()
        return dict(info)

    def _read_answers(self) -> None:
        while True:
            try:
                _kind, number = self._connection.recv()
            except (EOFError, OSError):
                return  # the worker is dead: nobody is answered any more, as with SGLang
            with self._lock:
                event = self._waiting.pop(number, None)
            if event is not None:
                event.set()

    def ask(self, number: int, from_user: bool) -> threading.Event:
        """Send a request; the event is set when its answer has come (never, if the worker is stuck or dead)."""
        event = threading.Event()
        with self._lock:
            self._waiting[number] = event
            with contextlib.suppress(OSError):  # a dead worker: the request hangs
                self._connection.send((number, from_user))
        return event

    def shut_down(self) -> None:
        """Ask the worker to end; a dead one needs no asking."""
        with self._lock:
            try:
                self._connection.send(SHUTDOWN)
            except OSError:
                return


class Engine:
    """Generates tokens: every token takes an answer of all ranks of one data parallel rank and of the detokenizer."""

    def __init__(self, groups: Sequence[Sequence[Channel]], detokenizer: Channel, settings: Settings) -> None:
        self.groups = [list(group) for group in groups]
        self.detokenizer = detokenizer
        self.settings = settings
        self._numbers = itertools.count(1)
        self._turn = itertools.count()
        self._requests = itertools.count(1)
        self._lock = threading.Lock()
        self.running: dict[str, int] = {}
        self._began = time.monotonic()

    def begin(self, request_id: str, dp_rank: int | None) -> int:
        """Count a request in; returns the data parallel rank that serves it (round robin unless chosen)."""
        with self._lock:
            chosen = next(self._turn) % len(self.groups) if dp_rank is None else dp_rank
            self.running[request_id] = chosen
            return chosen

    def end(self, request_id: str) -> None:
        """Count a request out."""
        with self._lock:
            self.running.pop(request_id, None)

    def admit(self) -> bool:
        """Hang for ever once ``hang_after`` user requests have been admitted (health stays 200). False: this request is
        to fail."""
        number = next(self._requests)
        if 0 <= self.settings.hang_after < number:
            threading.Event().wait()
        return not (self.settings.fail_every and number % self.settings.fail_every == 0)

    def step(self, dp_rank: int, from_user: bool, deadline: float | None = None) -> bool:
        """One token. False if it did not come before ``deadline`` (time.monotonic); without one it waits for ever."""
        if 0 <= self.settings.busy_after_s <= time.monotonic() - self._began:
            threading.Event().wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            return False
        number = next(self._numbers)
        events = [channel.ask(number, from_user) for channel in (*self.groups[dp_rank], self.detokenizer)]
        for event in events:
            if deadline is None:
                event.wait()
            elif not event.wait(max(0.0, deadline - time.monotonic())):
                return False
        return True

    def any_rank_answers(self, timeout_s: float) -> bool:
        """What /health looks at: whether anything came back from any rank."""
        deadline = time.monotonic() + timeout_s
        found = threading.Event()
        running = [
            threading.Thread(target=self._probe, args=(rank, deadline, found), daemon=True) for rank in self._ranks()
        ]
        for thread in running:
            thread.start()
        return found.wait(timeout_s)

    def _probe(self, dp_rank: int, deadline: float, found: threading.Event) -> None:
        if self.step(dp_rank, False, deadline):
            found.set()

    def _ranks(self) -> list[int]:
        return list(range(len(self.groups)))

    def shut_down(self) -> None:
        """Ask all schedulers to end."""
        for group in self.groups:
            for channel in group:
                channel.shut_down()
