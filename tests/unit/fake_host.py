# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host made of files: a proc tree, a cgroup tree and a shared memory directory below a temporary directory."""

from __future__ import annotations

import json
import os
import typing as t
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

OWN_PID = 4242
"""The pid under which the code under test runs on the fake host."""

V2_MOUNT = b"35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MEMORY_MOUNT = b"35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
HYBRID_MOUNT = b"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
V1_CPU_MOUNT = b"32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"


def meminfo(**kib: int) -> bytes:
    """/proc/meminfo from sizes in kB; the HugePages counts get no unit, as the kernel writes them."""
    units = {name: "" if name.startswith("HugePages_") else " kB" for name in kib}
    return b"".join(f"{name + ':':<16}{size:>8}{units[name]}\n".encode() for name, size in kib.items())


class FakeHost:
    """Roots ``proc``, ``sys`` and ``shm`` with pid 1 and our own process; ``self`` is ours."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proc = root / "proc"
        self.sys = root / "sys"
        self.shm = root / "shm"
        for directory in (self.proc / "net", self.sys / "fs" / "cgroup", self.shm):
            directory.mkdir(parents=True)
        (self.proc / "self").symlink_to(str(OWN_PID))
        self.process(1, ["/sbin/init"], ppid=0)
        self.process(OWN_PID, ["python3", "AnsiballZ_memory_info.py"])
        self.cgroups(b"0::/\n", V2_MOUNT)
        monkeypatch.setattr(os, "getpid", lambda: OWN_PID)

    def process(
        self,
        pid: int,
        argv: t.Sequence[str],
        ppid: int = 1,
        state: str = "S",
        threads: int = 1,
        status: t.Optional[t.Mapping[str, str]] = None,
        maps: bytes = b"",
        fds: t.Optional[t.Mapping[int, str]] = None,
    ) -> Path:
        base = self.proc / str(pid)
        (base / "fd").mkdir(parents=True)
        comm = os.path.basename(argv[0])[:15] if argv else "x"
        before = f"{pid} ({comm}) {state} {ppid} {pid} {pid} 0 -1 4194560 0 0 0 0 1 1 0 0 20 0 {threads} 0 {1000 + pid}"
        (base / "stat").write_text(before + " 0 0 18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0\n")
        (base / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in argv))
        fields = {"Name": comm, "State": f"{state} (x)", "Uid": "1000\t1000\t1000\t1000", **(status or {})}
        (base / "status").write_text("".join(f"{name}:\t{value}\n" for name, value in fields.items()))
        (base / "maps").write_bytes(maps)
        for number, target in (fds or {}).items():
            (base / "fd" / str(number)).symlink_to(target)
        return base

    def cgroups(self, membership: bytes, mountinfo: bytes) -> None:
        """What /proc/self/cgroup and /proc/self/mountinfo say."""
        (self.proc / str(OWN_PID) / "cgroup").write_bytes(membership)
        (self.proc / str(OWN_PID) / "mountinfo").write_bytes(mountinfo)

    def cgroup(self, path: str, **files: t.Union[str, int]) -> Path:
        """A cgroup below sys/fs/cgroup; the dots of its files' names are written as double underscores."""
        directory = self.sys / "fs" / "cgroup" / path.strip("/")
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name.replace("__", ".")).write_text(f"{text}\n")
        return directory

    def shm_file(self, name: str, size: int = 0, mtime: t.Optional[float] = None) -> Path:
        path = self.shm / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\1" * size)
        if mtime is not None:
            os.utime(path, (mtime, mtime))
        return path


def maps_line(path: Path, shown: t.Optional[str] = None, inode: t.Optional[int] = None) -> bytes:
    """A line of /proc/PID/maps that maps ``path``, under another name or with another inode if wanted."""
    status = path.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    number = status.st_ino if inode is None else inode
    return f"7f1c00000000-7f1c00004000 rw-s 00000000 {device} {number}                 {shown or path}\n".encode()


def run_module(main: t.Callable[[], t.Any], args: t.Mapping[str, t.Any], capsys: pytest.CaptureFixture[str]) -> t.Any:
    """Run a module's main() in this process and return its parsed JSON; ``failed`` says whether it failed."""
    capsys.readouterr()
    with patch_module_args(dict(args)), pytest.raises(SystemExit):
        main()
    return json.loads(capsys.readouterr().out)
