# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an inventory says of routers and of the servers behind them, what is wrong with it, and what becomes of it."""

from __future__ import annotations

import ipaddress
import typing as t

from ..module_utils.decide.routing import ABSENT, HEALTHY, UNKNOWN, Url, parse_url
from ..module_utils.errors import CleanSlateError
from .results import figure, items, mapping, rows
from .words import nearest, spec_problems, unknown_keys

Row = dict[str, t.Any]
Values = t.Mapping[str, t.Any]
_HERE = ("localhost", "127.0.0.1", "::1")


def secrets_of(values: Values) -> list[str]:
    """The routers' keys, which no message may show."""
    return [str(each["api_key"]) for each in _mappings(values.get("sglang_routers")) if each.get("api_key")]


def has_routers(values: Values) -> bool:
    """Whether anybody sends to the host's servers that can be asked to stop."""
    return bool(values.get("sglang_routers") or values.get("sglang_router_hooks"))


def router_problems(host: str, values: Values, options: Values, known_hosts: t.Collection[str]) -> list[str]:
    """Each mistake in the host's routers and hooks. ``options``: the argument specification of a host."""
    problems = []
    for key in ("sglang_routers", "sglang_router_hooks"):
        given = values.get(key)
        if given is None:
            continue
        if not isinstance(given, (list, tuple)) or len(_mappings(given)) != len(given):
            problems.append(f"{host}: {key} must be a list of mappings")
            continue
        for position, each in enumerate(given):
            problems += _entry_problems(f"{host}: {key}[{position}]", each, options[key]["options"])
        names = [str(each["name"]) for each in given if each.get("name")]
        twice = sorted({name for name in names if names.count(name) > 1})
        problems += [f"{host}: {key}: the name {name} is given twice" for name in twice]
    asked_from = values.get("sglang_router_host")
    if asked_from and str(asked_from) not in (*known_hosts, *_HERE):
        advice = nearest(str(asked_from), known_hosts)
        problems.append(f"{host}: sglang_router_host '{asked_from}' is no host of the inventory{advice}")
    return problems


def _entry_problems(where: str, entry: Values, options: Values) -> list[str]:
    problems = unknown_keys(where, map(str, entry), options, "key")
    known = {key: value for key, value in entry.items() if key in options and value is not None}
    if "api_key" in known and not isinstance(known.pop("api_key"), str):
        problems.append(f"{where}: api_key must be a string")
    problems += [f"{where}: {text}" for text in spec_problems(options, known)]
    for key in ("out", "back", "list"):
        if key in known and not known[key]:
            problems.append(f"{where}: {key} is empty; it must be a command in words")
    if isinstance(known.get("deadline_s"), (int, float)) and not 0 < known["deadline_s"] < float("inf"):
        problems.append(f"{where}: deadline_s is {known['deadline_s']}, but must be above 0")
    return problems + (_url_problems(where, "url", known["url"]) if known.get("url") else [])


def worker_problems(where: str, server: Values, values: Values) -> list[str]:
    """What is wrong with how routers would know one server."""
    problems = []
    for key in ("worker_url", "router_url"):
        if server.get(key):
            problems += _url_problems(where, key, server[key])
    aliases = server.get("worker_aliases")
    for alias in aliases if isinstance(aliases, (list, tuple)) else ():
        problems += _url_problems(where, "worker_aliases", alias)
    behind = has_routers(values) or server.get("router_url")
    if behind and not server.get("worker_url") and _listens_here_only(server.get("host")):
        problems.append(
            f"{where}: it has routers, but listens on {server.get('host') or '127.0.0.1'} alone; set its host, or the "
            "worker_url under which they know it"
        )
    return problems


def _url_problems(where: str, key: str, text: t.Any) -> list[str]:
    try:
        parse_url(str(text))
    except CleanSlateError as error:
        return [f"{where}: {key}: {error}"]
    return []


def _listens_here_only(host: t.Any) -> bool:
    if not host:
        return True  # SGLang's own default
    try:
        return ipaddress.ip_address(str(host).strip("[]")).is_loopback
    except ValueError:
        return str(host).lower() == "localhost"


def _mappings(value: t.Any) -> list[Values]:
    return [each for each in value if isinstance(each, t.Mapping)] if isinstance(value, (list, tuple)) else []


def worker_url(server: Values, address: str) -> str:
    """The URL under which routers know this server. ``address``: how its host is reached, where it listens on all."""
    if server.get("worker_url"):
        return str(parse_url(str(server["worker_url"])))
    host = str(server.get("host") or "127.0.0.1").strip("[]")
    flags = server.get("flags")
    names = {str(key).lstrip("-").replace("_", "-") for key in flags} if isinstance(flags, t.Mapping) else set()
    scheme = "https" if "ssl-certfile" in names else "http"
    return str(Url(scheme, address if host in ("0.0.0.0", "::") else host, int(server["port"])))


def routers_of(server: Values, routers: t.Sequence[Values]) -> list[Row]:
    """The routers in front of this server: all of the host's, or the one that it names."""
    if not server.get("router_url"):
        return [dict(router) for router in routers]
    wanted = parse_url(str(server["router_url"])).place
    found = [dict(router) for router in routers if parse_url(str(router["url"])).place == wanted]
    return found or [{"url": str(server["router_url"])}]


def wish(server: Values, routers: t.Sequence[Values], hooks: t.Sequence[Values], address: str) -> Row:
    """The arguments of router_worker for one server; ``routers`` and ``hooks`` are empty where nobody sends to it.

    ``out``: the state that takes it out. Where its requests are counted by connections that is done on its own host,
    by the eviction's rung drain; the routers are then only made to let go.
    """
    drain = server.get("drain") or {}
    how = drain.get("in_flight") or "auto"
    worker = {
        "url": worker_url(server, address),
        "aliases": list(server.get("worker_aliases") or ()),
        "api_key": server.get("api_key"),
        "give_key": bool(server.get("worker_give_key")),
        "settings": dict(server.get("worker_settings") or {}),
    }
    return {
        "routers": routers_of(server, routers),
        "workers": [worker],
        "hooks": [dict(hook) for hook in hooks],
        "out": "drained" if how in ("auto", "loads") else "absent",
        "drain_deadline_s": drain.get("deadline_s"),
    }


def net_s(wished: Values, deadlines: Values) -> int:
    """Seconds above the module's own deadlines, after which a task is given up."""
    looks = 6 * len(wished["routers"]) * (float(deadlines["request"]) + 1)
    hooks = sum(float(hook.get("deadline_s") or 60) + 2 for hook in wished["hooks"])
    waits = float(deadlines["removed"]) + float(deadlines["drain"]) + float(deadlines["healthy"])
    return int(looks + hooks + waits + 120)


def answer(raw: Values, hooks_only: bool = False) -> Row:
    """What came of a call, for the plays: {} where nothing was asked.

    ``problem``: one sentence, empty where there is none. ``present``: whether every router calls the server healthy,
    and every hook that was asked has it; None where one can't be asked, or where there are but hooks that tell nothing.
    ``anywhere``: whether any of them still lists it, or may.
    """
    if not raw or raw.get("skipped"):
        return {}
    verdict = str(raw.get("verdict") or "unknown")
    problems = [str(one) for one in items(raw, "problems")]
    problem = "; ".join(problems) if problems else "" if raw.get("verdict") else str(raw.get("msg") or "no answer")
    routers, hooks = rows(raw, "routers"), rows(raw, "hooks")
    states = [_state(worker, "after") for router in routers for worker in rows(router, "workers")]
    states += [_hook_state(hook) for hook in hooks if hook.get("action") == "list"]
    # Who answers with something else than a list has not told who is there.
    states += [UNKNOWN for each in (raw.get("routers"), raw.get("hooks")) if not isinstance(each or [], (list, tuple))]
    return {
        "verdict": verdict,
        "problem": problem,
        "present": _present(states),
        "anywhere": any(state != ABSENT for state in states) or (not states and not hooks_only and bool(problem)),
        "drained": raw.get("drained"),
        "routers": routers,
        "hooks": hooks,
        "plan": items(raw, "plan"),
        "changed": bool(raw.get("changed")),
        "seconds": raw.get("seconds"),
    }


def _state(worker: Values, when: str) -> str:
    """``when``: before or after."""
    return str(mapping(worker, when).get("state") or UNKNOWN)


def _seconds(result: Values) -> str:
    told = figure(result.get("seconds"))
    return "? s" if told is None else f"{told:.1f} s"


def _hook_state(hook: Values) -> str:
    missing = hook.get("missing")
    return UNKNOWN if missing is None else ABSENT if missing else HEALTHY


def _present(states: t.Sequence[str]) -> t.Optional[bool]:
    if not states or UNKNOWN in states:
        return None
    return all(state == HEALTHY for state in states)


def lines(answered: Values) -> list[str]:
    """For people: each router with before and after, and what was drained."""
    text = []
    for router in rows(answered, "routers"):
        for worker in rows(router, "workers"):
            before, after = _state(worker, "before"), _state(worker, "after")
            change = after if before == after else f"{before} -> {after}"
            text.append(f"router {router.get('name')}: {worker.get('url')} {change}")
    drained = mapping(answered, "drained")
    if drained:
        cut = "unknown" if drained.get("cut") is None else drained["cut"]
        text.append(f"drained: {drained.get('in_flight_at_start')} in flight, {cut} cut off, {_seconds(drained)}")
    for hook in rows(answered, "hooks"):
        text.append(f"hook {hook.get('name')} ({hook.get('action')}): {hook.get('result')}, {_seconds(hook)}")
    return text
