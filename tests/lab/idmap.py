# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A read-only mount of a tree whose ids are shown shifted, as an unprivileged container's root file system needs it.

util-linux before 2.39 can't make one, so the three system calls are made here (include/uapi/linux/mount.h; their
numbers are the same on every architecture).
"""

from __future__ import annotations

import ctypes
import os
import selectors
import subprocess
import typing as t
from pathlib import Path

IDS = 65536
HELPER_DEADLINE_S = 10
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
AT_FDCWD, AT_EMPTY_PATH, OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = -100, 0x1000, 1, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_IDMAP = 0x1, 0x100000


class _Attributes(ctypes.Structure):
    _fields_: t.ClassVar = [(name, ctypes.c_uint64) for name in ("set", "clr", "propagation", "userns_fd")]


def mount_idmapped(source: Path, target: Path, base: int) -> None:
    """Mount ``source`` (without the mounts below it) at ``target``: id 0 there shows as ``base`` and so on.

    Raises:
        OSError: the kernel or the file system can't do it.
    """
    attributes = _Attributes(set=MOUNT_ATTR_IDMAP | MOUNT_ATTR_RDONLY, userns_fd=_user_namespace(base))
    tree = -1
    try:
        tree = _call(OPEN_TREE, AT_FDCWD, os.fsencode(source), OPEN_TREE_CLONE | os.O_CLOEXEC)
        size = ctypes.sizeof(attributes)
        _call(MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, ctypes.byref(attributes), ctypes.c_size_t(size))
        _call(MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(attributes.userns_fd)
        if tree >= 0:
            os.close(tree)


def shift_ids(directory: Path, base: int) -> None:
    """Give everything below ``directory`` that has an ordinary id the one that it has in the container."""
    for folder, folders, files in os.walk(directory):
        for path in (os.path.join(folder, name) for name in ("", *folders, *files)):
            found = os.lstat(path)
            uid, gid = (one + base if one < IDS else one for one in (found.st_uid, found.st_gid))
            if (uid, gid) != (found.st_uid, found.st_gid):
                os.lchown(path, uid, gid)


def _call(number: int, *arguments: t.Any) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"system call {number}: {os.strerror(error)}")
    return result


def _user_namespace(base: int) -> int:
    """A descriptor of a user namespace with this mapping. The process that made it is gone when this returns."""
    with subprocess.Popen(
        ["unshare", "--user", "sh", "-c", "echo; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as helper:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(t.cast(t.Any, helper.stdout), selectors.EVENT_READ)
                if not selector.select(HELPER_DEADLINE_S):
                    raise OSError(f"unshare --user says nothing for {HELPER_DEADLINE_S} s")
            for kind in ("uid_map", "gid_map"):
                Path(f"/proc/{helper.pid}/{kind}").write_text(f"0 {base} {IDS}")
            return os.open(f"/proc/{helper.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            helper.kill()
