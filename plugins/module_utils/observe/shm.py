# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""/dev/shm: how much room is left, which files lie there, who made them and who still uses them.

A full /dev/shm kills the next start of SGLang by SIGBUS (exit code -7), and every SIGKILL leaves segments behind, so
the files are told one by one. Users are found by device and inode in one pass over /proc: a name can be taken by
anybody, and the same file can be seen under another mount.
"""

from __future__ import annotations

import os
import re
import stat
import typing as t

from ..model import Problem, ShmFile, ShmReading
from .procfs import list_pids, parse_stat, parse_status

_MIB = 1024 * 1024
_Inode = tuple[int, int]  # st_dev, st_ino

# SGLang 0.5.14+ stamps its segments; loky (through joblib) its semaphores.
_CREATOR = re.compile(
    r"^(?:sgl_shm_(?:mm|mq|nodecheck|sync)_(\d{1,10})_|multi_tokenizer_args_(\d{1,10})$|sem\.loky-(\d{1,10})-)"
)
_DELETED = b" (deleted)"
_ROUNDS = 2  # a process that was started during the first pass may have inherited what its parent mapped
_INIT_PID_NAMESPACE = 0xEFFFFFFC  # include/linux/proc_ns.h: the inodes of the host's own namespaces
_INIT_IPC_NAMESPACE = 0xEFFFFFFF


def creator_pid(name: str) -> t.Optional[int]:
    """The pid that a file's name carries; None for names without one (`sglang_loads_*`, `nccl-*`, `psm_*`, ...)."""
    match = _CREATOR.match(name)
    if match is None:
        return None
    return int(next(group for group in match.groups() if group is not None))


def read_shm(
    path: str = "/dev/shm",
    proc: str = "/proc",
    opener: t.Optional[t.Callable[[], int]] = None,
    inner: t.Optional[frozenset[int]] = None,
) -> ShmReading:
    """Read the room and the regular files of ``path`` (and of its directories, one level deep).

    ``scan_complete`` is True only if every process that could use a file was looked at: all of this PID namespace, none
    of them unreadable. Else users may be missing, and ``creator_alive`` is None wherever no living creator was seen: a
    pid of another namespace means nothing here. A container that shares our IPC namespace stamps the pid that it sees,
    so a creator lives as well where any process has that pid in its own PID namespace. Never raises; what failed is in
    ``problems``.

    ``opener`` opens the directory where it is a container's; then the pids in names are its own,
    or ours of those that are not in its PID namespace (``inner``).
    """
    try:
        # Not through a symbolic link: whoever may write the parent directory must not choose what is read.
        fd = opener() if opener is not None else os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (OSError, ValueError) as exc:
        return ShmReading(path, None, None, None, None, scan_complete=False, problems=(_problem(f"open {path}", exc),))
    try:
        return _read_open(path, fd, proc, inner)
    finally:
        os.close(fd)


def _read_open(path: str, fd: int, proc: str, inner: t.Optional[frozenset[int]]) -> ShmReading:
    problems: list[Problem] = []
    total = free = inodes = None
    try:
        room = os.fstatvfs(fd)
        total = room.f_blocks * room.f_frsize // _MIB
        free = room.f_bavail * room.f_frsize // _MIB
        inodes = room.f_favail if room.f_files else None  # a tmpfs without a limit of inodes says 0 of 0
    except OSError as exc:
        problems.append(_problem(f"statvfs {path}", exc))
    device = os.fstat(fd).st_dev
    found = _list(fd, "", problems)
    users = _Users(device, found, proc, inner)
    problems.extend(users.problems)
    files = None
    if found is not None:
        files = tuple(users.describe(name, status) for name, status in sorted(found.items()))
    return ShmReading(
        path=path,
        total_mib=total,
        free_mib=free,
        free_inodes=inodes,
        files=files,
        deleted_mapped=tuple(sorted(users.deleted)),
        scan_complete=users.complete,
        problems=tuple(problems),
    )


def _list(fd: int, prefix: str, problems: list[Problem]) -> t.Optional[dict[str, os.stat_result]]:
    """Regular files by name. Symbolic links, sockets and the like take no room and are passed over."""
    found: dict[str, os.stat_result] = {}
    try:
        with os.scandir(fd) as entries:
            names = [entry.name for entry in entries]
    except OSError as exc:
        problems.append(_problem(f"list {prefix or 'the directory'}", exc))
        return None
    for name in names:
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                found[prefix + name] = status
            elif stat.S_ISDIR(status.st_mode) and not prefix:
                found.update(_list_below(fd, name, problems))
        except FileNotFoundError:  # removed since it was listed
            continue
        except OSError as exc:
            problems.append(_problem(f"stat {prefix}{name}", exc))
    return found


def _list_below(fd: int, name: str, problems: list[Problem]) -> dict[str, os.stat_result]:
    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
    try:
        return _list(below, name + "/", problems) or {}
    finally:
        os.close(below)


def _problem(call: str, exc: Exception) -> Problem:
    return Problem(call=call, code=getattr(exc, "errno", None), message=str(getattr(exc, "strerror", None) or exc))


class _Users:
    """One pass over /proc: who maps and who has open which of the files."""

    def __init__(
        self,
        device: int,
        files: t.Optional[t.Mapping[str, os.stat_result]],
        proc: str,
        inner: t.Optional[frozenset[int]] = None,
    ) -> None:
        self._proc = proc
        self._inner = inner
        self._known: dict[_Inode, set[str]] = {}
        for name, status in (files or {}).items():
            self._known.setdefault((status.st_dev, status.st_ino), set()).add(name)
        self._basenames = {os.path.basename(name) for name in files or {}}
        devices = {device} | {found[0] for found in self._known}
        self._device_ids = {f"{os.major(dev):02x}:{os.minor(dev):02x}".encode(): dev for dev in devices}
        self._mapped: dict[_Inode, set[int]] = {}
        self._opened: dict[_Inode, set[int]] = {}
        self._unreadable: set[int] = set()
        self._stamped = any(creator_pid(name) is not None for name in files or {})
        self._inner_pids: set[int] = set()  # of processes in PID namespaces below ours, as they know themselves
        self.deleted: set[tuple[str, int]] = set()
        self.problems: list[Problem] = []
        self._pids: frozenset[int] = frozenset()
        own = self._own_namespace()
        for _round in range(_ROUNDS):
            self._scan_new()
        if own and self._pids and 1 not in self._pids:
            self.problems.append(Problem("list processes", None, "other users' processes are hidden (hidepid)"))
        if self._unreadable:
            some = ", ".join(str(pid) for pid in sorted(self._unreadable)[:5])
            advice = "; run as root" if os.geteuid() else ""
            message = f"processes that could not be read: {len(self._unreadable)} (pid {some}){advice}"
            self.problems.append(Problem("read maps and fds", None, message))
        # An init that even root can't look into (a protected one, as small virtual machines have) is no user of a
        # server's files; anybody else who can't be looked into may be.
        blind = self._unreadable - ({1} if os.geteuid() == 0 else set())
        self.complete = own and 1 in self._pids and not blind and files is not None

    def _scan_new(self) -> None:
        try:
            new = frozenset(list_pids(self._proc)) - self._pids
        except OSError as exc:
            self.problems.append(_problem(f"list {self._proc}", exc))
            return
        for pid in sorted(new):
            self._scan(pid)
        self._pids |= new

    def describe(self, name: str, status: os.stat_result) -> ShmFile:
        inode = (status.st_dev, status.st_ino)
        creator = creator_pid(name)
        return ShmFile(
            name=name,
            size_mib=round(status.st_blocks * 512 / _MIB, 3),
            uid=status.st_uid,
            mtime=status.st_mtime,
            creator_pid=creator,
            creator_alive=None if creator is None else self._alive(creator),
            mapped_by=tuple(sorted(self._mapped.get(inode, ()))),
            opened_by=tuple(sorted(self._opened.get(inode, ()))),
            device=status.st_dev,
            inode=status.st_ino,
        )

    def _own_namespace(self) -> bool:
        """Whether this /proc shows our own PID namespace, and /dev/shm is not shared with processes outside of it."""
        try:
            own = os.readlink(os.path.join(self._proc, "self")) == str(os.getpid())
        except OSError:
            own = False
        if not own:
            self.problems.append(Problem("readlink self", None, f"{self._proc} does not show our own PID namespace"))
            return False
        if self._namespace("ipc") == _INIT_IPC_NAMESPACE and self._namespace("pid") not in (None, _INIT_PID_NAMESPACE):
            # A container with the host's IPC namespace (docker run --ipc=host) has the host's /dev/shm as well.
            self.problems.append(
                Problem(
                    "readlink ns/ipc",
                    None,
                    "shared memory is shared with the host, whose processes can't be seen from here",
                )
            )
            return False
        return True

    def _namespace(self, kind: str) -> t.Optional[int]:
        try:
            target = os.readlink(os.path.join(self._proc, "self", "ns", kind))
        except OSError:
            return None
        match = re.search(r"\[(\d{1,20})\]$", target)
        return int(match.group(1)) if match else None

    def _alive(self, pid: int) -> t.Optional[bool]:
        """True: a process of this pid lives. False only where that can be known. A zombie without threads is dead."""
        if pid in self._inner_pids:
            return True
        if self._inner is not None and pid in self._inner and pid in self._pids:
            return True
        if self._inner is not None:  # the pid is one of the container's: ours of the same number are others
            return False if self.complete else None
        if pid not in self._pids:
            return False if self.complete else None
        current = self._stat(f"{self._proc}/{pid}")
        if current is None:  # it ended during the scan, or can't be read: the next look will tell
            return None
        if current["state"] in ("Z", "X") and current["threads"] <= 1:
            return False if self.complete else None
        return True

    def _stat(self, base: str) -> t.Optional[dict[str, t.Any]]:
        try:
            with open(f"{base}/stat", "rb") as stream:
                return parse_stat(stream.read().decode("utf-8", "replace"))
        except OSError:
            return None

    def _scan(self, pid: int) -> None:
        base = f"{self._proc}/{pid}"
        mapped = self._scan_maps(pid, base)
        self._scan_fds(pid, base)
        if self._stamped:
            self._scan_inner_pid(pid, base)
        if mapped:
            return
        current = self._stat(base)
        if current is None or current["state"] != "Z" or current["threads"] <= 1:
            return
        # A zombie leader shows neither maps nor fds, while its living threads still hold them.
        try:
            tasks = os.listdir(f"{base}/task")
        except OSError as exc:
            self._refused(pid, exc)
            return
        for task in tasks:
            self._scan_maps(pid, f"{base}/task/{task}")
            self._scan_fds(pid, f"{base}/task/{task}")

    def _scan_inner_pid(self, pid: int, base: str) -> None:
        try:
            with open(f"{base}/status", "rb") as stream:
                status = parse_status(stream.read().decode("utf-8", "replace"))
        except OSError as exc:
            self._refused(pid, exc)
            return
        numbers = status.get("NSpid", "").split()
        if len(numbers) > 1 and numbers[-1].isdecimal():
            self._inner_pids.add(int(numbers[-1]))

    def _refused(self, pid: int, exc: OSError) -> None:
        if not isinstance(exc, (FileNotFoundError, ProcessLookupError)):  # those two: it has ended
            self._unreadable.add(pid)

    def _scan_maps(self, pid: int, base: str) -> bool:
        """Whether there were any mappings at all."""
        try:
            with open(f"{base}/maps", "rb") as stream:
                data = stream.read()
        except OSError as exc:
            self._refused(pid, exc)
            return False
        if not any(device in data for device in self._device_ids):
            return bool(data)
        for line in data.split(b"\n"):
            # address perms offset major:minor inode path
            fields = line.split(None, 5)
            if len(fields) < 5 or fields[3] not in self._device_ids or not fields[4].isdigit():
                continue
            inode = (self._device_ids[fields[3]], int(fields[4][:20]))
            path = fields[5] if len(fields) > 5 else b""
            if inode in self._known:
                self._mapped.setdefault(inode, set()).add(pid)
            elif path.endswith(_DELETED):
                self.deleted.add((path[: -len(_DELETED)].decode("utf-8", "backslashreplace"), pid))
        return bool(data)

    def _scan_fds(self, pid: int, base: str) -> None:
        try:
            numbers = os.listdir(f"{base}/fd")
        except OSError as exc:
            self._refused(pid, exc)
            return
        for number in numbers:
            path = f"{base}/fd/{number}"
            try:
                # The name only spares us the stat, which would ask a foreign file system (a dead NFS, a hung FUSE).
                if os.path.basename(os.readlink(path)) not in self._basenames:
                    continue
                status = os.stat(path)
            except OSError as exc:
                self._refused(pid, exc)
                continue
            inode = (status.st_dev, status.st_ino)
            if inode in self._known:
                self._opened.setdefault(inode, set()).add(pid)
