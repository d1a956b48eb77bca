# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a running server is asked for its proof, and what its answers prove: tokens of a rank, reasoning kept apart,
tool calls made out. The judgements see the answers' bodies alone, whatever the server's flags say."""

from __future__ import annotations

import json
import re
import typing as t
from dataclasses import dataclass

from .http import Endpoint, Response, request, server_info
from .install import version_tuple

_ROUTED_SINCE = (0, 5, 12)
_TOKENS = 4
_CHAT_TOKENS = 96
# A model that can't be told not to think needs room to come to its call.
_TOOL_TOKENS = 512
_PROMPT = "Count from one to five."
_TOOL_NAME = "get_weather"
_TOOL_PROMPT = f"What is the weather in Oslo now? Call the function {_TOOL_NAME} for it. Answer with nothing else."
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "The weather in a city at this moment.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city's name"}},
            "required": ["city"],
        },
    },
}
_SOAK_WORDS = ("river", "stone", "lamp", "window", "garden", "letter", "engine", "harbour", "winter", "bridge")

# By SGLang's parser/reasoning_parser.py (0.5.10 to 0.5.23): what stands around a chain of thought.
_THOUGHT_MARKUP = re.compile(
    r"</?think>|\u25c1/?think\u25b7|\[/?THINK\]|<\|(?:START|END)_THINKING\|>|<\|channel\|?>(?:analysis|thought)"
    r"|</?(?:ifm\|think|seed:think|mm:think|think_fast|think_faster|reasoning)[^>]*>"
)
# By SGLang's function_call/*_detector.py (0.5.10 to 0.5.23): how the model families write a call.
_CALL_MARKUP = re.compile(
    r"<\|tool_calls?(?:_section)?_(?:begin|start)\|>|<\|tool_call_argument_begin\|>"  # Kimi K2, LFM2
    r"|<tool_calls?>|<\|tool_call\|?>|<(?:minimax|seed|iquest|dots)[:_](?:tool|function)_call>"  # Qwen, GLM, Hermes
    r"|<\uff5ctool[\u2581_]calls?[\u2581_]begin\uff5c>|<\uff5cDSML\uff5c"  # DeepSeek, Step
    r"|<\|python_tag\|>|\[TOOL_CALLS\]|<\|action_start\|> ?<\|plugin\|>|<\|START_ACTION\|>"  # Llama, Mistral, InternLM
    r"|<\|channel\|>commentary to=|<function[= ]|<invoke name="  # gpt-oss, Qwen coder, MiniMax
)
# Families without any markup (Llama JSON, Pythonic) begin with the call itself.
_BARE_CALL = re.compile(
    rf"^\s*(?:\[?\s*{_TOOL_NAME}\s*\(|\[?\s*\{{\s*\"(?:name|type|function)\"\s*:[^\n]{{0,80}}{_TOOL_NAME})"
)
_NO_PARSER = re.compile(r"(?i)tool[-_ ]?call[-_ ]?parser")
_NEAR = 200


@dataclass(frozen=True)
class Tokens:
    """What one data parallel rank generated; ``problem`` None: it did. ``silent``: no answer came in time, though
    somebody listens."""

    dp_rank: int
    count: t.Optional[int]
    seconds: float
    problem: t.Optional[str] = None
    silent: bool = False


@dataclass(frozen=True)
class Reasoning:
    """Whether a chat answer keeps the chain of thought apart. ``verdict``: separated, missing or unknown."""

    verdict: str
    message: str
    seconds: float
    silent: bool = False


@dataclass(frozen=True)
class Tools:
    """Whether a tool parser works. ``verdict``: called, missing (the call stands in the text), not_called (the model
    answered in words: proves nothing) or unknown. ``refused``: unknown since the server refused the question."""

    verdict: str
    message: str
    seconds: float
    silent: bool = False
    refused: bool = False


@dataclass(frozen=True)
class Client:
    """Asks one server. ``ranks``: its data parallel size; ``nonce`` makes the soak's prompts new to a prefix cache."""

    endpoint: Endpoint
    model: str
    ranks: int = 1
    version: t.Optional[str] = None
    nonce: str = ""

    def generate(self, rank: int, deadline_s: float) -> Response:
        return generate(self.endpoint, rank, self.ranks, self.version, deadline_s)

    def chat(self, deadline_s: float) -> Response:
        return chat(self.endpoint, self.model, deadline_s)

    def tool_chat(self, deadline_s: float) -> Response:
        return tool_chat(self.endpoint, self.model, deadline_s)

    def soak_request(self, index: int, tokens: int, deadline_s: float) -> Response:
        body = {**_sampling(soak_prompt(self.nonce, index), tokens), **self._routed(index % self.ranks)}
        return request(self.endpoint, "POST", "/generate", deadline_s, body)

    def server_info(self, deadline_s: float) -> Response:
        return server_info(self.endpoint, deadline_s)

    def _routed(self, rank: int) -> dict[str, t.Any]:
        return _routed(rank, self.ranks, self.version)


def _sampling(text: str, tokens: int) -> dict[str, t.Any]:
    return {"text": text, "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}


def _routed(rank: int, ranks: int, version: t.Optional[str]) -> dict[str, t.Any]:
    """How a version is told which rank is to answer."""
    if ranks <= 1:
        return {}
    known = version_tuple(version)
    names = []
    # An older SGLang passes over the newer name without a word, and the other way round: unsure, say both.
    if known is None or known >= _ROUTED_SINCE:
        names.append("routed_dp_rank")
    if known is None or known < _ROUTED_SINCE:
        names.append("data_parallel_rank")
    return dict.fromkeys(names, rank)


def generate(endpoint: Endpoint, rank: int, ranks: int, version: t.Optional[str], deadline_s: float) -> Response:
    """A few tokens of one data parallel rank."""
    body = {**_sampling(_PROMPT, _TOKENS), **_routed(rank, ranks, version)}
    return request(endpoint, "POST", "/generate", deadline_s, body)


def chat(endpoint: Endpoint, model: str, deadline_s: float) -> Response:
    """One chat answer, not streamed."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": _CHAT_TOKENS,
        # Some templates think only when asked to; the others pass over this.
        "chat_template_kwargs": {"thinking": True, "enable_thinking": True},
    }
    return request(endpoint, "POST", "/v1/chat/completions", deadline_s, body)


def tool_chat(endpoint: Endpoint, model: str, deadline_s: float) -> Response:
    """One chat answer with a function to call. tool_choice is auto, as clients ask: `required` needs a grammar backend,
    and one that doesn't know the device ends the scheduler (seen with SGLang 0.5.15, xgrammar on a CPU)."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _TOOL_PROMPT}],
        "tools": [_TOOL],
        "tool_choice": "auto",
        "temperature": 0,
        "max_tokens": _TOOL_TOKENS,
        "chat_template_kwargs": {"thinking": False, "enable_thinking": False},
    }
    return request(endpoint, "POST", "/v1/chat/completions", deadline_s, body)


def soak_prompt(nonce: str, index: int) -> str:
    """Differs from its first characters on, so that no prefix cache serves it."""
    shift = index % len(_SOAK_WORDS)
    words = [*_SOAK_WORDS[shift:], *_SOAK_WORDS[:shift]]
    return f"{index} {nonce} Tell a story in which these words come up in this order: {' '.join(words)}."


def judge_tokens(rank: int, ranks: int, answer: Response) -> Tokens:
    """Only tokens count: an answer without any, or of another rank, proves nothing."""
    problem = http_problem(answer)
    if problem is not None:
        return Tokens(rank, None, answer.seconds, problem, silent(answer))
    data = answer.json()
    meta = data.get("meta_info") if isinstance(data, dict) else None
    if not isinstance(meta, dict):
        return Tokens(rank, None, answer.seconds, "the answer to /generate has no meta_info")
    count = meta.get("completion_tokens")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        return Tokens(rank, None, answer.seconds, f"no token was generated (completion_tokens is {count!r})")
    served_by = meta.get("dp_rank")
    if ranks > 1 and served_by is not None and served_by != rank:
        return Tokens(rank, count, answer.seconds, f"rank {served_by} answered instead")
    return Tokens(rank, count, answer.seconds)


@dataclass(frozen=True)
class _Answer:
    """The parts of a chat answer that are judged."""

    thought: str
    content: str
    calls: tuple[t.Any, ...]
    parsed: bool
    finish_reason: t.Optional[str]
    reasoning_tokens: int
    raw_thought: t.Any


def _chat_answer(answer: Response) -> t.Optional[_Answer]:
    data = answer.json()
    try:
        choice = data["choices"][0]
        message = choice["message"]
        thought = message.get("reasoning_content")
        calls = message.get("tool_calls")
        content = message.get("content")
        counted = (data.get("usage") or {}).get("reasoning_tokens")
        reason = choice.get("finish_reason")
    except (TypeError, KeyError, IndexError, AttributeError):
        return None
    return _Answer(
        thought=thought if isinstance(thought, str) else "",
        content=content if isinstance(content, str) else "",
        calls=tuple(calls) if isinstance(calls, list) else (),
        parsed=isinstance(calls, list),
        finish_reason=reason if isinstance(reason, str) else None,
        reasoning_tokens=counted if isinstance(counted, int) and not isinstance(counted, bool) else 0,
        raw_thought=thought,
    )


def judge_reasoning(answer: Response) -> Reasoning:
    """reasoning_content must be there: with no parser in effect the chain of thought stands in content."""
    problem = http_problem(answer)
    if problem is not None:
        return Reasoning("unknown", problem, answer.seconds, silent(answer))
    seen = _chat_answer(answer)
    if seen is None:
        return Reasoning("unknown", "the answer has no message", answer.seconds)
    if seen.thought.strip():
        words = f"reasoning_content holds {len(seen.thought)} characters, content {len(seen.content)}"
        if not seen.content and seen.finish_reason != "length":
            words += "; content is empty though the answer is complete: the whole answer was taken for reasoning"
        return Reasoning("separated", words, answer.seconds)
    markup = _THOUGHT_MARKUP.search(seen.content)
    if seen.reasoning_tokens > 0 and markup is None:
        # Counted only where a parser is in effect (SGLang managers/scheduler.py); an empty thought has no text.
        words = f"{seen.reasoning_tokens} tokens were counted as reasoning; they hold no text"
        return Reasoning("separated", words, answer.seconds)
    if not seen.content.strip():
        return Reasoning("unknown", "the answer holds no text at all", answer.seconds)
    where = "content is all there is"
    if markup is not None:
        where = f"the chain of thought stands in content ({markup.group(0)})"
    return Reasoning(
        "missing", f"reasoning_content is {seen.raw_thought!r} and {where}: no reasoning parser works", answer.seconds
    )


def judge_tools(answer: Response) -> Tools:
    """A call must be made out into tool_calls: with no parser in effect its markup stands in the text."""
    problem = http_problem(answer)
    if problem is not None:
        if answer.status == 400 and _NO_PARSER.search(answer.body.decode("utf-8", errors="replace")):
            return Tools("missing", f"the server has no tool parser: {problem}", answer.seconds)
        return Tools("unknown", problem, answer.seconds, silent(answer), answer.status == 400)
    seen = _chat_answer(answer)
    if seen is None:
        return Tools("unknown", "the answer has no message", answer.seconds)
    names = [name for name in map(_called, seen.calls) if name is not None]
    if names:
        words = f"{', '.join(names)} was called"
        if seen.calls and not all(map(_readable_arguments, seen.calls)):
            words += "; the arguments are no JSON object"
        return Tools("called", words, answer.seconds)
    where, markup = "content", _CALL_MARKUP.search(seen.content) or _BARE_CALL.search(seen.content)
    if markup is None:
        # In a thought people and models write about markup too: only with the function's name behind it it is a call.
        where, markup = "reasoning_content", _call_in_thought(seen.thought)
    if markup is not None and seen.parsed and seen.finish_reason == "length":
        # SGLang gives an empty list, and no null, where a parser was at work.
        return Tools("not_called", "the call was cut short by the limit of tokens: this proves nothing", answer.seconds)
    if markup is not None:
        shown = markup.group(0).strip()[:60]
        return Tools("missing", f"tool_calls is empty and the call stands in {where} ({shown})", answer.seconds)
    words = "the model answered in words and called nothing: this proves nothing of the tool parser"
    if not (seen.content.strip() or seen.thought.strip()):
        words = "the answer holds neither a call nor text: this proves nothing of the tool parser"
    if seen.finish_reason == "length":
        words = f"{_TOOL_TOKENS} tokens were over before the model called anything: this proves nothing"
    return Tools("not_called", words, answer.seconds)


def _call_in_thought(thought: str) -> t.Optional[t.Match[str]]:
    for markup in _CALL_MARKUP.finditer(thought):
        if _TOOL_NAME in thought[markup.end() : markup.end() + _NEAR]:
            return markup
    return None


def _called(call: t.Any) -> t.Optional[str]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def _readable_arguments(call: t.Any) -> bool:
    try:
        return isinstance(json.loads(call["function"]["arguments"]), dict)
    except (TypeError, KeyError, ValueError, RecursionError):
        return False


def http_problem(answer: Response) -> t.Optional[str]:
    """Why an answer is none; None for a 200."""
    if answer.status is None:
        return answer.error or "no answer"
    if answer.status == 401:
        return "HTTP 401: the API key is missing or wrong"
    if answer.status != 200:
        return f"HTTP {answer.status}: {answer.body[:200].decode('utf-8', errors='replace').strip()}"
    return None


def silent(answer: Response) -> bool:
    """Somebody took the request and did not answer in time."""
    return answer.status is None and answer.kind == "timeout"
