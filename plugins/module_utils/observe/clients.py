# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients as they are: systemd's word of a unit, what a pid file says, and the processes around."""

from __future__ import annotations

import os
import re
import stat
import time
import typing as t

from ..decide.clients import PidFile, Scene, UnitView
from ..sglang.files import open_regular
from ..spawn import call_bounded, run_bounded
from .bounded import fetch_processes
from .look import own_pids
from .procfs import read_uptime_s

UNIT_DEADLINE_S = 10.0
PID_FILE_DEADLINE_S = 5.0
_PID = re.compile(rb"\s*([1-9][0-9]{0,8})\s*(?:\n|$)")
_STOPS_TOO = ("RequiredBy", "BoundBy", "ConsistsOf")
_FIELDS = (
    *("Id", "LoadState", "ActiveState", "MainPID", "ControlGroup", "InvocationID", "FreezerState", "RefuseManualStop"),
    *("WatchdogUSec", "Type", "TriggeredBy", *_STOPS_TOO),
)
_NO_WATCHDOG = ("", "0", "infinity")


def read_scene(protect: t.Sequence[str] = ()) -> Scene:
    """Everybody on this machine, and the clocks. Raises CleanSlateError where a process can't be read in time."""
    processes = fetch_processes()
    return Scene(
        processes=processes,
        own_pids=own_pids(processes),
        protect=tuple(protect),
        now=time.time(),
        uptime_s=read_uptime_s(),
        ticks_per_s=os.sysconf("SC_CLK_TCK"),
    )


def read_client_unit(name: str, deadline_s: float = UNIT_DEADLINE_S) -> t.Union[UnitView, str]:
    """A unit, or why systemd does not tell about it."""
    done = run_bounded(["systemctl", "show", f"--property={','.join(_FIELDS)}", "--", name], deadline_s)
    if done.timed_out:
        return f"systemd gave no answer about {name} within {deadline_s:g} s"
    view = parse_client_unit(done.stdout) if done.ok else None
    if view is not None:
        return view
    return f"systemd does not tell about {name}: {done.error or ' '.join(done.stderr.split())[:200] or 'no answer'}"


def parse_client_unit(text: str) -> t.Optional[UnitView]:
    """The ``key=value`` lines of ``systemctl show``; None where what must be there is not."""
    values = dict(line.split("=", 1) for line in text.split("\n") if "=" in line)
    main_pid = values.get("MainPID", "0")
    told = all(values.get(key) for key in ("Id", "LoadState", "ActiveState"))
    if not told or not re.fullmatch("[0-9]{1,9}", main_pid):
        return None
    freezer = values.get("FreezerState")
    return UnitView(
        name=values["Id"],
        load_state=values["LoadState"],
        active_state=values["ActiveState"],
        main_pid=int(main_pid),
        control_group=values.get("ControlGroup", ""),
        invocation=values.get("InvocationID", ""),
        frozen=None if freezer is None else freezer == "frozen",
        may_stop=values.get("RefuseManualStop", "no") != "yes",
        watchdog=values.get("WatchdogUSec", "") not in _NO_WATCHDOG,
        once=values.get("Type") == "oneshot",
        stops_too=tuple(name for key in _STOPS_TOO for name in values.get(key, "").split()),
        triggers=tuple(values.get("TriggeredBy", "").split()),
    )


def active_units(names: t.Sequence[str]) -> tuple[str, ...]:
    """Those of these units that run; one of which nothing is known counts as running."""
    views = ((name, read_client_unit(name)) for name in names)
    return tuple(name for name, view in views if isinstance(view, str) or view.runs)


def read_pid_file(path: str) -> PidFile:
    """What a pid file says; a missing one names nobody. It may lie on a dead file server, so a child reads it."""
    called = call_bounded(lambda: _read_pid_file(path), PID_FILE_DEADLINE_S)
    if not called.ok:
        why = called.error or f"no answer within {PID_FILE_DEADLINE_S:g} s"
        return PidFile(problem=f"{path} could not be read: {why}")
    return PidFile(**called.value)


def _read_pid_file(path: str) -> dict[str, t.Any]:
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        return {"problem": f"{path} can't be read: {error.strerror}"}
    with os.fdopen(fd, "rb") as stream:
        status = os.fstat(fd)
        data = stream.read(4096)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return {"problem": f"{path} can be changed by others (mode {stat.S_IMODE(status.st_mode):04o})"}
    match = _PID.match(data)
    if match is None:
        return {"problem": f"{path} holds no process id in its first line"}
    return {"pid": int(match.group(1)), "uid": status.st_uid, "written_at": status.st_mtime}
