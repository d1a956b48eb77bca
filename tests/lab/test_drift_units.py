# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""server_drift where systemd runs the server: none right after a launch, then what somebody did to the unit."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.containers import Container
from ansible_collections.cleanslate.sglang.tests.lab.inventory import run_module_on
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import MODEL, SERVER_USER, SGLANG_PYTHON
from ansible_collections.cleanslate.sglang.tests.lab.servers import unit_state
from ansible_collections.cleanslate.sglang.tests.lab.test_launch_units import KEY, UNIT, launch, ready

pytestmark = pytest.mark.lab
UNIT_FILE = f"etc/systemd/system/{UNIT}"
SETTINGS: dict[str, t.Any] = {
    "name": "main",
    "python": SGLANG_PYTHON,
    "user": SERVER_USER,
    "port": 30000,
    "device": "cpu",
    "gpus": [],
    "flags": {"model_path": MODEL, "device": "cpu"},
    "enabled": True,
    "restart": "on-failure",
    "unit_overrides": {"Service": {"RestartSec": 1, "Nice": 5}},
}


def check(box: Container, scratch: Path) -> dict[str, t.Any]:
    arguments = {"servers": [SETTINGS], "secrets": {"main": {"api_key": KEY}}, "expected_gpus": 0}
    done = run_module_on(box, "server_drift", arguments, scratch)
    assert done.status == "ok", done.result
    assert KEY not in json.dumps(done.result)
    return dict(done.result)


def rows(found: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    return [*found["servers"][0]["drift"], *found["host"]["drift"]]


def items(found: t.Mapping[str, t.Any]) -> list[str]:
    return [row["item"] for row in rows(found)]


def only(box: Container, scratch: Path, item: str) -> dict[str, t.Any]:
    found = check(box, scratch)
    assert (found["verdict"], items(found)) == ("drifted", [item]), found
    return rows(found)[0]


def test_what_somebody_did_to_the_unit(box: Container, tmp_path: Path) -> None:
    own = {name: SETTINGS[name] for name in ("enabled", "restart", "unit_overrides")}
    launched = launch(box, tmp_path, api_key=KEY, **own)
    assert launched["failed"] is False, launched
    assert ready(box, tmp_path, api_key=KEY)["ready"] is True
    found = check(box, tmp_path)
    assert (found["verdict"], items(found)) == ("in_sync", []), found

    # Edited, loaded or not; then set right again.
    unit = box.root / UNIT_FILE
    text = unit.read_text()
    for reload in (False, True):
        unit.write_text(text.replace("Nice=5", "Nice=10"))
        if reload:
            box.run(["systemctl", "daemon-reload"], 60).check()
        row = only(box, tmp_path, "unit_file")
        assert (row["wanted"], row["found"]) == (["Nice=5"], ["Nice=10"])
    unit.write_text(text)
    box.run(["systemctl", "daemon-reload"], 60).check()

    # As `systemctl edit` and `systemctl set-property` leave it.
    drop_in = box.root / f"{UNIT_FILE}.d" / "override.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nLimitNOFILE=1024\n")
    assert only(box, tmp_path, "unit_override")["found"] == [f"/{UNIT_FILE}.d/override.conf"]
    drop_in.unlink()
    drop_in.parent.rmdir()
    box.run(["systemctl", "set-property", UNIT, "CPUWeight=50"], 60).check()
    (path,) = only(box, tmp_path, "unit_override")["found"]
    assert path.startswith(f"/etc/systemd/system.control/{UNIT}.d/")
    (box.root / path.lstrip("/")).unlink()
    box.run(["systemctl", "daemon-reload"], 60).check()
    assert items(check(box, tmp_path)) == []

    box.run(["systemctl", "disable", UNIT], 60).check()
    row = only(box, tmp_path, "setting:enabled")
    assert (row["wanted"], row["found"], row["where"]) == (True, False, "host")
    box.run(["systemctl", "enable", UNIT], 60).check()

    # systemd starts it anew: worth knowing, no drift.
    box.run(["kill", "-KILL", str(launched["pid"])], 20).check()
    wait_for(
        "another process",
        lambda: unit_state(box, UNIT, "MainPID")["MainPID"] not in ("0", str(launched["pid"])),
        60,
    )
    found = check(box, tmp_path)
    assert "restarted_by_systemd" in items(found), found
    assert [row["item"] for row in rows(found) if row["severity"] != "note"] in ([], ["leftovers"]), found

    # By hand, by its very command line.
    box.run(["systemctl", "stop", UNIT], 60).check()
    found = check(box, tmp_path)
    assert "not_running" in items(found), found
    argv = [*launched["argv"]]
    box.run(["setsid", "--fork", "runuser", "-u", SERVER_USER, "--", *argv], 20)
    wait_for("it", lambda: "restarted_by_hand" in items(check(box, tmp_path)), 60)

    unit.unlink()
    assert "unit_file" in items(check(box, tmp_path))
