# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What this process ran out of, in words: open files, processes, memory. That is the machine's state and no defect.

It must never be taken for "there is nothing": a process whose files can't be opened for want of descriptors lives all
the same.
"""

from __future__ import annotations

import errno
import resource
import typing as t

_MEANS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def is_exhausted(error: BaseException) -> bool:
    """Whether this call failed for want of descriptors or memory, and not for what it was asked."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _MEANS)


def exhausted_by(error: BaseException, starting: bool = False) -> t.Optional[str]:
    """Which limit was met, and what to raise; None where it was none. ``starting``: a process was to be started."""
    code = error.errno if isinstance(error, OSError) else errno.ENOMEM if isinstance(error, MemoryError) else None
    if code == errno.EMFILE:
        limit = _limit(resource.RLIMIT_NOFILE)
        return f"no more than {limit} files may be open at once (RLIMIT_NOFILE); raise it (ulimit -n, LimitNOFILE=)"
    if code == errno.ENFILE:
        return "this host can open no more files at all (fs.file-max); end what keeps so many open, or raise it"
    if code == errno.ENOMEM:
        limit = _limit(resource.RLIMIT_AS)
        return (
            f"there is no memory for it: the memory of the host or of this cgroup is used up, or this process's limit "
            f"is met (RLIMIT_AS {limit}); free memory, or raise the limit"
        )
    if code == errno.EAGAIN and starting:
        limit = _limit(resource.RLIMIT_NPROC)
        return (
            f"no more processes may be started: the limit of this account (RLIMIT_NPROC {limit}), of this cgroup "
            "(pids.max) or of the host (kernel.pid_max, kernel.threads-max) is met; end some, or raise it"
        )
    return None


def _limit(which: int) -> str:
    soft = resource.getrlimit(which)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
