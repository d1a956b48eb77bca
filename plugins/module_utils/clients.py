# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients held before a server goes, and let go afterwards: from what was declared to a report.

Everybody is judged before anybody is asked: where one client can't be proved to be what was declared, none is touched.
What was held is handed back as plain data, and letting go touches nothing but that.
"""

from __future__ import annotations

import time
import typing as t
from dataclasses import dataclass, field, replace

from .act.clients import ask_systemd, freeze, pause, resume, still_there, terminate, wait_until
from .cgroups import unit_of
from .decide.clients import (
    ACTIONS,
    UNIT_NAME,
    Client,
    Scene,
    UnitView,
    judge_family,
    judge_process,
    judge_unit,
    parse_clients,
)
from .decide.ports import program_of
from .errors import CleanSlateError
from .model import Process
from .observe.clients import active_units, read_client_unit, read_pid_file, read_scene
from .observe.procfs import read_boot_id
from .observe.systemd import has_systemd

Key = tuple[int, int]
Row = dict[str, t.Any]
_PAUSED = ("T", "t")
# Results that mean: this client does not do what was asked, so the server must not go yet.
FAILED = frozenset({"refused", "unknown", "stayed"})


@dataclass(frozen=True)
class Seen:
    """A declared client as it was found. ``result``: running, paused, absent, refused or unknown."""

    client: Client
    result: str
    detail: str = ""
    unit: t.Optional[UnitView] = None
    process: t.Optional[Process] = None
    members: tuple[Process, ...] = ()


@dataclass
class Report:
    """The whole call, filled as it goes."""

    rows: list[Row] = field(default_factory=list)
    held: list[Row] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)
    changed: bool = False

    def add(self, client: t.Mapping[str, t.Any], result: str, detail: str = "", **more: t.Any) -> None:
        self.rows.append({**client, "result": result, "detail": detail, **more})

    def data(self, verdict: str, started: float) -> Row:
        problems = [f"client {row['name']}: {row['detail']}" for row in self.rows if row["result"] in FAILED]
        return {
            "verdict": "failed" if problems else verdict,
            "changed": self.changed,
            "clients": self.rows,
            "held": self.held,
            "problems": problems,
            "plan": self.plan,
            "seconds": round(time.monotonic() - started, 3),
        }


# --- looking ----------------------------------------------------------------------------------------------------------


def look_at(clients: t.Sequence[Client], protect: t.Sequence[str]) -> list[Seen]:
    """What there is of each client, and whether it may be touched."""
    scene = read_scene(protect)
    return [_look_at_unit(one, scene) if one.unit is not None else _look_at_process(one, scene) for one in clients]


def _look_at_unit(client: Client, scene: Scene) -> Seen:
    if not has_systemd():
        return Seen(client, "unknown", f"it is the unit {client.unit}, and systemd does not run here")
    view = read_client_unit(str(client.unit))
    if isinstance(view, str):
        return Seen(client, "unknown", view)
    if view.load_state == "not-found":
        return Seen(client, "unknown", f"there is no unit {client.unit} here")
    if client.action == "stop" and view.runs:
        view = replace(view, stops_too=active_units(view.stops_too))
    members, why = judge_unit(client, view, scene)
    if why is not None:
        return Seen(client, "refused", why, view, None, members)
    if not view.runs:
        return Seen(client, "absent", f"{client.unit} is {view.active_state}", view)
    paused = bool(view.frozen) or (bool(members) and all(one.state in _PAUSED for one in members))
    return Seen(client, "paused" if paused else "running", _triggers(view), view, None, members)


def _triggers(view: UnitView) -> str:
    """What may start it again while the server is away: for people to think of."""
    names = ", ".join(view.triggers)
    return f"{names} may start it again; declare that as a client too" if names else ""


def _look_at_process(client: Client, scene: Scene) -> Seen:
    file = read_pid_file(str(client.pid_file))
    process, why = judge_process(client, file, scene)
    if why is not None:
        return Seen(client, "refused", why)
    if process is None:
        words = f"there is no {client.pid_file}" if file.pid is None else f"pid {file.pid} is gone"
        return Seen(client, "absent", words)
    owner = _unit_around(process)
    if owner is not None and client.action == "stop":
        words = f"pid {process.pid} is the main process of {owner}, which would start it again: declare unit {owner}"
        return Seen(client, "refused", words, None, process)
    family, why = judge_family(process, scene)
    if why is not None:
        return Seen(client, "refused", why, None, process, family)
    paused = all(one.state in _PAUSED for one in family)
    return Seen(client, "paused" if paused else "running", "", None, process, family)


def _unit_around(process: Process) -> t.Optional[str]:
    unit = unit_of(process)
    if unit is None or not unit.endswith(".service") or not has_systemd():
        return None
    view = read_client_unit(unit)
    return view.name if isinstance(view, UnitView) and view.main_pid == process.pid else None


def _head(client: Client) -> Row:
    kind = "unit" if client.unit is not None else "process"
    return {
        "name": client.name,
        "kind": kind,
        "action": client.action,
        "unit": client.unit,
        "pid_file": client.pid_file,
        "program": client.program,
        "host": client.host,
        "after": client.after,
    }


def _shown(seen: Seen) -> str:
    if seen.unit is not None:
        return f"{seen.unit.name} ({seen.unit.active_state}, {len(seen.members)} processes)"
    return f"pid {seen.process.pid} ({program_of(seen.process)})" if seen.process else seen.client.name


def looked(raw: t.Sequence[t.Mapping[str, t.Any]], protect: t.Sequence[str]) -> Row:
    """State ``looked``: who is there, touching nobody."""
    started = time.monotonic()
    report = Report()
    for seen in look_at(parse_clients(raw), protect):
        report.add(_head(seen.client), seen.result, seen.detail, pid=seen.process.pid if seen.process else None)
    return report.data("looked", started)


# --- holding ----------------------------------------------------------------------------------------------------------


def hold(
    raw: t.Sequence[t.Mapping[str, t.Any]], protect: t.Sequence[str], deadline_s: float, check_mode: bool = False
) -> Row:
    """State ``held``: all clients are held, or the report says who is not, and why."""
    started = time.monotonic()
    report = Report()
    found = look_at(parse_clients(raw), protect)
    objected = any(seen.result in FAILED for seen in found)
    wanted = [seen for seen in found if seen.result == "running"]
    for seen in found:
        if seen.result != "running":
            report.add(_head(seen.client), seen.result, seen.detail)
        elif objected:
            report.add(_head(seen.client), "not_asked", "nobody was asked, since another client can't be held")
    if objected or check_mode:
        report.plan = [f"{seen.client.action} {_shown(seen)} for client {seen.client.name}" for seen in wanted]
        if not objected:
            for seen in wanted:
                report.add(_head(seen.client), "planned", seen.detail)
        report.changed = bool(wanted) and not objected
        return report.data("planned" if wanted else "nothing_to_do", started)
    _hold_all(wanted, protect, started + deadline_s, report)
    return report.data("held" if wanted else "nothing_to_do", started)


def _hold_all(wanted: t.Sequence[Seen], protect: t.Sequence[str], deadline: float, report: Report) -> None:
    """Ask everybody first, then wait for all together."""
    stopping: list[tuple[Seen, list[Key]]] = []
    for seen in wanted:
        left = max(1.0, deadline - time.monotonic())
        if seen.client.action == "pause":
            _pause_one(seen, protect, left, report)
        elif seen.unit is not None:
            refused = ask_systemd("stop", seen.unit.name, left)
            if refused is None:
                _note_held(report, seen, unit=seen.unit.name)
                stopping.append((seen, []))
            else:
                report.add(_head(seen.client), "refused", refused)
        elif seen.process is not None:
            _stop_process(seen, report, stopping)
    for seen, keys in stopping:
        _await_stop(seen, keys, deadline, report)


def _note_held(report: Report, seen: Seen, **more: t.Any) -> None:
    report.changed = True
    report.held.append({**_head(seen.client), "boot_id": read_boot_id(), **more})


def _stop_process(seen: Seen, report: Report, stopping: list[tuple[Seen, list[Key]]]) -> None:
    process = t.cast(Process, seen.process)
    result, detail = terminate(process, _unchanged)
    if result == "gone":
        report.add(_head(seen.client), "absent", f"pid {process.pid} is gone", pid=process.pid)
    elif result == "sent":
        _note_held(report, seen, processes=[list(process.key)])
        stopping.append((seen, [one.key for one in seen.members]))
    else:
        report.add(_head(seen.client), "refused", f"pid {process.pid}: {detail}", pid=process.pid)


def _unchanged(_process: Process) -> t.Optional[str]:
    """Its start time, checked with the pidfd open, is its identity: the evidence was looked at a moment ago."""
    return None


def _await_stop(seen: Seen, keys: t.Sequence[Key], deadline: float, report: Report) -> None:
    unit = seen.unit
    if unit is None:
        ended = wait_until(lambda: not still_there(keys), deadline)
        left = ", ".join(f"pid {pid}" for pid in still_there(keys))
        words = f"{left} has not ended on SIGTERM; it is never killed, end it yourself or give it longer (deadline_s)"
        pid = seen.process.pid if seen.process else None
        report.add(_head(seen.client), "held" if ended else "stayed", "" if ended else words, pid=pid)
        return
    last: list[t.Union[UnitView, str]] = [unit]

    def stopped() -> bool:
        last[0] = read_client_unit(unit.name)
        return isinstance(last[0], UnitView) and not last[0].runs

    ended = wait_until(stopped, deadline)
    state = last[0] if isinstance(last[0], str) else f"{unit.name} is {last[0].active_state}"
    words = f"{state}, though systemd was asked to stop it; give it longer (deadline_s)"
    report.add(_head(seen.client), "held" if ended else "stayed", seen.detail if ended else words)


def _pause_one(seen: Seen, protect: t.Sequence[str], left_s: float, report: Report) -> None:
    client, unit = seen.client, seen.unit
    if unit is not None and unit.frozen is not None and freeze(unit.name, left_s) is None:
        _note_held(report, seen, unit=unit.name, how="freeze", invocation=unit.invocation)
        report.add(_head(client), "held", seen.detail)
        return
    # Everybody of it is looked up and judged anew in each round: that is the evidence for each signal.
    problem: list[str] = []

    def family() -> t.Sequence[Process]:
        scene = read_scene(protect)
        if unit is not None:
            now = read_client_unit(unit.name)
            members, why = ((), now) if isinstance(now, str) else judge_unit(client, now, scene)
        else:
            process, why = judge_process(client, read_pid_file(str(client.pid_file)), scene)
            members, why = ((), why) if process is None or why else judge_family(process, scene)
        problem[:] = [why] if why else []
        return () if why else members

    paused, failed = pause(family, _unchanged)
    if paused:
        invocation = unit.invocation if unit is not None else ""
        name = unit.name if unit is not None else None
        _note_held(
            report, seen, unit=name, how="signal", invocation=invocation, processes=[list(key) for key in paused]
        )
    why = failed or (problem[0] if problem else None)
    result = "refused" if problem else "stayed" if failed else "held"
    report.add(_head(client), result, why or seen.detail, pids=[pid for pid, _ticks in paused])


# --- letting go -------------------------------------------------------------------------------------------------------


def release(raw: t.Sequence[t.Mapping[str, t.Any]], deadline_s: float, check_mode: bool = False) -> Row:
    """State ``released``: what an earlier call held goes on. Touches nothing else."""
    started = time.monotonic()
    report = Report()
    entries = [_parse_held(entry) for entry in raw]
    for entry in entries:
        if entry.head["after"] == "leave":
            report.add(entry.head, "left", "it is left as it is, as declared (after: leave)")
            continue
        if check_mode:
            report.plan.append(f"let client {entry.head['name']} go ({_undo_words(entry)})")
            report.add(entry.head, "planned")
            continue
        _release_one(entry, started + deadline_s, report)
    report.changed = report.changed or bool(report.plan)
    return report.data("planned" if report.plan else "released" if entries else "nothing_to_do", started)


@dataclass(frozen=True)
class Held:
    """What an earlier call held, as it was handed back."""

    head: Row
    unit: t.Optional[str]
    how: str
    invocation: str
    boot_id: t.Optional[str]
    processes: tuple[Key, ...]


def _parse_held(entry: t.Mapping[str, t.Any]) -> Held:
    """An entry of ``held``; raises CleanSlateError for one that no call of ours returned."""
    names = ("name", "kind", "action", "unit", "pid_file", "program", "host", "after")
    head = {key: entry.get(key) for key in names}
    unit = head["unit"]
    pairs = entry.get("processes") or []
    known = head["kind"] in ("unit", "process") and head["action"] in ACTIONS and isinstance(head["name"], str)
    named = unit is None if head["kind"] == "process" else isinstance(unit, str) and UNIT_NAME.fullmatch(unit)
    if not known or not named or not isinstance(pairs, list) or not all(_is_key(pair) for pair in pairs):
        raise CleanSlateError(
            f"held: {str(entry.get('name'))[:64]!r} is not what this module returned; hand back its result's `held` as "
            "it is"
        )
    return Held(
        head,
        unit,
        str(entry.get("how") or ""),
        str(entry.get("invocation") or ""),
        entry.get("boot_id"),
        tuple((int(pid), int(ticks)) for pid, ticks in pairs),
    )


def _is_key(pair: t.Any) -> bool:
    return (
        isinstance(pair, (list, tuple))
        and len(pair) == 2
        and all(isinstance(part, int) and not isinstance(part, bool) and part > 0 for part in pair)
    )


def _undo_words(entry: Held) -> str:
    if entry.head["action"] == "pause":
        return f"thaw {entry.unit}" if entry.how == "freeze" else f"SIGCONT to {len(entry.processes)} processes"
    return f"start {entry.unit}" if entry.unit else "nothing: a stopped process is not started from here"


def _release_one(entry: Held, deadline: float, report: Report) -> None:
    if entry.head["action"] == "stop":
        if entry.unit is None:
            words = "it was stopped by SIGTERM, and how it is started is not known here: start it yourself"
            report.add(entry.head, "left", words)
        else:
            _start_unit(entry, entry.unit, deadline, report)
        return
    if entry.boot_id != read_boot_id():
        report.add(entry.head, "absent", "the machine was booted since; nothing of it is paused")
        return
    if entry.unit is not None and entry.how == "freeze":
        _thaw(entry, entry.unit, deadline, report)
        return
    woken, problems = resume(entry.processes)
    if problems:
        report.add(entry.head, "stayed", "; ".join(problems))
        return
    report.changed = report.changed or bool(woken)
    gone = len(entry.processes) - len(woken)
    report.add(entry.head, "released" if woken else "absent", f"{gone} of its processes are gone" if gone else "")


def _start_unit(entry: Held, unit: str, deadline: float, report: Report) -> None:
    view = read_client_unit(unit)
    if isinstance(view, UnitView) and view.active_state == "active":
        report.add(entry.head, "running", f"{unit} runs already")
        return
    # A client that says failure when it is stopped stands as failed: that must not be taken for how the start went.
    ask_systemd("reset-failed", unit, max(1.0, deadline - time.monotonic()))
    refused = ask_systemd("start", unit, max(1.0, deadline - time.monotonic()))
    if refused is not None:
        report.add(entry.head, "stayed", refused)
        return
    report.changed = True
    last: list[t.Union[UnitView, str]] = [view]

    def settled() -> bool:
        last[0] = now = read_client_unit(unit)
        return isinstance(now, UnitView) and (now.once or now.active_state in ("active", "failed"))

    wait_until(settled, deadline)
    state = last[0] if isinstance(last[0], str) else last[0].active_state
    # A unit that runs once may have done its work and be inactive again.
    good = state in ("active", "activating", "inactive")
    words = "" if state == "active" else f"{unit} is {state}" if isinstance(last[0], UnitView) else state
    report.add(entry.head, "released" if good else "stayed", words if good else f"{words}, though it was started")


def _thaw(entry: Held, unit: str, deadline: float, report: Report) -> None:
    view = read_client_unit(unit)
    if isinstance(view, UnitView) and (view.invocation != entry.invocation or not view.frozen):
        report.add(entry.head, "running", f"{unit} is not paused any more (it is {view.active_state})")
        return
    refused = ask_systemd("thaw", unit, max(1.0, deadline - time.monotonic()))
    report.changed = report.changed or refused is None
    report.add(entry.head, "released" if refused is None else "stayed", refused or "")
