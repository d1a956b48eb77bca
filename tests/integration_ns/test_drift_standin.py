# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""server_drift on stand-in servers: in sync right after a launch, then each kind of drift named exactly once."""

from __future__ import annotations

import json
import signal
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.modules import run_module
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.standin import STANDIN

from .test_proof_cases import KEY, PORT, Site

pytestmark = pytest.mark.ns


@pytest.fixture
def site(ns: Namespace, tmp_path: Path) -> Site:
    site = Site(ns, tmp_path)
    site.start({"max_total_tokens": 128000, "enable_metrics": True})
    site.served(soak_requests=0)
    return site


def check(site: Site, changes: t.Mapping[str, t.Any] | None = None, **options: t.Any) -> dict[str, t.Any]:
    server = {
        "name": "main",
        "python": sys.executable,
        "user": "root",
        "port": PORT,
        "flags": {
            "model": str(site.model),
            "device": "cpu",
            "max_total_tokens": "128k",
            "enable-metrics": True,
        },
        "environment": {"PYTHONPATH": str(STANDIN)},
        **(changes or {}),
    }
    arguments = {
        "servers": [server],
        "secrets": {"main": {"api_key": KEY}},
        "state_dir": str(site.state),
        "expected_gpus": 0,
        "health_deadline_s": 5,
    }
    result = run_module("server_drift", {**arguments, **options}, 90, ns=site.ns)
    assert not result.failed, result.json
    assert KEY not in json.dumps(result.json)
    return result.json


def items(found: dict[str, t.Any]) -> list[str]:
    return [row["item"] for row in (*found["servers"][0]["drift"], *found["host"]["drift"])]


def test_in_sync_then_each_kind_once(site: Site) -> None:
    found = check(site)
    assert (found["verdict"], items(found)) == ("in_sync", []), found
    assert found["servers"][0]["engine_keys_compared"] >= 3

    flags = {"model": str(site.model), "device": "cpu", "max_total_tokens": "128k", "enable-metrics": True}
    kinds: list[tuple[str, dict[str, t.Any]]] = [
        ("flag:enable-metrics", {"flags": {k: v for k, v in flags.items() if k != "enable-metrics"}}),
        ("flag:max-total-tokens", {"flags": {**flags, "max_total_tokens": "64k"}}),
        ("flag:skip-server-warmup", {"flags": {**flags, "skip_server_warmup": True}}),
        ("env:NCCL_DEBUG", {"environment": {"PYTHONPATH": str(STANDIN), "NCCL_DEBUG": "INFO"}}),
        ("user", {"user": "nobody"}),
        ("python", {"python": "/other/python3"}),
    ]
    for item, changes in kinds:
        found = check(site, changes)
        assert (found["verdict"], items(found)) == ("drifted", [item]), found

    accepted = [{"server": "main", "item": "user", "reason": "ticket 12", "until": "2026-01-31"}]
    found = check(site, {"user": "nobody"}, accepted=accepted, today="2026-01-31")
    assert (found["verdict"], items(found)) == ("in_sync", [])
    found = check(site, {"user": "nobody"}, accepted=accepted, today="2026-02-01")
    assert (found["verdict"], found["servers"][0]["drift"][0]["state"]) == ("drifted", "expired_acceptance")

    site.signal(site.scheduler("sglang::scheduler"), signal.SIGSTOP)
    found = check(site)
    assert (found["verdict"], items(found)) == ("drifted", ["hung"]), found
    site.signal(site.pid, signal.SIGKILL)
    found = check(site)
    # What a killed server leaves in shared memory is a finding of its own.
    assert (found["verdict"], items(found)) == ("drifted", ["not_running", "leftovers"]), found
