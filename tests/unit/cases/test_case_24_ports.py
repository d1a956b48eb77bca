# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 24: TIME_WAIT alone leaves a port free; a listener makes it busy and is named; a connection on it is told."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.ports import judge_ports
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import PortUse, Reason
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.ports import read_ports
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_processes
from ansible_collections.cleanslate.sglang.tests.unit.fake_host import FakeHost

HEADER = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def row(number: int, local: str, peer: str, state: str, inode: int) -> bytes:
    """A row of /proc/net/tcp as the kernel prints it; addresses in hex, each word in the host's byte order."""
    queues = "00000000:00000000 00:00000000 00000000"
    return f"   {number}: {local} {peer} {state} {queues}  1000        0 {inode} 1\n".encode()


def judge(host: FakeHost, port: int, *rows: bytes) -> tuple[Reason, ...]:
    (host.proc / "net" / "tcp").write_bytes(HEADER + b"".join(rows))
    proc = str(host.proc)
    return judge_ports(read_ports(proc, [port]), [port], read_processes(proc))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    return FakeHost(tmp_path, monkeypatch)


def test_recorded_time_wait_is_free(host: FakeHost) -> None:
    rows = [row(number, "0100007F:7530", f"0100007F:{50000 + number:04X}", "06", 0) for number in range(40)]
    assert judge(host, 30000, *rows) == ()


def test_a_recorded_listener_is_busy_and_named(host: FakeHost) -> None:
    host.process(611, ["nginx: master process /usr/sbin/nginx"], fds={6: "socket:[34567]"})
    (reason,) = judge(host, 30000, row(0, "00000000:7530", "00000000:0000", "0A", 34567))
    assert (reason.code, reason.severity) == ("port_busy", "required")
    assert "pid 611 (nginx: master process /usr/sbin/nginx) listens on 0.0.0.0" in reason.message


def test_a_recorded_connection_that_a_peer_keeps_is_told(host: FakeHost) -> None:
    """A client's ZMQ connection sits on the local port that NCCL wants."""
    host.process(700, ["python3", "client.py"], fds={9: "socket:[45678]"})
    (reason,) = judge(host, 30235, row(0, "0A00000A:761B", "0B00000A:C350", "01", 45678))
    assert (reason.code, reason.severity) == ("port_in_use_by_connection", "advisory")
    assert "pid 700 (python3 client.py)" in reason.message
    assert "10.0.0.11:50000" in reason.message


def test_another_port_and_a_peers_port_are_nobodys_business(host: FakeHost) -> None:
    rows = (row(0, "00000000:7531", "00000000:0000", "0A", 1), row(1, "0A00000A:C350", "0B00000A:7530", "01", 2))
    assert judge(host, 30000, *rows) == ()


# --- the same with sockets of our own on loopback ---


def look(port: int) -> tuple[tuple[PortUse, ...], tuple[Reason, ...]]:
    uses = read_ports("/proc", [port])
    assert uses is not None
    return uses, judge_ports(uses, [port], read_processes("/proc"))


def test_real_listener_connection_and_time_wait() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _address = server.accept()
    try:
        _uses, reasons = look(port)
        assert [reason.code for reason in reasons] == ["port_busy", "port_in_use_by_connection"]
        assert all(f"pid {os.getpid()}" in reason.message for reason in reasons)
        server.close()
        _uses, reasons = look(port)
        assert [reason.code for reason in reasons] == ["port_in_use_by_connection"]
    finally:
        server.close()
        accepted.close()  # who closes first keeps the TIME_WAIT
        client.close()
    deadline = time.monotonic() + 10
    uses, reasons = look(port)
    while {use.state for use in uses} != {"TIME_WAIT"} and time.monotonic() < deadline:
        time.sleep(0.01)
        uses, reasons = look(port)
    assert {use.state for use in uses} == {"TIME_WAIT"}
    assert reasons == ()
    with socket.create_server(("127.0.0.1", port)):  # and so it is: SGLang sets SO_REUSEADDR as well
        assert [reason.code for reason in look(port)[1]] == ["port_busy"]
