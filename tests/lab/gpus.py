# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Simulated GPUs of a container: device nodes that can really be mapped, and an NVML double whose memory follows them.

Each node bears the number of a loop device of its own (major 7), so processes that map ``/dev/nvidia0`` readable are
told apart from those that map ``/dev/nvidia1``; modules get ``device_major: 7``. The library lies in the loader's path,
its state at the place where it looks by default.
"""

from __future__ import annotations

import contextlib
import os
import typing as t
from pathlib import Path

from ..doubles.nvml.double import DEFAULT_STATE, Gpu, Hold, write_state
from ..harness.devices import LOOP_MAJOR, loop_nodes, make_node
from .containers import Container

USED_MIB = 20_000


class Gpus:
    """The GPUs of a container. ``state`` holds the lines that the NVML double answers from."""

    def __init__(self, box: Container, minors: t.Sequence[int]) -> None:
        self.box = box
        self.minors = tuple(minors)
        self.lines: tuple[Gpu | Hold, ...] = ()
        self.paths = [f"/dev/nvidia{index}" for index in range(len(minors))]
        for index, minor in enumerate(minors):
            make_node(box.root / f"dev/nvidia{index}", LOOP_MAJOR, minor, block=True)
        records = box.root / DEFAULT_STATE.relative_to("/").with_suffix(".d")
        records.mkdir(parents=True)
        records.chmod(0o1777)
        self.write()

    def write(self, *more: Hold) -> None:
        """Every process that maps a node readable has memory there; ``more`` comes on top."""
        gpus = [Gpu(index, minor=minor) for index, minor in enumerate(self.minors)]
        holds = [Hold(index, mib=USED_MIB, device=f"{LOOP_MAJOR}:{minor}") for index, minor in enumerate(self.minors)]
        self.lines = (*gpus, *holds, *more)
        write_state(self.box.root / DEFAULT_STATE.relative_to("/"), self.lines)

    def holders(self, index: int) -> set[int]:
        """Inner pids of all processes that map this GPU's node readable: what the kernel says, not what we report."""
        wanted = os.makedev(LOOP_MAJOR, self.minors[index])
        return {seen.pid for seen in self.box.processes().values() if _maps_readable(seen.outer_pid, wanted)}


def _maps_readable(outer_pid: int, rdev: int) -> bool:
    proc = Path(f"/proc/{outer_pid}")
    try:
        for line in (proc / "maps").read_text(errors="replace").splitlines():
            words = line.split(maxsplit=5)
            if words[1].startswith("r") and len(words) == 6 and "/dev/nvidia" in words[5]:
                # The kernel names the node by its address range; stat tells the number whatever the path says.
                low, high = words[0].split("-")
                if os.stat(proc / "map_files" / f"{int(low, 16):x}-{int(high, 16):x}").st_rdev == rdev:
                    return True
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended while we looked
    return False


@contextlib.contextmanager
def simulated_gpus(box: Container, count: int = 2) -> t.Iterator[Gpus]:
    """Give a fresh container its GPUs. The loop devices are detached at the end, whatever happens."""
    with loop_nodes(box.directory / "loops", count) as nodes:
        yield Gpus(box, [os.minor(node.stat().st_rdev) for node in nodes])
