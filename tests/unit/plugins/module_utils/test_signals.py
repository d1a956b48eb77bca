# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What needs no second process owner; pids that change hands are in tests/integration_ns/test_evict_identity.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.act import signals
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.signals import grip, send, wait_ended
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_process
from ansible_collections.cleanslate.sglang.tests.unit.builders import process


@pytest.fixture
def child() -> object:
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield started
    started.kill()
    started.communicate()


def test_a_grip_checks_the_start_time(child: subprocess.Popen[bytes]) -> None:
    seen = read_process(child.pid)
    assert seen is not None
    before = len(os.listdir("/proc/self/fd"))
    assert grip(process(child.pid, start_ticks=seen.start_ticks + 1)) is None
    assert len(os.listdir("/proc/self/fd")) == before
    held = grip(seen)
    assert held is not None
    held.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_objection_stops_the_signal(child: subprocess.Popen[bytes]) -> None:
    seen = read_process(child.pid)
    assert seen is not None
    held = grip(seen)
    assert held is not None
    outcome = send(held, signal.SIGKILL, lambda now: "no evidence")
    assert (outcome.result, outcome.detail, outcome.signal) == ("changed", "no evidence", "SIGKILL")
    assert wait_ended([held], time.monotonic()) == set()
    assert child.poll() is None
    assert send(held, signal.SIGKILL, lambda now: None).result == "sent"
    assert wait_ended([held], time.monotonic() + 20) == {seen.key}
    held.close()


def test_a_zombie_is_gone(child: subprocess.Popen[bytes]) -> None:
    seen = read_process(child.pid)
    assert seen is not None
    held = grip(seen)
    assert held is not None
    child.send_signal(signal.SIGKILL)
    assert wait_ended([held], time.monotonic() + 20) == {seen.key}
    # Not reaped yet: it still has its number, and can't be signalled.
    assert send(held, signal.SIGKILL, lambda now: None).result == "gone"
    held.close()


def test_nobody_to_wait_for_is_no_wait() -> None:
    assert wait_ended([], time.monotonic() + 60) == set()


def test_without_pidfds_nothing_is_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signals.os, "pidfd_open")
    with pytest.raises(CleanSlateError, match="nothing was signalled"):
        grip(process(os.getpid()))


def test_no_descriptor_left_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(signals.os, "pidfd_open", refuse)
    with pytest.raises(CleanSlateError, match="RLIMIT_NOFILE"):
        grip(process(os.getpid()))
