# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How much is kept of a server's launches: their number, and the size of their logs.

At most ``keep`` launches lie there, the current one, last_good and those whose process lives among them whatever their
age. A folder without a record (its run was killed before it wrote one) is no launch and goes first. A launch goes as a
whole: its folder is renamed, then emptied; a run that is killed in between leaves a folder that the next one removes.
Something that is no file of ours (a folder in a launch) is left alone and named.

Logs of launches that do not run are cut to their ends. So a server's records are at most ``keep`` x (LOG_HEAD +
LOG_TAIL + five documents + four small files of at most 1 MiB), beside the log of the server that runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import time
import typing as t

from ..errors import CleanSlateError
from .record import (
    KEPT_LAUNCHES,
    LAUNCHES,
    create_file,
    is_launch_id,
    opened_folder,
    read_record,
    server_dir,
)
from .record_files import LINKS, look_link

LEAST_KEPT = 2
"""The current launch and last_good."""

MOST_KEPT = 100
LOG = "server.log"
LOG_HEAD = 1 << 20
LOG_TAIL = 4 << 20
_GONE = ".gone-"
_TEMPORARY = re.compile(r"\.(?:current\.json|current|last_good)\.[0-9]+\.[0-9a-f]{8}")
_TEMPORARY_S = 600.0


def prune(
    state_dir: str, name: str, keep: int = KEPT_LAUNCHES, living: t.Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Remove the oldest launches beyond ``keep``. ``living``: launches with a process.

    To be called with the server's lock held. Returns (the folders that are gone, what stayed and why); never raises
    for what lies on the disk.
    """
    folder = os.path.join(server_dir(state_dir, name), LAUNCHES)
    gone: list[str] = []
    problems: list[str] = []
    try:
        _remove_temporaries(server_dir(state_dir, name))
        with opened_folder(folder) as dir_fd:
            entries = os.listdir(dir_fd)
            for entry in sorted(entry for entry in entries if entry.startswith(_GONE)):
                _note(problems, os.path.join(folder, entry), functools.partial(_empty, entry, dir_fd))
            launches = sorted((entry for entry in entries if is_launch_id(entry)), reverse=True)
            for launch in _superfluous(launches, _protected(state_dir, name) | set(living), keep, dir_fd):
                path = os.path.join(folder, launch)
                if _note(problems, path, functools.partial(_remove, launch, dir_fd)):
                    gone.append(path)
    except (OSError, CleanSlateError) as error:
        problems.append(f"old launches in {folder} can't be looked at: {error}")
    return gone, problems


def _remove_temporaries(folder: str) -> None:
    """What runs left that were killed between writing a file and its rename."""
    with opened_folder(folder) as dir_fd:
        for entry in os.listdir(dir_fd):
            if _TEMPORARY.fullmatch(entry):
                status = os.stat(entry, dir_fd=dir_fd, follow_symlinks=False)
                if time.time() - status.st_mtime > _TEMPORARY_S:
                    os.unlink(entry, dir_fd=dir_fd)


def _protected(state_dir: str, name: str) -> set[str]:
    record = read_record(state_dir, name).record
    links = [look_link(state_dir, name, which).launch_id for which in LINKS]
    return {one for one in (record.launch_id if record is not None else None, *links) if one is not None}


def _superfluous(launches: t.Sequence[str], protected: set[str], keep: int, dir_fd: int) -> list[str]:
    """What goes, the oldest first: what is no launch, and whatever is beyond the number beside the protected ones."""
    half = [launch for launch in launches if launch not in protected and not _has_record(launch, dir_fd)]
    others = [launch for launch in launches if launch not in protected and launch not in half]
    room = max(0, keep - sum(1 for launch in launches if launch in protected))
    return sorted([*half, *others[room:]])


def _has_record(launch: str, dir_fd: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(f"{launch}/record.json", dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, NotADirectoryError))


def _note(problems: list[str], path: str, action: t.Callable[[], None]) -> bool:
    try:
        action()
    except (OSError, CleanSlateError) as error:
        problems.append(f"{path} can't be removed: {error.strerror if isinstance(error, OSError) else error}")
        return False
    return True


def remove_launch(state_dir: str, name: str, launch_id: str) -> None:
    """Remove a launch that did not come to its record, as far as that is possible."""
    with contextlib.suppress(OSError, CleanSlateError), opened_folder(
        os.path.join(server_dir(state_dir, name), LAUNCHES)
    ) as dir_fd:
        _remove(launch_id, dir_fd)


def _remove(launch: str, dir_fd: int) -> None:
    with _inside(launch, dir_fd) as inner:
        _check_plain(inner)
    os.rename(launch, _GONE + launch, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    _empty(_GONE + launch, dir_fd)


def _empty(entry: str, dir_fd: int) -> None:
    with _inside(entry, dir_fd) as inner:
        _check_plain(inner)
        for file in os.listdir(inner):
            os.unlink(file, dir_fd=inner)
    os.rmdir(entry, dir_fd=dir_fd)


@contextlib.contextmanager
def _inside(entry: str, dir_fd: int) -> t.Iterator[int]:
    fd = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _check_plain(fd: int) -> None:
    """A folder in there was not made by us, and unlink would stop half-way at it."""
    for file in sorted(os.listdir(fd)):
        if stat.S_ISDIR(os.stat(file, dir_fd=fd, follow_symlinks=False).st_mode):
            raise CleanSlateError(f"it holds the folder {file!r}, which is none of ours; remove it by hand")


# --- logs -------------------------------------------------------------------------------------------------------------


def cut_logs(state_dir: str, name: str, living: t.Collection[str] = ()) -> list[str]:
    """Cut the logs of launches without a process to their ends. To be called with the lock held and before a start.

    Returns what could not be cut and why; never raises for what lies on the disk.
    """
    folder = os.path.join(server_dir(state_dir, name), LAUNCHES)
    problems: list[str] = []
    try:
        with opened_folder(folder) as dir_fd:
            for launch in sorted(entry for entry in os.listdir(dir_fd) if is_launch_id(entry)):
                if launch in living:
                    continue
                try:
                    with _inside(launch, dir_fd) as inner:
                        _cut_log(inner)
                except (OSError, CleanSlateError) as error:
                    problems.append(f"{os.path.join(folder, launch, LOG)} can't be cut: {error}")
    except FileNotFoundError:
        return []
    except (OSError, CleanSlateError) as error:
        problems.append(f"the logs in {folder} can't be looked at: {error}")
    return problems


def _cut_log(dir_fd: int) -> None:
    try:
        fd = os.open(LOG, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    with os.fdopen(fd, "rb") as stream:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CleanSlateError("it is no plain file")
        if status.st_size <= LOG_HEAD + LOG_TAIL + 4096:  # a log that was cut is not cut again
            return
        head = stream.read(LOG_HEAD)
        stream.seek(status.st_size - LOG_TAIL)
        tail = stream.read(LOG_TAIL)
    left_out = status.st_size - LOG_HEAD - LOG_TAIL
    note = f"\n[... {left_out} bytes were left out here when a later launch started ...]\n".encode()
    create_file(dir_fd, LOG, head + note + tail, 0o600, (status.st_uid, status.st_gid))


def living_launches(state_dir: str, name: str, argvs: t.Iterable[t.Sequence[str]]) -> set[str]:
    """Launches of this server that stand on some process's command line, by their configuration file."""
    head = os.path.join(server_dir(state_dir, name), LAUNCHES) + "/"
    words = (word for argv in argvs for word in argv if word.startswith(head))
    return {launch for launch in (word[len(head) :].partition("/")[0] for word in words) if is_launch_id(launch)}
