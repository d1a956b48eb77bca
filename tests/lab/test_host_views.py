# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What can be seen from where: holders that fuser misses, holders by two views, a driver that fails in one of them."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Fault
from ansible_collections.cleanslate.sglang.tests.harness.command import run_command
from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.gpus import bus_of
from ansible_collections.cleanslate.sglang.tests.lab.inventory import run_module_on
from ansible_collections.cleanslate.sglang.tests.lab.node import Guest, Node
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import DOUBLES, PYTHON, SERVER_USER
from ansible_collections.cleanslate.sglang.tests.lab.scenarios import (
    OTHER_PORT,
    PORT,
    Census,
    codes,
    everybody_in,
    evictions,
    holder_on,
    joint_verdict,
    run_host,
    run_module_on_node,
    start_by_hand,
)

pytestmark = pytest.mark.lab


def hold(guest: Guest, gpu: int) -> int:
    """A process inside that holds a GPU; its outer pid."""
    argv = [PYTHON, f"{DOUBLES}/fixtures/hold_device.py", "--map", f"/dev/nvidia{gpu}"]
    guest.box.run(["systemd-run", "--quiet", f"--unit=hold{gpu}", f"--uid={SERVER_USER}", "--", *argv], 30).check()
    (pid,) = wait_for("a holder", lambda: guest.node.gpus.holders(gpu) & everybody_in(guest))
    return pid


def holders(result: t.Mapping[str, t.Any], index: int) -> set[int]:
    """The pids that gpu_info names as a GPU's holders."""
    (gpu,) = [one for one in result["gpus"] if one["index"] == index]
    return {one["pid"] for one in gpu["holders"]}


@pytest.mark.parametrize("passthrough", ["devN", "bind"])
def test_fuser_misses_nodes_that_proxmox_makes(node: Node, tmp_path: Path, passthrough: str) -> None:
    """``dev0: /dev/nvidia0`` makes another file with the same numbers. fuser compares files, we compare numbers."""
    with node.guest(passthrough=passthrough) as guest:
        pid = hold(guest, 0)
        asked = run_command(["fuser", str(node.gpus.nodes[0])], 30)
        found = {int(word) for word in asked.stdout.split()}
        # The test itself can fail: the node's own file, bind-mounted, is found.
        assert found == (set() if passthrough == "devN" else {pid}), asked
        done = run_module_on_node(node, "gpu_info", {"container": str(guest.vmid)}, tmp_path)
        assert done.status == "ok" and holders(done.result, 0) == {pid}, done.result
        assert not holders(done.result, 1)
        assert done.result["vantage"] == "host" and done.result["container"]["state"] == "running"


def test_unprivileged_from_both_sides(node: Node, tmp_path: Path) -> None:
    """Inside map_files is refused, and the paths of the mappings must lead to the same holders."""
    with node.guest(unprivileged=True) as guest:
        pid = hold(guest, 1)
        (inner,) = [one.pid for one in guest.box.processes().values() if one.outer_pid == pid]
        refused = guest.box.run(["sh", "-c", f"stat -L /proc/{inner}/map_files/*"], 30)
        assert refused.rc != 0 and "Operation not permitted" in refused.stderr
        inside = run_module_on(guest.box, "gpu_info", {"device_major": LOOP_MAJOR}, tmp_path)
        assert inside.status == "ok" and holders(inside.result, 1) == {inner}, inside.result
        outside = run_module_on_node(node, "gpu_info", {"container": str(guest.vmid)}, tmp_path)
        assert outside.status == "ok" and holders(outside.result, 1) == {pid}, outside.result
        (row,) = [one for gpu in outside.result["gpus"] for one in gpu["holders"]]
        assert (row["inner_pid"], row["lxc"]) == (inner, str(guest.vmid))
        assert outside.result["container"]["unprivileged"] is True


def test_gpus_are_not_told_by_an_index_that_differs(node: Node, tmp_path: Path) -> None:
    """The container has the node's GPU 1 alone, as its GPU 0: an index could mean either, a bus id can't."""
    with node.guest(gpus=[1]) as guest, holder_on(node, 0) as holder:
        pid = hold(guest, 1)
        arguments: dict[str, t.Any] = {
            "container": str(guest.vmid),
            "samples": 1,
            "settle_s": 0,
            "allow_simulated": True,
        }
        refused = run_module_on_node(node, "clean_state", {**arguments, "devices": ["0"]}, tmp_path)
        assert refused.status == "failed" and "UUID" in refused.result["msg"], refused.result
        judged = run_module_on_node(node, "clean_state", {**arguments, "devices": [bus_of(1)]}, tmp_path)
        assert judged.status == "failed" and judged.result["verdict"] == "dirty", judged.result
        assert str(pid) in str(judged.result["reasons"]) and str(holder) not in str(judged.result["reasons"])


def test_the_driver_fails_inside_alone(node: Node, tmp_path: Path) -> None:
    """Public case 16: NVML inside says Unknown Error, the node is fine. Unknown; nobody is killed or reset."""
    with node.guest() as guest:
        start_by_hand(guest, "embed", OTHER_PORT, 1)
        guest.gpus.write(Fault("nvmlInit*", code=999))
        everybody = Census.of(everybody_in(guest))
        judged = run_host(guest, "assert_clean", tmp_path, "-e", "server=chat")
        assert judged.rc == 2
        assert joint_verdict(judged)["verdict"] == "unknown", joint_verdict(judged)
        run = run_host(guest, "relaunch", tmp_path, "-e", "server=chat")
        assert run.rc == 2 and not run.of_action("server_launch"), run.stdout
        everybody.check()
        inside, outside = evictions(run)
        assert not inside.get("ended") and not outside.get("ended")
        assert not node.gpus.nvml.actions() and not node.pct_calls("stop")
        verdict = joint_verdict(judged)
        assert codes(verdict) == {"driver_unknown_error"} and "device cgroup" in verdict["summary"], verdict


def test_an_xid_of_one_gpu(node: Node, tmp_path: Path) -> None:
    """Public case 19: a Xid 119 every 45 s for one bus id. That GPU is unhealthy, the other is not."""
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    kmsg = tmp_path / "kmsg"
    bus = bus_of(0)[4:-2].lower()
    kmsg.write_text(
        "".join(
            f"3,{number},{int((uptime_s - 45 * (5 - number)) * 1e6)},-;NVRM: Xid (PCI:{bus}): 119, pid=1234, "
            "name=nvidia-smi, Timeout after 45s of waiting for RPC response from GPU0 GSP!\n"
            for number in range(5)
        )
    )
    with node.guest() as guest:
        arguments: dict[str, t.Any] = {
            "container": str(guest.vmid),
            "samples": 1,
            "settle_s": 0,
            "ports": [PORT],
            "allow_simulated": True,
            "kmsg": str(kmsg),
        }
        sick = run_module_on_node(node, "clean_state", {**arguments, "devices": ["0"]}, tmp_path)
        assert sick.status == "failed" and sick.result["verdict"] == "dirty", sick.result
        assert "119" in str(sick.result["reasons"]) and "Xid" in str(sick.result["reasons"])
        well = run_module_on_node(node, "clean_state", {**arguments, "devices": ["1"]}, tmp_path)
        assert well.status == "ok" and well.result["verdict"] == "clean", well.result
