# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests of drift share: a stand-in server that was launched and proved, its entry in an inventory, and
server_drift on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.harness.modules import run_module
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace, NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.standin import READY_LINE, STANDIN
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

PORT = 30000
KEY = "sk-drift-Secret-1"
ADMIN_KEY = "sk-drift-Admin-Secret-2"
TOKEN = "hf_drift_Secret_3"
SECRETS = (KEY, ADMIN_KEY, TOKEN)
Named = list[tuple[t.Optional[str], str]]
Json = dict[str, t.Any]


class Site:
    """One server in one namespace, with a stand-in and a model of its own, so that both can be changed.

    ``settings``: its entry in the inventory, without secrets. ``module_env``: for a simulated driver.
    """

    name = "main"

    def __init__(self, ns: Namespace, tmp_path: Path, module_env: t.Mapping[str, str] | None = None) -> None:
        self.ns = ns
        self.state = tmp_path / "records"
        self.standin = tmp_path / "standin"
        shutil.copytree(STANDIN, self.standin, ignore=shutil.ignore_patterns("__pycache__"))
        self.model = tmp_path / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text('{"model_type": "llama"}')
        self.module_env = module_env
        self.pid = 0
        self.log = tmp_path / "by-hand.log"
        self.options: Json = {"expected_gpus": 0}
        self.settings: Json = {
            "name": self.name,
            "python": sys.executable,
            "user": "root",
            "device": "cpu",
            "gpus": [],
            "port": PORT,
            "flags": {
                "model": str(self.model),
                "device": "cpu",
                "max_total_tokens": "128k",
                "enable-metrics": True,
            },
            "environment": {"PYTHONPATH": str(self.standin), "NCCL_DEBUG": "INFO"},
        }
        self.secrets: Json = {
            "api_key": KEY,
            "admin_api_key": ADMIN_KEY,
            "secret_environment": {"HF_TOKEN": TOKEN},
        }

    # --- the server ---------------------------------------------------------------------------------------------------

    def launch(self, **faults: str) -> None:
        switches = {f"SGLANG_STANDIN_{name}": value for name, value in faults.items()}
        self.settings["environment"].update(switches)
        # The stand-in reads no 128k, which the real one does; they mean the same.
        flags = {**self.settings["flags"], "max_total_tokens": 128000}
        settings = {**{name: value for name, value in self.settings.items() if name != "device"}, "flags": flags}
        arguments = {"launcher": "detached", "state_dir": str(self.state), **settings, **self.secrets}
        result = run_module("server_launch", arguments, 60, ns=self.ns, env=self.module_env)
        assert not result.failed, result.json
        self.pid = result.json["pid"]

    def proved(self) -> None:
        """As a relaunch leaves it."""
        arguments = {
            "name": self.name,
            "state_dir": str(self.state),
            "api_key": KEY,
            "deadline_s": 90,
            "token_deadline_s": 15,
            "soak_requests": 0,
        }
        result = run_module("server_ready", arguments, 150, ns=self.ns, env=self.module_env)
        assert not result.failed, result.json

    def serves(self) -> None:
        """Without a proof, which knows of no simulated GPUs."""
        log = self.launch_dir / "server.log"
        wait_for("it serves", lambda: READY_LINE in log.read_text(errors="replace"), 90)

    def start_by_hand(self, *words: str, env: t.Mapping[str, str] | None = None) -> NsProcess:
        """As somebody types it on the host."""
        started = self.ns.popen(
            [sys.executable, "-m", "sglang.launch_server", *words],
            {**self.settings["environment"], **(env or {})},
            detached=True,
            output=self.log,
        )
        wait_for("it serves", lambda: READY_LINE in self.log.read_text(errors="replace"), 90)
        self.pid = started.pid
        return started

    def signal(self, pid: int, number: signal.Signals) -> None:
        self.ns.call(lambda: os.kill(pid, number))

    def killed(self) -> None:
        """Its tree is gone, and what a killed server leaves in shared memory too."""
        self.signal(self.pid, signal.SIGKILL)
        wait_for("its tree gone", lambda: not any("sglang" in one for one in self.ns.titles().values()), 20)

    def clear_shm(self) -> None:
        def remove() -> None:
            for name in os.listdir("/dev/shm"):
                os.unlink(f"/dev/shm/{name}")

        self.ns.call(remove)

    def titled(self, title: str) -> int:
        return next(pid for pid, name in self.ns.titles().items() if name.startswith(title))

    # --- its record ---------------------------------------------------------------------------------------------------

    @property
    def record(self) -> Path:
        return self.state / self.name / "current.json"

    @property
    def launch_dir(self) -> Path:
        return Path(json.loads(self.record.read_text())["config"]).parent

    def change(self, file: Path, **changes: t.Any) -> None:
        """A JSON file of the record, as an older or another version would have left it."""
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    # --- the check ----------------------------------------------------------------------------------------------------

    def check(self, changes: t.Mapping[str, t.Any] | None = None, **options: t.Any) -> Json:
        """The module's result for this server, its entry changed so."""
        return self.check_all([{**self.settings, **(changes or {})}], **options)

    def check_all(self, servers: t.Sequence[Json], **options: t.Any) -> Json:
        arguments = {
            "servers": servers,
            "secrets": {self.name: self.secrets},
            "state_dir": str(self.state),
            "health_deadline_s": 15,
            **self.options,
            **options,
        }
        result = run_module("server_drift", arguments, 90, ns=self.ns, env=self.module_env)
        assert not result.failed, result.json
        assert not result.json["changed"]
        for secret in SECRETS:
            assert secret not in json.dumps(result.json)
        return result.json

    def flags(self, **changes: t.Any) -> Json:
        """The flags, some of them changed; None: left away."""
        wanted = {**self.settings["flags"], **changes}
        return {"flags": {name: value for name, value in wanted.items() if value is not None}}

    def environment(self, **changes: str | None) -> Json:
        wanted = {**self.settings["environment"], **changes}
        return {"environment": {name: value for name, value in wanted.items() if value is not None}}


def rows(result: Json) -> list[Json]:
    return [*(row for server in result["servers"] for row in server["drift"]), *result["host"]["drift"]]


def named(result: Json) -> Named:
    """(server, item) of every row, notes too: exactly what the check says."""
    return [(row["server"], row["item"]) for row in rows(result)]


def row_of(result: Json, item: str) -> Json:
    (row,) = [row for row in rows(result) if row["item"] == item]
    return row
