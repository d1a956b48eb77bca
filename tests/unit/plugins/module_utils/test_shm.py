# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.model import ShmFile, ShmReading
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.shm import creator_pid, read_shm
from ansible_collections.cleanslate.sglang.tests.unit.fake_host import OWN_PID, FakeHost, maps_line

MQ = "sgl_shm_mq_777_5f3a"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    return FakeHost(tmp_path, monkeypatch)


def read(host: FakeHost) -> ShmReading:
    return read_shm(str(host.shm), str(host.proc))


def only_file(host: FakeHost) -> ShmFile:
    files = read(host).files
    assert files is not None and len(files) == 1
    return files[0]


@pytest.mark.parametrize(
    ("name", "pid"),
    [
        ("sgl_shm_mm_12_ab", 12),
        ("sgl_shm_mq_123456_ab", 123456),
        ("sgl_shm_nodecheck_9_x", 9),
        ("sgl_shm_sync_9_x", 9),
        ("multi_tokenizer_args_4711", 4711),
        ("sem.loky-4711-qx3", 4711),
        ("sgl_shm_mq_12", None),  # no random part: not what SGLang writes
        ("sgl_shm_other_12_ab", None),
        ("my_sgl_shm_mq_12_ab", None),
        ("multi_tokenizer_args_4711_x", None),
        ("multi_tokenizer_args_", None),
        ("sem.mp-4711-x", None),
        ("psm_4711ab", None),
        ("sglang_loads_0123456789ab_01234567.shm", None),
        ("nccl-AbCdEf", None),
        ("sgl_shm_mq_" + "9" * 5000 + "_x", None),
    ],
)
def test_the_creator_by_the_name(name: str, pid: int | None) -> None:
    assert creator_pid(name) == pid


def test_a_file_of_a_dead_creator(host: FakeHost) -> None:
    path = host.shm_file(MQ, size=3 * 1024 * 1024, mtime=1_700_000_000)
    file = only_file(host)
    status = path.stat()
    assert (file.name, file.uid, file.mtime) == (MQ, status.st_uid, 1_700_000_000)
    assert (file.device, file.inode) == (status.st_dev, status.st_ino)
    assert file.size_mib == pytest.approx(3, abs=0.1)
    assert (file.creator_pid, file.creator_alive) == (777, False)
    assert (file.mapped_by, file.opened_by) == ((), ())
    assert read(host).scan_complete is True


def test_a_file_of_a_living_creator(host: FakeHost) -> None:
    host.shm_file(MQ)
    host.process(777, ["sglang::scheduler_TP0"])
    assert only_file(host).creator_alive is True


@pytest.mark.parametrize(("threads", "alive"), [(1, False), (2, True)])
def test_a_zombie_is_dead_unless_its_threads_live(host: FakeHost, threads: int, alive: bool) -> None:
    host.shm_file(MQ)
    (host.process(777, [], state="Z", threads=threads) / "task").mkdir()
    assert only_file(host).creator_alive is alive


@pytest.mark.parametrize(
    ("nspid", "alive"),
    [
        ("5000\t777", True),
        ("5000\t20\t777", True),
        ("5000\t777\t9", False),
        ("5000", False),
        ("", False),
        ("5000\tx", False),
    ],
)
def test_a_creator_in_a_container_is_found_by_the_pid_that_it_has_there(
    host: FakeHost, nspid: str, alive: bool
) -> None:
    host.shm_file(MQ)
    host.process(5000, ["sglang::scheduler_TP0"], status={"NSpid": nspid})
    assert only_file(host).creator_alive is alive


def test_a_process_whose_status_cannot_be_read_may_be_the_creator(host: FakeHost) -> None:
    host.shm_file(MQ)
    status = host.process(5000, ["a"]) / "status"
    status.unlink()
    status.mkdir()  # reading it is an error, for root as well
    assert_not_proved(host, "pid 5000")


def test_users_are_found_by_inode_under_any_name(host: FakeHost) -> None:
    path = host.shm_file(MQ)
    host.process(10, ["a"], maps=maps_line(path))
    host.process(11, ["b"], maps=maps_line(path, shown="/run/elsewhere/other-name"))
    host.process(12, ["c"], fds={3: str(path)})
    assert (only_file(host).mapped_by, only_file(host).opened_by) == ((10, 11), (12,))


def test_the_name_alone_makes_nobody_a_user(host: FakeHost, tmp_path: Path) -> None:
    path = host.shm_file(MQ)
    namesake = tmp_path / "elsewhere" / MQ
    namesake.parent.mkdir()
    namesake.write_bytes(b"")
    host.process(10, ["a"], maps=maps_line(path, inode=path.stat().st_ino + 100_000))
    host.process(11, ["b"], maps=b"7f00-7f01 rw-s 00000000 ff:ff 1 " + str(path).encode() + b"\n")
    host.process(12, ["c"], fds={3: str(namesake), 4: "socket:[55]", 5: "/dev/null", 6: "anon_inode:[eventpoll]"})
    assert (only_file(host).mapped_by, only_file(host).opened_by) == ((), ())
    assert read(host).deleted_mapped == ()


def test_threads_of_a_zombie_leader_still_use_the_file(host: FakeHost) -> None:
    path = host.shm_file(MQ)
    base = host.process(10, [], state="Z", threads=2)
    task = base / "task" / "11"
    (task / "fd").mkdir(parents=True)
    (task / "fd" / "3").symlink_to(path)
    (task / "maps").write_bytes(maps_line(path))
    assert (only_file(host).mapped_by, only_file(host).opened_by) == ((10,), (10,))


def test_a_file_that_is_deleted_but_mapped_is_told(host: FakeHost) -> None:
    path = host.shm_file("other")
    line = maps_line(path, shown="/dev/shm/sgl shm (deleted)", inode=path.stat().st_ino + 100_000)
    host.process(10, ["a"], maps=line)
    assert read(host).deleted_mapped == (("/dev/shm/sgl shm", 10),)


def test_directories_are_read_one_level_deep(host: FakeHost) -> None:
    host.shm_file("pool/a")
    (host.shm / "pool" / "deeper").mkdir()
    (host.shm / "pool" / "deeper" / "b").write_bytes(b"")
    reading = read(host)
    assert reading.files is not None
    assert [file.name for file in reading.files] == ["pool/a"]


def test_symbolic_links_are_not_followed(host: FakeHost, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"")
    (host.shm / MQ).symlink_to(outside / "secret")
    (host.shm / "directory").symlink_to(outside)
    assert read(host).files == ()
    link = tmp_path / "link"
    link.symlink_to(host.shm)
    reading = read_shm(str(link), str(host.proc))
    assert (reading.files, reading.free_mib, reading.scan_complete) == (None, None, False)
    assert reading.problems


def test_room_comes_from_the_file_system(host: FakeHost) -> None:
    room = os.statvfs(host.shm)
    reading = read(host)
    assert reading.total_mib == room.f_blocks * room.f_frsize // 2**20
    assert reading.free_mib is not None
    assert 0 <= reading.free_mib <= reading.total_mib


def test_a_missing_directory_is_unknown_and_not_empty(tmp_path: Path, host: FakeHost) -> None:
    reading = read_shm(str(tmp_path / "none"), str(host.proc))
    assert (reading.total_mib, reading.free_mib, reading.free_inodes, reading.files) == (None, None, None, None)
    assert reading.scan_complete is False
    assert "No such file" in reading.problems[0].message


# --- when the scan can't prove that nobody uses a file ---


def assert_not_proved(host: FakeHost, words: str) -> None:
    reading = read(host)
    assert reading.scan_complete is False
    assert reading.files is not None
    assert [file.creator_alive for file in reading.files] == [None]
    assert any(words in problem.message for problem in reading.problems)


def test_an_unreadable_process(host: FakeHost) -> None:
    host.shm_file(MQ)
    maps = host.process(10, ["a"]) / "maps"
    maps.unlink()
    maps.mkdir()  # reading it is an error, for root as well
    assert_not_proved(host, "pid 10")


@pytest.mark.skipif(os.geteuid() != 0, reason="to others than root an unreadable init says nothing")
def test_an_init_that_not_even_root_can_look_into_is_no_user(host: FakeHost) -> None:
    host.shm_file(MQ)
    maps = host.proc / "1" / "maps"
    maps.unlink()
    maps.mkdir()
    reading = read(host)
    assert reading.scan_complete is True
    assert any("pid 1" in problem.message for problem in reading.problems)


def test_a_process_that_ends_during_the_scan_hides_nothing(host: FakeHost) -> None:
    host.shm_file(MQ)
    base = host.process(10, ["a"])
    (base / "maps").unlink()
    (base / "fd").rmdir()
    assert read(host).scan_complete is True


def test_a_proc_of_another_namespace(host: FakeHost) -> None:
    host.shm_file(MQ)
    (host.proc / "self").unlink()
    (host.proc / "self").symlink_to("1")
    assert_not_proved(host, "PID namespace")


def test_hidden_processes(host: FakeHost) -> None:
    host.shm_file(MQ)
    (host.proc / "1").rename(host.proc / "hidden")
    assert_not_proved(host, "hidepid")


def test_shared_memory_of_the_host_in_a_container(host: FakeHost) -> None:
    host.shm_file(MQ)
    namespaces = host.proc / str(OWN_PID) / "ns"
    namespaces.mkdir()
    (namespaces / "ipc").symlink_to("ipc:[4026531839]")
    (namespaces / "pid").symlink_to("pid:[4026531836]")
    assert read(host).scan_complete is True  # this is the host itself
    (namespaces / "pid").unlink()
    (namespaces / "pid").symlink_to("pid:[4026533001]")
    assert_not_proved(host, "shared with the host")


def test_an_unlistable_proc(host: FakeHost, tmp_path: Path) -> None:
    host.shm_file(MQ)
    reading = read_shm(str(host.shm), str(tmp_path / "noproc"))
    assert reading.scan_complete is False
    assert reading.files is not None and reading.files[0].creator_alive is None


def test_users_are_seen_even_where_the_scan_is_incomplete(host: FakeHost) -> None:
    path = host.shm_file(MQ)
    (host.proc / "self").unlink()
    host.process(10, ["a"], maps=maps_line(path))
    assert only_file(host).mapped_by == (10,)


# --- the real thing ---


def test_our_own_mapping_on_the_real_proc() -> None:
    name = f"sgl_shm_mq_{os.getpid()}_test"
    path = Path("/dev/shm") / name
    with open(path, "w+b") as stream:
        try:
            stream.truncate(4096)
            reading = read_shm()
            assert reading.files is not None
            mine = next(file for file in reading.files if file.name == name)
        finally:
            path.unlink()
    assert os.getpid() in mine.opened_by
    assert (mine.creator_pid, mine.creator_alive) == (os.getpid(), True)


# --- no bytes make the reader raise ---


@settings(max_examples=100)
@given(
    name=st.binary(min_size=1, max_size=60).filter(lambda name: not set(name) & {0, 47} and name not in (b".", b"..")),
    maps=st.binary(max_size=200),
    stat=st.binary(max_size=80),
)
def test_no_names_and_no_maps_make_the_reader_raise(name: bytes, maps: bytes, stat: bytes) -> None:
    with tempfile.TemporaryDirectory() as root:
        base = os.path.join(root, "proc", "7")
        os.makedirs(os.path.join(base, "fd"))
        shm = os.path.join(root, "shm")
        os.mkdir(shm)
        path = os.path.join(os.fsencode(shm), name)
        with open(path, "wb"):
            pass
        Path(base, "maps").write_bytes(maps)
        Path(base, "stat").write_bytes(stat)
        reading = read_shm(shm, os.path.join(root, "proc"))
        assert reading.files is not None
        assert [os.fsencode(file.name) for file in reading.files] == [name]
        device = os.stat(path).st_dev
        real = f"0-1 rw-s 0 {os.major(device):02x}:{os.minor(device):02x} ".encode()
        Path(base, "maps").write_bytes(real + maps + b"\n" + real + b"12 " + maps)
        read_shm(shm, os.path.join(root, "proc"))
