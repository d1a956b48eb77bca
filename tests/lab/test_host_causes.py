# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why memory stays after a kill, as reports tell it, and what the node makes of each. docs/lab.md lists the rest."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Hold
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.gpus import USED_MIB
from ansible_collections.cleanslate.sglang.tests.lab.node import Node, outsider
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import OPERATOR
from ansible_collections.cleanslate.sglang.tests.lab.scenarios import (
    DEADLINES,
    PORT,
    Census,
    bounded,
    codes,
    evict,
    holder_on,
    start_by_hand,
)
from ansible_collections.cleanslate.sglang.tests.lab.servers import leaders, standin_argv, unit_state, wait_serving

pytestmark = pytest.mark.lab


def test_a_dead_rank_whose_child_holds_on(node: Node, tmp_path: Path) -> None:
    """The rank forked after CUDA was there, and was killed: the driver lists the dead pid, the child has the memory."""
    with node.guest() as guest, holder_on(node, 1) as holder:
        settings = "SGLANG_STANDIN_ORPHAN=1 SGLANG_STANDIN_DEVICES=/dev/nvidia0,/dev/nvidia1"
        start = f"export {settings}; nohup {shlex.join(standin_argv(PORT))} >log 2>&1 </dev/null &"
        subprocess.run([*guest.box.ssh_argv(OPERATOR, "-T"), start], timeout=60, check=True)
        wait_serving(guest.box, PORT)
        (rank,) = [one.outer_pid for one in guest.box.find("sglang::scheduler")]
        (child,) = node.gpus.holders(0) - {rank}
        os.kill(leaders(guest.box, PORT)[0].outer_pid, signal.SIGKILL)
        wait_for("the rank is dead", lambda: node.gpus.holders(0) == {child})
        node.gpus.write(Hold(0, USED_MIB, pid=rank, kept_by=(child,)), holds=False)
        spared = Census.of([holder, guest.box.outer_init])

        result = evict(node, tmp_path, guest, scope="gpu")
        assert result["verdict"] == "evicted", result
        assert {one["pid"] for one in result["ended"]} == {child}
        assert result["before"][0]["used_mib"] == USED_MIB and result["after"][0]["used_mib"] == 0
        spared.check()


def test_memory_that_comes_back_late(node: Node, tmp_path: Path) -> None:
    """The driver's deferred close: nobody is left to kill, and the memory goes on its own. It is waited for."""
    node.gpus.write(release_s=3)
    with node.guest() as guest, outsider(guest, 0) as orphan:
        result = evict(node, tmp_path, guest)
        assert result["verdict"] == "evicted" and {one["pid"] for one in result["ended"]} == {orphan.pid}, result
        # Without a launcher there is nobody to ask; and nothing comes after the kill but the wait.
        assert [rung["rung"] for rung in result["rungs"]] == ["kill"], result["rungs"]
        assert result["after"][0]["used_mib"] == 0


@pytest.mark.parametrize("attach", ["answers", "hangs"])
def test_a_supervisor(node: Node, tmp_path: Path, request: pytest.FixtureRequest, attach: str) -> None:
    """``Restart=always`` inside. The node asks the container's systemd; where that hangs, the respawn is named."""
    with node.guest() as guest:
        start_by_hand(guest, "old", PORT, 0, restart="always")
        if attach == "hangs":
            node.hang("exec", ignore_term=True)
        rungs = DEADLINES["stop"] + DEADLINES["term"] + DEADLINES["kill"]
        with bounded(request, f"a supervisor, attach {attach}", 4 * rungs + DEADLINES["attach"] + 6 * 10 + 20):
            result = evict(node, tmp_path, guest)
        if attach == "answers":
            assert result["verdict"] == "evicted" and [rung["rung"] for rung in result["rungs"]] == ["stop"], result
            stops = [call.argv for call in node.pct_calls("exec") if "stop" in call.argv]
            assert stops and stops[0][-1] == "old.service", node.pct_calls("exec")
            assert unit_state(guest.box, "old.service", "ActiveState")["ActiveState"] in ("inactive", "failed")
            assert not leaders(guest.box) and not node.gpus.holders(0)
        else:
            assert result["failed"] and "respawn" in codes(result), result
            assert "old.service" in str(result["reasons"]), result["reasons"]
            assert [call for call in node.pct_calls("exec") if call.hung]
