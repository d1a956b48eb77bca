# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cases 10 and 33: nobody is chosen by name alone, nor for having a GPU open; a holder is chosen by evidence."""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Hold
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Proc
from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import Recorded

PYTHONS = (
    Proc(800, ("python3", "-m", "ipykernel_launcher", "-f", "kernel.json")),
    Proc(801, ("python3", "/usr/lib/monitoring/agent.py")),
    Proc(802, ("/usr/bin/python3", "/root/.ansible/tmp/AnsiballZ_setup.py")),
    Proc(803, ("vim", "/opt/sglang/launch_server.py"), exe="/usr/bin/vim"),
    Proc(804, ("bash", "-c", "python -m sglang.launch_server"), exe="/usr/bin/bash"),
    Proc(805, ("tail", "-f", "sglang.launch_server.log"), exe="/usr/bin/tail"),
    Proc(806, ("grep", "sglang::scheduler"), exe="/usr/bin/grep"),
)


def plan(recorded: Recorded, **order: t.Any) -> dict[str, list[int]]:
    """rung -> pids."""
    result = recorded.module("gpu_evict", check=True, shm_dir=str(recorded.root / "shm"), **order)
    assert not result.failed, result.json
    return {row["rung"]: [int(text.split()[1]) for text in row["targets"]] for row in result.json["plan"]}


@pytest.mark.parametrize("scope", ["sglang", "gpu"])
def test_names_alone_choose_nobody(recorded: Recorded, scope: str) -> None:
    recorded.write(*PYTHONS)
    recorded.nvml.write(Gpu(0))
    assert plan(recorded, scope=scope) == {}


def test_a_client_of_both_gpus_holds_only_where_it_has_a_context(recorded: Recorded) -> None:
    """Every CUDA process that sees both GPUs has both open and their doorbells mapped write-only."""
    both = recorded.visitor(700, ["python3", "train.py"], 0, 1)
    context = recorded.holder(700, ["python3", "train.py"], 0)
    client = Proc(700, ["python3", "train.py"], maps=[*context.maps[:1], *both.maps], fds=both.fds)
    rank = recorded.holder(701, ["python3", "other.py"], 1)
    services = [
        recorded.visitor(710, "/usr/bin/nvidia-persistenced", 0, 1, exe="/usr/bin/nvidia-persistenced"),
        recorded.holder(711, "/usr/bin/dcgm-exporter", 0, 1, exe="/usr/bin/dcgm-exporter"),
        recorded.holder(712, "/usr/bin/nv-fabricmanager", 0, 1, exe="/usr/bin/nv-fabricmanager"),
        recorded.holder(713, "/usr/lib/xorg/Xorg", 0, 1, exe="/usr/lib/xorg/Xorg"),
    ]
    recorded.write(client, rank, *services, *PYTHONS)
    recorded.nvml.write(
        Gpu(0),
        Gpu(1),
        Hold(0, mib=900, always=True, pid=700),
        Hold(1, mib=900, always=True, pid=701),
        Hold(1, mib=4, always=True, pid=711),
    )
    assert plan(recorded, scope="gpu", devices=["1"]) == {"holders": [701]}
    assert plan(recorded, scope="gpu", devices=["0"]) == {"holders": [700]}
    one = recorded.module("gpu_info", devices=["1"]).json["gpus"][0]
    assert [row["pid"] for row in one["visitors"]] == [700, 710]
    shielded = {row["pid"]: row["protected"] is not None for row in one["holders"]}
    assert shielded == {701: False, 711: True, 712: True, 713: True}
    assert one["visitors"][0]["evidence"] == ["1 open descriptors", "doorbells 64 KiB write-only"]


def test_a_mapping_by_another_path_counts_by_its_number(recorded: Recorded) -> None:
    """A node that mknod made elsewhere escapes fuser; its number does not."""
    from ansible_collections.cleanslate.sglang.tests.harness.devices import make_node
    from ansible_collections.cleanslate.sglang.tests.harness.proctree import Mapping

    elsewhere = make_node(recorded.root / "dev" / "renamed", 195, 0)
    recorded.write(Proc(700, ["python3", "x.py"], maps=[Mapping(elsewhere)], fds=[elsewhere]))
    recorded.nvml.write(Gpu(0))
    assert plan(recorded, scope="gpu") == {"holders": [700]}


def test_the_control_node_and_other_majors_are_no_gpu(recorded: Recorded) -> None:
    from ansible_collections.cleanslate.sglang.tests.harness.devices import make_node
    from ansible_collections.cleanslate.sglang.tests.harness.proctree import Mapping

    control = make_node(recorded.root / "dev" / "nvidiactl", 195, 255)
    uvm = make_node(recorded.root / "dev" / "nvidia-uvm", 510, 0)
    recorded.write(Proc(700, ["python3", "x.py"], maps=[Mapping(control), Mapping(uvm)], fds=[control, uvm]))
    recorded.nvml.write(Gpu(0))
    assert plan(recorded, scope="gpu") == {}
    assert recorded.clean().json["verdict"] == "clean"
