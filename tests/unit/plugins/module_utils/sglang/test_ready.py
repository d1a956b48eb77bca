# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The wait for a server, on a scripted host in a time of its own. The parts of the proof are test_proving.py's."""

from __future__ import annotations

import dataclasses
import json
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.gpu_use import GpuUse
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.workers import Worker, expected_workers
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.causes import Kills
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.evidence import Closeup, ProcessEvidence
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.http import Response
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.proving import ProofWants
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.ready import (
    Leader,
    PortOwner,
    Readiness,
    Wants,
    wait_ready,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.running import RunningFlags
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.soak import SoakWants
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.watch import (
    Activity,
    Limits,
    Member,
    Watch,
    from_data,
    thresholds,
    to_data,
)

OURS = PortOwner(100, "python -m sglang.launch_server", True, "0.0.0.0")
STALE = PortOwner(66, "python -m sglang.launch_server --port 30000", False, "0.0.0.0")
LEADER = Leader(100, 5)
SILENT = Response(None, b"", 60.0, "no whole answer within 60 s", "timeout")
LOADING = (
    "[2026-02-23 10:00:25 TP0] Load weight begin. avail mem=94.10 GB\n"
    "Loading safetensors checkpoint shards:  25% Completed | 16/64 [00:20<01:00,  1.20s/it]\n"
)
BOUND = "ERROR: [Errno 98] error while attempting to bind on address ('0.0.0.0', 30000): address already in use\n"
BUSY = ProcessEvidence(
    pid=101,
    title="sglang::scheduler",
    role="scheduler",
    state="R",
    activity="busy",
    cpu_percent=99.0,
    wchan=None,
    threads=9,
    stack=('Thread 101 (active): "MainThread"', "    spin (scheduler.py:7)"),
    stack_source="py-spy",
)


def tokens(count: int = 4) -> Response:
    return Response(200, json.dumps({"text": "x", "meta_info": {"completion_tokens": count}}).encode(), 0.1)


def status(code: int) -> Response:
    return Response(code, b"", 0.1)


def rank(pid: int = 101, state: str = "S", role: str = "scheduler") -> Member:
    return Member(pid, 6, role, state)


def tree(*ranks: Member) -> Activity:
    return Activity((Member(100, 5, "leader", "S"), *ranks))


@dataclasses.dataclass
class Script:
    """A host in time: each list is played one item a look, and stays at its last."""

    leaders: list[Leader | None] = dataclasses.field(default_factory=lambda: [LEADER])
    owners: list[list[PortOwner] | None] = dataclasses.field(default_factory=lambda: [[OURS]])
    healths: list[Response] = dataclasses.field(default_factory=lambda: [status(200)])
    trees: list[Activity] = dataclasses.field(default_factory=lambda: [tree(rank())])
    logs: list[str | None] = dataclasses.field(default_factory=lambda: [""])
    used: list[t.Mapping[str, int] | None] = dataclasses.field(default_factory=lambda: [None])
    ooms: list[dict[str, int | None]] = dataclasses.field(default_factory=lambda: [{"cgroup": 0, "host": 0}])
    answer: Response = dataclasses.field(default_factory=tokens)
    close: Closeup = dataclasses.field(default_factory=Closeup)
    ranks: dict[str, dict[str, int]] = dataclasses.field(default_factory=lambda: {"sglang::scheduler": {}})
    clock: float = 1000.0
    gpu_look_s: float = 0.0
    asked: list[str] = dataclasses.field(default_factory=list)
    closeups: list[int | None] = dataclasses.field(default_factory=list)

    def now(self) -> float:
        return self.clock

    def wall(self) -> float:
        return 1771840800.0 + self.clock

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    def leader(self) -> Leader | None:
        return played(self.leaders)

    def port_owners(self) -> t.Sequence[PortOwner] | None:
        return played(self.owners)

    def log(self) -> str | None:
        return played(self.logs)

    def activity(self, leader: int) -> Activity:
        return played(self.trees)

    def gpus_in_use(self) -> t.Mapping[str, int] | None:
        self.asked.append("gpus")
        self.clock += self.gpu_look_s
        return played(self.used)

    def oom_places(self, leader: int) -> tuple[str, ...]:
        return (f"/sys/fs/cgroup/of-{leader}",)

    def oom_counts(self, places: t.Sequence[str]) -> t.Mapping[str, int | None]:
        return played(self.ooms)

    def closeup(self, leader: int | None, kills: Kills) -> Closeup:
        self.closeups.append(leader)
        return self.close

    def health(self, deadline_s: float) -> Response:
        self.asked.append("/health")
        answer = played(self.healths)
        self.clock += min(answer.seconds, deadline_s)
        return answer

    def generate(self, rank: int, deadline_s: float) -> Response:
        self.asked.append(f"/generate {rank}")
        return self.answer

    def chat(self, deadline_s: float) -> Response:
        raise AssertionError("no chat was demanded")

    def tool_chat(self, deadline_s: float) -> Response:
        raise AssertionError("no tools were demanded")

    def soak_request(self, index: int, tokens: int, deadline_s: float) -> Response:
        raise AssertionError("no soak was demanded")

    def server_info(self, deadline_s: float) -> Response:
        raise AssertionError("no flags were to be compared")

    def schedulers(self) -> t.Sequence[Worker] | None:
        first = [
            Worker(100, "python -m sglang.launch_server", "leader", "S"),
            Worker(102, "sglang::detokenizer", "detokenizer", "S"),
            Worker(103, "sglang::data_parallel_controller", "data_parallel_controller", "S"),
        ]
        ranks = self.ranks.items()
        return first + [Worker(110 + n, title, "scheduler", "S", part) for n, (title, part) in enumerate(ranks)]

    def gpu_users(self) -> t.Sequence[GpuUse] | None:
        return None

    def free_gpu_mib(self) -> int | None:
        return None

    def running_flags(self) -> RunningFlags | None:
        return None

    @property
    def requests(self) -> list[str]:
        return [path for path in self.asked if path.startswith("/")]


def played(items: list[t.Any]) -> t.Any:
    return items.pop(0) if len(items) > 1 else items[0]


PROOF = ProofWants(uses_gpu=False, soak=SoakWants(requests=0))


def wanted(**wants: t.Any) -> Wants:
    return Wants(**{"deadline_s": 100.0, "proof": PROOF, "launch_id": "l", "boot_id": "b", **wants})


def outcome(script: Script, **wants: t.Any) -> Readiness:
    return wait_ready(script, wanted(**wants))


def in_slices(script: Script, slice_s: float = 5.0, **wants: t.Any) -> list[Readiness]:
    """Call after call, as the action plugin does it: what was seen goes through JSON."""
    results: list[Readiness] = []
    watch: Watch | None = None
    while not results or not results[-1].finished:
        assert len(results) < 500
        results.append(wait_ready(script, wanted(slice_s=slice_s, **wants), watch))
        if results[-1].watch is not None:
            watch = from_data(json.loads(json.dumps(to_data(results[-1].watch))), "l", "b", script.clock)
    return results


def test_ready() -> None:
    script = Script(owners=[[], [], [OURS]], healths=[status(503), status(200)])
    result = outcome(script)
    assert (result.verdict, result.error, result.finished, result.phase) == ("ready", None, True, "ready")
    assert script.requests == ["/health", "/health", "/generate 0"]
    assert (result.leader, result.evidence, result.watch, script.closeups) == (LEADER, None, None, [])


def test_nothing_is_asked_before_our_own_process_listens() -> None:
    script = Script(owners=[[]])
    result = outcome(script, deadline_s=10)
    assert (result.verdict, result.finished, script.requests) == ("starting", True, [])
    assert "did not listen within 10 s and is still starting" in str(result.error)
    assert 9 <= result.seconds <= 10


def test_a_stale_server_fails_at_once_and_is_not_asked() -> None:
    script = Script(owners=[[STALE]])
    result = outcome(script)
    assert (result.verdict, script.requests, result.seconds) == ("failed", [], 0)
    assert "pid 66" in str(result.error)
    assert result.port_owner == STALE


def test_a_stale_server_beside_ours_fails() -> None:
    assert outcome(Script(owners=[[OURS, STALE]])).verdict == "failed"


def test_an_owner_who_cannot_be_seen_is_a_failure() -> None:
    result = outcome(Script(owners=[[PortOwner(None, None, False, "0.0.0.0")]]))
    assert result.verdict == "failed"
    assert "root" in str(result.error)
    assert outcome(Script(owners=[None])).verdict == "failed"


def test_a_table_of_ports_that_was_unreadable_once_is_no_failure() -> None:
    assert outcome(Script(owners=[None, [OURS]])).verdict == "ready"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", "Tried to allocate 2 GiB"),
        ("", "names no error"),
        (None, "can't be read"),
    ],
)
def test_a_process_that_is_gone_fails_early_with_the_logs_own_error(text: str | None, words: str) -> None:
    result = outcome(Script(leaders=[LEADER, LEADER, LEADER, None], owners=[[]], logs=[text]))
    assert (result.verdict, result.leader) == ("failed", LEADER)
    assert "pid 100" in str(result.error)
    assert words in str(result.error)
    assert result.seconds < 5


def test_a_launch_that_was_gone_before_the_watch_is_told_without_a_pid() -> None:
    script = Script(leaders=[None], logs=["ValueError: bad"])
    result = outcome(script)
    assert (result.verdict, result.error) == ("failed", "the server that was launched is gone: ValueError: bad")
    assert script.closeups == [None]


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"cgroup": 3, "host": 9}, "by the kernel's OOM killer, which struck 1 times in its control group"),
        ({"cgroup": 2, "host": 8}, "not by the kernel's OOM killer"),
        ({"cgroup": None, "host": 9}, "most likely by the kernel's OOM killer"),
        ({"cgroup": None, "host": None}, "is not known"),
    ],
)
def test_a_silent_death_is_told_with_the_oom_killers_count_since_the_watch_began(
    counts: dict[str, int | None], words: str
) -> None:
    script = Script(leaders=[LEADER, LEADER, None], owners=[[]], ooms=[{"cgroup": 2, "host": 8}, counts])
    assert words in str(outcome(script).error)


def test_a_restart_by_a_supervisor_is_told() -> None:
    result = outcome(Script(leaders=[LEADER, LEADER, Leader(200, 9)], owners=[[]]))
    assert result.verdict == "failed"
    assert "started anew (pid 200)" in str(result.error)


def test_a_server_that_dies_during_the_proof_is_not_ready() -> None:
    script = Script(leaders=[LEADER, LEADER, None])
    assert outcome(script).verdict == "failed"
    assert script.requests == ["/health", "/generate 0"]


def test_a_server_whose_port_goes_during_the_proof_is_not_ready() -> None:
    result = outcome(Script(owners=[[OURS], []]))
    assert (result.verdict, result.error) == ("failed", "the server does not listen any more")


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [(SILENT, "hung"), (Response(500, b"scheduler crashed", 0.1), "failed"), (tokens(0), "failed")],
)
def test_a_200_of_health_is_no_proof(answer: Response, verdict: str) -> None:
    result = outcome(Script(answer=answer, close=Closeup((BUSY,))))
    assert result.verdict == verdict
    assert "/health says 200, but" in str(result.error)
    assert result.proof is not None
    assert result.evidence is not None


def test_health_that_stays_503_is_still_starting() -> None:
    result = outcome(Script(healths=[status(503)]), deadline_s=5)
    assert result.verdict == "starting"
    assert "/health says 503" in str(result.error)


def test_a_listener_that_does_not_answer_is_hung_after_the_threshold_of_the_warm_up() -> None:
    script = Script(healths=[Response(None, b"", 25.0, "no whole answer within 25 s", "timeout")])
    result = outcome(script, deadline_s=900, limits=Limits(thresholds({"warm_up": 60})))
    assert result.verdict == "hung"
    assert "in phase warm_up and listens, but does not answer" in str(result.error)
    assert 60 <= result.seconds < 90


def test_case_09_a_busy_process_is_hung_with_its_stack() -> None:
    script = Script(owners=[[]], logs=[LOADING], close=Closeup((BUSY,)))
    result = outcome(script, deadline_s=900, limits=Limits(thresholds({"weights": 30})))
    assert result.verdict == "hung"
    assert result.error == (
        "the server has made no progress for 30 s in phase weights and does not listen: scheduler pid 101 is busy"
        " (CPU 99 %), its stack: spin (scheduler.py:7); see evidence"
    )
    assert result.evidence is not None
    assert (result.evidence.processes, result.evidence.port) == ((BUSY,), "nobody listens")
    assert result.evidence.last_lines[0].endswith("avail mem=94.10 GB")
    assert script.closeups == [100]


def test_a_stopped_rank_is_hung_and_is_never_asked() -> None:
    script = Script(trees=[tree(rank(state="T"))])
    result = outcome(script)
    assert (result.verdict, script.requests) == ("hung", [])
    assert "scheduler (pid 101) is stopped (state T) for 10 s" in str(result.error)
    assert 10 <= result.seconds < 13


@pytest.mark.parametrize("later", [tree(), tree(rank(state="Z"))])
def test_a_dead_rank_behind_a_living_leader_fails(later: Activity) -> None:
    script = Script(trees=[tree(rank()), later], owners=[[]], logs=["RuntimeError: CUDA error: bad\n"])
    result = outcome(script)
    assert result.verdict == "failed"
    assert "scheduler (pid 101) is dead for 10 s" in str(result.error)
    assert "CUDA error: bad" in str(result.error)
    assert result.seconds < 14


TWO_REPLICAS = dataclasses.replace(PROOF, expected=expected_workers({"dp-size": 2}))


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ({"sglang::scheduler_DP0": {"DP": 0}}, " without it (DP1 is missing)"),
        ({}, " without it"),
        ({"sglang::scheduler_DP0": {"DP": 0}, "sglang::scheduler_DP1": {"DP": 1}}, " without it"),
    ],
)
def test_case_28_a_dead_rank_is_named_by_the_titles_of_the_others(ranks: dict[str, dict[str, int]], said: str) -> None:
    script = Script(trees=[tree(rank()), tree(rank(state="Z"))], owners=[[]], ranks=ranks)
    result = outcome(script, proof=TWO_REPLICAS)
    assert result.verdict == "failed"
    assert str(result.error).endswith(said)


def test_a_port_that_was_not_had_fails_at_once_while_the_leader_lives() -> None:
    result = outcome(Script(owners=[[]], logs=["", BOUND]))
    assert (result.verdict, result.seconds) == ("failed", 1.0)
    assert str(result.error).startswith("the port is in use already: error while attempting to bind")


def test_a_server_that_reported_its_end_and_lives_on_fails() -> None:
    text = "ValueError: bad\n[2026-02-23 10:00:25] Received sigquit from a child process.\n"
    result = outcome(Script(owners=[[]], logs=[text]))
    assert result.verdict == "failed"
    assert "reported its end 10 s ago and lives on: ValueError: bad" in str(result.error)


def test_a_later_node_is_never_asked() -> None:
    script = Script()
    result = outcome(script, node=True)
    assert (result.verdict, script.requests) == ("ready", [])


def test_phases_come_from_the_log() -> None:
    text = LOADING + "max_total_num_tokens=231120, context_len=1\n"
    result = outcome(Script(owners=[[]], logs=[text]), deadline_s=3)
    assert (result.phase, result.total_tokens) == ("weights", 231120)
    assert result.progress_line.startswith("weights 25 %, 1.2 s/shard")
    assert result.progress_line in str(result.error)


def test_a_listener_is_in_warm_up_whatever_its_log_says() -> None:
    assert outcome(Script(logs=[None], healths=[status(503)]), deadline_s=3).phase == "warm_up"


def test_gpus_are_looked_at_every_ten_seconds_and_less_often_where_that_is_slow() -> None:
    quick, slow = Script(owners=[[]]), Script(owners=[[]], gpu_look_s=3.0)
    outcome(quick)
    outcome(slow)
    assert quick.asked.count("gpus") == 11
    assert slow.asked.count("gpus") == 4


def test_slices_end_where_one_piece_does() -> None:
    def script() -> Script:
        return Script(owners=[[]], logs=["a\n", "a\nb\n", LOADING], close=Closeup((BUSY,)))

    limits = Limits(thresholds({"weights": 30}))
    whole = outcome(script(), deadline_s=900, limits=limits)
    slices = in_slices(script(), deadline_s=900, limits=limits)
    assert [result.verdict for result in slices[:-1]] == ["starting"] * (len(slices) - 1)
    assert (slices[-1].verdict, whole.verdict) == ("hung", "hung")
    assert abs(slices[-1].seconds - whole.seconds) <= 2
    assert len(slices) > 5


def test_the_deadline_is_of_all_slices_together() -> None:
    last = list(in_slices(Script(owners=[[]]), deadline_s=22))[-1]
    assert (last.verdict, last.finished, last.watch) == ("starting", True, None)
    assert 21 <= last.seconds <= 22


def test_a_slice_ends_with_the_answer_and_the_next_one_proves() -> None:
    script = Script()
    first, second = in_slices(script)
    assert first.progress_line.endswith("it answers, the proof begins")
    assert (first.finished, second.verdict) == (False, "ready")
    assert script.requests == ["/health", "/generate 0"]


def test_an_answer_of_long_ago_counts_for_nothing() -> None:
    script = Script()
    first = wait_ready(script, wanted(slice_s=5.0))
    script.clock += 60
    wait_ready(script, wanted(slice_s=5.0), first.watch)
    assert script.requests == ["/health", "/health"]


def test_a_restart_between_two_slices_is_told() -> None:
    script = Script(owners=[[]])
    first = wait_ready(script, wanted(slice_s=3.0))
    script.leaders = [Leader(100, 77)]
    second = wait_ready(script, wanted(slice_s=3.0), first.watch)
    assert second.verdict == "failed"
    assert "started anew" in str(second.error)
