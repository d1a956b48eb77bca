# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many requests a worker behind a router still has, asked of the worker itself, over the network.

A router forgets a worker's load with the worker. The worker is asked for its loads, and that only where its version is
known to answer from shared memory; the version comes from /server_info, which is asked after a 200 of /health alone.
"""

from __future__ import annotations

import time
import typing as t

from ..sglang import http
from ..sglang.install import version_tuple
from ..sglang.router import Access, Ask, ask
from .inflight import LOADS_DEADLINE_S, LOADS_PATH, LOADS_SINCE, LoadsWatch

_INFO_PATHS = ("/server_info", "/get_server_info")  # the first since 0.5.6
_TRIES = 3
_PAUSE_S = 0.5


class WorkerCounter:
    """Counts one worker's requests by its own word. ``gone``: nobody accepts connections there any more; ``last``: the
    last number that was told; ``problem``: why none is told."""

    source = "loads"

    def __init__(self, access: Access, ask: Ask = ask, sleep: t.Callable[[float], None] = time.sleep) -> None:
        self.access = access
        self.note = ""
        self.gone = False
        self.last: t.Optional[int] = None
        self.problem = ""
        self._ask = ask
        self._sleep = sleep
        self._watch = LoadsWatch(self._loads, self._settles)

    def _loads(self) -> http.Response:
        """A busy server may be late once; it is asked again."""
        answer = http.Response(None, b"", 0.0, "not asked")
        for attempt in range(_TRIES):
            if attempt:
                self._sleep(_PAUSE_S)
            answer = self._ask(self.access, "GET", LOADS_PATH, LOADS_DEADLINE_S, None)
            self.gone = answer.kind == "refused"
            if answer.ok or self.gone:
                break
        return answer

    def _settles(self) -> bool:
        """Whether every scheduler has come to an end with what it worked on just now: /health is answered after a batch
        of one of them, and /server_info, asked only then, after one of each."""
        seen = self._ask(self.access, "GET", "/health", http.HEALTH_DEADLINE_S, None)
        return seen.ok and not version_of(self.access, self._ask)[1]

    def start(self) -> str:
        """Ask for the first time; why its requests can't be told, or an empty text."""
        return self._watch.start()

    def count(self) -> t.Optional[int]:
        """How many requests run or wait; None: it could not be told."""
        seen = self._watch.count()
        if self.gone:
            return 0
        if isinstance(seen, str):
            self.problem = seen
            return None
        self.last = seen
        return seen


def counter_of(
    access: Access, ask: Ask = ask, sleep: t.Callable[[float], None] = time.sleep
) -> t.Union[WorkerCounter, str]:
    """A counter for this worker; a text says why its requests can't be counted."""
    counter = WorkerCounter(access, ask, sleep)
    seen = ask(access, "GET", "/health", http.HEALTH_DEADLINE_S, None)
    if seen.kind == "refused":
        counter.gone, counter.note = True, f"nobody accepts connections on {access.url}, so nothing is in flight there"
        return counter
    if not seen.ok:
        return seen.error or f"its /health says HTTP {seen.status}"
    version, problem = version_of(access, ask)
    if problem:
        return problem
    known = version_tuple(version)
    if known is None or known < LOADS_SINCE:
        return f"its version is {version or 'not known'}, and /v1/loads can be asked without harm since 0.5.13"
    return counter.start() or counter


def version_of(access: Access, ask: Ask) -> tuple[t.Optional[str], str]:
    """(the version that it names, why it tells nothing). Its answer holds keys in clear: nothing else of it is kept."""
    path, older = _INFO_PATHS
    answer = ask(access, "GET", path, http.INFO_DEADLINE_S, None)
    if answer.status == 404:
        path = older
        answer = ask(access, "GET", path, http.INFO_DEADLINE_S, None)
    info, problem = http.info_of(answer)
    if info is None:
        return None, f"its {path} tells no version: {problem}"
    version = info.get("version")
    return (version if isinstance(version, str) else None), ""
