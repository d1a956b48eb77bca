# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan before the kill, by the real playbooks on the stand-in server and simulated GPUs."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import (
    PlaybookHost,
    refusal_of,
    summary_of,
)
from ansible_collections.cleanslate.sglang.tests.integration_ns.scripted import Scripted, planned
from ansible_collections.cleanslate.sglang.tests.unit.plan_host import SMALL

RULE = {
    "id": "our_page_size",
    "when": {"fact": "flags.page_size", "is": 64},
    "severity": "deny",
    "reason": "Pages of 64 were slow here.",
    "remedy": "Take page_size away.",
    "source": "our ticket 12",
    "waivable": True,
}
DENIED = {
    "id": "hicache_too_large",
    "severity": "deny",
    "message": "It does not fit.",
    "remedy": "Lower it.",
    "waived": None,
}
UNSURE = {"id": "model_unknown", "severity": "unknown", "message": "it is not there", "remedy": "", "waived": None}
SECRET = "Sesame-51a7-do-not-show"
REASON = "measured again with the new model"


def with_model(host: PlaybookHost) -> PlaybookHost:
    model = host.directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(SMALL))
    index = {"metadata": {"total_size": 16_400_000_000}, "weight_map": {}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return host


@pytest.fixture
def host(ns: Namespace, tmp_path: Path) -> PlaybookHost:
    one = with_model(PlaybookHost(tmp_path, ns))
    one.follow_schedulers()
    one.servers = [one.server("demo", 31000, flags={"tp_size": 2})]
    return one


@pytest.mark.ns
def test_a_denied_relaunch_leaves_the_old_server_alone(host: PlaybookHost, ns: Namespace) -> None:
    """Stopped before anything is touched, with reason and remedy; what is waived goes on, and the record keeps why."""
    first = summary_of(host.run("relaunch.yml").check())
    assert "Planned   allowed" in first
    before = host.record("demo")
    assert before["waivers"] == {}
    good = dict(host.servers[0]["flags"])

    for flags, words in (
        ({"mem_fraction_statc": 0.5}, ("mem-fraction-statc", "mem-fraction-static", "[flags-unknown]")),
        (
            {"enable_hierarchical_cache": True, "hicache_size": 4000},
            ("8,000.0 GB", "2 ranks x 4,000.00 GB", "is the largest that fits", "GB per rank", "[hicache_too_large]"),
        ),
        ({"page_size": 64}, ("Pages of 64 were slow here.", "(Take page_size away.)", "[our_page_size]")),
    ):
        host.variables["sglang_guardrails"] = [RULE]
        host.servers[0]["flags"] = {**good, **flags}
        run = host.run("relaunch.yml")
        message = refusal_of(run)
        for each in ("gpu01: server 'demo': the plan is denied: ", "Nothing was touched.", *words):
            assert each in message, message
        assert not run.of_action("gpu_evict"), run.stdout
        assert host.record("demo") == before
        assert before["pid"] in ns.pids()

    host.servers[0]["waivers"] = {"our_page_size": REASON}
    waived = summary_of(host.run("relaunch.yml").check())
    for each in ("SERVING", "Planned   allowed", "Waived: " + REASON, "[our_page_size]"):
        assert each in waived, waived
    after = host.record("demo")
    assert after["waivers"] == {"our_page_size": REASON}
    assert after["pid"] != before["pid"]


# --- what the module is told ------------------------------------------------------------------------------------------


def test_the_plan_knows_the_node_the_scope_and_that_there_are_keys(tmp_path: Path) -> None:
    """But no key. The modules answer from a script."""
    fleet = Scripted(tmp_path)
    told = {"node_available_mib": 90_000, "headroom_mib": 0}
    (seen,) = fleet.scripts["gpu_info@node"]
    fleet.script("gpu_info@node", {**seen, "container": {**seen["container"], **told}})
    fleet.server.update(api_key=SECRET, secret_environment={"HF_TOKEN": SECRET}, environment={"NCCL_DEBUG": "INFO"})
    fleet.server["waivers"] = {"weights_do_not_fit": REASON}
    fleet.variables["sglang_baselines_mib"] = {"0": 150}
    run = fleet.run("relaunch", scope="gpu").check()
    given = fleet.arguments("server_plan@inside")
    assert (given["node_available_mib"], given["node_headroom_mib"]) == (90_000, 0)
    assert (given["scope"], given["baselines"]) == ("gpu", {"0": 150})
    assert given["environment"] == {"NCCL_DEBUG": "INFO", "HF_TOKEN": "********"}
    assert (given["server"]["has_api_key"], given["server"]["has_admin_api_key"]) == (True, False)
    assert given["waivers"] == {"weights_do_not_fit": REASON}
    assert {rule["id"] for rule in given["rules"]} >= {"flashinfer_mla_on_sm120", "fp8_kv_on_int4_mla_moe"}
    assert SECRET not in json.dumps(given)
    assert "Planned   allowed" in summary_of(run)


def test_without_a_node_nothing_is_said_of_one(tmp_path: Path) -> None:
    fleet = Scripted(tmp_path)
    fleet.variables = {}
    fleet.script("server_plan@inside", planned("unknown", UNSURE, summary="unknown: it is not there [model_unknown]"))
    run = fleet.run("relaunch").check()
    given = fleet.arguments("server_plan@inside")
    assert (given.get("node_available_mib"), given.get("node_headroom_mib")) == (None, None)
    # What is not known stops nobody, and is told.
    text = summary_of(run)
    assert "SERVING" in text and "Planned   unknown: it is not there [model_unknown]" in text
    assert fleet.calls()[0] == "gpu_evict@inside"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda: planned("denied", DENIED), "the plan is denied: It does not fit. (Lower it.) [hicache_too_large]"),
        (lambda: {"failed": True, "msg": "there is no GPU 7", "verdict": "unknown"}, "there is no GPU 7"),
        (lambda: {"failed": True, "msg": "Timed out after 150 second(s)."}, "without a verdict: Timed out after 150"),
    ],
    ids=["denied", "failed", "timed out"],
)
def test_a_plan_that_is_no_yes_stops_before_anybody_is_asked_to_go(
    tmp_path: Path, answer: t.Callable[[], dict[str, t.Any]], words: str
) -> None:
    fleet = Scripted(tmp_path)
    fleet.script("server_plan@inside", answer())
    message = refusal_of(fleet.run("relaunch"))
    assert message.startswith("ct129: server 'chat': ") and words in message, message
    assert message.endswith("Nothing was touched.")
    assert fleet.calls() == []
    # Who only wants it gone or judged needs no plan.
    fleet.run("teardown").check()
    assert "server_plan@inside" not in [row["key"] for row in fleet.rows()]


# --- plan.yml: no server is needed, and none is touched ---------------------------------------------------------------


def fleet(host: PlaybookHost) -> PlaybookHost:
    """Two hosts, the second with two servers."""
    with_model(host)
    host.servers = [host.server("chat", 31000, gpus=[0])]
    other = {**json.loads(host.inventory().read_text())["sglang"]["hosts"]["gpu01"]}
    other["sglang_servers"] = [host.server("chat", 31001, gpus=[0]), host.server("embed", 31002, gpus=[1])]
    host.other_hosts["gpu02"] = other
    return host


def tables_of(run: PlaybookRun) -> dict[str, str]:
    """Host/server -> the text that its plan shows."""
    told = [task for task in run.tasks if task.task.startswith("Plan of ") and task.status == "ok"]
    return {f"{task.host}/{task.task[8:]}": str(task.result["msg"]) for task in told}


@pytest.mark.parametrize("check", [False, True], ids=["plain", "check"])
def test_the_plan_of_a_fleet_touches_nothing(tmp_path: Path, check: bool) -> None:
    host = fleet(PlaybookHost(tmp_path))
    allowed = host.run("plan.yml", check=check).check()
    texts = tables_of(allowed)
    assert set(texts) == {"gpu01/chat", "gpu02/chat", "gpu02/embed"}
    for name, text in texts.items():
        where, _slash, server = name.partition("/")
        assert text.startswith(f"{server} on {where}: ALLOWED (SGLang 0.5.15, "), text
        assert "GPU (SIMULATED), per rank" in text and "weights per rank" in text and "GiB" in text, text
        assert max(map(len, text.splitlines())) <= 100

    host.other_hosts["gpu02"]["sglang_servers"][0]["flags"]["attention_backend"] = "flashinfr"
    denied = host.run("plan.yml", check=check)
    message = refusal_of(denied)
    assert message == "gpu02: denied: chat. Nothing was touched."
    texts = tables_of(denied)
    assert texts["gpu01/chat"].startswith("chat on gpu01: ALLOWED")
    assert texts["gpu02/embed"].startswith("embed on gpu02: ALLOWED")
    for words in ("chat on gpu02: DENIED", "DENIED", "'flashinfr'", "flashinfer", "[flags-choice]"):
        assert words in texts["gpu02/chat"], texts["gpu02/chat"]

    one = host.run("plan.yml", check=check, extra_vars={"server": "gpu02/embed"}).check()
    assert set(tables_of(one)) == {"gpu02/embed"}
    for run in (allowed, denied, one):
        assert not [task.task for task in run.tasks if task.result.get("changed")]
        used = {task.action.rpartition(".")[2] for task in run.tasks}
        assert not used & {"gpu_evict", "server_launch", "clean_state"}, used
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("variables", "server", "words"),
    [
        ({"sglang_guardrails": [{**RULE, "severity": "denied"}]}, {}, ["our_page_size", "severity", "deny"]),
        ({"sglang_guardrails": ["nowhere.yml"]}, {}, ["nowhere.yml"]),
        ({}, {"waivers": {"fp8_kv_on_int4_mla": REASON}}, ["server 'chat'", "fp8_kv_on_int4_mla_moe"]),
        ({}, {"waivers": {"fp8_kv_on_int4_mla_moe": "yes"}}, ["server 'chat'", "fp8_kv_on_int4_mla_moe", "reason"]),
        ({}, {"waivers": {"trtllm_mla_on_sm120": REASON}}, ["server 'chat'", "can't be waived"]),
    ],
    ids=["rule", "file", "unknown id", "no reason", "never waivable"],
)
def test_mistakes_in_guardrails_and_waivers_are_named(
    tmp_path: Path, variables: dict[str, t.Any], server: dict[str, t.Any], words: list[str]
) -> None:
    host = PlaybookHost(tmp_path)
    host.servers = [host.server("chat", 31000, gpus=[0], **server)]
    host.variables.update(variables)
    message = refusal_of(host.run("relaunch.yml"))
    for word in words:
        assert word in message, message
    assert "Nothing was touched" in message
    assert not (tmp_path / "state").exists()
