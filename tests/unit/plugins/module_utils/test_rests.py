# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Schedulers that come to rest, by the file in which they tell their loads."""

from __future__ import annotations

import os
import struct
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.rests import REST_S, Rests, Slots, read_slots

SLOT = 64


def loads_file(path: Path, *slots: bytes, magic: bytes = b"SLNS", version: int = 2, ranks: int | None = None) -> Path:
    head = struct.pack("<4sHHI", magic, version, len(slots) if ranks is None else ranks, SLOT)
    path.write_bytes(head + b"".join(slot.ljust(SLOT, b"\0") for slot in slots))
    return path


def opened(proc: Path, pid: int, *targets: Path) -> None:
    """In this /proc the process has these open."""
    folder = proc / str(pid) / "fd"
    folder.mkdir(parents=True)
    for number, target in enumerate(targets):
        (folder / str(number)).symlink_to(target)


def test_one_file_that_several_processes_have_open_tells_each_rank(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    found = loads_file(tmp_path / "sglang_loads_default_0a1b2c3d.shm", b"one", b"two")
    opened(proc, 10, tmp_path / "other", found)
    opened(proc, 11, found)
    seen = read_slots([10, 11, 12], str(proc))
    assert len(seen) == 2 and seen[0] != seen[1]
    loads_file(found, b"one", b"new")
    again = read_slots([10], str(proc))
    assert again[0] == seen[0] and again[1] != seen[1]


def test_what_is_no_file_of_loads_tells_nothing(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    opened(proc, 1)
    assert "no files" in read_slots([1], str(proc))
    first, second = (loads_file(tmp_path / f"sglang_loads_{name}_1.shm", b"x") for name in "ab")
    opened(proc, 2, first, second)
    assert "2 files" in read_slots([2], str(proc))
    fifo = tmp_path / "sglang_loads_fifo_1.shm"
    os.mkfifo(fifo)
    opened(proc, 3, fifo)
    assert "no regular file" in read_slots([3], str(proc))


@pytest.mark.parametrize("changes", [{"magic": b"SLNT"}, {"version": 3}, {"ranks": 0}, {"ranks": 5000}])
def test_another_layout_is_not_guessed_at(tmp_path: Path, changes: dict[str, t.Any]) -> None:
    opened(tmp_path / "proc", 1, loads_file(tmp_path / "sglang_loads_x_1.shm", b"x", **changes))
    assert "another layout" in read_slots([1], str(tmp_path / "proc"))


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "sglang_loads_x_1.shm"
    path.write_bytes(b"SL")
    opened(tmp_path / "proc", 1, path)
    assert "can't be read" in read_slots([1], str(tmp_path / "proc"))


class World:
    """Tells these slots one after another, the last ones for ever, and counts what it was asked."""

    def __init__(self, *looks: t.Union[Slots, str]) -> None:
        self.looks = list(looks)
        self.now = 0.0
        self.poked = 0

    def read(self) -> t.Union[Slots, str]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def poke(self) -> None:
        self.poked += 1

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def rests(self) -> Rests:
        return Rests([1], self.poke, read=self.read, now=lambda: self.now, sleep=self.sleep)


def test_it_rests_when_every_rank_wrote_twice_since_then() -> None:
    world = World((b"a", b"b"), (b"a2", b"b"), (b"a3", b"b2"), (b"a3", b"b2"), (b"a3", b"b3"))
    assert world.rests()() is True
    assert world.poked == 4


@pytest.mark.parametrize("looks", [((b"a", b"b"), (b"a2", b"b"), (b"a3", b"b")), ((b"a",), (b"a2",))])
def test_a_rank_that_does_not_write_or_only_once_is_at_work_or_hangs(looks: tuple[Slots, ...]) -> None:
    world = World(*looks)
    assert world.rests()() is False
    assert REST_S <= world.now < REST_S + 0.5


@pytest.mark.parametrize("looks", [("gone",), ((b"a",), "gone"), ((b"a",), (b"a2", b"b"))])
def test_what_can_not_be_read_is_no_rest(looks: tuple[t.Union[Slots, str], ...]) -> None:
    assert World(*looks).rests()() is False


def test_the_start_says_why_nothing_can_be_seen() -> None:
    assert World("no files").rests().start() == "no files"
    assert World((b"a",)).rests().start() == ""
