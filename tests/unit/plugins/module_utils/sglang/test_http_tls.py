# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""https: whom the client believes, and that it sends no key to anybody else."""

from __future__ import annotations

import datetime
import http.server as servers
import ipaddress
import ssl
import threading
import typing as t
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import http

KEY = "sesame-tls-1"


def certificate(folder: Path, name: str, address: str) -> tuple[Path, Path]:
    """A certificate for this address that vouches for itself: (its file, its key's file)."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / f"{name}.crt", folder / f"{name}.key"
    certificate_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return certificate_file, key_file


class Server(t.NamedTuple):
    port: int
    authority: Path
    keys: list[str | None]


@pytest.fixture
def serve(tmp_path: Path) -> t.Iterator[t.Callable[[str], Server]]:
    running: list[servers.ThreadingHTTPServer] = []

    def start(address: str) -> Server:
        keys: list[str | None] = []

        class Handler(servers.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                keys.append(self.headers.get("Authorization"))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"OK")

            def log_message(self, *_words: t.Any) -> None:
                return

        files = certificate(tmp_path, f"server{len(running)}", address)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*files)
        server = servers.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return Server(server.server_address[1], files[0], keys)

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def ask(server: Server, verify: bool, authority: Path | None = None) -> http.Response:
    endpoint = http.Endpoint("127.0.0.1", server.port, KEY, True, verify, None if authority is None else str(authority))
    return http.request(endpoint, "GET", "/workers", 10)


def test_a_certificate_of_a_known_authority_is_believed(serve: t.Callable[[str], Server]) -> None:
    server = serve("127.0.0.1")
    assert ask(server, True, server.authority).ok and server.keys == [f"Bearer {KEY}"]


def test_nobody_else_gets_the_key(serve: t.Callable[[str], Server], tmp_path: Path) -> None:
    server, elsewhere = serve("127.0.0.1"), serve("127.0.0.9")
    for given, authority in ((server, None), (server, elsewhere.authority), (elsewhere, elsewhere.authority)):
        seen = ask(given, True, authority)
        assert (seen.status, seen.kind) == (None, "broken") and "certificate verify failed" in str(seen.error)
    missing = ask(server, True, tmp_path / "none.pem")
    assert missing.status is None and "FileNotFoundError" in str(missing.error)
    assert server.keys == elsewhere.keys == []


def test_without_a_check_anybody_is_believed(serve: t.Callable[[str], Server]) -> None:
    """As for a server of this host, which is proved by the owner of its port."""
    assert ask(serve("127.0.0.9"), False).ok
