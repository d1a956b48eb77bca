# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A start and its proof for people."""

from __future__ import annotations

import typing as t

from .results import INDENT, Result, failure, items, label, mapping, ran
from .tables import cell, paragraph, shortened


def planned_lines(planned: t.Any) -> list[str]:
    """The plan in short: its verdict, and what it was not sure of or warned of. Nothing where nobody planned."""
    if not ran(planned) or not planned.get("summary"):
        return []
    lines = paragraph(str(planned["summary"]), label("Planned"))
    for finding in items(planned, "findings"):
        if finding.get("severity") in ("unknown", "warn"):
            word = "warning" if finding["severity"] == "warn" else "unknown"
            lines += paragraph(f"{finding.get('message')} [{finding.get('id')}]", f"{word}: ", indent=INDENT)
    return lines


def launch_lines(launch: t.Any, would: bool = False) -> list[str]:
    """What was started: the launch's id, its process and its unit."""
    if not ran(launch):
        return [] if would else [label("Launched") + "nothing"]
    if launch.get("failed") or (not would and not launch.get("launch_id")):
        return paragraph(failure(launch), label("Launched"))
    facts = [
        f"launch {launch['launch_id']}" if launch.get("launch_id") else "",
        f"pid {launch['pid']}" if launch.get("pid") else "",
        cell(launch["unit"]) if launch.get("unit") else "",
        f"configuration {shortened(launch['config_hash'], 19)}" if launch.get("config_hash") else "",
    ]
    lines = paragraph(
        ", ".join(filter(None, facts)) or "a new process",
        label("Would" if would else "Launched") + ("start " if would else ""),
    )
    log = mapping(launch, "record").get("log") or launch.get("log")
    return lines + (paragraph(cell(log), "log: ", indent=INDENT) if log and not would else [])


def proof_lines(verify: t.Any) -> list[str]:
    """What proves that it serves: tokens of every rank, reasoning, headroom; or the server's own error."""
    if not ran(verify):
        return [label("Proved") + "nothing"]
    if not verify.get("ready"):
        verdict = cell(verify.get("verdict") or "no verdict")
        phase = f" in phase '{verify['phase']}'" if verify.get("phase") else ""
        text = f"not serving: {verdict}{phase}: {verify.get('error') or failure(verify)}"
        lines = paragraph(text, label("Proved"))
        tail = verify.get("log_tail")
        tail = tail.splitlines() if isinstance(tail, str) else items(verify, "log_tail")
        return lines + [" " * INDENT + "| " + shortened(line, 84) for line in tail[-8:]]
    facts = []
    for each in items(verify, "tokens"):
        rank = each.get("dp_rank")
        where = f" from DP rank {rank}" if rank is not None else ""
        facts.append(f"{cell(each.get('count'))} tokens{where} in {cell(each.get('seconds'))} s")
    reasoning = verify.get("reasoning")
    if isinstance(reasoning, t.Mapping):
        facts.append("reasoning " + cell(reasoning.get("verdict") or reasoning.get("message") or _flat(reasoning)))
    elif reasoning:
        facts.append("reasoning is separated")
    if verify.get("headroom_mib") is not None:
        facts.append(f"GPU headroom {cell(verify['headroom_mib'])} MiB")
    pid = f"pid {verify['pid']} serves on port {verify.get('port')}; " if verify.get("pid") else ""
    return paragraph(pid + ", ".join(facts), label("Proved"))


def _flat(mapping: Result) -> str:
    return ", ".join(f"{key} {cell(value)}" for key, value in mapping.items())
