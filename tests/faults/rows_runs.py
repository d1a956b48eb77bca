# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""relaunch and drift as whole runs on a host that lacks what they need, or whose server does not come up.

Where the preflight can see it, the old server goes on; else nothing is claimed of the new one.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.faults.model import Answer, Row
from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch
from ansible_collections.cleanslate.sglang.tests.faults.rows_identity import compiled
from ansible_collections.cleanslate.sglang.tests.faults.rows_play import (
    ANY_VERDICT,
    LEASE,
    compared,
    fleet_of_one,
    in_sync,
    outcome,
)
from ansible_collections.cleanslate.sglang.tests.faults.site import Site
from ansible_collections.cleanslate.sglang.tests.harness.modules import run_module
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import PlaybookHost

PORT = 31000
BOUND_S = 300.0
LISTEN = "import socket, time; s = socket.create_server(('0.0.0.0', {port})); print('up', flush=True); time.sleep(600)"


def run_on(site: Site, host: PlaybookHost, words: t.Mapping[str, str], **extra: t.Any) -> None:
    """relaunch.yml; a code for each of the words that its error says."""

    def run() -> Answer:
        done = host.run("relaunch.yml", extra_vars={"lease_wait_s": 1, **extra})
        told = outcome(done)
        failed = [str(task.result.get("msg")) for task in done.tasks if task.status == "failed" and not task.ignored]
        text = " ".join(failed)
        codes = {code for code, one in words.items() if one in text}
        return Answer(told.verdict, told.codes | codes, text[-600:] or told.text)

    site.look(run)


UNTOUCHED = {"untouched": "Nothing was touched"}


def beside_the_old(site: Site, **settings: t.Any) -> PlaybookHost:
    """The old server runs; this is wanted in its place."""
    server = site.host.server(gpus=(0,), port=PORT)
    site.name("old server", *server.tree())
    return fleet_of_one(site, **settings)


def wanting(words: str, **settings: t.Any) -> t.Callable[[Site], None]:
    """A start that can't be: the old server goes on, and ``words`` of the error say why (code `why`)."""

    def scene(site: Site) -> None:
        run_on(site, beside_the_old(site, **settings), {**UNTOUCHED, "why": words})

    return scene


def small_disk(site: Site, directory: Path, options: str, fill: bool) -> None:
    """A file system of its own there, which may be full."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size=64k,{options}", "none", str(directory)]
    site.ns.run(mount, 10).check()
    if fill:
        inside = site.ns.root / str(directory).lstrip("/") / "somebody's"
        with inside.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\1" * 4096):
                pass


def state_on(options: str, fill: bool) -> t.Callable[[Site], None]:
    """The state directory is on a full disk, or on one that nobody may write to."""

    def scene(site: Site) -> None:
        state = site.host.state_dir
        state.mkdir(parents=True)
        small_disk(site, state, f"mode=755{options}", fill)
        run_on(site, beside_the_old(site), UNTOUCHED)

    return scene


def clock_ahead(site: Site) -> None:
    """The host's clock jumped ten days, by which the lease of the other operator would be over."""
    host = beside_the_old(site)
    values = {"name": "demo", "state_dir": str(site.host.state_dir), "run_id": "a", "operator": "alice"}
    taken = run_module("server_lease", values, 60, ns=site.ns)
    assert not taken.failed, taken.json
    library = compiled(site, "clock_jump.so", "-shared", "-fPIC", "-ldl")
    jump = {"LD_PRELOAD": str(library), "CLOCK_JUMP_S": str(10 * 86_400)}
    host.variables["sglang_task_environment"] = {**host.nvml.env(), **jump}
    run_on(site, host, UNTOUCHED)


def limited(site: Site, host: PlaybookHost, *limits: str) -> None:
    """The modules' interpreter on the host runs under these limits."""
    wrapper = site.directory / "limited-python"
    wrapper.write_text(f'#!/bin/sh\nexec prlimit {shlex.join(limits)} {shlex.quote(sys.executable)} "$@"\n')
    wrapper.chmod(0o755)
    host.variables["ansible_python_interpreter"] = str(wrapper)


def few_files(site: Site) -> None:
    host = beside_the_old(site)
    limited(site, host, "--nofile=64")
    run_on(site, host, {**UNTOUCHED, "why": "files may be open at once"})


def short_of_memory(site: Site) -> None:
    """More free host memory is demanded than this machine has."""
    run_on(site, fleet_of_one(site, min_available_mib=2**30), {"not_clean": "is not clean for demo"})


def taken_port(site: Site) -> None:
    """Somebody who is no server listens there."""
    argv = [sys.executable, "-c", LISTEN.format(port=PORT)]
    output = site.directory / "listener"
    somebody = site.ns.popen(argv, detached=True, output=output)
    site.name("somebody", somebody.pid)
    run_on(site, fleet_of_one(site), {**UNTOUCHED, "why": f"TCP port {PORT} is busy"})


def starts_badly(words: str, **faults: str) -> t.Callable[[Site], None]:
    """The new server is started and does not come to serve."""

    def scene(site: Site) -> None:
        host = fleet_of_one(site, faults=faults, ready_deadline_s=8, on_failure="leave")
        run_on(site, host, {"why": words})

    return scene


# --- drift ------------------------------------------------------------------------------------------------------------


def record_gone(site: Site) -> None:
    one = in_sync(site)
    one.record.unlink()
    compared(site, one)


def record_broken(site: Site) -> None:
    """Half a record, as a full disk might have left it."""
    one = in_sync(site)
    one.record.write_text(one.record.read_text()[:40])
    compared(site, one)


def edited(site: Site) -> None:
    """Somebody changed the launch's own configuration by hand; what runs is as before."""
    one = in_sync(site)
    path = one.launch_dir / "config.yaml"
    path.write_text(path.read_text() + "\nmax-running-requests: 7\n")
    compared(site, one)


def unit_edited(site: Site) -> None:
    """The unit's file is not as the launch wrote it: the next start would be another one."""
    one = in_sync(site)
    unit = site.directory / "units" / "sglang-main.service"
    unit.parent.mkdir()
    kept = one.launch_dir / "unit"
    kept.write_text("[Service]\nUser=root\nLimitMEMLOCK=infinity\n")
    kept.chmod(0o600)
    unit.write_text(kept.read_text().replace("infinity", "64K"))
    one.change(one.record, unit=unit.name, launcher="systemd")
    one.change(one.launch_dir / "request.json", unit=unit.name, launcher="systemd", unit_dir=str(unit.parent))
    compared(site, one)


def drift_run(site: Site, host: PlaybookHost) -> None:
    """drift.yml: its exit code is its claim."""

    def run() -> Answer:
        done = host.run("drift.yml")
        verdict = {0: "in_sync", 2: "not in sync", 4: "unreachable"}.get(done.rc, f"rc {done.rc}")
        return Answer(verdict, text=(done.stdout + done.stderr)[-600:])

    site.look(run)


def drift_unreachable(site: Site) -> None:
    host = fleet_of_one(site)
    host.servers = []
    host.variables.update(
        ansible_connection="ssh",
        ansible_host="127.0.0.1",
        ansible_port=1,
        ansible_ssh_common_args="-o ConnectTimeout=5 -o BatchMode=yes",
    )
    drift_run(site, host)


def drift_on_a_full_disk(site: Site) -> None:
    """Where the module unpacks itself nothing is left."""
    host = fleet_of_one(site)
    host.servers = []
    full = site.directory / "full"
    full.mkdir()
    small_disk(site, full, "mode=1777", fill=True)
    host.variables["ansible_remote_tmp"] = str(full)
    host.variables["sglang_task_environment"] = {**host.nvml.env(), "TMPDIR": str(full)}
    drift_run(site, host)


NO_TRIAL = Patch("roles/preflight/tasks/server.yml", "  when: preflight_problem | length > 0\n", "  when: false\n")
NO_PLAN = Patch("roles/plan/tasks/main.yml", "    - plan_fails | bool\n", "    - false\n")
NO_LEASE = Patch("playbooks/tasks/lease_take.yml", "    - lease_refused | length > 0\n", "    - false\n")
NO_PROOF = Patch(
    "roles/verify/tasks/main.yml", "    - verify_result.ready | default(false) is not true\n", "    - false\n"
)
NOT_JUDGED = (
    Patch(
        "playbooks/drift.yml",
        "when: drift_result.verdict | default('unknown') != 'in_sync'",
        "when: drift_result.verdict | default('in_sync') != 'in_sync'",
    ),
    Patch(
        "roles/drift/tasks/main.yml",
        "  when:\n    - drift_fails | bool\n",
        "  when:\n    - false\n    - drift_fails | bool\n",
    ),
)
SILENT = Patch(
    "roles/drift/tasks/main.yml", "  ignore_errors: true\n", "  ignore_errors: true\n  ignore_unreachable: true\n"
)
REFUSED = ("untouched", "why")


def relaunch(
    name: str,
    fault: str,
    scene: t.Callable[[Site], None],
    *breaks: Patch,
    verdict: str = "refused",
    codes: tuple[str, ...] = (),
) -> Row:
    return Row(
        f"relaunch-{name}", fault, "relaunch", (verdict,), scene, breaks, codes=codes, bound_s=BOUND_S, quick=False
    )


RELAUNCH = (
    relaunch(
        "wrong-account", "the account of the server is none on the host",
        wanting("nobody-of-this-name", user="nobody-of-this-name"), NO_TRIAL, codes=REFUSED,
    ),
    relaunch(
        "model-gone", "the model's folder is gone", wanting("/models/gone", flags={"model_path": "/models/gone"}),
        NO_TRIAL, codes=REFUSED,
    ),
    relaunch(
        "unknown-flag", "a flag that SGLang does not know",
        wanting("no-such-flag", flags={"no_such_flag": 7}), NO_TRIAL, NO_PLAN, codes=REFUSED,
    ),
    relaunch(
        "state-full", "the disk with the state directory is full", state_on("", True), NO_LEASE, codes=("untouched",)
    ),
    relaunch(
        "state-read-only", "the state directory is read-only", state_on(",ro", False), NO_TRIAL, NO_LEASE,
        codes=("untouched",),
    ),
    relaunch(
        "clock-jump", "the clock jumps past another operator's lease", clock_ahead,
        Patch(LEASE, "left = lease.expires_since_boot - clock.since_boot if same_boot else", "left ="),
        codes=("untouched", "leased"),
    ),
    relaunch(
        "few-files", "too few files may be open for a server", few_files,
        Patch("plugins/module_utils/act/launch.py", "        _check_open_files()\n", "        pass\n"), codes=REFUSED,
    ),
    relaunch(
        "memory-short", "less host memory than the launch needs", short_of_memory, ANY_VERDICT, codes=("not_clean",)
    ),
    relaunch(
        "port-taken", "somebody who is no server listens on the port", taken_port,
        NO_PLAN, codes=REFUSED,
    ),
    relaunch(
        "start-hangs", "the new server never comes to listen", starts_badly("not proved to serve", HANG="sleep"),
        NO_PROOF, verdict="failed", codes=("why",),
    ),
    relaunch(
        "start-dies", "the new server dies while it loads", starts_badly("Not enough memory", CRASH="memory"),
        NO_PROOF, verdict="failed", codes=("why",),
    ),
)  # fmt: skip

DRIFT = (
    Row(
        "drift-record-gone", "the record of the launch is gone", "drift", ("drifted",), record_gone,
        (Patch("plugins/module_utils/decide/drift_server.py", "    if not seen.by_record:\n", "    if False:\n"),),
        codes=("restarted_by_hand",), bound_s=90,
    ),
    Row(
        "drift-record-broken", "half of the record of the launch is left", "drift", ("drifted",), record_broken,
        (Patch("plugins/module_utils/drifting.py", '            problems += (("record", reading.problem, "file"),)\n',
               "            pass\n"),),
        codes=("record", "restarted_by_hand"), bound_s=90,
    ),
    Row(
        "drift-edited", "somebody edited the launch's configuration", "drift", ("drifted",), edited,
        (Patch("plugins/module_utils/decide/drift_server.py", "    for row in found.differences:\n",
               "    for row in ():\n"),),
        codes=("flag",), bound_s=90,
    ),
    Row(
        "drift-unit-edited", "somebody edited the unit's file", "drift", ("drifted",), unit_edited,
        (Patch("plugins/module_utils/decide/drift_server.py", "    rows += _unit(wanted, seen.unit)\n", ""),),
        codes=("unit_file",), bound_s=90,
    ),
    Row(
        "drift-unreachable", "the host can't be reached", "drift", ("unreachable",), drift_unreachable,
        (*NOT_JUDGED, SILENT), bound_s=120,
    ),
    Row(
        "drift-disk-full", "the disk where modules unpack themselves is full", "drift", ("not in sync",),
        drift_on_a_full_disk, NOT_JUDGED, bound_s=120,
    ),
)  # fmt: skip
ROWS = (*RELAUNCH, *DRIFT)
