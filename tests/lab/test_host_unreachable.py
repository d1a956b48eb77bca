# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container that ssh does not reach: pct enters where it can, the node acts where it can't, a refusal says why."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.scripts.bootstrap import proxmox_collections
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Fault
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.lab.inventory import API_KEY
from ansible_collections.cleanslate.sglang.tests.lab.node import Guest, Node
from ansible_collections.cleanslate.sglang.tests.lab.scenarios import (
    DEADLINES,
    NVML_S,
    PCT_TRY_S,
    PORT,
    Census,
    bounded,
    codes,
    everybody_in,
    evictions,
    joint_verdict,
    relaunch_bound_s,
    run_host,
    run_module_on_node,
    start_by_hand,
    teardown_bound_s,
)
from ansible_collections.cleanslate.sglang.tests.lab.servers import ask, leaders
from ansible_collections.cleanslate.sglang.tests.lab.state import assert_state, host_of, host_of_node

pytestmark = pytest.mark.lab


@pytest.fixture
def cut_off(node: Node) -> t.Iterator[Guest]:
    """A container with a server, and without an sshd."""
    with node.guest() as guest:
        start_by_hand(guest, "old", PORT, 0)
        guest.box.run(["systemctl", "stop", "ssh.service"], 30).check()
        assert guest.box.ssh(["true"], 20).rc == 255
        yield guest


def environment(node: Node, scratch: Path, *, with_plugin: bool = True) -> dict[str, str]:
    """An operator's: a home with the node's key, and community.proxmox where it is installed."""
    home = scratch / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "known_hosts").write_text(node.lab.known_hosts.read_text())
    paths = [str(ROOT / ".collections"), *([str(proxmox_collections())] if with_plugin else [])]
    return {"HOME": str(home), "ANSIBLE_COLLECTIONS_PATH": ":".join(paths)}


def test_a_relaunch_through_pct(node: Node, cut_off: Guest, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    old = leaders(cut_off.box, PORT)[0]
    # Each task is six pct exec over a connection of its own.
    with bounded(request, "relaunch through pct exec", relaunch_bound_s(PCT_TRY_S, 60)):
        run = run_host(cut_off, "relaunch", tmp_path, "-e", "server=chat", env=environment(node, tmp_path))
    run.check()
    assert f"reaches it by pct exec {cut_off.vmid} on pve1" in " ".join(run.stdout.split()), run.stdout
    assert len(node.pct_calls("exec")) > 10
    assert old.pid not in cut_off.box.processes()
    assert ask(cut_off.box, "GET", "/health", PORT, key=API_KEY)[0] == 200
    assert joint_verdict(run)["verdict"] == "clean"


def test_it_says_why_not(node: Node, cut_off: Guest, tmp_path: Path) -> None:
    """The connection plugin is missing: nothing is touched, and the message names what to install."""
    everybody = Census.of(one.outer_pid for one in cut_off.box.find("sglang"))
    run = run_host(
        cut_off, "relaunch", tmp_path, "-e", "server=chat", env=environment(node, tmp_path, with_plugin=False)
    )
    assert run.rc == 2
    (failed,) = [task for task in run.tasks if task.status == "failed" and not task.ignored]
    assert "community.proxmox" in failed.result["msg"] and "Nothing was touched" in failed.result["msg"]
    everybody.check()
    assert not run.of_action("gpu_evict")


def test_no_way_in(node: Node, cut_off: Guest, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Neither ssh nor pct: a relaunch can't start anything in there, so it touches nothing, and says what it tried."""
    node.hang("exec", ignore_term=True)
    everybody = Census.of(everybody_in(cut_off))
    with bounded(request, "relaunch, no way in", relaunch_bound_s(PCT_TRY_S)):
        run = run_host(cut_off, "relaunch", tmp_path, "-e", "server=chat", env=environment(node, tmp_path))
    assert run.rc == 2
    (failed,) = [task for task in run.tasks if task.status == "failed" and not task.ignored]
    assert f"pct exec {cut_off.vmid}" in failed.result["msg"] and "Nothing was touched" in failed.result["msg"]
    everybody.check()
    assert not run.of_action("gpu_evict")


def test_an_attach_that_hangs(node: Node, cut_off: Guest, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Founding case 5: pct exec gives no answer. It costs its deadline, is named, and the node evicts without it."""
    node.hang("exec", ignore_term=True)
    # Worse than a refused connection: one that is taken, and never greeted.
    cut_off.box.run(["systemctl", "start", "ssh.service"], 30).check()
    cut_off.box.run(["systemctl", "kill", "--signal=STOP", "ssh.service"], 30).check()
    old = leaders(cut_off.box, PORT)[0]
    family = {one.outer_pid for one in cut_off.box.processes().values() if one.uid == old.uid}
    others = Census.of(everybody_in(cut_off) - family)
    with bounded(request, "teardown, ssh down, attach hangs", teardown_bound_s(PCT_TRY_S)):
        run = run_host(cut_off, "teardown", tmp_path, "-e", "server=chat", env=environment(node, tmp_path))
    run.check()
    _inside, outside = evictions(run)
    assert outside["verdict"] == "evicted" and {one["pid"] for one in outside["ended"]} == family
    stop = [rung for rung in outside["rungs"] if rung["rung"] == "stop"]
    assert stop and stop[0]["seconds"] < DEADLINES["attach"] + 5, stop
    assert stop[0]["note"] == f"pct exec {cut_off.vmid} gave no answer within {DEADLINES['attach']} s", stop
    hung = [call for call in node.pct_calls("exec") if call.hung]
    assert hung and not [call for call in hung if Path(f"/proc/{call.pid}").exists()]
    others.check()
    assert not node.gpus.holders(0)

    with bounded(request, "assert_clean, ssh down, attach hangs", teardown_bound_s(PCT_TRY_S)):
        judged = run_host(
            cut_off, "assert_clean", tmp_path, "-e", "server=chat", env=environment(node, tmp_path / "again")
        )
    judged.check()
    assert joint_verdict(judged)["views"]["host"]["verdict"] == "clean"
    assert_state(host_of_node(node), gone=sorted(family))


def test_a_node_that_does_not_answer(node: Node, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Its sshd takes connections and says nothing. The run ends before anything is touched."""
    with node.guest() as guest:
        start_by_hand(guest, "old", PORT, 0)
        everybody = Census.of(everybody_in(guest))
        with node.frozen(), bounded(request, "relaunch, the node's ssh hangs", relaunch_bound_s()):
            run = run_host(guest, "relaunch", tmp_path, "-e", "server=chat")
        assert run.rc != 0
        (failed,) = [task for task in run.tasks if task.status == "failed" and not task.ignored]
        assert "pve1" in failed.result["msg"] and "Nothing was touched" in failed.result["msg"], failed.result
        everybody.check()
        assert_state(host_of(guest.box), running=["old"], listening=[PORT])


def test_a_driver_that_hangs_on_the_node(node: Node, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """NVML on the node never answers: it costs its deadline, is named before anything is touched, and never clean."""
    with node.guest() as guest:
        node.gpus.write(Fault("nvmlDeviceGetMemoryInfo*", hang=True))
        with bounded(request, "assert_clean, the node's NVML hangs", teardown_bound_s()):
            run = run_host(guest, "assert_clean", tmp_path, "-e", "server=chat")
        assert run.rc == 2
        (failed,) = [task for task in run.tasks if task.status == "failed" and not task.ignored]
        assert f"NVML gave no answer within {NVML_S} s" in failed.result["msg"], failed.result
        arguments = {"container": str(guest.vmid), "samples": 1, "settle_s": 0, "allow_simulated": True}
        judged = run_module_on_node(node, "clean_state", arguments, tmp_path)
        assert judged.result["verdict"] == "unknown" and "driver_hung" in codes(judged.result), judged.result
