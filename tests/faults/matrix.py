# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All rows of the fault matrix, and the matrix as text."""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.sglang.tests.faults import (
    rows_clean,
    rows_evict,
    rows_identity,
    rows_lab,
    rows_lies,
    rows_light,
    rows_limits,
    rows_odd,
    rows_play,
    rows_rollout,
    rows_runs,
)
from ansible_collections.cleanslate.sglang.tests.faults.model import (
    BYSTANDER_KILLED,
    ERROR,
    FALSE_CLEAN,
    HANG,
    WRONG_VERDICT,
    Outcome,
    Row,
    counts,
)

ROWS: tuple[Row, ...] = (
    *rows_evict.ROWS,
    *rows_identity.ROWS,
    *rows_play.ROWS,
    *rows_clean.ROWS,
    *rows_lies.ROWS,
    *rows_limits.ROWS,
    *rows_odd.ROWS,
    *rows_play.PLAYBOOKS,
    *rows_runs.ROWS,
    *rows_rollout.ROWS,
    *rows_light.ROWS,
    *rows_lab.ROWS,
    *rows_lab.PLAYBOOKS,
)
MODULES = ("gpu_info", "gpu_evict", "clean_state", "drift")
WORDS = {
    FALSE_CLEAN: "false cleans",
    BYSTANDER_KILLED: "bystanders killed",
    HANG: "hangs",
    WRONG_VERDICT: "wrong verdicts",
    ERROR: "errors",
}


def of_modules(*entries: str) -> list[Row]:
    """The rows that run one module in a namespace, seconds each; of these entry points, if any is named."""
    return [row for row in ROWS if row.world == "ns" and row.entry in MODULES and row.entry in (entries or MODULES)]


def of_playbooks(*entries: str) -> list[Row]:
    """The rows that run a whole playbook in a namespace; of these entry points, if any is named."""
    others = {row.entry for row in ROWS} - set(MODULES)
    return [row for row in ROWS if row.world == "ns" and row.entry in (entries or others)]


def of_lab() -> list[Row]:
    """The rows in LXC containers."""
    return [row for row in ROWS if row.world == "lab"]


def of_light(*beginnings: str) -> list[Row]:
    """The rows on a light host behind a network; those whose ids begin so, if any beginning is named."""
    return [row for row in ROWS if row.world == "light" and row.id.startswith(beginnings or "")]


def by_id(names: t.Sequence[str]) -> tuple[Row, ...]:
    """The rows of these ids; a name that ends in ``*`` stands for all that begin so. KeyError names an unknown one."""
    found: dict[str, Row] = {}
    for name in names:
        same = [row for row in ROWS if row.id == name or (name.endswith("*") and row.id.startswith(name[:-1]))]
        if not same:
            raise KeyError(name)
        found.update((row.id, row) for row in same)
    return tuple(found.values())


def line(row: Row, outcome: Outcome) -> str:
    """One row of the printed matrix."""
    detail = " ".join(outcome.detail.split())
    words = f"  {detail[:300]}" if detail else ""
    return f"{row.id:34} {row.entry:12} {outcome.result:17} {outcome.seconds:6.1f} s of {row.bound_s:3.0f}{words}"


def closing(outcomes: t.Iterable[Outcome]) -> str:
    """The counts, all of which but the first must be 0."""
    found = counts(outcomes)
    return f"{found['ok']} of {sum(found.values())} rows as expected; " + ", ".join(
        f"{words}: {found[result]}" for result, words in WORDS.items()
    )


def table(rows: t.Iterable[Row] = ROWS) -> str:
    """The rows for docs/faults.md."""
    lines = ["| row | entry point | fault | right verdict | may die | proved by |", "|---|---|---|---|---|---|"]
    for row in rows:
        verdict = " or ".join(row.verdicts) + "".join(f", `{code}`" for code in row.codes)
        files = ", ".join(dict.fromkeys(patch.file.rpartition("/")[2] for patch in row.breaks))
        die = ", ".join(row.may_die) or "nobody"
        lines.append(f"| `{row.id}` | {row.entry} | {row.fault} | {verdict} | {die} | {files} |")
    return "\n".join(lines) + "\n"
