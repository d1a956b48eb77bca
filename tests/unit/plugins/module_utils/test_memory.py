# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.model import CgroupLimit, HostMemory, Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.memory import (
    available_mib,
    free_table,
    parse_meminfo,
    parse_status_memory,
    read_cgroup_limit,
    read_meminfo,
    read_pinned,
)
from ansible_collections.cleanslate.sglang.tests.unit.fake_host import (
    HYBRID_MOUNT,
    V1_CPU_MOUNT,
    V1_MEMORY_MOUNT,
    V2_MOUNT,
    FakeHost,
    meminfo,
)

GIB = 1024 * 1024 * 1024
NO_LIMIT = CgroupLimit(2, "/", None, None, None, readable=True)

# A whole file of a kernel 6.18, and what free of procps 4.0.2 printed at the same time.
RECORDED = b"""\
MemTotal:       24684096 kB
MemFree:        19628000 kB
MemAvailable:   23682600 kB
Buffers:          233408 kB
Cached:          3853200 kB
SwapCached:            0 kB
Active:           955528 kB
Inactive:        3664368 kB
Active(anon):       1600 kB
Inactive(anon):   540708 kB
Active(file):     953928 kB
Inactive(file):  3123660 kB
Unevictable:       18616 kB
Mlocked:           17676 kB
SwapTotal:             0 kB
SwapFree:              0 kB
Shmem:              8788 kB
KReclaimable:     283208 kB
Slab:             321912 kB
SReclaimable:     283208 kB
VmallocTotal:   34359738367 kB
HugePages_Total:       0
HugePages_Free:        0
HugePages_Rsvd:        0
HugePages_Surp:        0
Hugepagesize:       2048 kB
Hugetlb:               0 kB
DirectMap1G:    25165824 kB
"""
RECORDED_FREE = """\
               total        used        free      shared  buff/cache   available
Mem:              23           0          18           0           4          22
Swap:              0           0           0"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    return FakeHost(tmp_path, monkeypatch)


def test_a_recorded_meminfo_in_mib() -> None:
    assert parse_meminfo(RECORDED) == HostMemory(
        mem_total_mib=24105,
        mem_available_mib=23127,
        mem_free_mib=19167,
        buffers_mib=227,
        cached_mib=3762,
        shmem_mib=8,
        sreclaimable_mib=276,
        unevictable_mib=18,
        mlocked_mib=17,
        swap_total_mib=0,
        swap_free_mib=0,
        hugepages_total=0,
        hugepages_free=0,
        hugepage_size_kib=2048,
        hugepages_mib=0,
    )


def test_free_table_prints_what_free_printed() -> None:
    assert free_table(parse_meminfo(RECORDED)) == RECORDED_FREE


def test_what_is_missing_is_unknown_and_not_zero(tmp_path: Path) -> None:
    nothing = parse_meminfo(b"")
    assert set(dataclasses.astuple(nothing)) == {None}
    assert read_meminfo(str(tmp_path)) == nothing
    assert available_mib(nothing, NO_LIMIT) is None
    rows = free_table(nothing).splitlines()[1:]
    assert [row.split()[1:] for row in rows] == [["-"] * 6, ["-"] * 3]


@pytest.mark.parametrize(
    "line",
    [
        b"MemAvailable:   18446744073709551612 kB",  # below zero, printed as unsigned
        b"MemAvailable:   -12 kB",
        b"MemAvailable:   12",
        b"MemAvailable:   12 MB",
        b"MemAvailable:   0x12 kB",
        b"MemAvailable:   12 kB trailing",
        b"MemAvailable 12 kB",
        b"memavailable:   12 kB",
        b"MemAvailable:   \xb2 kB",
        b"MemAvailable:   " + b"9" * 5000 + b" kB",
    ],
)
def test_a_line_that_makes_no_sense_is_unknown_and_spoils_no_other(line: bytes) -> None:
    memory = parse_meminfo(b"MemTotal: 2048 kB\n" + line + b"\nMemFree: 1024 kB\n")
    assert (memory.mem_total_mib, memory.mem_available_mib, memory.mem_free_mib) == (2, None, 1)


def test_of_a_line_that_comes_twice_the_first_counts() -> None:
    assert parse_meminfo(b"MemAvailable: 1024 kB\nMemAvailable: 9999999 kB\n").mem_available_mib == 1


@pytest.mark.parametrize(
    ("counters", "expected_mib"),
    [
        ({"HugePages_Total": 512, "Hugepagesize": 2048}, 1024),
        ({"HugePages_Total": 512, "Hugepagesize": 2048, "Hugetlb": 5 * 1024 * 1024}, 5120),  # 1 GiB pages besides
        ({"HugePages_Total": 512}, None),
        ({"Hugepagesize": 2048}, None),
    ],
)
def test_reserved_hugepages(counters: dict[str, int], expected_mib: int | None) -> None:
    assert parse_meminfo(meminfo(**counters)).hugepages_mib == expected_mib


def test_a_container_whose_shared_exceeds_its_total() -> None:
    data = meminfo(MemTotal=524288, MemFree=400000, MemAvailable=450000, Shmem=978944, Buffers=0, Cached=50000)
    memory = parse_meminfo(data)
    assert (memory.mem_total_mib, memory.shmem_mib) == (512, 956)
    assert available_mib(memory, NO_LIMIT) == 439
    assert "956" not in free_table(memory)  # 956 MiB are 0 GiB
    assert "-" in free_table(memory)  # buff/cache, without SReclaimable


@pytest.mark.parametrize(
    ("counters", "expected_mib"),
    [
        ({"MemTotal": 1048576, "MemFree": 524288, "MemAvailable": 400000}, 390),
        ({"MemTotal": 1048576, "MemFree": 524288, "MemAvailable": 9000000}, 512),  # the host's figure: not believed
        ({"MemTotal": 1048576, "MemFree": 9000000, "MemAvailable": 9000000}, 1024),
        ({"MemTotal": 1048576, "MemAvailable": 9000000}, None),
        ({"MemFree": 524288, "MemAvailable": 400000}, None),
        ({"MemTotal": 1048576, "MemFree": 524288}, None),
    ],
)
def test_available_is_never_more_than_there_is(counters: dict[str, int], expected_mib: int | None) -> None:
    assert available_mib(parse_meminfo(meminfo(**counters)), NO_LIMIT) == expected_mib


def test_the_smaller_of_host_and_cgroup_is_available() -> None:
    memory = parse_meminfo(meminfo(MemTotal=4194304, MemFree=4194304, MemAvailable=3145728))
    assert available_mib(memory, CgroupLimit(2, "/a", 2048, 1024, 1024, readable=True)) == 1024
    assert available_mib(memory, CgroupLimit(2, "/a", 8192, 1024, 7168, readable=True)) == 3072


# --- cgroups ---


def limit_of(host: FakeHost) -> CgroupLimit:
    return read_cgroup_limit(str(host.proc), str(host.sys))


def test_v2_headroom_counts_file_pages_that_can_be_reclaimed(host: FakeHost) -> None:
    host.cgroups(b"0::/sys.slice/job.scope\n", V2_MOUNT)
    host.cgroup("/", memory__stat="anon 1")
    host.cgroup("/sys.slice", memory__max="max", memory__high="max", memory__current=GIB, memory__stat="anon 1")
    host.cgroup(
        "/sys.slice/job.scope",
        memory__max=8 * GIB,
        memory__high="max",
        memory__current=6 * GIB,
        memory__stat=f"anon {4 * GIB}\nfile {3 * GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\nunevictable 0",
    )
    assert limit_of(host) == CgroupLimit(2, "/sys.slice/job.scope", 8192, 6144, 3584, readable=True)


def test_v2_memory_high_binds_before_memory_max(host: FakeHost) -> None:
    host.cgroups(b"0::/a\n", V2_MOUNT)
    host.cgroup("/a", memory__max=8 * GIB, memory__high=5 * GIB, memory__current=GIB, memory__stat="anon 1")
    assert limit_of(host) == CgroupLimit(2, "/a", 5120, 1024, 4096, readable=True)


def test_a_wide_limit_above_that_is_nearly_used_up_binds_first(host: FakeHost) -> None:
    host.cgroups(b"0::/wide/narrow\n", V2_MOUNT)
    host.cgroup("/wide", memory__max=100 * GIB, memory__current=99 * GIB, memory__stat="anon 1")
    host.cgroup("/wide/narrow", memory__max=10 * GIB, memory__current=2 * GIB, memory__stat="anon 1")
    assert limit_of(host) == CgroupLimit(2, "/wide", 102400, 101376, 1024, readable=True)


def test_no_limit_tells_the_use_and_no_headroom(host: FakeHost) -> None:
    host.cgroups(b"0::/a\n", V2_MOUNT)
    host.cgroup("/a", memory__max="max", memory__high="max", memory__current=3 * GIB, memory__stat="anon 1")
    assert limit_of(host) == CgroupLimit(2, "/a", None, 3072, None, readable=True)


def test_inside_a_cgroup_namespace_our_path_is_the_root(host: FakeHost) -> None:
    host.cgroups(b"0::/\n", V2_MOUNT)
    host.cgroup("/", memory__max=4 * GIB, memory__high="max", memory__current=GIB, memory__stat="inactive_file 0")
    assert limit_of(host) == CgroupLimit(2, "/", 4096, 1024, 3072, readable=True)


def test_entered_from_outside_the_namespace_the_container_root_counts(host: FakeHost) -> None:
    host.cgroups(b"0::/../user.slice\n", V2_MOUNT)
    assert limit_of(host).readable is False
    host.cgroup("/", memory__max=4 * GIB, memory__current=GIB, memory__stat="inactive_file 0")
    assert limit_of(host) == CgroupLimit(2, "/", 4096, 1024, 3072, readable=True)


def test_v1_walks_the_memory_controller_only(host: FakeHost) -> None:
    host.cgroups(b"4:memory:/docker/abc\n3:cpu,cpuacct:/other\n0::/\n", V1_CPU_MOUNT + V1_MEMORY_MOUNT + HYBRID_MOUNT)
    unlimited = {"limit_in_bytes": 9223372036854771712, "usage_in_bytes": GIB}
    host.cgroup("/unified", memory__max=1, memory__current=1, memory__stat="anon 1")  # no controller of ours
    for path in ("/memory", "/memory/docker"):
        host.cgroup(path, memory__stat="cache 1", **{f"memory__{name}": size for name, size in unlimited.items()})
    host.cgroup(
        "/memory/docker/abc",
        memory__limit_in_bytes=4 * GIB,
        memory__usage_in_bytes=2 * GIB,
        memory__stat=f"active_file 0\ninactive_file 0\ntotal_active_file {GIB}\ntotal_inactive_file {GIB // 2}",
    )
    assert limit_of(host) == CgroupLimit(1, "/docker/abc", 4096, 2048, 3584, readable=True)


def test_v1_tells_a_limit_that_a_namespace_hides(host: FakeHost) -> None:
    host.cgroups(b"4:memory:/\n0::/\n", V1_MEMORY_MOUNT + HYBRID_MOUNT)
    host.cgroup(
        "/memory",
        memory__limit_in_bytes=9223372036854771712,
        memory__usage_in_bytes=GIB,
        memory__stat=f"hierarchical_memory_limit {2 * GIB}\ntotal_active_file 0\ntotal_inactive_file 0",
    )
    assert limit_of(host) == CgroupLimit(1, "/", 2048, 1024, 1024, readable=True)


def test_v1_mount_of_one_cgroup_as_docker_makes_it(host: FakeHost) -> None:
    mount = V1_MEMORY_MOUNT.replace(b" / /sys", b" /docker/abc /sys")
    host.cgroups(b"4:memory:/docker/abc/sub\n", mount)
    for path, limit in (("/memory", 3 * GIB), ("/memory/sub", 9 * GIB)):
        host.cgroup(path, memory__limit_in_bytes=limit, memory__usage_in_bytes=0, memory__stat="cache 0")
    assert limit_of(host) == CgroupLimit(1, "/", 3072, 0, 3072, readable=True)


def test_a_mount_point_with_blanks_in_its_name(host: FakeHost) -> None:
    host.cgroups(b"0::/\n", V2_MOUNT.replace(b"/sys/fs/cgroup", rb"/sys/fs/my\040cgroup"))
    directory = host.sys / "fs" / "my cgroup"
    directory.mkdir()
    for name, text in (("memory.max", str(GIB)), ("memory.current", "0"), ("memory.stat", "anon 0")):
        (directory / name).write_text(text)
    assert limit_of(host).limit_mib == 1024


@pytest.mark.parametrize("broken", ["memory.max", "memory.high", "memory.current", "memory.stat"])
def test_a_limit_that_cannot_be_read_is_not_no_limit(host: FakeHost, broken: str) -> None:
    host.cgroups(b"0::/a\n", V2_MOUNT)
    directory = host.cgroup("/a", memory__max=GIB, memory__high="max", memory__current=0, memory__stat="anon 0")
    assert limit_of(host).readable is True
    (directory / broken).unlink()
    (directory / broken).mkdir()  # reading it is an error, for root as well
    limit = limit_of(host)
    assert limit.readable is False
    if broken in ("memory.current", "memory.stat"):
        assert (limit.limit_mib, limit.headroom_mib) == (1024, None)


@pytest.mark.parametrize("text", ["", "many", "-1", "1 2", "0x10"])
def test_a_garbled_limit_is_not_no_limit(host: FakeHost, text: str) -> None:
    host.cgroups(b"0::/a\n", V2_MOUNT)
    host.cgroup("/a", memory__max=text, memory__current=0, memory__stat="anon 0")
    assert limit_of(host).readable is False


@pytest.mark.parametrize(
    ("membership", "mounts"),
    [
        (b"", V2_MOUNT),
        (b"garbage\n", V2_MOUNT),
        (b"0::/a\n", b""),
        (b"0::/not/there\n", V2_MOUNT),
        (b"4:memory:/a\n0::/a\n", V2_MOUNT),  # the controller is v1's, whose mount is hidden
        (b"0::/a\n", V2_MOUNT.replace(b" / /sys", b" /.. /sys")),
        (b"0::/a\0b\n", V2_MOUNT),
        (b"0::/a\n", V2_MOUNT.replace(b"/sys/fs/cgroup", b"/mnt/cgroup")),  # a recorded tree does not hold /mnt
    ],
)
def test_a_cgroup_that_cannot_be_found_is_not_known(host: FakeHost, membership: bytes, mounts: bytes) -> None:
    host.cgroups(membership, mounts)
    host.cgroup("/a", memory__max=GIB, memory__current=0, memory__stat="anon 0")
    limit = limit_of(host)
    assert (limit.readable, limit.limit_mib, limit.headroom_mib) == (False, None, None)


def test_a_kernel_without_a_memory_controller_has_no_limit(host: FakeHost) -> None:
    host.cgroups(b"3:cpu,cpuacct:/\n1:name=systemd:/\n", V1_CPU_MOUNT)
    assert limit_of(host) == CgroupLimit(None, None, None, None, None, readable=True)


def test_without_a_proc_nothing_is_known(tmp_path: Path) -> None:
    assert read_cgroup_limit(str(tmp_path), str(tmp_path)) == CgroupLimit(None, None, None, None, None, readable=False)


# --- pinned memory ---


def process_of(pid: int, title: str) -> Process:
    return Process(pid, 1, 1, pid, pid, "S", title[:15], (title,))


def test_pinned_memory_of_processes(host: FakeHost) -> None:
    host.process(7, ["a"], status={"RssShmem": "9819812 kB", "VmPin": "0 kB", "VmLck": "0 kB"})
    host.process(5, ["b"], status={"RssShmem": "1024 kB", "VmPin": "4096 kB", "VmLck": "2048 kB"})
    host.process(6, ["c"], status={"RssShmem": "lots"})
    gone = process_of(99, "d")
    pins = read_pinned([process_of(7, "a"), process_of(5, "b"), process_of(6, "c"), gone], str(host.proc))
    assert [(pin.pid, pin.title, pin.rss_shmem_mib, pin.vm_pin_mib, pin.vm_lck_mib) for pin in pins] == [
        (5, "b", 1, 4, 2),
        (6, "c", None, None, None),
        (7, "a", 9589, 0, 0),
    ]
    assert [pin.pinned_mib for pin in pins] == [4, None, 9589]


# --- no bytes make a parser raise ---

MEMINFO_LIKE = st.lists(
    st.one_of(
        st.binary(max_size=60),
        st.builds(
            lambda name, number, unit: f"{name}: {number}{unit}".encode(),
            st.sampled_from(["MemTotal", "MemFree", "MemAvailable", "Shmem", "HugePages_Total", "Hugepagesize"]),
            st.integers(-10, 10**30),
            st.sampled_from(["", " kB", "kB", " MB"]),
        ),
    )
).map(b"\n".join)


@given(data=MEMINFO_LIKE)
def test_no_meminfo_makes_the_parser_raise_or_invent_a_size(data: bytes) -> None:
    memory = parse_meminfo(data)
    assert all(value is None or 0 <= value < 10**13 for value in dataclasses.astuple(memory))
    assert len(free_table(memory).splitlines()) == 3
    available = available_mib(memory, NO_LIMIT)
    assert available is None or (memory.mem_total_mib is not None and 0 <= available <= memory.mem_total_mib)
    parse_status_memory(1, "x", data)


FIELDS = [field.name for field in dataclasses.fields(HostMemory)]


@given(data=MEMINFO_LIKE, dropped=st.sets(st.sampled_from(FIELDS)))
def test_knowing_less_never_makes_more_memory_available(data: bytes, dropped: set[str]) -> None:
    memory = parse_meminfo(data)
    less = dataclasses.replace(memory, **dict.fromkeys(dropped))
    before, after = available_mib(memory, NO_LIMIT), available_mib(less, NO_LIMIT)
    assert after is None or after == before


@settings(max_examples=150)
@given(
    membership=st.one_of(st.binary(max_size=80), st.sampled_from([b"0::/a/b\n", b"4:memory:/a\n", b"0::/\n"])),
    mounts=st.one_of(st.binary(max_size=120), st.sampled_from([V2_MOUNT, V1_MEMORY_MOUNT, V2_MOUNT + HYBRID_MOUNT])),
    text=st.binary(max_size=40),
)
def test_no_cgroup_files_make_the_reader_raise(membership: bytes, mounts: bytes, text: bytes) -> None:
    with tempfile.TemporaryDirectory() as root:
        own = os.path.join(root, "proc", "self")
        os.makedirs(own)
        for directory in ("a/b", "memory/a"):
            os.makedirs(os.path.join(root, "sys", "fs", "cgroup", directory))
            for name in ("max", "current", "stat", "limit_in_bytes", "usage_in_bytes"):
                Path(root, "sys", "fs", "cgroup", directory, f"memory.{name}").write_bytes(text)
        Path(own, "cgroup").write_bytes(membership)
        Path(own, "mountinfo").write_bytes(mounts)
        limit = read_cgroup_limit(os.path.join(root, "proc"), os.path.join(root, "sys"))
    if limit.headroom_mib is not None:
        assert limit.limit_mib is not None
        assert 0 <= limit.headroom_mib <= limit.limit_mib
