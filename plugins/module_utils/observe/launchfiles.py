# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a launch left on the disk, as it lies there now, and the unit that systemd would start. Every reading is
bounded."""

from __future__ import annotations

import os
import stat
import typing as t
from dataclasses import dataclass, field

from ..errors import CleanSlateError
from ..sglang.files import open_regular
from ..sglang.kept import REQUEST, UNIT, KeptRequest, environment_of, parse_request
from ..sglang.record import Record, opened_launch
from ..sglang.record_files import read_config_text, read_text
from ..spawn import fetch_bounded, run_bounded
from .systemd import has_systemd

FILES_DEADLINE_S = 20.0
SYSTEMCTL_DEADLINE_S = 10.0
_UNIT_LIMIT = 1 << 20
_CONFIG, _ENV = "config.yaml", "env"
UNIT_DIRS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
# `systemctl set-property` writes here.
_DROP_IN_DIRS = ("/etc/systemd/system.control", "/run/systemd/system.control", *UNIT_DIRS)


@dataclass(frozen=True)
class LaunchFiles:
    """``config``: the text of config.yaml. ``environment``: of the file env. ``unit``: the unit's text as written.
    ``times``: when config.yaml and env were last written. ``missing``: those of them that are gone.
    ``problems``: what could not be read or used; its value is then None."""

    config: t.Optional[str] = None
    environment: t.Optional[t.Mapping[str, str]] = None
    request: t.Optional[KeptRequest] = None
    unit: t.Optional[str] = None
    times: t.Mapping[str, float] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def fetch_launch_files(state_dir: str, record: Record, deadline_s: float = FILES_DEADLINE_S) -> LaunchFiles:
    """The files of the record's launch. Never raises for what lies there."""
    called = fetch_bounded(lambda: read_launch_files(state_dir, record), deadline_s)
    if called.ok:
        return t.cast(LaunchFiles, called.value)
    why = called.error or f"not read within {deadline_s:g} s"
    return LaunchFiles(problems=(f"the files of launch {record.launch_id}: {why}",))


def read_launch_files(state_dir: str, record: Record) -> LaunchFiles:
    """The same without a deadline."""
    where = (state_dir, record.name, record.launch_id)
    problems: list[str] = []

    def text_of(file: str) -> t.Optional[str]:
        try:
            return read_config_text(*where) if file == _CONFIG else read_text(*where, file)
        except CleanSlateError as error:
            problems.append(str(error))
            return None

    texts = {file: text_of(file) for file in (_CONFIG, _ENV, REQUEST, UNIT)}
    environment = request = None
    try:
        environment = None if texts[_ENV] is None else environment_of(texts[_ENV] or "")
    except ValueError as error:
        problems.append(f"the environment of launch {record.launch_id} can't be used: {error}")
    try:
        request = None if texts[REQUEST] is None else parse_request(texts[REQUEST] or "")
    except (ValueError, RecursionError) as error:
        problems.append(f"{REQUEST} of launch {record.launch_id} can't be used: it {error}")
    times = _times(where)
    return LaunchFiles(
        config=texts[_CONFIG],
        environment=environment,
        request=request,
        unit=texts[UNIT],
        times=times,
        missing=() if problems else tuple(file for file in (_CONFIG, _ENV) if file not in times),
        problems=tuple(problems),
    )


def _times(where: tuple[str, str, str]) -> dict[str, float]:
    found = {}
    try:
        with opened_launch(*where) as dir_fd:
            for file in (_CONFIG, _ENV):
                try:
                    found[file] = os.stat(file, dir_fd=dir_fd, follow_symlinks=False).st_mtime
                except FileNotFoundError:
                    continue
    except (OSError, CleanSlateError):
        return {}  # read_text has said so
    return found


# --- the unit ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitFiles:
    """The unit as systemd would load it. ``path`` None: there is no file. ``text``: with the path, None for a link (a
    masked unit is one). ``enabled`` None: not known. ``problem``: why nothing is known."""

    path: t.Optional[str] = None
    text: t.Optional[str] = None
    drop_ins: tuple[str, ...] = ()
    enabled: t.Optional[bool] = None
    problem: t.Optional[str] = None


def fetch_unit_files(
    unit: str, unit_dir: t.Optional[str] = None, deadline_s: float = FILES_DEADLINE_S, systemctl: str = "systemctl"
) -> UnitFiles:
    """By systemd where it runs; else as its search path has them. ``unit_dir``: where the launch wrote it."""
    shown = _asked(unit, systemctl) if has_systemd() else None
    called = fetch_bounded(lambda: read_unit_files(unit, unit_dir, shown), deadline_s)
    if called.ok:
        return t.cast(UnitFiles, called.value)
    return UnitFiles(problem=f"{unit}: {called.error or f'its files were not read within {deadline_s:g} s'}")


def _asked(unit: str, systemctl: str) -> t.Optional[dict[str, str]]:
    fields = "FragmentPath,DropInPaths,UnitFileState,LoadState"
    done = run_bounded([systemctl, "show", f"--property={fields}", "--", unit], SYSTEMCTL_DEADLINE_S)
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line) if done.ok else None


def read_unit_files(unit: str, unit_dir: t.Optional[str], shown: t.Optional[t.Mapping[str, str]] = None) -> UnitFiles:
    """``shown``: what `systemctl show` says; None: it was not asked, or did not answer."""
    if shown is None:
        path: t.Optional[str] = _first(unit, [*UNIT_DIRS, *([unit_dir] if unit_dir else [])])
        drop_ins = _drop_ins(unit, [*_DROP_IN_DIRS, *([unit_dir] if unit_dir else [])])
        enabled = None
    else:
        # systemd only knows what it has loaded: a file that was removed since is still its FragmentPath.
        path = shown.get("FragmentPath") or _first(unit, UNIT_DIRS)
        drop_ins = [name for name in shown.get("DropInPaths", "").split() if _is_own(name)]
        drop_ins += [name for name in _drop_ins(unit, _DROP_IN_DIRS) if name not in drop_ins]
        drop_ins = [name for name in drop_ins if os.path.lexists(name)]
        state = shown.get("UnitFileState", "")
        enabled = {"enabled": True, "enabled-runtime": True, "disabled": False, "static": False}.get(state)
    if path is None or not os.path.lexists(path):
        return UnitFiles(None, None, tuple(drop_ins), enabled)
    try:
        if stat.S_ISLNK(os.lstat(path).st_mode):
            return UnitFiles(path, f"a link to {os.readlink(path)}", tuple(drop_ins), enabled)
        with os.fdopen(open_regular(path), encoding="utf-8", errors="replace") as stream:
            return UnitFiles(path, stream.read(_UNIT_LIMIT), tuple(drop_ins), enabled)
    except OSError as error:
        return UnitFiles(path, None, tuple(drop_ins), enabled, f"{path} can't be read: {error.strerror}")


def _first(unit: str, folders: t.Iterable[str]) -> t.Optional[str]:
    return next((path for path in (os.path.join(folder, unit) for folder in folders) if os.path.lexists(path)), None)


def _drop_ins(unit: str, folders: t.Sequence[str]) -> list[str]:
    """Settings beside the unit's file: for itself, and for all units whose names begin alike up to a dash."""
    found: dict[str, list[str]] = {}
    for place in (os.path.join(folder, f"{name}.d") for name in _drop_in_names(unit) for folder in folders):
        try:
            names = sorted(os.listdir(place))
        except OSError:
            continue
        # /lib is a link to /usr/lib nearly everywhere.
        found.setdefault(os.path.realpath(place), [os.path.join(place, one) for one in names if one.endswith(".conf")])
    return [path for paths in found.values() for path in paths]


def _drop_in_names(unit: str) -> t.Iterator[str]:
    """sglang-chat.service: also sglang-.service. Not service: that is the system's, for every service."""
    yield unit
    stem, dot, kind = unit.rpartition(".")
    while "-" in stem:
        stem = stem[:-1] if stem.endswith("-") else stem
        if "-" not in stem:
            return
        stem = stem[: stem.rindex("-") + 1]
        yield stem + dot + kind


def _is_own(path: str) -> bool:
    return os.path.basename(os.path.dirname(path)) != "service.d"
