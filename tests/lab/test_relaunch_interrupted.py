# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ctrl-C or a lost connection in the middle of a step: nothing is half-written, and the next run finishes the job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.playbook import playbook_env
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.containers import Container, Seen
from ansible_collections.cleanslate.sglang.tests.lab.gpus import Gpus
from ansible_collections.cleanslate.sglang.tests.lab.inventory import (
    API_KEY,
    ansible_env,
    host_vars,
    run_on,
    server,
    write_inventory,
)
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import PYTHON
from ansible_collections.cleanslate.sglang.tests.lab.servers import (
    ask,
    leaders,
    standin_argv,
    start_unit,
    unit_file,
    unit_state,
    wait_serving,
)

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

PORT = 30000
STEP_DEADLINE_S = 240
UNIT = "sglang-chat.service"
# Empty files that stay, of the record and of the lease.
LOCKS = (".lock", ".lease.lock")
# Each step by its task, as it is printed after the evictions' own heading.
STEPS = {
    "evict": "Evict what holds the GPUs of chat",
    "judge": "Ask whether the host is clean for chat",
    "start": "launch : Start chat",
    "prove": "Wait for the proof that it serves: chat",
}


def modules(box: Container) -> list[Seen]:
    """Processes of Ansible modules in the container: pipelining hands the code to a bare interpreter."""
    return [one for one in box.processes().values() if one.title == PYTHON]


def connections(box: Container) -> list[int]:
    """Our own ssh processes of Ansible's connections to this lab, masters and clients."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                words = Path(f"/proc/{name}/cmdline").read_text(errors="replace").split("\0")
            except OSError:
                continue
            program = os.path.basename(words[0].split(" ")[0]).rstrip(":")
            if program == "ssh" and any(str(box.lab.sockets) in word for word in words):
                found.append(int(name))
    return found


def interrupt(box: Container, inventory: Path, scratch: Path, step: str, how: str) -> int:
    """Run relaunch.yml until the module of ``step`` runs, then cut; returns the playbook's status."""
    output = scratch / "interrupted.log"
    argv = [str(Path(sys.executable).parent / "ansible-playbook"), str(ROOT / "playbooks/relaunch.yml")]
    argv += ["-i", str(inventory), "-e", "server=chat"]
    events = {"HARNESS_EVENTS": str(scratch / "interrupted.events")}
    env = {**os.environ, **playbook_env(scratch), **ansible_env(box), **events}
    with output.open("wb") as sink:
        process = subprocess.Popen(argv, stdout=sink, stderr=sink, env=env, cwd=ROOT, start_new_session=True)
    try:
        heading = "PLAY [Relaunch, one server at a time]"

        def reached() -> bool:
            text = output.read_text(errors="replace")
            assert process.poll() is None, text
            _unused, _unused, relaunching = text.partition(heading)
            return STEPS[step] in relaunching and bool(modules(box))

        wait_for(f"the step {step!r}", reached, STEP_DEADLINE_S)
        if how == "ctrl-c":
            os.killpg(process.pid, signal.SIGINT)
        else:
            for pid in connections(box):
                # A client ends by itself when its master is gone.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return process.wait(120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def nothing_half_written(box: Container) -> None:
    """No temporary file anywhere; what is there is whole."""
    state = box.root / "var/lib/cleanslate"
    units = box.root / "etc/systemd/system"
    temporary = [path for path in units.iterdir() if path.name.startswith(".")]
    if state.exists():
        temporary += [path for path in state.rglob(".*") if path.name not in LOCKS]
        for record in (*state.glob("*/current.json"), *state.glob("*/launches/*/record.json")):
            json.loads(record.read_text())
        for config in state.glob("*/launches/*/config.yaml"):
            assert API_KEY in config.read_text()
    assert not temporary
    unit = units / UNIT
    assert not unit.exists() or unit.read_text().rstrip().splitlines()[-1].startswith("Standard")


@pytest.mark.parametrize(
    ("step", "how"),
    [
        ("evict", "lost"),
        ("judge", "lost"),
        pytest.param("start", "lost", marks=pytest.mark.promise),
        ("prove", "lost"),
        ("evict", "ctrl-c"),
        ("start", "ctrl-c"),
    ],
)
def test_the_next_run_finishes_the_job(box: Container, gpus: Gpus, tmp_path: Path, step: str, how: str) -> None:
    environment = {"SGLANG_STANDIN_DEVICES": "/dev/nvidia0,/dev/nvidia1"}
    start_unit(box, "old.service", unit_file(standin_argv(PORT), restart="always", environment=environment))
    wait_serving(box, PORT)
    old = leaders(box, PORT)[0]
    # The proof takes long enough to be cut, and so does the start.
    slow = {"SGLANG_STANDIN_LOAD_S": "3"} if step == "prove" else {}
    inventory = write_inventory(
        tmp_path / "hosts.json", {box.name: host_vars(box, [server("chat", PORT, 0, environment=slow)])}
    )
    assert interrupt(box, inventory, tmp_path, step, how) != 0
    if how == "lost":
        said = " ".join((tmp_path / "interrupted.log").read_text().split())
        # A step that was quicker than the cut is over; then it is the next one that finds nobody.
        assert ("the connection was lost" in said and "Run the same again" in said) or "UNREACHABLE!" in said, said
    # A module goes on without its connection and ends by itself; only then are its files as it leaves them.
    wait_for("the module's own end", lambda: not modules(box), 120)
    nothing_half_written(box)

    run_on(box, ROOT / "playbooks/relaunch.yml", inventory, tmp_path, "-e", "server=chat").check()

    nothing_half_written(box)
    assert old.pid not in box.processes()
    serving = leaders(box)
    assert len(serving) == 1 and serving[0].pid == int(unit_state(box, UNIT, "MainPID")["MainPID"])
    assert len(gpus.holders(0)) == 1
    assert ask(box, "GET", "/health", PORT, key=API_KEY)[0] == 200
    assert unit_state(box, "old.service", "ActiveState")["ActiveState"] in ("inactive", "failed")


def test_a_second_run_while_the_first_ones_module_goes_on(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    """The operator sees the connection die and starts again at once, while the old eviction still waits inside."""
    environment = {"SGLANG_STANDIN_DEVICES": "/dev/nvidia0,/dev/nvidia1", "SGLANG_STANDIN_IGNORE_TERM": "1"}
    start_unit(
        box, "old.service", unit_file(standin_argv(PORT), environment=environment) + "[Service]\nTimeoutStopSec=8\n"
    )
    wait_serving(box, PORT)
    inventory = write_inventory(tmp_path / "hosts.json", {box.name: host_vars(box, [server("chat", PORT, 0)])})
    assert interrupt(box, inventory, tmp_path, "evict", "lost") != 0
    run_on(box, ROOT / "playbooks/relaunch.yml", inventory, tmp_path, "-e", "server=chat").check()
    assert len(leaders(box)) == 1
    assert ask(box, "GET", "/health", PORT, key=API_KEY)[0] == 200
    nothing_half_written(box)
