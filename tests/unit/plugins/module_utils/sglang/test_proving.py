# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The sequence of the proof, on a scripted host."""

from __future__ import annotations

import dataclasses
import json
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.gpu_use import GpuUse
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.workers import Worker, expected_workers
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.cmdline import LaunchedFlags
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.http import Response
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.proving import (
    Proof,
    ProofWants,
    prove,
    prove_node,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.running import RunningFlags
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.soak import SoakWants

SILENT = Response(None, b"", 60.0, "no whole answer within 60 s", "timeout")
FLAGS = {"model-path": "/m", "dp-size": 2}


def reply(body: t.Any, status: int = 200) -> Response:
    return Response(status, json.dumps(body).encode(), 0.1)


TOKENS = reply({"meta_info": {"completion_tokens": 4}})
THOUGHT = reply({"choices": [{"message": {"content": "5", "reasoning_content": "hm"}, "finish_reason": "stop"}]})
PLAIN = reply({"choices": [{"message": {"content": "hm</think>5"}, "finish_reason": "stop"}]})
CALLED = reply({"choices": [{"message": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]})
IN_WORDS = reply({"choices": [{"message": {"content": "Rain."}, "finish_reason": "stop"}]})
LEFT_IN = reply({"choices": [{"message": {"content": "<tool_call>get_weather"}, "finish_reason": "stop"}]})


def tree(*ranks: int, state: str = "S") -> list[Worker]:
    return [
        Worker(1, "python -m sglang.launch_server", "leader", "S"),
        Worker(2, "sglang::data_parallel_controller", "data_parallel_controller", "S"),
        *(Worker(10 + rank, f"sglang::scheduler_DP{rank}", "scheduler", state, {"DP": rank}) for rank in ranks),
        Worker(4, "sglang::detokenizer", "detokenizer", "S"),
    ]


@dataclasses.dataclass
class Host:
    """A server of two data parallel ranks; ``trees`` and ``free`` are played one by one and stay at their last."""

    trees: list[list[Worker] | None] = dataclasses.field(default_factory=lambda: [tree(0, 1)])
    answers: dict[int, Response] = dataclasses.field(default_factory=dict)
    chat_answer: Response = THOUGHT
    tool_answer: Response = CALLED
    soak_answer: Response = TOKENS
    info: Response = dataclasses.field(default_factory=lambda: reply({"model_path": "/m", "dp_size": 2}))
    users: list[GpuUse] | None = dataclasses.field(default_factory=lambda: [GpuUse("0", 0, True, (10,))])
    free: list[int | None] = dataclasses.field(default_factory=lambda: [9000])
    text: str = ""
    launched: t.Mapping[str, t.Any] = dataclasses.field(default_factory=lambda: FLAGS)
    asked: list[str] = dataclasses.field(default_factory=list)

    def now(self) -> float:
        return 100.0

    def generate(self, rank: int, deadline_s: float) -> Response:
        self.asked.append(f"generate {rank}")
        return self.answers.get(rank, TOKENS)

    def chat(self, deadline_s: float) -> Response:
        self.asked.append("chat")
        return self.chat_answer

    def tool_chat(self, deadline_s: float) -> Response:
        self.asked.append("tools")
        return self.tool_answer

    def soak_request(self, index: int, tokens: int, deadline_s: float) -> Response:
        self.asked.append("soak")
        return self.soak_answer

    def server_info(self, deadline_s: float) -> Response:
        self.asked.append("info")
        return self.info

    def schedulers(self) -> t.Sequence[Worker] | None:
        return self.trees.pop(0) if len(self.trees) > 1 else self.trees[0]

    def gpu_users(self) -> t.Sequence[GpuUse] | None:
        return self.users

    def free_gpu_mib(self) -> int | None:
        return self.free.pop(0) if len(self.free) > 1 else self.free[0]

    def log(self) -> str | None:
        return self.text

    def running_flags(self) -> RunningFlags | None:
        return RunningFlags(LaunchedFlags(self.launched, {}, None, True, ()))


def wants(**changes: t.Any) -> ProofWants:
    values: dict[str, t.Any] = {
        "ranks": 2,
        "reasoning": True,
        "tools": True,
        "headroom_mib": 2048,
        "expected": expected_workers(FLAGS),
        "flags": FLAGS,
        "soak": SoakWants(requests=2, concurrency=1),
    }
    return ProofWants(**{**values, **changes})


def proved(host: Host, **changes: t.Any) -> Proof:
    return prove(host, wants(**changes))


def test_the_whole_proof_in_its_order() -> None:
    host = Host()
    proof = proved(host)
    assert (proof.problems, proof.warnings, proof.hung) == ((), (), False)
    assert sorted(host.asked[:2]) == ["generate 0", "generate 1"]
    assert host.asked[2:] == ["chat", "tools", "info", "soak", "soak"]
    assert [tokens.count for tokens in proof.tokens] == [4, 4]
    assert (proof.headroom_mib, proof.gpus_used) == (9000, (GpuUse("0", 0, True, (10,)),))
    assert proof.soak is not None and proof.soak.failed == 0
    assert proof.flags is not None and proof.flags.matches is True


def test_what_is_not_demanded_is_not_asked() -> None:
    host = Host()
    proof = proved(host, reasoning=False, tools=False, flags=None, uses_gpu=False, soak=SoakWants(requests=0))
    assert sorted(host.asked) == ["generate 0", "generate 1"]
    assert (proof.reasoning, proof.tools, proof.flags, proof.gpus_used, proof.headroom_mib, proof.soak) == (None,) * 6
    assert proof.problem is None


def test_case_28_a_dead_rank_is_found_by_the_tree_and_its_rank_is_not_asked() -> None:
    host = Host(trees=[tree(0)])
    proof = proved(host)
    assert proof.problem == "1 of 2 schedulers run: DP1 is missing"
    assert proof.hung is False
    assert host.asked == ["generate 0"]
    assert [tokens.count for tokens in proof.tokens] == [4, None]
    assert "not asked" in str(proof.tokens[1].problem)


def test_case_28_a_rank_that_lives_and_hangs_is_hung_and_nothing_more_is_asked() -> None:
    host = Host(answers={1: SILENT})
    proof = proved(host)
    assert "data parallel rank 1 does not generate: no whole answer" in str(proof.problem)
    assert proof.hung is True
    assert sorted(host.asked) == ["generate 0", "generate 1"]
    assert proof.headroom_mib == 9000  # what can't hang is judged all the same
    assert proof.flags is not None and proof.flags.matches is True


def test_a_stopped_rank_is_hung() -> None:
    proof = proved(Host(trees=[tree(0, 1, state="T")]))
    assert "stopped by a signal" in str(proof.problem)
    assert proof.hung is True


def test_a_rank_that_answers_with_an_error_is_failed() -> None:
    proof = proved(Host(answers={0: reply({}, 500)}))
    assert "data parallel rank 0" in str(proof.problem)
    assert proof.hung is False


def test_case_07_a_missing_reasoning_parser_and_all_further_findings() -> None:
    host = Host(chat_answer=PLAIN, tool_answer=LEFT_IN, free=[100], users=[GpuUse("0", 0, False)])
    proof = proved(host)
    assert "a reasoning parser was asked for" in str(proof.problem)
    assert [words.split(":")[0] for words in proof.problems[1:]] == [
        "a tool parser was asked for",
        "GPU 0 is planned for this server, and none of its processes holds it",
        "only 100 MiB of GPU memory are left by the driver, 2048 MiB are demanded",
    ]
    assert "soak" not in host.asked


def test_a_chat_without_an_answer_is_hung() -> None:
    host = Host(chat_answer=SILENT)
    proof = proved(host)
    assert proof.hung is True
    assert host.asked[-1] == "chat"


@pytest.mark.parametrize("answer", [IN_WORDS, reply({"message": "context length"}, 400)])
def test_a_tool_parser_that_is_not_proved_is_a_warning(answer: Response) -> None:
    proof = proved(Host(tool_answer=answer))
    assert proof.problem is None
    assert "the tool parser is not proved" in proof.warnings[0]


def test_a_tool_chat_that_fails_is_a_failure() -> None:
    assert "HTTP 500" in str(proved(Host(tool_answer=reply({}, 500))).problem)
    assert proved(Host(tool_answer=SILENT)).hung is True


def test_flags_that_differ_are_a_failure() -> None:
    proof = proved(Host(launched={**FLAGS, "model-path": "/other"}))
    assert proof.problem == (
        "it does not run with the flags as wanted: model-path is '/other', '/m' is wanted"
    )
    resolved = proved(Host(info=reply({"model_path": "/other"})))
    assert "model-path was resolved to '/other'" in str(resolved.problem)


def test_a_server_info_that_does_not_answer_is_a_warning() -> None:
    proof = proved(Host(info=SILENT))
    assert proof.problem is None
    assert "/server_info: no whole answer" in proof.warnings[0]


def test_strangers_and_use_that_the_evidence_does_not_tell_are_warnings() -> None:
    proof = proved(Host(users=[GpuUse("0", 0, True, (10,), ("pid 66 (x)",)), GpuUse("1", 1, None, note="hidden")]))
    assert proof.problem is None
    assert list(proof.warnings) == ["GPU 0 is also held by pid 66 (x)", "whether GPU 1 is used is not known: hidden"]


@pytest.mark.parametrize(
    ("users", "said"),
    [
        ([GpuUse("GPU-gone", None, False, absent=True)], "GPU GPU-gone is planned for this server, and the driver"),
        (None, "can't be seen from here, so that"),
    ],
)
def test_a_planned_gpu_that_nobody_shows_is_a_failure(users: list[GpuUse] | None, said: str) -> None:
    host = Host(users=users)
    assert said in str(proved(host).problem)
    assert "soak" not in host.asked


def test_case_02_the_log_s_headroom_counts_where_it_is_lower() -> None:
    log = "[2026-01-31 23:59:59] Capture cuda graph end. Time elapsed: 9.0 s. mem usage=1.0 GB. avail mem=0.82 GB.\n"
    proof = proved(Host(text=log))
    assert proof.headroom_mib == 839
    assert "only 839 MiB of GPU memory are left by the log" in str(proof.problem)


def test_headroom_that_nobody_knows_fails_only_where_it_is_demanded() -> None:
    assert "known neither" in str(proved(Host(free=[None])).problem)
    assert proved(Host(free=[None]), headroom_mib=0).problem is None


def test_headroom_that_the_soak_takes_is_seen() -> None:
    proof = proved(Host(free=[9000, 900]))
    assert "only 900 MiB of GPU memory are left by the driver after the soak" in str(proof.problem)


def test_a_soak_that_fails_is_a_failure_and_a_silent_one_hung() -> None:
    proof = proved(Host(soak_answer=reply({}, 500)))
    assert "2 of 2 requests of the soak failed: HTTP 500" in str(proof.problem)
    assert proof.hung is False
    assert proved(Host(soak_answer=SILENT)).hung is True


def test_a_soak_slower_than_demanded_is_a_failure_and_not_hung() -> None:
    soak = SoakWants(requests=2, concurrency=1, min_tokens_per_s=1e12)
    host = Host()
    proof = proved(host, soak=soak)
    assert "the soak is too slow" in str(proof.problem)
    assert proof.hung is False
    assert host.asked.count("soak") == 6, "a cold server is asked again before it is called slow"
    silent = proved(Host(soak_answer=SILENT), soak=soak)
    assert "too slow" not in " ".join(silent.problems)


def test_a_cold_server_is_asked_again_with_other_prompts() -> None:
    class Warming(Host):
        """Its first answers take a second each, the later ones a tenth."""

        indices: list[int] = []
        clock = 0.0

        def now(self) -> float:
            return self.clock

        def soak_request(self, index: int, tokens: int, deadline_s: float) -> Response:
            self.indices = [*self.indices, index]
            self.clock += 1.0 if len(self.indices) <= 2 else 0.1
            return self.soak_answer

    host = Warming()
    proof = proved(host, soak=SoakWants(requests=2, concurrency=1, min_tokens_per_s=20.0))
    assert proof.problems == ()
    assert host.indices == [0, 1, 2, 3]
    assert "at first the soak is too slow: 4 tokens/s" in proof.warnings[-1]
    assert proof.soak is not None and proof.soak.tokens_per_s == 40.0


def test_a_rank_that_dies_in_the_soak_is_seen() -> None:
    proof = proved(Host(trees=[tree(0, 1), tree(0)]))
    assert proof.problem == "after the soak 1 of 2 schedulers run: DP1 is missing"


def test_processes_that_can_t_be_read_are_a_warning_where_tokens_prove_more() -> None:
    proof = proved(Host(trees=[None]))
    assert proof.problem is None
    assert "can't be read" in proof.warnings[0]


# --- a later node -----------------------------------------------------------------------------------------------------

NODE = {"model-path": "/m", "tp-size": 4, "nnodes": 2, "node-rank": 1}


def node_tree(*ranks: int) -> list[Worker]:
    schedulers = [Worker(10 + rank, f"sglang::scheduler_TP{rank}", "scheduler", "S", {"TP": rank}) for rank in ranks]
    return [Worker(1, "python -m sglang.launch_server", "leader", "S"), *schedulers]


def node_proof(host: Host) -> Proof:
    return prove_node(host, wants(ranks=1, expected=expected_workers(NODE), flags=NODE))


def test_case_29_a_later_node_is_proved_by_its_processes_and_never_asked() -> None:
    host = Host(trees=[node_tree(2, 3)], launched=NODE)
    proof = node_proof(host)
    assert (proof.problem, host.asked) == (None, [])
    assert proof.workers is not None and proof.workers.schedulers == 2


def test_case_29_dead_schedulers_of_a_later_node() -> None:
    proof = node_proof(Host(trees=[node_tree()], launched=NODE))
    assert proof.problem == "0 of 2 schedulers run: TP2, TP3 are missing"


def test_case_29_a_later_node_that_can_t_be_looked_at_is_not_proved() -> None:
    assert "all the proof" in str(node_proof(Host(trees=[None], launched=NODE)).problem)
