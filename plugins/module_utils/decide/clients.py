# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What keeps sending to a server, and whether it may be held. Pure: what was declared and what was seen in, words out.

A client is a systemd unit, or a process that a pid file names and that runs the declared program. Whatever is not
proved to be that is left alone: a pid file may be old, its pid may be another process by now, and a unit's name may be
an alias of one that people need to get in.
"""

from __future__ import annotations

import os
import re
import typing as t
from dataclasses import dataclass

from ..cgroups import unit_of
from ..errors import CleanSlateError
from ..model import Process
from ..sglang.cmdline import is_leader, worker_role
from .kinship import descendants
from .ports import program_of
from .protected import protected_why

UNIT_NAME = re.compile(r"^[A-Za-z0-9:_.\\@-]{1,200}\.(?:service|timer)$")  # no '*': systemctl takes patterns
CLIENT_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}$")
ACTIONS = ("stop", "pause")
# Programs that run anything: that such a process has one of these names proves nothing.
INTERPRETER = re.compile(
    r"^(?:python[0-9.]*t?|pypy[0-9.]*|perl[0-9.]*|ruby[0-9.]*|node(?:js)?|deno|bun|java|php[0-9.]*|lua[0-9.]*|uv|uvx|env"
    r"|sh|bash|dash|zsh|ksh|fish|busybox|nohup|setsid|timeout|nice|stdbuf|tini|dumb-init)$"
)
PID_FILE_SLACK_S = 5.0  # a process is there before its pid file is written; clocks of files are coarse
# Ways into a machine, and what holds it together. Aliases are looked through: it is systemd's own name that counts.
_NEVER_UNITS = re.compile(
    r"^(?:ssh|sshd|ssh@.*|sshd@.*|sssd|nslcd|dbus|dbus-broker|user@.*|user-runtime-dir@.*|getty@.*|serial-getty@.*|"
    r"console-getty|container-getty@.*|systemd-.*|polkit|init|rescue|emergency|network|networking|NetworkManager|"
    r"tailscaled|wg-quick@.*|openvpn.*|docker|containerd|podman|crio|kubelet|lxc.*|pve.*|qemu.*|"
    r"nvidia-.*|dcgm.*|nv-.*|cron|crond|atd|salt-minion|puppet)\.(?:service|timer)$"
)


@dataclass(frozen=True)
class Client:
    """What was declared: a ``unit``, or a ``pid_file`` with the ``program`` that its process must run.

    ``host`` is the caller's, and only handed back. ``after``: release or leave, what is to become of it afterwards.
    """

    name: str
    action: str = "stop"
    unit: t.Optional[str] = None
    pid_file: t.Optional[str] = None
    program: t.Optional[str] = None
    host: t.Optional[str] = None
    after: str = "release"


@dataclass(frozen=True)
class UnitView:
    """What systemd says of a unit. ``name`` is its own one, whatever alias was asked for.

    ``stops_too``: units that systemd stops with it. ``triggers``: what may start it again (timers, sockets, paths).
    ``frozen``: None where this systemd knows no freezer. ``once``: it does its work and ends (Type=oneshot).
    """

    name: str
    load_state: str
    active_state: str
    main_pid: int = 0
    control_group: str = ""
    invocation: str = ""
    frozen: t.Optional[bool] = None
    may_stop: bool = True
    watchdog: bool = False
    once: bool = False
    stops_too: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether there is something to hold: also a unit that systemd is about to start again."""
        return self.active_state not in ("inactive", "failed")


@dataclass(frozen=True)
class PidFile:
    """A pid file as it was read. ``problem``: why it tells nothing. ``written_at``: seconds since 1970."""

    pid: t.Optional[int] = None
    uid: t.Optional[int] = None
    written_at: t.Optional[float] = None
    problem: t.Optional[str] = None


@dataclass(frozen=True)
class Scene:
    """What was seen around the clients. ``now`` and ``uptime_s`` are of the same moment."""

    processes: t.Mapping[int, Process]
    own_pids: frozenset[int]
    protect: tuple[str, ...]
    now: float
    uptime_s: t.Optional[float]
    ticks_per_s: int = 100

    def started_at(self, process: Process) -> t.Optional[float]:
        """When a process started, by the clock of files."""
        return None if self.uptime_s is None else self.now - self.uptime_s + process.start_ticks / self.ticks_per_s

    def objection(self, process: Process) -> t.Optional[str]:
        """Why nobody may touch this process, whatever was declared."""
        unit = unit_of(process)
        why = protected_why(process, self.own_pids, self.protect, {process.pid: unit} if unit else {})
        if why is not None:
            return why
        if is_leader(process.argv) or worker_role(process.title) is not None:
            return "an SGLang server itself, which is no client"
        return None


def parse_clients(raw: t.Sequence[t.Mapping[str, t.Any]]) -> tuple[Client, ...]:
    """The declared clients.

    Raises:
        CleanSlateError: one makes no sense; says which and why.
    """
    clients = tuple(_parse_client(entry) for entry in raw)
    names = [client.name for client in clients]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CleanSlateError(f"clients: {', '.join(twice)} is named more than once")
    return clients


def _parse_client(entry: t.Mapping[str, t.Any]) -> Client:
    values = {key: entry.get(key) for key in ("unit", "pid_file", "program", "host")}
    after = str(entry.get("after") or "release")
    client = Client(str(entry.get("name") or ""), str(entry.get("action") or "stop"), after=after, **values)
    label = f"clients: {client.name[:64]!r}"
    if not CLIENT_NAME.fullmatch(client.name):
        raise CleanSlateError(f"{label} is no name: letters, digits, blanks, '.', '_', '-', at most 64")
    if client.action not in ACTIONS:
        raise CleanSlateError(f"{label}: action is {client.action!r}; it must be {' or '.join(ACTIONS)}")
    if (client.unit is None) == (client.pid_file is None):
        raise CleanSlateError(f"{label} needs either unit, or pid_file with program, and not both")
    if (client.pid_file is None) != (client.program is None):
        raise CleanSlateError(f"{label}: pid_file and program belong together: a pid alone proves nothing")
    problem = _unit_name_problem(client) if client.unit is not None else _program_problem(client)
    if problem:
        raise CleanSlateError(f"{label}: {problem}")
    return client


def _unit_name_problem(client: Client) -> t.Optional[str]:
    unit = client.unit or ""
    if not UNIT_NAME.fullmatch(unit) or unit.startswith("-"):
        return f"unit is {unit[:80]!r}; it must be the whole name of one .service or .timer, without '*'"
    if unit.endswith(".timer") and client.action == "pause":
        return f"unit {unit} is a timer, which has nothing to pause; use action stop"
    return None


def _program_problem(client: Client) -> t.Optional[str]:
    program, path = client.program or "", client.pid_file or ""
    if not path.startswith("/"):
        return f"pid_file is {path[:80]!r}; it must be an absolute path"
    if not program or "/" in program or not program.isprintable():
        return f"program is {program[:80]!r}; it must be a file's name, without its folder"
    if INTERPRETER.match(program):
        return f"program {program} runs anything, so it proves nothing; name the script (or module) that it runs"
    return None


def programs_of(process: Process) -> frozenset[str]:
    """The names under which a process may be declared: its file, its argv[0], and what an interpreter runs.

    An argument of any other program is none: an editor that has the script open does not run it.
    """
    names = set()
    exe = (process.exe or "").replace(" (deleted)", "")
    first = process.argv[0] if process.argv else ""
    names |= {os.path.basename(exe), os.path.basename(first.split(" ")[0])}
    if INTERPRETER.match(os.path.basename(exe) or os.path.basename(first)):
        names |= set(_script_names(process.argv[1:]))
    return frozenset(name for name in names if name and not INTERPRETER.match(name))


def _script_names(words: t.Sequence[str]) -> t.Iterator[str]:
    """The script or module that an interpreter was given: the first word that is no option of its own."""
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word == "-m" and waiting:
            yield from (waiting[0], waiting[0].split(".")[-1])
            return
        if word in ("-W", "-X") and waiting:  # options of python that take a word
            waiting.pop(0)
        elif word in ("-c", "-e", "-") or not word:
            return
        elif not word.startswith("-"):
            yield os.path.basename(word)
            return


def judge_process(client: Client, file: PidFile, scene: Scene) -> tuple[t.Optional[Process], t.Optional[str]]:
    """(the client's process, why it must not be touched). Neither: it does not run."""
    if file.problem is not None:
        return None, file.problem
    process = None if file.pid is None else scene.processes.get(file.pid)
    if process is None or process.dead:
        return None, None
    shown = f"pid {process.pid} ({program_of(process)})"
    if client.program not in programs_of(process):
        return None, f"{client.pid_file} names {shown}, which does not run {client.program}: the pid was used again"
    why = scene.objection(process)
    if why is not None:
        return None, f"{client.pid_file} names {shown}: {why}"
    if file.uid not in (0, process.uid):
        return None, f"{client.pid_file} belongs to uid {file.uid}, {shown} to uid {process.uid}: it may name anybody"
    started = scene.started_at(process)
    if started is None or file.written_at is None:
        return None, f"since when {shown} runs is not known"
    if started > file.written_at + PID_FILE_SLACK_S:
        late = started - file.written_at
        return None, (
            f"{shown} started {late:.0f} s after {client.pid_file} was written, so the pid was used again (or the "
            "clock was set)"
        )
    return process, None


def judge_family(process: Process, scene: Scene) -> tuple[tuple[Process, ...], t.Optional[str]]:
    """(the process and all that descend from it, why they must not be paused)."""
    family = [process, *(scene.processes[pid] for pid in descendants(process.pid, scene.processes))]
    living = tuple(one for one in family if not one.dead)
    return living, _first_objection(living, scene)


def judge_unit(client: Client, unit: UnitView, scene: Scene) -> tuple[tuple[Process, ...], t.Optional[str]]:
    """(who runs in the unit, why it must not be touched)."""
    if unit.load_state not in ("loaded", "not-found"):
        return (), f"systemd says that {client.unit} is {unit.load_state}"
    alias = "" if unit.name == client.unit else f" (which is {unit.name})"
    if not UNIT_NAME.fullmatch(unit.name) or _NEVER_UNITS.match(unit.name):
        return (), f"{client.unit}{alias} is a unit that the machine, or the way into it, needs"
    if unit.name in scene.protect or client.unit in scene.protect:
        return (), f"{client.unit}{alias} is protected by the operator"
    if not unit.runs:
        return (), None
    if unit.control_group in ("/", "") and unit.main_pid:
        return (), f"systemd does not tell who runs in {client.unit}{alias}"
    members = members_of(unit, scene.processes)
    if unit.main_pid and unit.main_pid not in {one.pid for one in members}:
        return (), f"{client.unit}{alias} runs pid {unit.main_pid}, which is not to be seen in its cgroup from here"
    why = _first_objection(members, scene)
    if why is not None:
        return members, f"{client.unit}{alias}: {why}"
    if client.action == "pause":
        why = f"{client.unit} has a watchdog, which would end it while it is paused; use action stop"
        return members, why if unit.watchdog else None
    if not unit.may_stop:
        return members, f"{client.unit}{alias} refuses to be stopped by hand (RefuseManualStop)"
    others = [name for name in unit.stops_too if not name.endswith(".target")]
    if others:
        return members, f"systemd would stop {', '.join(others)} with {client.unit}{alias}; use action pause"
    return members, None


def members_of(unit: UnitView, processes: t.Mapping[int, Process]) -> tuple[Process, ...]:
    """Everybody in the unit's cgroup and those below it."""
    group = unit.control_group.rstrip("/")
    if not group:
        return ()
    inside = (
        one for one in processes.values() if any(path == group or path.startswith(group + "/") for path in one.cgroups)
    )
    return tuple(sorted((one for one in inside if not one.dead), key=lambda one: one.pid))


def _first_objection(members: t.Sequence[Process], scene: Scene) -> t.Optional[str]:
    for one in members:
        why = scene.objection(one)
        if why is not None:
            return f"pid {one.pid} ({program_of(one)}) in it must be left alone: {why}"
    return None


def owning_unit(process: Process, units: t.Mapping[str, UnitView]) -> t.Optional[str]:
    """The service that would start this process again, by systemd's own word; ``units``: those that were asked for."""
    unit = unit_of(process)
    view = units.get(unit) if unit is not None else None
    return view.name if view is not None and view.main_pid == process.pid else None
