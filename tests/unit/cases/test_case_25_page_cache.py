# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 25: 81 GB of page cache, and MemAvailable the same before and after drop_caches: apart, and not used."""

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


CACHE_KB = 81 * 10**9 // 1024
TOTAL_KB = 119 * GIB_KB
AVAILABLE_KB = 108 * GIB_KB


def recorded(cached_kb: int, free_kb: int) -> bytes:
    return meminfo(
        MemTotal=TOTAL_KB,
        MemFree=free_kb,
        MemAvailable=AVAILABLE_KB,
        Buffers=0,
        Cached=cached_kb,
        SReclaimable=0,
        Shmem=0,
        SwapTotal=0,
        SwapFree=0,
    )


def test_the_cache_is_told_apart(look: Look) -> None:
    result = look(recorded(CACHE_KB, free_kb=AVAILABLE_KB - CACHE_KB))
    assert result["meminfo"]["cached_mib"] == CACHE_KB // 1024
    assert result["available_mib"] == AVAILABLE_KB // 1024


def test_dropping_the_cache_changes_nothing_but_where_it_stands(look: Look) -> None:
    before = look(recorded(CACHE_KB, free_kb=AVAILABLE_KB - CACHE_KB))
    after = look(recorded(0, free_kb=AVAILABLE_KB))
    assert before["available_mib"] == after["available_mib"]
    used = [result["free_g"].splitlines()[1].split()[2] for result in (before, after)]
    assert used == ["11", "11"]


def test_cache_in_a_limited_cgroup_is_not_used_either(host: FakeHost, look: Look) -> None:
    limit = 100 * 1024**3
    cache = 81 * 10**9
    stat = f"anon {10**9}\nfile {cache}\nactive_file {cache // 2}\ninactive_file {cache // 2}"
    host.cgroup("/", memory__max=limit, memory__current=10**9 + cache, memory__stat=stat)
    result = look(recorded(CACHE_KB, free_kb=AVAILABLE_KB - CACHE_KB))
    assert result["cgroup"]["headroom_mib"] == (limit - 10**9) // 1024**2
    assert result["available_mib"] == result["cgroup"]["headroom_mib"]
