# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Words judged by a table of options, against argparse itself with a parser of the same options."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide import argv
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.option_table import Option, OptionTable

TABLE = OptionTable(
    [
        Option(("model-path", "model"), dest="model_path", action="store", type="str", required=True),
        Option(("tp-size", "tensor-size"), dest="tp_size", action="store", type="int"),
        Option(("fraction",), dest="fraction", action="store", type="float"),
        Option(("dtype",), dest="dtype", action="store", type="str", choices=("auto", "half")),
        Option(("rank",), dest="rank", action="store", type="int", choices=(16, 32)),
        Option(("limits",), dest="limits", action="store", type="json"),
        Option(("graph-bs",), values="many", dest="graph_bs", action="store", type="int", nargs="+"),
        Option(("graph-max",), dest="graph_max", action="store", type="int"),
        Option(("targets",), values="many", dest="targets", action="store", type="str", nargs="*", choices=("q", "k")),
        Option(("pair",), values="many", dest="pair", action="store", type="int", nargs=2),
        Option(("checksum",), values="optional", dest="checksum", action="store", type="str", nargs="?", const=""),
        Option(("number",), values="optional", dest="number", action="store", type="int", nargs="?", const="x"),
        Option(("enable-metrics",), values="none", dest="enable_metrics", action="store_true", nargs=0),
        Option(("enable-meter",), values="none", dest="enable_meter", action="store_true", nargs=0),
        Option(("strict",), values="none", toggle=True, dest="strict", action="toggle", nargs=0),
    ],
    "test",
)
ATOMS = (
    *("--model-path", "--model", "--mod", "--tp-size", "--tp", "--t", "--fraction", "--dtype", "--rank", "--limits"),
    *("--graph-bs", "--graph-b", "--graph", "--graph-max", "--targets", "--pair", "--checksum", "--number", "--strict"),
    *("--enable-metrics", "--enable-met", "--enable", "--no-strict", "--no", "--nothing", "--", "-", "-h", "-x", "--h"),
    *(
        "--tp-size=2",
        "--tp=3",
        "--tp=",
        "--dtype=auto",
        "--dt=x",
        "--strict=1",
        "--pair=1",
        "--checksum=",
        "--graph-bs=1",
    ),
    *(
        "a",
        "",
        "1",
        "2",
        "-1",
        "-1.5",
        "-.5",
        "-1e5",
        "1.5",
        "16",
        "auto",
        "q",
        "k",
        "x y",
        "-x y",
        "--x y",
        "{}",
        "[1]",
        "None",
    ),
)


def parser() -> argparse.ArgumentParser:
    built = argparse.ArgumentParser(prog="x")
    add = built.add_argument
    add("--model-path", "--model", type=str, required=True)
    add("--tp-size", "--tensor-size", type=int)
    add("--fraction", type=float)
    add("--dtype", type=str, choices=["auto", "half"])
    add("--rank", type=int, choices=[16, 32])
    add("--limits", type=json.loads)
    add("--graph-bs", type=int, nargs="+")
    add("--graph-max", type=int)
    add("--targets", type=str, nargs="*", choices=["q", "k"])
    add("--pair", type=int, nargs=2)
    add("--checksum", type=str, nargs="?", const="")
    add("--number", type=int, nargs="?", const="x")
    add("--enable-metrics", action="store_true")
    add("--enable-meter", action="store_true")
    add("--strict", action=argparse.BooleanOptionalAction)
    return built


def by_argparse(built: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace | None:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return built.parse_args(words)
        except SystemExit:
            return None


def test_random_words_are_judged_as_argparse_judges_them() -> None:
    chance, built = random.Random(4), parser()
    accepted = 0
    for _number in range(6000):
        words = (["--model", "m"] if chance.random() < 0.8 else []) + [
            chance.choice(ATOMS) for _each in range(chance.randint(0, 4))
        ]
        parsed, theirs = argv.parse(words, TABLE), by_argparse(built, words)
        assert (not parsed.problems) == (theirs is not None), (words, parsed.problems)
        if theirs is not None:
            accepted += 1
            assert parsed.values == {name: getattr(theirs, name) for name in parsed.values}, words
    assert accepted > 500


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["--nothing", "1"], "unknown", "--nothing is no option"),
        (["--enable-met"], "ambiguous", "--enable-met could be --enable-meter, --enable-metrics"),
        (["--tp-size"], "missing", "--tp-size needs a value"),
        (["--pair", "1"], "missing", "--pair needs 2 values"),
        (["--graph-bs"], "missing", "--graph-bs needs at least one value"),
        (["--enable-metrics", "1"], "extra", "the word '1' belongs to no option"),
        (["--enable-metrics=1"], "extra", "--enable-metrics takes no value"),
        (["--tp-size", "1.5"], "type", "--tp-size takes a whole number, not '1.5'"),
        (["--dtype", "full"], "choice", "--dtype: 'full' is not one of auto, half"),
        (["--help"], "help", "--help makes SGLang print a text and end"),
        ([], "required", "--model-path is required"),
    ],
)
def test_complaints_in_words(words: list[str], kind: str, message: str) -> None:
    parsed = argv.parse(words, TABLE, required=not words)
    assert (parsed.problems[0].kind, parsed.problems[0].message) == (kind, message)


def test_what_the_table_does_not_tell_is_not_judged() -> None:
    table = OptionTable(
        [
            Option(("a",), dest="a", action="store", unread=("type",)),
            Option(("b",), dest="b", action="store", type="str", unread=("choices",)),
            Option(("c",), dest="c", action="Strange", type="str", unread=("action",)),
            Option(("d",), dest="d", action="store", type="str", unread=("nargs",)),
            Option(("e",), dest="e", action="store", type="str", choices=("x",), conditional=("y",)),
            Option(("f",)),
        ],
        "test",
    )
    parsed = argv.parse(["--a", "1", "--b", "2", "--c", "3", "--d", "1", "2", "3", "--e", "y", "--f", "5"], table)
    assert not parsed.problems and [option.names[0] for option in parsed.unjudged] == ["a", "b", "c", "e", "f"]
    assert [problem.kind for problem in argv.parse(["--e", "z"], table).problems] == ["choice"]
