# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A server over two hosts with the real modules and stand-in servers: who goes and comes when, and what serves then.

Both hosts are this machine, by local connections, each with a state directory, a port and simulated GPUs of its own.
"""

from __future__ import annotations

import json
import os
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Hold, NvmlDouble
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, run_playbook
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import HELD_MIB, PlaybookHost
from ansible_collections.cleanslate.sglang.tests.integration_ns.spreading import errors

pytestmark = [pytest.mark.ns, pytest.mark.slow, pytest.mark.timeout(1500)]

# Twice as many tasks as for one host, and on a way back twice the path.
RUN_DEADLINE_S = 600
HOSTS = ("gpu01", "gpu02")
FLAGS = {"tp_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:25000"}


class Pair:
    """gpu01 has node 0 and gpu02 has node 1 of the server big. The nodes meet before they load."""

    def __init__(self, ns: Namespace, directory: Path) -> None:
        self.ns = ns
        self.directory = directory
        self.host = PlaybookHost(directory, ns)
        (directory / "nvml2").mkdir()
        self.nvml = (self.host.nvml, NvmlDouble(directory / "nvml2"))
        self.hold()
        self.change()

    def hold(self, *strangers: Hold) -> None:
        """Of each host's one GPU, the memory belongs to its node's scheduler; ``strangers`` have the second host's."""
        for rank, nvml in enumerate(self.nvml):
            held = Hold(0, HELD_MIB, title=f"sglang::scheduler_TP{rank}")
            nvml.write(Gpu(0), held, *(strangers if rank else ()))

    def change(self, *faults: t.Mapping[str, str], **settings: t.Any) -> None:
        """What is wanted from now on; ``faults``: switches of node 0 and of node 1."""
        given = (*faults, {}, {})[:2]
        entries = [
            self.host.server(
                "big", 31000 + rank, flags={**FLAGS, "node_rank": rank}, faults={"MEETS": "1", **switches}, **settings
            )
            for rank, switches in enumerate(given)
        ]
        self.host.servers = [entries[0]]
        self.host.other_hosts["gpu02"] = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "sglang_become": False,
            "sglang_allow_simulated": True,
            "sglang_state_dir": str(self.directory / "state2"),
            "sglang_task_environment": self.nvml[1].env(),
            "sglang_servers": [entries[1]],
        }

    def run(self, playbook: str, **extra: t.Any) -> PlaybookRun:
        return run_playbook(
            ROOT / "playbooks" / playbook,
            scratch=self.directory,
            deadline_s=RUN_DEADLINE_S,
            inventory=self.host.inventory(),
            extra_vars={"server": "big", **extra},
            env={"ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml"},
            ns=self.ns,
        )

    def folder(self, rank: int) -> Path:
        return self.directory / ("state2" if rank else "state") / "big"

    def records(self) -> list[dict[str, t.Any]]:
        return [json.loads((self.folder(rank) / "current.json").read_text()) for rank in (0, 1)]

    def link(self, rank: int, name: str) -> str:
        return Path(os.readlink(self.folder(rank) / name)).name

    def leaders(self) -> list[int]:
        return sorted(pid for pid, title in self.ns.titles().items() if "sglang.launch_server" in title)

    def leases(self) -> list[Path]:
        return [path for rank in (0, 1) if (path := self.folder(rank) / "lease.json").exists()]


@pytest.fixture
def pair(ns: Namespace, tmp_path: Path) -> Pair:
    return Pair(ns, tmp_path)


def rungs(run: PlaybookRun, host: str) -> list[str]:
    (result,) = [task.result for task in run.of_action("gpu_evict") if task.host == host]
    return [each["rung"] for each in result["rungs"] if each["asked"]]


def test_case_35_the_first_node_goes_first_and_both_come_together(pair: Pair) -> None:
    """A lone node 1 that ignores SIGTERM is killed, after node 0."""
    pair.change({}, {"IGNORE_TERM": "1"}, deadlines={"stop": 3, "term": 3})
    pair.run("relaunch.yml").check()
    old = pair.records()
    assert pair.leaders() == sorted(record["pid"] for record in old)

    run = pair.run("relaunch.yml").check()
    good = pair.records()
    assert pair.leaders() == sorted(record["pid"] for record in good)
    assert not {record["pid"] for record in old} & {record["pid"] for record in good}
    assert (rungs(run, "gpu01")[-1], rungs(run, "gpu02")[-1]) == ("term", "kill")
    order = [task.host for task in run.of_action("gpu_evict")]
    assert order == list(HOSTS)
    assert good[0]["run_id"] == good[1]["run_id"]
    assert [pair.link(rank, "last_good") for rank in (0, 1)] == [record["launch_id"] for record in good]
    assert pair.leases() == []


def test_a_node_that_dies_ends_the_wait_of_the_other_one_and_both_go_back(pair: Pair) -> None:
    """Node 0 would wait for ever at the meeting, and we for 500 s. Both go back to what was proved together."""
    pair.run("relaunch.yml").check()
    good = pair.records()
    pair.change({}, {"CRASH": "model"}, ready_deadline_s=500, hung_after={"distributed": 400})
    run = pair.run("relaunch.yml")
    found = errors(run)
    (first, *_again) = [task.result for task in run.of_action("server_ready") if task.host == "gpu01"]
    assert first["peer_failed"] is True
    assert first["seconds"] < 200
    again = pair.records()
    targets = ", ".join(record["launch_id"] for record in good)
    assert "big on gpu01, gpu02: the new configuration failed (node 1 (gpu02): failed: " in found[-1], found[-1]
    assert found[-1].endswith(f"rolled back to {targets}: serving"), found[-1]
    assert [record["from_launch"] for record in again] == [record["launch_id"] for record in good]
    assert pair.leaders() == sorted(record["pid"] for record in again)
    assert [pair.link(rank, "last_good") for rank in (0, 1)] == [record["launch_id"] for record in again]
    assert pair.leases() == []


def test_a_stranger_on_one_host_keeps_both_from_being_started(pair: Pair, ns: Namespace) -> None:
    """The old nodes are gone, nothing new is started on the clean host either, and the stranger lives."""
    pair.run("relaunch.yml").check()
    old = pair.records()
    stranger = ns.popen([sys.executable, "-c", "import time; time.sleep(600)"], detached=True)
    pair.hold(Hold(0, 5000, pid=stranger.pid))
    found = errors(pair.run("relaunch.yml"))
    assert "(gpu02): gpu02 is not clean" in found[-1], found[-1]
    assert pair.records() == old
    assert pair.leaders() == []
    assert stranger.pid in ns.pids()
    assert pair.leases() == []


def test_a_first_start_that_fails_leaves_both_hosts_clean(pair: Pair) -> None:
    """Nothing was proved before: both are stopped. A teardown and a check after it find nobody."""
    pair.change({"CRASH": "memory"}, {})
    found = errors(pair.run("relaunch.yml"))
    assert "(node 0 (gpu01): failed: " in found[-1], found[-1]
    assert found[-1].endswith("all nodes: stopped, the host is clean"), found[-1]
    assert pair.leaders() == []
    assert not [title for title in pair.ns.titles().values() if "sglang" in title]
    pair.run("teardown.yml").check()
    assert pair.leases() == []
