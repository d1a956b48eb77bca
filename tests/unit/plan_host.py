# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host to plan for: a recorded /proc, an installed SGLang of a few files, a model's directory, and GPUs as the
driver would tell of them.

    host = PlanHost(tmp_path, monkeypatch)
    host.processes(Proc(700, ...))
    planned = host.plan(flags={"tp_size": 4})

Arguments are those of server_plan; flags are merged with those of a launch that is fine, None takes one away.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Gpu, GpuReading
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import nvml
from ansible_collections.cleanslate.sglang.plugins.module_utils.plan_model import Finding
from ansible_collections.cleanslate.sglang.plugins.module_utils.planning import Plan, PlanRequest, plan
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.record import Record, to_text
from ansible_collections.cleanslate.sglang.plugins.modules import server_plan
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import guardrails
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Proc, write_proc
from ansible_collections.cleanslate.sglang.tests.unit import builders

OPTIONS = """
import argparse
def add_cli_args(parser):
    parser.add_argument("--model-path", "--model", type=str, required=True)
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pp-size", type=int, default=1)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--enable-dp-attention", action="store_true")
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--max-total-tokens", type=int)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--chunked-prefill-size", type=int)
    parser.add_argument("--enable-hierarchical-cache", action="store_true")
    parser.add_argument("--hicache-size", type=int, default=0)
    parser.add_argument("--reasoning-parser", type=str)
    parser.add_argument("--tool-call-parser", type=str)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--kv-cache-dtype", type=str, default="auto")
    parser.add_argument("--attention-backend", type=str)
    parser.add_argument("--quantization", type=str)
    parser.add_argument("--load-format", type=str, default="auto")
    parser.add_argument("--device", type=str)
    parser.add_argument("--config", type=str)
"""
SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
FLAGS = {"tp_size": 2, "mem_fraction_static": 0.8, "context_length": 32768}
V2_MOUNT = "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


class PlanHost:
    """Two H200 and 444 GiB of available memory, no limit, and nobody but init."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, version: str = "0.5.15") -> None:
        self.directory = directory
        self.monkeypatch = monkeypatch
        self.state = directory / "state"
        self.model = directory / "model"
        self.meminfo = {"MemTotal": 449 * 2**20, "MemAvailable": 444 * 2**20}
        self.tcp = ""
        self._processes: list[Proc] = [Proc(1, "/sbin/init", ppid=0)]
        self.write_model(SMALL, 16_400_000_000)
        self.sglang(version)
        self.gpus(builders.gpu(0, compute_capability="9.0"), builders.gpu(1, compute_capability="9.0"))
        cgroup = directory / "sys/fs/cgroup"
        cgroup.mkdir(parents=True)

    def write_model(self, config: t.Mapping[str, t.Any], weight_bytes: int) -> None:
        self.model.mkdir(exist_ok=True)
        (self.model / "config.json").write_text(json.dumps(config))
        index = {"metadata": {"total_size": weight_bytes}, "weight_map": {}}
        (self.model / "model.safetensors.index.json").write_text(json.dumps(index))

    def sglang(self, version: str, options: str = OPTIONS) -> None:
        """The SGLang that is installed in the directory ``venv``, in place of the one before."""
        shutil.rmtree(self.directory / "venv", ignore_errors=True)
        site = self.directory / "venv/lib/python3.11/site-packages"
        (site / "sglang/srt").mkdir(parents=True)
        (site / "sglang/srt/server_args.py").write_text(options)
        (site / f"sglang-{version}.dist-info").mkdir()

    def reading(self, reading: GpuReading) -> None:
        """What the driver says."""
        self.monkeypatch.setattr(nvml, "read_gpus", lambda deadline_s, proc: reading)

    def gpus(self, *gpus: Gpu) -> None:
        # Simulated: whom the driver lists is a holder, without a device node that is open.
        self.reading(GpuReading("nvml", gpus, simulated=True))

    def processes(self, *processes: Proc) -> None:
        self._processes += processes

    def record(self, log: t.Optional[str] = None, log_path: t.Optional[str] = None, **values: t.Any) -> None:
        """The record of the launch of the server ``chat``, and its log."""
        folder = self.state / "chat"
        folder.mkdir(parents=True, mode=0o755, exist_ok=True)
        if log is not None:
            log_path = str(self.directory / "server.log")
            Path(log_path).write_text(log)
        given = {"name": "chat", "launch_id": "20261130T011500Z-0c2d", "state": "started", "launcher": "detached"}
        (folder / "current.json").write_text(to_text(Record(**{**given, "log": log_path, **values})))

    def arguments(self, *, shipped: bool = False, **changes: t.Any) -> dict[str, t.Any]:
        """The module's arguments; ``shipped``: with the guardrails that come along."""
        defaults = {name: spec.get("default") for name, spec in server_plan.ARGUMENTS.items()}
        flags = {"model_path": str(self.model), **FLAGS, **changes.pop("flags", {})}
        given = {
            "python": str(self.directory / "venv/bin/python"),
            "proc_root": str(self.directory / "proc"),
            "state_dir": str(self.state),
            "port": 30000,
            "flags": {name: value for name, value in flags.items() if value is not None},
            "rules": guardrails.all_rules()[0] if shipped else [],
            "shm_dir": str(self.directory),
        }
        return {**defaults, **given, **changes}

    def request(self, **changes: t.Any) -> PlanRequest:
        request = server_plan.request_from(self.arguments(**changes))
        return dataclasses.replace(request, look=dataclasses.replace(request.look, sys=str(self.directory / "sys")))

    def write_proc(self) -> None:
        """The recorded /proc as the host is now."""
        proc = self.directory / "proc"
        shutil.rmtree(proc, ignore_errors=True)
        files = {"1/mountinfo": V2_MOUNT}
        write_proc(proc, self._processes, meminfo_kib=self.meminfo, tcp=self.tcp, files=files)
        (proc / "1/cgroup").write_text("0::/\n")
        for one in self._processes:
            (proc / f"{one.pid}/ns").mkdir(exist_ok=True)
            (proc / f"{one.pid}/ns/net").symlink_to("net:[4026531840]")

    def plan(self, **changes: t.Any) -> Plan:
        """The plan for this host as it is now."""
        self.write_proc()
        return plan(self.request(**changes))


def findings_of(planned: Plan, name: str) -> list[Finding]:
    return [one for one in planned.result.findings if one.id == name]


def finding(planned: Plan, name: str) -> Finding:
    """The one finding of this id."""
    found = findings_of(planned, name)
    assert len(found) == 1, [f"{one.id}: {one.message}" for one in planned.result.findings]
    return found[0]
