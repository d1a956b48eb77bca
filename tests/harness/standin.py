# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start the stand-in SGLang server (tests/doubles/sglang_standin) inside a namespace and talk to it.

server = start_standin(ns, "--tp-size", "2", faults={"IGNORE_TERM": "1"})
assert server.request("GET", "/health").status == 200
"""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import json
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace, NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

STANDIN = ROOT / "tests" / "doubles" / "sglang_standin"
READY_LINE = "The server is fired up and ready to roll!"
READY_DEADLINE_S = 60
_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Answer:
    """An HTTP answer; ``body`` is text."""

    status: int
    body: str

    @property
    def json(self) -> t.Any:
        return json.loads(self.body)


@dataclasses.dataclass(frozen=True)
class Standin:
    """A started server: ``leader`` is its first process, ``log`` its whole output."""

    ns: Namespace
    leader: NsProcess
    port: int
    log: Path

    def tree(self) -> dict[int, str]:
        """pid -> title of the leader and all its living descendants (zombies left out)."""
        return tree_of(self.ns, self.leader.pid)

    def find(self, title: str) -> int:
        """The pid of the one process in the tree whose title starts with ``title``."""
        matches = [pid for pid, name in self.tree().items() if name.startswith(title)]
        assert len(matches) == 1, f"{title}: {matches} in {self.tree()}"
        return matches[0]

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def wait_log(self, text: str, deadline_s: float = READY_DEADLINE_S) -> None:
        """Until the log holds ``text``."""
        wait_for(f"{text!r} in the log:\n{self.text()}", lambda: text in self.text(), deadline_s)

    def request(
        self, method: str, path: str, body: t.Any = None, *, key: str | None = None, deadline_s: float = 10
    ) -> Answer:
        """One HTTP request from inside the namespace."""

        def send() -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=deadline_s)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()

        return Answer(*self.ns.call(send, deadline_s + 5))


def tree_of(ns: Namespace, leader: int) -> dict[int, str]:
    """pid -> title of a process inside and all its living descendants (zombies left out)."""
    parents: dict[int, int] = {}
    for pid, _ticks in ns.living():
        try:
            text = (ns.proc / str(pid) / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[pid] = int(text.rpartition(")")[2].split()[1])
    found = {leader} & set(parents)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: " ".join(ns.cmdline(pid)) for pid in sorted(found)}


def environment(faults: t.Mapping[str, str] | None = None) -> dict[str, str]:
    """What makes ``python -m sglang.launch_server`` the stand-in, with these switches; added to our environment."""
    switches = {f"SGLANG_STANDIN_{name}": value for name, value in (faults or {}).items()}
    return {"PYTHONPATH": str(STANDIN), "PYTHONDONTWRITEBYTECODE": "1", **switches}


def start_standin(
    ns: Namespace,
    *flags: str,
    faults: t.Mapping[str, str] | None = None,
    port: int = 30000,
    serve: bool = False,
    wait: bool = True,
    detached: bool = True,
    env: t.Mapping[str, str] | None = None,
) -> Standin:
    """Start a server and wait until it is ready (unless not asked to).

    ``serve``: by ``sglang serve`` instead of ``python -m sglang.launch_server``. Detached, it is a child of process 1,
    which throws its exit status away; else ``leader.wait()`` gives that.
    """
    log = ns.directory / f"standin.{next(_numbers)}.log"
    entry = [str(STANDIN / "bin" / "sglang"), "serve"] if serve else ["-m", "sglang.launch_server"]
    argv = [sys.executable, *entry, "--model-path", "/models/tiny", "--port", str(port), *flags]
    leader = ns.popen(argv, {**environment(faults), **(env or {})}, detached=detached, output=log)
    server = Standin(ns, leader, port, log)
    if wait:
        server.wait_log(READY_LINE)
    return server
