# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A relaunch on a busy host touches nobody but its own server."""

from __future__ import annotations

import json
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.devices import loop_nodes
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.standin import start_standin
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import PlaybookHost, summary_of

pytestmark = pytest.mark.ns
BYSTANDERS = ROOT / "tests" / "fixtures" / "bystanders.py"


@pytest.fixture
def nodes(tmp_path: Path) -> t.Iterator[list[Path]]:
    with loop_nodes(tmp_path / "dev", 2) as made:
        yield made


def start_bystanders(ns: Namespace, directory: Path, nodes: list[Path]) -> dict[str, int]:
    """Every kind of bystander, those that use GPUs with both open; kind -> pid."""
    output = directory / "bystanders.json"
    devices = ",".join(map(str, nodes))
    argv = [sys.executable, str(BYSTANDERS), "--directory", str(directory / "bystanders"), "--devices", devices]
    ns.popen(argv, detached=True, output=output)
    text = wait_for("the bystanders", lambda: output.read_text().strip(), 60)
    return t.cast("dict[str, int]", json.loads(text.splitlines()[-1]))


@pytest.mark.parametrize("scope", ["server", pytest.param("gpu", marks=pytest.mark.promise)])
def test_nobody_else_is_touched(ns: Namespace, tmp_path: Path, nodes: list[Path], scope: str) -> None:
    """Promise 2: notebook, editor, monitoring, GPU services and a second server on the other GPU live on."""
    host = PlaybookHost(tmp_path, ns)
    host.follow_mappings(nodes)
    bystanders = start_bystanders(ns, tmp_path, nodes)
    # The other server sees and opens GPU 0 too, as every CUDA process does that is not told otherwise.
    other = start_standin(ns, port=31001, faults={"DEVICES": f"{nodes[1]},{nodes[0]}"})
    both = ",".join(map(str, nodes))
    host.servers = [host.server("demo", 31000, gpus=[0], scope=scope, faults={"DEVICES": both})]

    host.run("relaunch.yml").check()
    old = host.record("demo")
    before = {pid: ns.start_ticks(pid) for pid in (*bystanders.values(), *other.tree())}
    text = summary_of(host.run("relaunch.yml").check())

    assert host.record("demo")["pid"] != old["pid"]
    assert old["pid"] not in ns.pids()
    assert "20,000" in text
    assert {pid: ns.start_ticks(pid) for pid in before} == before
    stopped = [pid for pid in before if state(ns, pid) in "TtZX"]
    assert not stopped, ns.titles()
    answer = other.request("POST", "/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 4}})
    assert answer.status == 200, answer
    assert "left alone: " in text, text


def state(ns: Namespace, pid: int) -> str:
    """The kernel's state letter of a process inside."""
    return (ns.proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]


def test_the_operator_who_started_a_server_by_hand_lives_on(ns: Namespace, tmp_path: Path, nodes: list[Path]) -> None:
    """`ssh host 'nohup python -m sglang.launch_server ...'`: the operator's other processes are left alone."""
    host = PlaybookHost(tmp_path, ns)
    host.follow_mappings(nodes)
    host.servers = [host.server("demo", 31000, gpus=[0])]
    hand_made = start_standin(ns, port=31000, faults={"DEVICES": str(nodes[0])})
    session = ns.popen(["sh", "-c", "sleep 600 & wait"], detached=True)
    wait_for("the session's child", lambda: any(title == "sleep 600" for title in ns.titles().values()))
    kept = {pid for pid, title in ns.titles().items() if title == "sleep 600"} | {session.pid}

    text = summary_of(host.run("relaunch.yml").check())

    assert f"ended: pid {hand_made.leader.pid}" in text
    assert hand_made.leader.pid not in ns.pids()
    assert kept <= ns.pids()
