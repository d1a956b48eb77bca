# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Drift of a real server: none right after its proof, then each kind, named exactly once.

One server is looked at with changed inventories, records and models; a second start is somebody's by hand.
"""

from __future__ import annotations

import json
import shutil
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.engine.real import (
    PORT,
    START_DEADLINE_S,
    RealServer,
    cpu_environment,
    cpu_flags,
    engine_python,
    model_path,
)
from ansible_collections.cleanslate.sglang.tests.harness.modules import run_module
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

pytestmark = [pytest.mark.ns, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
KEY = "sk-drift-Secret-1"
ADMIN_KEY = "sk-drift-Admin-Secret-2"
Named = list[tuple[t.Optional[str], str]]
Json = dict[str, t.Any]


class Checked:
    """A real server with a model of its own, and its entry in the inventory."""

    def __init__(self, server: RealServer, directory: Path) -> None:
        self.server = server
        self.model = directory / "model"
        shutil.copytree(model_path(), self.model)
        self.settings: Json = {
            "name": server.name,
            "python": str(engine_python()),
            "user": "root",
            "device": "cpu",
            "gpus": [],
            "port": PORT,
            "flags": cpu_flags(model_path=str(self.model)),
            "environment": cpu_environment(),
        }

    def check(self, **changes: t.Any) -> Json:
        arguments = {
            "servers": [{**self.settings, **changes}],
            "secrets": {self.server.name: {"api_key": KEY, "admin_api_key": ADMIN_KEY}},
            "state_dir": str(self.server.state),
            "expected_gpus": 0,
        }
        result = run_module("server_drift", arguments, 120, ns=self.server.ns)
        assert not result.failed, result.json
        for secret in (KEY, ADMIN_KEY):
            assert secret not in json.dumps(result.json)
        return result.json

    def only(self, item: str, **changes: t.Any) -> Json:
        """The one row that there is, and it is this one."""
        found = self.check(**changes)
        assert (found["verdict"], named(found)) == ("drifted", [("main", item)]), found
        return rows(found)[0]

    def flags(self, **changes: t.Any) -> Json:
        flags = {**self.settings["flags"], **changes}
        return {name: value for name, value in flags.items() if value is not None}

    def by_hand(self, *words: str) -> None:
        started = self.server.ns.popen(
            [str(engine_python()), "-m", "sglang.launch_server", *words], env=cpu_environment(), detached=True
        )
        self.server.pid = started.pid


def rows(found: Json) -> list[Json]:
    return [*found["servers"][0]["drift"], *found["host"]["drift"]]


def named(found: Json) -> Named:
    return [(row["server"], row["item"]) for row in rows(found)]


def file_of(flags: t.Mapping[str, t.Any]) -> str:
    """As somebody writes a file for --config."""
    return "".join(f"{name.replace('_', '-')}: {json.dumps(value)}\n" for name, value in flags.items())


def test_in_sync_after_the_proof_then_each_kind_once(server: RealServer, tmp_path: Path) -> None:
    checked = Checked(server, tmp_path)
    server.start(flags={"model_path": str(checked.model)}, api_key=KEY, admin_api_key=ADMIN_KEY)
    assert server.ready(api_key=KEY)["verdict"] == "ready"

    # None of the hundred and more arguments that SGLang rewrites itself is named.
    found = checked.check()
    assert (found["verdict"], named(found)) == ("in_sync", []), found
    (shown,) = found["servers"]
    assert (shown["health"], shown["pid"], shown["running"]) == ("ok", server.pid, True)
    assert shown["engine_keys_compared"] >= 8

    # Another inventory: what was chosen, and what runs, are of equal rights.
    missing = checked.only("flag:enable-metrics", flags=checked.flags(enable_metrics=True))
    assert (missing["wanted"], missing["found"]) == (True, False if missing["where"] == "engine" else None)
    changed = checked.only("flag:max-total-tokens", flags=checked.flags(max_total_tokens="8k"))
    assert (changed["wanted"], changed["found"], changed["where"]) == ("8k", 4096, "engine")
    assert changed["also"] == ["file", "process"]
    extra = checked.only("flag:disable-overlap-schedule", flags=checked.flags(disable_overlap_schedule=None))
    assert (extra["wanted"], extra["found"]) == (None, True)
    assert checked.only("env:HF_HUB_OFFLINE", environment={**cpu_environment(), "HF_HUB_OFFLINE": "0"})
    # By meaning it is the same.
    same = checked.flags(max_total_tokens="4096", mem_fraction_static="0.30", disable_overlap_schedule="true")
    assert named(checked.check(flags=same)) == []

    # Another version, another model.
    record = server.state / "main" / "current.json"
    whole = json.loads(record.read_text())
    version = whole["fingerprint"]["sglang_version"]
    older = {**whole, "fingerprint": {**whole["fingerprint"], "sglang_version": "0.5.1"}}
    record.write_text(json.dumps(older))
    row = checked.only("sglang_version")
    assert (row["wanted"], row["found"], row["where"]) == ("0.5.1", version, "engine")
    record.write_text(json.dumps(whole))
    config = checked.model / "config.json"
    text = config.read_text()
    config.write_text(text + " ")
    assert checked.only("model_config")["wanted"].startswith("sha256:")
    config.write_text(text)
    assert named(checked.check()) == []

    # Hung, then killed.
    scheduler = server.wait_titled("sglang::scheduler")
    server.signal("STOP", scheduler)
    assert f"pid {scheduler}" in checked.only("hung")["found"]
    server.signal("CONT", scheduler)
    found = checked.check()
    assert (found["verdict"], named(found)) == ("in_sync", []), found
    tree = list(server.tree())
    server.signal("KILL", server.pid)
    for pid in tree:
        server.wait_dead(pid)
    found = checked.check()
    items = [item for item in named(found) if item != (None, "leftovers")]  # what a killed one leaves is its own row
    assert (found["verdict"], items) == ("drifted", [("main", "not_running")]), found


def test_other_flags_by_hand(server: RealServer, tmp_path: Path) -> None:
    checked = Checked(server, tmp_path)
    # The launch that the record stands for has ended at once, and somebody has started it his own way since.
    server.start(flags={"model_path": str(checked.model)}, api_key=KEY, admin_api_key=ADMIN_KEY)
    server.signal("KILL", server.pid)
    server.wait_dead(server.pid)
    config = tmp_path / "mine.yaml"

    # While it starts its command line tells.
    config.write_text(file_of(checked.flags()))
    keys = {"api-key": KEY, "admin-api-key": ADMIN_KEY}
    words = [f"--{name}={value}" for name, value in keys.items()]
    checked.by_hand("--config", str(config), "--port", str(PORT), "--tp", "2", *words)
    found = checked.check()
    by_hand = ("main", "restarted_by_hand")
    assert sorted(named(found)) == [("main", "flag:tp-size"), by_hand, ("main", "starting")], found
    row = next(row for row in rows(found) if row["item"] == "flag:tp-size")
    assert (row["wanted"], row["found"], row["where"]) == (None, "2", "process")
    server.signal("KILL", *server.tree())

    # Through its own file, it serves.
    wait_for("nobody left", lambda: not any("sglang" in title for title in server.ns.titles().values()), 60)
    config.write_text(file_of({**checked.flags(max_total_tokens=2048), "port": PORT, **keys}))
    checked.by_hand("--config", str(config))
    wait_for("it serves", lambda: server.request("GET", "/health").status == 200, START_DEADLINE_S)
    found = checked.check()
    items = sorted(item for item in named(found) if item != (None, "leftovers"))
    assert items == [("main", "flag:max-total-tokens"), by_hand], found
    row = next(row for row in rows(found) if row["item"] == "flag:max-total-tokens")
    assert (row["wanted"], row["found"], row["where"], row["also"]) == (4096, 2048, "engine", ["process"])
