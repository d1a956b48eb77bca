# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Routers and workers behind one `ask`, with a clock of their own, as sglang-router 0.3.2 answers."""

from __future__ import annotations

import dataclasses
import json
import typing as t

from ansible_collections.cleanslate.sglang.plugins.module_utils import routing
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.routing import Clock
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.http import Response
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.router import Access

REFUSED = Response(None, b"", 0.0, "nobody accepts connections on it", "refused")
LATE = Response(None, b"", 10.0, "no whole answer within 10 s", "timeout")
Row = dict[str, t.Any]


def answer(status: int, body: t.Any = "") -> Response:
    text = body if isinstance(body, str) else json.dumps(body)
    return Response(status, text.encode(), 0.01)


def worker(url: str = "http://w1:30000", **more: t.Any) -> Row:
    """One of the module's workers."""
    return {"url": url, "aliases": [], "api_key": None, "give_key": False, "settings": None, **more}


@dataclasses.dataclass
class FakeRouter:
    """``heals_at``: from when on it calls what it lists healthy; ``removes``, ``adds``: whether it keeps its promises;
    ``down``: what it answers instead, by method (or for all of them by ""); ``silent``: from when to when.
    """

    clock: FakeClock
    rows: list[Row] = dataclasses.field(default_factory=list)
    down: dict[str, Response] = dataclasses.field(default_factory=dict)
    heals_at: float = 0.0
    removes: bool = True
    adds: bool = True
    silent: tuple[float, float] = (0.0, 0.0)
    job: t.Optional[Row] = None
    asked: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    bodies: list[Row] = dataclasses.field(default_factory=list)
    keys: set[t.Optional[str]] = dataclasses.field(default_factory=set)
    number: int = 0

    def put(self, url: str, healthy: bool = True, **more: t.Any) -> FakeRouter:
        self.number += 1
        self.rows.append(
            {
                "id": f"id-{self.number}",
                "url": url,
                "model_id": "m",
                "priority": 50,
                "cost": 1.0,
                "worker_type": "regular",
                "is_healthy": healthy,
                "load": 0,
                **more,
            }
        )
        return self

    def ask(self, access: Access, method: str, path: str, body: t.Optional[t.Mapping[str, t.Any]]) -> Response:
        self.asked.append((method, path))
        self.keys.add(access.api_key)
        said = self.down.get(method, self.down.get(""))
        if said is not None:
            return said
        if self.silent[0] <= self.clock.now() < self.silent[1]:
            return LATE
        if self.clock.now() >= self.heals_at > 0:
            for row in self.rows:
                row["is_healthy"] = True
        if (method, path) == ("GET", "/workers"):
            return answer(200, {"workers": self.rows, "total": len(self.rows), "stats": {}})
        if method == "POST":
            self.bodies.append(dict(body or {}))
            if self.adds:
                self.put(str((body or {})["url"]), self.heals_at == 0)
            return answer(202, {"status": "accepted", "worker_id": f"id-{self.number}", "location": "/workers/x"})
        found = next((row for row in self.rows if path == f"/workers/{row['id']}"), None)
        if method == "DELETE":
            if found is not None and self.removes:
                self.rows.remove(found)
            return answer(202 if found else 404, {"status": "accepted"})
        if found is None and self.job is None:
            return answer(404, {"error": "Worker not found", "code": "WORKER_NOT_FOUND"})
        row = found or {"id": "x", "url": "http://w1:30000", "is_healthy": False}
        return answer(200, {**row, **({"job_status": self.job} if self.job else {})})

    @property
    def changed(self) -> bool:
        return any(method != "GET" for method, _path in self.asked)

    def urls(self) -> list[str]:
        return [row["url"] for row in self.rows]


@dataclasses.dataclass
class FakeWorker:
    """``loads``: what /v1/loads tells, one after another, the last for ever; None: no answer, "gone": refused."""

    loads: list[t.Any] = dataclasses.field(default_factory=lambda: [0])
    health: Response = dataclasses.field(default_factory=lambda: answer(200))
    version: str = "0.5.15"
    asked: list[str] = dataclasses.field(default_factory=list)

    def ask(self, path: str) -> Response:
        self.asked.append(path)
        if path == "/health":
            return self.health
        if path == "/server_info":
            return answer(200, {"version": self.version, "api_key": "sk-of-the-server"})
        if path != "/v1/loads":
            return answer(404)
        now = self.loads[0] if len(self.loads) == 1 else self.loads.pop(0)
        if now == "gone":
            return REFUSED
        if now is None:
            return LATE
        return answer(200, {"loads": [{"dp_rank": 0, "num_running_reqs": now, "num_waiting_reqs": 0}]})


@dataclasses.dataclass
class FakeClock:
    time: float = 100.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@dataclasses.dataclass
class FakeSite:
    """Hosts r1, r2 ... are routers, w1, w2 ... workers; nobody else accepts connections."""

    clock: FakeClock = dataclasses.field(default_factory=FakeClock)
    routers: dict[str, FakeRouter] = dataclasses.field(default_factory=dict)
    workers: dict[str, FakeWorker] = dataclasses.field(default_factory=dict)
    addresses: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    hook_results: dict[str, str] = dataclasses.field(default_factory=dict)
    hook_lists: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    hooks_run: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def router(self, name: str, *urls: str) -> FakeRouter:
        self.routers[name] = FakeRouter(self.clock)
        for url in urls:
            self.routers[name].put(url)
        return self.routers[name]

    def ask(
        self, access: Access, method: str, path: str, deadline_s: float, body: t.Optional[t.Mapping[str, t.Any]]
    ) -> Response:
        found: Response = REFUSED
        if access.url.host in self.routers:
            found = self.routers[access.url.host].ask(access, method, path, body)
        elif access.url.host in self.workers:
            found = self.workers[access.url.host].ask(path)
        self.clock.sleep(min(found.seconds, deadline_s))
        return found

    def run_hook(self, hook: t.Any, action: str, urls: t.Sequence[str]) -> Row:
        self.hooks_run.append((hook.name, action))
        result = self.hook_results.get(hook.name, "done")
        row = {"name": hook.name, "action": action, "result": result, "detail": f"it {result}", "seconds": 0.1}
        return {**row, "listed": self.hook_lists.get(hook.name)} if action == "list" else row

    def world(self) -> routing.World:
        clock = Clock(self.clock.now, self.clock.sleep)
        return routing.World(self.ask, clock, self.resolve, self.run_hook)

    def resolve(self, hosts: t.Sequence[str], _deadline_s: float) -> dict[str, list[str]]:
        """Each name has an address of its own, unless it was given others."""
        return {**{host: [f"192.0.2.{number}"] for number, host in enumerate(hosts)}, **self.addresses}

    def run(self, state: str, check: bool = False, **changes: t.Any) -> Row:
        params = {
            "state": state,
            "routers": [{"url": f"http://{name}:8000", "name": name, "api_key": f"k-{name}"} for name in self.routers],
            "workers": [worker()],
            "hooks": [],
            "leave_healthy": 1,
            "in_flight": "loads",
            "allow_cut": False,
            "request_deadline_s": 10,
            "removed_deadline_s": 30,
            "drain_deadline_s": 120,
            "healthy_deadline_s": 180,
            "validate_certs": True,
            "ca_path": None,
        }
        return routing.run({**params, **changes}, check, self.world())
