# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What follows for all nodes of one server over several hosts from what became of each of them. Pure functions.

Whatever happens to such a server happens to all of its nodes, since none of them is worth anything alone.

``unit``: the server with its hosts and members, as spread.to_data gives it. ``rows``: what each of its hosts noted as
facts, by the host's name: at (how far it came), held_first and held_second (whether it was another node that ended this
path), choice (on_failure), next (what it would do alone, later what was decided), message, from_launch, first, second,
stopped, trial. A host without a word of it vanished.
"""

from __future__ import annotations

import typing as t

from .going_back import clean_words, path_problem
from .results import Result, items, launch_problem, mapping, ran

JSON = dict[str, t.Any]
Rows = t.Mapping[str, Result]


def node_name(unit: Result, host: str) -> str:
    """One node for people: 'node 1 (gpu02)'."""
    rank = next((each.get("rank") for each in items(unit, "members") if each.get("host") == host), None)
    return f"node {'?' if rank is None else rank} ({host})"


def behind(unit: Result, rows: Rows, at: str) -> list[str]:
    """The nodes that did not come to this point, for people. In lockstep all of them are asked at the same moment."""
    return [node_name(unit, host) for host in items(unit, "hosts") if mapping(rows, host).get("at") != at]


def next_steps(unit: Result, rows: Rows) -> dict[str, JSON]:
    """What follows for each host after the path failed on one of them: decided once, for all.

    A unit goes back only as a whole. Where one node can't be seen or is another run's by now, what this run started on
    the others is stopped, since it is worth nothing alone; but where nobody is known to have failed the server may be
    serving, and all is left as it is.
    """
    hosts = [str(host) for host in items(unit, "hosts")]
    alone = {host: mapping(mapping(rows, host), "next") for host in hosts}
    if not any(ran(_first(rows, host, "launch")) for host in hosts):
        return {host: dict(alone[host]) or {"step": "nothing", "why": ""} for host in hosts}
    lost = [host for host in hosts if alone[host].get("lost")]
    gone = [host for host in hosts if not alone[host] or _not_seen(alone[host])]
    choice = str(mapping(rows, hosts[0]).get("choice") or "stop")
    if lost:
        choice, why_not = "stop", f"the lease on {_names(unit, lost)} is no longer ours, so nobody goes back"
    elif gone and any(_failed(rows, host) for host in hosts if host not in gone):
        choice, why_not = "stop", f"what became of {_names(unit, gone)} is not known, so nobody goes back"
    elif gone:
        why_not = f"what became of {_names(unit, gone)} is not known, and no node is known to have failed"
        choice = "leave"
    else:
        why_not = ""
    joint: JSON = {"step": choice, "why": why_not}
    left: JSON = {"step": "leave", "why": "there is no word of what became of it"}
    return {host: dict(alone[host]) or left if host in (*lost, *gone) else dict(joint) for host in hosts}


def _not_seen(follow: Result) -> bool:
    """Whether it is to be left since its connection was lost (and not since somebody chose to leave it)."""
    return follow.get("step") == "leave" and bool(follow.get("why"))


def _first(rows: Rows, host: str, key: str) -> t.Any:
    return mapping(mapping(rows, host), "first").get(key)


def _failed(rows: Rows, host: str) -> bool:
    """Whether this host itself knows of a failure: its start or its proof, not that of another node."""
    launch, verify = _first(rows, host, "launch"), _first(rows, host, "verify")
    if ran(launch) and launch_problem(launch):
        return True
    return ran(verify) and verify.get("ready") is not True and not verify.get("peer_failed")


def _names(unit: Result, hosts: t.Iterable[str]) -> str:
    return ", ".join(node_name(unit, host) for host in hosts)


# --- launches that belong together ------------------------------------------------------------------------------------

# One run starts a unit at most twice: with what is wanted, and from a kept launch.
Start = tuple[str, bool]


def starts_of(launches: t.Any) -> dict[Start, Result]:
    """The proved launches of one host by the start that they are a part of, the newest of each."""
    found: dict[Start, Result] = {}
    for each in launches if isinstance(launches, (list, tuple)) else ():
        if not isinstance(each, t.Mapping) or not each.get("run_id") or each.get("problem"):
            continue
        if each.get("verdict") == "ready" and each.get("launch_id"):
            found.setdefault((str(each["run_id"]), bool(each.get("from_launch"))), each)
    return found


def choose_start(unit: Result, launches: t.Mapping[str, t.Any], wanted: str = "", not_run: str = "") -> JSON:
    """The launches to go back to, one per host, that were proved together: {"launches": {host: id}, "problem": ''}.

    ``launches``: the kept launches of each host, the newest first. ``wanted``: an id of one of them, last_good, or '',
    auto and previous for the last proved start that is not the current one. ``not_run``: a run whose starts don't
    count, since one of them has just failed.
    """
    hosts = [str(host) for host in items(unit, "hosts")]
    found = {host: starts_of(launches.get(host)) for host in hosts}
    whole = [start for start in found[hosts[0]] if all(start in found[host] for host in hosts)] if hosts else []
    whole = [start for start in whole if not not_run or start[0] != not_run]
    if wanted not in ("", "auto", "previous", "last_good"):
        of_id = [start for start in whole if any(found[host][start]["launch_id"] == wanted for host in hosts)]
        if not of_id:
            return _no_start(unit, launches, f"launch '{wanted}' was not proved on all of its hosts, or is not kept")
        return _start(found, of_id[0])
    # Current is what all of them have: a start that failed on one of them before it was noted there is none.
    others = [start for start in whole if not all(found[host][start].get("current") for host in hosts)]
    usable = whole if wanted == "last_good" else others
    if not usable:
        other = "" if wanted == "last_good" else "other "
        return _no_start(unit, launches, f"no {other}launch of it was proved on all of its hosts in one run")
    return _start(found, usable[0])


def _start(found: t.Mapping[str, t.Mapping[Start, Result]], start: Start) -> JSON:
    return {"launches": {host: str(each[start]["launch_id"]) for host, each in found.items()}, "problem": ""}


def _no_start(unit: Result, launches: t.Mapping[str, t.Any], problem: str) -> JSON:
    kept = []
    for host in items(unit, "hosts"):
        rows = [each for each in items(launches, str(host)) if isinstance(each, t.Mapping)]
        words = [f"{each.get('launch_id')} ({each.get('verdict') or 'never judged'})" for each in rows[:5]]
        kept.append(f"{host}: {', '.join(words) or 'none'}")
    return {"launches": {}, "problem": f"{problem}; kept are {'; '.join(kept)}"}


def after_trials(unit: Result, trials: t.Mapping[str, t.Any]) -> JSON:
    """Whether all go back, after the kept launch of each host was tried: {"step": rollback | stop, "why"}.

    ``trials``: rollback_result of each host. One that can't be started again keeps all from it.
    """
    hosts = [str(host) for host in items(unit, "hosts")]
    found = {host: mapping(trials, host) for host in hosts}
    for host, trial in found.items():
        problem = str(trial.get("problem") or "") if trial.get("next") else "its kept launch was not tried"
        if mapping(trial, "next").get("lost"):
            lost = f"the lease on {node_name(unit, host)} is no longer ours, so nobody goes back"
            return {"step": "stop", "why": lost}
        if problem:
            return {"step": "stop", "why": f"there is nothing to go back to: {node_name(unit, host)}: {problem}"}
    # Of one node alone the configuration may be the same: what failed then is what is new on another one.
    if all(mapping(trial, "next").get("step") != "rollback" for trial in found.values()):
        return {"step": "stop", "why": str(mapping(found[hosts[0]], "next").get("why") or "")}
    return {"step": "rollback", "why": ""}


# --- the story of all nodes -------------------------------------------------------------------------------------------


def _cause(unit: Result, rows: Rows, path: str) -> tuple[str, Result]:
    """The node whose own failure ended this path (first, second) for all, by its rank, and its results."""
    hosts = [str(host) for host in items(unit, "hosts")]
    told = [(host, mapping(mapping(rows, host), path), mapping(rows, host)) for host in hosts]
    own = [
        (host, results)
        for host, results, row in told
        if results and not row.get(f"held_{path}") and not mapping(results, "verify").get("peer_failed")
    ]
    silent = [(host, results) for host, results, row in told if not row]
    found = own or silent or [(host, results) for host, results, _row in told]
    return found[0]


def _message(rows: Rows, host: str) -> str:
    return str(mapping(rows, host).get("message") or "there is no word of what became of it")


def unit_outcome(unit: Result, rows: Rows) -> str:
    """The whole story of a failed run of a unit, in one sentence for the error of each of its hosts."""
    hosts = [str(host) for host in items(unit, "hosts")]
    who = f"{unit.get('server')} on {', '.join(hosts)}"
    host, first = _cause(unit, rows, "first")
    told = {each: mapping(rows, each) for each in hosts}
    steps = {each: str(mapping(row, "next").get("step") or "nothing") for each, row in told.items()}
    whys = list(dict.fromkeys(str(mapping(row, "next").get("why") or "") for row in told.values()))
    because = "".join(f"; {why}" for why in whys if why)
    if set(steps.values()) == {"nothing"}:
        return f"{who}: {node_name(unit, host)}: {' '.join(_message(rows, host).split())}{because}"
    source = str(mapping(told, hosts[0]).get("from_launch") or "")
    what = f"launch {source}" if source else "the new configuration"
    head = f"{who}: {what} failed ({node_name(unit, host)}: {path_problem(first, _message(rows, host))}){because}"
    if "rollback" in steps.values():
        return f"{head}; {_back_words(unit, told)}"
    ends = [f"{_end_words(steps[each], told[each])}" for each in hosts]
    if len(set(ends)) == 1:
        return f"{head}; all nodes: {ends[0]}"
    return f"{head}; " + "; ".join(f"{node_name(unit, each)}: {end}" for each, end in zip(hosts, ends))


def _end_words(step: str, row: Result) -> str:
    if step == "stop":
        return f"stopped, {clean_words(mapping(row, 'stopped'))}"
    return "it was left as it is" if step == "leave" else "nothing more was done"


def _back_words(unit: Result, told: Rows) -> str:
    """How going back ended."""
    targets = [str(mapping(row, "trial").get("launch_id") or "unknown") for row in told.values()]
    target = ", ".join(dict.fromkeys(targets))
    if all(_serves_again(row) for row in told.values()):
        return f"rolled back to {target}: serving"
    host, second = _cause(unit, told, "second")
    again = f"{node_name(unit, host)}: {path_problem(second, second.get('message'))}"
    ends = []
    for row in told.values():
        results = mapping(row, "second")
        step = str(mapping(results, "next").get("step") or "nothing")
        why = str(mapping(results, "next").get("why") or "")
        if not why and step == "nothing":
            why = f"nothing was started, {clean_words(results)}" if not ran(results.get("launch")) else "it was left"
        ends.append(why or _end_words(step, row))
    same = f"all nodes: {ends[0]}"
    apart = "; ".join(f"{node_name(unit, each)}: {end}" for each, end in zip(told, ends))
    return f"the rollback to {target} failed too ({again}): {same if len(set(ends)) == 1 else apart}"


def _serves_again(row: Result) -> bool:
    second = mapping(row, "second")
    return bool(second) and not second.get("message") and mapping(second, "verify").get("ready") is True
