# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one place that starts helpers: bounded commands, bounded calls in a forked child, and detached servers.

A helper never holds the module: it gets a session of its own, /dev/null for what it does not need, and pipes that only
this file reads. When its deadline passes it is killed; one that can't be killed (state D in a driver) is left behind
and named. Nothing here waits without a limit.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import select
import signal
import time
import typing as t
from dataclasses import dataclass

from .errors import CleanSlateError
from .exhausted import exhausted_by

OUTPUT_LIMIT_BYTES = 16 * 2**20
FETCH_LIMIT_BYTES = 256 * 2**20  # our own values: a look at a host with many thousand processes
REAP_GRACE_S = 1.0
FETCH_GRACE_S = 0.2  # an answer that is there already is taken, however late somebody comes for it


@dataclass(frozen=True)
class Completed:
    """A command's end. ``rc`` None: it did not start (``error``) or did not end (``timed_out``)."""

    rc: t.Optional[int]
    stdout: str
    stderr: str
    timed_out: bool = False
    error: t.Optional[str] = None
    stuck_pid: t.Optional[int] = None

    @property
    def ok(self) -> bool:
        return self.rc == 0


@dataclass(frozen=True)
class Called:
    """A bounded call's end. ``value`` is what the function returned, passed through JSON."""

    value: t.Any = None
    timed_out: bool = False
    error: t.Optional[str] = None
    stuck_pid: t.Optional[int] = None
    stuck_state: t.Optional[str] = None
    stuck_wchan: t.Optional[str] = None

    @property
    def ok(self) -> bool:
        return not self.timed_out and self.error is None


def run_bounded(
    argv: t.Sequence[str],
    deadline_s: float,
    env: t.Optional[t.Mapping[str, str]] = None,
    stdin: t.Optional[bytes] = None,
) -> Completed:
    """Run a command and return within ``deadline_s`` (plus one second to reap). Never raises for what the command does.

    ``env`` replaces the environment when given. Output is decoded as UTF-8 with replacement and cut at 16 MiB.
    """
    try:
        pid, ((out_r, out_w), (err_r, err_w), (fail_r, fail_w), (in_r, in_w)) = _fork_with_pipes(4)
    except OSError as exc:
        return Completed(None, "", "", error=f"{argv[0]}: {_no_helper(exc)}")
    if pid == 0:
        _exec_child(argv, env, (in_r, out_w, err_w), fail_w)
    for fd in (out_w, err_w, fail_w, in_r):
        os.close(fd)
    end = time.monotonic() + deadline_s
    _feed(in_w, stdin)
    chunks, timed_out = _collect({out_r: "out", err_r: "err", fail_r: "fail"}, pid, end)
    status, stuck = _reap(pid, end, kill_now=timed_out)
    # A command may close its pipes and stay: it was ended at its deadline then, which is no end of its own.
    timed_out = timed_out or stuck is not None or (status == -signal.SIGKILL and time.monotonic() >= end)
    failure = chunks["fail"].decode("utf-8", "replace")
    if failure:
        return Completed(None, "", "", error=failure)
    return Completed(
        rc=None if timed_out else status,
        stdout=chunks["out"].decode("utf-8", "replace"),
        stderr=chunks["err"].decode("utf-8", "replace"),
        timed_out=timed_out,
        stuck_pid=stuck,
    )


def call_bounded(function: t.Callable[[], t.Any], deadline_s: float) -> Called:
    """Call ``function`` in a forked child; it returns JSON-able data. A hang or a crash in it can't reach the caller.
    """
    return begin_call(function, deadline_s).finish()


def begin_call(function: t.Callable[[], t.Any], deadline_s: float) -> Begun:
    """call_bounded in two halves, so that the caller can do something else meanwhile. The deadline runs from here; the
    caller finishes or abandons it, whatever happens in between."""
    return _begin(function, deadline_s, json_bytes, json.loads)


def fetch_bounded(function: t.Callable[[], t.Any], deadline_s: float) -> Called:
    """Like call_bounded for our own plain values (dataclasses, tuples), which come back as they are.

    They travel pickled, so ``function`` must only run code of ours: foreign libraries belong into call_bounded.
    """
    return _begin(function, deadline_s, pickle.dumps, pickle.loads).finish()


def json_bytes(value: t.Any) -> bytes:
    """JSON as it goes through a pipe."""
    return json.dumps(value).encode()


class Begun:
    """A helper that works on a call. ``finish`` waits for its answer; ``abandon`` ends it where nobody wants that any
    more. Either once; the second does nothing after the first.
    """

    def __init__(
        self, pid: int, result_fd: int, end: float, load: t.Callable[[bytes], t.Any], failed: t.Optional[str] = None
    ) -> None:
        self._pid = pid
        self._fd = result_fd
        self._end = end
        self._load = load
        self._called = None if failed is None else Called(error=failed)

    def finish(self) -> Called:
        if self._called is None:
            self._called = self._wait()
        return self._called

    def abandon(self) -> None:
        if self._called is None:
            os.close(self._fd)
            _reap(self._pid, self._end, kill_now=True)
            self._called = Called(error="it was abandoned")

    def _wait(self) -> Called:
        pid, end = self._pid, max(self._end, time.monotonic() + FETCH_GRACE_S)
        chunks, timed_out = _collect({self._fd: "result"}, pid, end, FETCH_LIMIT_BYTES)
        # Where it waits is only to be seen before it is ended, and most waits can be ended.
        state, wchan = _state_of(pid) if timed_out else (None, None)
        status, stuck = _reap(pid, end, kill_now=timed_out)
        if timed_out:
            return Called(timed_out=True, stuck_pid=stuck, stuck_state=state, stuck_wchan=wchan)
        if len(chunks["result"]) >= FETCH_LIMIT_BYTES:
            return Called(error=f"the helper's answer is larger than {FETCH_LIMIT_BYTES // 2**20} MiB")
        try:
            answer = self._load(chunks["result"])
        except (ValueError, EOFError, pickle.UnpicklingError):
            return Called(error=f"the helper process {_unanswered(status)}")
        return Called(value=answer.get("value"), error=answer.get("error"))


def _begin(
    function: t.Callable[[], t.Any],
    deadline_s: float,
    dump: t.Callable[[t.Any], bytes],
    load: t.Callable[[bytes], t.Any],
) -> Begun:
    try:
        pid, ((result_r, result_w),) = _fork_with_pipes(1)
    except OSError as exc:
        return Begun(0, -1, 0.0, load, failed=_no_helper(exc))
    if pid == 0:
        _call_child(function, result_w, dump)
    os.close(result_w)
    return Begun(pid, result_r, time.monotonic() + deadline_s, load)


def _unanswered(status: t.Optional[int]) -> str:
    if status == -signal.SIGKILL:
        return "was killed, as the kernel does where the memory of the host or of this cgroup is used up"
    return f"ended without an answer (status {status})"


def spawn_detached(
    argv: t.Sequence[str],
    env: t.Mapping[str, str],
    cwd: str,
    log_path: str,
    uid: t.Optional[int] = None,
    gid: t.Optional[int] = None,
    groups: t.Optional[t.Sequence[int]] = None,
    limits: t.Sequence[tuple[int, tuple[int, int]]] = (),
) -> int:
    """Start a process that outlives this one and its connection; return its pid.

    The process leads a session of its own (its sid is its pid), reads /dev/null and writes to ``log_path``, which is
    opened before the user is changed (mode 0600). Its parent is pid 1: a second fork hands it over. ``limits`` are
    pairs for resource.setrlimit.

    Raises:
        CleanSlateError: the program could not be started; says which one and why.
    """
    try:
        middle, ((answer_r, answer_w),) = _fork_with_pipes(1)
    except OSError as exc:
        raise CleanSlateError(f"could not start {argv[0]}: {_no_helper(exc)}") from exc
    if middle == 0:
        _detach(answer_w)
        _detached_child(argv, env, cwd, log_path, (uid, gid, groups), limits, answer_w)
    os.close(answer_w)
    chunks, timed_out = _collect({answer_r: "answer"}, None, time.monotonic() + 20)
    _reap(middle, time.monotonic() + 1, kill_now=False)
    text = chunks["answer"].decode("utf-8", "replace")
    number, _sep, failure = text.partition("\n")
    if timed_out or failure or not number.isdigit():
        raise CleanSlateError(f"could not start {argv[0]}: {failure.strip() or 'no answer from the starting process'}")
    return int(number)


def _fork_with_pipes(count: int) -> tuple[int, list[tuple[int, int]]]:
    """A forked child and so many pipes to it.

    Raises:
        OSError: this process may have no more descriptors or children; nothing was left open.
    """
    pipes: list[tuple[int, int]] = []
    try:
        for _unused in range(count):
            pipes.append(os.pipe())
        return os.fork(), pipes
    except OSError:
        for pair in pipes:
            for fd in pair:
                os.close(fd)
        raise


def _no_helper(exc: OSError) -> str:
    """Why no helper could be started."""
    return f"no helper process could be started: {exhausted_by(exc, starting=True) or _words(exc)}"


def _detach(answer_fd: int) -> None:
    """Fork once more and end the one in the middle, so that process 1 becomes the parent. In a forked child: whatever
    happens, it must not go on as a second module.
    """
    try:
        os.setsid()
        if os.fork() == 0:
            return
    except OSError as exc:
        _write_all(answer_fd, f"\n{_no_helper(exc)}".encode())
    os._exit(0)


def _exec_child(
    argv: t.Sequence[str], env: t.Optional[t.Mapping[str, str]], stdio: tuple[int, int, int], fail_fd: int
) -> t.NoReturn:
    try:
        os.setsid()
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)
        keep = _keep_only(fail_fd)
        os.set_inheritable(keep, False)
        if env is None:
            os.execvp(argv[0], list(argv))
        os.execvpe(argv[0], list(argv), dict(env))
    except BaseException as exc:  # the child must end here, whatever happened
        _write_all(fail_fd, f"{argv[0]}: {_words(exc)}".encode())
    os._exit(127)


def _call_child(
    function: t.Callable[[], t.Any], result_fd: int, dump: t.Callable[[t.Any], bytes]
) -> t.NoReturn:
    try:
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            _keep_only(result_fd)
            answer = dump({"value": function()})
        except Exception as exc:  # handed to the parent, which reports it
            answer = dump({"error": exhausted_by(exc) or f"{type(exc).__name__}: {exc}"})
        _write_all(result_fd, answer)
    finally:
        os._exit(0)


def _detached_child(
    argv: t.Sequence[str],
    env: t.Mapping[str, str],
    cwd: str,
    log_path: str,
    ids: tuple[t.Optional[int], t.Optional[int], t.Optional[t.Sequence[int]]],
    limits: t.Sequence[tuple[int, tuple[int, int]]],
    answer_fd: int,
) -> t.NoReturn:
    try:
        os.setsid()
        _write_all(answer_fd, f"{os.getpid()}\n".encode())
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _keep_only(answer_fd)
        os.set_inheritable(answer_fd, False)
        _set_limits(limits)
        uid, gid, groups = ids
        if gid is not None:
            os.setgroups(list(groups) if groups is not None else [gid])
            os.setgid(gid)
        if uid is not None:
            os.setuid(uid)
        os.umask(0o027)
        os.chdir(cwd)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execvpe(argv[0], list(argv), dict(env))
    except BaseException as exc:  # the child must end here, whatever happened
        _write_all(answer_fd, _words(exc).encode())
    os._exit(127)


def _set_limits(limits: t.Sequence[tuple[int, tuple[int, int]]]) -> None:
    import resource

    for which, pair in limits:
        resource.setrlimit(which, pair)


def _words(exc: BaseException) -> str:
    if isinstance(exc, OSError) and exc.errno is not None:
        name = f" ({exc.filename})" if exc.filename else ""
        return os.strerror(exc.errno) + name
    return f"{type(exc).__name__}: {exc}"


def _keep_only(fd: int) -> int:
    """Close every descriptor above 2 but this one: a helper must not hold the module's pipes."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number != fd:
            try:
                os.close(number)
            except OSError as exc:
                if exc.errno != errno.EBADF:
                    raise
    return fd


def _write_all(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except OSError as exc:
            if exc.errno == errno.EPIPE:  # nobody listens any more
                return
            raise


def _feed(fd: int, data: t.Optional[bytes]) -> None:
    """Hand over standard input; only what fits a pipe (64 KiB) is ever given, so this can't block."""
    try:
        if data:
            _write_all(fd, data[:65536])
    finally:
        os.close(fd)


def _collect(
    names: dict[int, str], pid: t.Optional[int], end: float, limit: int = OUTPUT_LIMIT_BYTES
) -> tuple[dict[str, bytes], bool]:
    """Read all pipes until they close, the process has ended and they are empty, or the time is up."""
    poller = select.poll()
    for fd in names:
        os.set_blocking(fd, False)
        poller.register(fd, select.POLLIN | select.POLLHUP)
    chunks = {name: bytearray() for name in names.values()}
    open_fds = set(names)
    timed_out = False
    while open_fds:
        left = end - time.monotonic()
        if left <= 0:
            timed_out = True
            break
        ready = poller.poll(min(left, 0.2) * 1000)
        for fd, _events in ready:
            data = os.read(fd, 65536)
            if not data:
                poller.unregister(fd)
                open_fds.discard(fd)
                continue
            if len(chunks[names[fd]]) < limit:
                chunks[names[fd]] += data
        # A grandchild may keep a pipe open for ever: the command's own end is what counts.
        if not ready and pid is not None and _has_ended(pid):
            break
    for fd in names:
        os.close(fd)
    return {name: bytes(data) for name, data in chunks.items()}, timed_out


def _has_ended(pid: int) -> bool:
    """Look without reaping: the status is still needed."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _reap(pid: int, end: float, kill_now: bool) -> tuple[t.Optional[int], t.Optional[int]]:
    """Wait for our own child until ``end``, then kill its session; return (status, pid if it can't be killed)."""
    killed = False
    if kill_now:
        _kill_session(pid)
        killed = True
        end = time.monotonic() + REAP_GRACE_S
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None, None
        if done:
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
            return code, None
        if time.monotonic() >= end:
            if killed:
                return None, pid
            _kill_session(pid)
            killed = True
            end = time.monotonic() + REAP_GRACE_S
        time.sleep(0.005)


def _kill_session(pid: int) -> None:
    """Kill a helper of ours and what it started; the pid is our unreaped child, so it can't name anybody else."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _state_of(pid: int) -> tuple[t.Optional[str], t.Optional[str]]:
    state = wchan = None
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
        with open(f"/proc/{pid}/wchan", encoding="utf-8", errors="replace") as handle:
            wchan = handle.read().strip() or None
    except (OSError, IndexError):
        return state, wchan
    return state, wchan
