# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A changed flag rolled out over six hosts by ssh, behind the real router, while clients send all the time.

Each host has its own pids, files, network and sshd (light.py). Nobody sends a request twice: the router runs with
--disable-retries, the clients try once, and a stream that is cut short counts as failed. A server is away from its
router while its long streams (over 20 s) are answered to the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness import router as real_router
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.namespace import NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, playbook_env, read_events
from ansible_collections.cleanslate.sglang.tests.harness.router import RouterProcess, start_router
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import PlaybookHost
from ansible_collections.cleanslate.sglang.tests.integration_ns.routed import ROUTER_PORT, Load, start_load
from ansible_collections.cleanslate.sglang.tests.lab.light import STATE_DIR, LightNetwork, why_not

REASON = why_not() or real_router.why_not()
pytestmark = [
    pytest.mark.lab,
    pytest.mark.ns,
    pytest.mark.slow,
    pytest.mark.long(330),
    pytest.mark.timeout(1500),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
NAMES = tuple(f"gpu{number:02}" for number in range(1, 7))
PORT = 30000
TOKEN_S = 0.25
# 22.5 s each; so many that every server has some at any moment.
LONG = ("--long", "36", "--long-tokens", "90")
SHORT = ("--short", "6", "--short-tokens", "2", "--plain", "6", "--plain-tokens", "2")
RAMP = "1,5"
ROLLOUT_DEADLINE_S = 600


@dataclasses.dataclass(frozen=True)
class Running:
    """A rollout under way, with its files in ``kept``."""

    process: NsProcess
    kept: Path

    def end(self) -> PlaybookRun:
        rc = self.process.wait(ROLLOUT_DEADLINE_S)
        return PlaybookRun(rc, (self.kept / "output").read_text(), "", read_events(self.kept / "events"))

    def kill(self) -> None:
        """The controller and what it started here, at once: nobody cleans anything up."""
        ns = self.process.ns
        pids = [pid for pid, title in ns.titles().items() if "ansible-playbook" in title]
        ns.run(["kill", "-KILL", *map(str, pids)], 10).check()
        wait_for("the controller is gone", lambda: not set(pids) & {pid for pid, _ticks in ns.living()}, 20)


class Fleet:
    """Six hosts with a server each, the router in the centre, and the flags that the inventory wants."""

    def __init__(self, network: LightNetwork) -> None:
        self.network = network
        self.ns = network.centre
        self.directory = network.directory / "centre"
        self.hosts = {name: network.host(name) for name in NAMES}
        # The stand-in's settings and the doubled GPUs, which show on every host.
        self.kit = PlaybookHost(network.shared)
        self.kit.follow_schedulers()
        self.flags: dict[str, t.Any] = {"mem_fraction_static": 0.5}
        self._changes = itertools.count(1)
        self._runs = itertools.count(1)
        # It looks after its workers as seldom as by default: a server that is stopped is not noticed in time.
        self.router: RouterProcess = start_router(self.ns, ROUTER_PORT, health=())

    def change(self) -> None:
        """Another flag is wanted of every server."""
        self.flags["mem_fraction_static"] = 0.5 + next(self._changes) / 100

    def inventory(self, routed: bool = True) -> Path:
        hosts = {}
        for name, host in self.hosts.items():
            server = self.kit.server("chat", PORT, flags=dict(self.flags), faults={"TOKEN_S": str(TOKEN_S)}, gpus=[0])
            server |= {"host": host.address, "soak": {"requests": 2, "tokens": 4}, "drain": {"deadline_s": 60}}
            hosts[name] = {
                **self.network.variables(host),
                "ansible_python_interpreter": sys.executable,
                "sglang_allow_simulated": True,
                "sglang_expected_gpus": 2,
                "sglang_task_environment": self.kit.nvml.env(),
                "sglang_servers": [server],
                **({"sglang_routers": [{"name": "front", "url": self.router.url}]} if routed else {}),
            }
        path = self.directory / "inventory.json"
        path.write_text(json.dumps({"all": {"children": {"sglang": {"hosts": hosts}}}}))
        return path

    @property
    def env(self) -> dict[str, str]:
        return {**LightNetwork.ansible_env(), "ANSIBLE_FORKS": str(len(NAMES))}

    def roll(self, ramp: str, routed: bool = True, **extra: t.Any) -> PlaybookRun:
        return self.begin(ramp, routed, **extra).end()

    def begin(self, ramp: str, routed: bool = True, **extra: t.Any) -> Running:
        """Start a rollout. How fast a busy machine is is no subject here."""
        kept = self.directory / f"run.{next(self._runs)}"
        kept.mkdir()
        extra_vars = {"rollout_ramp": ramp, "rollout_min_throughput": 0, "rollout_max_latency": 0, **extra}
        (kept / "vars.json").write_text(json.dumps(extra_vars))
        argv = [str(Path(sys.executable).parent / "ansible-playbook"), str(ROOT / "playbooks" / "rollout.yml")]
        argv += ["-i", str(self.inventory(routed)), "-e", f"@{kept}/vars.json"]
        env = {**playbook_env(self.directory), **self.env, "HARNESS_EVENTS": str(kept / "events")}
        # In a session of its own: killed as a whole, as with its terminal.
        process = self.ns.popen(["setsid", "--wait", *argv], env, output=kept / "output")
        return Running(process, kept)

    def load(self, name: str) -> Load:
        return start_load(self.ns, self.router, name, *LONG, *SHORT)

    def launches(self) -> dict[str, str]:
        """Of each host the launch that is current."""
        paths = {name: host.path(f"{STATE_DIR}/chat/current.json") for name, host in self.hosts.items()}
        return {name: str(json.loads(path.read_text())["launch_id"]) for name, path in paths.items()}

    def url(self, name: str) -> str:
        return f"http://{self.hosts[name].address}:{PORT}"

    def healthy(self) -> set[str]:
        """The hosts whose server the router lists and calls healthy."""
        states = self.router.states()
        return {name for name in NAMES if states.get(self.url(name))}

    def leader(self, name: str) -> set[int]:
        """The pids of the server's first process, inside."""
        titles = self.hosts[name].ns.titles()
        return {pid for pid, title in titles.items() if "-m sglang.launch_server" in title}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> t.Iterator[Fleet]:
    with LightNetwork(tmp_path_factory.mktemp("six")) as network:
        yield Fleet(network)


@pytest.fixture
def fleet(made: Fleet) -> Fleet:
    """Everybody serves as wanted and is in the router, also after a test that failed."""
    if made.healthy() != set(NAMES):
        made.roll("100%", router_leave_healthy=0, lease_wait_s=180).check()
    assert made.healthy() == set(NAMES)
    made.change()
    return made


def rows_of(kept: Path) -> dict[str, dict[str, t.Any]]:
    """Of each host its row in the one report in ``kept``."""
    (path,) = kept.glob("*.json")
    return {row["host"]: row for row in json.loads(path.read_text())["servers"]}


def last_error(run: PlaybookRun) -> str:
    assert run.rc == 2, f"rc {run.rc}\n{run.stdout}\n{run.stderr}"
    return [str(task.result["msg"]) for task in run.tasks if task.status == "failed" and not task.ignored][-1]


def nobody_was_cut(report: dict[str, t.Any], least: int) -> None:
    print(report)
    assert report["failed"] == 0, report
    assert sum(report["answered"].values()) > least, report
    assert report["longest_s"] > 20, report


def test_a_changed_flag_without_one_failed_request(fleet: Fleet) -> None:
    before = fleet.launches()
    load = fleet.load("kind")
    kept = fleet.directory / "kind"
    run = fleet.roll(RAMP, rollout_report_dir=str(kept))
    report = load.end()
    run.check()
    nobody_was_cut(report, 1500)
    assert report["answered"]["long"] >= 36, report
    assert not set(before.values()) & set(fleet.launches().values())
    assert fleet.healthy() == set(NAMES)
    rows = rows_of(kept)
    assert {name: (row["state"], row["batch"]) for name, row in rows.items()} == {
        name: ("changed", 1 if name == "gpu01" else 2) for name in NAMES
    }
    # No short request takes that long: each was left with long streams in flight.
    drained = [row["router"]["out"]["drained"] for row in rows.values()]
    assert all(each["cut"] == 0 and each["seconds"] > 3 for each in drained), drained


def test_the_same_without_its_router_being_asked_fails_requests(fleet: Fleet) -> None:
    """The test above is able to fail; two of the servers are enough for that."""
    load = fleet.load("rude")
    fleet.roll("1", routed=False, target="gpu01,gpu02").check()
    report = load.end()
    print(report)
    assert report["failed"] > 0, report
    assert fleet.healthy() == set(NAMES)


def test_after_a_killed_controller_and_after_a_lost_host_the_next_run_goes_on(fleet: Fleet) -> None:
    """Under load, without a failed request, and nobody is left out of the router."""
    first = fleet.launches()
    load = fleet.load("broken")
    the_controller_is_killed(fleet, first)
    load.goes_on(100)

    lost = fleet.hosts["gpu02"]
    kept = fleet.directory / "lost"
    old = fleet.leader("gpu02")
    running = fleet.begin("1,2,3", rollout_report_dir=str(kept), lease_wait_s=180)
    wait_for("gpu02 is being changed", lambda: not old & fleet.leader("gpu02"), ROLLOUT_DEADLINE_S)
    lost.lose()
    error = last_error(running.end())
    middle = fleet.launches()
    the_ramp_stopped_at_gpu02(error, rows_of(kept), first, middle)
    assert fleet.healthy() == set(NAMES) - {"gpu02"}

    lost.find()
    fleet.network.wait_answers(lost)
    fleet.roll("4", lease_wait_s=180).check()
    nobody_was_cut(load.end(), 1000)
    last = fleet.launches()
    assert not set(first.values()) & set(last.values())
    assert (last["gpu01"], last["gpu03"]) == (middle["gpu01"], middle["gpu03"]), "what was done was done again"
    assert fleet.healthy() == set(NAMES)


def the_controller_is_killed(fleet: Fleet, before: dict[str, str]) -> None:
    """While the canary is evicted and out of the router. The others are untouched."""
    old = fleet.leader("gpu01")
    running = fleet.begin(RAMP)
    wait_for("the canary is being changed", lambda: not old & fleet.leader("gpu01"), ROLLOUT_DEADLINE_S)
    running.kill()
    assert fleet.healthy() == set(NAMES) - {"gpu01"}
    now = fleet.launches()
    assert {name for name in NAMES if now[name] == before[name]} >= set(NAMES) - {"gpu01"}


def the_ramp_stopped_at_gpu02(
    error: str, rows: dict[str, dict[str, t.Any]], before: dict[str, str], now: dict[str, str]
) -> None:
    state = rows["gpu02"]["state"]
    assert state in ("failed", "left as it is"), rows["gpu02"]
    assert f"gpu02/chat ({state})" in error, error
    assert "not begun: gpu04/chat, gpu05/chat, gpu06/chat" in error, error
    assert [rows[name]["state"] for name in NAMES if name != "gpu02"] == ["changed"] * 2 + ["not begun"] * 3
    untouched = {name for name in NAMES if name != "gpu02" and now[name] == before[name]}
    assert untouched == {"gpu04", "gpu05", "gpu06"}
