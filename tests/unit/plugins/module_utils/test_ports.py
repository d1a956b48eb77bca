# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.ports import judge_ports, program_of
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import PortUse, Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.ports import parse_table, read_ports
from ansible_collections.cleanslate.sglang.tests.unit.fake_host import FakeHost

# Rows as a kernel 6.18 (x86-64) writes them.
HEADER = (
    b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
    + b" " * 53
    + b"\n"
)
LISTEN = (
    b"   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 34567 1 "
    b"0000000000000000 100 0 0 10 0                     \n"
)
TIME_WAIT = (
    b"   1: 0100007F:7530 0100007F:C350 06 00000000:00000000 03:00001770 00000000     0        0 0 3 0000000000000000\n"
)
ESTABLISHED = (
    b"   2: 0A00000A:7530 0B00000A:01BB 01 00000000:00000000 02:000A0000 00000000  1001        0 45678 2 "
    b"0000000000000000 20 4 30 10 -1\n"
)
LISTEN_6 = (
    b"   0: 00000000000000000000000000000000:7530 00000000000000000000000000000000:0000 0A"
    b" 00000000:00000000 00:00000000 00000000     0        0 56789 1 0000000000000000 100 0 0 10 0\n"
)
MAPPED_6 = (
    b"   1: 0000000000000000FFFF00000100007F:7530 0000000000000000FFFF00000100007F:C350 08"
    b" 00000000:00000000 00:00000000 00000000     0        0 56790 1 0000000000000000 20 0 0 10 -1\n"
)
LOCAL_6 = (
    b"   2: 00000000000000000000000001000000:7530 00000000000000000000000001000000:C351 01"
    b" 00000000:00000000 00:00000000 00000000     0        0 56791 1 0000000000000000 20 0 0 10 -1\n"
)
HEADER_6 = HEADER.replace(b"local_address rem_address ", b"local_address                         remote_address       ")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    return FakeHost(tmp_path, monkeypatch)


def write_tables(host: FakeHost, tcp: bytes | None, tcp6: bytes | None = None) -> None:
    for name, data in (("tcp", tcp), ("tcp6", tcp6)):
        if data is not None:
            (host.proc / "net" / name).write_bytes(data)


def process_of(pid: int, *argv: str, comm: str = "x") -> Process:
    return Process(pid, 1, 1, pid, pid, "S", comm, argv)


def test_rows_of_both_tables(host: FakeHost) -> None:
    write_tables(host, HEADER + LISTEN + TIME_WAIT + ESTABLISHED, HEADER_6 + LISTEN_6 + MAPPED_6 + LOCAL_6)
    assert read_ports(str(host.proc), [30000]) == (
        PortUse(30000, "127.0.0.1", "LISTEN", 34567, (), 1000, None),
        PortUse(30000, "127.0.0.1", "TIME_WAIT", 0, (), 0, "127.0.0.1:50000"),
        PortUse(30000, "10.0.0.10", "ESTABLISHED", 45678, (), 1001, "10.0.0.11:443"),
        PortUse(30000, "::", "LISTEN", 56789, (), 0, None),
        PortUse(30000, "127.0.0.1", "CLOSE_WAIT", 56790, (), 0, "127.0.0.1:50000"),
        PortUse(30000, "::1", "ESTABLISHED", 56791, (), 0, "[::1]:50001"),
    )


def test_only_the_ports_that_were_asked_for(host: FakeHost) -> None:
    write_tables(host, HEADER + LISTEN + TIME_WAIT)
    assert read_ports(str(host.proc), [50000, 443]) == ()  # peers' ports are not ours
    assert read_ports(str(host.proc), []) == ()


def test_owners_by_their_socket(host: FakeHost) -> None:
    write_tables(host, HEADER + LISTEN + ESTABLISHED)
    host.process(20, ["server"], fds={3: "socket:[34567]", 4: "socket:[99]", 5: "/dev/null"})
    host.process(21, ["child of server"], fds={3: "socket:[34567]"})
    uses = read_ports(str(host.proc), [30000])
    assert uses is not None
    assert [use.pids for use in uses] == [(20, 21), ()]


@pytest.mark.parametrize(
    "table",
    [
        None,
        b"",
        b"garbage\n",
        HEADER + b"garbage\n",
        HEADER + LISTEN[:40] + b"\n",
        HEADER + LISTEN + LISTEN[:30],
        HEADER + LISTEN.replace(b"0A ", b"GG "),
    ],
)
def test_a_table_that_cannot_be_understood_is_unknown_and_not_free(host: FakeHost, table: bytes | None) -> None:
    write_tables(host, table)
    uses = read_ports(str(host.proc), [1])
    assert uses is None
    assert [(reason.code, reason.severity) for reason in judge_ports(uses, [1])] == [("ports_unknown", "required")]


def test_a_host_without_ipv6_has_no_second_table(host: FakeHost) -> None:
    write_tables(host, HEADER)
    assert read_ports(str(host.proc), [30000]) == ()
    (host.proc / "net" / "tcp6").mkdir()  # there, but unreadable
    assert read_ports(str(host.proc), [30000]) is None


def test_a_state_that_is_not_known_is_told_by_its_number() -> None:
    uses = parse_table(HEADER + LISTEN.replace(b" 0A ", b" 2F "), {30000})
    assert uses is not None
    assert [use.state for use in uses] == ["state 47"]


def test_our_own_listener_on_the_real_proc() -> None:
    with socket.socket(socket.AF_INET) as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        server.listen()
        uses = read_ports("/proc", [port])
    assert uses is not None
    listening = [use for use in uses if use.state == "LISTEN"]
    assert [(use.address, use.uid) for use in listening] == [("127.0.0.1", os.getuid())]
    assert os.getpid() in listening[0].pids


# --- judging ---


def test_nothing_and_time_wait_are_free() -> None:
    assert judge_ports((), [30000]) == ()
    assert judge_ports((PortUse(30000, "127.0.0.1", "TIME_WAIT", 0),), [30000]) == ()


def test_a_listener_is_named_with_its_program() -> None:
    uses = (PortUse(30000, "0.0.0.0", "LISTEN", 5, (20,), 1000), PortUse(30000, "::", "LISTEN", 6, (20,), 1000))
    owner = process_of(20, "/opt/venv/bin/python3", "-m", "sglang.launch_server", "--api-key", "sk-secret")
    (reason,) = judge_ports(uses, [30000], {20: owner})
    assert (reason.code, reason.severity, reason.subject) == ("port_busy", "required", "port 30000")
    assert reason.message == (
        "TCP port 30000 is busy: pid 20 (/opt/venv/bin/python3 -m sglang.launch_server) listens on 0.0.0.0, ::"
    )


def test_a_listener_that_cannot_be_seen_is_busy_all_the_same() -> None:
    (reason,) = judge_ports((PortUse(30000, "0.0.0.0", "LISTEN", 5, (), 1000),), [30000])
    assert reason.code == "port_busy"
    assert "can't be seen from here (uid 1000)" in reason.message


@pytest.mark.parametrize("state", ["ESTABLISHED", "CLOSE_WAIT", "FIN_WAIT2", "SYN_SENT", "state 47"])
def test_a_connection_on_the_port_is_told_but_does_not_forbid(state: str) -> None:
    uses = (PortUse(30235, "10.0.0.10", state, 5, (33,), 1000, "10.0.0.11:443"),)
    (reason,) = judge_ports(uses, [30235], {33: process_of(33, "/usr/bin/curl", "-H", "Authorization: x")})
    assert (reason.code, reason.severity) == ("port_in_use_by_connection", "advisory")
    assert reason.message == (
        f"local TCP port 30235 is used by a connection of pid 33 (/usr/bin/curl) ({state}, peer 10.0.0.11:443)"
    )


def test_each_port_is_judged_on_its_own_and_once() -> None:
    uses = (
        PortUse(1, "::", "LISTEN", 5, (7, 8, 9, 10)),
        PortUse(1, "::1", "ESTABLISHED", 6, (7,), 0, "[::1]:9"),
        PortUse(2, "::", "TIME_WAIT", 0),
        PortUse(3, "::", "ESTABLISHED", 0, (), 0, "[::2]:9"),
        PortUse(3, "::", "ESTABLISHED", 0, (), 0, "[::1]:9"),
    )
    reasons = judge_ports(uses, [1, 2, 3, 1])
    assert [(reason.code, reason.subject) for reason in reasons] == [
        ("port_busy", "port 1"),
        ("port_in_use_by_connection", "port 1"),
        ("port_in_use_by_connection", "port 3"),
    ]
    assert "pid 7 and pid 8 and pid 9 and 1 more" in reasons[0].message
    assert "2 connections (ESTABLISHED, peer [::1]:9)" in reasons[2].message


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (("python3", "-u", "-m", "http.server", "--bind", "x"), "python3 -m http.server"),
        (("python3", "/srv/app.py", "secret"), "python3 /srv/app.py"),
        (("python3", "/opt/venv/bin/sglang", "serve", "--api-key", "x"), "python3 /opt/venv/bin/sglang serve"),
        (("python3", "-c", "key='secret'"), "python3 -c"),
        (("python3",), "python3"),
        (("nginx: master process /usr/sbin/nginx",), "nginx: master process /usr/sbin/nginx"),
        (("mysqld", "--password=secret"), "mysqld"),
        (("a\x1b[31m\nb",), "a?[31m?b"),
        (("x" * 200,), "x" * 80),
        ((), "[comm]"),
        (("",), "[comm]"),
    ],
)
def test_a_program_is_named_without_its_arguments(argv: tuple[str, ...], shown: str) -> None:
    assert program_of(process_of(1, *argv, comm="comm")) == shown


@given(
    data=st.one_of(st.binary(), st.binary().map(lambda tail: HEADER + LISTEN + tail)),
    ports=st.sets(st.integers(0, 65535)),
)
def test_no_bytes_make_the_parser_raise(data: bytes, ports: set[int]) -> None:
    uses = parse_table(data, ports)
    assert uses is None or {use.port for use in uses} <= ports
    judge_ports(uses, sorted(ports))


@given(cut=st.integers(0, len(HEADER + LISTEN + ESTABLISHED)))
def test_no_cut_of_a_table_turns_a_listener_into_a_free_port(cut: int) -> None:
    """A table without its last rows can't be told from a shorter one, but half a row may not pass as none."""
    data = (HEADER + LISTEN + ESTABLISHED)[:cut]
    uses = parse_table(data, {30000})
    whole = {
        len(HEADER): [],
        len(HEADER + LISTEN): ["LISTEN"],
        len(HEADER + LISTEN + ESTABLISHED): ["LISTEN", "ESTABLISHED"],
    }
    assert (None if uses is None else [use.state for use in uses]) == whole.get(cut)
