# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""relaunch.yml by ssh against a host with systemd: the unit that it writes, and the relaunch of its own servers."""

from __future__ import annotations

import stat
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun
from ansible_collections.cleanslate.sglang.tests.lab.containers import Container
from ansible_collections.cleanslate.sglang.tests.lab.gpus import Gpus
from ansible_collections.cleanslate.sglang.tests.lab.inventory import (
    API_KEY,
    host_vars,
    run_module_on,
    run_on,
    server,
    write_inventory,
)
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import SERVER_USER
from ansible_collections.cleanslate.sglang.tests.lab.servers import ask, unit_state, wait_serving

pytestmark = pytest.mark.lab

PORT = 30000
UNIT = "sglang-chat.service"
STATE = "var/lib/cleanslate/chat"


def relaunch(box: Container, scratch: Path, *servers: dict[str, t.Any], **options: t.Any) -> PlaybookRun:
    """relaunch.yml for the server 'chat'."""
    inventory = write_inventory(scratch / "hosts.json", {box.name: host_vars(box, servers)})
    return run_on(box, ROOT / "playbooks/relaunch.yml", inventory, scratch, "-e", "server=chat", **options)


def launch(box: Container, scratch: Path, settings: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """server_launch alone, as the role calls it; its result."""
    wanted = ("name", "port", "python", "user", "group", "flags", "environment", "api_key", "gpus")
    arguments = {"launcher": "systemd", **{name: settings[name] for name in wanted}}
    done = run_module_on(box, "server_launch", arguments, scratch)
    assert done.status == "ok", done.result
    return done.result


def main_pid(box: Container) -> int:
    return int(unit_state(box, UNIT, "MainPID")["MainPID"])


@pytest.mark.promise
def test_launch_and_relaunch_with_a_changed_flag(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    first = launch(box, tmp_path, server("chat", PORT, 0))
    old = main_pid(box)
    wait_serving(box, PORT, key=API_KEY)
    assert old and gpus.holders(0) and not gpus.holders(1)

    text = (box.root / "etc/systemd/system" / UNIT).read_text()
    for line in ("KillMode=mixed", f"User={SERVER_USER}", "Restart=no", "LimitMEMLOCK=infinity"):
        assert f"\n{line}\n" in text, text
    shown = unit_state(
        box, UNIT, "UnitFileState", "TimeoutStopUSec", "RuntimeDirectory", "Environment", "KillMode", "LimitMEMLOCK"
    )
    assert shown["UnitFileState"] == "static" and shown["KillMode"] == "mixed"
    assert f"TMPDIR=/run/{shown['RuntimeDirectory']}" in shown["Environment"]
    process = box.processes()[old]
    environment = Path(f"/proc/{process.outer_pid}/environ").read_text().split("\0")
    assert f"TMPDIR=/run/{shown['RuntimeDirectory']}" in environment
    assert shown["LimitMEMLOCK"] == "infinity"
    assert {one.uid for one in box.processes().values() if one.title.startswith("sglang::")} == {process.uid} != {0}

    folder = sorted((box.root / STATE / "launches").iterdir())[-1]
    for name in ("config.yaml", "env"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600, name
    assert API_KEY in (folder / "config.yaml").read_text()
    _the_key_shows_nowhere(box)
    assert API_KEY not in str(first)

    second = relaunch(box, tmp_path, server("chat", PORT, 0, flags={"max_total_tokens": 2048})).check()
    rungs = second.of_action("gpu_evict")[0].result["rungs"]
    assert [rung["rung"] for rung in rungs] == ["stop"], rungs
    assert main_pid(box) not in (0, old) and old not in box.processes()
    status, answer = ask(box, "GET", "/server_info", PORT, key=API_KEY)
    assert status == 200 and '"max_total_tokens": 2048' in answer
    assert ask(box, "GET", "/v1/models", PORT)[0] == 401
    _the_key_shows_nowhere(box)
    assert API_KEY not in second.stdout + second.stderr
    assert not [task.task for task in second.tasks if API_KEY in str(task.result)]


def test_a_launch_that_hangs_in_its_start_is_relaunched(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    """It never listens and holds its GPU; the proof gives up on it, and the next relaunch ends it and serves."""
    hanging = server("chat", PORT, 0, environment={"SGLANG_STANDIN_HANG": "sleep"}, ready_deadline_s=5)
    run = relaunch(box, tmp_path, hanging)
    assert run.rc == 2 and run.of_action("server_ready")[0].result["verdict"] == "starting", run.stdout
    stuck = main_pid(box)
    # A proof that fails leaves the server as it is, for people to look at.
    assert stuck in box.processes()

    again = relaunch(box, tmp_path, server("chat", PORT, 0)).check()
    rungs = again.of_action("gpu_evict")[0].result["rungs"]
    assert [rung["rung"] for rung in rungs] == ["stop"], rungs
    assert stuck not in box.processes() and main_pid(box) in box.processes()
    assert len(gpus.holders(0)) == 1
    assert ask(box, "GET", "/health", PORT, key=API_KEY)[0] == 200


def _the_key_shows_nowhere(box: Container) -> None:
    """Not in any command line, in the unit, or in what we logged and recorded."""
    assert not [one for one in box.processes().values() if API_KEY in one.title]
    assert API_KEY not in box.run(["systemctl", "show", UNIT], 30).check().stdout
    assert API_KEY not in box.run(["systemctl", "cat", UNIT], 30).check().stdout
    assert API_KEY not in (box.root / STATE / "current.json").read_text()
    # SGLang itself prints its arguments with the key; our own lines in the journal must not.
    journal = box.run(["journalctl", "--no-pager", "-o", "short", "-t", "ansible"], 30).stdout
    assert API_KEY not in journal
    readable = box.run(
        ["su", "-s", "/bin/sh", "nobody", "-c", f"grep -rls -e {API_KEY} /etc /run /var/lib /var/log /tmp /home"], 60
    )
    assert readable.stdout == ""
