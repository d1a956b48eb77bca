# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the router's client makes of each answer."""

from __future__ import annotations

import socket
import time
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.routing import Job, parse_url
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import router
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.http import Response
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.router import Access, Router, RouterError
from ansible_collections.cleanslate.sglang.tests.unit.fake_routers import LATE, REFUSED, answer

KEY = "sesame-9a1"
ROW = {"id": "u-1", "url": "http://w1:1", "is_healthy": True, "load": 2, "model_id": "m", "priority": 50, "cost": 1}
Call = t.Callable[[Router], t.Any]
CALLS: dict[str, Call] = {
    "GET /workers": lambda one: one.workers(),
    "GET /workers/u-1": lambda one: one.worker("u-1"),
    "POST /workers": lambda one: one.add("http://w1:1", None, {}),
    "DELETE /workers/u-1": lambda one: one.remove("u-1"),
}


def saying(given: Response, sent: list[t.Any] | None = None) -> Router:
    def ask(*words: t.Any) -> Response:
        if sent is not None:
            sent.append(words)
        return given

    return Router("east", Access(parse_url("http://r1:8000/base"), KEY), ask=ask)


def error_of(call: str, given: Response) -> RouterError:
    with pytest.raises(RouterError) as caught:
        CALLS[call](saying(given))
    assert KEY not in str(caught.value)
    return caught.value


def test_the_list_and_one_worker() -> None:
    (entry,) = saying(answer(200, {"workers": [ROW]})).workers()
    assert (entry.id, entry.url, entry.healthy) == ("u-1", "http://w1:1", True)
    assert (entry.load, entry.model_id, entry.cost) == (2, "m", 1.0)
    job = {"job_type": "AddWorker", "worker_url": "http://w1:1", "status": "failed", "message": f"no {KEY}"}
    seen = saying(answer(200, {**ROW, "job_status": job})).worker("u-1")
    assert seen is not None and seen.job == Job("AddWorker", "failed", "no ********")
    assert saying(answer(404, {"code": "WORKER_NOT_FOUND"})).worker("u-1") is None


def test_adding_and_removing() -> None:
    sent: list[t.Any] = []
    given = answer(202, {"status": "accepted", "worker_id": "u-2", "url": "http://w1:1", "location": "/workers/u-2"})
    assert saying(given, sent).add("http://w1:1", "wkey", {"priority": 7}) == "u-2"
    assert sent[0][1:3] == ("POST", "/workers")
    assert sent[0][4] == {"url": "http://w1:1", "api_key": "wkey", "priority": 7}
    assert saying(answer(202)).remove("u-1") is True
    assert saying(answer(404)).remove("u-1") is False
    assert saying(answer(202), sent).remove("../x") and sent[-1][2] == "/workers/..%2Fx"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [400, 405, 409, 418, 422, 429, 500, 502, 503, 307, 204])
def test_a_status_that_is_not_known_is_named(call: str, status: int) -> None:
    error = error_of(call, answer(status, f"odd words {KEY}"))
    assert error.kind == "unexpected"
    assert f"router east (http://r1:8000/base) answers {call} with HTTP {status}" in str(error)
    assert "odd words" in str(error)


@pytest.mark.parametrize("call", CALLS)
def test_200_is_not_202(call: str) -> None:
    good = 200 if call.startswith("GET") else 202
    assert error_of(call, answer(202 if good == 200 else 200, {"workers": []})).kind == "unexpected"


def test_an_older_router_is_told_by_its_missing_list() -> None:
    assert "is it an sglang-router of 0.3" in str(error_of("GET /workers", answer(404)))


@pytest.mark.parametrize("call", CALLS)
def test_the_key_and_the_role(call: str) -> None:
    missing = error_of(call, answer(401, "Missing or invalid Authorization header"))
    role = error_of(call, answer(403, "Admin role required for control plane access"))
    assert (missing.kind, role.kind) == ("denied", "denied")
    assert "is missing or wrong" in str(missing) and "has no admin role" in str(role)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("given", "kind"), [(REFUSED, "refused"), (LATE, "timeout")])
def test_no_answer(call: str, given: Response, kind: str) -> None:
    error = error_of(call, given)
    assert error.kind == kind and "can't be asked" in str(error)


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("GET /workers", "no json"),
        ("GET /workers", {"workers": {}}),
        ("GET /workers", {"urls": []}),
        ("GET /workers", {"workers": ["http://w1:1"]}),
        ("GET /workers", {"workers": [{**ROW, "is_healthy": "yes"}]}),
        ("GET /workers", {"workers": [{**ROW, "id": 7}]}),
        ("GET /workers/u-1", {"url": "http://w1:1"}),
        ("GET /workers/u-1", {**ROW, "job_status": "AddWorker"}),
        ("GET /workers/u-1", {**ROW, "job_status": {"job_type": "AddWorker"}}),
        ("POST /workers", {"status": "accepted"}),
        ("POST /workers", {"worker_id": "a/b"}),
        ("POST /workers", []),
    ],
)
def test_an_answer_that_is_not_understood(call: str, body: t.Any) -> None:
    error = error_of(call, answer(202 if call.startswith("POST") else 200, body))
    assert error.kind == "malformed" and "is not understood" in str(error)


def test_a_name_server_that_is_silent_does_not_hold_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_words: t.Any, **_more: t.Any) -> t.Any:
        time.sleep(60)

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    monkeypatch.setattr(router, "_GRACE_S", 0.1)
    started = time.monotonic()
    seen = router.ask(Access(parse_url("http://router.example:8000")), "GET", "/workers", 0.3)
    assert seen.kind == "timeout" and router.resolve(["router.example"], 0.3) == {}
    assert time.monotonic() - started < 20


def test_names_are_resolved_in_one_go_and_unknown_ones_left_out() -> None:
    assert router.resolve([], 1) == {}
    found = router.resolve(["localhost", "no-such-host.invalid"], 20)
    assert "127.0.0.1" in found["localhost"] and "no-such-host.invalid" not in found


def test_certificates_are_checked_unless_that_is_switched_off() -> None:
    access = Access(parse_url("https://r1"), KEY, True, "/ca.pem")
    assert (access.endpoint.tls, access.endpoint.verify, access.endpoint.ca_file) == (True, True, "/ca.pem")
    assert not Access(parse_url("https://r1"), KEY, False).endpoint.verify
