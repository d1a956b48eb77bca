# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Process 1 of a test's namespace: makes its mounts private, says so, reaps zombies, ends when the test does.

usage (as the first process of new PID, mount and perhaps network namespaces): init.py JSON
JSON: {"network": bool, "shm_mib": int, "keep": [directories below /tmp that stay visible]}
Prints ``ready``. Ends when its stdin is closed; the kernel then kills everything in the namespace.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
MS_BIND = 0x1000


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """mount(2). The command would resolve a /proc/self/fd link to the path that is hidden by then."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def private_tmp(keep: list[str]) -> None:
    """A fresh /tmp in which only ``keep`` shows through, at the same paths."""
    held = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in keep}
    mount("tmpfs", "/tmp", "tmpfs", options="mode=1777")
    for path, descriptor in held.items():
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", path, "none", MS_BIND)
        os.close(descriptor)


def loopback_up() -> None:
    """What ``ip link set lo up`` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(handle, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(handle, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def reap() -> None:
    """Collect every zombie that has become ours."""
    while True:
        try:
            pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def main() -> None:
    config = json.loads(sys.argv[1])
    mount("tmpfs", "/dev/shm", "tmpfs", options=f"mode=1777,size={config['shm_mib']}m")
    mount("tmpfs", "/run", "tmpfs", options="mode=755")
    for name in ("cleanslate", "lock"):
        os.mkdir(f"/run/{name}", 0o755)
    private_tmp(config["keep"])
    if config["network"]:
        loopback_up()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    print("ready", flush=True)
    while True:
        reap()
        readable = select.select([wake_read, 0], [], [])[0]
        if wake_read in readable:
            os.read(wake_read, 4096)
        if 0 in readable and not os.read(0, 1):
            return


if __name__ == "__main__":
    main()
