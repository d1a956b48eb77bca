# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""GPUs as nvidia-smi's XML tells them: the second source, where no client library is installed or v2 is missing."""

from __future__ import annotations

import dataclasses
import os
import re
import typing as t
from xml.etree import ElementTree

from ..model import Gpu, GpuHealth, GpuMemory, GpuReading, NvmlProcess, Problem
from ..spawn import run_bounded
from .nvml import is_simulated, kernel_module_version

NO_ANSWER = ("N/A", "[N/A]", "ERR!", "[ERR!]", "Unknown Error", "[Unknown Error]", "GPU requires reset", "Requested")
RECOVERY_WORDS = {"none": "none", "reset": "reset", "reboot": "node reboot", "drain p2p": "drain P2P"}


def read_by_nvidia_smi(deadline_s: float, proc: str = "/proc", command: str = "nvidia-smi") -> GpuReading:
    """One reading by ``nvidia-smi -q -x``. A missing program, a non-zero exit or a hang gives ``gpus`` None."""
    kernel_version = kernel_module_version(proc)
    done = run_bounded([command, "-q", "-x"], deadline_s)
    if done.error is not None:
        text = f"{command} could not be run: {done.error}"
        return _failed(Problem("nvidia-smi", None, text), kernel_version)
    if done.timed_out:
        text = f"{command} gave no answer within {deadline_s:g} s: the driver hangs"
        return _failed(Problem("nvidia-smi", None, text), kernel_version)
    reading = parse_xml(done.stdout)
    if reading is None or done.rc != 0:
        words = " ".join((done.stdout + " " + done.stderr).split())[:300]
        found = re.search(r"NVML library version: (\d+(?:\.\d+)+)", words)
        failed = _failed(Problem("nvidia-smi", done.rc, f"exit {done.rc}: {words}"), kernel_version)
        return dataclasses.replace(failed, nvml_version=found.group(1) if found else None)
    library = library_by_environment()
    return dataclasses.replace(
        reading,
        kernel_module_version=kernel_version,
        library=library,
        simulated=library is not None and is_simulated(library, kernel_version),
    )


def library_by_environment(name: str = "libnvidia-ml.so.1") -> t.Optional[str]:
    """The NVML library that LD_LIBRARY_PATH makes nvidia-smi load, if any: it may be no driver's."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return next((path for folder in folders if folder and os.path.exists(path := f"{folder}/{name}")), None)


def parse_xml(text: str) -> t.Optional[GpuReading]:
    """The XML of ``nvidia-smi -q -x``; None where it is not that. DTDs are not read."""
    plain = re.sub(r"<!DOCTYPE[^<>]*>", "", text)
    if "<!" in re.sub(r"<!--.*?-->", "", plain, flags=re.DOTALL):
        return None  # declarations of its own: the driver's program has none, and they can grow without end
    try:
        root = ElementTree.fromstring(plain)
    except (ElementTree.ParseError, ValueError):
        return None
    if root.tag != "nvidia_smi_log":
        return None
    gpus = tuple(_gpu(index, node) for index, node in enumerate(root.findall("gpu")))
    attached = _number(_value(root, "attached_gpus"))
    problems: tuple[Problem, ...] = ()
    if attached is not None and attached != len(gpus):
        # The GPUs bear no index here: where one is left out, the others can't be told by theirs.
        text = f"nvidia-smi shows {len(gpus)} of {attached} attached GPUs, so which is which is not known"
        problems = (Problem("nvidia-smi", None, text),)
    return GpuReading(
        source="nvidia-smi",
        gpus=None if problems else gpus,
        problems=problems,
        driver_version=_value(root, "driver_version"),
        cuda_driver_version=_value(root, "cuda_version"),
    )


def merge_memory(reading: GpuReading, smi: GpuReading) -> GpuReading:
    """NVML's reading with nvidia-smi's memory where NVML has only v1; GPUs are matched by UUID, never by order."""
    by_uuid = {gpu.uuid: gpu.memory for gpu in smi.gpus or () if gpu.uuid and gpu.memory}

    def better(gpu: Gpu) -> Gpu:
        found = by_uuid.get(gpu.uuid or "")
        if gpu.memory is None or gpu.memory.api != "v1" or found is None or found.used_mib is None:
            return gpu
        return dataclasses.replace(gpu, memory=found)

    return dataclasses.replace(
        reading, gpus=tuple(better(gpu) for gpu in reading.gpus or ()), problems=reading.problems + smi.problems
    )


def _failed(problem: Problem, kernel_version: t.Optional[str]) -> GpuReading:
    return GpuReading("nvidia-smi", None, kernel_module_version=kernel_version, problems=(problem,))


def _gpu(index: int, node: ElementTree.Element) -> Gpu:
    errors: list[Problem] = []
    memory = _memory(node, errors)
    return Gpu(
        index=index,
        uuid=_value(node, "uuid"),
        bus_id=node.get("id") or _value(node, "pci/pci_bus_id"),
        minor=_number(_value(node, "minor_number")),
        name=_value(node, "product_name"),
        memory=memory,
        processes=_processes(node, errors),
        health=_health(node),
        mig_enabled={"Enabled": True, "Disabled": False}.get(_value(node, "mig_mode/current_mig") or ""),
        errors=tuple(errors),
    )


def _memory(node: ElementTree.Element, errors: list[Problem]) -> t.Optional[GpuMemory]:
    fields = {name: _number(_value(node, f"fb_memory_usage/{name}")) for name in ("total", "used", "reserved", "free")}
    if fields["used"] is None:
        raw = (node.findtext("fb_memory_usage/used") or "missing").strip()
        errors.append(Problem("nvidia-smi fb_memory_usage/used", None, f"no figure: {raw}"))
        return None
    return GpuMemory(
        fields["total"], fields["used"], fields["reserved"], fields["free"], "nvidia-smi", used_excludes_reserved=True
    )


def _processes(node: ElementTree.Element, errors: list[Problem]) -> t.Optional[tuple[NvmlProcess, ...]]:
    table = node.find("processes")
    if table is None or (not table.findall("process_info") and (table.text or "").strip()):
        raw = "missing" if table is None else (table.text or "").strip()
        errors.append(Problem("nvidia-smi processes", None, f"no list: {raw}"))
        return None
    rows = []
    for row in table.findall("process_info"):
        pid = _number(_value(row, "pid"))
        if pid is not None:
            kind = {"C": "compute", "G": "graphics", "M": "mps"}.get((_value(row, "type") or "C")[0], "compute")
            rows.append(NvmlProcess(pid, kind, _number(_value(row, "used_memory"))))
    return tuple(rows)


def _health(node: ElementTree.Element) -> GpuHealth:
    reasons = node.find("clocks_event_reasons")
    if reasons is None:
        reasons = node.find("clocks_throttle_reasons")
    active = tuple(
        re.sub(r"^clocks_(event|throttle)_reason_", "", item.tag).replace("_", " ")
        for item in (reasons if reasons is not None else ())
        if (item.text or "").strip() == "Active"
    )
    action = _value(node, "gpu_recovery_action")
    return GpuHealth(
        retired_pages_pending=_yes(_value(node, "retired_pages/pending_retirement")),
        remap_pending=_yes(_value(node, "remapped_rows/remapped_row_pending")),
        remap_failure=_yes(_value(node, "remapped_rows/remapped_row_failure")),
        recovery_action=None if action is None else RECOVERY_WORDS.get(action.lower(), action.lower()),
        throttle_reasons=tuple("idle" if name == "gpu idle" else name for name in active),
        utilization_percent=_number(_value(node, "utilization/gpu_util")),
        persistence_mode={"Enabled": True, "Disabled": False}.get(_value(node, "persistence_mode") or ""),
    )


def _value(node: ElementTree.Element, path: str) -> t.Optional[str]:
    text = (node.findtext(path) or "").strip()
    return None if not text or text.startswith(NO_ANSWER) else text


def _number(text: t.Optional[str]) -> t.Optional[int]:
    found = re.match(r"(\d{1,18})(?:\.\d+)?(?:\s*(MiB|%))?$", text or "")
    return int(found.group(1)) if found else None


def _yes(text: t.Optional[str]) -> t.Optional[bool]:
    return {"Yes": True, "No": False}.get(text or "")
