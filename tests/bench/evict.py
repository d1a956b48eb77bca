# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long an eviction takes to a host that is seen to be free, beside what people type and beside what is possible.

usage: python -m tests.bench.evict [--gpu] [--rounds N] [--gib N] [--pinned-gib N] [--killall PATH] [--child]
       [--python WORDS] [--only WORDS] [--json FILE]

Each arm brings down the same leader and child (tests/bench/holder.py), in a PID and mount namespace of the benchmark's
own, whose process 1 is called init and has adopted the leader, as of a server that was started `detached`. (With
--child the leader's parent lives and might start it again, so gpu_evict watches for its return.) Two times are taken:
until the arm said its word, and until the memory was free, which a loop beside it watches.

gpu_evict runs as Ansible runs it on a target: the interpreter gets the one file (AnsiballZ) that Ansible made. How long
Ansible's own `ping` takes in the same way is printed beside it: that much is the start of any module.

  the limit          SIGKILL by pid, and a tight loop until nobody and no memory is left
  kill rung          gpu_evict with the rung `kill` alone
  default ladder     gpu_evict as it is; the holder takes --exit-s after SIGTERM
  founding sequence  pkill -9 -f; sleep 5; fuser -k; sleep 5; nvidia-smi
  SGLang's killall   sglang/cli/killall.py of an installed wheel, where --killall names it (with --gpu)

Without --gpu the memory is the host's, and the one GPU that the module asks about is simulated; the child holds it.

Nothing here passes or fails. Ratios of one run on one machine are comparable, seconds of two machines are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import typing as t
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".collections"))

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Hold, NvmlDouble

ROOT = Path(__file__).resolve().parents[2]
PORT = 31777
PATTERN = "sglang.launch_server"
SLACK_MIB = 64  # as gpu_evict's own max_used_mib
COLLECTION = "cleanslate.sglang"
# Process 1: collects whatever falls to it; the benchmark is its child.
INIT = """
import os, sys
environment = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], environment)
while True:
    pid, status = os.wait()
    if pid == child:
        sys.exit(os.waitstatus_to_exitcode(status))
"""
ARM_DEADLINE_S = 180
EXIT_S = 2.0  # of the holder after SIGTERM
Arm = t.Callable[["Bench", "Holder"], str]


class Memory:
    """The first GPU's used memory by NVML, or none at all where the benchmark runs without a GPU.

    NVML opens the device node, and `fuser -k` kills whoever has it open, the benchmark as well: so it is let go of as
    soon as the memory is free.
    """

    def __init__(self, gpu: bool) -> None:
        self._gpu = gpu
        self._nvml: t.Any = None

    def used_mib(self) -> int:
        if not self._gpu:
            return 0
        if self._nvml is None:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._nvml.nvmlDeviceGetHandleByIndex(0)).used >> 20)

    def let_go(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None


class Holder:
    """One leader and its child. Both fall to process 1, which collects them; with ``child`` the leader is ours, and a
    thread collects it.
    """

    def __init__(self, bench: Bench, words: t.Sequence[str]) -> None:
        self.memory = bench.memory
        self.base_mib = self.memory.used_mib()
        argv = [sys.executable, "-m", PATTERN, "--port", str(PORT), *words]
        environment = {**os.environ, "PYTHONPATH": str(bench.directory)}
        start = argv if bench.child else ["sh", "-c", '"$@" &', "start", *argv]
        self.process = subprocess.Popen(
            start, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        if len(line) != 2:
            raise SystemExit(f"the holder did not come up: {' '.join(argv)}")
        self.pids = [int(word) for word in line]
        self.freed = threading.Event()
        threading.Thread(target=self.process.wait, daemon=True).start()

    def is_gone(self) -> bool:
        return not any(os.path.exists(f"/proc/{pid}") for pid in self.pids)

    def is_free(self) -> bool:
        return self.is_gone() and self.memory.used_mib() <= self.base_mib + SLACK_MIB


@dataclasses.dataclass(frozen=True)
class Figure:
    """``word_s``: until the arm ended. ``free_s``: until the memory was free, None where it was not within 30 s more.
    ``said``: what the arm said."""

    word_s: float
    free_s: float | None
    said: str


@dataclasses.dataclass
class Bench:
    directory: Path
    memory: Memory
    gpu: bool
    killall: str | None = None
    double: NvmlDouble | None = None
    child: bool = False
    python: t.Sequence[str] = (sys.executable,)
    payloads: dict[str, Path] = dataclasses.field(default_factory=dict)

    def measure(self, arm: Arm, words: t.Sequence[str]) -> Figure:
        holder = Holder(self, words)
        if self.double:
            self.double.write(Gpu(0), Hold(0, mib=1024, pid=holder.pids[1]))
        time.sleep(0.5)
        found: list[float] = []
        began = time.monotonic()

        def watch() -> None:
            while time.monotonic() - began < ARM_DEADLINE_S:
                if holder.is_free():
                    found.append(time.monotonic() - began)
                    self.memory.let_go()
                    holder.freed.set()
                    return
                time.sleep(0.001)

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        said = arm(self, holder)
        word_s = time.monotonic() - began
        watching.join(30)
        for pid in [pid for pid in holder.pids if os.path.exists(f"/proc/{pid}")]:
            os.kill(pid, signal.SIGKILL)
        return Figure(word_s, found[0] if found else None, said)

    def prepare(self) -> None:
        """Let Ansible make the files that it sends, with their arguments in them: nobody is there to be evicted yet."""
        order = {"name": "bench", "port": PORT, "state_dir": str(self.directory / "state"), "devices": ["0"]}
        self.payloads["ping"] = self._payload("ansible.builtin.ping", {})
        self.payloads["kill"] = self._payload(f"{COLLECTION}.gpu_evict", {**order, "rungs": ["kill"]})
        self.payloads["ladder"] = self._payload(f"{COLLECTION}.gpu_evict", order)

    def _payload(self, module: str, arguments: t.Mapping[str, t.Any]) -> Path:
        remote = Path(tempfile.mkdtemp(dir=self.directory))
        (self.directory / "ansible.cfg").touch()
        settings = {
            "ANSIBLE_CONFIG": str(self.directory / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            "ANSIBLE_HOME": str(self.directory / "home"),
            "ANSIBLE_KEEP_REMOTE_FILES": "1",
            "ANSIBLE_REMOTE_TMP": str(remote),
        }
        words = ["localhost", "-c", "local", "-m", module, *(["-a", json.dumps(arguments)] if arguments else [])]
        interpreter = ["-e", json.dumps({"ansible_python_interpreter": sys.executable})]
        argv = [sys.executable, "-m", "ansible.cli.adhoc", *words, *interpreter]
        done = subprocess.run(
            argv, env={**os.environ, **settings}, capture_output=True, text=True, timeout=120, check=False
        )
        found = list(remote.rglob("AnsiballZ_*.py"))
        if len(found) != 1:
            raise SystemExit(f"Ansible made no file of {module}: {done.stdout[-500:]} {done.stderr[-500:]}")
        return found[0]

    def start(self, payload: str) -> subprocess.CompletedProcess[str]:
        """One of those files, as a target's interpreter gets it."""
        environment = {**os.environ, **(self.double.env() if self.double else {})}
        argv = [*self.python, str(self.payloads[payload])]
        return subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=120, check=False)

    def evict(self, payload: str) -> str:
        done = self.start(payload)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            return f"no result: {done.stderr[-300:]}"
        result = json.loads(lines[-1])
        reasons = "; ".join(str(each.get("message")) for each in result.get("reasons", []))
        within = f" ({result['seconds']:.2f} s within)" if "seconds" in result else ""
        return f"{result.get('verdict', result.get('msg'))}{within}{': ' + reasons if reasons else ''}"


def at_the_limit(_bench: Bench, holder: Holder) -> str:
    for pid in holder.pids:
        os.kill(pid, signal.SIGKILL)
    return "free" if holder.freed.wait(ARM_DEADLINE_S) else "never free"


def by_sigterm(_bench: Bench, holder: Holder) -> str:
    """The server's own exit, which the default ladder can't be faster than."""
    os.kill(holder.pids[0], signal.SIGTERM)
    return "free" if holder.freed.wait(ARM_DEADLINE_S) else "never free"


def by_kill_rung(bench: Bench, _holder: Holder) -> str:
    return bench.evict("kill")


def by_default_ladder(bench: Bench, _holder: Holder) -> str:
    return bench.evict("ladder")


def by_founding_sequence(bench: Bench, _holder: Holder) -> str:
    """No shell in between, so that the pattern does not hit the line that it stands in."""
    steps: list[list[str]] = [["pkill", "-9", "-f", PATTERN], ["sleep", "5"]]
    steps += [["fuser", "-k", "/dev/nvidia0"]] if bench.gpu and shutil.which("fuser") else []
    steps += [["sleep", "5"]]
    steps += [["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]] if bench.gpu else []
    said = ""
    for step in steps:
        said = subprocess.run(step, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    return said or "nothing"


def by_killall(bench: Bench, _holder: Holder) -> str:
    environment = {**os.environ, "SGLANG_IS_IN_CI": "true", "CUDA_VISIBLE_DEVICES": "0"}
    argv = [sys.executable, str(bench.killall)]
    return f"rc {subprocess.run(argv, capture_output=True, env=environment, timeout=120, check=False).returncode}"


def rows(bench: Bench) -> list[tuple[str, Arm]]:
    found: list[tuple[str, Arm]] = [
        ("the limit (SIGKILL)", at_the_limit),
        ("kill rung", by_kill_rung),
        ("founding sequence", by_founding_sequence),
    ]
    if bench.killall and bench.gpu:
        found.append(("SGLang's killall", by_killall))
    return [*found, ("the server's own SIGTERM exit", by_sigterm), ("default ladder", by_default_ladder)]


def tell(title: str, figures: t.Mapping[str, t.Sequence[Figure]]) -> None:
    limit = {"default ladder": "the server's own SIGTERM exit"}
    print(f"\n{title}\n{'':<32}{'its word':>10}{'free':>10}{'over the limit':>16}{'ratio':>8}  what it said")
    for name, each in figures.items():
        word = statistics.median(one.word_s for one in each)
        free = [one.free_s for one in each if one.free_s is not None]
        seen = f"{statistics.median(free):.3f} s" if free else "never"
        least = statistics.median(one.word_s for one in figures[limit.get(name, "the limit (SIGKILL)")])
        print(f"{name:<32}{word:>8.3f} s{seen:>10}{word - least:>14.3f} s{word / least:>8.1f}  {each[-1].said[:60]}")


def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "sglang"
        package.mkdir()
        (package / "__init__.py").touch()
        shutil.copy(Path(__file__).with_name("holder.py"), package / "launch_server.py")
        simulated = Path(directory) / "nvml"
        simulated.mkdir()
        double = None if options.gpu else NvmlDouble(simulated)
        python = options.python.split() if options.python else [sys.executable]
        memory = Memory(options.gpu)
        bench = Bench(Path(directory), memory, options.gpu, options.killall, double, options.child, python)
        bench.prepare()
        starts = []
        for _unused in range(max(3, options.rounds)):
            began = time.monotonic()
            bench.start("ping")
            starts.append(time.monotonic() - began)
        print(f"a module's start ({' '.join(python)}; Ansible's ping): {statistics.median(starts):.3f} s")
        kinds = {f"{options.gib} GiB plain": [("--gpu-gib" if options.gpu else "--host-gib"), str(options.gib)]}
        if options.gpu:
            kinds[f"{options.pinned_gib} GiB pinned, 1 GiB on the GPU"] = [
                "--gpu-gib", "1", "--pinned-gib", str(options.pinned_gib),
            ]  # fmt: skip
        kept: dict[str, t.Any] = {}
        for title, words in kinds.items():
            figures = {
                name: [bench.measure(arm, [*words, "--exit-s", str(EXIT_S)]) for _unused in range(options.rounds)]
                for name, arm in rows(bench)
                if options.only in name or arm in (at_the_limit, by_sigterm)
            }
            tell(f"{title}, median of {options.rounds}", figures)
            kept[title] = {name: [dataclasses.asdict(one) for one in each] for name, each in figures.items()}
        if options.json:
            Path(options.json).write_text(json.dumps(kept, indent=1))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--pinned-gib", type=float, default=8)
    parser.add_argument("--killall")
    parser.add_argument("--only", default="", help="arms with this in their name, and what they are compared with")
    parser.add_argument("--child", action="store_true", help="the leader's parent lives")
    parser.add_argument("--python", help="the target's interpreter and its options")
    parser.add_argument("--json")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return run(options)
    with tempfile.TemporaryDirectory() as directory:
        # gpu_evict tells an init by its program's file; this one is the interpreter under that name.
        init = Path(directory) / "init"
        shutil.copy2(Path(getattr(sys, "_base_executable", sys.executable)).resolve(), init)
        wrapper = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", str(init), "-S", "-c", INIT]
        argv = [*wrapper, sys.executable, "-m", "tests.bench.evict", "--inside", *sys.argv[1:]]
        environment = {**os.environ, "PYTHONHOME": sys.base_prefix}
        return subprocess.run(argv, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
