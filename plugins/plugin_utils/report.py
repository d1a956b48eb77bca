# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a run tells people at its end: lines of text from the modules' results.

A step that did not run, or whose module gave no result, is said to be so; nothing is good because it is absent.
"""

from __future__ import annotations

import re
import typing as t

from .inventory import driver_problem
from .tables import UNKNOWN, Column, cell, duration, paragraph, shortened, table

Result = t.Mapping[str, t.Any]
_LABEL = 10
# Ansible's and sudo's own words, so that a module's message about some password is left as it is.
_NO_SUDO = re.compile(r"sudo: (?:command )?not found|sudo: No such file")
_NO_PASSWORD = re.compile(r"(?:Missing|Incorrect) \w+ password|sudo: a password is required")


def _label(word: str) -> str:
    return word.ljust(_LABEL)


def _ran(result: t.Any) -> bool:
    """Whether a module's registered result is one: not skipped, not empty."""
    return isinstance(result, t.Mapping) and bool(result) and not result.get("skipped")


def _list(result: Result, key: str) -> list[t.Any]:
    value = result.get(key)
    return list(value) if isinstance(value, (list, tuple)) else []


def _map(result: Result, key: str) -> Result:
    value = result.get(key)
    return value if isinstance(value, t.Mapping) else {}


def _seconds(result: t.Any) -> t.Optional[float]:
    value = result.get("seconds") if isinstance(result, t.Mapping) else None
    return float(value) if isinstance(value, (int, float)) else None


def failure(result: t.Any) -> str:
    """Why a task failed, in one sentence: Ansible's own errors are put into words that name the way out."""
    if not isinstance(result, t.Mapping) or not result:
        return "it did not run"
    text = " ".join(str(result.get("msg") or "").split()).removeprefix("Task failed: ")
    output = " ".join(str(result.get(key) or "") for key in ("module_stderr", "module_stdout", "stderr")).strip()
    everything = f"{text} {output}"
    if result.get("unreachable"):
        return f"unreachable: {text}"
    if cut_off(result):
        return (
            "the connection was lost while it ran, or it was killed there; what it did is not known, and it may "
            "still run on the host. Run the same again"
        )
    if _NO_SUDO.search(everything):
        return "there is no sudo to become root with; connect as root and set sglang_become: false, or install sudo"
    if _NO_PASSWORD.search(everything):
        return f"no permission to become root: {shortened(text or output, 200)}; see --ask-become-pass"
    if "The module interpreter" in text or result.get("rc") == 127:
        said = shortened(text or output, 200)
        return f"the Python interpreter for Ansible's modules is missing: {said}; see ansible_python_interpreter"
    return text or shortened(output, 300) or "it failed without a message"


def cut_off(result: t.Any) -> bool:
    """Whether a module's answer never came: Ansible got nothing that it could read, not even an error's text."""
    if not isinstance(result, t.Mapping) or "deserialization failed: No start of json" not in str(result.get("msg")):
        return False
    return not any(str(result.get(key) or "").strip() for key in ("module_stderr", "module_stdout"))


def _reason(reason: t.Any) -> str:
    if not isinstance(reason, t.Mapping):
        return cell(reason)
    seen_from = f" (seen from {reason['seen_from']})" if reason.get("seen_from") else ""
    return f"{reason.get('message')} [{reason.get('code')}]{seen_from}"


def reasons(result: t.Any) -> list[str]:
    """The sentences of a result's reasons, each with its code."""
    return [_reason(each) for each in _list(result, "reasons")] if isinstance(result, t.Mapping) else []


def why(result: t.Any) -> str:
    """The reasons of a result in one line; where it has none, what failed."""
    return "; ".join(reasons(result)) or failure(result)


def launch_problem(result: t.Any) -> str:
    """Why a server was not started, or would not be; empty where all is well."""
    return "" if isinstance(result, t.Mapping) and result.get("config_hash") else failure(result)


def who(target: t.Any) -> str:
    """One process, unit or container as people name it."""
    if not isinstance(target, t.Mapping):
        return f"pid {target}" if isinstance(target, int) else cell(target)
    name = (
        target.get("title")
        or target.get("unit")
        or target.get("container")
        or target.get("name")
        or target.get("subject")
    )
    pid, inner = target.get("pid"), target.get("inner_pid")
    text = f"pid {pid}" if pid is not None else ""
    # Seen from the node: the pid inside the container is the one that its own tools show.
    text += f" ({inner} inside)" if text and inner is not None and inner != pid else ""
    return " ".join(part for part in (text, shortened(name, 48) if name else "") if part) or cell(str(dict(target)))


def _whys(target: t.Any) -> str:
    reason = target.get("why") if isinstance(target, t.Mapping) else None
    return f"{who(target)}: {reason}" if reason else who(target)


def _used(gpu: Result | None) -> int | None:
    """Memory in use, from gpu_evict's short rows or from full ones."""
    if not gpu:
        return None
    value = gpu.get("used_mib", _map(gpu, "memory").get("used_mib"))
    return value if isinstance(value, int) else None


def _gpus(result: Result, key: str) -> dict[t.Any, Result]:
    value = result.get(key)
    value = value.get("gpus") if isinstance(value, t.Mapping) else value
    return {gpu.get("index"): gpu for gpu in value or [] if isinstance(gpu, t.Mapping)}


def _holders(gpu: t.Optional[Result]) -> str:
    holders = _list(gpu, "holders") if gpu else []
    return ", ".join(who(each) for each in holders) or "nobody seen"


def _memory_rows(teardown: Result, clean: Result) -> list[list[t.Any]]:
    before, after = _gpus(teardown, "before"), _gpus(teardown, "after")
    judged = _gpus(_map(clean, "facts_seen"), "gpus")
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
    rows = _memory_rows(teardown if _ran(teardown) else {}, clean if _ran(clean) else {})
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
    for rung in _list(teardown, "rungs"):
        asked, left, stayed = (_list(rung, key) for key in ("asked", "left", "stayed"))
        rows.append(
            [rung.get("rung"), rung.get("seconds"), len(asked), len(left), "; ".join(map(_whys, stayed)) or "nobody"]
        )
    return rows


def eviction_lines(teardown: t.Any) -> list[str]:
    """The ladder: per rung who was asked, who left and who stayed and why; then what was left alone or kept."""
    if not _ran(teardown):
        return [_label("Evicted") + "not done"]
    verdict = teardown.get("verdict")
    took = f", {cell(_seconds(teardown))} s" if verdict or _seconds(teardown) is not None else ""
    return paragraph(f"{verdict or failure(teardown)}{took}", _label("Evicted")) + _ladder_lines(teardown)


def node_lines(teardown: t.Any, node: t.Any) -> list[str]:
    """What a container's Proxmox node did: its rungs with their seconds, who stayed, and what stood against more."""
    if not _ran(teardown):
        return []
    rungs = [f"{rung.get('rung')} {cell(rung.get('seconds'))} s" for rung in _list(teardown, "rungs")]
    climbed = f"{', '.join(rungs)}; " if rungs else ""
    verdict = teardown.get("verdict")
    took = f", {cell(_seconds(teardown))} s" if verdict or _seconds(teardown) is not None else ""
    lines = paragraph(f"node {node}: {climbed}{verdict or failure(teardown)}{took}", _label("Escalated"))
    lines += _container_lines(teardown) + _ladder_lines(teardown)
    for sentence in reasons(teardown):
        lines += paragraph(sentence, "- ", indent=_LABEL)
    return lines


def _container_lines(result: Result) -> list[str]:
    """The container as its node sees it, where that is not simply running."""
    container = _map(result, "container")
    state = container.get("state")
    lines = []
    if state not in (None, "running"):
        lines += paragraph(f"container {container.get('vmid')} is {state}", "state: ", indent=_LABEL)
    for one in _list(container, "stuck"):
        waits = f"state {one.get('state')}, waits in {one.get('wchan') or 'an unknown place'}"
        lines += paragraph(f"pid {one.get('pid')}: SIGKILL does not end it ({waits})", "stuck: ", indent=_LABEL)
    for problem in _list(container, "problems"):
        text = problem.get("message") if isinstance(problem, t.Mapping) else problem
        lines += paragraph(cell(text), "problem: ", indent=_LABEL)
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
        lines += [" " * _LABEL + line for line in table(columns, rows)]
    for rung in _list(teardown, "rungs"):
        if rung.get("note"):
            lines += paragraph(cell(rung["note"]), f"{rung.get('rung')}: ", indent=_LABEL)
    for each in _list(teardown, "ended"):
        lines += paragraph(f"{who(each)} (rung {cell(each.get('rung'))})", "ended: ", indent=_LABEL)
    pinned = _map(teardown, "pinned")
    if pinned.get("note"):
        lines += paragraph(cell(pinned["note"]), "memory: ", indent=_LABEL)
    leftovers = _map(teardown, "leftovers")
    for label, items in (
        ("came back", _list(teardown, "respawns")),
        ("left alone", _list(teardown, "spared")),
        ("removed", _list(leftovers, "removed")),
    ):
        for item in items:
            lines += paragraph(_whys(item), f"{label}: ", indent=_LABEL)
    for item in _list(leftovers, "kept"):
        lines += paragraph(_path(item), "kept: ", indent=_LABEL)
    return lines


def _path(item: t.Any) -> str:
    if not isinstance(item, t.Mapping):
        return cell(item)
    name = cell(item.get("path") or item.get("name"))
    return f"{name}: {item['why']}" if item.get("why") else name


def plan_lines(teardown: t.Any, node: t.Any = None) -> list[str]:
    """Check mode: who would be asked at which rung, by ``node`` where it is the node's plan."""
    if node and not _ran(teardown):
        return []
    if node:
        return [_label("Would") + f"then, by node {node}, where that is not enough:", *_node_plan(teardown)]
    if not _ran(teardown):
        return [_label("Would") + "evict: no plan"]
    rows = [
        [step.get("rung"), "; ".join(map(who, _list(step, "targets"))) or "nobody"] for step in _list(teardown, "plan")
    ]
    if rows:
        lines = [_label("Would") + "ask, until nobody wanted gone is left"]
        lines += [" " * _LABEL + line for line in table([Column("rung"), Column("whom", 76)], rows)]
    elif teardown.get("verdict") == "nothing_to_do":
        lines = [_label("Would") + "evict nobody: nobody whom the scope includes is here"]
    else:
        lines = paragraph(f"evict: not known: {why(teardown)}", _label("Would"))
    for item in _list(teardown, "spared"):
        lines += paragraph(_whys(item), "left alone: ", indent=_LABEL)
    return lines


def _node_plan(teardown: Result) -> list[str]:
    """The node's plan below its heading, and what stands against its opt-in rungs."""
    lines = plan_lines(teardown)
    for sentence in reasons(teardown):
        lines += paragraph(sentence, "- ", indent=_LABEL)
    return lines


def _view_lines(clean: Result) -> list[str]:
    """The verdict of each view that the joint one was made of."""
    lines: list[str] = []
    for view in _map(clean, "views").values():
        if isinstance(view, t.Mapping):
            said = view.get("verdict") or "no view, it can't be reached"
            available = view.get("available_mib")
            more = f", {cell(available)} MiB of host memory available" if available is not None else ""
            lines += paragraph(f"{said}{more}", f"{view.get('where')}: ", indent=_LABEL)
    return lines


def verdict_lines(clean: t.Any, word: str = "Verdict") -> list[str]:
    """The verdict, its reasons, its warnings and from where it was seen."""
    if not _ran(clean):
        return [_label(word) + "not judged"]
    verdict = clean.get("verdict")
    if not verdict:
        return paragraph(f"no verdict: {failure(clean)}", _label(word))
    summary = str(verdict if _list(clean, "reasons") else clean.get("summary") or verdict)
    seen_from = [f"seen from the {clean['vantage']}"] if clean.get("vantage") else []
    seen_from = [text for text in seen_from if text not in summary]
    seen_from += ["GPUs SIMULATED"] if clean.get("simulated") else []
    lines = paragraph(summary + (f" ({', '.join(seen_from)})" if seen_from else ""), _label(word))
    lines += _view_lines(clean)
    for reason in _list(clean, "reasons"):
        lines += paragraph(_reason(reason), "- ", indent=_LABEL)
    for warning in _list(clean, "warnings_found"):
        lines += paragraph(_reason(warning), "warning: ", indent=_LABEL)
    return lines


def planned_lines(planned: t.Any) -> list[str]:
    """The plan in short: its verdict, and what it was not sure of or warned of. Nothing where nobody planned."""
    if not _ran(planned) or not planned.get("summary"):
        return []
    lines = paragraph(str(planned["summary"]), _label("Planned"))
    for finding in _list(planned, "findings"):
        if finding.get("severity") in ("unknown", "warn"):
            word = "warning" if finding["severity"] == "warn" else "unknown"
            lines += paragraph(f"{finding.get('message')} [{finding.get('id')}]", f"{word}: ", indent=_LABEL)
    return lines


def launch_lines(launch: t.Any, would: bool = False) -> list[str]:
    """What was started: the launch's id, its process and its unit."""
    if not _ran(launch):
        return [] if would else [_label("Launched") + "nothing"]
    if launch.get("failed") or (not would and not launch.get("launch_id")):
        return paragraph(failure(launch), _label("Launched"))
    facts = [
        f"launch {launch['launch_id']}" if launch.get("launch_id") else "",
        f"pid {launch['pid']}" if launch.get("pid") else "",
        cell(launch["unit"]) if launch.get("unit") else "",
        f"configuration {shortened(launch['config_hash'], 19)}" if launch.get("config_hash") else "",
    ]
    lines = paragraph(
        ", ".join(filter(None, facts)) or "a new process",
        _label("Would" if would else "Launched") + ("start " if would else ""),
    )
    log = _map(launch, "record").get("log") or launch.get("log")
    return lines + (paragraph(cell(log), "log: ", indent=_LABEL) if log and not would else [])


def proof_lines(verify: t.Any) -> list[str]:
    """What proves that it serves: tokens of every rank, reasoning, headroom; or the server's own error."""
    if not _ran(verify):
        return [_label("Proved") + "nothing"]
    if not verify.get("ready"):
        verdict = cell(verify.get("verdict") or "no verdict")
        phase = f" in phase '{verify['phase']}'" if verify.get("phase") else ""
        text = f"not serving: {verdict}{phase}: {verify.get('error') or failure(verify)}"
        lines = paragraph(text, _label("Proved"))
        tail = verify.get("log_tail")
        tail = tail.splitlines() if isinstance(tail, str) else _list(verify, "log_tail")
        return lines + [" " * _LABEL + "| " + shortened(line, 84) for line in tail[-8:]]
    facts = []
    for each in _list(verify, "tokens"):
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
    return paragraph(pid + ", ".join(facts), _label("Proved"))


def _flat(mapping: Result) -> str:
    return ", ".join(f"{key} {cell(value)}" for key, value in mapping.items())


def _outcome(results: Result) -> str:
    """The last step that ran decides; a step that gave no result is a failure."""
    if _ran(results.get("verify")):
        return "SERVING" if _map(results, "verify").get("ready") is True else "FAILED: it does not serve"
    if _ran(results.get("launch")):
        if cut_off(results.get("launch")):
            return "FAILED: broken off in the start; whether it was started is not known"
        started = _map(results, "launch").get("launch_id")
        return "FAILED: it was started, not proved" if started else "FAILED: it was not started"
    if _ran(results.get("clean")):
        verdict = _map(results, "clean").get("verdict") or UNKNOWN
        return "FAILED: broken off before the start" if verdict == "clean" else f"FAILED: not clean ({verdict})"
    if _ran(results.get("teardown")) or _ran(results.get("teardown_host")):
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
        f"{word} {cell(_seconds(results[key]))} s" for word, key in names if _seconds(results.get(key)) is not None
    ]
    if results.get("total_s") is not None:
        parts.append(f"total {cell(float(results['total_s']))} s")
    return paragraph(", ".join(parts), _label("Time")) if parts else []


def _would_end(results: Result) -> bool:
    """Check mode: whether a real run would meet the same verdict, since there is nobody to evict."""
    verdict = _map(results, "clean").get("verdict")
    evictions = [results[key] for key in ("teardown", "teardown_host") if _ran(results.get(key))]
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
            return lines + [_label("Would") + words]
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
    lines += gpu_lines(teardown if _gpus_of(teardown) else by_node, {}) + eviction_lines(teardown)
    for sentence in reasons(teardown):
        lines += paragraph(sentence, "- ", indent=_LABEL)
    return lines + node_lines(by_node, results.get("node"))


def _gpus_of(teardown: t.Any) -> bool:
    return isinstance(teardown, t.Mapping) and bool(_gpus(teardown, "before"))


def clean_lines(results: Result) -> list[str]:
    """One verdict. ``results``: host, server and the registered result clean."""
    clean = results.get("clean")
    return [f"{results.get('server')} on {results.get('host')}", *gpu_lines({}, clean), *verdict_lines(clean)]


def _gpu_rows(info: Result) -> list[list[t.Any]]:
    rows: list[list[t.Any]] = []
    for gpu in _list(info, "gpus"):
        memory = _map(gpu, "memory")
        used = f"{cell(memory.get('used_mib'))} / {cell(memory.get('total_mib'))}"
        first: list[t.Any] = [str(gpu.get("index")), gpu.get("name"), used]
        people = [
            [_pids(each), role, shortened(each.get("title"), 60), duration(each.get("age_s")), _evidence(each)]
            for role, key in (("holder", "holders"), ("visitor", "visitors"), ("suspect", "suspects"))
            for each in _list(gpu, key)
            if isinstance(each, t.Mapping)
        ]
        for problem in _list(gpu, "errors"):
            people.append(["-", "error", f"{problem.get('call')}: {problem.get('message')}", "", ""])
        for person in people or [["-", "", "nobody seen", "", ""]]:
            rows.append([*first, *person])
            first = ["", "", ""]
    return rows


def _pids(each: Result) -> str:
    inner = each.get("inner_pid")
    return str(each.get("pid")) if inner is None else f"{each.get('pid')} ({inner} inside)"


def _evidence(holder: Result) -> str:
    protected = f"protected: {holder['protected']}; " if holder.get("protected") else ""
    return protected + "; ".join(map(cell, _list(holder, "evidence")))


def _host_line(host: str, info: Result) -> list[str]:
    if info.get("gpus") is None:
        problems = "; ".join(cell(driver_problem(each)) for each in _list(info, "problems")) or failure(info)
        return paragraph(f"{host}: GPUs unknown: {problems}")
    scan = _map(info, "scan")
    blind = len(_list(scan, "unreadable_pids"))
    parts = [
        f"{len(_list(info, 'gpus'))} GPUs{' (SIMULATED)' if info.get('simulated') else ''}",
        f"driver {cell(info.get('driver_version'))}, by {cell(info.get('source'))}",
        f"{cell(scan.get('processes'))} processes looked at" + (f", {blind} of them unreadable" if blind else ""),
    ]
    noticed = [cell(each.get("message")) for each in _list(info, "problems") if isinstance(each, t.Mapping)]
    lines = paragraph(f"{host}: " + "; ".join(parts))
    for problem in noticed:
        lines += paragraph(problem, "problem: ", indent=2)
    return lines


def _flag(value: t.Any) -> str:
    """A flag's value as people would type it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(_flag, value))
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


def _server_lines(servers: Result) -> list[str]:
    found = _list(servers, "servers")
    if not found:
        return [
            "Servers: none seen"
            if _ran(servers) and not servers.get("failed")
            else f"Servers: unknown: {failure(servers)}"
        ]
    lines = ["Servers"]
    for server in found:
        leader = _map(server, "leader")
        facts = [
            f"pid {leader.get('pid')}",
            f"port {server.get('port') or UNKNOWN}",
            f"GPUs {','.join(map(str, _list(server, 'gpus'))) or 'none'}",
            cell(server.get("unit") or server.get("container") or "no unit"),
            f"version {cell(server.get('version'))}",
            "launched by Clean Slate" if server.get("launched_by_us") else "launched by others",
        ]
        lines += paragraph(", ".join(facts), f"  {server.get('name') or '(unnamed)'}: {server.get('state')}: ")
        flags = _map(server, "flags")
        if flags:
            texts = [f"{key}={_flag(value)}" for key, value in sorted(flags.items()) if key not in ("host", "port")]
            lines += paragraph(" ".join(texts), "flags: ", indent=4)
    for orphan in _list(servers, "orphans"):
        lines += paragraph(who(orphan), "orphan: ", indent=2)
    return lines


def _ram_lines(memory: Result) -> list[str]:
    info = _map(memory, "meminfo")
    if not info:
        return paragraph(f"unknown: {failure(memory)}", "RAM: ")
    cgroup = _map(memory, "cgroup")
    limit = f"; container limit {cell(cgroup['limit_mib'])} MiB" if cgroup.get("limit_mib") is not None else ""
    shm = _map(memory, "shm")
    figures = [
        f"{cell(memory.get('available_mib'))} MiB available of {cell(info.get('mem_total_mib'))}",
        f"page cache {cell(info.get('cached_mib'))}",
        f"pinned by SGLang {cell(memory.get('pinned_mib'))}",
        f"swap free {cell(info.get('swap_free_mib'))}",
        f"hugepages {cell(info.get('hugepages_mib'))} MiB{limit}",
    ]
    lines = paragraph("; ".join(figures), "RAM: ")
    lines += paragraph(f"{cell(shm.get('free_mib'))} of {cell(shm.get('total_mib'))} MiB free", "/dev/shm: ")
    stale = [each for each in _list(shm, "files") if isinstance(each, t.Mapping) and each.get("stale")]
    for each in stale:
        lines += paragraph(
            f"{each.get('name')}, {cell(each.get('size_mib'))} MiB: {each.get('why')}", "leftover: ", indent=2
        )
    return lines


def inspect_lines(results: Result) -> list[str]:
    """One host for people.

    ``results``: host, gpu_info, memory_info and server_info as registered; for a container node_info, its node's view,
    and node, its name. A container that can't be reached is shown by its node alone.
    """
    host, node_info = str(results.get("host")), _map(results, "node_info")
    if not _ran(node_info):
        return _inside_lines(host, results)
    lines = []
    if _map(results, "gpu_info").get("skipped"):
        lines += paragraph(f"{host}: it can't be reached, so its servers and its memory are not known")
    else:
        lines += _inside_lines(host, results)
    title = f"{host} seen from node {results.get('node')}"
    return lines + _look_lines(title, node_info) + _container_lines(node_info)


def _inside_lines(host: str, results: Result) -> list[str]:
    lines = _look_lines(host, _map(results, "gpu_info"))
    lines += _server_lines(_map(results, "server_info"))
    return lines + _ram_lines(_map(results, "memory_info"))


def _look_lines(host: str, info: Result) -> list[str]:
    lines = _host_line(host, info)
    rows = _gpu_rows(info)
    if rows:
        columns = [
            Column("GPU"),
            Column("Name", 14),
            Column("Used/total MiB", 16, right=True),
            Column("Pid", right=True),
            Column("Role"),
            Column("Who", 24),
            Column("Since", 10),
            Column("Evidence", 26),
        ]
        lines += table(columns, rows)
    return lines
