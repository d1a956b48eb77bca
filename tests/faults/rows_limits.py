# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits and lacks: no descriptors, processes, memory, rights; parts of /proc, /sys and /dev/shm that are not there."""

from __future__ import annotations

import dataclasses
import os
import signal
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.faults.model import Answer, Row
from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch
from ansible_collections.cleanslate.sglang.tests.faults.rows_clean import CLEAN, LOOK, SPAWN, without
from ansible_collections.cleanslate.sglang.tests.faults.rows_evict import CLIMB, SIGNALS
from ansible_collections.cleanslate.sglang.tests.faults.rows_identity import PROCFS, compiled, fake_leader
from ansible_collections.cleanslate.sglang.tests.faults.rows_play import NOT_KNOWN_IS_FINE as DRIFT_KNOWS_ALL
from ansible_collections.cleanslate.sglang.tests.faults.rows_play import in_sync, shows
from ansible_collections.cleanslate.sglang.tests.faults.site import Site, told
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns import drift_site

Scene = t.Callable[[Site], None]
Json = dict[str, t.Any]
CGROUPS = Path("/sys/fs/cgroup")
# A Python that can start at all has two descriptors left, so the kernel is made to say it of a pipe.
NO_PIPE = ("pipe2:error=EMFILE",)
NO_TRACING = ("setpriv", "--bounding-set", "-sys_ptrace")
# Somebody else than root, who may read every file, and look into nobody else's process.
PLAIN_USER = (
    "setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups", "--inh-caps", "+dac_read_search",
    "--ambient-caps", "+dac_read_search", "--bounding-set", "-all,+dac_read_search",
)  # fmt: skip


def naming(*words: str) -> t.Callable[[Json], Answer]:
    """With the code ``limit_named`` where the result's sentence has these words."""

    def tell(result: Json) -> Answer:
        answer = told(result)
        named = all(word in answer.text for word in words)
        return Answer(answer.verdict, answer.codes | ({"limit_named"} if named else set()), answer.text)

    return tell


def limited(site: Site, controller: str, **files: int) -> tuple[str, ...]:
    """Words before a command that put it into a cgroup of its own with these limits."""
    group = CGROUPS / controller / f"cleanslate-limits-{os.getpid()}"
    group.mkdir()

    def removed() -> bool:
        try:
            group.rmdir()
        except OSError:
            return False
        return True

    site.later.callback(wait_for, "the cgroup's end", removed, 10)
    for name, value in files.items():
        (group / f"{controller}.{name}").write_text(str(value))
    return ("sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh")


# --- gpu_evict ----------------------------------------------------------------------------------------------------


def evict_without_processes(site: Site) -> None:
    fake_leader(site, "--port", "30000", name="server")
    wrap = limited(site, "pids", max=1)
    site.evict(port=30000, expected_gpus=0, trace=False, wrap=wrap, tell=naming("pids.max"))


def evict_without_files(site: Site) -> None:
    fake_leader(site, "--port", "30000", name="server")
    site.evict(port=30000, expected_gpus=0, inject=NO_PIPE, tell=naming("RLIMIT_NOFILE"))


def evict_with_few_files(site: Site) -> None:
    """Enough to look, not enough to take hold of all ranks."""
    site.server(gpus=(0, 1))
    wrap = ("prlimit", "--nofile=7:7")
    site.evict(port=30000, expected_gpus=0, trace=False, wrap=wrap, tell=naming("RLIMIT_NOFILE"))


def evict_hidden(check: bool) -> Scene:
    """hidepid: the server is not even listed."""

    def scene(site: Site) -> None:
        fake_leader(site, "--port", "30000", name="server")
        site.ns.run(["mount", "-o", "remount,hidepid=ptraceable", "/proc"], 10).check()
        site.evict(port=30000, wrap=NO_TRACING, trace=False, check=check)

    return scene


def evict_others_server(site: Site) -> None:
    """Whose network it is in can't be seen by another user, so whether it is the server of the port can't either."""
    fake_leader(site, "--port", "30000", name="server")
    site.evict(port=30000, expected_gpus=0, wrap=PLAIN_USER, trace=False)


def evict_not_permitted(site: Site) -> None:
    """Every server is asked for, and it belongs to another user."""
    fake_leader(site, "--port", "30000", name="server")
    site.evict(scope="sglang", wrap=PLAIN_USER, trace=False)


def evict_with_full_tmp(site: Site) -> None:
    site.ns.run(["mount", "-o", "remount,size=4k", "/tmp"], 10).check()
    site.server(gpus=(0,))
    site.evict(port=30000)


# --- clean_state --------------------------------------------------------------------------------------------------


def clean_without_processes(site: Site) -> None:
    """A launcher for our port is there, and nobody can look."""
    fake_leader(site, "--port", "30000", name="server")
    wrap = limited(site, "pids", max=1)
    site.clean(ports=[30000], expected_gpus=0, wrap=wrap, tell=naming("pids.max"))


def clean_without_files(site: Site) -> None:
    fake_leader(site, "--port", "30000", name="server")
    site.clean(ports=[30000], expected_gpus=0, inject=NO_PIPE, tell=naming("RLIMIT_NOFILE"))


def long_words(site: Site) -> None:
    """600 processes with a command line of 120 kB each that could be SGLang's: 72 MB to remember."""
    program = compiled(site, "crowd")
    output = site.ns.directory / "crowd.out"
    words = "sglang" + "x" * 120_000
    started = site.ns.popen([str(program), "600", "1", words], detached=True, output=output)
    wait_for("the crowd", lambda: output.exists() and "ready" in output.read_text(), 60)
    site.name("crowd", started.pid)
    fake_leader(site, "--port", "30000", name="server")


def clean_in_little_memory(site: Site) -> None:
    """The memory of the run's own cgroup is not enough for what there is to see: the kernel ends the helper."""
    long_words(site)
    wrap = limited(site, "memory", limit_in_bytes=96 * 2**20)
    site.clean(ports=[30000], expected_gpus=0, wrap=wrap, tell=naming("memory"))


def clean_in_little_space(site: Site) -> None:
    long_words(site)
    wrap = ("prlimit", f"--as={160 * 2**20}")
    site.clean(ports=[30000], expected_gpus=0, wrap=wrap, tell=naming("RLIMIT_AS"))


def clean_with_pids_only(site: Site) -> None:
    """/proc with subset=pid: processes, and nothing of the host."""
    site.ns.run(["mount", "-t", "proc", "-o", "subset=pid", "none", "/proc"], 10).check()
    site.clean(ports=[30000], required_available_mib=1)


def clean_without_sys(site: Site) -> None:
    """No cgroup is to be seen, so none of its limits."""
    site.ns.run(["umount", "--lazy", "--recursive", "/sys"], 10).check()
    site.clean(required_available_mib=1)


def clean_without_shm(site: Site) -> None:
    site.clean(shm_dir="/dev/nowhere")


def storm(site: Site) -> None:
    started = site.host.fixture("fork_storm.py", "--seconds", "60", "--width", "8", "--life-s", "0.01")
    site.later.callback(site.host.kill, started.pid, signal.SIGTERM)
    wait_for("the storm", lambda: len(site.ns.pids()) > 8)
    site.name("storm", started.pid)
    site.restless(started.pid)


def clean_in_a_storm(site: Site) -> None:
    storm(site)
    site.clean()


def big_crowd(site: Site) -> None:
    """And one who holds the GPU by a mapping alone, the last of all."""
    program = compiled(site, "crowd")
    output = site.ns.directory / "crowd.out"
    started = site.ns.popen([str(program), "5000", "50"], detached=True, output=output)
    wait_for("the crowd", lambda: output.exists() and "ready" in output.read_text(), 60)
    site.name("crowd", started.pid)
    site.holder()
    site.host.nvml.write(*site.host.gpus())


def clean_in_a_crowd(site: Site) -> None:
    big_crowd(site)
    site.clean(samples=1, nvml_deadline_s=90)


# --- gpu_info -----------------------------------------------------------------------------------------------------


def one_holder(result: Json) -> Answer:
    """A module that failed shows nothing."""
    if "scan" not in result:
        return Answer("incomplete", text=str(result.get("msg")))
    return shows(lambda gpu: len(gpu["holders"]) == 1)(result)


def info_in_a_storm(site: Site) -> None:
    storm(site)
    site.holder()
    site.info(one_holder)


def info_in_a_crowd(site: Site) -> None:
    big_crowd(site)
    site.info(one_holder, nvml_deadline_s=90)


def info_hidden(site: Site) -> None:
    site.holder()
    site.ns.run(["mount", "-o", "remount,hidepid=ptraceable", "/proc"], 10).check()
    site.info(shows(lambda gpu: len(gpu["holders"]) == 1), wrap=NO_TRACING)


# --- drift --------------------------------------------------------------------------------------------------------


def drift_told(result: Json) -> Answer:
    found = drift_site.rows(result) if "servers" in result else []
    codes = frozenset(str(row["item"]).partition(":")[0] for row in found)
    return Answer(result["verdict"], codes, ", ".join(str(row["item"]) for row in found) or str(result.get("msg")))


def drifts(limit: t.Callable[[Site], dict[str, t.Any]]) -> Scene:
    """A server that runs as the inventory says, checked under a limit."""

    def scene(site: Site) -> None:
        one = in_sync(site)
        given: Json = {"servers": [one.settings], "secrets": {one.name: one.secrets}, "state_dir": str(one.state)}
        site.module("server_drift", tell=drift_told, **limit(site), **given, **one.options)

    return scene


def hidden(site: Site) -> dict[str, t.Any]:
    site.ns.run(["mount", "-o", "remount,hidepid=ptraceable", "/proc"], 10).check()
    return {"wrap": NO_TRACING}


EMPTY_LOOK = Patch(
    LOOK,
    '    waits = called.stuck_wchan or "an unknown place"\n    detail',
    "    own = {pid: one for pid in (1, os.getpid()) if (one := procfs.read_identity(pid)) is not None}\n"
    "    if own:\n        return own, DeviceScan((), (), 2, 0.0), (), None\n"
    '    waits = called.stuck_wchan or "an unknown place"\n    detail',
)
READ_BY_OURSELVES = Patch(
    "plugins/module_utils/assess.py",
    '    waits = called.stuck_wchan or "an unknown place"\n    why',
    '    if called.error:\n        return read()\n    waits = called.stuck_wchan or "an unknown place"\n    why',
)
NO_LIMIT_NAMED = Patch("plugins/module_utils/exhausted.py", "    if code == errno.EMFILE:", "    if code == -1:")
HIDDEN_IS_FINE = Patch(LOOK, "    if 1 in processes:", "    if True:")
VANISHED_IS_AN_ERROR = Patch(
    PROCFS,
    "if stat_text else None\n    if stat is None:\n        return None",
    "if stat_text else None\n    if stat is None:\n        raise ValueError(base)",
)
SMALL_ANSWERS = Patch(SPAWN, "FETCH_LIMIT_BYTES = 256 * 2**20", "FETCH_LIMIT_BYTES = 2**18")

# Part of `make faults`: a few of each kind, under four seconds each.
QUICK = frozenset(
    {
        "evict-no-processes",
        "evict-no-files",
        "evict-others-server",
        "info-hidepid",
    }
)
ALL = (
    Row(
        "evict-no-processes", "no further process may be started (pids.max)", "gpu_evict", ("unknown",),
        evict_without_processes, (EMPTY_LOOK,), codes=("limit_named",),
    ),
    Row(
        "evict-no-files", "no further file may be opened (RLIMIT_NOFILE)", "gpu_evict", ("unknown",),
        evict_without_files, (EMPTY_LOOK,), codes=("limit_named",),
    ),
    Row(
        "evict-few-files", "too few descriptors to take hold of all ranks", "gpu_evict", ("unknown",),
        evict_with_few_files, (NO_LIMIT_NAMED,), codes=("limit_named",),
    ),
    Row(
        "evict-hidepid", "/proc hides the processes of others (hidepid)", "gpu_evict", ("unknown",),
        evict_hidden(check=False), (HIDDEN_IS_FINE,), codes=("scan_incomplete",),
    ),
    Row(
        "evict-check-hidepid", "check mode, and /proc hides the processes of others", "gpu_evict", ("unknown",),
        evict_hidden(check=True), (HIDDEN_IS_FINE,), codes=("scan_incomplete",),
    ),
    Row(
        "evict-others-server", "another user's server, whose network can't be seen", "gpu_evict", ("unknown",),
        evict_others_server,
        (Patch(CLIMB, "if port is None or not unknown or leader.port not in (None, port):", "if True:"),),
        codes=("server_unknown",),
    ),
    Row(
        "evict-not-permitted", "another user's server, which may not be signalled", "gpu_evict", ("failed",),
        evict_not_permitted,
        (Patch(SIGNALS, 'return Sent(pid, name, "refused",', 'return Sent(pid, name, "gone",'),),
        codes=("not_permitted",),
    ),
    Row(
        "evict-tmp-full", "/tmp is full", "gpu_evict", ("evicted",), evict_with_full_tmp,
        (Patch(SPAWN, "    return json.dumps(value).encode()\n",
               "    import tempfile\n\n    with tempfile.NamedTemporaryFile(\"w\") as file:\n"
               "        file.write(json.dumps(value) + \" \" * 65536)\n    return json.dumps(value).encode()\n"),),
        may_die=("server",),
    ),
    Row(
        "clean-no-processes", "no further process may be started (pids.max)", "clean_state", ("unknown",),
        clean_without_processes, (EMPTY_LOOK, READ_BY_OURSELVES), codes=("limit_named",),
    ),
    Row(
        "clean-no-files", "no further file may be opened (RLIMIT_NOFILE)", "clean_state", ("unknown",),
        clean_without_files, (NO_LIMIT_NAMED,),
        codes=("limit_named",),
    ),
    Row(
        "clean-low-memory", "the cgroup's memory is not enough to look", "clean_state", ("unknown",),
        clean_in_little_memory, (EMPTY_LOOK,), codes=("limit_named",),
    ),
    Row(
        "clean-low-address-space", "the address space is not enough to look (RLIMIT_AS)", "clean_state",
        ("unknown",), clean_in_little_space, (EMPTY_LOOK,), codes=("limit_named",),
    ),
    Row(
        "clean-proc-subset", "/proc shows processes only (subset=pid)", "clean_state", ("unknown",),
        clean_with_pids_only,
        (without("    if facts.ports is None:", new="    if False:"),
         without("    if available is None or not facts.cgroup.readable:", new="    if False:"),
         without("    if available >= needed:", new="    if True:"),
         without("    return list(judge_ports(facts.ports, limits.ports, facts.snapshot.processes))",
                 new="    return list(judge_ports(facts.ports or (), limits.ports, facts.snapshot.processes))")),
        codes=("ports_unknown", "host_memory_unknown"),
    ),
    Row(
        "clean-no-sys", "there is no /sys, so no limit of a cgroup is seen", "clean_state", ("unknown",),
        clean_without_sys,
        (without("    if available is None or not facts.cgroup.readable:", new="    if available is None:"),),
        codes=("host_memory_unknown",),
    ),
    Row(
        "clean-no-shm", "there is no /dev/shm", "clean_state", ("unknown",), clean_without_shm,
        (Patch(CLEAN, "    if shm.free_mib is None:\n        words",
               "    if shm.free_mib is None:\n        return []\n        words"),),
        codes=("shm_unknown",),
    ),
    Row(
        "clean-fork-storm", "processes come and go while we look", "clean_state", ("clean",), clean_in_a_storm,
        (VANISHED_IS_AN_ERROR,),
    ),
    Row(
        "clean-crowd", "5,000 processes with 50 open files each, and one holder", "clean_state", ("dirty",),
        clean_in_a_crowd, (SMALL_ANSWERS,), codes=("held",), bound_s=240,
    ),
    Row(
        "info-fork-storm", "processes come and go while we look", "gpu_info", ("complete",), info_in_a_storm,
        (VANISHED_IS_AN_ERROR,),
    ),
    Row(
        "info-crowd", "5,000 processes with 50 open files each, and one holder", "gpu_info", ("complete",),
        info_in_a_crowd,
        (Patch("plugins/module_utils/observe/devices.py",
               "    for process in processes.values():\n        if process.kernel_thread",
               "    for process in list(processes.values())[:4000]:\n        if process.kernel_thread"),),
        bound_s=240,
    ),
    Row(
        "info-hidepid", "/proc hides the processes of others (hidepid)", "gpu_info", ("incomplete",), info_hidden,
        (HIDDEN_IS_FINE,),
    ),
    Row(
        "drift-no-processes", "no further process may be started (pids.max)", "drift", ("unknown",),
        drifts(lambda site: {"wrap": limited(site, "pids", max=1)}), (DRIFT_KNOWS_ALL,), codes=("processes",),
        bound_s=90,
    ),
    Row(
        "drift-no-files", "no further file may be opened (RLIMIT_NOFILE)", "drift", ("unknown",),
        drifts(lambda _site: {"inject": NO_PIPE}), (DRIFT_KNOWS_ALL,), codes=("processes",), bound_s=90,
    ),
    Row(
        "drift-hidepid", "/proc hides the processes of others (hidepid)", "drift", ("unknown",), drifts(hidden),
        (HIDDEN_IS_FINE,), codes=("processes",), bound_s=90,
    ),
)  # fmt: skip
ROWS = tuple(dataclasses.replace(row, quick=row.id in QUICK) for row in ALL)
