# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A fresh PID, IPC, mount and network namespace per test: whatever signals something runs in here.

    with Namespace(tmp_path) as ns:
        server = ns.popen([sys.executable, "-m", "http.server"], detached=True)
        ns.run(["kill", str(server.pid)], deadline_s=5).check()

Own /proc, /dev/shm, /run, /tmp (only the test's directory, the checkout and the interpreter show through) and loopback.
Process 1 (init.py) reaps zombies. When the context ends, the kernel kills everything inside; that is checked.
Needs root, unshare and nsenter (util-linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
import typing as t
import warnings
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT, Completed, run_command
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

T = t.TypeVar("T")
START_DEADLINE_S = 20
END_DEADLINE_S = 20
# Write our pid where the harness finds it, go to the directory, become the command.
ENTRY = 'echo $$ >"$1" && cd "$2" && shift 2 && exec "$@"'


def why_not() -> str | None:
    """Why namespaces can't be used here, or None."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for command in ("unshare", "nsenter", "setsid", "mount"):
        if shutil.which(command) is None:
            return f"{command} is not installed"
    return None


@dataclasses.dataclass(frozen=True)
class NsProcess:
    """A process that was started inside. ``pid`` is its number there; ``popen`` is its nsenter outside.

    A detached one is a child of the namespace's process 1 and its ``popen`` has ended long ago.
    """

    pid: int
    popen: subprocess.Popen[bytes]
    ns: Namespace

    def wait(self, deadline_s: float = 10) -> int:
        """The exit status (negative: signal) of an attached process."""
        return self.popen.wait(deadline_s)

    def wait_gone(self, deadline_s: float = 10) -> None:
        """Until the pid is no more inside (a zombie still counts as there)."""
        wait_for(f"pid {self.pid} gone", lambda: self.pid not in self.ns.pids(), deadline_s)


class Namespace:
    """See the module's text. ``directory`` is the test's own; logs of the harness go there."""

    def __init__(
        self, directory: Path, *, network: bool = True, shm_mib: int = 64, keep: t.Sequence[Path] = ()
    ) -> None:
        self.directory = directory / "ns"
        self.network = network
        self.shm_mib = shm_mib
        visible = [ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), directory, *keep]
        self.keep = _below_tmp(visible)
        self._numbers = itertools.count(1)
        self._popens: list[subprocess.Popen[bytes]] = []
        self._unshare: subprocess.Popen[bytes] | None = None
        self.init_pid = 0

    def __enter__(self) -> Namespace:
        self.directory.mkdir(parents=True)
        config = {"network": self.network, "shm_mib": self.shm_mib, "keep": self.keep}
        argv = [
            "unshare",
            "--pid",
            "--fork",
            "--ipc",
            "--mount",
            "--mount-proc",
            "--kill-child",
            "--propagation",
            "private",
        ]
        argv += ["--net"] if self.network else []
        argv += [sys.executable, str(Path(__file__).parent / "init.py"), json.dumps(config)]
        log = self.directory / "init.log"
        with log.open("wb") as errors:
            self._unshare = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        assert self._unshare.stdout is not None
        readable = select.select([self._unshare.stdout], [], [], START_DEADLINE_S)[0]
        line = self._unshare.stdout.readline() if readable else b""
        if line != b"ready\n":
            self._unshare.kill()
            self._unshare.wait(END_DEADLINE_S)
            raise AssertionError(f"the namespace did not start: {line!r} {log.read_text()}")
        self.init_pid = _only_child(self._unshare.pid)
        self._pid_namespace = os.readlink(f"/proc/{self.init_pid}/ns/pid")
        return self

    def __exit__(self, *_exception: object) -> None:
        assert self._unshare is not None
        # The pidfd makes sure that the number still means our init.
        try:
            descriptor = os.pidfd_open(self.init_pid)
        except ProcessLookupError:
            descriptor = -1
        if descriptor >= 0:
            if self._pid_namespace == _link(f"/proc/{self.init_pid}/ns/pid"):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        for popen in (self._unshare, *self._popens):
            popen.wait(END_DEADLINE_S)
        for stream in (self._unshare.stdin, self._unshare.stdout):
            if stream is not None:
                stream.close()
        wait_for("nothing left of the namespace", lambda: not self._left(), END_DEADLINE_S)

    def _left(self) -> list[str]:
        """What still lives in the namespace, seen from outside."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and _link(f"/proc/{name}/ns/pid") == self._pid_namespace:
                found.append(f"{name} {_read(f'/proc/{name}/stat')}")
        return found

    @property
    def proc(self) -> Path:
        """The namespace's own /proc, as a path from outside."""
        return self.root / "proc"

    @property
    def root(self) -> Path:
        """The namespace's root directory, as a path from outside (for its /dev/shm, /tmp and /run)."""
        return Path(f"/proc/{self.init_pid}/root")

    def pids(self) -> set[int]:
        """All processes inside but process 1, zombies too."""
        return {int(name) for name in os.listdir(self.proc) if name.isdigit()} - {1}

    def start_ticks(self, pid: int) -> int | None:
        """Start time of a process inside, in clock ticks after boot; None if it is gone."""
        text = _read(str(self.proc / str(pid) / "stat"))
        return int(text.rpartition(")")[2].split()[19]) if text else None

    def living(self) -> set[tuple[int, int]]:
        """(pid, start ticks) of all processes inside but process 1 and zombies: two of these show who left."""
        found = set()
        for pid in self.pids():
            fields = _read(str(self.proc / str(pid) / "stat")).rpartition(")")[2].split()
            if fields and fields[0] not in "ZX":
                found.add((pid, int(fields[19])))
        return found

    def cmdline(self, pid: int) -> list[str]:
        """The command line of a process inside; [] if it has none or is gone."""
        return [word for word in _read(str(self.proc / str(pid) / "cmdline")).split("\0") if word]

    def titles(self) -> dict[int, str]:
        """pid -> command line (words joined by spaces) of all processes inside."""
        return {pid: " ".join(self.cmdline(pid)) for pid in sorted(self.pids())}

    def enter_argv(self) -> list[str]:
        """The words that, put before a command, run it inside."""
        kinds = ["--pid", "--ipc", "--mount", *(["--net"] if self.network else [])]
        return ["nsenter", "--target", str(self.init_pid), *kinds, "--"]

    def popen(
        self,
        argv: t.Sequence[str],
        env: t.Mapping[str, str] | None = None,
        *,
        cwd: Path = ROOT,
        detached: bool = False,
        output: Path | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> NsProcess:
        """Start a command inside. ``env`` is added to ours. ``output`` takes stdout and stderr (default: thrown away).

        Detached: in a session of its own and a child of process 1, as ``setsid nohup`` leaves it.
        """
        pid_file = self.directory / f"pid.{next(self._numbers)}"
        words = [*self.enter_argv(), *(["setsid", "--fork"] if detached else [])]
        words += ["sh", "-c", ENTRY, "sh", str(pid_file), str(cwd), *argv]
        with (output or Path(os.devnull)).open("ab") as sink:
            popen = subprocess.Popen(words, stdin=stdin, stdout=sink, stderr=sink, env=_environment(env))
        self._popens.append(popen)
        text = wait_for(f"{argv} started", lambda: _read(str(pid_file)).strip(), START_DEADLINE_S)
        return NsProcess(int(text), popen, self)

    def run(
        self,
        argv: t.Sequence[str],
        deadline_s: float,
        env: t.Mapping[str, str] | None = None,
        *,
        cwd: Path = ROOT,
        stdin: str = "",
    ) -> Completed:
        """Run a command inside to its end. ``env`` is added to ours."""
        pid_file = self.directory / f"pid.{next(self._numbers)}"
        words = [*self.enter_argv(), "sh", "-c", ENTRY, "sh", str(pid_file), str(cwd), *argv]

        def kill_inside() -> None:
            # Killing nsenter would leave the command running inside.
            pid = _read(str(pid_file)).strip()
            if pid:
                subprocess.run([*self.enter_argv(), "kill", "-KILL", pid], timeout=10, check=False)

        return run_command(words, deadline_s, env=_environment(env), stdin=stdin, on_timeout=kill_inside)

    def call(self, function: t.Callable[[], T], deadline_s: float = 60) -> T:
        """Run a Python function inside, in a forked child; its result (pickled) is returned.

        Its exception comes back as an AssertionError with the traceback's text; so does a passed deadline.
        """
        read_end, write_end = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns where pytest-xdist has a thread: it waits in a read then and holds no lock that we take.
            warnings.simplefilter("ignore", DeprecationWarning)
            middle = os.fork()
        if middle == 0:
            self._call_inside(function, write_end)
        os.close(write_end)
        try:
            raw = _read_message(read_end, time.monotonic() + deadline_s)
        finally:
            os.close(read_end)
            if raw_missing := not _reaped(middle):
                _end_call(middle)
        assert raw is not None, f"no result after {deadline_s:g} s (helper killed: {raw_missing})"
        error, result = pickle.loads(raw)
        assert error is None, f"inside the namespace:\n{error}"
        return t.cast(T, result)

    def _call_inside(self, function: t.Callable[[], T], write_end: int) -> t.NoReturn:
        """In the forked child: enter, fork again (only a child is in the PID namespace), answer, end."""
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            for kind in (*(["net"] if self.network else []), "ipc", "pid", "mnt"):
                descriptor = os.open(f"/proc/{self.init_pid}/ns/{kind}", os.O_RDONLY)
                if libc.setns(descriptor, 0):
                    raise OSError(ctypes.get_errno(), f"setns {kind}")
            os.chdir(ROOT)
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                os._exit(0)
            message = pickle.dumps((None, function()))
        except BaseException:
            message = pickle.dumps((traceback.format_exc(), None))
        os.write(write_end, len(message).to_bytes(8, "big"))
        os.write(write_end, message) if len(message) < 65536 else _write_all(write_end, message)
        os._exit(0)


def _end_call(middle: int) -> None:
    """End a call that did not end: first the child inside, so that its parent reaps it.

    Were the parent ended first, whoever adopts the child outside of the namespace would have to reap it before the
    namespace can end.
    """
    with contextlib.suppress(AssertionError, ProcessLookupError):
        os.kill(_only_child(middle), signal.SIGKILL)
    if not _reaped(middle):
        os.kill(middle, signal.SIGKILL)
        os.waitpid(middle, 0)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read_message(descriptor: int, end: float) -> bytes | None:
    """A message with its length before it; None if it was not complete at ``end`` (time.monotonic)."""
    data = b""
    while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "big"):
        readable = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]
        chunk = os.read(descriptor, 65536) if readable else b""
        if not chunk:
            return None
        data += chunk
    return data[8:]


def _reaped(pid: int, deadline_s: float = 2) -> bool:
    end = time.monotonic() + deadline_s
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _below_tmp(paths: t.Sequence[Path]) -> list[str]:
    """Those below /tmp, without the ones that lie in another of them."""
    wanted = sorted({path.resolve() for path in paths if Path("/tmp") in path.resolve().parents})
    return [str(path) for path in wanted if not any(other in path.parents for other in wanted)]


def _environment(added: t.Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, **(added or {})}


def _only_child(pid: int) -> int:
    """The one child of a process, by the parents in /proc (the ``children`` file is not in every kernel)."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _read(f"/proc/{name}/stat").rpartition(")")[2].split()
            if fields and int(fields[1]) == pid:
                return int(name)
    raise AssertionError(f"process {pid} has no child")


def _read(path: str) -> str:
    """A file's text, or nothing where the file or its process is gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _link(path: str) -> str | None:
    """A link's target, or None where its process is gone or a kernel thread's can't be read."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def main() -> int:
    """``python -m ...tests.harness.namespace DIRECTORY COMMAND...``: run a command inside a fresh namespace."""
    with Namespace(Path(sys.argv[1])) as ns:
        process = subprocess.run([*ns.enter_argv(), *sys.argv[2:]], check=False)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
