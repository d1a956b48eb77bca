# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files: whole or not at all, and what a killed run left is mended by the next."""

from __future__ import annotations

import fcntl
import json
import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import drift_files, drift_history
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_document import iso
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_files import DriftFilesError, Store
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_history import Limits
from ansible_collections.cleanslate.sglang.tests.unit.drift_builders import NOW, answer, document, ok

DAY = 86400
LIMITS = Limits(400, 64)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "out")
    store.prepare()
    return store


def line(at: float, hosts: int = 1) -> dict[str, t.Any]:
    entries = {f"gpu{number:03d}": {"verdict": "in_sync"} for number in range(hosts)}
    base = {"v": 1, "at": iso(at), "run": f"r{at:.0f}", "verdict": "in_sync", "status": "successful", "seconds": 1.5}
    return {**base, "hosts": entries}


def test_a_file_is_replaced_whole_and_readable_as_the_umask_says(store: Store) -> None:
    before = os.umask(0o022)
    try:
        store.write("metrics.prom", "a 1\n")
    finally:
        os.umask(before)
    path = store.directory / "metrics.prom"
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("a 1\n", 0o644)
    inode = path.stat().st_ino
    store.write("metrics.prom", "a 2\n")
    assert path.read_text() == "a 2\n" and path.stat().st_ino != inode
    assert [each.name for each in store.directory.iterdir() if each.name.endswith(".tmp")] == []


def test_a_file_that_can_t_be_written_leaves_the_old_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write("latest.json", "old")

    def full(_fd: int) -> t.NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drift_files.os, "fsync", full)
    with pytest.raises(DriftFilesError, match=r"latest\.json: No space left on device"):
        store.write("latest.json", "new")
    assert (store.directory / "latest.json").read_text() == "old"
    assert not list(store.directory.glob(".latest*"))


def test_halves_of_characters_are_no_reason_to_fail(store: Store) -> None:
    store.write("index.html", "a\ud800b")
    assert (store.directory / "index.html").read_bytes() == b"a?b"


def test_temporary_files_of_killed_runs_go(store: Store) -> None:
    left = store.directory / ".latest.json.0123456789ab.tmp"
    left.write_text("half")
    others = [".notes.tmp", ".latest.json.tmp", ".report.json.0123456789ab.tmp", ".latest.json.0123456789abc.tmp"]
    for name in others:
        (store.directory / name).write_text("somebody's")
    with store.locked():
        assert not left.exists()
        assert all((store.directory / name).exists() for name in others)


def test_the_lock_is_waited_for_and_then_named(store: Store) -> None:
    with open(store.directory / ".lock", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DriftFilesError, match=r"\.lock is held by another run"), store.locked(0.2):
            raise AssertionError
    with store.locked(0.2):
        pass


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "could not be read"),
        (b"[]", "no document"),
        (b'{"schema": "cleanslate.drift", "schema_version": 99}', "schema version 99"),
        (b'{"schema": "cleanslate.drift", "schema_version": 1}', "has lost a part"),
        (b"\xff\xff", "could not be read"),
    ],
)
def test_a_document_that_can_t_be_used_is_replaced_and_told(store: Store, content: bytes, why: str) -> None:
    (store.directory / "latest.json").write_bytes(content)
    found, problem = store.latest()
    assert found is None and problem is not None and why in problem


def test_the_latest_document(store: Store) -> None:
    assert store.latest() == (None, None)
    written = document(ok("a", answer()), expected=["a"])
    store.write("latest.json", json.dumps(written))
    assert store.latest() == (json.loads(json.dumps(written)), None)


@pytest.mark.parametrize("torn", [b'{"v":1,"at":"20', b"x" * 200_000, b"\x00"])
def test_a_line_that_was_cut_short_is_taken_away(store: Store, torn: bytes) -> None:
    store.add_history(line(NOW), NOW, LIMITS)
    path = store.directory / "history.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    store.add_history(line(NOW + 60), NOW + 60, LIMITS)
    assert path.read_bytes() == whole + drift_history.dump(line(NOW + 60))


def test_a_history_of_nothing_but_a_cut_line(store: Store) -> None:
    path = store.directory / "history.jsonl"
    path.write_bytes(b"x" * 70_000)
    store.add_history(line(NOW), NOW, LIMITS)
    assert path.read_bytes() == drift_history.dump(line(NOW))


def test_a_new_day_compacts(store: Store) -> None:
    start = NOW // DAY * DAY
    for hour in range(48):
        store.add_history(line(start + 3600 * hour), start + 3600 * hour, LIMITS)
    for day in range(2, 10):
        store.add_history(line(start + day * DAY), start + day * DAY, LIMITS)
    found = [json.loads(each) for each in store.history()]
    assert [each.get("runs") for each in found] == [24, 24, 1, *[None] * 7]


def test_a_year_of_checks_of_a_fleet_is_bounded(store: Store) -> None:
    """30 hosts, twice a day for 13 months; a check a quarter of an hour only makes the last week longer."""
    sizes = []
    for day in range(400):
        for hour in (6, 18):
            at = NOW - (400 - day) * DAY + hour * 3600
            store.add_history(line(at, 30), at, Limits(365, 0.3))
        sizes.append((store.directory / "history.jsonl").stat().st_size)
    assert max(sizes) <= 300_000
    lines = [json.loads(each) for each in store.history()]
    assert len(lines) > 150 and lines[-1]["at"] == iso(NOW - DAY + 18 * 3600)
    assert all(later["at"] > earlier["at"] for earlier, later in zip(lines, lines[1:]))


def test_a_run_s_directory_is_private_and_goes(store: Store) -> None:
    with store.run_directory("run1", None) as path:
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "artifacts").mkdir()
    assert not path.exists() and not (store.directory / "runs").exists()
    with pytest.raises(RuntimeError), store.run_directory("run2", None) as path:
        raise RuntimeError
    assert not path.exists()


def test_directories_of_dead_runs_go_and_those_of_living_ones_stay(store: Store) -> None:
    dead = store.directory / ".runs" / "dead"
    living = store.directory / ".runs" / "living"
    for each in (dead, living):
        (each / "artifacts").mkdir(parents=True)
        (each / ".lock").touch()
    with open(living / ".lock", "ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with store.run_directory("mine", None):
            assert not dead.exists() and living.exists()


def test_kept_runs_are_few(store: Store) -> None:
    for number in range(5):
        with store.run_directory(f"run{number}", 2) as path:
            (path / "x").write_text("x")
    kept = store.directory / "runs"
    assert sorted(each.name for each in kept.iterdir()) == ["run3", "run4"]
    assert kept.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_can_t_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DriftFilesError, match="--out .*/file/out: Not a directory"):
        Store(tmp_path / "file" / "out").prepare()
