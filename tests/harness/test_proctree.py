# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A recorded /proc reads as the kernel's own does."""

from __future__ import annotations

import os
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.devices import memory_nodes
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Mapping, Proc, tcp_line, write_proc


def fields(text: str) -> list[str]:
    return text.rpartition(")")[2].split()


def test_same_files_in_the_same_shape_as_the_kernel(tmp_path: Path) -> None:
    root = write_proc(tmp_path / "proc", [Proc(7, ["python3", "-m", "x"], ppid=3, start_ticks=99, uid=5)], self_pid=7)
    for name in (
        "stat",
        "status",
        "cmdline",
        "comm",
        "maps",
        "environ",
        "cgroup",
        "wchan",
        "exe",
        "fd",
        "map_files",
        "task",
    ):
        assert os.path.lexists(f"/proc/self/{name}"), name
        assert os.path.lexists(root / "self" / name), name
    kernel = Path("/proc/self/stat").read_text()
    recorded = (root / "7" / "stat").read_text()
    assert len(fields(recorded)) == len(fields(kernel))
    assert (fields(recorded)[1], fields(recorded)[19]) == ("3", "99")
    known = {line.partition(":")[0] for line in Path("/proc/self/status").read_text().splitlines()}
    written = {line.partition(":")[0] for line in (root / "7" / "status").read_text().splitlines()}
    assert written <= known
    assert (root / "7" / "cmdline").read_bytes() == b"python3\0-m\0x\0"
    assert "MemAvailable" in (root / "meminfo").read_text()


def test_zombie_leader_shows_only_what_its_thread_has(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    root = write_proc(tmp_path / "proc", [Proc(7, "x", state="Z", tids=[8], fds=[file], maps=[Mapping(file)])])
    assert os.listdir(root / "7" / "fd") == []
    assert (root / "7" / "maps").read_text() == ""
    assert os.listdir(root / "7" / "task" / "8" / "fd") == ["3"]
    assert str(file) in (root / "7" / "task" / "8" / "maps").read_text()


def test_pending_kill_and_wait_channel(tmp_path: Path) -> None:
    root = write_proc(tmp_path / "proc", [Proc(7, "x", state="R", kill_pending=True, wchan="uvm_spin_loop")])
    assert "ShdPnd:\t0000000000000100\n" in (root / "7" / "status").read_text()
    assert (root / "7" / "wchan").read_text() == "uvm_spin_loop"


def test_tcp_line_has_the_kernels_columns(tmp_path: Path) -> None:
    root = write_proc(tmp_path / "proc", [Proc(7, "x")], tcp=tcp_line(30000))
    line = (root / "net" / "tcp").read_text().splitlines()[1].split()
    assert (line[1], line[3], line[9]) == ("0100007F:7530", "0A", "4711")


@pytest.mark.ns
def test_device_scan_agrees_on_a_live_and_a_recorded_holder(ns: Namespace, tmp_path: Path) -> None:
    from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.devices import scan_devices
    from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_processes
    from ansible_collections.cleanslate.sglang.tests.harness.programs import FIXTURES
    from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

    (zero,) = memory_nodes(tmp_path / "zero")
    output = tmp_path / "out"
    live = ns.popen([sys.executable, str(FIXTURES / "hold_device.py"), "--map", str(zero)], output=output)
    wait_for("held", lambda: output.read_text().strip())
    root = write_proc(
        tmp_path / "proc", [Proc(live.pid, "python3", fds=[zero], maps=[Mapping(zero, "rw-p", size_kib=4)])]
    )

    def scan(proc: str) -> t.Any:
        return [use for use in scan_devices(read_processes(proc), proc, major=1).uses if use.pid == live.pid]

    def summary(proc: str) -> list[tuple[int, int]]:
        return [(use.minor, use.readable_kib) for use in scan(proc) if use.minor == 5]

    assert ns.call(lambda: summary("/proc")) == summary(str(root)) == [(5, 4)]
