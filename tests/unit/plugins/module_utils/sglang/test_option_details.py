# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an option says beyond its name, in both styles of declaration."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.option_table import (
    NOT_KNOWN,
    Option,
    OptionTable,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.options import read_options
from ansible_collections.cleanslate.sglang.tests.unit.plugins.module_utils.sglang import fixture_sglang


def table_of(directory: str) -> OptionTable:
    table = read_options(directory)
    assert table is not None
    return table


@pytest.fixture
def old(tmp_path: Path) -> OptionTable:
    return table_of(fixture_sglang.old(tmp_path))


@pytest.fixture
def new(tmp_path: Path) -> OptionTable:
    return table_of(fixture_sglang.new(tmp_path))


def get(table: OptionTable, name: str) -> Option:
    option = table.get(name)
    assert option is not None and name in option.names, name
    return option


def test_choices_are_followed_through_constants_imports_and_variables(old: OptionTable) -> None:
    choices = {option.names[0]: option.choices for option in old.options if option.choices is not None}
    assert choices == {
        "dtype": ("auto", "half"),
        "draft-quantization": ("awq", "fp8", "unquant"),
        "sampling-backend": ("flashinfer", "pytorch"),
        "lora-target-modules": ("q_proj", "k_proj", "all"),
        "lora-rank": (16, 32),
        "reasoning-parser": ("auto", "kimi_k2", "deepseek-r1"),
    }


def test_a_choice_under_a_condition_and_a_list_that_grows_are_not_taken_for_sure(old: OptionTable) -> None:
    assert get(old, "sampling-backend").conditional == ("token_oracle",)
    assert get(old, "grown").unread == ("choices",)


def test_types_of_arguments_added_by_hand(old: OptionTable) -> None:
    types = {option.names[0]: option.type for option in old.options}
    assert types["tp-size"] == "int" and types["mem-fraction-static"] == "float" and types["limits"] == "json"
    assert types["draft-attention"] == "nullable_str"
    assert types["enable-metrics"] is None  # bare
    changed = get(old, "max-total-tokens")
    assert (changed.type, changed.unread) == (None, ("type",))  # a function of a known name, with another text


def test_shapes_requirements_and_defaults(old: OptionTable) -> None:
    assert get(old, "model-path").required and not get(old, "tp-size").required
    nargs = {option.names[0]: option.nargs for option in old.options}
    assert nargs["pair"] == 2 and nargs["cuda-graph-bs"] == "+" and nargs["checksum"] == "?" and nargs["dtype"] is None
    assert nargs["enable-metrics"] == nargs["strict"] == 0
    assert get(old, "dtype").default == "auto" and get(old, "tp-size").default == 1
    assert get(old, "checksum").const == "" and get(old, "enable-metrics").default is False
    assert get(old, "tp-size").dest == "tp_size"


def test_fields_become_arguments_by_sglangs_rules(new: OptionTable) -> None:
    found = {option.names[0]: (option.type, option.nargs, option.choices, option.default) for option in new.options}
    expected: dict[str, tuple[t.Any, ...]] = {
        "model-path": ("str", None, None, None),
        "tensor-parallel-size": ("int", None, None, 1),
        "fraction": ("float", None, None, None),
        "old-style": ("float", None, None, 0.5),
        "enable-metrics": (None, 0, None, None),
        "backend": ("str", None, ("full", "disabled"), None),
        "narrowed": ("str", None, ("none", "a"), None),
        "level": ("int", None, (1, 2), 1),
        "cuda-graph-bs-decode": ("int", "+", None, None),
        "ratios": ("float", "*", None, []),
        "whole": ("json", None, None, None),
        "union": ("str", None, None, None),
        "capture": ("str", None, ("full", "disabled"), "full"),
        "attention": ("str", None, ("triton", "fa3", "extra"), None),
        "reasoning-parser": ("str", None, ("auto", "kimi_k2", "qwen3"), "auto"),
        "mode": ("str", None, ("none", "all"), None),
    }
    assert {name: found[name] for name in expected} == expected
    assert "runtime-only" not in new.names and get(new, "tp-size").dest == "tp_size"


def test_required_fields(new: OptionTable) -> None:
    assert sorted(option.names[0] for option in new.options if option.required) == ["model-path", "wanted"]


def test_retired_options_and_what_takes_their_place(new: OptionTable) -> None:
    retired = {
        option.names[0]: (option.action, option.successor, option.refusal)
        for option in new.options
        if option.deprecated
    }
    assert retired == {
        "cuda-graph-bs": ("DeprecatedAliasStoreAction", "--cuda-graph-bs-decode", None),
        "disable-cuda-graph": ("DeprecatedStoreTrueAction", "--backend=disabled", None),
        "stopped": ("DeprecatedAction", None, "--stopped is gone. Use --going."),
        "noop": ("DeprecatedAction", None, None),
        "forced": ("DeprecatedStoreConstAction", None, None),
        "retired": ("store_true", "--fraction", None),
        "alias": ("store_true", "--backend=full", None),
    }
    assert get(new, "forced").const == "full"


def test_what_the_source_does_not_tell_is_named(new: OptionTable) -> None:
    unread = {option.names[0]: option.unread for option in new.options if option.unread}
    assert unread == {
        "strange": ("action",),
        "computed": ("choices",),
        "unknown-type": ("type",),
        "lora-paths": ("action",),  # no such class in these sources
    }
    assert get(new, "forced").default is None and get(new, "strange").choices is None


def test_the_config_file_refuses_every_option_of_a_field_that_a_retired_one_sets(new: OptionTable) -> None:
    outside = sorted(option.names[0] for option in new.options if not option.in_config)
    assert outside == [
        # backend is set by --forced, cuda_graph_bs_decode by --cuda-graph-bs: SGLang goes by the field.
        *("backend", "cuda-graph-bs", "cuda-graph-bs-decode", "disable-cuda-graph", "forced", "lora-paths", "noop"),
        *("stopped", "strange"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        'parser.add_argument("--x", choices={[1]: 2})',
        'parser.add_argument("--x", choices=[*X], nargs=[1])',
        'parser.add_argument("--x", choices=X)\nX = X',
        'parser.add_argument("--x", choices=f())\ndef f():\n    return f()',
        'parser.add_argument("--x", choices=[a for a in b for b in c])',
        'parser.add_argument("--x", choices=-"a", type=lambda: 1)',
        'from sglang.srt.server_args import Y\nparser.add_argument("--x", choices=Y)',
        'class C:\n    x: A[Optional[()], ""] = 1\n    y: A[int] = 1\n    z: A[Literal[()], Arg()] = 2',
    ],
)
def test_strange_sources_are_not_known_rather_than_an_error(tmp_path: Path, line: str) -> None:
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt" / "server_args.py").write_text(line + "\nparser.add_argument('--y', type=int)\n")
    table = table_of(str(tmp_path))
    assert get(table, "y").type == "int"
    if "x" in table.names and "class C" not in line:
        assert get(table, "x").choices is None and "choices" in get(table, "x").unread


def test_a_default_that_is_no_literal_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt" / "server_args.py").write_text("parser.add_argument('--y', default=os.getpid())\n")
    assert get(table_of(str(tmp_path)), "y").default is NOT_KNOWN
