# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 11 with a load generator that is a systemd unit: stopped or paused before the server goes, and let go by choice.
"""

from __future__ import annotations

import json
import shlex
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.containers import Container, ansible_host
from ansible_collections.cleanslate.sglang.tests.lab.gpus import Gpus
from ansible_collections.cleanslate.sglang.tests.lab.inventory import run_module_on
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import DOUBLES, PYTHON
from ansible_collections.cleanslate.sglang.tests.lab.servers import (
    leaders,
    standin_argv,
    start_unit,
    unit_file,
    unit_state,
    wait_serving,
)
from ansible_collections.cleanslate.sglang.tests.lab.test_evict_units import evict

pytestmark = pytest.mark.lab

PORT = 30000
UNIT = "load.service"
REPORT = "/run/load.json"
RUNNING = ("ActiveState", "MainPID", "InvocationID")


def start_load(box: Container) -> None:
    """A server and what keeps sending to it."""
    start_unit(box, "kimi.service", unit_file(standin_argv(PORT), environment={"SGLANG_STANDIN_TOKEN_S": "0.01"}))
    wait_serving(box, PORT)
    program = f"{DOUBLES}/fixtures/run_inference.py"
    argv = [PYTHON, program, "--port", str(PORT), "--pid-file", "/run/load.pid", "--report", REPORT]
    start_unit(box, UNIT, f"[Service]\nExecStart={shlex.join(argv)}\nRestart=always\nRestartSec=0.2\n")
    sends(box)


def counts(box: Container) -> dict[str, int]:
    path = box.root / REPORT.lstrip("/")
    found = json.loads(path.read_text()) if path.exists() else {"answered": 0, "failed": 0}
    assert isinstance(found, dict)
    return found


def sends(box: Container) -> None:
    before = counts(box)["answered"]
    wait_for("answers", lambda: counts(box)["answered"] > before + 2 or 0 < counts(box)["answered"] < before, 30)


def client_hold(box: Container, scratch: Path, **arguments: t.Any) -> tuple[str, dict[str, t.Any]]:
    done = run_module_on(box, "client_hold", arguments, scratch)
    return done.status, done.result


def declared(unit: str = UNIT, **changes: t.Any) -> dict[str, t.Any]:
    return {"name": "load", "unit": unit, **changes}


def results(result: t.Mapping[str, t.Any]) -> list[str]:
    return [row["result"] for row in result["clients"]]


def test_a_load_generator_is_stopped_loses_nothing_and_is_started_again(
    box: Container, gpus: Gpus, tmp_path: Path
) -> None:
    start_load(box)
    held = client_hold(box, tmp_path, clients=[declared()])[1]
    assert (held["verdict"], held["changed"], results(held)) == ("held", True, ["held"]), held
    time.sleep(1)  # Restart=always would have it back by now
    assert unit_state(box, UNIT, "ActiveState")["ActiveState"] == "inactive"
    evicted = evict(box, tmp_path, drained_clients=True)
    assert evicted["drain"]["cut_off"] == 0 and counts(box)["failed"] == 0, (evicted["drain"], counts(box))
    assert not leaders(box)
    left = [{**held["held"][0], "after": "leave"}]
    assert results(client_hold(box, tmp_path, state="released", held=left)[1]) == ["left"]
    assert unit_state(box, UNIT, "ActiveState")["ActiveState"] == "inactive"
    released = client_hold(box, tmp_path, state="released", held=held["held"])[1]
    assert results(released) == ["released"], released
    assert unit_state(box, UNIT, "ActiveState")["ActiveState"] == "active"
    again = client_hold(box, tmp_path, state="released", held=held["held"])[1]
    assert results(again) == ["running"] and not again["changed"]


def test_a_load_generator_is_paused_and_goes_on_as_the_same_process(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    start_load(box)
    before = unit_state(box, UNIT, *RUNNING)
    held = client_hold(box, tmp_path, clients=[declared(action="pause")])[1]
    assert results(held) == ["held"], held
    seen = counts(box)
    time.sleep(1)
    assert counts(box) == seen
    assert results(client_hold(box, tmp_path, clients=[declared(action="pause")])[1]) == ["paused"]
    released = client_hold(box, tmp_path, state="released", held=held["held"])[1]
    assert results(released) == ["released"], released
    sends(box)
    assert unit_state(box, UNIT, *RUNNING) == before


@pytest.mark.parametrize("unit", ["ssh.service", "alias.service", "kimi.service", "systemd-journald.service"])
def test_units_that_are_no_clients_are_left_alone(box: Container, gpus: Gpus, tmp_path: Path, unit: str) -> None:
    """The way in (also under another name), the server itself, and what the machine needs."""
    start_load(box)
    (box.root / "etc/systemd/system/alias.service").symlink_to("/etc/systemd/system/ssh.service")
    box.run(["systemctl", "daemon-reload"], 30).check()
    real = "ssh.service" if unit == "alias.service" else unit
    before = {name: unit_state(box, name, *RUNNING) for name in (real, UNIT)}
    status, result = client_hold(box, tmp_path, clients=[declared(), {"name": "x", "unit": unit}])
    assert status == "failed" and results(result) == ["not_asked", "refused"], result
    assert unit in result["msg"] and (unit != "alias.service" or "which is ssh.service" in result["msg"])
    assert {name: unit_state(box, name, *RUNNING) for name in (real, UNIT)} == before


def test_a_unit_in_which_this_very_module_runs_is_left_alone(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    """A second way in, by a unit with an innocent name: what counts is who is inside."""
    start_load(box)
    command = "/usr/sbin/sshd -D -p 2222 -f /etc/ssh/lab_sshd_config"
    start_unit(box, "entry.service", f"[Service]\nExecStart={command}\nKillMode=process\n")
    host = ansible_host(box)
    extra = f"{host.get('ansible_ssh_common_args', '')} -o HostKeyAlias={host['ansible_host']}"
    variables = {**host, "ansible_port": "2222", "ansible_ssh_common_args": extra}
    arguments = {"clients": [{"name": "x", "unit": "entry.service"}]}
    done = run_module_on(box, "client_hold", arguments, tmp_path, variables=variables)
    assert done.status == "failed" and results(done.result) == ["refused"], done.result
    assert "sshd" in done.result["msg"] or "this run itself" in done.result["msg"]
    assert unit_state(box, "entry.service", "ActiveState")["ActiveState"] == "active"


def test_a_process_that_a_unit_would_start_again_is_to_be_declared_as_that(
    box: Container, gpus: Gpus, tmp_path: Path
) -> None:
    start_load(box)
    client = {"name": "load", "pid_file": "/run/load.pid", "program": "run_inference.py"}
    status, result = client_hold(box, tmp_path, clients=[client])
    assert status == "failed" and f"declare unit {UNIT}" in result["msg"], result
    assert unit_state(box, UNIT, "ActiveState")["ActiveState"] == "active"
