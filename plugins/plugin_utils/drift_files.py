# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of drift checks, in one directory that any number of runs may share.

Whoever writes holds the directory's lock. A file is written beside its place and renamed, so that a reader, or a run
that is killed in the middle, never leaves half a file. The history alone is added to: a line that was cut short by a
kill is taken away by the next run, before it adds its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
import typing as t
from pathlib import Path

from . import drift_history
from .drift_answers import JSON
from .drift_document import SCHEMA, SCHEMA_VERSION, is_whole

LATEST, HISTORY, METRICS, JUNIT, PAGE = "latest.json", "history.jsonl", "metrics.prom", "junit.xml", "index.html"
LOCK = ".lock"
RUNS, KEPT_RUNS = ".runs", "runs"
LOCK_DEADLINE_S = 60.0
_LATEST_LIMIT = 512 * 2**20
_TEMPORARY = ".tmp"
_RANDOM_BYTES = 6
_NAMES = "|".join(re.escape(name) for name in (LATEST, HISTORY, METRICS, JUNIT, PAGE))
_OURS = re.compile(rf"\.({_NAMES})\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}{re.escape(_TEMPORARY)}")


class DriftFilesError(Exception):
    """The output can't be written or read; the message says what and where."""


class Store:
    """One output directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def prepare(self) -> None:
        """The directory is there and can be written to."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with open(self.directory / LOCK, "ab"):
                pass
        except OSError as error:
            raise DriftFilesError(f"--out {self.directory}: {error.strerror or error}") from error

    @contextlib.contextmanager
    def locked(self, deadline_s: float = LOCK_DEADLINE_S) -> t.Iterator[None]:
        """Hold the directory's lock. The kernel gives it back when its holder dies, however that dies."""
        end = time.monotonic() + deadline_s
        with open(self.directory / LOCK, "ab") as handle:
            while not _try_lock(handle.fileno()):
                if time.monotonic() > end:
                    lock = self.directory / LOCK
                    raise DriftFilesError(f"{lock} is held by another run for {deadline_s:.0f} s; nothing was written")
                time.sleep(0.05)
            self._sweep()
            yield

    def _sweep(self) -> None:
        """What killed runs left: only a holder of the lock writes such files, and that is us now."""
        for path in self.directory.glob(f".*{_TEMPORARY}"):
            if _OURS.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()

    # --- the newest document ------------------------------------------------------------------------------------------

    def latest(self) -> tuple[t.Optional[JSON], t.Optional[str]]:
        """(the document of the last run, None where there is none; why it can't be used)."""
        path = self.directory / LATEST
        try:
            if path.stat().st_size > _LATEST_LIMIT:
                return None, f"{path} is too large to be ours; it is replaced"
            document = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError, RecursionError) as error:
            return None, f"{path} could not be read ({error}); it is replaced"
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            return None, f"{path} is no document of a drift check; it is replaced"
        if document.get("schema_version") != SCHEMA_VERSION:
            return None, f"{path} is of schema version {document.get('schema_version')}; it is replaced"
        if not is_whole(document):
            return None, f"{path} has lost a part of what a drift check writes; it is replaced"
        return document, None

    def write(self, name: str, content: t.Union[str, bytes]) -> None:
        """One whole file, under the lock."""
        write_atomic(self.directory / name, content)

    # --- history ------------------------------------------------------------------------------------------------------

    def add_history(self, line: t.Mapping[str, t.Any], now: float, limits: drift_history.Limits) -> None:
        """One more line, under the lock; once a day, and where it is too large, the file is compacted first."""
        path = self.directory / HISTORY
        added = drift_history.dump(line)
        try:
            with open(path, "a+b") as handle:
                _repair(handle)
                size = handle.seek(0, os.SEEK_END)
                first, last = _ends(handle, size)
                if not drift_history.needs_compaction(first, last, size + len(added), now, limits):
                    handle.seek(0, os.SEEK_END)
                    handle.write(added)
                    handle.flush()
                    os.fsync(handle.fileno())
                    return
                handle.seek(0)
                kept = drift_history.compact(handle, now, limits, len(added))
            write_atomic(path, b"".join([*kept, added]))
        except OSError as error:
            raise DriftFilesError(f"{path}: {error.strerror or error}") from error

    def history(self) -> list[bytes]:
        """All lines; a cut one is skipped by who parses them."""
        try:
            with open(self.directory / HISTORY, "rb") as handle:
                return handle.readlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DriftFilesError(f"{self.directory / HISTORY}: {error.strerror or error}") from error

    # --- directories of runs ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def run_directory(self, run_id: str, keep: t.Optional[int]) -> t.Iterator[Path]:
        """A fresh directory for ansible-runner, readable by its owner alone; removed at the end, also those of runs
        that were killed. With ``keep`` it is moved to ``runs`` instead, of which the newest ``keep`` stay."""
        base = self.directory / RUNS
        path = base / run_id
        with contextlib.ExitStack() as stack:
            # Made and locked in one go: a directory without a locked lock is one of a dead run.
            with self.locked():
                try:
                    base.mkdir(mode=0o700, exist_ok=True)
                    path.mkdir(mode=0o700)
                    handle = stack.enter_context(open(path / LOCK, "wb"))
                except OSError as error:
                    raise DriftFilesError(f"{path}: {error.strerror or error}") from error
                _try_lock(handle.fileno())
                self._remove_dead(base, run_id)
            try:
                yield path
            finally:
                if keep is None:
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    self._keep(path, keep)

    def _remove_dead(self, base: Path, own: str) -> None:
        for path in base.iterdir():
            if path.name == own:
                continue
            try:
                with open(path / LOCK, "ab") as handle:
                    if _try_lock(handle.fileno()):
                        shutil.rmtree(path, ignore_errors=True)
            except OSError as error:
                # Another run removes its own at this moment, or it is no directory of a run.
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    raise DriftFilesError(f"{path}: {error.strerror or error}") from error

    def _keep(self, path: Path, count: int) -> None:
        kept = self.directory / KEPT_RUNS
        kept.mkdir(mode=0o700, exist_ok=True)
        os.replace(path, kept / path.name)
        for old in sorted(each for each in kept.iterdir())[:-count]:
            shutil.rmtree(old, ignore_errors=True)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_atomic(path: Path, content: t.Union[str, bytes]) -> None:
    """A file, whole or not at all. Its name meanwhile begins with a dot and ends in .tmp, which no collector reads."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(_RANDOM_BYTES)}{_TEMPORARY}")
    try:
        # Readable as the umask says: others than the owner collect metrics and serve the page.
        with open(temporary, "xb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise DriftFilesError(f"{path}: {error.strerror or error}") from error


def _repair(handle: t.IO[bytes]) -> None:
    """Take away a last line that has no end."""
    size = handle.seek(0, os.SEEK_END)
    end = size
    while end > 0:
        start = max(0, end - 65536)
        handle.seek(start)
        block = handle.read(end - start)
        found = block.rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end != size:
        handle.truncate(end)


def _ends(handle: t.IO[bytes], size: int) -> tuple[t.Optional[bytes], t.Optional[bytes]]:
    """The first and the last line of a file whose last line is whole."""
    if not size:
        return None, None
    handle.seek(0)
    first = handle.readline()
    start = size - 1
    tail = b""
    while start > 0 and b"\n" not in tail[:-1]:
        block_start = max(0, start - 65536)
        handle.seek(block_start)
        tail = handle.read(size - block_start)
        start = block_start
    return first, tail[:-1].rpartition(b"\n")[2] + b"\n"
