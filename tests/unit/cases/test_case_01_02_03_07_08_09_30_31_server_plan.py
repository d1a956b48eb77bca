# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The founding incidents from the arguments of server_plan to its verdict, with the server of then still there.

449 GiB RAM, 8 x 96 GB, Kimi-K2.5 INT4, TP 8. The old server holds all GPUs; what it gives back is free by then.
"""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.planning import Plan, to_result
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.plan_report import plan_lines, plan_why
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Proc
from ansible_collections.cleanslate.sglang.tests.unit import builders
from ansible_collections.cleanslate.sglang.tests.unit.cases import test_case_01_02_03_07_08_09_plan as incidents
from ansible_collections.cleanslate.sglang.tests.unit.plan_host import OPTIONS, PlanHost, finding

LEADER = ("/opt/v/bin/python3", "-m", "sglang.launch_server", "--port", "8000")
USED_MIB = 76_109
HICACHE_KIB = 384_000_000_000 // 8 // 1024


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanHost:
    one = PlanHost(tmp_path, monkeypatch, "0.5.12")
    one.write_model(incidents.CONFIG, incidents.WEIGHT_BYTES)
    one.processes(Proc(700, LEADER))
    memory = builders.memory(USED_MIB, total_mib=97_887, reserved_mib=640, free_mib=97_247 - USED_MIB)
    name = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    for rank in range(8):
        status = {"RssShmem": f"{HICACHE_KIB} kB"}
        one.processes(Proc(701 + rank, f"sglang::scheduler_TP{rank}", ppid=700, pgid=700, sid=700, status=status))
    one.gpus(
        *(
            builders.gpu(rank, listed=[701 + rank], name=name, compute_capability="12.0", memory=memory)
            for rank in range(8)
        )
    )
    # 444 GiB once the old server has given back what it pins.
    one.meminfo = {"MemTotal": 449 * 2**20, "MemAvailable": 444 * 2**20 - 8 * HICACHE_KIB}
    return one


def plan(host: PlanHost, waivers: t.Optional[dict[str, str]] = None, **changes: t.Any) -> Plan:
    flags = {**incidents.FLAGS, **changes}
    environment = {"NCCL_P2P_DISABLE": "1"}
    return host.plan(shipped=True, name="kimi", port=8000, flags=flags, environment=environment, waivers=waivers or {})


def denied(planned: Plan) -> list[str]:
    return [one.id for one in planned.result.findings if one.severity == "deny"]


def test_the_old_server_is_no_reason_against_the_new_one(host: PlanHost) -> None:
    planned = plan(host)
    assert {gpu.returned_mib for gpu in planned.topology.gpus} == {USED_MIB}
    assert planned.host.returned_mib == 8 * HICACHE_KIB // 1024
    host_available = planned.result.budget.value("host_available")
    assert host_available is not None and round(host_available / 1e9, 1) == 476.7


def test_case_1(host: PlanHost) -> None:
    planned = plan(host, hicache_size=300, mem_fraction_static=0.93)
    assert (planned.result.verdict, denied(planned)) == ("denied", ["hicache_too_large"])
    result = to_result(planned)
    for words in ("2,400.0 GB", "476.7 GB", "hicache-size 53 is the largest that fits", "[hicache_too_large]"):
        assert words in plan_why(result)


def test_case_2(host: PlanHost) -> None:
    planned = plan(host, mem_fraction_static=0.93)
    assert planned.result.verdict == "allowed"
    assert finding(planned, "headroom_small").severity == "warn"
    left = planned.result.budget.value("headroom_after_start")
    assert left is not None and left < 2 * 2**30  # less than is asked for


def test_case_3(host: PlanHost) -> None:
    planned = plan(host)
    assert (planned.result.verdict, denied(planned)) == ("allowed", [])
    budget = planned.result.budget
    figures = {name: budget.value(name) for name in ("hicache_total", "host_margin", "host_margin_after_reserve")}
    assert {name: round((value or 0) / 1e9, 1) for name, value in figures.items()} == {
        "hicache_total": 384.0,
        "host_margin": 52.7,
        "host_margin_after_reserve": 42.0,
    }
    text = "\n".join(plan_lines({"host": "ct129", "server": "kimi", "plan": to_result(planned)}))
    assert "kimi on ct129: ALLOWED" in text
    assert "384.00 GB" in text and "357.63 GiB" in text


@pytest.mark.parametrize(
    ("flags", "name", "waivable"),
    [
        ({"reasoning_parser": None}, "kimi_k2_reasoning_parser", True),
        ({"kv_cache_dtype": "fp8_e4m3"}, "fp8_kv_on_int4_mla_moe", True),
        ({"attention_backend": "flashinfer"}, "flashinfer_mla_on_sm120", True),
        ({"attention_backend": "trtllm_mla"}, "trtllm_mla_on_sm120", False),
    ],
    ids=["case 7", "case 8", "case 9", "case 9, never waivable"],
)
def test_cases_7_8_and_9(host: PlanHost, flags: dict[str, t.Any], name: str, waivable: bool) -> None:
    planned = plan(host, **flags)
    assert (planned.result.verdict, denied(planned)) == ("denied", [name])
    assert finding(planned, name).waivable is waivable
    text = "\n".join(plan_lines({"host": "ct129", "server": "kimi", "plan": to_result(planned)}))
    assert (f"to accept it: waivers: {{{name}: a written reason}}" in text) is waivable
    assert "remedy: " in text
    if waivable:
        accepted = plan(host, {name: "tested here on 400 questions"}, **flags)
        assert accepted.result.verdict == "allowed"
        assert "Waived: tested here on 400 questions" in finding(accepted, name).message


def test_case_30(host: PlanHost) -> None:
    option = '    parser.add_argument("--cuda-graph-max-bs-{}", type=int)\n'
    host.sglang("0.5.20", OPTIONS + option.format("decode") + option.format("prefill"))
    planned = plan(host, cuda_graph_max_bs=64)
    assert (planned.result.verdict, denied(planned)) == ("denied", ["flags-removed"])
    told = finding(planned, "flags-removed")
    assert "removed in SGLang 0.5.20" in told.message and told.remedy == "Use cuda-graph-max-bs-decode"


@pytest.mark.parametrize("flags", [{"config": "/etc/f.yaml"}, {"config=/etc/f.yaml": True}])
def test_case_31(host: PlanHost, flags: dict[str, t.Any]) -> None:
    planned = plan(host, **flags)
    assert (planned.result.verdict, denied(planned)) == ("denied", ["flags-config"])
