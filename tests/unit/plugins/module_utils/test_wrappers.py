# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a unit whose main process is not the server is the server's own."""

from __future__ import annotations

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.wrappers import wrapper_pid
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Unit

UNIT = "kimi.service"


def process(pid: int, ppid: int, exe: str, unit: str = UNIT, state: str = "S") -> Process:
    return Process(
        pid, pid, ppid, pid, pid, state, exe[:15], (exe,), exe=f"/usr/bin/{exe}", cgroups=(f"/system.slice/{unit}",)
    )


def wrapped(*others: Process, main: str = "bash", main_pid: int = 10, unit: str = UNIT) -> int | None:
    """systemd -> main (10) -> leader (11) -> rank (12), and others."""
    tree = [process(1, 0, "systemd", "init.scope"), process(10, 1, main, unit), process(11, 10, "python3.11", unit)]
    processes = {one.pid: one for one in (*tree, process(12, 11, "python3.11", unit), *others)}
    return wrapper_pid(processes[11], Unit(unit, main_pid, "always", "active", "loaded"), processes)


@pytest.mark.parametrize("main", ["bash", "sh", "dash", "sudo", "tini", "timeout"])
def test_a_shell_around_the_server(main: str) -> None:
    assert wrapped(main=main) == 10


def test_a_logger_behind_the_pipe_belongs_to_it() -> None:
    assert wrapped(process(13, 10, "tee")) == 10


def test_a_shell_in_a_shell() -> None:
    tree = [process(10, 1, "bash"), process(11, 10, "sh"), process(12, 11, "python3.11")]
    assert wrapper_pid(tree[2], Unit(UNIT, 10, "no", "active", "loaded"), {one.pid: one for one in tree}) == 10


@pytest.mark.parametrize("main", ["cron", "sshd", "supervisord", "python3.11", "node", "login", "agetty"])
def test_a_daemon_that_started_it_is_not_its_wrapper(main: str) -> None:
    assert wrapped(main=main) is None


def test_a_unit_that_runs_something_else_as_well_is_left_to_its_owner() -> None:
    assert wrapped(process(13, 10, "nginx")) is None
    assert wrapped(process(13, 1, "python3.11")) is None
    assert wrapped(process(13, 10, "nginx", "nginx.service")) == 10
    assert wrapped(process(13, 10, "nginx", state="Z")) == 10


def test_the_leader_itself_or_nobody_as_main_process() -> None:
    assert wrapped(main_pid=11) is None
    assert wrapped(main_pid=0) is None
    assert wrapped(main_pid=999) is None
