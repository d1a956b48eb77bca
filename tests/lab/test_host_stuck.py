# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container whose init is dead while a child can't die: everything is named, and nothing waits for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.node import Node, silent_files
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import DOUBLES, SGLANG_PYTHON
from ansible_collections.cleanslate.sglang.tests.lab.scenarios import (
    PCT_TRY_S,
    Census,
    bounded,
    codes,
    evictions,
    holder_on,
    joint_verdict,
    run_host,
    teardown_bound_s,
)
from ansible_collections.cleanslate.sglang.tests.lab.state import assert_state, host_of_node

pytestmark = pytest.mark.lab

SILENT = "mnt/silent"
WAITS_FOR_FUSE = ("request_wait_answer", "fuse_wait_answer")


@pytest.mark.promise
def test_init_dead_child_unkillable(node: Node, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = node.directory / "silent"
    folder.mkdir()
    entry = f"{folder} {SILENT} none bind,create=dir 0 0"
    with (
        silent_files(folder) as files,
        node.guest(mounts=[entry]) as guest,
        holder_on(node, 1) as holder,
    ):
        try:
            words = ["--title", "sglang::scheduler_TP0", "--map", "--read", f"/{SILENT}/x", "/dev/nvidia0"]
            argv = [SGLANG_PYTHON, f"{DOUBLES}/fixtures/hold_device.py", *words]
            guest.box.run(["systemd-run", "--quiet", "--unit=stuck", "--", *argv], 30).check()
            (stuck,) = wait_for("a holder of GPU 0", lambda: node.gpus.holders(0), 20)
            wait_for("it reads", lambda: wchan(stuck) in WAITS_FOR_FUSE, 20)
            os.kill(guest.box.outer_init, signal.SIGKILL)
            wait_for("it can't die", lambda: state(stuck) == "D", 20)
            spared = Census.of([holder])

            with bounded(request, "teardown, init dead, child unkillable", teardown_bound_s(PCT_TRY_S)):
                run = run_host(guest, "teardown", tmp_path, "-e", "server=chat")
            assert run.rc == 2, run.stdout
            _inside, outside = evictions(run)
            assert outside["verdict"] in ("failed", "unknown"), outside
            assert names(outside["msg"], stuck), outside["msg"]
            assert names(run.stdout, stuck), run.stdout

            with bounded(request, "assert_clean, init dead, child unkillable", teardown_bound_s(PCT_TRY_S)):
                judged = run_host(guest, "assert_clean", tmp_path, "-e", "server=chat")
            assert judged.rc == 2, judged.stdout
            verdict = joint_verdict(judged)
            assert verdict["verdict"] == "dirty", verdict
            assert names(str(verdict["reasons"]), stuck), verdict["reasons"]
            assert {"held", "container_broken"} <= codes(verdict), codes(verdict)
            assert_state(host_of_node(node), living={stuck: "sglang::scheduler_TP0", holder: "hold_device"})
            assert state(stuck) == "D"
            spared.check()
        finally:
            # Its server's death frees whoever waits there; then the container can go.
            files.kill()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wchan(pid: int) -> str:
    return Path(f"/proc/{pid}/wchan").read_text()


def names(text: str, pid: int) -> bool:
    """Whether a text tells the unkillable process with its state and what it waits on, however its lines are broken."""
    words = " ".join(text.split())
    return f"pid {pid}" in words and "state D" in words and wchan(pid) in words
