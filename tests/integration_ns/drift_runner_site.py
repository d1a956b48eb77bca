# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real runner, playbook and role with a server_drift that answers from a script, as an installed collection.

    fleet = DriftFleet(tmp_path, ns)
    fleet.hosts["gpu01"] = {"answer": answer([server()])}
    done = fleet.run()
    assert (done.rc, fleet.latest()["verdict"]) == (0, "in_sync")

A copy of the collection lies where an installation would. What a host answers: ``answer`` (a result), ``fail`` (a
message), ``write`` (raw output), ``sleep`` (seconds before), ``unreachable`` (nobody listens there).
"""

from __future__ import annotations

import json
import shutil
import sys
import typing as t
from pathlib import Path

import jsonschema
from junitparser import JUnitXml
from prometheus_client.parser import text_string_to_metric_families

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT, Completed
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace, NsProcess

RUN_DEADLINE_S = 240
SCHEMA = json.loads((ROOT / "docs" / "drift.schema.json").read_text())
LINE_SCHEMA = {"$defs": SCHEMA["$defs"], **SCHEMA["$defs"]["history_line"]}
FILES = ("latest.json", "history.jsonl", "metrics.prom", "junit.xml", "index.html")

MODULE = """#!/usr/bin/python
# WANT_JSON
import json, os, sys, time

with open(sys.argv[1]) as handle:
    arguments = json.load(handle)
host = os.path.basename(arguments["state_dir"])
with open("%(directory)s/asked", "a") as handle:
    handle.write(host + "\\n")
with open("%(directory)s/script.json") as handle:
    script = json.load(handle)[host]
time.sleep(script.get("sleep", 0))
if "write" in script:
    print(script["write"])
elif "fail" in script:
    print(json.dumps({"failed": True, "msg": script["fail"]}))
else:
    print(json.dumps({"changed": False, **script["answer"]}))
"""


class DriftFleet:
    """Hosts, an inventory, an installed collection and a directory for reports."""

    def __init__(self, directory: Path, ns: Namespace, scripted: bool = True) -> None:
        self.directory = directory
        self.ns = ns
        self.out = directory / "out"
        self.hosts: dict[str, dict[str, t.Any]] = {}
        self.variables: dict[str, dict[str, t.Any]] = {}
        self.collection = directory / "site" / "ansible_collections" / "cleanslate" / "sglang"
        for name in ("plugins", "roles", "playbooks", "meta", "scripts", "requirements"):
            ignored = shutil.ignore_patterns("__pycache__", "collections")
            shutil.copytree(ROOT / name, self.collection / name, ignore=ignored)
        shutil.copy(ROOT / "galaxy.yml", self.collection)
        if scripted:
            module = MODULE % {"directory": directory}
            (self.collection / "plugins" / "modules" / "server_drift.py").write_text(module)

    def inventory(self) -> Path:
        """Inventory and script, written anew."""
        hosts = {}
        for name, script in self.hosts.items():
            hosts[name] = {
                "ansible_connection": "local",
                "ansible_python_interpreter": sys.executable,
                "sglang_become": False,
                "sglang_state_dir": f"/var/lib/{name}",
                "sglang_servers": [],
                **({"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
                   if script.get("unreachable") else {}),
                **self.variables.get(name, {}),
            }  # fmt: skip
        (self.directory / "script.json").write_text(json.dumps(self.hosts))
        path = self.directory / "inventory.yml"
        path.write_text(json.dumps({"sglang": {"hosts": hosts}}))
        return path

    def argv(self, *arguments: str) -> list[str]:
        script = str(self.collection / "scripts" / "drift.py")
        return [sys.executable, script, "-i", str(self.inventory()), "--out", str(self.out), *arguments]

    def environment(self) -> dict[str, str]:
        """Another version of the collection is on Ansible's path: it must not be the one that runs."""
        home = self.directory / "ansible"
        return {
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            "ANSIBLE_HOME": str(home),
            "ANSIBLE_LOCAL_TEMP": str(home / "local"),
            "ANSIBLE_REMOTE_TEMP": str(home / "remote"),
            "ANSIBLE_INVENTORY_UNPARSED_WARNING": "0",
        }

    def run(self, *arguments: str, env: t.Mapping[str, str] | None = None, cwd: Path | None = None) -> Completed:
        """One check to its end."""
        environment = {**self.environment(), **(env or {})}
        return self.ns.run(self.argv(*arguments), RUN_DEADLINE_S, environment, cwd=cwd or self.directory)

    def start(self, *arguments: str) -> NsProcess:
        """One check, not waited for."""
        output = self.directory / "started.log"
        return self.ns.popen(self.argv(*arguments), self.environment(), cwd=self.directory, output=output)

    def asked(self) -> list[str]:
        """The hosts that the module ran on, in their order."""
        path = self.directory / "asked"
        return path.read_text().split() if path.exists() else []

    def latest(self) -> dict[str, t.Any]:
        """The document, valid by its schema."""
        document = json.loads((self.out / "latest.json").read_bytes())
        jsonschema.Draft202012Validator(SCHEMA).validate(document)
        return t.cast("dict[str, t.Any]", document)

    def host(self, name: str) -> dict[str, t.Any]:
        return next(host for host in self.latest()["hosts"] if host["name"] == name)

    def history(self) -> list[dict[str, t.Any]]:
        """All lines, each valid."""
        raw = (self.out / "history.jsonl").read_bytes()
        assert raw.endswith(b"\n"), raw[-200:]
        lines = [json.loads(line) for line in raw.splitlines()]
        for line in lines:
            jsonschema.Draft202012Validator(LINE_SCHEMA).validate(line)
        return lines

    def metrics(self) -> dict[tuple[str, str], float]:
        """Samples by name and the values of their labels, joined."""
        found = {}
        for family in text_string_to_metric_families((self.out / "metrics.prom").read_text()):
            for sample in family.samples:
                found[(sample.name.removeprefix("cleanslate_drift_"), "/".join(sample.labels.values()))] = sample.value
        return found

    def all_valid(self) -> None:
        """Every file is there and whole, by the parsers of others; nothing else lies about."""
        self.latest()
        self.history()
        assert self.metrics()
        JUnitXml.fromstring((self.out / "junit.xml").read_bytes())
        page = (self.out / "index.html").read_text()
        assert page.startswith("<!DOCTYPE html>") and page.endswith("</html>\n")
        assert sorted(path.name for path in self.out.iterdir() if not path.name.startswith(".")) == sorted(FILES)
        assert not list(self.out.glob(".*.tmp"))
