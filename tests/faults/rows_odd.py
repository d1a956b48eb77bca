# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Odd processes, supervisors of other kinds, numbers that wrap, and sources that say too much, nothing or nonsense."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Hold
from ansible_collections.cleanslate.sglang.tests.faults.model import Row
from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch
from ansible_collections.cleanslate.sglang.tests.faults.rows_clean import ENDLESS, SILENT, XIDS, without_client_library
from ansible_collections.cleanslate.sglang.tests.faults.rows_evict import (
    BY_PATH,
    CLIMB,
    DEVICES,
    LEADER,
    NO_MAPS,
    NO_TASKS,
    SIGNALS,
    TARGETS,
)
from ansible_collections.cleanslate.sglang.tests.faults.rows_identity import _outer, _remove_group, compiled
from ansible_collections.cleanslate.sglang.tests.faults.rows_play import shows
from ansible_collections.cleanslate.sglang.tests.faults.site import Site
from ansible_collections.cleanslate.sglang.tests.harness.standin import environment
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import DEADLINES, RANK_MIB

Scene = t.Callable[[Site], None]
SMI = "plugins/module_utils/observe/nvidia_smi.py"
KERNEL_LOG = "plugins/module_utils/observe/kernel_log.py"
MIB = 2**20


# --- odd holders --------------------------------------------------------------------------------------------------


def odd(site: Site, mode: str) -> list[int]:
    """A process of tests/fixtures/odd.c that has GPU 0 mapped and closed; the driver lists nobody."""
    program = compiled(site, "odd", "-pthread")
    output = site.ns.directory / "odd"
    site.ns.popen([str(program), mode, str(site.host.nodes[0])], detached=True, output=output)
    wait_for("its pids", lambda: output.exists() and output.read_text().endswith("\n"))
    pids = [int(word) for word in output.read_text().split()]
    site.host.nvml.write(
        *site.host.gpus(), Hold(0, mib=RANK_MIB, device=str(site.host.nodes[0]), listed="no", id="gpu0")
    )
    return pids


def state_of(site: Site, pid: int) -> str:
    return (site.ns.proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]


def evicts(mode: str, state: str = "") -> Scene:
    def scene(site: Site) -> None:
        pids = odd(site, mode)
        if state:
            wait_for(f"state {state}", lambda: state_of(site, pids[0]) == state)
        site.name("holder", *pids)
        family = {pid for pid in site.ns.pids() if site.ns.cmdline(pid)[1:2] == [mode]}
        site.name("holder", *family)
        site.evict(scope="gpu", devices=["0"])

    return scene


def renames(site: Site) -> None:
    site.name("holder", *odd(site, "renames"))
    site.evict(scope="gpu", devices=["0"])


TRACER = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
assert libc.ptrace(16, int(sys.argv[1]), None, None) == 0, ctypes.get_errno()
os.waitpid(int(sys.argv[1]), 0x40000000)
print("stopped", flush=True)
time.sleep(600)
"""


def traced_rank(site: Site) -> None:
    """A debugger has stopped a rank (state t), so nobody answers; the debugger itself is nobody's business."""
    server = site.server(gpus=(0, 1), faults={"IGNORE_TERM": "1"})
    output = site.ns.directory / "tracer"
    argv = [sys.executable, "-c", TRACER, str(server.find("sglang::scheduler_TP1"))]
    tracer = site.ns.popen(argv, detached=True, output=output)
    wait_for("the stop", lambda: output.exists() and "stopped" in output.read_text())
    site.name("debugger", tracer.pid)
    site.evict(port=30000, trace=False, deadlines={**DEADLINES, "term": 90, "term_hung": 1})


def frozen_rank(site: Site) -> None:
    """Everybody of the server can be ended but one rank, which is in a frozen cgroup (v1)."""
    group = Path(f"/sys/fs/cgroup/freezer/cleanslate-rank-{os.getpid()}")
    group.mkdir()
    site.later.callback(_remove_group, group)
    server = site.server(gpus=(0, 1), faults={"IGNORE_TERM": "1"})
    (group / "cgroup.procs").write_text(str(_outer(site, server.find("sglang::scheduler_TP1"))))
    (group / "freezer.state").write_text("FROZEN")
    site.later.callback((group / "freezer.state").write_text, "THAWED")
    site.evict(port=30000, deadlines={**DEADLINES, "term": 1, "kill": 2})


COLLECTOR = """
import os, sys, time
wanted, end = {int(word) for word in sys.argv[1:]}, time.monotonic() + 40
while wanted and time.monotonic() < end:
    child = os.fork()
    if child == 0:
        if os.getpid() not in wanted:
            os._exit(0)
        os.setsid()
        print(os.getpid(), flush=True)
        time.sleep(600)
    if child in wanted:
        wanted.discard(child)
    else:
        os.waitpid(child, 0)
time.sleep(600)
"""


def pids_wrap(site: Site) -> None:
    """There are 400 pids only, and whatever number of the server's becomes free has a new owner within a second. After
    a wrap the kernel gives out none below 300."""
    settings = "echo 400 >/proc/sys/kernel/pid_max && echo 310 >/proc/sys/kernel/ns_last_pid"
    site.ns.run(["sh", "-c", settings], 10).check()
    server = site.server(gpus=(0, 1), faults={"IGNORE_TERM": "1"})
    numbers = sorted(server.tree())
    output = site.ns.directory / "collected"
    collector = site.ns.popen(
        [sys.executable, "-c", COLLECTOR, *map(str, numbers)], detached=True, output=output
    )
    site.name("collector", collector.pid)
    site.restless(collector.pid)
    site.brings_newcomers()

    def watch() -> None:
        seen: set[int] = set()
        end = time.monotonic() + 20
        while len(seen) < len(numbers) and time.monotonic() < end:
            for word in output.read_text().split():
                if int(word) not in seen:
                    seen.add(int(word))
                    site.arrives("new owner of a pid", int(word))
            time.sleep(0.02)
        assert seen, "no number found a new owner"

    site.evict(port=30000, trace=False, deadlines={**DEADLINES, "term": 1}, meanwhile=watch)


# --- supervisors --------------------------------------------------------------------------------------------------

SHELL = 'trap "" TERM; while :; do "$@"; sleep 1; done'
# A session of its own for each start, as runsv does.
SESSIONS = """
import subprocess, sys, time
while True:
    subprocess.Popen(sys.argv[1:], start_new_session=True).wait()
    time.sleep(1)
"""
# One above that starts the supervisor itself again, as s6-svscan does.
TWO_LEVELS = """
import os, subprocess, sys, time
if sys.argv[1] != "below":
    while True:
        subprocess.Popen([sys.executable, "-c", sys.orig_argv[2], "below", *sys.argv[1:]]).wait()
        time.sleep(1)
while True:
    subprocess.Popen(sys.argv[2:]).wait()
    time.sleep(1)
"""
# It looks from time to time whether its program still runs, as supervisord with autorestart does.
POLLS = """
import subprocess, sys, time
child = None
while True:
    if child is None or child.poll() is not None:
        child = subprocess.Popen(sys.argv[1:])
    time.sleep(0.7)
"""
# The server's parent has ended; the one that adopted it starts it again.
SUBREAPER = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
while True:
    if os.fork() == 0:
        if os.fork() == 0:
            os.execv(sys.argv[1], sys.argv[1:])
        os._exit(0)
    try:
        while True:
            os.wait()
    except ChildProcessError:
        time.sleep(1)
"""


def supervised(*words: str) -> Scene:
    def scene(site: Site) -> None:
        started = site.ns.popen([*words, *LEADER], environment({"LOAD_S": "60"}), detached=True)

        def launched() -> list[int]:
            return [pid for pid in site.ns.pids() if site.ns.cmdline(pid)[:3] == LEADER[:3]]

        leaders = wait_for("a leader", launched)
        known = {pid for pid in site.ns.pids() if "sglang.launch_server" in " ".join(site.ns.cmdline(pid))}
        # Whoever names the server on its command line beside the shell of every row.
        shells = {pid for pid in known if site.ns.cmdline(pid)[:1] == ["bash"]}
        site.name("supervisor", *(known - set(leaders) - shells), started.pid)
        site.name("server", *leaders)
        site.brings_newcomers()
        site.evict(port=30000)

    return scene


# --- clean_state and gpu_info -------------------------------------------------------------------------------------


def clean_odd(mode: str) -> Scene:
    """A holder by its mapping alone, without memory in use."""

    def scene(site: Site) -> None:
        pids = odd(site, mode)
        if mode == "leaderless":
            wait_for("a zombie", lambda: state_of(site, pids[0]) == "Z")
        site.host.nvml.write(*site.host.gpus())
        site.clean()

    return scene


def mapped_only(run: t.Callable[[Site, int], None]) -> Scene:
    def scene(site: Site) -> None:
        pid = site.holder("--close")
        site.host.nvml.write(*site.host.gpus())
        run(site, pid)

    return scene


def other_node(run: t.Callable[[Site, int], None]) -> Scene:
    """The same device under another path, as a container's own node is."""

    def scene(site: Site) -> None:
        node = site.ns.directory / "card"
        os.mknod(node, os.stat(site.host.nodes[0]).st_mode, os.stat(site.host.nodes[0]).st_rdev)
        held = site.host.hold("--map", str(node))
        wait_for("the mapping", lambda: str(node) in (site.ns.proc / str(held.pid) / "maps").read_text())
        site.name("holder", held.pid)
        site.host.nvml.write(*site.host.gpus())
        run(site, held.pid)

    return scene


def cleaned(site: Site, _pid: int) -> None:
    site.clean()


def told_of(site: Site, pid: int) -> None:
    site.info(shows(lambda gpu: [one["pid"] for one in gpu["holders"]] == [pid]))


def info_leaderless(site: Site) -> None:
    pids = odd(site, "leaderless")
    wait_for("a zombie", lambda: state_of(site, pids[0]) == "Z")
    told_of(site, pids[0])


def smi_runs(line: str, **options: t.Any) -> Scene:
    """No client library, and nvidia-smi is this shell line."""

    def scene(site: Site) -> None:
        folder = site.directory / "smi"
        folder.mkdir()
        done = site.ns.run(["nvidia-smi", "-q", "-x"], 30, site.host.nvml.env()).check()
        (folder / "answer.xml").write_text(done.stdout)
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncd {folder}\n{line}\n")
        program.chmod(0o755)
        path = {"PATH": f"{folder}:/usr/bin:/bin:/usr/sbin:/sbin"}
        site.clean(env={**without_client_library(site), **path}, **options)

    return scene


# Memory is in use, and the answer's own declaration says of it what it likes.
BOMB = (
    "echo '<!DOCTYPE nvidia_smi_log [<!ENTITY nothing \"0 MiB\">]>'; "
    "sed -e '/<!DOCTYPE/d' -e '/<?xml/d' -e 's:<used>.*</used>:<used>\\&nothing;</used>:' answer.xml"
)


def huge_kernel_log(site: Site) -> None:
    """100 MB, with the report of a dead GPU in the beginning; not all of it is read."""
    path = site.ns.directory / "kmsg"
    now = int(float(Path("/proc/uptime").read_text().split()[0]) * 1e6)
    block = f"6,1,{now},-;{'x' * 1000}\n".encode() * 1000
    with path.open("wb") as file:
        file.write(f"4,0,{now},-;NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus.\n".encode())
        for _block in range(100):
            file.write(block)
    site.clean(kmsg=str(path), xid_window_s=600, vantage="host", samples=1)


NO_SIGKILL = Patch(
    CLIMB, "            sent += [send(held, signal.SIGKILL, self._still_holds) for held in rest]\n", ""
)
BY_NAME = Patch(SIGNALS, "if now.key != held.process.key:", "if now.comm != held.process.comm:")
ANY_MEMBER = Patch(
    TARGETS, "        if process is not None and process.key == key:\n            add(process, why)",
    "        if process is not None:\n            add(process, why)",
)  # fmt: skip
THREADS_HAVE_NO_MAPPINGS = Patch(DEVICES, "if exc.errno == errno.ESRCH and root != base:", "if False:")
ENDLESS_RESPAWNS = Patch(CLIMB, "MAX_RESPAWNS = 3", "MAX_RESPAWNS = 1000")
TRACED_IS_NOT_STOPPED = Patch(
    CLIMB, 'any(one.process.state in ("T", "t") for one', 'any(one.process.state in ("T",) for one'
)


def supervisor(name: str, fault: str, *words: str) -> Row:
    return Row(
        f"evict-supervisor-{name}", fault, "gpu_evict", ("failed",), supervised(*words), (ENDLESS_RESPAWNS,),
        codes=("respawn",), may_die=("server",), bound_s=60,
    )  # fmt: skip


# Part of `make faults`: a few of each kind, under four seconds each.
QUICK = frozenset(
    {
        "evict-leaderless",
        "clean-mapping-only",
        "clean-smi-entities",
    }
)
ALL = (
    Row(
        "evict-vfork", "a holder in state D that waits for its vfork child, which ignores SIGTERM", "gpu_evict",
        ("evicted",), evicts("vfork", "D"), (NO_SIGKILL,), may_die=("holder",),
    ),
    Row(
        "evict-undumpable", "a holder that nobody may trace (PR_SET_DUMPABLE 0)", "gpu_evict", ("evicted",),
        evicts("undumpable"), (NO_MAPS,), may_die=("holder",),
    ),
    Row(
        "evict-seccomp", "a holder under strict seccomp", "gpu_evict", ("evicted",), evicts("seccomp"), (NO_MAPS,),
        may_die=("holder",),
    ),
    Row(
        "evict-renames", "a holder that changes its name and title all the time", "gpu_evict", ("evicted",),
        renames, (BY_NAME,), may_die=("holder",),
    ),
    Row(
        "evict-nested-init", "a holder that is process 1 of a PID namespace: SIGTERM is nothing to it", "gpu_evict",
        ("evicted",), evicts("init"), (NO_SIGKILL,), may_die=("holder",),
    ),
    Row(
        "evict-leaderless", "a zombie whose living thread has the mapping", "gpu_evict", ("evicted",),
        evicts("leaderless", "Z"), (THREADS_HAVE_NO_MAPPINGS,), may_die=("holder",),
    ),
    Row(
        "evict-subreaper", "a subreaper and the grandchild that it adopted hold the GPU", "gpu_evict", ("evicted",),
        evicts("reaper"), (NO_MAPS,), may_die=("holder",),
    ),
    Row(
        "evict-traced-rank", "a debugger has stopped a rank (state t)", "gpu_evict", ("evicted",), traced_rank,
        (TRACED_IS_NOT_STOPPED,), may_die=("server",), bound_s=45,
    ),
    Row(
        "evict-frozen-rank", "all but one rank can be killed: it is in a frozen cgroup (v1)", "gpu_evict",
        ("failed",), frozen_rank,
        (Patch(CLIMB, "if one.process.kill_pending or one.process.state == \"D\"]", "if False]"),),
        codes=("unkillable",), may_die=("server",),
    ),
    Row(
        "evict-pids-wrap", "400 pids: a number of the server's has a new owner at once", "gpu_evict", ("evicted",),
        pids_wrap, (ANY_MEMBER,), may_die=("server",),
    ),
    supervisor("shell", "a shell loop starts the server again", "sh", "-c", SHELL, "sh"),
    supervisor("sessions", "a supervisor gives each start a session of its own", sys.executable, "-c", SESSIONS),
    supervisor("two-levels", "a supervisor under a supervisor", sys.executable, "-c", TWO_LEVELS),
    supervisor("polls", "a supervisor that looks from time to time", sys.executable, "-c", POLLS),
    supervisor("subreaper", "whoever adopted the server starts it again", sys.executable, "-c", SUBREAPER),
    Row(
        "clean-mapping-only", "a holder that has only a mapping, and no memory", "clean_state", ("dirty",),
        mapped_only(cleaned), (NO_MAPS,), codes=("held",),
    ),
    Row(
        "clean-other-node", "a holder through another node of the same device", "clean_state", ("dirty",),
        other_node(cleaned), (BY_PATH,), codes=("held",),
    ),
    Row(
        "clean-leaderless", "a zombie whose living thread has the mapping", "clean_state", ("dirty",),
        clean_odd("leaderless"), (THREADS_HAVE_NO_MAPPINGS,), codes=("held",),
    ),
    Row(
        "clean-undumpable", "a holder that nobody may trace (PR_SET_DUMPABLE 0)", "clean_state", ("dirty",),
        clean_odd("undumpable"), (NO_MAPS,), codes=("held",),
    ),
    Row(
        "info-mapping-only", "a holder that has only a mapping", "gpu_info", ("complete",), mapped_only(told_of),
        (NO_MAPS,),
    ),
    Row(
        "info-other-node", "a holder through another node of the same device", "gpu_info", ("complete",),
        other_node(told_of), (BY_PATH,),
    ),
    Row(
        "info-leaderless", "a zombie whose living thread has the mapping", "gpu_info", ("complete",),
        info_leaderless, NO_TASKS,
    ),
    Row(
        "clean-smi-hangs", "no client library, and nvidia-smi never answers", "clean_state", ("unknown",),
        smi_runs("exec sleep 600", nvml_deadline_s=1), (ENDLESS,), codes=("driver_hung",), bound_s=25,
    ),
    Row(
        "clean-smi-endless", "no client library, and nvidia-smi prints without end", "clean_state", ("unknown",),
        smi_runs("exec yes '<gpu>'", nvml_deadline_s=1), (ENDLESS,), codes=("driver_hung",), bound_s=25,
    ),
    Row(
        "clean-smi-garbage", "no client library, and nvidia-smi prints nonsense", "clean_state", ("unknown",),
        smi_runs("exec head -c 100000 /dev/urandom"), (SILENT,), codes=("driver_silent",),
    ),
    Row(
        "clean-smi-entities", "nvidia-smi's XML declares what its figures mean", "clean_state", ("unknown",),
        smi_runs(BOMB), (Patch(SMI, '    if "<!" in re.sub', '    if "<!-" in re.sub'),), codes=("driver_silent",),
    ),
    Row(
        "clean-kernel-log-huge", "a kernel log of 100 MB, a dead GPU in its beginning", "clean_state", ("dirty",),
        huge_kernel_log, (Patch(XIDS, "        result += _of_gpu(gpu, own, now_s, window_s, log.complete)\n", ""),),
        codes=("xid_host_restart", "kernel_log_incomplete"),
    ),
)  # fmt: skip
ROWS = tuple(dataclasses.replace(row, quick=row.id in QUICK) for row in ALL)
