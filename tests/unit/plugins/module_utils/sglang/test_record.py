# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import dataclasses
import json
import os
import stat
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError, NotPermitted
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import record as records

RECORD = records.Record(
    name="main",
    launch_id="20260131T235959Z-1a2b",
    state="started",
    launcher="detached",
    boot_id="b-1",
    pid=100,
    start_ticks=5,
    sid=100,
    port=30000,
    gpus=("GPU-1",),
    flags={"tp-size": 1},
    environment={"A": "b"},
    argv=("python3", "-m", "sglang.launch_server"),
    config="/s/main/launches/20260131T235959Z-1a2b/config.yaml",
)


def mode_of(path: Path | str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def process(pid: int, start_ticks: int, argv: tuple[str, ...] = (), state: str = "S") -> Process:
    return Process(pid, start_ticks, 1, pid, pid, state, "python3", argv)


def test_written_and_read_again(tmp_path: Path) -> None:
    state = str(tmp_path / "var" / "state")
    folder = records.create_launch_dir(state, "main", RECORD.launch_id)
    paths = records.write_record(state, RECORD)
    assert records.find_recorded(state, "main") == RECORD
    assert [mode_of(path) for path in paths] == [0o600, 0o644]
    assert mode_of(folder) == 0o700
    assert mode_of(state) == mode_of(f"{state}/main") == 0o755
    assert sorted(os.listdir(folder)) == ["record.json"]
    assert list(records.list_records(state)) == ["main"]


def test_none_is_none(tmp_path: Path) -> None:
    assert records.read_record(str(tmp_path), "main") == records.Reading()
    assert records.find_recorded(str(tmp_path / "nowhere"), "main") is None
    assert records.list_records(str(tmp_path / "nowhere")) == {}


def broken(**changes: t.Any) -> str:
    return json.dumps({**dataclasses.asdict(RECORD), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        records.to_text(RECORD)[:-40],
        "[]",
        "null",
        "[" * 100000,
        broken(pid="100"),
        broken(pid=-1),
        broken(pid=True),
        broken(state="running"),
        broken(name="other"),
        broken(name=None),
        broken(launch_id="../../etc"),
        broken(gpus="GPU-1"),
        broken(flags=[]),
        "x" * (1024 * 1024 + 1),
    ],
)
def test_a_truncated_or_hostile_record_is_a_problem_and_not_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "current.json").write_text(text)
    reading = records.read_record(str(tmp_path), "main")
    assert reading.record is None
    assert "main/current.json" in str(reading.problem)
    with pytest.raises(CleanSlateError, match="current.json"):
        records.find_recorded(str(tmp_path), "main")


def test_links_fifos_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text(records.to_text(RECORD))
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "current.json").symlink_to(target)
    assert "current.json" in str(records.read_record(str(tmp_path), "main").problem)
    (tmp_path / "main" / "current.json").unlink()
    os.mkfifo(tmp_path / "main" / "current.json")
    assert "plain file" in str(records.read_record(str(tmp_path), "main").problem)
    (tmp_path / "link").symlink_to(tmp_path / "main")
    with pytest.raises(NotPermitted):
        records.write_file(str(tmp_path / "link"), "x", b"")
    os.chmod(tmp_path / "main", 0o777)
    with pytest.raises(NotPermitted, match="0777"):
        records.write_file(str(tmp_path / "main"), "x", b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    os.chown(tmp_path / "main", 12345, 12345)
    with pytest.raises(NotPermitted, match="12345"):
        records.write_file(str(tmp_path / "main"), "x", b"")
    with pytest.raises(NotPermitted, match="12345"):
        records.create_launch_dir(str(tmp_path), "main", RECORD.launch_id)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records.write_file(str(tmp_path), "f", b"old")

    def fail(*_args: t.Any, **_kwargs: t.Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(NotPermitted, match="No space left"):
        records.write_file(str(tmp_path), "f", b"new")
    assert os.listdir(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a b", "a" * 65, "x\n"])
def test_names_that_are_no_file_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(CleanSlateError, match="name of a server"):
        records.read_record(str(tmp_path), name)


def test_the_leader_of_a_record() -> None:
    leader = process(100, 5)
    assert records.recorded_process(RECORD, {100: leader}, "b-1") == leader
    assert records.recorded_process(RECORD, {100: process(100, 6)}, "b-1") is None
    assert records.recorded_process(RECORD, {100: process(100, 5, state="Z")}, "b-1") is None
    assert records.recorded_process(RECORD, {100: leader}, "b-2") is None
    assert records.recorded_process(dataclasses.replace(RECORD, boot_id=None), {100: leader}, None) is None


def test_the_leader_of_an_interrupted_launch_is_found_by_its_configuration_file() -> None:
    starting = dataclasses.replace(RECORD, state="starting", pid=None, start_ticks=None)
    argv = ("python3", "-m", "sglang.launch_server", "--config", str(RECORD.config))
    assert records.recorded_process(starting, {7: process(7, 1, argv)}, "b-1") == process(7, 1, argv)
    assert records.recorded_process(starting, {7: process(7, 1, ("vim", str(RECORD.config)))}, "b-1") is None


def test_launch_ids_sort_by_time() -> None:
    first, second = records.new_launch_id(1000.0), records.new_launch_id(1001.0)
    assert first.startswith("19700101T001640Z-")
    assert first < second


def test_launches_of_one_second_sort_by_their_order() -> None:
    taken: list[str] = []
    for _start in range(50):
        taken.append(records.new_launch_id(1000.0, taken))
    assert taken == sorted(set(taken))
    assert records.new_launch_id(1001.0, taken) > taken[-1]


def test_writing_a_file_removes_what_killed_writers_of_it_left(tmp_path: Path) -> None:
    """The lease, a unit, a record: each writer's temporaries, once they are old; nobody else's."""
    left = {
        ".lease.json.12.0a1b2c3d": 700.0,  # goes
        ".lease.json.13.0a1b2c3d": 500.0,  # its writer may live
        ".lease.lock": 700.0,
        ".current.json.12.0a1b2c3d": 700.0,  # another file's
        ".lease.json.12.0a1b2c3d.bak": 700.0,
        "lease.json.12.0a1b2c3d": 700.0,
    }
    now = time.time()
    for name, age in left.items():
        (tmp_path / name).write_text("{")
        os.utime(tmp_path / name, (now - age, now - age))
    (tmp_path / ".lease.json.14.0a1b2c3d").mkdir()
    os.utime(tmp_path / ".lease.json.14.0a1b2c3d", (1, 1))
    records.write_file(str(tmp_path), "lease.json", b"{}")
    expected = {*left, "lease.json", ".lease.json.14.0a1b2c3d"} - {".lease.json.12.0a1b2c3d"}
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert (tmp_path / "lease.json").read_text() == "{}"
