# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's Proxmox node: that it is what the scenarios take it for, and that nothing of it reaches the machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT, DeadlinePassed, run_command
from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.containers import IDS_BASE, Lab
from ansible_collections.cleanslate.sglang.tests.lab.gpus import USED_MIB
from ansible_collections.cleanslate.sglang.tests.lab.leftovers import mounts_below, node_processes
from ansible_collections.cleanslate.sglang.tests.lab.node import Guest, Node, outsider
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import DOUBLES, PYTHON, SERVER_USER
from ansible_collections.cleanslate.sglang.tests.lab.state import assert_state, host_of, host_of_node

pytestmark = pytest.mark.lab

MEMORY = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
LISTED = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]


def memory(text: str) -> list[int]:
    return [int(line.split(", ")[1]) for line in text.splitlines()]


def test_pct_as_on_proxmox(node: Node) -> None:
    with node.guest(passthrough="bind") as guest:
        vmid = str(guest.vmid)
        assert node.run(["pct", "status", vmid], 20).check().stdout == "status: running\n"
        inside = node.run(["pct", "exec", vmid, "--", "hostname"], 20).check()
        assert inside.stdout == f"{guest.box.name}\n"
        # By the absolute name too, which community.proxmox uses; and neither of it on the machine itself.
        assert node.run(["/usr/sbin/pct", "config", vmid], 20).check().stdout == guest.config.read_text()
        assert node.run(["cat", f"/etc/pve/lxc/{vmid}.conf"], 20).check().stdout == guest.config.read_text()
        assert not Path("/usr/sbin/pct").exists() and not Path("/etc/pve").exists()
        assert node.run(["pct", "status", "4711"], 20).rc == 255

        guest.set_option("lock", "backup")
        refused = node.run(["pct", "stop", vmid], 20)
        assert (refused.rc, refused.stderr) == (255, "CT is locked (backup)\n")
        assert [vmid, "running", "backup", guest.box.name] in [
            line.split() for line in node.run(["pct", "list"], 20).check().stdout.splitlines()
        ]
        guest.set_option("lock", None)

        node.hang("status")
        started = time.monotonic()
        with pytest.raises(DeadlinePassed):
            node.run(["timeout", "60", "pct", "status", vmid], 2)
        assert time.monotonic() - started < 10
        (call,) = [one for one in node.pct_calls("status") if one.hung]
        assert call.argv == ("status", vmid) and call.rc is None
        stat = Path(f"/proc/{call.pid}/stat").read_text().rpartition(")")[2].split()
        assert stat[0] == "S"


def test_stop_and_start(node: Node) -> None:
    with node.guest() as guest:
        assert guest.box.run(MEMORY, 30).check().stdout == "0, 0\n1, 0\n"
        node.run(["pct", "stop", str(guest.vmid)], 40).check()
        assert node.run(["pct", "status", str(guest.vmid)], 20).check().stdout == "status: stopped\n"
        node.run(["pct", "start", str(guest.vmid)], 40).check()
        guest.box.wait_booted()
        # The nodes and the driver are there again, as after any start.
        assert guest.box.run(MEMORY, 30).check().stdout == "0, 0\n1, 0\n"
        assert_state(host_of(guest.box), running=["ssh"], listening=[22], silent=[30000])
        assert [(call.argv[0], call.rc) for call in node.pct_calls() if call.argv[0] in ("stop", "start")] == [
            ("stop", 0),
            ("start", 0),
        ]


@pytest.mark.parametrize("passthrough", ["devN", "bind"])
def test_who_sees_what(node: Node, passthrough: str) -> None:
    """A process past the PID namespace: the node sees it, NVML inside its memory only, /proc inside nothing."""
    with node.guest(passthrough=passthrough) as guest, outsider(guest, 1) as orphan:
        assert Path(f"/proc/{orphan.pid}/cmdline").read_bytes().rstrip(b"\0") == b"sglang::scheduler_TP0"
        cgroups = Path(f"/proc/{orphan.pid}/cgroup").read_text().splitlines()
        assert [line for line in cgroups if f":/lxc/{guest.vmid}/" in line] == cgroups
        assert orphan.pid not in {one.outer_pid for one in guest.box.processes().values()}
        listing = guest.box.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"], 20).stdout
        assert "sglang::" not in listing

        assert memory(guest.box.run(MEMORY, 30).check().stdout) == [0, USED_MIB]
        assert guest.box.run(LISTED, 30).check().stdout == ""
        assert memory(node.run(MEMORY, 30).check().stdout) == [0, USED_MIB]
        assert node.run(LISTED, 30).check().stdout == f"{orphan.pid}, {USED_MIB}\n"
        assert node.gpus.holders(1) == {orphan.pid} and not node.gpus.holders(0)

        inside = os.stat(guest.box.root / "dev/nvidia1")
        outside = os.stat(node.gpus.nodes[1])
        assert inside.st_rdev == outside.st_rdev == os.makedev(LOOP_MAJOR, node.gpus.minors[1])
        same = (inside.st_dev, inside.st_ino) == (outside.st_dev, outside.st_ino)
        assert same == (passthrough == "bind")

        assert_state(host_of_node(node), living={orphan.pid: "sglang::scheduler_TP0"})
        orphan.process.kill()
        orphan.process.wait(10)
        assert memory(guest.box.run(MEMORY, 30).check().stdout) == [0, 0]
        assert memory(node.run(MEMORY, 30).check().stdout) == [0, 0]


def test_unprivileged(node: Node) -> None:
    with node.guest(unprivileged=True) as guest:
        box = guest.box
        init = Path(f"/proc/{box.outer_init}")
        assert init.stat().st_uid == IDS_BASE
        assert (init / "uid_map").read_text().split() == ["0", str(IDS_BASE), "65536"]
        assert box.ssh(["id", "-u"], 20).check().stdout == "0\n"
        holder = [PYTHON, f"{DOUBLES}/fixtures/hold_device.py", "--map", "/dev/nvidia1"]
        box.run(["systemd-run", "--quiet", "--unit=holder", f"--uid={SERVER_USER}", *holder], 30).check()
        wait_for("a holder of GPU 1", lambda: len(node.gpus.holders(1)) == 1)
        (outer,) = node.gpus.holders(1)
        assert f":/lxc/{guest.vmid}/ns/system.slice/holder.service\n" in Path(f"/proc/{outer}/cgroup").read_text()
        # What tells holders from visitors is refused to this container's root.
        (inner,) = [one.pid for one in box.processes().values() if one.outer_pid == outer]
        done = box.run(["sh", "-c", f"stat -L /proc/{inner}/map_files/*"], 20)
        assert done.rc != 0 and "Operation not permitted" in done.stderr
        assert memory(box.run(MEMORY, 30).check().stdout) == [0, USED_MIB]
        with outsider(guest, 0) as orphan:
            assert node.gpus.holders(0) == {orphan.pid}
            assert Path(f"/proc/{orphan.pid}").stat().st_uid == IDS_BASE
            assert memory(box.run(MEMORY, 30).check().stdout) == [USED_MIB, USED_MIB]
        # It comes back like any other.
        node.run(["pct", "stop", str(guest.vmid)], 40).check()
        node.run(["pct", "start", str(guest.vmid)], 40).check()
        box.wait_booted()
        assert memory(box.run(MEMORY, 30).check().stdout) == [0, 0]


def test_two_at_once(pair: tuple[Guest, Guest]) -> None:
    first, second = pair
    assert (first.vmid, second.vmid) == (129, 130)
    with outsider(first, 0) as orphan:
        # The memory is the device's: it shows to both.
        for guest in pair:
            assert memory(guest.box.run(MEMORY, 30).check().stdout) == [USED_MIB, 0]
        assert f":/lxc/{first.vmid}/" in Path(f"/proc/{orphan.pid}/cgroup").read_text()
    assert (
        second.box.run(
            [PYTHON, "-c", f"import socket; socket.create_connection(('{first.box.address}', 22), 5)"], 10
        ).rc
        == 0
    )


def test_nothing_of_a_node_stays(node: Node) -> None:
    argv = ["ssh", *node.ssh_words, "sleep 600"]
    session = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_for("a session", lambda: len(node.processes()) >= 3, 20)
        node.close()
        assert session.wait(20) == 255
    finally:
        session.kill()
        session.wait(10)
    assert not node.processes()
    assert not node.directory.exists() and not mounts_below(node.directory)
    assert str(node.directory) not in Path("/proc/mounts").read_text()


def test_a_killed_run_is_swept_away(lab: Lab) -> None:
    """No root login, loop device or mount outlives a run by more than a cleanup."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.lab.node"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _unused in range(6)]
            directory = Path(lines[4].split()[1]).parent
            session = subprocess.Popen(
                [*shlex.split(lines[2].partition(":")[2]), "sleep 600"],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            wait_for("a session", lambda: len(node_processes(directory / "node")) >= 3, 20)
        finally:
            process.send_signal(signal.SIGKILL)
    try:
        run_command([sys.executable, "-m", "tests.lab.containers", "cleanup"], 120, cwd=ROOT).check()
        wait_for("the dead run removed, by us or by a run that started", lambda: not directory.exists(), 60)
        assert session.wait(20) == 255
    finally:
        session.kill()
        session.wait(10)
    assert not node_processes(directory / "node") and not mounts_below(directory)
    assert not [
        path for path in Path("/sys/block").glob("loop*/loop/backing_file") if str(directory) in path.read_text()
    ]
