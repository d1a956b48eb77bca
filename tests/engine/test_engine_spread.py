# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real server over two hosts: proved together, and taken back together when one node dies in its start."""

from __future__ import annotations

import concurrent.futures
import json
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.engine.real import (
    BOUND,
    SCHEDULER,
    cpu_environment,
    cpu_flags,
    engine_python,
    stat_fields,
)
from ansible_collections.cleanslate.sglang.tests.engine.real_host import RealHost, failure_of
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import summary_of

pytestmark = [pytest.mark.ns, pytest.mark.engine, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]
HOSTS = ("gpu01", "gpu02")
START_S = 300


class Pair(RealHost):
    """Both hosts share one namespace, and each has a state directory of its own."""

    def __init__(self, directory: Path, ns: Namespace) -> None:
        super().__init__(directory, ns)
        self.changes: dict[str, t.Any] = {}

    def node(self, rank: int) -> dict[str, t.Any]:
        shared = {"tp_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:25000"}
        return {
            "name": "big",
            "port": self.port + rank,
            "device": "cpu",
            "gpus": [],
            "python": str(engine_python()),
            "user": "root",
            "launcher": "detached",
            "flags": cpu_flags(**shared, node_rank=rank, **self.changes),
            "environment": cpu_environment(**BOUND),
            "ready_deadline_s": START_S,
            "shm_required_mib": 16,
            "soak": {"requests": 2, "concurrency": 2, "tokens": 8},
        }

    def inventory(self) -> Path:
        hosts = {
            name: {
                "ansible_connection": "local",
                "ansible_python_interpreter": sys.executable,
                "sglang_become": False,
                "sglang_state_dir": str(self.state(name)),
                "sglang_task_environment": self.nvml.env(),
                "sglang_servers": [self.node(rank)],
            }
            for rank, name in enumerate(HOSTS)
        }
        path = self.directory / "inventory.json"
        path.write_text(json.dumps({"sglang": {"hosts": hosts}}))
        return path

    def state(self, host: str) -> Path:
        return self.directory / "state" / host

    def now(self, host: str) -> dict[str, t.Any]:
        """The record of the node's last launch; empty where there is none, or it is being written."""
        path = self.state(host) / "big" / "current.json"
        try:
            return t.cast("dict[str, t.Any]", json.loads(path.read_text()))
        except (OSError, ValueError):
            return {}

    def good(self, host: str) -> str:
        return (self.state(host) / "big" / "last_good").readlink().name

    def schedulers(self, host: str) -> list[int]:
        """Those of the node's last launch."""
        found = {self.now(host).get("pid", 0)}
        parents = {pid: stat_fields(self.ns, pid) for pid, _ticks in self.ns.living()}
        while more := {pid for pid, fields in parents.items() if fields and int(fields[1]) in found} - found:
            found |= more
        return [pid for pid, title in self.ns.titles().items() if pid in found and SCHEDULER in title]


def test_both_nodes_are_proved_together_and_a_node_that_dies_in_its_start_takes_both_back(
    engine_ns: Namespace, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, engine_ns)
    run = pair.play("relaunch.yml", server="big").check()
    assert "SERVING" in summary_of(run), summary_of(run)
    assert pair.generates() == 4
    before = {host: pair.now(host) for host in HOSTS}
    assert {host: pair.good(host) for host in HOSTS} == {host: before[host]["launch_id"] for host in HOSTS}

    pair.changes = {"max_running_requests": 16}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(pair.play, "relaunch.yml", server="big")

        def victim() -> list[int]:
            assert not done.done(), failure_of(done.result())
            return pair.schedulers("gpu02") if pair.now("gpu02").get("pid") != before["gpu02"]["pid"] else []

        killed = wait_for("node 1 starts", victim, START_S)
        pair.ns.run(["kill", "-KILL", *map(str, killed)], 10).check()
        why = failure_of(done.result())
    print(why)
    assert "node 1 (gpu02)" in why and "rolled back to" in why and "serving" in why, why
    assert pair.generates() == 4
    for host in HOSTS:
        back = pair.now(host)
        assert back["from_launch"] == before[host]["launch_id"], back
        assert back["config_hash"] == before[host]["config_hash"]
        assert pair.good(host) == back["launch_id"]
    leaders = [pid for pid, title in pair.sglang().items() if "sglang.launch_server" in title]
    assert sorted(leaders) == sorted(pair.now(host)["pid"] for host in HOSTS), pair.sglang()
