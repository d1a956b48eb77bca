# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Does CUDA itself work? NVML can answer while CUDA fails, so a context and 64 MiB are tried on each chosen GPU."""

from __future__ import annotations

import ctypes
import typing as t

from ..model import Gpu
from ..spawn import call_bounded

PROBE_BYTES = 64 * 2**20


def probe_cuda(gpus: t.Sequence[Gpu], deadline_s: float) -> dict[int, t.Optional[str]]:
    """An error text by GPU index, None where a context was made and memory taken and given back.

    The probe runs in a child with a deadline and loads libcuda.so.1 there; GPUs are found by bus id, since CUDA's order
    is not the driver's.
    """
    called = call_bounded(lambda: {str(gpu.index): _probe_one(gpu.bus_id) for gpu in gpus}, deadline_s)
    if called.ok:
        return {int(index): text for index, text in called.value.items()}
    words = called.error or f"CUDA gave no answer within {deadline_s:g} s (state {called.stuck_state})"
    return {gpu.index: words for gpu in gpus}


def _probe_one(bus_id: t.Optional[str]) -> t.Optional[str]:
    if bus_id is None:
        return "its bus id is not known"
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    steps: tuple[tuple[str, tuple[t.Any, ...]], ...] = (
        ("cuInit", (0,)),
        ("cuDeviceGetByPCIBusId", (ctypes.byref(device), bus_id.encode())),
        ("cuCtxCreate_v2", (ctypes.byref(context), 0, device)),
        ("cuMemAlloc_v2", (ctypes.byref(memory), ctypes.c_size_t(PROBE_BYTES))),
        ("cuMemFree_v2", (memory,)),
        ("cuCtxDestroy_v2", (context,)),
    )
    for name, args in steps:
        code = getattr(cuda, name)(*args)
        if code != 0:
            return f"{name} failed with CUDA error {code} ({_error_name(cuda, code)})"
    return None


def _error_name(cuda: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    if cuda.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value:
        return text.value.decode("ascii", "replace")
    return "unknown"
