# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real playbooks, roles and filters with modules that answer from a script: who is asked what, in which order.

    fleet = Scripted(tmp_path)
    fleet.script("gpu_evict@node", {"verdict": "evicted"})
    run = fleet.run("relaunch")
    assert fleet.calls() == ["gpu_evict@inside", ...]

A copy of the collection takes the place of the real one. Each module is a short program that writes down how it was
called and gives the next answer of its script, the last one again and again. Nothing is looked at or signalled.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.harness import tree
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, run_playbook

NODE, CONTAINER, VMID = "pve1", "ct129", 129
UUIDS = ("GPU-aaaa", "GPU-bbbb")
MODULES = (
    "gpu_info",
    "gpu_evict",
    "clean_state",
    "server_launch",
    "server_plan",
    "server_ready",
    "server_info",
    "memory_info",
    "server_lease",
    "client_hold",
)
RUN_DEADLINE_S = 120

# AnsibleModule refuses arguments that its specification doesn't know, so these modules speak Ansible's protocol alone.
MODULE = """#!/usr/bin/python
# WANT_JSON
import json, sys

with open(sys.argv[1]) as handle:
    arguments = json.load(handle)
check = bool(arguments.pop("_ansible_check_mode", False))
given = {key: value for key, value in arguments.items() if not key.startswith("_ansible_")}
where = "node" if "container" in given else "inside"
key = "%(name)s@" + where
directory = "%(directory)s"
with open(directory + "/calls", "a") as handle:
    row = {"key": key, "arguments": given, "check": check}
    handle.write(json.dumps(row) + "\\n")
with open(directory + "/script.json") as handle:
    script = json.load(handle)
with open(directory + "/calls") as handle:
    count = sum(1 for line in handle if json.loads(line)["key"] == key)
answer = dict(script[key][min(count, len(script[key])) - 1])
if answer.pop("echo", False):
    # The lease of whoever asks for it.
    held = given.get("state") == "held" and not check
    answer["lease"] = {"name": given["name"], "run_id": given["run_id"]} if held else None
if "kill" in answer:
    # The connection is gone: no answer at all.
    sys.exit(0)
print(json.dumps(answer))
"""

# Takes the place of community.proxmox's plugin: it connects locally and writes down with which options.
PCT_PLUGIN = '''
from __future__ import annotations
import json
from ansible.plugins.connection.local import Connection as Local

DOCUMENTATION = """
name: proxmox_pct_remote
short_description: A stand-in
description: A stand-in.
author: tests
options:
  remote_addr: {vars: [{name: inventory_hostname}, {name: ansible_host}], description: [x], type: string}
  port: {vars: [{name: ansible_port}], type: int, default: 22, description: [x]}
  remote_user: {vars: [{name: ansible_user}], type: string, description: [x]}
  private_key_file:
    vars: [{name: ansible_private_key_file}, {name: ansible_ssh_private_key_file}]
    type: string
    description: [x]
  vmid: {vars: [{name: proxmox_vmid}], type: int, description: [x]}
"""


class Connection(Local):
    transport = "community.proxmox.proxmox_pct_remote"
    has_pipelining = False

    def _connect(self):
        names = ("remote_addr", "port", "remote_user", "private_key_file", "vmid")
        with open("%(directory)s/connections", "a") as handle:
            handle.write(json.dumps({name: self.get_option(name) for name in names}) + chr(10))
        return super()._connect()
'''


def _told(row: dict[str, t.Any]) -> str:
    """A call in short: `server_launch from last_good (check)`."""
    arguments = row["arguments"]
    words = [row["key"].removesuffix("@inside")]
    if row["key"].startswith(("server_lease", "client_hold")):
        words.append(str(arguments.get("state", "held")))
    if arguments.get("from_launch"):
        words.append(f"from {arguments['from_launch']}")
    return " ".join(words) + (" (check)" if row["check"] else "")


def gpu(index: int) -> dict[str, t.Any]:
    return {"index": index, "uuid": UUIDS[index], "bus_id": f"00000000:{index + 1:02X}:00.0", "name": "Scripted"}


def clean(vantage: str, **changes: t.Any) -> dict[str, t.Any]:
    """A clean verdict as the module gives it."""
    facts = {"gpus": [gpu(0)], "available_mib": 90_000 if vantage == "host" else 80_000}
    return {
        "verdict": "clean",
        "summary": f"clean, seen from the {vantage}",
        "reasons": [],
        "warnings_found": [],
        "vantage": vantage,
        "simulated": False,
        "samples_taken": [],
        "facts_seen": facts,
        "seconds": 1.0,
        **changes,
    }


def dirty(vantage: str, code: str, means: str = "dirty") -> dict[str, t.Any]:
    """A verdict with one reason about GPU 0."""
    subject = "GPU 0 (00000000:01:00.0)"
    reason = {"code": code, "message": f"{subject}: {code}", "subject": subject, "severity": "required", "means": means}
    return clean(vantage, verdict=means, summary=f"{means}: {code}", reasons=[reason])


def evicted(verdict: str, *rungs: str, **changes: t.Any) -> dict[str, t.Any]:
    """An eviction's result as the module gives it."""
    code = {"failed": "still_there", "unknown": "scan_incomplete"}.get(verdict)
    reasons = [{"code": code, "message": f"somebody stayed ({code})", "severity": "required"}] if code else []
    return {
        "verdict": verdict,
        "changed": bool(rungs),
        "plan": [{"rung": rung, "targets": ["pid 7"]} for rung in rungs] if verdict == "planned" else [],
        "rungs": [
            {"rung": rung, "asked": [{"pid": 7}], "left": [7], "stayed": [], "seconds": 0.2, "note": ""}
            for rung in rungs
        ],
        "before": [{**gpu(0), "used_mib": 20_000, "holders": []}],
        "after": [{**gpu(0), "used_mib": 0, "holders": []}],
        "reasons": reasons,
        "seconds": 0.5,
        **changes,
    }


def planned(verdict: str, *findings: dict[str, t.Any], **changes: t.Any) -> dict[str, t.Any]:
    """A plan's result as the module gives it."""
    return {
        "verdict": verdict,
        "summary": verdict,
        "findings": list(findings),
        "budget": {"gpu": [], "host": []},
        "sglang_version": "0.5.15",
        "seconds": 0.4,
        **changes,
    }


def kept(launch_id: str, config_hash: str = "sha256:bb", **changes: t.Any) -> dict[str, t.Any]:
    """What server_launch says in check mode of a kept launch."""
    record: dict[str, t.Any] = {"launch_id": None, "port": 31000, "gpus": [UUIDS[0]], "device": None, "user": "root"}
    return {
        "changed": True,
        "launch_id": None,
        "pid": None,
        "config_hash": config_hash,
        "from_launch": launch_id,
        "record": {**record, **changes},
    }


def launched(launch_id: str, config_hash: str = "sha256:aa", **changes: t.Any) -> dict[str, t.Any]:
    """A start as the module gives it."""
    return {"changed": True, "launch_id": launch_id, "pid": 9, "config_hash": config_hash, **changes}


def unproved(verdict: str = "failed", error: str = "no such model", **changes: t.Any) -> dict[str, t.Any]:
    """A start that does not serve."""
    return {"failed": True, "ready": False, "verdict": verdict, "error": error, "pid": None, "log_tail": [], **changes}


class Scripted:
    """A container and its node, both by local connections, and the scripts of their modules."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.variables: dict[str, t.Any] = {"sglang_proxmox_host": NODE, "sglang_vmid": VMID}
        self.node_variables: dict[str, t.Any] = {}
        self.server: dict[str, t.Any] = {
            "name": "chat",
            "port": 31000,
            "gpus": [0],
            "python": sys.executable,
            "flags": {"model_path": str(directory)},
        }
        gpus = {"gpus": [gpu(0), gpu(1)], "problems": []}
        # The container is this machine as well as its node, so its init is in the namespace of everybody here.
        seen = {**gpus, "container": {"vmid": str(VMID), "state": "running", "init_pid": os.getpid(), "problems": []}}
        ready = {"ready": True, "verdict": "ready", "pid": 9, "port": 31000, "tokens": []}
        self.scripts: dict[str, list[dict[str, t.Any]]] = {
            "gpu_info@inside": [gpus],
            "gpu_info@node": [seen],
            "gpu_evict@inside": [evicted("evicted", "term")],
            "gpu_evict@node": [evicted("evicted", "kill")],
            "clean_state@inside": [clean("container")],
            "clean_state@node": [clean("host")],
            "server_launch@inside": [{"changed": True, "config_hash": "sha256:aa", "launch_id": "one", "pid": 9}],
            "server_plan@inside": [planned("allowed")],
            "server_ready@inside": [ready],
            "server_info@inside": [{"servers": [], "orphans": []}],
            "memory_info@inside": [{"available_mib": 1}],
            "server_lease@inside": [{"changed": False, "echo": True, "holder": None, "broken": None, "waited_s": 0.0}],
            "client_hold@inside": [{"changed": True, "verdict": "held", "clients": [], "held": [], "problems": []}],
        }
        self._collection()

    def _collection(self) -> None:
        target = self.directory / "collections/ansible_collections/cleanslate/sglang"
        for name in ("roles", "plugins/filter", "plugins/plugin_utils", "plugins/module_utils", "meta"):
            shutil.copytree(tree.root() / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        playbooks = tree.root() / "playbooks"
        shutil.copytree(playbooks, target / "playbooks", ignore=shutil.ignore_patterns("collections"))
        shutil.copy(tree.root() / "galaxy.yml", target)
        (target / "plugins/modules").mkdir()
        for name in MODULES:
            module = MODULE % {"name": name, "directory": str(self.directory)}
            (target / f"plugins/modules/{name}.py").write_text(module)

    def pct_plugin(self, broken: str = "") -> None:
        """The controller has a stand-in of community.proxmox's connection plugin; ``broken``: why it can't connect."""
        target = self.directory / "collections/ansible_collections/community/proxmox/plugins/connection"
        target.mkdir(parents=True)
        source = PCT_PLUGIN % {"directory": str(self.directory)}
        if broken:
            source = source.replace("import json", "import json\nfrom ansible.errors import AnsibleConnectionFailure")
            source = source.replace("return super()._connect()", f"raise AnsibleConnectionFailure({broken!r})")
        (target / "proxmox_pct_remote.py").write_text(source)

    def connections(self) -> list[dict[str, t.Any]]:
        """The options of every connection by that plugin."""
        path = self.directory / "connections"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def script(self, key: str, *answers: dict[str, t.Any]) -> None:
        """The answers of MODULE@inside or MODULE@node, one after another."""
        self.scripts[key] = list(answers)

    @staticmethod
    def ssh_to_nowhere() -> dict[str, t.Any]:
        """Variables of a host that does not answer by ssh."""
        return {
            "ansible_connection": "ssh",
            "ansible_host": "127.0.0.1",
            "ansible_port": 1,
            "ansible_ssh_common_args": "-o ConnectTimeout=5 -o BatchMode=yes",
        }

    def unreachable(self) -> None:
        """The container does not answer by ssh."""
        self.variables.update(self.ssh_to_nowhere())

    def pct(self, body: str) -> None:
        """The node's pct is this shell script."""
        path = self.directory / "pct"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        self.variables["sglang_host_environment"] = {"PATH": f"{self.directory}:/usr/bin:/bin"}

    def run(
        self, playbook: str, *, check: bool = False, env: t.Mapping[str, str] | None = None, **extra: t.Any
    ) -> PlaybookRun:
        local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        container = {
            **local,
            "sglang_become": False,
            "sglang_host_become": False,
            "sglang_servers": [self.server],
            **self.variables,
        }
        node = {**local, **self.node_variables}
        inventory = self.directory / "inventory.yml"
        groups = {"sglang": {"hosts": {CONTAINER: container}}, "proxmox": {"hosts": {NODE: node}}}
        inventory.write_text(json.dumps({"all": {"children": groups}}))
        (self.directory / "script.json").write_text(json.dumps(self.scripts))
        (self.directory / "calls").write_text("")
        paths = f"{self.directory / 'collections'}"
        return run_playbook(
            f"cleanslate.sglang.{playbook}",
            scratch=self.directory,
            deadline_s=RUN_DEADLINE_S,
            inventory=inventory,
            extra_vars=extra,
            env={"ANSIBLE_COLLECTIONS_PATH": paths, "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml", **(env or {})},
            cwd=self.directory,
            check=check,
        )

    def rows(self) -> list[dict[str, t.Any]]:
        """Every call of a module: key, arguments, check."""
        return [json.loads(line) for line in (self.directory / "calls").read_text().splitlines()]

    def calls(self) -> list[str]:
        """The calls after the preflight's, in their order, without those for the lease."""
        keys = [row["key"] for row in self.rows() if not row["key"].startswith("server_lease")]
        first = next(
            (number for number, key in enumerate(keys) if key.startswith(("gpu_evict", "clean_state"))), len(keys)
        )
        return keys[first:]

    def whole(self) -> list[str]:
        """The calls from the lease on, each with what tells it from others of its module."""
        rows = self.rows()
        keys = [row["key"] for row in rows]
        start = keys.index("server_lease@inside") if "server_lease@inside" in keys else len(keys)
        return [_told(row) for row in rows[start:]]

    def arguments(self, key: str, number: int = -1) -> dict[str, t.Any]:
        """The arguments of one call of a module."""
        return t.cast("dict[str, t.Any]", [row["arguments"] for row in self.rows() if row["key"] == key][number])
