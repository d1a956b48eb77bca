# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cases 24 and 27 as clean_state sees them: a busy port and a full /dev/shm are found before the start."""

from __future__ import annotations

import os
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.modules import clean_state
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Proc, tcp_line
from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import LEADER, Recorded, codes
from ansible_collections.cleanslate.sglang.tests.unit.fake_host import run_module

PORT = 30000


def test_time_wait_leaves_the_port_free(recorded: Recorded) -> None:
    recorded.write(tcp=tcp_line(PORT, "06", inode=0))
    recorded.nvml.write(Gpu(0))
    assert recorded.clean(ports=[PORT]).json["verdict"] == "clean"


def test_a_listener_makes_it_busy_and_is_named(recorded: Recorded) -> None:
    recorded.write(Proc(77, ("/usr/sbin/nginx",), exe="/usr/sbin/nginx", fds=["socket:[4711]"]), tcp=tcp_line(PORT))
    recorded.nvml.write(Gpu(0))
    result = recorded.clean(ports=[PORT, 30001])
    assert (result.json["verdict"], codes(result)) == ("dirty", ["port_busy"])
    assert "pid 77 (/usr/sbin/nginx)" in result.json["summary"]


def test_a_connection_on_the_port_is_told(recorded: Recorded) -> None:
    recorded.write(tcp=tcp_line(PORT, "01", inode=99))
    recorded.nvml.write(Gpu(0))
    result = recorded.clean(ports=[PORT])
    assert result.json["verdict"] == "clean"
    assert "port_in_use_by_connection" in [row["code"] for row in result.json["warnings_found"]]


def test_sockets_that_cannot_be_read_are_unknown(recorded: Recorded) -> None:
    recorded.write()
    (recorded.proc / "net" / "tcp").unlink()
    recorded.nvml.write(Gpu(0))
    result = recorded.clean(ports=[PORT])
    assert (result.json["verdict"], codes(result)) == ("unknown", ["ports_unknown"])


def test_a_server_for_the_port_that_does_not_listen_yet_is_dirty(recorded: Recorded) -> None:
    recorded.write(Proc(500, LEADER))
    namespace = recorded.proc / "500" / "ns"
    namespace.mkdir()
    (namespace / "net").symlink_to("net:[1]")
    (recorded.proc / "1" / "ns").mkdir()
    (recorded.proc / "1" / "ns" / "net").symlink_to("net:[1]")
    recorded.nvml.write(Gpu(0))
    result = recorded.clean(ports=[PORT])
    assert (result.json["verdict"], codes(result)) == ("dirty", ["server_running"])


def test_a_server_whose_port_cannot_be_told_is_unknown(recorded: Recorded) -> None:
    recorded.write(Proc(500, (*LEADER[:3], "--config", "/nowhere/config.yaml")))
    recorded.nvml.write(Gpu(0))
    result = recorded.clean(ports=[PORT])
    assert (result.json["verdict"], codes(result)) == ("unknown", ["server_port_unknown"])


@pytest.mark.parametrize(("devices", "state"), [("0", "dirty"), ("1", "clean")])
def test_a_server_that_still_imports_is_seen_before_it_takes_its_gpu(
    recorded: Recorded, devices: str, state: str
) -> None:
    recorded.write(Proc(500, LEADER, environ={"CUDA_VISIBLE_DEVICES": devices}))
    recorded.nvml.write(Gpu(0), Gpu(1))
    result = recorded.clean(devices=["0"])
    assert result.json["verdict"] == state
    assert codes(result) == (["server_starting"] if state == "dirty" else [])


# --- case 27 ---


def judge(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free_pages: int
) -> dict[str, t.Any]:
    """In this process, since the room of a file system can't be recorded; a host without GPUs."""
    if not recorded.proc.exists():
        recorded.write()
    answer = os.statvfs_result((4096, 4096, 4_718_592, free_pages, free_pages, 10**6, 10**6, 10**6, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: answer)
    roots = {"proc_root": str(recorded.proc), "shm_dir": str(recorded.root / "shm")}
    result = run_module(clean_state.main, {**roots, "expected_gpus": 0, "samples": 1}, capsys)
    return t.cast("dict[str, t.Any]", result)


def test_a_full_dev_shm_is_dirty(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(852):
        (recorded.root / "shm" / f"sgl_shm_mm_{3_900_000 + number}_x").write_bytes(b"x")
    result = judge(recorded, capsys, monkeypatch, free_pages=1024)
    assert result["failed"] is True
    assert [row["code"] for row in result["reasons"]] == ["shm_full"]
    assert "4 MiB free of 18432" in result["msg"]
    assert "SIGBUS (exit code -7)" in result["msg"]
    assert "852 files" in result["msg"]


def test_enough_room_is_clean(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = judge(recorded, capsys, monkeypatch, free_pages=4_000_000)
    assert (result["verdict"], result["reasons"]) == ("clean", [])


def test_room_that_cannot_be_read_is_unknown(recorded: Recorded) -> None:
    recorded.nvml.write(Gpu(0))
    result = recorded.clean(shm_dir=str(recorded.root / "nowhere"))
    assert (result.json["verdict"], codes(result)) == ("unknown", ["shm_unknown"])
