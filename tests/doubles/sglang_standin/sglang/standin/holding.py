# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a running server holds: device mappings, pinned memory, shared memory segments, sockets, listeners."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Sequence

SHM = "/dev/shm"
PAGE = 4096
READABLE_BYTES = 2 * 1024 * 1024
DOORBELL_BYTES = 64 * 1024
LOADS_HEADER = struct.Struct("<4sHHI")  # magic, version, data parallel ranks, bytes of a rank's slot
LOADS_SLOT_BYTES = 16 * 1024
QUEUE_BYTES = 64 * 1024

# Everything that has to stay open as long as the process lives.
_kept: list[object] = []


def visit_devices(paths: Sequence[str]) -> None:
    """Open every device and map its doorbells write-only, as each CUDA process does that sees the device."""
    for path in paths:
        descriptor = _open(path)
        if descriptor is not None:
            _map(path, descriptor, DOORBELL_BYTES, mmap.PROT_WRITE)


def hold_device(path: str) -> None:
    """Have a context on the device: a readable mapping of 2 MiB."""
    descriptor = _open(path)
    if descriptor is not None:
        _map(path, descriptor, READABLE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE)


def _open(path: str) -> int | None:
    """A descriptor that can be mapped, or None: a node without a driver is kept open with O_PATH and not mapped."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        _kept.append(os.open(path, os.O_PATH))
        return None
    _kept.append(descriptor)
    return descriptor


def _map(path: str, descriptor: int, size: int, protection: int) -> None:
    # A shared mapping of /dev/zero's number shows as shared memory, not as the node; block devices map as nvidia's do.
    shared = stat.S_ISBLK(os.stat(path).st_mode)
    flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    try:
        _kept.append(mmap.mmap(descriptor, size, flags=flags, prot=protection))
    except OSError as error:
        if error.errno != errno.ENODEV:  # a driver that can't be mapped, such as /dev/null's: open is all there is
            raise


def pin_memory(size_mib: int) -> None:
    """A touched shared anonymous mapping: it shows as RssShmem, where SGLang's HiCache host pool shows."""
    if size_mib:
        pool = mmap.mmap(-1, size_mib * 1024 * 1024, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        for _unused in range(size_mib):
            pool.write(b"\1" * (1024 * 1024))
        _kept.append(pool)


def make_loads_segment(dp_size: int) -> str:
    """``sglang_loads_<12 hex>_<8 hex>.shm``: made by the leader, left behind after every stop. Returns its path."""
    path = f"{SHM}/sglang_loads_{secrets.token_hex(6)}_{secrets.token_hex(4)}.shm"
    map_segment(path, loads_bytes(dp_size))
    return path


def loads_bytes(dp_size: int) -> int:
    return LOADS_HEADER.size + dp_size * LOADS_SLOT_BYTES


class LoadsWriter:
    """A scheduler's part of that file, which stays open: it is written anew in every round of its loop."""

    def __init__(self, path: str, dp_size: int, dp_rank: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(self._descriptor, loads_bytes(dp_size))
        self._offset = LOADS_HEADER.size + dp_rank * LOADS_SLOT_BYTES
        LOADS_HEADER.pack_into(self._map, 0, b"SLNS", 2, dp_size, LOADS_SLOT_BYTES)

    def write(self) -> None:
        """A message pack of one entry: the time."""
        payload = b"\x81\xa9timestamp\xcb" + struct.pack(">d", time.time())
        end = self._offset + 4 + len(payload)
        struct.pack_into("<I", self._map, self._offset, 0)
        self._map[self._offset + 4 : end] = payload
        struct.pack_into("<I", self._map, self._offset, len(payload))


def make_queue_segment() -> str:
    """``sgl_shm_mq_<pid>_<random>``: there while its maker lives, left behind only when that one is killed."""
    path = f"{SHM}/sgl_shm_mq_{os.getpid()}_{secrets.token_hex(4)}"
    map_segment(path, QUEUE_BYTES)
    return path


def map_segment(path: str, size: int) -> None:
    """Create or open a shared memory file and keep it mapped."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        _kept.append(mmap.mmap(descriptor, size))
    finally:
        os.close(descriptor)


def make_ipc_sockets() -> None:
    """Three ``/tmp/tmp????????`` sockets (zmq ipc) and the two empty files that SGLang leaves with them."""
    for _unused in range(3):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{tempfile.gettempdir()}/tmp{secrets.token_hex(4)}")
        listener.listen()
        _kept.append(listener)
    for _unused in range(2):
        with tempfile.NamedTemporaryFile(delete=False):
            pass


def listen_like_torch(first_rank: bool, nccl_port: int | None) -> None:
    """The TCPStore of the first rank on all addresses, and one gloo listener per scheduler on loopback."""
    addresses = [("127.0.0.1", 0)]
    if first_rank:
        addresses.append(("0.0.0.0", nccl_port or 0))
    for address in addresses:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        _kept.append(listener)
