# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lies of the NVML double that rows_clean has not, and what they do to gpu_evict, gpu_info and drift."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import typing as t

from ansible_collections.cleanslate.sglang.tests.doubles.nvml import lies
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Fault, Hold, Mig
from ansible_collections.cleanslate.sglang.tests.faults.model import Answer, Row
from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch
from ansible_collections.cleanslate.sglang.tests.faults.rows_clean import (
    CLEAN,
    ENDLESS,
    HOLDERS,
    MUTE,
    NVML,
    SILENT,
    lying,
    with_gpu,
    without,
)
from ansible_collections.cleanslate.sglang.tests.faults.rows_evict import CLIMB, NO_SERVICES
from ansible_collections.cleanslate.sglang.tests.faults.rows_play import DRIFT_HOST, compared, in_sync
from ansible_collections.cleanslate.sglang.tests.faults.site import Site
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import RANK_MIB

Scene = t.Callable[[Site], None]
Json = dict[str, t.Any]
ASSESS = "plugins/module_utils/assess.py"
MPS = "nvidia-cuda-mps-server"


# --- clean_state --------------------------------------------------------------------------------------------------


def orphaned(site: Site) -> tuple[int, int]:
    """A child that keeps what its dead parent had, and the driver lists the parent: (parent, child)."""
    output = site.ns.directory / "orphaned"
    site.host.hold("--map", "--fork", "1", str(site.host.nodes[0]), output=output)
    wait_for("two pids", lambda: output.exists() and len(output.read_text().split()) == 2)
    parent, child = map(int, output.read_text().split())
    site.host.gone([parent])
    site.name("orphan", child)
    site.host.nvml.write(*site.host.gpus(), *lies.forked_orphan(0, parent, child, 20_998))
    return parent, child


def clean_orphaned(site: Site) -> None:
    orphaned(site)
    site.clean()


def stranger(site: Site) -> int:
    """Somebody whom the driver lists, and who has nothing open."""
    pid = site.ns.popen(["sleep", "600"], detached=True).pid
    site.name("stranger", pid)
    return pid


def managed_memory(site: Site) -> None:
    """The rows of the list have 5 MiB, the GPU has 60,000 in use."""
    site.host.nvml.write(*site.host.gpus(), *lies.managed_memory(0, stranger(site), 60_000, 5))
    site.clean()


def unpins_slowly(site: Site) -> None:
    """The memory stays for three seconds after its holder's death."""
    pid = site.holder()
    site.host.nvml.write(*site.host.gpus(), *lies.unpins_slowly(0, pid, 20_000, 3))
    site.host.kill(pid, signal.SIGKILL)
    site.host.gone([pid])
    site.clean(settle_s=30)


def mps_server(site: Site) -> None:
    """It owns the context of all its clients, and is listed with their memory."""
    site.service("dcgm")  # compiles the program
    folder = site.ns.directory / "mps"
    folder.mkdir()
    shutil.copy(site.ns.directory / "bystanders" / "bystander", folder / MPS)
    node = str(site.host.nodes[0])
    started = site.ns.popen([str(folder / MPS)], {"BYSTANDER_DEVICES": node}, detached=True)
    wait_for("its doorbells", lambda: node in (site.ns.proc / str(started.pid) / "maps").read_text())
    site.name("the MPS server", started.pid)
    site.host.memory_follows_mappings(*lies.mps_server(0, started.pid, 7000))


def growing(run: t.Callable[[Site], None]) -> Scene:
    """One who holds the GPU by the driver's word, which comes too late: between the two calls the list has grown."""

    def scene(site: Site) -> None:
        held = site.host.hold(str(site.host.nodes[0]))
        site.name("holder", held.pid)
        site.host.nvml.write(*site.host.gpus(), Hold(0, mib=10, pid=held.pid), *lies.list_grows_meanwhile(0))
        run(site)

    return scene


def clean_beside_mps(site: Site) -> None:
    mps_server(site)
    site.clean()


# --- gpu_evict ----------------------------------------------------------------------------------------------------


def evict_beside_mps(site: Site) -> None:
    mps_server(site)
    site.evict(scope="gpu", devices=["0"])


def lied_to(*lines: t.Any, **options: t.Any) -> Scene:
    """A server holds GPU 0, and the driver tells this besides."""

    def scene(site: Site) -> None:
        site.server(gpus=(0,))
        site.host.memory_follows_mappings(*lines)
        site.evict(port=30000, **options)

    return scene


def held_and_lied_to(*lines: t.Any, **options: t.Any) -> Scene:
    """Somebody holds GPU 0, and the driver tells this besides."""

    def scene(site: Site) -> None:
        site.holder()
        site.host.memory_follows_mappings(*lines)
        site.evict(scope="gpu", **{"devices": ["0"], **options})

    return scene


def old_memory_call(site: Site) -> None:
    """It counts the driver's own part, and nothing else tells the two apart."""
    site.server(gpus=(0,))
    site.host.memory_follows_mappings(*lies.without_memory_v2())
    site.evict(port=30000, devices=["0"], env=_own_python(site), smi=False)


def _own_python(site: Site) -> dict[str, str]:
    """No nvidia-smi in the path."""
    return {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}


def holder_on_an_instance(site: Site) -> None:
    """Listed on a MIG instance alone, with the device open and no mapping that tells."""
    node = str(site.host.nodes[0])
    held = site.host.hold(node)
    site.name("holder", held.pid)
    site.host.memory_follows_mappings(Mig(0, 0), Hold(0, mib=4000, mig=0, pid=held.pid))
    site.evict(scope="gpu", devices=["0"])


def checked(*lines: t.Any) -> Scene:
    """Check mode: the same driver, and nobody is asked."""

    def scene(site: Site) -> None:
        site.holder()
        site.host.memory_follows_mappings(*lines)
        site.evict(scope="gpu", check=True, trace=False, nvml_deadline_s=1)

    return scene


# --- gpu_info -----------------------------------------------------------------------------------------------------


def shown(check: t.Callable[[Json], bool]) -> t.Callable[[Json], Answer]:
    """``complete`` if the whole result is as it should be, else ``lied``."""

    def tell(result: Json) -> Answer:
        return Answer("complete" if check(result) else "lied", text=json.dumps(result.get("gpus"))[:300])

    return tell


def informed(check: t.Callable[[Json], bool], *lines: t.Any, **options: t.Any) -> Scene:
    def scene(site: Site) -> None:
        site.host.memory_follows_mappings(*lines)
        site.info(shown(check), **options)

    return scene


def info_orphaned(site: Site) -> None:
    parent, child = orphaned(site)

    def right(result: Json) -> bool:
        gpu = result["gpus"][0]
        return gpu["stale_pids"] == [parent] and [one["pid"] for one in gpu["holders"]] == [child]

    site.info(shown(right))


# --- drift --------------------------------------------------------------------------------------------------------


def drifts(*lines: t.Any) -> Scene:
    def scene(site: Site) -> None:
        one = in_sync(site)
        site.host.memory_follows_mappings(*lines)
        compared(site, one)

    return scene


def drift_orphaned(site: Site) -> None:
    """On the other GPU than the server's."""
    one = in_sync(site)
    node = str(site.host.nodes[1])
    output = site.ns.directory / "orphaned"
    site.host.hold("--map", "--fork", "1", node, output=output)
    wait_for("two pids", lambda: output.exists() and len(output.read_text().split()) == 2)
    parent, child = map(int, output.read_text().split())
    site.host.gone([parent])
    site.name("orphan", child)
    held = Hold(0, mib=RANK_MIB, device=str(site.host.nodes[0]), id="gpu0")
    site.host.nvml.write(*site.host.gpus(), held, *lies.forked_orphan(1, parent, child, 20_998))
    compared(site, one)


NO_LIST_IS_AN_EMPTY_ONE = Patch(NVML, '            if kind == "compute":\n                return None\n', "")
HEALTH_FORGOTTEN = Patch(
    CLEAN,
    "failed = [problem for problem in gpu.errors if problem.call in HEALTH_CALLS and problem.code is not None]",
    "failed: list[t.Any] = []",
)
SILENT_DRIVER_IS_FINE = Patch(
    CLIMB, "        if snapshot.reading.gpus is None:\n            words", "        if False:\n            words"
)
MEMORY_UNKNOWN_IS_FREE = Patch(
    CLIMB, '        elif used is None:\n            self._reason("memory_unknown"',
    '        elif False:\n            self._reason("memory_unknown"',
)  # fmt: skip
CHECK_MODE_KNOWS_ALL = Patch(
    "plugins/module_utils/evict.py", '    if codes:\n        return "unknown"\n    if check_mode:',
    '    if codes and not check_mode:\n        return "unknown"\n    if check_mode:',
)  # fmt: skip
REMAP_FAULT = Fault("nvmlDeviceGetRemappedRows", gpu=0, code=lies.UNKNOWN)

# Part of `make faults`: a few of each kind, under four seconds each.
QUICK = frozenset(
    {
        "clean-list-grows",
        "clean-forked-orphan",
        "evict-list-forbidden",
        "evict-check-list-forbidden",
        "info-list-forbidden",
    }
)
ALL = (
    Row(
        "clean-driver-library-missing", "NVML: library missing (12)", "clean_state", ("unknown",),
        lying(*lies.init_fails(lies.LIBRARY_NOT_FOUND)), (SILENT,), codes=("driver_library_missing",),
    ),
    Row(
        "clean-one-call-hangs", "one call for one GPU never answers", "clean_state", ("unknown",),
        lying(*lies.hangs("nvmlDeviceGetMemoryInfo_v2", gpu=1), nvml_deadline_s=1), (ENDLESS,),
        codes=("driver_hung",), bound_s=30,
    ),
    Row(
        "clean-driver-too-slow", "NVML answers, but not in time", "clean_state", ("unknown",),
        lying(*lies.slow(100), nvml_deadline_s=1, samples=1),
        (Patch(NVML, "begin_call(lambda: _query(proc), deadline_s)", "begin_call(lambda: _query(proc), 60.0)"),),
        codes=("driver_hung",),
    ),
    Row(
        "clean-gpu-handle-lost", "one GPU is counted, and its handle says that it is lost (15)", "clean_state",
        ("unknown",), lying(*lies.no_handle(1, lies.GPU_IS_LOST)), (MUTE,), codes=("gpu_no_answer",),
    ),
    Row(
        "clean-gpu-handle-reset", "one GPU is counted, and its handle wants a reset (16)", "clean_state",
        ("unknown",), lying(*lies.no_handle(0, lies.RESET_REQUIRED)), (MUTE,), codes=("gpu_no_answer",),
    ),
    Row(
        "clean-list-grows", "the process list grows while it is read", "clean_state", ("unknown",),
        growing(lambda site: site.clean()), (NO_LIST_IS_AN_EMPTY_ONE,), codes=("processes_unknown",),
    ),
    Row(
        "clean-wants-reboot", "the driver asks for a reboot", "clean_state", ("dirty",), with_gpu(lies.wants(0, 2)),
        (Patch(NVML, '"recovery_action": _recovery_action(asker, handle),', '"recovery_action": None,'),),
        codes=("recovery_action",),
    ),
    Row(
        "clean-field-fails", "the field of the recovery action fails, the call does not", "clean_state",
        ("unknown",), lying(*lies.field_fails(0, 230)), (HEALTH_FORGOTTEN,), codes=("health_unknown",),
    ),
    Row(
        "clean-remap-query-fails", "whether rows were remapped is not answered", "clean_state", ("unknown",),
        lying(REMAP_FAULT), (HEALTH_FORGOTTEN,), codes=("health_unknown",),
    ),
    Row(
        "clean-forked-orphan", "a forked child holds what its dead parent is listed for", "clean_state", ("dirty",),
        clean_orphaned,
        (without("if use is not None and (use.readable_kib or listed):", HOLDERS, "if use is not None and listed:"),),
        codes=("held",),
    ),
    Row(
        "clean-managed-memory", "the list has a hundredth of the memory in use", "clean_state", ("dirty",),
        managed_memory,
        (without("    known = [value for value in used if value is not None]",
                 new="    known = [sum(row.used_mib or 0 for row in gpu.processes or ()) for _one in used]"),
         without("    if holder.protected is None:\n        return True",
                 new="    if holder.protected is None:\n        return False")),
        codes=("memory_in_use",),
    ),
    Row(
        "clean-unpins-slowly", "memory is unpinned for three seconds after the death", "clean_state", ("clean",),
        unpins_slowly,
        (Patch(ASSESS, "late = time.monotonic() - started >= wanted.settle_s", "late = True"),),
    ),
    Row(
        "clean-mps-server", "an MPS server is listed with its clients' memory", "clean_state", ("dirty",),
        clean_beside_mps,
        (without("if not any(above):", new="if not any(above) or facts.snapshot.holders[gpu.index].holders:"),),
        codes=("memory_in_use",),
    ),
    Row(
        "evict-mps-server", "an MPS server is listed with its clients' memory", "gpu_evict", ("nothing_to_do",),
        evict_beside_mps, (NO_SERVICES,),
    ),
    Row(
        "evict-driver-dies-beside", "a server, and NVML never answers: memory can't be told", "gpu_evict",
        ("unknown",), lied_to(*lies.hangs(), nvml_deadline_s=1), (MEMORY_UNKNOWN_IS_FREE,),
        codes=("memory_unknown",), may_die=("server",),
    ),
    Row(
        "evict-driver-not-loaded", "holders are asked for and the driver is not loaded (9)", "gpu_evict",
        ("unknown",), held_and_lied_to(*lies.init_fails(lies.DRIVER_NOT_LOADED), devices=[]),
        (SILENT_DRIVER_IS_FINE,), codes=("gpus_unknown",),
    ),
    Row(
        "evict-gpu-lost", "the chosen GPU fell off the bus", "gpu_evict", ("unknown",),
        held_and_lied_to(*lies.falls_off(1), devices=["1"]),
        (Patch(CLIMB, "            if gpu.minor is None:\n", "            if False:\n"),
         Patch(CLIMB, "            if gpu.processes is None and not gpu.mig and visitors:", "            if False:")),
        codes=("gpus_unknown",),
    ),
    Row(
        "evict-old-memory-call", "only the old memory call, which counts the driver's part", "gpu_evict",
        ("unknown",), old_memory_call,
        (Patch(CLIMB, "                if not memory.used_excludes_reserved:\n                    return None\n", ""),),
        codes=("memory_unknown",), may_die=("server",),
    ),
    Row(
        "evict-unified-memory", "a GPU without memory of its own", "gpu_evict", ("evicted",),
        lied_to(*lies.unified_memory(0), devices=["0"]),
        (Patch(CLIMB, "            if memory is not None and memory.unified:\n                continue\n", ""),),
        may_die=("server",),
    ),
    Row(
        "evict-list-forbidden", "no process list, and somebody has the GPU open", "gpu_evict", ("unknown",),
        held_and_lied_to(*lies.processes_forbidden(0)),
        (Patch(CLIMB, "            if gpu.processes is None and not gpu.mig and visitors:", "            if False:"),),
        codes=("gpus_unknown",), may_die=("holder",),
    ),
    Row(
        "evict-list-grows", "the process list grows while it is read, and has the holder", "gpu_evict", ("unknown",),
        growing(lambda site: site.evict(scope="gpu", devices=["0"])),
        (Patch(CLIMB, "            if gpu.processes is None and not gpu.mig and visitors:", "            if False:"),),
        codes=("gpus_unknown",),
    ),
    Row(
        "evict-mig-holder", "a holder that only a MIG instance lists", "gpu_evict", ("evicted",),
        holder_on_an_instance,
        (without("if use is not None and (use.readable_kib or listed):", HOLDERS,
                 "if use is not None and use.readable_kib:"),),
        may_die=("holder",),
    ),
    Row(
        "evict-check-driver-hangs", "check mode, and NVML never answers", "gpu_evict", ("unknown",),
        checked(*lies.hangs()), (CHECK_MODE_KNOWS_ALL,), codes=("gpus_unknown",),
    ),
    Row(
        "evict-check-list-forbidden", "check mode, and no process list", "gpu_evict", ("unknown",),
        checked(*lies.processes_forbidden(0)), (CHECK_MODE_KNOWS_ALL,), codes=("gpus_unknown",),
    ),
    Row(
        "info-gpu-lost", "one GPU falls off the bus", "gpu_info", ("complete",),
        informed(lambda result: result["gpus"][1]["memory"] is None and bool(result["gpus"][1]["errors"]),
                 *lies.falls_off(1)),
        (Patch(NVML, "        memory=_memory_from_json(data.get(\"memory\")),\n        processes",
               "        memory=_memory_from_json(data.get(\"memory\") or {\"api\": \"v2\"}),\n        processes"),),
    ),
    Row(
        "info-list-forbidden", "no process list", "gpu_info", ("complete",),
        informed(lambda result: result["gpus"][0]["processes"] is None, *lies.processes_forbidden(0)),
        (NO_LIST_IS_AN_EMPTY_ONE,),
    ),
    Row(
        "info-list-grows", "the process list grows while it is read", "gpu_info", ("complete",),
        growing(lambda site: site.info(shown(lambda result: result["gpus"][0]["processes"] is None))),
        (NO_LIST_IS_AN_EMPTY_ONE,),
    ),
    Row(
        "info-mig-mute", "one MIG instance gives no answer", "gpu_info", ("complete",),
        informed(lambda result: [one["memory"] is None for one in result["gpus"][0]["mig"]] == [False, True],
                 *lies.mig_with_a_mute_instance(0, 2, 1)),
        (Patch(NVML, "        data.get(\"uuid\"),\n        _memory_from_json(data.get(\"memory\")),",
               "        data.get(\"uuid\"),\n        _memory_from_json(data.get(\"memory\") or {\"api\": \"v2\"}),"),),
    ),
    Row(
        "info-unified-memory", "a GPU without memory of its own", "gpu_info", ("complete",),
        informed(lambda result: result["gpus"][0]["memory"]["unified"] is True, *lies.unified_memory(0)),
        (Patch(NVML, '                    return {"api": "none", "unified": True}',
               '                    return {"api": "none", "unified": False}'),),
    ),
    Row(
        "info-driver-mismatch", "library and kernel module differ (18)", "gpu_info", ("complete",),
        informed(lambda result: result["gpus"] is None and result["nvml_version"] == "13.580.159.04"
                 and result["problems"][0]["code"] == lies.LIB_RM_VERSION_MISMATCH, *lies.version_mismatch()),
        (Patch(NVML, '            "nvml_version": version,\n', ""),),
    ),
    Row(
        "info-forked-orphan", "a forked child holds what its dead parent is listed for", "gpu_info", ("complete",),
        info_orphaned,
        (without("if use is not None and (use.readable_kib or listed):", HOLDERS, "if use is not None and listed:"),),
    ),
    Row(
        "drift-list-forbidden", "no process list, and others have the GPU open", "drift", ("unknown",),
        drifts(*lies.processes_forbidden(1)),
        (Patch(DRIFT_HOST, "    why += [words for gpu in snapshot.reading.gpus or () if",
               "    why += [words for gpu in () if"),),
        codes=("holders",), bound_s=90,
    ),
    Row(
        "drift-gpu-lost", "one GPU falls off the bus", "drift", ("unknown",), drifts(*lies.falls_off(1)),
        (Patch(DRIFT_HOST, "    if memory is None or used is None:\n        why",
               "    if memory is None or used is None:\n        return\n        why"),),
        codes=("gpu",), bound_s=90,
    ),
    Row(
        "drift-forked-orphan", "a forked child holds what its dead parent is listed for", "drift", ("drifted",),
        drift_orphaned,
        (without("if use is not None and (use.readable_kib or listed):", HOLDERS, "if use is not None and listed:"),),
        codes=("holder",), bound_s=90,
    ),
)  # fmt: skip
ROWS = tuple(dataclasses.replace(row, quick=row.id in QUICK) for row in ALL)
