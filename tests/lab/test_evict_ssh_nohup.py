# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A server started by ``ssh host 'nohup python -m sglang.launch_server ... &'`` shares its cgroup with sshd's session
and the operator's shells: only its own processes go.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.containers import Container, Seen
from ansible_collections.cleanslate.sglang.tests.lab.gpus import Gpus
from ansible_collections.cleanslate.sglang.tests.lab.inventory import run_module_on
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import OPERATOR
from ansible_collections.cleanslate.sglang.tests.lab.servers import leaders, standin_argv, wait_serving

pytestmark = pytest.mark.lab

PORT = 30000


@contextlib.contextmanager
def operator_session(box: Container, command: str) -> t.Iterator[subprocess.Popen[bytes]]:
    """An operator's ssh session with a terminal, in whose login shell ``command`` runs."""
    argv = [*box.ssh_argv(OPERATOR, "-tt"), command]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as session:
        try:
            yield session
        finally:
            session.kill()


def sessions(box: Container) -> dict[int, Seen]:
    """Everything of sshd, login shells and what the operators run in them."""
    words = ("sshd", "bash", "sleep 3000", "systemd-logind")
    return {one.pid: one for one in box.processes().values() if one.title.lstrip("-").startswith(words)}


@pytest.mark.parametrize("logind", [pytest.param(True, marks=pytest.mark.promise), False])
def test_only_the_server_goes(box: Container, gpus: Gpus, tmp_path: Path, logind: bool) -> None:
    if not logind:
        # Then sessions have no scope: all of them, and the server, live in the cgroup of ssh.service.
        box.run(["systemctl", "mask", "--runtime", "--now", "systemd-logind.service"], 30).check()
    start = (
        f"SGLANG_STANDIN_DEVICES=/dev/nvidia0,/dev/nvidia1 nohup {shlex.join(standin_argv(PORT))} >server.log 2>&1 &"
    )
    # The session from which the server is started stays open, with a shell and a job in it; a second one as well.
    with (
        operator_session(box, f"{start} sleep 3000; true"),
        operator_session(box, "bash -l -c 'sleep 3000; true'"),
    ):
        wait_for("two sessions", lambda: len(box.find("sleep 3000")) >= 4, 20)
        wait_serving(box, PORT)
        leader = leaders(box)[0]
        inside = Path(f"/proc/{leader.outer_pid}/cgroup").read_text()
        assert ("/session-" in inside) == logind and ("/ssh.service" in inside) == (not logind), inside
        before = sessions(box)
        sshd = [one for one in before.values() if one.title.startswith(f"sshd: {OPERATOR}")]
        assert len(sshd) >= 2, before
        arguments = {
            "port": PORT,
            "name": "main",
            "devices": ["0"],
            "expected_gpus": 2,
            "device_major": LOOP_MAJOR,
            "deadlines": {"term": 15, "kill": 10},
        }
        held = gpus.holders(0)
        done = run_module_on(box, "gpu_evict", arguments, tmp_path)
        assert done.status == "ok" and done.result["verdict"] == "evicted", done.result
        assert [rung["rung"] for rung in done.result["rungs"]] == ["term"]
        ended = {one["pid"] for one in done.result["ended"]}
        assert held | {leader.pid} <= ended and not ended & set(before)
        assert not leaders(box) and not gpus.holders(0)
        after = sessions(box)
        assert {pid: one.start_ticks for pid, one in before.items()}.items() <= {
            pid: one.start_ticks for pid, one in after.items()
        }.items()


def test_a_server_whose_session_is_gone(box: Container, gpus: Gpus, tmp_path: Path) -> None:
    """The usual case: the operator has logged out, the server is a child of process 1 in a scope that nobody owns."""
    start = f"SGLANG_STANDIN_DEVICES=/dev/nvidia0 nohup {shlex.join(standin_argv(PORT))} >server.log 2>&1 </dev/null &"
    assert subprocess.run([*box.ssh_argv(OPERATOR, "-T"), start], timeout=30, check=True).returncode == 0
    wait_serving(box, PORT)
    leader = leaders(box)[0]
    with operator_session(box, "bash -l -c 'sleep 3000; true'"):
        wait_for("a session", lambda: len(box.find("sleep 3000")) >= 2, 20)
        before = sessions(box)
        arguments = {"port": PORT, "devices": ["0"], "expected_gpus": 2, "device_major": LOOP_MAJOR}
        done = run_module_on(box, "gpu_evict", arguments, tmp_path)
        assert done.status == "ok" and done.result["verdict"] == "evicted", done.result
        assert leader.pid in {one["pid"] for one in done.result["ended"]}
        assert not leaders(box) and not gpus.holders(0)
        assert set(before) <= set(sessions(box))
