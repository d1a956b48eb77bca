# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of another mount namespace, through /proc/PID/root, without leaving it.

Whoever is root in a container may put a symbolic link to /etc anywhere, and we, outside, would follow it into our own
/etc. openat2(2) with RESOLVE_IN_ROOT resolves links as the container itself would; a kernel without it (before 5.6)
gets a walk that refuses links. Any of this can hang on a file system of the container: call it in a bounded child.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
import typing as t

from ..sglang.files import keep_descriptors
from .procfs import parse_stat, read_text

SYS_OPENAT2 = 437  # the same number on every architecture
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10


def open_inside(
    pid: int, path: str, flags: int = os.O_RDONLY, proc: str = "/proc", start_ticks: t.Optional[int] = None
) -> int:
    """A descriptor of ``path`` as process ``pid`` sees it; with ``start_ticks``, that very process.

    Raises:
        OSError: it is not there, may not be opened, or the process is gone.
    """
    if "\0" in path:
        raise ValueError("a path with a NUL in it")
    try:
        root = os.open(f"{proc}/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:  # not to be taken for 'no such file' there
        raise ProcessLookupError(errno.ESRCH, "the process through which it is seen is gone", path) from None
    try:
        # Checked with the root open: a pid that was given away since would lead into somebody else's files.
        if start_ticks is not None and _start_ticks(pid, proc) != start_ticks:
            raise ProcessLookupError(errno.ESRCH, "the process through which it is seen is gone", path)
        return _openat2(root, path, flags | os.O_CLOEXEC)
    except OSError as exc:
        if exc.errno != errno.ENOSYS:
            raise
        return _walk(root, path, flags | os.O_CLOEXEC)
    finally:
        os.close(root)


def read_inside(
    pid: int, path: str, proc: str = "/proc", limit: int = 1 << 20, start_ticks: t.Optional[int] = None
) -> t.Optional[str]:
    """The text of a regular file, or None: a FIFO would block us, and opening a device can change its state."""
    try:
        return load_inside(pid, path, proc, limit, start_ticks=start_ticks)
    except (OSError, ValueError):
        return None


def load_inside(
    pid: int,
    path: str,
    proc: str = "/proc",
    limit: int = 1 << 20,
    owner: t.Optional[int] = None,
    start_ticks: t.Optional[int] = None,
) -> t.Optional[str]:
    """The text of a regular file; None where there is no such file. ``owner``: nobody but this uid may change it.

    Raises:
        OSError: it is there and can't be read, is no regular file, or others may change it.
    """
    try:
        seen = open_inside(pid, path, os.O_PATH, proc, start_ticks)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(seen).st_mode):
            raise OSError(errno.EINVAL, "no regular file", path)
        info = os.fstat(seen)
        if owner is not None and (info.st_uid != owner or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            raise OSError(errno.EPERM, f"uid {info.st_uid} or others may change it", path)
        # By descriptor, so that nobody can put another file in its place in between.
        fd = os.open(f"/proc/self/fd/{seen}", os.O_RDONLY | os.O_NONBLOCK)
    finally:
        os.close(seen)
    with os.fdopen(fd, "rb") as stream:
        return stream.read(limit).decode("utf-8", "replace")


def real_path_inside(
    pid: int, path: str, proc: str = "/proc", start_ticks: t.Optional[int] = None
) -> t.Optional[str]:
    """The path of the file behind links, named as the container's own processes name it; None where there is none."""
    try:
        seen = open_inside(pid, path, os.O_PATH, proc, start_ticks)
    except OSError:
        return None
    try:
        return os.readlink(f"/proc/self/fd/{seen}")
    finally:
        os.close(seen)


def device_numbers(
    pid: int, directory: str = "/dev", proc: str = "/proc", start_ticks: t.Optional[int] = None
) -> t.Optional[list[tuple[str, int, int]]]:
    """(name, major, minor) of the device nodes in a directory, links not followed; None where it can't be read."""
    try:
        fd = open_inside(pid, directory, os.O_RDONLY | os.O_DIRECTORY, proc, start_ticks)
    except OSError:
        return None
    result = []
    try:
        for name in sorted(os.listdir(fd)):
            try:
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
                result.append((name, os.major(info.st_rdev), os.minor(info.st_rdev)))
    except OSError:
        return None
    finally:
        os.close(fd)
    return result


def enter_root(pid: int, start_ticks: int, proc: str = "/proc") -> str:
    """Make the root of this very process our own, where it is another one, and return what stands before its paths from
    now on. For a forked child alone, which ends after it has read: all links lead where they lead that process.

    Raises:
        OSError: the process is gone, or we may not.
    """
    path = f"{proc}/{pid}/root"
    if proc != "/proc" or _same_root(pid, proc):
        return path
    root = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if _start_ticks(pid, proc) != start_ticks:
        raise ProcessLookupError(errno.ESRCH, "the process through which it is seen is gone", path)
    keep_descriptors()
    # Whatever is imported from here on would be code of theirs.
    sys.path[:], sys.meta_path[:], sys.path_hooks[:] = [], [], []
    os.fchdir(root)
    os.chroot(".")
    os.close(root)
    return ""


def _same_root(pid: int, proc: str) -> bool:
    """Also where it can't be seen: then nothing can be read there either."""
    try:
        theirs, ours = os.stat(f"{proc}/{pid}/root/."), os.stat(f"{proc}/self/root/.")
        spaces = [os.readlink(f"{proc}/{one}/ns/mnt") for one in (str(pid), "self")]
    except OSError:
        return True
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino) and spaces[0] == spaces[1]


def _start_ticks(pid: int, proc: str) -> t.Optional[int]:
    stat_fields = parse_stat(read_text(f"{proc}/{pid}/stat") or "")
    return stat_fields["start_ticks"] if stat_fields else None


def _openat2(root: int, path: str, flags: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    how = struct.pack("QQQ", flags, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    fd = libc.syscall(SYS_OPENAT2, root, os.fsencode(path), how, ctypes.c_size_t(len(how)))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return int(fd)


def _walk(root: int, path: str, flags: int) -> int:
    names = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in names:
        raise OSError(errno.EXDEV, "a path with '..' is not followed", path)
    current = os.dup(root)
    try:
        for name in names[:-1]:
            if stat.S_ISLNK(os.stat(name, dir_fd=current, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, "a link on the way is not followed", path)
            following = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
            os.close(current)
            current = following
        return os.open(names[-1] if names else ".", flags | os.O_NOFOLLOW, dir_fd=current)
    finally:
        os.close(current)
