# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Helpers are bounded: whatever they do, the caller gets its answer in time, and nothing of ours is left open."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.spawn import (
    Called,
    begin_call,
    call_bounded,
    run_bounded,
    spawn_detached,
)

GENEROUS_S = 20.0


def open_descriptors() -> set[str]:
    # The listing's own descriptor is gone by the time of the check.
    return {name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}


@pytest.fixture(autouse=True)
def nothing_left_open() -> object:
    before = open_descriptors()
    yield
    assert open_descriptors() == before


def test_a_command_and_its_output() -> None:
    done = run_bounded(["sh", "-c", "cat; echo err >&2; exit 3"], GENEROUS_S, stdin=b"in")
    assert (done.rc, done.stdout, done.stderr, done.timed_out, done.ok) == (3, "in", "err\n", False, False)


def test_its_environment_is_the_given_one() -> None:
    done = run_bounded(["sh", "-c", "echo $A-$HOME"], GENEROUS_S, env={"A": "1", "PATH": os.defpath})
    assert done.stdout == "1-\n"


def test_a_session_of_its_own_and_no_descriptor_of_ours() -> None:
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    try:
        done = run_bounded(["sh", "-c", "ls /proc/$$/fd; cut -d' ' -f6 /proc/$$/stat; echo $$"], GENEROUS_S)
    finally:
        os.close(read_end)
        os.close(write_end)
    *numbers, sid, pid = done.stdout.split()
    assert sid == pid
    assert {"0", "1", "2"} <= set(numbers)
    assert str(write_end) not in numbers


@pytest.mark.parametrize("argv", [["/nowhere/nvidia-smi"], ["no-such-program-here"], ["/etc/passwd"]])
def test_what_cannot_start_is_an_error_and_no_exit_status(argv: list[str]) -> None:
    done = run_bounded(argv, GENEROUS_S)
    assert done.rc is None
    assert done.error is not None
    assert argv[0] in done.error


@pytest.mark.parametrize(
    "script",
    [
        "sleep 600",
        "trap '' TERM; sleep 600",
        "exec >&- 2>&-; sleep 600",
        "sleep 600 & sleep 600",
        "yes",
    ],
)
def test_a_command_that_does_not_end_is_ended(script: str) -> None:
    started = time.monotonic()
    done = run_bounded(["sh", "-c", script], 0.4)
    assert time.monotonic() - started < GENEROUS_S
    assert (done.rc, done.timed_out, done.ok, done.stuck_pid) == (None, True, False, None)


def test_a_grandchild_that_keeps_the_pipes_does_not_keep_us() -> None:
    started = time.monotonic()
    done = run_bounded(["sh", "-c", "sleep 30 & echo $!"], 25)
    assert time.monotonic() - started < 20
    assert done.rc == 0
    os.kill(int(done.stdout), signal.SIGKILL)


def test_output_that_is_no_utf_8() -> None:
    assert run_bounded(["printf", r"\377x"], GENEROUS_S).stdout == "\ufffdx"


# --- calls ---


def test_a_call_and_its_value() -> None:
    called = call_bounded(lambda: {"a": [1, None, "x"]}, GENEROUS_S)
    assert (called.value, called.ok) == ({"a": [1, None, "x"]}, True)


def test_an_exception_comes_back_in_words() -> None:
    empty: dict[str, str] = {}
    called = call_bounded(lambda: empty["absent"], GENEROUS_S)
    assert (called.value, called.ok, called.error) == (None, False, "KeyError: 'absent'")


def test_a_value_that_is_no_json_and_a_crash_are_errors() -> None:
    assert "not JSON serializable" in str(call_bounded(object, GENEROUS_S).error)
    crashed = call_bounded(lambda: os.kill(os.getpid(), signal.SIGSEGV), GENEROUS_S)
    assert "status -11" in str(crashed.error)


def test_a_call_that_hangs_is_left(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    started = time.monotonic()
    called = call_bounded(lambda: open(fifo).read(), 0.4)  # noqa: SIM115
    assert time.monotonic() - started < GENEROUS_S
    assert (called.timed_out, called.ok, called.value, called.stuck_pid) == (True, False, None, None)
    assert called.stuck_state in ("S", "R", "D"), "where it waited is told although it could be ended"


def test_a_large_value_passes_the_pipe() -> None:
    called = call_bounded(lambda: "x" * 2_000_000, GENEROUS_S)
    assert len(called.value) == 2_000_000


def test_a_call_cannot_write_to_our_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert call_bounded(lambda: os.write(1, b"noise"), GENEROUS_S).value == 5
    assert capfd.readouterr().out == ""


def test_what_a_call_does_to_its_own_process_stays_there() -> None:
    assert call_bounded(lambda: os.environ.setdefault("CALLED", "1"), GENEROUS_S).value == "1"
    assert "CALLED" not in os.environ


# --- detached ---


def test_a_detached_process_outlives_us_and_writes_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "import os, sys, time; print(os.getsid(0), os.getppid(), flush=True); time.sleep(60)"
    pid = spawn_detached([sys.executable, "-c", script], {"PATH": os.defpath}, "/", str(log))
    try:
        deadline = time.monotonic() + GENEROUS_S
        while not log.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        sid, _parent = log.read_text().split()
        assert int(sid) in (pid, os.getsid(pid))
        assert os.getsid(pid) != os.getsid(0)
        assert log.stat().st_mode & 0o777 == 0o600
        assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
    finally:
        os.kill(pid, signal.SIGKILL)


def test_what_cannot_be_started_detached_says_so(tmp_path: Path) -> None:
    with pytest.raises(CleanSlateError, match="could not start /nowhere/python: No such file"):
        spawn_detached(["/nowhere/python"], {}, "/", str(tmp_path / "log"))
    with pytest.raises(CleanSlateError, match="No such file"):
        spawn_detached([sys.executable], {}, "/nowhere", str(tmp_path / "log"))


def test_a_log_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CleanSlateError):
        spawn_detached([sys.executable], {}, "/", str(tmp_path / "log"))
    assert not (tmp_path / "elsewhere").exists()


def children() -> list[int]:
    """Our own, living or dead."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_a_call_in_two_halves_works_meanwhile_and_is_fetched_however_late() -> None:
    begun = begin_call(lambda: "an answer", 0.3)
    time.sleep(0.6)
    assert begun.finish() == Called(value="an answer")
    assert begun.finish() == Called(value="an answer")
    begun.abandon()
    assert children() == []


def test_a_call_in_two_halves_has_its_deadline_from_the_first() -> None:
    began = time.monotonic()
    begun = begin_call(lambda: time.sleep(60), 0.5)
    time.sleep(0.3)
    assert begun.finish().timed_out
    assert time.monotonic() - began < 30
    assert children() == []


def test_an_abandoned_call_leaves_nobody() -> None:
    before = set(os.listdir("/proc/self/fd"))
    begun = begin_call(lambda: time.sleep(60), 30)
    assert len(children()) == 1
    begun.abandon()
    begun.abandon()
    assert children() == []
    assert begun.finish().error == "it was abandoned"
    assert set(os.listdir("/proc/self/fd")) == before
