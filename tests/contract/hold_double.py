# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Holds "GPU memory" on the double: a readable private mapping of a device node and an exclusive flock.

A fork shares both, as it shares a CUDA process's device files and memory; the kernel drops them with the last process.
Prints its pid, forks once for each line on stdin, prints the child's pid, and sleeps on until it is killed.

usage: hold_double.py NODE LOCK
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import sys

node = os.open(sys.argv[1], os.O_RDWR)
mapping = mmap.mmap(node, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
lock = os.open(sys.argv[2], os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
print(os.getpid(), flush=True)
for _unused in sys.stdin:
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
while True:
    signal.pause()
