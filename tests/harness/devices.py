# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Device nodes that have no GPU behind them, for holders and visitors.

A process is a holder of a GPU if it maps the node readable; that needs a driver behind the number. Two are everywhere:

- /dev/zero's (character 1:5), mapped private. All such nodes have one number: enough for one GPU.
- loop devices (block 7:N), mapped shared like a real one (``rw-s``), each with its own minor number: as many as wanted.

Nodes of major 195 without a driver can only be opened with O_PATH: enough for a visitor.
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
ZERO = (1, 5)
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


def zero_node(directory: Path) -> Path:
    """nvidia0 with /dev/zero's numbers (major 1, minor 5)."""
    directory.mkdir(exist_ok=True)
    return make_node(directory / "nvidia0", *ZERO)


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
