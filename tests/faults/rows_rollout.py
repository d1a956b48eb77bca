# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""rollout: what stops the ramp, who is touched until then, and what each server has in the end.

All but two run the real playbooks over the modules of a small world (tests/integration_ns/rolling.py), in which any
step of any server can fail.
"""

from __future__ import annotations

import json
import sys
import typing as t

from ansible_collections.cleanslate.sglang.tests.faults.model import Answer, Row
from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch
from ansible_collections.cleanslate.sglang.tests.faults.rows_play import LEASE, NEVER_STOP, ROLLOUT, fleet_of_one
from ansible_collections.cleanslate.sglang.tests.faults.site import Site
from ansible_collections.cleanslate.sglang.tests.harness.modules import run_module
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun
from ansible_collections.cleanslate.sglang.tests.integration_ns.rolling import Fleet

FOUR = {f"gpu0{number}": ["chat"] for number in (1, 2, 3, 4)}
BOUND_S = 300.0


def rolls(
    *allowed: str, faults: t.Mapping[str, t.Mapping[str, t.Any]], routed: bool = False, ramp: str = "1,2"
) -> t.Callable[[Site], None]:
    """A rollout over four hosts. ``allowed``: the servers that it may touch. The codes are `HOST/SERVER STATE`, of
    each server: its state in the report; and `HOST/SERVER=CONFIGURATION`, with ! where it does not serve.
    """

    def scene(site: Site) -> None:
        fleet = Fleet(site.directory / "fleet", FOUR)
        if routed:
            fleet.behind_a_router()
        for unit, fault in faults.items():
            fleet.fault(unit, **fault)
        kept = site.directory / "kept"

        def run() -> Answer:
            done = fleet.roll(rollout_ramp=ramp, rollout_report_dir=str(kept))
            beyond = sorted(set(fleet.touched()) - set(allowed))
            codes = {f"{unit}={word}" for unit, word in fleet.configurations().items()}
            codes |= {f"{row['host']}/{row['server']} {row['state']}" for row in rows_of(kept)}
            codes |= {f"{unit} out" for unit in set(fleet.units()) - set(fleet.routed())} if routed else set()
            text = f"rc {done.rc}, touched {fleet.touched()}: {error_of(done)[-600:]}"
            if beyond:
                return Answer("went on", frozenset(codes), text)
            verdict = "done" if done.rc == 0 else "stopped" if fleet.touched() else "refused"
            return Answer(verdict, frozenset(codes), text)

        site.look(run)

    return scene


def error_of(run: PlaybookRun) -> str:
    """What ended the run, or its last words."""
    failed = [str(each.result.get("msg")) for each in run.tasks if each.status == "failed" and not each.ignored]
    return (failed or [run.stdout[-600:]])[-1]


def rows_of(kept: t.Any) -> list[dict[str, t.Any]]:
    """The servers of the one report, if there is one."""
    paths = sorted(kept.glob("*.json")) if kept.is_dir() else []
    return list(json.loads(paths[0].read_text())["servers"]) if paths else []


def beside_another_operator(site: Site) -> None:
    """Real modules: a run of alice works on the server that comes first."""
    server = site.host.server(gpus=(0,), port=31000)
    site.name("old server", *server.tree())
    host = fleet_of_one(site)
    values = {"name": "demo", "state_dir": str(site.host.state_dir), "run_id": "a", "operator": "alice"}
    taken = run_module("server_lease", values, 60, ns=site.ns)
    assert not taken.failed, taken.json

    def run() -> Answer:
        done = host.run("rollout.yml", extra_vars={"lease_wait_s": 1})
        text = error_of(done)
        codes = {"leased"} if "run a of alice works on 'demo'" in text and "demo (not touched)" in text else set()
        return Answer("done" if done.rc == 0 else "stopped", frozenset(codes), text[-600:])

    site.look(run)


def on_other_flags(site: Site) -> None:
    """Real modules: the first of two servers comes to serve, and with another flag than was wanted."""
    host = fleet_of_one(site)
    # Somebody's wrapper, which knows better.
    wrapper = site.directory / "python3"
    wrapper.write_text(f"""#!/bin/sh
case "$*" in *sglang.launch_server*) set -- "$@" --max-running-requests 7;; esac
exec {sys.executable} "$@"
""")
    wrapper.chmod(0o755)
    flags = {"device": "cpu", "max_running_requests": 32}
    host.servers = [
        host.server("one", 31000, gpus=[0], flags=dict(flags), python=str(wrapper), on_failure="leave"),
        host.server("two", 31001, gpus=[1], flags=dict(flags)),
    ]

    def run() -> Answer:
        done = host.run("rollout.yml", extra_vars={"rollout_ramp": "1,1"})
        text = error_of(done)
        begun = (site.host.state_dir / "two" / "current.json").exists()
        codes = {"flags"} if "max-running-requests" in text or "max_running_requests" in text else set()
        verdict = "went on" if begun else "done" if done.rc == 0 else "stopped"
        return Answer(verdict, frozenset(codes), text[-600:])

    site.look(run)


def row(
    name: str, fault: str, verdict: str, scene: t.Callable[[Site], None], *breaks: Patch, codes: tuple[str, ...]
) -> Row:
    return Row(
        f"rollout-{name}", fault, "rollout", (verdict,), scene, breaks, codes=codes, bound_s=BOUND_S, quick=False
    )


LOST_IS_A_FAILURE = Patch(
    "plugins/plugin_utils/going_back.py",
    "    told = [each for each in results if isinstance(each, t.Mapping)]\n",
    "    told: list[t.Any] = []\n",
)
ROUTER_SAYS_YES = Patch(
    "roles/router/tasks/ask.yml", "    - router_fails | bool\n", "    - false\n"
)
BACK_WITHOUT_PROOF = Patch(
    "playbooks/tasks/relaunch_server.yml",
    "        - relaunch_router_out | length > 0\n        - lease_run_id | length > 0\n        - >-\n"
    "          (verify_result.ready | default(false) is true)\n",
    "        - relaunch_router_out | length > 0\n        - lease_run_id | length > 0\n        - >-\n          true\n",
)
SKIPS_THE_FIRST = Patch(
    ROLLOUT, "    problems = []\n    for row in batch:\n", "    problems = []\n    for row in batch[1:]:\n"
)
ANYBODYS_LEASE = Patch(LEASE, "return self.running or not self.expired", "return False")
FLAGS_UNREAD = Patch(
    "plugins/module_utils/sglang/proving.py", "        if flags.differences:\n", "        if False:\n"
)
ONE, TWO, THREE = "gpu01/chat", "gpu02/chat", "gpu03/chat"

ROWS = (
    row(
        "canary-hangs", "the canary hangs in its proof", "stopped", rolls(ONE, faults={ONE: {"proof": "hung"}}),
        NEVER_STOP, codes=(f"{ONE} rolled back", f"{ONE}=old", f"{TWO} not begun"),
    ),
    row(
        "canary-other-flags", "the canary serves with another flag than was wanted", "stopped", on_other_flags,
        FLAGS_UNREAD, codes=("flags",),
    ),
    row(
        "host-unreachable", "a host is gone after its eviction, in the middle of its batch", "stopped",
        rolls(ONE, TWO, THREE, faults={TWO: {"down": "evict"}}), NEVER_STOP,
        codes=(f"{ONE}=new", f"{TWO} failed", f"{THREE}=new", "gpu04/chat not begun", "gpu04/chat=old"),
    ),
    row(
        "lease-lost", "another run has the lease by the time of a start", "stopped",
        rolls(ONE, TWO, THREE, faults={TWO: {"lost": True}}), LOST_IS_A_FAILURE,
        codes=(f"{TWO}=old!", f"{THREE}=new", "gpu04/chat not begun"),
    ),
    row(
        "one-of-a-batch-fails", "the first of two in a batch is not proved, the second is", "stopped",
        rolls(ONE, TWO, THREE, faults={TWO: {"proof": "failed"}}), SKIPS_THE_FIRST,
        codes=(f"{TWO} rolled back", f"{THREE}=new", "gpu04/chat not begun"),
    ),
    row(
        "router-down", "the router of the third host does not answer", "refused",
        rolls(faults={THREE: {"listed": "router east does not answer"}}, routed=True), ROUTER_SAYS_YES,
        codes=(f"{ONE}=old",),
    ),
    row(
        "way-back-fails", "neither the new configuration nor the old one serves", "stopped",
        rolls(ONE, faults={ONE: {"proof": "failed", "old_proof": "hung"}}, routed=True), BACK_WITHOUT_PROOF,
        codes=(f"{ONE} rollback failed", f"{ONE}=old!", f"{ONE} out", f"{TWO} not begun"),
    ),
    row(
        "two-operators", "another operator's run works on the canary", "stopped", beside_another_operator,
        ANYBODYS_LEASE, codes=("leased",),
    ),
)  # fmt: skip
