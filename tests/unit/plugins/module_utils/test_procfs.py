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

from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import procfs
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.systemd import parse_unit
from ansible_collections.cleanslate.sglang.tests.harness.proctree import BOOT_ID, Proc, write_proc
from ansible_collections.cleanslate.sglang.tests.unit.builders import process

STAT = "700 (a) b) (c) S 1 699 698 0 -1 4194560 0 0 0 0 1 2 0 0 20 0 17 0 123456 9 9 9\n"


def test_a_comm_with_parentheses_and_blanks() -> None:
    assert procfs.parse_stat(STAT) == {
        "pid": 700,
        "comm": "a) b) (c",
        "state": "S",
        "ppid": 1,
        "pgid": 699,
        "sid": 698,
        "flags": 4194560,
        "threads": 17,
        "start_ticks": 123456,
    }


@pytest.mark.parametrize(
    "text", ["", "700", "700 (x", "700 (x) S 1", "x (y) S " + "1 " * 30, "700 (x) S a" + " 1" * 30]
)
def test_a_stat_that_makes_no_sense_is_none(text: str) -> None:
    assert procfs.parse_stat(text) is None


def test_cmdline() -> None:
    assert procfs.parse_cmdline(b"python3\0-m\0\0x\0") == ("python3", "-m", "", "x")
    assert procfs.parse_cmdline(b"sglang::scheduler_TP0\0\0\0\0\0") == ("sglang::scheduler_TP0",)
    assert procfs.parse_cmdline(b"") == ()
    assert procfs.parse_cmdline(b"\xff\0") == ("\ufffd",)


def test_cgroups_v2_first_then_systemds() -> None:
    text = "12:pids:/c\n1:name=systemd:/b\n0::/a\n11:cpu,cpuacct:/c\nnonsense\n"
    assert procfs.parse_cgroups(text) == ("/a", "/b", "/c")
    assert procfs.parse_cgroups("0::/a:b\n") == ("/a:b",)


def test_a_recorded_process(tmp_path: Path) -> None:
    proc = write_proc(
        tmp_path / "proc",
        [
            Proc(1, "/sbin/init"),
            Proc(
                700,
                "sglang::scheduler_TP0",
                state="D",
                uid=1000,
                pgid=600,
                sid=500,
                cgroup="0::/system.slice/x.service\n",
                kill_pending=True,
                nspid=(700, 12),
                rss_shmem_kib=9_819_812,
                wchan="uvm_wait",
                tids=(701,),
            ),
            Proc(2, "", ppid=0, kernel_thread=True),
        ],
    )
    found = procfs.read_processes(str(proc))
    one = found[700]
    assert one.title == "sglang::scheduler_TP0"
    assert (one.state, one.uid, one.pgid, one.sid, one.threads) == ("D", 1000, 600, 500, 2)
    assert (one.kill_pending, one.nspid, one.rss_shmem_mib) == (True, (700, 12), 9589)
    assert one.cgroups == ("/system.slice/x.service",)
    assert procfs.read_wchan(700, str(proc)) == "uvm_wait"
    assert procfs.read_wchan(1, str(proc)) is None
    assert found[2].kernel_thread
    assert found[2].title == "[kthread]"
    assert procfs.read_boot_id(str(proc)) == BOOT_ID
    assert procfs.age_s(one, procfs.read_uptime_s(str(proc))) == pytest.approx(
        100_000 - 5000 / os.sysconf("SC_CLK_TCK")
    )


def test_a_zombie_with_threads_is_not_dead(tmp_path: Path) -> None:
    processes = [Proc(5, "x", state="Z"), Proc(6, "x", state="Z", tids=(7, 8))]
    found = procfs.read_processes(str(write_proc(tmp_path / "proc", processes)))
    assert (found[5].dead, found[6].dead) == (True, False)
    assert found[6].task_states == ("S", "S", "Z")


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert procfs.read_process(5, str(tmp_path)) is None
    assert procfs.read_text(str(tmp_path / "x")) is None
    assert procfs.read_environment(5, str(tmp_path)) is None
    assert procfs.read_uptime_s(str(tmp_path)) is None
    assert procfs.read_boot_id(str(tmp_path)) is None
    assert procfs.age_s(process(5), None) is None


def test_a_file_that_never_ends_is_cut() -> None:
    assert procfs.read_bytes("/dev/zero", limit=100_000) == b"\0" * 100_000


def test_ancestors_and_cycles() -> None:
    processes = {pid: process(pid, ppid=ppid) for pid, ppid in {5: 4, 4: 3, 3: 1, 1: 0}.items()}
    assert procfs.ancestors(5, processes) == [4, 3, 1]
    cycle = {pid: process(pid, ppid=ppid) for pid, ppid in {5: 4, 4: 5}.items()}
    assert procfs.ancestors(5, cycle) == [4, 5]


def test_the_living_host_reads_as_itself() -> None:
    code = "print(flush=True); input()"  # its line says that it is past exec, while which a command line is empty
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"A": "b=c"}
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        found = procfs.read_process(child.pid)
        assert found is not None
        assert (found.ppid, found.argv[1:], found.uid) == (os.getpid(), ("-c", code), os.getuid())
        assert procfs.read_process(os.getpid()) is not None
    finally:
        child.communicate(b"\n")
    assert procfs.read_process(child.pid) is None


# --- parsers never raise, whatever a hostile process writes ---


@given(st.text())
def test_parse_stat_never_raises(text: str) -> None:
    for candidate in (text, f"1 ({text}) S 1 1 1 0 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 5 6", f"1 (x) S {text}"):
        parsed = procfs.parse_stat(candidate)
        assert parsed is None or isinstance(parsed["start_ticks"], int)


@given(st.text())
def test_parse_status_and_cgroups_never_raise(text: str) -> None:
    assert all(isinstance(value, str) for value in procfs.parse_status(text).values())
    assert all(isinstance(path, str) for path in procfs.parse_cgroups(text))


@given(st.binary())
def test_parse_cmdline_never_raises(data: bytes) -> None:
    assert all(isinstance(word, str) for word in procfs.parse_cmdline(data))


@given(st.text(), st.text())
def test_parse_unit_never_raises(text: str, number: str) -> None:
    parse_unit(text)
    unit = parse_unit(f"LoadState=loaded\nMainPID={number}")
    assert unit is None or unit.main_pid >= 0


def test_parse_unit() -> None:
    text = (
        "Id=x.service\nMainPID=77\nRestart=always\nActiveState=active\nLoadState=loaded\nControlGroup=/system.slice/x\n"
    )
    unit = parse_unit(text)
    assert unit is not None
    assert (unit.name, unit.main_pid, unit.restart, unit.active_state) == ("x.service", 77, "always", "active")
    assert parse_unit("MainPID=77\n") is None
    assert parse_unit("LoadState=loaded\nMainPID=x\n") is None
