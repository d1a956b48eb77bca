# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import dataclasses
import json
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.http import Response
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.ready import (
    Leader,
    PortOwner,
    Readiness,
    Wants,
    wait_ready,
)

OURS = PortOwner(100, "python -m sglang.launch_server", True, "0.0.0.0")
STALE = PortOwner(66, "python -m sglang.launch_server --port 30000", False, "0.0.0.0")
LEADER = Leader(100, 5)
SILENT = Response(None, b"", 60.0, "no whole answer within 60 s", "timeout")


def tokens(count: t.Any = 4, **meta: t.Any) -> Response:
    return Response(200, json.dumps({"text": "x", "meta_info": {"completion_tokens": count, **meta}}).encode(), 0.1)


def chat(**message: t.Any) -> Response:
    usage = {"reasoning_tokens": message.pop("reasoning_tokens", None)}
    body = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
    return Response(200, json.dumps(body).encode(), 0.5)


def status(code: int) -> Response:
    return Response(code, b"", 0.1)


@dataclasses.dataclass
class Script:
    """A host in time: each list is played one item a look, and stays at its last."""

    leaders: list[Leader | None] = dataclasses.field(default_factory=lambda: [LEADER])
    owners: list[list[PortOwner] | None] = dataclasses.field(default_factory=lambda: [[OURS]])
    healths: list[Response] = dataclasses.field(default_factory=lambda: [status(200)])
    answers: dict[int, Response] = dataclasses.field(default_factory=dict)
    chat_answer: Response = dataclasses.field(default_factory=lambda: chat(reasoning_content="hm", content="5"))
    text: str | None = ""
    free_mib: int | None = 9000
    clock: float = 1000.0
    asked: list[str] = dataclasses.field(default_factory=list)

    def now(self) -> float:
        return self.clock

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    def leader(self) -> Leader | None:
        return self.leaders.pop(0) if len(self.leaders) > 1 else self.leaders[0]

    def port_owners(self) -> t.Sequence[PortOwner] | None:
        return self.owners.pop(0) if len(self.owners) > 1 else self.owners[0]

    def log(self) -> str | None:
        return self.text

    def health(self, deadline_s: float) -> Response:
        self.asked.append("/health")
        answer = self.healths.pop(0) if len(self.healths) > 1 else self.healths[0]
        self.clock += min(answer.seconds, deadline_s)
        return answer

    def generate(self, rank: int, deadline_s: float) -> Response:
        self.asked.append(f"/generate {rank}")
        answer = self.answers.get(rank, tokens())
        self.clock += min(answer.seconds, deadline_s)
        return answer

    def chat(self, deadline_s: float) -> Response:
        self.asked.append("/chat")
        return self.chat_answer

    def free_gpu_mib(self) -> int | None:
        return self.free_mib


def outcome(script: Script, **wants: t.Any) -> Readiness:
    return wait_ready(script, Wants(**{"deadline_s": 100.0, **wants}))


def test_ready() -> None:
    script = Script(owners=[[], [], [OURS]], healths=[status(503), status(200)])
    result = outcome(script, ranks=2, reasoning=True, headroom_mib=2048)
    assert (result.verdict, result.error, result.headroom_mib) == ("ready", None, 9000)
    assert script.asked == ["/health", "/health", "/generate 0", "/generate 1", "/chat"]
    assert result.leader == LEADER
    assert result.reasoning is not None
    assert result.reasoning.verdict == "separated"


def test_nothing_is_asked_before_our_own_process_listens() -> None:
    script = Script(owners=[[]])
    result = outcome(script, deadline_s=10)
    assert (result.verdict, script.asked) == ("timeout", [])
    assert "did not listen" in str(result.error)
    assert 9 <= result.seconds <= 10


def test_a_stale_server_fails_at_once_and_is_not_asked() -> None:
    script = Script(owners=[[STALE]])
    result = outcome(script)
    assert (result.verdict, script.asked, result.seconds) == ("failed", [], 0)
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
    result = outcome(Script(leaders=[LEADER, LEADER, None], owners=[[]], text=text))
    assert (result.verdict, result.leader) == ("failed", LEADER)
    assert "pid 100" in str(result.error)
    assert words in str(result.error)
    assert result.seconds < 5
    assert outcome(Script(leaders=[None], text=text)).verdict == "failed"


def test_a_restart_by_a_supervisor_is_told() -> None:
    result = outcome(Script(leaders=[LEADER, Leader(200, 9)], owners=[[]]))
    assert result.verdict == "failed"
    assert "started anew (pid 200)" in str(result.error)


def test_a_server_that_dies_during_the_proof_is_not_ready() -> None:
    assert outcome(Script(leaders=[LEADER, None])).verdict == "failed"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (SILENT, "no whole answer"),
        (tokens(0), "no token"),
        (tokens(None), "no token"),
        (tokens(True), "no token"),
        (tokens(dp_rank=0), "rank 0 answered instead"),
        (status(401), "API key"),
        (Response(500, b"scheduler crashed", 0.1), "scheduler crashed"),
        (Response(200, b"{}", 0.1), "meta_info"),
        (Response(200, b"<html>", 0.1), "meta_info"),
    ],
)
def test_only_tokens_from_every_rank_count(answer: Response, words: str) -> None:
    result = outcome(Script(answers={1: answer}), ranks=2)
    assert result.verdict == "failed"
    assert "rank 1" in str(result.error)
    assert words in str(result.error)
    assert [row.problem is None for row in result.tokens] == [True, False]


def test_health_that_stays_503_is_a_timeout() -> None:
    script = Script(healths=[status(503)])
    result = outcome(script, deadline_s=5)
    assert result.verdict == "timeout"
    assert "/health says 503" in str(result.error)


@pytest.mark.parametrize(
    ("answer", "verdict", "ready"),
    [
        (chat(reasoning_content="hm", content="5"), "separated", True),
        (chat(reasoning_content="all of it", content=""), "separated", True),
        (chat(reasoning_content=None, content="<think>hm</think>5"), "missing", False),
        (chat(reasoning_content="  ", content="5"), "missing", False),
        (chat(content="5"), "missing", False),
        (chat(reasoning_content=None, content="", reasoning_tokens=9), "separated", True),
        (chat(reasoning_content=None, content="", reasoning_tokens=0), "missing", False),
        (chat(reasoning_content=None, content="5", reasoning_tokens=9), "missing", False),
        (SILENT, "unknown", False),
        (Response(200, b"{}", 0.1), "unknown", False),
        (Response(200, b'{"choices": [{"message": null}]}', 0.1), "unknown", False),
    ],
)
def test_reasoning(answer: Response, verdict: str, ready: bool) -> None:
    result = outcome(Script(chat_answer=answer), reasoning=True)
    assert result.reasoning is not None
    assert (result.reasoning.verdict, result.verdict == "ready") == (verdict, ready)


LINE = "max_total_num_tokens=231120, available_gpu_mem={} GB"


@pytest.mark.parametrize(
    ("text", "free_mib", "headroom", "ready"),
    [
        (LINE.format("0.82"), None, 839, False),
        (LINE.format("0.82"), 5000, 839, False),
        (LINE.format("6.50"), 1000, 1000, False),
        (LINE.format("6.50"), 5000, 5000, True),
        (LINE.format("2.00"), None, 2048, True),
        ("", 2048, 2048, True),
        ("", None, None, False),
    ],
)
def test_headroom_is_the_lower_of_the_logs_and_the_drivers_figure(
    text: str, free_mib: int | None, headroom: int | None, ready: bool
) -> None:
    result = outcome(Script(text=text, free_mib=free_mib), headroom_mib=2048)
    assert (result.headroom_mib, result.verdict == "ready") == (headroom, ready)


def test_headroom_is_not_judged_without_a_gpu_or_a_demand() -> None:
    assert outcome(Script(free_mib=1), headroom_mib=2048, uses_gpu=False).headroom_mib is None
    assert outcome(Script(free_mib=1), headroom_mib=0).verdict == "ready"


def test_phases_come_from_the_log() -> None:
    text = "[2026-02-23 10:00:25 TP0] Load weight begin. avail mem=94.10 GB\n"
    text += (
        "Loading safetensors checkpoint shards:  25% Completed | 16/64\nmax_total_num_tokens=231120, context_len=1\n"
    )
    result = outcome(Script(owners=[[]], text=text), deadline_s=3)
    assert (result.phase, result.total_tokens) == ("weights", 231120)
    assert "(phase weights, 25 %)" in str(result.error)
