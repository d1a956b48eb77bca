# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""GPUs as NVML tells them, through the real client library (nvidia-ml-py), in a child with a deadline.

NVML calls can hang in the driver (state D). So the whole reading happens in a forked child; when the deadline passes
the child is left behind and the reading says ``timed out``, with the child's pid and what it waits on. A failed query
is None with a Problem beside it, never zero and never an empty list.

Sources: nvml.h and nvidia-ml-py 13 for struct versions; measured on an H200 (driver 580.159): v1 used 615 MiB idle, v2
used 0 and reserved 615.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import time
import types
import typing as t

from ..model import Gpu, GpuHealth, GpuMemory, GpuReading, MigInstance, NvmlProcess, Problem
from ..spawn import Begun, begin_call, run_bounded
from .procfs import read_text

MIB = 2**20
NOT_AVAILABLE = 2**64 - 1  # the driver's N/A in a process row; 2**64 - 1 bytes is no memory figure
NOT_SUPPORTED = 3
RECOVERY_ACTION_FIELD = 230
FIELD_NOT_THERE = (2, NOT_SUPPORTED, 13)  # an unknown field is Invalid Argument in that field (measured)
RECOVERY_ACTIONS = (
    "none", "reset", "node reboot", "drain P2P", "drain and reset", "IMEX reset", "bus reset", "system reboot",
)  # fmt: skip
# nvml.h nvmlClocksEventReason*: idle and the software power cap are a normal day's work
THROTTLE_BITS = {
    0x1: "idle",
    0x2: "application clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}


def read_gpus(deadline_s: float = 10.0, proc: str = "/proc") -> GpuReading:
    """Ask NVML, else nvidia-smi; at most ``deadline_s`` for each.

    Where NVML has no v2 memory call, nvidia-smi's figures are taken beside it, since v1 counts the driver's own part.
    """
    return PendingReading(deadline_s, proc).reading()


class PendingReading:
    """read_gpus in two halves: NVML is asked from the start, and ``reading`` waits for what it says. ``abandon`` where
    nobody wants to know any more."""

    def __init__(self, deadline_s: float = 10.0, proc: str = "/proc") -> None:
        self._deadline_s = deadline_s
        self._proc = proc
        self._started = time.monotonic()
        self._begun = begin_nvml(deadline_s, proc)

    def reading(self) -> GpuReading:
        by_nvml = None if self._begun is None else _reading_of(self._begun, self._deadline_s, self._proc)
        return _completed(by_nvml, self._deadline_s, self._proc, self._started)

    def abandon(self) -> None:
        if self._begun is not None:
            self._begun.abandon()


def _completed(by_nvml: t.Optional[GpuReading], deadline_s: float, proc: str, started: float) -> GpuReading:
    """With nvidia-smi's words where NVML can't be asked, or tells less."""
    from .nvidia_smi import merge_memory, read_by_nvidia_smi

    reading = by_nvml
    if reading is None:
        reading = read_by_nvidia_smi(deadline_s, proc)
        if reading.gpus is None:
            text = "no nvidia-ml-py is installed for this interpreter by root, so nvidia-smi was asked"
            reading = dataclasses.replace(reading, problems=(Problem("nvml", None, text), *reading.problems))
    elif any(gpu.memory is not None and gpu.memory.api == "v1" for gpu in reading.gpus or ()):
        reading = merge_memory(reading, read_by_nvidia_smi(deadline_s, proc))
    return dataclasses.replace(reading, seconds=round(time.monotonic() - started, 3))


def begin_nvml(deadline_s: float, proc: str = "/proc") -> t.Optional[Begun]:
    """Ask NVML, or None where no trustworthy client library is installed for this interpreter."""
    return None if client_library_path() is None else begin_call(lambda: _query(proc), deadline_s)


def read_by_nvml(deadline_s: float, proc: str = "/proc") -> t.Optional[GpuReading]:
    """One reading by NVML, or None where no trustworthy client library is installed for this interpreter."""
    begun = begin_nvml(deadline_s, proc)
    return None if begun is None else _reading_of(begun, deadline_s, proc)


def _reading_of(begun: Begun, deadline_s: float, proc: str) -> GpuReading:
    called = begun.finish()
    kernel_version = kernel_module_version(proc)
    if called.timed_out:
        where = f"pid {called.stuck_pid} state {called.stuck_state}, waits in {called.stuck_wchan}"
        detail = where if called.stuck_pid else "the helper was ended"
        text = f"NVML gave no answer within {deadline_s:g} s ({detail}): the driver hangs"
        return GpuReading("nvml", None, kernel_module_version=kernel_version, problems=(Problem("nvml", None, text),))
    if called.error is not None:
        problem = Problem("nvml", None, called.error)
        return GpuReading("nvml", None, kernel_module_version=kernel_version, problems=(problem,))
    return _reading_from_json(called.value, kernel_version)


def client_library_path() -> t.Optional[str]:
    """The file of an importable pynvml that root may run: owned by root or by us, not writable by others."""
    import importlib.util

    try:
        spec = importlib.util.find_spec("pynvml")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin or not os.path.isfile(spec.origin):
        return None
    info = os.stat(spec.origin)
    trusted = info.st_uid in (0, os.geteuid()) and not info.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
    return spec.origin if trusted else None


def kernel_module_version(proc: str = "/proc") -> t.Optional[str]:
    """The loaded kernel module's version by /proc/driver/nvidia/version; None where there is no module."""
    text = read_text(f"{proc}/driver/nvidia/version") or ""
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)?)", text)
    return found.group(1) if found else None


def kernel_gpu_count(proc: str = "/proc") -> t.Optional[int]:
    """How many GPUs the kernel module drives (/proc/driver/nvidia/gpus); None where that can't be seen."""
    try:
        return len(os.listdir(f"{proc}/driver/nvidia/gpus"))
    except OSError:
        return None


def is_simulated(library: t.Optional[str], kernel_version: t.Optional[str]) -> bool:
    """Whether this library is no driver's: outside the loader's cache and not the kernel module's own version.

    Container runtimes and some images put the real library into a folder of LD_LIBRARY_PATH; its file is then named
    after the loaded kernel module (libnvidia-ml.so.580.159.04), which a double's is not.
    """
    if library is None:
        return False
    real = os.path.realpath(library)
    if kernel_version and real.endswith(f".so.{kernel_version}"):
        return False
    for ldconfig in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        if os.path.exists(ldconfig):
            listing = run_bounded([ldconfig, "-p"], 5.0)
            cached = re.findall(r"libnvidia-ml\.so\.1 .*=> (\S+)", listing.stdout)
            return real not in {os.path.realpath(path) for path in cached}
    return not real.startswith(("/usr/lib", "/lib"))


# --- in the child -----------------------------------------------------------------------------------------------------


class _Asker:
    """Calls NVML functions by name and keeps one Problem per failed call."""

    def __init__(self, nvml: types.ModuleType) -> None:
        self.nvml = nvml
        self.problems: list[dict[str, t.Any]] = []

    def ask(self, name: str, *args: t.Any, quiet: bool = False) -> t.Any:
        """The call's answer or None. ``quiet``: Not Supported is an ordinary answer of this GPU, no problem."""
        try:
            return getattr(self.nvml, name)(*args)
        except self.nvml.NVMLError as exc:
            if not (quiet and exc.value in (NOT_SUPPORTED, self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND)):
                self.problems.append({"call": name, "code": exc.value, "message": str(exc)})
        except Exception as exc:  # pynvml raises plain exceptions too: NVMLLibraryMismatchError, AttributeError
            self.problems.append({"call": name, "code": None, "message": f"{type(exc).__name__}: {exc}"})
        return None


def _query(proc: str) -> dict[str, t.Any]:
    import pynvml

    asker = _Asker(pynvml)
    if not hasattr(pynvml, "nvmlInit") or not hasattr(pynvml, "NVMLError"):
        return {"problems": [{"call": "import", "code": None, "message": "pynvml is not nvidia-ml-py"}], "gpus": None}
    before = len(asker.problems)
    asker.ask("nvmlInit")
    if len(asker.problems) > before:
        # The library tells its own version without nvmlInit, and its file is named after it: a mismatch can be named.
        library = _loaded_library()
        version = _text(_Asker(pynvml).ask("nvmlSystemGetNVMLVersion")) or version_of_file(library)
        failed: dict[str, t.Any] = {
            "problems": asker.problems,
            "gpus": None,
            "library": library,
            "nvml_version": version,
        }
        return failed
    result: dict[str, t.Any] = {
        "library": _loaded_library(),
        "driver_version": _text(asker.ask("nvmlSystemGetDriverVersion")),
        "nvml_version": _text(asker.ask("nvmlSystemGetNVMLVersion")),
        "cuda": asker.ask("nvmlSystemGetCudaDriverVersion", quiet=True),
    }
    count = asker.ask("nvmlDeviceGetCount")
    result["gpus"] = None if count is None else [_query_gpu(pynvml, index) for index in range(count)]
    result["problems"] = asker.problems
    return result


def _query_gpu(nvml: types.ModuleType, index: int) -> dict[str, t.Any]:
    asker = _Asker(nvml)
    gpu: dict[str, t.Any] = {"index": index, "errors": asker.problems}
    handle = asker.ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return gpu
    pci = asker.ask("nvmlDeviceGetPciInfo", handle)
    capability = asker.ask("nvmlDeviceGetCudaComputeCapability", handle, quiet=True)
    mig = asker.ask("nvmlDeviceGetMigMode", handle, quiet=True)
    gpu.update(
        uuid=_text(asker.ask("nvmlDeviceGetUUID", handle)),
        bus_id=_text(pci.busId) if pci is not None else None,
        minor=asker.ask("nvmlDeviceGetMinorNumber", handle),
        name=_text(asker.ask("nvmlDeviceGetName", handle)),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        memory=_query_memory(nvml, asker, handle),
        processes=_query_processes(asker, handle),
        health=_query_health(nvml, asker, handle),
        mig_enabled=bool(mig[0]) if mig else None,
    )
    gpu["mig"] = _query_mig(nvml, handle) if gpu["mig_enabled"] else []
    return gpu


def _query_memory(nvml: types.ModuleType, asker: _Asker, handle: t.Any) -> t.Optional[dict[str, t.Any]]:
    """Memory by v2, else v1; Not Supported by both means unified memory (GB10, Jetson), which is no failure."""
    second = getattr(nvml, "nvmlMemory_v2", None)
    codes = []
    for api, args in (("v2", (handle, second)), ("v1", (handle,))):
        if api == "v2" and second is None:
            continue
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(*args)
        except Exception as exc:  # NVMLError, or pynvml's plain mismatch error where the symbol is missing
            codes.append(getattr(exc, "value", None))
            if api == "v1":
                if codes and all(code == NOT_SUPPORTED for code in codes):
                    return {"api": "none", "unified": True}
                message = str(exc) or type(exc).__name__
                asker.problems.append({"call": "nvmlDeviceGetMemoryInfo", "code": codes[-1], "message": message})
            continue
        return {
            "api": api,
            "unified": False,
            "total": info.total,
            "used": info.used,
            "free": info.free,
            "reserved": getattr(info, "reserved", None) if api == "v2" else None,
        }
    return None


def _query_processes(asker: _Asker, handle: t.Any) -> t.Optional[list[dict[str, t.Any]]]:
    """The compute, graphics and MPS lists joined; None when the compute list could not be had."""
    rows: dict[tuple[int, t.Optional[int]], dict[str, t.Any]] = {}
    for kind, name in (
        ("compute", "nvmlDeviceGetComputeRunningProcesses"),
        ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
        ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
    ):
        listed = asker.ask(name, handle, quiet=kind != "compute")
        if listed is None:
            if kind == "compute":
                return None
            continue
        for row in listed:
            used = row.usedGpuMemory
            rows.setdefault(
                (row.pid, getattr(row, "gpuInstanceId", None)),
                {
                    "pid": row.pid,
                    "kind": kind,
                    "used": None if used is None or used >= NOT_AVAILABLE else used,
                    "gi": _instance(getattr(row, "gpuInstanceId", None)),
                    "ci": _instance(getattr(row, "computeInstanceId", None)),
                },
            )
    return list(rows.values())


def _query_health(nvml: types.ModuleType, asker: _Asker, handle: t.Any) -> dict[str, t.Any]:
    remapped = asker.ask("nvmlDeviceGetRemappedRows", handle, quiet=True)
    retired = asker.ask("nvmlDeviceGetRetiredPagesPendingStatus", handle, quiet=True)
    utilization = asker.ask("nvmlDeviceGetUtilizationRates", handle, quiet=True)
    persistence = asker.ask("nvmlDeviceGetPersistenceMode", handle, quiet=True)
    reasons = _throttle_reasons(nvml, asker, handle)
    return {
        "remap_pending": bool(remapped[2]) if remapped else None,
        "remap_failure": bool(remapped[3]) if remapped else None,
        "retired_pages_pending": None if retired is None else bool(retired),
        "recovery_action": _recovery_action(asker, handle),
        "utilization_percent": utilization.gpu if utilization is not None else None,
        "persistence_mode": None if persistence is None else bool(persistence),
        "throttle": reasons,
    }


def _throttle_reasons(nvml: types.ModuleType, asker: _Asker, handle: t.Any) -> t.Optional[int]:
    name = "nvmlDeviceGetCurrentClocksEventReasons"  # since R535; the older name is gone from some libraries
    if not hasattr(nvml, name):
        name = "nvmlDeviceGetCurrentClocksThrottleReasons"
    answer = asker.ask(name, handle, quiet=True)
    return None if answer is None else int(answer)


def _recovery_action(asker: _Asker, handle: t.Any) -> t.Optional[int]:
    values = asker.ask("nvmlDeviceGetFieldValues", handle, [RECOVERY_ACTION_FIELD], quiet=True)
    if not values:
        return None
    code = int(values[0].nvmlReturn)  # each field value carries its own return code
    if code == 0:
        return int(values[0].value.uiVal)
    if code not in FIELD_NOT_THERE:
        text = f"NVML error {code} for the field of the recovery action"
        asker.problems.append({"call": "nvmlDeviceGetFieldValues", "code": code, "message": text})
    return None


def _query_mig(nvml: types.ModuleType, handle: t.Any) -> list[dict[str, t.Any]]:
    """Each MIG instance by itself: a query that fails on one says nothing of the others."""
    asker = _Asker(nvml)
    slots = asker.ask("nvmlDeviceGetMaxMigDeviceCount", handle)
    result: list[dict[str, t.Any]] = []
    if slots is None:
        return [{"uuid": None, "memory": None, "processes": None, "errors": asker.problems}]
    for slot in range(slots):
        inner = _Asker(nvml)
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except nvml.NVMLError as exc:
            if exc.value == nvml.NVML_ERROR_NOT_FOUND:  # an empty slot
                continue
            inner.problems.append({"call": "MigDeviceHandleByIndex", "code": exc.value, "message": str(exc)})
            result.append({"uuid": None, "memory": None, "processes": None, "errors": inner.problems})
            continue
        result.append(
            {
                "uuid": _text(inner.ask("nvmlDeviceGetUUID", instance)),
                "memory": _query_memory(nvml, inner, instance),
                "processes": _query_processes(inner, instance),
                "errors": inner.problems,
            }
        )
    return result


def _loaded_library() -> t.Optional[str]:
    """The file that the loader really took, by our own maps."""
    for line in (read_text("/proc/self/maps", 16 * MIB) or "").splitlines():
        path = line.split(None, 5)[5] if len(line.split(None, 5)) == 6 else ""
        if os.path.basename(path).startswith("libnvidia-ml.so"):
            return path
    return None


def version_of_file(library: t.Optional[str]) -> t.Optional[str]:
    """The driver's version that a library file (libnvidia-ml.so.580.159.04) is named after."""
    found = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)$", os.path.realpath(library)) if library else None
    return found.group(1) if found else None


def _text(value: t.Any) -> t.Optional[str]:
    if value is None:
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _instance(value: t.Optional[int]) -> t.Optional[int]:
    return None if value is None or value == 0xFFFFFFFF else value


# --- back in the parent ----------------------------------------------------------------------------------------------


def _reading_from_json(data: t.Mapping[str, t.Any], kernel_version: t.Optional[str]) -> GpuReading:
    gpus = data.get("gpus")
    cuda = data.get("cuda")
    return GpuReading(
        source="nvml",
        gpus=None if gpus is None else tuple(_gpu_from_json(gpu) for gpu in gpus),
        driver_version=data.get("driver_version"),
        nvml_version=data.get("nvml_version"),
        cuda_driver_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        kernel_module_version=kernel_version,
        library=data.get("library"),
        simulated=is_simulated(data.get("library"), kernel_version),
        problems=_problems(data.get("problems", ())),
    )


def _problems(rows: t.Iterable[t.Mapping[str, t.Any]]) -> tuple[Problem, ...]:
    return tuple(Problem(row["call"], row["code"], row["message"]) for row in rows)


def _gpu_from_json(data: t.Mapping[str, t.Any]) -> Gpu:
    return Gpu(
        index=data["index"],
        uuid=data.get("uuid"),
        bus_id=data.get("bus_id"),
        minor=data.get("minor"),
        name=data.get("name"),
        compute_capability=data.get("compute_capability"),
        memory=_memory_from_json(data.get("memory")),
        processes=_processes_from_json(data.get("processes")),
        health=_health_from_json(data.get("health") or {}),
        mig_enabled=data.get("mig_enabled"),
        mig=tuple(_mig_from_json(row) for row in data.get("mig", ())),
        errors=_problems(data.get("errors", ())),
    )


def _mig_from_json(data: t.Mapping[str, t.Any]) -> MigInstance:
    return MigInstance(
        data.get("uuid"),
        _memory_from_json(data.get("memory")),
        _processes_from_json(data.get("processes")),
        _problems(data.get("errors", ())),
    )


def mib(size_bytes: t.Optional[int]) -> t.Optional[int]:
    """Bytes to whole MiB, rounded up: a byte in use is not zero."""
    return None if size_bytes is None else -(-size_bytes // MIB)


def _memory_from_json(data: t.Optional[t.Mapping[str, t.Any]]) -> t.Optional[GpuMemory]:
    if data is None:
        return None
    free = data.get("free")
    return GpuMemory(
        total_mib=mib(data.get("total")),
        used_mib=mib(data.get("used")),
        reserved_mib=mib(data.get("reserved")),
        free_mib=None if free is None else free // MIB,
        api=data["api"],
        used_excludes_reserved=data["api"] == "v2",
        unified=bool(data.get("unified")),
    )


def _processes_from_json(
    rows: t.Optional[t.Iterable[t.Mapping[str, t.Any]]],
) -> t.Optional[tuple[NvmlProcess, ...]]:
    if rows is None:
        return None
    return tuple(NvmlProcess(row["pid"], row["kind"], mib(row["used"]), row["gi"], row["ci"]) for row in rows)


def _health_from_json(data: t.Mapping[str, t.Any]) -> GpuHealth:
    action = data.get("recovery_action")
    bits = data.get("throttle") or 0
    named = tuple(name for bit, name in THROTTLE_BITS.items() if bits & bit)
    return GpuHealth(
        retired_pages_pending=data.get("retired_pages_pending"),
        remap_pending=data.get("remap_pending"),
        remap_failure=data.get("remap_failure"),
        recovery_action=None if action is None else _action_name(action),
        throttle_reasons=named,
        utilization_percent=data.get("utilization_percent"),
        persistence_mode=data.get("persistence_mode"),
    )


def _action_name(number: int) -> str:
    return RECOVERY_ACTIONS[number] if 0 <= number < len(RECOVERY_ACTIONS) else f"unknown action {number}"
