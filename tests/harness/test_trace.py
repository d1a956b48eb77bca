# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The trace names exactly the signals that were sent, whatever call sent them."""

from __future__ import annotations

import sys

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.trace import (
    Signal,
    parse_trace,
    run_traced,
    strace_missing,
    who_left,
)

RECORD = """\
20    pidfd_open(30, 0)                 = 4
20    pidfd_send_signal(4<pid:30>, SIGTERM, NULL, 0) = 0
20    pidfd_open(31, 0 <unfinished ...>
21    kill(-40, SIGKILL <unfinished ...>
20    <... pidfd_open resumed>)         = 5
21    <... kill resumed>)               = -1 ESRCH (No such process)
22    pidfd_send_signal(5, SIGKILL, NULL, 0) = 0
22    pidfd_send_signal(9, SIGKILL, NULL, 0) = -1 EBADF (Bad file descriptor)
22    kill(30, 0)                       = 0
22    tgkill(50, 51, SIGUSR1)           = 0
21    +++ exited with 0 +++
"""


def test_parse_resolves_pidfds_and_broken_lines() -> None:
    assert parse_trace(RECORD) == [
        Signal(20, 30, "SIGTERM", "pidfd_send_signal", 0),
        Signal(21, -40, "SIGKILL", "kill", -1),
        Signal(22, 31, "SIGKILL", "pidfd_send_signal", 0),
        Signal(22, None, "SIGKILL", "pidfd_send_signal", -1),
        Signal(22, 50, "SIGUSR1", "tgkill", 0),
    ]


KILLER = """
import os, signal, sys, threading
first, second = map(int, sys.argv[1:])
os.kill(first, 0)
fd = os.pidfd_open(first)
thread = threading.Thread(target=signal.pidfd_send_signal, args=(fd, signal.SIGTERM))
thread.start()
thread.join()
if os.fork() == 0:
    os.kill(second, signal.SIGKILL)
    os._exit(0)
os.wait()
"""


@pytest.mark.ns
def test_traced_program(ns: Namespace) -> None:
    reason = strace_missing()
    if reason:
        pytest.skip(reason)
    first, second, bystander = (ns.popen(["sleep", "300"], detached=True) for _unused in range(3))
    before = ns.living()
    done, signals = run_traced(ns, [sys.executable, "-c", KILLER, str(first.pid), str(second.pid)], 30)
    done.check()
    assert [(signal.target, signal.signal) for signal in signals] == [(first.pid, "SIGTERM"), (second.pid, "SIGKILL")]
    first.wait_gone()
    second.wait_gone()
    assert who_left(before, ns.living()) == {first.pid, second.pid}
    assert bystander.pid in ns.pids()
