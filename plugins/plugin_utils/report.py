# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a run tells people at its end: lines of text from the modules' results.

A step that did not run, or whose module gave no result, is said to be so; nothing is good because it is absent.
"""

from __future__ import annotations

import typing as t

from .evict_report import eviction_lines, gpu_lines, gpus_of, node_lines, plan_lines, verdict_lines
from .results import INDENT, Result, cut_off, failure, items, label, mapping, ran, reasons, seconds
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
    """The summary of one server's relaunch, or of its way back.

    ``results``: host, server, check (bool), left_alone (bool), total_s, from_launch, on_failure, and the registered
    results teardown, teardown_host (with node, the node's name), clean, launch, verify and planned, each empty where
    its step did not run. After a failure first, second and stopped hold those of each path, next and trial what was
    decided, and outcome its sentence. lease, lease_released, clients_held, clients_released and clients_problems
    are told where they matter.
    """
    title = f"{results.get('server')} on {results.get('host')}"
    if results.get("left_alone"):
        lines = [f"{title}: SERVING, left alone: it has the wanted configuration", *unit_lines(results)]
        return lines + proof_lines(results.get("verify")) + _lease_lines(results) + _times(results)
    if results.get("check"):
        return _check_lines(title, results)
    first = mapping(results, "first")
    lines = [f"{title}: {_whole_outcome(results)}", *unit_lines(results)]
    lines += path_lines(first or results, results)
    if mapping(results, "second"):
        lines += ["", f"Going back to launch {mapping(results, 'trial').get('launch_id')}"]
        lines += path_lines(mapping(results, "second"), {**results, "planned": {}})
    if mapping(results, "stopped"):
        lines += ["", "Stopping it"] + path_lines(mapping(results, "stopped"), {**results, "planned": {}}, starts=False)
    lines += _client_lines(results) + _lease_lines(results)
    story = mapping(results, "outcome").get("outcome")
    lines += paragraph(str(story), label("Outcome")) if story and first else []
    return lines + _times(results)


def unit_lines(results: Result) -> list[str]:
    """Of a server over several hosts: which of its nodes this is."""
    unit = mapping(results, "unit")
    rank = next((each.get("rank") for each in items(unit, "members") if each.get("host") == results.get("host")), None)
    if not unit:
        return []
    return paragraph(f"node {'?' if rank is None else rank} of {unit.get('nodes')}: {unit.get('name')}", label("Unit"))


def path_lines(path: Result, results: Result, starts: bool = True) -> list[str]:
    """What the steps of one path did. ``path``: its registered results."""
    lines = gpu_lines(path.get("teardown"), path.get("clean"))
    lines += eviction_lines(path.get("teardown"))
    lines += node_lines(path.get("teardown_host"), results.get("node"))
    lines += verdict_lines(path.get("clean"))
    if not starts:
        return lines
    lines += planned_lines(results.get("planned")) + launch_lines(path.get("launch"))
    return lines + proof_lines(path.get("verify"))


def _check_lines(title: str, results: Result) -> list[str]:
    lines = [f"{title}: check mode, nothing was changed", *unit_lines(results)]
    holder = mapping(mapping(results, "lease"), "holder")
    if holder and holder.get("held"):
        lines += paragraph(f"wait for {holder_words(holder)}", label("Would"))
    lines += plan_lines(results.get("teardown"))
    lines += plan_lines(results.get("teardown_host"), results.get("node") or "of the container")
    lines += verdict_lines(results.get("clean"), "Now")
    if _would_end(results):
        words = "end here and start nothing: it is not clean, and the scope includes nobody to evict"
        return lines + [label("Would") + words]
    lines += planned_lines(results.get("planned")) + launch_lines(results.get("launch"), would=True)
    return lines + _would_follow(results) + _client_lines(results)


def _would_follow(results: Result) -> list[str]:
    """Check mode: what a failure of the start or of the proof would lead to."""
    choice = results.get("on_failure")
    if choice == "leave":
        return paragraph("leave it as it is, if it does not serve (on_failure: leave)", label("Would"))
    if choice != "rollback":
        return paragraph(f"stop it, if it does not serve (on_failure: {choice})", label("Would")) if choice else []
    trial = mapping(results, "trial")
    follow = mapping(trial, "next")
    if follow.get("step") == "rollback":
        same = mapping(results, "launch").get("config_hash")
        if same and same == trial.get("config_hash"):
            text = f"stop it, if it does not serve: launch {trial.get('launch_id')} has the same configuration"
        else:
            text = f"go back to launch {trial.get('launch_id')}, if it does not serve"
        return paragraph(text, label("Would"))
    why = follow.get("why")
    return paragraph(f"stop it, if it does not serve: {why}", label("Would")) if why else []


def _whole_outcome(results: Result) -> str:
    """The title's words: how the wanted path ended, and what came of what followed."""
    first, second = mapping(results, "first"), mapping(results, "second")
    text = _outcome(first or results)
    if not first:
        return text
    if text == "SERVING":
        # Its own proof passed, and what is a part of something that does not serve does not serve either.
        text = "FAILED: another node of it does not serve"
    step = mapping(results, "next").get("step")
    if second:
        target = mapping(results, "trial").get("launch_id")
        if mapping(second, "verify").get("ready") is True and not second.get("message"):
            return f"{text}; rolled back to {target}: SERVING"
        return f"{text}; the rollback failed too"
    return text + {"stop": "; stopped", "leave": "; left as it is"}.get(str(step), "")


def _client_lines(results: Result) -> list[str]:
    lines: list[str] = []
    problems = results.get("clients_problems") or []
    for client in results.get("clients_released") or []:
        detail = f" ({client['detail']})" if client.get("detail") else ""
        lines += paragraph(f"{client.get('name')}: {client.get('result')}{detail}", label("Client"))
    for client in results.get("clients_held") or []:
        word = "stopped" if client.get("action") == "stop" else "paused"
        lines += paragraph(f"{client.get('name')} on {client.get('host')}: still {word}", label("Client"))
    for problem in problems if isinstance(problems, (list, tuple)) else []:
        lines += paragraph(cell(problem), "warning: ", indent=INDENT)
    return lines


def holder_words(holder: Result) -> str:
    """Who holds a lease, since when and until when."""
    by = " ".join(filter(None, (f"of {holder['operator']}" if holder.get("operator") else "",
                                f"on {holder['controller']}" if holder.get("controller") else "")))  # fmt: skip
    return f"run {holder.get('run_id')} {by}, which works on it since {holder.get('taken_at')}".replace("  ", " ")


def _lease_lines(results: Result) -> list[str]:
    """The lease, where something about it is worth telling."""
    lease, released = mapping(results, "lease"), results.get("lease_released")
    lines: list[str] = []
    waited = lease.get("waited_s")
    if isinstance(waited, (int, float)) and waited >= 1:
        lines += paragraph(f"waited {cell(float(waited))} s for another run", label("Lease"))
    if mapping(lease, "broken"):
        words = holder_words(mapping(lease, "broken"))
        reason = mapping(lease, "broken").get("why")
        lines += paragraph(f"broken: that of {words}{f' ({reason})' if reason else ''}", label("Lease"))
    # failed_when: false takes the word 'failed' away, and leaves the message.
    if ran(released) and released.get("msg"):
        lines += paragraph(f"not given back ({failure(released)}); it ends by itself", label("Lease"))
    return lines


def teardown_lines(results: Result) -> list[str]:
    """The summary of one eviction.

    ``results``: host, server, check, the registered results teardown and teardown_host, and node, its name; lease,
    lease_released, clients_held and clients_problems as for a relaunch, and no_lease, why there is none.
    """
    teardown, by_node = results.get("teardown"), results.get("teardown_host")
    title = f"{results.get('server')} on {results.get('host')}"
    if results.get("check"):
        plans = plan_lines(teardown) + plan_lines(by_node, results.get("node") or "of the container")
        return [f"{title}: check mode, nothing was changed", *plans]
    lines = [f"{title}: eviction; it certifies nothing, assert_clean.yml does", *unit_lines(results)]
    lines += paragraph(str(results["no_lease"]), label("Lease")) if results.get("no_lease") else []
    lines += gpu_lines(teardown if _has_gpus(teardown) else by_node, {}) + eviction_lines(teardown)
    for sentence in reasons(teardown):
        lines += paragraph(sentence, "- ", indent=INDENT)
    return lines + node_lines(by_node, results.get("node")) + _client_lines(results) + _lease_lines(results)


def _has_gpus(teardown: t.Any) -> bool:
    return isinstance(teardown, t.Mapping) and bool(gpus_of(teardown, "before"))


def clean_lines(results: Result) -> list[str]:
    """One verdict. ``results``: host, server and the registered result clean."""
    clean = results.get("clean")
    return [f"{results.get('server')} on {results.get('host')}", *gpu_lines({}, clean), *verdict_lines(clean)]
