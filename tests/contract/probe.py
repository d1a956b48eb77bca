# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One reading of whatever libnvidia-ml.so.1 the loader finds, as JSON: raw calls, no interpretation.

Runs as a program of its own, since the loader's path counts at the start of a process. Nothing but nvidia-ml-py.
Output: {"gpus": [GPU...], "errors": {name: code}}; a figure that can't be had is {"code": N}.
"""

from __future__ import annotations

import ctypes
import json
import sys
import typing as t

import pynvml

Answer = t.Any


def ask(function: t.Callable[..., Answer], *arguments: object) -> Answer:
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        return {"code": int(error.value)}
    except pynvml.NVMLLibraryMismatchError:
        return {"code": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "wrapped": True}


def memory(handle: object, version: t.Optional[int]) -> Answer:
    answer = ask(pynvml.nvmlDeviceGetMemoryInfo, handle, version)
    names = ("total", "reserved", "free", "used") if version else ("total", "free", "used")
    return answer if isinstance(answer, dict) else {name: getattr(answer, name) for name in names}


def rows(function: t.Callable[..., Answer], handle: object) -> Answer:
    answer = ask(function, handle)
    return answer if isinstance(answer, dict) else [{"pid": row.pid, "used": row.usedGpuMemory} for row in answer]


class ProcessV1(ctypes.Structure):
    """The row under the name without a version: 16 bytes."""

    _fields_: t.ClassVar = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong)]


def raw(symbol: str) -> Answer:
    """The library's own function, past nvidia-ml-py's wrappers."""
    return pynvml._nvmlGetFunctionPointer(symbol)  # the library object itself is not public either


def rows_v1(handle: object) -> Answer:
    count, space = ctypes.c_uint(64), (ProcessV1 * 64)()
    code = raw("nvmlDeviceGetComputeRunningProcesses")(handle, ctypes.byref(count), space)
    return {"code": code} if code else [{"pid": row.pid, "used": row.used} for row in space[: count.value]]


def two_calls(handle: object) -> dict[str, int]:
    """Code and count of the first call, which offers no room."""
    count = ctypes.c_uint(0)
    code = raw("nvmlDeviceGetComputeRunningProcesses_v3")(handle, ctypes.byref(count), None)
    return {"code": code, "count": count.value}


def fields(handle: object) -> list[dict[str, int]]:
    answers = pynvml.nvmlDeviceGetFieldValues(handle, [31, 142, 143, 144, 145, 230, 60000])
    return [{"id": answer.fieldId, "code": answer.nvmlReturn, "value": answer.value.uiVal} for answer in answers]


def same_device(handle: object) -> int:
    return int(pynvml.nvmlDeviceGetIndex(handle))


def gpu(index: int) -> dict[str, Answer]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    uuid = str(pynvml.nvmlDeviceGetUUID(handle))
    bus = str(pynvml.nvmlDeviceGetPciInfo(handle).busId)
    return {
        "index": index,
        "uuid": uuid,
        "bus": bus,
        "minor": ask(pynvml.nvmlDeviceGetMinorNumber, handle),
        "name": pynvml.nvmlDeviceGetName(handle),
        "capability": list(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        "own_index": same_device(handle),
        "index_by_uuid": same_device(pynvml.nvmlDeviceGetHandleByUUID(uuid)),
        "index_by_bus": same_device(pynvml.nvmlDeviceGetHandleByPciBusId(bus)),
        "index_by_short_bus": same_device(pynvml.nvmlDeviceGetHandleByPciBusId(bus[4:].lower())),
        "v1": memory(handle, None),
        "v2": memory(handle, pynvml.nvmlMemory_v2),
        "compute": rows(pynvml.nvmlDeviceGetComputeRunningProcesses, handle),
        "compute_v2": rows(pynvml.nvmlDeviceGetComputeRunningProcesses_v2, handle),
        "compute_v1": rows_v1(handle),
        "graphics": rows(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle),
        "mps": rows(pynvml.nvmlDeviceGetMPSComputeRunningProcesses, handle),
        "first_call": two_calls(handle),
        "fields": fields(handle),
        "event_reasons": ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
        "throttle_reasons": ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        "remapped": ask(pynvml.nvmlDeviceGetRemappedRows, handle),
        "mig": ask(pynvml.nvmlDeviceGetMigMode, handle),
        "persistence": ask(pynvml.nvmlDeviceGetPersistenceMode, handle),
    }


def code_of(function: t.Callable[..., Answer], *arguments: object) -> int:
    answer = ask(function, *arguments)
    return answer["code"] if isinstance(answer, dict) else 0


def errors(count: int) -> dict[str, int]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    found = {
        "index_past_the_end": code_of(pynvml.nvmlDeviceGetHandleByIndex, count),
        "unknown_uuid": code_of(pynvml.nvmlDeviceGetHandleByUUID, "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff"),
        "unknown_bus": code_of(pynvml.nvmlDeviceGetHandleByPciBusId, "00000000:FE:1F.0"),
        "memory_v2_wrong_version": code_of(pynvml.nvmlDeviceGetMemoryInfo, handle, 0x02000020),
        "missing_symbol": code_of(pynvml._nvmlGetFunctionPointer, "nvmlDeviceGetNothingOfTheKind"),
    }
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    found["after_one_of_two_shutdowns"] = code_of(pynvml.nvmlDeviceGetCount)
    pynvml.nvmlShutdown()
    found["after_shutdown"] = code_of(pynvml.nvmlDeviceGetCount)
    found["second_shutdown"] = code_of(pynvml.nvmlShutdown)
    found["handle_after_shutdown"] = code_of(pynvml.nvmlDeviceGetUUID, handle)
    return found


def main() -> None:
    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    reading = {
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "nvml": pynvml.nvmlSystemGetNVMLVersion(),
        "cuda": pynvml.nvmlSystemGetCudaDriverVersion(),
        "gpus": [gpu(index) for index in range(count)],
        "errors": errors(count),
    }
    json.dump(reading, sys.stdout)


main()
