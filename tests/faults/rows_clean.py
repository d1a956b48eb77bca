# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""clean_state: what looks clean and is not, and drivers that lie, hang or say nothing."""

from __future__ import annotations

import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.doubles.nvml import lies
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Line
from ansible_collections.cleanslate.sglang.tests.faults.model import Row
from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch
from ansible_collections.cleanslate.sglang.tests.faults.site import Site
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

CORE = "plugins/module_utils"
CLEAN = f"{CORE}/decide/clean.py"
HOLDERS = f"{CORE}/decide/holders.py"
NVML = f"{CORE}/observe/nvml.py"
LOOK = f"{CORE}/observe/look.py"
SPAWN = f"{CORE}/spawn.py"
XIDS = f"{CORE}/decide/xids.py"
PORTS = f"{CORE}/decide/ports.py"
MEMORY = f"{CORE}/observe/memory.py"
Scene = t.Callable[[Site], None]


def lying(*lines: Line, **options: t.Any) -> Scene:
    """The driver with these lines beside its two GPUs."""

    def scene(site: Site) -> None:
        site.host.memory_follows_mappings(*lines)
        site.clean(**options)

    return scene


def with_gpu(gpu: Gpu, **options: t.Any) -> Scene:
    """GPU 0 is this one; its node stays what it was."""

    def scene(site: Site) -> None:
        import dataclasses

        first, second = site.host.gpus()
        assert isinstance(first, Gpu)
        site.host.nvml.write(dataclasses.replace(gpu, minor=first.minor), second)
        site.clean(**options)

    return scene


# --- the host -----------------------------------------------------------------------------------------------------


def port_busy(site: Site) -> None:
    code = "import socket, time\ns = socket.socket()\ns.bind(('0.0.0.0', 30000))\ns.listen()\nprint(1, flush=True)\n"
    output = site.ns.directory / "listener"
    site.ns.popen([sys.executable, "-c", code + "time.sleep(600)"], detached=True, output=output)
    wait_for("the listener", lambda: output.exists() and output.read_text())
    site.clean(ports=[30000])


def starting_server(site: Site) -> None:
    """It imports, holds nothing yet, and will take GPU 0."""
    options = {"CUDA_VISIBLE_DEVICES": "0"}
    server = site.host.server(gpus=(0,), faults={"SPAWN_S": "60"}, wait=False, env=options)
    wait_for("its command line", lambda: "launch_server" in " ".join(site.ns.cmdline(server.leader.pid)))
    site.clean(devices=["0"])


def orphan(site: Site) -> None:
    """A scheduler whose leader is gone, without any memory on the GPUs."""
    standin = str(Path(__file__).resolve().parents[1] / "doubles" / "sglang_standin")
    node = str(site.host.nodes[1])
    held = site.host.hold("--title", "sglang::scheduler_TP0", node, env={"PYTHONPATH": standin})
    wait_for("its title", lambda: site.ns.cmdline(held.pid) == ["sglang::scheduler_TP0"])
    site.clean()


def full_shm(site: Site) -> None:
    with (site.ns.root / "dev" / "shm" / "somebody's").open("wb") as file:
        file.write(b"\1" * 60 * 2**20)
    site.clean(shm_required_mib=16)


def dead_but_listed(site: Site) -> None:
    """A zombie that nobody collects; the driver lists it with its memory."""
    code = "import os, time\npid = os.fork()\nif pid == 0: os._exit(0)\nprint(pid, flush=True)\ntime.sleep(600)"
    output = site.ns.directory / "zombie"
    site.ns.popen([sys.executable, "-c", code], detached=True, output=output)
    pid = int(wait_for("its number", lambda: output.exists() and output.read_text()))
    wait_for("the zombie", lambda: ") Z " in (site.ns.proc / str(pid) / "stat").read_text())
    site.host.memory_follows_mappings(*lies.dead_pid(0, pid, 10_151))
    site.clean()


def no_right_to_look(site: Site) -> None:
    """Root without CAP_SYS_PTRACE, as in a locked-down container: nobody's mappings can be read."""
    site.clean(wrap=("setpriv", "--bounding-set", "-sys_ptrace"))


def hidden_processes(site: Site) -> None:
    """hidepid, and no right to see through it: a server that just starts is not even listed."""
    server = site.host.server(gpus=(0,), faults={"SPAWN_S": "60"}, wait=False, env={"CUDA_VISIBLE_DEVICES": "0"})
    wait_for("its command line", lambda: "launch_server" in " ".join(site.ns.cmdline(server.leader.pid)))
    site.ns.run(["mount", "-o", "remount,hidepid=ptraceable", "/proc"], 10).check()
    site.clean(wrap=("setpriv", "--bounding-set", "-sys_ptrace"), devices=["0"])


def little_memory(site: Site) -> None:
    site.clean(required_available_mib=10**8)


def kernel_log(*lines: str, exists: bool = True) -> Scene:
    def scene(site: Site) -> None:
        path = site.ns.directory / "kmsg"
        if exists:
            now = int(float(Path("/proc/uptime").read_text().split()[0]) * 1e6)
            path.write_text("".join(f"4,{number},{now},-;{line}\n" for number, line in enumerate(lines)))
        site.clean(kmsg=str(path), xid_window_s=600, vantage="host")

    return scene


# --- nvidia-smi ---------------------------------------------------------------------------------------------------


def without_client_library(site: Site) -> dict[str, str]:
    """Nobody but root may have written the client library that root runs; here somebody else might have."""
    folder = site.directory / "python"
    folder.mkdir()
    module = folder / "pynvml.py"
    module.write_text("raise RuntimeError\n")
    module.chmod(0o666)
    return {"PYTHONPATH": str(folder)}


def smi_missing(site: Site) -> None:
    site.clean(smi=False, env=without_client_library(site))


def smi_says(word: str) -> Scene:
    """nvidia-smi answers, with ``word`` where the memory in use should be."""

    def scene(site: Site) -> None:
        done = site.ns.run(["nvidia-smi", "-q", "-x"], 30, site.host.nvml.env()).check()
        before, mark, rest = done.stdout.partition("<used>")
        folder = site.directory / "smi"
        folder.mkdir()
        (folder / "answer.xml").write_text(f"{before}{mark}{word}</used>" + rest.partition("</used>")[2])
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nexec cat {folder}/answer.xml\n")
        program.chmod(0o755)
        path = {"PATH": f"{folder}:/usr/bin:/bin:/usr/sbin:/sbin"}
        site.clean(env={**without_client_library(site), **path})

    return scene


def foreign_library(site: Site) -> None:
    """A client library that anybody may change, in root's Python path: it kills whom it can find."""
    editor = next(pid for pid, title in site.ns.titles().items() if title.startswith("vim "))
    environment = without_client_library(site)
    module = Path(environment["PYTHONPATH"]) / "pynvml.py"
    module.write_text(f"import os\nos.kill({editor}, 9)\n")
    site.clean(smi=False, env=environment)


SILENT = Patch(CLEAN, "return [_driver_silent(facts)]", "return []")
ENDLESS = Patch(
    SPAWN,
    "        if left <= 0:\n            timed_out = True",
    "        if left <= -3600:\n            timed_out = True",
)
MUTE = Patch(
    CLEAN, "    if gpu.memory is None:\n        words", "    if gpu.memory is None:\n        return []\n        words"
)


def without(condition: str, file: str = CLEAN, new: str = "if False:") -> Patch:
    return Patch(file, condition, new)


ROWS = (
    Row(
        "clean-driver-not-loaded", "NVML: driver not loaded (9)", "clean_state", ("unknown",),
        lying(*lies.init_fails(lies.DRIVER_NOT_LOADED)), (SILENT,), codes=("driver_not_loaded",),
    ),
    Row(
        "clean-driver-unknown-error", "NVML: Unknown Error (999), a lost device cgroup", "clean_state",
        ("unknown",), lying(*lies.init_fails(lies.UNKNOWN)), (SILENT,), codes=("driver_unknown_error",),
    ),
    Row(
        "clean-driver-no-permission", "NVML: no permission (4)", "clean_state", ("unknown",),
        lying(*lies.init_fails(lies.NO_PERMISSION)), (SILENT,), codes=("driver_no_permission",),
    ),
    Row(
        "clean-driver-mismatch", "NVML: library and kernel module differ (18)", "clean_state", ("unknown",),
        lying(*lies.version_mismatch()), (SILENT,), codes=("driver_mismatch",),
    ),
    Row(
        "clean-driver-hangs", "NVML never answers", "clean_state", ("unknown",),
        lying(*lies.hangs(), nvml_deadline_s=1), (ENDLESS,), codes=("driver_hung",), bound_s=40,
    ),
    Row(
        "clean-driver-slow", "NVML is slow, and answers in time", "clean_state", ("clean",),
        lying(*lies.slow(20), nvml_deadline_s=20, samples=1),
        (Patch(NVML, "begin_call(lambda: _query(proc), deadline_s)",
               "begin_call(lambda: _query(proc), min(deadline_s, 0.1))"),),
    ),
    Row(
        "clean-gpu-without-handle", "one GPU is counted and has no handle", "clean_state", ("unknown",),
        lying(*lies.no_handle(1)), (MUTE,), codes=("gpu_no_answer",),
    ),
    Row(
        "clean-gpu-lost", "one GPU falls off the bus", "clean_state", ("unknown",), lying(*lies.falls_off(1)),
        (MUTE,), codes=("gpu_no_answer",),
    ),
    Row(
        "clean-unified-memory", "a GPU without memory of its own", "clean_state", ("unknown",),
        lying(*lies.unified_memory(0)), (without("if limits.required_available_mib > 0:", new="if True:"),),
        codes=("unified_memory",),
    ),
    Row(
        "clean-old-memory-call", "only the old memory call, which counts the driver's part; nvidia-smi helps",
        "clean_state", ("clean",), lying(*lies.without_memory_v2()),
        (Patch(NVML, 'elif any(gpu.memory is not None and gpu.memory.api == "v1"',
               'elif any(gpu.memory is not None and gpu.memory.api == "v0"'),),
    ),
    Row(
        "clean-old-memory-call-alone", "the same, and no nvidia-smi", "clean_state", ("unknown",),
        lying(*lies.without_memory_v2(), smi=False),
        (without("    if not memory.used_excludes_reserved:\n        text", new="    if False:\n        text"),),
        codes=("reserved_unknown",),
    ),
    Row(
        "clean-processes-forbidden", "no process list, and somebody has the GPU open", "clean_state", ("unknown",),
        lying(*lies.processes_forbidden(0)),
        (Patch(CLEAN, 'severity = "required" if unprotected else "warning"', 'severity = "warning"'),),
        codes=("processes_unknown",),
    ),
    Row(
        "clean-latched-utilization", "100 % busy with nothing on it", "clean_state", ("clean",),
        with_gpu(lies.busy_when_idle(0)), (without("if health.utilization_percent == 100 and idle:"),),
        codes=("utilization_latched",),
    ),
    Row(
        "clean-retirement-pending", "pages wait for retirement", "clean_state", ("dirty",),
        with_gpu(lies.pending_retirement(0)), (without("if health.retired_pages_pending:"),),
        codes=("retirement_pending",),
    ),
    Row(
        "clean-remap-failed", "row remapping failed", "clean_state", ("dirty",), with_gpu(lies.remap_failed(0)),
        (without("if health.remap_failure:"),), codes=("remap_failure",),
    ),
    Row(
        "clean-remap-pending", "a row waits for a reset", "clean_state", ("clean",),
        with_gpu(lies.remap_pending(0)), (without("if health.remap_pending:"),), codes=("remap_pending",),
    ),
    Row(
        "clean-wants-reset", "the driver asks for a reset", "clean_state", ("dirty",), with_gpu(lies.wants(0, 1)),
        (without('if health.recovery_action not in (None, "none"):'),), codes=("recovery_action",),
    ),
    Row(
        "clean-memory-rebounds", "memory comes back between two samples", "clean_state", ("dirty",),
        with_gpu(lies.rebounds(0, 0, 9000, 0)), (without("if not any(above):", new="if not all(above):"),),
        codes=("unstable",),
    ),
    Row(
        "clean-dead-pid", "the driver lists a dead pid with memory", "clean_state", ("dirty",),
        lying(*lies.dead_pid(0, 999_999, 10_151)),
        (without("    if found.stale_pids:\n        pids", new="    if False:\n        pids"),),
        codes=("stale_pid",),
    ),
    Row(
        "clean-zombie-listed", "a zombie that nobody collects is listed with memory", "clean_state", ("dirty",),
        dead_but_listed, (without("if process is None or process.dead:", HOLDERS, "if process is None:"),),
        codes=("stale_pid",),
    ),
    Row(
        "clean-held-elsewhere", "memory in use, nobody listed: another PID namespace", "clean_state", ("dirty",),
        lying(*lies.held_elsewhere(0, 7000)),
        (without("if not any(above):", new="if not any(above) or not facts.snapshot.holders[gpu.index].holders:"),),
        codes=("held_elsewhere",),
    ),
    Row(
        "clean-mig-mute", "one MIG instance gives no answer", "clean_state", ("unknown",),
        lying(*lies.mig_with_a_mute_instance(0, 2, 1)),
        (without("if used is None or instance.processes is None:",
                 new="if used is None or instance.processes is None:\n            continue\n        if False:"),),
        codes=("mig_no_answer",),
    ),
    Row(
        "clean-gpu-missing", "fewer GPUs than the host has", "clean_state", ("unknown",), lying(expected_gpus=3),
        (without("if limits.expected_gpus is not None and shown != limits.expected_gpus:"),), codes=("gpu_count",),
    ),
    Row(
        "clean-simulated", "a driver that is none", "clean_state", ("unknown",), lying(allow_simulated=False),
        (without("if reading.simulated and not limits.allow_simulated:"),), codes=("simulated",),
    ),
    Row(
        "clean-smi-missing", "no client library and no nvidia-smi", "clean_state", ("unknown",), smi_missing,
        (SILENT,), codes=("driver_silent",),
    ),
    Row(
        "clean-smi-n-a", "nvidia-smi prints [N/A] for the memory", "clean_state", ("unknown",), smi_says("[N/A]"),
        (MUTE,), codes=("gpu_no_answer",),
    ),
    Row(
        "clean-smi-err", "nvidia-smi prints ERR! for the memory", "clean_state", ("unknown",), smi_says("ERR!"),
        (MUTE,), codes=("gpu_no_answer",),
    ),
    Row(
        "clean-foreign-library", "a client library that anybody may write", "clean_state", ("unknown",),
        foreign_library, (without("return spec.origin if trusted else None", NVML, "return spec.origin"),),
    ),
    Row(
        "clean-port-busy", "somebody listens on the server's port", "clean_state", ("dirty",), port_busy,
        (without("        if listening:", PORTS, "        if False:"),), codes=("port_busy",),
    ),
    Row(
        "clean-server-starting", "a server that still imports will take the GPU", "clean_state", ("dirty",),
        starting_server, (without("elif limits.expected_gpus != 0:", new="elif False:"),),
        codes=("server_starting",),
    ),
    Row(
        "clean-orphan", "a scheduler without a leader, without memory", "clean_state", ("dirty",), orphan,
        (without("if worker_role(process.title) and not _has_leader(process, leaders, snapshot):"),),
        codes=("orphan",),
    ),
    Row(
        "clean-shm-full", "/dev/shm is full", "clean_state", ("dirty",), full_shm,
        (without("if shm.free_mib < limits.shm_required_mib:"),), codes=("shm_full",),
    ),
    Row(
        "clean-no-permission", "root without the right to look into others", "clean_state", ("unknown",),
        no_right_to_look, (without("    if blind:", new="    if False:"),), codes=("scan_incomplete",),
    ),
    Row(
        "clean-hidepid", "/proc hides the processes of others (hidepid)", "clean_state", ("unknown",),
        hidden_processes, (without("    if 1 in processes:", LOOK, "    if True:"),), codes=("scan_failed",),
    ),
    Row(
        "clean-memory-short", "less host memory than the launch needs", "clean_state", ("dirty",), little_memory,
        (without("    if available >= needed:", new="    if True:"),), codes=("host_memory_short",),
    ),
    Row(
        "clean-kernel-log-unreadable", "the kernel log can't be read", "clean_state", ("clean",),
        kernel_log(exists=False), (Patch(XIDS, "return _unread(log, vantage)", "return []"),),
        codes=("kernel_log_unknown",),
    ),
    Row(
        "clean-xid-79", "the kernel log has Xid 79 for the GPU", "clean_state", ("dirty",),
        kernel_log("NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus."),
        (Patch(XIDS, "        result += _of_gpu(gpu, own, now_s, window_s, log.complete)\n", ""),),
        codes=("xid_host_restart",),
    ),
)  # fmt: skip
