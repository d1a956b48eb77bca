# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a run tells people at its end: lines of text from the modules' results.

A step that did not run, or whose module gave no result, is said to be so; nothing is good because it is absent.
"""

from __future__ import annotations

import typing as t

from .evict_report import eviction_lines, gpu_lines, gpus_of, node_lines, plan_lines, verdict_lines
from .results import INDENT, Result, cut_off, label, mapping, ran, reasons, seconds
from .serve_report import launch_lines, planned_lines, proof_lines
from .tables import UNKNOWN, cell, paragraph


def _outcome(results: Result) -> str:
    """The last step that ran decides; a step that gave no result is a failure."""
    if ran(results.get("verify")):
        return "SERVING" if mapping(results, "verify").get("ready") is True else "FAILED: it does not serve"
    if ran(results.get("launch")):
        if cut_off(results.get("launch")):
            return "FAILED: broken off in the start; whether it was started is not known"
        started = mapping(results, "launch").get("launch_id")
        return "FAILED: it was started, not proved" if started else "FAILED: it was not started"
    if ran(results.get("clean")):
        verdict = mapping(results, "clean").get("verdict") or UNKNOWN
        return "FAILED: broken off before the start" if verdict == "clean" else f"FAILED: not clean ({verdict})"
    if ran(results.get("teardown")) or ran(results.get("teardown_host")):
        return "FAILED: the eviction did not succeed"
    return "FAILED: nothing was done"


def _times(results: Result) -> list[str]:
    names = (
        ("evict", "teardown"),
        ("node", "teardown_host"),
        ("judge", "clean"),
        ("launch", "launch"),
        ("prove", "verify"),
    )
    parts = [
        f"{word} {cell(seconds(results[key]))} s" for word, key in names if seconds(results.get(key)) is not None
    ]
    if results.get("total_s") is not None:
        parts.append(f"total {cell(float(results['total_s']))} s")
    return paragraph(", ".join(parts), label("Time")) if parts else []


def _would_end(results: Result) -> bool:
    """Check mode: whether a real run would meet the same verdict, since there is nobody to evict."""
    verdict = mapping(results, "clean").get("verdict")
    evictions = [results[key] for key in ("teardown", "teardown_host") if ran(results.get(key))]
    nobody = bool(evictions) and all(each.get("verdict") == "nothing_to_do" for each in evictions)
    return nobody and verdict in ("dirty", "unknown")


def relaunch_lines(results: Result) -> list[str]:
    """The summary of one server's relaunch.

    ``results``: host, server, check (bool), left_alone (bool), total_s, and the registered results teardown,
    teardown_host (with node, the node's name), clean, launch, verify and planned, each empty where its step did not
    run.
    """
    title = f"{results.get('server')} on {results.get('host')}"
    if results.get("left_alone"):
        lines = [f"{title}: SERVING, left alone: it has the wanted configuration"]
        return lines + proof_lines(results.get("verify")) + _times(results)
    if results.get("check"):
        lines = [f"{title}: check mode, nothing was changed"]
        lines += plan_lines(results.get("teardown"))
        lines += plan_lines(results.get("teardown_host"), results.get("node") or "of the container")
        lines += verdict_lines(results.get("clean"), "Now")
        if _would_end(results):
            words = "end here and start nothing: it is not clean, and the scope includes nobody to evict"
            return lines + [label("Would") + words]
        return lines + planned_lines(results.get("planned")) + launch_lines(results.get("launch"), would=True)
    lines = [f"{title}: {_outcome(results)}"]
    lines += gpu_lines(results.get("teardown"), results.get("clean"))
    lines += eviction_lines(results.get("teardown"))
    lines += node_lines(results.get("teardown_host"), results.get("node"))
    lines += verdict_lines(results.get("clean"))
    lines += planned_lines(results.get("planned"))
    lines += launch_lines(results.get("launch"))
    return lines + proof_lines(results.get("verify")) + _times(results)


def teardown_lines(results: Result) -> list[str]:
    """The summary of one eviction.

    ``results``: host, server, check, the registered results teardown and teardown_host, and node, its name.
    """
    teardown, by_node = results.get("teardown"), results.get("teardown_host")
    title = f"{results.get('server')} on {results.get('host')}"
    if results.get("check"):
        plans = plan_lines(teardown) + plan_lines(by_node, results.get("node") or "of the container")
        return [f"{title}: check mode, nothing was changed", *plans]
    lines = [f"{title}: eviction; it certifies nothing, assert_clean.yml does"]
    lines += gpu_lines(teardown if _has_gpus(teardown) else by_node, {}) + eviction_lines(teardown)
    for sentence in reasons(teardown):
        lines += paragraph(sentence, "- ", indent=INDENT)
    return lines + node_lines(by_node, results.get("node"))


def _has_gpus(teardown: t.Any) -> bool:
    return isinstance(teardown, t.Mapping) and bool(gpus_of(teardown, "before"))


def clean_lines(results: Result) -> list[str]:
    """One verdict. ``results``: host, server and the registered result clean."""
    clean = results.get("clean")
    return [f"{results.get('server')} on {results.get('host')}", *gpu_lines({}, clean), *verdict_lines(clean)]
