# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.option_table import COMMON_OPTIONS
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.options import option_names, read_options

OLD = """
import argparse
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str, required=True)
        parser.add_argument("--tensor-parallel-size", "--tp-size", type=int, default=1)
        parser.add_argument("--cuda-graph-bs", type=int, nargs="+")
        parser.add_argument("--disable-cuda-graph", action="store_true")
        parser.add_argument("--numa-node", type=int, nargs="?")
        parser.add_argument("--strict", action=argparse.BooleanOptionalAction)
        parser.add_argument("--config", type=str)
"""
NEW = """
class ServerArgs:
    model_path: A[str, Arg(help="m", aliases=["--model"])]
    tp_size: A[int, Arg(help="t", aliases=["--tensor-parallel-size"])] = 1
    enable_metrics: A[bool, "bare"] = False
    maybe: A[Optional[bool], "bare"] = None
    sizes: A[Optional[List[int]], "many"] = None
    parsed: A[Optional[List[int]], Arg(help="one", type_parser=json_list)] = None
    hidden: A[bool, Arg(help="x", no_cli=True)] = False
    renamed_field: A[Literal["a", "b"], Arg(cli_name="--fp8-gemm-backend", help="x")] = "a"
    strict: A[bool, Arg(help="x", action=argparse.BooleanOptionalAction)] = True
    lora_paths: A[list, Arg(help="x", action=LoRAPathAction, action_kwargs={"type": str, "nargs": "*"})] = None
    sampling_backend: A[Optional[str], "declared and added by hand"] = None
    not_an_option: int = 3

    def add_cli_args(parser):
        parser.add_argument("--sampling-backend", type=str)
        parser.add_argument("--disable-cuda-graph", action=DeprecatedStoreTrueAction, new_flag="x")
        parser.add_argument("--monokernel", action=DeprecatedStoreConstAction, const_value="a", nargs=None)
"""
FIELDS = """
class Extra:
    cuda_graph_max_bs_decode: A[Optional[int], "x" "y"] = None
    cuda_graph_max_bs_prefill: A[Optional[int], f"x{1}"] = None
"""


def installed(root: Path, server_args: str, fields: str | None = None) -> str:
    (root / "srt").mkdir()
    (root / "srt" / "server_args.py").write_text(server_args)
    if fields is not None:
        (root / "srt" / "arg_groups" / "fields").mkdir(parents=True)
        (root / "srt" / "arg_groups" / "fields" / "graphs.py").write_text(fields)
    return str(root)


def test_options_added_by_hand(tmp_path: Path) -> None:
    table = read_options(installed(tmp_path, OLD))
    assert table is not None
    assert table.names == {
        *("model-path", "model", "tensor-parallel-size", "tp-size", "cuda-graph-bs", "disable-cuda-graph", "numa-node"),
        *("strict", "no-strict", "config"),
    }
    shapes = {
        name: (option.values, option.toggle, option.in_config) for name in table.names if (option := table.get(name))
    }
    assert shapes["cuda-graph-bs"] == ("many", False, True)
    assert shapes["disable-cuda-graph"] == ("none", False, True)
    assert shapes["numa-node"] == ("optional", False, True)
    assert shapes["no-strict"] == ("none", True, False)


def test_options_by_annotation(tmp_path: Path) -> None:
    table = read_options(installed(tmp_path, NEW, FIELDS))
    assert table is not None
    assert table.names == {
        *("model-path", "model", "tp-size", "tensor-parallel-size", "enable-metrics", "maybe", "sizes", "parsed"),
        *(
            "fp8-gemm-backend",
            "strict",
            "no-strict",
            "lora-paths",
            "sampling-backend",
            "disable-cuda-graph",
            "monokernel",
        ),
        *("cuda-graph-max-bs-decode", "cuda-graph-max-bs-prefill"),
    }
    shapes = {name: (option.values, option.in_config) for name in table.names if (option := table.get(name))}
    assert shapes["enable-metrics"] == shapes["maybe"] == ("none", True)
    assert shapes["sizes"] == ("many", True)
    assert shapes["parsed"] == ("one", True)
    assert shapes["lora-paths"] == ("many", False)
    assert shapes["disable-cuda-graph"] == ("none", False)
    assert shapes["monokernel"] == ("one", False)
    assert table.candidates("cuda-graph-max-bs") == ("cuda-graph-max-bs-decode", "cuda-graph-max-bs-prefill")
    assert table.get("cuda-graph-max-bs") is None
    assert table.get("tp") is not None


@pytest.mark.parametrize("source", ["", "def broken(", "\0"])
def test_sources_that_cannot_be_understood_are_unknown_not_empty(tmp_path: Path, source: str) -> None:
    assert option_names(installed(tmp_path, source)) is None


def test_missing_sources_are_unknown(tmp_path: Path) -> None:
    assert option_names(str(tmp_path / "nowhere")) is None


def test_the_built_in_list_completes_the_usual_abbreviations() -> None:
    for short, name in (("tp", "tp-size"), ("dp", "dp-size"), ("pp", "pp-size"), ("mem-frac", "mem-fraction-static")):
        assert COMMON_OPTIONS.candidates(short) == (name,)
