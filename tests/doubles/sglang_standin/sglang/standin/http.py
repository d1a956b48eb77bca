# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The HTTP side, in the shapes of SGLang 0.5.15 (and the endpoints that other versions add or lack)."""

from __future__ import annotations

import datetime
import hmac
import http.server
import json
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable
from urllib.parse import parse_qs, urlsplit

from sglang.srt.server_args import ServerArgs
from sglang.standin.engine import Engine
from sglang.standin.log import log
from sglang.standin.settings import Settings
from sglang.version import __version__, version_at_least

THOUGHT = "Let me think about it."
ANSWER = "Hello from the stand-in."
# As Kimi K2 writes a call; the parser's work is to take it out of the text.
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)
ARGUMENTS = '{"city": "Oslo"}'
OPEN_PATHS = ("/health", "/metrics") + (("/ready",) if version_at_least(0, 5, 20) else ())


class Api:
    """State and answers, apart from the wire."""

    def __init__(
        self,
        args: ServerArgs,
        settings: Settings,
        engine: Engine,
        info: dict[str, int],
        on_request: Callable[[], None],
    ) -> None:
        self.args = args
        self.settings = settings
        self.engine = engine
        self.info = info
        self.on_request = on_request
        self.up = False
        self.unhealthy = False
        self.terminating = False
        self.started = time.time()

    def health(self) -> int:
        """HTTP status of /health: starting or stopping 503, else that of a one-token request with a time limit."""
        if self.terminating or not self.up:
            return 503
        time.sleep(self.settings.health_sleep_s)
        if self.engine.any_rank_answers(self.settings.health_timeout_s):
            self.unhealthy = False
            return 200
        log(
            "Health check failed. Server couldn't get a response from detokenizer for last "
            f"{self.settings.health_timeout_s:g} seconds."
        )
        self.unhealthy = True
        return 503

    def generate_warmup(self) -> None:
        """One request to every data parallel rank, counted as the server's own."""
        for dp_rank in range(len(self.engine.groups)):
            for _token in self._tokens(8, dp_rank, from_user=False):
                pass

    def _tokens(self, count: int, dp_rank: int | None, from_user: bool = True) -> Iterator[int]:
        """Yield the serving rank once per token; the request counts as in flight until the last one is taken."""
        self.on_request()
        request_id = uuid.uuid4().hex
        rank = self.engine.begin(request_id, dp_rank)
        try:
            if from_user and not self.engine.admit():
                raise Failed("the stand-in fails this request")
            for _unused in range(count):
                time.sleep(self.settings.token_s)
                self.engine.step(rank, from_user)
                yield rank
        finally:
            self.engine.end(request_id)

    def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """/generate: the text so far after each token; the last one is the answer of a plain request."""
        dp_rank = body.get("routed_dp_rank", body.get("data_parallel_rank"))
        if dp_rank is not None and not 0 <= int(dp_rank) < len(self.engine.groups):
            raise BadRequest(f"routed_dp_rank={dp_rank} out of range [0, {len(self.engine.groups)})")
        count = int((body.get("sampling_params") or {}).get("max_new_tokens", 16))
        request_id = uuid.uuid4().hex
        started = time.monotonic()
        words = (ANSWER + " ").split(" ")
        text = ""
        for done, rank in enumerate(self._tokens(count, None if dp_rank is None else int(dp_rank)), start=1):
            text += " " + (words[(done - 1) % (len(words) - 1)])
            meta: dict[str, Any] = {
                "id": request_id,
                "finish_reason": {"type": "length", "length": count} if done == count else None,
                "prompt_tokens": 4,
                "completion_tokens": done,
                "cached_tokens": 0,
                "e2e_latency": time.monotonic() - started,
            }
            if len(self.engine.groups) > 1:
                meta["dp_rank"] = rank
            yield {"text": text, "output_ids": list(range(1, done + 1)), "meta_info": meta}

    def chat_parts(self, body: dict[str, Any]) -> Iterator[dict[str, str]]:
        """The deltas of one chat answer: reasoning apart where a parser was asked for, else inside the content."""
        count = int(body.get("max_completion_tokens") or body.get("max_tokens") or 8)
        pieces = [*self._thought(body), {"content": self._called_text(body) or ANSWER}]
        if self._called_text(body):
            count = len(pieces)
        for done, _rank in enumerate(self._tokens(count, body.get("routed_dp_rank"))):
            if done < len(pieces):
                yield pieces[done]
            else:
                yield {"content": " ..."}

    def _thought(self, body: dict[str, Any]) -> list[dict[str, str]]:
        kwargs = body.get("chat_template_kwargs") or {}
        if not self.settings.thinks or kwargs.get("thinking") is False or kwargs.get("enable_thinking") is False:
            return []
        if self.args.reasoning_parser:
            return [{"reasoning_content": THOUGHT}]
        return [{"content": f"<think>{THOUGHT}</think>"}]

    def _called_text(self, body: dict[str, Any]) -> str:
        """The call as the model writes it; empty where it was given nothing to call, or answers in words."""
        tools = body.get("tools") or []
        if not tools or body.get("tool_choice") == "none" or not self.settings.calls_tools:
            return ""
        return CALL.format(name=tools[0]["function"]["name"], arguments=ARGUMENTS)

    def tool_calls(self, body: dict[str, Any]) -> list[dict[str, Any]] | None:
        """What a tool parser makes of the call; None without a parser."""
        if not self._called_text(body) or not self.args.tool_call_parser:
            return None
        name = body["tools"][0]["function"]["name"]
        function = {"name": name, "arguments": ARGUMENTS}
        return [{"id": f"functions.{name}:0", "index": 0, "type": "function", "function": function}]

    def server_info(self) -> dict[str, Any]:
        """/server_info: every rank has to answer, without a time limit; echoes the secrets in clear."""
        states = []
        self.on_request()
        request_id = uuid.uuid4().hex
        self.engine.begin(request_id, 0)
        try:
            for dp_rank in range(len(self.engine.groups)):
                self.engine.step(dp_rank, False)
                states.append(
                    {
                        **vars(self.args),
                        "last_gen_throughput": 123.4,
                        "memory_usage": {
                            "weight": 61.73,
                            "kvcache": 13.22,
                            "token_capacity": self.info["max_total_num_tokens"],
                            "graph": 1.5,
                        },
                        "effective_max_running_requests_per_dp": self.args.max_running_requests,
                    }
                )
        finally:
            self.engine.end(request_id)
        more = json.loads(Path(self.settings.more_info).read_text()) if self.settings.more_info else {}
        result: dict[str, Any] = {
            **more,
            **vars(self.args),
            "status": "ready",
            **self.info,
            "internal_states": states,
            "version": __version__,
        }
        if version_at_least(0, 5, 15):
            result["kv_events"] = None
        if version_at_least(0, 5, 20):
            result["launch_command"] = " ".join(sys.argv[1:])
        return result

    def loads(self) -> dict[str, Any]:
        """/v1/loads: answered from shared memory, so it answers whatever the schedulers do."""
        running = list(self.engine.running.values())
        return {
            "timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(),
            "version": __version__,
            "loads": [
                {
                    "dp_rank": dp_rank,
                    "timestamp": time.time(),
                    "num_running_reqs": running.count(dp_rank),
                    "num_waiting_reqs": 0,
                    "num_waiting_uncached_tokens": 0,
                    "num_used_tokens": 16 * running.count(dp_rank),
                    "num_total_tokens": 16 * running.count(dp_rank),
                    "max_total_num_tokens": self.info["max_total_num_tokens"],
                    "token_usage": 0.0,
                    "gen_throughput": 0.0,
                    "cache_hit_rate": 0.0,
                    "utilization": 0.0,
                    "max_running_requests": self.args.max_running_requests,
                }
                for dp_rank in range(len(self.engine.groups))
            ],
        }

    def model_info(self) -> dict[str, Any]:
        """/model_info."""
        return {
            "model_path": self.args.model_path,
            "tokenizer_path": self.args.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "standin",
            "architectures": ["StandinForCausalLM"],
        }

    def models(self) -> dict[str, Any]:
        """/v1/models."""
        name = self.args.served_model_name
        card = {
            "id": name,
            "object": "model",
            "created": int(self.started),
            "owned_by": "sglang",
            "root": name,
            "parent": None,
            "max_model_len": self.args.context_length or 262144,
        }
        return {"object": "list", "data": [card]}


class BadRequest(Exception):
    """Answered with status 400 and the text."""


class Failed(Exception):
    """Answered with status 500 and the text."""


class Handler(http.server.BaseHTTPRequestHandler):
    """The wire. ``api`` is set on a subclass made for each server."""

    api: Api
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not self._allowed(path):
            return
        api = self.api
        if path in ("/health", "/health_generate"):
            self._reply(api.health())
        elif path == "/ready" and version_at_least(0, 5, 20):
            self._reply(200 if api.up and not api.unhealthy and not api.terminating else 503)
        elif path == "/metrics" and api.args.enable_metrics:
            lines = [
                f'sglang:num_running_reqs{{dp_rank="{load["dp_rank"]}"}} {float(load["num_running_reqs"])}'
                for load in api.loads()["loads"]
            ]
            self._reply(200, ("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4")
        else:
            answer = self._json_answers().get(path)
            self._reply_json(200, answer()) if answer else self._reply_json(404, {"detail": "Not Found"})

    def _json_answers(self) -> dict[str, Callable[[], dict[str, Any]]]:
        api = self.api
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "/get_model_info": api.model_info,
            "/get_server_info": api.server_info,
            "/v1/models": api.models,
        }
        if version_at_least(0, 5, 6):
            answers.update({"/model_info": api.model_info, "/server_info": api.server_info})
        if version_at_least(0, 5, 8):
            wanted = parse_qs(urlsplit(self.path).query).get("dp_rank")
            answers["/v1/loads"] = lambda: _only_rank(api.loads(), wanted[0] if wanted else None)
        return answers

    def do_POST(self) -> None:
        # The body is read before anything is answered, or a kept connection would read it as the next request.
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        if not self._allowed(path):
            return
        try:
            body = json.loads(raw or b"{}")
            if path == "/generate":
                self._generate(body)
            elif path == "/v1/chat/completions":
                self._chat(body)
            else:
                self._reply_json(404, {"detail": "Not Found"})
        except (BadRequest, ValueError) as error:
            self._reply_json(400, {"error": {"message": str(error)}})
        except Failed as error:
            self._reply_json(500, {"error": {"message": str(error)}})

    def _generate(self, body: dict[str, Any]) -> None:
        if body.get("stream"):
            self._stream(self.api.generate(body))
            return
        answers = list(self.api.generate(body))
        self._reply_json(200, answers[-1] if answers else {})

    def _chat(self, body: dict[str, Any]) -> None:
        base = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": self.api.args.served_model_name}
        parts = self.api.chat_parts(body)
        if body.get("stream"):
            self._stream(
                {
                    **base,
                    "object": "chat.completion.chunk",
                    "choices": [{"index": 0, "delta": {"role": "assistant", **part}, "finish_reason": None}],
                }
                for part in parts
            )
            return
        texts = {"content": "", "reasoning_content": ""}
        count = 0
        for part in parts:
            count += 1
            for key, text in part.items():
                texts[key] += text
        calls = self.api.tool_calls(body)
        message = {
            "role": "assistant",
            "content": "" if calls else texts["content"],
            "reasoning_content": texts["reasoning_content"] or None,
            "tool_calls": calls,
        }
        usage = {
            "prompt_tokens": 4,
            "total_tokens": 4 + count,
            "completion_tokens": count,
            "reasoning_tokens": 1 if texts["reasoning_content"] else 0,
        }
        self._reply_json(
            200,
            {
                **base,
                "object": "chat.completion",
                "choices": [
                    {
                        "index": 0,
                        "message": message,
                        "logprobs": None,
                        "finish_reason": "tool_calls" if calls else "stop",
                    }
                ],
                "usage": usage,
            },
        )

    def _stream(self, events: Iterator[dict[str, Any]]) -> None:
        """Server-sent events; the connection's end is the end of the body."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _allowed(self, path: str) -> bool:
        key = self.api.args.api_key
        given = self.headers.get("Authorization", "")
        if not key or path.startswith(OPEN_PATHS):
            return True
        scheme, _space, token = given.partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), key.encode()):
            return True
        self._reply_json(401, {"error": "Unauthorized"})
        return False

    def _reply_json(self, status: int, value: dict[str, Any]) -> None:
        self._reply(status, json.dumps(value).encode(), "application/json")

    def _reply(self, status: int, body: bytes = b"", content_type: str = "") -> None:
        self.send_response(status)
        if content_type:
            self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """uvicorn's access line, on stdout as with SGLang."""
        host, port = self.client_address[:2]
        phrase = self.responses.get(code, ("",))[0]
        print(f'INFO:     {host}:{port} - "{self.requestline}" {int(code)} {phrase}', flush=True)


def _only_rank(loads: dict[str, Any], dp_rank: str | None) -> dict[str, Any]:
    if dp_rank is None:
        return loads
    return {**loads, "loads": [load for load in loads["loads"] if str(load["dp_rank"]) == dp_rank]}


class DummyHandler(http.server.BaseHTTPRequestHandler):
    """What a node of rank 1 and above serves: a constant 200 for /health, and nothing else."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        known = urlsplit(self.path).path in ("/ping", "/health", "/health_generate")
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Nothing, as with SGLang (log_level warning)."""


class Server(http.server.ThreadingHTTPServer):
    """One thread per connection; a client that went away is no error worth a traceback."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):
            super().handle_error(request, client_address)

    def server_bind(self) -> None:
        """Bind without looking the host's name up."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


def listen(args: ServerArgs, api: Api) -> Server:
    """Bind the HTTP port. Where it is taken, end with uvicorn's message and status 1."""
    return _bind(args, type("BoundHandler", (Handler,), {"api": api}))


def listen_dummy(args: ServerArgs) -> Server:
    """Bind the port of a later node."""
    return _bind(args, DummyHandler)


def _bind(args: ServerArgs, handler: type[http.server.BaseHTTPRequestHandler]) -> Server:
    try:
        return Server((args.host, args.port), handler)
    except OSError as error:
        sys.stderr.write(
            f"ERROR:    [Errno {error.errno}] error while attempting to bind on address ('{args.host}', {args.port}): "
            f"{(error.strerror or '').lower()}\n"
        )
        sys.exit(1)
