# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for nvidia-smi over the NVML double: the forms that programs ask for, through the real nvidia-ml-py.

    nvidia-smi -L
    nvidia-smi --query-gpu=FIELDS --format=csv[,noheader][,nounits] [-i GPU[,GPU]]
    nvidia-smi --query-compute-apps=FIELDS --format=csv[,noheader][,nounits] [-i GPU[,GPU]]
    nvidia-smi --query-remapped-rows=FIELDS --format=csv[,noheader][,nounits] [-i GPU[,GPU]]
    nvidia-smi -q [-x] [-i GPU[,GPU]]
    nvidia-smi -pm 0|1 [-i GPU[,GPU]]
    nvidia-smi --gpu-reset|-r [-i GPU[,GPU]]

Wording and exit codes are the real program's (580.159.04, read off an H200; -pm, -r and the failures come from
reports). Exit codes are NVML's numbers, 255 for anything else.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import sys
import time
import typing as t
import xml.sax.saxutils
from pathlib import Path

# The double that this file was built beside, or the loader's own where it is installed.
BESIDE = Path(__file__).resolve().parent.parent
STATE = Path(os.environ.get("CLEANSLATE_NVML_STATE") or "/run/cleanslate-nvml-double/state")
RECORDS = STATE.with_name(STATE.name + ".d")


def load_beside() -> None:
    """Sees that nvidia-ml-py loads the double of this build, also where the environment was dropped (sudo)."""
    paths = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if (BESIDE / "libnvidia-ml.so.1").exists() and str(BESIDE) not in paths:
        os.environ["LD_LIBRARY_PATH"] = ":".join([str(BESIDE), *filter(None, paths)])
        os.execv(sys.executable, [sys.executable, *sys.argv])


load_beside()

import pynvml  # noqa: E402  (the library path must stand first)

MIB = 1024 * 1024
COMMUNICATION = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)
LIBRARY = (
    "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display Driver "
    "is properly installed and present in your system.\nPlease also try adding directory that contains libnvidia-ml.so "
    "to your system PATH.\n"
)
IN_USE = (
    "{count} currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, graphics "
    "application such as an X server, or a monitoring application such as another instance of nvidia-smi). Please "
    "first kill all processes using {these} and all compute applications running in the system."
)


class Exit(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Gpu(t.NamedTuple):
    number: int
    bus_id: str
    handle: t.Any


def error_text(code: int) -> str:
    texts = {
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "Driver/library version mismatch",
        pynvml.NVML_ERROR_RESET_REQUIRED: "GPU requires reset",
    }
    return texts.get(code) or str(pynvml.NVMLError(code)).strip()


def init() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        code = int(error.value)
        if code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
            raise Exit(9, COMMUNICATION) from error
        if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            raise Exit(12, LIBRARY) from error
        text = f"Failed to initialize NVML: {error_text(code)}\n"
        if code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            # "13.580.159.04" is told as "580.159".
            version = str(pynvml.nvmlSystemGetNVMLVersion()).split(".")
            text += f"NVML library version: {'.'.join(version[1:3])}\n"
        raise Exit(code if code <= 18 else 255, text) from error


def system_key(name: str, default: str) -> str:
    """A key that only this stand-in reads from the state file's `system` line."""
    for words in map(shlex.split, STATE.read_text().splitlines()):
        if words[:1] == ["system"]:
            default = dict(word.split("=", 1) for word in words[1:]).get(name, default)
    return default


def gpu_key(index: int, name: str, default: str) -> str:
    for words in map(shlex.split, STATE.read_text().splitlines()):
        values = dict(word.split("=", 1) for word in words[1:]) if words[:1] == ["gpu"] else {}
        if values.get("index") == str(index):
            default = values.get(name, default)
    return default


def stated_bus_id(index: int) -> str:
    """The bus id of a GPU that has no handle, as nvidia-smi prints it then (four digits of domain)."""
    return gpu_key(index, "bus", f"00000000:{index + 1:02X}:00.0")[-12:].upper()


def gpus(selection: str | None) -> tuple[list[Gpu], int]:
    """The chosen GPUs, and the exit code that a GPU without a handle makes."""
    found, code = [], 0
    wanted = selection.split(",") if selection is not None else None
    seen: set[str] = set()
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            names = {str(index), "00000000:" + stated_bus_id(index)[5:], stated_bus_id(index)}
            if wanted is None or names & set(wanted):
                seen |= names
                text = error_text(int(error.value))
                sys.stderr.write(
                    f"Unable to determine the device handle for GPU{index}: {stated_bus_id(index)}: {text}\n"
                )
                code = int(system_key("smi_handle_rc", "0"))
            continue
        bus_id = str(pynvml.nvmlDeviceGetPciInfo(handle).busId)
        names = {str(index), str(pynvml.nvmlDeviceGetUUID(handle)), bus_id, bus_id[4:]}
        if wanted is None or names & set(wanted):
            seen |= names
            found.append(Gpu(index, bus_id, handle))
    if wanted is not None and not set(wanted) <= seen:
        raise Exit(6, "No devices were found\n")
    return found, code


class MemoryV2(ctypes.Structure):
    _fields_ = pynvml.c_nvmlMemory_v2_t._fields_


def memory(handle: t.Any) -> t.Any:
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError_FunctionNotFound:
        # The real program has the reserved part from elsewhere: old drivers show 0 MiB when idle (gpustat#130).
        answer = MemoryV2()
        code = ctypes.CDLL("libnvidia-ml.so.1").cleanslate_nvml_memory(handle, ctypes.byref(answer))
        if code:
            raise pynvml.NVMLError(code) from None
        return answer


def in_mib(size: int) -> str:
    """Rounded up, as the real program does: 644,939,776 bytes reserved are 616 MiB there."""
    return f"{-(-size // MIB)} MiB"


def mib(part: str) -> t.Callable[[Gpu], str]:
    return lambda gpu: in_mib(getattr(memory(gpu.handle), part))


def field(number: int, names: t.Mapping[int, str]) -> t.Callable[[Gpu], str]:
    def read(gpu: Gpu) -> str:
        answer = pynvml.nvmlDeviceGetFieldValues(gpu.handle, [number])[0]
        if answer.nvmlReturn:
            raise pynvml.NVMLError(answer.nvmlReturn)
        return names.get(answer.value.uiVal, str(answer.value.uiVal))

    return read


ON = {0: "Disabled", 1: "Enabled"}
YES = {0: "No", 1: "Yes"}
RECOVERY = {0: "None", 1: "Reset", 2: "Reboot", 3: "Drain P2P", 4: "Drain and Reset"}

GPU_FIELDS: dict[str, t.Callable[[Gpu], str]] = {
    "timestamp": lambda gpu: time.strftime("%Y/%m/%d %H:%M:%S.000"),
    "count": lambda gpu: str(pynvml.nvmlDeviceGetCount()),
    "index": lambda gpu: str(gpu.number),
    "name": lambda gpu: str(pynvml.nvmlDeviceGetName(gpu.handle)),
    "uuid": lambda gpu: str(pynvml.nvmlDeviceGetUUID(gpu.handle)),
    "serial": lambda gpu: str(pynvml.nvmlDeviceGetSerial(gpu.handle)),
    "pci.bus_id": lambda gpu: gpu.bus_id,
    "driver_version": lambda gpu: str(pynvml.nvmlSystemGetDriverVersion()),
    "compute_cap": lambda gpu: ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(gpu.handle))),
    "persistence_mode": lambda gpu: ON[pynvml.nvmlDeviceGetPersistenceMode(gpu.handle)],
    "memory.total": mib("total"),
    "memory.reserved": mib("reserved"),
    "memory.used": mib("used"),
    "memory.free": mib("free"),
    "utilization.gpu": lambda gpu: f"{pynvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu} %",
    "utilization.memory": lambda gpu: f"{pynvml.nvmlDeviceGetUtilizationRates(gpu.handle).memory} %",
    "temperature.gpu": lambda gpu: str(pynvml.nvmlDeviceGetTemperature(gpu.handle, 0)),
    "power.draw": lambda gpu: f"{pynvml.nvmlDeviceGetPowerUsage(gpu.handle) / 1000:.2f} W",
    "power.limit": lambda gpu: f"{pynvml.nvmlDeviceGetPowerManagementLimit(gpu.handle) / 1000:.2f} W",
    "pstate": lambda gpu: f"P{pynvml.nvmlDeviceGetPerformanceState(gpu.handle)}",
    "mig.mode.current": lambda gpu: ON[pynvml.nvmlDeviceGetMigMode(gpu.handle)[0]],
    "mig.mode.pending": lambda gpu: ON[pynvml.nvmlDeviceGetMigMode(gpu.handle)[1]],
    "retired_pages.pending": lambda gpu: YES[pynvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu.handle)],
    "clocks_event_reasons.active": lambda gpu: f"0x{pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu.handle):016X}",
    "gpu_recovery_action": field(230, RECOVERY),
}
# The header shows the name on the right.
ALIASES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_serial": "serial",
    "gpu_bus_id": "pci.bus_id",
    "clocks_throttle_reasons.active": "clocks_event_reasons.active",
}
UNITS = {"memory": "MiB", "utilization": "%", "power": "W", "used": "MiB"}


def unit_of(name: str) -> str:
    unit = UNITS.get(name.split(".")[0].split("_")[0])
    return f" [{unit}]" if unit else ""


def cell(read: t.Callable[[], str], units: bool) -> str:
    try:
        text = read()
    except pynvml.NVMLError as error:
        code = int(error.value)
        return "[N/A]" if code == pynvml.NVML_ERROR_NOT_SUPPORTED else f"[{error_text(code)}]"
    for unit in (" MiB", " %", " W"):
        if not units and text.endswith(unit):
            return text[: -len(unit)]
    return text


class Format(t.NamedTuple):
    header: bool
    units: bool


def parse_format(text: str | None) -> Format:
    words = (text or "csv").split(",")
    if set(words) - {"csv", "noheader", "nounits"} or "csv" not in words:
        raise Exit(2, "Format modifier is not recognized.\n")
    return Format("noheader" not in words, "nounits" not in words)


def columns(text: str | None, known: t.Container[str], aliases: t.Mapping[str, str]) -> list[str]:
    names = [aliases.get(name, name) for name in (text or "").split(",")]
    for asked, name in zip((text or "").split(","), names):
        if name not in known:
            raise Exit(2, f'Field "{asked}" is not a valid field to query.\n\n')
    return names


def print_header(names: t.Sequence[str], shape: Format) -> None:
    if shape.header:
        print(", ".join(name + (unit_of(name) if shape.units else "") for name in names))


def print_row(reads: t.Iterable[t.Callable[[], str]], shape: Format) -> None:
    print(", ".join(cell(read, shape.units) for read in reads))


def query_gpu(fields: str | None, shape: Format, selection: str | None) -> int:
    names = columns(fields, GPU_FIELDS, ALIASES)
    chosen, code = gpus(selection)
    print_header(names, shape)
    for gpu in chosen:
        print_row([functools.partial(GPU_FIELDS[name], gpu) for name in names], shape)
    return code


def remapped(gpu: Gpu) -> list[str]:
    correctable, uncorrectable, pending, failure = pynvml.nvmlDeviceGetRemappedRows(gpu.handle)
    return [str(correctable), str(uncorrectable), YES[pending], YES[failure]]


def remapped_part(at: int) -> t.Callable[[Gpu], str]:
    return lambda gpu: remapped(gpu)[at]


REMAP_FIELDS: dict[str, t.Callable[[Gpu], str]] = {
    "gpu_uuid": GPU_FIELDS["uuid"],
    "gpu_bus_id": GPU_FIELDS["pci.bus_id"],
    "gpu_name": GPU_FIELDS["name"],
    "remapped_rows.correctable": remapped_part(0),
    "remapped_rows.uncorrectable": remapped_part(1),
    "remapped_rows.pending": remapped_part(2),
    "remapped_rows.failure": remapped_part(3),
}


def query_remapped(fields: str | None, shape: Format, selection: str | None) -> int:
    names = columns(fields, REMAP_FIELDS, {})
    chosen, code = gpus(selection)
    print_header(names, shape)
    for gpu in chosen:
        print_row([functools.partial(REMAP_FIELDS[name], gpu) for name in names], shape)
    return code


def process_name(pid: int) -> str:
    try:
        return str(pynvml.nvmlSystemGetProcessName(pid))
    except pynvml.NVMLError:
        return "[Not Found]"


def used_memory(row: t.Any) -> str:
    if row.usedGpuMemory is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return in_mib(row.usedGpuMemory)


APP_FIELDS: dict[str, t.Callable[[Gpu, t.Any], str]] = {
    "timestamp": lambda gpu, row: time.strftime("%Y/%m/%d %H:%M:%S.000"),
    "gpu_name": lambda gpu, row: GPU_FIELDS["name"](gpu),
    "gpu_uuid": lambda gpu, row: GPU_FIELDS["uuid"](gpu),
    "gpu_serial": lambda gpu, row: GPU_FIELDS["serial"](gpu),
    "gpu_bus_id": lambda gpu, row: gpu.bus_id,
    "pid": lambda gpu, row: str(row.pid),
    "process_name": lambda gpu, row: process_name(row.pid),
    "used_gpu_memory": lambda gpu, row: used_memory(row),
}
APP_ALIASES = {"name": "process_name", "used_memory": "used_gpu_memory"}


def query_apps(fields: str | None, shape: Format, selection: str | None) -> int:
    names = columns(fields, APP_FIELDS, APP_ALIASES)
    chosen, code = gpus(selection)
    print_header(names, shape)
    for gpu in chosen:
        for row in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle):
            print_row([functools.partial(APP_FIELDS[name], gpu, row) for name in names], shape)
    return code


def plain(read: t.Callable[[], str]) -> str:
    """A value in -q and -x: without the square brackets of the CSV forms."""
    return cell(read, True).strip("[]")


def process_rows(gpu: Gpu) -> list[tuple[str, t.Any]]:
    rows = [("C", row) for row in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)]
    rows += [("G", row) for row in pynvml.nvmlDeviceGetGraphicsRunningProcesses(gpu.handle)]
    return rows


def element(name: str, text: str, depth: int) -> str:
    return "\t" * depth + f"<{name}>{xml.sax.saxutils.escape(text)}</{name}>\n"


def xml_of(gpu: Gpu) -> str:
    def value(name: str) -> str:
        return plain(lambda: GPU_FIELDS[name](gpu))

    out = f'\t<gpu id="{gpu.bus_id}">\n'
    out += element("product_name", value("name"), 2)
    out += element("persistence_mode", value("persistence_mode"), 2)
    out += "\t\t<mig_mode>\n"
    out += element("current_mig", value("mig.mode.current"), 3) + element("pending_mig", value("mig.mode.pending"), 3)
    out += "\t\t</mig_mode>\n\t\t<mig_devices>\n\t\t\tNone\n\t\t</mig_devices>\n"
    out += element("serial", value("serial"), 2) + element("uuid", value("uuid"), 2)
    out += element("minor_number", plain(lambda: str(pynvml.nvmlDeviceGetMinorNumber(gpu.handle))), 2)
    out += element("gpu_recovery_action", value("gpu_recovery_action"), 2)
    out += "\t\t<pci>\n" + element("pci_bus_id", gpu.bus_id, 3) + "\t\t</pci>\n"
    out += "\t\t<fb_memory_usage>\n"
    for part in ("total", "reserved", "used", "free"):
        out += element(part, value(f"memory.{part}"), 3)
    out += "\t\t</fb_memory_usage>\n\t\t<utilization>\n"
    out += element("gpu_util", value("utilization.gpu"), 3) + element("memory_util", value("utilization.memory"), 3)
    out += "\t\t</utilization>\n\t\t<retired_pages>\n"
    out += element("pending_retirement", value("retired_pages.pending"), 3)
    out += "\t\t</retired_pages>\n\t\t<remapped_rows>\n"
    for at, name in enumerate(("corr", "unc", "pending", "failure")):
        out += element(f"remapped_row_{name}", plain(functools.partial(remapped_part(at), gpu)), 3)
    out += "\t\t</remapped_rows>\n\t\t<processes>\n"
    for kind, row in process_rows(gpu):
        out += "\t\t\t<process_info>\n"
        out += element("gpu_instance_id", "N/A" if row.gpuInstanceId == 0xFFFFFFFF else str(row.gpuInstanceId), 4)
        instance = row.computeInstanceId
        out += element("compute_instance_id", "N/A" if instance == 0xFFFFFFFF else str(instance), 4)
        out += element("pid", str(row.pid), 4) + element("type", kind, 4)
        out += element("process_name", process_name(row.pid), 4)
        out += element("used_memory", plain(functools.partial(used_memory, row)), 4)
        out += "\t\t\t</process_info>\n"
    return out + "\t\t</processes>\n\t</gpu>\n\n"


def cuda_version() -> str:
    number = pynvml.nvmlSystemGetCudaDriverVersion()
    return f"{number // 1000}.{number % 1000 // 10}"


def query_xml(selection: str | None) -> int:
    chosen, code = gpus(selection)
    print('<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n<nvidia_smi_log>')
    print(element("timestamp", time.asctime(), 1), end="")
    print(element("driver_version", str(pynvml.nvmlSystemGetDriverVersion()), 1), end="")
    print(element("cuda_version", cuda_version(), 1), end="")
    print(element("attached_gpus", str(pynvml.nvmlDeviceGetCount()), 1), end="")
    print("".join(map(xml_of, chosen)) + "</nvidia_smi_log>")
    return code


def query_text(selection: str | None) -> int:
    chosen, code = gpus(selection)
    print("\n==============NVSMI LOG==============\n")
    for name, text in (
        ("Timestamp", time.asctime()),
        ("Driver Version", str(pynvml.nvmlSystemGetDriverVersion())),
        ("CUDA Version", cuda_version()),
    ):
        print(f"{name:<55}: {text}")
    print(f"\n{'Attached GPUs':<55}: {pynvml.nvmlDeviceGetCount()}")
    for gpu in chosen:
        print(f"GPU {gpu.bus_id}")
        for name, key in (("Product Name", "name"), ("Persistence Mode", "persistence_mode"), ("GPU UUID", "uuid")):
            print(f"    {name:<51}: {plain(functools.partial(GPU_FIELDS[key], gpu))}")
        print("    FB Memory Usage")
        for name in ("Total", "Reserved", "Used", "Free"):
            text = plain(functools.partial(GPU_FIELDS[f"memory.{name.lower()}"], gpu))
            print(f"        {name:<47}: {text}")
    return code


def list_gpus(selection: str | None) -> int:
    chosen, code = gpus(selection)
    for gpu in chosen:
        print(f"GPU {gpu.number}: {GPU_FIELDS['name'](gpu)} (UUID: {GPU_FIELDS['uuid'](gpu)})")
    return code


LINE = "+-----------------------------------------------------------------------------------------+"
HEAD = """\
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|"""
PROCESS_HEAD = """\
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|"""


def short(gpu: Gpu, name: str) -> str:
    """A value in the table for people: a figure that can't be had is ERR! there."""
    text = cell(lambda: GPU_FIELDS[name](gpu), True)
    return "N/A" if text == "[N/A]" else "ERR!" if text.startswith("[") else text


def table_rows(gpu: Gpu) -> str:
    used, total = (short(gpu, f"memory.{part}").replace(" ", "") for part in ("used", "total"))
    watts = [short(gpu, f"power.{part}").split(".")[0] for part in ("draw", "limit")]
    power = " / ".join(f"{text:>4}W" if text.isdigit() else text for text in watts)
    mode = {"Enabled": "On", "Disabled": "Off"}.get(short(gpu, "persistence_mode"), "N/A")
    mig = short(gpu, "mig.mode.current")
    celsius = short(gpu, "temperature.gpu") + "C"
    util = short(gpu, "utilization.gpu").replace(" ", "")
    return (
        f"| {gpu.number:>3}  {short(gpu, 'name')[:26]:<26}{mode:>7} | {gpu.bus_id:>18} Off | {'0':>20} |\n"
        f"| N/A {celsius:>5} {short(gpu, 'pstate'):>5} {power:>23} | {used + ' / ' + total:>22} | "
        f"{util:>7} {'Default':>12} |\n"
        f"|{'':41}|{'':24}| {mig:>20} |\n{HEAD.splitlines()[0]}"
    )


def overview(selection: str | None) -> int:
    chosen, code = gpus(selection)
    driver = str(pynvml.nvmlSystemGetDriverVersion())
    print(f"{time.asctime()}       \n{LINE}")
    print(f"| NVIDIA-SMI {driver:<22} Driver Version: {driver:<14} CUDA Version: {cuda_version():<8} |\n{HEAD}")
    for gpu in chosen:
        print(table_rows(gpu))
    print(f"\n{LINE}\n{PROCESS_HEAD}")
    rows = [(gpu, kind, row) for gpu in chosen for kind, row in process_rows(gpu)]
    for gpu, kind, row in rows:
        used = plain(functools.partial(used_memory, row)).replace(" ", "")
        print(f"|  {gpu.number:>3}   N/A  N/A {row.pid:>15} {kind:>6}   {process_name(row.pid)[:31]:<31} {used:>14} |")
    if not rows:
        print(f"|  {'No running processes found':<87}|")
    print(LINE)
    return code


def note(text: str) -> None:
    RECORDS.mkdir(exist_ok=True)
    with (RECORDS / "smi.log").open("a") as log:
        log.write(text + "\n")


def set_link(name: str, content: str) -> None:
    temporary = RECORDS / f".{name}.{os.getpid()}"
    temporary.symlink_to(content)
    temporary.replace(RECORDS / name)


def need_root(action: str, gpu: Gpu) -> None:
    if os.geteuid() != 0:
        text = f"Unable to {action} for GPU {gpu.bus_id}: Insufficient Permissions\n"
        raise Exit(4, text + "Terminating early due to previous errors.\n")


def set_persistence(selection: str | None, mode: str) -> int:
    if mode not in {"0", "1", "DISABLED", "ENABLED"}:
        raise Exit(2, f"Invalid persistence mode value: {mode}\n")
    wanted = int(mode in {"1", "ENABLED"})
    chosen, code = gpus(selection)
    for gpu in chosen:
        need_root("set persistence mode", gpu)
        if pynvml.nvmlDeviceGetPersistenceMode(gpu.handle) == wanted:
            print(f"Persistence mode is already {ON[wanted]} for GPU {gpu.bus_id}.")
            continue
        note(f"pm {gpu.number} {wanted}")
        set_link(f"pm.{gpu.number}", str(wanted))
        print(f"{ON[wanted]} persistence mode for GPU {gpu.bus_id}.")
    print("All done.")
    return code


def in_use(gpu: Gpu) -> bool:
    """By smi_reset: auto, a live process is listed; pm, or persistence mode is on (NVSentinel#1690); never: always."""
    policy = gpu_key(gpu.number, "smi_reset", "auto")
    if policy not in {"auto", "pm", "never"}:
        raise Exit(255, f"NVML double: smi_reset={policy} is none of auto, pm, never\n")
    live = [row.pid for _unused, row in process_rows(gpu) if Path(f"/proc/{row.pid}").exists()]
    return bool(live or policy == "never" or (policy == "pm" and pynvml.nvmlDeviceGetPersistenceMode(gpu.handle)))


def reset(selection: str | None) -> int:
    chosen, code = gpus(selection)
    refused = []
    for gpu in chosen:
        need_root("reset", gpu)
        if in_use(gpu):
            refused.append(gpu)
    if refused:
        print("The following GPUs could not be reset:")
        for gpu in refused:
            note(f"refused {gpu.number}")
            print(f"  GPU {gpu.bus_id}: In use by another client")
        one = len(refused) == 1
        count = "1 device is" if one else f"{len(refused)} devices are"
        print("\n" + IN_USE.format(count=count, these="this device" if one else "these devices") + "\n")
        return 255
    for gpu in chosen:
        note(f"reset {gpu.number}")
        set_link(f"reset.{gpu.number}", "done")
        print(f"GPU {gpu.bus_id} was successfully reset.")
    print("All done.")
    return code


class Options(t.NamedTuple):
    flags: dict[str, str | None]

    def value(self, *names: str) -> str | None:
        return next((self.flags[name] for name in names if name in self.flags), None)

    def has(self, *names: str) -> bool:
        return any(name in self.flags for name in names)


QUERY_FLAGS = {"--query-gpu", "--query-compute-apps", "--query-remapped-rows"}
WITH_VALUE = {"-i", "--id", "-pm", "--persistence-mode", "--format", *QUERY_FLAGS}
WITHOUT_VALUE = {"-L", "--list-gpus", "-q", "--query", "-x", "--xml-format", "-r", "--gpu-reset"}


def parse(words: t.Sequence[str]) -> Options:
    flags: dict[str, str | None] = {}
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name in WITHOUT_VALUE and not equals:
            flags[name] = None
        elif name in WITH_VALUE and (equals or rest):
            flags[name] = value if equals else rest.pop(0)
        else:
            raise Exit(255, f"ERROR: Option {name} is not recognized. Please run 'nvidia-smi -h'.\n\n")
    return Options(flags)


QUERIES: dict[str, t.Callable[[str | None, Format, str | None], int]] = {
    "--query-gpu": query_gpu,
    "--query-compute-apps": query_apps,
    "--query-remapped-rows": query_remapped,
}


def run(options: Options) -> int:
    selection = options.value("-i", "--id")
    init()
    shape = parse_format(options.value("--format"))
    for flag, query in QUERIES.items():
        if options.has(flag):
            return query(options.value(flag), shape, selection)
    if options.has("-pm", "--persistence-mode"):
        return set_persistence(selection, str(options.value("-pm", "--persistence-mode")))
    if options.has("-r", "--gpu-reset"):
        return reset(selection)
    if options.has("-L", "--list-gpus"):
        if selection is not None:
            raise Exit(2, "ERROR: Option -i is not valid for this command. Please run 'nvidia-smi -h' for help.\n\n")
        return list_gpus(selection)
    if options.has("-q", "--query"):
        return query_xml(selection) if options.has("-x", "--xml-format") else query_text(selection)
    return overview(selection)


def main() -> int:
    try:
        return run(parse(sys.argv[1:]))
    except Exit as error:
        sys.stdout.write(error.text)
        return error.code
    except pynvml.NVMLError as error:
        print(f"Failed: {error_text(int(error.value))}")
        return int(error.value) if int(error.value) <= 18 else 255


if __name__ == "__main__":
    sys.exit(main())
