# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An eviction and its verdict for people: GPUs before and after, the ladder, who stayed and why."""

from __future__ import annotations

import typing as t

from .results import (
    INDENT,
    Result,
    failure,
    items,
    label,
    mapping,
    ran,
    reason_text,
    reasons,
    rows,
    seconds,
    who,
    who_and_why,
    why,
)
from .tables import Column, cell, paragraph, table


def _used(gpu: Result | None) -> int | None:
    """Memory in use, from gpu_evict's short rows or from full ones."""
    if not gpu:
        return None
    value = gpu.get("used_mib", mapping(gpu, "memory").get("used_mib"))
    return value if isinstance(value, int) else None


def gpus_of(result: Result, key: str) -> dict[t.Any, Result]:
    found = rows(mapping(result, key), "gpus") or rows(result, key)
    return {gpu.get("index"): gpu for gpu in found if isinstance(gpu.get("index"), (int, str, type(None)))}


def _holders(gpu: t.Optional[Result]) -> str:
    holders = items(gpu, "holders") if gpu else []
    return ", ".join(who(each) for each in holders) or "nobody seen"


def _memory_rows(teardown: Result, clean: Result) -> list[list[t.Any]]:
    before, after = gpus_of(teardown, "before"), gpus_of(teardown, "after")
    judged = gpus_of(mapping(clean, "facts_seen"), "gpus")
    rows = []
    for index in sorted({*before, *after, *judged}, key=str):
        name = (judged.get(index) or before.get(index) or after.get(index) or {}).get("name")
        rows.append(
            [
                str(index),
                name or "-",
                _used(before.get(index)) if before else "-",
                _used(after.get(index)) if after else "-",
                _used(judged.get(index)) if judged else "-",
                _holders(before.get(index)) if before else "-",
            ]
        )
    return rows


def gpu_lines(teardown: t.Any, clean: t.Any) -> list[str]:
    """Used memory per GPU before, after the eviction and at the verdict, without columns of steps that did not run."""
    rows = _memory_rows(teardown if ran(teardown) else {}, clean if ran(clean) else {})
    if not rows:
        return []
    columns = [
        Column("GPU"),
        Column("Name", 24),
        Column("Before MiB", right=True),
        Column("After MiB", right=True),
        Column("At verdict", right=True),
        Column("Held before by", 34),
    ]
    told = [index for index in range(len(columns)) if any(row[index] != "-" for row in rows)]
    return table([columns[index] for index in told], [[row[index] for index in told] for row in rows])


def _rung_rows(teardown: Result) -> list[list[t.Any]]:
    rows = []
    for rung in items(teardown, "rungs"):
        asked, left, stayed = (items(rung, key) for key in ("asked", "left", "stayed"))
        told = "; ".join(map(who_and_why, stayed)) or "nobody"
        rows.append([rung.get("rung"), rung.get("seconds"), len(asked), len(left), told])
    return rows


def eviction_lines(teardown: t.Any) -> list[str]:
    """The ladder: per rung who was asked, who left and who stayed and why; then what was left alone or kept."""
    if not ran(teardown):
        return [label("Evicted") + "not done"]
    verdict = teardown.get("verdict")
    took = f", {cell(seconds(teardown))} s" if verdict or seconds(teardown) is not None else ""
    return paragraph(f"{verdict or failure(teardown)}{took}", label("Evicted")) + _ladder_lines(teardown)


def node_lines(teardown: t.Any, node: t.Any) -> list[str]:
    """What a container's Proxmox node did: its rungs with their seconds, who stayed, and what stood against more."""
    if not ran(teardown):
        return []
    rungs = [f"{rung.get('rung')} {cell(rung.get('seconds'))} s" for rung in items(teardown, "rungs")]
    climbed = f"{', '.join(rungs)}; " if rungs else ""
    verdict = teardown.get("verdict")
    took = f", {cell(seconds(teardown))} s" if verdict or seconds(teardown) is not None else ""
    lines = paragraph(f"node {node}: {climbed}{verdict or failure(teardown)}{took}", label("Escalated"))
    lines += container_lines(teardown) + _ladder_lines(teardown)
    for sentence in reasons(teardown):
        lines += paragraph(sentence, "- ", indent=INDENT)
    return lines


def container_lines(result: Result) -> list[str]:
    """The container as its node sees it, where that is not simply running."""
    container = mapping(result, "container")
    state = container.get("state")
    lines = []
    if state not in (None, "running"):
        lines += paragraph(f"container {container.get('vmid')} is {state}", "state: ", indent=INDENT)
    for one in items(container, "stuck"):
        waits = f"state {one.get('state')}, waits in {one.get('wchan') or 'an unknown place'}"
        lines += paragraph(f"pid {one.get('pid')}: SIGKILL does not end it ({waits})", "stuck: ", indent=INDENT)
    for problem in items(container, "problems"):
        text = problem.get("message") if isinstance(problem, t.Mapping) else problem
        lines += paragraph(cell(text), "problem: ", indent=INDENT)
    return lines


def _ladder_lines(teardown: Result) -> list[str]:
    lines: list[str] = []
    rows = _rung_rows(teardown)
    if rows:
        columns = [
            Column("rung"),
            Column("seconds", right=True),
            Column("asked", right=True),
            Column("left", right=True),
            Column("stayed and why", 60),
        ]
        lines += [" " * INDENT + line for line in table(columns, rows)]
    for rung in items(teardown, "rungs"):
        if rung.get("note"):
            lines += paragraph(cell(rung["note"]), f"{rung.get('rung')}: ", indent=INDENT)
    for each in items(teardown, "ended"):
        lines += paragraph(f"{who(each)} (rung {cell(each.get('rung'))})", "ended: ", indent=INDENT)
    pinned = mapping(teardown, "pinned")
    if pinned.get("note"):
        lines += paragraph(cell(pinned["note"]), "memory: ", indent=INDENT)
    leftovers = mapping(teardown, "leftovers")
    for word, found in (
        ("came back", items(teardown, "respawns")),
        ("left alone", items(teardown, "spared")),
        ("removed", items(leftovers, "removed")),
    ):
        for item in found:
            lines += paragraph(who_and_why(item), f"{word}: ", indent=INDENT)
    for item in items(leftovers, "kept"):
        lines += paragraph(_path(item), "kept: ", indent=INDENT)
    return lines


def _path(item: t.Any) -> str:
    if not isinstance(item, t.Mapping):
        return cell(item)
    name = cell(item.get("path") or item.get("name"))
    return f"{name}: {item['why']}" if item.get("why") else name


def plan_lines(teardown: t.Any, node: t.Any = None) -> list[str]:
    """Check mode: who would be asked at which rung, by ``node`` where it is the node's plan."""
    if node and not ran(teardown):
        return []
    if node:
        return [label("Would") + f"then, by node {node}, where that is not enough:", *_node_plan(teardown)]
    if not ran(teardown):
        return [label("Would") + "evict: no plan"]
    rows = [
        [step.get("rung"), "; ".join(map(who, items(step, "targets"))) or "nobody"] for step in items(teardown, "plan")
    ]
    if rows:
        lines = [label("Would") + "ask, until nobody wanted gone is left"]
        lines += [" " * INDENT + line for line in table([Column("rung"), Column("whom", 76)], rows)]
    elif teardown.get("verdict") == "nothing_to_do":
        lines = [label("Would") + "evict nobody: nobody whom the scope includes is here"]
    else:
        lines = paragraph(f"evict: not known: {why(teardown)}", label("Would"))
    for item in items(teardown, "spared"):
        lines += paragraph(who_and_why(item), "left alone: ", indent=INDENT)
    return lines


def _node_plan(teardown: Result) -> list[str]:
    """The node's plan below its heading, and what stands against its opt-in rungs."""
    lines = plan_lines(teardown)
    for sentence in reasons(teardown):
        lines += paragraph(sentence, "- ", indent=INDENT)
    return lines


def _view_lines(clean: Result) -> list[str]:
    """The verdict of each view that the joint one was made of."""
    lines: list[str] = []
    for view in mapping(clean, "views").values():
        if isinstance(view, t.Mapping):
            said = view.get("verdict") or "no view, it can't be reached"
            available = view.get("available_mib")
            more = f", {cell(available)} MiB of host memory available" if available is not None else ""
            lines += paragraph(f"{said}{more}", f"{view.get('where')}: ", indent=INDENT)
    return lines


def verdict_lines(clean: t.Any, word: str = "Verdict") -> list[str]:
    """The verdict, its reasons, its warnings and from where it was seen."""
    if not ran(clean):
        return [label(word) + "not judged"]
    verdict = clean.get("verdict")
    if not verdict:
        return paragraph(f"no verdict: {failure(clean)}", label(word))
    summary = str(verdict if items(clean, "reasons") else clean.get("summary") or verdict)
    seen_from = [f"seen from the {clean['vantage']}"] if clean.get("vantage") else []
    seen_from = [text for text in seen_from if text not in summary]
    seen_from += ["GPUs SIMULATED"] if clean.get("simulated") else []
    lines = paragraph(summary + (f" ({', '.join(seen_from)})" if seen_from else ""), label(word))
    lines += _view_lines(clean)
    for reason in items(clean, "reasons"):
        lines += paragraph(reason_text(reason), "- ", indent=INDENT)
    for warning in items(clean, "warnings_found"):
        lines += paragraph(reason_text(warning), "warning: ", indent=INDENT)
    return lines
