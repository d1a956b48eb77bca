# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a run, dead or alive, may leave outside of its files: mounts, loop devices, processes of its node."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from ..harness.command import run_command
from ..harness.waiting import wait_for
from .rootfs import LabError

STEP_DEADLINE_S = 30


def unmount_below(directory: Path) -> None:
    """Unmount all that is mounted below ``directory``; a dead FUSE server's mount goes lazily. LabError: it did not."""
    for path in reversed(mounts_below(directory)):
        run_command(["umount", "--lazy", str(path)], STEP_DEADLINE_S)
    left = mounts_below(directory)
    if left:
        # Never go on: what is mounted here may be the machine's own root.
        raise LabError(f"still mounted: {', '.join(map(str, left))}")


def mounts_below(directory: Path) -> list[Path]:
    """Mount points below a directory, in the order in which they were mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [Path(line.split()[4].encode().decode("unicode_escape")) for line in lines]
    return [point for point in points if directory in point.parents]


def detach_loops_below(directory: Path) -> None:
    """Detach the loop devices whose files lie below ``directory``."""
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if directory in Path(path.read_text().strip()).parents:
                run_command(["losetup", "--detach", f"/dev/{path.parent.parent.name}"], STEP_DEADLINE_S)


def node_processes(directory: Path) -> list[int]:
    """Everything in the mount namespace of the node at ``directory``: sshd, its sessions, what runs in them."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _is_of_node(int(name), directory)]


def end_node_processes(directory: Path) -> None:
    """Kill them all."""
    for pid in node_processes(directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for("the node's processes gone", lambda: not node_processes(directory), STEP_DEADLINE_S)


def _is_of_node(pid: int, directory: Path) -> bool:
    """Only a process of that namespace has this mount."""
    try:
        mounts = Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError:
        return False
    return f"upperdir={directory}/sbin/upper," in mounts
