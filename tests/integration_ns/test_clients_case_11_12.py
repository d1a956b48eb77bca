# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cases 11 and 12: a client keeps sending while the server goes, and requests are in flight when it does."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.modules import (
    ModuleResult,
    module_argv,
    module_env,
    parse_result,
    run_module,
)
from ansible_collections.cleanslate.sglang.tests.harness.namespace import NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.standin import Answer, Standin
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import (
    DEADLINES,
    Host,
    plain_signals,
    rungs,
    sent,
)

pytestmark = pytest.mark.ns
PROGRAM = "run_inference.py"


@dataclasses.dataclass
class Sender:
    """A client at work."""

    host: Host
    process: NsProcess
    pid_file: Path
    report: Path

    def counts(self) -> dict[str, int]:
        found = json.loads(self.report.read_text())
        assert isinstance(found, dict)
        return found

    def sends(self) -> None:
        """Until it has got some more answers."""
        before = self.counts()["answered"] if self.report.exists() else 0
        wait_for("answers", lambda: self.report.exists() and self.counts()["answered"] > before + 2, 20)

    def state(self) -> str:
        text = (self.host.ns.proc / str(self.process.pid) / "stat").read_text()
        return text.rpartition(")")[2].split()[0]

    def declared(self, **changes: t.Any) -> dict[str, t.Any]:
        return {"name": "load", "pid_file": str(self.pid_file), "program": PROGRAM, **changes}


def sender(host: Host, *words: str) -> Sender:
    folder = host.ns.directory
    pid_file, report = folder / "load.pid", folder / "load.json"
    process = host.fixture(
        PROGRAM, "--port", "30000", "--pid-file", str(pid_file), "--report", str(report), *words, output=folder / "load"
    )
    wait_for("the pid file", lambda: pid_file.exists() and pid_file.read_text().endswith("\n"), 20)
    os.chmod(pid_file, 0o644)
    return Sender(host, process, pid_file, report)


def hold(host: Host, *clients: dict[str, t.Any], trace: bool = True, **more: t.Any) -> ModuleResult:
    return run_hold(host, trace=trace, clients=list(clients), **more)


def run_hold(host: Host, *, trace: bool = True, check: bool = False, **arguments: t.Any) -> ModuleResult:
    return run_module("client_hold", arguments, 60, ns=host.ns, trace=trace, check=check)


def results(result: ModuleResult) -> list[str]:
    return [row["result"] for row in result.json["clients"]]


# --- case 11 ---


def test_a_client_that_was_held_loses_no_answer_and_comes_back_by_choice_only(host: Host) -> None:
    server = host.server(gpus=(0,), faults={"TOKEN_S": "0.01"})
    load = sender(host)
    load.sends()
    held = hold(host, load.declared(), deadline_s=15)
    assert not held.failed, held.json
    assert (held.json["verdict"], results(held)) == ("held", ["held"])
    assert sent(held) == {(load.process.pid, "SIGTERM")} and not plain_signals(held)
    evicted = host.evict(port=30000, drained_clients=True)
    assert not evicted.failed, evicted.json
    assert rungs(evicted)[0] == "drain"
    drained = evicted.json["drain"]
    assert (drained["asked"], drained["cut_off"], drained["source"]) == (True, 0, "loads"), drained
    assert load.counts()["failed"] == 0
    host.gone([server.leader.pid])
    released = run_hold(host, state="released", held=held.json["held"])
    assert results(released) == ["left"] and "start it yourself" in released.json["clients"][0]["detail"]
    assert not sent(released) and not host.alive([load.process.pid])


def test_a_client_that_nobody_holds_is_cut_off_and_that_is_counted(host: Host) -> None:
    host.server(gpus=(0,), faults={"TOKEN_S": "0.05", "IGNORE_TERM": "1"})
    load = sender(host)
    load.sends()
    result = host.evict(port=30000, deadlines={**DEADLINES, "term": 1})
    assert not result.failed, result.json
    drained = result.json["drain"]
    assert not drained["asked"] and drained["source"] == "connections" and drained["waited_s"] == 0
    assert drained["cut_off"] == 3, drained
    assert "drain" not in rungs(result)
    assert host.alive([load.process.pid])
    assert load.process.pid not in {pid for pid, _unused in sent(result)}
    wait_for("failures", lambda: load.counts()["failed"] >= 3, 20)


def test_a_paused_client_goes_on_where_it_was(host: Host) -> None:
    host.server(gpus=(0,), faults={"TOKEN_S": "0.01"})
    load = sender(host)
    load.sends()
    held = hold(host, load.declared(action="pause"))
    assert not held.failed, held.json
    assert load.state() == "T" and sent(held) == {(load.process.pid, "SIGSTOP")}
    again = hold(host, load.declared(action="pause"))
    assert results(again) == ["paused"] and not again.json["held"] and not sent(again)
    released = run_hold(host, state="released", held=held.json["held"])
    assert (released.json["verdict"], results(released)) == ("released", ["released"])
    assert sent(released) == {(load.process.pid, "SIGCONT")}
    load.sends()
    assert load.counts()["failed"] == 0


def test_a_client_that_does_not_end_is_named_and_never_killed(host: Host) -> None:
    host.server(gpus=(0,))
    load = sender(host, "--deaf")
    held = hold(host, load.declared(), deadline_s=1.5)
    assert held.failed and held.json["verdict"] == "failed"
    assert results(held) == ["stayed"] and f"pid {load.process.pid}" in held.json["msg"]
    assert [row["name"] for row in held.json["held"]] == ["load"]
    assert sent(held) == {(load.process.pid, "SIGTERM")} and host.alive([load.process.pid])


def test_check_mode_says_who_would_be_held(host: Host) -> None:
    host.server(gpus=(0,))
    load = sender(host)
    result = run_hold(host, check=True, clients=[load.declared()])
    assert result.json["verdict"] == "planned" and result.json["changed"] and not result.json["held"]
    assert f"stop pid {load.process.pid}" in result.json["plan"][0]
    assert not sent(result) and load.state() != "T"
    seen = run_hold(host, state="looked", clients=[load.declared()])
    assert (seen.json["verdict"], results(seen), seen.json["changed"]) == ("looked", ["running"], False)


# --- who is not the client ---


def test_one_client_that_is_not_proved_leaves_all_alone(host: Host) -> None:
    host.server(gpus=(0,))
    load = sender(host)
    other = host.ns.popen(["sleep", "600"], detached=True)
    path = host.ns.directory / "other.pid"
    path.write_text(str(other.pid))
    stranger = {"name": "other", "pid_file": str(path), "program": "loadgen"}
    result = hold(host, load.declared(), stranger)
    assert result.failed and sorted(results(result)) == ["not_asked", "refused"]
    assert f"pid {other.pid} (sleep)" in result.json["msg"] and "does not run loadgen" in result.json["msg"]
    assert not sent(result) and host.alive([other.pid, load.process.pid])


def test_a_pid_that_was_used_again_is_left_alone(host: Host) -> None:
    """The same program, started long after the pid file was written."""
    host.server(gpus=(0,))
    load = sender(host)
    os.utime(load.pid_file, (1_000_000_000, 1_000_000_000))
    result = hold(host, load.declared())
    assert result.failed and results(result) == ["refused"] and "the pid was used again" in result.json["msg"]
    assert not sent(result) and host.alive([load.process.pid])


@pytest.mark.parametrize("what", ["ours", "init", "server", "protected"])
def test_who_is_never_a_client(host: Host, what: str) -> None:
    server = host.server(gpus=(0,))
    load = sender(host)
    path = host.ns.directory / "other.pid"
    pids = {"init": 1, "server": server.leader.pid, "protected": load.process.pid}
    programs = {"ours": "run_module.py", "init": "init.py", "server": "sglang.launch_server", "protected": PROGRAM}
    # For ours: a shell that becomes the module writes its own pid first, so that the pid file names the module.
    path.write_text(str(pids.get(what, 0)))
    os.chmod(path, 0o644)
    client = {"name": "x", "pid_file": str(path), "program": programs[what]}
    protect = [PROGRAM, str(load.process.pid)] if what == "protected" else []
    result = _held_by_itself(host, path, client) if what == "ours" else hold(host, client, protect=protect)
    assert result.failed and results(result) == ["refused"], result.json
    words = {"ours": "this run itself", "init": "pid 1", "server": "SGLang server", "protected": "by the operator"}
    assert words[what] in result.json["msg"]
    assert not sent(result)


def _held_by_itself(host: Host, path: Path, client: dict[str, t.Any]) -> ModuleResult:
    argv = ["sh", "-c", f'echo $$ >"{path}"; exec "$@"', "x", *module_argv("client_hold")]
    done = host.ns.run(argv, 60, module_env(), stdin=json.dumps({"clients": [client]}))
    return ModuleResult(done.rc, parse_result(done.stdout, done.stderr), done.stderr)


def test_what_was_held_is_not_resumed_under_another_start_time(host: Host) -> None:
    """Between holding and letting go the paused process ended, and its pid is somebody else's."""
    other = host.ns.popen(["sleep", "600"], detached=True)
    host.kill(other.pid, signal.SIGSTOP)
    entry = {"name": "load", "kind": "process", "action": "pause", "pid_file": "/p", "program": "p", "how": "signal"}
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    ticks = host.ns.start_ticks(other.pid)
    assert ticks is not None
    stale = {**entry, "boot_id": boot_id, "processes": [[other.pid, ticks - 1]]}
    result = run_hold(host, state="released", held=[stale])
    assert results(result) == ["absent"] and not sent(result)
    booted = {**entry, "boot_id": "another", "processes": [[other.pid, ticks]]}
    result = run_hold(host, state="released", held=[booted])
    assert results(result) == ["absent"] and not sent(result)


# --- case 12 ---


class Request:
    """One long request in a thread of its own."""

    def __init__(self, server: Standin, tokens: int) -> None:
        self.answer: t.Optional[Answer] = None
        self.error: t.Optional[BaseException] = None
        body = {"text": "x", "sampling_params": {"max_new_tokens": tokens}}

        def send() -> None:
            try:
                self.answer = server.request("POST", "/generate", body, deadline_s=60)
            except BaseException as error:  # told by the test
                self.error = error

        self.thread = threading.Thread(target=send)
        self.thread.start()
        wait_for("the request in flight", lambda: _running(server) > 0, 20)


def _running(server: Standin) -> int:
    loads = server.request("GET", "/v1/loads").json["loads"]
    return sum(row["num_running_reqs"] for row in loads)


@pytest.mark.parametrize("how", ["auto", "loads", "connections"])
def test_requests_in_flight_are_waited_for(host: Host, how: str) -> None:
    server = host.server(gpus=(0,), faults={"TOKEN_S": "0.1"})
    request = Request(server, 120)  # it outlives the start of a module on a busy machine
    result = host.evict(port=30000, drain={"in_flight": how}, deadlines={**DEADLINES, "drain": 60})
    request.thread.join(60)
    assert not result.failed, result.json
    assert request.answer is not None and request.answer.status == 200, request.error
    drained = result.json["drain"]
    assert drained["in_flight_before"] >= 1 and drained["in_flight_after"] == 0 and drained["cut_off"] == 0, drained
    assert drained["source"] == ("connections" if how == "connections" else "loads") and not drained["asked"]
    assert 0 < drained["waited_s"] < 60 and rungs(result)[0] == "drain"


def test_the_wait_is_bounded_and_what_is_cut_off_is_counted(host: Host) -> None:
    server = host.server(gpus=(0,), faults={"TOKEN_S": "0.5"})
    request = Request(server, 200)
    deadlines = {**DEADLINES, "drain": 1.5, "term": 1}
    result = host.evict(port=30000, drained_clients=True, deadlines=deadlines)
    request.thread.join(30)
    assert not result.failed, result.json
    drained = result.json["drain"]
    assert (drained["cut_off"], drained["in_flight_after"], drained["source"]) == (1, 1, "loads"), drained
    assert 1.5 <= drained["waited_s"] < 6 and "when the 1.5 s were over" in drained["note"]
    assert request.answer is None or request.answer.status != 200


def test_a_server_that_hangs_is_not_waited_for(host: Host) -> None:
    server = host.server(gpus=(0,))
    host.kill(server.find("sglang::scheduler"), signal.SIGSTOP)
    result = host.evict(port=30000, drained_clients=True, deadlines={**DEADLINES, "drain": 60})
    drained = result.json["drain"]
    assert drained["waited_s"] == 0 and "state T" in drained["note"] and "drain" not in rungs(result)


def test_an_old_server_is_not_asked(host: Host) -> None:
    """Before 0.5.13 /v1/loads goes to the scheduler."""
    server = host.server(gpus=(0,), env={"PYTHONPATH": str(_old_version(host))})
    result = host.evict(port=30000, drained_clients=True)
    assert not result.failed, result.json
    assert result.json["drain"]["source"] == "connections" and "0.5.12" in result.json["drain"]["note"]
    assert "/v1/loads" not in server.text()


def _old_version(host: Host) -> Path:
    """The stand-in under another version's name."""
    folder = host.ns.directory / "old"
    folder.mkdir()
    double = ROOT / "tests" / "doubles" / "sglang_standin"
    (folder / "sglang").symlink_to(double / "sglang")
    (folder / "sglang-0.5.12.dist-info").mkdir()
    (folder / "sglang-0.5.12.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.12\n")
    return folder


def test_a_server_with_a_key_is_asked_with_its_own_and_the_key_is_nowhere(host: Host) -> None:
    config = host.ns.directory / "config.yaml"
    config.write_text("api-key: sesame-1234\n")
    server = host.server("--config", str(config), gpus=(0,))
    host.record(server, config=str(config))
    result = host.evict(name="main", drained_clients=True)
    assert not result.failed, result.json
    assert result.json["drain"]["source"] == "loads", result.json["drain"]
    assert "sesame" not in json.dumps(result.json) + result.stderr


def test_check_mode_tells_the_wait(host: Host) -> None:
    host.server(gpus=(0,))
    result = host.evict(port=30000, drained_clients=True, check=True)
    assert result.json["plan"][0]["rung"] == "drain"
    assert not sent(result)
