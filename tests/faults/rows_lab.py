# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rows in LXC containers: what systemd, sshd, logins, a Proxmox node and neighbour containers add to a fault."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import time
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.faults.lab_site import DEADLINES, LOCAL, LabSite, group_of
from ansible_collections.cleanslate.sglang.tests.faults.model import Answer, Row
from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch
from ansible_collections.cleanslate.sglang.tests.faults.rows_evict import ANY_PORT, NO_DEADLINE, NO_KILL_RUNG
from ansible_collections.cleanslate.sglang.tests.faults.rows_play import ANY_VERDICT, outcome
from ansible_collections.cleanslate.sglang.tests.faults.site import told
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.inventory import run_module_on
from ansible_collections.cleanslate.sglang.tests.lab.node import Guest, outsider, silent_files
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import (
    DOUBLES,
    MODEL,
    OPERATOR,
    PYTHON,
    SERVER_USER,
    SGLANG_PYTHON,
)
from ansible_collections.cleanslate.sglang.tests.lab.scenarios import OTHER_PORT, PORT, chat, joint_verdict
from ansible_collections.cleanslate.sglang.tests.lab.servers import standin_argv, unit_state, wait_serving

CORE = "plugins/module_utils"
CLIMB = f"{CORE}/act/climb.py"
OWNERS = f"{CORE}/act/owners.py"
CGROUPS = f"{CORE}/cgroups.py"
CMDLINE = f"{CORE}/sglang/cmdline.py"
TARGETS = f"{CORE}/decide/targets.py"
GUESTS = f"{CORE}/decide/guests.py"
RESTARTERS = f"{CORE}/decide/restarters.py"
CLEAN = f"{CORE}/decide/clean.py"
LOOK = f"{CORE}/observe/look.py"
VERDICTS = "plugins/plugin_utils/verdicts.py"
DRIFT_SERVER = f"{CORE}/decide/drift_server.py"
ON_GPU_0 = "SGLANG_STANDIN_DEVICES=/dev/nvidia0,/dev/nvidia1"
RESTART_S = 2.5  # RestartSec is 1 s: a restart that was coming has come by then
Json = dict[str, t.Any]


def unit_stays_down(site: LabSite, unit: str) -> t.Callable[[Json], Answer]:
    """What the module says; ``came_back`` where its unit runs, or will run, all the same."""

    def tell(result: Json) -> Answer:
        answer = told(result)
        if answer.verdict != "evicted":
            return answer
        time.sleep(RESTART_S)
        state = unit_state(site.box, unit, "ActiveState")["ActiveState"]
        down = state in ("inactive", "failed")
        return answer if down else dataclasses.replace(answer, verdict="came_back", text=f"{unit} is {state}")

    return tell


# --- owners and supervisors ---------------------------------------------------------------------------------------


def restarting_unit(site: LabSite) -> None:
    site.unit("kimi", PORT, restart="always")
    site.brings_newcomers(lambda title: "sglang" in title)
    site.evict_inside(port=PORT, tell=unit_stays_down(site, "kimi.service"))


def unit_around_a_shell(site: LabSite) -> None:
    """Its main process is a shell, which systemd would start again, and the server with it."""
    command = f"/bin/bash -c '{shlex.join(standin_argv(PORT))}; echo ended'"
    site.unit("kimi", PORT, restart="always", argv=command)
    site.brings_newcomers(lambda title: "sglang" in title)
    site.evict_inside(port=PORT, tell=unit_stays_down(site, "kimi.service"))


def another_unit(site: LabSite) -> None:
    """Another server's unit, which sees and opens the same GPUs."""
    site.unit("kimi", PORT, 0)
    site.unit("embed", OTHER_PORT, 1, called="other server", restart="always")
    site.evict_inside(port=PORT)


def user_unit(site: LabSite) -> None:
    """A unit of the operator's own manager, which root does not stop: it starts the server again."""
    command = f"ExecStart={shlex.join(standin_argv(PORT))}"
    text = f"[Service]\n{command}\nRestart=always\nRestartSec=1\nEnvironment={ON_GPU_0}\n"
    folder = site.box.root / f"home/{OPERATOR}/.config/systemd/user"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.service").write_text(text)
    site.later.callback((folder / "mine.service").unlink)
    start = "systemctl --user daemon-reload && systemctl --user start mine.service && exec sleep 3000"
    site.later.enter_context(site.session(start))
    wait_serving(site.box, PORT)
    site.name("server", *site.in_unit("mine.service"))
    site.name_found("operator's session", "sleep 3000")
    site.brings_newcomers(lambda title: "sglang" in title)
    site.evict_inside(port=PORT, scope="server", devices=[])


def loop_in_a_login(site: LabSite) -> None:
    """``while true`` in an operator's shell: nobody's unit, and it starts the server again."""
    loop = f"export {ON_GPU_0}; while true; do {shlex.join(standin_argv(PORT))} >>log 2>&1; sleep 1; done"
    site.later.enter_context(site.session(f"bash -c {shlex.quote(loop)}; true"))
    wait_serving(site.box, PORT)
    leader = site.leader(PORT)
    loop_pid = int(Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[1])
    site.name("the operator's loop", loop_pid)
    site.name("server", leader, *descendants(leader))
    site.brings_newcomers(lambda title: "sglang" in title)
    site.evict_inside(port=PORT)


def descendants(pid: int) -> list[int]:
    """Outer pids of everybody below this one."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
                if stat[0] not in "ZX":
                    parents.setdefault(int(stat[1]), []).append(int(name))
    found = list(parents.get(pid, []))
    for child in found:
        found += parents.get(child, [])
    return found


# --- logins -------------------------------------------------------------------------------------------------------


def nohup(site: LabSite, *environment: str) -> int:
    """``ssh host 'nohup python -m sglang.launch_server ... &'``: the session is gone; the leader's outer pid."""
    words = " ".join([f"export {ON_GPU_0}", *environment])
    start = f"{words}; nohup {shlex.join(standin_argv(PORT))} >log 2>&1 </dev/null &"
    subprocess.run([*site.box.ssh_argv(OPERATOR, "-T"), start], timeout=60, check=True)
    wait_serving(site.box, PORT)
    return site.leader(PORT)


def session_goes_on(site: LabSite) -> None:
    """The server was started in a session that is still open: shells and jobs are in its cgroup."""
    start = f"export {ON_GPU_0}; nohup {shlex.join(standin_argv(PORT))} >log 2>&1 & sleep 3000; true"
    site.later.enter_context(site.session(start))
    site.later.enter_context(site.session("bash -l -c 'sleep 3001; true'"))
    wait_for("the second session", lambda: len(site.box.find("sleep 3001")) >= 2, 20)
    wait_serving(site.box, PORT)
    leader = site.leader(PORT)
    site.name("server", leader, *descendants(leader))
    scope = group_of(leader)
    assert "/session-" in scope, scope
    jobs = [one.outer_pid for one in site.box.find("sleep 300")]
    assert any(group_of(pid) == scope for pid in jobs), jobs
    site.name("operator's job", *jobs)
    site.evict_inside(port=PORT)


def orphans_of_init(site: LabSite) -> None:
    """The session is gone, leader and rank are dead; init has adopted a child that has the memory, by its mapping."""
    leader = nohup(site, "SGLANG_STANDIN_ORPHAN=1")
    family = [leader, *descendants(leader)]
    (child,) = {pid for pid in site.node.gpus.holders(0) if "scheduler" not in words_of(pid)}
    os.kill(leader, signal.SIGKILL)
    wait_for("the tree is dead", lambda: not {*family} - {child} & {*site.node.gpus.holders(0)})
    wait_for("nobody else", lambda: site.node.gpus.holders(0) == {child})
    site.name("orphan", child)
    site.later.enter_context(site.session("bash -l -c 'sleep 3001; true'"))
    wait_for("a session", lambda: len(site.box.find("sleep 3001")) >= 2, 20)
    site.name_found("operator's job", "sleep 3001")
    site.evict_inside(scope="gpu", devices=["0"])


def words_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def entered_by_pct(site: LabSite) -> None:
    """``pct enter``: the operator's shell, typed into, is in no unit; its command line names the server."""
    command = f"{shlex.join(standin_argv(PORT))} >/tmp/log 2>&1"
    typed = f"export {ON_GPU_0}; {command} & sleep 3000; true # python -m sglang.launch_server --port {PORT}"
    which = ["-P", str(site.node.lab.lxc), "-n", str(site.guest.vmid)]
    argv = ["lxc-attach", *which, "--", "bash", "-c", typed]
    silent: Json = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    entered = site.later.enter_context(subprocess.Popen(argv, start_new_session=True, **silent))
    site.later.callback(entered.kill)
    wait_serving(site.box, PORT)
    leader = site.leader(PORT)
    server = {leader, *descendants(leader)}
    site.name("server", *server)
    site.name("the operator's pct enter", *({entered.pid, *descendants(entered.pid)} - server))
    site.evict_on_node(port=PORT)


# --- containers of containers, neighbours, the node ---------------------------------------------------------------


def hierarchies(pid: int) -> list[Path]:
    """A process's cgroup in every hierarchy."""
    mounts = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _dash, after = line.partition(" - ")
        kind, _source, options = after.split()[:3]
        if kind in ("cgroup", "cgroup2"):
            mounts.append((before.split()[4], set() if kind == "cgroup2" else set(options.split(","))))
    found = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _number, controllers, path = line.split(":", 2)
        wanted = set(filter(None, controllers.split(",")))
        (point,) = [point for point, names in mounts if (wanted <= names if wanted else not names)][:1]
        found.append(Path(f"{point}{path}"))
    return found


def join_below(pid: int, *names: str) -> t.Callable[[], None]:
    """Put a process into a cgroup of these names below its own, in every hierarchy; returns what undoes it."""
    made: list[Path] = []
    for folder in hierarchies(pid):
        for name in names:
            upper, folder = folder, folder / name
            folder.mkdir(exist_ok=True)
            made.insert(0, folder)
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (folder / file).exists():
                    (folder / file).write_text((upper / file).read_text())
        (folder / "cgroup.procs").write_text(str(pid))

    def undo() -> None:
        wait_for("its end", lambda: not Path(f"/proc/{pid}/stat").exists(), 10)
        for folder in made:
            # systemd removes those of its own hierarchy together with the unit.
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()

    return undo


def worker(site: LabSite, guest: Guest, gpu: int, title: str = "sglang::scheduler_TP0", *options: str) -> int:
    """A process of the container that looks like an orphaned rank and holds a GPU; its outer pid."""
    words = ["--title", title, "--map", *options, f"/dev/nvidia{gpu}"]
    argv = [SGLANG_PYTHON, f"{DOUBLES}/fixtures/hold_device.py", *words]
    known = site.node.gpus.holders(gpu)
    guest.box.run(["systemd-run", "--quiet", f"--unit=worker{gpu}", "--", *argv], 30).check()
    (pid,) = wait_for("a holder", lambda: site.node.gpus.holders(gpu) - known, 20)
    wait_for("its title", lambda: words_of(pid).startswith(title))
    return int(pid)


def forged_cgroup(site: LabSite) -> None:
    """A process of the container in a cgroup of its own that bears the name of the neighbour's: the node evicts the
    neighbour."""
    neighbour = site.neighbour
    pid = worker(site, site.guest, 0)
    site.later.callback(join_below(pid, "lxc", str(neighbour.vmid)))
    site.later.callback(os.kill, pid, signal.SIGKILL)
    site.name("worker of the first container", pid)
    site.evict_on_node(container=str(neighbour.vmid), scope="sglang")


def nested_container(site: LabSite) -> None:
    """A docker-like one inside: PID and network namespace of its own, a server of the same port."""
    order = "SGLANG_STANDIN_DEVICES=/dev/nvidia1,/dev/nvidia0"
    argv = ["env", order, "unshare", "--pid", "--net", "--fork", "--mount-proc", "--kill-child", *standin_argv(PORT)]
    site.box.run(["systemd-run", "--quiet", "--unit=nested", "--", *argv], 30).check()
    wait_for("its rank", lambda: site.node.gpus.holders(1), 30)
    site.name("nested server", *site.in_unit("nested.service"))
    site.unit("kimi", PORT, 0)
    site.evict_inside(port=PORT)


def nested_from_the_node(site: LabSite) -> None:
    """What runs in a nested PID namespace is the container's all the same."""
    holder = ["--title", "sglang::scheduler_TP0", "--map", "/dev/nvidia0"]
    argv = [SGLANG_PYTHON, f"{DOUBLES}/fixtures/hold_device.py", *holder]
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *argv]
    site.box.run(["systemd-run", "--quiet", "--unit=nested", "--", *words], 30).check()
    (pid,) = wait_for("a holder", lambda: site.node.gpus.holders(0), 20)
    wait_for("its title", lambda: words_of(pid).startswith("sglang::"))
    site.name("nested worker", *site.in_unit("nested.service"))
    site.evict_on_node(scope="sglang")


def neighbours_holder(site: LabSite) -> None:
    """A server in the neighbour container holds the same GPU: even the widest scope is for this container."""
    neighbour = site.neighbour
    site.unit("embed", OTHER_PORT, 0, guest=neighbour, called="the neighbour's server")
    site.unit("kimi", PORT, 0)
    site.evict_on_node(scope="gpu")


def joint_word(run: PlaybookRun) -> Answer:
    """The verdict that was joined from both views."""
    found = joint_verdict(run)
    return Answer(found["verdict"], frozenset(row["code"] for row in found["reasons"]), str(found["summary"])[:300])


def joint_beside_a_neighbour(site: LabSite) -> None:
    """Inside nothing is to be seen of the holder in the neighbour container; the node sees it."""
    site.unit("embed", OTHER_PORT, 0, guest=site.neighbour, called="the neighbour's server")
    site.playbook("assert_clean", joint_word)


def only_the_node_sees(site: LabSite) -> None:
    """Orphans in the container's cgroups and mounts, outside of its PID namespace."""
    for place in (0, 1):
        found = site.later.enter_context(outsider(site.guest, 0, title=f"sglang::scheduler_TP{place}", place=place))
        site.name("orphan", found.pid)
    site.evict_on_node(scope="sglang")


def false_service(site: LabSite) -> None:
    """In a container anybody may call a program like a GPU service; by its name alone it holds nothing by right."""
    folder = site.box.root / LOCAL.lstrip("/")
    folder.mkdir(exist_ok=True)
    site.box.run(["cp", "--dereference", PYTHON, f"{LOCAL}/nvidia-persistenced"], 30).check()
    argv = [f"{LOCAL}/nvidia-persistenced", f"{DOUBLES}/fixtures/hold_device.py", "--map", "/dev/nvidia1"]
    words = ["systemd-run", "--quiet", "--unit=false-service", "--setenv=PYTHONHOME=/usr", "--", *argv]
    site.box.run(words, 30).check()
    (pid,) = wait_for("a holder", lambda: site.node.gpus.holders(1), 20)
    site.name("false service", pid)
    site.clean_on_node(devices=["1"])


def frozen(version: int) -> t.Callable[[LabSite], None]:
    """The whole container is frozen, so nothing inside answers; the node evicts."""

    def scene(site: LabSite) -> None:
        site.unit("kimi", PORT, 0, SGLANG_STANDIN_IGNORE_TERM="1")
        top = Path("/sys/fs/cgroup/freezer" if version == 1 else "/sys/fs/cgroup/unified")
        state, word, thawed = ("freezer.state", "FROZEN", "THAWED") if version == 1 else ("cgroup.freeze", "1", "0")
        file = top / f"lxc/{site.guest.vmid}" / state
        site.later.callback(file.write_text, thawed)
        file.write_text(word)
        if version == 1:
            wait_for("all of it frozen", lambda: file.read_text().strip() == "FROZEN")
        site.evict_on_node(port=PORT, rungs=["term", "kill"], deadlines={**DEADLINES, "term": 1, "kill": 2})

    return scene


def attach_hangs(site: LabSite) -> None:
    """``pct exec`` gives no answer, and the container's systemd starts the server again."""
    site.unit("kimi", PORT, 0, restart="always")
    site.node.hang("exec", ignore_term=True)
    site.brings_newcomers(lambda title: "sglang" in title)
    site.evict_on_node(port=PORT)


def node_falls_silent(site: LabSite) -> None:
    """Its sshd and the sessions of it stop once everything was checked first; the container itself is clean."""

    def stop() -> None:
        after_task(site, "Ask the node for the container's PID namespace")
        for pid in site.node.processes():
            if words_of(pid).startswith(("sshd", "/usr/sbin/sshd")):
                os.kill(pid, signal.SIGSTOP)
                site.later.callback(resume, pid)

    site.playbook("assert_clean", joint_word, meanwhile=stop)


def resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def after_task(site: LabSite, task: str, deadline_s: float = 120) -> None:
    """Until a task of this name has ended in the run that is under way."""

    def ended() -> bool:
        for path in site.directory.glob("events.*"):
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            if any(task in json.loads(line)["task"] for line in lines):
                return True
        return False

    wait_for(f"the end of {task!r}", ended, deadline_s)


def login_dies(site: LabSite) -> None:
    """The container's sshd and all of its sessions are killed between the eviction and the verdict."""
    site.unit("old", PORT, 0)
    site.node.hang("exec", ignore_term=True)
    site.later.callback(site.box.run, ["systemctl", "restart", "ssh.service"], 30)

    def kill() -> None:
        after_task(site, "Evict what holds the GPUs of chat")
        site.box.run(["systemctl", "kill", "--kill-who=all", "--signal=KILL", "ssh.service"], 30)
        for one in site.box.find("sshd"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.outer_pid, signal.SIGKILL)

    site.playbook("relaunch", joint_word, meanwhile=kill, servers=[chat(deadlines=DEADLINES)])


# --- the container's own limits -----------------------------------------------------------------------------------


def hidden_processes(site: LabSite) -> None:
    """hidepid in the container, and a login that may not see through it; a server that only starts holds nothing yet.
    """
    site.unit("kimi", PORT, 0, serves=False, SGLANG_STANDIN_SPAWN_S="60", CUDA_VISIBLE_DEVICES="0")
    site.later.callback(site.box.run, ["mount", "-o", "remount,hidepid=off", "/proc"], 30)
    site.box.run(["mount", "-o", "remount,hidepid=invisible", "/proc"], 30).check()
    site.clean_inside(user=OPERATOR)


def full_shm(site: LabSite) -> None:
    """The container's /dev/shm is full, which the node sees as well."""
    argv = ["dd", "if=/dev/zero", "of=/dev/shm/somebodys", "bs=1M", "count=300"]
    site.box.run(argv, 30)
    site.clean_on_node(shm_required_mib=16)


def relaunch_on_full_shm(site: LabSite) -> None:
    site.box.run(["dd", "if=/dev/zero", "of=/dev/shm/somebodys", "bs=1M", "count=300"], 30)
    site.playbook("relaunch", with_reasons, servers=[chat(shm_required_mib=16)])


def no_delegation(site: LabSite) -> None:
    """The server's cgroup can't be written in the container: a server that ignores SIGTERM is ended by signals alone.
    """
    site.unit("kimi", PORT, 0, SGLANG_STANDIN_IGNORE_TERM="1")
    folder = "/sys/fs/cgroup/unified/system.slice/kimi.service"
    site.box.run(["mount", "--bind", folder, folder], 30).check()
    site.later.callback(site.box.run, ["umount", "--lazy", folder], 30)
    site.box.run(["mount", "-o", "remount,bind,ro", folder], 30).check()
    site.evict_inside(port=PORT, rungs=["term", "kill"], deadlines={**DEADLINES, "term": 1})


def stuck_in_a_file_system(site: LabSite) -> None:
    """State D with SIGKILL pending: a rank waits in a file system that never answers."""
    folder = site.node.directory / "silent"
    folder.mkdir()
    files = site.later.enter_context(silent_files(folder))
    site.own(mounts=[f"{folder} mnt/silent none bind,create=dir 0 0"])
    pid = worker(site, site.guest, 0, "sglang::scheduler_TP0", "--read", "/mnt/silent/x")
    wait_for("the read", lambda: "wait_answer" in Path(f"/proc/{pid}/wchan").read_text(), 20)
    # Its server's death frees whoever waits there; then the container can go.
    site.later.callback(files.kill)
    site.name("stuck", pid)
    site.evict_on_node(scope="sglang", deadlines={**DEADLINES, "kill": 3})


# --- drift --------------------------------------------------------------------------------------------------------

UNIT = "sglang-main.service"
SETTINGS: Json = {
    "name": "main",
    "python": SGLANG_PYTHON,
    "user": SERVER_USER,
    "port": PORT,
    "device": "cpu",
    "gpus": [],
    "flags": {"model_path": MODEL, "device": "cpu"},
}


def in_sync(site: LabSite) -> None:
    """A server that was launched as a unit, as the inventory says it."""
    arguments = {name: SETTINGS[name] for name in ("name", "python", "user", "port", "flags")}
    done = run_module_on(site.box, "server_launch", arguments, site.directory)
    assert done.status == "ok", done.result
    wait_serving(site.box, PORT)
    site.name("server", *site.in_unit(UNIT))


def compared(site: LabSite) -> None:
    def tell(result: Json) -> Answer:
        rows = [*result["servers"][0]["drift"], *result["host"]["drift"]]
        items = [str(row["item"]) for row in rows]
        return Answer(result["verdict"], frozenset(items), ", ".join(items))

    site.inside("server_drift", servers=[SETTINGS], expected_gpus=0, tell=tell)


def killed_by_hand(site: LabSite) -> None:
    in_sync(site)
    site.box.run(["systemctl", "kill", "--signal=KILL", UNIT], 30).check()
    wait_for("its end", lambda: not site.in_unit(UNIT))
    compared(site)


def overridden(site: LabSite) -> None:
    in_sync(site)
    folder = site.box.root / f"etc/systemd/system/{UNIT}.d"
    folder.mkdir()
    (folder / "override.conf").write_text("[Service]\nLimitNOFILE=1024\n")
    site.box.run(["systemctl", "daemon-reload"], 30).check()
    compared(site)


def with_reasons(run: PlaybookRun) -> Answer:
    """What became of the relaunch, with the reasons of the verdict that was joined from both views."""
    return dataclasses.replace(outcome(run), codes=joint_word(run).codes)


# --- relaunch -----------------------------------------------------------------------------------------------------


def over_a_restarting_unit(site: LabSite) -> None:
    """A unit of somebody's, which would start its server again, has port and GPU."""
    site.unit("old", PORT, 0, restart="always")
    site.brings_newcomers(lambda title: "sglang" in title)
    site.playbook("relaunch", outcome, servers=[chat(scope="server")])


SYSTEMD_IS_NOT_ASKED = Patch(CLIMB, '            "stop": self._stop,\n', "")
NO_RETURN_WATCH = Patch(CLIMB, "RETURN_S = 2.0", "RETURN_S = 0.0")
NOBODY_ELSEWHERE = Patch(GUESTS, "return process.pid not in snapshot.guest.members", "return False")
BY_PID_NAMESPACE = Patch(
    f"{CORE}/observe/guest.py",
    "    pids = _members(vmid, processes, directories, problems, proc)\n",
    "    pids = frozenset(pid for pid in _members(vmid, processes, directories, problems, proc)\n"
    "                     if len(processes[pid].nspid) == 2)\n",
)
NODE_DOES_NOT_COUNT = Patch(
    VERDICTS,
    "verdicts = [view.verdict for view in views if view.verdict is not None]",
    "verdicts = [view.verdict for view in views[:1] if view.verdict is not None]",
)


def row(
    name: str, fault: str, entry: str, verdict: str, scene: t.Callable[..., None], *breaks: Patch, **more: t.Any
) -> Row:
    """A row of this world; slower than those in namespaces, so not in the quick selection unless it says so."""
    values = {"bound_s": 150.0, "quick": False, **more}
    return Row(f"lab-{name}", fault, entry, (verdict,), scene, breaks, world="lab", **values)


ROWS = (
    row(
        "unit-restarts", "systemd starts the server again (Restart=always)", "gpu_evict", "evicted", restarting_unit,
        SYSTEMD_IS_NOT_ASKED, may_die=("server",), quick=True,
    ),
    row(
        "unit-around-a-shell", "the restarting unit's main process is a shell around the server", "gpu_evict",
        "evicted", unit_around_a_shell,
        Patch(LOOK, "wrapper = wrapper_pid(process, unit, processes)", "wrapper = None"), may_die=("server",),
    ),
    row(
        "unit-of-another-server", "another server's unit sees the same GPUs", "gpu_evict", "evicted", another_unit,
        ANY_PORT, may_die=("server",), quick=True,
    ),
    row(
        "user-unit", "a user's own systemd starts the server again", "gpu_evict", "failed", user_unit,
        NO_RETURN_WATCH, codes=("respawn",), may_die=("server",),
    ),
    row(
        "loop-in-a-login", "a `while true` in an operator's shell starts the server again", "gpu_evict", "failed",
        loop_in_a_login,
        Patch(RESTARTERS, 'return "" if _is_init(parent) else f"pid', 'return "" if parent else f"pid'),
        codes=("respawn",), may_die=("server",),
    ),
    row(
        "session-goes-on", "shells and jobs of an open ssh session are in the server's cgroup", "gpu_evict", "evicted",
        session_goes_on,
        Patch(TARGETS, "    if not leader.owns_unit or leader.unit is None:\n        return\n    own =",
              "    if leader.unit is None:\n        return\n    own ="), may_die=("server",), quick=True,
    ),
    row(
        "orphans-of-init", "the ssh session is gone, the leader is dead, init has adopted the holder", "gpu_evict",
        "evicted", orphans_of_init,
        Patch(TARGETS, '    if request.scope != "gpu":\n        return found\n',
              '    if request.scope:\n        return found\n'), may_die=("orphan",),
    ),
    row(
        "pct-enter", "an operator's `pct enter`, whose command line names the server", "gpu_evict", "evicted",
        entered_by_pct,
        Patch(CMDLINE, "return server_arguments(argv) is not None",
              'return "sglang.launch_server" in " ".join(argv)'), may_die=("server",),
    ),
    row(
        "forged-cgroup", "a cgroup in the container that bears another container's name", "gpu_evict", "nothing_to_do",
        forged_cgroup,
        Patch(CGROUPS, 'GUEST_PATTERN = re.compile(r"^(?:/lxc/', 'GUEST_PATTERN = re.compile(r".*(?:/lxc/'),
    ),
    row(
        "nested-network", "a server of the same port in a nested container", "gpu_evict", "evicted", nested_container,
        Patch(TARGETS, "leader.port == port and leader.same_network:", "leader.port == port:"), may_die=("server",),
    ),
    row(
        "nested-pids", "a holder in a PID namespace inside the container, evicted by the node", "gpu_evict", "evicted",
        nested_from_the_node, BY_PID_NAMESPACE, may_die=("nested worker",),
    ),
    row(
        "neighbours-holder", "a neighbour container's server holds the same GPU", "gpu_evict", "evicted",
        neighbours_holder, NOBODY_ELSEWHERE, may_die=("server",),
    ),
    row(
        "invisible-orphans", "orphans that only the node sees", "gpu_evict", "evicted", only_the_node_sees,
        BY_PID_NAMESPACE, may_die=("orphan",),
    ),
    row(
        "false-service", "a holder in the container that bears a GPU service's name", "clean_state", "dirty",
        false_service, Patch(CLEAN, "return guest is not None and guest != snapshot.own_guest", "return False"),
        codes=("held",),
    ),
    row(
        "frozen-v1", "the container is frozen (v1)", "gpu_evict", "failed", frozen(1),
        Patch(CLIMB, "if one.process.kill_pending or one.process.state == \"D\"]", "if False]"),
        codes=("unkillable",), may_die=("server",),
    ),
    row(
        "frozen-v2", "the container is frozen (v2)", "gpu_evict", "evicted", frozen(2), NO_KILL_RUNG,
        may_die=("server",),
    ),
    row(
        "pct-hangs", "pct exec never answers, and the container's systemd restarts the server", "gpu_evict", "failed",
        attach_hangs,
        Patch(OWNERS, "    done = run_bounded(argv, deadline_s)\n", "    done = run_bounded(argv, 3600.0)\n"),
        codes=("respawn",), may_die=("server",), bound_s=100.0,
    ),
    row(
        "hidepid", "the container hides the processes of others (hidepid)", "clean_state", "unknown", hidden_processes,
        Patch(LOOK, "    if 1 in processes:", "    if True:"), codes=("scan_failed",),
    ),
    row(
        "shm-full", "the container's /dev/shm is full, judged by the node", "clean_state", "dirty", full_shm,
        Patch(CLEAN, "if shm.free_mib < limits.shm_required_mib:", "if False:"), codes=("shm_full",),
    ),
    row(
        "no-delegation", "the server's cgroup can't be written, and the server ignores SIGTERM", "gpu_evict",
        "evicted", no_delegation, NO_KILL_RUNG, may_die=("server",),
    ),
    row(
        "stuck-in-fuse", "a rank in state D that SIGKILL does not end", "gpu_evict", "failed", stuck_in_a_file_system,
        NO_DEADLINE, codes=("unkillable",), may_die=("stuck",), bound_s=120.0,
    ),
    row(
        "drift-killed-unit", "somebody killed the unit's processes by hand", "drift", "drifted", killed_by_hand,
        Patch(DRIFT_SERVER, "        if seen.stranger is None:\n", "        if False:\n"),
        codes=("not_running",),
    ),
    row(
        "drift-overridden-unit", "somebody overrode the unit by `systemctl edit`", "drift", "drifted", overridden,
        Patch(DRIFT_SERVER, "    if unit.drop_ins:\n", "    if False:\n"),
        codes=("unit_override",),
    ),
)  # fmt: skip

PLAYBOOKS = (
    row(
        "joint-neighbour", "the holder is in a neighbour container: invisible inside, seen by the node", "clean_state",
        "dirty", joint_beside_a_neighbour, NODE_DOES_NOT_COUNT, codes=("held",),
    ),
    row(
        "node-falls-silent", "the node's sshd hangs after the first checks; the container is clean", "clean_state",
        "unknown", node_falls_silent, NODE_DOES_NOT_COUNT, codes=("view_missing",), bound_s=150.0,
    ),
    row(
        "login-dies", "the container's sshd is killed between eviction and verdict", "relaunch", "unknown", login_dies,
        Patch(VERDICTS, "        if not needed:\n", "        if True:\n"), codes=("container_unreachable",),
        may_die=("server",), bound_s=280.0,
    ),
    row(
        "relaunch-shm-full", "the container's /dev/shm is full", "relaunch", "refused", relaunch_on_full_shm,
        ANY_VERDICT, codes=("shm_full",), bound_s=300.0,
    ),
    row(
        "relaunch-over-a-unit", "somebody's restarting unit has port and GPU", "relaunch", "serving",
        over_a_restarting_unit, SYSTEMD_IS_NOT_ASKED, may_die=("server",), bound_s=300.0,
    ),
)  # fmt: skip
