# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""No descriptors, processes or memory: a limit that is named, never "there is nothing", and never a second module."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils import spawn
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.exhausted import exhausted_by, is_exhausted
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import devices, procfs
from ansible_collections.cleanslate.sglang.tests.unit.builders import process

LIMITS = {
    errno.EMFILE: "RLIMIT_NOFILE",
    errno.ENFILE: "fs.file-max",
    errno.ENOMEM: "RLIMIT_AS",
    errno.EAGAIN: "pids.max",
}


def open_descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}


@contextlib.contextmanager
def few_descriptors(more: int) -> t.Iterator[None]:
    """No more than so many above those that are open. Whatever goes wrong, the next test has as many as before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in open_descriptors())
    with contextlib.ExitStack() as stack:
        while (fd := os.open(os.devnull, os.O_RDONLY)) <= highest:  # the gaps below
            stack.callback(os.close, fd)
        os.close(fd)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + more, hard))
        yield


@pytest.mark.parametrize(("code", "limit"), LIMITS.items(), ids=str)
def test_the_limit_is_named(code: int, limit: str) -> None:
    words = exhausted_by(OSError(code, "x"), starting=True)
    assert words is not None and limit in words


def test_what_is_no_limit_is_none() -> None:
    assert exhausted_by(OSError(errno.ENOENT, "x"), starting=True) is None
    assert exhausted_by(BlockingIOError(errno.EAGAIN, "x")) is None
    assert exhausted_by(ValueError("x")) is None
    assert is_exhausted(MemoryError()) and not is_exhausted(PermissionError(errno.EACCES, "x"))


def helpers() -> list[t.Callable[[], str]]:
    """What each way to start a helper says where none can be started."""

    def detached() -> str:
        with pytest.raises(CleanSlateError) as raised:
            spawn.spawn_detached(["true"], {}, "/", os.devnull)
        return str(raised.value)

    return [
        lambda: spawn.run_bounded(["true"], 5).error or "",
        lambda: spawn.call_bounded(lambda: 1, 5).error or "",
        lambda: spawn.fetch_bounded(lambda: 1, 5).error or "",
        detached,
    ]


@pytest.mark.parametrize("helper", range(4))
@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM])
def test_no_further_process_is_an_answer(monkeypatch: pytest.MonkeyPatch, helper: int, code: int) -> None:
    def fork() -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fork", fork)
    before = open_descriptors()
    words = helpers()[helper]()
    assert "no helper process could be started" in words and LIMITS[code] in words
    assert open_descriptors() == before


@pytest.mark.parametrize("helper", range(4))
@pytest.mark.parametrize("left", [0, 1])
def test_no_further_descriptor_is_an_answer(helper: int, left: int) -> None:
    before = open_descriptors()
    with few_descriptors(left):
        words = helpers()[helper]()
    assert "no helper process could be started" in words and "RLIMIT_NOFILE" in words
    assert open_descriptors() == before


def test_a_helper_without_memory_says_so() -> None:
    def greedy() -> t.NoReturn:
        raise MemoryError

    assert "RLIMIT_AS" in (spawn.call_bounded(greedy, 5).error or "")


TWICE = """
import os, sys
from ansible_collections.cleanslate.sglang.plugins.module_utils import spawn
real, calls = os.fork, []
def fork():
    calls.append(1)
    if len(calls) == 2:
        raise BlockingIOError(11, "no more")
    return real()
os.fork = fork
try:
    spawn.spawn_detached(["true"], {}, "/", os.devnull)
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


def test_a_launch_that_cannot_fork_twice_goes_on_only_once() -> None:
    """The forked one in the middle must never come back as a second module that goes on where the first one does."""
    argv = [sys.executable, "-c", TWICE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.stdout.count("\n") == 1, done
    assert done.stdout.startswith("CleanSlateError") and "pids.max" in done.stdout


def test_want_of_descriptors_is_not_the_end_of_a_process() -> None:
    here = process(os.getpid())
    assert procfs.read_process(os.getpid()) is not None
    with few_descriptors(0):
        for read in (
            lambda: procfs.read_bytes("/proc/self/stat"),
            lambda: procfs.read_identity(os.getpid()),
            lambda: procfs.read_process(os.getpid()),
            lambda: devices.scan_devices({here.pid: here}),
        ):
            with pytest.raises(OSError) as raised:
                read()
            assert is_exhausted(raised.value)
    assert procfs.read_bytes("/proc/self/no such file") is None
