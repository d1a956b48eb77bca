# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 27: 852 segments fill /dev/shm; the next start would die of SIGBUS. Found before the start."""

from __future__ import annotations

import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.modules import memory_info
from ansible_collections.cleanslate.sglang.tests.unit.fake_host import FakeHost, maps_line, run_module

SEGMENTS = 852
SEGMENT_BYTES = 5 * 4096  # the real ones had 22 MiB each, 18 GiB in all
PAGE = 4096
TMPFS_PAGES = 18 * 1024**3 // PAGE


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    host = FakeHost(tmp_path, monkeypatch)
    for number in range(SEGMENTS):
        host.shm_file(f"sgl_shm_mm_{20000 + number // 8}_{number:08x}", size=SEGMENT_BYTES)
    return host


@pytest.fixture
def shm(host: FakeHost, capsys: pytest.CaptureFixture[str]) -> t.Callable[[], t.Any]:
    roots = {"proc_root": str(host.proc), "sys_root": str(host.sys), "shm_dir": str(host.shm)}
    return lambda: run_module(memory_info.main, roots, capsys)["shm"]


def fill(monkeypatch: pytest.MonkeyPatch, free_pages: int, free_inodes: int, inodes: int = 10**6) -> None:
    """Let the file system answer as a tmpfs of 18 GiB with this much room."""
    room = (TMPFS_PAGES, free_pages, free_pages, inodes, free_inodes, free_inodes)
    answer = os.statvfs_result((PAGE, PAGE, *room, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: answer)


def test_room_and_count_are_told(shm: t.Callable[[], t.Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, free_pages=1024, free_inodes=999_148)
    result = shm()
    assert (result["total_mib"], result["free_mib"], result["free_inodes"]) == (18 * 1024, 4, 999_148)
    assert (result["file_count"], len(result["files"]), result["files_left_out"]) == (SEGMENTS, SEGMENTS, 0)
    assert result["files_mib"] == pytest.approx(SEGMENTS * SEGMENT_BYTES / 2**20, rel=0.25)


def test_all_are_stale_when_their_creators_are_dead(shm: t.Callable[[], t.Any]) -> None:
    result = shm()
    assert result["stale_count"] == SEGMENTS
    assert result["stale_mib"] == result["files_mib"]


def test_those_of_a_living_server_are_not(host: FakeHost, shm: t.Callable[[], t.Any]) -> None:
    host.process(20000, ["python3", "-m", "sglang.launch_server"])  # created 8 of them
    host.process(30000, ["sglang::scheduler_TP0"], maps=maps_line(host.shm / "sgl_shm_mm_20001_00000008"))
    result = shm()
    assert result["stale_count"] == SEGMENTS - 9
    kept = {file["name"]: file["why"] for file in result["files"] if not file["stale"]}
    assert kept["sgl_shm_mm_20001_00000008"] == "in use by pid 30000"
    assert "creator's pid 20000 lives" in kept["sgl_shm_mm_20000_00000007"]


def test_none_is_stale_when_not_everybody_could_be_looked_at(host: FakeHost, shm: t.Callable[[], t.Any]) -> None:
    maps = host.process(30000, ["somebody"]) / "maps"
    maps.unlink()
    maps.mkdir()  # reading it is an error, for root as well
    result = shm()
    assert (result["scan_complete"], result["file_count"], result["stale_count"]) == (False, SEGMENTS, 0)


def test_no_room_for_names_is_told_though_there_is_room_for_bytes(
    host: FakeHost, shm: t.Callable[[], t.Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of empty nccl-* files take no bytes, but an inode each."""
    for number in range(300):
        host.shm_file(f"nccl-{number:06d}")
    fill(monkeypatch, free_pages=TMPFS_PAGES // 2, free_inodes=0)
    result = shm()
    assert (result["free_mib"], result["free_inodes"], result["file_count"]) == (9 * 1024, 0, SEGMENTS + 300)


def test_unlimited_inodes_are_not_zero(shm: t.Callable[[], t.Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, free_pages=1024, free_inodes=0, inodes=0)
    assert shm()["free_inodes"] is None
