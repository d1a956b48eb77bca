# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""SGLang's own router (PyPI sglang-router, 0.3): its workers listed, added and removed over HTTP.

Each call has a deadline, name resolution included. What the router says is taken at its word only where its status is
one that is known for that call; everything else is an error that names it. Adding and removing are queued by the
router: a 202 means that it will try.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import typing as t
from dataclasses import dataclass
from urllib.parse import quote

from ..decide.routing import Entry, Job, Url
from ..errors import CleanSlateError
from ..spawn import call_bounded, fetch_bounded
from . import http
from .redact import Redactor

REQUEST_DEADLINE_S = 10.0
_GRACE_S = 1.0
_SAID_LIMIT = 200
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}$")


class RouterError(CleanSlateError):
    """A router that can't be reached, refuses, or answers what is not understood. ``kind``: refused, timeout, broken
    (no answer), denied (the key), unexpected (another status) or malformed."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Access:
    """How a router or a worker is reached. ``verify``, ``ca_file``: its certificate, for https."""

    url: Url
    api_key: t.Optional[str] = None
    verify: bool = True
    ca_file: t.Optional[str] = None

    @property
    def endpoint(self) -> http.Endpoint:
        tls = self.url.scheme == "https"
        return http.Endpoint(self.url.host, self.url.port, self.api_key, tls, self.verify, self.ca_file)


Ask = t.Callable[[Access, str, str, float, t.Optional[t.Mapping[str, t.Any]]], http.Response]


def ask(
    access: Access, method: str, path: str, deadline_s: float, body: t.Optional[t.Mapping[str, t.Any]] = None
) -> http.Response:
    """One request below the base URL. A name is looked up in a child: nothing else ends a name server's silence."""

    def send() -> http.Response:
        return http.request(access.endpoint, method, access.url.path + path, deadline_s, body)

    try:
        ipaddress.ip_address(access.url.host)
    except ValueError:
        called = fetch_bounded(send, deadline_s + _GRACE_S)
        if called.timed_out:
            error = f"no answer from {access.url}{path} within {deadline_s:g} s"
            return http.Response(None, b"", deadline_s, error, "timeout")
        if called.error is not None:
            return http.Response(None, b"", 0.0, f"{access.url}{path}: {called.error}", "broken")
        return t.cast(http.Response, called.value)
    return send()


def resolve(hosts: t.Sequence[str], deadline_s: float) -> dict[str, list[str]]:
    """The addresses of these names; a name without any, or all of them where the time is up, are left out."""

    def look_up() -> dict[str, list[str]]:
        found = {}
        for host in hosts:
            try:
                rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError):
                continue
            found[host] = sorted({str(row[4][0]) for row in rows})
        return found

    if not hosts:
        return {}
    called = call_bounded(look_up, deadline_s)
    return dict(called.value) if called.ok else {}


class Router:
    """One router. Every method raises RouterError where it does not get an answer that it understands."""

    def __init__(self, name: str, access: Access, deadline_s: float = REQUEST_DEADLINE_S, ask: Ask = ask) -> None:
        self.name = name
        self.access = access
        self.deadline_s = deadline_s
        self._ask = ask
        self._redactor = Redactor([access.api_key])

    def workers(self) -> tuple[Entry, ...]:
        """All workers that it lists. One whose addition is not done is not among them."""
        answer = self._call("GET", "/workers", (200,))
        data = answer.json()
        rows = data.get("workers") if isinstance(data, dict) else None
        if not isinstance(rows, list):
            raise self._malformed("GET", "/workers", "it has no list of workers")
        return tuple(self._entry(row, "GET /workers") for row in rows)

    def worker(self, worker_id: str) -> t.Optional[Entry]:
        """One worker by its id, with what the router still has to do for it; None where it knows none."""
        path = self._path(worker_id)
        answer = self._call("GET", path, (200, 404))
        return None if answer.status == 404 else self._entry(answer.json(), f"GET {path}")

    def add(self, url: str, api_key: t.Optional[str], settings: t.Mapping[str, t.Any]) -> str:
        """Queue the addition; the id under which it can be followed."""
        body = {**settings, "url": url, **({"api_key": api_key} if api_key else {})}
        redactor = Redactor([self.access.api_key, api_key])
        answer = self._call("POST", "/workers", (202,), body, redactor)
        data = answer.json()
        found = data.get("worker_id") if isinstance(data, dict) else None
        if not isinstance(found, str) or not _ID.match(found):
            raise self._malformed("POST", "/workers", "it names no id of the worker")
        return found

    def remove(self, worker_id: str) -> bool:
        """Queue the removal; False where it is gone already."""
        return self._call("DELETE", self._path(worker_id), (202, 404)).status == 202

    def _path(self, worker_id: str) -> str:
        return f"/workers/{quote(worker_id, safe='')}"

    def _call(
        self,
        method: str,
        path: str,
        known: t.Collection[int],
        body: t.Optional[t.Mapping[str, t.Any]] = None,
        redactor: t.Optional[Redactor] = None,
    ) -> http.Response:
        answer = self._ask(self.access, method, path, self.deadline_s, body)
        where = f"router {self.name} ({self.access.url})"
        if answer.status is None:
            raise RouterError(f"{where} can't be asked: {answer.error}", answer.kind or "broken")
        if answer.status in known:
            return answer
        said = (redactor or self._redactor).text(answer.body.decode("utf-8", "replace")[:_SAID_LIMIT])
        words = f", and says: {' '.join(said.split())}" if said.strip() else ""
        if answer.status in (401, 403):
            lacks = "is missing or wrong" if answer.status == 401 else "has no admin role"
            message = f"{where} answers {method} {path} with HTTP {answer.status}: the API key for it {lacks}{words}"
            raise RouterError(message, "denied")
        advice = "; is it an sglang-router of 0.3 or newer?" if answer.status in (404, 405) else ""
        raise RouterError(
            f"{where} answers {method} {path} with HTTP {answer.status}, which is not known for that{words}{advice}",
            "unexpected",
        )

    def _malformed(self, method: str, path: str, why: str) -> RouterError:
        where = f"router {self.name} ({self.access.url})"
        return RouterError(f"the answer of {where} to {method} {path} is not understood: {why}", "malformed")

    def _entry(self, row: t.Any, what: str) -> Entry:
        method, _space, path = what.partition(" ")
        if not isinstance(row, dict):
            raise self._malformed(method, path, "a worker is no object")
        worker_id, url, healthy = row.get("id"), row.get("url"), row.get("is_healthy")
        if not isinstance(worker_id, str) or not isinstance(url, str) or not isinstance(healthy, bool):
            raise self._malformed(method, path, "a worker has no id, url or is_healthy")
        load, priority, cost = row.get("load"), row.get("priority"), row.get("cost")
        return Entry(
            id=worker_id,
            url=url,
            healthy=healthy,
            load=load if isinstance(load, int) else None,
            model_id=_text(row.get("model_id")),
            worker_type=_text(row.get("worker_type")),
            priority=priority if isinstance(priority, int) else None,
            cost=_figure(cost),
            job=self._job(row.get("job_status"), method, path),
        )

    def _job(self, row: t.Any, method: str, path: str) -> t.Optional[Job]:
        if row is None:
            return None
        kind, status = (row.get("job_type"), row.get("status")) if isinstance(row, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(status, str):
            raise self._malformed(method, path, "job_status has no job_type or status")
        return Job(kind, status, self._redactor.text(str(row.get("message") or ""))[:_SAID_LIMIT])


def _figure(value: t.Any) -> t.Optional[float]:
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:  # JSON's whole numbers have no end
        return None


def _text(value: t.Any) -> t.Optional[str]:
    return value if isinstance(value, str) else None
