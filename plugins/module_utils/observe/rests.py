# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a server's schedulers come to rest, seen from its own host and without asking them anything.

Since SGLang 0.5.13 each scheduler writes its loads into shared memory, with the time: after each prompt, after each
15th token, and, while it has nothing to do, in every round of its loop (once a second with --sleep-on-idle). So one
that works on a long step, or hangs, leaves its slot as it is. One whose slot was written twice since we began to look
has gone round its loop in between: it took up what was sent to it, and has come to an end with it, or tells it. (Once
is not enough: it may have stood still behind the point where it takes up requests.) 0.5.13 to 0.5.23 have one layout.

The file is found by who has it open, is read without its lock (a stopped scheduler would keep that for ever), and only
compared with itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import time
import typing as t

from ..spawn import fetch_bounded

_NAME = re.compile(r"^sglang_loads_[0-9A-Za-z._-]{1,100}\.shm(?: \(deleted\))?$")
_HEADER = struct.Struct("<4sHHI")  # magic, version, slots (one for each data parallel rank), bytes of a slot
_MAGIC, _VERSION = b"SLNS", 2
_MOST_RANKS, _SLOT_LIMIT = 1024, 1 << 20
_READ_DEADLINE_S = 5.0
_PAUSE_S = 0.1
_ROUNDS = 2
# An idle one wakes once a second with --sleep-on-idle; a busy machine may be late.
REST_S = 4.0

Slots = tuple[bytes, ...]


def read_slots(pids: t.Iterable[int], proc: str = "/proc") -> t.Union[Slots, str]:
    """A digest of each rank's slot, of the one file that these processes have; a text says why there is none."""
    found: dict[tuple[int, int], str] = {}
    for pid in pids:
        for path in _open_loads(f"{proc}/{pid}/fd"):
            try:
                status = os.stat(path)
            except OSError:
                continue
            found.setdefault((status.st_dev, status.st_ino), path)
    if len(found) != 1:
        return f"{len(found) or 'no'} files of loads are open in its processes"
    try:
        return _slots_of(next(iter(found.values())))
    except (OSError, struct.error) as error:
        return f"its file of loads can't be read: {error}"


def _open_loads(directory: str) -> t.Iterator[str]:
    """What a process has open that is named like a file of loads."""
    try:
        numbers = os.listdir(directory)
    except OSError:
        return
    for number in numbers:
        path = f"{directory}/{number}"
        try:
            if _NAME.match(os.path.basename(os.readlink(path))):
                yield path
        except OSError:
            continue


def _slots_of(path: str) -> t.Union[Slots, str]:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            return "its file of loads is no regular file"
        magic, version, ranks, size = _HEADER.unpack(stream.read(_HEADER.size))
        if (magic, version) != (_MAGIC, _VERSION) or not 0 < ranks <= _MOST_RANKS or not 0 < size <= _SLOT_LIMIT:
            return "its file of loads has another layout"
        return tuple(hashlib.sha256(stream.read(size)).digest() for _rank in range(ranks))


class Rests:
    """Called, it says whether every scheduler wrote its loads twice since then, within ``REST_S``.

    ``poke`` is called before each look: where schedulers of several hosts send their loads, node 0 writes them down
    when it is asked for them.
    """

    def __init__(
        self,
        pids: t.Collection[int],
        poke: t.Callable[[], object],
        proc: str = "/proc",
        read: t.Optional[t.Callable[[], t.Union[Slots, str]]] = None,
        now: t.Callable[[], float] = time.monotonic,
        sleep: t.Callable[[float], None] = time.sleep,
    ) -> None:
        self._pids, self._proc = tuple(pids), proc
        self._poke, self._now, self._sleep = poke, now, sleep
        self._read = read or self._read_bounded

    def _read_bounded(self) -> t.Union[Slots, str]:
        called = fetch_bounded(lambda: read_slots(self._pids, self._proc), _READ_DEADLINE_S)
        if not called.ok:
            return f"its file of loads can't be read: {called.error or 'no end in time'}"
        return t.cast("t.Union[Slots, str]", called.value)

    def start(self) -> str:
        """Why this can't be seen, or an empty text."""
        seen = self._read()
        return seen if isinstance(seen, str) else ""

    def __call__(self) -> bool:
        end = self._now() + REST_S
        last = self._read()
        if isinstance(last, str):
            return False
        rounds = [0] * len(last)
        while self._now() < end:
            self._sleep(_PAUSE_S)
            self._poke()
            seen = self._read()
            if isinstance(seen, str) or len(seen) != len(last):
                return False
            rounds = [count + (new != old) for count, new, old in zip(rounds, seen, last)]
            if min(rounds) >= _ROUNDS:
                return True
            last = seen
        return False
