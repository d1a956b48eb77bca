# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Process titles and the parent-death signal, as SGLang's workers set them.

setproctitle (which SGLang uses) writes the title over the memory that held argv and the environment, so that
/proc/PID/cmdline shows the title and /proc/PID/environ is wiped. The same is done here without the dependency.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
COMM_BYTES = 15

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: object) -> None:
    if _libc.prctl(option, argument, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent() -> None:
    """SIGKILL when the parent dies. Like SGLang's, it does not look whether the parent is still the one it had."""
    _prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def set_title(title: str) -> None:
    """Show ``title`` as the command line and, cut to 15 bytes, as comm; wipe argv and environ."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    # proc(5), fields 48 to 51: arg_start, arg_end, env_start, env_end; fields[0] is field 3.
    arg_start, arg_end, env_start, env_end = (int(fields[number - 3]) for number in (48, 49, 50, 51))
    # libc's environ points into the memory that is about to be wiped: give it copies first.
    environ = dict(os.environ)
    _libc.clearenv()
    for name, value in environ.items():
        os.putenv(name, value)
    end = env_end if env_start == arg_end else arg_end
    text = title.encode()[: end - arg_start - 1]
    ctypes.memset(arg_start, 0, end - arg_start)
    ctypes.memmove(arg_start, text, len(text))
    _prctl(PR_SET_NAME, ctypes.c_char_p(title.encode()[:COMM_BYTES]))
