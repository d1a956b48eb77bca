# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fixture programs are what they say they are, by the kernel's own word."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.devices import memory_nodes, visitor_nodes
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.programs import FIXTURES, start_bystanders, start_program
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

pytestmark = pytest.mark.ns
KILL_BIT = 1 << 8


def status(ns: Namespace, pid: int) -> dict[str, str]:
    lines = (ns.proc / str(pid) / "status").read_text().splitlines()
    return {name: value.strip() for name, _colon, value in (line.partition(":") for line in lines)}


def maps(ns: Namespace, pid: int, path: Path) -> list[str]:
    lines = (ns.proc / str(pid) / "maps").read_text().splitlines()
    return [line.split()[1] for line in lines if line.endswith(str(path))]


def open_rdevs(ns: Namespace, pid: int) -> set[int]:
    return {os.stat(entry).st_rdev for entry in (ns.proc / str(pid) / "fd").iterdir() if entry.exists()}


def has_open(ns: Namespace, pid: int, rdev: int) -> bool:
    return rdev in open_rdevs(ns, pid)


def kill(ns: Namespace, pid: int, number: signal.Signals) -> None:
    ns.call(lambda: os.kill(pid, number))


def test_visitor_and_holder(ns: Namespace, tmp_path: Path) -> None:
    (bare,) = visitor_nodes(tmp_path / "bare", 1)
    (zero,) = memory_nodes(tmp_path / "zero")
    visitor, _lines = start_program(ns, "hold_device", bare)
    holder, _lines = start_program(ns, "hold_device", "--map", zero)
    doorbell, _lines = start_program(ns, "hold_device", "--map", "--write-only", zero)
    assert os.makedev(195, 0) in open_rdevs(ns, visitor.pid)
    assert maps(ns, visitor.pid, bare) == []
    assert maps(ns, holder.pid, zero) == ["rw-p"]
    assert maps(ns, doorbell.pid, zero) == ["-w-p"]


def test_forked_holders_outlive_their_parent_and_may_ignore_sigterm(ns: Namespace, tmp_path: Path) -> None:
    (zero,) = memory_nodes(tmp_path / "zero")
    parent, lines = start_program(ns, "hold_device", "--map", "--fork", 2, "--ignore-term", zero, lines=3)
    parent.wait_gone()
    children = list(map(int, lines[1:]))
    for child in children:
        assert maps(ns, child, zero) == ["rw-p"]
        assert status(ns, child)["PPid"] == "1"
        kill(ns, child, signal.SIGTERM)
    assert set(children) <= ns.pids()


def test_zombie_leader(ns: Namespace, tmp_path: Path) -> None:
    (bare,) = visitor_nodes(tmp_path / "bare", 1)
    leader, _lines = start_program(ns, "zombie_leader", bare)
    wait_for("zombie", lambda: status(ns, leader.pid)["State"].startswith("Z"))
    assert status(ns, leader.pid)["Threads"] == "2"
    base = ns.proc / str(leader.pid)
    # A zombie's own descriptors can't be listed, its other thread's can.
    assert _entries(base / "fd") == []
    (thread,) = (entry for entry in (base / "task").iterdir() if entry.name != str(leader.pid))
    assert os.makedev(195, 0) in {os.stat(entry).st_rdev for entry in (thread / "fd").iterdir() if entry.exists()}
    kill(ns, leader.pid, signal.SIGKILL)
    leader.wait_gone()


def _entries(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except PermissionError:
        return []


def test_unkillable_reader(ns: Namespace, tmp_path: Path) -> None:
    mountpoint = tmp_path / "hang"
    server, _lines = start_program(ns, "unkillable_fuse", mountpoint)
    reader = ns.popen(["cat", str(mountpoint / "x")], detached=True)
    wait_for("the read", lambda: "wait_answer" in (ns.proc / str(reader.pid) / "wchan").read_text())
    kill(ns, reader.pid, signal.SIGKILL)
    wait_for("state D", lambda: status(ns, reader.pid)["State"].startswith("D"))
    pending = status(ns, reader.pid)
    assert (int(pending["SigPnd"], 16) | int(pending["ShdPnd"], 16)) & KILL_BIT
    kill(ns, server.pid, signal.SIGKILL)
    reader.wait_gone()


def test_respawner(ns: Namespace) -> None:
    supervisor, (first,) = start_program(ns, "respawner", "--delay-s", "0.1", "sleep", "300")
    kill(ns, int(first), signal.SIGKILL)
    second = wait_for("respawn", lambda: [pid for pid, title in ns.titles().items() if title == "sleep 300"])
    assert second != [int(first)]
    kill(ns, supervisor.pid, signal.SIGTERM)
    wait_for("both gone", lambda: not ns.pids())


def test_fork_storm(ns: Namespace) -> None:
    storm, _lines = start_program(ns, "fork_storm", "--life-s", "0.02")
    seen = {pid for pid in ns.pids() if pid != storm.pid}
    wait_for("others", lambda: len(seen.union(ns.pids())) > 4 and not seen & (ns.pids() - {storm.pid}))
    kill(ns, storm.pid, signal.SIGTERM)
    wait_for("all gone", lambda: not ns.pids())


def test_reused_pid(ns: Namespace) -> None:
    first = ns.popen(["sleep", "300"], detached=True)
    ticks = ns.start_ticks(first.pid)
    kill(ns, first.pid, signal.SIGKILL)
    first.wait_gone()
    start_program(ns, "reuse_pid", first.pid, "sleep", "301")
    wait_for("the new owner", lambda: ns.titles().get(first.pid) == "sleep 301")
    assert ns.start_ticks(first.pid) != ticks


def test_shm_files(ns: Namespace) -> None:
    process, (line,) = start_program(ns, "make_shm", "--size-kib", 8)
    names = json.loads(line)
    present = {path.name for path in (ns.root / "dev" / "shm").iterdir()}
    assert present == {name for kind, name in names.items() if kind != "deleted"}
    creators = {kind: int(names[kind].split("_")[3]) for kind in ("dead", "alive", "mapped")}
    assert creators["alive"] == process.pid
    assert creators["dead"] not in ns.pids()
    text = (ns.proc / str(process.pid) / "maps").read_text()
    used = {kind for kind, name in names.items() if f"/dev/shm/{name}" in text}
    assert used == {"alive", "mapped", "loads_mapped", "deleted"}
    assert f"{names['deleted']} (deleted)" in text


def test_bystanders(ns: Namespace, tmp_path: Path) -> None:
    (zero,) = memory_nodes(tmp_path / "zero")
    pids = start_bystanders(ns, devices=[zero])

    def exe(kind: str) -> str:
        return os.path.basename(os.readlink(ns.proc / str(pids[kind]) / "exe"))

    assert {kind: exe(kind) for kind in ("editor", "persistenced", "dcgm", "hostengine", "monitor")} == {
        "editor": "vim",
        "persistenced": "nvidia-persistenced",
        "dcgm": "dcgm-exporter",
        "hostengine": "nv-hostengine",
        "monitor": "python3",
    }
    assert ns.cmdline(pids["editor"]) == ["vim", "/opt/sglang/launch_server.py"]
    assert "ipykernel_launcher" in ns.cmdline(pids["jupyter"])
    assert status(ns, pids["monitor"])["Uid"].split()[0] == "65534"
    rdev = os.stat(zero).st_rdev
    for kind in ("persistenced", "dcgm", "hostengine", "monitor", "jupyter"):
        pid = pids[kind]
        wait_for(f"{kind} has the device", functools.partial(has_open, ns, pid, rdev))
    wait_for("doorbell", lambda: maps(ns, pids["dcgm"], zero) == ["-w-p"])
    assert rdev not in open_rdevs(ns, pids["editor"])


def test_every_program_says_what_it_is_for() -> None:
    for path in FIXTURES.glob("*.py"):
        assert "usage: " + path.name in path.read_text().replace("usage (root): ", "usage: ").replace(
            "usage (root, in a PID namespace of its own): ", "usage: "
        )
