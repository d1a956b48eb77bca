# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Spelling: what somebody may have meant."""

from __future__ import annotations

import difflib
import typing as t


def nearest(word: str, valid: t.Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the valid word most like this one, or nothing."""
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def unknown_keys(where: str, given: t.Iterable[str], valid: t.Iterable[str], kind: str) -> list[str]:
    """One sentence for each key that is not valid."""
    known = list(valid)
    return [
        f"{where}: unknown {kind} '{key}'{nearest(key, known) or '; valid are ' + ', '.join(sorted(known))}"
        for key in given
        if key not in known
    ]
