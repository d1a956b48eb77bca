# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in of nvidia-smi: what the real one prints (an H200, driver 580.159.04) and was reported to."""

from __future__ import annotations

import os
import subprocess
import typing as t
import xml.etree.ElementTree
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml import lies
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import NA, Fault, Gpu, Hold, NvmlDouble, Variant

DEADLINE_S = 60
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="nvidia-smi changes settings for root only")


def smi(nvml: NvmlDouble, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr. The library's path is left out of the environment, as sudo does."""
    env = {key: value for key, value in {**os.environ, **nvml.env()}.items() if key != "LD_LIBRARY_PATH"}
    argv = [str(nvml.library_dir / "bin" / "nvidia-smi"), *arguments]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def nvml(tmp_path: Path) -> NvmlDouble:
    return NvmlDouble(tmp_path)


@pytest.fixture
def pid() -> t.Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def test_csv_as_the_real_one_prints_it(nvml: NvmlDouble) -> None:
    uuid = "GPU-b75bd30c-6f2a-b532-d75f-225e13950e00"
    nvml.write(Gpu(0, name="NVIDIA H200", uuid=uuid, bus="00000000:00:06.0"))
    fields = "index,uuid,pci.bus_id,name,memory.used,memory.total,memory.reserved,memory.free,utilization.gpu"
    fields += ",retired_pages.pending,gpu_recovery_action,clocks_event_reasons.active,persistence_mode,compute_cap"
    code, out, _unused = smi(nvml, f"--query-gpu={fields},mig.mode.current", "--format=csv,noheader,nounits")
    row = f"0, {uuid}, 00000000:00:06.0, NVIDIA H200, 0, 143771, 616, 143156, 0, [N/A], None"
    assert (code, out) == (0, f"{row}, 0x0000000000000000, Enabled, 9.0, Disabled\n")
    code, out, _unused = smi(
        nvml, "--query-gpu=index,memory.used,utilization.gpu,temperature.gpu,gpu_uuid", "--format=csv"
    )
    assert out == f"index, memory.used [MiB], utilization.gpu [%], temperature.gpu, uuid\n0, 0 MiB, 0 %, 44, {uuid}\n"
    assert smi(nvml, "--query-gpu=index") == (0, "index\n0\n", "")
    assert smi(nvml, "-L") == (0, f"GPU 0: NVIDIA H200 (UUID: {uuid})\n", "")


def test_processes(nvml: NvmlDouble, pid: int) -> None:
    nvml.write(Gpu(0), Gpu(1), Hold(1, mib=5638, pid=pid))
    code, out, _unused = smi(nvml, "--query-compute-apps=pid,used_memory,gpu_bus_id,name", "--format=csv")
    assert code == 0
    assert out == f"pid, used_gpu_memory [MiB], gpu_bus_id, process_name\n{pid}, 5638 MiB, 00000000:02:00.0, sleep\n"
    assert smi(nvml, "--query-compute-apps=pid", "--format=csv,noheader", "-i", "0") == (0, "", "")
    assert f"{pid}      C   sleep " in smi(nvml)[1]


def test_xml(nvml: NvmlDouble, pid: int) -> None:
    nvml.write(Gpu(0), Gpu(1, minor=5), Hold(1, mib=70, pid=pid, listed="na"))
    code, out, _unused = smi(nvml, "-q", "-x")
    root = xml.etree.ElementTree.fromstring(out)
    gpus = root.findall("gpu")
    assert (code, root.tag, root.findtext("attached_gpus")) == (0, "nvidia_smi_log", "2")
    assert [gpu.get("id") for gpu in gpus] == ["00000000:01:00.0", "00000000:02:00.0"]
    assert gpus[1].findtext("minor_number") == "5"
    assert gpus[1].findtext("fb_memory_usage/used") == "70 MiB"
    assert gpus[1].findtext("processes/process_info/pid") == str(pid)
    assert gpus[1].findtext("processes/process_info/used_memory") == "N/A"
    assert gpus[0].find("processes/process_info") is None


def test_figures_that_cannot_be_had(nvml: NvmlDouble) -> None:
    nvml.write(Gpu(0, util=NA), Gpu(1), *lies.unified_memory(0), Fault("nvmlDeviceGetMemoryInfo*", gpu=1, code=999))
    code, out, _unused = smi(nvml, "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits")
    assert (code, out) == (0, "[N/A], [N/A]\n[Unknown Error], 0\n")
    table = smi(nvml)[1]
    assert "N/A / N/A" in table
    assert "ERR! / ERR!" in table


def test_used_memory_without_v2(tmp_path: Path) -> None:
    nvml = NvmlDouble(tmp_path, Variant.WITHOUT_MEMORY_V2)
    nvml.write(Gpu(0, extra_mib=12))
    assert smi(nvml, "--query-gpu=memory.used", "--format=csv,noheader") == (0, "12 MiB\n", "")


def test_a_gpu_without_handle_goes_to_stderr(nvml: NvmlDouble) -> None:
    nvml.write(Gpu(0), Gpu(1), Gpu(2), *lies.no_handle(1, lies.GPU_IS_LOST))
    lost = "Unable to determine the device handle for GPU1: 0000:02:00.0: GPU is lost\n"
    assert smi(nvml, "--query-gpu=index", "--format=csv,noheader") == (0, "0\n2\n", lost)


@pytest.mark.parametrize(
    ("lines", "code", "text"),
    [
        (lies.init_fails(9), 9, "couldn't communicate with the NVIDIA driver"),
        (lies.init_fails(4), 4, "Failed to initialize NVML: Insufficient Permissions\n"),
        (lies.init_fails(12), 12, "couldn't find libnvidia-ml.so"),
        (lies.init_fails(999), 255, "Failed to initialize NVML: Unknown Error\n"),
        (
            lies.version_mismatch("580.159.04"),
            18,
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.159\n",
        ),
    ],
)
def test_no_driver(nvml: NvmlDouble, lines: lies.Lines, code: int, text: str) -> None:
    nvml.write(Gpu(0), *lines)
    found, out, _unused = smi(nvml, "-L")
    assert found == code
    assert text in out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--query-gpu=foo,index", "--format=csv"), 2, 'Field "foo" is not a valid field to query.\n\n'),
        (("--query-gpu=index", "--format=xml"), 2, "Format modifier is not recognized.\n"),
        (("--query-gpu=index", "--format=csv", "-i", "7"), 6, "No devices were found\n"),
        (("--nonsense",), 255, "ERROR: Option --nonsense is not recognized. Please run 'nvidia-smi -h'.\n\n"),
    ],
)
def test_wrong_arguments(nvml: NvmlDouble, arguments: tuple[str, ...], code: int, text: str) -> None:
    nvml.write(Gpu(0))
    assert smi(nvml, *arguments) == (code, text, "")


@needs_root
def test_a_reset_is_refused_while_a_process_is_there(nvml: NvmlDouble, pid: int) -> None:
    nvml.write(Gpu(0), Hold(0, mib=5, pid=pid))
    code, out, _unused = smi(nvml, "--gpu-reset", "-i", "0")
    assert code == 255
    assert "  GPU 00000000:01:00.0: In use by another client\n\n1 device is currently being used" in out
    assert nvml.actions() == ["refused 0"]


@needs_root
def test_a_reset_clears_what_no_process_holds(nvml: NvmlDouble) -> None:
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    nvml.write(
        Gpu(0, extra_mib=600, recovery=1, smi_reset="pm"),
        *lies.dead_pid(0, 4_000_000, 100),
        Fault("nvmlDeviceGetUtilizationRates", gpu=0, code=15, until_reset=True),
    )
    query = ("--query-gpu=memory.used,gpu_recovery_action,utilization.gpu,persistence_mode", "--format=csv,noheader")
    before = smi(nvml, *query)[1]
    refused = smi(nvml, "-r", "-i", uuid)[0]
    off = smi(nvml, "-pm", "0", "-i", uuid)
    done = smi(nvml, "-r", "-i", uuid)
    on = smi(nvml, "-pm", "1", "-i", uuid)
    assert before == "700 MiB, Reset, [GPU is lost], Enabled\n"
    assert refused == 255
    assert off == (0, "Disabled persistence mode for GPU 00000000:01:00.0.\nAll done.\n", "")
    assert done == (0, "GPU 00000000:01:00.0 was successfully reset.\nAll done.\n", "")
    assert on[0] == 0
    assert smi(nvml, *query)[1] == "0 MiB, None, 0 %, Enabled\n"
    assert nvml.actions() == ["refused 0", "pm 0 0", "reset 0", "pm 0 1"]
