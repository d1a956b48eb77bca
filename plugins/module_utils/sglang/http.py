# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small HTTP client that always comes back, and the order in which SGLang may be asked.

Looking must not harm: /server_info on a hung scheduler hangs for ever and spoils a later SIGTERM, so it is asked only
after /health
answered 200 in the same run. /health itself needs up to 20 s to say 503 (client timeout 25 s). Eviction asks nothing
at all.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import ssl
import time
import typing as t
from dataclasses import dataclass

LIMIT_BYTES = 4 * 1024 * 1024
HEALTH_DEADLINE_S = 25.0
INFO_DEADLINE_S = 10.0
_INFO_PATHS = ("/server_info", "/get_server_info")  # the first since 0.5.6


@dataclass(frozen=True)
class Response:
    """What came back. ``status`` None: no whole answer, and ``error`` says why in words; ``kind``: refused, timeout
    or broken."""

    status: t.Optional[int]
    body: bytes
    seconds: float
    error: t.Optional[str] = None
    kind: t.Optional[str] = None

    def json(self) -> t.Any:
        """The body as JSON; None if it is none."""
        try:
            return json.loads(self.body.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError):
            return None

    @property
    def ok(self) -> bool:
        return self.status == 200


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and the key for it. ``host`` as in SGLang's --host: 0.0.0.0 and :: are asked by
    loopback.

    ``verify``: whether its certificate is checked, by ``ca_file`` or else by what the system trusts. Without it who
    answers must be proved in another way, for example by the owner of the port.
    """

    host: str
    port: int
    api_key: t.Optional[str] = None
    tls: bool = False
    verify: bool = False
    ca_file: t.Optional[str] = None

    @property
    def address(self) -> str:
        if self.host in ("", "0.0.0.0"):
            return "127.0.0.1"
        return "::1" if self.host in ("::", "[::]") else self.host.strip("[]")

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Probe:
    """/health, and what /server_info told afterwards; ``info`` None: not asked, or no answer (``info_error``)."""

    health: Response
    info: t.Optional[t.Mapping[str, t.Any]] = None
    info_error: t.Optional[str] = None


def request(
    endpoint: Endpoint, method: str, path: str, deadline_s: float, body: t.Optional[t.Mapping[str, t.Any]] = None
) -> Response:
    """One request, over within ``deadline_s`` in total, whatever the peer does. No redirects, no proxies. Never
    raises for the peer."""
    start = time.monotonic()
    payload = b"" if body is None else json.dumps(body).encode()
    name = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
    headers = {"Host": f"{name}:{endpoint.port}", "Connection": "close", "Accept": "application/json"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    try:
        status, data = _exchange(endpoint, method, path, headers, payload, start + deadline_s)
    except ConnectionRefusedError:
        return _failed(start, "refused", f"nobody accepts connections on {endpoint}")
    except (TimeoutError, socket.timeout):
        return _failed(start, "timeout", f"no whole answer from {endpoint}{path} within {deadline_s:g} s")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _failed(start, "broken", f"{endpoint}{path}: {type(error).__name__}: {error}")
    return Response(status, data, time.monotonic() - start)


def _failed(start: float, kind: str, error: str) -> Response:
    return Response(None, b"", time.monotonic() - start, error, kind)


def _exchange(
    endpoint: Endpoint, method: str, path: str, headers: t.Mapping[str, str], payload: bytes, deadline: float
) -> tuple[int, bytes]:
    if any(ord(character) < 0x20 or ord(character) > 0x7E for value in headers.values() for character in value):
        raise ValueError("a header holds a character that HTTP does not allow (the API key?)")
    with socket.create_connection((endpoint.address, endpoint.port), timeout=_left(deadline)) as plain:
        sock: socket.socket = plain
        if endpoint.tls:
            sock = _tls_context(endpoint).wrap_socket(plain, server_hostname=endpoint.address)
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        if payload or method == "POST":
            lines.append(f"Content-Length: {len(payload)}")
        sock.settimeout(_left(deadline))
        sock.sendall("\r\n".join([*lines, "", ""]).encode("ascii") + payload)
        response = http.client.HTTPResponse(t.cast(socket.socket, _Readable(sock, deadline)), method=method)
        response.begin()
        data = response.read(LIMIT_BYTES + 1)
        if len(data) > LIMIT_BYTES:
            raise ValueError(f"the answer is larger than {LIMIT_BYTES} bytes")
        if response.length:
            raise http.client.IncompleteRead(data, response.length)
        return response.status, data


def _tls_context(endpoint: Endpoint) -> ssl.SSLContext:
    if endpoint.verify:
        return ssl.create_default_context(cafile=endpoint.ca_file)
    # A server of this host is proved by the owner of its port, not by a certificate that was made for another name.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Readable:
    """What http.client wants of a socket: a file to read from. Each read gets what is left of the whole time."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._raw = _Raw(sock, deadline)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._raw)


class _Raw(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__()
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: t.Any) -> int:
        self._sock.settimeout(_left(self._deadline))
        return self._sock.recv_into(buffer)


def health(endpoint: Endpoint, deadline_s: float = HEALTH_DEADLINE_S) -> Response:
    """GET /health: a real one-token request when the server is idle."""
    return request(endpoint, "GET", "/health", deadline_s)


def probe(
    endpoint: Endpoint, health_deadline_s: float = HEALTH_DEADLINE_S, info_deadline_s: float = INFO_DEADLINE_S
) -> Probe:
    """/health, and only after its 200 what the server resolved (/server_info)."""
    seen = health(endpoint, health_deadline_s)
    if not seen.ok:
        return Probe(seen)
    info, problem = info_of(server_info(endpoint, info_deadline_s))
    return Probe(seen, info, problem)


def server_info(endpoint: Endpoint, deadline_s: float = INFO_DEADLINE_S) -> Response:
    """What the server resolved, by the name that its version knows. Only after a 200 of /health in the same run. The
    answer holds the keys in clear."""
    start = time.monotonic()
    answer = Response(None, b"", 0.0, "not asked")
    for path in _INFO_PATHS:
        answer = request(endpoint, "GET", path, max(deadline_s - (time.monotonic() - start), 0.1))
        if answer.status != 404:
            break
    return answer


def info_of(answer: Response) -> tuple[t.Optional[dict[str, t.Any]], t.Optional[str]]:
    """(what /server_info told, why it told nothing)."""
    if not answer.ok:
        words = {401: "the API key is missing or wrong"}.get(answer.status or 0, f"HTTP {answer.status}")
        return None, answer.error or words
    data = answer.json()
    return (data, None) if isinstance(data, dict) else (None, "the answer is no JSON object")
