# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import contextlib
import socket
import threading
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import http

Answer = t.Callable[[bytes, socket.socket, threading.Event], None]


class Peer:
    """A raw TCP peer: it answers each connection by `answer` and keeps what it was sent."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.over = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _address = self.listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                sock.settimeout(10)
                data = b""
                while b"\r\n\r\n" not in data:
                    data += sock.recv(65536)
                self.requests.append(data)
                self.answer(data, sock, self.over)

    @property
    def endpoint(self) -> http.Endpoint:
        return http.Endpoint("127.0.0.1", self.listener.getsockname()[1])

    def close(self) -> None:
        self.over.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(15)
        assert not self.thread.is_alive()


@pytest.fixture
def peer() -> t.Iterator[t.Callable[[Answer], Peer]]:
    peers: list[Peer] = []

    def make(answer: Answer) -> Peer:
        peers.append(Peer(answer))
        return peers[-1]

    yield make
    for one in peers:
        one.close()


def says(text: bytes) -> Answer:
    return lambda _data, sock, _over: sock.sendall(text)


def http_answer(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


Make = t.Callable[[Answer], Peer]


def test_an_answer(peer: Make) -> None:
    server = peer(says(http_answer(b'{"a": 1}')))
    endpoint = http.Endpoint("127.0.0.1", server.endpoint.port, api_key="k-1")
    response = http.request(endpoint, "POST", "/x", 5, {"b": 2})
    assert (response.status, response.json(), response.error) == (200, {"a": 1}, None)
    sent = server.requests[0]
    assert sent.startswith(b"POST /x HTTP/1.1\r\n")
    assert b"Authorization: Bearer k-1\r\n" in sent
    assert sent.endswith(b'{"b": 2}')


def test_chunks(peer: Make) -> None:
    server = peer(says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"))
    assert http.request(server.endpoint, "GET", "/", 5).body == b"abc"


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    response = http.request(http.Endpoint("127.0.0.1", port), "GET", "/health", 5)
    assert (response.status, response.kind) == (None, "refused")
    assert str(port) in str(response.error)


def silent(_data: bytes, _sock: socket.socket, over: threading.Event) -> None:
    over.wait(10)


def drips(_data: bytes, sock: socket.socket, over: threading.Event) -> None:
    """A byte every 50 ms: no single read ever times out."""
    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not over.wait(0.05):
        sock.sendall(b"x")


def drips_headers(_data: bytes, sock: socket.socket, over: threading.Event) -> None:
    sock.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while not over.wait(0.05):
        sock.sendall(b"x")


@pytest.mark.parametrize("answer", [silent, drips, drips_headers])
def test_the_deadline_is_for_the_whole_answer(peer: Make, answer: Answer) -> None:
    response = http.request(peer(answer).endpoint, "GET", "/health", 0.4)
    assert (response.status, response.kind) == (None, "timeout")
    assert 0.4 <= response.seconds < 5


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"hello\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (http.LIMIT_BYTES + 1),
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
    ],
)
def test_a_broken_answer_is_none(peer: Make, text: bytes) -> None:
    response = http.request(peer(says(text)).endpoint, "GET", "/health", 5)
    assert (response.status, response.kind) == (None, "broken")
    assert response.error


def test_redirects_are_not_followed(peer: Make) -> None:
    server = peer(says(http_answer(b"", "302 Found", "Location: http://127.0.0.1:1/\r\n")))
    assert http.request(server.endpoint, "GET", "/health", 5).status == 302


def test_a_key_cannot_smuggle_headers(peer: Make) -> None:
    server = peer(says(http_answer(b"")))
    endpoint = http.Endpoint("127.0.0.1", server.endpoint.port, api_key="a\r\nX: y")
    assert http.request(endpoint, "GET", "/", 5).kind == "broken"
    assert server.requests == []


def test_proxies_of_the_environment_are_not_used(peer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert http.request(peer(says(http_answer(b"x"))).endpoint, "GET", "/", 5).body == b"x"


def by_path(answers: t.Mapping[bytes, bytes]) -> Answer:
    return lambda data, sock, _over: sock.sendall(answers.get(data.split()[1], http_answer(b"", "404 Not Found")))


@pytest.mark.parametrize(
    "health", [http_answer(b"", "503 Service Unavailable"), b"", http_answer(b"", "401 Unauthorized")]
)
def test_server_info_is_not_asked_unless_health_is_200(peer: Make, health: bytes) -> None:
    server = peer(by_path({b"/health": health, b"/server_info": http_answer(b"{}")}))
    probe = http.probe(server.endpoint)
    assert probe.info is None
    assert [request.split()[1] for request in server.requests] == [b"/health"]


def test_server_info_after_health(peer: Make) -> None:
    server = peer(by_path({b"/health": http_answer(b""), b"/server_info": http_answer(b'{"version": "0.5.15"}')}))
    assert http.probe(server.endpoint).info == {"version": "0.5.15"}


def test_the_older_name_of_server_info(peer: Make) -> None:
    server = peer(by_path({b"/health": http_answer(b""), b"/get_server_info": http_answer(b'{"version": "0.5.5"}')}))
    assert http.probe(server.endpoint).info == {"version": "0.5.5"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (http_answer(b"", "401 Unauthorized"), "API key"),
        (http_answer(b"[1]"), "no JSON object"),
        (http_answer(b"<"), "JSON"),
    ],
)
def test_server_info_that_tells_nothing(peer: Make, answer: bytes, words: str) -> None:
    probe = http.probe(peer(by_path({b"/health": http_answer(b""), b"/server_info": answer})).endpoint)
    assert probe.info is None
    assert words in str(probe.info_error)


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("", "127.0.0.1"), ("::", "::1"), ("[::1]", "::1"), ("10.0.0.1", "10.0.0.1")],
)
def test_the_address_to_ask(host: str, address: str) -> None:
    assert http.Endpoint(host, 1).address == address
