# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""drift.yml on the stand-in server and simulated GPUs: what it says, how it ends, and that one task goes to a host."""

from __future__ import annotations

import json
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Fault, Gpu, Hold
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun
from ansible_collections.cleanslate.sglang.tests.harness.standin import start_standin
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import PlaybookHost

pytestmark = [pytest.mark.ns, pytest.mark.timeout(600)]

KEY = "sk-Drift-Secret-77b1"
TOKEN = "hf_Drift_Secret_c2d9"
# Actions that run on the controller alone.
CONTROLLER = ("fail", "debug")
UNREACHABLE = {
    "ansible_connection": "ssh",
    "ansible_host": "127.0.0.1",
    "ansible_port": 1,
    "ansible_ssh_common_args": "-o ConnectTimeout=5 -o BatchMode=yes",
}


@pytest.fixture
def host(ns: Namespace, tmp_path: Path) -> PlaybookHost:
    one = PlaybookHost(tmp_path, ns)
    one.follow_schedulers()
    server = one.server("demo", 31000, flags={"tp_size": 2, "max_total_tokens": 4096})
    one.servers = [{**server, "api_key": KEY, "secret_environment": {"HF_TOKEN": TOKEN}}]
    return one


def table_of(run: PlaybookRun, host: str = "gpu01") -> str:
    """The table of one host."""
    (shown,) = [task for task in run.named("Show what differs") if task.host == host]
    return str(shown.result["msg"])


def on_hosts(run: PlaybookRun) -> list[tuple[str, str]]:
    """(host, module) of every task that did not stay on the controller."""
    names = [(task.host, task.action.rpartition(".")[2]) for task in run.tasks if task.status != "skipped"]
    return [(name, action) for name, action in names if action not in CONTROLLER]


def marked(text: str) -> list[list[str]]:
    """Mark, server and item of each row of a table."""
    marks = ("CRITICAL", "warning", "note", "unknown", "expired")
    return [line.split()[:3] for line in text.splitlines() if line.split()[:1] and line.split()[0] in marks]


def test_in_sync_drifted_accepted_expired_gone(host: PlaybookHost, ns: Namespace) -> None:
    host.run("relaunch.yml").check()
    before = {pid for pid in ns.pids() if pid == host.record("demo")["pid"]}
    for arguments in ((), ("--check", "--diff", "-vvv")):
        run = host.run("drift.yml", *arguments).check()
        assert on_hosts(run) == [("gpu01", "server_drift")], run.stdout
        text = table_of(run)
        assert text.startswith("gpu01: in sync (0 drifted, 0 unknown, 0 accepted)"), text
        assert "demo: in sync: pid " in text and "health ok" in text, text
        assert marked(text) == []
        assert KEY not in run.stdout + run.stderr and TOKEN not in run.stdout + run.stderr
        assert not [task for task in run.tasks if KEY in str(task.result) or TOKEN in str(task.result)]
    assert {pid for pid in ns.pids() if pid == host.record("demo")["pid"]} == before

    host.servers[0]["flags"]["max_total_tokens"] = 2048
    run = host.run("drift.yml")
    assert run.rc == 2, run.stdout
    assert marked(table_of(run)) == [["CRITICAL", "demo", "flag:max-total-tokens"]]
    (failed,) = [task for task in run.tasks if task.status == "failed"]
    assert failed.result["msg"] == "gpu01 has drifted: demo: flag:max-total-tokens: wanted 2048, found 4096"
    assert "remedy: relaunch it: playbooks/relaunch.yml -e server=demo" in table_of(run)

    entry = {"server": "demo", "item": "flag:max-*", "reason": "ticket 12", "until": "2999-12-31"}
    host.variables["sglang_drift_accepted"] = [entry]
    text = table_of(host.run("drift.yml").check())
    assert "accepted: demo: flag:max-total-tokens: wanted 2048, found 4096: ticket 12" in text, text
    entry["until"] = "2020-01-31"
    run = host.run("drift.yml")
    assert run.rc == 2, run.stdout
    assert marked(table_of(run)) == [["expired", "demo", "flag:max-total-tokens"]]
    assert "accepted until 2020-01-31" in table_of(run)

    del host.variables["sglang_drift_accepted"]
    host.servers[0]["flags"]["max_total_tokens"] = 4096
    ns.run(["kill", "-9", str(host.record("demo")["pid"])], 20)
    run = host.run("drift.yml")
    assert run.rc == 2, run.stdout
    assert ["CRITICAL", "demo", "not_running"] in marked(table_of(run)), table_of(run)


def test_back_in_sync_after_a_start_by_hand(host: PlaybookHost, ns: Namespace) -> None:
    """With other flags, by a prefix. A relaunch of what has changed mends it, and then leaves it alone."""
    host.run("relaunch.yml").check()
    ns.run(["kill", "-9", str(host.record("demo")["pid"])], 20)
    by_hand = ["--model-path", str(host.directory / "model"), "--tp", "2", "--max-total-tok", "2048"]
    start_standin(ns, *by_hand, "--api-key", KEY, port=31000)
    run = host.run("drift.yml")
    found = marked(table_of(run))
    assert run.rc == 2 and KEY not in run.stdout + run.stderr, run.stdout
    assert ["CRITICAL", "demo", "flag:max-total-tokens"] in found, found
    assert ["warning", "demo", "restarted_by_hand"] in found, found
    host.run("relaunch.yml", extra_vars={"relaunch_when": "changed"}).check()
    pid = host.record("demo")["pid"]
    run = host.run("relaunch.yml", extra_vars={"relaunch_when": "drifted"}).check()
    assert table_of(run).startswith("gpu01: in sync"), run.stdout
    assert host.record("demo")["pid"] == pid


def test_what_only_the_check_sees_is_relaunched_where_it_drifted(host: PlaybookHost) -> None:
    """The model's configuration is none of ours: `changed` leaves the server alone, `drifted` does not."""
    (host.directory / "model").mkdir(exist_ok=True)
    config = host.directory / "model/config.json"
    config.write_text('{"architectures": ["LlamaForCausalLM"]}')
    host.run("relaunch.yml").check()
    pid = host.record("demo")["pid"]
    config.write_text('{"architectures": ["QwenForCausalLM"]}')
    run = host.run("drift.yml")
    assert (run.rc, marked(table_of(run))) == (2, [["warning", "demo", "model_config"]]), table_of(run)
    host.run("relaunch.yml", extra_vars={"relaunch_when": "changed"}).check()
    assert host.record("demo")["pid"] == pid
    run = host.run("relaunch.yml", extra_vars={"relaunch_when": "drifted"}).check()
    assert "model_config" in table_of(run) and host.record("demo")["pid"] != pid


def test_every_host_of_a_fleet_is_told(host: PlaybookHost) -> None:
    """In sync, wrong variables, not reachable, a module that can't run: none is silent, and none
    keeps the others from being checked.
    """
    host.servers = []
    base = {"ansible_connection": "local", "sglang_servers": [], "sglang_become": False}
    host.other_hosts = {
        "gpu02": {**base, "sglang_servers": [host.server("chat", 31000, prot=1)]},
        "gpu03": {**base, **UNREACHABLE},
        "gpu04": {**base, "ansible_python_interpreter": "/opt/nowhere/bin/python3"},
        "gpu06": {**base, "sglang_become": True, "ansible_become_exe": "/opt/nowhere/sudo"},
        "gpu05": {**base, "sglang_drift_accepted": [{"itme": "x", "reason": "y", "until": "soon"}]},
    }
    # Root that becomes root needs no sudo; here it is asked for all the same.
    run = host.run("drift.yml", env={"ANSIBLE_BECOME_ALLOW_SAME_USER": "1"})
    assert run.rc == 4, run.stdout
    assert table_of(run).startswith("gpu01: in sync"), run.stdout
    assert "gpu04: UNKNOWN: the Python interpreter for Ansible's modules is missing" in table_of(run, "gpu04")
    assert "gpu06: UNKNOWN: there is no sudo to become root with" in table_of(run, "gpu06")
    (fleet,) = [task.result["msg"] for task in run.named("Drift of all hosts") if task.status == "ok"]
    assert fleet.startswith("6 hosts: 1 in sync, 2 unknown, 1 unreachable, 2 not checked"), fleet
    for words in ("gpu04 is unknown: the Python", "gpu03 unreachable: ", "gpu02: not checked", "gpu05: not checked"):
        assert words in " ".join(fleet.split()), fleet
    refused = {task.host: str(task.result["msg"]) for task in run.tasks if task.status == "failed" and not task.ignored}
    assert set(refused) == {"gpu02", "gpu04", "gpu05", "gpu06"}, refused
    assert "did you mean 'port'?" in refused["gpu02"] and refused["gpu02"].startswith("not checked: gpu02: ")
    for words in ("sglang_drift_accepted[0]", "'itme'; did you mean 'item'?", "item is missing"):
        assert words in refused["gpu05"], refused["gpu05"]
    assert sorted(on_hosts(run)) == [(name, "server_drift") for name in ("gpu01", "gpu03", "gpu04", "gpu06")]
    # What one host lacks is no reason for another's exit code.
    assert host.run("drift.yml", "--limit", "gpu01").rc == 0
    assert host.run("drift.yml", "--limit", "gpu02").rc == 2
    assert host.run("drift.yml", "--limit", "gpu03").rc == 4


def test_memory_that_the_host_says_is_known_is_no_drift(host: PlaybookHost) -> None:
    """Also on a host without servers; what is too much for what is allowed is drift."""
    host.servers = []
    host.nvml.write(Gpu(0), Hold(0, 300, always=True))
    run = host.run("drift.yml")
    assert (run.rc, [words[1] for words in marked(table_of(run))]) == (2, ["(host)"]), table_of(run)
    host.variables.update(sglang_max_used_mib=100, sglang_baselines_mib={"0": 200})
    host.run("drift.yml").check()
    host.variables["sglang_baselines_mib"] = {"0": 150}
    assert host.run("drift.yml").rc == 2
    # The role alone, in somebody's own playbook: it fails by itself, unless its caller wants to judge.
    play = {"hosts": "sglang", "gather_facts": False}
    role = "cleanslate.sglang.drift"
    own = host.directory / "own.yml"
    own.write_text(json.dumps([{**play, "roles": [role]}]))
    run = host.run(str(own))
    assert run.rc == 2 and "gpu01 has drifted: memory_unexplained:0: " in run.stdout, run.stdout
    own.write_text(json.dumps([{**play, "roles": [{"role": role, "drift_fails": False, "drift_shows": False}]}]))
    run = host.run(str(own)).check()
    assert run.of_action("server_drift")[0].result["verdict"] == "drifted"
    assert {task.status for task in run.named("Show what differs")} == {"skipped"}


def test_what_does_not_answer_in_time_is_unknown(host: PlaybookHost) -> None:
    """A driver that hangs is named by the module's own deadline; the net above the module ends what has none."""
    host.servers = []
    host.nvml.write(Gpu(0), Fault("*", hang=True))
    host.variables["sglang_nvml_deadline_s"] = 1
    run = host.run("drift.yml")
    text = table_of(run)
    assert run.rc == 2 and text.startswith("gpu01: UNKNOWN (0 drifted, "), text
    assert ["unknown", "(host)"] in [words[:2] for words in marked(text)], text
    del host.variables["sglang_nvml_deadline_s"]
    run = host.run("drift.yml", extra_vars={"drift_timeout_s": 3})
    assert run.rc == 2, run.stdout
    assert table_of(run) == "gpu01: UNKNOWN: Timed out after 3 second(s)."
    assert "gpu01 is unknown: Timed out after 3 second(s)." in run.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-e", "target=gpus"), "No host in the inventory matches 'gpus'"),
        (("--limit", "apart"), "No host that --limit leaves matches 'sglang'"),
    ],
)
def test_a_check_of_nobody_fails(host: PlaybookHost, arguments: tuple[str, ...], words: str) -> None:
    inventory = host.inventory()
    inventory.write_text(inventory.read_text().replace('{"sglang"', '{"others": {"hosts": {"apart": {}}}, "sglang"'))
    host.inventory = lambda: inventory  # type: ignore[method-assign]
    run = host.run("drift.yml", *arguments)
    assert run.rc == 2, run.stdout
    assert words in run.stdout
    assert not run.of_action("server_drift")


@pytest.mark.parametrize(
    "arguments", [("--tags", "x"), ("--skip-tags", "all"), ("--skip-tags", "x,untagged"), ("--tags", "never")]
)
def test_tags_leave_nothing_out(host: PlaybookHost, arguments: tuple[str, ...]) -> None:
    host.servers = []
    host.variables["sglang_expected_gpus"] = 7
    run = host.run("drift.yml", *arguments)
    assert run.rc == 2 and marked(table_of(run)) == [["CRITICAL", "(host)", "gpu_count"]], run.stdout


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (("--skip-tags", "always"), {}),
        (("--skip-tags", "tagged"), {}),
        ((), {"ANSIBLE_SKIP_TAGS": "always"}),
        (("--start-at-task", "nothing like it"), {}),
        (("--start-at-task", "Fail where a host is not in sync"), {}),
    ],
)
def test_a_check_that_would_be_left_out_is_refused(
    host: PlaybookHost, arguments: tuple[str, ...], env: dict[str, str]
) -> None:
    run = host.run("drift.yml", *arguments, env=env)
    assert run.rc != 0 and "a check runs as a whole" in run.stdout + run.stderr, run
    assert not run.tasks


def test_a_host_that_nothing_was_learnt_of_fails_the_check(host: PlaybookHost) -> None:
    """Somebody's strategy or plugin may end a host in silence; here it is a task of the role that is gone."""
    host.servers = []
    book = host.directory / "silent.yml"
    plays = (ROOT / "playbooks" / "drift.yml").read_text()
    book.write_text("- {hosts: sglang, gather_facts: false}\n" + plays[plays.index("- name: See that somebody") :])
    run = host.run(str(book))
    assert run.rc == 2 and "not checked, so nothing is known: gpu01" in run.stdout, run.stdout


# --- the schedule: only looked at, since it is the machine's own ------------------------------------------------------


def scheduled(host: PlaybookHost, **settings: t.Any) -> PlaybookRun:
    """drift_schedule.yml on the controller itself, in check mode."""
    variables = {f"drift_schedule_{name}": value for name, value in {"become": False, **settings}.items()}
    return host.run("drift_schedule.yml", "--diff", check=True, extra_vars=variables)


def test_a_controller_schedules_what_it_has(host: PlaybookHost) -> None:
    """Without any setting it is this run's Python, collection and inventory."""
    out = host.directory / "reports"
    environment = {"ANSIBLE_CONFIG": "/etc/100%"}
    run = scheduled(host, kind="cron", cron="7 * * * *", out=str(out), environment=environment).check()
    line = next(each for each in run.stdout.splitlines() if each.startswith("+7 * * * * root "))
    assert "timeout --kill-after=90 1080 env ANSIBLE_CONFIG=/etc/100\\% /" in line, line
    # The interpreter of this run, by the name that Ansible has for it.
    assert f" {Path(sys.prefix).resolve()}/bin/python" in line, line
    assert f" {ROOT}/scripts/drift.py -i {host.directory}/inventory.yml --out {out} --timeout 900 2>&1 | logger" in line
    assert not out.exists()
    assert [task.host for task in run.tasks if task.status == "ok"][0] == "localhost"


def test_a_schedule_that_would_not_run_is_refused(host: PlaybookHost) -> None:
    run = scheduled(
        host,
        kind="cron",
        python="/opt/nowhere/bin/python",
        inventory=[str(host.directory / "missing")],
        vault_password_file="/etc/nowhere",
        name="../other",
        timeout_s=0,
    )
    assert run.rc == 2, run.stdout
    message = str([task.result["msg"] for task in run.tasks if task.status == "failed"][-1])
    for words in (
        "name: '../other' is no name of a unit",
        "timeout_s: 0 must be above 0 seconds",
        "python: /opt/nowhere/bin/python can't be used by root with ansible-runner",
        f"inventory: root can't read {host.directory}/missing",
        "vault_password_file: root can't read /etc/nowhere",
        "Nothing was changed.",
    ):
        assert words in message, message
    # Hosts that check themselves have what they need on their own disk.
    settings = {"drift_schedule_pull": True, "drift_schedule_kind": "cron"}
    pulled = host.run("drift_schedule.yml", check=True, extra_vars=settings)
    (refused,) = [task for task in pulled.tasks if task.status == "failed"]
    assert (refused.host, pulled.rc) == ("gpu01", 2)
    assert "inventory: root can't read /etc/cleanslate/inventory on this host" in str(refused.result["msg"])
    assert "there is no account 'nobody-here'" in scheduled(host, kind="cron", user="nobody-here").stdout
    if not Path("/run/systemd/system").exists():
        assert "kind: no systemd runs on this host" in scheduled(host, kind="systemd").stdout
