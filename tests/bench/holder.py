# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an eviction has to bring down: a leader that listens, and a child that holds memory. For the benchmark alone.

usage: python -m sglang.launch_server --port P [--gpu-gib N] [--pinned-gib N] [--host-gib N] [--exit-s S]

The benchmark puts this file where it answers to SGLang's name. It needs nothing but the CUDA driver's library, so a
start takes seconds. After SIGTERM it takes --exit-s, as a server that ends what is in flight, and ends its child.
It prints both pids when the memory is held, and ends by itself after ten minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import signal
import socket
import time

LIFE_S = 600
GIB = 1 << 30


def hold_on_gpu(gpu_gib: float, pinned_gib: float) -> object:
    """Memory of the first GPU, and host memory that the driver has pinned."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            raise OSError(f"{name} failed: CUDA error {code}")

    context, device, pointer, host = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    if gpu_gib:
        call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(int(gpu_gib * GIB)))
    if pinned_gib:
        call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(int(pinned_gib * GIB)), 0)
    return cuda, context, pointer, host


def hold_on_host(gib: float) -> mmap.mmap:
    """Plain memory, every page of it touched."""
    memory = mmap.mmap(-1, int(gib * GIB), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, len(memory), mmap.PAGESIZE):
        memory[offset] = 1
    return memory


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    for name in ("--gpu-gib", "--pinned-gib", "--host-gib", "--exit-s"):
        parser.add_argument(name, type=float, default=0)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        kept = [hold_on_host(options.host_gib)] if options.host_gib else []
        held = hold_on_gpu(options.gpu_gib, options.pinned_gib) if options.gpu_gib or options.pinned_gib else None
        os.write(writing, b"." if kept or held else b"-")
        time.sleep(LIFE_S)
        os._exit(0)
    os.close(writing)
    listening = socket.create_server(("127.0.0.1", options.port))
    if not os.read(reading, 1):
        raise SystemExit("the child could not hold the memory")

    def leave(*_unused: object) -> None:
        time.sleep(options.exit_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listening.close()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    print(os.getpid(), child, flush=True)
    time.sleep(LIFE_S)


if __name__ == "__main__":
    main()
