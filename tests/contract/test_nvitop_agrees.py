# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""nvitop and gpustat, two programs that know nothing of us, show the memory and the processes that NVML tells."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import typing as t
from importlib.util import find_spec

import pytest

from ansible_collections.cleanslate.sglang.tests.contract.subject import MIB, Holder, Subject

pytestmark = pytest.mark.promise

SIZE_MIB = 4_000
DEADLINE_S = 60


def run(subject: Subject, module: str, *arguments: str) -> str:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed in this interpreter")
    # nvitop cuts its tables to the terminal's width.
    env = {**subject.env(), "COLUMNS": "160", "LINES": "50"}
    argv = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def nvitop(subject: Subject) -> tuple[list[float], list[tuple[int, int]]]:
    """Used MiB of each GPU, and (GPU, pid) of each process, as nvitop prints them."""
    text = run(subject, "nvitop", "--once", "--ascii")
    sizes = re.findall(r"\| +([\d.]+)([KMG]i|)B / ", text)
    used = [float(size) * {"": 0, "Ki": 1 / 1024, "Mi": 1, "Gi": 1024}[unit] for size, unit in sizes]
    processes = re.findall(r"^\| +(\d+) +(\d+) [CGX] ", text, re.MULTILINE)
    return used, [(int(gpu), int(pid)) for gpu, pid in processes]


def gpustat(subject: Subject) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Used MiB of each GPU, and (GPU, pid, MiB) of each process, as gpustat prints them."""
    gpus = json.loads(run(subject, "gpustat", "--json"))["gpus"]
    processes = [(gpu["index"], row["pid"], row["gpu_memory_usage"]) for gpu in gpus for row in gpu["processes"]]
    return [gpu["memory.used"] for gpu in gpus], processes


def test_nvitop_agrees(subject: Subject, hold: t.Callable[[int], Holder]) -> None:
    holder = hold(SIZE_MIB)
    used, processes = nvitop(subject)
    told = [gpu["v2"]["used"] / MIB for gpu in subject.read()["gpus"]]
    # It prints four figures.
    assert used == pytest.approx(told, rel=0.01, abs=1)
    assert processes == [(0, holder.pid)]
    holder.kill()
    subject.wait_for(lambda gpu: gpu["v2"]["used"] < SIZE_MIB * MIB)
    used, processes = nvitop(subject)
    assert used[0] < SIZE_MIB
    assert processes == []


def test_gpustat_agrees(subject: Subject, hold: t.Callable[[int], Holder]) -> None:
    holder = hold(SIZE_MIB)
    used, processes = gpustat(subject)
    reading = subject.read()["gpus"]
    assert used == [gpu["v2"]["used"] // MIB for gpu in reading]
    assert processes == [(0, holder.pid, reading[0]["compute"][0]["used"] // MIB)]
    holder.kill()
    subject.wait_for(lambda gpu: gpu["v2"]["used"] < SIZE_MIB * MIB)
    used, processes = gpustat(subject)
    assert used[0] < SIZE_MIB
    assert processes == []
