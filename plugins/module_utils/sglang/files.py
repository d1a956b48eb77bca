# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Opens regular files and nothing else: opening a FIFO or a device can wait, or do something."""

from __future__ import annotations

import errno
import os
import stat
import typing as t

_descriptors: t.Optional[int] = None


def keep_descriptors() -> None:
    """To be called before this process takes another root, whose /proc is not to be trusted."""
    global _descriptors
    _descriptors = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def open_regular(path: str, follow: bool = False) -> int:
    """A descriptor for reading. The kind is looked at before anything is opened.

    ``follow``: whether the path itself may be a symbolic link (those above it are always followed).

    Raises:
        OSError: it can't be opened; EINVAL where it is no regular file.
    """
    place = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", path)
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        if _descriptors is not None:
            return os.open(str(place), flags, dir_fd=_descriptors)
        return os.open(f"/proc/self/fd/{place}", flags)
    finally:
        os.close(place)
