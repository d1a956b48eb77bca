# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rollout: what is left to do, in which batches, and whether a batch went well. Pure functions.

A batch is a set of servers, never of hosts: how many may be away at once is what counts, and a host may have several.
A server over several hosts (nnodes) is one server: its members are in the same batch, at the same slot of it, so that
their hosts come to it at the same moment. A server counts as proved only where its own result says so, of each member;
one without a word of it (its host failed, can't be reached or vanished) is not.
"""

from __future__ import annotations

import math
import re
import typing as t
from dataclasses import dataclass, replace

from .going_back import launches_of
from .inventory import flag_name, listed
from .results import Result, items, mapping, ran, rows

JSON = dict[str, t.Any]
RAMP = (1, "10%", "25%")
PER_NODE = 1
MIN_THROUGHPUT = 0.8
MAX_LATENCY = 1.5
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%")
# What server_ready's soak is where a server's entry says nothing, as in its documentation.
_SOAK = {"requests": 8, "concurrency": 4, "tokens": 32}


@dataclass(frozen=True)
class Unit:
    """One server. ``node``: the Proxmox node of its host, empty where none is named. ``done``: it is as wanted.
    ``routed``: routers send to it. ``others``: of a server over several hosts its members beside this one, which is
    that of node rank 0, in the order of their ranks; ``label``: how people call it as a whole, else empty."""

    host: str
    server: str
    node: str = ""
    done: bool = False
    routed: bool = False
    others: tuple[Unit, ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        return f"{self.host}/{self.server}"

    @property
    def members(self) -> tuple[Unit, ...]:
        return (self, *self.others)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(member.host for member in self.members)

    @property
    def all_done(self) -> bool:
        """A server over several hosts is as wanted only as a whole."""
        return all(member.done for member in self.members)


# --- what was asked for -----------------------------------------------------------------------------------------------


def ramp_of(value: t.Any) -> list[t.Any]:
    """A ramp as a list: `[1, '10%']`, `'1,10%'` and `1` are understood."""
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value] if isinstance(value, (int, float)) else list(listed(value))


def _whole(text: str, least: int) -> bool:
    """Whether a text is a number of servers: one that can be counted to."""
    return text.isdecimal() and len(text) <= 9 and int(text) >= least


def step_problem(step: t.Any) -> str:
    """Why this is no step of a ramp; empty where it is one."""
    wanted = "a step is a number of servers from 1, or a part of them from 1% to 100%"
    if isinstance(step, bool) or not isinstance(step, (int, str)):
        return f"rollout_ramp has {step!r}, but {wanted}"
    text = str(step).strip()
    part = _PERCENT.fullmatch(text)
    good = 0 < float(part.group(1)) <= 100 if part else _whole(text, 1)
    return "" if good else f"rollout_ramp has '{step}', but {wanted}"


def _number_problem(name: str, value: t.Any, least: float, words: str) -> str:
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    return "" if least <= number < math.inf else f"{name} is '{value}', but must be {words}"


def option_problems(options: t.Mapping[str, t.Any]) -> list[str]:
    """What is wrong with the variables of a rollout, each as one sentence. Absent ones have their defaults."""
    ramp = ramp_of(options.get("ramp", RAMP))
    problems = [step_problem(step) for step in ramp]
    problems += [] if ramp else ["rollout_ramp is empty; without a step nothing begins"]
    per_node = str(options.get("per_node", PER_NODE)).strip()
    if not _whole(per_node, 1):
        problems.append(f"rollout_per_node is '{per_node}', but must be a number of guests from 1")
    least = str(options.get("leave_healthy", 1)).strip()
    if not _whole(least, 0):
        problems.append(f"router_leave_healthy is '{least}', but must be a number of workers from 0")
    problems.append(
        _number_problem(
            "rollout_min_throughput",
            options.get("min_throughput", MIN_THROUGHPUT),
            0,
            "a part of the rate before, for example 0.8; 0 judges none",
        )
    )
    problems.append(
        _number_problem(
            "rollout_max_latency",
            options.get("max_latency", MAX_LATENCY),
            0,
            "a multiple of the latency before, for example 1.5; 0 judges none",
        )
    )
    return [problem for problem in problems if problem]


# --- what is left to do -----------------------------------------------------------------------------------------------


def seen(settings: Result, results: Result, options: t.Mapping[str, t.Any]) -> JSON:
    """What was found of one server before anything is touched.

    ``settings``: its complete entry. ``results``: current, the result of server_info with what is wanted; trial, that
    of server_launch in check mode; verify, the proof that it serves, empty where it was not asked; routers, what they
    have, empty where there are none.
    ``done``: it runs as wanted, its launch was proved in full, and it serves now. What can't be known is a reason to
    change it.
    """
    name = str(settings["name"])
    current, trial, verify = mapping(results, "current"), mapping(results, "trial"), mapping(results, "verify")
    launches = [each for each in launches_of(current, name) if isinstance(each, t.Mapping)]
    now = next((each for each in launches if each.get("current")), {})
    running: Result = next((each for each in rows(current, "servers") if each.get("name") == name), {})
    same = running.get("matches") is True
    same = same and _told(trial, "config_changed") is False and _told(trial, "secrets_changed") is False
    proved = now.get("verdict") == "ready" and ran(verify) and verify.get("ready") is True
    every = options.get("when") == "always"
    return {
        "done": bool(same and proved and not every),
        "why": _why(same, now, verify, str(options.get("when"))),
        "old": {"launch_id": now.get("launch_id"), "config_hash": now.get("config_hash")},
        "config_hash": _told(trial, "config_hash"),
        "differences": _differences(running, trial),
        "nodes": nodes_of(settings),
        "routed": bool(mapping(results, "routers")),
        "limits": soak_limits(launches, settings, options),
    }


def _told(result: t.Any, key: str) -> t.Any:
    return result.get(key) if isinstance(result, t.Mapping) else None


def _why(same: bool, now: Result, verify: t.Any, when: str) -> str:
    """Why it is to be changed, or that it is as wanted, in a few words."""
    if not now:
        return "no launch of it is known"
    if not same:
        return "its configuration differs, or is not known"
    if now.get("verdict") != "ready":
        return f"its launch {now.get('launch_id')} was never proved"
    if not ran(verify) or verify.get("ready") is not True:
        # leave_alone.yml takes the proof away from a server that has drifted.
        return "it has drifted, or does not serve" if when == "drifted" else "it does not serve"
    return "relaunch_when is always" if when == "always" else "it serves as wanted"


def _differences(running: Result, trial: t.Any) -> list[JSON]:
    """What changes, item by item; secrets are compared on the host and never told."""
    rows = [
        {"item": str(each.get("item")), "old": each.get("found"), "new": each.get("wanted")}
        for each in items(running, "differences")
        if isinstance(each, t.Mapping)
    ]
    if _told(trial, "secrets_changed") is True:
        rows.append({"item": "keys or secret environment", "old": "********", "new": "******** (others)"})
    return rows


def nodes_of(settings: Result) -> int:
    """Over how many hosts a server is spread."""
    for key, value in mapping(settings, "flags").items():
        if flag_name(str(key)) == "nnodes" and _whole(str(value).strip(), 0):
            return int(str(value))
    return 1


def soak_limits(launches: t.Sequence[Result], settings: Result, options: t.Mapping[str, t.Any]) -> JSON:
    """How slow the soak of the new launch may be: by the last proved launch, where its soak was the same load.

    {"min_tokens_per_s", "max_latency_s": None where it is not judged, "baseline": that launch's figures or None,
    "note": why there is none}.
    """
    none: JSON = {"min_tokens_per_s": None, "max_latency_s": None, "baseline": None}
    least = float(options.get("min_throughput", MIN_THROUGHPUT))
    most = float(options.get("max_latency", MAX_LATENCY))
    if least <= 0 and most <= 0:
        return {**none, "note": "no limit was asked for"}
    wanted = {**_SOAK, **{key: value for key, value in mapping(settings, "soak").items() if key in _SOAK}}
    if not wanted["requests"]:
        return {**none, "note": "its soak has no requests"}
    good = next((each for each in launches if each.get("last_good") and not each.get("problem")), None)
    if good is None:
        return {**none, "note": "no launch of it was proved before"}
    soak = mapping(good, "soak")
    if not soak:
        return {**none, "note": f"launch {good.get('launch_id')} was proved without a soak"}
    load = (wanted["requests"], min(wanted["concurrency"], wanted["requests"]), wanted["requests"] * wanted["tokens"])
    if tuple(soak.get(key) for key in ("requests", "concurrency", "tokens")) != tuple(float(each) for each in load):
        return {**none, "note": f"the soak of launch {good.get('launch_id')} was another load"}
    rate, middle = soak.get("tokens_per_s"), soak.get("latency_p50_s")
    return {
        "min_tokens_per_s": round(rate * least, 1) if rate and least > 0 else None,
        "max_latency_s": round(middle * most, 3) if middle and most > 0 else None,
        "baseline": {"launch_id": good.get("launch_id"), "tokens_per_s": rate, "latency_p50_s": middle},
        "note": "",
    }


# --- batches ----------------------------------------------------------------------------------------------------------


def size_of(step: t.Any, total: int) -> int:
    """How many servers a step of the ramp takes, at least one."""
    part = _PERCENT.fullmatch(str(step).strip())
    return max(1, int(total * float(part.group(1)) / 100)) if part else int(step)


def batches_of(units: t.Sequence[Unit], ramp: t.Sequence[t.Any], total: int, per_node: int) -> list[list[Unit]]:
    """The units in batches: as many as the step of the ramp says, the last step again and again.

    A guest whose node has ``per_node`` guests in the batch waits for a later one; nobody overtakes it but those that
    it has to wait for. A server over more guests of a node than that comes alone there: it can't be taken apart.
    """
    left = list(units)
    found: list[list[Unit]] = []
    while left:
        size = size_of(ramp[min(len(found), len(ramp) - 1)], total)
        batch: list[Unit] = []
        for unit in left:
            if len(batch) < size and _fits(unit, batch, per_node):
                batch.append(unit)
        found.append(batch)
        left = [unit for unit in left if unit not in batch]
    return found


def _fits(unit: Unit, batch: t.Sequence[Unit], per_node: int) -> bool:
    for node in {member.node for member in unit.members if member.node}:
        own = {member.host for member in unit.members if member.node == node}
        guests = own | {member.host for each in batch for member in each.members if member.node == node}
        if len(guests) > max(per_node, len(own)):
            return False
    return True


def named(units: t.Sequence[Unit], name: str) -> list[Unit]:
    """The units that HOST/SERVER (of any member), or a server's name alone, stands for."""
    return [unit for unit in units if any(name in (member.name, member.server) for member in unit.members)]


def slots_of(units: t.Sequence[Unit]) -> list[int]:
    """Of each unit its slot: hosts go through theirs side by side, each with one server at a time, and all members of a
    unit come at the same one."""
    taken: dict[str, set[int]] = {}
    found = []
    for unit in units:
        busy = set().union(*(taken.get(host, set()) for host in unit.hosts))
        slot = next(number for number in range(len(busy) + 1) if number not in busy)
        for host in unit.hosts:
            taken.setdefault(host, set()).add(slot)
        found.append(slot)
    return found


def plan(units: t.Sequence[Unit], options: t.Mapping[str, t.Any]) -> JSON:
    """The whole rollout: {"problems", "batches", "slots", "most", "done", "left_out", "total", "routed", "ramp",
    "canary"}.

    ``batches``: lists of {"host", "server", "node", "unit", "slot"}, one per member of a server. ``unit``: the name of
    a server over several hosts, else empty. ``slots``: per batch how many slots it has. ``most``: the most servers of
    one host. ``total``: servers that were chosen. ``options``: as for option_problems, and canary, except.
    """
    problems = option_problems(options)
    left_out: list[Unit] = []
    for name in listed(options.get("except", [])):
        meant = named(units, name)
        problems += [] if meant else [f"rollout_except names {name}, which is none of the chosen servers"]
        left_out += [unit for unit in meant if unit not in left_out]
    pending = [unit for unit in units if not unit.all_done and unit not in left_out]
    canary = str(options.get("canary") or "").strip()
    first = named(units, canary) if canary else []
    problems += _canary_problems(canary, first, left_out)
    ramp = ramp_of(options.get("ramp", RAMP))
    batches: list[list[Unit]] = []
    if not problems:
        order = sorted(pending, key=lambda unit: unit not in first)
        per_node = int(options.get("per_node", PER_NODE))
        batches = batches_of(order, ramp, len(units) - len(left_out), per_node)
    return {
        "problems": problems,
        "batches": [_rows(batch) for batch in batches],
        "slots": [max(slots_of(batch)) + 1 for batch in batches],
        "most": _most_of_one_host(units),
        "done": _rows([unit for unit in units if unit.all_done and unit not in left_out]),
        "left_out": _rows(left_out),
        "total": len(units),
        "routed": any(member.routed for unit in units for member in unit.members),
        "ramp": ramp,
        "canary": batches[0][0].name if batches else "",
    }


def _canary_problems(canary: str, found: t.Sequence[Unit], left_out: t.Sequence[Unit]) -> list[str]:
    if not canary:
        return []
    if not found:
        return [f"rollout_canary is {canary}, which is none of the chosen servers"]
    if len(found) > 1:
        names = ", ".join(unit.name for unit in found)
        return [f"rollout_canary is {canary}, which stands for several servers: {names}; name one as HOST/SERVER"]
    return [f"rollout_canary {canary} is left out by rollout_except"] if found[0] in left_out else []


def _rows(units: t.Sequence[Unit]) -> list[JSON]:
    """One row per member."""
    return [
        {"host": member.host, "server": member.server, "node": member.node, "unit": unit.label, "slot": slot}
        for unit, slot in zip(units, slots_of(units))
        for member in unit.members
    ]


def _most_of_one_host(units: t.Sequence[Unit]) -> int:
    hosts = [host for unit in units for host in unit.hosts]
    return max((hosts.count(host) for host in hosts), default=0)


def units_of(hosts: t.Sequence[str], variables: t.Mapping[str, t.Any]) -> tuple[list[Unit], list[str]]:
    """The chosen servers in the order of the inventory, and what stands against changing them here.

    ``variables``: per host preflight_chosen, preflight_units, rollout_seen and sglang_proxmox_host.
    """
    units: list[Unit] = []
    problems: list[str] = []
    seen_: set[tuple[str, str]] = set()
    for host in hosts:
        for server in variables[host].get("preflight_chosen") or []:
            if (host, server) in seen_:
                continue
            spread = mapping(mapping(variables[host], "preflight_units"), str(server))
            places = [(str(each["host"]), str(each["server"])) for each in items(spread, "members")] or [(host, server)]
            seen_.update(places)
            found = [(place, _member(*place, variables.get(place[0]) or {})) for place in places]
            members = [member for _place, member in found if member is not None]
            problems += [
                f"{place[0]}: server '{place[1]}': nothing is known of it" for place, member in found if member is None
            ]
            if len(members) == len(found):
                label = str(spread.get("name") or "") if len(members) > 1 else ""
                units.append(replace(members[0], others=tuple(members[1:]), label=label))
    return units, problems


def _member(host: str, server: str, values: Result) -> t.Optional[Unit]:
    """What was found of one server of one host; None: nothing."""
    row = mapping(values, "rollout_seen").get(server)
    if not isinstance(row, t.Mapping):
        return None
    node = str(values.get("sglang_proxmox_host") or "")
    return Unit(host, str(server), node, row["done"] is True, row["routed"] is True)


def mine(batch: t.Sequence[Result], host: str) -> list[str]:
    """What a host has to do at each slot of a batch: a server's name, or nothing."""
    slots = max((int(row["slot"]) for row in batch), default=-1) + 1
    own = {int(row["slot"]): str(row["server"]) for row in batch if row["host"] == host}
    return [own.get(slot, "") for slot in range(slots)]


def answers_requests(units: t.Any, host: str, server: str) -> bool:
    """Whether requests are sent to this member: of a server over several hosts only to that of node rank 0.

    ``units``: preflight_units of the host.
    """
    members = items(mapping(units if isinstance(units, t.Mapping) else {}, server), "members")
    return all(each.get("rank") == 0 for each in members if each.get("host") == host)


def spread_problems(plan_: Result, variables: t.Mapping[str, t.Any]) -> list[str]:
    """Servers over several hosts whose other hosts are not known: changed alone, they would never serve."""
    rows = [row for batch in items(plan_, "batches") for row in batch if not row.get("unit")]
    alone = [row for row in rows if variables[row["host"]]["rollout_seen"][row["server"]]["nodes"] > 1]
    return [
        f"{row['host']}: server '{row['server']}' is spread over several hosts (nnodes), and its other hosts are not "
        f"known; leave it out: -e rollout_except={row['host']}/{row['server']}"
        for row in alone
    ]


# --- the stop rule ----------------------------------------------------------------------------------------------------


def judge_batch(batch: t.Sequence[Result], results: t.Mapping[str, t.Any]) -> list[str]:
    """Why a batch did not go well, one sentence per server; empty: every planned server is proved.

    ``results``: per host its rollout_results. A host without any is one that failed or vanished.
    """
    problems = []
    for row in batch:
        host, server = str(row["host"]), str(row["server"])
        told = results.get(host)
        result = told.get(server) if isinstance(told, t.Mapping) else None
        if isinstance(result, t.Mapping) and result.get("proved") is True:
            continue
        error = result.get("error") if isinstance(result, t.Mapping) else None
        problems.append(f"{host}/{server}: {error or 'there is no word of what became of it'}")
    return problems


def too_few_left(batch: t.Sequence[Result], answers: t.Mapping[str, t.Any], least: int) -> list[str]:
    """Why a batch may not be taken out of the routers as a whole; empty where enough others are left in each.

    ``answers``: per host what the routers of its servers said (router_result by the server's name). A worker's id is
    the same in every answer of a router. Those for another model don't count; a model that a router does not tell is
    taken for the same.
    """
    leaving: dict[str, set[str]] = {}
    listed_: dict[str, list[Result]] = {}
    for row in batch:
        answer = mapping(mapping(answers, str(row["host"])), str(row["server"]))
        for router in rows(answer, "routers"):
            url = str(router.get("url"))
            listed_.setdefault(url, [each for each in rows(router, "listed") if each.get("healthy") is True])
            for worker in rows(router, "workers"):
                entries = rows(mapping(worker, "after"), "entries")
                leaving.setdefault(url, set()).update(str(each.get("id")) for each in entries)
    problems = []
    for url, workers in listed_.items():
        gone = [each for each in workers if str(each.get("id")) in leaving.get(url, set())]
        for model in sorted({str(each.get("model_id") or "") for each in gone}):
            left = [
                each
                for each in workers
                if each not in gone and (not model or str(each.get("model_id") or model) == model)
            ]
            if len(left) < least:
                told = f" for model {model}" if model else ""
                problems.append(
                    f"router {url} would have {len(left)} healthy workers{told} without the {len(gone)} of this batch, "
                    f"at least {least} are demanded (router_leave_healthy); take a smaller rollout_ramp, or mend the "
                    "others"
                )
    return problems
