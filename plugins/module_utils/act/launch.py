# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starts a server: preconditions first, then the files, then the process, and the record around it.

A run that dies in between leaves a record in the state "starting"; the next run finds the process, if there is one,
by the launch's
configuration file on its command line. Two runs for one server exclude each other by a lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import os
import resource
import stat
import time
import typing as t
from dataclasses import dataclass

from ..errors import CleanSlateError, NotPermitted
from ..model import Process
from ..observe.bounded import fetch_process, fetch_processes
from ..observe.systemd import has_systemd, read_unit
from ..sglang.causes import last_error
from ..sglang.cmdline import is_leader
from ..sglang.files import open_regular
from ..sglang.keeping import cut_logs, living_launches, prune, remove_launch
from ..sglang.launch import Account, LaunchPlan, LaunchRequest
from ..sglang.record import (
    KEPT_LAUNCHES,
    Record,
    create_launch_dir,
    create_server_dir,
    read_record,
    recorded_process,
    server_dir,
    write_file,
    write_record,
)
from ..sglang.record_files import What, check_links, set_link, write_document, write_summary
from ..sglang.redact import Redactor
from ..sglang.unit import MARK
from ..spawn import Called, call_bounded, run_bounded, spawn_detached

ACCESS_DEADLINE_S = 20.0
RELOAD_DEADLINE_S = 60.0
START_DEADLINE_S = 60.0
DEFAULT_UNIT_DIR = "/etc/systemd/system"
JOURNAL_DEADLINE_S = 10.0
_OPEN_FILES = 1048576
_LEAST_OPEN_FILES = 1024  # what a login has at least by default; with fewer a server dies while it starts
_UNIT_LIMIT = 1 << 20
_RUNNING = ("active", "activating", "reloading")


@dataclass(frozen=True)
class _Journal:
    """A unit's output since this start; an earlier one's errors would explain nothing."""

    unit: str
    since: float
    redactor: Redactor

    def error(self) -> str:
        """The cause, for a message and without secrets; empty if the output doesn't tell."""
        argv = ["journalctl", "--unit", self.unit, "--since", f"@{self.since:.6f}"]
        done = run_bounded([*argv, "--lines", "200", "--output", "cat", "--no-pager"], JOURNAL_DEADLINE_S)
        cause = last_error(done.stdout) if done.ok else None
        return f" ({self.redactor.text(cause)})" if cause else ""


@dataclass(frozen=True)
class Launched:
    """What was done: the completed record, and each file with whether its content is new.

    ``problems``: what of the record's upkeep failed while the server was started all the same.
    """

    record: Record
    files: tuple[tuple[str, bool], ...]
    problems: tuple[str, ...] = ()


def choose_launcher(wanted: str, run: str = "/run") -> str:
    """systemd where it runs and we may write units, else a detached process."""
    if wanted != "auto":
        return wanted
    return "systemd" if has_systemd(run) and os.geteuid() == 0 else "detached"


# --- before anything is touched ---------------------------------------------------------------------------------------


def check_preconditions(
    request: LaunchRequest,
    processes: t.Mapping[int, Process],
    unit_dir: str = DEFAULT_UNIT_DIR,
    run: str = "/run",
    may_run: bool = False,
) -> t.Optional[Record]:
    """Raise CleanSlateError for what would make the start fail; return the record of the launch before, if any.

    ``may_run``: a server that lives now is no error, since it would be evicted before the start.
    """
    if request.launcher == "systemd":
        _check_systemd(unit_dir, run)
    if os.geteuid() != 0 and request.account.uid != os.geteuid():
        raise NotPermitted(f"only root can start a server as {request.account.user!r}; use become, or leave user away")
    if request.launcher != "systemd":
        _check_open_files()
    _check_paths(request)
    _check_state_dir(request.state_dir)
    check_links(request.state_dir, request.name)
    before = check_not_running(request, processes, may_run)
    if request.launcher == "systemd":
        check_unit_free(request, unit_dir, processes, may_run)
    return before


def check_not_running(
    request: LaunchRequest, processes: t.Mapping[int, Process], may_run: bool = False
) -> t.Optional[Record]:
    """Raise if a process of the record lives (unless it may); return the record of the launch before, if any."""
    reading = read_record(request.state_dir, request.name)
    if reading.problem is not None:
        raise CleanSlateError(f"{reading.problem}; look at it, then remove or mend it")
    if reading.record is None:
        return None
    alive = recorded_process(reading.record, processes, request.boot_id)
    if alive is not None and not may_run:
        raise CleanSlateError(
            f"the server {request.name!r} runs already: pid {alive.pid}, launch {reading.record.launch_id}. "
            f"End it with gpu_evict (name: {request.name}) first"
        )
    return reading.record


def check_unit_free(
    request: LaunchRequest,
    unit_dir: str,
    processes: t.Mapping[int, Process],
    may_run: bool = False,
) -> None:
    """Raise if the unit is somebody else's, or runs: a start would then start nothing.

    ``may_run``: an SGLang server in it is no error, since it would be evicted before the start.
    """
    unit = str(request.unit)
    path = os.path.join(unit_dir, unit)
    text = read_unit_file(path)
    if text is not None and MARK not in text:
        raise CleanSlateError(
            f"unit: {path} was not written by cleanslate.sglang; choose another unit name, or move it away"
        )
    seen = read_unit(unit)
    if seen is None:
        raise CleanSlateError(f"unit: systemd does not tell the state of {unit}")
    if seen.active_state not in _RUNNING or not seen.main_pid:
        return
    process = processes.get(seen.main_pid)
    if may_run and process is not None and is_leader(process.argv):
        return
    words = "" if process is None else f" ({request.redactor.text(' '.join(request.redactor.argv(process.argv)))})"
    raise CleanSlateError(
        f"unit: {unit} is {seen.active_state} with pid {seen.main_pid}{words}, which no record here stands for; "
        "stop that unit, or choose another unit name"
    )


def _check_systemd(unit_dir: str, run: str) -> None:
    if not has_systemd(run):
        raise CleanSlateError("launcher is systemd, but systemd does not run here; say launcher: detached, or auto")
    if os.geteuid() != 0:
        raise NotPermitted("launcher is systemd: only root may write units; use become, or launcher: detached")
    if not os.path.isdir(unit_dir):
        raise CleanSlateError(f"unit_dir: {unit_dir} is not a directory")


def _check_open_files() -> None:
    """A server that we start ourselves can't have more open files than we may give it."""
    files = _settable(resource.RLIMIT_NOFILE, _OPEN_FILES)[1]
    if files != resource.RLIM_INFINITY and files < _LEAST_OPEN_FILES:
        raise CleanSlateError(
            f"no more than {files} files may be open at once here (RLIMIT_NOFILE), and that can't be raised; a server "
            f"needs {_LEAST_OPEN_FILES} at least. Raise it for the account that logs in (limits.conf), or say "
            "launcher: systemd"
        )


def _check_paths(request: LaunchRequest) -> None:
    """Paths as the server's account sees them, in a bounded child: a model may lie on a file server that is dead."""
    if not request.python.startswith("/"):
        raise CleanSlateError(f"python: {request.python!r} must be an absolute path")
    wanted = [("python", request.python, "program")]
    names = {name.lstrip("-").replace("_", "-"): value for name, value in request.flags.items()}
    model = names.get("model-path", names.get("model"))
    if isinstance(model, str) and model.startswith("/"):
        wanted.append(("flags: model_path", model, "any"))
    if request.workdir is not None:
        wanted.append(("workdir", request.workdir, "directory"))
    if request.log is not None and request.log.startswith("/"):
        wanted.append(("log: the folder", os.path.dirname(request.log), "present"))
    called = _ask_as(request.account, lambda: [_look_at(path, kind) for _what, path, kind in wanted])
    if not called.ok:
        paths = ", ".join(path for _what, path, _kind in wanted)
        why = called.error or f"no answer within {ACCESS_DEADLINE_S:g} s (a dead file server?)"
        raise CleanSlateError(f"could not look at {paths} as {request.account.user!r}: {why}")
    problems = [f"{what}: {path} {problem}" for (what, path, _kind), problem in zip(wanted, called.value) if problem]
    if problems:
        raise CleanSlateError("; ".join(problems) + f" (seen as user {request.account.user!r})")


def _ask_as(account: Account, question: t.Callable[[], t.Any]) -> Called:
    """Put a question as the server's account, in a bounded child."""

    def ask() -> t.Any:
        if os.geteuid() == 0 and account.uid != 0:
            os.setgroups(list(account.groups) or [account.gid])
            os.setgid(account.gid)
            os.setuid(account.uid)
        return question()

    return call_bounded(ask, ACCESS_DEADLINE_S)


def _look_at(path: str, kind: str) -> t.Optional[str]:
    """What is wrong with a path, seen by this process's user."""
    try:
        status = os.stat(path)
    except PermissionError:
        return "can't be reached: a folder above it is closed for this user"
    except OSError as error:
        return (
            f"is missing ({error.strerror})"
            if isinstance(error, FileNotFoundError)
            else f"can't be used: {error.strerror}"
        )
    if kind == "program":
        if not stat.S_ISREG(status.st_mode):
            return "is no file"
        return None if os.access(path, os.X_OK) else "is not executable"
    if kind == "present":
        return None if stat.S_ISDIR(status.st_mode) else "is no directory"
    mode = os.R_OK | (os.X_OK if stat.S_ISDIR(status.st_mode) else 0)
    if kind == "directory" and not stat.S_ISDIR(status.st_mode):
        return "is no directory"
    return None if os.access(path, mode) else "can't be read"


def _check_state_dir(state_dir: str) -> None:
    if not state_dir.startswith("/"):
        raise CleanSlateError(f"state_dir: {state_dir!r} must be an absolute path")
    existing = state_dir
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise CleanSlateError(f"state_dir: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise NotPermitted(f"state_dir: {existing} can't be written; use become, or choose another state_dir")


# --- the start --------------------------------------------------------------------------------------------------------


Documents = t.Mapping[What, t.Mapping[str, t.Any]]


def start(
    request: LaunchRequest,
    plan: LaunchPlan,
    unit_dir: str = DEFAULT_UNIT_DIR,
    keep: int = KEPT_LAUNCHES,
    documents: t.Optional[Documents] = None,
) -> Launched:
    """Write the files, start the server, complete the record. ``documents``: what was found and done before."""
    state_dir, name, launch_id = request.state_dir, request.name, plan.record.launch_id
    create_server_dir(state_dir, name)
    with _locked(server_dir(state_dir, name), name):
        processes = fetch_processes()
        check_not_running(request, processes)
        if request.launcher == "systemd":
            check_unit_free(request, unit_dir, processes)
        living = living_launches(state_dir, name, (process.argv for process in processes.values()))
        problems = cut_logs(state_dir, name, living)
        try:
            files = _write_files(request, plan, documents or {})
        except BaseException:
            # Nothing names this launch yet: its folder would be taken for one that was interrupted.
            remove_launch(state_dir, name, launch_id)
            raise
        files += [(path, True) for path in write_record(state_dir, plan.record)]
        set_link(state_dir, name, "current", launch_id)
        try:
            process = _start_process(request, plan, unit_dir, files)
        except CleanSlateError as error:
            _note_failure(request, plan.record, str(error))
            raise
        record = _complete(state_dir, plan.record, process)
        problems += _keep_house(state_dir, record, keep, living)
    return Launched(record, tuple(files), tuple(problems))


def _start_process(
    request: LaunchRequest, plan: LaunchPlan, unit_dir: str, files: list[tuple[str, bool]]
) -> Process:
    if request.launcher != "systemd":
        return _start_detached(request, plan)
    changed, process = _start_unit(request, plan, unit_dir)
    files.append((os.path.join(unit_dir, str(request.unit)), changed))
    return process


def _note_failure(request: LaunchRequest, record: Record, error: str) -> None:
    """A launch that did not even start has its verdict already: nobody will come to judge it."""
    where = (request.state_dir, record.name, record.launch_id)
    with contextlib.suppress(CleanSlateError):
        write_document(*where, "proof", {"verdict": "failed", "error": error, "at": _now()}, request.redactor)
        write_summary(*where)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0).isoformat()


def _write_files(request: LaunchRequest, plan: LaunchPlan, documents: Documents) -> list[tuple[str, bool]]:
    """Everything in the launch's folder but its record."""
    account, redactor = request.account, request.redactor
    state_dir, name, launch_id = request.state_dir, request.name, plan.record.launch_id
    gid = account.gid if os.geteuid() == 0 else None
    folder = create_launch_dir(state_dir, name, launch_id, gid)
    owner = (account.uid, account.gid)
    paths = [write_file(folder, "env", plan.files["env"].encode())]
    config = write_file(folder, "config.yaml", plan.files["config.yaml"].encode(), owner=owner)
    _check_readable(account, config)
    paths.append(config)
    paths += [write_file(folder, file, text.encode()) for file, text in plan.kept.items()]
    paths += [write_document(state_dir, name, launch_id, what, data, redactor) for what, data in documents.items()]
    if plan.log_path is not None and os.path.dirname(plan.log_path) == folder:
        paths.append(write_file(folder, os.path.basename(plan.log_path), b"", owner=owner))
    return [(path, True) for path in paths]


def _complete(state_dir: str, starting: Record, process: Process) -> Record:
    record = dataclasses.replace(
        starting,
        state="started",
        pid=process.pid,
        start_ticks=process.start_ticks,
        sid=process.sid,
        started_at=_now(),
    )
    try:
        write_record(state_dir, record)
    except CleanSlateError as error:
        raise CleanSlateError(
            f"the server {record.name!r} was started (pid {process.pid}), and its record can't be completed: {error}. "
            "It runs, and the next run finds it by its configuration file"
        ) from error
    return record


def _keep_house(state_dir: str, record: Record, keep: int, living: t.Collection[str]) -> list[str]:
    """What may fail without harm: the server was started."""
    problems = []
    try:
        write_summary(state_dir, record.name, record.launch_id)
    except CleanSlateError as error:
        problems.append(str(error))
    return problems + prune(state_dir, record.name, keep, living)[1]


@contextlib.contextmanager
def _locked(folder: str, name: str) -> t.Iterator[None]:
    fd = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CleanSlateError(f"another run starts the server {name!r} at this moment; wait for it") from None
        yield
    finally:
        os.close(fd)


def _check_readable(account: Account, path: str) -> None:
    called = _ask_as(account, lambda: os.access(path, os.R_OK))
    if called.value is not True:
        raise CleanSlateError(
            f"the user {account.user!r} can't read {path}: a folder above it is closed; choose another state_dir"
        )


def _start_detached(request: LaunchRequest, plan: LaunchPlan) -> Process:
    account = request.account
    root = os.geteuid() == 0
    pid = spawn_detached(
        list(plan.argv),
        dict(plan.environment),
        request.workdir or "/",
        str(plan.log_path),
        uid=account.uid if root else None,
        gid=account.gid if root else None,
        groups=(account.groups or (account.gid,)) if root else None,
        limits=_limits(request.limit_memlock),
    )
    process = fetch_process(pid)
    if process is None:
        raise CleanSlateError(f"the server {request.name!r} (pid {pid}) ended at once; see {plan.log_path}")
    return process


def _limits(memlock: str) -> list[tuple[int, tuple[int, int]]]:
    """Limits that can be set here: without the right to raise them, what is allowed already."""
    infinity = resource.RLIM_INFINITY
    wanted = {
        resource.RLIMIT_MEMLOCK: infinity if memlock == "infinity" else int(memlock),
        resource.RLIMIT_NOFILE: _OPEN_FILES,
    }
    return [(which, _settable(which, value)) for which, value in wanted.items()]


def _settable(which: int, value: int) -> tuple[int, int]:
    """The pair that a child may set: as wanted, else the hard limit that is there."""
    called = call_bounded(lambda: resource.setrlimit(which, (value, value)), 5.0)
    hard = resource.getrlimit(which)[1]
    return (value, value) if called.ok else (hard, hard)


def _start_unit(request: LaunchRequest, plan: LaunchPlan, unit_dir: str) -> tuple[bool, Process]:
    """Write and start the unit; returns whether its text is new, and the main process."""
    unit = str(request.unit)
    text = str(plan.unit_text)
    path = os.path.join(unit_dir, unit)
    changed = read_unit_file(path) != text
    if changed:
        write_file(unit_dir, unit, text.encode(), mode=0o644)
    redactor = request.redactor
    _systemctl(["daemon-reload"], RELOAD_DEADLINE_S, redactor)
    run_bounded(["systemctl", "reset-failed", unit], RELOAD_DEADLINE_S)  # fails where there is nothing to reset
    _systemctl(["enable" if request.enabled else "disable", unit], RELOAD_DEADLINE_S, redactor)
    journal = _Journal(unit, time.time(), redactor)
    _systemctl(["start", unit], START_DEADLINE_S, redactor, journal)
    seen = read_unit(unit)
    process = fetch_process(seen.main_pid) if seen is not None and seen.main_pid else None
    if process is None:
        raise CleanSlateError(
            f"the unit {unit} was started and has no main process{journal.error()}; see journalctl -u {unit}"
        )
    if plan.record.config not in process.argv and not process.dead:
        raise CleanSlateError(
            f"the unit {unit} was started, and its main process {process.pid} is not this launch: "
            f"{plan.record.config} is not on its command line; see systemctl cat {unit}"
        )
    return changed, process


def read_unit_file(path: str) -> t.Optional[str]:
    """The text of a unit, None if there is none. A link (a masked unit is one) or a device has the text ''."""
    if not os.path.lexists(path):
        return None
    try:
        fd = open_regular(path)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ELOOP):
            return ""
        raise NotPermitted(f"unit: {path} can't be read: {error.strerror}") from error
    with os.fdopen(fd, encoding="utf-8", errors="replace") as stream:
        return stream.read(_UNIT_LIMIT)


def _systemctl(
    words: list[str], deadline_s: float, redactor: Redactor, journal: t.Optional[_Journal] = None
) -> None:
    done = run_bounded(["systemctl", *words], deadline_s)
    if done.ok:
        return
    said = redactor.text(" ".join((done.error or done.stderr or "").split()))
    why = f"gave no answer within {deadline_s:g} s" if done.timed_out else f"failed: {said or f'status {done.rc}'}"
    raise CleanSlateError(f"systemctl {' '.join(words)} {why}{'' if journal is None else journal.error()}")
