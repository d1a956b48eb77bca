# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A changed flag rolled out over real processes behind the real router, while clients send: no request fails.

Three hosts of an inventory share one namespace, each with a state directory and a stand-in server of its own. Nobody
sends a request twice: the router runs with --disable-retries, and the clients try once.
"""

from __future__ import annotations

import json
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, playbook_env, run_playbook
from ansible_collections.cleanslate.sglang.tests.harness.router import RouterProcess, start_router, why_not
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import PlaybookHost

from .routed import ROUTER_PORT, WORKER_PORTS, start_load, url_of

pytestmark = [
    pytest.mark.ns,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
LONG = ("--long-tokens", "1100")  # 22 s
PORTS = dict(zip(("gpu01", "gpu02", "gpu03"), WORKER_PORTS))
ROLLOUT_DEADLINE_S = 900


class Site:
    """The hosts, their router, and the flags that the inventory wants."""

    def __init__(self, directory: Path, ns: Namespace) -> None:
        self.ns = ns
        self.directory = directory
        self.host = PlaybookHost(directory, ns)
        self.flags: dict[str, t.Any] = {}
        # Looked after as seldom as by default: a server that ends well, within seconds, is not noticed in time.
        self.router: RouterProcess = start_router(ns, ROUTER_PORT, health=())

    def inventory(self, routed: bool = True) -> Path:
        hosts = {}
        for name, port in PORTS.items():
            flags = {"device": "cpu", **self.flags}
            server = self.host.server("chat", port, flags=flags, faults={"TOKEN_S": "0.02"}, device="cpu")
            server |= {"worker_url": url_of(port), "soak": {"requests": 2, "tokens": 8}}
            server |= {"drain": {"deadline_s": 60}} if routed else {}
            hosts[name] = {
                "ansible_connection": "local",
                "ansible_python_interpreter": sys.executable,
                "sglang_become": False,
                "sglang_state_dir": str(self.directory / "state" / name),
                "sglang_task_environment": self.host.nvml.env(),
                "sglang_servers": [server],
                **({"sglang_routers": [{"url": self.router.url}]} if routed else {}),
            }
        path = self.directory / "inventory.json"
        path.write_text(json.dumps({"sglang": {"hosts": hosts}}))
        return path

    def roll(self, routed: bool = True, **extra: t.Any) -> PlaybookRun:
        return run_playbook(
            ROOT / "playbooks" / "rollout.yml",
            scratch=self.directory,
            deadline_s=ROLLOUT_DEADLINE_S,
            inventory=self.inventory(routed),
            extra_vars={"rollout_min_throughput": 0, "rollout_max_latency": 0, **extra},
            env={"ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml", "ANSIBLE_PIPELINING": "1"},
            ns=self.ns,
        )

    def launches(self) -> dict[str, str]:
        """Of each host the launch that is current."""
        found = {}
        for name in PORTS:
            record = json.loads((self.directory / "state" / name / "chat" / "current.json").read_text())
            found[name] = str(record["launch_id"])
        return found

    def everybody_is_back(self) -> bool:
        return self.router.states() == {url_of(port): True for port in PORTS.values()}


@pytest.fixture
def site(ns: Namespace, tmp_path: Path) -> Site:
    """All servers run with the first flags and are behind the router."""
    site = Site(tmp_path, ns)
    site.roll(rollout_ramp="100%", router_leave_healthy=0).check()
    assert site.everybody_is_back()
    return site


def test_a_changed_flag_without_one_failed_request(site: Site) -> None:
    before = site.launches()
    load = start_load(site.ns, site.router, "load", *LONG)
    site.flags = {"mem_fraction_static": 0.7}
    kept = site.directory / "kept"
    run = site.roll(rollout_ramp="1", rollout_report_dir=str(kept))
    report = load.end()
    print(report)
    run.check()
    assert report["failed"] == 0, report
    assert sum(report["answered"].values()) > 500 and report["answered"]["long"] >= 4, report
    assert report["longest_s"] > 20, report
    assert not set(before.values()) & set(site.launches().values())
    assert site.everybody_is_back()
    rows = json.loads(next(kept.glob("*.json")).read_text())["servers"]
    assert [row["state"] for row in rows] == ["changed"] * 3
    drained = [row["router"]["out"]["drained"] for row in rows]
    assert all(each["cut"] == 0 for each in drained) and any(each["seconds"] > 5 for each in drained), drained


def test_without_its_router_being_asked_requests_fail(site: Site) -> None:
    """The test above is able to fail: of the same change to a single server its clients notice."""
    load = start_load(site.ns, site.router, "rude", *LONG)
    site.flags = {"mem_fraction_static": 0.7}
    site.roll(routed=False, target="gpu01").check()
    report = load.end()
    print(report)
    assert report["failed"] > 0, report


def test_a_controller_that_is_killed_leaves_nobody_out(site: Site) -> None:
    """Killed while the canary is out of the router: the others serve, and the next run puts everything right."""
    site.flags = {"mem_fraction_static": 0.7}
    argv = [str(Path(sys.executable).parent / "ansible-playbook"), str(ROOT / "playbooks" / "rollout.yml")]
    argv += ["-i", str(site.inventory()), "-e", "rollout_ramp=1"]
    before = site.launches()
    controller = site.ns.popen(argv, playbook_env(site.directory), detached=True, output=site.directory / "killed.log")
    wait_for("the canary is out", lambda: url_of(PORTS["gpu01"]) not in site.router.states(), 240)
    site.ns.run(["sh", "-c", f"kill -KILL -{controller.pid}"], 10).check()
    wait_for("the controller is gone", lambda: controller.pid not in site.ns.pids(), 20)
    assert {url: healthy for url, healthy in site.router.states().items() if healthy} == {
        url_of(PORTS["gpu02"]): True, url_of(PORTS["gpu03"]): True,
    }  # fmt: skip
    assert (site.launches()["gpu02"], site.launches()["gpu03"]) == (before["gpu02"], before["gpu03"])
    site.roll(rollout_ramp="1,100%", router_leave_healthy=0, lease_wait_s=180).check()
    assert site.everybody_is_back()
    assert not set(before.values()) & set(site.launches().values())
