# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in behaves as the real SGLang 0.5.15 was seen to: processes, signals, endpoints, leftovers, failures."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.devices import loop_nodes, memory_nodes, visitor_nodes
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.standin import Standin, start_standin
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

pytestmark = pytest.mark.ns
KEY = "sk-test-key"


def kill(ns: Namespace, pid: int, number: signal.Signals) -> None:
    ns.call(lambda: os.kill(pid, number))


def shm(ns: Namespace, prefix: str) -> list[str]:
    return sorted(path.name for path in (ns.root / "dev" / "shm").iterdir() if path.name.startswith(prefix))


def tree_is(server: Standin, *titles: str) -> None:
    names = [name for name in server.tree().values() if "resource_tracker" not in name]
    assert sorted(name for name in names if name.startswith("sglang::")) == sorted(titles)
    assert len(names) == len(titles) + 1


@pytest.mark.parametrize("serve", [False, True], ids=["module", "serve"])
def test_tree_and_titles(ns: Namespace, serve: bool) -> None:
    server = start_standin(ns, "--tp", "2", serve=serve)
    tree_is(server, "sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer")
    assert "launch_server" in server.tree()[server.leader.pid] or "sglang serve" in server.tree()[server.leader.pid]
    scheduler = ns.proc / str(server.find("sglang::scheduler_TP0"))
    assert (scheduler / "comm").read_text() == "sglang::schedul\n"
    assert b"SGLANG" not in (scheduler / "environ").read_bytes()
    assert b"PYTHONPATH" in (ns.proc / str(server.leader.pid) / "environ").read_bytes()


def test_one_rank_has_no_number_and_data_parallel_ranks_are_grandchildren(ns: Namespace) -> None:
    tree_is(start_standin(ns), "sglang::scheduler", "sglang::detokenizer")
    server = start_standin(ns, "--dp-size", "2", port=30001)
    ranks = ["sglang::scheduler_DP0", "sglang::scheduler_DP1"]
    tree_is(server, "sglang::data_parallel_controller", *ranks, "sglang::detokenizer")
    controller = server.find("sglang::data_parallel_controller")
    for rank in ranks:
        status = (ns.proc / str(server.find(rank)) / "status").read_text()
        assert f"\nPPid:\t{controller}\n" in status


def test_leader_killed_in_the_spawn_phase_leaves_children_that_load_on(ns: Namespace) -> None:
    server = start_standin(ns, faults={"SPAWN_S": "1.5"}, wait=False)

    def spawned() -> list[int]:
        return [pid for pid, name in ns.titles().items() if "spawn_main" in name and "sglang" not in name]

    wait_for("two spawned children", lambda: len(spawned()) == 2)
    # They must have read what their parent sends them at birth.
    wait_for("both in the spawn phase's sleep", lambda: all(_asleep(ns, pid) for pid in spawned()))
    orphans = spawned()
    kill(ns, server.leader.pid, signal.SIGKILL)
    wait_for(
        "titles", lambda: [ns.titles().get(pid) for pid in orphans] == ["sglang::scheduler", "sglang::detokenizer"]
    )
    for pid in orphans:
        assert "\nPPid:\t1\n" in (ns.proc / str(pid) / "status").read_text()


def _asleep(ns: Namespace, pid: int) -> bool:
    """In time.sleep, and not in the read of what the parent sends a spawned child at birth."""
    # wchan, since system call numbers differ by architecture. Python 3.11 uses clock_nanosleep, older ones select.
    wchan = (ns.proc / str(pid) / "wchan").read_text()
    return "nanosleep" in wchan or wchan in ("poll_schedule_timeout", "do_select", "core_sys_select")


def test_leader_killed_later_takes_its_children_along(ns: Namespace) -> None:
    server = start_standin(ns, "--tp-size", "2")
    pids = set(server.tree())
    assert len(shm(ns, "sgl_shm_mq_")) == 1
    kill(ns, server.leader.pid, signal.SIGKILL)
    wait_for("tree gone", lambda: not pids & ns.pids())
    assert len(shm(ns, "sgl_shm_mq_")) == 1
    assert len(shm(ns, "sglang_loads_")) == 1


def test_clean_stop_ends_by_sigkill_and_leaves_the_loads_segment_and_sockets(ns: Namespace) -> None:
    # Not detached, because a detached one's exit status goes to process 1.
    server = start_standin(ns, detached=False, env={"TMPDIR": "/run"})
    pids = set(server.tree())
    kill(ns, server.leader.pid, signal.SIGTERM)
    assert server.leader.wait() == -signal.SIGKILL
    wait_for("tree gone", lambda: not pids & ns.pids())
    assert "Gracefully exiting... Remaining number of requests 0" in server.text()
    assert shm(ns, "sgl_shm_mq_") == []
    (loads,) = shm(ns, "sglang_loads_")
    assert (ns.root / "dev" / "shm" / loads).stat().st_size == 12 + 16 * 1024
    left = [path for path in (ns.root / "run").iterdir() if path.name.startswith("tmp")]
    assert (sum(path.is_socket() for path in left), sum(path.is_file() for path in left)) == (3, 2)


def test_sigterm_before_the_first_request_kills_the_leader_at_once(ns: Namespace) -> None:
    server = start_standin(ns, "--skip-server-warmup")
    pids = set(server.tree())
    kill(ns, server.leader.pid, signal.SIGTERM)
    wait_for("tree gone", lambda: not pids & ns.pids())
    assert "SIGTERM received" not in server.text()


def test_drain_waits_for_the_request_in_flight(ns: Namespace) -> None:
    server = start_standin(ns, faults={"TOKEN_S": "0.1"})
    answers: list[int] = []

    def ask() -> None:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 15}}
        answers.append(server.request("POST", "/generate", body, deadline_s=20).status)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for("in flight", lambda: _running(server) == [1])
    kill(ns, server.leader.pid, signal.SIGTERM)
    wait_for("draining", lambda: "Remaining number of requests 1" in server.text())
    assert server.request("GET", "/health").status == 503
    thread.join(20)
    assert answers == [200]
    server.leader.wait_gone()


def _running(server: Standin) -> list[int]:
    loads = server.request("GET", "/v1/loads").json["loads"]
    return [load["num_running_reqs"] for load in loads]


def test_ignored_sigterm(ns: Namespace) -> None:
    server = start_standin(ns, faults={"IGNORE_TERM": "1"})
    status = (ns.proc / str(server.leader.pid) / "status").read_text()
    ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    assert ignored & 1 << (signal.SIGTERM - 1)


def test_dead_scheduler_brings_the_server_down(ns: Namespace) -> None:
    server = start_standin(ns, "--tp-size", "2")
    pids = set(server.tree())
    kill(ns, server.find("sglang::scheduler_TP1"), signal.SIGKILL)
    wait_for("tree gone", lambda: not pids & ns.pids())
    assert "crashed with exit code -9. Triggering SIGQUIT for cleanup..." in server.text()


@pytest.mark.parametrize("by_hand", [True, False], ids=["killed", "switch"])
def test_dead_data_parallel_rank_goes_unnoticed(ns: Namespace, by_hand: bool) -> None:
    server = start_standin(
        ns, "--dp-size", "2", "--skip-server-warmup", faults={} if by_hand else {"DEAD_DP_RANK": "1"}
    )
    if by_hand:
        kill(ns, server.find("sglang::scheduler_DP1"), signal.SIGKILL)
    wait_for("one rank left", lambda: sum("scheduler" in name for name in server.tree().values()) == 1)
    assert server.request("GET", "/health").status == 200
    assert _generate(server, 0) == 0
    with pytest.raises(AssertionError, match="timed out"):
        _generate(server, 1, deadline_s=1)


def _generate(server: Standin, dp_rank: int, deadline_s: float = 20) -> int:
    body = {"text": "x", "routed_dp_rank": dp_rank, "sampling_params": {"max_new_tokens": 2}}
    return int(server.request("POST", "/generate", body, deadline_s=deadline_s).json["meta_info"]["dp_rank"])


def test_hung_scheduler_health_503_and_server_info_hangs(ns: Namespace) -> None:
    server = start_standin(ns, faults={"HEALTH_TIMEOUT_S": "0.5"})
    kill(ns, server.find("sglang::scheduler"), signal.SIGSTOP)
    assert server.request("GET", "/health").status == 503
    assert server.request("GET", "/model_info").status == 200
    assert server.request("GET", "/v1/loads").status == 200
    with pytest.raises(AssertionError, match="timed out"):
        server.request("GET", "/server_info", deadline_s=1)


def test_generation_hangs_while_health_is_200(ns: Namespace) -> None:
    server = start_standin(ns, faults={"HANG_AFTER": "1"})
    body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    assert server.request("POST", "/generate", body).status == 200
    with pytest.raises(AssertionError, match="timed out"):
        server.request("POST", "/generate", body, deadline_s=1)
    assert server.request("GET", "/health").status == 200


def test_health_is_503_until_warm(ns: Namespace) -> None:
    server = start_standin(ns, faults={"WARMUP_S": "300"}, wait=False)
    wait_for("port open", lambda: _port_open(server))
    assert server.request("GET", "/health").status == 503


def _port_open(server: Standin) -> bool:
    lines = (server.ns.proc / str(server.leader.pid) / "net" / "tcp").read_text().splitlines()[1:]
    return any(line.split()[1].endswith(f":{server.port:04X}") and line.split()[3] == "0A" for line in lines)


def test_key_guards_all_but_health_and_is_echoed_in_clear(ns: Namespace) -> None:
    server = start_standin(ns, "--api-key", KEY)
    assert server.request("GET", "/health").status == 200
    refused = server.request("GET", "/server_info")
    assert (refused.status, refused.json) == (401, {"error": "Unauthorized"})
    info = server.request("GET", "/server_info", key=KEY).json
    assert (info["api_key"], info["version"], info["status"]) == (KEY, "0.5.15", "ready")
    assert f"api_key='{KEY}'" in server.text()
    # Each part below internal_states repeats the options.
    assert info["internal_states"][0]["api_key"] == KEY


def test_reasoning_goes_apart_only_with_a_parser(ns: Namespace) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    plain = start_standin(ns).request("POST", "/v1/chat/completions", body).json["choices"][0]["message"]
    assert plain["reasoning_content"] is None and plain["content"].startswith("<think>")
    server = start_standin(ns, "--reasoning-parser", "kimi_k2", port=30001)
    parsed = server.request("POST", "/v1/chat/completions", body).json["choices"][0]["message"]
    assert parsed["reasoning_content"] and "think>" not in parsed["content"]
    stream = server.request("POST", "/v1/chat/completions", {**body, "stream": True}).body
    assert "reasoning_content" in stream and stream.endswith("data: [DONE]\n\n")


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("parser", [True, False])
def test_a_call_is_taken_out_of_the_text_only_with_a_parser(ns: Namespace, parser: bool) -> None:
    flags = ("--tool-call-parser", "kimi_k2") if parser else ()
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": [TOOL], "tool_choice": "auto"}
    choice = start_standin(ns, *flags).request("POST", "/v1/chat/completions", body).json["choices"][0]
    message = choice["message"]
    if parser:
        assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        assert (choice["finish_reason"], message["content"]) == ("tool_calls", "")
    else:
        assert message["tool_calls"] is None
        assert "<|tool_call_begin|>functions.get_weather:0" in message["content"]


def test_every_nth_request_fails(ns: Namespace) -> None:
    server = start_standin(ns, faults={"FAIL_EVERY": "3"})
    body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    assert [server.request("POST", "/generate", body).status for _unused in range(6)] == [200, 200, 500] * 2


def test_a_later_node_has_schedulers_alone_and_says_200_whatever_happens(ns: Namespace) -> None:
    flags = ("--tp-size", "4", "--nnodes", "2", "--node-rank", "1")
    server = start_standin(ns, *flags, wait=False)
    server.wait_log("Dummy health check server started")
    tree_is(server, "sglang::scheduler_TP2", "sglang::scheduler_TP3")
    kill(ns, server.find("sglang::scheduler_TP3"), signal.SIGKILL)
    assert server.request("GET", "/health").status == 200
    assert server.request("GET", "/server_info").status == 404


def test_config_file_comes_before_the_command_line_and_one_word_is_ignored(ns: Namespace, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "tp-size: 2\nserved-model-name: from-file\nreasoning-parser: kimi_k2\ndisable-cuda-graph: false\n"
    )
    server = start_standin(ns, "--config", str(config), "--served-model-name", "from-line")
    info = server.request("GET", "/server_info").json
    assert (info["tp_size"], info["served_model_name"], info["reasoning_parser"]) == (2, "from-line", "kimi_k2")
    ignored = start_standin(ns, f"--config={config}", port=30001)
    assert ignored.request("GET", "/server_info").json["tp_size"] == 1


def test_bad_flag_ends_with_status_2(ns: Namespace) -> None:
    server = start_standin(ns, "--reasoning-parser", "kimi-k2", wait=False)
    server.leader.wait_gone()
    assert "invalid choice: 'kimi-k2'" in server.text()


def test_port_conflict(ns: Namespace) -> None:
    first = start_standin(ns)
    second = start_standin(ns, wait=False)
    second.leader.wait_gone(30)
    assert (
        "[Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use"
        in second.text()
    )
    assert first.request("GET", "/health").status == 200


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("model", "is not a local folder and is not a valid model identifier"),
        ("killed", "Rank 0 scheduler died during initialization (exit code: -9)"),
        ("sigbus", "Rank 0 scheduler died during initialization (exit code: -7)"),
        ("nccl", "torch.distributed.DistBackendError: NCCL error in:"),
        ("cuda_oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"),
        ("unbalanced", "The memory capacity is unbalanced. Some GPUs may be occupied by other processes."),
        ("memory", "Not enough memory. Please try to increase --mem-fraction-static."),
        ("hicache", "Not enough host memory available. Requesting 300.00 GB but only have"),
        ("graph_oom", "Capture cuda graph failed: torch.OutOfMemoryError: CUDA out of memory."),
        ("warmup", "Initialization failed. warmup error:"),
    ],
)
def test_start_that_fails(ns: Namespace, kind: str, text: str) -> None:
    server = start_standin(ns, "--tp-size", "2", faults={"CRASH": kind}, wait=False)
    server.leader.wait_gone(30)
    wait_for("nothing left", lambda: not ns.pids())
    assert text in server.text()


def test_first_long_prefill_that_fails(ns: Namespace) -> None:
    server = start_standin(ns, faults={"CRASH": "prefill_oom"})
    with pytest.raises(AssertionError):
        server.request("POST", "/generate", {"text": "x"})
    server.leader.wait_gone()
    assert "Scheduler hit an exception: Traceback" in server.text()


@pytest.mark.parametrize("how", ["spin", "sleep"])
def test_start_that_hangs_never_listens(ns: Namespace, how: str) -> None:
    server = start_standin(ns, faults={"HANG": how}, wait=False)
    server.wait_log("Load weight begin")
    pid = server.find("sglang::scheduler")
    wait_for(
        "processor time" if how == "spin" else "asleep",
        lambda: (_ticks(ns, pid) > 20) if how == "spin" else _asleep(ns, pid),
        deadline_s=60,  # at the lowest priority, a busy machine gives it little
    )
    assert not _port_open(server)


def _ticks(ns: Namespace, pid: int) -> int:
    return int((ns.proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[11])


def test_unknown_switch_is_refused(ns: Namespace) -> None:
    server = start_standin(ns, faults={"NO_SUCH": "1"}, wait=False)
    server.leader.wait_gone()
    assert "SGLANG_STANDIN_NO_SUCH: the stand-in has no such switch" in server.text()


def test_pinned_memory_shows_as_rss_shmem(ns: Namespace) -> None:
    server = start_standin(ns, faults={"PINNED_MIB": "20"})
    status = (ns.proc / str(server.find("sglang::scheduler")) / "status").read_text()
    kib = int(next(line for line in status.splitlines() if line.startswith("RssShmem")).split()[1])
    assert 20 * 1024 <= kib < 21 * 1024


def test_headroom_in_the_log(ns: Namespace) -> None:
    server = start_standin(ns, faults={"AVAILABLE_GPU_MEM_GB": "0.82"})
    assert "context_len=262144, available_gpu_mem=0.82 GB" in server.text()


def _maps(ns: Namespace, pid: int, path: Path) -> list[str]:
    """Permissions of the mappings of a device node, as /proc/PID/maps lists them."""
    lines = (ns.proc / str(pid) / "maps").read_text().splitlines()
    return sorted(line.split()[1] for line in lines if line.endswith(str(path)))


def _descriptors(ns: Namespace, pid: int, path: Path) -> int:
    directory = ns.proc / str(pid) / "fd"
    return sum(os.readlink(entry) == str(path) for entry in directory.iterdir())


def test_each_rank_holds_its_own_device_and_visits_the_others(ns: Namespace, tmp_path: Path) -> None:
    with loop_nodes(tmp_path / "dev", 2) as nodes:
        assert len({os.stat(node).st_rdev for node in nodes}) == 2
        server = start_standin(ns, "--tp-size", "2", faults={"DEVICES": ",".join(map(str, nodes))})
        for title, held in (("sglang::scheduler_TP0", 0), ("sglang::scheduler_TP1", 1), ("sglang::detokenizer", None)):
            pid = server.find(title)
            for number, node in enumerate(nodes):
                assert _maps(ns, pid, node) == (["-w-s", "rw-s"] if number == held else ["-w-s"])
                assert _descriptors(ns, pid, node) >= 1
        assert _maps(ns, server.leader.pid, nodes[0]) == ["-w-s"]
        kill(ns, server.leader.pid, signal.SIGKILL)
        wait_for("all gone", lambda: not ns.pids())


def test_memory_nodes_and_nodes_without_a_driver(ns: Namespace, tmp_path: Path) -> None:
    zero, null = memory_nodes(tmp_path / "memory", 2)
    (bare,) = visitor_nodes(tmp_path / "bare", 1)
    server = start_standin(ns, "--tp", "2", faults={"DEVICES": f"{zero},{null},{bare}"})
    first, second = server.find("sglang::scheduler_TP0"), server.find("sglang::scheduler_TP1")
    assert _maps(ns, first, zero) == ["-w-p", "rw-p"]
    assert _maps(ns, second, zero) == ["-w-p"]
    for node in (null, bare):
        assert _maps(ns, second, node) == []
        assert _descriptors(ns, second, node) >= 1


def test_orphan_outlives_the_server_and_holds_its_device(ns: Namespace, tmp_path: Path) -> None:
    (zero,) = memory_nodes(tmp_path / "zero")
    server = start_standin(ns, faults={"DEVICES": str(zero), "ORPHAN": "1"})
    orphan = server.find("python3")
    kill(ns, server.leader.pid, signal.SIGKILL)
    wait_for("only the orphan left", lambda: ns.pids() == {orphan})
    assert _maps(ns, orphan, zero) == ["-w-p", "rw-p"]


def test_installed_like_a_real_one(ns: Namespace, tmp_path: Path) -> None:
    from ansible_collections.cleanslate.sglang.tests.doubles.sglang_standin.install import install

    python = install(tmp_path / "venv", version="0.5.23")
    log = tmp_path / "log"
    argv: t.Sequence[str] = [str(python.parent / "sglang"), "serve", "--model-path", "/m"]
    leader = ns.popen(argv, detached=True, output=log)
    server = Standin(ns, leader, 30000, log)
    server.wait_log("ready to roll")
    assert server.request("GET", "/ready").status == 200
    info = server.request("GET", "/server_info").json
    assert (info["version"], info["launch_command"]) == ("0.5.23", "serve --model-path /m")
    done = subprocess.run(
        [python, "-c", "import sglang; print(sglang.__version__)"], capture_output=True, timeout=20, check=True
    )
    assert done.stdout == b"0.5.23\n"
