# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run rows of the fault matrix, against the checkout or against a copy without the row's defence."""

from __future__ import annotations

import dataclasses
import traceback
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.faults import lab_site, light_site, site
from ansible_collections.cleanslate.sglang.tests.faults.model import Facts, Outcome, Row, judge, judge_proof
from ansible_collections.cleanslate.sglang.tests.faults.patches import apply_all
from ansible_collections.cleanslate.sglang.tests.harness.namespace import why_not as namespaces_why_not
from ansible_collections.cleanslate.sglang.tests.harness.trace import strace_missing
from ansible_collections.cleanslate.sglang.tests.harness.tree import copy_tree, using
from ansible_collections.cleanslate.sglang.tests.lab import light

OPENERS: dict[str, t.Callable[..., t.Any]] = {
    "ns": site.opened,
    "light": light_site.opened,
    "lab": lab_site.opened,
}


def observe(row: Row, directory: Path, tree: Path | None = None) -> Facts:
    """Make the fault, run the entry point, and say what was seen; whatever goes wrong is a fact too."""
    facts: Facts | None = None
    problem = ""
    try:
        with using(tree), OPENERS[row.world](directory, row.bound_s) as place:
            row.scene(place)
            facts = place.facts
    except Exception:
        problem = traceback.format_exc()
    if facts is None:
        return Facts(None, 0.0, problem=problem or "the scene ran no entry point")
    return dataclasses.replace(facts, problem="\n".join(filter(None, (facts.problem, problem))))


def run_row(row: Row, directory: Path) -> Outcome:
    """The row against the checkout."""
    return judge(row, observe(row, directory))


def prove_row(row: Row, directory: Path) -> Outcome:
    """The row against a copy without its defence: ``ok`` means that it turned red.

    Raises:
        DoesNotApply: a patch no longer fits the product.
    """
    tree = copy_tree(directory / "copy")
    apply_all(tree, row.breaks)
    return judge_proof(row, observe(row, directory, tree))


def close() -> None:
    """End what rows share. The next one makes it anew."""
    lab_site.close_shared()


def why_not(row: Row, lab_why_not: t.Callable[[], str | None]) -> str | None:
    """Why this row can't be run on this machine, or None."""
    reasons = {"lab": lab_why_not, "light": light.why_not}
    return namespaces_why_not() or strace_missing() or reasons.get(row.world, lambda: None)()
