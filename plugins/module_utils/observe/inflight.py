# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many requests a server works on: its own word (/v1/loads), or the connections on its port as an upper bound.

/v1/loads is the one question that may be put to a server before an eviction: since SGLang 0.5.13 it is answered from
shared memory, also while the schedulers hang, and no scheduler learns of it. Before that it is not asked.
"""

from __future__ import annotations

import dataclasses
import os
import time
import typing as t
from dataclasses import dataclass

from ..asking import endpoint_of
from ..errors import CleanSlateError
from ..sglang import http
from ..sglang.configfile import read_config
from ..sglang.files import open_regular
from ..sglang.flags import canonical
from ..sglang.install import version_tuple
from ..snapshot import Leader
from ..spawn import fetch_bounded
from .bounded import fetch_launched
from .ports import parse_table, read_ports
from .rests import Rests

LOADS_SINCE = (0, 5, 13)
LOADS_DEADLINE_S = 2.0
LOADS_PATH = "/v1/loads"
READ_DEADLINE_S = 5.0
STEADY_LOOKS = 20
# SGLang closes a connection that was idle for 5 s (SGLANG_TIMEOUT_KEEP_ALIVE).
KEEP_ALIVE_S = 6.0
UNDERWAY = "its schedulers rest, and a connection is open: it may be a request on its way to them"
UNRESTED = "a scheduler is at work, or hangs, and tells of no request: it counts as one"
_CONFIG_LIMIT = 1 << 20
_COUNTS = ("num_running_reqs", "num_waiting_reqs")


def count_connections(port: int, network_of: t.Optional[int] = None, proc: str = "/proc") -> t.Optional[int]:
    """Established connections to a local port; None where the table can't be read. ``network_of``: the pid in whose
    network namespace the port is; None: in ours."""
    where = f"{proc}/net" if network_of is None else f"{proc}/{network_of}/net"
    total = 0
    for name in ("tcp", "tcp6"):
        try:
            with open(os.path.join(where, name), "rb") as stream:
                rows = parse_table(stream.read(), frozenset([port]))
        except FileNotFoundError:
            if name == "tcp":
                return None
            continue
        except OSError:
            return None
        if rows is None:
            return None
        total += sum(row.state == "ESTABLISHED" for row in rows)
    return total


@dataclass(frozen=True)
class Loads:
    """What /v1/loads told: ``total``: requests that run or wait; ``tokens``: of each rank, how many are in use."""

    total: int
    tokens: tuple[int, ...] = ()


def loads_of(answer: http.Response) -> t.Union[Loads, str]:
    """An answer of /v1/loads, over all ranks; a text says why it tells nothing."""
    if not answer.ok:
        return answer.error or f"/v1/loads says HTTP {answer.status}"
    data = answer.json()
    rows = data.get("loads") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not rows:
        return "/v1/loads names no rank"
    total = 0
    for row in rows:
        counts = [row.get(name) for name in _COUNTS] if isinstance(row, dict) else [None]
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            return "/v1/loads does not count the requests"
        total += sum(t.cast("list[int]", counts))
    tokens = [row.get("num_used_tokens") for row in rows]
    return Loads(total, tuple(number if isinstance(number, int) else 0 for number in tokens))


class LoadsWatch:
    """Counts a server's requests by /v1/loads, again and again, and does not take every zero for an idle server.

    A scheduler tells its loads after a prompt was read, where it leaves out that request, then after each 15th token,
    and when it rests (0.5.15: a request of 6 s was told at no moment). What gives such a request away are tokens in
    use, unless they stay as they are for longer than 15 tokens take. While the first prompt after a rest is read
    nothing does; ``settle`` waits for the scheduler to come to an end with it, and says whether it did. ``unrested``:
    whether the last number is a one because it did not.
    """

    def __init__(self, ask: t.Callable[[], http.Response], settle: t.Optional[t.Callable[[], bool]] = None) -> None:
        self.unrested = False
        self._ask = ask
        self._settle = settle
        self._tokens: tuple[int, ...] = ()
        self._steady = 0

    def start(self) -> str:
        """Ask once: why nothing is told, or an empty text."""
        seen = loads_of(self._ask())
        return seen if isinstance(seen, str) else ""

    def count(self) -> t.Union[int, str]:
        """How many; one where none are told and it can't be said that the server rests. A text: not known."""
        self.unrested = False
        seen = loads_of(self._ask())
        if self._settle is not None and isinstance(seen, Loads) and not seen.total:
            if not self._settle():
                self.unrested = True
                return 1
            seen = loads_of(self._ask())
        if isinstance(seen, str):
            return seen
        self._steady = self._steady + 1 if seen.tokens == self._tokens and not seen.total else 0
        self._tokens = seen.tokens
        if seen.total or not any(seen.tokens):
            return seen.total
        return 0 if self._steady >= STEADY_LOOKS else 1


def loads_endpoint(
    leader: Leader, port: int, family: t.Collection[int], config: t.Optional[str]
) -> t.Union[http.Endpoint, str]:
    """Where this leader may be asked for its loads; a text says why it may not.

    ``family``: the pids of its tree, one of which must listen on the port, since the key is sent there. ``config``: the
    launch's configuration file, which may hold the key.
    """
    if leader.same_network is not True:
        return "its port is in another network namespace"
    launched, problem = fetch_launched(leader.process, deadline_s=READ_DEADLINE_S)
    if problem is not None:
        return problem
    version = launched.install.version if launched.install is not None else None
    known = version_tuple(version)
    if known is None or known < LOADS_SINCE:
        return f"its version is {version or 'not known'}, and /v1/loads can be asked without harm since 0.5.13"
    listeners = [use for use in read_ports(ports=[port]) or () if use.state == "LISTEN"]
    listening = {pid for use in listeners for pid in use.pids}
    if not listening or not listening <= set(family):
        return f"it is not the one that listens on port {port}"
    flags = dict(launched.flags.flags) if launched.flags is not None else {}
    key = None if config is None else read_api_key(config)
    # Where it was seen to listen: its command line may name another host, which would get the key.
    endpoint = endpoint_of(port, [use.address for use in listeners])
    return dataclasses.replace(endpoint, api_key=key, tls="ssl-certfile" in flags)


def read_api_key(config: str) -> t.Optional[str]:
    """The key in a launch's configuration file; None where there is none, or it can't be read in time."""

    def read() -> t.Optional[str]:
        with os.fdopen(open_regular(config), "rb") as stream:
            flags = read_config(stream.read(_CONFIG_LIMIT).decode("utf-8", "replace")) or {}
        keys = [str(value) for name, value in flags.items() if canonical(name) == "api-key" and value is not None]
        return keys[0] if keys else None

    called = fetch_bounded(read, READ_DEADLINE_S)
    return t.cast("t.Optional[str]", called.value) if called.ok else None


class Underway:
    """Whether a request may be on its way to the schedulers, which rest: then its connection is open. So are idle ones,
    but these the server closes itself after some seconds; so after that long a rest what is open counts no more."""

    def __init__(
        self, connections: t.Callable[[], t.Optional[int]], now: t.Callable[[], float] = time.monotonic
    ) -> None:
        self._connections = connections
        self._now = now
        self._since: t.Optional[float] = None

    def is_any(self, rests: bool) -> bool:
        """``rests``: what the schedulers do now."""
        if not rests:
            self._since = None
            return False
        now = self._now()
        if self._since is None:
            self._since = now
        return now - self._since < KEEP_ALIVE_S and self._connections() != 0


class Counter:
    """Counts one leader's requests, always by the same source: the loads where they are told and it can be seen that
    the schedulers rest, else connections."""

    def __init__(
        self, leader: Leader, port: int, family: t.Collection[int], wanted: str, config: t.Optional[str], proc: str
    ) -> None:
        self.port = port
        self.proc = proc
        self.pid: t.Optional[int] = leader.process.pid if leader.same_network is not True else None
        self.endpoint: t.Optional[http.Endpoint] = None
        self._watch: t.Optional[LoadsWatch] = None
        self._underway = Underway(lambda: count_connections(self.port, self.pid, self.proc))
        self.note = "" if wanted == "connections" else self._choose_loads(leader, family, config)

    def _choose_loads(self, leader: Leader, family: t.Collection[int], config: t.Optional[str]) -> str:
        try:
            found = loads_endpoint(leader, self.port, family, config)
        except CleanSlateError as error:
            return str(error)
        if isinstance(found, str):
            return found

        def ask() -> http.Response:
            return http.request(found, "GET", LOADS_PATH, LOADS_DEADLINE_S)

        rests = Rests(family, ask, self.proc)
        watch = LoadsWatch(ask, rests)
        problem = watch.start() or rests.start()
        if problem:
            return problem
        self.endpoint, self._watch = found, watch
        return ""

    @property
    def source(self) -> str:
        return "connections" if self.endpoint is None else "loads"

    def count(self) -> t.Optional[int]:
        """How many requests are in flight now; None: not known."""
        if self._watch is None:
            return count_connections(self.port, self.pid, self.proc)
        seen = self._watch.count()
        self.note = UNRESTED if self._watch.unrested else ""
        number = seen if isinstance(seen, int) else None
        if self._underway.is_any(number == 0):
            self.note = UNDERWAY
            return 1
        return number
