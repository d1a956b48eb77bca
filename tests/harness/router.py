# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start the real sglang-router inside a namespace.

router = start_router(ns, 41000, "http://127.0.0.1:41001", "http://127.0.0.1:41002")
assert {worker["url"] for worker in router.workers()} == {"http://127.0.0.1:41001", "http://127.0.0.1:41002"}

It spreads requests by round robin, never sends one twice, and looks after its workers every second or two, so that a
test need not wait for minutes.
"""

from __future__ import annotations

import dataclasses
import http.client
import importlib.util
import json
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace, NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

READY_DEADLINE_S = 60
FAST = (
    *("--health-check-interval-secs", "1"),
    *("--health-failure-threshold", "2"),
    *("--health-success-threshold", "1"),
    *("--health-check-timeout-secs", "2"),
)
PLAIN = ("--policy", "round_robin", "--disable-retries", "--log-level", "warn")


def why_not() -> str | None:
    """Why there is no router here, or None."""
    return None if importlib.util.find_spec("sglang_router") else "sglang-router is not installed"


@dataclasses.dataclass(frozen=True)
class RouterProcess:
    """A started router; ``key`` is what its management asks for."""

    ns: Namespace
    process: NsProcess
    port: int
    log: Path
    key: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, method: str, path: str, body: t.Any = None, deadline_s: float = 10) -> tuple[int, t.Any]:
        """One request from inside the namespace: (status, JSON or text)."""

        def send() -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=deadline_s)
            headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
            if body is not None:
                headers["Content-Type"] = "application/json"
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()

        status, text = self.ns.call(send, deadline_s + 5)
        return status, json.loads(text) if text[:1] in ("{", "[") else text

    def workers(self) -> list[dict[str, t.Any]]:
        """What it lists."""
        status, found = self.call("GET", "/workers")
        assert status == 200, (status, found)
        return t.cast("list[dict[str, t.Any]]", found["workers"])

    def states(self) -> dict[str, bool]:
        """URL -> whether it calls it healthy."""
        return {worker["url"]: worker["is_healthy"] for worker in self.workers()}

    def add(self, url: str, **settings: t.Any) -> None:
        """Add a worker, and wait until it is healthy."""
        assert self.call("POST", "/workers", {"url": url, **settings})[0] == 202
        wait_for(f"{url} healthy", lambda: self.states().get(url), READY_DEADLINE_S)


def start_router(
    ns: Namespace,
    port: int,
    *workers: str,
    flags: t.Sequence[str] = (),
    key: str | None = None,
    health: t.Sequence[str] = FAST,
) -> RouterProcess:
    """Start a router and wait until it calls all these workers healthy."""
    log = ns.directory / f"router.{port}.log"
    argv = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 5000), *PLAIN, *health, *flags]
    process = ns.popen(argv, {"PYTHONDONTWRITEBYTECODE": "1"}, detached=True, output=log)
    router = RouterProcess(ns, process, port, log, key)

    def answers() -> bool:
        assert process.pid in ns.pids(), f"the router ended: {log.read_text(errors='replace')[-2000:]}"
        try:
            return router.call("GET", "/liveness")[0] == 200
        except AssertionError:
            return False

    wait_for("the router answers", answers, READY_DEADLINE_S)
    for url in workers:
        router.add(url)
    return router
