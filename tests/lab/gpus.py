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

from ..doubles.nvml.double import DEFAULT_STATE, Gpu, Hold, Line, NvmlDouble, write_state
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
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass  # it ended while we looked, or a sandbox hides its own first process: that holds no loop device
    return False


@contextlib.contextmanager
def simulated_gpus(box: Container, count: int = 2) -> t.Iterator[Gpus]:
    """Give a fresh container its GPUs. The loop devices are detached at the end, whatever happens."""
    with loop_nodes(box.directory / "loops", count) as nodes:
        yield Gpus(box, [os.minor(node.stat().st_rdev) for node in nodes])


# --- GPUs of a node, passed through to its containers -----------------------------------------------------------------

# In every container of a node: files whose locks say, past PID namespaces, who still lives.
SHARED = "/opt/cleanslate-shared"
# So many processes at a time can be seen by their locks, per GPU.
PLACES = 3


def uuid_of(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012x}"


def bus_of(index: int) -> str:
    return f"00000000:{index + 1:02X}:00.0"


def _stated(position: int, index: int, minor: int, **settings: t.Any) -> Gpu:
    """The node's GPU ``index``, which stands at ``position`` in somebody's list."""
    return Gpu(position, uuid=uuid_of(index), bus=bus_of(index), minor=minor, **settings)


class NodeGpus:
    """A node's GPUs: nodes of its own, and a double that sees every process of the machine that maps one of them.

    ``locks`` is the folder that each container sees at SHARED: whoever holds memory of GPU N without being visible
    there locks one of ``locks/gpuN.0``, ``locks/gpuN.1`` and so on.
    """

    def __init__(self, directory: Path, nodes: t.Sequence[Path]) -> None:
        self.nodes = tuple(nodes)
        self.minors = tuple(os.minor(node.stat().st_rdev) for node in nodes)
        self.nvml = NvmlDouble(directory / "nvml")
        self.locks = directory / "locks"
        self.locks.mkdir(mode=0o755)
        for index in range(len(nodes)):
            for place in range(PLACES):
                (self.locks / f"gpu{index}.{place}").touch(mode=0o666)
        self.write()

    def write(
        self,
        *more: Line,
        settings: t.Mapping[int, t.Mapping[str, t.Any]] | None = None,
        release_s: float | None = None,
        holds: bool = True,
    ) -> None:
        """``settings``: of a GPU's state line, by index; ``release_s``: memory outlives its process so long; ``holds``:
        whoever maps a GPU has memory there; ``more``: further lines.
        """
        chosen = settings or {}
        minors = list(enumerate(self.minors))
        gpus = [_stated(index, index, minor, **chosen.get(index, {})) for index, minor in minors]
        mapped = [Hold(index, USED_MIB, device=f"{LOOP_MAJOR}:{minor}", release_s=release_s) for index, minor in minors]
        self.nvml.write(*gpus, *(mapped if holds else ()), *more)

    def holders(self, index: int) -> set[int]:
        """Outer pids of all processes of the machine that map this GPU readable."""
        wanted = os.makedev(LOOP_MAJOR, self.minors[index])
        return {int(name) for name in os.listdir("/proc") if name.isdigit() and _maps_readable(int(name), wanted)}


class GuestGpus:
    """What a container has of its node's GPUs, and what NVML says there: memory is the device's, the list its own.

    Memory that a process outside of its PID namespace holds shows as long as that process locks the GPU's file.
    """

    def __init__(self, gpus: NodeGpus, indices: t.Sequence[int]) -> None:
        self.node = gpus
        self.indices = tuple(indices)
        self.state = Path()

    def prepare(self, box: Container, passthrough: str) -> list[str]:
        """Mount entries for a container that is to be made. ``passthrough``: ``devN`` (another node with the same
        number, as Proxmox makes it) or ``bind`` (the node's own file, as lxc.mount.entry makes it).
        """
        folder = box.directory / "nvml"
        folder.mkdir()
        self.state = folder / "state"
        records = self.state.with_suffix(".d")
        records.mkdir()
        records.chmod(0o1777)
        self.write()
        entries = [
            # Before the next line, or systemd mounts its own /run over it.
            "tmpfs run tmpfs rw,nosuid,nodev,mode=0755 0 0",
            f"{folder} {DEFAULT_STATE.parent.relative_to('/')} none bind,create=dir 0 0",
            f"{self.node.locks} {SHARED.lstrip('/')} none bind,create=dir 0 0",
        ]
        made = box.directory / "passthrough"
        made.mkdir()
        for index in self.indices:
            source = self.node.nodes[index]
            if passthrough == "devN":
                source = make_node(made / source.name, LOOP_MAJOR, self.node.minors[index], block=True)
            entries.append(f"{source} dev/{source.name} none bind,create=file 0 0")
        return entries

    def write(self, *more: Line) -> None:
        lines: list[Line] = []
        for position, index in enumerate(self.indices):
            minor = self.node.minors[index]
            lines += [_stated(position, index, minor), Hold(position, mib=USED_MIB, device=f"{LOOP_MAJOR}:{minor}")]
            lines += [
                Hold(position, mib=USED_MIB, lock=f"{SHARED}/gpu{index}.{place}", listed="no")
                for place in range(PLACES)
            ]
        write_state(self.state, (*lines, *more))
