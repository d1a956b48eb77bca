# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real SGLang of `make engine` on the CPU, through our real modules, in a namespace of its own.

    server = RealServer(ns, tmp_path)
    server.start(flags={"reasoning_parser": "kimi_k2"})
    assert server.ready()["verdict"] == "ready"

Whatever a test times is timed from outside of the modules, by looks at the namespace's /proc.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import time
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.scripts.bootstrap import cache_dir
from ansible_collections.cleanslate.sglang.tests.harness.modules import run_module
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

PORT = 31000
READY_LINE = "The server is fired up and ready to roll!"
# A start takes 15 s on an idle machine with two cores, and several times that on a busy one.
START_DEADLINE_S = 400.0  # on a machine that does other things too
# A net above every deadline of the module.
MODULE_DEADLINE_S = 280.0
# Two ranks of one machine need cores of their own, else SGLang refuses to start. Compiled kernels would only cost time.
BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}
SHM_MIB = 256
SPAWNED = "multiprocessing.spawn"
SCHEDULER = "sglang::scheduler"


def engine_python() -> Path:
    return cache_dir() / "engine" / "bin" / "python"


def model_path() -> Path:
    return cache_dir() / "tiny-model"


def why_no_engine() -> str | None:
    """Why the real SGLang can't be used here, or None."""
    for name in ("engine", "tiny-model"):
        if not (cache_dir() / name / ".complete").exists():
            return f"no {name} in {cache_dir()}: run `make engine`"
    return None


def cpu_flags(**changes: t.Any) -> dict[str, t.Any]:
    """Flags with which SGLang serves the tiny model without a GPU."""
    return {
        "model_path": str(model_path()),
        "load_format": "dummy",
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 4096,
        **changes,
    }


def cpu_environment(**changes: str) -> dict[str, str]:
    return {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", **changes}


@dataclasses.dataclass(frozen=True)
class Timed:
    """What server_ready said, and when it had said it (time.monotonic)."""

    result: dict[str, t.Any]
    ended: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """An HTTP answer of the server; status 0 where none came."""

    status: int
    body: str

    @property
    def json(self) -> t.Any:
        return json.loads(self.body)


class RealServer:
    """One server by its name in one namespace. ``directory`` keeps its state."""

    def __init__(self, ns: Namespace, directory: Path, name: str = "main", port: int = PORT) -> None:
        self.ns = ns
        self.state = directory / "state"
        self.name = name
        self.port = port
        self.pid = 0
        self.launch_id = ""

    # --- our modules --------------------------------------------------------------------------------------------------

    def launch(
        self,
        *,
        flags: t.Mapping[str, t.Any] | None = None,
        environment: t.Mapping[str, str] | None = None,
        **more: t.Any,
    ) -> dict[str, t.Any]:
        """server_launch's result, also where it failed."""
        arguments = {
            "name": self.name,
            "python": str(engine_python()),
            "user": "root",
            "launcher": "detached",
            "state_dir": str(self.state),
            "port": self.port,
            "flags": cpu_flags(**(flags or {})),
            "environment": cpu_environment(**(environment or {})),
            **more,
        }
        return run_module("server_launch", arguments, 60, ns=self.ns).json

    def start(self, **changes: t.Any) -> dict[str, t.Any]:
        """Launch it; what it does then is another matter."""
        result = self.launch(**changes)
        assert not result.get("failed"), result
        self.pid, self.launch_id = result["pid"], result["launch_id"]
        return result

    def ready(self, **changes: t.Any) -> dict[str, t.Any]:
        """server_ready's result; a short soak, unless it is asked for otherwise."""
        arguments = {
            "name": self.name,
            "state_dir": str(self.state),
            "deadline_s": START_DEADLINE_S,
            "soak_requests": 2,
            "soak_concurrency": 2,
            "soak_tokens": 8,
            **changes,
        }
        return run_module("server_ready", arguments, MODULE_DEADLINE_S, ns=self.ns).json

    @contextlib.contextmanager
    def watched(self, **changes: t.Any) -> t.Iterator[concurrent.futures.Future[Timed]]:
        """server_ready at work while the test does something to the server."""

        def watch() -> Timed:
            result = self.ready(**changes)
            return Timed(result, time.monotonic())

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            yield pool.submit(watch)

    def evict(self) -> dict[str, t.Any]:
        arguments = {"name": self.name, "state_dir": str(self.state), "scope": "server", "expected_gpus": 0}
        return run_module("gpu_evict", arguments, 120, ns=self.ns).json

    # --- the server's processes ---------------------------------------------------------------------------------------

    def tree(self) -> dict[int, str]:
        """pid -> title of the leader and its living descendants."""
        parents = {}
        for pid, _ticks in self.ns.living():
            fields = stat_fields(self.ns, pid)
            if fields:
                parents[pid] = int(fields[1])
        found = {self.pid} & set(parents)
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return {pid: " ".join(self.ns.cmdline(pid)) for pid in sorted(found)}

    def titled(self, words: str) -> list[int]:
        """Living processes of the server with these words in their titles."""
        return [pid for pid, title in self.tree().items() if words in title]

    def wait_titled(self, words: str, deadline_s: float = START_DEADLINE_S) -> int:
        """The first process with these words in its title, once there is one."""
        return wait_for(f"{words} of {self.name}\n{self.log_tail()}", lambda: self.titled(words), deadline_s)[0]

    def signal(self, name: str, *pids: int) -> None:
        self.ns.run(["kill", f"-{name}", *map(str, pids)], 10).check()

    def alive(self, pid: int) -> bool:
        return pid in {each for each, _ticks in self.ns.living()}

    def wait_dead(self, pid: int, deadline_s: float = START_DEADLINE_S) -> float:
        """When the process was seen to be gone (time.monotonic)."""
        wait_for(f"pid {pid} gone\n{self.log_tail()}", lambda: not self.alive(pid), deadline_s)
        return time.monotonic()

    def log(self) -> str:
        path = self.state / self.name / "launches" / self.launch_id / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-15:])

    # --- its HTTP -----------------------------------------------------------------------------------------------------

    def request(self, method: str, path: str, body: t.Any = None, deadline_s: float = 30) -> Answer:
        """One request from inside of the namespace."""

        def send() -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=deadline_s)
            headers = {"Content-Type": "application/json"}
            try:
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                response = connection.getresponse()
                return response.status, response.read().decode()
            except OSError as error:
                return 0, repr(error)

        return Answer(*self.ns.call(send, deadline_s + 5))

    def chat(self) -> dict[str, t.Any]:
        """The message that the server answers to a greeting."""
        body = {
            "model": str(model_path()),
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 16,
        }
        answer = self.request("POST", "/v1/chat/completions", body).json
        return t.cast("dict[str, t.Any]", answer["choices"][0]["message"])


def stat_fields(ns: Namespace, pid: int) -> list[str]:
    """The fields of a process's stat behind its name (state is the first, the parent the second); [] if it is gone."""
    try:
        return (ns.proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
