# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a running leader tells of itself: its interpreter, its SGLang, its flags as launched. Nothing of it is run."""

from __future__ import annotations

import os
import typing as t

from ..model import Process
from ..sglang.cmdline import LaunchedFlags, launched_flags
from ..sglang.install import Install, find_install
from ..sglang.logs import read_ends
from ..sglang.option_table import OptionTable
from ..sglang.options import read_options
from .inside import enter_root
from .procfs import read_environment


class LaunchedServer(t.NamedTuple):
    """``environment`` None: it can't be read. ``flags`` None: no leader. ``options`` None: its SGLang can't be read.
    ``python``: its interpreter as an absolute path. ``config_mtime``: when its configuration file was last written."""

    environment: t.Optional[dict[str, str]]
    cwd: t.Optional[str]
    install: t.Optional[Install]
    options: t.Optional[OptionTable]
    flags: t.Optional[LaunchedFlags]
    python: t.Optional[str] = None
    config_mtime: t.Optional[float] = None


def read_launched(process: Process, proc: str = "/proc", enter: bool = False) -> LaunchedServer:
    """Everything about how this leader was launched, seen through its own root directory (it may live in a
    container). ``enter``: make that root our own, so that no link of a container leads out of it; for a forked child
    alone."""
    environment = read_environment(process.pid, proc)
    cwd = _link(f"{proc}/{process.pid}/cwd")
    root = enter_root(process.pid, process.start_ticks, proc) if enter else f"{proc}/{process.pid}/root"
    python = _interpreter(process, environment or {}, cwd, root)
    install = find_install(python, (environment or {}).get("PYTHONPATH", ""), root) if python else None
    options = None if install is None or install.package is None else read_options(root + install.package)

    def absolute(path: str) -> t.Optional[str]:
        return path if path.startswith("/") else f"{cwd}/{path}" if cwd else None

    def read_config_text(path: str) -> t.Optional[str]:
        place = absolute(path)
        return None if place is None else read_ends(root + place)

    flags = launched_flags(process.argv, read_config_text, options, process.argv_cut)
    config = None if flags is None or flags.config_path is None else absolute(flags.config_path)
    mtime = None if config is None else _mtime(root + config)
    return LaunchedServer(environment, cwd, install, options, flags, python, mtime)


def same_network(pid: int, proc: str = "/proc") -> t.Optional[bool]:
    """Whether this process's ports are ours; None if that can't be read."""
    own, other = _link(f"{proc}/self/ns/net"), _link(f"{proc}/{pid}/ns/net")
    return None if own is None or other is None else own == other


def _interpreter(
    process: Process, environment: t.Mapping[str, str], cwd: t.Optional[str], root: str
) -> t.Optional[str]:
    """argv[0] as an absolute path: the link in a virtual environment names it, /proc/PID/exe only the base Python."""
    word = process.argv[0] if process.argv else ""
    if word.startswith("/"):
        return word
    if "/" in word:
        return None if cwd is None else os.path.normpath(os.path.join(cwd, word))
    for folder in environment.get("PATH", "").split(":"):
        if folder.startswith("/") and os.path.lexists(f"{root}{folder}/{word}"):
            return f"{folder}/{word}"
    return process.exe


def _mtime(path: str) -> t.Optional[float]:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


def _link(path: str) -> t.Optional[str]:
    try:
        return os.readlink(path)
    except OSError:
        return None
