# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Founding case 6: a host with 449 GiB of RAM, 4 used, 394 free, 50 in caches and 444 available is a clean one."""

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


def recorded(free_gib: float, cache_gib: float) -> bytes:
    return meminfo(
        MemTotal=int(449.3 * GIB_KB),
        MemFree=int(free_gib * GIB_KB),
        MemAvailable=int(444.6 * GIB_KB),
        Buffers=int(0.1 * GIB_KB),
        Cached=int(cache_gib * GIB_KB),
        SReclaimable=int(0.3 * GIB_KB),
        Shmem=12 * 1024,
        SwapTotal=0,
        SwapFree=0,
    )


def test_free_g_as_the_operator_saw_it(look: Look) -> None:
    result = look(recorded(free_gib=394.4, cache_gib=49.8))
    assert result["free_g"] == (
        "               total        used        free      shared  buff/cache   available\n"
        "Mem:             449           4         394           0          50         444\n"
        "Swap:              0           0           0"
    )
    assert result["problems"] == []


CACHES = [(394.4, 49.8, "50"), (408.4, 35.8, "36"), (444.1, 0.1, "0")]


@pytest.mark.parametrize(("free_gib", "cache_gib", "shown"), CACHES)
def test_caches_are_not_used_memory(look: Look, free_gib: float, cache_gib: float, shown: str) -> None:
    result = look(recorded(free_gib, cache_gib))
    row = result["free_g"].splitlines()[1].split()
    assert (row[2], row[5], row[6]) == ("4", shown, "444")
    assert result["available_mib"] == int(444.6 * GIB_KB) // 1024


def test_no_swap_is_zero_and_an_unknown_swap_is_null(look: Look) -> None:
    assert look(recorded(394.4, 49.8))["meminfo"]["swap_total_mib"] == 0
    without = look(recorded(394.4, 49.8).replace(b"SwapTotal", b"NoSwap"))
    assert without["meminfo"]["swap_total_mib"] is None
    assert without["available_mib"] == int(444.6 * GIB_KB) // 1024
