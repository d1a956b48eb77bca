# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A kept launch started again where systemd runs the server: the same unit, command line, environment and files."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.lab.containers import Container
from ansible_collections.cleanslate.sglang.tests.lab.inventory import run_module_on
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import SERVER_USER
from ansible_collections.cleanslate.sglang.tests.lab.servers import unit_state
from ansible_collections.cleanslate.sglang.tests.lab.test_launch_units import KEY, UNIT, launch, ready

pytestmark = pytest.mark.lab

STATE = "var/lib/cleanslate/main"
NEEDED = ("ExecStart", "EnvironmentFiles", "User", "Group", "Nice", "LimitMEMLOCK", "TimeoutStopUSec", "UnitFileState")


def folder_of(box: Container, result: t.Mapping[str, t.Any]) -> Path:
    return Path(box.root) / STATE / "launches" / str(result["launch_id"])


def unit_text(box: Container) -> str:
    return (box.root / "etc/systemd/system" / UNIT).read_text()


def seen_in_the_box(box: Container, pid: int) -> list[list[str]]:
    """Command line and environment, as the kernel has them. What systemd itself adds for this start is left out."""
    rows = []
    for file in ("cmdline", "environ"):
        text = box.run(["cat", f"/proc/{pid}/{file}"], 20).check().stdout
        rows.append([word for word in text.split("\0") if word and not word.startswith(_BY_SYSTEMD)])
    return [rows[0], sorted(rows[1])]


_BY_SYSTEMD = ("INVOCATION_ID=", "JOURNAL_STREAM=", "SYSTEMD_EXEC_PID=", "MEMORY_PRESSURE_")


def shown(box: Container) -> dict[str, str]:
    """What systemd has loaded, without the times and pids of one start."""
    state = unit_state(box, UNIT, *NEEDED)
    return {name: value.partition(" ; ignore_errors=")[0] for name, value in state.items()}


def test_a_unit_is_started_exactly_as_it_was(box: Container, tmp_path: Path) -> None:
    first = launch(
        box,
        tmp_path,
        api_key=KEY,
        unit_overrides={"Service": {"Nice": 5, "LimitCORE": 0}},
        stop_timeout_s=33,
        enabled=True,
        environment={"NCCL_DEBUG": "IN FO"},
        secret_environment={"ANY": "hf-Unit-Secret-2"},
        start_check=["/bin/test", "-d", "/"],
        log="file",
    )
    assert first["failed"] is False, first
    assert ready(box, tmp_path, record=True)["ready"] is True
    old = first["launch_id"]
    text, loaded, kernel = unit_text(box), shown(box), seen_in_the_box(box, first["pid"])
    files = {name: (folder_of(box, first) / name).read_bytes() for name in ("config.yaml", "env")}
    box.run(["systemctl", "stop", UNIT], 60).check()
    other = launch(box, tmp_path)
    assert other["failed"] is False, other
    assert unit_text(box).replace(other["launch_id"], old) != text
    box.run(["systemctl", "stop", UNIT], 60).check()

    done = run_module_on(box, "server_launch", {"name": "main", "from_launch": "last_good"}, tmp_path)
    assert done.status != "failed", done.result
    second = done.result
    new = second["launch_id"]
    assert (second["from_launch"], second["unit"], second["launcher"]) == (old, UNIT, "systemd")
    assert unit_text(box).replace(new, old) == text
    assert {name: value.replace(new, old) for name, value in shown(box).items()} == loaded
    assert [[word.replace(new, old) for word in words] for words in seen_in_the_box(box, second["pid"])] == kernel
    assert {name: (folder_of(box, second) / name).read_bytes() for name in files} == files
    assert (folder_of(box, second) / "unit").read_text() == unit_text(box)
    assert unit_state(box, UNIT, "User")["User"] == SERVER_USER
    proof = ready(box, tmp_path, record=True)
    assert proof["ready"] is True, proof
    info = run_module_on(box, "server_info", {"name": "main", "expected_gpus": 0, "probe": False}, tmp_path).result
    rows = [(row["launch_id"], row["verdict"], row["from_launch"]) for row in info["servers"][0]["launches"]]
    assert rows == [(new, "ready", old), (other["launch_id"], None, None), (old, "ready", None)]
    assert KEY not in json.dumps([first, second, proof, info])
