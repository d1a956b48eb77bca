# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Relaunches of a real SGLang on a real GPU, from every dirty state, with the figures for docs/measured.md.

usage: scenarios.py --out DIR --model MODEL [--python PYTHON] [--budget SECONDS] [--inventory-vars JSON] SCENARIO...

Scenarios run in the given order; each one takes the host as the one before left it. What was seen is written to
DIR/report.json after each scenario, so that a run that is cut off still tells what it saw. A scenario that goes wrong
is reported and the next one goes on. ``--budget``: no scenario is started after so many seconds.

one GPU:   start serving killed hung orphan from_orphan hicache from_hicache hicache_killed timing namespaces
           graphs drift no_room teardown
two GPUs:  neighbour tp2 tp2_killed spread
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import typing as t
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALLBACKS = ROOT / "tests" / "harness" / "callback_plugins"
NAME, PORT, NEIGHBOUR_PORT = "gpu", 31000, 31500
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "PYTHONPATH", "HOME", "LANG")
PASSED_PREFIXES = ("NCCL_", "NVSHMEM_", "TORCH_", "HF_", "TRITON_")
BASE_FLAGS: dict[str, t.Any] = {
    "load-format": "dummy",
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-cuda-graph": True,
    "mem-fraction-static": 0.5,
    "reasoning-parser": "kimi_k2",
}
HOLD = """
import os, signal, torch
memory = torch.empty(20 << 30, dtype=torch.uint8, device="cuda:0"); torch.cuda.synchronize()
child = os.fork()
if child == 0:
    while True: signal.pause()
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

Figures = dict[str, t.Any]


@dataclasses.dataclass(frozen=True)
class Node:
    """One of two inventory hosts that this machine stands for, with a GPU each."""

    host: str
    rank: int

    def of(self, server: t.Mapping[str, t.Any]) -> Figures:
        """The node's own entry of a server over both. Port + rank, since both have the same address here."""
        flags = {**server["flags"], "node-rank": self.rank}
        return {**server, "gpus": [str(self.rank)], "port": server["port"] + self.rank, "flags": flags}


NODES = (Node("gpu01", 0), Node("gpu02", 1))


@dataclasses.dataclass
class Lab:
    """Where things are, and what was seen so far."""

    out: Path
    model: str
    python: str
    extra: dict[str, t.Any]
    report: dict[str, t.Any] = dataclasses.field(default_factory=dict)
    runs: int = 0

    # --- playbooks ----------------------------------------------------------------------------------------------------

    def relaunch(
        self,
        flags: t.Mapping[str, t.Any],
        gpus: t.Sequence[str] = ("0",),
        extra: t.Sequence[str] = (),
        **server: t.Any,
    ) -> Figures:
        return self.playbook("relaunch.yml", flags, gpus, extra, **server)

    def playbook(
        self,
        name: str,
        flags: t.Mapping[str, t.Any],
        gpus: t.Sequence[str],
        extra: t.Sequence[str] = (),
        **server: t.Any,
    ) -> Figures:
        """Run a playbook on this machine; return its exit code, seconds, and each module's result."""
        self.runs += 1
        inventory = self.out / "work" / f"inventory{self.runs}.json"
        inventory.parent.mkdir(exist_ok=True)
        inventory.write_text(json.dumps(self._inventory(flags, gpus, server)))
        events = self.out / "work" / f"events{self.runs}"
        argv = [
            sys.executable,
            "-m",
            "ansible",
            "playbook",
            str(ROOT / "playbooks" / name),
            "-i",
            str(inventory),
            *extra,
        ]
        environment = {
            **os.environ,
            "HARNESS_EVENTS": str(events),
            "ANSIBLE_CALLBACK_PLUGINS": str(CALLBACKS),
            "ANSIBLE_CALLBACKS_ENABLED": "harness_events",
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            "ANSIBLE_LOCALHOST_WARNING": "0",
            "ANSIBLE_NOCOLOR": "1",
        }
        started = time.monotonic()
        log = self.out / f"playbook{self.runs}.log"
        with log.open("wb") as handle:
            try:
                rc: int | None = subprocess.run(
                    argv, cwd=ROOT, env=environment, stdout=handle, stderr=subprocess.STDOUT, timeout=420, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                rc = None
        seconds = round(time.monotonic() - started, 2)
        lines = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        modules = {
            line["action"].rpartition(".")[2]: line["result"] for line in lines if "cleanslate" in line["action"]
        }
        tail = log.read_text(errors="replace").splitlines()[-60:]
        print("\n".join(tail), flush=True)
        ready = [line["result"] for line in lines if line["action"].endswith("server_ready")]
        return {"playbook": name, "rc": rc, "seconds": seconds, "modules": modules, "ready": ready}

    def _inventory(self, flags: t.Mapping[str, t.Any], gpus: t.Sequence[str], server: t.Mapping[str, t.Any]) -> Figures:
        passed = {
            name: value for name, value in os.environ.items() if name in PASSED_ON or name.startswith(PASSED_PREFIXES)
        }
        one = {
            "name": NAME,
            "port": PORT,
            "gpus": list(gpus),
            "python": self.python,
            "user": "root",
            "launcher": "detached",
            "flags": {"model-path": self.model, **BASE_FLAGS, **flags},
            "environment": {**passed, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            "ready_deadline_s": 360,
            **server,
        }
        variables = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "sglang_become": False,
            **self.extra,
        }
        hosts: Figures = {"gpuhost": {**variables, "sglang_servers": [one]}}
        if "nnodes" in flags:
            hosts = {
                node.host: {
                    **variables,
                    "sglang_state_dir": str(self.out / node.host),
                    "sglang_servers": [node.of(one)],
                }
                for node in NODES
            }
        return {"all": {"children": {"sglang": {"hosts": hosts}}}}

    # --- looking by other means than the product's
    # ------------------------------------------------------------------------

    def leader(self) -> int:
        record = json.loads(Path(f"/var/lib/cleanslate/{NAME}/current.json").read_text())
        return int(record["pid"])

    def tree(self) -> dict[int, str]:
        """The leader's descendants by title."""
        return below(self.leader())

    def note(self, name: str, figures: Figures) -> None:
        self.report[name] = figures
        (self.out / "report.json").write_text(json.dumps(self.report, indent=1, default=str))


def titles() -> dict[int, tuple[int, str]]:
    """pid -> (parent, title) of everybody."""
    result = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:
            continue
        result[int(entry.name)] = (int(stat[1]), title)
    return result


def below(pid: int) -> dict[int, str]:
    everybody = titles()
    found = {pid: everybody[pid][1]} if pid in everybody else {}
    grown = True
    while grown:
        fresh = {one: title for one, (parent, title) in everybody.items() if parent in found and one not in found}
        found.update(fresh)
        grown = bool(fresh)
    return found


def start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def used_mib() -> list[int]:
    """What nvidia-smi says, GPU by GPU."""
    argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    return [int(line) for line in done.stdout.split()]


def chat(port: int) -> str:
    """One chat completion; the answer's text, reasoning included."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "x", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    return str(answer["choices"][0]["message"])


def short(figures: Figures) -> Figures:
    """What docs/measured.md wants of a run."""
    modules = figures["modules"]
    evict = modules.get("gpu_evict", {})
    return {
        "rc": figures["rc"],
        "seconds": figures["seconds"],
        "evict": {key: evict.get(key) for key in ("verdict", "summary", "seconds", "pinned", "spared", "reasons")},
        "rungs": [(one["rung"], one["seconds"], one["note"], one["stayed"]) for one in evict.get("rungs", [])],
        "ended": evict.get("ended"),
        "before": evict.get("before"),
        "after": evict.get("after"),
        "clean": {key: modules.get("clean_state", {}).get(key) for key in ("verdict", "summary", "seconds", "reasons")},
        "launch": {key: modules.get("server_launch", {}).get(key) for key in ("pid", "launch_id", "msg")},
        "ready": {
            key: modules.get("server_ready", {}).get(key)
            for key in (
                "verdict", "seconds", "tokens", "reasoning", "headroom_mib", "phases", "error", "soak", "workers",
                "gpus_used", "progress",
            )
        },
    }


# --- one GPU
# --------------------------------------------------------------------------------------------------------------


def start(lab: Lab) -> Figures:
    """From an idle GPU; the first start compiles kernels."""
    return {"relaunch": short(lab.relaunch({})), "chat": chat(PORT), "tree": lab.tree(), "used_mib": used_mib()}


def serving(lab: Lab) -> Figures:
    before = lab.leader()
    figures = short(lab.relaunch({"max-running-requests": 16}))
    return {"relaunch": figures, "old_leader": before, "new_leader": lab.leader(), "chat": chat(PORT)}


def killed(lab: Lab) -> Figures:
    """The leader is SIGKILLed, as an out-of-memory killer does it; the relaunch follows at once."""
    os.kill(lab.leader(), signal.SIGKILL)
    return {"relaunch": short(lab.relaunch({})), "chat": chat(PORT)}


def hung(lab: Lab) -> Figures:
    scheduler = next(pid for pid, title in lab.tree().items() if title.startswith("sglang::scheduler"))
    os.kill(scheduler, signal.SIGSTOP)
    return {"stopped": scheduler, "relaunch": short(lab.relaunch({})), "chat": chat(PORT)}


def hold_20_gib(lab: Lab) -> Figures:
    """A foreign program with 20 GiB forks and is SIGKILLed: the child holds the memory, NVML lists the dead pid."""
    lab.playbook("teardown.yml", {}, ["0"])
    holder = subprocess.Popen([lab.python, "-c", HOLD], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    holder.wait(timeout=60)
    time.sleep(1)
    listed = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stdout
    return {"parent": holder.pid, "orphan": child, "nvidia_smi_lists": listed, "used_mib": used_mib()}


def gone(pid: int) -> bool:
    """Dead, or a zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def orphan(lab: Lab) -> Figures:
    """The orphan is refused by default, evicted by a teardown with scope gpu."""
    seen = hold_20_gib(lab)
    refused = short(lab.relaunch({}))
    assert refused["rc"] != 0, "a dirty host was called clean"
    spared = not gone(seen["orphan"])
    return {**seen, "default_scope": refused, "orphan_spared": spared, "gone": scope_gpu(lab, seen["orphan"])}


def from_orphan(lab: Lab) -> Figures:
    """One relaunch with scope gpu, from the orphan to proved serving."""
    seen = hold_20_gib(lab)
    figures = short(lab.relaunch({}, extra=["-e", "scope=gpu"]))
    assert figures["rc"] == 0, figures
    assert gone(seen["orphan"]), "the orphan lives"
    return {**seen, "relaunch": figures, "orphan_gone": True, "chat": chat(PORT), "used_mib_after": used_mib()}


def scope_gpu(lab: Lab, child: int) -> Figures:
    figures = short(lab.playbook("teardown.yml", {}, ["0"], ["-e", "scope=gpu"]))
    return {"teardown": figures, "orphan_gone": gone(child), "used_mib": used_mib()}


HICACHE = {
    "enable-hierarchical-cache": True,
    "hicache-size": 40,
    "max-total-tokens": 2000000,
    "mem-fraction-static": 0.5,
}


def hicache(lab: Lab) -> Figures:
    """A server with 40 GB of pinned host memory, from whatever was there."""
    return {"relaunch": short(lab.relaunch(HICACHE)), "chat": chat(PORT), "used_mib": used_mib()}


def from_hicache(lab: Lab) -> Figures:
    """One relaunch from a serving HiCache server to proved serving; only the kill rung, so that pinned memory remains
    to be named and waited for.
    """
    old = lab.leader()
    figures = short(lab.relaunch({}, rungs=["kill"]))
    assert figures["rc"] == 0, figures
    assert gone(old), "the old leader lives"
    assert figures["evict"]["pinned"], "nothing pinned was named"
    return {"old_leader": old, "relaunch": figures, "new_leader": lab.leader(), "chat": chat(PORT)}


def hicache_killed(lab: Lab) -> Figures:
    """Only the kill rung: how long the memory outlives the process, and that it is waited for and named."""
    return {"teardown": short(lab.playbook("teardown.yml", HICACHE, ["0"], rungs=["kill"])), "used_mib": used_mib()}


def timing(lab: Lab) -> Figures:
    """Module time against nvidia-smi's, as ratios of the same machine."""
    sys.path.insert(0, str(ROOT / ".collections"))
    from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import look, nvml, procfs

    def timed(call: t.Callable[[], t.Any], count: int = 5) -> float:
        times = []
        for _unused in range(count):
            began = time.monotonic()
            call()
            times.append(time.monotonic() - began)
        return round(sorted(times)[count // 2], 4)

    smi = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv"]
    options = look.LookOptions()
    return {
        "nvidia_smi_s": timed(lambda: subprocess.run(smi, capture_output=True, timeout=60, check=False)),
        "read_by_nvml_s": timed(lambda: nvml.read_by_nvml(10.0)),
        "look_s": timed(lambda: look.look(options)),
        "processes": len(procfs.list_pids()),
    }


# What our look shows of the first GPU, as seen from wherever this runs.
LOOK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import look
from ansible_collections.cleanslate.sglang.plugins.module_utils.results import gpu_rows
seen = look.look(look.LookOptions(devices=("0",)))
row = gpu_rows(seen)[0]
holders = [{key: one[key] for key in ("pid", "inner_pid", "title", "evidence")} for one in row["holders"]]
listed = [one["pid"] for one in row["processes"] or ()]
print(json.dumps({"used_mib": row["memory"]["used_mib"], "holders": holders, "listed": listed}))
"""
ONE_GIB = """
import signal, torch
memory = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0"); torch.cuda.synchronize()
print("holding", flush=True)
signal.pause()
"""
OWN_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def namespaces(lab: Lab) -> Figures:
    """The node's view and a container's: a holder in a PID namespace below is seen from above with both its pids; one
    above is memory that nobody holds as seen from below.
    """
    lab.playbook("teardown.yml", {}, ["0"])
    seen = {}
    for place, wrapper in (("below", OWN_NAMESPACE), ("above", [])):
        words = [*wrapper, lab.python, "-c", ONE_GIB]
        holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "holding\n"
            seen[f"holder {place}, seen from above"] = look_from([])
            seen[f"holder {place}, seen from below"] = look_from(OWN_NAMESPACE)
        finally:
            os.killpg(holder.pid, signal.SIGKILL)
            holder.wait(timeout=60)
    (below,) = seen["holder below, seen from above"]["holders"]
    assert below["inner_pid"] == 1 and below["pid"] != 1, seen
    outside = seen["holder above, seen from below"]
    assert outside["used_mib"] > 1024 and not outside["holders"], seen
    return seen


def look_from(wrapper: t.Sequence[str]) -> Figures:
    words = [*wrapper, sys.executable, "-c", LOOK, str(ROOT / ".collections")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    return t.cast(Figures, json.loads(done.stdout))


GRAPHS = {"disable-cuda-graph": False, "cuda-graph-max-bs": 8}


def graphs(lab: Lab) -> Figures:
    """A start that captures CUDA graphs: every phase with its seconds, the soak, and what lies in the record."""
    figures = short(lab.relaunch(GRAPHS))
    assert figures["rc"] == 0, figures
    folder = Path(f"/var/lib/cleanslate/{NAME}")
    assert (folder / "last_good").readlink() == (folder / "current").readlink(), "the proved launch is not last_good"
    kept = sorted(path.name for path in (folder / "current").iterdir())
    proof = json.loads((folder / "last_good" / "proof.json").read_text())
    summary = (folder / "current" / "summary.txt").read_text()
    return {"relaunch": figures, "kept": kept, "summary": summary, "proof": proof}


# Somebody else's program on the same GPU, which begins when the host was proved clean and a launch is recorded. It
# holds 30 GiB, takes all that is left as soon as the server has its KV cache, and ends when that server gave it back.
HOG = """
import json, sys, time, torch
record, before, end = sys.argv[1], sys.argv[2], time.time() + 300
while json.load(open(record))["launch_id"] == before and time.time() < end:
    time.sleep(0.05)
base = torch.empty(30 << 30, dtype=torch.uint8, device="cuda:0"); torch.cuda.synchronize()
print("holding", flush=True)
extra = None
while time.time() < end:
    free, total = torch.cuda.mem_get_info()
    if extra is None and free < 4 << 30:
        try:
            extra = torch.empty(max(free - (48 << 20), 1), dtype=torch.uint8, device="cuda:0")
            print("took", extra.numel() >> 20, "MiB", flush=True)
        except torch.OutOfMemoryError:
            pass
    elif extra is not None and free > 8 << 30:
        print("the server gave its memory back", flush=True)
        break
    time.sleep(0.02)
"""


def no_room(lab: Lab) -> Figures:
    """A fraction too high beside another holder: the start runs out of GPU memory, the run says so in one sentence, and
    goes back to the launch that was proved last.
    """
    if not lab.report.get("graphs"):
        assert lab.relaunch(GRAPHS)["rc"] == 0, "there is nothing to go back to"
    record = Path(f"/var/lib/cleanslate/{NAME}/current.json")
    good = json.loads(record.read_text())["launch_id"]
    words = [lab.python, "-c", HOG, str(record), good]
    hog = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        greedy = {**GRAPHS, "mem-fraction-static": 0.99}
        waived = {"headroom_small": "this run is to fail"}
        figures = lab.relaunch(greedy, on_failure="rollback", min_gpu_headroom_mib=0, waivers=waived)
        said, _nothing = hog.communicate(timeout=60)
    finally:
        if hog.poll() is None:
            os.killpg(hog.pid, signal.SIGKILL)
            hog.wait(timeout=60)
    now = json.loads(record.read_text())
    seen = {
        "rc": figures["rc"],
        "seconds": figures["seconds"],
        "verdicts": [
            {key: one.get(key) for key in ("verdict", "error", "phase", "phases")} for one in figures["ready"]
        ],
        "evidence": [one.get("evidence") for one in figures["ready"]][:1],
        "hog": {"rc": hog.returncode, "said": said.splitlines()},
        "good": good,
        "now": {key: now.get(key) for key in ("launch_id", "from_launch", "pid")},
    }
    lab.note("no_room", seen)
    assert figures["rc"] != 0, "a start without room was called good"
    assert hog.returncode == 0, "the other holder was ended"
    assert "memory" in str(seen["verdicts"][0]["error"]), "the cause is not named"
    assert now.get("from_launch") == good, "it did not go back"
    return {**seen, "chat": chat(PORT), "used_mib": used_mib()}


# Holds 1 GiB until its input ends.
NEIGHBOUR = """
import sys, torch
memory = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0"); torch.cuda.synchronize()
print("holding", flush=True)
sys.stdin.read()
"""


def drifted(lab: Lab, flags: t.Mapping[str, t.Any], **variables: t.Any) -> Figures:
    """One run of drift.yml: its exit code, and each row as (server, item, state)."""
    before = dict(lab.extra)
    lab.extra.update(variables)
    try:
        figures = lab.playbook("drift.yml", flags, ("0",))
    finally:
        lab.extra = before
    answer = figures["modules"]["server_drift"]
    rows = [row for part in (*answer["servers"], answer["host"]) for row in part["drift"]]
    return {
        "rc": figures["rc"],
        "seconds": figures["seconds"],
        "module_seconds": answer["seconds"],
        "verdict": answer["verdict"],
        "rows": [[row["server"], row["item"], row["state"], row["wanted"], row["found"]] for row in rows],
        "host": answer["host"],
    }


def drift(lab: Lab) -> Figures:
    """What runs against what was chosen, after a start with CUDA graphs: nothing of the engine's own rewrites, then
    each difference once; the process of somebody else is named as a holder, and goes on.
    """
    if not lab.report.get("graphs"):
        assert lab.relaunch(GRAPHS)["rc"] == 0, "there is nothing to compare"
    same = drifted(lab, GRAPHS, sglang_expected_gpus=1)
    lab.note("drift", {"same": same})
    assert (same["rc"], same["verdict"]) == (0, "in_sync"), same
    flags = {**GRAPHS, "mem-fraction-static": 0.4, "schedule-conservativeness": 1.3}
    changed = drifted(lab, flags, sglang_expected_gpus=2)
    neighbour = subprocess.Popen(
        [lab.python, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "holding\n"
        held = drifted(lab, GRAPHS, sglang_expected_gpus=1)
    finally:
        said, _nothing = neighbour.communicate(timeout=60)
    found = {"same": same, "changed": changed, "held": held, "neighbour": [neighbour.pid, neighbour.returncode, said]}
    lab.note("drift", found)
    assert sorted(row[1] for row in changed["rows"] if row[2] == "drift") == [
        "flag:mem-fraction-static", "flag:schedule-conservativeness", "gpu_count",
    ], changed  # fmt: skip
    assert changed["rc"] == 2
    holders = [row for row in held["rows"] if row[1].startswith("holder:")]
    assert len(holders) == 1, held
    assert str(neighbour.pid) in holders[0][1], held
    assert neighbour.returncode == 0, "somebody else's process was ended"
    return found


def teardown(lab: Lab) -> Figures:
    return {"teardown": short(lab.playbook("teardown.yml", {}, ["0"])), "used_mib": used_mib()}


# --- two GPUs
# -------------------------------------------------------------------------------------------------------------


def neighbour(lab: Lab) -> Figures:
    """A server on GPU 0 is relaunched with scope gpu; the one on GPU 1, which sees and has open both, serves on."""
    flags = {"model-path": lab.model, **BASE_FLAGS, "port": NEIGHBOUR_PORT, "base-gpu-id": 1, "host": "127.0.0.1"}
    argv = [lab.python, "-m", "sglang.launch_server"]
    for name, value in flags.items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    with (lab.out / "neighbour.log").open("wb") as log:
        other = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    first = short(lab.relaunch({}))
    wait_serving(NEIGHBOUR_PORT, 240)
    identity = {pid: start_ticks(pid) for pid in below(other.pid)}
    info = lab.playbook("inspect.yml", {}, ["0"])["modules"].get("gpu_info", {})
    again = short(lab.relaunch({"max-running-requests": 16}, extra=["-e", "scope=gpu"]))
    same = all(Path(f"/proc/{pid}").exists() and start_ticks(pid) == ticks for pid, ticks in identity.items())
    answer = chat(NEIGHBOUR_PORT)
    seen = {
        "first": first,
        "relaunch_scope_gpu": again,
        "neighbour_untouched": same,
        "neighbour_processes": len(identity),
        "neighbour_chat": answer,
        "chat": chat(PORT),
        "holders": [
            {"index": gpu["index"], "holders": names(gpu["holders"]), "visitors": names(gpu["visitors"])}
            for gpu in info.get("gpus") or []
        ],
    }
    assert same, f"the neighbour was touched: {seen}"
    os.killpg(other.pid, signal.SIGTERM)
    other.wait(timeout=60)
    return seen


def names(rows: t.Iterable[t.Mapping[str, t.Any]]) -> list[str]:
    return [f"{row['pid']} {row.get('title')} {row['evidence']}" for row in rows]


def wait_serving(port: int, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while True:
        try:
            chat(port)
            return
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            if time.monotonic() > end:
                raise
            time.sleep(2)


TP2 = {
    "tp-size": 2,
    "enable-hierarchical-cache": True,
    "hicache-size": 10,
    "max-total-tokens": 2000000,
    "mem-fraction-static": 0.5,
}


def tp2(lab: Lab) -> Figures:
    """Tensor parallel size 2 over both GPUs with 10 GB of HiCache per rank."""
    figures = short(lab.relaunch(TP2, ["0", "1"]))
    return {"relaunch": figures, "chat": chat(PORT), "tree": lab.tree(), "used_mib": used_mib()}


def tp2_killed(lab: Lab) -> Figures:
    """The leader is SIGKILLed; what is left is evicted and waited for."""
    os.kill(lab.leader(), signal.SIGKILL)
    return {"teardown": short(lab.playbook("teardown.yml", TP2, ["0", "1"])), "used_mib": used_mib()}


SPREAD = {"tp-size": 2, "nnodes": 2, "dist-init-addr": "127.0.0.1:25000"}


def launch_ids(lab: Lab) -> dict[str, str]:
    """Of each node the launch that is current."""
    found = {}
    for node in NODES:
        record = json.loads((lab.out / node.host / NAME / "current.json").read_text())
        found[node.host] = str(record["launch_id"])
    return found


def kill_node_1(lab: Lab, known: str, said: list[str]) -> None:
    """SIGKILL the next launch of node 1, ten seconds after it came."""
    record = lab.out / NODES[1].host / NAME / "current.json"
    end = time.monotonic() + 300
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            now = json.loads(record.read_text())
            if now["launch_id"] != known and now.get("pid"):
                time.sleep(10)
                tree = below(int(now["pid"]))
                for pid in tree:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                said.append(f"killed {sorted(tree.items())}")
                return
        time.sleep(0.5)
    said.append("no launch of node 1 came")


def spread(lab: Lab) -> Figures:
    """One server over two hosts with a GPU each. Relaunched together; then node 1 dies while another configuration
    starts, and both are back on what was proved before."""
    lab.playbook("teardown.yml", {}, ["0", "1"])
    first = lab.relaunch(SPREAD)
    proved, answer = launch_ids(lab), chat(PORT)
    said: list[str] = []
    killer = threading.Thread(target=kill_node_1, args=(lab, proved[NODES[1].host], said), daemon=True)
    killer.start()
    failed = lab.relaunch({**SPREAD, "max-running-requests": 16})
    killer.join(timeout=5)
    after = launch_ids(lab)
    came_from = {
        node.host: json.loads((lab.out / node.host / NAME / "current.json").read_text()).get("from_launch")
        for node in NODES
    }
    seen = {
        "first": {"rc": first["rc"], "seconds": first["seconds"], "launches": proved, "chat": answer},
        "failed": {"rc": failed["rc"], "seconds": failed["seconds"], "killed": said, "launches": after},
        "came_from": came_from,
        "chat": chat(PORT),
        "used_mib": used_mib(),
    }
    assert first["rc"] == 0 and failed["rc"] == 2 and came_from == proved, f"not as expected: {seen}"
    return seen


SCENARIOS: dict[str, t.Callable[[Lab], Figures]] = {
    function.__name__: function
    for function in (
        start, serving, killed, hung, orphan, from_orphan, hicache, from_hicache, hicache_killed, timing,
        namespaces, graphs, drift, no_room, teardown,
        neighbour, tp2, tp2_killed, spread,
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--budget", type=float, default=540)
    parser.add_argument("--inventory-vars", type=json.loads, default={})
    parser.add_argument("scenarios", nargs="+", choices=sorted(SCENARIOS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lab = Lab(options.out.resolve(), options.model, options.python, options.inventory_vars)
    began = time.monotonic()
    failed = 0
    for name in options.scenarios:
        spent = time.monotonic() - began
        if spent > options.budget:
            print(f"skipped {name}: {spent:.0f} s of {options.budget:.0f} s are spent", flush=True)
            continue
        print(f"=== {name} at {spent:.0f} s", flush=True)
        try:
            lab.note(name, SCENARIOS[name](lab))
        except Exception as exc:  # the next scenario still tells something; the exit code tells of this one
            failed += 1
            traceback.print_exc()
            lab.note(name, {"failed": f"{type(exc).__name__}: {exc}"})
    print(f"{len(lab.report) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
