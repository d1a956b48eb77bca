# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A start and its proof for people."""

from __future__ import annotations

import typing as t

from .results import INDENT, Result, failure, items, label, mapping, ran, rows, who
from .tables import UNKNOWN, cell, exact, paragraph, shortened


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
        f"again from launch {launch['from_launch']}" if launch.get("from_launch") else "",
    ]
    lines = paragraph(
        ", ".join(filter(None, facts)) or "a new process",
        label("Would" if would else "Launched") + ("start " if would else ""),
    )
    log = mapping(launch, "record").get("log") or launch.get("log")
    return lines + (paragraph(cell(log), "log: ", indent=INDENT) if log and not would else [])


def proof_lines(verify: t.Any) -> list[str]:
    """What proves that it serves, or why it does not: the server's own error, its last lines, where its ranks are."""
    if not ran(verify):
        return [label("Proved") + "nothing"]
    lines = _proved(verify) if verify.get("ready") else _not_proved(verify)
    return lines + phase_lines(verify)


def _proved(verify: Result) -> list[str]:
    facts = []
    for each in rows(verify, "tokens"):
        rank = each.get("dp_rank")
        where = f" from DP rank {rank}" if rank is not None else ""
        facts.append(f"{cell(each.get('count'))} tokens{where} in {cell(each.get('seconds'))} s")
    facts += _verdicts(verify)
    if verify.get("headroom_mib") is not None:
        facts.append(f"GPU headroom {cell(verify['headroom_mib'])} MiB")
    pid = f"pid {verify['pid']} serves on port {verify.get('port')}; " if verify.get("pid") else ""
    lines = paragraph(pid + ", ".join(facts), label("Proved"))
    lines += _ranks(verify) + _flags(verify) + _load(verify)
    for warning in items(mapping(verify, "proof"), "warnings"):
        lines += paragraph(cell(warning), "warning: ", indent=INDENT)
    return lines


def _verdicts(verify: Result) -> list[str]:
    """What the probes of the answer's form found, where they were asked for."""
    facts = []
    for key, word in (("reasoning", "reasoning"), ("tools", "tool calls")):
        found = verify.get(key)
        if isinstance(found, t.Mapping):
            facts.append(f"{word} " + cell(found.get("verdict") or found.get("message") or _flat(found)))
        elif found and key == "reasoning":
            facts.append("reasoning is separated")
    return facts


def _ranks(verify: Result) -> list[str]:
    """Schedulers that live, and the GPUs that they hold."""
    workers, used = mapping(verify, "workers"), items(verify, "gpus_used")
    facts = []
    if workers.get("schedulers") is not None:
        wanted = workers.get("expected")
        facts.append(f"{cell(workers['schedulers'])} of {cell(wanted)} schedulers live")
    if used:
        held = [_gpu(each) for each in used if each.get("used") is True]
        unseen = [_gpu(each) for each in used if each.get("used") is None]
        hidden = f", not visible {','.join(unseen)}" if unseen else ""
        facts.append(f"GPUs in use {','.join(held) or 'none'}{hidden}")
    lines = paragraph("; ".join(facts), "ranks: ", indent=INDENT) if facts else []
    for each in used:
        for stranger in items(each, "strangers"):
            lines += paragraph(f"GPU {_gpu(each)} is also held by {cell(stranger)}", "warning: ", indent=INDENT)
    return lines


def _gpu(each: Result) -> str:
    index = each.get("index")
    return str(each.get("gpu") if index is None else index)


def _flags(verify: Result) -> list[str]:
    """Flags that run otherwise than wanted, and those that SGLang has set itself."""
    judged = verify.get("flags_differ")
    lines: list[str] = []
    for key, word in (("differences", "differs"), ("resolved", "set by SGLang")):
        for each in items(judged, key) if isinstance(judged, t.Mapping) else []:
            if isinstance(each, t.Mapping):
                values = f"wanted {exact(each.get('wanted'))}, runs with {exact(each.get('found'))}"
                lines += paragraph(f"{each.get('item')}: {values}", f"{word}: ", indent=INDENT)
            else:
                lines += paragraph(cell(each), f"{word}: ", indent=INDENT)
    return lines


def _load(verify: Result) -> list[str]:
    soak = mapping(verify, "soak")
    if not soak:
        return []
    latency = mapping(soak, "latency_s")
    facts = [
        f"{cell(soak.get('requests'))} requests, {cell(soak.get('concurrency'))} at a time: "
        f"{cell(soak.get('failed'))} failed",
        f"{cell(soak.get('tokens_per_s'))} tokens/s",
    ]
    if latency:
        facts.append(f"latency {cell(latency.get('p50'))} s, 95 % within {cell(latency.get('p95'))} s")
    if soak.get("first_error"):
        facts.append(f"first error: {soak['first_error']}")
    return paragraph(", ".join(facts), "load: ", indent=INDENT)


def phase_lines(verify: Result) -> list[str]:
    """How long each phase of the start took."""
    facts = []
    for each in items(verify, "phases"):
        if each.get("name") != "ready":
            percent = f" ({cell(each['percent'])} %)" if isinstance(each.get("percent"), (int, float)) else ""
            seconds = each.get("seconds")
            took = f" {seconds:.0f} s" if isinstance(seconds, (int, float)) else ""
            facts.append(f"{each.get('name')}{took}{percent}")
    return paragraph(", ".join(facts), "phases: ", indent=INDENT) if facts else []


def _not_proved(verify: Result) -> list[str]:
    verdict = cell(verify.get("verdict") or "no verdict")
    phase = f" in phase '{verify['phase']}'" if verify.get("phase") else ""
    text = f"not serving: {verdict}{phase}: {verify.get('error') or failure(verify)}"
    lines = paragraph(text, label("Proved"))
    error = str(verify.get("error"))
    for problem in items(mapping(verify, "proof"), "problems"):
        if str(problem) not in error:
            lines += paragraph(cell(problem), "also: ", indent=INDENT)
    lines += _load(verify) + evidence_lines(mapping(verify, "evidence"))
    tail = verify.get("log_tail")
    tail = tail.splitlines() if isinstance(tail, str) else items(verify, "log_tail")
    return lines + [" " * INDENT + "| " + shortened(line, 84) for line in tail[-10:]]


def evidence_lines(evidence: Result) -> list[str]:
    """Where each rank was, and what memory there was, at the moment when it was given up."""
    lines: list[str] = []
    for each in items(evidence, "processes"):
        facts = [f"state {each.get('state') or UNKNOWN}"]
        if each.get("cpu_percent") is not None:
            busy = "" if isinstance(each["cpu_percent"], str) else " % CPU"
            facts.append(f"{cell(each['cpu_percent'])}{busy}")
        if each.get("wchan"):
            facts.append(f"waits in {each['wchan']}")
        stack = [cell(line) for line in items(each, "stack")]
        if stack:
            facts.append(f"stack ({cell(each.get('stack_source'))}): {'; '.join(stack[:4])}")
        elif each.get("stack_problem"):
            facts.append(f"no stack: {each['stack_problem']}")
        lines += paragraph(f"{who(each)}: {', '.join(facts)}", "rank: " if _is_rank(each) else "near: ", indent=INDENT)
    shown = [
        f"GPU {each.get('index')} {cell(each.get('used_mib'))} of {cell(each.get('total_mib'))} MiB in use"
        for each in items(evidence, "gpus")
    ]
    memory = mapping(evidence, "memory")
    if memory.get("available_mib") is not None:
        shown.append(f"{cell(memory['available_mib'])} MiB of host memory available")
    if memory.get("cgroup_oom_kills"):
        shown.append(f"{cell(memory['cgroup_oom_kills'])} processes killed for lack of memory")
    return lines + (paragraph("; ".join(shown), "memory: ", indent=INDENT) if shown else [])


def _is_rank(process: Result) -> bool:
    return "scheduler" in f"{process.get('role')} {process.get('title')}"


def _flat(mapping: Result) -> str:
    return ", ".join(f"{key} {cell(value)}" for key, value in mapping.items())
