# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What became of a rollout: a document for programs, a table for a terminal, a page for a browser. Pure functions.

Every server that was chosen is in it, also one whose host gave no answer: then it is said that nothing is known.
"""

from __future__ import annotations

import html
import typing as t

from .going_back import path_problem
from .inventory import merge, redact, server_options
from .results import Result, items, mapping, ran, rows
from .tables import Column, cell, exact, paragraph, table

JSON = dict[str, t.Any]
# States of a server at the end, in the order in which a person wants to see them.
AS_WANTED, CHANGED, LEFT_OUT, NOT_BEGUN = "as wanted", "changed", "left out", "not begun"
ROLLED_BACK, BACK_FAILED, STOPPED, LEFT = "rolled back", "rollback failed", "stopped", "left as it is"
UNTOUCHED, FAILED, UNKNOWN = "not touched", "failed", "unknown"
FINE = (AS_WANTED, CHANGED, LEFT_OUT)
# From the best to the worst: of a server over several hosts its worst member says what it is.
_RANKING = (
    *(LEFT_OUT, NOT_BEGUN, AS_WANTED, CHANGED, ROLLED_BACK, UNTOUCHED),
    *(STOPPED, LEFT, BACK_FAILED, FAILED, UNKNOWN),
)
# What only the whole of such a server can be.
_OF_THE_WHOLE = (AS_WANTED, CHANGED, ROLLED_BACK)


# --- one server -------------------------------------------------------------------------------------------------------


def unit_result(results: Result) -> JSON:
    """What became of one server, from what its relaunch registered.

    ``results``: as for relaunch_lines, with gone_at and back_at (seconds since the epoch, 0: never), error (why the run
    failed for it), router_problem, router_out and router_back.
    """
    first, second = mapping(results, "first"), mapping(results, "second")
    wanted = first or results
    verify = mapping(wanted, "verify")
    router_problem = str(results.get("router_problem") or "")
    serves = ran(verify) and verify.get("ready") is True
    error = str(results.get("error") or "")
    if serves and router_problem:
        error = "; ".join(filter(None, (error, f"it serves, but {router_problem}")))
    soak = mapping(verify, "soak")
    return {
        "proved": serves and not error,
        "state": _state(results, wanted, second, serves),
        "serving": _serving(results, wanted, second),
        "error": error,
        "why": "" if serves else _reason(first, error),
        "launch_id": mapping(wanted, "launch").get("launch_id"),
        "config_hash": mapping(wanted, "launch").get("config_hash"),
        "rolled_back_to": mapping(results, "trial").get("launch_id") if second else None,
        "down_s": _down(results),
        "drain": _drain(mapping(wanted, "teardown")),
        "router": {"out": _plain(results.get("router_out")), "back": _plain(results.get("router_back"))},
        "proof": {
            "verdict": verify.get("verdict"),
            "seconds": verify.get("seconds"),
            "tokens": [each.get("count") for each in rows(verify, "tokens")],
            "tokens_per_s": soak.get("tokens_per_s"),
            "latency_s": mapping(soak, "latency_s").get("p50"),
        },
    }


def _reason(first: Result, error: str) -> str:
    """Why it was not changed, without what followed."""
    return path_problem(first, error) if first else error


def _state(results: Result, wanted: Result, second: Result, serves: bool) -> str:
    if results.get("left_alone"):
        return AS_WANTED
    step = mapping(results, "next").get("step")
    if second:
        return ROLLED_BACK if _came_back(second) else BACK_FAILED
    if serves and step in (None, "nothing"):
        return CHANGED
    if step in ("stop", "leave"):
        return STOPPED if step == "stop" else LEFT
    touched = any(ran(wanted.get(key)) for key in ("teardown", "teardown_host", "launch"))
    return FAILED if touched else UNTOUCHED


def _came_back(second: Result) -> bool:
    """Whether going back went well; of a server over several hosts one of them may be proved while the whole is not."""
    return mapping(second, "verify").get("ready") is True and not second.get("message")


def _serving(results: Result, wanted: Result, second: Result) -> t.Optional[bool]:
    """Whether it serves now, whatever its configuration; None: that is not known."""
    last = mapping(second or wanted, "verify")
    if ran(last) and last.get("ready") is True and (not second or _came_back(second)):
        return True
    if mapping(results, "stopped") or (second and mapping(second, "next").get("step") == "stop"):
        return False
    return False if ran(last) and last.get("verdict") == "failed" else None


def _down(results: Result) -> t.Optional[float]:
    """Seconds without it: from the eviction until it was proved again; None where it was not evicted, or is not back.
    """
    gone, back = (_number(results.get(key)) for key in ("gone_at", "back_at"))
    return round(back - gone, 1) if gone and back and back >= gone else None


def _number(value: t.Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def _drain(teardown: Result) -> JSON:
    found = mapping(teardown, "drain")
    return {key: found.get(key) for key in ("in_flight_before", "in_flight_after", "cut_off")}


def _plain(result: t.Any) -> JSON:
    """The answer of the routers in what people ask for: not all the workers that each of them lists."""
    if not ran(result):
        return {}
    seats = [
        {"router": router.get("name"), "url": worker.get("url"), **_seat(worker)}
        for router in items(result, "routers")
        for worker in items(router, "workers")
    ]
    told = {key: result[key] for key in ("verdict", "drained", "problem", "seconds") if key in result}
    return {**told, "workers": seats}


def _seat(worker: Result) -> JSON:
    return {key: mapping(worker, key).get("state") for key in ("before", "after")}


# --- the whole --------------------------------------------------------------------------------------------------------


def document(plan: Result, variables: t.Mapping[str, t.Any], run: Result, times: Result, stopped: t.Any = ()) -> JSON:
    """The report: verdict, batches and one row per server.

    ``plan``: of rollout.plan. ``variables``: per host rollout_seen, rollout_results, rollout_restored and rollout_broke
    (what failed there beside the servers). ``run``: who ran it. ``times``: started_at and ended_at, ISO 8601.
    ``stopped``: why a batch was not begun.
    """
    rows = [_unit_row(row, variables, AS_WANTED, None) for row in items(plan, "done")]
    rows += [_unit_row(row, variables, LEFT_OUT, None) for row in items(plan, "left_out")]
    begun = _begun(plan, variables)
    for number, batch in enumerate(items(plan, "batches"), 1):
        state = UNKNOWN if number <= begun else NOT_BEGUN
        rows += [_unit_row(row, variables, state, number) for row in batch]
    rows = _as_wholes(rows)
    open_ = [row for row in rows if row["state"] not in FINE or row["error"]]
    reasons = [str(each) for each in stopped or []]
    broken = _broken(variables)
    return {
        "version": 1,
        "verdict": "stopped" if open_ or reasons or broken else "done",
        "stopped": reasons,
        "broken": broken,
        "run_id": run.get("run_id"),
        "operator": run.get("operator"),
        "controller": run.get("controller"),
        "started_at": times.get("started_at"),
        "ended_at": times.get("ended_at"),
        "ramp": [str(step) for step in items(plan, "ramp")],
        "canary": plan.get("canary"),
        "batches": [[f"{row['host']}/{row['server']}" for row in batch] for batch in items(plan, "batches")],
        "begun": begun,
        "servers": rows,
    }


def _broken(variables: t.Mapping[str, t.Any]) -> list[str]:
    """What failed beside the servers, each as one sentence; a task for all of them fails for each host, and is told
    once."""
    found: dict[str, list[str]] = {}
    for host, values in variables.items():
        if values.get("rollout_broke"):
            found.setdefault(str(values["rollout_broke"]), []).append(host)
    return [f"it broke off on {_few(hosts)}: {why}" for why, hosts in found.items()]


def _few(hosts: t.Sequence[str], most: int = 5) -> str:
    left = len(hosts) - most
    return ", ".join(hosts) if left <= 0 else f"{', '.join(hosts[:most])} and {left} others"


def _begun(plan: Result, variables: t.Mapping[str, t.Any]) -> int:
    """How many batches were begun: as many as any host says."""
    told = [values.get("rollout_begun") for values in variables.values() if isinstance(values, t.Mapping)]
    return min(max([int(_number(each)) for each in told], default=0), len(items(plan, "batches")))


_LOST = "its host failed or can't be reached"


def _unit_row(row: Result, variables: t.Mapping[str, t.Any], state: str, batch: t.Optional[int]) -> JSON:
    host, server = str(row["host"]), str(row["server"])
    values = variables.get(host) or {}
    found = mapping(mapping(values, "rollout_seen"), server)
    told = mapping(mapping(values, "rollout_results"), server)
    restored = mapping(mapping(values, "rollout_restored"), server)
    broke = values.get("rollout_broke")
    unknown = f"there is no word of what became of it: {broke or _LOST}" if state == UNKNOWN else ""
    limits = mapping(found, "limits")
    return {
        "host": host,
        "server": server,
        "node": row.get("node") or None,
        "unit": row.get("unit") or None,
        "batch": batch,
        "state": told.get("state", state),
        "proved": told.get("proved") is True or state == AS_WANTED,
        "serving": told.get("serving", True if state == AS_WANTED else None),
        "error": str(told.get("error") or ("" if told else unknown)),
        "why": str(told.get("why") or found.get("why") or ""),
        "old": dict(mapping(found, "old")),
        "new": {"launch_id": told.get("launch_id"), "config_hash": told.get("config_hash") or found.get("config_hash")},
        "differences": [dict(each) for each in rows(found, "differences")],
        "rolled_back_to": told.get("rolled_back_to"),
        "down_s": told.get("down_s"),
        "drain": dict(mapping(told, "drain")),
        "router": {**mapping(told, "router"), **({"restored": dict(restored)} if restored else {})},
        "proof": dict(mapping(told, "proof")),
        "baseline": limits.get("baseline"),
        "baseline_note": str(limits.get("note") or ""),
    }


def _as_wholes(rows: t.Sequence[JSON]) -> list[JSON]:
    """The same, where no member of a server over several hosts says of itself what its whole is not."""
    wholes: dict[str, list[JSON]] = {}
    for row in rows:
        if row["unit"]:
            wholes.setdefault(row["unit"], []).append(row)
    return [_as_whole(row, wholes[row["unit"]]) if row["unit"] else row for row in rows]


def _as_whole(row: JSON, members: t.Sequence[JSON]) -> JSON:
    proved = all(member["proved"] for member in members)
    worst = max(members, key=lambda member: _RANKING.index(member["state"]))
    if row["state"] == worst["state"] or row["state"] not in _OF_THE_WHOLE or worst["state"] in (AS_WANTED, CHANGED):
        return {**row, "proved": proved}
    # Nothing was done to the worst one, but to this one: then the whole has failed.
    state = FAILED if worst["state"] == UNTOUCHED else worst["state"]
    why = f"{worst['host']}/{worst['server']} is {worst['state']}: {worst['error'] or 'it is not proved'}"
    return {
        **row,
        "state": state,
        "proved": proved,
        "serving": None if worst["serving"] is None else bool(row["serving"] and worst["serving"]),
        "error": "; ".join(filter(None, (row["error"], f"of {row['unit']} {why}"))),
    }


def servers_in(rows: t.Sequence[Result]) -> int:
    """How many servers these rows are: one over several hosts is one."""
    return len({row.get("unit") or f"{row['host']}/{row['server']}" for row in rows})


def secrets_of(values: Result) -> list[str]:
    """The secrets of a host's servers. What is as short as a word of the report is none."""
    defaults = mapping(values, "sglang_server_defaults")
    hidden = [key for key, option in server_options().items() if option.get("no_log")]
    found: list[t.Any] = []
    for server in items(values, "sglang_servers"):
        merged = merge(defaults, server) if isinstance(server, t.Mapping) else {}
        for each in (merged.get(key) for key in hidden):
            found += each.values() if isinstance(each, t.Mapping) else [each]
    return [str(each) for each in found if each is not None and len(str(each)) > 3]


def without_secrets(value: t.Any, secrets: t.Sequence[str]) -> t.Any:
    """The same without these texts, wherever they stand. The modules have masked what they told; this is the net."""
    if isinstance(value, t.Mapping):
        return {redact(str(key), secrets): without_secrets(each, secrets) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(each, secrets) for each in value]
    return redact(value, secrets) if isinstance(value, str) else value


def why_stopped(report: Result) -> str:
    """Why a rollout is not done, in one sentence that names each server; empty where it is."""
    if report.get("verdict") == "done":
        return ""
    rows = items(report, "servers")
    bad = [row for row in rows if row["state"] not in (*FINE, NOT_BEGUN) or row["error"]]
    # What is the same of all members of a server is told once.
    same: dict[tuple[str, str, str], list[str]] = {}
    for row in bad:
        key = (str(row.get("unit") or id(row)), str(row["state"]), str(row["error"] or "it is not proved"))
        same.setdefault(key, []).append(f"{row['host']}/{row['server']}")
    told = [f"{', '.join(names)} ({state}): {error}" for (_unit, state, error), names in same.items()]
    waiting = [row for row in rows if row["state"] == NOT_BEGUN]
    refused = [str(reason) for reason in items(report, "stopped")]
    broken = [str(reason) for reason in items(report, "broken")]
    number = int(report.get("begun") or 0)
    # What broke off with nobody of the batch bad did so between the batches.
    between = bool(refused) or not number or bool(broken and not told)
    where = f"before batch {number + 1}" if between and number < len(items(report, "batches")) else f"in batch {number}"
    reasons = "; ".join([*refused, *broken, *told]) or "it broke off"
    words = [f"the rollout stopped {where} of {len(items(report, 'batches'))}: {reasons}"]
    if waiting:
        words.append(f"not begun: {', '.join(row['host'] + '/' + row['server'] for row in waiting)}")
    changed = servers_in([row for row in rows if row["state"] == CHANGED and not row["error"]])
    return "; ".join([*words, f"{changed} changed. Run the same again once it is mended: it goes on with what is left"])


# --- for a terminal ---------------------------------------------------------------------------------------------------


def plan_lines(plan: Result, variables: t.Mapping[str, t.Any]) -> list[str]:
    """The batches, before anything is touched."""
    batches, done = items(plan, "batches"), items(plan, "done")
    count = servers_in([row for batch in batches for row in batch])
    if not count:
        return [f"Nothing to do: {cell(servers_in(done))} of {cell(plan.get('total'))} servers are as wanted"]
    lines = [f"{cell(count)} servers in {cell(len(batches))} batches, ramp {cell(items(plan, 'ramp'))}"]
    columns = [Column("Batch", right=True), Column("Server", 40), Column("Node", 16), Column("Why", 40)]
    rows = []
    for number, batch in enumerate(batches, 1):
        for row in batch:
            found = mapping(mapping(variables.get(row["host"]) or {}, "rollout_seen"), str(row["server"]))
            rows.append([number, f"{row['host']}/{row['server']}", row.get("node") or "-", found.get("why") or "-"])
    lines += table(columns, rows)
    for name in dict.fromkeys(row["unit"] for batch in batches for row in batch if row.get("unit")):
        lines += paragraph(f"{name}: they go and come together, and count once", "One server: ")
    for label, group in (("As wanted", done), ("Left out", items(plan, "left_out"))):
        if group:
            lines += paragraph(", ".join(f"{row['host']}/{row['server']}" for row in group), f"{label}: ")
    return lines


def report_lines(report: Result) -> list[str]:
    """The report for people: the outcome, a table, and the story of each server that is worth one."""
    rows = items(report, "servers")
    lines = [_title(report, rows)]
    columns = [
        Column("Batch", right=True),
        Column("Server", 28),
        Column("State", 15),
        Column("Configuration", 20),
        Column("Down s", right=True),
        Column("Cut", right=True),
        Column("Tokens/s", 22, right=True),
    ]
    lines += table(columns, [_cells(row) for row in rows]) if rows else []
    lines += _changes(rows)
    for name in dict.fromkeys(row["unit"] for row in rows if row.get("unit")):
        lines += paragraph(str(name), "One server: ")
    for row in rows:
        lines += _story(row)
    for reason in [*items(report, "stopped"), *items(report, "broken")]:
        lines += paragraph(cell(reason), "Stopped: ")
    return lines


def _title(report: Result, rows: t.Sequence[Result]) -> str:
    states = dict.fromkeys(row["state"] for row in rows)
    counts = {state: servers_in([row for row in rows if row["state"] == state]) for state in states}
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"Rollout {'DONE' if report.get('verdict') == 'done' else 'STOPPED'}: {told or 'no server'}"


def _cells(row: Result) -> list[t.Any]:
    old, new = (_short(mapping(row, key).get("config_hash")) for key in ("old", "new"))
    cut = mapping(row, "drain").get("cut_off")
    rate, before = mapping(row, "proof").get("tokens_per_s"), mapping(row, "baseline").get("tokens_per_s")
    rates = "-" if rate is None else cell(rate)
    return [
        row["batch"] or "-",
        f"{row['host']}/{row['server']}",
        row["state"],
        old if old == new else f"{old} -> {new}",
        "-" if row["down_s"] is None else row["down_s"],
        "-" if cut is None else cut,
        rates if before is None or rate is None else f"{rates} (was {cell(before)})",
    ]


def _short(value: t.Any) -> str:
    return str(value or "-").removeprefix("sha256:")[:8]


def _changes(rows: t.Sequence[Result]) -> list[str]:
    """What changes, once for all servers for which it is the same."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["state"] not in (AS_WANTED, LEFT_OUT):
            for each in items(row, "differences"):
                found.setdefault(_change(each), []).append(f"{row['host']}/{row['server']}")
    lines: list[str] = []
    for change, names in found.items():
        lines += paragraph(f"{change} ({', '.join(names)})", "Change: ")
    return lines


def _story(row: Result) -> list[str]:
    name = f"{row['host']}/{row['server']}"
    lines: list[str] = []
    restored = mapping(mapping(row, "router"), "restored")
    if restored:
        words = "put back into its routers" if restored.get("back") else f"not in its routers: {restored.get('why')}"
        lines += paragraph(words, f"{name}: ")
    if row["error"]:
        lines += paragraph(row["error"], f"{name}: ")
    elif row["state"] == CHANGED and row["baseline_note"]:
        lines += paragraph(f"not compared with a baseline: {row['baseline_note']}", f"{name}: ")
    return lines


# --- for a browser ----------------------------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .4em .6em; border-bottom: 1px solid #ddd; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
code { font-size: 90%; }
.good { color: #176117; } .bad { color: #a11212; font-weight: 600; } .open { color: #666; }
"""


def report_html(report: Result) -> str:
    """One file that needs nothing else. Everything in it is text: nothing that a host said becomes markup."""
    rows = items(report, "servers")
    title = html.escape(_title(report, rows))
    body = [f"<h1>{title}</h1>", f"<p>{html.escape(_who(report))}</p>"]
    reasons = [*items(report, "stopped"), *items(report, "broken")]
    body += [f'<p class="bad">{html.escape(str(reason))}</p>' for reason in reasons]
    heads = ("Batch", "Server", "State", "Old", "New", "What changed", "Down s", "Drained / cut", "Proof", "Why")
    body.append("<table><tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>")
    body += [_html_row(row) for row in rows]
    body.append("</table>")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _who(report: Result) -> str:
    by = f"run {report.get('run_id')} of {report.get('operator')} on {report.get('controller')}"
    return f"{by}, from {report.get('started_at')} to {report.get('ended_at')}, ramp {cell(items(report, 'ramp'))}"


def _html_row(row: Result) -> str:
    state = str(row["state"])
    kind = "good" if state in FINE and not row["error"] else "open" if state == NOT_BEGUN else "bad"
    changes = [_change(each) for each in row["differences"]]
    old, new = (mapping(row, key) for key in ("old", "new"))
    drain, proof = mapping(row, "drain"), mapping(row, "proof")
    drained = f"{_or_dash(drain.get('in_flight_before'))} / {_or_dash(drain.get('cut_off'))}"
    rate, before = proof.get("tokens_per_s"), mapping(row, "baseline").get("tokens_per_s")
    proved = "; ".join(
        filter(
            None,
            (
                str(proof.get("verdict") or ""),
                f"{cell(rate)} tokens/s" if rate is not None else "",
                f"before {cell(before)}" if before is not None else "",
            ),
        )
    )
    cells = [
        _td(row["batch"] or "", "n"),
        _td(f"{row['host']}/{row['server']}" + (f" (of {row['unit']})" if row.get("unit") else "")),
        _td(state + (f" to {row['rolled_back_to']}" if row["rolled_back_to"] else ""), kind),
        _td(_configuration(old)),
        _td(_configuration(new)),
        "<td>" + "<br>".join(html.escape(change) for change in changes) + "</td>",
        _td("" if row["down_s"] is None else cell(row["down_s"]), "n"),
        _td(drained),
        _td(proved),
        _td(row["error"] or row["why"]),
    ]
    return "<tr>" + "".join(cells) + "</tr>"


def _change(each: Result) -> str:
    old, new = (exact(each.get(key), "not set") for key in ("old", "new"))
    return f"{each.get('item')}: {old} -> {new}"


def _or_dash(value: t.Any) -> str:
    return "-" if value is None else cell(value)


def _configuration(side: Result) -> str:
    return " ".join(filter(None, (str(side.get("launch_id") or ""), _short(side.get("config_hash")))))


def _td(value: t.Any, kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f"<td{mark}>{html.escape(str(value))}</td>"
