# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a running server is asked for its proof, and what its answers prove: tokens of a rank, reasoning kept apart."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from .http import Endpoint, Response, request
from .install import version_tuple

_ROUTED_SINCE = (0, 5, 12)
_TOKENS = 4
_CHAT_TOKENS = 96
_PROMPT = "Count from one to five."


@dataclass(frozen=True)
class Tokens:
    """What one data parallel rank generated; ``problem`` None: it did."""

    dp_rank: int
    count: t.Optional[int]
    seconds: float
    problem: t.Optional[str] = None


@dataclass(frozen=True)
class Reasoning:
    """Whether a chat answer keeps the chain of thought apart. ``verdict``: separated, missing or unknown."""

    verdict: str
    message: str
    seconds: float


@dataclass(frozen=True)
class Tools:
    """Whether a tool parser works. ``verdict``: called, missing (the call stands in the text), not_called (the model
    answered in words: proves nothing) or unknown."""

    verdict: str
    message: str
    seconds: float


def generate(endpoint: Endpoint, rank: int, ranks: int, version: t.Optional[str], deadline_s: float) -> Response:
    """A few tokens of one data parallel rank."""
    body: dict[str, t.Any] = {
        "text": _PROMPT,
        "sampling_params": {"max_new_tokens": _TOKENS, "temperature": 0, "ignore_eos": True},
    }
    if ranks > 1:
        known = version_tuple(version)
        # An older SGLang passes over the newer name without a word, and the other way round: unsure, say both.
        if known is None or known >= _ROUTED_SINCE:
            body["routed_dp_rank"] = rank
        if known is None or known < _ROUTED_SINCE:
            body["data_parallel_rank"] = rank
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


def judge_tokens(rank: int, ranks: int, answer: Response) -> Tokens:
    """Only tokens count: an answer without any, or of another rank, proves nothing."""
    problem = _http_problem(answer)
    if problem is not None:
        return Tokens(rank, None, answer.seconds, problem)
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


def judge_reasoning(answer: Response) -> Reasoning:
    """reasoning_content must be there: with no parser in effect the chain of thought stands in content."""
    problem = _http_problem(answer)
    if problem is not None:
        return Reasoning("unknown", problem, answer.seconds)
    data = answer.json()
    try:
        message = data["choices"][0]["message"]
        thought, content = message.get("reasoning_content"), message.get("content")
        reason = data["choices"][0].get("finish_reason")
        usage = data.get("usage") or {}
    except (TypeError, KeyError, IndexError, AttributeError):
        return Reasoning("unknown", "the answer has no message", answer.seconds)
    if isinstance(thought, str) and thought.strip():
        words = f"reasoning_content holds {len(thought)} characters, content {len(content or '')}"
        if not content and reason != "length":
            words += "; content is empty though the answer is complete: the whole answer was taken for reasoning"
        return Reasoning("separated", words, answer.seconds)
    counted = usage.get("reasoning_tokens")
    if not content and isinstance(counted, int) and counted > 0:
        return Reasoning("separated", f"{counted} tokens were counted as reasoning; they hold no text", answer.seconds)
    where = "the chain of thought stands in content" if "think" in str(content).lower() else "content is all there is"
    return Reasoning(
        "missing", f"reasoning_content is {thought!r} and {where}: no reasoning parser works", answer.seconds
    )


def _http_problem(answer: Response) -> t.Optional[str]:
    if answer.status is None:
        return answer.error or "no answer"
    if answer.status == 401:
        return "HTTP 401: the API key is missing or wrong"
    if answer.status != 200:
        return f"HTTP {answer.status}: {answer.body[:200].decode('utf-8', errors='replace').strip()}"
    return None
