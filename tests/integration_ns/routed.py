# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stand-in servers behind real routers, and clients that send to them all the time."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.harness.modules import ModuleResult, run_module
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace, NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.programs import FIXTURES
from ansible_collections.cleanslate.sglang.tests.harness.router import RouterProcess
from ansible_collections.cleanslate.sglang.tests.harness.standin import Standin, start_standin
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

ROUTER_PORT = 41000
WORKER_PORTS = (41001, 41002, 41003)
TOKEN_S = 0.02
DEADLINE_S = 120


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@dataclasses.dataclass
class Fleet:
    """Servers by their port."""

    ns: Namespace
    servers: dict[int, Standin] = dataclasses.field(default_factory=dict)

    def start(self, port: int, *flags: str) -> None:
        self.servers[port] = start_standin(self.ns, *flags, port=port, faults={"TOKEN_S": str(TOKEN_S)})

    def stop(self, port: int, patience_s: float = 5) -> None:
        """SIGTERM, and SIGKILL to what is left, as an eviction does."""
        server = self.servers.pop(port)
        pids = set(server.tree())
        self.ns.run(["kill", "-TERM", str(server.leader.pid)], 10)
        try:
            wait_for("the server ends", lambda: not pids & self.ns.pids(), patience_s)
        except AssertionError:
            self.ns.run(["sh", "-c", f"kill -KILL {' '.join(map(str, sorted(pids)))} || true"], 10)
            wait_for("the server is gone", lambda: not pids & self.ns.pids(), 20)

    def in_flight(self, port: int) -> int:
        rows = self.servers[port].request("GET", "/v1/loads").json["loads"]
        return sum(int(row["num_running_reqs"]) for row in rows)

    def signal(self, process: NsProcess, what: signal.Signals) -> None:
        self.ns.run(["kill", f"-{what.name.removeprefix('SIG')}", str(process.pid)], 10).check()


@dataclasses.dataclass
class Load:
    """Clients at work."""

    ns: Namespace
    process: NsProcess
    path: Path

    def report(self) -> dict[str, t.Any]:
        return t.cast("dict[str, t.Any]", json.loads(self.path.read_text()))

    def answered(self) -> int:
        return sum(self.report()["answered"].values()) if self.path.exists() else 0

    def goes_on(self, more: int = 60) -> None:
        """Until that many more were answered."""
        before = self.answered()
        wait_for("more answers", lambda: self.answered() >= before + more, 60)

    def end(self, deadline_s: float = 120) -> dict[str, t.Any]:
        """Let everybody finish what has begun, and read the report."""
        self.ns.run(["kill", "-TERM", str(self.process.pid)], 10).check()
        wait_for("the clients have ended", Path(f"{self.path}.done").exists, deadline_s)
        return self.report()


def start_load(ns: Namespace, router: RouterProcess, name: str = "load", *words: str) -> Load:
    path = ns.directory / f"{name}.json"
    argv = [sys.executable, str(FIXTURES / "router_load.py"), "--port", str(router.port), "--report", str(path), *words]
    process = ns.popen(argv, {"PYTHONDONTWRITEBYTECODE": "1"}, detached=True, output=ns.directory / f"{name}.out")
    load = Load(ns, process, path)
    load.goes_on()
    return load


def router_worker(
    ns: Namespace,
    state: str,
    behind: t.Sequence[RouterProcess],
    *ports: int,
    check: bool = False,
    diff: bool = False,
    **more: t.Any,
) -> ModuleResult:
    """The module, for these routers and servers, or for those that ``more`` names in full."""
    arguments = {
        "state": state,
        "routers": [{"name": f"r{router.port}", "url": router.url, "api_key": router.key} for router in behind],
        "workers": [{"url": url_of(port)} for port in ports],
        "request_deadline_s": 5,
        "healthy_deadline_s": 30,
        **more,
    }
    return run_module("router_worker", arguments, DEADLINE_S, ns=ns, check=check, diff=diff)


def states(result: ModuleResult, when: str = "after") -> list[str]:
    """Of each router, of each worker."""
    return [worker[when]["state"] for router in result.json["routers"] for worker in router["workers"]]
