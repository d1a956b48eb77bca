# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""gpu_info, drift, relaunch and rollout: what they say of a faulty host, and what they do on it."""

from __future__ import annotations

import json
import signal
import typing as t

from ansible_collections.cleanslate.sglang.tests.doubles.nvml import lies
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Hold
from ansible_collections.cleanslate.sglang.tests.faults.model import Answer, Row
from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch
from ansible_collections.cleanslate.sglang.tests.faults.rows_evict import OPEN_IS_HOLDING
from ansible_collections.cleanslate.sglang.tests.faults.site import Site
from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR
from ansible_collections.cleanslate.sglang.tests.harness.modules import run_module
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun
from ansible_collections.cleanslate.sglang.tests.integration_ns import drift_site
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import CHANGING, PlaybookHost
from ansible_collections.cleanslate.sglang.tests.integration_ns.rolling import Fleet

CORE = "plugins/module_utils"
NVML = f"{CORE}/observe/nvml.py"
LOOK = f"{CORE}/observe/look.py"
HOLDERS = f"{CORE}/decide/holders.py"
DRIFT = f"{CORE}/decide/drift.py"
DRIFT_HOST = f"{CORE}/decide/drift_host.py"
DRIFT_SERVER = f"{CORE}/decide/drift_server.py"
LEASE = f"{CORE}/lease.py"
CLEAN_STATE = "plugins/modules/clean_state.py"
ROLLOUT = "plugins/plugin_utils/rollout.py"
Json = dict[str, t.Any]


# --- gpu_info -----------------------------------------------------------------------------------------------------


def shows(check: t.Callable[[Json], bool]) -> t.Callable[[Json], Answer]:
    """``told`` if what gpu_info shows is right, ``lied`` if not, ``incomplete`` where it says that it does not know."""

    def tell(result: Json) -> Answer:
        gpus = result.get("gpus")
        text = json.dumps(gpus)[:200]
        if gpus is None or not result["scan"]["complete"]:
            return Answer("incomplete", text=str(result.get("problems") or result["scan"]))
        return Answer("complete" if not gpus or check(gpus[0]) else "lied", text=text)

    return tell


def listed_twice(site: Site) -> None:
    pid = site.holder()
    site.host.nvml.write(*site.host.gpus(), *lies.listed_twice(0, pid, 5000))
    site.info(shows(lambda gpu: [row["pid"] for row in gpu["processes"]] == [pid]))


def no_figure(site: Site) -> None:
    """N/A is no figure: neither zero nor 2**64 - 1 bytes."""
    pid = site.holder()
    site.host.nvml.write(*site.host.gpus(), *lies.no_figure(0, pid, 5000))
    site.info(shows(lambda gpu: [row["used_mib"] for row in gpu["processes"]] == [None]))


def dead_pid(site: Site) -> None:
    site.host.memory_follows_mappings(*lies.dead_pid(0, 999_999, 10_151))
    site.info(shows(lambda gpu: gpu["stale_pids"] == [999_999] and gpu["holders"] == []))


def silent_driver(site: Site) -> None:
    site.host.nvml.write(*site.host.gpus(), *lies.hangs())
    site.info(shows(lambda gpu: True), nvml_deadline_s=1)


def not_seen(site: Site) -> None:
    site.holder()
    site.info(shows(lambda gpu: len(gpu["holders"]) == 1), wrap=("setpriv", "--bounding-set", "-sys_ptrace"))


# --- drift --------------------------------------------------------------------------------------------------------


def in_sync(site: Site) -> drift_site.Site:
    """A server on GPU 0 that runs as the inventory says."""
    one = drift_site.Site(site.ns, site.directory, site.host.nvml.env())
    one.options = {"expected_gpus": 2, "device_major": LOOP_MAJOR, "health_deadline_s": 3}
    one.settings.update({"device": "gpu", "gpus": ["0"]})
    del one.settings["flags"]["device"]
    one.launch(DEVICES=str(site.host.nodes[0]))
    one.serves()
    return one


def compared(site: Site, one: drift_site.Site, **options: t.Any) -> None:
    def run() -> Answer:
        found = one.check(**options)
        rows = drift_site.rows(found)
        codes = frozenset(str(row["item"]).partition(":")[0] for row in rows)
        return Answer(found["verdict"], codes, ", ".join(str(row["item"]) for row in rows))

    site.look(run)


def drift_holder(site: Site) -> None:
    one = in_sync(site)
    site.holder(gpu=1)
    compared(site, one)


def drift_memory(site: Site) -> None:
    one = in_sync(site)
    site.host.memory_follows_mappings(Hold(1, mib=5000, always=True))
    compared(site, one)


def drift_driver_hangs(site: Site) -> None:
    one = in_sync(site)
    site.host.memory_follows_mappings(*lies.hangs("nvmlInit*"))
    compared(site, one, nvml_deadline_s=1)


def drift_stopped(site: Site) -> None:
    """The leader is stopped: it lives, listens, and answers nobody."""
    one = in_sync(site)
    one.signal(one.pid, signal.SIGSTOP)
    compared(site, one)


# --- relaunch -----------------------------------------------------------------------------------------------------


def fleet_of_one(site: Site, **settings: t.Any) -> PlaybookHost:
    """The site as one host of an inventory, with a server that is to run on GPU 0."""
    host = PlaybookHost(site.directory, site.ns)
    host.nvml = site.host.nvml
    host.variables["sglang_state_dir"] = str(site.host.state_dir)
    host.follow_mappings(site.host.nodes)
    faults = {"DEVICES": str(site.host.nodes[0]), **settings.pop("faults", {})}
    host.servers = [host.server("demo", 31000, gpus=[0], faults=faults, **settings)]
    site.brings_newcomers()
    return host


WORDS = {"not_clean": "is not clean for demo", "leased": "run a of alice works on 'demo'"}


def outcome(run: PlaybookRun) -> Answer:
    """``serving``; ``refused`` where nothing was changed; else ``failed``."""
    if run.rc == 0:
        text = run.stdout[-300:]
        return Answer("serving" if "SERVING" in run.stdout else "done", text=text)
    tasks = [task for task in run.tasks if task.action.rpartition(".")[2] in CHANGING]
    changed = [task.task for task in tasks if task.result.get("changed")]
    started = any("server_launch" in task.action and task.result.get("pid") for task in run.tasks)
    failed = [str(task.result.get("msg")) for task in run.tasks if task.status == "failed" and not task.ignored]
    verdict = "failed" if started else "stopped" if changed else "refused"
    text = " ".join(failed or [run.stderr])
    codes = frozenset(code for code, words in WORDS.items() if words in text)
    return Answer(verdict, codes, text[-300:])


def relaunched(site: Site, host: PlaybookHost) -> None:
    site.look(lambda: outcome(host.run("relaunch.yml")))


def on_a_held_gpu(site: Site) -> None:
    """Somebody else holds the GPU, and the scope does not reach it."""
    site.holder()
    relaunched(site, fleet_of_one(site))


def on_full_shm(site: Site) -> None:
    with (site.ns.root / "dev" / "shm" / "somebody's").open("wb") as file:
        file.write(b"\1" * 60 * 2**20)
    relaunched(site, fleet_of_one(site))


def beside_visitors(site: Site) -> None:
    relaunched(site, fleet_of_one(site, scope="gpu"))


def beside_another_operator(site: Site) -> None:
    server = site.host.server(gpus=(0,), port=31000)
    site.name("old server", *server.tree())
    host = fleet_of_one(site)
    values = {"name": "demo", "state_dir": str(site.host.state_dir), "run_id": "a", "operator": "alice"}
    taken = run_module("server_lease", values, 60, ns=site.ns)
    assert not taken.failed, taken.json
    site.look(lambda: outcome(host.run("relaunch.yml", extra_vars={"lease_wait_s": 1})))


# --- rollout ------------------------------------------------------------------------------------------------------

THREE = {"gpu01": ["chat"], "gpu02": ["chat"], "gpu03": ["chat"]}


def rolled(site: Site, fleet: Fleet, *untouched: str) -> None:
    """``went on``: it changed servers that it had to leave alone."""

    def run() -> Answer:
        done = fleet.roll(rollout_ramp="1,1,1")
        touched = [unit for unit in untouched if unit in str(fleet.touched())]
        failed = [str(task.result.get("msg")) for task in done.tasks if task.status == "failed" and not task.ignored]
        words = f"rc {done.rc}, touched {fleet.touched()}: {(failed or [''])[-1][-200:]}"
        if touched:
            return Answer("went on", text=words)
        return Answer("done" if done.rc == 0 else "stopped", text=words)

    site.look(run)


def canary_fails(site: Site) -> None:
    fleet = Fleet(site.directory / "fleet", THREE)
    fleet.fault("gpu01/chat", proof="failed")
    rolled(site, fleet, "gpu02/chat", "gpu03/chat")


ANY_VERDICT = Patch(
    CLEAN_STATE, 'if result["verdict"] != "clean":\n', 'result["verdict"] = "clean"\n        if False:\n'
)
NEVER_STOP = Patch(
    ROLLOUT,
    "def judge_batch(batch: t.Sequence[Result], results: t.Mapping[str, t.Any]) -> list[str]:\n",
    "def judge_batch(batch: t.Sequence[Result], results: t.Mapping[str, t.Any]) -> list[str]:\n    return []\n",
)
NOT_KNOWN_IS_FINE = Patch(DRIFT, 'return "unknown" if "unknown" in states else "in_sync"', 'return "in_sync"')

ROWS = (
    Row(
        "info-listed-twice", "the driver lists a pid twice", "gpu_info", ("complete",), listed_twice,
        (Patch(NVML, '(row.pid, getattr(row, "gpuInstanceId", None)),', "(row.pid, len(rows)),"),),
    ),
    Row(
        "info-no-figure", "the driver has no figure for a process", "gpu_info", ("complete",), no_figure,
        (Patch(NVML, '"used": None if used is None or used >= NOT_AVAILABLE else used,', '"used": used or 0,'),),
    ),
    Row(
        "info-dead-pid", "the driver lists a dead pid", "gpu_info", ("complete",), dead_pid,
        (Patch(HOLDERS, "                stale.append(pid)\n", "                pass\n"),),
    ),
    Row(
        "info-driver-hangs", "NVML never answers", "gpu_info", ("incomplete",), silent_driver,
        (Patch(LOOK, "    processes, scan, leaders, guest = bounded_view(options)\n    gpus",
               "    if reading.gpus is None:\n        reading = NO_GPUS\n"
               "    processes, scan, leaders, guest = bounded_view(options)\n    gpus"),),
    ),
    Row(
        "info-no-permission", "root without the right to look into others", "gpu_info", ("incomplete",), not_seen,
        (Patch("plugins/modules/gpu_info.py", '"complete": snapshot.scan.complete and not snapshot.problems,',
               '"complete": True,'),),
    ),
    Row(
        "drift-undeclared-holder", "somebody whom nobody declared holds a GPU", "drift", ("drifted",), drift_holder,
        (Patch(DRIFT_HOST, "if holder.pid not in ours and holder.protected is None:", "if False:"),),
        codes=("holder",), bound_s=90,
    ),
    Row(
        "drift-unexplained-memory", "memory that nobody who is seen holds", "drift", ("drifted",), drift_memory,
        (Patch(DRIFT_HOST, "    if used <= limit or (", "    if used > 0 or ("),),
        codes=("memory_unexplained",), bound_s=90,
    ),
    Row(
        "drift-driver-hangs", "NVML never answers", "drift", ("unknown",), drift_driver_hangs, (NOT_KNOWN_IS_FINE,),
        codes=("gpu_count",), bound_s=90,
    ),
    Row(
        "drift-stopped-server", "the server is stopped (state T)", "drift", ("drifted",), drift_stopped,
        (Patch(DRIFT_SERVER, "    if workers is not None and workers.stopped:", "    if False:"),
         Patch(DRIFT_SERVER, 'elif health is not None and (health.kind == "timeout" or health.slow):', "elif False:")),
        codes=("hung",), bound_s=90,
    ),
)  # fmt: skip

PLAYBOOKS = (
    Row(
        "relaunch-held-gpu", "somebody else holds the GPU", "relaunch", ("refused",), on_a_held_gpu,
        (ANY_VERDICT,), codes=("not_clean",), bound_s=230,
    ),
    Row(
        "relaunch-shm-full", "/dev/shm is full", "relaunch", ("refused",), on_full_shm, (ANY_VERDICT,),
        codes=("not_clean",), bound_s=230, quick=False,
    ),
    Row(
        "relaunch-visitors", "others have the GPU open", "relaunch", ("serving",), beside_visitors,
        (OPEN_IS_HOLDING,), bound_s=230, quick=False,
    ),
    Row(
        "relaunch-two-operators", "another operator's run works on the server", "relaunch", ("refused",),
        beside_another_operator,
        (Patch(LEASE, "return self.running or not self.expired", "return False"),), codes=("leased",),
        bound_s=230, quick=False,
    ),
    Row(
        "rollout-canary-fails", "the canary is not proved", "rollout", ("stopped",), canary_fails, (NEVER_STOP,),
        bound_s=240,
    ),
)  # fmt: skip
