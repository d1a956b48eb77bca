# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.option_table import OptionTable
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.options import read_options
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.rules import Rule, broken, read_rules

OPTIONS = """
class ServerArgs:
    a: A[bool, "a"] = False
    b: A[bool, "b"] = False
    c: A[Optional[str], "c"] = None
    n: A[int, "n"] = 1
    moved: A[bool, "m"] = False
    fixed: A[bool, "f"] = False
"""
CHECKS = """
    def __post_init__(self):
        if self.model_path.lower() == "none":
            return
        self._plain()
        if self.arch == "x":
            self._sometimes()
        run_hook(handle_more, self)
        self._early()

    def _plain(self):
        if self.a and self.b:
            raise ValueError("a and "
                             f"b: {self.a}   never")
        assert not (self.a and self.c is not None), "a without c"
        assert self.n == 1 or not self.b, "b wants n of 1"
        if self.c is not None:
            if self.n not in (1, 2):
                raise ValueError("c wants n of 1 or 2")
            elif self.fixed:
                raise ValueError("c is not for fixed")
        if self.a and self.moved:
            raise ValueError("a or moved")
        if self.b and self.fixed:
            raise ValueError("b or fixed")
        if self.a or self.b:
            raise ValueError("an alternative is not read")
        if self.a and self.unheard_of:
            raise ValueError("not an option")
        if self.a and is_blackwell():
            raise ValueError("not about options alone")
        if is_blackwell():
            if self.a and self.n == 7:
                raise ValueError("under a condition that is not known")

    def _sometimes(self):
        if self.a and self.n == 5:
            raise ValueError("not every start gets here")

    def _early(self):
        if self.n == 1:
            return
        if self.b and self.c is None:
            raise ValueError("n is not 1 here")
        if is_cpu():
            return
        if self.b and self.n == 9:
            raise ValueError("may not get here")

    def change(self):
        self.moved = compute()
        self.fixed = True
"""
HOOK = """
def handle_more(server_args):
    if server_args.b and server_args.n == 3:
        raise ValueError("of the hook")

def never_called(server_args):
    if server_args.b and server_args.n == 4:
        raise ValueError("of nobody")
"""


@pytest.fixture
def read(tmp_path: Path) -> tuple[tuple[Rule, ...], OptionTable]:
    (tmp_path / "srt" / "arg_groups").mkdir(parents=True)
    (tmp_path / "srt" / "server_args.py").write_text(OPTIONS + CHECKS)
    (tmp_path / "srt" / "arg_groups" / "hook.py").write_text(HOOK)
    table = read_options(str(tmp_path))
    assert table is not None
    return read_rules(str(tmp_path), table), table


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        ({"a": True, "b": True}, {"a and b: ... never": True}),
        ({"a": True}, {}),
        ({"a": False, "b": True}, {}),
        ({"a": True, "c": ""}, {"a without c": True}),
        ({"b": True, "n": 2}, {"b wants n of 1": True, "n is not 1 here": True}),
        ({"c": "x", "n": 3}, {"c wants n of 1 or 2": True}),
        ({"c": "x", "n": 2, "fixed": True}, {"c is not for fixed": True}),
        ({"a": True, "moved": True}, {"a or moved": False}),  # SGLang computes it itself as well
        ({"b": True, "fixed": True}, {"b or fixed": True}),  # it only ever makes it true
        ({"b": True, "n": 3}, {"b wants n of 1": True, "n is not 1 here": True, "of the hook": True}),
        ({"a": True, "n": 5}, {}),
        ({"a": True, "n": 7}, {}),
        ({"b": True, "c": "x", "n": 4}, {"b wants n of 1": True, "c wants n of 1 or 2": True}),
        ({"b": True, "c": "x", "n": 9}, {"b wants n of 1": True, "c wants n of 1 or 2": True}),
    ],
)
def test_combinations_that_are_refused(
    read: tuple[tuple[Rule, ...], OptionTable], values: dict[str, t.Any], messages: dict[str, bool]
) -> None:
    rules, table = read
    assert {rule.message: sure for rule, sure in broken(rules, values, table)} == messages


def test_a_rule_names_its_place(read: tuple[tuple[Rule, ...], OptionTable]) -> None:
    rules, _table = read
    rule = next(rule for rule in rules if rule.message == "of the hook")
    assert rule.place == "arg_groups/hook.py:3" and rule.dests == ("b", "n")


@pytest.mark.parametrize("source", ["def broken(", "\0", ""])
def test_sources_that_cannot_be_understood_have_no_rules(tmp_path: Path, source: str) -> None:
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt" / "server_args.py").write_text(source)
    assert read_rules(str(tmp_path), OptionTable([], "test")) == ()
    assert read_rules(str(tmp_path / "nowhere"), OptionTable([], "test")) == ()
