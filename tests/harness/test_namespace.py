# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The namespace harness keeps its promises: isolation, deadlines, nothing left behind."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import DeadlinePassed
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace

pytestmark = pytest.mark.ns


def test_processes_inside_have_their_own_numbers_and_end_with_it(tmp_path: Path) -> None:
    with Namespace(tmp_path) as ns:
        sleeper = ns.popen(["sleep", "300"], detached=True)
        stubborn = ns.popen(["sh", "-c", "trap '' TERM; while :; do sleep 300; done"])
        assert {sleeper.pid, stubborn.pid} <= ns.pids()
        assert ns.titles()[sleeper.pid] == "sleep 300"
        marks = ns._left()
        assert len(marks) >= 3
    assert ns._left() == []


def test_detached_process_is_a_child_of_process_1_and_is_reaped(ns: Namespace) -> None:
    process = ns.popen(["sleep", "300"], detached=True)
    status = (ns.proc / str(process.pid) / "status").read_text()
    assert "\nPPid:\t1\n" in status
    before = ns.living()
    ns.run(["kill", "-KILL", str(process.pid)], 5).check()
    process.wait_gone()
    assert {pid for pid, _ticks in before - ns.living()} == {process.pid}


def test_run_gives_status_and_output(ns: Namespace) -> None:
    done = ns.run(
        ["sh", "-c", "cat; echo err >&2; echo $VALUE; pwd; exit 3"], 5, {"VALUE": "v"}, stdin="in\n", cwd=Path("/")
    )
    assert (done.rc, done.stdout, done.stderr) == (3, "in\nv\n/\n", "err\n")


def test_run_stops_at_the_deadline_and_kills_the_command(ns: Namespace) -> None:
    with pytest.raises(DeadlinePassed, match="begun"):
        ns.run(["sh", "-c", "echo begun; exec sleep 300"], 3)
    assert "sleep 300" not in ns.titles().values()


def test_output_held_by_a_grandchild_does_not_hold_run(ns: Namespace) -> None:
    started = time.monotonic()
    assert ns.run(["sh", "-c", "sleep 60 & echo done"], 30).stdout == "done\n"
    assert time.monotonic() - started < 30


def test_mounts_are_private(ns: Namespace, tmp_path: Path) -> None:
    name = f"cleanslate-harness-{os.getpid()}"
    for directory in ("/dev/shm", "/tmp", "/run", "/run/cleanslate"):
        ns.run(["touch", f"{directory}/{name}"], 5).check()
        assert not Path(directory, name).exists()
        assert (ns.root / directory[1:] / name).exists()
    ns.run(["touch", str(tmp_path / name)], 5).check()
    assert (tmp_path / name).exists()


def test_ports_are_private(ns: Namespace) -> None:
    with socket.socket() as outside:
        outside.bind(("127.0.0.1", 0))
        outside.listen()
        port = outside.getsockname()[1]

        def bind_the_same() -> int:
            with socket.socket() as inside:
                inside.bind(("127.0.0.1", port))
                inside.listen()
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                return int(inside.getsockname()[1])

        assert ns.call(bind_the_same) == port


def test_call_returns_results_of_any_size_and_raises_what_was_raised(ns: Namespace) -> None:
    assert ns.call(os.getpid) < 100
    assert len(ns.call(lambda: "x" * 300_000)) == 300_000
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        ns.call(lambda: 1 // 0)
    with pytest.raises(AssertionError, match="no result after"):
        ns.call(lambda: time.sleep(60), deadline_s=0.3)


def test_interpreter_and_checkout_are_visible(ns: Namespace) -> None:
    done = ns.run([sys.executable, "-c", "import ansible, os; print(os.path.exists('galaxy.yml'))"], 20)
    assert done.check().stdout == "True\n"
