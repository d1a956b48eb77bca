# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Servers over several hosts: the real playbooks, roles and filters with modules that act on a small world.

    pair = Spread(tmp_path, {"gpu01": ["big"], "gpu02": ["big"]})
    pair.fault("gpu02/big", clean="dirty")
    run = pair.play("relaunch")
    assert pair.story() == ["evict gpu01/big", "evict gpu02/big"]

A server named big is one over all hosts that have it. Each node is a file: its launches, whether it serves, who has its
lease. The modules read and change it as the real ones change a host, and write down each call with its time.
"""

from __future__ import annotations

import json
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, run_playbook
from ansible_collections.cleanslate.sglang.tests.integration_ns.rolling import CONNECTION
from ansible_collections.cleanslate.sglang.tests.integration_ns.scripted import (
    MODULES,
    Scripted,
    clean,
    dirty,
    evicted,
    gpu,
    planned,
)

RUN_DEADLINE_S = 480
OLD, NEW = "sha256:" + "0" * 64, "sha256:" + "1" * 64
ADDRESS = "192.0.2.1:5000"
FIRST = "20260131T000000Z-0001"

MODULE = r'''#!/usr/bin/python
# WANT_JSON
import json, os, sys, time

with open(sys.argv[1]) as handle:
    arguments = json.load(handle)
check = bool(arguments.pop("_ansible_check_mode", False))
given = {key: value for key, value in arguments.items() if not key.startswith("_ansible_")}
directory, module, host = "%(directory)s", "%(name)s", os.environ.get("FLEET_HOST", "")
begun = time.time()
with open(directory + "/fleet.json") as handle:
    fleet = json.load(handle)
# A verdict is of a host, and here of its node.
name = given.get("name") or "big"
node = host + "/" + name
path = directory + "/world/" + node.replace("/", "+")
state = {}
if os.path.exists(path):
    with open(path) as handle:
        state = json.load(handle)
fault = fleet["faults"].get(node, {})
back = bool(state and state["launches"] and state["launches"][0]["from_launch"])


def save():
    with open(path + ".new", "w") as handle:
        json.dump(state, handle)
    os.rename(path + ".new", path)


def down(step):
    if fault.get("down") == step:
        open(directory + "/down/" + host, "w").close()


def rows():
    found = []
    for number, each in enumerate(state["launches"]):
        found.append(dict(each, current=number == 0, last_good=each["launch_id"] == state["last_good"], problem=None))
    return found


answer = fleet["answers"].get(module, {})
time.sleep(fault.get(module + "_s", 0))
if module == "server_lease":
    held = given.get("state") == "held" and not check
    answer["lease"] = {"name": name, "run_id": given["run_id"]} if held else None
    if fault.get("lease") and held:
        answer = {"failed": True, "msg": fault["lease"]}
    elif not check:
        state["lease"] = given["run_id"] if held else None
        save()
elif module == "server_plan" and fault.get("plan"):
    answer.update(verdict="denied", findings=[{"id": "x", "severity": "deny", "message": "too large", "remedy": ""}])
elif module == "server_info" and state:
    server = {"name": name, "matches": state["config"] == fleet["new"], "differences": [], "launches": rows()}
    answer["servers"] = [server] if state["serving"] else []
    answer["records"] = [] if state["serving"] else [{"name": name, "launches": rows()}]
elif module == "gpu_evict" and not check:
    down("evict")
    if fault.get("evict"):
        answer = fleet["stuck"]
    elif fault.get("lost"):
        answer = dict(fleet["stuck"], reasons=[{"code": "lease_lost", "message": "the lease is no longer ours"}])
    else:
        state["serving"] = False
        save()
elif module == "clean_state" and (fault.get("clean") or fault.get("back_clean") and back):
    answer = fleet["dirty"]
elif module == "server_launch":
    source = given.get("from_launch")
    config = fleet["old"] if source else fleet["new"]
    answer = {"changed": True, "config_hash": config, "from_launch": source, "launch_id": None,
              "config_changed": config != state.get("config"), "secrets_changed": False,
              "record": {"port": 31000, "gpus": [], "device": None, "user": "root", "from_launch": source}}
    if source and fault.get("broken"):
        answer = {"failed": True, "msg": "its files are gone"}
    elif not check:
        down("launch")
        if fault.get("launch") and not source:
            answer = {"failed": True, "msg": fault["launch"]}
        else:
            launch = "20260201T00000%%dZ-0001" %% len(state["launches"])
            row = {"launch_id": launch, "run_id": given.get("run_id"), "from_launch": source, "verdict": None,
                   "config_hash": config, "startable": True}
            state["launches"].insert(0, row)
            state.update(config=config, serving=False)
            save()
            answer.update(launch_id=launch, pid=9)
elif module == "server_ready":
    down("proof")
    last = state["launches"][0]
    if given.get("last_good") == "now":
        state["last_good"] = last["launch_id"]
        answer = {"ready": True, "verdict": "ready"}
    else:
        bad = fault.get("back_proof") if back else fault.get("proof")
        running = not given.get("record")
        if running:
            bad = None if state["serving"] else "failed"
        else:
            last["verdict"] = bad or "ready"
            if not bad and given.get("last_good", "ready") == "ready":
                state["last_good"] = last["launch_id"]
        state["serving"] = not bad
        answer = {"ready": not bad, "verdict": bad or "ready", "error": bad and "it does not serve (" + bad + ")",
                  "pid": None if bad else 9, "port": 31000, "tokens": [], "seconds": 1.0}
        if bad:
            answer["failed"] = True
    save()
with open(directory + "/calls", "a") as handle:
    key = module + ":" + given["state"] if "state" in given else module
    row = {"key": key, "unit": node, "arguments": given, "check": check, "at": begun, "until": time.time()}
    handle.write(json.dumps(row) + "\n")
if fault.get("cut") == module and not check:
    sys.exit(0)
print(json.dumps(answer))
'''

_WORDS = {
    "gpu_evict": "evict",
    "clean_state": "judge",
    "server_launch": "start",
    "server_ready": "prove",
    "client_hold:held": "hold",
    "client_hold:released": "release",
}


class Spread(Scripted):
    """Hosts whose servers named big are the nodes of one server, in the order of the hosts; all run the old
    configuration, which was proved, and the inventory wants the new one."""

    def __init__(self, directory: Path, servers: t.Mapping[str, t.Sequence[str]]) -> None:
        self.servers = {host: list(names) for host, names in servers.items()}
        self.flags: dict[str, dict[str, t.Any]] = {}
        self.entries: dict[str, dict[str, t.Any]] = {}
        self.host_variables: dict[str, dict[str, t.Any]] = {}
        self.faults: dict[str, dict[str, t.Any]] = {}
        super().__init__(directory)
        for name in ("world", "down"):
            (directory / name).mkdir()
        for node in self.nodes():
            self.put(node)

    def _collection(self) -> None:
        super()._collection()
        target = self.directory / "collections/ansible_collections/cleanslate/sglang/plugins"
        for name in MODULES:
            module = MODULE % {"name": name, "directory": str(self.directory)}
            (target / f"modules/{name}.py").write_text(module)
        (target / "connection").mkdir()
        (target / "connection/fleet.py").write_text(CONNECTION % {"directory": str(self.directory)})

    def nodes(self) -> list[str]:
        return [f"{host}/{name}" for host, names in self.servers.items() for name in names]

    def put(
        self, node: str, config: str = OLD, *, run_id: str | None = "before", verdict: str | None = "ready"
    ) -> None:
        """This node runs with this configuration, started by that run."""
        row = {"launch_id": FIRST, "run_id": run_id, "from_launch": None, "verdict": verdict, "config_hash": config}
        state = {"config": config, "launches": [row], "last_good": FIRST if verdict == "ready" else None}
        self._path(node).write_text(json.dumps({**state, "serving": True, "lease": None}))

    def _path(self, node: str) -> Path:
        return self.directory / "world" / node.replace("/", "+")

    def state(self, node: str) -> dict[str, t.Any]:
        return t.cast("dict[str, t.Any]", json.loads(self._path(node).read_text()))

    def serving(self) -> dict[str, str]:
        """Of each node: new or old, with ! where it does not serve."""
        found = {node: self.state(node) for node in self.nodes()}
        words = {OLD: "old", NEW: "new"}
        return {node: words[state["config"]] + ("" if state["serving"] else "!") for node, state in found.items()}

    def leases(self) -> list[str]:
        """The nodes on which somebody still holds the lease."""
        return [node for node in self.nodes() if self.state(node)["lease"]]

    def fault(self, node: str, **faults: t.Any) -> None:
        """evict, clean, back_clean, launch (message), proof, back_proof (verdict), broken (can't be started again),
        lease (message), lost, plan; down: the step at which the host is gone; cut: the module whose answer never comes;
        MODULE_s: how long it takes."""
        self.faults[node] = faults

    def inventory(self) -> Path:
        hosts = {}
        big = [host for host, names in self.servers.items() if "big" in names]
        for number, (host, names) in enumerate(self.servers.items()):
            servers = []
            for position, name in enumerate(names):
                flags: dict[str, t.Any] = {"model_path": str(self.directory)}
                if name == "big":
                    flags.update(nnodes=len(big), node_rank=big.index(host), dist_init_addr=ADDRESS)
                flags.update(self.flags.get(f"{host}/{name}", {}))
                entry = {"name": name, "port": 31000 + position, "gpus": [position], "python": sys.executable}
                servers.append({**entry, "flags": flags, **self.entries.get(f"{host}/{name}", {})})
            hosts[host] = {
                "ansible_connection": "cleanslate.sglang.fleet",
                "ansible_host": f"192.0.2.{number + 1}",
                "ansible_python_interpreter": sys.executable,
                "sglang_become": False,
                "sglang_task_environment": {"FLEET_HOST": host},
                "sglang_servers": servers,
                **self.host_variables.get(host, {}),
            }
        path = self.directory / "inventory.yml"
        path.write_text(json.dumps({"sglang": {"hosts": hosts}}))
        return path

    def play(
        self,
        playbook: str,
        *arguments: str,
        check: bool = False,
        env: t.Mapping[str, str] | None = None,
        **extra: t.Any,
    ) -> PlaybookRun:
        answers = {
            "gpu_info": {"gpus": [gpu(0), gpu(1)], "problems": []},
            "gpu_evict": evicted("planned" if check else "evicted", "term"),
            "clean_state": clean("container"),
            "server_plan": planned("allowed"),
            "server_info": {"servers": [], "orphans": []},
            "memory_info": {"available_mib": 1},
            "server_lease": {"changed": False, "holder": None, "broken": None, "waited_s": 0.0},
            "client_hold": {"changed": True, "verdict": "held", "clients": [], "held": [], "problems": []},
        }
        fleet = {"answers": answers, "faults": self.faults, "old": OLD, "new": NEW}
        fleet.update(stuck=evicted("failed"), dirty=dirty("container", "held_elsewhere"))
        (self.directory / "fleet.json").write_text(json.dumps(fleet))
        (self.directory / "calls").write_text("")
        return run_playbook(
            f"cleanslate.sglang.{playbook}",
            *arguments,
            scratch=self.directory,
            deadline_s=RUN_DEADLINE_S,
            inventory=self.inventory(),
            extra_vars=extra,
            env={
                "ANSIBLE_COLLECTIONS_PATH": str(self.directory / "collections"),
                "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml",
                "ANSIBLE_FORKS": "10",
                "ANSIBLE_PIPELINING": "1",
                **(env or {}),
            },
            cwd=self.directory,
            check=check,
        )

    def story(self) -> list[str]:
        """What was done, in the order of its begin; an eviction, a start and a proof of a kept launch as `again`."""
        found = []
        for row in sorted(self.rows(), key=lambda row: row["at"]):
            word = _WORDS.get(row["key"])
            if word is None or row["check"] or row["arguments"].get("last_good") == "now":
                continue
            found.append(f"{word} {row['unit']}" + (" again" if row["arguments"].get("from_launch") else ""))
        return found

    def touched(self) -> list[str]:
        """What a refused run must not have done."""
        return [each for each in self.story() if each.split()[0] in ("evict", "start", "hold")]


def errors(run: PlaybookRun) -> list[str]:
    """The errors that ended a host, in their order."""
    assert run.rc == 2, f"rc {run.rc}\n{run.stdout}\n{run.stderr}"
    return [str(task.result["msg"]) for task in run.tasks if task.status == "failed" and not task.ignored]
