# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.model import DeviceScan
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.devices import parse_maps, scan_devices
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_processes
from ansible_collections.cleanslate.sglang.tests.harness.devices import make_node
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Mapping, Proc, write_proc

MAPS = """\
7f0000000000-7f0000200000 rw-s 00000000 00:05 1234    /dev/nvidia0
7f0000300000-7f0000310000 -w-s 00000000 00:05 1235    /dev/nvidia1
7f0000400000-7f0000500000 rw-p 00000000 00:00 0       [heap]
7f0000600000-7f0000601000 rw-p 00000000 00:00 0
7f0000700000-7f0000701000 r--p 00000000 fd:01 99      /usr/lib/a b.so (deleted)
nonsense
"""


def test_parse_maps() -> None:
    lines = parse_maps(MAPS)
    assert [(line.path, line.readable, line.kib, line.device, line.inode) for line in lines] == [
        ("/dev/nvidia0", True, 2048, (0, 5), 1234),
        ("/dev/nvidia1", False, 64, (0, 5), 1235),
        ("/usr/lib/a b.so (deleted)", True, 4, (0xFD, 1), 99),
    ]
    assert lines[0].address == "7f0000000000-7f0000200000"


@given(st.text())
def test_parse_maps_never_raises(text: str) -> None:
    parse_maps(text)
    parse_maps(f"7f00-7f10 rw-s 0 {text} 5 /x\n{text} rw-s 0 00:05 5 /x")


def scan(proc: Path) -> DeviceScan:
    return scan_devices(read_processes(str(proc)), str(proc))


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return make_node(tmp_path / "nvidia3", 195, 3)


def test_fds_and_mappings_are_told_apart(tmp_path: Path, node: Path) -> None:
    proc = write_proc(
        tmp_path / "proc",
        [
            Proc(10, "holder", maps=[Mapping(node, "rw-s", 2048), Mapping(node, "-w-s", 64)], fds=[node, node]),
            Proc(11, "visitor", maps=[Mapping(node, "-w-s", 64)], fds=[node]),
            Proc(12, "nobody", fds=["/dev/null", "socket:[5]"]),
            Proc(13, "kernel", kernel_thread=True),
        ],
    )
    found = scan(proc)
    assert [(use.pid, use.minor, use.fds, use.readable_kib, use.write_only_kib) for use in found.uses] == [
        (10, 3, 2, 2048, 64),
        (11, 3, 1, 0, 64),
    ]
    assert found.complete


def test_the_threads_of_a_zombie_leader_are_looked_at(tmp_path: Path, node: Path) -> None:
    proc = write_proc(tmp_path / "proc", [Proc(10, "x", state="Z", tids=(11,), maps=[Mapping(node)], fds=[node])])
    (proc / "10" / "task" / "11" / "root").symlink_to("/")
    (use,) = scan(proc).uses
    assert (use.pid, use.fds, use.readable_kib) == (10, 1, 2048)


def test_a_dead_zombie_holds_nothing(tmp_path: Path, node: Path) -> None:
    proc = write_proc(tmp_path / "proc", [Proc(10, "x", state="Z", maps=[Mapping(node)], fds=[node])])
    assert scan(proc).uses == ()


def test_without_map_files_the_path_below_root_is_compared(tmp_path: Path, node: Path) -> None:
    """An unprivileged container may not look through map_files."""
    proc = write_proc(tmp_path / "proc", [Proc(10, "x", maps=[Mapping(node)])])
    for link in (proc / "10" / "map_files").iterdir():
        link.unlink()
    found = scan(proc)
    assert [(use.pid, use.readable_kib) for use in found.uses] == [(10, 2048)]
    assert found.complete


def test_a_suspicious_mapping_that_cannot_be_looked_up_is_no_proof_of_absence(tmp_path: Path, node: Path) -> None:
    proc = write_proc(tmp_path / "proc", [Proc(10, "x", maps=[Mapping(node)])])
    for link in (proc / "10" / "map_files").iterdir():
        link.unlink()
    (proc / "10" / "root").unlink()
    found = scan(proc)
    assert (found.uses, found.unreadable, found.complete) == ((), (10,), False)


def test_a_block_device_is_no_gpu_under_nvidias_own_major(tmp_path: Path) -> None:
    block = make_node(tmp_path / "b", 195, 0, block=True)
    assert scan(write_proc(tmp_path / "proc", [Proc(10, "x", fds=[block])])).uses == ()


def test_a_living_holder(tmp_path: Path) -> None:
    """A node with /dev/zero's number, mapped by a real process."""
    path = make_node(tmp_path / "nvidia5", 1, 5)
    script = (
        "import mmap, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "m = mmap.mmap(fd, 8192, flags=mmap.MAP_PRIVATE)\n"
        "print(flush=True)\n"
        "input()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        processes = {pid: one for pid, one in read_processes().items() if pid in (child.pid, os.getpid())}
        uses = {use.pid: use for use in scan_devices(processes, major=1).uses if use.minor == 5}
        assert (uses[child.pid].fds >= 1, uses[child.pid].readable_kib) == (True, 8)
    finally:
        child.communicate(b"\n")
