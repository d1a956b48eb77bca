# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.argtypes import NotThisType, convert, expected

PHASES = {"decode": ("backend", "max_bs"), "prefill": ("backend",)}


@pytest.mark.parametrize(
    ("kind", "word", "value"),
    [
        ("int", "1_0", 10),
        ("int", " 7 ", 7),
        ("int", "-1", -1),
        ("float", "1e-5", 1e-5),
        ("float", "inf", float("inf")),
        ("size", "128k", 128_000),
        ("size", "1.5k", 1500),
        ("size", "0.0015k", 1),
        ("size", "1Ki", 1024),
        ("size", " 2M ", 2_000_000),
        ("size", "1_0", 10),
        ("size", "-1", -1),
        ("nullable_str", "None", None),
        ("nullable_str", "", None),
        ("nullable_str", "none", "none"),
        ("json", '{"a": [1, null]}', {"a": [1, None]}),
        ("json", "-1", -1),
        ("json_strict", "[1]", [1]),
        ("cuda_graph_config", '{"decode": {"max_bs": 8, "backend": "tc_piecewise"}}', None),
        ("cuda_graph_config_2", '{"decode": {"backend": "full"}}', None),
        ("cuda_graph_backend", "full", "full"),
        ("lora_path", "name=/a", "name=/a"),
        ("lora_path", ' {"lora_name": "a", "lora_path": "/a"} ', {"lora_name": "a", "lora_path": "/a"}),
        ("str", "--x", "--x"),
    ],
)
def test_words_become_values_as_in_sglang(kind: str, word: str, value: t.Any) -> None:
    found = convert(kind, word, PHASES)
    assert value is None and kind.startswith("cuda_graph_config") or (found == value and type(found) is type(value))


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        *(("int", word) for word in ("1.0", "0x10", "", "k", "1_", "1e3", "8.0")),
        *(("float", word) for word in ("1,5", "", "0.9x")),
        *(("size", word) for word in ("1.5Ki", "128K", "k", "", "-1k", "1e3", "1 k")),
        *(("json", word) for word in ("{a}", "", "{'a': 1}", "[1,]")),
        *(("json_strict", word) for word in ("NaN", "[Infinity]", '"\\ud800"')),
        *(
            ("cuda_graph_config", word)
            for word in ("[]", "{", '{"other": {}}', '{"decode": []}', '{"prefill": {"max_bs": 1}}')
        ),
        ("cuda_graph_config_2", '{"decode": {"backend": "tc_piecewise"}}'),
        ("cuda_graph_backend", "tc_piecewise"),
        *(("lora_path", word) for word in ("{x}", '{"lora_name": "a"}', "{}")),
        ("json", "[" * 100_000),
    ],
)
def test_words_that_sglang_refuses(kind: str, word: str) -> None:
    with pytest.raises(NotThisType):
        convert(kind, word, PHASES)


def test_every_kind_says_what_it_wants() -> None:
    assert expected("int") == "a whole number" and expected("str") == expected("never heard of") == "text"
