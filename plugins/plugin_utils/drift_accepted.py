# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an inventory accepts as drift, and what is wrong with it."""

from __future__ import annotations

import typing as t

from ..module_utils.decide.drift import parse_acceptance
from .words import unknown_keys

NAME = "sglang_drift_accepted"
KEYS = ("server", "item", "reason", "until")


def acceptance_problems(host: str, accepted: t.Any) -> list[str]:
    """Each mistake in a host's accepted drift, as one sentence."""
    if accepted is None:
        return []
    if not isinstance(accepted, (list, tuple)) or not all(isinstance(each, t.Mapping) for each in accepted):
        return [f"{host}: {NAME} must be a list of mappings, each with item, reason and until"]
    problems = []
    for number, each in enumerate(accepted):
        problems += unknown_keys(f"{host}: {NAME}[{number}]", map(str, each), KEYS, "key")
        try:
            parse_acceptance(plain(each), number)
        except ValueError as error:
            problems.append(f"{host}: {NAME.removesuffix('accepted')}{error}")
    return problems


def plain(entry: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """One entry as the module takes it. YAML makes a date of a day without quotes."""
    given = {key: entry[key] for key in KEYS if entry.get(key) is not None}
    return {"server": "*", **given, **({"until": str(given["until"])} if "until" in given else {})}
