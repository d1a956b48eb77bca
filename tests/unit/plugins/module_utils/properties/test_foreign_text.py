# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever foreign text says, its parser comes back: with a value or its own refusal, in time, and not with more than
it was given.
"""

from __future__ import annotations

import re
import typing as t

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.tests.unit.plugins.module_utils.properties.foreign import (
    LOGS,
    PARSERS,
    PIECES,
    Parser,
    TooLong,
    limited,
    mutated,
)

each_parser = pytest.mark.parametrize("parser", PARSERS, ids=[parser.name for parser in PARSERS])

LONG = 64 * 1024
# What patterns stumble over when it comes again and again.
UNITS = (
    *("a", " ", "\t", "0", "A_", "a-", "a.", "Aa.", ":", ";", ",", "#", "=", "'", '"', "\\", "\\\\", "(", "["),
    *("{", "<", "|"),
    *("%", "1%", "\0", "\n", "\r", "\x1b[", "\x1b[0", "- ", "-- ", "--a ", "a: ", "x: y ", "key=", "A=", "://", "x@"),
    *("secret_", "token ", "bearer ", "hf_", "sk-", '\\"', '"api_key": ', "--api-key ", "error: ", "Error: ", "died "),
    *("died exit code: ", "terminated with ", "Capture ", "Capture graph end. ", "Load weight end. ", "Allocating "),
    *("max_total_num_tokens=1,", "CUDA out of memory. ", "Tried to allocate 1", "[Errno 1]", "NCCL error", "nccl"),
    *("Not enough host memory available. Requesting ", " Please ", "tp_size 1 should be ", "100%|", "1/1 [", "(a:1"),
    *("<!DOCTYPE", "<a>", "&#1;", "Xid", "NVRM: Xid (0:", "0::/", "/a.service", "dev0: ", "_DP1", "_A1", "1e"),
)


def bounded(value: t.Any, text: str) -> bool:
    return len(repr(value)) <= 40 * len(text) + 20_000


BYTES = st.binary().map(lambda data: data.decode("utf-8", "replace"))


@each_parser
@given(text=st.text() | BYTES | st.lists(st.sampled_from(PIECES), max_size=6).map("".join))
def test_any_text_is_read_or_refused(parser: Parser, text: str) -> None:
    assert bounded(parser.try_it(text), text)


@pytest.mark.parametrize("parser", [each for each in PARSERS if each.samples], ids=lambda parser: parser.name)
@given(data=st.data())
def test_a_real_text_that_went_wrong_is_read_or_refused(parser: Parser, data: st.DataObject) -> None:
    text = data.draw(mutated(parser.samples))
    with limited():
        assert bounded(parser.try_it(text), text)


@each_parser
def test_a_long_text_comes_to_an_end(parser: Parser) -> None:
    head = parser.samples[0][:200] if parser.samples else ""
    with limited(40):
        for unit in UNITS:
            parser.try_it(head + unit * (LONG // len(unit)) + "X")


def test_the_limit_sees_a_pattern_that_takes_the_square() -> None:
    slow = Parser("slow", lambda text: re.search(r"[^\n]*died", text))
    with pytest.raises(TooLong), limited(2):
        slow.try_it("a" * 1024 * 1024)


def test_a_log_of_long_lines_does_not_take_long() -> None:
    """A log is read up to 2 MiB; requests, and so lines of any length, may stand in it."""
    readers = [parser for parser in PARSERS if parser.samples == LOGS]
    assert len(readers) >= 7
    with limited(60):
        for unit in ("a", "died ", "Capture graph end. "):
            text = (unit * (1400 // len(unit)) + "\n") * 350 + unit * (1024 * 1024 // len(unit))
            for parser in readers:
                parser.try_it(text)
