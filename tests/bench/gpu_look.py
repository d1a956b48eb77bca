# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long gpu_info takes beside nvidia-smi and nvitop, each as a process of its own, on a host with a GPU.

usage: python -m tests.bench.gpu_look [--rounds N] [--json FILE]

gpu_info answers who holds each GPU (mappings and descriptors of every process), which the others don't; the row without
holders is what they tell as well. A tool that is not installed is left out, and said so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN_MODULE = ROOT / "tests" / "harness" / "run_module.py"
READ_ONLY = (
    "from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import nvml; "
    "print(len(nvml.read_by_nvml(10.0).gpus or ()))"
)


def environment() -> dict[str, str]:
    paths = [str(ROOT / ".collections"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TERM": "dumb"}


def seconds(argv: list[str], stdin: str = "") -> float:
    began = time.perf_counter()
    done = subprocess.run(
        argv, input=stdin, capture_output=True, text=True, env=environment(), timeout=120, check=False
    )
    taken = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}: {(done.stderr or done.stdout)[-400:]}")
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        raise SystemExit("nvidia-smi is not installed here: this benchmark needs a host with a GPU")
    smi = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    rows: list[tuple[str, list[str], str]] = [
        ("nvidia-smi --query-gpu", smi, ""),
        ("nvidia-smi -q -x", ["nvidia-smi", "-q", "-x"], ""),
        ("python -c pass", [sys.executable, "-c", "pass"], ""),
        ("our NVML reading alone", [sys.executable, "-c", READ_ONLY], ""),
        ("gpu_info", [sys.executable, str(RUN_MODULE), "gpu_info"], "{}"),
    ]
    if importlib.util.find_spec("nvitop"):
        rows.append(("nvitop --once", [sys.executable, "-m", "nvitop", "--once", "--ascii"], ""))
    else:
        print("nvitop is not installed: left out")
    figures = {}
    for name, argv, stdin in rows:
        seconds(argv, stdin)  # once for the caches
        figures[name] = statistics.median(seconds(argv, stdin) for _unused in range(options.rounds))
    processes = sum(name.isdigit() for name in os.listdir("/proc"))
    print(f"\n{processes} processes, median of {options.rounds}")
    for name, taken in figures.items():
        print(f"{name:<32}{taken:>8.3f} s{taken / figures['nvidia-smi --query-gpu']:>8.1f} x nvidia-smi")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
