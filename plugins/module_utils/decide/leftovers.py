# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which files of a dead server may be removed from /dev/shm: only those that surely are such; others are reported."""

from __future__ import annotations

import re
import typing as t
from dataclasses import dataclass

from ..model import ShmFile

# Names that carry their creator's pid. Before 0.5.14 SGLang's segments were called psm_*, as those of any Python
# program.
_STAMPED = re.compile(r"^(?:sgl_shm_(?:mm|mq|nodecheck|sync)_\d+_|multi_tokenizer_args_\d+$|sem\.loky-\d+-)")
_UNSTAMPED = re.compile(r"^(?:sglang_loads_|sglang_host_pool_|nccl-)")


@dataclass(frozen=True)
class Leftover:
    """Whether a file may go, and why (not), as a phrase for people."""

    removable: bool
    why: str


def judge_leftover(
    file: ShmFile,
    *,
    server_uid: t.Optional[int],
    leader_died_at: t.Optional[float],
    scan_complete: bool,
    owners: t.Optional[t.Sequence[range]] = None,
) -> Leftover:
    """Judge one file of /dev/shm.

    A file whose name carries its creator's pid may go when that process is dead, nobody maps or has open the file, and
    it belongs to the server's user where that is known.
    One of SGLang's names without a pid may go when nobody maps or has it open, it belongs to the server's user
    (``server_uid``), and it was last written before the leader's death (``leader_died_at``, seconds since the epoch).
    Nothing may go after a scan that could not see every process, and of a container's nothing that belongs to others
    than its own users (``owners``).
    """
    stamped = _STAMPED.match(file.name) is not None
    if not stamped and not _UNSTAMPED.match(file.name):
        return Leftover(False, "not a name of SGLang's: it may belong to any program")
    if file.mapped_by or file.opened_by:
        return Leftover(False, f"in use by pid {_pids(file)}")
    if not scan_complete:
        return Leftover(False, "not every process could be looked at: it may be in use")
    if owners is not None and not any(file.uid in some for some in owners):
        return Leftover(False, f"it belongs to uid {file.uid}, which is none of the container's")
    if stamped:
        return _judge_stamped(file, server_uid)
    return _judge_unstamped(file, server_uid, leader_died_at)


def _judge_stamped(file: ShmFile, server_uid: t.Optional[int]) -> Leftover:
    if server_uid is not None and file.uid != server_uid:
        return _of_another_user(file, server_uid)
    if file.creator_pid is None or file.creator_alive is None:
        return Leftover(False, "whether its creator lives is not known")
    if file.creator_alive:
        return Leftover(False, f"a process with its creator's pid {file.creator_pid} lives")
    return Leftover(True, f"its creator, pid {file.creator_pid}, is dead and nobody uses it")


def _judge_unstamped(file: ShmFile, server_uid: t.Optional[int], leader_died_at: t.Optional[float]) -> Leftover:
    if server_uid is None:
        return Leftover(False, "nobody uses it, but the server's user is not known")
    if file.uid != server_uid:
        return _of_another_user(file, server_uid)
    if leader_died_at is None:
        return Leftover(False, "nobody uses it, but when the server's leader died is not known")
    if not file.mtime < leader_died_at:
        return Leftover(False, "it is younger than the leader's death")
    return Leftover(True, "it belongs to the server's user, is older than the leader's death, and nobody uses it")


def _of_another_user(file: ShmFile, server_uid: int) -> Leftover:
    return Leftover(False, f"it belongs to uid {file.uid}, not to the server's user (uid {server_uid})")


def _pids(file: ShmFile) -> str:
    pids = sorted(set(file.mapped_by) | set(file.opened_by))
    text = ", ".join(str(pid) for pid in pids[:5])
    return text + (f" and {len(pids) - 5} more" if len(pids) > 5 else "")
