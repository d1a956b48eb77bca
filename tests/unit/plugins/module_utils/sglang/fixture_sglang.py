# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two small SGLang packages in both styles of declaration, as sources on disk."""

from __future__ import annotations

from pathlib import Path

COMMON = '''
import argparse
import json
from decimal import Decimal
import re

def human_readable_int(value: str) -> int:
    """A changed function: not the one that is known."""
    return int(value)

def nullable_str(val: str):
    if not val or val == "None":
        return None
    return val

TARGETS = ["q_proj", "k_proj"]
ALL = "all"
'''

OLD = """
import argparse
import json
from sglang.srt.utils.common import (
    ALL,
    TARGETS,
    human_readable_int,  # sizes
    nullable_str,
)
from sglang.srt.parser.reasoning_parser import ReasoningParser

DTYPES = ["auto", "half"]
QUANT = ["awq", "fp8"]
DRAFT_QUANT = [*QUANT, "unquant"]
SAMPLING = {"flashinfer", "pytorch"}
if envs.ORACLE.get():
    SAMPLING.add("token_oracle")
GROWN = ["a"]
GROWN.append("b")

def add_dtypes(choices):
    DTYPES.extend(choices)

class ServerArgs:
    dtype: str = "auto"

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str, required=True)
        parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
        parser.add_argument("--dtype", type=str, default=ServerArgs.dtype, choices=DTYPES)
        parser.add_argument("--draft-quantization", type=str, choices=DRAFT_QUANT)
        parser.add_argument("--sampling-backend", type=str, choices=SAMPLING)
        parser.add_argument("--grown", choices=GROWN)
        parser.add_argument("--lora-target-modules", type=str, choices=TARGETS + [ALL], nargs="*")
        parser.add_argument("--lora-rank", type=int, choices=[16, 32])
        names = list(ReasoningParser.DetectorMap.keys())
        parser.add_argument("--reasoning-parser", type=str, choices=["auto"] + names)
        parser.add_argument("--max-total-tokens", type=human_readable_int)
        parser.add_argument("--draft-attention", type=nullable_str)
        parser.add_argument("--limits", type=json.loads)
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--cuda-graph-bs", type=int, nargs="+")
        parser.add_argument("--pair", type=int, nargs=2)
        parser.add_argument("--checksum", type=str, nargs="?", const="")
        parser.add_argument("--enable-metrics", action="store_true")
        parser.add_argument("--strict", action=argparse.BooleanOptionalAction)
        parser.add_argument("--api-key", type=str)
        parser.add_argument("--config", type=str)
"""

PARSERS = '''
from typing import Dict
class ReasoningParser:
    """Doc."""
    DetectorMap: Dict[str, type] = {
        "kimi_k2": KimiDetector,
        "deepseek-r1": DeepSeekDetector,
    }
'''

NEW = """
import argparse
import json
from sglang.srt.arg_groups.argparse_actions import DeprecatedAction, DeprecatedAliasStoreAction
from sglang.srt.graph_config import Backend, Mode
from sglang.srt.utils.common import nullable_str

def _reasoning_parser_choices():
    module = sys.modules.get("x")
    if module is not None:
        return list(module.Names)
    from sglang.srt.parser.names import NAMES
    return list(NAMES)

def _modes():
    from sglang.srt.graph_config import Mode
    return list(Mode)

class ServerArgs:
    def add_cli_args(parser):
        parser.add_argument("--reasoning-parser", type=str, choices=["auto"] + _reasoning_parser_choices(),
                            default=_declared_default("reasoning_parser"))
        parser.add_argument("--mode", choices=[m.name.lower() for m in _modes()])
        parser.add_argument("--cuda-graph-bs", type=int, nargs="+", action=DeprecatedAliasStoreAction,
                            new_flag="--cuda-graph-bs-decode", dest="cuda_graph_bs_decode")
        parser.add_argument("--disable-cuda-graph", action=DeprecatedStoreTrueAction, new_flag="--backend=disabled")
        parser.add_argument("--stopped", action=DeprecatedAction, error_message="--stopped is gone. Use --going.")
        parser.add_argument("--noop", action=DeprecatedAction)
        parser.add_argument("--forced", action=DeprecatedStoreConstAction, dest="backend", const_value=Backend.FULL)
        parser.add_argument("--strange", action=SomeAction)
        parser.add_argument("--computed", choices=os.listdir("/"))
        parser.add_argument("--config", type=str)
"""

FIELDS = """
from typing import Dict, List, Literal, Optional, Union
from sglang.srt.arg_groups.choices import BACKENDS
from sglang.srt.graph_config import Backend

class Model:
    model_path: A[str, Arg(help="m", aliases=["--model"])]
    reasoning_parser: A[Optional[str], Arg(help="x", no_cli=True)] = "auto"
    tp_size: A[int, Arg(help="t", cli_name="--tensor-parallel-size", aliases=["--tp-size"])] = 1
    fraction: A[Optional[float], "f", NS("memory")] = None
    old_style: A[float | None, "f"] = 0.5
    enable_metrics: A[Optional[bool], "bare"] = None
    backend: A[Optional[Literal["full", "disabled"]], Arg(help="b")] = None
    narrowed: A[Literal[None, "a", "b"], Arg(help="b", choices=["none", "a"])] = None
    level: A[Literal[1, 2], "l"] = 1
    bs_decode: A[Optional[List[int]], Arg(help="b", cli_name="--cuda-graph-bs-decode")] = None
    cuda_graph_bs_decode: A[Optional[List[int]], Arg(help="x", no_cli=True)] = None
    ratios: A[List[float], Arg(help="r", nargs="*")] = []
    whole: A[Optional[List[int]], Arg(help="one word", type_parser=json.loads)] = None
    union: A[Optional[Union[str, Dict]], "u"] = None
    capture: A[str, Arg(help="c", choices=Backend.ALL)] = Backend.FULL
    attention: A[Optional[str], Arg(help="a", choices=BACKENDS + ["extra"])] = None
    unknown_type: A[str, Arg(help="a", type_parser=mystery)] = "x"
    wanted: A[str, Arg(help="w", required=True)] = "x"
    not_wanted: A[str, Arg(help="w", required=False)]
    retired: A[bool, "[Deprecated] Use --fraction instead."] = False
    alias: A[bool, "(Deprecated: use --backend=full) x"] = False
    lora_paths: A[list, Arg(help="x", action=LoRAPathAction, action_kwargs={"type": str, "nargs": "*"})] = None
    runtime_only: A[int, Derived("x")] = 1
"""

CHOICES = """
BACKENDS = [
    "triton",
    # a comment in between
    "fa3",  # and one behind
]
add_backends = BACKENDS.extend
"""

GRAPH = '''
from enum import IntEnum
class Backend:
    """Doc."""
    FULL = "full"
    DISABLED = "disabled"
    ALL = (FULL, DISABLED)

class Mode(IntEnum):
    NONE = 0
    ALL = 1
'''

NAMES = """
NAMES: list[str] = ["kimi_k2", "qwen3"]
"""


def _write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / "srt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def old(root: Path) -> str:
    return _write(root, {"server_args.py": OLD, "utils/common.py": COMMON, "parser/reasoning_parser.py": PARSERS})


def new(root: Path) -> str:
    return _write(
        root,
        {
            "server_args.py": NEW,
            "arg_groups/fields/model.py": FIELDS,
            "arg_groups/choices.py": CHOICES,
            "graph_config.py": GRAPH,
            "parser/names.py": NAMES,
            "utils/common.py": COMMON,
        },
    )
