# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The common ones of SGLang 0.5.15's options: argparse with abbreviations, --config YAML before the command line.

The names stand here as add_argument calls, so that a reader of the sources (ast) finds them where SGLang has them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import types
from collections.abc import Sequence
from typing import Any

REASONING_PARSERS = [
    "auto",
    "deepseek-r1",
    "deepseek-v3",
    "glm45",
    "gpt-oss",
    "kimi",
    "kimi_k2",
    "minimax",
    "minimax-append-think",
    "mistral",
    "qwen3",
    "qwen3-thinking",
    "step3",
    "nemotron_3",
    "interns1",
]
TOOL_CALL_PARSERS = [
    "auto",
    "deepseekv3",
    "deepseekv31",
    "deepseekv32",
    "glm",
    "glm45",
    "glm47",
    "gpt-oss",
    "kimi_k2",
    "llama3",
    "minimax-m2",
    "mistral",
    "pythonic",
    "qwen",
    "qwen25",
    "qwen3_coder",
    "step3",
]
ATTENTION_BACKENDS = [
    "triton",
    "torch_native",
    "flex_attention",
    "nsa",
    "fa3",
    "fa4",
    "flashinfer",
    "flashmla",
    "cutlass_mla",
    "trtllm_mla",
    "tokenspeed_mla",
    "trtllm_mha",
    "dual_chunk_flash_attn",
    "aiter",
    "wave",
    "intel_amx",
    "ascend",
    "intel_xpu",
]


class ServerArgs(types.SimpleNamespace):
    """All options with their resolved values; its repr is what SGLang logs, secrets in clear."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser."""
        add = parser.add_argument
        parser.add_argument("--model-path", "--model", type=str, required=True)
        parser.add_argument("--tokenizer-path", type=str)
        parser.add_argument("--load-format", type=str, default="auto")
        parser.add_argument("--trust-remote-code", action="store_true")
        parser.add_argument("--context-length", type=int)
        parser.add_argument("--revision", type=str)
        parser.add_argument("--host", type=str, default="127.0.0.1")
        parser.add_argument("--port", type=int, default=30000)
        parser.add_argument("--nccl-port", type=int)
        parser.add_argument("--skip-server-warmup", action="store_true")
        parser.add_argument("--dtype", type=str, default="auto")
        parser.add_argument("--quantization", type=str)
        parser.add_argument("--kv-cache-dtype", type=str, default="auto")
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--max-running-requests", type=int)
        parser.add_argument("--max-total-tokens", type=int)
        parser.add_argument("--chunked-prefill-size", type=int)
        parser.add_argument("--max-prefill-tokens", type=int, default=16384)
        parser.add_argument("--schedule-policy", type=str, default="fcfs")
        parser.add_argument("--schedule-conservativeness", type=float, default=1.0)
        parser.add_argument("--page-size", type=int)
        parser.add_argument("--device", type=str)
        parser.add_argument("--tensor-parallel-size", "--tp-size", type=int, default=1, dest="tp_size")
        parser.add_argument("--pipeline-parallel-size", "--pp-size", type=int, default=1, dest="pp_size")
        parser.add_argument("--data-parallel-size", "--dp-size", type=int, default=1, dest="dp_size")
        parser.add_argument("--expert-parallel-size", "--ep-size", "--ep", type=int, default=1, dest="ep_size")
        parser.add_argument("--load-balance-method", type=str, default="auto")
        parser.add_argument("--dist-init-addr", "--nccl-init-addr", type=str)
        parser.add_argument("--nnodes", type=int, default=1)
        parser.add_argument("--node-rank", type=int, default=0)
        parser.add_argument("--base-gpu-id", type=int, default=0)
        parser.add_argument("--random-seed", type=int)
        parser.add_argument("--watchdog-timeout", type=float, default=300)
        parser.add_argument("--log-level", type=str, default="info")
        parser.add_argument("--log-requests", action="store_true")
        parser.add_argument("--enable-metrics", action="store_true")
        parser.add_argument("--api-key", type=str)
        parser.add_argument("--admin-api-key", type=str)
        parser.add_argument("--ssl-keyfile-password", type=str)
        parser.add_argument("--served-model-name", type=str)
        parser.add_argument("--chat-template", type=str)
        parser.add_argument("--reasoning-parser", type=str, choices=REASONING_PARSERS)
        parser.add_argument("--tool-call-parser", type=str, choices=TOOL_CALL_PARSERS)
        parser.add_argument("--attention-backend", type=str, choices=ATTENTION_BACKENDS)
        parser.add_argument("--prefill-attention-backend", type=str, choices=ATTENTION_BACKENDS)
        parser.add_argument("--decode-attention-backend", type=str, choices=ATTENTION_BACKENDS)
        parser.add_argument("--sampling-backend", type=str)
        parser.add_argument("--grammar-backend", type=str)
        parser.add_argument("--enable-hierarchical-cache", action="store_true")
        parser.add_argument("--hicache-ratio", type=float, default=2.0)
        parser.add_argument("--hicache-size", type=int, default=0)
        parser.add_argument("--hicache-write-policy", type=str, default="write_through")
        parser.add_argument("--hicache-mem-layout", type=str, default="page_first")
        parser.add_argument("--enable-dp-attention", action="store_true")
        parser.add_argument("--enable-mixed-chunk", action="store_true")
        parser.add_argument("--enable-torch-compile", action="store_true")
        parser.add_argument("--disable-radix-cache", action="store_true")
        parser.add_argument("--disable-cuda-graph", action="store_true")
        parser.add_argument("--disable-overlap-schedule", action="store_true")
        parser.add_argument("--disable-custom-all-reduce", action="store_true")
        parser.add_argument("--cuda-graph-max-bs", type=int)
        parser.add_argument("--cuda-graph-bs", type=int, nargs="+")
        parser.add_argument("--speculative-algorithm", type=str)
        parser.add_argument("--speculative-num-steps", type=int)
        # Accepted as --config=FILE too, and then ignored: only the two-word form is looked for before parsing.
        add("--config", type=str, help="a YAML file with options")


def prepare_server_args(argv: Sequence[str]) -> ServerArgs:
    """Parse a command line (without the program's name). Exits with status 2 on a bad option, as argparse does."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    words = list(argv)
    if "--config" in words:
        words = _merge_config(parser, words)
    values = vars(parser.parse_args(words))
    values.pop("config")
    return _resolve(ServerArgs(**values))


def _resolve(args: ServerArgs) -> ServerArgs:
    """Fill in what SGLang decides by itself."""
    defaults = {
        "tokenizer_path": args.model_path,
        "served_model_name": args.model_path,
        "device": "cuda",
        "mem_fraction_static": 0.88,
        "chunked_prefill_size": 8192,
        "cuda_graph_max_bs": 512 if args.tp_size >= 4 else 256,
        "attention_backend": "flashinfer",
        "sampling_backend": "flashinfer",
        "grammar_backend": "xgrammar",
        "page_size": 1,
        "max_running_requests": 2048,
        "random_seed": random.randrange(1 << 30),
    }
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def _merge_config(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Put the file's options before those of the command line, which win."""
    if words.count("--config") > 1:
        raise ValueError("Multiple config files specified! Only one allowed.")
    position = words.index("--config")
    if position == len(words) - 1:
        raise ValueError("No config file specified after --config flag!")
    path = pathlib.Path(words[position + 1])
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(f"Config file must be YAML format, got: {path.suffix}")
    if not path.exists():
        raise ValueError(f"Config file not found: {path}")
    config = read_yaml(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError("Config file must contain a dictionary at root level")
    switches = {action.dest for action in parser._actions if isinstance(action, argparse._StoreTrueAction)}
    merged: list[str] = []
    for key, value in config.items():
        if isinstance(value, bool):
            if key.replace("-", "_") not in switches:
                merged += [f"--{key}", str(value).lower()]
            elif value:
                merged.append(f"--{key}")
        elif isinstance(value, list):
            merged += [f"--{key}", *map(str, value)] if value else []
        else:
            merged += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return merged + words[:position] + words[position + 2 :]


def read_yaml(text: str) -> Any:
    """YAML by PyYAML where it is installed, else the subset that config files of this project use."""
    try:
        import yaml
    except ImportError:
        return _read_flat_yaml(text)
    return yaml.safe_load(text) or {}


def _read_flat_yaml(text: str) -> dict[str, Any]:
    """``key: scalar`` lines, lists as ``[a, b]`` or ``- item`` lines, JSON objects; anything else is a ValueError."""
    config: dict[str, Any] = {}
    key = ""
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#") or stripped == "---":
            continue
        if stripped.startswith("- ") and isinstance(config.get(key), list):
            config[key].append(_scalar(stripped[2:]))
            continue
        key, colon, value = stripped.partition(":")
        if not colon or line[0] in " \t":
            raise ValueError(f"line {number}: not in the YAML subset that is read without PyYAML: {line!r}")
        config[key] = _scalar(value.strip()) if value.strip() else []
    return config


def _scalar(text: str) -> Any:
    if text[:1] in "'\"" and text[-1:] == text[:1]:
        return text[1:-1].replace("''", "'") if text[0] == "'" else json.loads(text)
    if text[:1] == "[" and text[-1:] == "]" and '"' not in text:
        return [_scalar(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    named = {"true": True, "false": False, "null": None}
    if text.lower() in named:
        return named[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text
