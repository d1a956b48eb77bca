# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""gpu_evict: who is who. Numbers and names that change hands, hostile command lines, locks, limits and rights."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.doubles.nvml import lies
from ansible_collections.cleanslate.sglang.tests.faults.model import Answer, Row
from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch
from ansible_collections.cleanslate.sglang.tests.faults.rows_evict import NO_KILL_RUNG
from ansible_collections.cleanslate.sglang.tests.faults.site import Site, told
from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR
from ansible_collections.cleanslate.sglang.tests.harness.modules import (
    module_argv,
    module_env,
    parse_result,
    run_module,
)
from ansible_collections.cleanslate.sglang.tests.harness.namespace import NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.standin import STANDIN
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import DEADLINES, FIXTURES, NAME

CORE = "plugins/module_utils"
CLIMB = f"{CORE}/act/climb.py"
SIGNALS = f"{CORE}/act/signals.py"
TARGETS = f"{CORE}/decide/targets.py"
HOLDERS = f"{CORE}/decide/holders.py"
PROTECTED = f"{CORE}/decide/protected.py"
LEFTOVERS = f"{CORE}/decide/leftovers.py"
PROCFS = f"{CORE}/observe/procfs.py"
SPAWN = f"{CORE}/spawn.py"
LEASE = f"{CORE}/lease.py"
CMDLINE = f"{CORE}/sglang/cmdline.py"
PIDFD_OPEN = "434"
WINDOW = ("pidfd_open:delay_enter=4s:when=1",)
SLEEPER = "import time; time.sleep(600)"


def in_window(site: Site) -> None:
    """Until the module is about to take hold of its target, having looked at it: strace holds it there for 4 s."""

    def stands_there() -> bool:
        for pid, title in site.ns.titles().items():
            if "run_module.py" in title and not title.startswith("strace"):
                text = (site.ns.proc / str(pid) / "syscall").read_text()
                if text.split()[:1] == [PIDFD_OPEN]:
                    return True
        return False

    wait_for("the window", stands_there, 40)


def fake_leader(site: Site, *words: str, name: str = "leader", **environment: str) -> NsProcess:
    """A leader by its command line alone."""
    output = site.ns.directory / f"{name}.out"
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", "/models/tiny", *words]
    env = {"PYTHONPATH": str(FIXTURES / "leader"), **environment}
    started = site.ns.popen(argv, env, detached=True, output=output)
    wait_for("the leader", lambda: output.exists() and "ready" in output.read_text())
    site.name(name, started.pid)
    return started


# --- numbers that change hands ------------------------------------------------------------------------------------


def pid_reuse(site: Site) -> None:
    """A worker without a leader dies between look and signal, and its number is given to somebody else."""
    worker = site.host.hold("--title", "sglang::scheduler_TP0", "/dev/null", env={"PYTHONPATH": str(STANDIN)})
    wait_for("its title", lambda: site.ns.cmdline(worker.pid) == ["sglang::scheduler_TP0"])
    ticks = site.ns.start_ticks(worker.pid)
    assert ticks is not None

    def change_hands() -> None:
        in_window(site)
        site.departs((worker.pid, ticks))
        site.host.kill(worker.pid, signal.SIGKILL)
        wait_for("the number to be free", lambda: worker.pid not in site.ns.pids())
        starter = site.host.fixture("reuse_pid.py", str(worker.pid), "sleep", "300")
        wait_for("the new owner", lambda: site.ns.cmdline(worker.pid)[:1] == ["sleep"])
        site.arrives("new owner of the pid", worker.pid)
        site.arrives("its parent", starter.pid)

    site.evict(scope="sglang", inject=WINDOW, meanwhile=change_hands)


def leader_replaced(site: Site) -> None:
    """Same pid, same start time, another program: the leader exec'ed between look and signal."""
    leader = fake_leader(site, "--port", "30000")

    def become_another() -> None:
        in_window(site)
        site.host.kill(leader.pid, signal.SIGUSR1)
        wait_for("another program", lambda: site.ns.cmdline(leader.pid)[:1] == ["sleep"])

    site.evict(port=30000, inject=WINDOW, meanwhile=become_another)


def session_reused(site: Site) -> None:
    """The record's session number belongs to another program by now, whose worker looks like one that imports."""
    server = site.server(gpus=(0,), port=30001, name="other server")
    ticks = site.ns.start_ticks(server.leader.pid)
    assert ticks is not None
    other = site.ns.popen([sys.executable, "-c", SLEEPER, "--multiprocessing-fork"], detached=True)
    site.name("new owner of the session", other.pid)
    exe = os.path.realpath(sys.executable)
    site.host.record(
        server, pid=other.pid, sid=other.pid, start_ticks=ticks - 1000, port=None, python=exe, program=exe
    )
    site.evict(name=NAME)


def recorded_orphans(site: Site) -> None:
    """Leader and ranks are dead; forked children hold the memory, and only the record tells whose they are."""
    server = site.host.server(gpus=(0, 1), faults={"ORPHAN": "1"})
    site.host.record(server)
    tree = server.tree()
    orphans = {pid for pid, title in tree.items() if title == "python3"}
    site.name("orphan", *orphans)
    site.host.kill(server.leader.pid, signal.SIGKILL)
    site.host.gone(set(tree) - orphans)
    site.evict(name=NAME)


def double_fork(site: Site) -> None:
    """The driver lists the dead parent; its child, forked twice, in a session of its own, has the memory."""
    output = site.ns.directory / "pids"
    site.host.hold("--map", "--fork", "1", str(site.host.nodes[0]), output=output)
    wait_for("two pids", lambda: output.exists() and len(output.read_text().split()) == 2)
    parent, child = map(int, output.read_text().split())
    site.host.gone([parent])
    site.name("orphan", child)
    site.host.nvml.write(*site.host.gpus(), *lies.forked_orphan(0, parent, child, 20_998))
    site.evict(scope="gpu", devices=["0"])


def foreign_pid(site: Site) -> None:
    """An older driver lists the host's pids in a container, where the number means somebody else."""
    stranger = site.ns.popen(["sleep", "600"], detached=True)
    site.name("stranger", stranger.pid)
    site.host.nvml.write(*site.host.gpus(), *lies.foreign_pids(0, 5000, stranger.pid))
    site.evict(scope="gpu", devices=["0"], max_used_mib=6000)


# --- places -------------------------------------------------------------------------------------------------------


def nested_namespace(site: Site) -> None:
    """Another server of the same port, in a container with a network of its own."""
    words = ["-m", "sglang.launch_server", "--model-path", "/models/tiny", "--port", "30000"]
    argv = ["unshare", "--net", "--pid", "--fork", "--kill-child", sys.executable, *words]
    site.ns.popen(argv, {"PYTHONPATH": str(FIXTURES / "leader")}, detached=True)

    def inner() -> list[int]:
        found = site.ns.titles().items()
        return [pid for pid, title in found if "launch_server" in title and title.startswith(sys.executable)]

    site.name("server in a container", *wait_for("it", inner))
    site.server(gpus=(0,))
    site.evict(port=30000)


ANCESTOR = """
import mmap, os, subprocess, sys, time
node, folder, *command = sys.argv[1:]
held = mmap.mmap(os.open(node, os.O_RDWR), 4096, flags=mmap.MAP_PRIVATE)
while not os.path.exists(folder + "/go"):
    time.sleep(0.02)
with open(folder + "/given") as given, open(folder + "/answer", "w") as answer:
    subprocess.call(command, stdin=given, stdout=answer)
open(folder + "/done", "w").close()
time.sleep(600)
"""


def own_ancestor(site: Site) -> None:
    """The program from which the run is started holds the GPU itself, as a notebook does."""
    folder, node = site.ns.directory / "ancestor", str(site.host.nodes[0])
    folder.mkdir()
    values = {"scope": "gpu", "devices": ["0"], "device_major": LOOP_MAJOR, "deadlines": DEADLINES}
    (folder / "given").write_text(json.dumps(values))
    argv = [sys.executable, "-c", ANCESTOR, node, str(folder), *module_argv("gpu_evict")]
    started = site.ns.popen(argv, module_env(site.host.nvml.env()), detached=True)
    wait_for("the mapping", lambda: node in (site.ns.proc / str(started.pid) / "maps").read_text())
    site.name("the operator's own program", started.pid)

    def run() -> Answer:
        (folder / "go").touch()
        wait_for("the run's end", (folder / "done").exists, site.deadline_s)
        return told(parse_result((folder / "answer").read_text(), ""))

    site.look(run)


# --- hostile command lines ----------------------------------------------------------------------------------------

FORGED = (
    ("python3 -m sglang.launch_server --port 30000",),
    ("python3\n-m\nsglang.launch_server", "--port", "30000"),
    ("vi", "-m", "sglang.launch_server", "--port", "30000"),
    ("python3", "-c", SLEEPER, "-m", "sglang.launch_server", "--port", "30000"),
    ("grep\t\"'\udcff\udcfe", "python -m sglang.launch_server", "--port=30000"),
    ("tail", "x" * 120_000 + " -m sglang.launch_server --port 30000"),
)


def has_its_words(site: Site, pid: int) -> bool:
    """Whether it no longer runs the little program that gives it its command line."""
    return "os.execv" not in " ".join(site.ns.cmdline(pid))


def forged_titles(site: Site) -> None:
    """Programs whose command lines name a server in every way that is none: newlines, quotes, bytes, 120 KB."""
    for number, words in enumerate(FORGED):
        program = "/usr/bin/python3" if words[:2] == ("python3", "-c") else "/bin/sleep"
        if program == "/bin/sleep":
            # sleep would refuse such words: a shell of that name waits instead.
            program, tail = "/bin/bash", ("-c", "read x <> <(:)")
            code = "import os, sys; os.execv(sys.argv[1], [w.encode('utf-8', 'surrogateescape') for w in WORDS])"
            code = code.replace("WORDS", repr([words[0], *tail, *words[1:]]))
        else:
            code = f"import os; os.execv({program!r}, {list(words)!r})"
        forged = site.ns.popen([sys.executable, "-c", code, program], detached=True)
        site.name(f"forged {number}", forged.pid)
        wait_for("its words", functools.partial(has_its_words, site, forged.pid))
    site.server(gpus=(0,))
    site.evict(scope="sglang")


def cut_command_line(site: Site) -> None:
    """A server of another port, whose port stands behind the first 128 KiB of its command line."""
    fake_leader(site, *("--x" + "y" * 60_000 for _unused in range(3)), "--port", "31000", name="other server")
    site.evict(port=30000)


# --- storms and crowds --------------------------------------------------------------------------------------------


def fork_storm(site: Site) -> None:
    """Processes that come and go while we look, none of them ours."""
    storm = site.host.fixture("fork_storm.py", "--seconds", "60", "--width", "8", "--life-s", "0.01")
    site.later.callback(site.host.kill, storm.pid, signal.SIGTERM)
    wait_for("the storm", lambda: len(site.ns.pids()) > 8)
    site.name("storm", storm.pid)
    site.restless(storm.pid)
    site.server(gpus=(0,), faults={"IGNORE_TERM": "1"})
    site.evict(port=30000, deadlines={**DEADLINES, "term": 1}, trace=False)


def forking_server(site: Site) -> None:
    """The server's own workers fork faster than one look after another."""
    leader = fake_leader(site, "--port", "30000", name="server", LEADER_FORKS="1", LEADER_IGNORES_TERM="1")
    wait_for("workers", lambda: len([one for one in site.ns.titles().values() if "scheduler_TP0" in one]) > 3)
    session = leader.pid
    site.restless(session)
    site.evict(port=30000, deadlines={**DEADLINES, "term": 1}, trace=False)


def compiled(site: Site, name: str, *options: str) -> Path:
    """A C program of tests/fixtures."""
    target = site.directory / name
    argv = ["gcc", "-O1", "-Wall", "-Werror", "-o", str(target), str(FIXTURES / f"{name.partition('.')[0]}.c")]
    subprocess.run([*argv, *options], check=True, timeout=60)
    return target


def crowd(site: Site) -> None:
    """5,000 processes with 50 open files each."""
    program = compiled(site, "crowd")
    output = site.ns.directory / "crowd.out"
    started = site.ns.popen([str(program), "5000", "50"], detached=True, output=output)
    wait_for("the crowd", lambda: output.exists() and "ready" in output.read_text(), 60)
    site.name("crowd", started.pid)
    site.server(gpus=(0,))
    site.evict(port=30000, trace=False)


# --- rights and limits --------------------------------------------------------------------------------------------


def may_not_look(site: Site) -> None:
    site.holder()
    site.host.nvml.write(*site.host.gpus())
    site.evict(scope="gpu", devices=["0"], wrap=("setpriv", "--bounding-set", "-sys_ptrace"))


def driver_hangs(site: Site) -> None:
    site.holder()
    site.host.nvml.write(*site.host.gpus(), *lies.hangs())
    site.evict(scope="gpu", nvml_deadline_s=1)


def memory_stays(site: Site) -> None:
    site.host.memory_follows_mappings(*lies.held_elsewhere(1, 7000))
    site.server(gpus=(1,))
    site.evict(port=30000, devices=["1"])


def memory_comes_late(site: Site) -> None:
    """The kernel unpins host memory after the death."""
    site.host.memory_follows_mappings(release_s=2)
    site.server(gpus=(0,), faults={"PINNED_MIB": "64"})
    site.evict(port=30000, devices=["0"])


def protected_holder(site: Site) -> None:
    pid = site.holder()
    site.evict(scope="gpu", devices=["0"], protect=[str(pid)])


def shm_in_use(site: Site) -> None:
    """Files of dead servers, some of which a living program has still mapped or open."""
    output = site.ns.directory / "shm"
    user = site.host.fixture("make_shm.py", output=output)
    wait_for("its files", lambda: output.exists() and output.read_text().endswith("}\n"))
    site.name("user of the files", user.pid)
    site.evict(port=30000)


def frozen(version: int) -> t.Callable[[Site], None]:
    """The server is in a frozen cgroup: of v1 it can't even be killed, of v2 SIGKILL reaches it."""

    def scene(site: Site) -> None:
        top = Path("/sys/fs/cgroup/freezer" if version == 1 else "/sys/fs/cgroup/unified")
        group = top / f"cleanslate-faults-{os.getpid()}"
        group.mkdir()
        site.later.callback(_remove_group, group)
        leader = fake_leader(site, "--port", "30000", name="server", LEADER_IGNORES_TERM="1")
        (group / "cgroup.procs").write_text(str(_outer(site, leader.pid)))
        state, word = ("freezer.state", "FROZEN") if version == 1 else ("cgroup.freeze", "1")
        (group / state).write_text(word)
        thawed = "THAWED" if version == 1 else "0"
        site.later.callback((group / state).write_text, thawed)
        site.evict(port=30000, deadlines={**DEADLINES, "term": 1, "kill": 2})

    return scene


def _outer(site: Site, pid: int) -> int:
    """The number that a process of the namespace has outside."""
    namespace = os.readlink(f"/proc/{site.ns.init_pid}/ns/pid")
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                status = Path(f"/proc/{name}/status").read_text()
                same = os.readlink(f"/proc/{name}/ns/pid") == namespace
            except OSError:
                continue
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
            if same and numbers[-1] == str(pid):
                return int(name)
    raise AssertionError(f"pid {pid} is not to be seen from outside")


def _remove_group(group: Path) -> None:
    def removed() -> bool:
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        try:
            group.rmdir()
        except OSError:
            return False
        return True

    wait_for("the cgroup's end", removed, 10)


# --- locks --------------------------------------------------------------------------------------------------------


def leased(site: Site, **changes: t.Any) -> None:
    """A server on which run ``a`` of alice works."""
    server = site.server(gpus=(0,))
    site.host.record(server)
    values = {"name": NAME, "state_dir": str(site.host.state_dir), "run_id": "a", "operator": "alice"}
    taken = run_module("server_lease", values, 60, ns=site.ns)
    assert not taken.failed, taken.json
    path = site.host.state_dir / NAME / "lease.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, **{key: found[value] for key, value in changes.items()}}))


def two_operators(site: Site) -> None:
    leased(site)
    site.evict(name=NAME)


def stale_lock(site: Site) -> None:
    """Its controller is gone and its time is over."""
    leased(site, expires_since_boot="renewed_since_boot", expires_at="renewed_at")
    site.evict(name=NAME)


def clock_jump(site: Site) -> None:
    """Somebody set the host's clock ten days ahead: by it, the lease would have expired."""
    leased(site)
    library = compiled(site, "clock_jump.so", "-shared", "-fPIC", "-ldl")
    site.evict(name=NAME, trace=False, env={"LD_PRELOAD": str(library), "CLOCK_JUMP_S": str(10 * 86_400)})


def state_dir_on(options: str, fill: bool = False) -> t.Callable[[Site], None]:
    """The state directory lies on a file system of its own that is full or read-only; the lease is the run's."""

    def scene(site: Site) -> None:
        state = site.host.state_dir
        state.mkdir(parents=True)
        site.ns.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "none", str(state)], 10).check()
        inside = site.ns.root / str(state).lstrip("/")
        site.server(gpus=(0,))
        values = {"name": NAME, "state_dir": str(state), "run_id": "a", "operator": "alice"}
        taken = run_module("server_lease", values, 60, ns=site.ns)
        assert not taken.failed, taken.json
        if fill:
            with open(inside / "somebody's", "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(b"\1" * 4096):
                    pass
        else:
            site.ns.run(["mount", "-o", f"remount,{options}", str(state)], 10).check()
        site.evict(name=NAME, port=30000, run_id="a")

    return scene


ANY_IDENTITY = (
    Patch(SIGNALS, "if now is None or now.key != process.key:", "if now is None:"),
    Patch(SIGNALS, "if now.key != held.process.key:", "if False:"),
)
RECORDED = '            add(process, f"in session {record.sid}, which the launch record made for this server")'

ROWS = (
    Row(
        "evict-pid-reuse", "the pid changes hands between look and signal", "gpu_evict",
        ("evicted", "nothing_to_do"), pid_reuse, ANY_IDENTITY,
    ),
    Row(
        "evict-leader-replaced", "the leader becomes another program between look and signal", "gpu_evict",
        ("evicted", "nothing_to_do"), leader_replaced,
        (Patch(CLIMB, 'return None if is_leader(called.value) else "it runs another program by now"', "return None"),),
    ),
    Row(
        "evict-session-reused", "the recorded session number belongs to somebody else", "gpu_evict",
        ("nothing_to_do",), session_reused,
        (Patch(TARGETS, "if now is not None and now.start_ticks != record.start_ticks:", "if False:"),),
    ),
    Row(
        "evict-recorded-orphans", "orphans of a dead server in its recorded session (setsid)", "gpu_evict",
        ("evicted",), recorded_orphans, (Patch(TARGETS, RECORDED, "            pass"),), may_die=("orphan",),
    ),
    Row(
        "evict-double-fork", "a forked child holds what its dead parent is listed for", "gpu_evict", ("evicted",),
        double_fork, (Patch(HOLDERS, "text.startswith((READABLE_MAPPING, NVML_AND_OPEN))",
                            "text.startswith(NVML_AND_OPEN)"),), may_die=("orphan",),
    ),
    Row(
        "evict-foreign-pid", "the driver lists a number that means somebody else here", "gpu_evict",
        ("nothing_to_do",), foreign_pid,
        (Patch(HOLDERS, "holder.protected is None and solid", "holder.protected is None"),),
    ),
    Row(
        "evict-nested-container", "a server of the same port in a container's network", "gpu_evict", ("evicted",),
        nested_namespace,
        (Patch(TARGETS, "leader.port == port and leader.same_network:", "leader.port == port:"),),
        may_die=("server",),
    ),
    Row(
        "evict-own-ancestor", "the program that started the run holds the GPU", "gpu_evict", ("nothing_to_do",),
        own_ancestor, (Patch(PROTECTED, "if process.pid in own_pids:", "if process.pid in ():"),),
    ),
    Row(
        "evict-forged-titles", "command lines that name a server: newlines, quotes, bytes, 120 KB", "gpu_evict",
        ("evicted",), forged_titles,
        (Patch(CMDLINE, "return server_arguments(argv) is not None",
               'return "sglang.launch_server" in " ".join(argv)'),), may_die=("server",),
    ),
    Row(
        "evict-cut-command-line", "a port behind the first 128 KiB of the command line", "gpu_evict",
        ("unknown",), cut_command_line, (Patch(CMDLINE, "    if cut:\n", "    if False:\n"),),
        codes=("server_unknown",),
    ),
    Row(
        "evict-fork-storm", "processes come and go while we look", "gpu_evict", ("evicted",), fork_storm,
        (Patch(PROCFS, "if stat_text else None\n    if stat is None:\n        return None",
               "if stat_text else None\n    if stat is None:\n        raise ValueError(base)"),), may_die=("server",),
    ),
    Row(
        "evict-forking-server", "the server forks faster than we look", "gpu_evict", ("evicted",), forking_server,
        (Patch(CLIMB, "for attempt in range(KILL_ROUNDS):", "for attempt in range(1):"),), may_die=("server",),
    ),
    Row(
        "evict-crowd", "5,000 processes with 50 open files each", "gpu_evict", ("evicted",), crowd,
        (Patch(SPAWN, "FETCH_LIMIT_BYTES = 256 * 2**20", "FETCH_LIMIT_BYTES = 2**18"),), may_die=("server",),
        bound_s=240, quick=False,
    ),
    Row(
        "evict-no-permission", "root without the right to look into others", "gpu_evict", ("unknown",), may_not_look,
        (Patch(CLIMB, "        if blind:", "        if False:"),), codes=("scan_incomplete",),
    ),
    Row(
        "evict-driver-hangs", "NVML never answers", "gpu_evict", ("unknown",), driver_hangs,
        (Patch(CLIMB, "        if snapshot.reading.gpus is None:\n            words",
               "        if False:\n            words"),),
        codes=("gpus_unknown",),
    ),
    Row(
        "evict-memory-stays", "memory stays though nobody is left", "gpu_evict", ("failed",), memory_stays,
        (Patch(CLIMB, '        if used:\n            self._reason("memory_held"',
               '        if False:\n            self._reason("memory_held"'),),
        codes=("memory_held",), may_die=("server",),
    ),
    Row(
        "evict-memory-comes-late", "memory comes free two seconds after the death", "gpu_evict", ("evicted",),
        memory_comes_late, (Patch(CLIMB, "expected = 10.0 + self._unpin_s()", "expected = 0.0"),),
        may_die=("server",),
    ),
    Row(
        "evict-protected", "a holder that the operator protects", "gpu_evict", ("nothing_to_do",), protected_holder,
        (Patch(PROTECTED, "    for wanted in protect:", "    for wanted in ():"),),
    ),
    Row(
        "evict-shm-in-use", "files of dead servers that somebody still uses", "gpu_evict", ("nothing_to_do",),
        shm_in_use, (Patch(LEFTOVERS, "if file.mapped_by or file.opened_by:", "if False:"),),
    ),
    Row(
        "evict-frozen-v1", "the server is in a frozen cgroup (v1)", "gpu_evict", ("failed",), frozen(1),
        (Patch(CLIMB, "if one.process.kill_pending or one.process.state == \"D\"]", "if False]"),),
        codes=("unkillable",), may_die=("server",),
    ),
    Row(
        "evict-frozen-v2", "the server is in a frozen cgroup (v2)", "gpu_evict", ("evicted",), frozen(2),
        (NO_KILL_RUNG,), may_die=("server",),
    ),
    Row(
        "evict-two-operators", "another operator's run works on the server", "gpu_evict", ("unknown",), two_operators,
        (Patch(LEASE, "if found is not None and found[1].held:", "if False:"),), codes=("refused",),
    ),
    Row(
        "evict-stale-lock", "the lease of a run that is gone", "gpu_evict", ("evicted",), stale_lock,
        (Patch(LEASE, "return self.running or not self.expired", "return True"),), may_die=("server",),
    ),
    Row(
        "evict-clock-jump", "the host's clock is set ten days ahead", "gpu_evict", ("unknown",), clock_jump,
        (Patch(LEASE, "left = lease.expires_since_boot - clock.since_boot if same_boot else", "left ="),),
        codes=("refused",),
    ),
    Row(
        "evict-state-full", "the disk with the state directory is full", "gpu_evict", ("unknown",),
        state_dir_on("", fill=True),
        (Patch(LEASE, "        _write(folder, renewed(found, clock, length, module, process))\n", ""),),
        codes=("refused",),
    ),
    Row(
        "evict-state-read-only", "the state directory is read-only", "gpu_evict", ("unknown",), state_dir_on("ro"),
        (Patch(LEASE, "    process = our_process()\n    if not os.path",
               "    return Kept(state_dir, name, None)\n    process = our_process()\n    if not os.path"),),
        codes=("refused",),
    ),
)  # fmt: skip
