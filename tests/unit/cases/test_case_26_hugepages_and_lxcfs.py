# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 26: hugepages that eat MemAvailable while nobody uses them, and what lxcfs tells of a container."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.modules import memory_info
from ansible_collections.cleanslate.sglang.tests.unit.fake_host import FakeHost, meminfo, run_module

GIB_KB = 1024**2
Look = t.Callable[[bytes], t.Any]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    return FakeHost(tmp_path, monkeypatch)


@pytest.fixture
def look(host: FakeHost, capsys: pytest.CaptureFixture[str]) -> Look:
    def memory(data: bytes) -> t.Any:
        (host.proc / "meminfo").write_bytes(data)
        roots = {"proc_root": str(host.proc), "sys_root": str(host.sys), "shm_dir": str(host.shm)}
        return run_module(memory_info.main, roots, capsys)

    return memory


def test_reserved_hugepages_are_told_apart_and_not_available(look: Look) -> None:
    """7.05 GB were asked for; 16 GiB of RAM were there, 12 of them reserved as free hugepages."""
    result = look(
        meminfo(
            MemTotal=16 * GIB_KB,
            MemFree=int(1.5 * GIB_KB),
            MemAvailable=2_040_000_000 // 1024,
            Cached=GIB_KB,
            HugePages_Total=6144,
            HugePages_Free=6144,
            HugePages_Rsvd=0,
            Hugepagesize=2048,
            Hugetlb=12 * GIB_KB,
        )
    )
    memory = result["meminfo"]
    assert result["available_mib"] == 2_040_000_000 // 1024**2
    assert (memory["hugepages_total"], memory["hugepages_free"]) == (6144, 6144)
    assert memory["hugepages_mib"] == 12 * 1024
    assert result["available_mib"] * 1024**2 < 7_050_000_000 < memory["hugepages_mib"] * 1024**2


def test_available_memory_does_not_hide_that_hugepages_are_used_up(look: Look) -> None:
    counters = {"HugePages_Total": 6144, "HugePages_Free": 0, "Hugepagesize": 2048}
    result = look(meminfo(MemTotal=64 * GIB_KB, MemFree=40 * GIB_KB, MemAvailable=40 * GIB_KB, **counters))
    assert (result["available_mib"], result["meminfo"]["hugepages_free"]) == (40 * 1024, 0)


def test_shared_greater_than_the_total(look: Look) -> None:
    """lxcfs virtualises the total (512 MiB) and lets the host's Shmem (956 MiB) through."""
    data = meminfo(MemTotal=512 * 1024, MemFree=460 * 1024, MemAvailable=480 * 1024, Shmem=956 * 1024, Cached=20 * 1024)
    result = look(data + meminfo(Buffers=0, SReclaimable=0, SwapTotal=0, SwapFree=0))
    assert (result["meminfo"]["mem_total_mib"], result["meminfo"]["shmem_mib"]) == (512, 956)
    assert result["available_mib"] == 480
    assert result["free_g"].splitlines()[1].split() == ["Mem:"] + ["0"] * 6
    assert result["problems"] == []


def test_the_hosts_available_in_a_container_is_not_believed(look: Look) -> None:
    data = meminfo(MemTotal=2 * GIB_KB, MemFree=GIB_KB, MemAvailable=400 * GIB_KB)
    assert look(data)["available_mib"] == 1024


def test_file_pages_count_as_headroom_where_lxcfs_forgets_them(host: FakeHost, look: Look) -> None:
    """1024 MiB, of which dd left 500 in the cache: lxcfs said 510 used and no cache, so 514 available."""
    mib = 1024**2
    stat = f"anon {10 * mib}\nfile {500 * mib}\nactive_file 0\ninactive_file {500 * mib}"
    host.cgroup("/", memory__max=1024 * mib, memory__current=510 * mib, memory__stat=stat)
    data = meminfo(MemTotal=1024 * 1024, MemFree=514 * 1024, MemAvailable=514 * 1024, Cached=0)
    result = look(data)
    assert result["cgroup"]["headroom_mib"] == 1014
    assert result["available_mib"] == 514  # the smaller one: a container's own figure is never improved on
    modern = look(data.replace(f"{514 * 1024:>8}".encode(), f"{1014 * 1024:>8}".encode()))
    assert modern["available_mib"] == 1014


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 4096,
        b"MemTotal: kB\nMemAvailable: -1 kB\n",
        b"MemTotal:  524288 kB\nMemAvailable: 18446744073709551615 kB\nMemFree: 0 kB\n",
        bytes(range(256)) * 8,
    ],
)
def test_nonsense_is_unknown_and_never_a_size(look: Look, data: bytes) -> None:
    result = look(data)
    assert result["available_mib"] is None
    assert [problem["message"] for problem in result["problems"]] == ["MemAvailable is not told"]
