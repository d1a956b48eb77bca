# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who is left alone always, whatever the evidence says."""

from __future__ import annotations

import os
import typing as t

from ..model import Process

# SIGKILL on a DCGM exporter has frozen GPUs (Xid 119/120, NVIDIA/dcgm-exporter#84); persistenced and the fabric manager
# hold devices with nearly no memory; an MPS server is asked to end its client, never killed.
GPU_SERVICES = (
    "nvidia-persistenced",
    "nv-hostengine",
    "dcgm-exporter",
    "nv-fabricmanager",
    "Xorg",
    "Xwayland",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)
ACCESS = ("sshd", "sshd-session", "sudo", "su", "systemd", "systemd-logind", "init", "lxc-start", "containerd-shim")


def protected_why(
    process: Process, own_pids: t.Collection[int], protect: t.Sequence[str], units: t.Mapping[int, str]
) -> t.Optional[str]:
    """Why this process must not be signalled, or None.

    ``own_pids``: the module's process and all its ancestors. ``protect``: what the operator named: a pid, the base
    name of a program (as its file, its title or its command line has it), or a systemd unit. ``units``: unit names by
    pid, where known.
    """
    if process.pid == 1:
        return "pid 1"
    if process.kernel_thread:
        return "kernel thread"
    if process.pid in own_pids:
        return "this run itself"
    name = program_name(process)
    names = (str(process.pid), name, process.comm, os.path.basename(process.argv[0]) if process.argv else name)
    if name in GPU_SERVICES:
        return f"GPU service {name}"
    if name in ACCESS:
        return f"access and supervision ({name})"
    for wanted in protect:
        if wanted in names or (units.get(process.pid) or "") == wanted:
            return f"protected by the operator ({wanted})"
    return None


def program_name(process: Process) -> str:
    """The executable's base name; by comm where the link can't be read (cut at 15 characters, so matched as cut)."""
    if process.exe:
        return os.path.basename(process.exe.replace(" (deleted)", ""))
    for name in GPU_SERVICES + ACCESS:
        if process.comm == name[:15]:
            return name
    return process.comm
