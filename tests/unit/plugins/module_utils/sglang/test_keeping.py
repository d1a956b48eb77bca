# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import dataclasses
import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import keeping
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import record_files as files
from ansible_collections.cleanslate.sglang.tests.unit.kept_launches import REQUEST, keep, launch_id, prove


def left(state: Path) -> list[str]:
    return sorted(os.listdir(state / "main" / "launches"))


def test_as_many_as_are_wanted_stay_the_current_and_the_last_good_one_among_them(tmp_path: Path) -> None:
    for day in range(1, 15):
        keep(tmp_path, day)
        if day == 2:
            prove(tmp_path, launch_id(2))
    gone, problems = keeping.prune(str(tmp_path), "main", 5)
    assert problems == []
    assert left(tmp_path) == [launch_id(day) for day in (2, 11, 12, 13, 14)]
    assert len(gone) == 9
    assert files.read_link(str(tmp_path), "main", "last_good") == launch_id(2)
    assert files.read_link(str(tmp_path), "main", "current") == launch_id(14)
    keeping.prune(str(tmp_path), "main", keeping.LEAST_KEPT)
    assert left(tmp_path) == [launch_id(2), launch_id(14)]


def test_a_launch_with_a_process_stays(tmp_path: Path) -> None:
    for day in range(1, 8):
        keep(tmp_path, day)
    config = str(tmp_path / "main" / "launches" / launch_id(1) / "config.yaml")
    living = keeping.living_launches(str(tmp_path), "main", [("python", "--config", config), ("x", "/other/config")])
    assert living == {launch_id(1)}
    keeping.prune(str(tmp_path), "main", 3, living)
    assert launch_id(1) in left(tmp_path)


def test_folders_without_a_record_go_first_and_count_for_nothing(tmp_path: Path) -> None:
    for day in range(1, 5):
        keep(tmp_path, day)
    for day in range(5, 9):
        (tmp_path / "main" / "launches" / launch_id(day)).mkdir()
        (tmp_path / "main" / "launches" / launch_id(day) / "env").write_text("")
    keeping.prune(str(tmp_path), "main", 4)
    assert left(tmp_path) == [launch_id(day) for day in range(1, 5)]


def test_a_removal_that_was_cut_short_is_completed(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    gone = tmp_path / "main" / "launches" / f".gone-{launch_id(2)}"
    gone.mkdir()
    (gone / "config.yaml").write_text("x")
    assert keeping.prune(str(tmp_path), "main", 5) == ([], [])
    assert left(tmp_path) == [launch_id(1)]


@pytest.mark.parametrize("kind", ["fifo", "link", "socketless file"])
def test_what_is_no_folder_goes_with_its_launch(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "elsewhere"
    target.write_text("stays")
    for day in range(1, 4):
        keep(tmp_path, day)
    odd = tmp_path / "main" / "launches" / launch_id(1) / "odd"
    {"fifo": os.mkfifo, "link": lambda path: os.symlink(target, path), "socketless file": Path.touch}[kind](odd)
    assert keeping.prune(str(tmp_path), "main", 2)[1] == []
    assert left(tmp_path) == [launch_id(2), launch_id(3)]
    assert target.read_text() == "stays"


def test_a_launch_with_a_folder_in_it_is_left_whole_and_named(tmp_path: Path) -> None:
    for day in range(1, 5):
        keep(tmp_path, day)
    launch = tmp_path / "main" / "launches" / launch_id(1)
    (launch / "notes").mkdir()
    before = sorted(os.listdir(launch))
    gone, problems = keeping.prune(str(tmp_path), "main", 2)
    assert [Path(path).name for path in gone] == [launch_id(2)]
    assert "'notes'" in problems[0]
    assert launch_id(1) in problems[0]
    assert sorted(os.listdir(launch)) == before


def test_a_link_in_the_place_of_a_launch_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("stays")
    for day in range(2, 5):
        keep(tmp_path, day)
    (tmp_path / "main" / "launches" / launch_id(1)).symlink_to(elsewhere)
    problems = keeping.prune(str(tmp_path), "main", 2)[1]
    assert launch_id(1) in problems[0]
    assert (elsewhere / "precious").read_text() == "stays"


def test_other_files_of_the_server_stay_and_only_old_temporaries_go(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    folder = tmp_path / "main"
    for name in ("lease.json", ".lease.lock", "notes.txt", ".current.json.12.0a1b2c3d", ".current.13.0a1b2c3d"):
        (folder / name).write_text("")
    os.utime(folder / ".current.json.12.0a1b2c3d", (1, 1))
    keeping.prune(str(tmp_path), "main")
    assert {"lease.json", ".lease.lock", "notes.txt", ".current.13.0a1b2c3d"} <= set(os.listdir(folder))
    assert ".current.json.12.0a1b2c3d" not in os.listdir(folder)


def big_log(state: Path, day: int) -> Path:
    path = state / "main" / "launches" / launch_id(day) / "server.log"
    with path.open("wb") as stream:
        stream.write(b"first line\n")
        stream.seek(9 << 20)
        stream.write(b"\nlast line\n")
    path.chmod(0o600)
    return path


def test_logs_of_launches_without_a_process_are_cut_to_their_ends_once(tmp_path: Path) -> None:
    for day in range(1, 4):
        keep(tmp_path, day)
    cut, living = big_log(tmp_path, 1), big_log(tmp_path, 2)
    assert keeping.cut_logs(str(tmp_path), "main", {launch_id(2)}) == []
    data = cut.read_bytes()
    assert data.startswith(b"first line\n")
    assert data.endswith(b"\nlast line\n")
    assert b"bytes were left out here" in data
    assert len(data) < keeping.LOG_HEAD + keeping.LOG_TAIL + 200
    assert os.stat(cut).st_mode & 0o777 == 0o600
    assert living.stat().st_size > 9 << 20
    inode = cut.stat().st_ino
    keeping.cut_logs(str(tmp_path), "main")
    assert cut.stat().st_ino == inode


def test_a_log_that_is_no_file_is_named_and_not_opened(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    keep(tmp_path, 2)
    os.mkfifo(tmp_path / "main" / "launches" / launch_id(1) / "server.log")
    (tmp_path / "main" / "launches" / launch_id(2) / "server.log").symlink_to("/etc/passwd")
    problems = keeping.cut_logs(str(tmp_path), "main")
    assert ["no plain file" in problems[0], launch_id(2) in problems[1]] == [True, True]


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path, 1)
    log = big_log(tmp_path, 1)
    size = log.stat().st_size

    def full(*_words: t.Any) -> t.NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in keeping.cut_logs(str(tmp_path), "main")[0]
    assert log.stat().st_size == size


def test_two_servers_in_one_state_directory_do_not_touch_each_other(tmp_path: Path) -> None:
    other = dataclasses.replace(REQUEST, name="main2")
    for day in range(1, 6):
        keep(tmp_path, day)
        keep(tmp_path, day, other)
    keeping.prune(str(tmp_path), "main", 2)
    assert len(left(tmp_path)) == 2
    assert len(os.listdir(tmp_path / "main2" / "launches")) == 5
    assert files.read_link(str(tmp_path), "main2", "current") == launch_id(5)
