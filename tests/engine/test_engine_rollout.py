# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A changed flag rolled out over two real servers behind the real router, while clients send: no request fails.

Two hosts of an inventory share one namespace, each with a state directory and a real SGLang of its own. Nobody sends a
request twice: the router runs with --disable-retries, and the clients try once.
"""

from __future__ import annotations

import json
import shutil
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.engine.real import (
    cpu_environment,
    cpu_flags,
    engine_python,
    model_path,
)
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, run_playbook
from ansible_collections.cleanslate.sglang.tests.harness.router import RouterProcess, start_router, why_not
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import PlaybookHost
from ansible_collections.cleanslate.sglang.tests.integration_ns.routed import Load, start_load

pytestmark = [
    pytest.mark.ns,
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.long(770),
    pytest.mark.timeout(2400),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
ROUTER_PORT = 41000
PORTS = {"gpu01": 31001, "gpu02": 31002}
ROLLOUT_DEADLINE_S = 1000
# So long does a long stream take while everybody sends to both servers; more while one is away.
LONG_S = 22.0
TRIAL_TOKENS = 150
LONGEST_TOKENS = 7500
CLIENTS_DEADLINE_S = 280.0
# Long streams need a longer context than the tiny model has.
CONTEXT = {"max_position_embeddings": 8192}
# An idle scheduler leaves the processor to others.
FLAGS = {"max_total_tokens": 60000, "sleep_on_idle": True}


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


class Site:
    """The hosts, their router, and the flags that the inventory wants."""

    def __init__(self, directory: Path, ns: Namespace) -> None:
        self.ns = ns
        self.directory = directory
        self.host = PlaybookHost(directory, ns)
        self.model = directory / "model"
        shutil.copytree(model_path(), self.model)
        config = self.model / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **CONTEXT}))
        self.flags: dict[str, t.Any] = {}
        # Looked after as seldom as by default: a server that is gone for a minute is not noticed in time.
        self.router: RouterProcess = start_router(ns, ROUTER_PORT, health=())

    def server(self, port: int, routed: bool) -> dict[str, t.Any]:
        return {
            "name": "chat",
            "port": port,
            "python": str(engine_python()),
            "user": "root",
            "launcher": "detached",
            "device": "cpu",
            "gpus": [],
            "flags": cpu_flags(model_path=str(self.model), **FLAGS, **self.flags),
            "environment": cpu_environment(OMP_NUM_THREADS="1"),
            "ready_deadline_s": 300,
            "shm_required_mib": 16,
            "soak": {"requests": 2, "concurrency": 2, "tokens": 8},
            "worker_url": url_of(port),
            **({"drain": {"deadline_s": 300}} if routed else {}),
        }

    def inventory(self, routed: bool) -> Path:
        hosts = {
            name: {
                "ansible_connection": "local",
                "ansible_python_interpreter": sys.executable,
                "sglang_become": False,
                "sglang_state_dir": str(self.directory / "state" / name),
                "sglang_task_environment": self.host.nvml.env(),
                "sglang_servers": [self.server(port, routed)],
                **({"sglang_routers": [{"url": self.router.url}]} if routed else {}),
            }
            for name, port in PORTS.items()
        }
        path = self.directory / "inventory.json"
        path.write_text(json.dumps({"sglang": {"hosts": hosts}}))
        return path

    def roll(self, routed: bool = True, **extra: t.Any) -> PlaybookRun:
        return run_playbook(
            ROOT / "playbooks" / "rollout.yml",
            scratch=self.directory,
            deadline_s=ROLLOUT_DEADLINE_S,
            inventory=self.inventory(routed),
            extra_vars={"rollout_min_throughput": 0, "rollout_max_latency": 0, **extra},
            env={"ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml", "ANSIBLE_PIPELINING": "1"},
            ns=self.ns,
        )

    def launches(self) -> dict[str, str]:
        """Of each host the launch that is current."""
        found = {}
        for name in PORTS:
            record = json.loads((self.directory / "state" / name / "chat" / "current.json").read_text())
            found[name] = str(record["launch_id"])
        return found

    def everybody_is_back(self) -> bool:
        return self.router.states() == {url_of(port): True for port in PORTS.values()}

    def clients(self, name: str, long_tokens: int) -> Load:
        words = ["--model", str(self.model), "--ignore-eos", "--long-tokens", str(long_tokens)]
        words += ["--long", "3", "--short", "3", "--short-tokens", "12", "--plain", "3", "--plain-tokens", "12"]
        return start_load(self.ns, self.router, name, *words)

    def long_tokens(self) -> int:
        """How many tokens keep a stream alive for long enough, on this machine with these clients."""
        trial = self.clients("trial", TRIAL_TOKENS)
        wait_for("long streams", lambda: trial.report()["answered"].get("long", 0) >= 6, 240)
        report = trial.end(CLIENTS_DEADLINE_S)
        assert report["failed"] == 0, report
        return min(int(LONG_S / report["longest_s"] * TRIAL_TOKENS), LONGEST_TOKENS)


def test_a_changed_flag_without_one_failed_request_and_with_some_where_nobody_asks_the_router(
    engine_ns: Namespace, tmp_path: Path
) -> None:
    site = Site(tmp_path, engine_ns)
    site.roll(rollout_ramp="100%", router_leave_healthy=0).check()
    assert site.everybody_is_back()
    before = site.launches()

    long_tokens = site.long_tokens()
    load = site.clients("load", long_tokens)
    site.flags = {"max_running_requests": 64}
    kept = tmp_path / "kept"
    run = site.roll(rollout_ramp="1", rollout_report_dir=str(kept))
    report = load.end(CLIENTS_DEADLINE_S)
    print(report)
    run.check()
    assert report["failed"] == 0, report
    assert sum(report["answered"].values()) > 200 and report["answered"]["long"] >= 4, report
    assert not set(before.values()) & set(site.launches().values())
    assert site.everybody_is_back()
    rows = json.loads(next(kept.glob("*.json")).read_text())["servers"]
    assert [row["state"] for row in rows] == ["changed"] * 2
    drained = [row["router"]["out"]["drained"] for row in rows]
    print(drained)
    assert all(each["cut"] == 0 for each in drained), drained
    # The router's clients were in the middle of long streams each time.
    assert all(each["in_flight_at_start"] > 0 and each["seconds"] > 3 for each in drained), drained
    assert report["longest_s"] > 20, report

    # The same without the router being asked: so the test above is able to fail.
    load = site.clients("rude", long_tokens)
    site.flags = {"max_running_requests": 48}
    site.roll(routed=False, target="gpu01").check()
    rude = load.end(CLIENTS_DEADLINE_S)
    print(rude)
    assert rude["failed"] > 0, rude
