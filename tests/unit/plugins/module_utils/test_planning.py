# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan from the module's arguments to its verdict: a recorded /proc, an installed SGLang that is a few files, a
model's directory, and GPUs as the driver would tell of them.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils import planning
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide import budget_findings
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Gpu, GpuReading, NvmlProcess
from ansible_collections.cleanslate.sglang.plugins.module_utils.plan_model import GIB, WAIVABLE, Finding
from ansible_collections.cleanslate.sglang.plugins.module_utils.planning import Plan
from ansible_collections.cleanslate.sglang.tests.harness.proctree import BOOT_ID, Proc
from ansible_collections.cleanslate.sglang.tests.unit import builders
from ansible_collections.cleanslate.sglang.tests.unit.plan_host import PlanHost, finding, findings_of

UNKNOWN_SEVERITIES = ("deny", "unknown")
LISTENS = "   0: 00000000:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0  0 {inode} 1 0 100 0\n"
RULE = {
    "id": "no_triton",
    "when": {"fact": "flags.attention_backend", "is": "triton"},
    "severity": "deny",
    "reason": "Not with triton.",
    "remedy": "Take it away.",
    "source": "a test",
    "waivable": True,
}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanHost:
    return PlanHost(tmp_path, monkeypatch)


def worst(planned: Plan) -> list[Finding]:
    return [one for one in planned.result.findings if one.severity in UNKNOWN_SEVERITIES and one.waived is None]


def server(pid: int = 700, port: int = 30000, **status: str) -> tuple[Proc, Proc]:
    """A launcher and its scheduler."""
    words = ("/opt/v/bin/python3", "-m", "sglang.launch_server", "--port", str(port))
    leader = Proc(pid, words, environ={"CUDA_VISIBLE_DEVICES": "0,1"})
    return leader, Proc(pid + 1, "sglang::scheduler_TP0", ppid=pid, pgid=pid, sid=pid, status=status)


def held(index: int, used_mib: int, **by: int) -> Gpu:
    """A GPU whose driver lists who uses how much: ``pid_701=5000``."""
    rows = tuple(NvmlProcess(int(name[4:]), "compute", mib) for name, mib in by.items())
    return builders.gpu(index, used_mib, processes=rows)


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_good_configuration_is_allowed(host: PlanHost) -> None:
    planned = host.plan()
    assert (planned.result.verdict, worst(planned)) == ("allowed", [])
    assert planned.result.sglang_version == "0.5.15"
    assert planned.topology.tp == 2 and len(planned.topology.gpus) == 2
    assert planned.result.budget.value("max_total_num_tokens")
    result = planning.to_result(planned)
    assert (result["summary"], result["simulated"]) == ("allowed", True)  # the GPUs of this test are


def test_an_unknown_flag_is_denied_with_the_nearest_name(host: PlanHost) -> None:
    planned = host.plan(flags={"mem_fraction_statc": 0.8, "mem_fraction_static": None})
    assert planned.result.verdict == "denied"
    assert "mem-fraction-static" in finding(planned, "flags-unknown").message + finding(planned, "flags-unknown").remedy
    assert planning.summary(planned.result).startswith("denied: ")


def test_denied_outranks_unknown(host: PlanHost) -> None:
    planned = host.plan(flags={"model_path": "nobody/has-read-this", "tp_sise": 2})
    assert planned.result.verdict == "denied"
    assert {one.severity for one in worst(planned)} == {"deny", "unknown"}
    severities = [one.severity for one in planned.result.findings]
    assert severities == sorted(severities, key=["deny", "unknown", "warn", "note"].index)


def test_findings_and_figures_are_plain_data(host: PlanHost) -> None:
    result = planning.to_result(host.plan(flags={"tp_sise": 2}))
    assert json.loads(json.dumps(result)) == result
    assert result["findings"][0]["severity"] == "deny"
    assert {figure["name"] for figure in result["budget"]["gpu"]} >= {"gpu_free", "weights_per_rank", "kv_pool"}


# --- what is free by then ---------------------------------------------------------------------------------------------


def test_memory_of_the_server_that_goes_counts_as_free(host: PlanHost) -> None:
    host.processes(*server(RssAnon="1048576 kB", RssShmem="2097152 kB"))
    host.gpus(held(0, 100_000, pid_701=99_000), held(1, 100_000, pid_701=99_000))
    planned = host.plan(name="chat")
    assert [gpu.returned_mib for gpu in planned.topology.gpus] == [100_000, 100_000]
    assert planned.host.returned_mib == 3 * 1024
    assert planned.result.verdict == "allowed"
    figure = planned.result.budget.figure("gpu_free")
    assert figure is not None and "100,000 MiB that the server gives back" in figure.formula


def test_memory_of_a_neighbour_does_not(host: PlanHost) -> None:
    host.processes(*server(900, 31000, RssAnon="1048576 kB"))
    host.gpus(held(0, 100_000, pid_901=99_000), held(1, 100_000, pid_901=99_000))
    planned = host.plan(name="chat", flags={"mem_fraction_static": 0.1})
    assert [gpu.returned_mib for gpu in planned.topology.gpus] == [0, 0]
    assert planned.host.returned_mib == 0
    told = {one.subject: one.severity for one in findings_of(planned, "gpu_not_idle")}
    assert told == {"GPU 0": "warn", "GPU 1": "warn"}
    # With another scope the neighbour goes as well.
    assert [gpu.returned_mib for gpu in host.plan(name="chat", scope="sglang").topology.gpus] == [100_000, 100_000]


def test_of_a_shared_gpu_what_the_driver_counts_for_those_that_go(host: PlanHost) -> None:
    host.processes(*server(), *server(900, 31000))
    host.gpus(held(0, 100_000, pid_701=60_000, pid_901=39_000), held(1, 70_000, pid_701=69_000))
    assert [gpu.returned_mib for gpu in host.plan(name="chat").topology.gpus] == [60_000, 70_000]


def test_a_baseline_stays(host: PlanHost) -> None:
    host.processes(*server())
    host.gpus(held(0, 100_000, pid_701=99_000), held(1, 100_000, pid_701=99_000))
    planned = host.plan(name="chat", baselines={"0": 150})
    assert [gpu.returned_mib for gpu in planned.topology.gpus] == [99_850, 100_000]


def test_memory_that_nobody_visible_holds_counts_as_free_and_is_told(host: PlanHost) -> None:
    """Of a container's GPU the inside sees no holder, and its node takes over: the plan must not stop that."""
    host.gpus(held(0, 76_109), held(1, 500))
    planned = host.plan(name="chat")
    assert [gpu.returned_mib for gpu in planned.topology.gpus] == [76_109, 500]
    assert planned.result.verdict == "allowed"
    (hidden,) = findings_of(planned, "gpu_holder_unknown")
    assert hidden.severity == "warn" and "GPU 0 has 76,109 MiB in use" in hidden.message


def test_a_driver_that_counts_its_own_part_as_used(host: PlanHost) -> None:
    host.processes(*server())
    old = builders.memory(100_000, api="v1", reserved_mib=None, used_excludes_reserved=False)
    host.gpus(*(dataclasses.replace(held(index, 0, pid_701=99_000), memory=old) for index in (0, 1)))
    assert [gpu.returned_mib for gpu in host.plan(name="chat").topology.gpus] == [98_976, 98_976]


def test_no_more_host_memory_comes_back_than_is_in_use(host: PlanHost) -> None:
    host.processes(*server(RssShmem=f"{400 * 2**20} kB"))
    host.meminfo = {"MemTotal": 460 * 2**20, "MemAvailable": 300 * 2**20}
    assert host.plan(name="chat").host.returned_mib == 160 * 1024


def test_a_server_that_moves_to_another_port_is_known_by_its_record(host: PlanHost) -> None:
    """The inventory's port is the new one; what listens on the old one is the launch that is replaced."""
    host.processes(*server(port=30005))
    host.gpus(held(0, 100_000, pid_701=99_000), held(1, 100_000, pid_701=99_000))
    assert [gpu.returned_mib for gpu in host.plan(name="chat").topology.gpus] == [0, 0]
    host.record(pid=700, start_ticks=5000, boot_id=BOOT_ID, sid=700, port=30005)
    assert [gpu.returned_mib for gpu in host.plan(name="chat").topology.gpus] == [100_000, 100_000]


# --- ports ------------------------------------------------------------------------------------------------------------


def listens(host: PlanHost, port: int, pid: int) -> None:
    host.tcp += LISTENS.format(port=port, inode=port)
    leader, scheduler = server(pid, port)
    host.processes(dataclasses.replace(leader, fds=[f"socket:[{port}]"]), scheduler)


def test_the_port_of_the_server_that_goes_is_not_busy(host: PlanHost) -> None:
    listens(host, 30000, 700)
    assert host.plan(name="chat").result.verdict == "allowed"


def test_the_port_of_somebody_else_is(host: PlanHost) -> None:
    host.tcp = LISTENS.format(port=30000, inode=4)
    host.processes(Proc(800, ("nginx", "-g", "daemon off;"), fds=["socket:[4]"]))
    planned = host.plan(name="chat")
    assert planned.result.verdict == "denied"
    assert "nginx" in finding(planned, "port_busy").message


def test_ports_of_attention_dp_are_counted_from_the_servers_port(host: PlanHost) -> None:
    listens(host, 8000 + 233, 900)
    planned = host.plan(name="chat", port=8000, flags={"enable_dp_attention": True, "dp_size": 2})
    assert finding(planned, "port_busy").subject == "port 8233"
    assert 30000 not in [wish.port for wish in planned.topology.ports]


# --- what the last launch taught --------------------------------------------------------------------------------------

LOG = """\
[2026-11-30 01:19:40 TP0] Load weight begin. avail mem=138.00 GB
[2026-11-30 01:19:40 TP0] Load weight end. elapsed=0.11 s, type=LlamaForCausalLM, avail mem=120.00 GB, mem usage=18 GB.
[2026-11-30 01:19:40 TP0] Memory pool end. avail mem=30.00 GB
[2026-11-30 01:19:40 TP0] max_total_num_tokens=2000000, chunked_prefill_size=8192, available_gpu_mem=28.00 GB
"""


def test_the_last_launch_teaches_what_the_same_weights_need(host: PlanHost) -> None:
    host.record(log=LOG, flags={"model-path": str(host.model), "tp-size": 2, "mem-fraction-static": 0.5})
    planned = host.plan(name="chat")
    assert planned.learned is not None and planned.learned.same_weights
    assert planned.learned.free_after_load_bytes == 120 * GIB
    figure = planned.result.budget.figure("weights_per_rank")
    assert figure is not None and "launch" in figure.source
    other = host.plan(name="chat", flags={"quantization": "fp8"})
    assert other.learned is not None and not other.learned.same_weights
    assert host.plan(name="another").learned is None


@pytest.mark.parametrize(
    ("launched", "same"),
    [
        ({"tp": 2}, True),
        ({"tp_size": "2"}, True),
        ({"tp-size": 4}, False),
        ({"tp-size": 2, "cuda-graph-max-bs": 8}, False),
        ({"tp-size": 2, "mem-fraction-static": 0.1, "hicache-size": 9, "reasoning-parser": "x"}, True),
    ],
)
def test_which_flags_make_other_weights(host: PlanHost, launched: dict[str, t.Any], same: bool) -> None:
    host.record(log=LOG, flags={"model-path": str(host.model), **launched})
    learned = host.plan(name="chat").learned
    assert learned is not None and learned.same_weights is same


def test_a_record_that_can_not_be_used_is_told(host: PlanHost) -> None:
    host.record(log=LOG)
    (host.state / "chat" / "current.json").write_text("{")
    planned = host.plan(name="chat")
    assert planned.learned is None
    assert finding(planned, "last_launch_unread").severity == "warn"


def test_a_log_that_is_a_pipe_teaches_nothing_and_hangs_nobody(host: PlanHost, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    host.record(log_path=str(tmp_path / "pipe"))
    assert host.plan(name="chat").learned is None


# --- what can't be known ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gone", "remote", "no json", "a pipe", "fields missing"])
def test_a_model_that_can_not_be_read_is_unknown_and_named(host: PlanHost, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "other"
    path.mkdir()
    if kind == "no json":
        (path / "config.json").write_text("{")
    elif kind == "a pipe":
        os.mkfifo(path / "config.json")
    elif kind == "fields missing":
        (path / "config.json").write_text('{"architectures": ["NobodyKnowsForCausalLM"]}')
    name = {"gone": str(tmp_path / "gone"), "remote": "org/model"}.get(kind, str(path))
    planned = host.plan(flags={"model_path": name})
    assert planned.result.verdict == "unknown"
    assert planned.result.budget.value("max_total_num_tokens") is None
    assert any(name in one.message or name in one.subject for one in planned.result.findings)


def test_a_model_directory_that_hangs_is_given_up(host: PlanHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "read_model", lambda path, package: time.sleep(60))
    monkeypatch.setattr(planning, "MODEL_DEADLINE_S", 0.2)
    planned = host.plan()
    assert planned.result.verdict == "unknown"
    assert planned.model.source == "unreadable"
    assert "no answer within 0.2 s" in planned.model.problems[0]


def test_without_sglang_flags_are_not_judged(host: PlanHost, tmp_path: Path) -> None:
    planned = host.plan(python=str(tmp_path / "none/bin/python"), flags={"tp_sise": 2})
    assert planned.result.verdict == "unknown"
    assert finding(planned, "flags-unread").severity == "unknown"
    assert planned.result.sglang_version is None


def test_gpus_that_can_not_be_read_are_unknown(host: PlanHost) -> None:
    host.reading(GpuReading("none", None))
    planned = host.plan()
    assert planned.result.verdict == "unknown"
    assert planned.result.budget.value("gpu_free") is None


def test_a_gpu_that_is_not_there_is_one_clear_error(host: PlanHost) -> None:
    with pytest.raises(CleanSlateError, match="7"):
        host.plan(devices=["7"])


# --- guardrails -------------------------------------------------------------------------------------------------------


def test_a_rule_that_can_not_be_read_is_one_clear_error(host: PlanHost) -> None:
    with pytest.raises(CleanSlateError, match="no_triton.*severity"):
        host.plan(rules=[{**RULE, "severity": "denied"}])


def test_a_rule_denies_and_a_waiver_makes_a_warning_of_it(host: PlanHost) -> None:
    given = {"rules": [RULE], "flags": {"attention_backend": "triton"}}
    assert host.plan(**given).result.verdict == "denied"
    planned = host.plan(**given, waivers={"no_triton": "tested here for a week"})
    assert planned.result.verdict == "allowed"
    waived = finding(planned, "no_triton")
    assert (waived.severity, waived.waived) == ("warn", "tested here for a week")
    assert planning.summary(planned.result) == "allowed, 1 warning"


def test_what_is_computed_can_be_waived_as_well(host: PlanHost) -> None:
    flags = {"context_length": 400_000}
    denied = host.plan(flags=flags)
    assert denied.result.verdict == "denied" and finding(denied, "context_too_long").waivable
    planned = host.plan(flags=flags, waivers={"context_too_long": "rope scaling was tested here"})
    assert planned.result.verdict == "allowed"
    told = finding(planned, "context_too_long")
    assert (told.severity, told.waived) == ("warn", "rope scaling was tested here")
    assert told.message.endswith(". Waived: rope scaling was tested here")
    # Not everything: a port that somebody listens on stays busy.
    host.tcp = LISTENS.format(port=30000, inode=4)
    assert host.plan(waivers={"port_busy": "it is only nginx"}).result.verdict == "denied"


def test_what_says_that_it_can_be_waived_can_be() -> None:
    """Every finding of decide/ that is made with ``waivable`` is in the list by which waivers are checked."""
    places = {"Finding": 6, "_say": 6, "_deny": 5}
    found = set()
    for path in sorted(Path(budget_findings.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = [keyword.value for keyword in node.keywords if keyword.arg == "waivable"]
            given += node.args[places[name] :][:1] if name in places else []
            if given and not (isinstance(given[0], ast.Constant) and given[0].value is False):
                found.add(node.args[0].value)
    assert found == set(WAIVABLE)


def test_rules_see_the_server_and_its_environment(host: PlanHost) -> None:
    rules = [
        {**RULE, "id": "asks_server", "when": {"fact": "server.has_api_key", "is": True}},
        {**RULE, "id": "asks_variable", "when": {"fact": "environment.NCCL_DEBUG", "is": "INFO"}},
        {**RULE, "id": "asks_budget", "when": {"fact": "budget.gpu_free_gib", "above": 100}},
        {**RULE, "id": "asks_version", "when": {"fact": "sglang.version", "version_at_least": "0.5.15"}},
    ]
    planned = host.plan(rules=rules, server={"has_api_key": True}, environment={"NCCL_DEBUG": "INFO"})
    assert {one.id for one in worst(planned)} == {"asks_server", "asks_variable", "asks_budget", "asks_version"}


# --- without a GPU ----------------------------------------------------------------------------------------------------


def test_a_server_on_the_cpu_has_no_gpu_findings(host: PlanHost) -> None:
    def nobody(*_arguments: t.Any) -> t.NoReturn:
        raise AssertionError("the driver was asked")

    host.monkeypatch.setattr(planning.look.__globals__["nvml"], "read_gpus", nobody)
    planned = host.plan(device="cpu", devices=[], flags={"device": "cpu"}, shipped=True)
    assert planned.result.verdict == "allowed", worst(planned)
    result = planning.to_result(planned)
    assert result["budget"]["gpu"] == []
    assert not [one for one in result["findings"] if "GPU" in one["message"]]


def test_figures_of_the_demo(host: PlanHost) -> None:
    """Simulated GPUs, and a server that computes on the CPU all the same."""
    flags = {"device": "cpu", "attention_backend": "torch_native", "load_format": "dummy", "max_total_tokens": 4096}
    assert host.plan(flags={**flags, "mem_fraction_static": 0.3}, shipped=True).result.verdict == "allowed"


def test_it_takes_well_under_a_second(host: PlanHost) -> None:
    assert host.plan(shipped=True).result.seconds < 5  # the machine of the tests may be busy
