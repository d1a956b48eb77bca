# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import time
import typing as t
from pathlib import Path

import pytest
import yaml

from ansible_collections.cleanslate.sglang.plugins.modules import memory_info
from ansible_collections.cleanslate.sglang.tests.unit.fake_host import FakeHost, maps_line, meminfo, run_module

GIB = 1024**3
MEMORY = meminfo(
    MemTotal=8 * 1024**2,
    MemFree=4 * 1024**2,
    MemAvailable=6 * 1024**2,
    Buffers=0,
    Cached=1024**2,
    SReclaimable=0,
    Shmem=0,
)


class Host(FakeHost):
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(root, monkeypatch)
        self._capsys = capsys
        (self.proc / "meminfo").write_bytes(MEMORY)

    def memory_info(self, **args: t.Any) -> t.Any:
        roots = {"proc_root": str(self.proc), "sys_root": str(self.sys), "shm_dir": str(self.shm)}
        return run_module(memory_info.main, {**roots, **args}, self._capsys)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Host:
    return Host(tmp_path, monkeypatch, capsys)


def test_a_healthy_host(host: Host) -> None:
    result = host.memory_info()
    assert result["changed"] is False
    assert result["available_mib"] == 6144
    assert (result["meminfo"]["mem_total_mib"], result["meminfo"]["swap_total_mib"]) == (8192, None)
    assert result["cgroup"] == {
        "version": 2,
        "path": "/",
        "limit_mib": None,
        "current_mib": None,
        "headroom_mib": None,
        "readable": True,
    }
    assert result["free_g"].splitlines()[1].split() == ["Mem:", "8", "2", "4", "0", "1", "6"]
    assert (result["sglang"], result["pinned_mib"]) == ([], 0)
    assert result["shm"]["files"] == []
    assert (result["shm"]["file_count"], result["shm"]["scan_complete"]) == (0, True)
    assert result["problems"] == []


def test_check_mode_looks_as_well(host: Host) -> None:
    assert host.memory_info(_ansible_check_mode=True)["available_mib"] == 6144


def test_a_container_limit_bounds_what_is_available(host: Host) -> None:
    host.cgroup("/", memory__max=2 * GIB, memory__current=GIB, memory__stat=f"inactive_file {GIB // 4}")
    result = host.memory_info()
    assert result["cgroup"]["headroom_mib"] == 1280
    assert result["available_mib"] == 1280


def test_what_sglang_pins_and_who_is_sglang(host: Host) -> None:
    key = "sk-very-secret"
    leader = ["/opt/venv/bin/python3", "-m", "sglang.launch_server", "--api-key", key, "--port", "30000"]
    host.process(100, leader, status={"RssShmem": "20480 kB", "VmPin": "0 kB", "VmLck": "0 kB"})
    scheduler = {"RssShmem": "9819812 kB", "VmPin": "0 kB", "VmLck": "64 kB"}
    host.process(101, ["sglang::scheduler_TP0"], ppid=100, status=scheduler)
    host.process(102, ["sglang::detokenizer"], ppid=100, status={"RssShmem": "0 kB", "VmPin": "0 kB", "VmLck": "0 kB"})
    host.process(103, ["sglang::scheduler_TP1"], ppid=100, state="Z", status=scheduler)  # dead: it pins nothing
    host.process(104, ["vim", "sglang::scheduler_TP0.log"], status=scheduler)
    host.process(105, ["grep", "-r", "sglang.launch_server", "."], status=scheduler)
    host.process(106, ["python3", "train.py"], status={"RssShmem": "99999999 kB"})
    result = host.memory_info()
    assert [(row["pid"], row["rss_shmem_mib"], row["vm_pin_mib"], row["vm_lck_mib"]) for row in result["sglang"]] == [
        (100, 20, 0, 0),
        (101, 9589, 0, 0),
        (102, 0, 0, 0),
    ]
    assert result["sglang"][1]["title"] == "sglang::scheduler_TP0"
    assert result["pinned_mib"] == 9609
    assert "--port 30000" in result["sglang"][0]["title"]
    assert key not in str(result)


def test_pinned_memory_that_is_not_told_is_unknown_and_not_zero(host: Host) -> None:
    host.process(101, ["sglang::scheduler_TP0"], status={"RssShmem": "1024 kB"})
    host.process(102, ["sglang::scheduler_TP1"])
    result = host.memory_info()
    assert result["pinned_mib"] is None
    assert [row["rss_shmem_mib"] for row in result["sglang"]] == [1, None]
    assert "102/status" in result["problems"][0]["call"]


def test_shared_memory_by_owner(host: Host) -> None:
    now = time.time()
    used = host.shm_file("sgl_shm_mq_100_a", size=1024, mtime=now - 60)
    host.shm_file("sgl_shm_mq_777_b", size=4096, mtime=now - 3600)
    host.shm_file("sglang_loads_0a_1b.shm", size=16)
    host.shm_file("psm_1a2b", size=16)
    host.process(100, ["python3", "-m", "sglang.launch_server"], maps=maps_line(used), fds={9: str(used)})
    shm = host.memory_info()["shm"]
    files = {file["name"]: file for file in shm["files"]}
    assert (shm["file_count"], shm["stale_count"], shm["files_left_out"]) == (4, 1, 0)
    stale = files["sgl_shm_mq_777_b"]
    assert (stale["stale"], stale["creator_pid"], stale["creator_alive"]) == (True, 777, False)
    assert 3590 <= stale["age_s"] <= 3700
    assert stale["uid"] == os.getuid()
    live = files["sgl_shm_mq_100_a"]
    assert (live["stale"], live["creator_alive"], live["mapped_by"], live["opened_by"]) == (False, True, [100], [100])
    assert files["sglang_loads_0a_1b.shm"]["stale"] is False
    assert "server's user is not known" in files["sglang_loads_0a_1b.shm"]["why"]
    assert "any program" in files["psm_1a2b"]["why"]


def test_a_file_without_a_name_that_is_still_mapped(host: Host) -> None:
    path = host.shm_file("x")
    line = maps_line(path, shown="/dev/shm/sgl_shm_mm_5_a (deleted)", inode=path.stat().st_ino + 100_000)
    host.process(100, ["python3"], maps=line)
    assert host.memory_info()["shm"]["deleted_but_mapped"] == [{"path": "/dev/shm/sgl_shm_mm_5_a", "pid": 100}]


def test_a_name_that_is_no_utf_8_comes_escaped(host: Host) -> None:
    (Path(os.fsdecode(os.fsencode(str(host.shm)) + b"/nccl-\xff\n"))).write_bytes(b"")
    assert [file["name"] for file in host.memory_info()["shm"]["files"]] == ["nccl-\\xff\n"]


def test_what_cannot_be_read_is_null_with_a_reason(host: Host, tmp_path: Path) -> None:
    (host.proc / "meminfo").unlink()
    host.cgroups(b"0::/gone\n", b"")
    result = host.memory_info(shm_dir=str(tmp_path / "none"))
    assert result["available_mib"] is None
    assert set(result["meminfo"].values()) == {None}
    assert result["cgroup"]["readable"] is False
    shm = result["shm"]
    assert (shm["free_mib"], shm["total_mib"], shm["files"], shm["file_count"], shm["stale_count"]) == (None,) * 5
    words = " ".join(problem["message"] for problem in result["problems"])
    assert "MemAvailable" in words
    assert "cgroup" in words
    assert "No such file" in words


def test_a_meminfo_that_does_not_answer_is_given_up_and_the_rest_is_told(host: Host) -> None:
    """lxcfs is a FUSE file system: with its daemon stuck, a read never returns. A FIFO without a writer acts alike."""
    (host.proc / "meminfo").unlink()
    os.mkfifo(host.proc / "meminfo")
    host.shm_file("psm_a")
    result = host.memory_info(deadline_s=6)
    assert (result["meminfo"], result["cgroup"], result["available_mib"], result["free_g"]) == (None,) * 4
    (problem,) = result["problems"]
    assert "no answer within 2 s" in problem["message"]
    assert result["sglang"] == []
    assert [file["name"] for file in result["shm"]["files"]] == ["psm_a"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"proc_root": "/nowhere"}, "proc_root: /nowhere is not a directory"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": -1}, "deadline_s"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"device": "0"}, "Unsupported parameters"),
    ],
)
def test_bad_input_is_one_clear_error(host: Host, args: dict[str, t.Any], words: str) -> None:
    result = host.memory_info(**args)
    assert result["failed"] is True
    assert words in result["msg"]


def test_the_real_host(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_module(memory_info.main, {}, capsys)
    assert 0 < result["available_mib"] <= result["meminfo"]["mem_total_mib"]
    assert result["shm"]["path"] == "/dev/shm"
    assert result["free_g"].startswith("               total")


# --- the documentation says what the module does ---


def documented(entries: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """Names of the documented return values, with those of the dicts and lists of dicts below them."""
    return {name: documented(entry.get("contains") or {}) for name, entry in entries.items()}


def test_every_key_of_the_result_is_documented_and_there(host: Host) -> None:
    host.process(101, ["sglang::scheduler_TP0"], maps=maps_line(host.shm_file("x"), "/dev/shm/y (deleted)", inode=1))
    result = host.memory_info()
    names = documented(yaml.safe_load(memory_info.RETURN))
    result = {name: value for name, value in result.items() if name not in ("changed", "invocation")}
    assert set(names) == set(result)
    for name in ("meminfo", "cgroup", "shm"):
        assert set(names[name]) == set(result[name]), name
    assert set(names["sglang"]) == set(result["sglang"][0])
    assert set(names["shm"]["files"]) == set(result["shm"]["files"][0])
    assert set(names["shm"]["deleted_but_mapped"]) == set(result["shm"]["deleted_but_mapped"][0])
    assert set(names["problems"]) == set(result["problems"][0])
