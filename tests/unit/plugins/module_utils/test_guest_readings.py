# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container's shared memory, ports and memory limit, read from its node."""

from __future__ import annotations

import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.model import CgroupLimit, ShmReading
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.memory import read_guest_limit
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.ports import read_ports
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.shm import read_shm
from ansible_collections.cleanslate.sglang.tests.unit.fake_host import (
    HYBRID_MOUNT,
    OWN_PID,
    V1_CPU_MOUNT,
    V1_MEMORY_MOUNT,
    V2_MOUNT,
    FakeHost,
    maps_line,
)

VMID = "129"
MQ = "sgl_shm_mq_777_5f3a"
MIB = 1024 * 1024
HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LISTEN = "   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 34567 1 0\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    return FakeHost(tmp_path, monkeypatch)


# --- shared memory ---


def read(host: FakeHost, outsiders: t.Collection[int] = ()) -> ShmReading:
    """Read as a container's: the directory is opened by somebody else, the path is only its name."""

    def opener() -> int:
        return os.open(host.shm, os.O_RDONLY | os.O_DIRECTORY)

    return read_shm("/dev/shm", str(host.proc), opener, frozenset(outsiders))


def alive(host: FakeHost, outsiders: t.Collection[int] = ()) -> bool | None:
    (file,) = read(host, outsiders).files or ()
    assert (file.name, file.creator_pid) == (MQ, 777)
    return file.creator_alive


def test_a_creator_is_alive_by_the_pid_that_it_has_inside(host: FakeHost) -> None:
    host.shm_file(MQ)
    assert alive(host) is False
    host.process(777, ["a stranger on the node"], status={"NSpid": "777"})
    assert alive(host) is False
    host.process(5000, ["sglang::scheduler"], status={"NSpid": "5000\t777"})
    assert alive(host) is True


def test_a_creator_outside_of_the_pid_namespace_is_alive_by_ours(host: FakeHost) -> None:
    host.shm_file(MQ)
    host.process(777, ["sglang::scheduler"], status={"NSpid": "777"})
    assert (alive(host), alive(host, {777}), alive(host, {778})) == (False, True, False)
    assert read(host, {777}).scan_complete


def test_an_outsider_that_has_ended_is_dead(host: FakeHost) -> None:
    host.shm_file(MQ)
    assert alive(host, {777}) is False


def test_a_creator_is_not_known_where_not_everybody_can_be_seen(host: FakeHost) -> None:
    host.shm_file(MQ)
    (host.process(20, ["x"]) / "maps").unlink()
    (host.proc / "20" / "maps").mkdir()
    assert not read(host).scan_complete
    assert alive(host) is None


def test_users_are_named_by_our_pids(host: FakeHost) -> None:
    path = host.shm_file(MQ)
    host.process(5000, ["x"], status={"NSpid": "5000\t7"}, maps=maps_line(path, f"/dev/shm/{MQ}"))
    host.process(5001, ["x"], status={"NSpid": "5001\t8"}, fds={3: str(path)})
    (file,) = read(host).files or ()
    assert (file.mapped_by, file.opened_by) == ((5000,), (5001,))


def test_a_directory_that_cannot_be_had_is_not_an_empty_one(host: FakeHost) -> None:
    def gone() -> int:
        raise FileNotFoundError(2, "no living process of container 129 leads to its files", "/dev/shm")

    reading = read_shm("/dev/shm", str(host.proc), gone, frozenset())
    assert (reading.free_mib, reading.files, reading.scan_complete) == (None, None, False)
    assert "no living process of container 129" in reading.problems[0].message


# --- ports ---


def test_ports_of_the_containers_network(host: FakeHost) -> None:
    own, theirs = host.proc / "net", host.proc / "50" / "net"
    host.process(50, ["/sbin/init"])
    host.process(5000, ["server"], fds={3: "socket:[34567]"})
    theirs.mkdir()
    (own / "tcp").write_text(HEADER)
    (theirs / "tcp").write_text(HEADER + LISTEN)
    uses = read_ports(str(host.proc), [30000], network_of=50)
    assert uses is not None
    assert [(use.port, use.state, use.pids) for use in uses] == [(30000, "LISTEN", (5000,))]
    assert read_ports(str(host.proc), [30000]) == ()
    (own / "tcp").write_text(HEADER + LISTEN)
    (theirs / "tcp").write_text(HEADER)
    assert read_ports(str(host.proc), [30000], network_of=50) == ()


def test_ports_of_a_network_that_is_gone_are_not_free(host: FakeHost) -> None:
    (host.proc / "net" / "tcp").write_text(HEADER)
    assert read_ports(str(host.proc), [30000], network_of=50) is None


# --- the memory limit ---


def limit(host: FakeHost) -> CgroupLimit:
    return read_guest_limit(VMID, str(host.proc), str(host.sys))


def stat(active: int = 0, inactive: int = 0, prefix: str = "") -> str:
    return f"{prefix}active_file {active}\n{prefix}inactive_file {inactive}"


def test_its_own_limit_and_not_that_of_whoever_asks(host: FakeHost) -> None:
    host.cgroups(b"0::/user.slice\n", V2_MOUNT)
    host.cgroup("user.slice", memory__max=10 * MIB, memory__current=0, memory__stat=stat())
    host.cgroup("lxc")
    host.cgroup("lxc/130", memory__max=20 * MIB, memory__current=0, memory__stat=stat())
    host.cgroup(
        "lxc/129", memory__max=1000 * MIB, memory__high="max", memory__current=900 * MIB, memory__stat=stat(50 * MIB)
    )
    host.cgroup("lxc/129/ns", memory__max=5 * MIB, memory__current=0, memory__stat=stat())
    assert limit(host) == CgroupLimit(2, "/lxc/129", 1000, 900, 150, readable=True)


@pytest.mark.parametrize("name", ["lxc/129", "lxc.payload/129", "lxc.payload.129"])
def test_by_each_of_its_names(host: FakeHost, name: str) -> None:
    host.cgroup(name, memory__max=100 * MIB, memory__current=0, memory__stat=stat())
    assert limit(host) == CgroupLimit(2, f"/{name}", 100, 0, 100, readable=True)


def test_a_limit_above_it_can_bind_first(host: FakeHost) -> None:
    host.cgroup("lxc", memory__max=300 * MIB, memory__current=290 * MIB, memory__stat=stat())
    host.cgroup("lxc/129", memory__max=100 * MIB, memory__current=10 * MIB, memory__stat=stat())
    found = limit(host)
    assert (found.path, found.headroom_mib) == ("/lxc", 10)


def test_no_limit_is_known_to_be_none(host: FakeHost) -> None:
    host.cgroup("lxc/129", memory__max="max", memory__current=7 * MIB)
    assert limit(host) == CgroupLimit(2, "/lxc/129", None, 7, None, readable=True)


def test_v1(host: FakeHost) -> None:
    host.cgroups(b"4:memory:/\n", V1_CPU_MOUNT + V1_MEMORY_MOUNT)
    host.cgroup("cpu,cpuacct/lxc/129")
    host.cgroup(
        "memory/lxc/129",
        memory__limit_in_bytes=1000 * MIB,
        memory__usage_in_bytes=900 * MIB,
        memory__stat=stat(50 * MIB, 0, "total_"),
    )
    assert limit(host) == CgroupLimit(1, "/lxc/129", 1000, 900, 150, readable=True)


def test_a_host_with_both_where_v1_has_the_memory(host: FakeHost) -> None:
    host.cgroups(b"4:memory:/\n0::/\n", HYBRID_MOUNT + V1_MEMORY_MOUNT)
    host.cgroup("unified/lxc/129")
    host.cgroup(
        "memory/lxc/129", memory__limit_in_bytes=64 * MIB, memory__usage_in_bytes=0, memory__stat=stat(0, 0, "total_")
    )
    assert limit(host) == CgroupLimit(1, "/lxc/129", 64, 0, 64, readable=True)


def test_a_host_with_both_where_v2_has_it(host: FakeHost) -> None:
    host.cgroups(b"0::/\n", HYBRID_MOUNT + V1_CPU_MOUNT)
    host.cgroup("unified/lxc/129", memory__max=64 * MIB, memory__current=0, memory__stat=stat())
    assert limit(host) == CgroupLimit(2, "/lxc/129", 64, 0, 64, readable=True)


def test_what_cannot_be_found_or_read_is_not_no_limit(host: FakeHost) -> None:
    unknown = CgroupLimit(None, None, None, None, None, readable=False)
    assert limit(host) == unknown
    host.cgroup("lxc/129", memory__max="many", memory__current=0)
    assert limit(host).readable is False
    (host.proc / str(OWN_PID) / "mountinfo").unlink()
    assert limit(host) == unknown
