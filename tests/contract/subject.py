# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two things under contract: the double, and the real library of a machine with a GPU."""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Hold, Line, NvmlDouble

HERE = Path(__file__).resolve().parent
MIB = 1024 * 1024
PROBE_DEADLINE_S = 60
START_DEADLINE_S = 120
RELEASE_DEADLINE_S = 60
Reading = dict[str, t.Any]


class Holder:
    """A process that holds memory of GPU 0, and its forks."""

    def __init__(self, argv: t.Sequence[str], env: t.Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True, start_new_session=True
        )
        self.children: list[int] = []
        self.pid = self._read_pid()

    def _read_pid(self) -> int:
        assert self.process.stdout is not None
        ready, _unused, _unused = select.select([self.process.stdout], [], [], START_DEADLINE_S)
        if not ready:
            self.process.kill()
            raise TimeoutError(f"the holder said nothing within {START_DEADLINE_S} s")
        return int(self.process.stdout.readline())

    def fork(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("fork\n")
        self.process.stdin.flush()
        self.children.append(self._read_pid())
        return self.children[-1]

    def kill(self) -> None:
        """Kills the process itself, not its forks."""
        self.process.kill()
        self.process.wait(timeout=START_DEADLINE_S)

    def kill_children(self) -> None:
        while self.children:
            child = self.children.pop()
            # Its parent is dead or ours; the session proves that the number still means our fork.
            if os.getsid(child) == self.pid:
                os.kill(child, signal.SIGKILL)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.kill_children()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Subject:
    """What the contract is about; `name` is `double` or `real`."""

    name: str

    def env(self) -> dict[str, str]:
        raise NotImplementedError

    def hold(self, mib: int) -> Holder:
        raise NotImplementedError

    def device_number(self) -> tuple[int, int]:
        """Major and minor of GPU 0's device node, as a holder maps it."""
        raise NotImplementedError

    def close(self) -> None:
        pass

    def read(self, *prefix: str) -> Reading:
        """One reading by a fresh process; `prefix` is a program that runs it (unshare)."""
        argv = [*prefix, sys.executable, str(HERE / "probe.py")]
        done = subprocess.run(
            argv, env=self.env(), capture_output=True, text=True, timeout=PROBE_DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return t.cast(Reading, json.loads(done.stdout))

    def gpu(self, *prefix: str) -> Reading:
        return t.cast(Reading, self.read(*prefix)["gpus"][0])

    def used_mib(self) -> int:
        return int(self.gpu()["v2"]["used"]) // MIB

    def wait_for(self, reached: t.Callable[[Reading], bool], deadline_s: float = RELEASE_DEADLINE_S) -> Reading:
        """Reads GPU 0 until the condition holds; the last reading, whether or not it did: the caller asserts."""
        end = time.monotonic() + deadline_s
        while True:
            reading = self.gpu()
            if reached(reading) or time.monotonic() > end:
                return reading
            time.sleep(0.2)


class DoubleSubject(Subject):
    name = "double"

    def __init__(self, directory: Path) -> None:
        self.double = NvmlDouble(directory)
        self.directory = directory
        self.node = Path("/dev/zero")
        gpus: tuple[Line, ...] = (Gpu(0), Gpu(1))
        self.double.write(*gpus)

    def env(self) -> dict[str, str]:
        return {**os.environ, **self.double.env()}

    def hold(self, mib: int) -> Holder:
        handle, lock = tempfile.mkstemp(dir=self.directory, prefix="lock-")
        os.close(handle)
        holder = Holder([sys.executable, str(HERE / "hold_double.py"), str(self.node), lock], os.environ)
        namespace = os.stat("/proc/self/ns/pid").st_ino
        # A CUDA context takes some memory beside what is asked for.
        self.double.add(Hold(0, mib=mib + 500, lock=lock, pid=holder.pid, pidns=namespace))
        return holder

    def device_number(self) -> tuple[int, int]:
        number = os.stat(self.node).st_rdev
        return os.major(number), os.minor(number)


class RealSubject(Subject):
    name = "real"

    def env(self) -> dict[str, str]:
        return dict(os.environ)

    def hold(self, mib: int) -> Holder:
        return Holder([sys.executable, str(HERE / "hold_real.py"), str(mib)], os.environ)

    def device_number(self) -> tuple[int, int]:
        return 195, int(self.gpu()["minor"])


def maps_readable(pid: int, device: tuple[int, int]) -> bool:
    """Whether the process has a readable mapping of this device number (root)."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        file = f"/proc/{pid}/map_files/{span}"
        if not rights.startswith("r") or not os.path.lexists(file):
            continue
        found = os.stat(file)
        if stat.S_ISCHR(found.st_mode) and (os.major(found.st_rdev), os.minor(found.st_rdev)) == device:
            return True
    return False
