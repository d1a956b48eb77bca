# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan for people: the verdict, the budget as a table (GB and GiB told apart), each finding with its remedy."""

from __future__ import annotations

import typing as t

from .results import failure, rows
from .tables import UNKNOWN, Column, paragraph, table

GB, GIB = 1e9, 2**30
SEVERITIES = {"deny": "DENIED", "unknown": "UNKNOWN", "warn": "warning", "note": "note"}
# Of a server without HiCache these say nothing.
SILENT_AT_ZERO = ("hicache_per_rank", "hicache_total", "sglang_reserve", "unpin_")
DIGITS = {"fraction": 3, "s": 1}
Result = t.Mapping[str, t.Any]


def plan_lines(results: Result) -> list[str]:
    """``results``: host, server, and plan, the registered result of server_plan."""
    result = results.get("plan")
    title = f"{results.get('server')} on {results.get('host')}"
    if not isinstance(result, t.Mapping) or "verdict" not in result or "findings" not in result:
        return paragraph(f"{title}: no plan: {failure(result)}")
    version = result.get("sglang_version")
    lines = [f"{title}: {str(result['verdict']).upper()} (SGLang {version or UNKNOWN}, {result.get('seconds', 0)} s)"]
    given = result.get("budget")
    budget: Result = given if isinstance(given, t.Mapping) else {}
    gpus = "GPU (SIMULATED), per rank" if result.get("simulated") else "GPU, per rank"
    lines += _figures(gpus, budget.get("gpu") or [])
    lines += _figures("Host", budget.get("host") or [])
    for finding in result["findings"]:
        lines += _finding(finding)
    return lines


def plan_why(result: t.Any) -> str:
    """Everything that denies a plan, with its remedy, in one line; where there is no plan, what failed."""
    if not isinstance(result, t.Mapping) or "findings" not in result:
        return failure(result)
    denied = [one for one in rows(result, "findings") if one.get("severity") == "deny" and not one.get("waived")]
    return "; ".join(_sentence(one) for one in denied) or str(result.get("summary"))


def _sentence(finding: Result) -> str:
    remedy = f" ({finding['remedy']})" if finding.get("remedy") else ""
    return f"{finding.get('message')}{remedy} [{finding.get('id')}]"


def _finding(finding: Result) -> list[str]:
    label = SEVERITIES.get(str(finding.get("severity")), "note")
    text = f"{finding.get('subject')}: {finding.get('message')} [{finding.get('id')}]"
    lines = paragraph(text, f"{label:8} ")
    if finding.get("remedy"):
        lines += paragraph(str(finding["remedy"]), "remedy: ", indent=9)
    if finding.get("source") and finding.get("severity") in ("deny", "warn"):
        lines += paragraph(str(finding["source"]), "source: ", indent=9)
    if finding.get("severity") == "deny" and finding.get("waivable") and not finding.get("waived"):
        lines += paragraph(f"to accept it: waivers: {{{finding.get('id')}: a written reason}}", "", indent=9)
    return lines


def _figures(title: str, figures: t.Sequence[Result]) -> list[str]:
    rows = []
    for figure in figures:
        if figure.get("value") == 0 and str(figure.get("name")).startswith(SILENT_AT_ZERO):
            continue
        value, unit = figure.get("value"), str(figure.get("unit"))
        if value is None:
            rows.append([figure.get("label"), UNKNOWN, "", figure.get("reason") or ""])
        elif unit == "bytes":
            sizes = [f"{value / GB:,.2f} GB", f"{value / GIB:,.2f} GiB"]
            rows.append([figure.get("label"), *sizes, figure.get("formula")])
        else:
            text = f"{value:,.{DIGITS.get(unit, 0)}f}"
            rows.append([figure.get("label"), text, unit, figure.get("formula")])
    if not rows:
        return []
    columns = [Column(title, 28), Column("", 13, right=True), Column("", 13, right=True), Column("how", 40)]
    return table(columns, rows)
