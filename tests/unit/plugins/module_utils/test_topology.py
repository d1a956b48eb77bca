# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import dataclasses
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.topology import (
    Flags,
    judge_port_wishes,
    lowest_capability,
    plan_topology,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import PortUse
from ansible_collections.cleanslate.sglang.plugins.module_utils.plan_model import (
    GpuFacts,
    ModelFacts,
    PortWish,
    Topology,
)

GPUS = tuple(GpuFacts(i, f"GPU-{i}", "NVIDIA H200", 143771, 143155, "9.0") for i in range(8))


def plan(
    flags: dict[str, t.Any], gpus: t.Sequence[GpuFacts] | None = GPUS[:1], model: ModelFacts | None = None
) -> tuple[Topology, set[tuple[str, str]]]:
    topology, findings = plan_topology(flags, gpus, model, "0.5.15")
    return topology, {(finding.severity, finding.id) for finding in findings}


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "ranks", "share"),
    [
        ({}, 1, 1),
        ({"tp": 8}, 8, 8),
        ({"tp-size": 2, "pp-size": 2}, 4, 2),
        ({"tp-size": 2, "dp-size": 3}, 6, 2),  # whole replicas
        ({"tp-size": 8, "dp-size": 4, "enable-dp-attention": True}, 8, 2),
        ({"tp-size": 8, "attn-dp-size": 8}, 8, 1),
        ({"tp-size": 16, "nnodes": 2, "dist-init-addr": "n0:5000"}, 8, 16),
        ({"tp_size": "4"}, 4, 4),
        ({"tp-size": [4]}, 4, 4),
    ],
)
def test_ranks_on_this_host_and_ranks_that_share_a_cache(flags: dict[str, t.Any], ranks: int, share: int) -> None:
    topology, findings = plan(flags, GPUS)
    assert (topology.ranks_here, topology.attention_tp) == (ranks, share)
    assert len(topology.gpus) == ranks
    assert not any(severity in ("deny", "unknown") for severity, _id in findings)


def test_too_few_and_too_many_gpus() -> None:
    assert plan({"tp-size": 8}, GPUS[:4])[1] == {("deny", "gpus_too_few")}
    topology, findings = plan({"tp-size": 2}, GPUS[:4])
    assert findings == {("warn", "gpus_spare")}
    assert [gpu.index for gpu in topology.gpus] == [0, 1]
    assert plan({"tp-size": 2}, ())[1] == {("deny", "gpus_too_few")}


def test_the_message_tells_the_arithmetic() -> None:
    _topology, findings = plan_topology({"tp-size": 8, "pp-size": 2}, GPUS[:8])
    assert "16 ranks on this host need 16 GPUs (tp 8 x pp 2 x dp 1), and the server gets 8" in findings[0].message


def test_a_base_and_a_step_choose_among_the_gpus() -> None:
    topology, _findings = plan({"tp-size": 2, "base-gpu-id": 1, "gpu-id-step": 3}, GPUS)
    assert [gpu.index for gpu in topology.gpus] == [1, 4]
    assert ("deny", "gpus_too_few") in plan({"tp-size": 2, "base-gpu-id": 7}, GPUS)[1]


def test_gpus_that_could_not_be_listed_are_unknown_and_a_cpu_needs_none() -> None:
    assert plan({}, None)[1] == {("unknown", "gpus_unknown")}
    assert plan({"device": "cpu"}, None)[1] == set()


def test_unlike_gpus() -> None:
    other = dataclasses.replace(GPUS[1], name="NVIDIA H100", compute_capability="12.0")
    assert plan({"tp-size": 2}, (GPUS[0], other))[1] == {("warn", "gpus_differ")}
    full = dataclasses.replace(GPUS[1], free_mib=100_000)
    assert plan({"tp-size": 2}, (GPUS[0], full))[1] == {("deny", "gpus_unbalanced")}
    back = dataclasses.replace(full, returned_mib=43_155)
    assert plan({"tp-size": 2}, (GPUS[0], back))[1] == set()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"tp-size": 8, "dp-size": 3, "enable-dp-attention": True}, "attention_dp_size"),
        ({"tp-size": 3, "nnodes": 2, "dist-init-addr": "n0:5000"}, "nodes_divide"),
        ({"tp-size": 2, "nnodes": 2, "dist-init-addr": "n0:5000", "node-rank": 2}, "node_rank"),
        ({"tp-size": 2, "nnodes": 2, "dist-init-addr": "n0:5000", "node-rank": -1}, "node_rank"),
        ({"tp-size": 2, "nnodes": 2}, "dist_init_addr"),
        ({"tp-size": 2, "dp-size": 2, "nnodes": 2, "dist-init-addr": "n0:5000"}, "nodes_dp"),
        ({"tp-size": 0}, "topology_size"),
        ({"dp-size": -1}, "topology_size"),
        ({"nnodes": 0}, "topology_size"),
    ],
)
def test_sizes_that_do_not_go_together_are_denied(flags: dict[str, t.Any], expected: str) -> None:
    assert ("deny", expected) in plan(flags, GPUS)[1]


def test_a_number_that_is_none_is_unknown() -> None:
    topology, findings = plan({"tp-size": "eight", "port": "http"})
    assert topology.ranks_here is None
    assert findings == {("unknown", "flag_number")}


def test_attention_dp_without_a_size_is_switched_off_by_sglang() -> None:
    topology, findings = plan({"enable-dp-attention": True})
    assert not topology.attention_dp
    assert findings == {("warn", "attention_dp_off")}


def test_heads_have_to_divide() -> None:
    model = ModelFacts("/m", "local", attention_heads=20)
    assert plan({"tp-size": 8}, GPUS, model)[1] == {("deny", "heads_divide")}
    assert plan({"tp-size": 4}, GPUS[:4], model)[1] == set()
    # With attention-DP only tp / dp ranks share the heads.
    assert plan({"tp-size": 8, "dp-size": 2, "enable-dp-attention": True}, GPUS, model)[1] == set()


def test_the_lowest_capability_is_not_the_first_in_the_alphabet() -> None:
    assert lowest_capability([GpuFacts(0, compute_capability="12.0"), GpuFacts(1, compute_capability="9.0")]) == "9.0"
    assert lowest_capability([GpuFacts(0, compute_capability="9.0"), GpuFacts(1)]) is None
    assert lowest_capability([]) is None


# --- ports ------------------------------------------------------------------------------------------------------------


def ports(flags: dict[str, t.Any]) -> list[int]:
    return [wish.port for wish in plan(flags)[0].ports]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [30000]),
        ({"port": 31000, "nccl-port": 23456}, [31000, 23456]),
        # facts of 0.5.15: 30233 and the six after it
        ({"tp-size": 2, "dp-size": 2, "enable-dp-attention": True}, [30000, *range(30233, 30240)]),
        ({"port": 65500, "dp-size": 2, "enable-dp-attention": True}, [65500, *range(65267, 65274)]),
        # near the end of the range SGLang counts downwards
        ({"port": 65300, "dp-size": 2, "enable-dp-attention": True}, [65300, 65533, *range(65527, 65533)]),
        ({"nnodes": 2, "dist-init-addr": "10.0.0.1:5000"}, [30000, 5000]),
        ({"nnodes": 2, "dist-init-addr": "[fd00::1]:5000", "node-rank": 1}, [30000]),
        (
            {"nnodes": 2, "dist-init-addr": "n0:5000", "enable-dp-attention": True, "dp-size": 2},
            [30000, 5000, *range(5001, 5007), 5013],
        ),
        ({"disaggregation-mode": "prefill"}, [30000, 8998]),
        ({"port": 0}, []),
        ({"port": 70000}, []),
    ],
)
def test_the_ports_that_will_be_wanted(flags: dict[str, t.Any], expected: list[int]) -> None:
    assert ports(flags) == expected


def test_a_busy_port_is_denied_with_its_purpose() -> None:
    wishes = (PortWish(30000, "HTTP"), PortWish(30233, "attention-DP"))
    uses = [PortUse(30233, "0.0.0.0", "LISTEN", 1, (77,))]
    (finding,) = judge_port_wishes(wishes, uses)
    assert (finding.severity, finding.id) == ("deny", "port_busy")
    assert "wanted for attention-DP" in finding.message and "pid 77" in finding.message


def test_ports_that_nobody_could_look_at_are_unknown() -> None:
    findings = judge_port_wishes((PortWish(30000, "HTTP"),), None)
    assert [finding.severity for finding in findings] == ["unknown"]
    assert judge_port_wishes((PortWish(30000, "HTTP"),), []) == ()


# --- values of flags --------------------------------------------------------------------------------------------------


def test_flags_are_read_as_sglang_reads_them() -> None:
    flags = Flags({"Max_Total_Tokens": "128k", "tp": True, "a": False, "b": "false", "c": None, "d": [], "e": "1.5"})
    assert flags.whole("max-total-tokens") == 128_000
    assert not any(flags.has(name) for name in "abcd")
    assert flags.whole("e") is None and flags.number("e") is not None
    assert flags.whole("tp-size") is None
    assert flags.bad == ["e", "tp-size"]
    assert flags.whole("unset", 7) == 7


def test_too_few_gpus_cannot_be_waived_and_unbalanced_ones_can() -> None:
    full = dataclasses.replace(GPUS[1], free_mib=100_000)
    for flags, gpus, waivable in (({"tp-size": 8}, GPUS[:4], False), ({"tp-size": 2}, (GPUS[0], full), True)):
        _topology, findings = plan_topology(flags, gpus)
        assert [finding.waivable for finding in findings] == [waivable]
