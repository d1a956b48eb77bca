# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One server: its settings in the inventory against its files, its process and what it says of itself. Pure."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field

from ..sglang import flags as flag_tools
from ..sglang.cmdline import LaunchedFlags
from ..sglang.options import OptionTable
from ..sglang.redact import MASK, is_secret_name, is_secret_variable
from ..sglang.running import RunningFlags, judge_flags
from ..sglang.servers import Wanted, compare
from .drift import Row

RELAUNCH = "relaunch it: playbooks/relaunch.yml -e server={name}"


@dataclass(frozen=True)
class WantedServer:
    """A server's settings in the inventory. ``gpus``: UUIDs or indices; empty: all; None: not judged.
    ``secret_names``: variables that are given as secrets; they are never compared."""

    name: str
    flags: t.Mapping[str, t.Any]
    host: t.Optional[str] = None
    port: t.Optional[int] = None
    environment: t.Mapping[str, str] = field(default_factory=dict)
    secret_names: frozenset[str] = frozenset()
    gpus: t.Optional[tuple[str, ...]] = None
    python: t.Optional[str] = None
    user: t.Optional[str] = None

    @property
    def all_flags(self) -> dict[str, t.Any]:
        """The flags with host and port, as a launch has them."""
        own = {name: value for name, value in (("host", self.host), ("port", self.port)) if value is not None}
        return {**flag_tools.check(self.flags), **own}


@dataclass(frozen=True)
class Place:
    """Flags, environment, GPUs, interpreter and user as one place shows them. None: not known (``problem``)."""

    flags: t.Optional[LaunchedFlags]
    environment: t.Optional[t.Mapping[str, str]] = None
    gpus_known: bool = False
    gpus: t.Optional[tuple[str, ...]] = None
    python: t.Optional[str] = None
    user: t.Optional[str] = None
    problem: t.Optional[str] = None


@dataclass(frozen=True)
class SeenServer:
    """What was seen of one server.

    ``file``: its launch's files; None: it was never launched from here. ``process``: its leader; None: none runs.
    ``by_record``: whether that leader is the very one that was launched. ``stranger``: who else listens on its port.
    ``info``: the answer of /server_info; ``health``: ok, refused, timeout, broken, unhealthy, or None: not asked.
    ``stopped``: ranks that are stopped (state T) or dead. ``changed_after_start``: files of its launch that were.
    ``units``: (unit_file or unit_override, wanted, found). ``versions``: (at launch, installed now, by the engine).
    """

    file: t.Optional[Place] = None
    process: t.Optional[Place] = None
    pid: t.Optional[int] = None
    by_record: bool = False
    stranger: t.Optional[str] = None
    options: t.Optional[OptionTable] = None
    info: t.Optional[t.Mapping[str, t.Any]] = None
    info_problem: t.Optional[str] = None
    health: t.Optional[str] = None
    health_words: t.Optional[str] = None
    listens: t.Optional[bool] = None
    stopped: tuple[str, ...] = ()
    changed_after_start: tuple[str, ...] = ()
    units: tuple[tuple[str, t.Any, t.Any], ...] = ()
    versions: tuple[t.Optional[str], t.Optional[str], t.Optional[str]] = (None, None, None)
    problems: tuple[str, ...] = ()


def judge_server(wanted: WantedServer, seen: SeenServer) -> tuple[tuple[Row, ...], int]:
    """(rows, still one for each place: drift.merge joins them; how many flags the engine was asked for)."""
    fix = RELAUNCH.format(name=wanted.name)
    rows: list[Row] = []

    def add(item: str, want: t.Any, found: t.Any, where: str, severity: str, remedy: str = fix) -> None:
        rows.append(Row(wanted.name, item, want, found, where, severity, remedy))

    def unknown(item: str, why: str, where: str) -> None:
        remedy = "look at it as root; nothing was changed"
        rows.append(Row(wanted.name, item, None, why, where, "warning", remedy, "unknown"))

    if seen.process is None:
        if seen.stranger is not None:
            add("not_ours", "this server on its port", seen.stranger, "process", "critical")
        else:
            add("not_running", "running", "no process", "process", "critical")
    for where, place in (("file", seen.file), ("process", seen.process)):
        if place is not None:
            _compare_place(wanted, place, seen.options, where, add, unknown)
    compared = _compare_engine(wanted, seen, add, unknown)
    if seen.process is not None:
        _judge_running(seen, add, unknown)
    for item, want, found in seen.units:
        add(item, want, found, "file", "warning")
    then, installed, told = seen.versions
    for version, where in ((installed, "file"), (told, "engine")):
        if then is not None and version is not None and version != then:
            add("sglang_version", then, version, where, "warning")
    for problem in seen.problems:
        unknown("unreadable", problem, "host")
    return tuple(rows), compared


Add = t.Callable[..., None]


def _compare_place(
    wanted: WantedServer, place: Place, options: t.Optional[OptionTable], where: str, add: Add, unknown: Add
) -> None:
    if place.flags is None or not place.flags.complete:
        known = () if place.flags is None else place.flags.problems
        unknown("flags", place.problem or "; ".join(known) or "its flags can't be read", where)
    if place.environment is None:
        unknown("environment", place.problem or "its environment can't be read", where)
    flags = {name: value for name, value in wanted.all_flags.items() if not _secret(name, value)}
    found = compare(
        Wanted(flags, dict(wanted.environment), wanted.gpus),
        _without_secrets(place.flags),
        _own_environment(wanted, place.environment),
        place.gpus,
        place.gpus_known,
        options,
    )
    for row in found.differences:
        kind, _dot, name = row.item.partition(".")
        if kind == "gpus":
            add("gpus", row.wanted, row.found, where, "critical")
        elif kind == "environment":
            add(f"env:{name}", _shown(name, row.wanted), _shown(name, row.found), where, "warning")
        elif place.flags is not None and (place.flags.complete or row.found is not None):
            add(f"flag:{name}", row.wanted, row.found, where, "critical")
    for item, want, seen in (("python", wanted.python, place.python), ("user", wanted.user, place.user)):
        if want is not None and seen is not None and want != seen:
            add(item, want, seen, where, "critical" if item == "user" else "warning")


def _compare_engine(wanted: WantedServer, seen: SeenServer, add: Add, unknown: Add) -> int:
    """Only what the user set, and of it only what SGLang does not set itself."""
    if seen.info is None:
        if seen.info_problem is not None:
            unknown("engine", f"/server_info: {seen.info_problem}", "engine")
        return 0
    judged = judge_flags(wanted.all_flags, RunningFlags(None, seen.options), seen.info)
    for row in judged.differences:
        add(f"flag:{row.item}", row.wanted, row.found, "engine", "critical")
    return judged.compared


def _judge_running(seen: SeenServer, add: Add, unknown: Add) -> None:
    if seen.stranger is not None:
        add("not_ours", "this server on its port", seen.stranger, "process", "critical")
    if not seen.by_record:
        add("restarted_by_hand", "the launch of the record", f"pid {seen.pid}", "process", "warning")
    if seen.changed_after_start:
        add("started_before_change", "started after its files", ", ".join(seen.changed_after_start), "file", "warning")
    if seen.stopped:
        add("hung", "every rank runs", "; ".join(seen.stopped), "process", "critical")
    elif seen.health in ("timeout", "unhealthy"):
        hung = seen.health == "timeout"
        add("hung" if hung else "unhealthy", "GET /health: 200", seen.health_words, "engine", "critical")
    elif seen.health not in (None, "ok"):
        unknown("health", seen.health_words or str(seen.health), "engine")
    elif seen.listens is False and seen.stranger is None:
        add("unhealthy", "listens on its port", "it does not listen", "process", "critical")


def _secret(name: str, value: t.Any) -> bool:
    return is_secret_name(flag_tools.normalise(str(name))) or MASK in str(value)


def _shown(name: str, value: t.Any) -> t.Any:
    return MASK if value is not None and is_secret_variable(name) else value


def _without_secrets(flags: t.Optional[LaunchedFlags]) -> t.Optional[LaunchedFlags]:
    if flags is None:
        return None
    plain = {name: value for name, value in flags.flags.items() if not _secret(name, value)}
    return LaunchedFlags(plain, flags.sources, flags.config_path, flags.complete, flags.problems)


def _own_environment(
    wanted: WantedServer, environment: t.Optional[t.Mapping[str, str]]
) -> t.Optional[dict[str, str]]:
    """Without the variables that come as secrets."""
    if environment is None:
        return None
    return {name: value for name, value in environment.items() if name not in wanted.secret_names}
