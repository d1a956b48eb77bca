# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two containers that share a GPU: one is evicted, the other's holder stays, and the verdict says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.lab.node import Guest, Node
from ansible_collections.cleanslate.sglang.tests.lab.scenarios import (
    OTHER_PORT,
    PORT,
    Census,
    bounded,
    chat,
    everybody_in,
    evictions,
    joint_verdict,
    relaunch_bound_s,
    run_host,
    signalled,
    start_by_hand,
    trace_node,
)
from ansible_collections.cleanslate.sglang.tests.lab.servers import ask, leaders
from ansible_collections.cleanslate.sglang.tests.lab.state import assert_state, host_of

pytestmark = pytest.mark.lab


def test_the_neighbours_holder_stays(
    node: Node, pair: tuple[Guest, Guest], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Even with the widest scope: whoever holds the GPU *in this container*."""
    mine, other = pair
    start_by_hand(mine, "old", PORT, 0)
    start_by_hand(other, "embed", OTHER_PORT, 0)
    (neighbour,) = node.gpus.holders(0) & everybody_in(other)
    spared = Census.of(everybody_in(other))
    with bounded(request, "relaunch beside a neighbour on the same GPU", relaunch_bound_s()):
        run = run_host(
            mine,
            "relaunch",
            tmp_path,
            "-e",
            "server=chat",
            servers=[chat(scope="gpu")],
            node_variables={"ansible_python_interpreter": trace_node(node)},
        )
    assert run.rc == 2, run.stdout
    assert not signalled(node)
    spared.check()
    assert ask(other.box, "GET", "/health", OTHER_PORT)[0] == 200
    assert not leaders(mine.box) and node.gpus.holders(0) == {neighbour}
    _inside, outside = evictions(run)
    assert not outside["ended"] and neighbour in {one["pid"] for one in outside["spared"]}, outside
    assert_state(host_of(mine.box), not_running=["old", "sglang-chat"], silent=[PORT])
    assert_state(host_of(other.box), running=["embed"], listening=[OTHER_PORT])
    verdict = joint_verdict(run)
    assert verdict["verdict"] == "dirty"
    text = str(verdict["reasons"])
    assert f"container {other.vmid}" in text and str(neighbour) in text, text
