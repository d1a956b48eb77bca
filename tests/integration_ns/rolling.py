# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A fleet of several hosts for rollouts: the real playbooks, roles and filters with modules that act on a small world.

    fleet = Fleet(tmp_path, {"gpu01": ["chat"], "gpu02": ["chat"]})
    fleet.fault("gpu02/chat", proof="failed")
    run = fleet.roll()
    assert fleet.started() == ["gpu01/chat", "gpu02/chat", "gpu02/chat from last_good"]

Each server is a file: which configuration it has, whether it serves, what was proved. The modules read and change it as
the real ones change a host, and write down each call. A host that is `down` does not answer any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, playbook_env, run_playbook
from ansible_collections.cleanslate.sglang.tests.integration_ns.scripted import (
    MODULES,
    Scripted,
    clean,
    evicted,
    gpu,
    planned,
)

RUN_DEADLINE_S = 240
OLD, NEW = "sha256:" + "0" * 64, "sha256:" + "1" * 64
KEY = "sk-fleet-secret"

MODULE = r'''#!/usr/bin/python
# WANT_JSON
import json, os, sys, time

with open(sys.argv[1]) as handle:
    arguments = json.load(handle)
check = bool(arguments.pop("_ansible_check_mode", False))
given = {key: value for key, value in arguments.items() if not key.startswith("_ansible_")}
directory, module, host = "%(directory)s", "%(name)s", os.environ.get("FLEET_HOST", "")
with open(directory + "/fleet.json") as handle:
    fleet = json.load(handle)
if module == "router_worker":
    # On the controller, which knows a server by its URL.
    host, name = fleet["urls"][given["workers"][0]["url"]].split("/")
else:
    name = given.get("name", "")
unit = host + "/" + name
path = directory + "/world/" + unit.replace("/", "+")
state = {}
if os.path.exists(path):
    with open(path) as handle:
        state = json.load(handle)
fault = fleet["faults"].get(unit, {})
with open(directory + "/calls", "a") as handle:
    key = module + ":" + given["state"] if module == "router_worker" else module
    row = {"key": key, "unit": unit, "arguments": given, "check": check, "at": time.time()}
    row["serving"] = state.get("serving")
    handle.write(json.dumps(row) + "\n")


def save():
    with open(path + ".new", "w") as handle:
        json.dump(state, handle)
    os.rename(path + ".new", path)


def down():
    open(directory + "/down/" + host, "w").close()


def launches():
    good = state.get("last_good")
    row = {"launch_id": state["launch"], "config_hash": state["config"], "verdict": state["verdict"], "current": True,
           "last_good": state["launch"] == good, "soak": state.get("soak"), "problem": None, "startable": True,
           "run_id": state.get("run_id"), "from_launch": state.get("from_launch")}
    kept = [dict(state["kept"], current=False)] if state["launch"] != good and state.get("kept") else []
    return [row] + kept


def listed():
    names = sorted(os.listdir(directory + "/routed"))
    return [{"id": each, "url": each, "healthy": True, "model_id": "chat"} for each in names]


def router():
    mark = directory + "/routed/" + unit.replace("/", "+")
    entry = [each for each in listed() if directory + "/routed/" + each["id"] == mark]
    before = {"state": "healthy" if entry else "absent", "entries": entry}
    problem = fault.get(given["state"])
    if given["state"] in ("absent", "drained") and not check and not problem and entry:
        os.unlink(mark)
    if given["state"] == "present" and not check and not problem:
        open(mark, "w").close()
    entry = [each for each in listed() if directory + "/routed/" + each["id"] == mark]
    after = {"state": "healthy" if entry else "absent", "entries": entry}
    drained = {"seconds": 0.2, "in_flight_at_start": 4, "in_flight_at_end": 0, "cut": 0, "source": "loads", "note": ""}
    worker = {"url": given["workers"][0]["url"], "before": before, "after": after, "action": "none", "seconds": 0.1}
    row = {"name": "east", "url": "http://router:1", "reachable": True, "error": None, "workers": [worker],
           "listed": listed()}
    verdict = "failed" if problem else given["state"]
    return {"verdict": verdict, "routers": [row], "drained": drained if given["state"] == "drained" else None,
            "hooks": [], "plan": [], "problems": [problem] if problem else [], "seconds": 0.3, "changed": not check}


answer = fleet["answers"].get(module, {})
new = fleet["new"]
if module == "server_lease":
    held = given.get("state") == "held" and not check
    answer["lease"] = {"name": name, "run_id": given["run_id"]} if held else None
    if fault.get("lease") and held:
        answer = {"failed": True, "msg": fault["lease"]}
elif module == "router_worker":
    answer = router()
elif module == "server_plan" and fault.get("plan"):
    finding = {"id": "hicache_too_large", "severity": "deny", "message": "too large", "remedy": ""}
    answer.update(verdict="denied", findings=[finding])
elif module == "server_info" and state:
    matches = state["config"] == new
    row = {"item": "flag:mem-fraction-static", "found": 0.8, "wanted": 0.9}
    server = {"name": name, "matches": matches, "differences": [] if matches else [row], "launches": launches()}
    if state["serving"]:
        answer["servers"] = [server]
    else:
        answer["records"] = [{"name": name, "launches": launches()}]
elif module == "gpu_evict" and not check:
    time.sleep(fault.get("evict_s", 0))
    state["serving"] = False
    save()
    if fault.get("down") == "evict":
        down()
    if fault.get("loses"):
        os.unlink(fault["loses"])
elif module == "server_launch":
    back = given.get("from_launch")
    config = fleet["old"] if back else new
    answer = {"changed": True, "config_hash": config, "from_launch": "first" if back else None, "launch_id": None,
              "config_changed": config != state.get("config"), "secrets_changed": False,
              "record": {"port": 31000, "gpus": [], "device": None, "user": "root"}}
    if fault.get("lost") and not back and not check:
        answer = {"failed": True, "lease_lost": True, "msg": "the lease on 'chat' is no longer ours: run 7 has it"}
    elif back and not state.get("last_good"):
        answer = {"failed": True, "msg": "no launch was ever proved"}
    elif not check:
        if fault.get("down") == "launch":
            down()
        state.setdefault("kept", launches()[0] if state.get("launch") else None)
        state.update(config=config, launch="again" if back else "second", serving=False, verdict=None)
        state.update(run_id=given.get("run_id"), from_launch=back)
        save()
        answer.update(launch_id=state["launch"], pid=9)
elif module == "server_ready" and given.get("last_good") == "now":
    state["last_good"] = state["launch"]
    save()
    answer = {"ready": True, "verdict": "ready", "finished": True}
elif module == "server_ready":
    if fault.get("down") == "proof":
        down()
    bad = fault.get("proof") if state["config"] == new else fault.get("old_proof")
    rate = 50.0 if fault.get("slow") and state["config"] == new else 100.0
    least = given.get("soak_min_tokens_per_s")
    problem = None
    if bad:
        problem = "it does not serve (" + bad + ")"
    elif least is not None and rate < float(least):
        bad, problem = "failed", "the soak is too slow: %%g tokens/s, at least %%s are demanded" %% (rate, least)
    soak = {"requests": 8, "failed": 0, "concurrency": 4, "tokens": 256, "tokens_per_s": rate}
    soak["latency_s"] = {"p50": 1.0}
    if given.get("record"):
        state["verdict"] = bad or "ready"
        if not bad:
            kept = {"requests": 8.0, "concurrency": 4.0, "tokens": 256.0, "tokens_per_s": rate, "latency_p50_s": 1.0}
            state["soak"] = kept
            if given.get("last_good", "ready") == "ready":
                state["last_good"] = state["launch"]
    state["serving"] = not bad
    save()
    answer = {"ready": not bad, "verdict": bad or "ready", "error": problem, "pid": None if bad else 9, "port": 31000,
              "tokens": [], "soak": soak, "seconds": 1.0}
    if bad:
        answer["failed"] = True
print(json.dumps(answer))
'''

CONNECTION = '''
from __future__ import annotations
import os
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection.local import Connection as Local

DOCUMENTATION = """
name: fleet
short_description: A stand-in
description: A local connection to a host that may be down.
author: tests
options:
  fleet_host: {vars: [{name: inventory_hostname}], description: [x], type: string}
"""


class Connection(Local):
    transport = "cleanslate.sglang.fleet"

    def exec_command(self, *arguments, **options):
        if os.path.exists("%(directory)s/down/" + self.get_option("fleet_host")):
            raise AnsibleConnectionFailure("Connection timed out")
        return super().exec_command(*arguments, **options)
'''


class Fleet(Scripted):
    """Hosts with servers that all run the old configuration; the inventory wants the new one."""

    def __init__(self, directory: Path, servers: t.Mapping[str, t.Sequence[str]]) -> None:
        self.servers = {host: list(names) for host, names in servers.items()}
        self.host_variables: dict[str, dict[str, t.Any]] = {host: {} for host in servers}
        self.entries: dict[str, dict[str, t.Any]] = {}
        self.faults: dict[str, dict[str, t.Any]] = {}
        super().__init__(directory)
        for name in ("world", "down", "routed"):
            (directory / name).mkdir()
        for unit in self.units():
            self.put(unit, OLD)
        self.routers: list[dict[str, t.Any]] = []
        self.wide: set[str] = set()

    def _collection(self) -> None:
        super()._collection()
        target = self.directory / "collections/ansible_collections/cleanslate/sglang/plugins"
        for name in (*MODULES, "router_worker"):
            module = MODULE % {"name": name, "directory": str(self.directory)}
            (target / f"modules/{name}.py").write_text(module)
        (target / "connection").mkdir()
        (target / "connection/fleet.py").write_text(CONNECTION % {"directory": str(self.directory)})

    def units(self) -> list[str]:
        return [f"{host}/{name}" for host, names in self.servers.items() for name in names]

    def put(self, unit: str, config: str, **changes: t.Any) -> None:
        """This server runs with this configuration, and was proved."""
        soak = {"requests": 8.0, "concurrency": 4.0, "tokens": 256.0, "tokens_per_s": 100.0, "latency_p50_s": 1.0}
        state = {"config": config, "launch": "first", "last_good": "first", "verdict": "ready", "serving": True}
        state |= {"run_id": "before", "from_launch": None}
        path = self.directory / "world" / unit.replace("/", "+")
        path.write_text(json.dumps({**state, "soak": soak, **changes}))

    def spread(self, name: str) -> None:
        """The servers of this name are the nodes of one server, in the order of the hosts."""
        self.wide.add(name)
        hosts = [host for host, names in self.servers.items() if name in names]
        for rank, host in enumerate(hosts):
            flags = {"nnodes": len(hosts), "node_rank": rank, "dist_init_addr": "192.0.2.1:5000"}
            entry = {"model_path": str(self.directory), "mem_fraction_static": 0.9, **flags}
            self.entries[f"{host}/{name}"] = {"flags": entry}

    def _answers(self, unit: str) -> bool:
        """Whether requests go there: not to the further nodes of one server."""
        host, name = unit.split("/")
        return name not in self.wide or host == next(each for each, names in self.servers.items() if name in names)

    def state(self, unit: str) -> dict[str, t.Any]:
        return t.cast(
            "dict[str, t.Any]", json.loads((self.directory / "world" / unit.replace("/", "+")).read_text())
        )

    def configurations(self) -> dict[str, str]:
        """Of each server: new or old, with ! where it does not serve."""
        found = {unit: self.state(unit) for unit in self.units()}
        words = {OLD: "old", NEW: "new"}
        return {unit: words[state["config"]] + ("" if state["serving"] else "!") for unit, state in found.items()}

    def fault(self, unit: str, **faults: t.Any) -> None:
        """proof, old_proof: a verdict; slow; plan: denied; lease: a message; lost: the lease is another run's at the
        start; down: the step after which it is gone; loses: a file that is gone after the eviction; evict_s: how long
        that takes; drained, present, listed: what the router says against it."""
        self.faults[unit] = faults

    def behind_a_router(self) -> None:
        """All servers are behind one router, which lists them."""
        self.routers = [{"name": "east", "url": "http://router:1", "api_key": KEY}]
        for unit in filter(self._answers, self.units()):
            (self.directory / "routed" / unit.replace("/", "+")).touch()

    def routed(self) -> list[str]:
        """The servers that the router lists."""
        return sorted(path.name.replace("+", "/") for path in (self.directory / "routed").iterdir())

    def story(self) -> list[str]:
        """What was done, in its order: calls that change something."""
        words = {"router_worker:drained": "out", "router_worker:present": "back", "gpu_evict": "evict",
                 "server_launch": "start"}  # fmt: skip
        rows = [row for row in self.rows() if row["key"] in words and not row["check"]]
        return [f"{words[row['key']]} {row['unit']}" for row in rows]

    def mended(self) -> None:
        """No faults any more, and all hosts answer."""
        self.faults.clear()
        for path in (self.directory / "down").iterdir():
            path.unlink()

    def inventory(self) -> Path:
        hosts = {}
        for number, (host, names) in enumerate(self.servers.items()):
            servers = [
                {
                    "name": name,
                    "host": "0.0.0.0",
                    "port": 31000 + position,
                    "gpus": [position],
                    "python": sys.executable,
                    "api_key": KEY,
                    "flags": {"model_path": str(self.directory), "mem_fraction_static": 0.9},
                    **self.entries.get(f"{host}/{name}", {}),
                }
                for position, name in enumerate(names)
            ]
            hosts[host] = {
                "ansible_connection": "cleanslate.sglang.fleet",
                "ansible_host": f"192.0.2.{number + 1}",
                "ansible_python_interpreter": sys.executable,
                "sglang_become": False,
                **({"sglang_routers": self.routers} if self.routers else {}),
                "sglang_task_environment": {"FLEET_HOST": host},
                "sglang_servers": servers,
                **self.host_variables[host],
            }
        path = self.directory / "inventory.yml"
        path.write_text(json.dumps({"sglang": {"hosts": hosts}}))
        return path

    def roll(
        self, *arguments: str, check: bool = False, env: t.Mapping[str, str] | None = None, **extra: t.Any
    ) -> PlaybookRun:
        """Run rollout.yml."""
        self._prepare()
        return run_playbook(
            "cleanslate.sglang.rollout",
            *arguments,
            scratch=self.directory,
            deadline_s=RUN_DEADLINE_S,
            inventory=self.inventory(),
            extra_vars=extra,
            env={**self._environment(), **(env or {})},
            cwd=self.directory,
            check=check,
        )

    def begin(self, ramp: str) -> subprocess.Popen[bytes]:
        """Start rollout.yml and don't wait for it. ``killed`` ends it."""
        self._prepare()
        argv = [str(Path(sys.executable).parent / "ansible-playbook"), "cleanslate.sglang.rollout"]
        argv += ["-i", str(self.inventory()), "-e", f"rollout_ramp={ramp}"]
        env = {**os.environ, **playbook_env(self.directory), **self._environment()}
        with (self.directory / "begun.log").open("wb") as log:
            return subprocess.Popen(
                argv, cwd=self.directory, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _environment(self) -> dict[str, str]:
        return {
            "ANSIBLE_COLLECTIONS_PATH": str(self.directory / "collections"),
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml",
            "ANSIBLE_FORKS": "10",
            "ANSIBLE_PIPELINING": "1",
        }

    def _prepare(self) -> None:
        """What the modules answer, and an empty list of their calls."""
        gone = {"in_flight_before": 3, "in_flight_after": 0, "cut_off": 0}
        answers = {
            "gpu_info": {"gpus": [gpu(0), gpu(1)], "problems": []},
            "gpu_evict": evicted("evicted", "term", drain=gone),
            "clean_state": clean("container"),
            "server_plan": planned("allowed"),
            "server_info": {"servers": [], "orphans": []},
            "memory_info": {"available_mib": 1},
            "server_lease": {"changed": False, "holder": None, "broken": None, "waited_s": 0.0},
            "client_hold": {"changed": True, "verdict": "held", "clients": [], "held": [], "problems": []},
        }
        urls = {
            f"http://192.0.2.{number}:{31000 + position}": f"{host}/{name}"
            for number, (host, names) in enumerate(self.servers.items(), 1)
            for position, name in enumerate(names)
        }
        fleet = {"answers": answers, "faults": self.faults, "old": OLD, "new": NEW, "urls": urls}
        (self.directory / "fleet.json").write_text(json.dumps(fleet))
        (self.directory / "calls").write_text("")

    def touched(self) -> list[str]:
        """The servers that were evicted, in their order."""
        return [row["unit"] for row in self.rows() if row["key"] == "gpu_evict" and not row["check"]]

    def started(self) -> list[str]:
        """The starts in their order."""
        rows = [row for row in self.rows() if row["key"] == "server_launch" and not row["check"]]
        return [row["unit"] + (" again" if row["arguments"].get("from_launch") else "") for row in rows]


def killed(controller: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a controller and all that descends from it: its workers have sessions of their own."""
    controller.send_signal(signal.SIGSTOP)
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {controller.pid}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    controller.wait(20)


def shown(run: PlaybookRun, task: str) -> str:
    """The text that a task of this name showed."""
    found = [each.result["msg"] for each in run.named(task) if "msg" in each.result]
    assert found, f"no {task}\n{run.stdout}\n{run.stderr}"
    return found[-1] if isinstance(found[-1], str) else "\n".join(found[-1])
