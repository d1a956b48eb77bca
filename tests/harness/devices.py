# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Device nodes that have no GPU behind them, for holders and visitors.

A process is a holder of a GPU if it maps the node readable; that needs a driver behind the number. What there is:

- ``memory_nodes``: character devices of major 1. /dev/zero's (minor 5) can be mapped (private), the others only be
  opened: the first GPU has holders by mapping, the others visitors, or holders by NVML's word. Give the code under test
  major 1.
- ``loop_nodes``: block devices 7:N, mapped shared as a real one is (``rw-s``), each with its own minor number.
- ``visitor_nodes``: major 195 without a driver, which can only be opened with O_PATH.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import typing as t
from pathlib import Path

NVIDIA_MAJOR = 195
NVIDIACTL_MINOR = 255
MEMORY_MAJOR = 1
MEMORY_MINORS = (5, 3, 7, 9)  # zero, null, full, urandom
LOOP_MAJOR = 7
LOOP_BYTES = 4 * 1024 * 1024
LOSETUP_DEADLINE_S = 20


def make_node(path: Path, major: int, minor: int, *, block: bool = False) -> Path:
    """mknod; needs root. Returns the path."""
    kind = stat.S_IFBLK if block else stat.S_IFCHR
    os.mknod(path, kind | 0o666, os.makedev(major, minor))
    path.chmod(0o666)
    return path


def visitor_nodes(directory: Path, count: int) -> list[Path]:
    """nvidia0... with NVIDIA's own numbers: they can be seen open, not mapped."""
    directory.mkdir(exist_ok=True)
    make_node(directory / "nvidiactl", NVIDIA_MAJOR, NVIDIACTL_MINOR)
    return [make_node(directory / f"nvidia{minor}", NVIDIA_MAJOR, minor) for minor in range(count)]


def memory_nodes(directory: Path, count: int = 1) -> list[Path]:
    """nvidia0... of major 1, with the minors of MEMORY_MINORS in that order."""
    directory.mkdir(exist_ok=True)
    minors = MEMORY_MINORS[:count]
    return [make_node(directory / f"nvidia{number}", MEMORY_MAJOR, minor) for number, minor in enumerate(minors)]


@contextlib.contextmanager
def loop_nodes(directory: Path, count: int) -> t.Iterator[list[Path]]:
    """nvidia0... over loop devices; ``os.minor(os.stat(path).st_rdev)`` is each one's minor number (major 7)."""
    directory.mkdir(exist_ok=True)
    attached: list[str] = []
    nodes: list[Path] = []
    try:
        for number in range(count):
            backing = directory / f"backing{number}"
            with backing.open("wb") as file:
                file.truncate(LOOP_BYTES)
            done = subprocess.run(
                ["losetup", "--find", "--show", str(backing)],
                check=True,
                capture_output=True,
                text=True,
                timeout=LOSETUP_DEADLINE_S,
            )
            attached.append(done.stdout.strip())
            minor = os.minor(os.stat(attached[-1]).st_rdev)
            nodes.append(make_node(directory / f"nvidia{number}", LOOP_MAJOR, minor, block=True))
        yield nodes
    finally:
        for device in attached:
            subprocess.run(["losetup", "--detach", device], check=True, timeout=LOSETUP_DEADLINE_S)
