# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record of a launch on the host: who was started, when, with what.

    <state_dir>/<server>/current.json                  0644, no secret in it
    <state_dir>/<server>/current, last_good            links to launches/<launch id>, see record_files
    <state_dir>/<server>/launches/<launch id>/         root and the server's group may enter (0710)
        config.yaml   0600, the server's user: SGLang's --config, may hold the API keys
        env           0600: KEY=VALUE lines
        record.json   0600: the same as current.json at that time
        request.json  0600: what was asked for, without secrets (kept.py)
        unit          0600: the text of the unit that was written
        plan.json ... proof.json, summary.txt          0600: documents, see record_files
        server.log    0600: output of a detached server

The record is written as "starting" (no pid) before the start and completed after it, so a run that dies in between
leaves a trace:
the path of config.yaml on the leader's command line is unique to the launch. Files are written beside their place and
renamed.
Folders that another user could change are refused, symbolic links are never followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import stat
import time
import typing as t
from dataclasses import dataclass, field

from ..errors import CleanSlateError, NotPermitted
from ..model import Process
from .cmdline import is_leader

CURRENT = "current.json"
LAUNCHES = "launches"
KEPT_LAUNCHES = 10
LIMIT_BYTES = 1024 * 1024
STALE_S = 600.0
"""A file that waits for its rename for longer than that has lost its writer."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LAUNCH_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{4}")


@dataclass(frozen=True)
class Record:
    """What was started. ``state``: starting (pid unknown) or started.

    ``gpus``: UUIDs or indices in the order of CUDA_VISIBLE_DEVICES; None: all GPUs of the host. ``device``: gpu or cpu.
    ``waivers``: guardrails that were accepted, with the reasons. ``flags`` and ``environment`` are redacted.
    ``started_at``: UTC, ISO 8601. ``pid``, ``start_ticks`` and ``boot_id`` name the leader.
    ``from_launch``: the kept launch that this one repeats. ``operator`` and ``run_id``: who asked for it, in which run.
    ``fingerprint``: what the host had at the start beside the flags (observe/fingerprint.py); None: nobody looked.
    """

    name: str
    launch_id: str
    state: str
    launcher: str
    boot_id: t.Optional[str] = None
    unit: t.Optional[str] = None
    pid: t.Optional[int] = None
    start_ticks: t.Optional[int] = None
    sid: t.Optional[int] = None
    started_at: t.Optional[str] = None
    user: t.Optional[str] = None
    host: t.Optional[str] = None
    port: t.Optional[int] = None
    device: str = "gpu"
    gpus: t.Optional[tuple[str, ...]] = None
    python: t.Optional[str] = None
    config: t.Optional[str] = None
    config_hash: t.Optional[str] = None
    flags: t.Mapping[str, t.Any] = field(default_factory=dict)
    environment: t.Mapping[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    log: t.Optional[str] = None
    waivers: t.Mapping[str, str] = field(default_factory=dict)
    from_launch: t.Optional[str] = None
    operator: t.Optional[str] = None
    run_id: t.Optional[str] = None
    fingerprint: t.Optional[t.Mapping[str, t.Any]] = None


@dataclass(frozen=True)
class Reading:
    """A record that was looked for. Neither: there is none. ``problem``: there is one, and it can't be used, and
    why."""

    record: t.Optional[Record] = None
    problem: t.Optional[str] = None


_TEXT = ("name", "launch_id", "state", "launcher", "device")
_OPTIONAL_TEXT = (
    *("boot_id", "unit", "started_at", "user", "host", "python", "config", "config_hash", "log"),
    *("from_launch", "operator", "run_id"),
)
_OPTIONAL_INTEGER = ("pid", "start_ticks", "sid", "port")
_STATES = ("starting", "started")


def parse(text: str) -> Record:
    """A record from JSON; raises ValueError that says what is wrong. Keys that are not known are passed over."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("is not a JSON object")
    values: dict[str, t.Any] = {"device": data.get("device", "gpu")}
    for name in _TEXT:
        values[name] = _typed(data, name, (str,), values.get(name))
    for name in _OPTIONAL_TEXT:
        values[name] = _typed(data, name, (str, type(None)))
    for name in _OPTIONAL_INTEGER:
        values[name] = _typed(data, name, (int, type(None)))
    gpus = _typed(data, "gpus", (list, type(None)))
    values["gpus"] = None if gpus is None else tuple(str(gpu) for gpu in gpus)
    values["argv"] = tuple(str(word) for word in _typed(data, "argv", (list,), []))
    values["flags"] = _typed(data, "flags", (dict,), {})
    values["environment"] = {str(k): str(v) for k, v in _typed(data, "environment", (dict,), {}).items()}
    values["waivers"] = {str(k): str(v) for k, v in _typed(data, "waivers", (dict,), {}).items()}
    values["fingerprint"] = _typed(data, "fingerprint", (dict, type(None)))
    if values["state"] not in _STATES:
        raise ValueError(f"has the state {values['state']!r}")
    for name in ("pid", "start_ticks", "sid", "port"):
        if values[name] is not None and values[name] <= 0:
            raise ValueError(f"has {name} {values[name]}")
    if not _NAME.fullmatch(values["name"]) or not _LAUNCH_ID.fullmatch(values["launch_id"]):
        raise ValueError("has no usable name or launch_id")
    if values["from_launch"] is not None and not _LAUNCH_ID.fullmatch(values["from_launch"]):
        raise ValueError("has no usable from_launch")
    return Record(**values)


def _typed(data: t.Mapping[str, t.Any], name: str, kinds: tuple[type, ...], default: t.Any = None) -> t.Any:
    value = data.get(name, default)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ValueError(f"has {name} of type {type(value).__name__}")
    return value


def to_text(record: Record) -> str:
    """The JSON that is written, with a newline at its end."""
    return json.dumps(dataclasses.asdict(record), indent=2, sort_keys=True) + "\n"


def new_launch_id(now: t.Optional[float] = None, taken: t.Iterable[str] = ()) -> str:
    """Sorts by time: 20260131T235959Z-1a2b. ``taken``: ids that are there; of the same second, ours comes after them.

    The clock may have been set back since an older launch: the id keeps the time of day, by which logs are found.
    """
    second = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    last = max((int(one[-4:], 16) for one in taken if is_launch_id(one) and one.startswith(second)), default=None)
    number = secrets.randbelow(0x8000) if last is None else min(last + 1, 0xFFFF)
    return f"{second}-{number:04x}"


def server_dir(state_dir: str, name: str) -> str:
    """Where everything about one server lies. Raises for a name that is no plain file name."""
    if not _NAME.fullmatch(name):
        raise CleanSlateError(
            f"{name!r} is no name of a server: letters, digits, '_', '.', '-', at most 64, no '-' or '.' first"
        )
    return os.path.join(state_dir, name)


def is_launch_id(text: str) -> bool:
    """Whether this names a launch, and so is safe as a file's name."""
    return _LAUNCH_ID.fullmatch(text) is not None


def launch_dir(state_dir: str, name: str, launch_id: str) -> str:
    """Where one launch's files lie. Raises for an id that is none."""
    if not is_launch_id(launch_id):
        raise CleanSlateError(f"{launch_id!r} is no id of a launch; they look like 20260131T235959Z-1a2b")
    return os.path.join(server_dir(state_dir, name), LAUNCHES, launch_id)


def read_record(state_dir: str, name: str) -> Reading:
    """The current record of a server. Never raises for what lies on the disk."""
    folder = server_dir(state_dir, name)
    path = os.path.join(folder, CURRENT)
    try:
        with opened_folder(folder) as dir_fd:
            text = read_small(CURRENT, dir_fd)
    except FileNotFoundError:
        return Reading()
    except (OSError, CleanSlateError) as error:
        return Reading(problem=f"the record {path} can't be read: {error}")
    try:
        record = parse(text)
    except (ValueError, RecursionError) as error:
        return Reading(problem=f"the record {path} can't be used: it {_reason(error)}")
    if record.name != name:
        return Reading(problem=f"the record {path} can't be used: it is of the server {record.name!r}")
    return Reading(record=record)


def _reason(error: BaseException) -> str:
    return f"is no JSON ({error})" if isinstance(error, (json.JSONDecodeError, RecursionError)) else str(error)


def find_recorded(state_dir: str, name: str) -> t.Optional[Record]:
    """The record, or None where there is none. One that is there and can't be used is an error: it is not 'no
    server'."""
    reading = read_record(state_dir, name)
    if reading.problem is not None:
        raise CleanSlateError(f"{reading.problem}; look at it, then remove or mend it")
    return reading.record


def list_records(state_dir: str) -> dict[str, Reading]:
    """All servers that were launched from this state directory, by name. A missing directory is an empty one."""
    try:
        names = sorted(os.listdir(state_dir))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise NotPermitted(f"the state directory {state_dir} can't be read: {error.strerror}") from error
    readings = {name: read_record(state_dir, name) for name in names if _NAME.fullmatch(name)}
    return {name: reading for name, reading in readings.items() if reading != Reading()}


def recorded_process(
    record: Record, processes: t.Mapping[int, Process], boot_id: t.Optional[str]
) -> t.Optional[Process]:
    """The leader that this record stands for, if it lives: by pid, start time and boot; for a launch that was
    interrupted (or a systemd restart) by the launch's own configuration file on a leader's command line."""
    if record.pid is not None and record.boot_id == boot_id and boot_id is not None:
        process = processes.get(record.pid)
        if process is not None and process.start_ticks == record.start_ticks and not process.dead:
            return process
    if record.config is None:
        return None
    for process in processes.values():
        if record.config in process.argv and is_leader(process.argv) and not process.dead:
            return process
    return None


# --- writing ----------------------------------------------------------------------------------------------------------


def create_server_dir(state_dir: str, name: str) -> str:
    """Make the folders of a server. Refuses what another user made or could change."""
    path = server_dir(state_dir, name)
    _create_folders(((state_dir, 0o755), (path, 0o755), (os.path.join(path, LAUNCHES), 0o711)))
    return path


def create_launch_dir(state_dir: str, name: str, launch_id: str, gid: t.Optional[int] = None) -> str:
    """Make the folders of a launch; ``gid``: the server's group, which may pass through (0710) but not list."""
    path = launch_dir(state_dir, name, launch_id)
    create_server_dir(state_dir, name)
    _create_folders(((path, 0o700 if gid is None else 0o710),))
    if gid is not None and os.geteuid() == 0:
        try:
            os.chown(path, 0, gid)
        except OSError as error:
            raise NotPermitted(f"{path}: {error.strerror}; the launch record needs that folder") from error
    return path


def _create_folders(steps: t.Iterable[tuple[str, int]]) -> None:
    for folder, mode in steps:
        try:
            os.makedirs(os.path.dirname(folder) or "/", mode=0o755, exist_ok=True)
            try:
                os.mkdir(folder, mode)
            except FileExistsError:
                with opened_folder(folder):
                    continue
            os.chmod(folder, mode)  # whatever the umask is
        except OSError as error:
            raise NotPermitted(f"{error.filename}: {error.strerror}; the launch record needs that folder") from error


def write_file(
    folder: str, name: str, data: bytes, mode: int = 0o600, owner: t.Optional[tuple[int, int]] = None
) -> str:
    """Write a file whole or not at all: beside its place, synced, renamed. Returns its path."""
    try:
        with opened_folder(folder) as dir_fd:
            create_file(dir_fd, name, data, mode, owner)
    except OSError as error:
        raise NotPermitted(f"can't write {os.path.join(folder, name)}: {error.strerror}") from error
    return os.path.join(folder, name)


def create_file(
    dir_fd: int, name: str, data: bytes, mode: int = 0o600, owner: t.Optional[tuple[int, int]] = None
) -> None:
    """The same in a folder that is open already. Raises OSError."""
    temporary = f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
            stream.flush()
            if owner is not None and os.geteuid() == 0:
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)
            os.fsync(fd)
        os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise
    _remove_stale(dir_fd, name)


def _remove_stale(dir_fd: int, name: str) -> None:
    """What writers of the same file left that were killed before the rename."""
    pattern = re.compile(rf"\.{re.escape(name)}\.[0-9]+\.[0-9a-f]{{8}}")
    with contextlib.suppress(OSError):
        for entry in filter(pattern.fullmatch, os.listdir(dir_fd)):
            status = os.stat(entry, dir_fd=dir_fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > STALE_S:
                os.unlink(entry, dir_fd=dir_fd)
    os.fsync(dir_fd)


def write_record(state_dir: str, record: Record) -> list[str]:
    """Write the record into the launch's folder and make it the current one. Returns both paths."""
    data = to_text(record).encode()
    folder = launch_dir(state_dir, record.name, record.launch_id)
    kept = write_file(folder, "record.json", data)
    return [kept, write_file(server_dir(state_dir, record.name), CURRENT, data, mode=0o644)]


@contextlib.contextmanager
def opened_folder(path: str) -> t.Iterator[int]:
    """A descriptor of a folder that only root or we can change; refuses links and other people's folders."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_owner(os.fstat(fd), path)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened_launch(state_dir: str, name: str, launch_id: str) -> t.Iterator[int]:
    """A descriptor of a launch's folder; none of the folders on the way below the state directory may be a link."""
    path = launch_dir(state_dir, name, launch_id)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with opened_folder(server_dir(state_dir, name)) as server_fd:
        launches_fd = os.open(LAUNCHES, flags, dir_fd=server_fd)
        try:
            _check_owner(os.fstat(launches_fd), os.path.dirname(path))
            fd = os.open(launch_id, flags, dir_fd=launches_fd)
        finally:
            os.close(launches_fd)
        try:
            _check_owner(os.fstat(fd), path)
            yield fd
        finally:
            os.close(fd)


def _check_owner(status: os.stat_result, path: str, owners: t.Collection[int] = ()) -> None:
    if status.st_uid not in (0, os.geteuid(), *owners):
        raise NotPermitted(f"{path} belongs to uid {status.st_uid}, who could change it under our hands")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotPermitted(f"{path} can be changed by others (mode {stat.S_IMODE(status.st_mode):04o})")


def read_small(name: str, dir_fd: int, owners: t.Collection[int] = ()) -> str:
    """A plain file's text. Raises OSError, or NotPermitted for a link, a pipe, a large file or another user's one.

    ``owners``: users, beside root and us, whose file it may be.
    """
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotPermitted("it is no plain file")
        _check_owner(status, name, owners)
    except BaseException:
        os.close(fd)
        raise
    with os.fdopen(fd, "rb") as stream:
        data = stream.read(LIMIT_BYTES + 1)
    if len(data) > LIMIT_BYTES:
        raise NotPermitted(f"it is larger than {LIMIT_BYTES} bytes")
    return data.decode("utf-8", errors="replace")
