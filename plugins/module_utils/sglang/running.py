# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a server runs with the flags that were wanted: as it was started, and as SGLang resolved them. Pure."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from .cmdline import LaunchedFlags
from .options import OptionTable


@dataclass(frozen=True)
class RunningFlags:
    """How the leader was started, by its command line and its configuration file. ``launched`` None: not readable, and
    ``problem`` says why. ``options``: those of the installed SGLang."""

    launched: t.Optional[LaunchedFlags]
    options: t.Optional[OptionTable] = None
    problem: t.Optional[str] = None


@dataclass(frozen=True)
class FlagDifference:
    """A flag that is not as wanted. ``seen``: launched (command line and configuration file) or resolved
    (/server_info). ``note``: why SGLang sets such a flag itself, where it is known to."""

    item: str
    wanted: t.Any
    found: t.Any
    seen: str
    note: t.Optional[str] = None


@dataclass(frozen=True)
class FlagsJudgement:
    """``matches`` None: not known (``problem`` says why; no failure). ``differences`` are failures; ``resolved`` are
    wanted flags that SGLang set to something else itself: reported, no failure. ``compared``: how many wanted flags
    were found in /server_info."""

    matches: t.Optional[bool]
    differences: tuple[FlagDifference, ...] = ()
    resolved: tuple[FlagDifference, ...] = ()
    compared: int = 0
    problem: t.Optional[str] = None


def judge_flags(
    wanted: t.Mapping[str, t.Any],
    running: t.Optional[RunningFlags],
    info: t.Optional[t.Mapping[str, t.Any]],
) -> FlagsJudgement:
    """``wanted``: the record's flags (secrets masked). ``info``: the answer of /server_info; None: not asked, or no
    answer. No secret is in the result."""
    raise NotImplementedError
