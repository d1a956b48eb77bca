# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tree of a server by /proc/PID/stat alone: who is a rank, who is only a helper, who is dead."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.activity import read_tree


def put(proc: Path, pid: int, ppid: int, comm: str, state: str = "S", threads: int = 1) -> None:
    """A process as /proc/PID/stat shows it (proc_pid_stat(5)): threads are field 20, the start time is field 22."""
    fields = [str(pid), f"({comm})", state, str(ppid), *["0"] * 15, str(threads), "0", str(1000 + pid), *["0"] * 30]
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(" ".join(fields) + "\n")


def roles(proc: Path) -> dict[int, tuple[str, bool]]:
    return {member.pid: (member.role, member.dead) for member in read_tree(100, str(proc))}


def test_ranks_by_their_comm_and_nobody_of_another_tree(tmp_path: Path) -> None:
    put(tmp_path, 100, 1, "python")
    put(tmp_path, 101, 100, "sglang::schedul")
    put(tmp_path, 102, 100, "sglang::detoken", "Z")
    put(tmp_path, 103, 1, "sglang::schedul")
    assert roles(tmp_path) == {100: ("leader", False), 101: ("scheduler", False), 102: ("detokenizer", True)}


def test_a_dead_main_thread_with_living_ones_is_not_dead(tmp_path: Path) -> None:
    put(tmp_path, 100, 1, "python")
    put(tmp_path, 101, 100, "sglang::schedul", "Z", threads=3)
    assert roles(tmp_path)[101] == ("scheduler", False)


@pytest.mark.parametrize("comm", ["sglang::schedul", "sglang::detoken"])
def test_what_a_rank_forks_is_no_rank(tmp_path: Path, comm: str) -> None:
    """A zombie that a living scheduler does not reap was taken for a dead scheduler, and the start for failed."""
    put(tmp_path, 100, 1, "python")
    put(tmp_path, 101, 100, comm)
    put(tmp_path, 102, 101, comm, "Z")
    put(tmp_path, 103, 101, comm)
    put(tmp_path, 104, 103, comm, "Z")
    found = roles(tmp_path)
    assert found[101][0] != "other"
    assert [found[pid] for pid in (102, 103, 104)] == [("other", True), ("other", False), ("other", True)]


def test_a_controller_s_schedulers_are_ranks(tmp_path: Path) -> None:
    put(tmp_path, 100, 1, "python")
    put(tmp_path, 101, 100, "sglang::data_pa")
    put(tmp_path, 102, 101, "sglang::schedul", "Z")
    assert roles(tmp_path)[102] == ("scheduler", True)
