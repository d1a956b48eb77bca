# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What kind of file is behind a path, without asking a file server that may be dead.

A plain stat of another process's descriptor asks NFS or FUSE for fresh attributes and can wait for ever. statx with
AT_STATX_DONT_SYNC (Linux 4.11) answers from what the kernel has, which is all that a device number needs.
"""

from __future__ import annotations

import ctypes
import os
import stat
import typing as t
from dataclasses import dataclass

AT_FDCWD = -100
AT_STATX_DONT_SYNC = 0x4000
STATX_TYPE = 0x0001
BUFFER_BYTES = 256
MODE_AT, RDEV_MAJOR_AT, RDEV_MINOR_AT = 0x1C, 0x80, 0x84  # offsets in struct statx, include/uapi/linux/stat.h


@dataclass(frozen=True)
class Kind:
    """The type of a file, and for a device node its numbers."""

    mode: int
    major: int
    minor: int

    @property
    def character_device(self) -> bool:
        return stat.S_ISCHR(self.mode)

    @property
    def block_device(self) -> bool:
        return stat.S_ISBLK(self.mode)


_LIBC = ctypes.CDLL(None, use_errno=True)


def kind_of(path: str) -> Kind:
    """The kind of the file behind ``path``, links followed.

    Raises:
        OSError: as os.stat does.
    """
    if not hasattr(_LIBC, "statx"):
        info = os.stat(path)
        return Kind(info.st_mode, os.major(info.st_rdev), os.minor(info.st_rdev))
    buffer = ctypes.create_string_buffer(BUFFER_BYTES)
    if _LIBC.statx(AT_FDCWD, os.fsencode(path), AT_STATX_DONT_SYNC, STATX_TYPE, buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    raw = buffer.raw
    return Kind(_number(raw, MODE_AT, 2), _number(raw, RDEV_MAJOR_AT, 4), _number(raw, RDEV_MINOR_AT, 4))


def _number(raw: bytes, offset: int, size: int) -> int:
    import sys

    order: t.Literal["little", "big"] = sys.byteorder
    return int.from_bytes(raw[offset : offset + size], order)
