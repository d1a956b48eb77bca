# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What answers prove. The bodies are those of a real SGLang (tests/fixtures/answers) unless they stand here."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.http import Endpoint, Response
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.proof import (
    Client,
    judge_reasoning,
    judge_tokens,
    judge_tools,
    soak_prompt,
)

ANSWERS = Path(__file__).resolve().parents[4] / "fixtures" / "answers"


def real(name: str) -> Response:
    """A recorded answer."""
    kept = json.loads((ANSWERS / f"{name}.json").read_text())
    return Response(kept["status"], json.dumps(kept["body"]).encode(), kept["seconds"])


def chat(finish: str = "stop", counted: t.Any = None, **message: t.Any) -> Response:
    body = {
        "choices": [{"message": {"role": "assistant", "content": "", **message}, "finish_reason": finish}],
        "usage": {"reasoning_tokens": counted},
    }
    return Response(200, json.dumps(body).encode(), 0.5)


def call(name: str = "get_weather", arguments: str = '{"city": "Oslo"}') -> dict[str, t.Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


SILENT = Response(None, b"", 60.0, "no whole answer within 60 s", "timeout")
REFUSED = Response(None, b"", 0.0, "nobody accepts connections", "refused")

# --- tokens -----------------------------------------------------------------------------------------------------------


def test_real_tokens_count() -> None:
    judged = judge_tokens(0, 1, real("generate"))
    assert (judged.count, judged.problem, judged.silent) == (4, None, False)


@pytest.mark.parametrize(
    ("answer", "words", "silent"),
    [
        (SILENT, "no whole answer", True),
        (REFUSED, "nobody accepts", False),
        (Response(401, b"{}", 0.1), "API key", False),
        (Response(500, b"boom", 0.1), "HTTP 500: boom", False),
        (Response(200, b"[]", 0.1), "no meta_info", False),
        (Response(200, b'{"meta_info": {"completion_tokens": 0}}', 0.1), "no token", False),
        (Response(200, b'{"meta_info": {"completion_tokens": true}}', 0.1), "no token", False),
    ],
)
def test_what_holds_no_token_proves_nothing(answer: Response, words: str, silent: bool) -> None:
    judged = judge_tokens(0, 1, answer)
    assert words in str(judged.problem)
    assert judged.silent is silent


def test_a_rank_that_sglang_does_not_know_is_named() -> None:
    assert "out of range" in str(judge_tokens(5, 6, real("generate.no-such-rank")).problem)


def test_another_rank_proves_nothing() -> None:
    answer = Response(200, b'{"meta_info": {"completion_tokens": 4, "dp_rank": 1}}', 0.1)
    assert judge_tokens(1, 2, answer).problem is None
    assert judge_tokens(0, 2, answer).problem == "rank 1 answered instead"


# --- reasoning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("chat.reasoning-parser", "separated"),
        ("tools.both-parsers.thought", "separated"),
        ("chat.no-parser", "missing"),
        ("chat.no-parser.thought", "missing"),
        ("chat.too-long", "unknown"),
    ],
)
def test_reasoning_by_real_bodies(name: str, verdict: str) -> None:
    assert judge_reasoning(real(name)).verdict == verdict


def test_a_thought_without_content_is_no_failure() -> None:
    judged = judge_reasoning(chat("length", reasoning_content="I count"))
    assert judged.verdict == "separated"
    assert "whole answer" not in judged.message
    complete = judge_reasoning(chat("stop", reasoning_content="I count"))
    assert complete.verdict == "separated"
    assert "the whole answer was taken for reasoning" in complete.message


@pytest.mark.parametrize(
    "content", ["I count.</think>5", "\u25c1think\u25b7so\u25c1/think\u25b75", "[THINK]so[/THINK]5", "<think>so"]
)
def test_a_thought_in_content_is_named_by_its_markup(content: str) -> None:
    judged = judge_reasoning(chat(content=content, reasoning_content=None))
    assert judged.verdict == "missing"
    assert "the chain of thought stands in content (" in judged.message


def test_tokens_counted_as_reasoning_prove_a_parser_unless_the_markup_is_there() -> None:
    assert judge_reasoning(chat(content="5", counted=7)).verdict == "separated"
    assert judge_reasoning(chat(content="so</think>5", counted=7)).verdict == "missing"
    assert judge_reasoning(chat(content="5", counted=0)).verdict == "missing"
    assert judge_reasoning(chat(content="5", counted=True)).verdict == "missing"


@pytest.mark.parametrize("body", [b"", b"null", b"{}", b'{"choices": []}', b'{"choices": [{"message": null}]}'])
def test_no_message_is_unknown_for_both(body: bytes) -> None:
    answer = Response(200, body, 0.1)
    assert judge_reasoning(answer).verdict == "unknown"
    assert judge_tools(answer).verdict == "unknown"


def test_no_text_at_all_is_unknown() -> None:
    assert judge_reasoning(chat()).verdict == "unknown"
    # No evidence of a missing parser: a random model on a real server answered so.
    assert judge_tools(chat()).verdict == "not_called"


def test_silence_is_told_apart_from_a_refusal() -> None:
    assert judge_reasoning(SILENT).silent and judge_tools(SILENT).silent
    assert not judge_reasoning(REFUSED).silent and not judge_tools(REFUSED).silent


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("tools.tool-parser", "called"),
        ("tools.both-parsers", "called"),
        ("tools.both-parsers.thought", "called"),
        ("tools.no-parser", "missing"),
        ("tools.no-parser.words", "not_called"),
        ("tools.tool-parser.words", "not_called"),
        ("tools.tool-parser.required-cut-short", "not_called"),
        ("tools.no-grammar.required", "unknown"),
    ],
)
def test_tools_by_real_bodies(name: str, verdict: str) -> None:
    assert judge_tools(real(name)).verdict == verdict


@pytest.mark.parametrize(
    "content",
    [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "<tool_call>get_weather\n<arg_key>city</arg_key>",
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function",
        '<\uff5cDSML\uff5cfunction_calls><\uff5cDSML\uff5cinvoke name="get_weather">',
        "<\uff5ctool_calls_begin\uff5c>",
        '<minimax:tool_call><invoke name="get_weather">',
        '<|python_tag|>{"name": "get_weather", "parameters": {}}',
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {}}]',
        "<|tool_call_start|>[get_weather(city='Oslo')]<|tool_call_end|>",
        "<|channel|>commentary to=functions.get_weather",
        "<function=get_weather><parameter=city>",
        "[get_weather(city='Oslo')]",
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]',
    ],
)
def test_a_call_left_in_content_is_a_missing_parser(content: str) -> None:
    judged = judge_tools(chat(content=content, tool_calls=None))
    assert judged.verdict == "missing"
    assert "stands in content" in judged.message


def test_a_call_left_in_the_thought_is_a_missing_parser_and_talk_of_one_is_not() -> None:
    left = "I ask. <tool_call>\n" + json.dumps({"name": "get_weather"})
    assert judge_tools(chat(reasoning_content=left)).verdict == "missing"
    talk = "I should call get_weather(city='Oslo') in the way that was said."
    assert judge_tools(chat(content="Rain.", reasoning_content="a <tool_call> is" + " x" * 200)).verdict == "not_called"
    assert judge_tools(chat(content="I would call get_weather(city='Oslo').")).verdict == "not_called"
    assert judge_tools(chat(content="Rain.", reasoning_content=talk)).verdict == "not_called"


def test_an_answer_that_ran_out_of_tokens_proves_nothing() -> None:
    judged = judge_tools(chat("length", reasoning_content="hm"))
    assert judged.verdict == "not_called"
    assert "tokens were over" in judged.message


def test_arguments_that_are_no_object_are_told() -> None:
    assert "no JSON object" in judge_tools(chat(tool_calls=[call(arguments="{city")])).message
    assert "no JSON object" not in judge_tools(chat(tool_calls=[call()])).message


@pytest.mark.parametrize("calls", [[None], [{}], [{"function": None}], [{"function": {"name": ""}}], "x", {}])
def test_calls_that_are_none_count_for_nothing(calls: t.Any) -> None:
    assert judge_tools(chat(content="Rain.", tool_calls=calls)).verdict == "not_called"


def test_a_refusal_for_want_of_a_parser_is_missing_and_another_one_unknown() -> None:
    body = b'{"error": {"message": "tool_choice needs --tool-call-parser to be set"}}'
    assert judge_tools(Response(400, body, 0.1)).verdict == "missing"
    other = judge_tools(real("chat.too-long"))
    assert (other.verdict, other.refused) == ("unknown", True)
    assert judge_tools(Response(500, body, 0.1)).refused is False


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_soak_prompts_differ_from_the_first_words_on() -> None:
    prompts = [soak_prompt("n", index) for index in range(200)]
    assert len({prompt.split()[0] for prompt in prompts}) == 200
    assert soak_prompt("a", 1) != soak_prompt("b", 1)


def test_a_soak_request_goes_to_each_rank_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, t.Any]] = []

    def keep(_endpoint: Endpoint, _method: str, _path: str, _deadline_s: float, body: dict[str, t.Any]) -> Response:
        sent.append(body)
        return Response(200, b"", 0.0)

    monkeypatch.setattr("ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.proof.request", keep)
    client = Client(Endpoint("h", 1), "m", ranks=2, version="0.5.15", nonce="n")
    for index in range(3):
        client.soak_request(index, 32, 5)
    client.tool_chat(5)
    assert [body["routed_dp_rank"] for body in sent[:3]] == [0, 1, 0]
    assert {body["sampling_params"]["max_new_tokens"] for body in sent[:3]} == {32}
    assert all(body["sampling_params"]["ignore_eos"] for body in sent[:3])
    assert sent[3]["tool_choice"] == "auto"
