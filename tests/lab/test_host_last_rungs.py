# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rungs that reach beyond one server: stop the container, reset a GPU. Both refuse a lot, and restore things."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.gpus import USED_MIB
from ansible_collections.cleanslate.sglang.tests.lab.inventory import API_KEY
from ansible_collections.cleanslate.sglang.tests.lab.node import Guest, Node
from ansible_collections.cleanslate.sglang.tests.lab.scenarios import (
    DEADLINES,
    OTHER_PORT,
    PORT,
    Census,
    bounded,
    chat,
    codes,
    everybody_in,
    evict,
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
from ansible_collections.cleanslate.sglang.tests.lab.state import assert_state, host_of

pytestmark = pytest.mark.lab

STUBBORN = {"SGLANG_STANDIN_IGNORE_TERM": "1"}


# --- container_stop ---------------------------------------------------------------------------------------------------


def test_stop_refuses(node: Node, tmp_path: Path) -> None:
    """Unconfirmed, confirmed for another one, locked, HA-managed, others that nobody gave up: nothing is touched."""
    with node.guest() as guest:
        start_by_hand(guest, "old", PORT, 0)
        start_by_hand(guest, "embed", OTHER_PORT, 1)
        everybody = Census.of(everybody_in(guest))
        vmid = str(guest.vmid)
        # Only this server: the other one is somebody whom the stop would hit.
        scope = {"scope": "server"}
        given = {**scope, "confirm_container_stop": vmid, "acknowledge": ["embed.service"]}

        refused = evict(node, tmp_path, guest, "container_stop", **scope)
        assert {"container_stop_unconfirmed", "container_unacknowledged"} <= codes(refused), refused
        assert refused["failed"] and f"confirm_container_stop={vmid}" in str(refused["reasons"])

        refused = evict(node, tmp_path, guest, "container_stop", **{**given, "confirm_container_stop": "130000"})
        assert "container_stop_unconfirmed" in codes(refused), refused

        refused = evict(node, tmp_path, guest, "container_stop", **{**given, "acknowledge": []})
        assert codes(refused) & {"container_unacknowledged"} and str(OTHER_PORT) in str(refused["reasons"]), refused

        guest.set_option("lock", "backup")
        refused = evict(node, tmp_path, guest, "container_stop", **given)
        assert "container_locked" in codes(refused) and "backup" in str(refused["reasons"]), refused
        guest.set_option("lock", None)

        node.set_ha(guest.vmid)
        refused = evict(node, tmp_path, guest, "container_stop", **given)
        assert "container_ha_managed" in codes(refused), refused

        everybody.check()
        assert not node.pct_calls("stop")


def test_stop_start_relaunch(
    node: Node, pair: tuple[Guest, Guest], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A server that no allowed rung ends: with everybody's word its container restarts, and the run goes on."""
    mine, other = pair
    start_by_hand(mine, "old", PORT, 0, **STUBBORN)
    start_by_hand(mine, "embed", OTHER_PORT, 1)
    start_by_hand(other, "embed", OTHER_PORT, 1)
    spared = Census.of(everybody_in(other))
    init = mine.box.outer_init
    confirmed = ["-e", f"confirm_container_stop={mine.vmid}", "-e", "acknowledge=embed.service"]
    bound = relaunch_bound_s(DEADLINES["container_stop"], DEADLINES["container_start"], 60)
    with bounded(request, "relaunch over a stop of the container", bound):
        run = run_host(
            mine,
            "relaunch",
            tmp_path,
            "-e",
            "server=chat",
            *confirmed,
            servers=[chat(rungs=["term"], deadlines={**DEADLINES, "term": 2}, scope="server")],
        )
    run.check()
    _inside, outside = evictions(run)
    assert [rung["rung"] for rung in outside["rungs"]][-1] == "container_stop", outside["rungs"]
    assert [(call.argv, call.rc) for call in node.pct_calls() if call.argv[0] in ("stop", "start")] == [
        (("stop", str(mine.vmid)), 0),
        (("start", str(mine.vmid)), 0),
    ]
    assert mine.box.outer_init != init
    spared.check()
    assert joint_verdict(run)["verdict"] == "clean"
    assert ask(mine.box, "GET", "/health", PORT, key=API_KEY)[0] == 200
    assert_state(host_of(mine.box), running=["sglang-chat"], not_running=["old", "embed"], listening=[PORT])


def test_a_stop_that_hangs(node: Node, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """``pct stop`` gives no answer: it costs its deadline, the blockers are named, and nothing is half done."""
    with node.guest() as guest:
        start_by_hand(guest, "old", PORT, 0)
        node.hang("stop", ignore_term=True)
        everybody = Census.of(everybody_in(guest))
        leader = leaders(guest.box, PORT)[0]
        deadlines = {**DEADLINES, "container_stop": 4}
        with bounded(request, "container_stop, pct stop hangs", 4 + 20 + 4 * 10 + 20):
            result = evict(
                node,
                tmp_path,
                guest,
                "container_stop",
                deadlines=deadlines,
                confirm_container_stop=str(guest.vmid),
            )
        assert result["failed"] and "container_stop_hung" in codes(result), result
        assert "4 s" in result["msg"] and str(leader.outer_pid) in str(result), result["msg"]
        everybody.check()
        hung = [call for call in node.pct_calls("stop") if call.hung]
        assert len(hung) == 1 and not Path(f"/proc/{hung[0].pid}").exists()
        assert not node.pct_calls("start")


def test_a_start_that_hangs(node: Node, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Stopped, and ``pct start`` gives no answer: tried again, and then told that the container is down now."""
    with node.guest() as guest:
        start_by_hand(guest, "old", PORT, 0)
        node.hang("start", ignore_term=True)
        deadlines = {**DEADLINES, "container_start": 3}
        with bounded(request, "container_stop, pct start hangs", DEADLINES["container_stop"] + 2 * 3 + 4 * 10 + 20):
            result = evict(
                node, tmp_path, guest, "container_stop", deadlines=deadlines, confirm_container_stop=str(guest.vmid)
            )
        assert result["failed"] and "container_start_failed" in codes(result), result
        assert f"pct start {guest.vmid}" in result["msg"] and "stopped" in result["msg"], result["msg"]
        hung = [call for call in node.pct_calls("start") if call.hung]
        assert hung and not [call for call in hung if Path(f"/proc/{call.pid}").exists()]
        assert node.run(["pct", "status", str(guest.vmid)], 30).check().stdout == "status: stopped\n"


# --- gpu_reset --------------------------------------------------------------------------------------------------------


def test_reset_refuses(node: Node, pair: tuple[Guest, Guest], tmp_path: Path) -> None:
    """Unconfirmed, for another GPU, or while anybody uses the GPU: the node, or the container next door."""
    mine, other = pair
    leak(node, 0)
    refused = evict(node, tmp_path, mine, "gpu_reset")
    assert refused["failed"] and "gpu_reset_unconfirmed" in codes(refused), refused
    refused = evict(node, tmp_path, mine, "gpu_reset", confirm_gpu_reset=["1"])
    assert "gpu_reset_unconfirmed" in codes(refused), refused

    with holder_on(node, 0) as holder:
        refused = evict(node, tmp_path, mine, "gpu_reset", confirm_gpu_reset=["0"])
        # Somebody out of scope explains the memory, so no reset is even considered.
        assert refused["verdict"] == "nothing_to_do" and not refused["changed"], refused
        assert holder in {one["pid"] for one in refused["spared"]}, refused
    # It merely has the GPU open.
    start_by_hand(other, "embed", OTHER_PORT, 1)
    spared = Census.of(everybody_in(other))
    refused = evict(node, tmp_path, mine, "gpu_reset", confirm_gpu_reset=["0"])
    assert "gpu_reset_in_use" in codes(refused) and f"container {other.vmid}" in str(refused["reasons"]), refused
    spared.check()
    assert not node.gpus.nvml.actions()


def test_reset_frees_what_nobody_holds(node: Node, tmp_path: Path) -> None:
    """Memory that stayed without a holder, and persistence mode as it was before."""
    with node.guest() as guest:
        leak(node, 0)
        traced = trace_node(node)
        arguments = {"confirm_gpu_reset": ["0"]}
        result = evict(node, tmp_path, guest, "gpu_reset", **arguments)
        assert not result["failed"], result
        actions = node.gpus.nvml.actions()
        assert actions == ["pm 0 0", "reset 0", "pm 0 1"], actions
        assert result["after"][0]["used_mib"] == 0
        assert traced and not signalled(node)


def test_a_refused_reset_restores_persistence(node: Node, tmp_path: Path) -> None:
    with node.guest() as guest:
        leak(node, 0, smi_reset="never")
        result = evict(node, tmp_path, guest, "gpu_reset", confirm_gpu_reset=["0"])
        assert result["failed"], result
        actions = node.gpus.nvml.actions()
        assert actions[0] == "pm 0 0" and actions[-1] == "pm 0 1" and "reset 0" not in actions, actions
        mode = node.run(["nvidia-smi", "--query-gpu=persistence_mode", "--format=csv,noheader", "-i", "0"], 30).check()
        assert mode.stdout == "Enabled\n"
        assert codes(result) & {"gpu_reset_failed", "gpu_reset_in_use", "gpu_reset_unsupported"}, result


def leak(node: Node, gpu: int, **settings: t.Any) -> None:
    """Memory that no process explains, until a reset."""
    node.gpus.write(settings={gpu: {"extra_mib": USED_MIB, **settings}})
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", str(gpu)]
    wait_for("it leaks", lambda: node.run(asked, 30).check().stdout == f"{USED_MIB}\n")
