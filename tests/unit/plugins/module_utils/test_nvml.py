# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of the NVML reading that need no library; the real client is in tests/contract and the case tests."""

from __future__ import annotations

import sys
import types
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.model import GpuReading
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import look, nvml
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Proc, write_proc
from ansible_collections.cleanslate.sglang.tests.unit.builders import gpu, process

VERSIONS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  367.35  Mon Jul 11 23:14:21 PDT 2016": "367.35",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build": "580.159.04",
    "something else": None,
    "": None,
}


@pytest.mark.parametrize("text", VERSIONS)
def test_kernel_module_version(tmp_path: Path, text: str) -> None:
    path = tmp_path / "driver" / "nvidia"
    path.mkdir(parents=True)
    (path / "version").write_text(text + "\n")
    assert nvml.kernel_module_version(str(tmp_path)) == VERSIONS[text]


def test_no_kernel_module(tmp_path: Path) -> None:
    assert nvml.kernel_module_version(str(tmp_path)) is None
    assert nvml.kernel_gpu_count(str(tmp_path)) is None


def test_kernel_gpu_count(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "driver" / "nvidia" / "gpus" / name).mkdir(parents=True)
    assert nvml.kernel_gpu_count(str(tmp_path)) == 2


def test_a_byte_in_use_is_not_zero() -> None:
    assert [nvml.mib(size) for size in (None, 0, 1, 2**20, 2**20 + 1)] == [None, 0, 1, 1, 2]


def test_version_of_a_library_file(tmp_path: Path) -> None:
    real = tmp_path / "libnvidia-ml.so.367.44"
    real.touch()
    link = tmp_path / "libnvidia-ml.so.1"
    link.symlink_to(real)
    assert nvml.version_of_file(str(link)) == "367.44"
    assert nvml.version_of_file(None) is None
    assert nvml.version_of_file(str(tmp_path / "libnvidia-ml.so.1.x")) is None


def test_a_library_outside_of_the_loaders_cache_is_simulated_unless_it_is_the_modules_own(tmp_path: Path) -> None:
    real = tmp_path / "libnvidia-ml.so.580.159.04"
    real.touch()
    assert nvml.is_simulated(str(real), None)
    assert nvml.is_simulated(str(real), "570.1")
    assert not nvml.is_simulated(str(real), "580.159.04")
    assert not nvml.is_simulated(None, None)


@pytest.mark.parametrize(("mode", "trusted"), [(0o644, True), (0o664, False), (0o646, False)])
def test_code_that_others_may_write_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, trusted: bool
) -> None:
    path = tmp_path / "pynvml.py"
    path.touch()
    path.chmod(mode)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert nvml.client_library_path() == (str(path) if trusted else None)


def test_no_client_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert nvml.client_library_path() is None
    assert nvml.read_by_nvml(5) is None


def test_names_of_recovery_actions() -> None:
    assert nvml._action_name(0) == "none"
    assert nvml._action_name(2) == "node reboot"
    assert nvml._action_name(99) == "unknown action 99"


# --- a list that has grown old ---


def test_rows_whose_pid_was_given_away_do_not_count(tmp_path: Path) -> None:
    proc = write_proc(tmp_path / "proc", [Proc(10, "x", start_ticks=5), Proc(11, "x", start_ticks=99), Proc(12, "x")])
    then = {10: process(10, start_ticks=5), 11: process(11, start_ticks=5), 13: process(13)}
    reading = GpuReading("nvml", (gpu(0, listed=[10, 11, 12, 13]), gpu(1, processes=None)))
    pruned = look.still_listed(reading, then, str(proc))
    assert pruned.gpus is not None
    # 11 is another process by now, 12 was not there at the time; 13 is dead, and its row tells of memory.
    assert [row.pid for row in pruned.gpus[0].processes or ()] == [10, 13]
    assert pruned.gpus[1].processes is None
    none = GpuReading("nvml", None)
    assert look.still_listed(none, then, str(proc)) == none


@pytest.mark.parametrize(
    ("code", "action", "told"),
    [(0, 1, False), (2, None, False), (3, None, False), (13, None, False), (999, None, True)],
)
def test_a_field_that_fails_is_told_and_one_that_is_not_there_is_not(code: int, action: int | None, told: bool) -> None:
    value = types.SimpleNamespace(nvmlReturn=code, value=types.SimpleNamespace(uiVal=1))
    client = types.SimpleNamespace(nvmlDeviceGetFieldValues=lambda _handle, _fields: [value], NVMLError=OSError)
    asker = nvml._Asker(t.cast(types.ModuleType, client))
    assert nvml._recovery_action(asker, None) == action
    assert [row["code"] for row in asker.problems] == ([code] if told else [])
