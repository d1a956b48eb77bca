# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A login that is not root: one clear error, no verdict that it can't give, and nothing touched."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR
from ansible_collections.cleanslate.sglang.tests.lab.containers import Container
from ansible_collections.cleanslate.sglang.tests.lab.gpus import Gpus
from ansible_collections.cleanslate.sglang.tests.lab.inventory import (
    API_KEY,
    host_vars,
    run_module_on,
    run_on,
    server,
    unprivileged,
    write_inventory,
)
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import MODEL, SERVER_USER, SGLANG_PYTHON
from ansible_collections.cleanslate.sglang.tests.lab.servers import (
    leaders,
    standin_argv,
    start_unit,
    unit_file,
    wait_serving,
)

pytestmark = pytest.mark.lab

PORT = 30000
DEVICES = {"devices": ["0"], "expected_gpus": 2, "device_major": LOOP_MAJOR}


def test_modules_say_what_they_may_not(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    environment = {"SGLANG_STANDIN_DEVICES": "/dev/nvidia0,/dev/nvidia1"}
    start_unit(box, "kimi.service", unit_file(standin_argv(PORT), environment=environment))
    wait_serving(box, PORT)
    servers = {one.key for one in box.processes().values() if "sglang" in one.title}
    files = set((box.root / "etc/systemd/system").iterdir())

    evicted = run_module_on(
        box,
        "gpu_evict",
        {"port": PORT, "deadlines": {"stop": 3, "term": 3, "kill": 3}, **DEVICES},
        tmp_path,
        variables=unprivileged(box),
    )
    assert evicted.status == "failed" and evicted.result["verdict"] in ("failed", "unknown"), evicted.result
    words = evicted.result["msg"].lower()
    assert "permit" in words or "permission" in words or "root" in words, evicted.result["msg"]

    judged = run_module_on(box, "clean_state", {"samples": 1, **DEVICES}, tmp_path, variables=unprivileged(box))
    assert judged.status == "failed" and judged.result["verdict"] in ("dirty", "unknown"), judged.result

    launched = run_module_on(
        box,
        "server_launch",
        {
            "name": "chat",
            "python": SGLANG_PYTHON,
            "flags": {"model_path": MODEL},
            "user": SERVER_USER,
            "port": PORT + 1,
            "launcher": "systemd",
        },
        tmp_path,
        variables=unprivileged(box),
    )
    assert launched.status == "failed" and "root" in launched.result["msg"], launched.result

    assert servers == {one.key for one in box.processes().values() if "sglang" in one.title}
    assert files == set((box.root / "etc/systemd/system").iterdir())
    assert not (box.root / "var/lib/cleanslate").exists()


def test_an_idle_gpu_is_not_called_clean_without_root(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    """Memory is at zero, but who has the node mapped can't be seen: never 'clean'."""
    judged = run_module_on(box, "clean_state", {"samples": 1, **DEVICES}, tmp_path, variables=unprivileged(box))
    assert judged.status == "failed" and judged.result["verdict"] == "unknown", judged.result


def test_the_playbook_refuses_before_anything_is_touched(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    variables = {**host_vars(box, [server("chat", PORT, 0)]), **unprivileged(box)}
    inventory = write_inventory(tmp_path / "hosts.json", {box.name: variables})
    run = run_on(box, ROOT / "playbooks/relaunch.yml", inventory, tmp_path, "-e", "server=chat")
    assert run.rc != 0
    failed = [task for task in run.tasks if task.status == "failed"]
    assert len(failed) == 1 and "only root" in failed[0].result["msg"], run.stdout
    assert "Nothing was touched" in failed[0].result["msg"]
    assert not leaders(box) and not (box.root / "var/lib/cleanslate").exists()


def test_what_is_only_looked_at_is_not_called_well_without_root(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    """A server that root has launched, looked at by somebody else: figures of memory are the same, and what only root
    may read is unknown, also where root calls it well.
    """
    arguments = {
        "name": "chat",
        "python": SGLANG_PYTHON,
        "flags": {"model_path": MODEL, "tp_size": 1},
        "user": SERVER_USER,
        "port": PORT,
        "gpus": ["0"],
        "environment": {"SGLANG_STANDIN_DEVICES": "/dev/nvidia0"},
        "api_key": API_KEY,
    }
    run_module_on(box, "server_launch", arguments, tmp_path)
    wait_serving(box, PORT, key=API_KEY)
    files = {path: path.stat().st_mtime_ns for path in (box.root / "var/lib/cleanslate").rglob("*")}
    wanted = {name: value for name, value in arguments.items() if name != "api_key"}
    node = {"expected_gpus": 2, "device_major": LOOP_MAJOR}
    calls: dict[str, dict[str, t.Any]] = {
        "memory_info": {},
        "server_info": {**node},
        "server_drift": {"servers": [wanted], "secrets": {"chat": {"api_key": API_KEY}}, **node},
        "server_plan": {
            "name": "chat",
            "python": SGLANG_PYTHON,
            "flags": {"model_path": MODEL, "tp_size": 1},
            "port": PORT + 1,
            "devices": ["0"],
            "scope": "gpu",
            **node,
        },
    }
    calls["router_worker"] = {"state": "listed", "routers": [{"name": "east", "url": "http://127.0.0.1:9"}]}
    root = {module: run_module_on(box, module, given, tmp_path) for module, given in calls.items()}
    user = {
        module: run_module_on(box, module, given, tmp_path, variables=unprivileged(box))
        for module, given in calls.items()
    }
    assert API_KEY not in json.dumps([done.result for done in user.values()])

    memory = [found["memory_info"].result for found in (root, user)]
    assert abs(memory[0]["available_mib"] - memory[1]["available_mib"]) < 8192, memory
    assert memory[1]["pinned_mib"] in (None, memory[0]["pinned_mib"]), memory

    (seen,), (own,) = (found["server_info"].result["servers"] for found in (user, root))
    assert own["flags_complete"] and not seen["flags_complete"], seen
    assert seen["host"] == own["host"] and user["server_info"].result["problems"], user["server_info"].result

    assert user["server_drift"].result["verdict"] == "unknown", user["server_drift"].result

    assert user["server_plan"].result["verdict"] != "allowed", user["server_plan"].result

    said = [found["router_worker"].result.get("msg") for found in (root, user)]
    assert said[0] == said[1] and "ermi" not in str(said), said

    assert files == {path: path.stat().st_mtime_ns for path in (box.root / "var/lib/cleanslate").rglob("*")}
