# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""server_drift on stand-in servers: in sync right after a proof, then each kind of drift, named exactly once."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.modules import module_argv, module_env, parse_result
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.drift_site import (
    ADMIN_KEY,
    KEY,
    PORT,
    Site,
    named,
    row_of,
    rows,
)

pytestmark = pytest.mark.ns


@pytest.fixture
def site(ns: Namespace, tmp_path: Path) -> Site:
    """A server that was launched and proved."""
    site = Site(ns, tmp_path)
    site.launch()
    site.proved()
    return site


def drifted(site: Site, item: str, changes: t.Mapping[str, t.Any] | None = None, **options: t.Any) -> dict[str, t.Any]:
    """The one row that there is, and it is this one."""
    found = site.check(changes, **options)
    assert (found["verdict"], named(found)) == ("drifted", [("main", item)]), found
    return row_of(found, item)


@pytest.mark.promise
def test_in_sync_after_its_proof_then_another_inventory_each_kind_once(site: Site) -> None:
    found = site.check()
    assert (found["verdict"], named(found)) == ("in_sync", []), found
    (server,) = found["servers"]
    assert (server["running"], server["pid"], server["health"]) == (True, site.pid, "ok")
    assert server["engine_keys_compared"] >= 5

    missing = drifted(site, "flag:skip-server-warmup", site.flags(skip_server_warmup=True))
    assert (missing["wanted"], missing["found"], missing["severity"]) == (True, None, "critical")
    changed = drifted(site, "flag:max-total-tokens", site.flags(max_total_tokens="64k"))
    assert (changed["wanted"], changed["where"], changed["also"]) == ("64k", "engine", ["file", "process"])
    extra = drifted(site, "flag:enable-metrics", site.flags(**{"enable-metrics": None}))
    assert (extra["wanted"], extra["found"]) == (None, True)
    drifted(site, "flag:host", {"host": "0.0.0.0"})

    drifted(site, "env:NCCL_DEBUG", site.environment(NCCL_DEBUG="WARN"))
    drifted(site, "env:NCCL_DEBUG", site.environment(NCCL_DEBUG=None))
    drifted(site, "env:NCCL_ALGO", site.environment(NCCL_ALGO="Ring"))
    drifted(site, "user", {"user": "nobody"})
    drifted(site, "python", {"python": "/other/bin/python3"})
    drifted(site, "setting:workdir", {"workdir": "/srv"})
    # Settings of systemd mean nothing to a detached server.
    assert named(site.check({"restart": "on-failure"})) == []


def test_accepted_drift_until_its_end(site: Site) -> None:
    accepted = [{"server": "main", "item": "user", "reason": "ticket 12", "until": "2026-01-31"}]
    found = site.check({"user": "nobody"}, accepted=accepted, today="2026-01-31")
    assert (found["verdict"], named(found)) == ("in_sync", [])
    assert [(row["item"], row["reason"]) for row in found["servers"][0]["accepted"]] == [("user", "ticket 12")]
    row = drifted(site, "user", {"user": "nobody"}, accepted=accepted, today="2026-02-01")
    assert (row["state"], row["reason"]) == ("expired_acceptance", "ticket 12 (accepted until 2026-01-31)")
    # One that covers nothing any more is told, and fails nobody.
    found = site.check(accepted=accepted, today="2026-02-01")
    assert (found["verdict"], named(found)) == ("in_sync", [("main", "waiver_expired:user")])


def test_a_waiver_of_the_launch_until_its_end(ns: Namespace, tmp_path: Path) -> None:
    site = Site(ns, tmp_path)
    site.settings["waivers"] = {"shm_small": "small on purpose, ticket 12, until 2026-01-31"}
    site.launch()
    site.proved()
    assert named(site.check(today="2026-01-31")) == []
    row = drifted(site, "waiver_expired:shm_small", today="2026-02-01")
    assert (row["state"], "ticket 12" in row["wanted"]) == ("expired_acceptance", True)
    # Who renews it in the inventory need not relaunch for it.
    assert named(site.check({"waivers": {"shm_small": "ticket 12, until 2027-01-31"}}, today="2026-02-01")) == []


def test_other_flags_by_hand_through_a_prefix_and_through_a_file(site: Site, tmp_path: Path) -> None:
    by_hand = ("main", "restarted_by_hand")
    site.killed()
    site.clear_shm()
    common = ["--model", str(site.model), "--device=cpu", "--max-total-tok", "128000", "--enable-metrics"]
    keys = {"api-key": KEY, "admin-api-key": ADMIN_KEY}
    site.start_by_hand(*common, "--tp", "2", *(f"--{name}={value}" for name, value in keys.items()))
    found = site.check()
    assert sorted(named(found)) == [("main", "flag:tp-size"), by_hand], found
    row = row_of(found, "flag:tp-size")
    assert (row["wanted"], str(row["found"]), row["where"]) == (None, "2", "process")

    site.killed()
    site.clear_shm()
    site.log.write_text("")
    config = tmp_path / "mine.yaml"
    flags = {"model-path": str(site.model), "device": "cpu", "max-total-tokens": 64000, "enable-metrics": True, **keys}
    config.write_text(json.dumps(flags))
    site.start_by_hand("--config", str(config))
    found = site.check()
    assert sorted(named(found)) == [("main", "flag:max-total-tokens"), by_hand], found
    assert row_of(found, "flag:max-total-tokens")["where"] == "engine"

    # The same server, launched by nobody: its port tells whose it is. What it has read is another matter.
    config.write_text(json.dumps({**flags, "max-total-tokens": 128000}))
    later = time.time() + 60  # this test is quicker than the clocks that are compared are exact
    os.utime(config, (later, later))
    found = site.check()
    assert sorted(named(found)) == [("main", "command_line"), ("main", "flag:max-total-tokens"), by_hand], found
    assert row_of(found, "command_line")["state"] == "unknown"


def test_a_file_that_unfolds_without_end_and_a_number_without_sense(site: Site, tmp_path: Path) -> None:
    """A small file of somebody else's, and the look goes on: what it sets is unknown, what is beside it is told."""
    site.killed()
    site.clear_shm()
    config = tmp_path / "mine.yaml"
    flags = {"model-path": str(site.model), "device": "cpu", "enable-metrics": True, "api-key": KEY}
    config.write_text(json.dumps({**flags, "admin-api-key": ADMIN_KEY}))
    site.start_by_hand("--config", str(config), "--max-total-tokens", "128000")
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 9)]
    config.write_text("\n".join(lines))
    os.utime(config, (1, 1))
    wanted = site.flags(max_total_tokens="1e9999999")
    found = site.check(wanted)
    row = row_of(found, "command_line")
    assert row["state"] == "unknown", found
    assert "is not a mapping in YAML that is understood here" in row["found"]
    assert row_of(found, "flag:max-total-tokens")["wanted"] == "1e9999999"


def test_its_own_file_edited_while_it_runs(site: Site) -> None:
    """Nobody knows from the file what the process has read; the engine does."""
    config = site.launch_dir / "config.yaml"
    config.write_text(config.read_text().replace("128000", "64000"))
    later = time.time() + 5  # a fast machine is here within the seconds that the clocks may be apart
    os.utime(config, (later, later))
    found = site.check(site.flags())
    assert sorted(named(found)) == [("main", "flag:max-total-tokens"), ("main", "started_before_change")], found
    assert row_of(found, "flag:max-total-tokens")["where"] == "file"


def test_another_sglang_another_model(site: Site) -> None:
    info = site.standin / "sglang-0.5.15.dist-info"
    info = info.rename(site.standin / "sglang-0.5.16.dist-info")
    row = drifted(site, "sglang_version")
    assert (row["wanted"], row["where"]) == ("0.5.15", "host")
    assert row["found"] == "0.5.16 (the server still runs 0.5.15)"
    info.rename(site.standin / "sglang-0.5.15.dist-info")

    config = site.model / "config.json"
    before = config.read_text()
    config.write_text('{"model_type": "qwen3"}')
    drifted(site, "model_config")
    config.write_text(before)
    index = site.model / "model.safetensors.index.json"
    index.write_text("{}")
    assert drifted(site, "model_index")["wanted"] == "none"
    index.unlink()
    config.unlink()
    assert drifted(site, "model_config")["found"] == "none"
    config.write_text(before)
    assert named(site.check()) == []


def test_a_restart_by_hand_with_another_version(site: Site) -> None:
    site.killed()
    site.clear_shm()
    flags = ["--model", str(site.model), "--device=cpu", "--max-total-tokens", "128000", "--enable-metrics"]
    site.start_by_hand(*flags, env={"SGLANG_STANDIN_VERSION": "0.5.14"})
    found = site.check(site.environment(SGLANG_STANDIN_VERSION="0.5.14"))
    assert ("main", "sglang_version") in named(found)
    assert (row_of(found, "sglang_version")["found"], row_of(found, "sglang_version")["where"]) == ("0.5.14", "engine")


def test_the_unit_s_file_by_file(site: Site, tmp_path: Path) -> None:
    """Where systemd is not there to ask. The lab asks it."""
    unit_dir = tmp_path / "units"
    unit_dir.mkdir()
    text = "[Service]\nUser=root\nLimitMEMLOCK=infinity\n"
    unit = unit_dir / "sglang-main.service"
    for file in (unit, site.launch_dir / "unit"):
        file.write_text(text)
    (site.launch_dir / "unit").chmod(0o600)
    site.change(site.record, unit="sglang-main.service", launcher="systemd")
    request = site.launch_dir / "request.json"
    site.change(request, unit="sglang-main.service", launcher="systemd", unit_dir=str(unit_dir))
    assert named(site.check()) == []
    unit.write_text(text.replace("infinity", "64K"))
    row = drifted(site, "unit_file")
    assert (row["wanted"], row["found"]) == (["LimitMEMLOCK=infinity"], ["LimitMEMLOCK=64K"])
    unit.unlink()
    assert drifted(site, "unit_file")["found"] == "missing"
    unit.symlink_to("/dev/null")
    assert drifted(site, "unit_file")["found"] == ["a link to /dev/null"]
    unit.unlink()
    unit.write_text(text)
    drop_in = unit_dir / "sglang-.service.d" / "limits.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nLimitNOFILE=10\n")
    assert drifted(site, "unit_override")["found"] == [str(drop_in)]
    drop_in.unlink()
    drifted(site, "setting:restart", {"restart": "on-failure"})
    assert named(site.check({"restart": False})) == []


def test_hung_and_dead(site: Site) -> None:
    scheduler = site.titled("sglang::scheduler")
    site.signal(scheduler, signal.SIGSTOP)
    row = drifted(site, "hung")
    assert f"pid {scheduler}" in row["found"]
    site.signal(scheduler, signal.SIGCONT)
    site.signal(site.pid, signal.SIGSTOP)
    assert f"pid {site.pid}" in drifted(site, "hung")["found"]
    site.signal(site.pid, signal.SIGCONT)
    assert named(site.check()) == []
    site.killed()
    found = site.check()
    # What a killed server leaves in shared memory is a finding of its own.
    assert (found["verdict"], named(found)) == ("drifted", [("main", "not_running"), (None, "leftovers")]), found
    assert found["servers"][0]["running"] is False
    site.clear_shm()
    drifted(site, "not_running")
    # Somebody else has taken its port meanwhile.
    script = f"import socket; s = socket.create_server(('127.0.0.1', {PORT})); s.accept()"
    site.ns.popen([sys.executable, "-c", script], detached=True)
    wait_for("the port", lambda: f":{PORT:04X} " in Path(f"/proc/{site.ns.init_pid}/net/tcp").read_text(), 10)
    drifted(site, "not_ours")


def test_health_that_says_503(ns: Namespace, tmp_path: Path) -> None:
    """During the warm-up it is a start; for a server that has run for longer than a start takes it is not."""
    site = Site(ns, tmp_path)
    site.launch(WARMUP_S="600")
    wait_for("the port", lambda: f":{PORT:04X} " in Path(f"/proc/{ns.init_pid}/net/tcp").read_text(), 60)
    found = site.check()
    assert (found["verdict"], named(found)) == ("in_sync", [("main", "starting")]), found
    row = row_of(found, "starting")
    assert (row["severity"], "503" in row["found"]) == ("note", True)
    assert found["servers"][0]["health"] == "unhealthy"
    drifted(site, "unhealthy", {"ready_deadline_s": 1})


def test_a_scheduler_that_never_answers_is_hung_whatever_its_age(ns: Namespace, tmp_path: Path) -> None:
    """Nothing shows on its processes: it is busy for ever. /health finds out, after its own limit or after ours."""
    site = Site(ns, tmp_path)
    site.settings["environment"]["SGLANG_HEALTH_CHECK_TIMEOUT"] = "2"
    site.launch(BUSY_AFTER_S="3", HEALTH_TIMEOUT_S="2")
    site.serves()
    wait_for("it to be busy", lambda: site.check()["servers"][0]["health"] != "ok", 20)
    row = drifted(site, "hung")
    assert (row["where"], "HTTP 503 after" in row["found"]) == ("engine", True), row
    row = drifted(site, "hung", health_deadline_s=1)
    assert "HTTP 503" not in row["found"], row
    # Where nobody may be asked, nobody knows.
    found = site.check(probe=False)
    assert (found["verdict"], named(found), found["servers"][0]["health"]) == ("in_sync", [], None)


def test_a_later_node_is_judged_without_http(ns: Namespace, tmp_path: Path) -> None:
    site = Site(ns, tmp_path)
    site.settings["flags"].update({"tp_size": 2, "nnodes": 2, "node_rank": 1, "dist_init_addr": "127.0.0.1:5000"})
    site.launch()
    wait_for("its scheduler", lambda: any("scheduler" in one for one in ns.titles().values()), 60)
    found = site.check()
    assert (found["verdict"], named(found), found["servers"][0]["health"]) == ("in_sync", [], None), found


# --- what can't be seen -----------------------------------------------------------------------------------------------


def test_one_server_that_makes_no_sense_hides_no_other(site: Site) -> None:
    broken = {"name": "other", "port": 31000, "flags": {"model_path": "/m", "config": "/c"}}
    found = site.check_all([broken, site.settings])
    assert (found["verdict"], named(found)) == ("unknown", [("other", "settings")]), found
    assert [(server["name"], server["verdict"], server["running"]) for server in found["servers"]] == [
        ("other", "unknown", None),
        ("main", "in_sync", True),
    ]
    found = site.check_all([{"name": "other", "port": "x", "flags": {}}, site.settings])
    assert named(found) == [("other", "settings")]
    found = site.check_all([{"name": "../other", "port": 31000, "flags": {"model": "/m"}}, site.settings])
    assert named(found) == [("../other", "settings")]


def test_a_record_that_cannot_be_read(site: Site) -> None:
    whole = site.record.read_text()
    site.record.write_text(whole[:50])
    found = site.check()
    assert ("main", "record") in named(found)
    assert row_of(found, "record")["state"] == "unknown"
    assert "not_running" not in [item for _server, item in named(found)]  # its port tells that it is there
    site.record.write_text(whole)
    config = site.launch_dir / "config.yaml"
    config.rename(config.with_name("gone"))
    assert [row["item"] for row in rows(site.check()) if row["state"] == "drift"] == ["launch_files"]
    config.with_name("gone").rename(config)
    assert named(site.check()) == []


def test_a_launch_of_an_older_version_has_nothing_to_compare_with(site: Site) -> None:
    site.change(site.record, fingerprint=None)
    found = site.check()
    assert (found["verdict"], named(found)) == ("in_sync", [("main", "fingerprint")]), found
    request = site.launch_dir / "request.json"
    site.change(request, version=None)
    found = site.check()
    assert (found["verdict"], row_of(found, "fingerprint")["severity"]) == ("in_sync", "note"), found


def test_without_the_right_to_look_into_processes_all_is_unknown(site: Site) -> None:
    """As for a user who is not root: files are readable, the server's environment, port and mappings are not."""
    secrets = {site.name: site.secrets}
    arguments = {"servers": [site.settings], "secrets": secrets, "state_dir": str(site.state), "expected_gpus": 0}
    argv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *module_argv("server_drift")]
    done = site.ns.run(argv, 60, module_env(), stdin=json.dumps(arguments))
    found = parse_result(done.stdout, done.stderr)
    assert found["verdict"] == "unknown", found
    assert sorted((row["item"], row["state"]) for row in rows(found)) == [
        ("command_line", "unknown"),
        ("environment", "unknown"),
        ("port", "unknown"),
    ], found
    assert found["servers"][0]["health"] is None


def test_a_leader_that_shows_no_command_line_is_neither_gone_nor_drifted(site: Site) -> None:
    """Its first thread has ended, others live on: such a process shows nothing of itself, and holds what it held."""
    fixture = ROOT / "tests" / "fixtures" / "zombie_leader.py"
    zombie = site.ns.popen([sys.executable, str(fixture), "/dev/null"], detached=True)
    wait_for("the zombie", lambda: not site.ns.cmdline(zombie.pid), 10)
    site.killed()
    site.clear_shm()
    site.change(site.record, pid=zombie.pid, start_ticks=site.ns.start_ticks(zombie.pid))
    found = site.check()
    assert found["servers"][0]["running"] is True
    states = {(row["item"], row["state"]) for row in rows(found)}
    assert {("command_line", "unknown"), ("environment", "unknown")} <= states, found
    assert "not_running" not in dict(states)
    assert not [item for item, _state in states if item.startswith(("flag:", "env:"))], found


def test_a_server_with_a_network_of_its_own_is_another_one(site: Site) -> None:
    """As in a container: its port is not this host's."""
    site.killed()
    site.clear_shm()
    words = [sys.executable, "-m", "sglang.launch_server", "--model", str(site.model), "--port", str(PORT)]
    other = site.ns.popen(["unshare", "--net", *words], site.settings["environment"], detached=True, output=site.log)
    wait_for("it", lambda: "sglang.launch_server" in site.ns.cmdline(other.pid), 10)
    drifted(site, "not_running")


def test_two_servers_that_have_changed_their_ports(site: Site) -> None:
    """The inventory gives the one's port to the other: nobody is taken for somebody else."""
    found = site.check_all(
        [
            {**site.settings, "name": "new", "gpus": []},
            {**site.settings, "port": PORT + 1},
        ]
    )
    assert sorted(named(found)) == [("main", "flag:port"), ("new", "not_ours")], found
    (new, main) = found["servers"]
    assert (new["running"], main["pid"], main["health"]) == (False, site.pid, "ok")
