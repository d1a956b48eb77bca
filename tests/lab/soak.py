# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Relaunches in a row on one host, each with a fault that a generator of random numbers picks.

    with opened(directory) as place:
        report = Soak(place, seed=1).run(200)

The host is one container of the lab (systemd, sshd, the stand-in SGLang, the NVML double), reached by ssh with the real
playbooks. After every round a census past sshd says whether the round's claim is true, who of the bystanders lives, and
what has grown since the first round (soak_judge.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
import typing as t
from collections import Counter
from pathlib import Path

from ..harness.command import ROOT, DeadlinePassed, run_command
from ..harness.playbook import PlaybookRun, playbook_env, read_events, run_playbook
from ..harness.waiting import wait_for
from .containers import Container, Lab
from .gpus import Gpus, simulated_gpus
from .inventory import API_KEY, ansible_env, host_vars, run_module_on, server, write_inventory
from .rootfs import DOUBLES, OPERATOR, PYTHON
from .servers import leaders, standin_argv, start_bystanders, start_unit, unit_file, wait_serving
from .soak_judge import Bounds, Claim, Growth, counts, totals, untrue

# Containers of its own: a soak of an hour takes no slot from the tests.
NUMBERS = (139, 140)
PORT, OTHER_PORT = 30000, 30001
UNIT = "sglang-chat.service"
STATE = "/var/lib/cleanslate"
KEEP = 4
RUN_S = 400.0  # what one run of the playbook may take, on a busy machine too; more is a hang
SETTLE_S = 25.0  # until what a round left has gone
STEP_S = 30.0
MODULES_S = 90.0
READY_S = 60
# Of a launch, beyond its documents: what a folder may hold.
FILES_OF_A_LAUNCH = 13
BYTES_OF_A_LAUNCH = 128 * 1024

# What a run can come to.
SERVING, BACK, STOPPED, NOT_CLEAN, LEASED, DENIED, LOST, KILLED, FAILED = (
    "serving", "rolled back", "stopped", "not clean", "leased", "denied", "lost", "killed", "failed",
)  # fmt: skip
WORDS = (
    (BACK, re.compile(r"rolled back to \S+: serving")),
    (STOPPED, re.compile(r"stopped, the host is clean")),
    (LOST, re.compile(r"the connection was lost|unreachable: |UNREACHABLE!|Failed to connect to the host via ssh")),
    (NOT_CLEAN, re.compile(r"is not clean for chat")),
    (LEASED, re.compile(r"works on 'chat'")),
    (DENIED, re.compile(r"is denied|DENIED|denied:")),
)


@dataclasses.dataclass(frozen=True)
class Told:
    """What a run said."""

    verdict: str
    text: str


def told(run: PlaybookRun) -> Told:
    """The verdict of a finished run, by what it says to people."""
    if run.rc == 0:
        return Told(SERVING if "SERVING" in run.stdout else FAILED, run.stdout[-400:])
    failed = [str(task.result.get("msg")) for task in run.tasks if task.status == "failed" and not task.ignored]
    lost = [str(task.result.get("msg")) for task in run.tasks if task.status == "unreachable"]
    text = " ".join(" ".join([*failed[-1:], *lost]).split()) or f"{run.stdout[-300:]} {run.stderr[-300:]}"
    everything = f"{text} {'UNREACHABLE!' if run.rc == 4 else ''}"
    return Told(next((verdict for verdict, words in WORDS if words.search(everything)), FAILED), text)


class Place:
    """The host, its GPUs, its bystanders, and how playbooks are run against it."""

    def __init__(self, box: Container, gpus: Gpus, scratch: Path) -> None:
        self.box = box
        self.gpus = gpus
        self.scratch = scratch
        self.packed = scratch / "packed"
        self.packed.mkdir(exist_ok=True)
        self.runs = 0
        self.bystanders: dict[str, tuple[int, int]] = {}

    def settle_in(self) -> None:
        """Who must live from the first round to the last."""
        found = start_bystanders(self.box, self.gpus.paths)
        order = f"{self.gpus.paths[1]},{self.gpus.paths[0]}"
        text = unit_file(standin_argv(OTHER_PORT), restart="always", environment={"SGLANG_STANDIN_DEVICES": order})
        start_unit(self.box, "embed.service", text)
        wait_serving(self.box, OTHER_PORT)
        processes = self.box.processes()
        embed = [one for one in processes.values() if self._of_unit(one.outer_pid)]
        neighbours = {f"neighbour {one.title[:40]}": one.pid for one in embed}
        self.bystanders = {name: processes[pid].key for name, pid in {**found, **neighbours}.items()}

    @staticmethod
    def _of_unit(outer: int) -> bool:
        with contextlib.suppress(OSError):
            return "/embed.service" in Path(f"/proc/{outer}/cgroup").read_text()
        return False

    # --- runs ---------------------------------------------------------------------------------------------------------

    def inventory(self, variables: t.Mapping[str, t.Any], **settings: t.Any) -> Path:
        """The host with the server 'chat' as a round wants it."""
        self.runs += 1
        chosen = {
            "soak": {"requests": 1, "concurrency": 1, "tokens": 2, "deadline_s": 20},
            "settle_s": 3,
            "ready_deadline_s": READY_S,
            "deadlines": {"stop": 10, "term": 4, "kill": 6},
            "stop_timeout_s": 4,
            "keep_launches": KEEP,
            "shm_required_mib": 16,
            **settings,
        }
        one = server("chat", PORT, 0, **chosen)
        path = self.scratch / f"hosts.{self.runs}.json"
        host = {**host_vars(self.box, [one]), "sglang_progress_s": 1, **variables}
        return write_inventory(path, {self.box.name: host})

    @property
    def env(self) -> dict[str, str]:
        """For many runs in a row: the collection's plugins are loaded once a run and modules are packed once for all.
        """
        fast = {"ANSIBLE_CALLBACKS_ENABLED": "harness_events,harness_preload", "HARNESS_PACKED": str(self.packed)}
        return {**ansible_env(self.box), **fast, "ANSIBLE_REMOTE_TEMP": "/run/ansible-tmp"}

    def relaunch(
        self, *words: str, variables: t.Mapping[str, t.Any] | None = None, lease_wait_s: int = 20, **settings: t.Any
    ) -> Told:
        """relaunch.yml to its end."""
        return told(
            run_playbook(
                ROOT / "playbooks/relaunch.yml",
                *("-e", "server=chat", "-e", f"lease_wait_s={lease_wait_s}", *words),
                scratch=self.scratch,
                deadline_s=RUN_S,
                inventory=self.inventory(variables or {}, **settings),
                env=self.env,
            )
        )

    @contextlib.contextmanager
    def relaunching(
        self, *, variables: t.Mapping[str, t.Any] | None = None, **settings: t.Any
    ) -> t.Iterator[Relaunching]:
        """The same beside something else; killed at the end where it still runs."""
        inventory = self.inventory(variables or {}, **settings)
        running = Relaunching(self, inventory)
        try:
            yield running
        finally:
            running.kill()

    # --- things that happen -------------------------------------------------------------------------------------------

    def by_hand(self, *, restart: bool = False, **switches: str) -> int:
        """The server is one that somebody started by ``ssh host 'nohup ...'``; its pid."""
        self.box.run(["systemctl", "stop", UNIT], STEP_S)
        self.box.run(["systemctl", "reset-failed", UNIT], STEP_S)
        settings = {"DEVICES": ",".join(self.gpus.paths), **switches}
        exports = " ".join(f"SGLANG_STANDIN_{name}={value}" for name, value in settings.items())
        start = f"mkdir -p /tmp/by-hand; export TMPDIR=/tmp/by-hand {exports}; cd /tmp/by-hand;"
        start += f" nohup {shlex.join(standin_argv(PORT))} >log 2>&1 </dev/null &"
        subprocess.run([*self.box.ssh_argv(OPERATOR, "-T"), start], timeout=STEP_S, check=True)
        wait_serving(self.box, PORT)
        return leaders(self.box, PORT)[0].pid

    def signal(self, pids: t.Iterable[int], number: int) -> None:
        """To processes inside, by their pids inside."""
        found = self.box.processes()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(found[pid].outer_pid, number)

    def python(self, *words: str, **env: str) -> str:
        """A program of the fixtures, or a script by ``-c``, inside; its output."""
        return self.box.run([PYTHON, *words], STEP_S, env).check().stdout

    def record(self) -> dict[str, t.Any] | None:
        """The host's current record of the server."""
        try:
            text = (self.box.root / STATE.lstrip("/") / "chat/current.json").read_text()
            found: dict[str, t.Any] = json.loads(text)
        except (FileNotFoundError, ValueError):
            return None
        return found

    def leader(self) -> int | None:
        """The pid of the recorded server, if it lives."""
        record = self.record() or {}
        seen = self.box.processes().get(record.get("pid", -1))
        return seen.pid if seen is not None and seen.start_ticks == record.get("start_ticks") else None

    def ranks(self) -> list[int]:
        """The schedulers that hold GPU 0."""
        return sorted(self.gpus.holders(0))

    def modules(self) -> list[int]:
        """Ansible modules inside: pipelining hands their code to a bare interpreter."""
        return [one.pid for one in self.box.processes().values() if one.title == PYTHON]

    def sessions(self) -> list[int]:
        """sshd's processes of connections, by their pids inside; not its listener."""
        sshd = [one for one in self.box.processes().values() if one.title.startswith(("sshd: ", "sshd-session: "))]
        return [one.pid for one in sshd if "[listener]" not in one.title]

    def after_a_cut(self) -> None:
        """What people do after a lost run: wait for its module's own end, and give its lease back by its id."""
        end = time.monotonic() + MODULES_S
        while self.modules():
            assert time.monotonic() < end, f"modules still run after {MODULES_S:g} s"
            time.sleep(0.3)  # a look at all processes is not cheap
        lease = self.box.root / STATE.lstrip("/") / "chat/lease.json"
        if lease.exists():
            run_id = json.loads(lease.read_text())["run_id"]
            self.lease(state="released", run_id=run_id)

    def lease(self, **arguments: t.Any) -> None:
        done = run_module_on(self.box, "server_lease", {"name": "chat", **arguments}, self.scratch)
        assert done.status == "ok", done.result

    def disconnect(self) -> None:
        """End the shared connection."""
        for socket in sorted(self.box.lab.sockets.glob("*")):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(socket.stat().st_mode):
                    ask = ["ssh", "-F", "/dev/null", "-O", "exit", "-o", f"ControlPath={socket}", "lab"]
                    if run_command(ask, STEP_S).rc != 0:
                        socket.unlink(missing_ok=True)

    def census(self, port: int | None = PORT) -> dict[str, t.Any]:
        """What there is, counted inside, past sshd."""
        words = [f"{DOUBLES}/fixtures/census.py", "--state", STATE]
        asked = ["--port", str(port)] if port else []
        found: dict[str, t.Any] = json.loads(self.python(*words, *asked, CENSUS_KEY=API_KEY))
        return found

    def own(self) -> dict[str, int]:
        """What the controller has: processes of its runs, and files that they left."""
        left = list((self.scratch / "ansible").rglob("ansible-local-*"))
        return {"controller's processes": len(self._controllers()), "controller's files": len(left)}

    def _controllers(self) -> list[int]:
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and str(self.scratch) in Path(f"/proc/{name}/cmdline").read_text(errors="replace"):
                    found.append(int(name))
        return [pid for pid in found if pid != os.getpid() and pid != os.getppid()]

    def forget_controller(self) -> None:
        """What Ansible leaves of a controller that is killed."""
        for path in (self.scratch / "ansible").rglob("ansible-local-*"):
            run_command(["rm", "-rf", str(path)], STEP_S)

    def sweep(self) -> None:
        """Files of the tests themselves."""
        for pattern in ("events.*", "vars.*", "hosts.*.json", "background.*"):
            for path in sorted(self.scratch.glob(pattern), key=lambda one: one.stat().st_mtime)[:-6]:
                path.unlink()


class Relaunching:
    """A run beside its caller."""

    def __init__(self, place: Place, inventory: Path) -> None:
        number = place.runs
        self.output = place.scratch / f"background.{number}.log"
        self.events = place.scratch / f"events.background.{number}"
        argv = [str(Path(sys.executable).parent / "ansible-playbook"), str(ROOT / "playbooks/relaunch.yml")]
        argv += ["-i", str(inventory), "-e", "server=chat", "-e", "lease_wait_s=20"]
        env = {**os.environ, **playbook_env(place.scratch), **place.env, "HARNESS_EVENTS": str(self.events)}
        with self.output.open("wb") as sink:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=env, cwd=ROOT, start_new_session=True
            )

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def wait(self) -> Told:
        """Its end."""
        try:
            code = self.process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            raise DeadlinePassed(f"not done after {RUN_S:g} s: {self.output.read_text()[-2000:]}") from None
        return told(PlaybookRun(code, self.output.read_text(errors="replace"), "", read_events(self.events)))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """The whole of it, as when the controller dies; its shared connection is not of it."""
        if not self.over:
            os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STEP_S)
        if not self.over:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(STEP_S)


@contextlib.contextmanager
def opened(directory: Path) -> t.Iterator[Place]:
    """A host with its bystanders; nothing of it is left at the end."""
    with Lab() as lab, lab.container(numbers=NUMBERS) as box, simulated_gpus(box) as gpus:
        place = Place(box, gpus, directory)
        place.settle_in()
        yield place


# --- a round ----------------------------------------------------------------------------------------------------------


class Round:
    """One round, as its fault sees it."""

    def __init__(self, place: Place, rng: random.Random, number: int, typical_s: float, good: int | None) -> None:
        self.place = place
        self.rng = rng
        self.number = number
        self.typical_s = typical_s
        self.good = good
        self.tokens = 1024 + 8 * number  # the flag by which launches are told apart
        self.served: int | None = None  # who served before the last run
        self.later = contextlib.ExitStack()
        self.details: list[str] = []

    def relaunch(self, *words: str, **settings: t.Any) -> str:
        """One run to its end; its verdict."""
        self.served = self.place.leader()
        said = self.place.relaunch(*words, **{"flags": {"max_total_tokens": self.tokens}, **settings})
        self.details.append(f"{said.verdict}: {said.text}")
        return said.verdict

    def moment(self) -> float:
        """Some time within a run."""
        return self.rng.uniform(0.05, 0.95) * self.typical_s

    def cut(self, how: t.Callable[[Relaunching], str | None], **variables: t.Any) -> str:
        """A run that is cut at some moment, then what people do, then another one. ``how`` returns what it came to, or
        None where the run's own end tells.
        """
        flags = {"max_total_tokens": self.tokens}
        with self.place.relaunching(variables=variables, flags=flags) as running:
            end = time.monotonic() + self.moment()
            while time.monotonic() < end and not running.over:
                time.sleep(0.05)
            first = None if running.over else how(running)
            if first is None:
                said = running.wait()
                first = said.verdict
                self.details.append(f"{said.verdict}: {said.text}")
        self.place.after_a_cut()  # also a run that served may not have reached the host to give its lease back
        if first == SERVING:
            return f"{first}"
        return f"{first}, then {self.relaunch()}"

    def environment(self, **switches: str) -> dict[str, str]:
        return {f"SGLANG_STANDIN_{name}": value for name, value in switches.items()}


@dataclasses.dataclass(frozen=True)
class Fault:
    """``scene`` makes the fault and runs; ``verdicts``: what may come of it; ``served``: it needs a server of ours that
    serves, which is checked first.
    """

    name: str
    scene: t.Callable[[Round], str]
    verdicts: tuple[str, ...]
    served: bool = False


def none(one: Round) -> str:
    return one.relaunch()


def leader_killed(one: Round) -> str:
    one.place.signal([t.cast(int, one.place.leader())], signal.SIGKILL)
    return one.relaunch()


def rank_killed(one: Round) -> str:
    one.place.signal(one.place.ranks()[:1], signal.SIGKILL)
    return one.relaunch()


def rank_stopped(one: Round) -> str:
    one.place.signal(one.place.ranks()[:1], signal.SIGSTOP)
    return one.relaunch()


def orphans(one: Round) -> str:
    """The leader of a server that somebody started is killed; a rank's child, in no session of ours, holds the GPU."""
    leader = one.place.by_hand(ORPHAN="1")
    one.place.signal([leader], signal.SIGKILL)
    one.later.callback(_clear_by_hand, one)
    return one.relaunch(scope="gpu")


def ignores_term(one: Round) -> str:
    one.place.by_hand(IGNORE_TERM="1")
    one.later.callback(_clear_by_hand, one)
    return one.relaunch()


def session_dies(one: Round) -> str:
    """The login from which the server was started is killed, as by a network that is gone."""
    before = set(one.place.sessions())
    one.place.by_hand()
    one.place.signal(set(one.place.sessions()) - before, signal.SIGKILL)
    one.later.callback(_clear_by_hand, one)
    return one.relaunch()


def _clear_by_hand(one: Round) -> None:
    one.place.box.run(["rm", "-rf", "/tmp/by-hand"], STEP_S)
    one.place.python("-c", _OWN_SHM, OPERATOR)


_OWN_SHM = """\
import os, pwd, sys
uid = pwd.getpwnam(sys.argv[1]).pw_uid
for entry in list(os.scandir("/dev/shm")):
    if entry.stat().st_uid == uid:
        os.unlink(entry.path)
"""
_DEAD_SHM = """\
import os, pwd, sys
user, count = sys.argv[1], int(sys.argv[2])
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
account = pwd.getpwnam(user)
for number in range(count):
    path = f"/dev/shm/sgl_shm_mq_{child}_{number:08x}"
    with open(path, "wb") as file:
        file.write(b"1" * 4096)
    os.chown(path, account.pw_uid, account.pw_gid)
"""
_STRANGERS_SHM = """\
import os, sys
free = os.statvfs("/dev/shm")
with open("/dev/shm/dataset.bin", "wb") as file:
    os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - (6 << 20))
"""


def shm_leftovers(one: Round) -> str:
    """Hundreds of segments of servers that died; the relaunch removes them."""
    one.place.python("-c", _DEAD_SHM, "sglang", str(one.rng.randrange(200, 500)))
    return one.relaunch()


def shm_full(one: Round) -> str:
    one.place.python("-c", _STRANGERS_SHM)
    one.later.callback(lambda: one.place.box.run(["rm", "-f", "/dev/shm/dataset.bin"], STEP_S).check())
    return one.relaunch()


def held(one: Round) -> str:
    """Somebody else's program on the GPU; it is gone before the next round."""
    box, gpus = one.place.box, one.place.gpus
    before = gpus.holders(0)
    words = ["systemd-run", "--unit=holder", "--quiet", "--collect", "--", PYTHON]
    box.run([*words, f"{DOUBLES}/fixtures/hold_device.py", "--map", gpus.paths[0]], STEP_S).check()
    one.later.callback(lambda: box.run(["systemctl", "stop", "holder.service"], STEP_S).check())
    wait_for("the holder", lambda: gpus.holders(0) - before)
    return one.relaunch()


def port_taken(one: Round) -> str:
    """The server died, and another program took its port."""
    one.place.box.run(["systemctl", "stop", UNIT], STEP_S)
    script = f"import socket, time; s = socket.create_server(('127.0.0.1', {PORT})); time.sleep(600)"
    words = ["systemd-run", "--unit=squatter", "--quiet", "--collect", "--", PYTHON, "-c", script]
    one.place.box.run(words, STEP_S).check()
    one.later.callback(lambda: one.place.box.run(["systemctl", "stop", "squatter.service"], STEP_S).check())
    return one.relaunch()


def controller_killed(one: Round) -> str:
    def kill(running: Relaunching) -> str:
        running.kill(signal.SIGKILL)
        return KILLED

    one.later.callback(one.place.forget_controller)
    return one.cut(kill)


def controller_interrupted(one: Round) -> str:
    def interrupt(running: Relaunching) -> str:
        running.kill(signal.SIGINT)
        return KILLED

    return one.cut(interrupt)


def cable_out(one: Round) -> str:
    """The network is gone for longer than ssh waits for it."""
    box = one.place.box

    def out(_running: Relaunching) -> None:
        box.run(["ip", "link", "set", "eth0", "down"], STEP_S).check()
        time.sleep(one.rng.uniform(5, 9))
        box.run(["ip", "link", "set", "eth0", "up"], STEP_S).check()

    impatient = "-o ServerAliveInterval=1 -o ServerAliveCountMax=2 -o ConnectTimeout=2 "
    return one.cut(out, ansible_ssh_common_args=impatient + box.lab.ssh_options)


def connection_killed(one: Round) -> str:
    """sshd's own process of the connection dies in the middle of a run."""

    def kill(_running: Relaunching) -> None:
        one.place.signal(one.place.sessions(), signal.SIGKILL)

    return one.cut(kill)


def dies_in_start(one: Round) -> str:
    how = one.rng.choice(["model", "killed", "sigbus", "nccl", "cuda_oom", "memory", "graph_oom", "warmup"])
    one.details.append(how)
    return one.relaunch(environment=one.environment(CRASH=how))


def hangs_in_start(one: Round) -> str:
    return one.relaunch(environment=one.environment(HANG="sleep"), ready_deadline_s=12)


def answers_nobody(one: Round) -> str:
    """/health says 200, and no request is answered."""
    return one.relaunch(environment=one.environment(FAIL_EVERY="1"))


def bad_flag(one: Round) -> str:
    return one.relaunch(flags={"max_total_tokens": one.tokens, "no_such_option": 3})


def unit_failed(one: Round) -> str:
    """systemd has given the unit up: started and killed again and again, until its limit."""
    for _unused in range(7):
        one.place.box.run(["systemctl", "kill", "--signal=KILL", UNIT], STEP_S)
        one.place.box.run(["systemctl", "start", UNIT], STEP_S)
    one.place.box.run(["systemctl", "kill", "--signal=KILL", UNIT], STEP_S)
    return one.relaunch()


def stale_lease(one: Round) -> str:
    """A run of somebody's ended without giving its lease back; it has expired."""
    one.place.lease(state="held", run_id="gone", operator="bob", ttl_s=1)
    time.sleep(1.5)
    return one.relaunch()


_HALF_WRITTEN = """\
import os, sys
top = sys.argv[1]
launch = f"{top}/launches/20260101T000000Z-{os.getpid() % 65536:04x}"
os.makedirs(launch)
os.makedirs(f"{top}/launches/.gone-20260101T000000Z-dead")
open(f"{launch}/config.yaml", "w").write("model-path: /mo")
open(f"{top}/launches/.gone-20260101T000000Z-dead/env", "w").write("A=")
for place in (f"{top}/.current.json", f"{top}/.lease.json"):
    temporary = f"{place}.{os.getpid()}.0a1b2c3d"
    open(temporary, "w").write('{"launch_id": "2026')
    os.utime(temporary, (1, 1))
"""


def half_written(one: Round) -> str:
    """What runs leave that are killed while they write."""
    one.place.python("-c", _HALF_WRITTEN, f"{STATE}/chat")
    return one.relaunch()


def two_operators(one: Round) -> str:
    """Both at once: one after another, or the second one gives up; never both into one server."""
    flags = {"max_total_tokens": one.tokens}
    with one.place.relaunching(flags=flags) as first:
        time.sleep(one.rng.uniform(0, 0.5) * one.typical_s)
        second = one.relaunch(lease_wait_s=1)
        said = first.wait()
    one.details.append(f"{said.verdict}: {said.text}")
    return ", ".join(sorted({second, said.verdict}))


_MEMORY = Path("/sys/fs/cgroup/memory/lxc")


def low_memory(one: Round) -> str:
    """The container's limit leaves less than the next launch needs."""
    group = _MEMORY / str(one.place.box.number) / "ns"
    limit = group / "memory.limit_in_bytes"
    if not limit.exists():  # version 2 alone
        group = Path("/sys/fs/cgroup/lxc") / str(one.place.box.number) / "ns"
        limit = group / "memory.max"
    assert limit.exists(), f"no memory controller for the container at {group}"
    before = limit.read_text().strip()
    one.later.callback(lambda: limit.write_text("-1" if limit.name.endswith("bytes") else before))
    limit.write_text(str(2048 << 20))
    return one.relaunch(min_available_mib=4096)


CUT = tuple(f"{first}, then {SERVING}" for first in (KILLED, LOST))
FAULTS = (
    Fault("none", none, (SERVING,)),
    Fault("leader killed", leader_killed, (SERVING,), served=True),
    Fault("rank killed", rank_killed, (SERVING,), served=True),
    Fault("rank stopped", rank_stopped, (SERVING,), served=True),
    Fault("orphans", orphans, (SERVING,)),
    Fault("ignores SIGTERM", ignores_term, (SERVING,)),
    Fault("session dies", session_dies, (SERVING,)),
    Fault("shm leftovers", shm_leftovers, (SERVING,)),
    Fault("shm full", shm_full, (NOT_CLEAN,)),
    Fault("GPU held", held, (NOT_CLEAN,)),
    Fault("port taken", port_taken, (DENIED,)),
    Fault("low memory", low_memory, (NOT_CLEAN, DENIED)),
    Fault("controller killed", controller_killed, (SERVING, *CUT)),
    Fault("Ctrl-C", controller_interrupted, (SERVING, *CUT)),
    Fault("cable out", cable_out, (SERVING, *CUT)),
    Fault("connection killed", connection_killed, (SERVING, *CUT)),
    Fault("dies in start", dies_in_start, (BACK,)),
    Fault("hangs in start", hangs_in_start, (BACK,)),
    Fault("fails requests", answers_nobody, (BACK,)),
    Fault("bad flag", bad_flag, (DENIED,)),
    Fault("unit failed", unit_failed, (SERVING,), served=True),
    Fault("stale lease", stale_lease, (SERVING,)),
    Fault("half-written", half_written, (SERVING,)),
    Fault("two operators", two_operators, (SERVING, f"{LEASED}, {SERVING}")),
)


def dealt(rng: random.Random, faults: t.Sequence[Fault] = FAULTS) -> t.Iterator[Fault]:
    """The faults in random order, all of them before any comes again."""
    while True:
        deck = list(faults)
        rng.shuffle(deck)
        yield from deck


# --- the soak ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """One round as it was."""

    number: int
    fault: str
    verdict: str
    seconds: float
    problems: tuple[str, ...]
    wrong: bool = False
    false_claims: int = 0
    lost: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()
    hung: bool = False
    sums: t.Mapping[str, int] = dataclasses.field(default_factory=dict)
    details: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    def line(self) -> str:
        shown = " ".join(f"{name.replace(' ', '_')}={self.sums[name]}" for name in SHOWN if name in self.sums)
        text = f"{self.number:4} {self.fault:18} {self.verdict:24} {self.seconds:6.1f} s  {shown}"
        return "\n".join([text, *(f"       {problem}" for problem in self.problems)])


SHOWN = ("process", "zombie", "fds", "shm", "shm bytes", "state", "state bytes", "unit", "mount", "cgroup", "/tmp")


@dataclasses.dataclass
class Report:
    """All rounds, and since when something has grown."""

    seed: int
    rounds: list[Result] = dataclasses.field(default_factory=list)
    since: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.rounds) and all(one.ok for one in self.rounds)

    def table(self) -> str:
        """Kinds by rounds, and the sums that must be 0."""
        kinds = Counter(one.fault for one in self.rounds)
        lines = [f"{'fault':18} rounds  verdicts"]
        for name in sorted(kinds):
            verdicts = Counter(one.verdict for one in self.rounds if one.fault == name)
            told_so = ", ".join(f"{number} x {verdict}" for verdict, number in verdicts.most_common())
            lines.append(f"{name:18} {kinds[name]:6}  {told_so}")
        lines += [f"grown since round {number}: {what}: {name}" for (what, name), number in self.since.items()]
        rounds, seconds = self.rounds, [one.seconds for one in self.rounds]
        sums = {
            "wrong verdicts": sum(one.wrong for one in rounds),
            "false claims": sum(one.false_claims for one in rounds),
            "bystanders lost": len({name for one in rounds for name in one.lost}),
            "leaks": len(self.since),
            "hangs": sum(one.hung for one in rounds),
        }
        lines.append(
            f"{len(rounds)} rounds, seed {self.seed}: "
            + ", ".join(f"{name} {number}" for name, number in sums.items())
            + f"; {sum(seconds):.0f} s, {sum(seconds) / max(1, len(seconds)):.1f} s a round, "
            + f"longest {max(seconds, default=0):.1f} s"
        )
        return "\n".join(lines)


class Soak:
    """Rounds in a row on one place."""

    def __init__(self, place: Place, seed: int, say: t.Callable[[str], None] = print) -> None:
        self.place = place
        self.rng = random.Random(seed)
        self.report = Report(seed)
        self.say = say
        self.bounds: Bounds | None = None
        self.good: int | None = None
        self.plain: list[float] = []

    def run(self, count: int, until: float | None = None, faults: t.Sequence[Fault] = FAULTS) -> Report:
        """``count`` rounds, none begun after the monotonic time ``until``. The first one has no fault: it is the base.
        """
        deck = dealt(self.rng, faults)
        for number in range(1, count + 1):
            if until is not None and time.monotonic() > until:
                break
            fault = FAULTS[0] if number == 1 else next(deck)
            result = self.round(number, fault)
            self.report.rounds.append(result)
            self.say(result.line())
        return self.report

    def round(self, number: int, fault: Fault) -> Result:
        """One fault, one verdict, one census."""
        place = self.place
        began = time.monotonic()
        typical = sorted(self.plain[-5:])[len(self.plain[-5:]) // 2] if self.plain else 15.0
        one = Round(place, random.Random(self.rng.randrange(1 << 30)), number, typical, self.good)
        problems: list[str] = []
        hung, verdict = False, "no verdict"
        try:
            if fault.served and place.leader() is None:
                one.details.append("nobody served: started first")
                assert one.relaunch() == SERVING, one.details
                self.good = one.tokens
                one.tokens += 4
            verdict = fault.scene(one)
        except DeadlinePassed as passed:
            hung = True
            problems.append(f"hung: {str(passed)[:1500]}")
        except Exception as error:  # a fact like others
            problems.append(f"{type(error).__name__}: {str(error)[:1500]}")
        seconds = time.monotonic() - began
        wrong = verdict not in fault.verdicts
        if wrong:
            problems.append(f"expected {' or '.join(fault.verdicts)}: {' | '.join(one.details)[:1500]}")
        elif fault is FAULTS[0]:
            self.plain.append(seconds)
        last = verdict.rpartition("then ")[2]
        claim = self._claim(last, one)
        if SERVING in last:
            self.good = one.tokens
        census = place.census()
        false = untrue(claim, census, place.record(), self._holders(claim))
        problems += [f"false claim ({verdict}): {text}" for text in false]
        if claim.state == "open" and not hung:
            problems.append("no claim could be judged")
        try:
            one.later.close()
        except Exception as error:
            problems.append(f"the fault could not be taken back: {error}")
        lost = self._lost(census)
        problems += [f"lost: {name}" for name in lost]
        grown, sums = self._grown(number)
        problems += [f"grown since round {self.report.since[more.what, more.name]}: {more}" for more in grown]
        return Result(
            number, fault.name, verdict, seconds, tuple(problems), wrong, len(false), tuple(lost),
            tuple(map(str, grown)), hung, sums, tuple(one.details),
        )  # fmt: skip

    def _claim(self, last: str, one: Round) -> Claim:
        if SERVING in last:
            return Claim("serves", one.tokens)
        if last == BACK:
            return Claim("serves", self.good)
        if last in (NOT_CLEAN, STOPPED):
            return Claim("nobody")
        if last in (DENIED, LEASED):
            return Claim("serves", self.good, one.served) if one.served is not None else Claim("nobody")
        return Claim("open")

    def _holders(self, claim: Claim) -> list[int]:
        return self.place.ranks() if claim.state == "serves" else []

    def _lost(self, census: t.Mapping[str, t.Any]) -> list[str]:
        living = {(one["pid"], one["ticks"]) for one in census["processes"] if one["state"] not in "ZX"}
        return [name for name, key in self.place.bystanders.items() if key not in living]

    def _grown(self, number: int) -> tuple[list[Growth], dict[str, int]]:
        """What is beyond its bounds once what passes has passed; and the sums."""
        self.place.disconnect()
        end = time.monotonic() + SETTLE_S
        while True:
            now = counts(self.place.census(None))
            now.update({("controller", name): value for name, value in self.place.own().items()})
            if self.bounds is None:
                if not any("session-" in name for _what, name in now) or time.monotonic() > end:
                    self.bounds = Bounds(now, promised())
                    break
            elif time.monotonic() > end or all(
                (one.what, one.name) in self.report.since for one in self.bounds.grown(now)
            ):
                break
            time.sleep(0.5)
        grown = self.bounds.grown(now)
        for one in grown:
            self.report.since.setdefault((one.what, one.name), number)
        self.place.sweep()
        return grown, totals(now)


def promised() -> dict[tuple[str, str], int]:
    """What is kept by setting: so many launches, and nothing more."""
    return {("state", "chat/launches/*"): KEEP, ("bytes", "state"): KEEP * BYTES_OF_A_LAUNCH}
