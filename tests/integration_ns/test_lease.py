# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two runs on one server, with real modules: one works, the other waits or fails, and nobody is signalled meanwhile."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.modules import (
    ModuleResult,
    module_argv,
    module_env,
    run_module,
)
from ansible_collections.cleanslate.sglang.tests.harness.namespace import NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.standin import Standin
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import DEADLINES, NAME, Host, codes, sent

pytestmark = pytest.mark.ns
SLOW_TERM = {**DEADLINES, "term": 20}


def lease(host: Host, run_id: str, **arguments: t.Any) -> ModuleResult:
    values = {"name": NAME, "state_dir": str(host.state_dir), "run_id": run_id, **arguments}
    return run_module("server_lease", values, 60, ns=host.ns)


def stored(host: Host) -> dict[str, t.Any]:
    found = json.loads((host.state_dir / NAME / "lease.json").read_text())
    assert isinstance(found, dict)
    return found


def change(host: Host, **changes: t.Any) -> None:
    path = host.state_dir / NAME / "lease.json"
    path.write_text(json.dumps({**stored(host), **changes}))


def recorded(host: Host, **options: t.Any) -> Standin:
    server = host.server(gpus=(0,), **options)
    host.record(server)
    return server


def start_evict(host: Host, run_id: str, **arguments: t.Any) -> NsProcess:
    """gpu_evict in the background, once its lease names it."""
    values = {"name": NAME, "state_dir": str(host.state_dir), "run_id": run_id, "device_major": 7, **arguments}
    given = host.ns.directory / "arguments.json"
    given.write_text(json.dumps(values))
    argv = ["sh", "-c", f'exec "$@" <"{given}"', "x", *module_argv("gpu_evict")]
    process = host.ns.popen(argv, {**module_env(host.nvml.env())}, output=host.ns.directory / "evict.out")
    wait_for("the module's lease", lambda: stored(host)["pid"] is not None, 20)
    return process


def test_two_runs_at_once_one_works_and_the_other_names_it(host: Host) -> None:
    server = recorded(host)
    answers: dict[str, ModuleResult] = {}

    def take(run_id: str) -> None:
        answers[run_id] = lease(host, run_id, operator=f"op-{run_id}", controller=f"ctl-{run_id}")

    threads = [threading.Thread(target=take, args=(one,)) for one in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    won = [run for run, answer in answers.items() if not answer.failed]
    assert len(won) == 1, answers
    for run in set(answers) - set(won):
        assert f"run {won[0]} of op-{won[0]} on ctl-{won[0]} works on 'main' since " in answers[run].json["msg"]
        assert answers[run].json["holder"]["run_id"] == won[0]
        refused = host.evict(name=NAME, run_id=run)
        assert refused.failed and f"op-{won[0]}" in refused.json["msg"] and not sent(refused)
    by_hand = host.evict(name=NAME)
    assert by_hand.failed and "has no run_id" in by_hand.json["msg"] and not sent(by_hand)
    assert host.alive([server.leader.pid])
    done = host.evict(name=NAME, run_id=won[0])
    assert not done.failed and (server.leader.pid, "SIGTERM") in sent(done)
    assert stored(host)["pid"] is None and stored(host)["run_id"] == won[0]


def test_the_second_waits_until_the_first_gives_it_back(host: Host) -> None:
    assert not lease(host, "a").failed
    answers: list[ModuleResult] = []
    thread = threading.Thread(target=lambda: answers.append(lease(host, "b", wait_s=30)))
    thread.start()
    time.sleep(1.5)
    assert not answers
    assert lease(host, "a", state="released").json["changed"]
    thread.join(40)
    assert not answers[0].failed and answers[0].json["waited_s"] >= 0.5 and answers[0].json["broken"] is None


def test_a_module_that_works_is_not_overtaken_though_its_lease_has_expired(host: Host) -> None:
    recorded(host, faults={"IGNORE_TERM": "1"})
    assert not lease(host, "a").failed
    process = start_evict(host, "a", deadlines=SLOW_TERM)
    change(host, expires_since_boot=stored(host)["renewed_since_boot"])
    held = lease(host, "b", wait_s=1)
    assert held.failed and f"its gpu_evict (pid {stored(host)['pid']}) runs now" in held.json["msg"]
    process.wait(60)
    assert stored(host)["run_id"] == "a"


def test_a_module_that_was_killed_holds_it_until_it_expires_and_then_the_next_run_goes_on(host: Host) -> None:
    server = recorded(host, faults={"IGNORE_TERM": "1"})
    assert not lease(host, "a", operator="alice").failed
    process = start_evict(host, "a", deadlines=SLOW_TERM)
    host.kill(stored(host)["pid"], signal.SIGKILL)
    process.wait(20)
    held = lease(host, "b")
    assert held.failed and "alice" in held.json["msg"] and held.json["holder"]["running"] is False
    change(host, expires_since_boot=stored(host)["renewed_since_boot"])
    taken = lease(host, "b")
    assert not taken.failed and taken.json["broken"]["operator"] == "alice"
    assert "has ended" in taken.json["broken"]["why"]
    refused = host.evict(name=NAME, run_id="a")
    assert refused.failed and "no longer ours" in refused.json["msg"] and not sent(refused)
    done = host.evict(name=NAME, run_id="b", deadlines={**DEADLINES, "term": 1})
    assert not done.failed and not host.alive([server.leader.pid])


def test_the_same_run_goes_on_after_its_module_was_killed(host: Host) -> None:
    recorded(host, faults={"IGNORE_TERM": "1"})
    assert not lease(host, "a").failed
    process = start_evict(host, "a", deadlines=SLOW_TERM)
    host.kill(stored(host)["pid"], signal.SIGKILL)
    process.wait(20)
    assert not lease(host, "a").failed
    assert not host.evict(name=NAME, run_id="a", deadlines={**DEADLINES, "term": 1}).failed


def test_who_loses_the_lease_on_the_way_signals_nobody_any_more(host: Host) -> None:
    """The lease is somebody else's while the server ignores SIGTERM: SIGKILL never comes."""
    server = recorded(host, faults={"IGNORE_TERM": "1"})
    assert not lease(host, "a").failed
    answers: list[ModuleResult] = []
    deadlines = {**DEADLINES, "term": 4}
    thread = threading.Thread(target=lambda: answers.append(host.evict(name=NAME, run_id="a", deadlines=deadlines)))
    thread.start()
    wait_for("the module's lease", lambda: stored(host)["pid"] is not None, 30)
    wait_for("SIGTERM", lambda: "SIGTERM" in server.text() or _ignored(server), 30)
    change(host, run_id="b", operator="bob", pid=None, start_ticks=None, module=None)
    thread.join(90)
    (result,) = answers
    assert result.failed and result.json["verdict"] == "failed" and "lease_lost" in codes(result), result.json
    assert "run b of bob" in result.json["msg"]
    assert sent(result) <= {(server.leader.pid, "SIGTERM")}
    assert host.alive(server.tree()) and host.alive([server.leader.pid])
    assert stored(host)["run_id"] == "b"


def _ignored(server: Standin) -> bool:
    """Whether some time has passed since the module began: the stand-in logs nothing for a signal that it ignores."""
    time.sleep(1.0)
    return True


@pytest.mark.parametrize("what", ["garbage", "link", "empty"])
def test_what_lies_in_its_place_stops_everything(host: Host, what: str) -> None:
    server = recorded(host)
    path = host.state_dir / NAME / "lease.json"
    if what == "link":
        path.symlink_to(host.ns.directory / "elsewhere")
    else:
        path.write_text("garbage" if what == "garbage" else "")
    for result in (lease(host, "a"), host.evict(name=NAME), host.evict(name=NAME, run_id="a")):
        assert result.failed and f"rm -- {path}" in result.json["msg"], result.json
        assert not sent(result)
    assert host.alive([server.leader.pid])
    path.unlink()
    assert not lease(host, "a").failed


def test_a_state_directory_that_can_not_be_written(host: Host) -> None:
    mounted = host.ns.directory / "readonly"
    mounted.mkdir()
    host.ns.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(mounted)], 10).check()
    result = lease(host, "a", state_dir=str(mounted / "state"))
    assert result.failed and "Read-only file system" in result.json["msg"] and str(mounted) in result.json["msg"]
    refused = host.evict(name=NAME, run_id="a", state_dir=str(mounted / "state"))
    assert refused.failed and "no longer ours" in refused.json["msg"]
    by_hand = host.evict(name=NAME, state_dir=str(mounted / "state"))
    assert not by_hand.failed, by_hand.json  # nobody can hold it there


def test_check_mode_writes_nothing_and_says_who_holds_it(host: Host) -> None:
    server = recorded(host)
    values = {"name": NAME, "state_dir": str(host.state_dir), "run_id": "b"}
    free = run_module("server_lease", values, 60, ns=host.ns, check=True)
    assert free.json["changed"] and free.json["holder"] is None
    assert not (host.state_dir / NAME / "lease.json").exists()
    assert not lease(host, "a", operator="alice").failed
    before = stored(host)
    held = run_module("server_lease", {**values, "wait_s": 30}, 60, ns=host.ns, check=True)
    assert not held.failed and held.json["holder"]["operator"] == "alice" and held.json["waited_s"] == 0
    planned = host.evict(name=NAME, run_id="b", check=True)
    assert planned.json["verdict"] == "planned" and stored(host) == before and host.alive([server.leader.pid])


def test_a_clock_that_jumps_breaks_nothing(host: Host) -> None:
    """The lease of a run is seen the same by a module whose time of day is a year off."""
    assert not lease(host, "a").failed
    change(host, taken_at=1.0, renewed_at=2.0, expires_at=62.0)  # what it looks like when the clock was set forward
    assert lease(host, "b").failed
    change(host, taken_at=4e9, renewed_at=4e9, expires_at=4e9 + 60)  # and back
    assert lease(host, "b").failed
    change(host, expires_since_boot=stored(host)["renewed_since_boot"])
    assert not lease(host, "b").failed
    change(host, boot_id="another-boot", pid=os.getpid(), start_ticks=1)
    taken = lease(host, "c")
    assert not taken.failed and "earlier boot" in taken.json["broken"]["why"]


def test_the_files_are_the_owners_alone_to_change(host: Host) -> None:
    assert not lease(host, "a").failed
    folder = Path(host.state_dir / NAME)
    modes = {name: os.stat(folder / name).st_mode & 0o777 for name in sorted(os.listdir(folder))}
    assert modes == {".lease.lock": 0o600, "launches": 0o711, "lease.json": 0o644}
