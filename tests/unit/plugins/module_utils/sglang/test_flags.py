# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import configfile, flags
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.option_table import Option, OptionTable

yaml = pytest.importorskip("yaml", reason="PyYAML is what SGLang reads the file with; ansible-core brings it")

TABLE = OptionTable(
    [
        Option(("model-path", "model")),
        Option(("enable-metrics",), values="none"),
        Option(("strict",), values="none", toggle=True, in_config=False),
        Option(("disable-cuda-graph",), values="none", in_config=False),
        Option(("cuda-graph-bs",), values="many", in_config=False),
        Option(("share",)),
        Option(("tp-size", "tensor-parallel-size")),
    ],
    "test",
)

VALUES: dict[str, t.Any] = {
    "model-path": "/models/a b: c # d",
    "text": "quotes \" ' \\ and \u00e9 \U0001f600 \t end\n2nd line",
    "looks-like-bool": "yes",
    "looks-like-number": "0123",
    "looks-like-null": "null",
    "mem-fraction-static": 0.9,
    "small": 1e-07,
    "count": 128,
    "list": [1, "two", 3.5],
    "mapping": {"a": {"b": [1, None, True]}, "c": "\U0001f600"},
    "flag": True,
}


def test_the_written_file_is_read_alike_by_yaml_and_by_our_reader() -> None:
    text = flags.to_yaml(flags.render(VALUES).config)
    assert text.isascii()
    assert len(text.splitlines()) == len(VALUES)
    by_yaml, by_subset = yaml.safe_load(text), configfile.read_subset(text)
    # YAML 1.1 takes 1e-07 for text; SGLang makes words of all values, so nothing is lost. Before 0.5.14 it wrote a
    # mapping as Python does, so a mapping is JSON in the file already.
    assert json.loads(by_yaml["mapping"]) == VALUES["mapping"]
    assert by_subset == by_yaml == {**VALUES, "small": "1e-07", "mapping": by_yaml["mapping"]}


def test_the_file_has_full_names_and_a_value_that_may_be_left_away_is_not_in_it() -> None:
    table = OptionTable(
        [
            Option(("is-embedding",), values="none"),
            Option(("model-checksum",), values="optional"),
            Option(("tp-size",)),
        ],
        "test",
    )
    rendered = flags.render({"is-emb": True, "model-checksum": True, "tp": 2}, table)
    assert rendered == flags.Rendered({"is-embedding": True, "tp-size": 2}, ("--model-checksum",))
    assert flags.render({"model-checksum": "abc"}, table).config == {"model-checksum": "abc"}


def test_names_are_the_same_with_dashes_or_underscores() -> None:
    assert flags.check({"mem_fraction_static": 1, "--tp-size": 2}) == {"mem-fraction-static": 1, "tp-size": 2}


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"config": "f.yaml"}, "config"),
        ({"api_key": "x"}, "api_key"),
        ({"admin-api-key": "x"}, "admin_api_key"),
        ({"ssl_keyfile_password": "x"}, "ssl_keyfile_password"),
        ({"tp-size": None}, "no value"),
        ({"tp-size": 1, "tp_size": 2}, "same option"),
        ({"tp": 1, "tensor-parallel-size": 2}, "same option"),
        ({"a b": 1}, "no name"),
        ({"": 1}, "no name"),
        ({"x": float("nan")}, "not a number"),
        ({"x": "a\0b"}, "character"),
        ({"x": [[1]]}, "list in a list"),
        ({"x": [None]}, "no value"),
        ({"x": object()}, "object"),
    ],
)
def test_what_cannot_be_a_configuration_is_refused_by_name(mapping: dict[str, t.Any], words: str) -> None:
    with pytest.raises(CleanSlateError, match=words) as caught:
        flags.check(mapping)
    assert "'x'" not in str(caught.value) or "api" not in str(mapping)


def test_render_without_knowledge_of_the_installed_version() -> None:
    rendered = flags.render(
        {"enable_metrics": True, "trust-remote-code": False, "no-strict": True, "bs": [], "x": [1, 2]}
    )
    assert rendered == flags.Rendered({"enable-metrics": True, "x": [1, 2]}, ("--no-strict",))


def test_render_puts_what_a_config_file_may_not_hold_onto_the_command_line() -> None:
    rendered = flags.render(
        {"strict": False, "disable_cuda_graph": True, "cuda_graph_bs": [1, 2], "enable_metrics": True, "share": False},
        TABLE,
    )
    assert rendered.config == {"enable-metrics": True, "share": False}
    assert rendered.argv == ("--no-strict", "--disable-cuda-graph", "--cuda-graph-bs", "1", "2")
    assert flags.render({"no-strict": False, "disable-cuda-graph": False}, TABLE).argv == ("--strict",)


def test_mappings_in_a_list_become_json_since_sglang_would_write_python() -> None:
    assert flags.render({"lora": [{"a": 1}]}).config == {"lora": ['{"a": 1}']}


def test_to_argv() -> None:
    assert flags.to_argv({"tp": 2, "metrics": True, "off": False, "j": {"a": 1}, "l": [1, "b"], "e": []}) == [
        *("--tp", "2", "--metrics", "--j", '{"a": 1}', "--l", "1", "b"),
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.9, "0.90"),
        (1, "1"),
        (128000, "128k"),
        (131072, "128Ki"),
        ("25.6k", 25600),
        (True, "true"),
        (["a"], "a"),
        ([1, 2], ["1", "2"]),
        ({"a": 1}, '{"a": 1.0}'),
        (" a ", "a"),
        (1e-05, "0.00001"),
    ],
)
def test_values_of_one_meaning(one: t.Any, other: t.Any) -> None:
    assert flags.same_value(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.9, 0.91), ("128k", "128Ki"), ("a", "b"), (True, 1), ("false", 0), ([1, 2], [2, 1]), ("128K", 128000)],
)
def test_values_of_another_meaning(one: t.Any, other: t.Any) -> None:
    assert not flags.same_value(one, other)


def test_differences() -> None:
    wanted = {"model": "/m", "tp": 2, "mem_fraction_static": 0.9, "enable-metrics": False, "strict": False, "new": 1}
    found = {
        "model-path": "/m",
        "tp-size": "4",
        "mem-fraction-static": "0.90",
        "no-strict": True,
        "api-key": "**",
        "old": "x",
    }
    assert flags.differences(wanted, found, TABLE) == [
        flags.Difference("new", 1, None),
        flags.Difference("old", None, "x"),
        flags.Difference("tp-size", 2, "4"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "a: [1,\n  2]\n",
        "a: |\n  text\n",
        "a: &x 1\nb: *x\n",
        "a: {b: c}\n",
        "- 1\n",
        "just words\n",
        "a:\n  b: 1\n",
        "a: !!python/object:os.system x\n",
        'a: "open\n',
        "a: 'it''s' x'\n",
    ],
)
def test_more_than_the_subset_is_not_understood(text: str) -> None:
    with pytest.raises(configfile.NotUnderstood):
        configfile.read_subset(text)


def test_the_subset_that_people_write() -> None:
    text = (
        "---\n# comment\nmodel-path: /models/x  # here\ntp_size: 2\nmem: 0.90\nmetrics: yes\nradix: off\n"
        "name: 'it''s'\nlist:\n  - 1\n  - two\nempty:\n\nhash: a#b\ncolon: http://h:1\n"
    )
    assert configfile.read_subset(text) == yaml.safe_load(text)


def test_a_broken_file_is_unknown_with_and_without_pyyaml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (yaml, None):
        monkeypatch.setattr(configfile, "_pyyaml", lambda module=module: module)
        assert configfile.read_config("a: [1") is None
        assert configfile.read_config("- 1") is None
        assert configfile.read_config("") == {}
        assert configfile.read_config(json.dumps("x")) is None


@pytest.mark.parametrize("name", ["api_k", "api", "--admin-api-ke", "ssl_keyfile_p", "Api-Key"])
def test_an_abbreviated_secret_is_refused_too(name: str) -> None:
    """argparse completes --api-k to --api-key, so its value would be shown."""
    with pytest.raises(CleanSlateError, match="is a secret and would be shown"):
        flags.check({name: "sk-1"})
    assert flags.effective({name: "sk-1", "tp_size": 2}) == {"tp-size": 2}


def test_the_refusal_of_an_abbreviation_names_the_option() -> None:
    with pytest.raises(CleanSlateError, match="by the option admin_api_key"):
        flags.check({"admin_api": "sk-1"})
    assert flags.check({"ssl_keyfile": "/tls/key"}) == {"ssl-keyfile": "/tls/key"}


def _laughing(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, levels)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        _laughing(9),
        "a: &a [*a]",
        "a: &a {x: 1}\nb: {<<: *a}",
        f"a: {'[' * 100}{']' * 100}",
        f"a: {'9' * 5000}",
        f"{{{'[' * 100}{']' * 100}: 1}}",
    ],
    ids=range(6),
)
def test_a_file_that_unfolds_without_end_is_not_understood(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (yaml, None):
        monkeypatch.setattr(configfile, "_pyyaml", lambda module=module: module)
        assert configfile.read_config(text) is None


def test_an_integer_that_python_writes_in_no_text_is_not_understood() -> None:
    assert configfile.read_config(f"a: 0x{'f' * 5000}") is None


def test_an_anchor_that_nobody_uses_is_read() -> None:
    assert configfile.read_config("a: &x 1\nb: [[1], {c: 2}]") == {"a": 1, "b": [[1], {"c": 2}]}


@pytest.mark.parametrize(
    "odd",
    [
        "1e9999999",
        "-1e99999999999999999999",
        "1e999999G",
        "[" * 100_000,
        '{"a":' * 3000 + "1" + "}" * 3000,
        "[" * 300 + "1" + "]" * 300,
        int("0x" + "f" * 5000, 16),
        -int("0x" + "f" * 5000, 16),
    ],
    ids=range(8),
)
def test_an_odd_value_is_compared_as_what_it_is(odd: t.Any) -> None:
    assert flags.same_value(odd, odd)
    assert not flags.same_value(odd, "1")
    assert not flags.same_value([odd, 2], [1, 2])
    assert [one.item for one in flags.differences({"max-total-tokens": 1, "tp": 2}, {"tp": 2, "x": odd})] == [
        "max-total-tokens",
        "x",
    ]


def test_data_too_deep_to_be_compared_is_not_alike() -> None:
    deep: list[t.Any] = []
    other: list[t.Any] = []
    for _level in range(200_000):
        deep, other = [deep, 1], [other, 1]
    assert not flags.same_value(deep, other)
