# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Evictions on a host that misbehaves: servers come back, memory stays, processes can't be ended."""

from __future__ import annotations

import signal
import sys
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Hold
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.lies import held_elsewhere
from ansible_collections.cleanslate.sglang.tests.harness.standin import environment
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import (
    DEADLINES,
    Host,
    bounded,
    codes,
    rung,
    sent,
)

pytestmark = pytest.mark.ns
LEADER = [sys.executable, "-m", "sglang.launch_server", "--model-path", "/models/tiny", "--port", "30000"]


# --- case 34: a supervisor ---


@pytest.mark.parametrize("delay_s", ["0.1", "1"])
def test_a_server_that_comes_back_is_counted_named_and_left_after_three_rounds(host: Host, delay_s: str) -> None:
    output = host.ns.directory / "respawner"
    supervisor = host.fixture(
        "respawner.py", "--delay-s", delay_s, *LEADER, env=environment({"LOAD_S": "60"}), output=output
    )
    wait_for("a leader", lambda: any("launch_server" in title and "respawner" not in title for title in _titles(host)))
    result = host.evict(port=30000)
    assert result.failed
    assert result.json["verdict"] == "failed"
    assert "respawn" in codes(result)
    assert len(result.json["respawns"]) == 3
    assert {row["supervisor"].split()[1] for row in result.json["respawns"]} == {str(supervisor.pid)}
    assert supervisor.pid not in {pid for pid, _unused in sent(result)}
    (reason,) = [row for row in result.json["reasons"] if row["code"] == "respawn"]
    assert f"pid {supervisor.pid}" in reason["message"]
    assert "3 times" in reason["message"]
    bounded(result)


def _titles(host: Host) -> list[str]:
    return list(host.ns.titles().values())


def test_a_server_that_came_back_once_is_ended_again(host: Host) -> None:
    supervisor = host.fixture("respawner.py", "--limit", "2", *LEADER, env=environment({"LOAD_S": "60"}))
    wait_for("a leader", lambda: any("launch_server" in title and "respawner" not in title for title in _titles(host)))
    result = host.evict(port=30000)
    assert not result.failed, result.json
    (row,) = result.json["respawns"]
    assert row["supervisor"].startswith(f"pid {supervisor.pid} ")
    assert (row["pid"], "SIGKILL") in sent(result)


# --- memory ---


def test_pinned_memory_is_awaited_and_named(host: Host) -> None:
    host.memory_follows_mappings(release_s=1.5)
    host.server(gpus=(0,), faults={"PINNED_MIB": "64"})
    result = host.evict(port=30000, devices=["0"])
    assert not result.failed, result.json
    pinned = result.json["pinned"]
    assert pinned["freed"] is True
    assert pinned["pinned_mib"] >= 64
    assert pinned["waited_s"] >= 1.4
    assert "GB of host memory was pinned" in pinned["note"]
    assert result.json["after"][0]["used_mib"] == 0


def test_memory_that_never_comes_free_is_a_failure_after_a_plausible_time(host: Host) -> None:
    host.memory_follows_mappings(*held_elsewhere(1, 7000))
    server = host.server(gpus=(1,))
    result = host.evict(port=30000, devices=["1"])
    assert result.failed
    assert (result.json["verdict"], codes(result)) == ("failed", {"memory_held"})
    assert "GPU 1 7000 MiB" in result.json["pinned"]["note"]
    assert sent(result) == {(server.leader.pid, "SIGTERM")}
    bounded(result)


def test_memory_of_a_gpu_that_was_not_chosen_is_not_awaited(host: Host) -> None:
    host.memory_follows_mappings(*held_elsewhere(1, 7000))
    host.server(gpus=(0,))
    result = host.evict(port=30000, devices=["0"])
    assert not result.failed, result.json


def test_a_dead_driver_after_the_eviction_is_unknown(host: Host) -> None:
    from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Fault

    host.server(gpus=(0,))
    host.nvml.add(Fault("nvmlInit*", code=9))
    result = host.evict(port=30000)
    assert result.failed
    assert (result.json["verdict"], codes(result)) == ("unknown", {"memory_unknown"})
    assert len(result.json["ended"]) > 1


# --- processes that can't be ended ---


@pytest.mark.promise
def test_never_hang(host: Host) -> None:
    """A rank in state D after SIGKILL is named with what it waits in, within the deadlines."""
    mountpoint = host.ns.directory / "fuse"
    log = host.ns.directory / "fuse.log"
    server = host.fixture("unkillable_fuse.py", str(mountpoint), output=log)
    wait_for("the mount", lambda: log.exists() and "mounted" in log.read_text())
    code = (
        "import mmap, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "held = mmap.mmap(fd, 4096)\n"
        "open(sys.argv[2]).read()\n"
    )
    stuck = host.ns.popen([sys.executable, "-c", code, str(host.nodes[0]), str(mountpoint / "x")], detached=True)
    wait_for("the read", lambda: "wait_answer" in (host.ns.proc / str(stuck.pid) / "wchan").read_text())
    try:
        result = host.evict(scope="gpu", devices=["0"], deadlines={**DEADLINES, "holders": 3})
    finally:
        host.kill(server.pid, signal.SIGKILL)
    assert result.failed
    assert (result.json["verdict"], codes(result)) == ("failed", {"unkillable"})
    (stayed,) = rung(result, "holders")["stayed"]
    assert stayed["pid"] == stuck.pid
    assert "state D" in stayed["why"]
    assert "waits in" in stayed["why"]
    assert "wait_answer" in stayed["why"]
    assert "reboot" in result.json["reasons"][0]["message"]
    bounded(result)


def test_a_fork_storm_is_survived(host: Host) -> None:
    storm = host.fixture("fork_storm.py", "--seconds", "40")
    host.server(gpus=(0,), faults={"IGNORE_TERM": "1"})
    result = host.evict(port=30000, deadlines={**DEADLINES, "term": 1})
    assert not result.failed, result.json
    assert host.alive([storm.pid])
    host.kill(storm.pid, signal.SIGTERM)


# --- bad orders ---


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({}, "no server is named"),
        ({"scope": "gpu", "devices": ["7"]}, "GPU '7' is not on this host"),
        ({"scope": "gpu", "devices": ["0", "GPU-00000000-0000-0000-0000-000000000000"]}, "twice"),
        ({"port": 30000, "deadlines": {"term": -1}}, "deadlines.term"),
        ({"port": 30000, "nvml_deadline_s": 0}, "nvml_deadline_s"),
        ({"port": 30000, "proc_root": "/tmp"}, "recorded tree"),
        ({"name": "../x"}, "is no name of a server"),
        ({"port": 30000, "baselines": {"0": "much"}}, "whole number of MiB"),
    ],
)
def test_an_order_that_makes_no_sense_touches_nobody(host: Host, order: dict[str, t.Any], words: str) -> None:
    holder = host.hold("--map", str(host.nodes[0]))
    result = host.evict(**order)
    assert result.failed
    assert words in result.json["msg"]
    assert result.json["verdict"] == "unknown"
    assert sent(result) == set()
    assert host.alive([holder.pid])


def test_a_record_that_cannot_be_read_is_an_error_and_not_nothing(host: Host) -> None:
    folder = host.state_dir / "main"
    folder.mkdir(parents=True)
    (folder / "current.json").write_text("{")
    result = host.evict(name="main")
    assert result.failed
    assert "can't be used" in result.json["msg"]


def test_where_memory_belongs_to_the_driver_alone_it_is_not_signalled(host: Host) -> None:
    """A simulated driver lists a process that has nothing open: it is shown as a holder, and nobody is ended for it."""
    listed = host.ns.popen(["sleep", "600"], detached=True)
    host.nvml.write(*host.gpus(), Hold(0, mib=500, pid=listed.pid))
    result = host.evict(scope="gpu", devices=["0"])
    assert sent(result) == set()
    assert host.alive([listed.pid])
