# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Drift of a real server: none right after its proof, and other flags by hand, through a prefix and a file."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.engine.real import (
    PORT,
    RealServer,
    cpu_environment,
    cpu_flags,
    engine_python,
)
from ansible_collections.cleanslate.sglang.tests.harness.modules import run_module

pytestmark = [pytest.mark.ns, pytest.mark.engine, pytest.mark.slow]
KEY = "sk-drift-Secret-1"


def check(server: RealServer) -> dict[str, t.Any]:
    wanted = {
        "name": server.name,
        "python": str(engine_python()),
        "user": "root",
        "port": PORT,
        "flags": cpu_flags(),
        "environment": cpu_environment(),
    }
    arguments = {
        "servers": [wanted],
        "secrets": {server.name: {"api_key": KEY}},
        "state_dir": str(server.state),
        "expected_gpus": 0,
    }
    result = run_module("server_drift", arguments, 120, ns=server.ns)
    assert not result.failed, result.json
    assert KEY not in json.dumps(result.json)
    return result.json


def drift(found: dict[str, t.Any]) -> dict[str, dict[str, t.Any]]:
    rows = found["servers"][0]["drift"]
    assert len({row["item"] for row in rows}) == len(rows), rows
    return {row["item"]: row for row in rows}


def test_no_drift_after_the_proof_then_other_flags_by_hand(server: RealServer, tmp_path: Path) -> None:
    server.start(api_key=KEY)
    assert server.ready(api_key=KEY)["verdict"] == "ready"
    found = check(server)
    assert (found["verdict"], found["servers"][0]["drift"], found["host"]["drift"]) == ("in_sync", [], []), found
    assert found["servers"][0]["engine_keys_compared"] > 5

    for way in ("prefix", "file"):
        server.signal("KILL", server.pid)
        server.wait_dead(server.pid)
        other = cpu_flags(max_total_tokens=2048)
        words = [str(engine_python()), "-m", "sglang.launch_server", "--port", str(PORT)]
        if way == "prefix":
            del other["max_total_tokens"]
            words += ["--max-total-tok=2048"]
        config = tmp_path / f"{way}.yaml"
        config.write_text(json.dumps({name.replace("_", "-"): value for name, value in other.items()}))
        words += ["--config", str(config)]
        server.pid = server.ns.popen(words, env=cpu_environment(), detached=True).pid
        rows = drift(check(server))
        row = rows["flag:max-total-tokens"]
        assert (row["wanted"], str(row["found"]), row["where"]) == (4096, "2048", "process"), row
        assert {"restarted_by_hand", "flag:max-total-tokens"} <= set(rows) <= {
            "restarted_by_hand",
            "flag:max-total-tokens",
            "unhealthy",
            "hung",
        }, rows
