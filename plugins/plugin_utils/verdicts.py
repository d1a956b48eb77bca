# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two views of one container, from inside and from its Proxmox node: verdicts and evictions joined.

Pure functions over registered results. A view that should have answered and did not is unknown; another view can only
make the joint verdict worse, never better.
"""

from __future__ import annotations

import re
import typing as t
from dataclasses import dataclass

from .results import failure, figure, mapping, reasons, rows

Result = t.Mapping[str, t.Any]
JSON = dict[str, t.Any]

VERDICTS = ("dirty", "unknown", "clean")
EVICTED = ("evicted", "nothing_to_do", "planned")
# What the node's own eviction does not settle by finding nobody: memory that stays without a process.
_OF_MEMORY = frozenset({"memory_held", "memory_unknown"})
_BUS_ID = re.compile(r"\(([0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f.]+)\)")


@dataclass(frozen=True)
class View:
    """One answer. ``verdict`` is None where a container that can't be reached is no view at all."""

    vantage: str
    where: str
    reachable: bool
    verdict: t.Optional[str]
    result: Result
    reasons: tuple[JSON, ...]


def join_verdicts(
    inside: t.Any, node: t.Any, host: str, node_name: str, vmid: t.Any, needs_inside: bool = False
) -> JSON:
    """The joint verdict, with the keys of clean_state's own result, from both registered results.

    ``inside`` is empty, skipped or unreachable where the container could not be reached: then the node's view alone
    decides, unless ``needs_inside``, since a server can only be started in a container that answers.
    """
    from_inside = _inside_view(inside, host, needs_inside)
    from_node = _node_view(_of_container(node, str(vmid)), node_name)
    views = (from_inside, from_node)
    verdicts = [view.verdict for view in views if view.verdict is not None]
    verdict = next(word for word in VERDICTS if word in verdicts)
    found = _joined_reasons(from_inside, from_node)
    facts = _facts(views)
    return {
        "verdict": verdict,
        "summary": _summary(verdict, found, facts, views),
        "reasons": found,
        "warnings_found": _joined_warnings(from_inside, from_node, needs_inside),
        "facts_seen": facts,
        "simulated": any(bool(view.result.get("simulated")) for view in views),
        "samples_taken": _first(views, "samples_taken") or [],
        "views": {view.vantage: _row(view) for view in views},
        "container": node.get("container") if isinstance(node, t.Mapping) else None,
        "vmid": str(vmid),
        "ask_again": _node_sees_free(from_inside, from_node),
        "seconds": round(sum(_number(view.result.get("seconds")) for view in views), 3),
        "changed": False,
    }


def _answered(result: t.Any) -> bool:
    """Whether it is a verdict, not a failure on the way to one."""
    if not isinstance(result, t.Mapping) or result.get("verdict") not in VERDICTS:
        return False
    given = result.get("reasons")
    listed = given is None or isinstance(given, (list, tuple))
    return not (result["verdict"] == "clean" and (result.get("failed") or not listed))


def _inside_view(result: t.Any, host: str, needed: bool) -> View:
    where = f"inside {host}"
    if not isinstance(result, t.Mapping) or not result or result.get("skipped") or result.get("unreachable"):
        kept = result if isinstance(result, t.Mapping) else {}
        if not needed:
            return View("container", where, False, None, kept, ())
        missing = _reason("container_unreachable", f"{_unreachable(kept, host)}; nothing can be started in it", host)
        return View("container", where, False, "unknown", kept, (missing,))
    return _view("container", where, result)


def _node_view(result: t.Any, node: str) -> View:
    where = f"node {node}"
    if isinstance(result, t.Mapping) and not result.get("unreachable"):
        return _view("host", where, result)
    missing = _reason("view_missing", f"{where} gave no verdict: {failure(result)}", where)
    kept = result if isinstance(result, t.Mapping) else {}
    return View("host", where, False, "unknown", kept, (missing,))


def _of_container(result: t.Any, vmid: str) -> t.Any:
    """The node's answer, if it is about this container; another one's says nothing here."""
    seen = result.get("container") if isinstance(result, t.Mapping) else None
    about = seen.get("vmid") if isinstance(seen, t.Mapping) else None
    if about is None or str(about) == vmid:
        return result
    return {"failed": True, "msg": f"it answered for container {about}, not for {vmid}"}


def _view(vantage: str, where: str, result: Result) -> View:
    if _answered(result):
        return View(vantage, where, True, result["verdict"], result, tuple(_given_reasons(result)))
    # A module that refused says 'unknown' and why, without a list of reasons.
    missing = _reason("view_missing", f"{where} gave no verdict: {failure(result)}", where)
    return View(vantage, where, True, "unknown", result, (missing,))


def _given_reasons(result: Result) -> list[JSON]:
    found = [dict(each) for each in rows(result, "reasons")]
    if not found and result["verdict"] != "clean":
        text = str(result.get("summary") or result.get("msg") or "no reason was given")
        found = [_reason("view_missing", text, "verdict", means=result["verdict"])]
    return found


def _reason(code: str, message: str, subject: str, severity: str = "required", means: str = "unknown") -> JSON:
    return {"code": code, "message": message, "subject": subject, "severity": severity, "means": means}


def _unreachable(result: Result, host: str) -> str:
    why = f" ({failure(result).removeprefix('unreachable: ')})" if result.get("msg") else ""
    return f"{host} can't be reached{why}"


def _bus_id(subject: t.Any) -> t.Optional[str]:
    """A GPU is known on both sides by its bus id; indices differ."""
    match = _BUS_ID.search(str(subject))
    return match.group(1).lower() if match else None


def _about(view: View, bus_id: str) -> list[JSON]:
    return [each for each in view.reasons if _bus_id(each.get("subject")) == bus_id]


def _elsewhere(view: View) -> list[tuple[JSON, str]]:
    """The reasons of the kind 'somebody outside holds it', each with its GPU's bus id."""
    found = [(each, _bus_id(each.get("subject"))) for each in view.reasons if each.get("code") == "held_elsewhere"]
    return [(each, bus_id) for each, bus_id in found if bus_id is not None]


def _joined_reasons(inside: View, node: View) -> list[JSON]:
    """All reasons, dirty ones first. What the node knows of a GPU that is held elsewhere replaces that word."""
    replaced = [
        reason
        for reason, bus_id in _elsewhere(inside)
        if any(each.get("means", "dirty") == "dirty" for each in _about(node, bus_id))
    ]
    found = [
        {**reason, "vantage": view.vantage, "seen_from": view.where}
        for view in (inside, node)
        for reason in view.reasons
        if not (view is inside and reason in replaced)
    ]
    return sorted(found, key=lambda reason: reason.get("means", "dirty") != "dirty")


def _node_sees_free(inside: View, node: View) -> bool:
    """Whether the node calls a GPU free that is held elsewhere as seen from inside: one of them looked too early."""
    if not _answered(node.result) or not node.reachable:
        return False
    facts = node.result.get("facts_seen")
    shown = {str(gpu.get("bus_id")).lower() for gpu in rows(facts, "gpus")}
    return any(bus_id in shown and not _about(node, bus_id) for _reason_, bus_id in _elsewhere(inside))


def _joined_warnings(inside: View, node: View, needs_inside: bool) -> list[JSON]:
    seen_by_node = node.reachable and _answered(node.result)
    found = [
        {**warning, "vantage": view.vantage, "seen_from": view.where}
        for view in (inside, node)
        for warning in rows(view.result, "warnings_found")
        # The node sees what can't be seen from inside.
        if not (view is inside and seen_by_node and warning.get("code") == "not_visible")
    ]
    if inside.verdict is None and not needs_inside:
        host = inside.where.removeprefix("inside ")
        text = f"{_unreachable(inside.result, host)}; the node sees everything of it, and its view alone counts"
        advisory = _reason("container_unreachable", text, host, "advisory", "unknown")
        found.append({**advisory, "vantage": "container", "seen_from": inside.where})
    return found


def _number(value: t.Any) -> float:
    return figure(value) or 0.0


def _first(views: t.Sequence[View], key: str) -> t.Any:
    return next((view.result[key] for view in views if view.result.get(key)), None)


def _available(view: View) -> t.Optional[int]:
    facts = view.result.get("facts_seen")
    value = facts.get("available_mib") if isinstance(facts, t.Mapping) else None
    return value if isinstance(value, int) else None


def _facts(views: t.Sequence[View]) -> JSON:
    """The figures of the inside view, else the node's; of host memory the least that a view tells."""
    told = [value for value in map(_available, views) if value is not None]
    shown = next(filter(None, (mapping(view.result, "facts_seen") for view in views)), {})
    return {**shown, "available_mib": min(told) if told else None}


def _summary(verdict: str, found: t.Sequence[JSON], facts: Result, views: t.Sequence[View]) -> str:
    if verdict != "clean":
        first = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"{verdict}: {first.get('message')} (seen from {first['seen_from']}){more}"
    count = len(rows(facts, "gpus"))
    label = " (simulated driver)" if any(view.result.get("simulated") for view in views) else ""
    what = f"{count} GPU{'s' if count != 1 else ''} free{label}" if count else "no GPUs declared"
    available = "unknown" if facts["available_mib"] is None else f"{facts['available_mib']} MiB"
    places = " and ".join(view.where for view in views if view.verdict is not None)
    return f"clean: {what}, {available} of host memory available, seen from {places}"


def _row(view: View) -> JSON:
    return {
        "where": view.where,
        "reachable": view.reachable,
        "verdict": view.verdict,
        "reasons": [dict(each) for each in view.reasons],
        "available_mib": _available(view),
        "seconds": view.result.get("seconds"),
    }


# --- the node's eviction ----------------------------------------------------------------------------------------------


def eviction_problem(inside: t.Any, node: t.Any, host: str, node_name: str) -> str:
    """Why an eviction from both sides did not succeed, in one sentence; empty where it did.

    The node sees every process of the container, so its word counts for processes. It does not for memory that stayed
    as seen from inside where the node found nobody to evict: then nobody has waited for that memory. The same where the
    eviction from inside was cut short by the net above it.
    """
    if not isinstance(node, t.Mapping) or node.get("verdict") not in EVICTED:
        return "; ".join(filter(None, (_from_inside(inside, host), f"node {node_name}: {_why(node)}")))
    if node["verdict"] != "nothing_to_do" or not isinstance(inside, t.Mapping):
        return ""
    cut_short = bool(inside.get("failed")) and not inside.get("unreachable") and inside.get("verdict") is None
    if not cut_short and inside.get("verdict") not in ("failed", "unknown"):
        return ""
    codes = {each.get("code") for each in inside.get("reasons") or [] if isinstance(each, t.Mapping)}
    settled = bool(codes) and not codes & _OF_MEMORY
    return "" if settled else f"inside {host}: {_why(inside)}; node {node_name} found nobody to evict"


def _why(result: t.Any) -> str:
    return "; ".join(reasons(result)) or failure(result)


def _from_inside(inside: t.Any, host: str) -> str:
    if not isinstance(inside, t.Mapping) or not inside or inside.get("verdict") in EVICTED:
        return ""
    return f"inside {host}: {_why(inside)}"
