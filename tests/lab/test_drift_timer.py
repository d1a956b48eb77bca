# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The schedule of the check for drift where systemd runs: the timer fires, and what it writes is seen by testinfra.

The container is the control node and the host at once. Ansible lies in it where it lies on this machine, and the
checkout stands where a collection is installed for all users.
"""

from __future__ import annotations

import json
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.containers import Container, Lab
from ansible_collections.cleanslate.sglang.tests.lab.gpus import Gpus
from ansible_collections.cleanslate.sglang.tests.lab.inventory import (
    API_KEY,
    host_vars,
    run_module_on,
    run_on,
    server,
    write_inventory,
)
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import OPERATOR, PYTHON
from ansible_collections.cleanslate.sglang.tests.lab.servers import wait_serving
from ansible_collections.cleanslate.sglang.tests.lab.state import Host, host_of

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

PORT = 30000
SERVER_UNIT = "sglang-chat.service"
TIMER, SERVICE = "cleanslate-drift.timer", "cleanslate-drift.service"
INSTALLED = "/usr/share/ansible/collections/ansible_collections/cleanslate/sglang"
INVENTORY = "/etc/cleanslate/inventory.json"
OUT = "/var/lib/cleanslate-drift"
REPORTS = ("latest.json", "history.jsonl", "metrics.prom", "junit.xml", "index.html")
RUN_DEADLINE_S = 120
NOWHERE = {"ansible_host": "192.0.2.1", "ansible_ssh_common_args": "-o ConnectTimeout=3"}


def _mounts(_box: Container) -> list[str]:
    """This machine's Ansible at its own place, and the checkout at the place of an installed collection."""
    own = {str(Path(sys.prefix).resolve()), str(Path(sys.base_prefix).resolve())} - {"/usr", "/usr/local"}
    places = [(path, path) for path in sorted(own)] + [(str(ROOT), INSTALLED)]
    return [f"{source} {target.lstrip('/')} none ro,bind,create=dir 0 0" for source, target in places]


@pytest.fixture
def box(lab: Lab) -> t.Iterator[Container]:
    with lab.container(prepare=_mounts) as container:
        yield container


@pytest.fixture
def host(box: Container, gpus: Gpus) -> Host:
    return host_of(box)


def serving(box: Container, scratch: Path, wanted: dict[str, t.Any]) -> None:
    """The server as the inventory wants it, launched by us."""
    names = ("name", "port", "python", "user", "group", "flags", "environment", "api_key", "gpus")
    arguments = {"launcher": "systemd", **{name: wanted[name] for name in names}}
    done = run_module_on(box, "server_launch", arguments, scratch)
    assert done.status == "ok", done.result
    wait_serving(box, PORT, key=API_KEY)


def write_inside(
    box: Container, wanted: dict[str, t.Any] | None, connection: dict[str, t.Any], **others: t.Any
) -> None:
    """The inventory on the control node."""
    variables = {**host_vars(box, [wanted] if wanted else []), "sglang_allow_simulated": True}
    for name in ("ansible_host", "ansible_user", "ansible_ssh_private_key_file", "ansible_ssh_common_args"):
        del variables[name]
    path = box.root / INVENTORY.lstrip("/")
    path.parent.mkdir(exist_ok=True)
    write_inventory(path, {box.name: {**variables, **connection}, **others})


def schedule(box: Container, scratch: Path, *, check: bool = False, **settings: t.Any) -> PlaybookRun:
    """drift_schedule.yml from outside, with a timer that fires twice a minute."""
    inventory = write_inventory(scratch / "hosts.json", {box.name: host_vars(box, [])})
    variables = {
        "drift_schedule_hosts": box.name,
        "drift_schedule_python": str(Path(sys.prefix).resolve() / "bin/python"),
        "drift_schedule_inventory": [INVENTORY],
        "drift_schedule_on_calendar": ["*-*-* *:*:0/30"],
        "drift_schedule_random_delay": "0",
        "drift_schedule_accuracy": "1s",
        "drift_schedule_timeout_s": 60,
        **{f"drift_schedule_{name}": value for name, value in settings.items()},
    }
    playbook = ROOT / "playbooks/drift_schedule.yml"
    return run_on(box, playbook, inventory, scratch, "--diff", extra_vars=variables, check=check)


def changed(run: PlaybookRun) -> list[str]:
    return [task.task for task in run.tasks if task.result.get("changed")]


def latest(box: Container) -> dict[str, t.Any] | None:
    path = box.root / OUT.lstrip("/") / "latest.json"
    return t.cast("dict[str, t.Any]", json.loads(path.read_text())) if path.exists() else None


def ended(box: Container, status: int, after: int = 0) -> int:
    """Wait until more than ``after`` runs of the service have ended with this exit status; returns how many have."""
    words = "Deactivated successfully" if status == 0 else f"code=exited, status={status}/"

    def look() -> int:
        count = journal(box).count(words)
        return count if count > after else 0

    try:
        return wait_for(f"{SERVICE} ended with {status}", look, RUN_DEADLINE_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{journal(box)}") from error


def journal(box: Container) -> str:
    return box.run(["journalctl", "--no-pager", "-o", "short", "-u", SERVICE, "-u", TIMER], 30).stdout


def test_the_timer_fires_and_its_reports_are_there(box: Container, host: Host, tmp_path: Path) -> None:
    wanted = server("chat", PORT, 0)
    serving(box, tmp_path, wanted)
    write_inside(box, wanted, {"ansible_connection": "local"})

    tried = schedule(box, tmp_path, check=True).check()
    assert {"Write the service", "Write the timer"} <= {name.rpartition(" : ")[2] for name in changed(tried)}
    assert f"ExecStart={Path(sys.prefix).resolve()}" in tried.stdout
    assert not host.file(f"/etc/systemd/system/{TIMER}").exists and not host.file(OUT).exists

    schedule(box, tmp_path).check()
    assert changed(schedule(box, tmp_path).check()) == []
    assert host.service(TIMER).is_running and host.service(TIMER).is_enabled

    count = ended(box, 0)
    for name in REPORTS:
        report = host.file(f"{OUT}/{name}")
        assert report.exists and report.size > 0, name
        assert not report.contains(API_KEY), name
    assert (host.file(OUT).mode, host.file(OUT).user) == (0o750, "root")
    assert (latest(box) or {})["verdict"] == "in_sync", latest(box)
    # It is the timer that starts it, again and again.
    ended(box, 0, after=count)

    # Drift is the service's exit code, and the timer goes on.
    box.run(["systemctl", "stop", SERVER_UNIT], 60).check()
    ended(box, 10)
    assert host.run(f"systemctl is-failed {SERVICE}").stdout.strip() in ("failed", "activating")
    found = json.dumps(latest(box))
    assert '"not_running"' in found and (latest(box) or {})["verdict"] == "drifted", found
    assert host.service(TIMER).is_running
    # Of a host that can't be asked nothing is known, and that is no silence either.
    write_inside(box, wanted, {"ansible_connection": "local"}, gpu999=NOWHERE | {"sglang_servers": []})
    ended(box, 20)
    assert "gpu999" in json.dumps(latest(box))
    assert API_KEY not in journal(box)


def test_cron_takes_the_place_of_the_timer_and_all_of_it_goes(box: Container, host: Host, tmp_path: Path) -> None:
    """A host without servers is enough for that."""
    write_inside(box, None, {"ansible_connection": "local"})
    schedule(box, tmp_path, on_calendar=["2099-01-01"]).check()
    assert host.service(TIMER).is_running
    schedule(box, tmp_path, kind="cron", cron="7 * * * *").check()
    assert not host.file(f"/etc/systemd/system/{TIMER}").exists and not host.service(TIMER).is_running
    line = host.file("/etc/cron.d/cleanslate-drift").content_string.splitlines()[-1]
    assert line.startswith("7 * * * * root timeout "), line
    # As cron does it: a shell, and % without its backslash.
    box.run(["sh", "-c", line.removeprefix("7 * * * * root ").replace("\\%", "%")], RUN_DEADLINE_S).check()
    assert (latest(box) or {})["verdict"] == "in_sync", latest(box)
    assert "in_sync" in box.run(["journalctl", "--no-pager", "-t", "cleanslate-drift"], 30).stdout

    schedule(box, tmp_path, state="absent").check()
    assert not host.file("/etc/cron.d/cleanslate-drift").exists
    assert changed(schedule(box, tmp_path, state="absent").check()) == []
    assert host.file(f"{OUT}/latest.json").exists


def test_a_host_checks_itself(box: Container, host: Host, tmp_path: Path) -> None:
    """Its inventory has the whole fleet, reached by ssh; it looks at itself alone, without ssh."""
    wanted = server("chat", PORT, 0)
    serving(box, tmp_path, wanted)
    write_inside(box, wanted, {"ansible_connection": "ssh", **NOWHERE}, gpu999=NOWHERE | {"sglang_servers": []})
    schedule(box, tmp_path, pull=True).check()
    ended(box, 0)
    report = latest(box) or {}
    assert report["verdict"] == "in_sync", report
    assert "gpu999" not in json.dumps(report)

    run = schedule(box, tmp_path, state="absent").check()
    assert not host.file(f"/etc/systemd/system/{SERVICE}").exists and not host.service(TIMER).is_running, run.stdout


def test_what_would_not_run_is_refused_before_anything_is_written(
    box: Container, host: Host, tmp_path: Path
) -> None:
    """An account that can't read the Ansible of root, a calendar that systemd does not understand, no inventory."""
    run = schedule(box, tmp_path, user=OPERATOR, on_calendar=["often"])
    assert run.rc == 2, run.stdout
    (failed,) = [task for task in run.tasks if task.status == "failed"]
    message = str(failed.result["msg"])
    assert "systemd does not understand 'often'" in message, message
    assert f"inventory: {OPERATOR} can't read {INVENTORY}" in message, message
    assert message.endswith("Nothing was changed.")
    again = schedule(box, tmp_path, python=PYTHON)
    assert "No module named 'ansible_runner'" in again.stdout, again.stdout
    assert not host.file(OUT).exists and not host.file(f"/etc/systemd/system/{TIMER}").exists
