# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""server_launch, server_info and server_ready on a stand-in server, each in a PID namespace of its own."""

from __future__ import annotations

import json
import os
import stat
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.modules import ModuleResult, run_module
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.standin import STANDIN, start_standin
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

pytestmark = pytest.mark.ns

KEY = "sk-launch-Secret-1"
PORT = 30000


class Site:
    """One server's arguments and state in one namespace."""

    def __init__(self, ns: Namespace, tmp_path: Path) -> None:
        self.ns = ns
        self.state = tmp_path / "state"
        self.model = tmp_path / "model"
        self.model.mkdir()

    def arguments(self, *, faults: t.Mapping[str, str] | None = None, **changes: t.Any) -> dict[str, t.Any]:
        flags = {"model_path": str(self.model), "device": "cpu", **changes.pop("flags", {})}
        environment = {
            "PYTHONPATH": str(STANDIN),
            **{f"SGLANG_STANDIN_{name}": value for name, value in (faults or {}).items()},
            **changes.pop("environment", {}),
        }
        return {
            "name": "main",
            "python": sys.executable,
            "user": "root",
            "launcher": "detached",
            "state_dir": str(self.state),
            "port": PORT,
            "flags": flags,
            "environment": environment,
            **changes,
        }

    def launch(self, *, check: bool = False, diff: bool = False, **changes: t.Any) -> ModuleResult:
        arguments = self.arguments(**changes)
        return run_module("server_launch", arguments, 60, ns=self.ns, check=check, diff=diff)

    def started(self, **changes: t.Any) -> ModuleResult:
        result = self.launch(**changes)
        assert not result.failed, result.json
        return result

    def ready(self, **changes: t.Any) -> ModuleResult:
        arguments = {"name": "main", "state_dir": str(self.state), "deadline_s": 40, **changes}
        return run_module("server_ready", arguments, 120, ns=self.ns)

    def kill_all(self) -> None:
        """End everything in the namespace, also children that are still importing and outlive their leader, and what
        a server that starts makes meanwhile."""

        def ended() -> bool:
            pids = [str(pid) for pid, _ticks in self.ns.living()]
            if pids:
                self.ns.run(["kill", "-KILL", *pids], 5)
            return not self.ns.living()

        wait_for("everything gone", ended, 15)

    def info(self, **changes: t.Any) -> ModuleResult:
        arguments = {"state_dir": str(self.state), "expected_gpus": 0, **changes}
        return run_module("server_info", arguments, 120, ns=self.ns)

    def record(self) -> dict[str, t.Any]:
        value = json.loads((self.state / "main" / "current.json").read_text())
        assert isinstance(value, dict)
        return value


@pytest.fixture
def site(ns: Namespace, tmp_path: Path) -> Site:
    return Site(ns, tmp_path)


def mode_of(path: Path | str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_server_is_started_proved_and_recorded(site: Site) -> None:
    launched = site.started(api_key=KEY, flags={"reasoning_parser": "kimi_k2", "tp_size": 2})
    result = launched.json
    assert result["changed"] is True
    assert site.ns.start_ticks(result["pid"]) == result["start_ticks"]
    ready = site.ready(api_key=KEY)
    assert not ready.failed, ready.json
    answer = ready.json
    assert (answer["ready"], answer["verdict"], answer["phase"], answer["error"]) == (True, "ready", "ready", None)
    assert answer["pid"] == answer["port_owner"]["pid"] == result["pid"]
    assert [(row["dp_rank"], row["count"], row["problem"]) for row in answer["tokens"]] == [(0, 4, None)]
    assert answer["reasoning"]["verdict"] == "separated"
    record = site.record()
    assert (record["state"], record["pid"], record["sid"]) == ("started", result["pid"], result["pid"])
    # It outlives the one who started it: nobody of the module's session is left, and its parent is process 1.
    status = (site.ns.proc / str(result["pid"]) / "status").read_text()
    assert "\nPPid:\t1\n" in status


def test_no_secret_on_the_command_line_in_results_or_in_the_record(site: Site) -> None:
    launched = site.started(
        diff=True, api_key=KEY, admin_api_key=KEY + "-admin", secret_environment={"HF_TOKEN": "hf-Secret-2"}
    )
    ready = site.ready(api_key=KEY)
    assert not ready.failed, ready.json
    info = site.info(api_key=KEY)
    assert not info.failed, info.json
    current = (site.state / "main" / "current.json").read_text()
    commands = "\n".join(site.ns.titles().values())
    for text in (json.dumps(launched.json), json.dumps(ready.json), json.dumps(info.json), current, commands):
        assert KEY not in text
        assert "hf-Secret-2" not in text
    folder = Path(launched.json["record"]["config"]).parent
    assert KEY in (folder / "config.yaml").read_text()
    assert {path.name: mode_of(path) for path in folder.iterdir()} == {
        **dict.fromkeys(
            ("config.yaml", "env", "record.json", "request.json", "server.log", "summary.txt"),
            0o600,
        )
    }
    assert mode_of(folder) == 0o710
    # The raw log does hold it, since SGLang prints it: that is why it is 0600.
    assert KEY in (folder / "server.log").read_text()


def test_the_environment_is_made_from_scratch(site: Site) -> None:
    arguments = site.arguments(environment={"NCCL_DEBUG": "INFO"})
    result = run_module("server_launch", arguments, 60, ns=site.ns, env={"LEAKED_IN": "yes", "LD_LIBRARY_PATH": "/x"})
    assert not result.failed, result.json
    data = (site.ns.proc / str(result.json["pid"]) / "environ").read_bytes()
    found = dict(word.split("=", 1) for word in data.decode().split("\0") if word)
    assert found["NCCL_DEBUG"] == "INFO"
    assert set(found) == {"PATH", "HOME", "USER", "LOGNAME", "LANG", "PYTHONPATH", "NCCL_DEBUG"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python": "/nowhere/python"}, ["python: /nowhere/python is missing"]),
        ({"python": "/etc/passwd"}, ["/etc/passwd is not executable"]),
        ({"python": "python3"}, ["absolute path"]),
        ({"user": "nobody-such"}, ["user: 'nobody-such' does not exist"]),
        ({"user": None}, ["user is missing"]),
        ({"group": "no-such-group"}, ["group: 'no-such-group'"]),
        ({"flags": {"model_path": "/nowhere/model"}}, ["model_path: /nowhere/model is missing"]),
        ({"launcher": "systemd"}, ["systemd does not run here"]),
        ({"flags": {"config": "f.yaml"}}, ["'config' is not taken"]),
        ({"flags": {"api_key": "x"}}, ["'api-key' is a secret"]),
        ({"flags": {"port": 1}}, ["flags: port is 1"]),
        ({"environment": {"A": True}}, ["environment: A"]),
        ({"environment": {"A": "1\n2"}}, ["environment: A"]),
        ({"name": "../x"}, ["name of a server"]),
        ({"gpus": ["0"]}, ["gpus:", "0"]),
        ({"port": 70000}, ["port is 70000"]),
        ({"unit": "x"}, ["unit: 'x'"]),
        ({"log": "journal"}, ["log: only systemd"]),
        ({"workdir": "/nowhere"}, ["workdir: /nowhere is missing"]),
        ({"limit_memlock": "lots"}, ["limit_memlock"]),
    ],
)
def test_bad_input_is_one_error_before_anything_is_touched(
    site: Site, changes: dict[str, t.Any], words: list[str]
) -> None:
    before = site.ns.living()
    result = site.launch(**changes)
    assert result.failed
    for word in words:
        assert word in result.json["msg"]
    assert not site.state.exists()
    assert site.ns.living() == before


def test_check_mode_says_what_would_start_and_writes_nothing(site: Site) -> None:
    result = site.launch(check=True, diff=True, api_key=KEY)
    assert not result.failed, result.json
    assert (result.json["changed"], result.json["pid"], result.json["launch_id"]) == (True, None, None)
    assert result.json["diff"]["before"] == ""
    assert "model-path" in result.json["diff"]["after"]
    assert KEY not in json.dumps(result.json)
    assert not site.state.exists()
    assert site.ns.titles() == {}


def test_the_difference_to_the_launch_before_is_that_of_the_configuration(site: Site) -> None:
    site.started(flags={"tp_size": 1})
    site.kill_all()
    same = site.launch(check=True, diff=True, flags={"tp_size": 1})
    assert same.json["diff"]["before"] == same.json["diff"]["after"]
    assert same.json["config_changed"] is False
    other = site.launch(check=True, diff=True, flags={"tp_size": 2})
    before, after = (other.json["diff"][key].splitlines() for key in ("before", "after"))
    assert [line for line in after if line not in before] == ["tp-size: 2"]
    assert other.json["config_changed"] is True


def test_a_running_server_is_not_started_twice(site: Site) -> None:
    first = site.started()
    second = site.launch()
    assert second.failed
    assert f"pid {first.json['pid']}" in second.json["msg"]
    assert "gpu_evict" in second.json["msg"]
    assert site.record()["pid"] == first.json["pid"]


def test_a_launch_that_was_interrupted_is_found_by_its_configuration_file(site: Site) -> None:
    first = site.started()
    record = {**site.record(), "state": "starting", "pid": None, "start_ticks": None, "sid": None}
    (site.state / "main" / "current.json").write_text(json.dumps(record))
    second = site.launch()
    assert second.failed
    assert f"pid {first.json['pid']}" in second.json["msg"]
    ready = site.ready()
    assert (ready.json["ready"], ready.json["pid"]) == (True, first.json["pid"])


def test_a_launch_that_was_interrupted_before_the_start_is_no_obstacle(site: Site) -> None:
    site.started()
    site.kill_all()
    record = {**site.record(), "state": "starting", "pid": None, "start_ticks": None, "sid": None}
    (site.state / "main" / "current.json").write_text(json.dumps(record))
    second = site.started()
    assert second.json["launch_id"] != record["launch_id"]
    assert site.ready().json["ready"] is True


@pytest.mark.parametrize("user", ["nobody"])
def test_the_server_runs_as_its_user_and_reads_its_own_configuration(site: Site, tmp_path: Path, user: str) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/tmp"):
            os.chmod(folder, os.stat(folder).st_mode | stat.S_IXOTH | stat.S_IROTH) if "pytest" in str(folder) else None
    result = site.launch(user=user, python="/usr/bin/python3")
    assert not result.failed, result.json
    status = (site.ns.proc / str(result.json["pid"]) / "status").read_text()
    uids = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
    assert set(uids) == {"65534"}
    assert site.ready().json["ready"] is True


# --- readiness that fails ---------------------------------------------------------------------------------------------


def test_a_stale_server_on_the_port_is_named_at_once(site: Site) -> None:
    stale = start_standin(site.ns, port=PORT)
    site.started(faults={"LOAD_S": "60"})
    ready = site.ready()
    assert ready.failed
    assert ready.json["verdict"] == "failed"
    assert f"pid {stale.leader.pid}" in ready.json["error"]
    assert ready.json["seconds"] < 10


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cuda_oom", "out of GPU memory"),
        ("hicache", "HiCache does not fit"),
        ("nccl", "NCCL failed"),
        ("memory", "no GPU memory is left for the KV cache"),
        ("sigbus", "/dev/shm"),
        ("killed", "exit code: -9"),
    ],
)
def test_a_server_that_died_fails_early_with_its_own_error(site: Site, fault: str, words: str) -> None:
    launched = site.started(faults={"CRASH": fault})
    ready = site.ready()
    assert ready.failed
    assert ready.json["verdict"] == "failed"
    assert words in ready.json["error"]
    assert ready.json["log_tail"]
    assert launched.json["pid"] not in site.ns.pids()


def test_a_refused_flag_is_named(site: Site) -> None:
    site.started(flags={"no_such_option": 3})
    ready = site.ready()
    assert ready.failed
    assert "--no-such-option" in ready.json["error"]


def test_an_interpreter_without_sglang_is_named(site: Site) -> None:
    site.started(environment={"PYTHONPATH": "/nowhere"})
    ready = site.ready()
    assert ready.failed
    assert "No module named" in ready.json["error"]


def test_loading_beyond_the_deadline_is_still_starting_with_the_phase(site: Site) -> None:
    site.started(faults={"LOAD_S": "120"})
    ready = site.ready(deadline_s=3)
    assert ready.failed
    assert ready.json["verdict"] == "starting"
    assert ready.json["phase"] == "weights"
    assert "did not listen" in ready.json["error"]


def test_headroom_by_the_log_is_judged_where_a_gpu_is_used(site: Site) -> None:
    site.started(flags={"device": "cuda"}, faults={"AVAILABLE_GPU_MEM_GB": "0.82"})
    ready = site.ready()
    assert ready.failed
    # Here is no GPU that anybody could look at, which is a finding of its own.
    blind, little = ready.json["proof"]["problems"]
    assert "can't be seen from here" in blind
    assert "839 MiB" in little
    assert ready.json["headroom_mib"] == 839
    enough = site.ready(min_gpu_headroom_mib=512)
    assert enough.json["proof"]["problems"] == [blind]


def test_an_asked_for_reasoning_parser_that_does_not_work(site: Site) -> None:
    site.started()
    ready = site.ready(reasoning_parser="kimi_k2")
    assert ready.failed
    assert "reasoning_content is None" in ready.json["error"]
    assert ready.json["reasoning"]["verdict"] == "missing"


def test_a_wrong_key_is_named(site: Site) -> None:
    site.started(api_key=KEY)
    ready = site.ready(api_key="sk-wrong")
    assert ready.failed
    assert "API key" in ready.json["error"]


def test_no_launch_is_no_wait(site: Site) -> None:
    ready = site.ready()
    assert ready.failed
    assert "no launch of 'main'" in ready.json["msg"]


# --- server_info ------------------------------------------------------------------------------------------------------


def only(result: ModuleResult) -> dict[str, t.Any]:
    assert not result.failed, result.json
    assert len(result.json["servers"]) == 1, result.json["servers"]
    server = result.json["servers"][0]
    assert isinstance(server, dict)
    return server


def test_a_server_of_ours_is_shown_as_it_was_launched(site: Site) -> None:
    launched = site.started(api_key=KEY, flags={"tp_size": 2, "dp": 2}, environment={"NCCL_DEBUG": "INFO"})
    assert site.ready(api_key=KEY).json["ready"] is True
    server = only(site.info(api_key=KEY))
    assert (server["name"], server["launched_by_us"], server["state"]) == ("main", True, "serving")
    assert server["leader"]["pid"] == launched.json["pid"]
    assert server["flags"] == {
        "model-path": str(site.model),
        "device": "cpu",
        "tp-size": 2,
        "dp-size": 2,
        "port": PORT,
        "api-key": "********",
    }
    assert server["environment"] == {"NCCL_DEBUG": "INFO", "PYTHONPATH": str(STANDIN)}
    assert (server["version"], server["port"], server["listening"]) == ("0.5.15", PORT, True)
    assert server["resolved"]["version"] == "0.5.15"
    assert (server["health"]["status"], server["health"]["code"]) == ("ok", 200)
    roles = sorted((row["role"], tuple(sorted(row["ranks"].items()))) for row in server["tree"])
    assert [role for role in roles if role[0] == "scheduler"] == [
        ("scheduler", (("DP", dp), ("TP", tp))) for dp in (0, 1) for tp in (0, 1)
    ]
    assert {"leader", "detokenizer", "data_parallel_controller"} <= {role for role, _ranks in roles}
    assert KEY not in json.dumps(server)


def test_servers_of_others_and_editors(site: Site) -> None:
    start_standin(site.ns, "--tp", "2", port=31000, env={"HF_TOKEN": "hf-Secret-3"})
    start_standin(site.ns, port=32000, serve=True)
    site.ns.popen(["sh", "-c", "sleep 300; : python -m sglang.launch_server --port 1"], detached=True)
    result = site.info()
    assert [server["port"] for server in result.json["servers"]] == [31000, 32000]
    assert {server["launched_by_us"] for server in result.json["servers"]} == {False}
    assert result.json["servers"][0]["flags"]["tp-size"] == "2"
    assert result.json["servers"][0]["environment"]["HF_TOKEN"] == "********"
    assert only(site.info(port=32000))["port"] == 32000


def test_wanted_is_compared_by_meaning(site: Site) -> None:
    site.started(
        flags={"mem_fraction_static": 0.9, "enable_metrics": True},
        environment={"NCCL_DEBUG": "INFO"},
        secret_environment={"HTTPS_PROXY": "http://10.0.0.1:3128"},  # no secret by its name
    )
    flags = {"model": str(site.model), "device": "cpu", "mem-fraction-static": "0.90", "enable_metrics": True}
    environment = site.arguments(environment={"NCCL_DEBUG": "INFO"})["environment"]
    wanted = {"flags": flags, "environment": environment, "gpus": []}
    server = only(site.info(name="main", port=PORT, probe=False, wanted=wanted))
    assert (server["matches"], server["differences"]) == (True, [])
    wanted = {"flags": {**flags, "mem-fraction-static": 0.8, "enable_metrics": False}, "environment": {}}
    server = only(site.info(name="main", probe=False, wanted=wanted))
    assert server["matches"] is False
    assert server["differences"] == [
        {"item": "flags.enable-metrics", "wanted": None, "found": True},
        {"item": "flags.mem-fraction-static", "wanted": 0.8, "found": 0.9},
        {"item": "environment.NCCL_DEBUG", "wanted": None, "found": "INFO"},
        {"item": "environment.PYTHONPATH", "wanted": None, "found": str(STANDIN)},
    ]


def test_a_configuration_that_cannot_be_read_is_unknown_not_equal(site: Site) -> None:
    launched = site.started()
    assert site.ready().json["ready"] is True
    Path(launched.json["record"]["config"]).unlink()
    server = only(site.info(name="main", probe=False, wanted={"flags": {}}))
    assert (server["matches"], server["flags_complete"], server["port"]) == (None, False, None)


def test_nothing_is_asked_of_a_hung_server_but_its_health(site: Site) -> None:
    standin = start_standin(site.ns, faults={"HEALTH_TIMEOUT_S": "6"})
    scheduler = standin.find("sglang::scheduler")
    site.ns.run(["kill", "-STOP", str(scheduler)], 5).check()
    server = only(site.info())
    assert (server["state"], server["health"]["code"], server["resolved"]) == ("hung", 503, None)
    asked = [line for line in standin.text().splitlines() if "HTTP/1.1" in line]
    assert all("/server_info" not in line for line in asked)
    server = only(site.info(probe=False))
    assert (server["state"], server["health"]) == ("listening", None)
    assert [line for line in standin.text().splitlines() if "HTTP/1.1" in line] == asked


def test_a_record_without_a_process_is_told(site: Site) -> None:
    launched = site.started()
    assert site.ready().json["ready"] is True
    site.kill_all()
    result = site.info()
    assert result.json["servers"] == []
    assert [row["problem"] for row in result.json["records"]] == ["its process does not live"]
    assert result.json["records"][0]["launch_id"] == launched.json["launch_id"]


def test_a_server_that_spins_and_never_listens_is_told_with_its_phase(site: Site) -> None:
    """The start-up part of case 9: busy for ever, nothing on the port; the wait ends at its deadline and says so."""
    site.started(faults={"HANG": "spin"})
    ready = site.ready(deadline_s=4)
    assert (ready.json["verdict"], ready.json["port_owner"]) == ("starting", None)
    assert "did not listen" in ready.json["error"]
