# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stacks of processes: whose py-spy is run, what there is without, and that nothing holds who looks."""

from __future__ import annotations

import dataclasses
import os
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import stacks
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_process
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.stacks import PySpy, find_py_spy, gather
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.watch import Member
from ansible_collections.cleanslate.sglang.plugins.module_utils.spawn import Completed

OWN = os.getuid()
DUMP = """\
Process 101: sglang::scheduler
Python v3.11.2 (/usr/bin/python3.11)

Thread 140 (idle): "worker"
    wait (threading.py:320)
Thread 101 (active): "MainThread"
    spin (scheduler.py:7)
    run (scheduler.py:70)
"""
NONE = PySpy(None, "there is none here")


def hang(*_words: t.Any) -> t.NoReturn:
    time.sleep(600)
    raise AssertionError("nobody waited")


def installed(folder: Path, mode: int = 0o755) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    program = folder / "py-spy"
    program.write_text("#!/bin/sh\n")
    program.chmod(mode)
    return program


def own(pid: int | None = None, role: str = "scheduler") -> Member:
    process = read_process(os.getpid())
    assert process is not None
    return Member(process.pid if pid is None else pid, process.start_ticks, role, "S")


@pytest.fixture(autouse=True)
def _no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_CPU_SAMPLE_S", 0.01)


def test_py_spy_of_the_system_is_found(tmp_path: Path) -> None:
    program = installed(tmp_path / "bin")
    assert find_py_spy(f"{tmp_path}/nowhere:{tmp_path}/bin", OWN) == PySpy(str(program))


def test_no_py_spy_says_where_it_was_looked_for(tmp_path: Path) -> None:
    found = find_py_spy(f"{tmp_path}/a:{tmp_path}/b", OWN)
    assert found == PySpy(None, f"py-spy is in none of {tmp_path}/a, {tmp_path}/b")
    installed(tmp_path / "a", 0o644)
    assert find_py_spy(f"{tmp_path}/a", OWN).path is None


@pytest.mark.skipif(OWN != 0, reason="only root gives files away")
@pytest.mark.parametrize("what", ["bin/py-spy", "bin", "."])
def test_a_py_spy_that_another_account_owns_is_never_run(what: str, tmp_path: Path) -> None:
    installed(tmp_path / "bin")
    os.chown(tmp_path / what, 990, -1)
    found = find_py_spy(f"{tmp_path}/bin")
    assert found.path is None
    assert "belongs to uid 990" in str(found.problem)


@pytest.mark.parametrize("mode", [0o775, 0o757])
@pytest.mark.parametrize("what", ["bin/py-spy", "bin", "."])
def test_a_py_spy_that_others_can_change_is_never_run(what: str, mode: int, tmp_path: Path) -> None:
    installed(tmp_path / "bin")
    (tmp_path / what).chmod(mode)
    found = find_py_spy(f"{tmp_path}/bin", OWN)
    assert found.path is None
    assert f"can be changed by others (mode {mode:04o})" in str(found.problem)


def test_a_link_is_judged_by_where_it_leads(tmp_path: Path) -> None:
    """Such as from /usr/local/bin into a service user's virtual environment."""
    program = installed(tmp_path / "theirs")
    (tmp_path / "theirs").chmod(0o777)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "py-spy").symlink_to(program)
    assert find_py_spy(f"{tmp_path}/bin", OWN).path is None


def test_the_next_folder_counts_after_one_that_is_refused(tmp_path: Path) -> None:
    installed(tmp_path / "a", 0o777)
    good = installed(tmp_path / "b")
    assert find_py_spy(f"{tmp_path}/a:{tmp_path}/b", OWN) == PySpy(str(good))


def test_py_spy_is_asked_without_a_stop_and_in_a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[t.Any] = []

    def run(argv: list[str], deadline_s: float, environment: dict[str, str]) -> Completed:
        asked.append((argv, deadline_s, sorted(environment)))
        return Completed(0, DUMP, "")

    monkeypatch.setattr(stacks, "run_bounded", run)
    [seen] = gather([own()], PySpy("/usr/bin/py-spy"))
    argv = ["/usr/bin/py-spy", "dump", "--pid", str(os.getpid()), "--nonblocking"]
    assert asked == [(argv, 10.0, ["HOME", "LANG", "PATH"])]
    assert (seen.stack_source, seen.stack_problem) == ("py-spy", None)
    assert seen.stack[:2] == ('Thread 101 (active): "MainThread"', "    spin (scheduler.py:7)")


@pytest.mark.parametrize(
    ("done", "words"),
    [
        (Completed(1, "", "Error: Permission denied\n"), "py-spy: Error: Permission denied"),
        (Completed(None, "", "", timed_out=True), "py-spy did not answer within 10 s"),
    ],
)
def test_the_kernel_s_view_where_py_spy_fails(
    done: Completed, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "run_bounded", lambda *_words: done)
    [seen] = gather([own()], PySpy("/usr/bin/py-spy"))
    assert (seen.stack_source, seen.stack_problem) == ("kernel", words)
    assert any(line.startswith("threads: 1 in state") for line in seen.stack)


def test_a_process_that_holds_its_readers_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_kernel_lines", hang)
    monkeypatch.setattr(stacks, "read_wchan", hang)
    monkeypatch.setattr(stacks, "KERNEL_DEADLINE_S", 0.2)
    [seen] = gather([own()], NONE)
    assert (seen.stack, seen.stack_source, seen.wchan) == ((), "none", None)
    assert seen.stack_problem == "there is none here; the kernel's view was not read in time"


def test_no_stack_is_read_after_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "run_bounded", hang)
    monkeypatch.setattr(stacks, "_kernel_lines", hang)
    [seen] = gather([own()], PySpy("/usr/bin/py-spy"), deadline_s=0.0)
    assert seen.stack_problem == "the time for stacks was over"
    assert (seen.pid, seen.role) == (os.getpid(), "scheduler")


def test_ranks_go_before_helpers_and_sixteen_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_stack", lambda *_words: ((), "none", None))
    monkeypatch.setattr(stacks, "_titles", lambda members, proc: {})
    nobody = 2**22 + 1
    helpers = [own(nobody + index, "other") for index in range(40)]
    found = gather([*helpers, own(nobody + 50), own(nobody + 51, "leader")], NONE)
    assert len(found) == 16
    assert [process.role for process in found[:3]] == ["leader", "scheduler", "other"]


def test_after_two_locked_command_lines_nobody_is_asked_for_his(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fetch(pid: int, proc: str, deadline_s: float) -> t.NoReturn:
        asked.append(pid)
        raise stacks.CleanSlateError("locked")

    monkeypatch.setattr(stacks, "fetch_process", fetch)
    assert stacks._titles([own(pid) for pid in (1, 2, 3, 4)], "/proc") == {}
    assert asked == [1, 2]


def test_a_zombie_has_no_stack(tmp_path: Path) -> None:
    member = dataclasses.replace(own(7), state="Z")
    [seen] = gather([member], NONE, proc=str(tmp_path))
    assert (seen.activity, seen.stack_source, seen.stack_problem) == ("dead", "none", "it is dead")


def test_the_threads_are_told_by_state_and_place(tmp_path: Path) -> None:
    for tid in range(7, 107):
        folder = tmp_path / "7" / "task" / str(tid)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{tid} (python) S 1 7 7 " + " ".join(["0"] * 46))
        (folder / "wchan").write_text("futex_wait_queue" if tid != 7 else "0")
    (tmp_path / "7" / "stack").write_text("[<0>] futex_wait_queue+0x60/0x90\n[<0>] 0xffffffffffffffff\n")
    (tmp_path / "7" / "syscall").write_text("202 0x1 0x2\n")
    assert stacks._kernel_lines(7, str(tmp_path)) == [
        "kernel: futex_wait_queue+0x60/0x90",
        "call: number 202",
        "threads: 1 in state S, no place told",
        "threads: 63 in state S, futex_wait_queue",
        "threads: 36 more",
    ]
