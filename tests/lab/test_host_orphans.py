# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A relaunch whose holders can't be seen from inside: the node evicts exactly them, and nobody else notices."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.lab.gpus import USED_MIB
from ansible_collections.cleanslate.sglang.tests.lab.inventory import API_KEY
from ansible_collections.cleanslate.sglang.tests.lab.node import Guest, Node, outsider
from ansible_collections.cleanslate.sglang.tests.lab.scenarios import (
    OTHER_PORT,
    PORT,
    Census,
    bounded,
    bystanders_on,
    chat,
    everybody_in,
    evictions,
    holder_on,
    joint_verdict,
    relaunch_bound_s,
    run_host,
    signalled,
    start_by_hand,
    trace_node,
)
from ansible_collections.cleanslate.sglang.tests.lab.servers import ask, leaders
from ansible_collections.cleanslate.sglang.tests.lab.state import assert_state, host_of, host_of_node

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("attach", [pytest.param("answers", marks=pytest.mark.promise), "hangs"])
def test_exactly_the_invisible_go(
    node: Node, pair: tuple[Guest, Guest], tmp_path: Path, request: pytest.FixtureRequest, attach: str
) -> None:
    """Founding case 4; public case 33: who merely has the GPU open is left alone. ``hangs``: no pct exec answers."""
    mine, other = pair
    if attach == "hangs":
        node.hang("exec", ignore_term=True)
    start_by_hand(mine, "old", PORT, 0)
    start_by_hand(other, "embed", OTHER_PORT, 1)
    with contextlib.ExitStack() as stack:
        orphans = [
            stack.enter_context(outsider(mine, 0, title=f"sglang::scheduler_TP{rank}", place=rank)) for rank in (0, 1)
        ]
        bystanders = stack.enter_context(bystanders_on(node))
        holder = stack.enter_context(holder_on(node, 1))
        old = leaders(mine.box, PORT)[0]
        family = {one.outer_pid for one in mine.box.processes().values() if one.uid == old.uid}
        spared = Census.of({holder, *bystanders.values()} | everybody_in(other) | {mine.box.outer_init} - family)

        with bounded(request, f"relaunch by the node, attach {attach}", relaunch_bound_s()):
            run = run_host(
                mine,
                "relaunch",
                tmp_path,
                "-e",
                "server=chat",
                node_variables={"ansible_python_interpreter": trace_node(node)},
            )
        run.check()

        pids = {one.pid for one in orphans}
        assert {target for target, _signal in signalled(node)} == pids
        spared.check()
        assert not [one for one in orphans if one.lives]
        inside, outside = evictions(run)
        assert old.pid in {one["pid"] for one in inside["ended"]}
        assert {one["pid"] for one in outside["ended"]} == pids and outside["verdict"] == "evicted"
        assert outside["before"][0]["used_mib"] == 2 * USED_MIB and outside["after"][0]["used_mib"] == 0
        rows = outside["before"][0]["holders"]
        assert {(one["pid"], one["lxc"]) for one in rows} == {(pid, str(mine.vmid)) for pid in pids}
        verdict = joint_verdict(run)
        assert verdict["verdict"] == "clean"
        assert {view["verdict"] for view in verdict["views"].values()} == {"clean"}

        # It serves, in a unit of ours; nobody else noticed.
        assert ask(mine.box, "GET", "/health", PORT, key=API_KEY)[0] == 200
        assert_state(host_of(mine.box), running=["sglang-chat"], listening=[PORT], gone=[old.pid])
        assert_state(host_of(other.box), running=["embed"], listening=[OTHER_PORT])
        assert ask(other.box, "GET", "/health", OTHER_PORT)[0] == 200
        words = {holder: "hold_device", bystanders["dcgm"]: "dcgm-exporter", bystanders["jupyter"]: "ipykernel"}
        assert_state(host_of_node(node), living=words, gone=sorted(pids))
    # Nothing of it needed an attach.
    assert not node.pct_calls("exec")


def test_unprivileged(node: Node, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The same where the container's root is somebody else outside, and map_files is refused inside."""
    with node.guest(unprivileged=True) as guest:
        start_by_hand(guest, "old", PORT, 0)
        with outsider(guest, 0) as orphan, holder_on(node, 1) as holder:
            spared = Census.of({holder, guest.box.outer_init})
            with bounded(request, "relaunch of an unprivileged container", relaunch_bound_s()):
                run = run_host(
                    guest,
                    "relaunch",
                    tmp_path,
                    "-e",
                    "server=chat",
                    node_variables={"ansible_python_interpreter": trace_node(node)},
                )
            run.check()
            assert {target for target, _signal in signalled(node)} == {orphan.pid}
            spared.check()
            _inside, outside = evictions(run)
            assert outside["container"]["unprivileged"] is True
            assert joint_verdict(run)["verdict"] == "clean"
            assert ask(guest.box, "GET", "/health", PORT, key=API_KEY)[0] == 200
            assert_state(host_of(guest.box), running=["sglang-chat"], listening=[PORT])


def test_check_mode_touches_nothing(node: Node, tmp_path: Path) -> None:
    """It shows the node's plan as well, and everybody lives on."""
    with node.guest() as guest:
        start_by_hand(guest, "old", PORT, 0)
        with outsider(guest, 0) as orphan:
            everybody = Census.of(everybody_in(guest) | {orphan.pid})
            run = run_host(guest, "relaunch", tmp_path, "-e", "server=chat", "--check").check()
            everybody.check()
            _inside, outside = evictions(run)
            assert outside["verdict"] == "planned"
            assert f"pid {orphan.pid} sglang::scheduler_TP0" in str(outside["plan"]), outside["plan"]
            assert not node.pct_calls("stop")


def test_not_where_it_is_not_allowed(node: Node, tmp_path: Path) -> None:
    """``sglang_host_rungs: false``: the node is not asked, and what is held elsewhere ends the run."""
    with node.guest() as guest, outsider(guest, 0) as orphan:
        run = run_host(
            guest, "relaunch", tmp_path, "-e", "server=chat", variables={"sglang_host_rungs": False}, servers=[chat()]
        )
        assert run.rc == 2 and "held_elsewhere" in run.stdout, run.stdout
        assert orphan.lives and not evictions(run)[1]
        assert not leaders(guest.box) and not (guest.box.root / "etc/systemd/system/sglang-chat.service").exists()
