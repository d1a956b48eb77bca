# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long one look at a host takes, as ratios to what everybody knows on the same machine at the same moment.

usage: python -m tests.bench.look [--processes N] [--rounds N]

N idle processes are started for the time of the run (and ended by their own handles). Printed is the median of the
rounds in milliseconds and its ratio to `ps -eo pid,stat,args`, which reads about the same files once. Nothing here
passes or fails: these figures are for people who compare two versions on one machine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import typing as t
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".collections"))

from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import devices, look, procfs
from ansible_collections.cleanslate.sglang.plugins.module_utils.spawn import call_bounded, run_bounded


def median_ms(call: t.Callable[[], t.Any], rounds: int) -> float:
    times = []
    for _unused in range(rounds):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    idle = [subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL) for _unused in range(options.processes)]
    try:
        processes = procfs.read_processes()
        rows = [
            ("ps -eo pid,stat,args", lambda: run_bounded(["ps", "-eo", "pid,stat,args"], 60)),
            ("an empty bounded call", lambda: call_bounded(lambda: None, 60)),
            ("read all processes", procfs.read_processes),
            ("scan their descriptors and mappings", lambda: devices.scan_devices(processes)),
            ("one whole look without GPUs", lambda: look.look(look.LookOptions(expected_gpus=0))),
        ]
        figures = [(name, median_ms(call, options.rounds)) for name, call in rows]
    finally:
        for process in idle:
            process.kill()
            process.wait()
    print(f"{len(processes)} processes, median of {options.rounds} rounds")
    for name, milliseconds in figures:
        print(f"{name:<40}{milliseconds:>10.1f} ms{milliseconds / figures[0][1]:>8.2f} x ps")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
