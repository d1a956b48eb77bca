# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Predict what a real SGLang will print, then start it and compare.

usage: predict.py --plan FILE --model MODEL [--only NAME,...]
       predict.py --compare FILE --model MODEL --out DIR [--budget SECONDS]

``--plan`` writes the predictions of each configuration before any launch, from what the driver says of an idle GPU;
nothing is learned from an earlier start. ``--compare`` starts each of them in turn, stops it as soon as its log holds
the figures, and writes DIR/compare.json. No configuration is started after ``--budget`` seconds. The model is the tiny
one of engine/make_tiny_model.py, with dummy weights.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import typing as t
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINKS = ROOT / ".collections"
if not (LINKS / "ansible_collections" / "cleanslate" / "sglang").exists():  # nobody has prepared this checkout
    LINKS = Path(tempfile.mkdtemp(prefix="collections-"))
    (LINKS / "ansible_collections" / "cleanslate").mkdir(parents=True)
    (LINKS / "ansible_collections" / "cleanslate" / "sglang").symlink_to(ROOT)
sys.path.insert(0, str(LINKS))

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.budget import budget  # noqa: E402
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.budget_findings import judge_budget  # noqa: E402
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.topology import plan_topology  # noqa: E402
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import to_json  # noqa: E402
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import memory, nvml  # noqa: E402
from ansible_collections.cleanslate.sglang.plugins.module_utils.plan_model import GpuFacts, HostFacts  # noqa: E402
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.install import find_install  # noqa: E402
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.model_config import read_model  # noqa: E402
from ansible_collections.cleanslate.sglang.tests.gpu.scenarios import BASE_FLAGS, used_mib  # noqa: E402

PORT = 31000
CAP = 2_000_000
CONFIGURATIONS: dict[str, dict[str, t.Any]] = {
    "half_bf16": {"mem-fraction-static": 0.5},
    "most_fp8": {"mem-fraction-static": 0.88, "kv-cache-dtype": "fp8_e4m3"},
    "most_bf16_page64": {"mem-fraction-static": 0.88, "kv-cache-dtype": "bfloat16", "page-size": 64},
    "half_fp8_page64": {"mem-fraction-static": 0.5, "kv-cache-dtype": "fp8_e4m3", "page-size": 64},
    "hicache_size": {
        "mem-fraction-static": 0.5,
        "enable-hierarchical-cache": True,
        "hicache-size": 10,
        "max-total-tokens": CAP,
    },
    "hicache_ratio_page64": {
        "mem-fraction-static": 0.88,
        "enable-hierarchical-cache": True,
        "hicache-ratio": 2.5,
        "max-total-tokens": CAP,
        "page-size": 64,
    },
}
FIGURES = ("max_total_num_tokens", "available_gpu_mem_gib", "hicache_gb")
READY_DEADLINE_S = 240
FREE_DEADLINE_S = 60

_START = re.compile(r"max_total_num_tokens=(\d+),.*?available_gpu_mem=([\d.]+) GB")
_POOL = re.compile(r"Allocating (?:.*?tokens, )?([\d.]+) GB host memory")
_BEFORE = re.compile(r"Load weight begin\. avail mem=([\d.]+) GB")
_AFTER = re.compile(r"Memory pool end\. avail mem=([\d.]+) GB")

Figures = dict[str, t.Any]


def predict(model_path: str, only: t.Sequence[str]) -> Figures:
    """The predictions, with the readings that they rest on."""
    install = find_install(sys.executable, os.environ.get("PYTHONPATH", ""))
    assert install is not None, "no SGLang is installed for this Python"
    began = time.monotonic()
    reading = nvml.read_gpus()
    assert reading.gpus, reading.problems
    facts = [
        GpuFacts(
            gpu.index,
            gpu.uuid,
            gpu.name,
            gpu.memory.total_mib if gpu.memory else None,
            gpu.memory.free_mib if gpu.memory else None,
            gpu.compute_capability,
        )
        for gpu in reading.gpus[:1]
    ]
    model = read_model(model_path, install.package)
    shm = os.statvfs("/dev/shm")
    limit = memory.read_cgroup_limit()
    host = HostFacts(
        mem_available_mib=memory.read_meminfo().mem_available_mib,
        cgroup_headroom_mib=limit.headroom_mib,
        cgroup_limited=limit.limit_mib is not None if limit.readable else None,
        shm_free_mib=shm.f_bavail * shm.f_frsize >> 20,
    )
    plans: Figures = {}
    for name, changes in CONFIGURATIONS.items():
        if only and name not in only:
            continue
        flags = {"model-path": model_path, **BASE_FLAGS, **changes}
        topology, findings = plan_topology(flags, facts, model, install.version)
        result = budget(flags, model, topology, host, None, install.version)
        judged = (*findings, *judge_budget(result, flags, model, topology, host, install.version))
        hicache = result.value("hicache_per_rank")
        headroom = result.value("headroom_after_start")
        plans[name] = {
            "flags": changes,
            "max_total_num_tokens": result.value("max_total_num_tokens"),
            "available_gpu_mem_gib": None if headroom is None else round(headroom / 2**30, 3),
            "hicache_gb": round(hicache / 1e9, 2) if hicache else None,
            "findings": to_json(judged),
            "budget": to_json(result),
        }
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "sglang": install.version,
        "learned": None,
        "gpu": to_json(facts[0]),
        "host": to_json(host),
        "model": to_json(model),
        "seconds": round(time.monotonic() - began, 3),
        "configurations": plans,
    }


def words(model_path: str, changes: t.Mapping[str, t.Any]) -> list[str]:
    """The command line; the log level is SGLang's own."""
    argv = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(PORT)]
    for name, value in {"model-path": model_path, **BASE_FLAGS, **changes}.items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return argv


def measure(model_path: str, changes: t.Mapping[str, t.Any], log: Path) -> Figures:
    """Start it, wait for the figures, end it, and wait for the GPU to be free again."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    wants_pool = "enable-hierarchical-cache" in changes
    began = time.monotonic()
    with log.open("wb") as handle:
        server = subprocess.Popen(
            words(model_path, changes),
            stdout=handle,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    figures: Figures = {}
    try:
        while time.monotonic() - began < READY_DEADLINE_S:
            text = log.read_text(errors="replace")
            figures = read_log(text)
            if "max_total_num_tokens" in figures and (not wants_pool or figures["hicache_gb"] is not None):
                break
            if server.poll() is not None:
                figures["error"] = f"it ended with {server.returncode}: " + " | ".join(text.splitlines()[-5:])[-600:]
                break
            time.sleep(0.2)
        else:
            figures["error"] = f"no figures within {READY_DEADLINE_S} s"
        figures["seconds_to_figures"] = round(time.monotonic() - began, 1)
    finally:
        end_group(server)
    figures["seconds"] = round(time.monotonic() - began, 1)
    return figures


def read_log(text: str) -> Figures:
    """What the log says so far; GB of the GPU lines are GiB, those of the host pools GB."""
    start, pools = _START.search(text), _POOL.findall(text)
    figures: Figures = {"hicache_gb": sum(map(float, pools)) if pools else None}
    for name, pattern in (("free_before_load_gib", _BEFORE), ("free_after_pool_gib", _AFTER)):
        found = pattern.search(text)
        figures[name] = float(found.group(1)) if found else None
    if start:
        figures["max_total_num_tokens"] = int(start.group(1))
        figures["available_gpu_mem_gib"] = float(start.group(2))
    return figures


def end_group(server: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the launcher's own session (all of its children are in it), then wait for the memory."""
    with contextlib.suppress(ProcessLookupError):  # it has ended, and its children with it
        os.killpg(server.pid, signal.SIGKILL)
    server.wait(timeout=60)
    end = time.monotonic() + FREE_DEADLINE_S
    while used_mib()[0] > 1024:
        if time.monotonic() > end:
            raise SystemExit(f"GPU 0 still has {used_mib()[0]} MiB in use {FREE_DEADLINE_S} s after the server's end")
        time.sleep(0.2)


def percent(predicted: t.Optional[float], real: t.Optional[float]) -> t.Optional[float]:
    return None if predicted is None or not real else round((predicted - real) / real * 100, 3)


def compare(plan: t.Mapping[str, t.Any], model_path: str, out: Path, budget_s: float, digest: str) -> list[Figures]:
    """One row per configuration and figure; ``error_percent`` is (predicted - real) / real."""
    rows: list[Figures] = []
    seen: Figures = {}
    began = time.monotonic()
    for name, predicted in plan["configurations"].items():
        if time.monotonic() - began > budget_s:
            rows.append({"configuration": name, "figure": "-", "note": "not started: the time is used up"})
            continue
        real = seen[name] = measure(model_path, predicted["flags"], out / f"{name}.log")
        for figure in FIGURES:
            if predicted[figure] is None and real.get(figure) is None:
                continue
            rows.append(
                {
                    "configuration": name,
                    "figure": figure,
                    "predicted": predicted[figure],
                    "real": real.get(figure),
                    "error_percent": percent(predicted[figure], real.get(figure)),
                    "note": real.get("error"),
                }
            )
        report = {"plan": {"at": plan["at"], "sha256": digest}, "rows": rows, "seen": seen}
        (out / "compare.json").write_text(json.dumps(report, indent=1))
        print(f"{name}: {real}", flush=True)
    return rows


def shown(rows: t.Sequence[t.Mapping[str, t.Any]]) -> str:
    """A table for people."""
    lines = [f"{'configuration':<22}{'figure':<24}{'predicted':>16}{'real':>16}{'error %':>10}"]
    for row in rows:
        predicted, real, error = (row.get(name) for name in ("predicted", "real", "error_percent"))
        cells = ["-" if value is None else f"{value:,}" for value in (predicted, real, error)]
        note = f"  {row['note']}" if row.get("note") else ""
        lines.append(f"{row['configuration']:<22}{row['figure']:<24}{cells[0]:>16}{cells[1]:>16}{cells[2]:>10}{note}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--plan", type=Path)
    what.add_argument("--compare", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--budget", type=float, default=600.0)
    arguments = parser.parse_args()
    if arguments.plan:
        plan = predict(arguments.model, [name for name in arguments.only.split(",") if name])
        text = json.dumps(plan, indent=1)
        arguments.plan.write_text(text)
        for name, one in plan["configurations"].items():
            print(f"{name}: " + ", ".join(f"{figure} {one[figure]}" for figure in FIGURES))
        print(f"sha256 {hashlib.sha256(text.encode()).hexdigest()} at {plan['at']}, {plan['seconds']} s")
        return 0
    data = arguments.compare.read_bytes()
    out = arguments.out or arguments.compare.parent
    out.mkdir(parents=True, exist_ok=True)
    rows = compare(json.loads(data), arguments.model, out, arguments.budget, hashlib.sha256(data).hexdigest())
    print(shown(rows))
    wrong = [row for row in rows if row.get("note") or abs(row.get("error_percent") or 0) >= 3]
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
