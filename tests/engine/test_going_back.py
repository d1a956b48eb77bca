# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real playbooks around the real SGLang: back on last_good, a last_good that is broken, two controllers at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.engine.real import model_path
from ansible_collections.cleanslate.sglang.tests.engine.real_host import RUN_DEADLINE_S, RealHost, failure_of
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import summary_of

# Several relaunches of a real server each: beyond the 300 s of every other test.
pytestmark = [pytest.mark.ns, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]
# A plan can't know that this is no JSON; SGLang refuses it some seconds after its start.
BAD = {"json_model_override_args": "{no JSON"}


@pytest.fixture
def host(engine_ns: Namespace, tmp_path: Path) -> RealHost:
    """A server whose model lies in the test's own folder, so that it can be broken."""
    model = tmp_path / "tiny"
    shutil.copytree(model_path(), model)
    return RealHost(tmp_path, engine_ns, model_path=str(model))


def test_back_on_last_good_and_a_last_good_that_is_broken_leaves_a_clean_host(host: RealHost, tmp_path: Path) -> None:
    good_entry = host.servers[0]
    host.play("relaunch.yml").check()
    good = host.record("chat")
    assert host.link("last_good") == host.link("current") == good["launch_id"]

    host.servers = [{**good_entry, "flags": {**good_entry["flags"], **BAD}}]
    run = host.play("relaunch.yml")
    why = failure_of(run)
    for words in ("the new configuration failed", "json", f"rolled back to {good['launch_id']}", "serving"):
        assert words in why, why
    back = host.record("chat")
    assert back["from_launch"] == good["launch_id"]
    assert back["config_hash"] == good["config_hash"]
    assert back["pid"] != good["pid"]
    assert host.link("last_good") == host.link("current") == back["launch_id"]
    assert host.generates() == 4
    assert back["pid"] in host.sglang()
    assert "rolled back" in summary_of(run)

    # Now the way back is broken as well. The new configuration doesn't need that model, and fails for its own reason.
    (tmp_path / "tiny" / "config.json").unlink()
    elsewhere = {**good_entry["flags"], "model_path": str(model_path()), **BAD}
    host.servers = [{**good_entry, "flags": elsewhere}]
    run = host.play("relaunch.yml")
    why = failure_of(run)
    for words in ("the new configuration failed", "the rollback to ", "failed too", "stopped, the host is clean"):
        assert words in why, why
    assert host.sglang() == {}
    assert host.generates() == 0
    host.play("assert_clean.yml").check()


def test_two_controllers_at_once_and_one_that_dies(host: RealHost, engine_ns: Namespace, tmp_path: Path) -> None:
    output = tmp_path / "alice.log"
    first = host.begin("relaunch.yml", output, "alice")
    wait_for("alice's server loads", lambda: "Wait for the proof" in output.read_text(), 120)
    loser = failure_of(host.play("relaunch.yml", "bob", lease_wait_s=1))
    for words in ("of alice on", "works on 'chat'", "server_ready", "Nothing was touched"):
        assert words in loser, loser
    wait_for("alice's run ends", lambda: first.pid not in {pid for pid, _ticks in engine_ns.living()}, RUN_DEADLINE_S)
    assert "SERVING" in output.read_text(), output.read_text()
    winner = host.record("chat")
    assert winner["operator"] == "alice"
    assert host.generates() == 4

    # The next one dies while its server loads; whoever comes then waits for the lease to expire, and goes on.
    output = tmp_path / "bob.log"
    second = host.begin("relaunch.yml", output, "bob")
    wait_for("bob's server loads", lambda: "Wait for the proof" in output.read_text(), RUN_DEADLINE_S)
    kill_controller(engine_ns, "ansible-playbook")
    assert second.pid not in {pid for pid, _ticks in engine_ns.living()}
    run = host.play("relaunch.yml", "carol", lease_wait_s=300)
    assert "chat on gpu01: SERVING" in summary_of(run.check())
    last = host.record("chat")
    assert last["operator"] == "carol"
    assert host.generates() == 4
    leaders = [pid for pid, title in host.sglang().items() if "sglang.launch_server" in title]
    assert leaders == [last["pid"]], host.sglang()
    broken = [lease.result["broken"] for lease in run.of_action("server_lease") if lease.result.get("broken")]
    assert not broken or "bob" in repr(broken), broken


def kill_controller(ns: Namespace, playbook: str) -> None:
    """End ansible-playbook with all its forks at once, as when its machine dies. The module that runs lives on."""
    forks = [pid for pid, title in ns.titles().items() if f"/{playbook} " in f"{title} "]
    assert forks
    ns.run(["kill", "-KILL", *map(str, forks)], 10).check()
    wait_for("the controller is gone", lambda: not set(forks) & {pid for pid, _ticks in ns.living()}, 30)
