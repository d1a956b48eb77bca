# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Readings that can hang, with a deadline: a command line whose process is locked, a venv on a dead file server."""

from __future__ import annotations

import typing as t

from ..errors import CleanSlateError
from ..model import Process
from ..sglang.install import Install, find_install
from ..sglang.option_table import OptionTable
from ..sglang.options import read_options
from ..sglang.rules import Rule, read_rules
from ..sglang.sources import Package
from ..spawn import fetch_bounded
from .procfs import read_process, read_processes
from .servers import LaunchedServer, read_launched

READ_DEADLINE_S = 30.0
_UNKNOWN = LaunchedServer(None, None, None, None, None)


def fetch_processes(proc: str = "/proc", deadline_s: float = READ_DEADLINE_S) -> dict[int, Process]:
    """All processes. Raises CleanSlateError where they can't be read in time."""
    found = _fetch(lambda: read_processes(proc), "the processes' command lines", deadline_s)
    return t.cast("dict[int, Process]", found)


def fetch_process(pid: int, proc: str = "/proc", deadline_s: float = READ_DEADLINE_S) -> t.Optional[Process]:
    """One process, None when it is gone. Raises CleanSlateError where it can't be read in time."""
    found = _fetch(lambda: read_process(pid, proc), f"the process {pid}", deadline_s)
    return t.cast("t.Optional[Process]", found)


def fetch_install(
    python: str, python_path: str = "", deadline_s: float = READ_DEADLINE_S
) -> tuple[t.Optional[Install], t.Optional[OptionTable]]:
    """An interpreter's SGLang and its options. Raises CleanSlateError where they can't be read in time."""

    def read() -> tuple[t.Optional[Install], t.Optional[OptionTable]]:
        install = find_install(python, python_path)
        return install, None if install is None or install.package is None else read_options(install.package)

    found = _fetch(read, f"the SGLang of {python}", deadline_s)
    return t.cast("tuple[t.Optional[Install], t.Optional[OptionTable]]", found)


Sources = tuple[t.Optional[Install], t.Optional[OptionTable], tuple[Rule, ...]]


def fetch_sources(python: str, python_path: str = "", deadline_s: float = READ_DEADLINE_S) -> Sources:
    """Like fetch_install, with what the installed SGLang's own checks refuse, as far as its sources tell."""

    def read() -> Sources:
        install = find_install(python, python_path)
        if install is None or install.package is None:
            return install, None, ()
        package = Package(install.package)
        table = read_options(install.package, package)
        return install, table, () if table is None else read_rules(install.package, table, package)

    return t.cast(Sources, _fetch(read, f"the SGLang of {python}", deadline_s))


def fetch_launched(
    process: Process, proc: str = "/proc", deadline_s: float = READ_DEADLINE_S
) -> tuple[LaunchedServer, t.Optional[str]]:
    """How a leader was launched, and why that isn't known (then all of it is None)."""
    try:
        # Links of a container's must lead nowhere but into it.
        found = _fetch(lambda: read_launched(process, proc, True), f"how pid {process.pid} was launched", deadline_s)
    except CleanSlateError as error:
        return _UNKNOWN, str(error)
    return t.cast(LaunchedServer, found), None


def _fetch(read: t.Callable[[], t.Any], what: str, deadline_s: float) -> t.Any:
    called = fetch_bounded(read, deadline_s)
    if called.timed_out:
        raise CleanSlateError(
            f"{what}: not read within {deadline_s:g} s; a process is locked, or a file server does not answer"
        )
    if called.error is not None:
        raise CleanSlateError(f"{what}: {called.error}")
    return called.value
