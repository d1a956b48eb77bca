# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Workers behind routers: from what is wished to a report that says, for each router, how it was and how it is.

Nothing is taken out anywhere unless every router answers, the worker can say when it is idle, and enough other workers
are left. Putting in goes as far as it can, since each router that has the worker again helps. In the end all routers
are asked once more: the report is what they say then, not what was done.
"""

from __future__ import annotations

import typing as t
from dataclasses import asdict, dataclass, field

from .act import drain as draining
from .act.routing import Clock, Hook, Seat, put_in, run_hook, take_out
from .decide.routing import (
    ABSENT,
    HEALTHY,
    UNKNOWN,
    Entry,
    Url,
    Wanted,
    entries_of,
    hosts_to_resolve,
    other_spellings,
    parse_url,
    reasons_to_keep,
    settings_lost,
    state_of,
)
from .durations import check_seconds
from .errors import CleanSlateError
from .observe.routed import WorkerCounter, counter_of
from .sglang.router import Access, Ask, Router, RouterError, ask, resolve

Row = dict[str, t.Any]
Params = t.Mapping[str, t.Any]
SETTLE_S = 0.5
RESOLVE_DEADLINE_S = 10.0
_SHOWN = 5


@dataclass(frozen=True)
class Worker:
    """A worker as it was declared."""

    wanted: Wanted
    access: Access
    settings: Row
    give_key: bool

    @property
    def url(self) -> str:
        return str(self.wanted.url)


@dataclass(frozen=True)
class Wish:
    state: str
    workers: tuple[Worker, ...]
    hooks: tuple[Hook, ...]
    leave_healthy: int
    in_flight: str
    allow_cut: bool
    removed_deadline_s: float
    drain_deadline_s: float
    healthy_deadline_s: float

    @property
    def takes_out(self) -> bool:
        return self.state in ("absent", "drained")

    @property
    def direction(self) -> str:
        return "out" if self.takes_out else "back"


@dataclass(frozen=True)
class World:
    """What reaches out of this process; tests have their own."""

    ask: Ask = ask
    clock: Clock = Clock()
    resolve: t.Callable[[t.Sequence[str], float], t.Mapping[str, t.Collection[str]]] = resolve
    run_hook: t.Callable[[Hook, str, t.Sequence[str]], Row] = run_hook


@dataclass
class Report:
    """The whole call, filled as it goes."""

    wish: Wish
    routers: tuple[Router, ...]
    before: dict[str, t.Union[tuple[Entry, ...], RouterError]] = field(default_factory=dict)
    after: dict[str, t.Union[tuple[Entry, ...], RouterError]] = field(default_factory=dict)
    seats: list[Seat] = field(default_factory=list)
    hooks: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)
    drained: t.Optional[Row] = None
    unknown: bool = False
    spelled_twice: bool = False

    def fail(self, problem: str, unknown: bool = False) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
        self.unknown = self.unknown or unknown


# --- what was asked -----------------------------------------------------------------------------------------------


def parse_routers(params: Params, world: World) -> tuple[Router, ...]:
    """The routers of the module's options. Raises CleanSlateError for one that makes no sense."""
    found = []
    for position, raw in enumerate(params["routers"]):
        where = f"routers[{position}]"
        url = _url(where, raw["url"])
        name = str(raw.get("name") or f"{url.host}:{url.port}{url.path}")
        access = Access(url, raw.get("api_key") or None, params["validate_certs"], params["ca_path"])
        found.append(Router(name, access, params["request_deadline_s"], world.ask))
    _once("router", [router.name for router in found])
    _once("router", [str(router.access.url) for router in found])
    return tuple(found)


def parse_wish(params: Params) -> Wish:
    """The rest of the options. Raises CleanSlateError for what makes no sense."""
    workers = []
    for position, raw in enumerate(params["workers"]):
        where = f"workers[{position}]"
        url = _url(where, raw["url"])
        aliases = tuple(_url(f"{where}: aliases", text) for text in raw.get("aliases") or ())
        access = Access(url, raw.get("api_key") or None, params["validate_certs"], params["ca_path"])
        settings = {key: value for key, value in (raw.get("settings") or {}).items() if value is not None}
        workers.append(Worker(Wanted(url, aliases), access, settings, bool(raw.get("give_key"))))
    _once("worker", [worker.url for worker in workers])
    for raw in params["hooks"]:
        check_seconds(raw, "deadline_s")
    hooks = tuple(
        Hook(
            raw["name"],
            tuple(raw.get("out") or ()),
            tuple(raw.get("back") or ()),
            raw["deadline_s"],
            tuple(raw.get("list") or ()),
        )
        for raw in params["hooks"]
    )
    _once("hook", [hook.name for hook in hooks])
    check_seconds(params, "request_deadline_s", "removed_deadline_s", "drain_deadline_s", "healthy_deadline_s")
    state = params["state"]
    if state != "listed" and not workers:
        raise CleanSlateError(f"state is {state}, but workers is empty: which worker is meant?")
    if not params["routers"] and not hooks:
        raise CleanSlateError("neither routers nor hooks are given: who sends to the workers?")
    if params["leave_healthy"] < 0:
        raise CleanSlateError(f"leave_healthy is {params['leave_healthy']}; it must be 0 or more")
    return Wish(
        state,
        tuple(workers),
        hooks,
        params["leave_healthy"],
        params["in_flight"],
        params["allow_cut"],
        params["removed_deadline_s"],
        params["drain_deadline_s"],
        params["healthy_deadline_s"],
    )


def _url(where: str, text: str) -> Url:
    try:
        return parse_url(text)
    except CleanSlateError as error:
        raise CleanSlateError(f"{where}: {error}") from error


def _once(what: str, names: t.Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CleanSlateError(f"{what} {', '.join(twice)} is given twice")


# --- the whole way ------------------------------------------------------------------------------------------------


def run(params: Params, check: bool = False, world: t.Optional[World] = None) -> Row:
    """Look, judge, act, look again. The result's ``verdict`` is failed or unknown where ``problems`` is not empty."""
    there = world or World()
    wish = parse_wish(params)
    report = Report(wish, parse_routers(params, there))
    started = there.clock.now()
    _list_all(report, report.before)
    if wish.state == "listed":
        _ask_hooks(report, there)
    else:
        counters = _judge(report, there)
        _make_plan(report)
        # What is taken out half sends its requests on to a server that is about to go; what is put in half, helps.
        if not check and not (wish.takes_out and report.problems):
            _act(report, counters, there)
    acted = any(seat.action != "none" for seat in report.seats)
    if acted:
        if wish.takes_out and report.drained is None:
            there.clock.sleep(SETTLE_S)
        _list_all(report, report.after)
        _certify(report)
    return _result(report, check, there.clock.now() - started)


def _list_all(report: Report, into: dict[str, t.Union[tuple[Entry, ...], RouterError]]) -> None:
    for router in report.routers:
        try:
            into[router.name] = router.workers()
        except RouterError as error:
            into[router.name] = error
            report.fail(str(error))


def _ask_hooks(report: Report, world: World) -> None:
    """What other load balancers have, of those that can tell."""
    for hook in report.wish.hooks:
        if not hook.list:
            continue
        row = world.run_hook(hook, "list", [worker.url for worker in report.wish.workers])
        if row["result"] != "done":
            report.fail(f"hook {hook.name} (list): {row['detail']}", unknown=True)
        urls = row.get("listed") or ()
        missing = [
            worker.url for worker in report.wish.workers if not any(worker.wanted.is_it(url) for url in urls)
        ]
        report.hooks.append({**row, "missing": missing if row["result"] == "done" else None})


def _listed(found: t.Union[tuple[Entry, ...], RouterError, None]) -> tuple[Entry, ...]:
    return found if isinstance(found, tuple) else ()


def _judge(report: Report, world: World) -> list[WorkerCounter]:
    """Everything that speaks against it, before anything is touched. The counters of workers that will be drained."""
    wish = report.wish
    wanted = [worker.wanted for worker in wish.workers]
    everything = [entry for found in report.before.values() for entry in _listed(found)]
    names = hosts_to_resolve(wanted, everything)
    addresses = world.resolve(names, RESOLVE_DEADLINE_S)
    report.warnings += [
        f"the name {name} could not be looked up here, so whether it is another spelling of a worker is not known"
        for name in names
        if not addresses.get(name)
    ]
    for worker in wish.workers if wish.takes_out and report.routers else ():
        if everything and not entries_of(worker.wanted, everything):
            listed = ", ".join(sorted({entry.url for entry in everything})[:_SHOWN])
            report.warnings.append(f"no router lists {worker.url}; if it should be there, compare: {listed}")
    for router in report.routers:
        listing = report.before[router.name]
        if isinstance(listing, RouterError):
            continue
        for worker in wish.workers:
            entries = entries_of(worker.wanted, listing)
            for other in other_spellings(worker.wanted, listing, addresses):
                report.spelled_twice = True
                report.fail(
                    f"router {router.name} lists {other}, which leads to the same address as the worker {worker.url}; "
                    "name it in aliases if it is the same worker"
                )
            key = worker.access.api_key if worker.give_key else None
            report.seats.append(Seat(router, worker.wanted, entries, key, worker.settings))
            if wish.takes_out:
                report.warnings += settings_lost(router.name, entries, worker.settings)
        if wish.takes_out:
            for reason in reasons_to_keep(router.name, wanted, listing, wish.leave_healthy):
                report.fail(reason)
    missing = [hook.name for hook in wish.hooks if not hook.argv(wish.direction)]
    if missing:
        report.fail(f"hook {', '.join(missing)} has no command for '{wish.direction}'")
    if wish.state != "drained" or wish.in_flight == "none" or report.problems:
        return []
    return _counters(report, world)


def _counters(report: Report, world: World) -> list[WorkerCounter]:
    counters = []
    for worker in report.wish.workers:
        found = counter_of(worker.access, world.ask, world.clock.sleep)
        if isinstance(found, str):
            report.fail(
                f"how many requests {worker.url} has in flight can't be told, so it can't be drained: {found}; "
                "state=absent takes it out without waiting",
                unknown=True,
            )
        else:
            counters.append(found)
    return counters


_DOES = {HEALTHY: ("remove", ""), "unhealthy": ("remove", "wait for"), ABSENT: ("", "add")}


def _make_plan(report: Report) -> None:
    for seat in report.seats:
        verb = _DOES[state_of(seat.before)][0 if report.wish.takes_out else 1]
        if verb:
            report.plan.append(f"{verb} {seat.wanted.url} at router {seat.router.name}")
    for hook in report.wish.hooks:
        report.plan.append(f"run hook {hook.name}: {report.wish.direction}")
    if report.wish.state == "drained" and report.wish.in_flight != "none":
        report.plan.append(f"wait until nothing is in flight, at most {report.wish.drain_deadline_s:g} s")


def _act(report: Report, counters: t.Sequence[WorkerCounter], world: World) -> None:
    wish = report.wish
    if wish.state == "present" and report.spelled_twice:
        return  # it would be there twice, and get twice its share
    if wish.takes_out:
        take_out(report.seats, wish.removed_deadline_s, world.clock)
    else:
        put_in(report.seats, wish.healthy_deadline_s, world.clock)
    for seat in report.seats:
        report.warnings += [seat.warning] if seat.warning else []
        if seat.problem:
            report.fail(f"{seat.wanted.url}: {seat.problem}")
    if wish.takes_out and report.problems:
        return  # requests still come: neither other load balancers nor a wait would change that
    if not wish.takes_out and report.seats and not any(seat.done for seat in report.seats):
        return  # what no router calls healthy is not for others either
    for hook in wish.hooks:
        row = world.run_hook(hook, wish.direction, [worker.url for worker in wish.workers])
        report.hooks.append(row)
        if row["result"] != "done":
            report.fail(f"hook {hook.name} ({wish.direction}): {row['detail']}", unknown=row["result"] == "timeout")
    if counters and not report.problems:
        _drain(report, counters, world)


def _drain(report: Report, counters: t.Sequence[WorkerCounter], world: World) -> None:
    wish = report.wish
    clock = world.clock
    # A request that was on its way when the router let go is not counted by anybody for a moment.
    clock.sleep(SETTLE_S)

    def lives() -> bool:
        return not all(counter.gone for counter in counters)

    end = draining.drain(draining.DrainWish(True), counters, wish.drain_deadline_s, lives, clock.now, clock.sleep)
    cut = end.cut_off
    note = end.note
    died = [counter for counter in counters if counter.gone and counter.last]
    if died:
        cut = sum(counter.last or 0 for counter in died) + sum(c.last or 0 for c in counters if not c.gone)
        note = f"{', '.join(str(c.access.url) for c in died)} went while requests were in flight"
    elif cut is None and end.in_flight_after == 0:
        cut = 0
    if end.in_flight_after is None:
        note = "; ".join(filter(None, [note, *(counter.problem for counter in counters)]))
    report.drained = {
        "seconds": round(end.waited_s + SETTLE_S, 3),
        "in_flight_at_start": end.in_flight_before,
        "in_flight_at_end": end.in_flight_after,
        "cut": cut,
        "source": end.source,
        "note": note,
    }
    if cut is None:
        report.fail(f"whether requests are in flight could not be told to the end: {note}", unknown=True)
    elif cut and not wish.allow_cut:
        report.fail(
            f"{cut} requests were in flight after {wish.drain_deadline_s:g} s and would be cut off: {note}; wait "
            "longer (drain_deadline_s), accept that (allow_cut), or put the worker back (state=present)"
        )


def _certify(report: Report) -> None:
    """What acted does not certify itself: the routers' lists, asked again."""
    for router in report.routers:
        listing = report.after[router.name]
        if isinstance(listing, RouterError):
            continue
        for worker in report.wish.workers:
            state = state_of(entries_of(worker.wanted, listing))
            if report.wish.takes_out and state != ABSENT and not _has_problem(report, router, worker):
                report.fail(
                    f"router {router.name} lists {worker.url} again ({state}): somebody adds it, for example an "
                    "addition that was still pending there, service discovery, or another run"
                )
            if not report.wish.takes_out and state != HEALTHY and not _has_problem(report, router, worker):
                report.fail(f"router {router.name} called {worker.url} healthy, and now {state}")


def _has_problem(report: Report, router: Router, worker: Worker) -> bool:
    return any(seat.problem for seat in report.seats if seat.router is router and seat.wanted is worker.wanted)


# --- the result ---------------------------------------------------------------------------------------------------


def _entry_row(entry: Entry) -> Row:
    row = asdict(entry)
    row["job"] = None if entry.job is None else str(entry.job)
    return row


def _view(found: t.Union[tuple[Entry, ...], RouterError, None], wanted: Wanted) -> Row:
    if not isinstance(found, tuple):
        return {"state": UNKNOWN, "entries": []}
    entries = entries_of(wanted, found)
    return {"state": state_of(entries), "entries": [_entry_row(entry) for entry in entries]}


def _result(report: Report, check: bool, seconds: float) -> Row:
    wish = report.wish
    acted = bool(report.after)
    final = report.after if acted else report.before
    rows = []
    for router in report.routers:
        listing = report.before[router.name]
        error = next((found for found in (final[router.name], listing) if isinstance(found, RouterError)), None)
        rows.append(
            {
                "name": router.name,
                "url": str(router.access.url),
                "reachable": error is None,
                "error": None if error is None else str(error),
                "workers": [_worker_row(report, router, worker, final) for worker in wish.workers],
                "listed": [_entry_row(entry) for entry in _listed(final[router.name])],
            }
        )
    problems = list(report.problems)
    if problems and wish.state != "listed":
        problems.append(_whereabouts(report, rows, acted))
    would = any(not text.startswith("wait ") for text in report.plan) and not (wish.takes_out and report.problems)
    done = any(seat.action in ("added", "removed") for seat in report.seats) or bool(report.hooks)
    blind = report.unknown or any(isinstance(found, RouterError) for found in final.values())
    good = wish.state if wish.state == "listed" or not check else "planned"
    return {
        "verdict": good if not problems else "unknown" if blind else "failed",
        "changed": wish.state != "listed" and (would if check else done),
        "routers": rows,
        "hooks": report.hooks,
        "drained": report.drained,
        "plan": report.plan,
        "problems": problems,
        "warnings": list(dict.fromkeys(report.warnings)),
        "seconds": round(seconds, 3),
        "diff": _diff(report, rows, check),
    }


def _worker_row(
    report: Report, router: Router, worker: Worker, final: t.Mapping[str, t.Union[tuple[Entry, ...], RouterError]]
) -> Row:
    seat = next((one for one in report.seats if one.router is router and one.wanted is worker.wanted), None)
    return {
        "url": worker.url,
        "before": _view(report.before[router.name], worker.wanted),
        "after": _view(final[router.name], worker.wanted),
        "action": "none" if seat is None else seat.action,
        "seconds": 0.0 if seat is None else seat.seconds,
        "detail": "" if seat is None else (seat.problem or ""),
    }


def _whereabouts(report: Report, rows: t.Sequence[Row], acted: bool) -> str:
    """Where the workers are now, at every router: what a person needs to mend it."""
    places = [
        f"{worker['url']}: {worker['after']['state']} at {row['name']}" for row in rows for worker in row["workers"]
    ]
    head = "now" if acted or report.hooks else "nothing was changed; now"
    return f"{head} {', '.join(places)}" if places else head.rpartition("; ")[0] or "no router was asked"


def _diff(report: Report, rows: t.Sequence[Row], check: bool) -> Row:
    wish = report.wish
    goal = ABSENT if wish.takes_out else HEALTHY
    blocked = wish.takes_out and bool(report.problems)
    before, after = [], []
    for row in rows:
        for worker in row["workers"]:
            state = worker["after"]["state"]
            if check and wish.state != "listed" and state != UNKNOWN and not blocked:
                state = goal
            before.append(f"{row['name']} {worker['url']}: {worker['before']['state']}\n")
            after.append(f"{row['name']} {worker['url']}: {state}\n")
    return {"before": "".join(before), "after": "".join(after)}
