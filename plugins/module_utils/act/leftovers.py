# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remove one file that was judged a leftover, if it still is the file that was judged."""

from __future__ import annotations

import os
import stat
import typing as t

from ..model import ShmFile


def remove_leftover(shm_path: str, file: ShmFile, opener: t.Optional[t.Callable[[], int]] = None) -> t.Optional[str]:
    """Unlink ``file`` from ``shm_path``; return None, or why it was left alone. One that is gone already is no error.

    We are root in a directory that everybody may write to, so names are not trusted: the directory is opened once and
    not through a symbolic link, and only a regular file with the judged device, inode and owner is unlinked, relative
    to that open directory. Names in subdirectories are refused: SGLang makes none. ``opener`` opens a container's.
    """
    if "/" in file.name or file.name in ("", ".", "..") or "\0" in file.name:
        return f"{file.name!r} is not a plain file name"
    if file.device is None or file.inode is None:
        return f"{file.name}: which inode was judged is not known"
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        directory = opener() if opener is not None else os.open(shm_path, flags)
    except OSError as exc:
        return f"cannot open {shm_path}: {exc.strerror}"
    try:
        status = os.stat(file.name, dir_fd=directory, follow_symlinks=False)
        changed = _changed(file, status, os.fstat(directory).st_dev)
        if changed is not None:
            return f"{file.name}: {changed}"
        os.unlink(file.name, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as exc:
        return f"cannot remove {shm_path}/{file.name}: {exc.strerror}"
    finally:
        os.close(directory)
    return None


def _changed(file: ShmFile, status: os.stat_result, device: int) -> t.Optional[str]:
    if status.st_dev != device:
        return "another file system is mounted there"
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file any more"
    if (status.st_dev, status.st_ino) != (file.device, file.inode):
        return "another file has taken its name"
    if status.st_uid != file.uid:
        return f"its owner changed from uid {file.uid} to {status.st_uid}"
    return None
