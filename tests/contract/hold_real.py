# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Holds GPU memory on a real GPU: one plain CUDA allocation through torch.

Prints its pid, forks once for each line on stdin (after CUDA has started, as data loaders do), prints the child's pid,
and sleeps on until it is killed.

usage: hold_real.py MIB
"""

from __future__ import annotations

import os
import signal
import sys

import torch

memory = torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
print(os.getpid(), flush=True)
for _unused in sys.stdin:
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
while True:
    signal.pause()
