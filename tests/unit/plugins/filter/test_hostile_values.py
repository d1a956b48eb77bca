# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever an inventory, a command line or a host's answer says, the controller's filters come back: with a value, or
with an error in words. Never with Python's.
"""

from __future__ import annotations

import contextlib
import json
import typing as t
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from ansible.errors import AnsibleError

from ansible_collections.cleanslate.sglang.plugins.filter import containers as container_filters
from ansible_collections.cleanslate.sglang.plugins.filter import inventory as inventory_filters
from ansible_collections.cleanslate.sglang.plugins.filter import plans
from ansible_collections.cleanslate.sglang.plugins.filter import rollout as rollout_filters
from ansible_collections.cleanslate.sglang.plugins.filter import spread as spread_filters
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import (
    containers,
    drift_answers,
    drift_document,
    drift_history,
    drift_table,
    going_back,
    inspect_report,
    inventory,
    plan_report,
    report,
    results,
    router_settings,
    runs,
    verdicts,
)
from ansible_collections.cleanslate.sglang.tests.unit import drift_builders
from ansible_collections.cleanslate.sglang.tests.unit.plugins.filter.hostile import LARGE, OF_YAML, PLAIN, spoiled
from ansible_collections.cleanslate.sglang.tests.unit.plugins.module_utils.properties.foreign import limited


@dataclass(frozen=True)
class Entry:
    """``call`` gets the sample with something else at one of its places. ``yaml``: it comes from an inventory or a
    command line, so it can be more than JSON. ``whole``: the sample as a whole may be replaced as well. ``step``: every
    which of the changes is tried, where one takes long."""

    name: str
    call: Callable[[t.Any], t.Any]
    sample: t.Any
    yaml: bool = False
    whole: bool = False
    step: int = 1


SERVER: dict[str, t.Any] = {
    **{"name": "chat", "port": 30000, "python": "/opt/p", "gpus": ["0"], "rungs": ["term"], "device": "cuda"},
    "flags": {"model_path": "/m", "nnodes": 2, "node_rank": 0, "dist_init_addr": "a:1"},
    **{"environment": {"A": "b"}, "secret_environment": {"K": "sesame"}, "api_key": "sesame"},
    **{"deadlines": {"attach": 30}, "soak": {"requests": 2}, "hung_after": {"imports": 60}, "keep_launches": 5},
    **{"drain": {"deadline_s": 10}, "clients": [{"name": "c", "unit": "c.service", "host": "h2"}]},
    **{"worker_url": "http://a:1", "worker_aliases": ["http://b:1"], "waivers": {"abc_d": "tested, ticket 12"}},
}
VALUES: dict[str, t.Any] = {
    "sglang_servers": [SERVER],
    "sglang_server_defaults": {"protect": ["x.service"]},
    **{"sglang_proxmox_host": "pve", "sglang_vmid": 129, "sglang_host_rungs": True, "sglang_expected_gpus": 2},
    "sglang_drift_accepted": [{"server": "chat", "item": "flags.tp-size", "reason": "so", "until": "2026-02-01"}],
    "sglang_routers": [{"name": "r", "url": "http://r:1", "api_key": "sesame"}],
    "sglang_router_hooks": [{"name": "h", "out": ["a"], "back": ["b"], "list": ["c"], "deadline_s": 5}],
    **{"sglang_router_host": "localhost", "sglang_protect": ["sshd.service"], "sglang_nvml_deadline_s": 10},
}
RULE = {
    "rules": [
        {
            **{"id": "abc_d", "severity": "deny", "reason": "r", "remedy": "m", "source": "s", "waivable": True},
            "when": {"all": [{"fact": "flags.tp_size", "at_least": 2}]},
        }
    ]
}
OPTIONS = {
    **{"ramp": [1, "10%"], "per_node": 1, "leave_healthy": 1, "min_throughput": 0.8, "max_latency": 1.5},
    **{"when": "differs", "canary": "h/chat", "except": ["h/other"]},
}
GPUS = {"gpus": [{"index": 0, "uuid": "GPU-a", "bus_id": "00000000:3B:00.0"}], "problems": [{"code": 9}], "msg": "x"}
REASONS = [{"code": "held", "message": "x", "subject": "GPU 0 (00000000:3B:00.0)", "means": "dirty"}]
VIEW = {
    **{"verdict": "dirty", "reasons": REASONS, "warnings_found": [{"code": "x", "message": "y"}], "seconds": 1.0},
    "facts_seen": {"gpus": [{"index": 0, "bus_id": "00000000:3B:00.0"}], "available_mib": 1000},
}
CLEAN = {**VIEW, "verdict": "clean", "reasons": []}
WORKER = {
    **{"url": "http://a:1", "before": {"state": "healthy"}},
    "after": {"state": "absent", "entries": [{"id": "1"}]},
}
ROUTERS: dict[str, t.Any] = {
    **{"verdict": "done", "problems": ["x"], "plan": ["a"], "seconds": 1.0},
    "routers": [{"name": "r", "url": "http://r:1", "workers": [WORKER], "listed": [{"id": "1", "healthy": True}]}],
    "hooks": [{"name": "h", "action": "list", "missing": False, "result": "ok", "seconds": 1.0}],
    "drained": {"cut": 1, "in_flight_at_start": 2, "seconds": 1.0},
}
FAILED = {"msg": "x", "module_stderr": "a", "rc": 1, "reasons": REASONS}
DRIFT = drift_builders.answer([drift_builders.server(drift=[drift_builders.row("flags.tp-size")])])
FINDING = {"id": "a", "severity": "deny", "message": "x", "remedy": "y", "waived": None}
KEPT: dict[str, t.Any] = {
    **{"launch_id": "20260131T235959Z-1a2b", "run_id": "r1", "verdict": "ready", "config_hash": "sha256:a"},
    **{"current": True, "last_good": True, "soak": {"requests": 8.0, "tokens_per_s": 100.0}},
}
INFO = {"servers": [{"name": "chat", "matches": True, "differences": [{"item": "a"}], "launches": [KEPT]}]}
READY = {"ready": True, "verdict": "ready", "pid": 9, "soak": {"tokens_per_s": 90.0}, "tokens": [{"count": 4}]}
PATH = {"launch": {"launch_id": "n", "config_hash": "sha256:b"}, "verify": READY, "teardown": {"verdict": "evicted"}}
UNIT = {"server": "big", "name": "big over h, g", "nodes": 2, "hosts": ["h", "g"]}
NODE: dict[str, t.Any] = {
    **{"spread_at": "x", "relaunch_alone": {"step": "rollback"}, "relaunch_first": PATH, "relaunch_choice": "rollback"},
    **{"relaunch_second": {"alone": {"step": "nothing"}, "held": True}, "spread_launches": {"big": [KEPT]}},
    **{"rollback_result": VIEW, "relaunch_failed": {"message": "x"}, "relaunch_next": {"step": "rollback"}},
}
RECORD: dict[str, t.Any] = {
    **{"gpus": ["0"], "flags": {"tp-size": 2}, "device": "cuda", "port": 30000, "environment": {"A": "b"}},
    **{"unit": None, "launch_id": "20260131T235959Z-1a2b", "argv": ["python3"], "log": "/l", "user": "u"},
}
BATCH = [{"host": "h", "server": "chat"}]


def _spread(call: Callable[..., t.Any], *words: t.Any) -> Callable[[t.Any], t.Any]:
    return lambda node: call({"h": node, "g": NODE}, UNIT, *words)


def _confirmations(value: dict[str, t.Any]) -> t.Any:
    return container_filters.confirmation_problems({"h": value}, ["h"], value.get("stop"), "0")


ENTRIES: tuple[Entry, ...] = (
    Entry(
        "inventory_problems",
        lambda values: inventory_filters.inventory_problems({"h1": values, "h2": {}, "pve": {}}, ["h1", "h2"]),
        VALUES,
        yaml=True,
        step=3,
    ),
    Entry("choice_problems", lambda value: inventory_filters.choice_problems(value, {"a": ["x"]}), {"a": "x"}, True),
    Entry("rollout_problems", rollout_filters.rollout_problems, OPTIONS, yaml=True),
    Entry(
        "confirmation_problems",
        _confirmations,
        {"sglang_vmid": 1, "sglang_proxmox_host": "p", "confirm_gpu_reset": "0", "stop": ["129"]},
        yaml=True,
    ),
    Entry("guardrail_problems", lambda own: plans.guardrail_problems(own, {}, "h"), RULE, True, True, 13),
    Entry("waivers", lambda given: plans.guardrail_problems(RULE, given, "h"), {"abc_d": "tested"}, True, True, 5),
    Entry("why", results.why, FAILED, whole=True),
    Entry("launch_problem", results.launch_problem, FAILED, whole=True),
    Entry("gpu_problems", lambda info: inventory.gpu_problems("h", ["chat"], [SERVER], info, 2), GPUS),
    Entry("node_devices", lambda info: containers.node_devices(SERVER, info, info), GPUS, whole=True),
    Entry("node_baselines", lambda info: containers.node_baselines({"0": 5}, info, info), GPUS, whole=True),
    Entry(
        "node_problems",
        lambda info: containers.node_problems("h", "n", 129, {"rc": 0, "stdout": "0"}, info, True, True, ["a"]),
        {**GPUS, "container": {"state": "running", "init_pid": 7}},
        whole=True,
    ),
    Entry("pct_problem", lambda result: containers.pct_problem(result, 129), FAILED, whole=True),
    Entry("view from inside", lambda view: verdicts.join_verdicts(view, VIEW, "h", "n", 1), VIEW, whole=True),
    Entry("view of the node", lambda view: verdicts.join_verdicts(VIEW, view, "h", "n", 1), VIEW, whole=True),
    Entry("clean view", lambda view: verdicts.join_verdicts(view, CLEAN, "h", "n", 1), CLEAN, whole=True),
    Entry("old_settings", lambda told: going_back.old_settings(SERVER, told), {"record": RECORD}),
    Entry("eviction_problem", lambda one: verdicts.eviction_problem(one, one, "h", "n"), VIEW, whole=True),
    Entry("router_answer", lambda raw: router_settings.lines(router_settings.answer(raw)), ROUTERS),
    Entry("clean_lines", report.clean_lines, {"inside": VIEW, "node": VIEW, "joint": VIEW}),
    Entry("teardown_lines", report.teardown_lines, {"drain": {}, "inside": VIEW, "node": VIEW, "evict": VIEW}),
    Entry("relaunch_lines", report.relaunch_lines, {**PATH, "clean": VIEW, "path": "cold", "seconds": {"all": 3.0}}),
    Entry("inspect_lines", inspect_report.inspect_lines, {"gpus": GPUS, "servers": INFO, "clean": VIEW}),
    Entry("plan_why", plan_report.plan_why, {"findings": [FINDING], "summary": "x"}, whole=True),
    Entry("drift_lines", lambda one: drift_table.drift_lines(one, "h"), DRIFT, whole=True),
    Entry("drift_why", lambda one: drift_table.drift_why(one, "h"), DRIFT, whole=True),
    Entry("drift_overview", lambda one: drift_table.drift_overview({"h": one, "g": DRIFT}), DRIFT, whole=True),
    Entry("drift_calls", lambda one: drift_table.calls_for_relaunch(one, "chat"), DRIFT, whole=True),
    Entry("drift answer", lambda one: drift_answers.read_answer("h", one, "x"), DRIFT, whole=True),
    Entry("launches_of", lambda info: going_back.launches_of(info, "chat"), INFO, whole=True),
    Entry("choose_launch", lambda kept: going_back.choose_launch(kept, ""), [KEPT], whole=True),
    Entry("way_back", lambda trial: going_back.way_back(trial, SERVER, "sha256:x"), PATH["launch"], whole=True),
    Entry("after_failure", lambda told: going_back.after_failure(told, "rollback"), PATH),
    Entry("clients_go_on", lambda one: going_back.clients_go_on(one, one, one, one), {**READY, **VIEW}, whole=True),
    Entry("lease_lost", going_back.lease_lost, FAILED, whole=True),
    Entry("lease_problem", lambda result: runs.lease_problem(result, "r1"), {**FAILED, "lease": {"run_id": "r2"}}),
    Entry(
        "rollout_seen",
        lambda told: rollout_filters.rollout_seen(
            {"name": "chat", "flags": {}}, told.get("current"), told.get("trial"), told.get("verify"), {}, OPTIONS
        ),
        {"current": INFO, "trial": {"config_changed": False, "config_hash": "a"}, "verify": READY},
    ),
    Entry(
        "rollout_judgement",
        lambda told: rollout_filters.rollout_judgement(BATCH, {"h": {"rollout_results": told}}),
        {"chat": {"proved": False, "error": "x"}},
        whole=True,
    ),
    Entry(
        "rollout_too_few",
        lambda told: rollout_filters.rollout_too_few(BATCH, {"h": {"rollout_others": told}}, 1),
        {"chat": ROUTERS},
    ),
    Entry("rollout_result", rollout_filters.rollout_result, {"first": PATH, "second": PATH, "routers": ROUTERS}),
    Entry("spread_behind", _spread(spread_filters.spread_behind, "x"), NODE),
    Entry("spread_next", _spread(spread_filters.spread_next, "g"), NODE),
    Entry("spread_next, second", _spread(spread_filters.spread_next, "g", "second"), NODE),
    Entry("spread_start", _spread(spread_filters.spread_start), NODE),
    Entry("spread_trials", _spread(spread_filters.spread_trials), NODE),
    Entry("spread_outcome", _spread(spread_filters.spread_outcome), NODE),
)


def _next_document(previous: t.Any) -> t.Any:
    """What the next check makes of the document of the last one, which lies in a folder for all to see."""
    ours = {name: DOCUMENT[name] for name in ("schema", "schema_version")}
    if isinstance(previous, dict) and drift_document.is_whole({**previous, **ours}):
        answers = (drift_builders.ok("a", DRIFT),)
        made = drift_builders.document(*answers, expected=["a"], previous=previous, finished=drift_builders.NOW + 100)
        drift_history.line_of(made)


def _history(line: t.Any) -> t.Any:
    raw = json.dumps(line).encode()
    drift_history.compact([raw, raw], drift_builders.NOW, drift_history.Limits(400, 64))
    return drift_history.of_hosts([raw], ["a"], drift_builders.NOW, 30, 5)


DOCUMENT = drift_builders.document(drift_builders.ok("a", DRIFT), drift_builders.ok("b", DRIFT), expected=["a", "b"])
ENTRIES = (
    *ENTRIES,
    Entry("drift document", _next_document, DOCUMENT, whole=True, step=3),
    Entry("drift history", _history, drift_history.line_of(DOCUMENT), whole=True),
)
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


@each_entry
def test_any_value_at_any_place_is_read_or_refused(entry: Entry) -> None:
    tried = [one for one in spoiled(entry.sample, PLAIN) if entry.whole or not one[0].startswith("all of it")]
    for what, value in tried[:: entry.step]:
        _comes_back(entry, what, value)


@pytest.mark.parametrize("entry", [each for each in ENTRIES if each.yaml], ids=lambda entry: entry.name)
@pytest.mark.parametrize("name", [*LARGE, *OF_YAML])
def test_what_yaml_can_say_comes_to_an_end(entry: Entry, name: str) -> None:
    """At some of the places: each takes its time."""
    value = {**LARGE, **OF_YAML}[name]
    found = [one for one in spoiled(entry.sample, {name: value}) if one[0].endswith(f" is {name}")]
    found = found[0 if entry.whole else 1 :]
    with limited(60):
        for what, each in found[:: max(1, len(found) // 2)]:
            _comes_back(entry, what, each)


def _comes_back(entry: Entry, what: str, value: t.Any) -> None:
    try:
        with contextlib.suppress(AnsibleError):
            entry.call(value)
    except Exception as error:
        raise AssertionError(f"{entry.name}: {what}: {type(error).__name__}") from error
