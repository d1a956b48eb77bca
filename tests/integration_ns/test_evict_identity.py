# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Between the look and the signal a pid can come to mean somebody else: then nobody is signalled."""

from __future__ import annotations

import os
import signal
import sys
import time
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.act.signals import grip, send, wait_ended
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_process
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

pytestmark = pytest.mark.ns
REUSE = ROOT / "tests" / "fixtures" / "reuse_pid.py"


def no_objection(_now: Process) -> t.Optional[str]:
    return None


def see(ns: Namespace, pid: int) -> Process:
    process = ns.call(lambda: read_process(pid))
    assert process is not None
    return process


def kill(ns: Namespace, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    ns.call(lambda: os.kill(pid, number))


def give_to_another(ns: Namespace, pid: int) -> None:
    """End the process and have its number given to a new one."""
    kill(ns, pid)
    wait_for("the number to be free", lambda: pid not in ns.pids())
    ns.popen([sys.executable, str(REUSE), str(pid), "sleep", "300"], detached=True)
    wait_for("the new owner", lambda: ns.cmdline(pid)[:1] == ["sleep"])


def test_no_grip_on_a_number_that_was_given_to_another(ns: Namespace) -> None:
    seen = see(ns, ns.popen(["sleep", "600"], detached=True).pid)
    give_to_another(ns, seen.pid)
    assert ns.call(lambda: grip(seen)) is None
    assert ns.cmdline(seen.pid)[:1] == ["sleep"]


def test_a_grip_from_before_never_reaches_the_new_owner(ns: Namespace) -> None:
    """The number changes hands after the pidfd was opened: the signal finds nobody."""
    first = ns.popen(["sleep", "600"], detached=True)
    seen = see(ns, first.pid)
    ready, go = ns.directory / "ready", ns.directory / "go"

    def hold_and_send() -> tuple[str, set[tuple[int, int]]]:
        held = grip(seen)
        assert held is not None
        ready.touch()
        while not go.exists():
            time.sleep(0.02)
        outcome = send(held, signal.SIGKILL, no_objection)
        ended = wait_ended([held], time.monotonic())
        held.close()
        return outcome.result, ended

    import threading

    results: list[tuple[str, set[tuple[int, int]]]] = []
    thread = threading.Thread(target=lambda: results.append(ns.call(hold_and_send)))
    thread.start()
    wait_for("the grip", ready.exists)
    give_to_another(ns, seen.pid)
    go.touch()
    thread.join(20)
    assert results == [("changed", {seen.key})]
    assert ns.cmdline(seen.pid)[:1] == ["sleep"]


def test_gone_refused_and_objected(ns: Namespace) -> None:
    process = ns.popen(["sleep", "600"], detached=True)
    seen = see(ns, process.pid)

    def body() -> list[str]:
        held = grip(seen)
        assert held is not None
        results = [send(held, signal.SIGTERM, lambda now: f"it is {now.comm}").detail]
        if os.fork() == 0:
            # Another user may open a pidfd, and not signal through it.
            os.setuid(65534)
            refused = send(held, signal.SIGTERM, no_objection)
            os._exit(0 if refused.result == "refused" and "run as root" in refused.detail else 1)
        results.append(str(os.wait()[1]))
        results.append(send(held, signal.SIGKILL, no_objection).result)
        assert wait_ended([held], time.monotonic() + 10) == {seen.key}
        deadline = time.monotonic() + 10
        while read_process(seen.pid) is not None and time.monotonic() < deadline:
            time.sleep(0.02)
        results.append(send(held, signal.SIGKILL, no_objection).result)
        held.close()
        return results

    assert ns.call(body) == ["it is sleep", "0", "sent", "gone"]
    assert ns.call(lambda: grip(seen)) is None


def test_a_wait_ends_at_its_deadline_and_tells_who_ended(ns: Namespace) -> None:
    stays = see(ns, ns.popen(["sleep", "600"], detached=True).pid)
    goes = see(ns, ns.popen(["sleep", "600"], detached=True).pid)

    def body() -> tuple[set[tuple[int, int]], int]:
        before = len(os.listdir("/proc/self/fd"))
        grips = [held for one in (stays, goes) if (held := grip(one)) is not None]
        send(grips[1], signal.SIGKILL, no_objection)
        ended = wait_ended(grips, time.monotonic() + 0.5)
        for held in grips:
            held.close()
        return ended, len(os.listdir("/proc/self/fd")) - before

    assert ns.call(body) == ({goes.key}, 0)


def test_a_zombie_leader_with_a_living_thread_has_not_ended(ns: Namespace) -> None:
    node = ns.directory / "node"
    node.touch()
    zombie = ns.popen([sys.executable, str(ROOT / "tests" / "fixtures" / "zombie_leader.py"), str(node)], detached=True)
    wait_for("a zombie", lambda: " Z " in (ns.proc / str(zombie.pid) / "stat").read_text())
    seen = see(ns, zombie.pid)
    assert not seen.dead

    def body() -> list[bool]:
        held = grip(seen)
        assert held is not None
        results = [bool(wait_ended([held], time.monotonic() + 0.3))]
        assert send(held, signal.SIGKILL, no_objection).result == "sent"
        results.append(bool(wait_ended([held], time.monotonic() + 10)))
        held.close()
        return results

    assert ns.call(body) == [False, True]
