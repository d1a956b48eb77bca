# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab itself: what it claims to be, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT, run_command
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.containers import Container, Lab, remove_stale_cgroups
from ansible_collections.cleanslate.sglang.tests.lab.gpus import USED_MIB, Gpus
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import DOUBLES, PYTHON, SERVER_USER

pytestmark = pytest.mark.lab


def test_the_cgroups_are_laid_out_as_on_proxmox(box: Container) -> None:
    sshd = next(one for one in box.processes().values() if one.title.startswith("sshd: /usr/sbin/sshd"))
    outside = Path(f"/proc/{sshd.outer_pid}/cgroup").read_text()
    assert f":/lxc/{box.number}/ns/system.slice/ssh.service\n" in outside
    status = Path(f"/proc/{sshd.outer_pid}/status").read_text()
    assert f"NSpid:\t{sshd.outer_pid}\t{sshd.pid}\n" in status


def test_an_unknown_host_key_is_refused(box: Container) -> None:
    box.lab.known_hosts.write_text("")
    done = box.ssh(["true"], 20)
    box.lab.write_known_hosts()
    assert done.rc == 255 and "Host key verification failed" in done.stderr


def test_gpu_memory_follows_who_maps_the_node(box: Container, gpus: Gpus) -> None:
    program = f"{DOUBLES}/fixtures/hold_device.py"
    box.run(
        ["systemd-run", "--quiet", "--unit=holder", f"--uid={SERVER_USER}", PYTHON, program, "--map", "/dev/nvidia1"],
        30,
    )
    wait_for("a holder of GPU 1", lambda: len(gpus.holders(1)) == 1)
    asked = box.run(["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"], 30).check()
    assert [line.split(", ") for line in asked.stdout.splitlines()] == [["0", "0"], ["1", str(USED_MIB)]]
    box.run(["systemctl", "stop", "holder"], 30).check()
    asked = box.run(["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"], 30).check()
    assert [line.split(", ") for line in asked.stdout.splitlines()] == [["0", "0"], ["1", "0"]]


def test_a_killed_run_is_swept_away(lab: Lab) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.lab.containers", "up"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _unused in range(4)]
            inventory = Path(lines[3].split()[1])
            number = int(lines[2].split()[-1])
            directory = inventory.parent
            assert os.path.ismount(directory / "lxc" / str(number) / "merged")
        finally:
            process.send_signal(signal.SIGKILL)
    run_command([sys.executable, "-m", "tests.lab.containers", "cleanup"], 120, cwd=ROOT).check()
    wait_for("the dead run removed, by us or by a run that started", lambda: not directory.exists(), 60)
    assert str(directory) not in Path("/proc/mounts").read_text()
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and str(directory) in _cmdline(pid)]


def test_ctrl_c_leaves_nothing(lab: Lab) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.lab.containers", "up"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _unused in range(5)]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    directory = Path(lines[3].split()[1]).parent
    assert not directory.exists() and str(directory) not in Path("/proc/mounts").read_text()


def _cmdline(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def test_cgroups_of_a_killed_run_are_no_obstacle(lab: Lab, tmp_path: Path) -> None:
    """LXC starts no container over them. Those of other numbers stay, and so does what is in use (here: not empty)."""
    for place in ("systemd/lxc/131/ns/a", "lxc.monitor/131", "pids/lxc.monitor/131", "lxc/132", "freezer/lxc/131"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "freezer/lxc/131/used").touch()
    remove_stale_cgroups(131, tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("13*"))
    assert left == ["freezer/lxc/131", "lxc/132"]
    with lab.container() as box:
        number = box.number
        monitors = [path for path in Path("/sys/fs/cgroup").glob("**/lxc.monitor") if path.is_dir()]
        assert monitors
    for one in monitors:
        (one / str(number)).mkdir(exist_ok=True)
    with lab.container(numbers=[number]) as again:
        assert again.run(["true"], 20).rc == 0
