# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ctrl-C, or a controller that dies, at each step: the next run finishes the job, and nothing is half-written."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace, NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import PlaybookHost, summary_of

pytestmark = [pytest.mark.ns, pytest.mark.slow]

# Where the run is broken off: the words of the task's heading.
STEPS = {
    "preflight": "Try the start of each chosen server",
    "teardown": "Evict what holds the GPUs",
    "clean_state": "Ask whether the host is clean",
    "launch": "launch : Start demo",
    "verify": "Wait for the proof",
}
# The second heading of this text is meant: the first is the preflight's trial.
SECOND = ("launch",)


@pytest.fixture
def host(ns: Namespace, tmp_path: Path) -> PlaybookHost:
    """A host on which the old server ends slowly and the new one starts slowly, so that each step lasts."""
    one = PlaybookHost(tmp_path, ns)
    one.follow_schedulers()
    faults = {"LOAD_S": "3", "POLL_S": "2"}
    one.servers = [one.server("demo", 31000, flags={"tp_size": 2}, faults=faults)]
    return one


def break_off(ns: Namespace, run: NsProcess, how: str) -> None:
    """Ctrl-C reaches the whole process group; a controller that dies takes nothing with it."""

    def strike() -> None:
        if how == "ctrl-c":
            os.killpg(os.getpgid(run.pid), signal.SIGINT)
        else:
            os.kill(run.pid, signal.SIGKILL)

    ns.call(strike)
    wait_for("the run's end", lambda: run.pid not in {pid for pid, _ticks in ns.living()}, 60)


@pytest.mark.parametrize("how", ["ctrl-c", "controller dies"])
@pytest.mark.parametrize("step", STEPS)
def test_the_next_run_finishes_the_job(host: PlaybookHost, ns: Namespace, tmp_path: Path, step: str, how: str) -> None:
    host.run("relaunch.yml").check()
    old = host.record("demo")
    output = tmp_path / "broken-off.log"
    run = host.start("relaunch.yml", output)
    times = 2 if step in SECOND else 1
    heading = STEPS[step]
    wait_for(heading, lambda: output.read_text().count(heading) >= times, 120)
    break_off(ns, run, how)
    assert "PLAY RECAP" not in output.read_text() or how == "ctrl-c"

    for path in (tmp_path / "state" / "demo").rglob("*.json"):
        json.loads(path.read_text())
    text = summary_of(host.run("relaunch.yml").check())

    assert "demo on gpu01: SERVING" in text
    new = host.record("demo")
    assert new["pid"] != old["pid"]
    leaders = [pid for pid, title in ns.titles().items() if "sglang.launch_server" in title]
    assert leaders == [new["pid"]], ns.titles()
    schedulers = [title for title in ns.titles().values() if title.startswith("sglang::scheduler")]
    assert len(schedulers) == 2, ns.titles()
