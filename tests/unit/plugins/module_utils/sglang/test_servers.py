# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import servers
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.cmdline import LaunchedFlags
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.flags import Difference

LAUNCH = ("python3", "-m", "sglang.launch_server", "--port", "1")


def process(pid: int, ppid: int, *argv: str, state: str = "S") -> Process:
    return Process(pid, pid * 10, ppid, pid, pid, state, "x", argv)


def tree(*processes: Process) -> dict[int, Process]:
    return {one.pid: one for one in processes}


HOST = tree(
    process(1, 0, "init"),
    process(10, 1, *LAUNCH),
    process(11, 10, "python3", "-c", "from multiprocessing.resource_tracker import main;main(6)"),
    process(12, 10, "sglang::data_parallel_controller"),
    process(13, 12, "sglang::scheduler_DP0"),
    process(14, 10, "python3", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"),
    process(15, 10, *LAUNCH),
    process(20, 1, *LAUNCH, state="Z"),
    process(21, 1, "sglang::scheduler_TP0"),
    process(22, 1, "sglang::scheduler_TP1", state="Z"),
    process(30, 1, "vim", "sglang::scheduler"),
)


def test_leaders_trees_and_orphans() -> None:
    found = servers.leaders(HOST)
    assert [leader.pid for leader in found] == [10]
    members = servers.tree_of(found[0], HOST)
    assert {member.process.pid: member.role for member in members} == {
        10: "leader",
        11: "resource_tracker",
        12: "data_parallel_controller",
        13: "scheduler",
        14: "starting",
        15: "other",
    }
    assert [one.pid for one in servers.orphans(HOST, [members])] == [21]


def test_a_torn_snapshot_with_a_cycle_ends() -> None:
    host = tree(process(10, 11, *LAUNCH), process(11, 10, "x"))
    assert [member.process.pid for member in servers.tree_of(host[10], host)] == [10, 11]


def launched(complete: bool = True, **flags: t.Any) -> LaunchedFlags:
    return LaunchedFlags({name.replace("_", "-"): value for name, value in flags.items()}, {}, None, complete, ())


def test_equal() -> None:
    wanted = servers.Wanted({"tp": 2, "off": False}, {"A": "1", "NCCL_X": "y"}, ())
    found = launched(tp_size="2", host="h", port="1", api_key="****")
    environment = {"A": "1", "NCCL_X": "y", "PATH": "/", "HF_TOKEN": "x", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert servers.compare(wanted, found, environment, None, True) == servers.Comparison(True, ())


@pytest.mark.parametrize(
    ("wanted", "difference"),
    [
        (servers.Wanted(flags={"tp": 1}), Difference("flags.tp-size", 1, "2")),
        (servers.Wanted(flags={"tp": 2, "port": 9}), Difference("flags.port", 9, "1")),
        (servers.Wanted(environment={"A": "2"}), Difference("environment.A", "2", "1")),
        (servers.Wanted(environment={"A": "1", "B": "2"}), Difference("environment.B", "2", None)),
        (servers.Wanted(gpus=("GPU-1",)), Difference("gpus", ["GPU-1"], ["GPU-0"])),
        (servers.Wanted(gpus=()), Difference("gpus", "all", ["GPU-0"])),
    ],
)
def test_different(wanted: servers.Wanted, difference: Difference) -> None:
    compared = servers.compare(wanted, launched(tp_size="2", port="1"), {"A": "1"}, ("GPU-0",), True)
    assert compared == servers.Comparison(False, (difference,))


@pytest.mark.parametrize(
    ("wanted", "found", "environment", "gpus_known"),
    [
        (servers.Wanted(flags={}), None, {}, True),
        (servers.Wanted(flags={}), launched(complete=False), {}, True),
        (servers.Wanted(environment={}), launched(), None, True),
        (servers.Wanted(gpus=()), launched(), {}, False),
    ],
)
def test_what_is_not_known_is_not_equal(
    wanted: servers.Wanted, found: LaunchedFlags | None, environment: dict[str, str] | None, gpus_known: bool
) -> None:
    assert servers.compare(wanted, found, environment, None, gpus_known).matches is None


def test_a_sure_difference_counts_even_where_the_rest_is_unknown() -> None:
    compared = servers.compare(servers.Wanted(flags={"tp": 1}), launched(False, tp_size="2"), {}, None, True)
    assert compared.matches is False


@pytest.mark.parametrize(
    "name",
    [
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"),
        *("NVSHMEM_DEBUG", "TRANSFORMERS_OFFLINE", "HTTP_PROXY", "https_proxy", "NVTE_X", "NCCL_ALGO"),
    ],
)
def test_a_variable_that_decides_how_sglang_runs_and_is_not_wanted(name: str) -> None:
    compared = servers.compare(servers.Wanted(environment={}), launched(), {name: "x"}, None, True)
    assert [row.item for row in compared.differences] == [f"environment.{name}"]


@pytest.mark.parametrize("name", ["HOME", "PATH", "INVOCATION_ID", "MY_LD_PRELOAD", "PYTHONUNBUFFERED", "my_proxy"])
def test_other_variables_count_only_where_they_were_chosen(name: str) -> None:
    wanted = servers.Wanted(environment={})
    assert servers.compare(wanted, launched(), {name: "x"}, None, True).matches is True
    compared = servers.compare(wanted, launched(), {name: "x"}, None, True, chosen=[name])
    assert [row.item for row in compared.differences] == [f"environment.{name}"]
