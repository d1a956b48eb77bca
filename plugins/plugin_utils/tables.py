# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Aligned plain-text tables for a terminal of 80 to 100 columns."""

from __future__ import annotations

import textwrap
import typing as t
from dataclasses import dataclass

GAP = "  "
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Column:
    """One column: its heading, its widest text (longer ones are wrapped) and its alignment."""

    title: str
    width: int = 100
    right: bool = False


def table(columns: t.Sequence[Column], rows: t.Sequence[t.Sequence[t.Any]]) -> list[str]:
    """The lines of a table with a heading. A cell that is too wide goes on below itself."""
    texts = [[cell(value) for value in row] for row in rows]
    widths = [
        min(column.width, max([len(column.title)] + [len(row[index]) for row in texts]))
        for index, column in enumerate(columns)
    ]
    lines = [_line([column.title for column in columns], columns, widths)]
    for row in texts:
        wrapped = [_wrapped(text, widths[index]) for index, text in enumerate(row)]
        for part in range(max(map(len, wrapped))):
            lines.append(_line([each[part] if part < len(each) else "" for each in wrapped], columns, widths))
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(1, width), break_on_hyphens=False) or [""]


def _line(cells: t.Sequence[str], columns: t.Sequence[Column], widths: t.Sequence[int]) -> str:
    padded = [
        text.rjust(width) if column.right else text.ljust(width) for text, column, width in zip(cells, columns, widths)
    ]
    return GAP.join(padded).rstrip()


def cell(value: t.Any) -> str:
    """A value as people read it: thousands separated, a list by commas, null as 'unknown'. Never a guess."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(each) for each in value)
    return " ".join(str(value).split())


def exact(value: t.Any, absent: str = UNKNOWN) -> str:
    """A value of a configuration as it is written there: 0.52 and 0.53 are not the same, and 4096 has no comma."""
    if value is None:
        return absent
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ", ".join(exact(each, absent) for each in value)
    return " ".join(str(value).split())


def paragraph(text: str, label: str = "", width: int = 96, indent: int = 0) -> list[str]:
    """A text behind a label, wrapped under itself."""
    first = " " * indent + label
    return textwrap.wrap(
        " ".join(text.split()), width, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
    ) or [first.rstrip()]


def shortened(text: t.Any, width: int) -> str:
    """One line of at most this many characters; what was cut shows as '...'."""
    line = cell(text)
    return line if len(line) <= width else line[: width - 3] + "..."


_FOR_EVER = 10**12


def duration(seconds: t.Optional[float]) -> str:
    """An age in the two largest units."""
    if not isinstance(seconds, (int, float)) or not abs(seconds) < _FOR_EVER:
        return UNKNOWN
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
