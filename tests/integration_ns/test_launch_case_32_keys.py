# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 32: SGLang shows its keys in /server_info, the start-up log line and launch_command; none reaches our
results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.modules import run_module
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.standin import STANDIN, start_standin

pytestmark = pytest.mark.ns

KEY, ADMIN = "sk-Case-32-user", "sk-Case-32-admin"


@pytest.mark.parametrize("version", ["0.5.12", "0.5.15", "0.5.23"])
def test_a_server_of_others_with_its_keys_on_the_command_line(ns: Namespace, tmp_path: Path, version: str) -> None:
    server = start_standin(ns, "--api-key", KEY, f"--admin-api-key={ADMIN}", faults={"VERSION": version})
    assert KEY in server.text()
    assert KEY in server.request("GET", "/server_info", key=KEY).body
    info = run_module("server_info", {"state_dir": str(tmp_path), "api_key": KEY, "expected_gpus": 0}, 60, ns=ns)
    assert not info.failed, info.json
    [found] = info.json["servers"]
    assert found["state"] == "serving"
    assert found["resolved"]["api_key"] == found["resolved"]["internal_states"][0]["admin_api_key"] == "********"
    assert found["flags"]["api-key"] == found["flags"]["admin-api-key"] == "********"
    assert ("launch_command" in found["resolved"]) == (version == "0.5.23")
    for secret in (KEY, ADMIN):
        assert secret not in json.dumps(info.json)
        assert secret not in info.stderr


def test_a_launch_that_fails_after_it_logged_its_keys(ns: Namespace, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    launched = run_module(
        "server_launch",
        {
            "name": "main",
            "python": sys.executable,
            "user": "root",
            "launcher": "detached",
            "state_dir": str(tmp_path / "state"),
            "flags": {"model_path": str(tmp_path / "model"), "device": "cpu"},
            "environment": {"PYTHONPATH": str(STANDIN), "SGLANG_STANDIN_CRASH": "cuda_oom"},
            "api_key": KEY,
            "admin_api_key": ADMIN,
        },
        60,
        ns=ns,
    )
    assert not launched.failed, launched.json
    # Without api_key: the secret is known by its name in the log alone.
    ready = run_module("server_ready", {"name": "main", "state_dir": str(tmp_path / "state")}, 60, ns=ns)
    assert ready.failed
    log = Path(launched.json["log"])
    assert KEY in log.read_text()
    assert any("server_args=" in line for line in ready.json["log_tail"])
    for secret in (KEY, ADMIN):
        assert secret not in json.dumps(ready.json)
        assert secret not in json.dumps(launched.json)
