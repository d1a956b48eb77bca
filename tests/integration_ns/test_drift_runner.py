# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""scripts/drift.py through the real ansible-runner: its exit status, and reports that are there whatever happens."""

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
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace, NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.drift_runner_site import DriftFleet
from ansible_collections.cleanslate.sglang.tests.unit.drift_builders import answer, row, server

pytestmark = pytest.mark.ns

IN_SYNC: dict[str, t.Any] = {"answer": answer([server("chat")])}
DRIFTED: dict[str, t.Any] = {"answer": answer([server("chat", [row("flag:tp-size", wanted=8, found=4)])])}


@pytest.fixture
def fleet(ns: Namespace, tmp_path: Path) -> DriftFleet:
    fleet = DriftFleet(tmp_path, ns)
    fleet.hosts["gpu01"] = IN_SYNC
    return fleet


def hook(fleet: DriftFleet, body: str) -> str:
    """A command for --notify."""
    path = fleet.directory / "hook"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_from_in_sync_to_drifted_to_gone_and_back(fleet: DriftFleet) -> None:
    fleet.hosts["gpu02"] = IN_SYNC
    told = fleet.directory / "told"
    notify = hook(fleet, f'cat >> {told}; echo "$CLEANSLATE_DRIFT_VERDICT $1" >> {told}')
    collector = fleet.directory / "textfile"
    collector.mkdir()
    done = fleet.run("--notify", f"{notify} word", "--metrics", str(collector / "drift.prom"))
    assert (done.rc, done.stderr) == (0, ""), done
    assert "2 hosts: 2 in sync" in done.stdout and not told.exists()
    fleet.all_valid()
    assert (collector / "drift.prom").read_text() == (fleet.out / "metrics.prom").read_text()
    assert [path.name for path in collector.iterdir()] == ["drift.prom"]
    assert list(fleet.out.joinpath(".runs").iterdir()) == []
    success = fleet.latest()["last_success_at"]

    fleet.hosts["gpu02"] = DRIFTED
    done = fleet.run("--notify", f"{notify} word")
    assert done.rc == 10 and "gpu02/chat: flag:tp-size [critical, process and file]: wanted 8, found 4" in done.stdout
    fleet.all_valid()
    message, said = told.read_text().rstrip().rsplit("}", 1)
    assert said == "drifted word"
    assert [each["item"] for each in json.loads(message + "}")["changes"]] == [None, "flag:tp-size"]
    drifted = fleet.host("gpu02")

    fleet.hosts["gpu02"] = {"unreachable": True}
    done = fleet.run()
    assert done.rc == 20, done
    fleet.all_valid()
    gone = fleet.host("gpu02")
    assert (gone["state"], gone["last_answer"]["verdict"]) == ("unreachable", "drifted")
    assert "Connection refused" in gone["problem"]
    assert [each["name"] for each in gone["servers"]] == ["chat"]
    metrics = fleet.metrics()
    assert (metrics["host_verdict", "gpu02/unknown"], metrics["server_verdict", "gpu02/chat/unknown"]) == (1, 1)
    assert metrics["run_exit_code", ""] == 20
    assert fleet.latest()["last_success_at"] >= success and metrics["last_success_timestamp_seconds", ""] > 0

    fleet.hosts["gpu02"] = DRIFTED
    assert fleet.run().rc == 10
    # The same difference as before the silence: it is as old as it was, and not new.
    assert fleet.host("gpu02")["servers"][0]["drift"] == drifted["servers"][0]["drift"]
    assert [each["what"] for each in fleet.latest()["changes"]] == ["verdict"]
    assert [line["verdict"] for line in fleet.history()] == ["in_sync", "drifted", "unknown", "drifted"]


@pytest.mark.parametrize(
    ("script", "state", "why"),
    [
        ({"fail": "servers[0] has no name."}, "failed", "servers[0] has no name."),
        ({"write": "no JSON at all"}, "failed", ""),
        ({"write": '{"changed": false, "verdict": "in_sync"}'}, "failed", "names neither servers nor the host"),
        ({"answer": {**answer([server()]), "verdict": "unknown"}}, "answered", None),
    ],
    ids=["fails", "no_json", "no_answer", "says_unknown"],
)
def test_a_host_that_does_not_answer_well_is_unknown(
    fleet: DriftFleet, script: dict[str, t.Any], state: str, why: str | None
) -> None:
    fleet.hosts["gpu02"] = script
    done = fleet.run()
    assert done.rc == 20, done
    fleet.all_valid()
    host = fleet.host("gpu02")
    assert (host["state"], host["verdict"]) == (state, "unknown")
    assert host["problem"] is None if why is None else why in host["problem"]
    assert fleet.host("gpu01")["verdict"] == "in_sync"


def test_a_host_whose_variables_are_wrong_is_unknown(fleet: DriftFleet) -> None:
    fleet.hosts["gpu02"] = IN_SYNC
    fleet.variables["gpu02"] = {"sglang_servers": [{"name": "chat", "prot": 30000}]}
    done = fleet.run()
    assert done.rc == 20 and fleet.asked() == ["gpu01"]
    assert "prot" in fleet.host("gpu02")["problem"], fleet.host("gpu02")


def test_a_run_that_takes_too_long_ends_and_names_who_did_not_answer(fleet: DriftFleet) -> None:
    fleet.hosts["gpu02"] = {**IN_SYNC, "sleep": 200}
    started = time.monotonic()
    done = fleet.run("--timeout", "25")
    assert time.monotonic() - started < 170
    assert done.rc == 20 and "did not end within 25 s" in done.stdout, done
    fleet.all_valid()
    assert (fleet.host("gpu01")["state"], fleet.host("gpu02")["state"]) == ("answered", "no_answer")
    assert fleet.latest()["run"]["status"] == "timeout"
    nobody_left(fleet)


def nobody_left(fleet: DriftFleet) -> None:
    """Nothing of a run lives on: neither Ansible nor a module."""

    def left() -> list[str]:
        words = [" ".join(fleet.ns.cmdline(pid)) for pid in fleet.ns.pids()]
        return [line for line in words if "ansible" in line or "drift.py" in line]

    wait_for(f"nobody left: {left()}", lambda: not left(), 30)


def kill(fleet: DriftFleet, process: NsProcess, number: signal.Signals = signal.SIGKILL) -> None:
    fleet.ns.call(lambda: os.kill(process.pid, number))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_still_reports(fleet: DriftFleet, number: signal.Signals) -> None:
    assert fleet.run().rc == 0
    fleet.hosts["gpu01"] = {**IN_SYNC, "sleep": 200}
    process = fleet.start()
    wait_for("the module runs", lambda: len(fleet.asked()) == 2, 120)
    kill(fleet, process, number)
    assert process.wait(90) == 20
    fleet.all_valid()
    assert fleet.latest()["run"]["problems"] == [f"the run was ended by {number.name}"]
    assert (fleet.host("gpu01")["state"], fleet.host("gpu01")["last_answer"]["verdict"]) == ("no_answer", "in_sync")
    nobody_left(fleet)


def test_a_fleet_that_can_t_be_listed_makes_all_that_were_known_unknown(fleet: DriftFleet) -> None:
    fleet.hosts["gpu02"] = DRIFTED
    assert fleet.run().rc == 10
    argv = fleet.argv()
    (fleet.directory / "inventory.yml").write_text("{ no yaml: [")
    done = fleet.ns.run(argv, 120, fleet.environment(), cwd=fleet.directory)
    assert done.rc == 20, done
    fleet.all_valid()
    found = fleet.latest()
    assert {host["name"]: host["verdict"] for host in found["hosts"]} == {"gpu01": "unknown", "gpu02": "unknown"}
    assert "no host to check" in found["run"]["problems"][0] and "inventory.yml" in found["run"]["problems"][0]
    assert fleet.metrics()["run_failed", ""] == 1


def test_a_first_run_without_a_host_is_unknown(fleet: DriftFleet) -> None:
    done = fleet.run("--limit", "nobody")
    assert done.rc == 20 and "no host" in done.stdout, done
    fleet.all_valid()
    assert fleet.latest()["hosts"] == []


def test_without_ansible_runner_the_way_out_is_told(fleet: DriftFleet) -> None:
    assert fleet.run().rc == 0
    (fleet.directory / "missing").mkdir()
    (fleet.directory / "missing" / "ansible_runner.py").write_text("raise ImportError('not here')\n")
    done = fleet.run(env={"PYTHONPATH": str(fleet.directory / "missing")})
    assert done.rc == 20, done
    wanted = f"{sys.executable} -m pip install -r {fleet.collection / 'requirements' / 'drift.txt'}"
    assert wanted in done.stdout
    fleet.all_valid()
    assert fleet.host("gpu01")["verdict"] == "unknown" and wanted in fleet.host("gpu01")["problem"]


def test_a_limit_keeps_the_others_and_its_status_is_of_those_asked(fleet: DriftFleet) -> None:
    fleet.hosts["gpu02"] = DRIFTED
    assert fleet.run().rc == 10
    done = fleet.run("--limit", "gpu01")
    assert done.rc == 0 and fleet.asked()[2:] == ["gpu01"], done
    assert (fleet.latest()["verdict"], fleet.host("gpu02")["in_this_run"]) == ("drifted", False)
    # What nobody has asked for too long is unknown.
    time.sleep(1.1)
    done = fleet.run("--limit", "gpu01", "--fresh-s", "1")
    assert done.rc == 0 and fleet.host("gpu02")["state"] == "stale"
    assert list(fleet.history()[-1]["hosts"]) == ["gpu01"]


def test_however_a_run_is_narrowed_the_others_stay(fleet: DriftFleet) -> None:
    """Its target is a host, or the limit stands behind --. Who left the inventory leaves the reports."""
    fleet.hosts["gpu02"] = DRIFTED
    fleet.hosts["gpu03"] = IN_SYNC
    assert fleet.run().rc == 10
    for arguments, limit in ((("-e", "target=gpu01"), None), (("--", "--limit", "gpu01"), "gpu01")):
        done = fleet.run(*arguments)
        assert done.rc == 0, done
        document = fleet.latest()
        assert [host["name"] for host in document["hosts"]] == ["gpu01", "gpu02", "gpu03"]
        assert (document["verdict"], document["run"]["hosts"], document["run"]["limit"]) == ("drifted", 1, limit)
        assert fleet.metrics()["host_verdict", "gpu02/drifted"] == 1
    del fleet.hosts["gpu03"]
    assert fleet.run("-e", "target=gpu01").rc == 0
    assert [host["name"] for host in fleet.latest()["hosts"]] == ["gpu01", "gpu02"]
    del fleet.hosts["gpu02"]
    assert fleet.run().rc == 0
    assert [host["name"] for host in fleet.latest()["hosts"]] == ["gpu01"]


@pytest.mark.parametrize("words", [("--skip-tags", "always"), ("--start-at-task", "nothing")])
def test_a_run_that_leaves_the_check_out_is_unknown(fleet: DriftFleet, words: tuple[str, str]) -> None:
    done = fleet.run("--", *words)
    assert done.rc == 20 and f"{words[0]}" in done.stdout and "a check runs as a whole" in done.stdout, done
    assert fleet.asked() == []


def test_a_host_that_checks_itself(fleet: DriftFleet) -> None:
    fleet.hosts["gpu02"] = DRIFTED
    inventory = json.loads(fleet.inventory().read_text())
    del inventory["sglang"]["hosts"]["gpu02"]["ansible_connection"]
    argv = fleet.argv("-c", "local", "-l", "gpu02")
    (fleet.directory / "inventory.yml").write_text(json.dumps(inventory))
    done = fleet.ns.run(argv, 120, fleet.environment(), cwd=fleet.directory)
    assert (done.rc, fleet.asked()) == (10, ["gpu02"]), done
    assert [host["name"] for host in fleet.latest()["hosts"]] == ["gpu02"]


def test_a_notification_that_fails_is_told_and_changes_no_status(fleet: DriftFleet) -> None:
    fleet.hosts["gpu01"] = DRIFTED
    complaint = "echo https://chat.example/told-Secret no route >&2"
    done = fleet.run("--notify", hook(fleet, f"cat >/dev/null; {complaint}; exit 3"))
    assert done.rc == 10 and "notify: hook: exit status 3\n" in done.stderr, done
    for path in (fleet.out / name for name in ("latest.json", "index.html", "history.jsonl")):
        assert "told-Secret" not in path.read_text()
    fleet.all_valid()
    assert fleet.latest()["notification"]["ok"] is False
    assert fleet.metrics()["notify_failed", ""] == 1
    assert "Nobody was notified" in (fleet.out / "index.html").read_text()
    # It is told again, since nobody heard it, and then no more.
    for expected in ("0", "0"):
        done = fleet.run("--notify", hook(fleet, f"echo x >> {fleet.directory}/heard"))
        assert done.rc == 10 and fleet.metrics()["notify_failed", ""] == float(expected)
    assert (fleet.directory / "heard").read_text() == "x\n"


def test_a_notification_that_hangs_is_ended(fleet: DriftFleet) -> None:
    fleet.hosts["gpu01"] = DRIFTED
    done = fleet.run("--notify", hook(fleet, "sleep 300"), "--notify-timeout", "2")
    assert done.rc == 10 and "no end within 2 s" in done.stderr, done
    done = fleet.run("--notify", "/no/such/command")
    assert done.rc == 10 and "/no/such/command: No such file" in done.stderr, done
    nobody_left(fleet)


def test_who_was_there_before_is_no_child_of_the_run(fleet: DriftFleet) -> None:
    """A shell that starts something and becomes the runner: that is its child as well."""
    pid = fleet.directory / "bystander"
    words = " ".join(fleet.argv())
    script = f"sleep 1000 >/dev/null 2>&1 & echo $! > {pid}; exec {words}"
    done = fleet.ns.run(["sh", "-c", script], 120, fleet.environment(), cwd=fleet.directory)
    assert done.rc == 0, done
    assert int(pid.read_text()) in fleet.ns.pids()


def test_reports_that_can_t_be_written_are_no_success(fleet: DriftFleet) -> None:
    (fleet.out / "metrics.prom").mkdir(parents=True)
    done = fleet.run()
    assert done.rc == 20 and "metrics.prom: Is a directory" in done.stderr, done
    assert fleet.latest()["verdict"] == "in_sync" and (fleet.out / "index.html").exists()
    done = fleet.run("--metrics", str(fleet.directory / "none" / "x.prom"))
    assert done.rc == 20 and "is no directory" in done.stderr, done


def test_settings_of_the_user_count_and_host_keys_are_checked(fleet: DriftFleet) -> None:
    """ansible-runner switches the check of host keys off; the ansible.cfg of the current directory is what counts."""
    project = fleet.directory / "project"
    project.mkdir(mode=0o755)
    (project / "ansible.cfg").write_text("[defaults]\nforks = 3\nhost_key_checking = True\n")
    fleet.hosts["gpu02"] = {"unreachable": True}
    done = fleet.run("--keep-run", cwd=project)
    assert done.rc == 20, done
    shown = fleet.directory / "shown"
    program = fleet.directory / "bin"
    program.mkdir()
    (program / "ssh").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shown}\nexit 255\n')
    (program / "ssh").chmod(0o755)
    fleet.run(cwd=project, env={"PATH": f"{program}:{os.environ['PATH']}"})
    assert "StrictHostKeyChecking=no" not in shown.read_text()
    assert f"ControlPath={fleet.out}" in shown.read_text() or len(str(fleet.out)) > 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_runs_at_once_and_one_that_is_killed(fleet: DriftFleet) -> None:
    for number in range(2, 5):
        fleet.hosts[f"gpu0{number}"] = {**(DRIFTED if number == 2 else IN_SYNC), "sleep": 0.5}
    assert fleet.run().rc == 10
    before = len(fleet.asked())
    runs = [fleet.start("--timeout", "200") for _number in range(10)]
    wait_for("modules run", lambda: len(fleet.asked()) > before, 120)
    kill(fleet, runs[4])
    while any(each.popen.poll() is None for each in runs):
        # Whoever reads meanwhile reads whole files.
        fleet.latest()
        assert fleet.metrics()["hosts", "drifted"] == 1
        time.sleep(0.3)
    assert [each.wait(1) for each in runs] == [10, 10, 10, 10, -9, 10, 10, 10, 10, 10]
    fleet.all_valid()
    lines = fleet.history()
    assert len(lines) == 10 and len({line["run"] for line in lines}) == 10
    assert all(len(line["hosts"]) == 4 for line in lines)
    # What the killed one left goes with the next run.
    assert fleet.run().rc == 10
    assert list((fleet.out / ".runs").iterdir()) == []
    fleet.all_valid()


PUBLISH = """
import sys, time
sys.path[0] = {path!r}
from pathlib import Path
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import drift_run
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_files import Store
from ansible_collections.cleanslate.sglang.tests.unit.drift_builders import answer, collected, ok, row, run, server

events = [ok(f"gpu{{n:03d}}", answer([server("chat", [row("user")])], gpus=8)) for n in range(40)]
options = drift_run.parse(["--out", {out!r}])
store = Store(options.out)
store.prepare()
Path({ready!r}).touch()
while True:
    hosts = tuple(collected(*events).hosts(()))
    drift_run.publish(options, store, run(time.time()), drift_run.Outcome(hosts, "successful", 0))
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_of_the_writing_leaves_whole_files(fleet: DriftFleet) -> None:
    ready = fleet.directory / "ready"
    code = PUBLISH.format(path=str(ROOT / ".collections"), out=str(fleet.out), ready=str(ready))
    (fleet.directory / "publish.py").write_text(code)
    for number in range(8):
        ready.unlink(missing_ok=True)
        process = fleet.ns.popen([sys.executable, str(fleet.directory / "publish.py")], cwd=fleet.directory)
        wait_for("it writes", lambda: ready.exists() and (fleet.out / "index.html").exists(), 30)
        time.sleep(0.35 + 0.037 * number)
        kill(fleet, process)
        process.wait(10)
        fleet.latest()
        assert fleet.metrics()
        for line in (fleet.out / "history.jsonl").read_bytes().split(b"\n")[:-1]:
            json.loads(line)
    assert fleet.run().rc == 0
    fleet.all_valid()
