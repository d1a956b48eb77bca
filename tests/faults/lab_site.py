# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The world ``lab``: a Proxmox node with an LXC container that boots systemd and has an sshd; where a row needs one, a
neighbour container with the same GPUs. Modules and playbooks reach them by ssh.

Who lives is told on the node, by pid and start time there: all members of the containers' cgroups, what runs on the
node, and whoever has a name. Booted containers are shared by the rows of a run: after each row what it brought is
ended and removed, and unless the container is then what it was right after its boot, the next row gets a new one.

    def restarting_unit(site: LabSite) -> None:
        site.unit("kimi", PORT, 0, restart="always")
        site.evict_inside(port=PORT)
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.faults.looking import Key, Looking
from ansible_collections.cleanslate.sglang.tests.faults.model import Answer
from ansible_collections.cleanslate.sglang.tests.faults.site import told
from ansible_collections.cleanslate.sglang.tests.harness import tree
from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, TaskResult
from ansible_collections.cleanslate.sglang.tests.harness.trace import STRACE, Signal, parse_trace
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.containers import Container, Lab, ansible_host
from ansible_collections.cleanslate.sglang.tests.lab.inventory import run_module_on
from ansible_collections.cleanslate.sglang.tests.lab.node import Guest, Node
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import DOUBLES, OPERATOR, PYTHON, SERVER_USER
from ansible_collections.cleanslate.sglang.tests.lab.scenarios import (
    bystanders_on,
    run_host,
    run_module_on_node,
    signalled,
    start_ticks,
    trace_node,
)
from ansible_collections.cleanslate.sglang.tests.lab.servers import (
    leaders,
    standin_argv,
    start_bystanders,
    start_unit,
    unit_file,
    wait_serving,
)

# Slots of the matrix's own, so that it does not wait for a lab that runs beside it.
NUMBERS, NEIGHBOURS = (131,), (132,)
STEP_S = 30
# The fixtures end by themselves after 600 s, so a container is not used for a row that begins later than this.
AGE_S = 280
DEADLINES = {"stop": 6, "term": 6, "term_hung": 2, "kill": 5, "holders": 4, "attach": 4}
TRACED_PYTHON, TRACES = "/usr/local/bin/traced-python3", "/run/traces"
UNITS, STATE = "etc/systemd/system", "var/lib/cleanslate"
# What a login brings and takes with it, whoever ends it: no deed of a row.
SESSIONS = re.compile(r"sshd(:|$)|/usr/sbin/sshd .*-R|(/usr)?/lib/systemd/systemd --user|\(sd-pam\)")
# Daemons that systemd starts when somebody asks them.
HELPERS = re.compile(r"(/usr)?/lib/systemd/systemd-|/usr/bin/dbus-daemon|\(systemd|\(sd-|\(\w+\)$")
GUEST = re.compile(r"^0::/lxc/([0-9]+)(/|$)", re.MULTILINE)
LOCAL = "/run/cleanslate-row"


def title_of(pid: int) -> str:
    """A process's command line, its name in brackets where it has none; empty where it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return words or f"({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:
        return ""


def group_of(pid: int) -> str:
    """Its cgroup in the unified hierarchy, as the node sees it."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line[3:] for line in lines if line.startswith("0::")), "")


def members(vmids: t.Collection[int]) -> set[int]:
    """Outer pids of everybody in these containers' cgroups, whatever PID namespace they are in."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                match = GUEST.search(Path(f"/proc/{name}/cgroup").read_text())
            except OSError:
                continue
            if match and int(match[1]) in vmids:
                found.add(int(name))
    return found


class NodeEyes:
    """Everybody in the containers and on the node, without the containers' inits and without logins that nobody named.
    """

    proc = Path("/proc")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.guests: list[Guest] = []
        self.named: set[Key] = set()

    @property
    def root(self) -> Path:
        return self.guests[0].box.root

    def living(self) -> set[Key]:
        inits = {guest.box.outer_init for guest in self.guests}
        found = set()
        for pid in members({guest.vmid for guest in self.guests}) | set(self.node.processes()):
            key = (pid, self.start_ticks(pid) or 0)
            if key[1] and pid not in inits and not SESSIONS.match(title_of(pid)):
                found.add(key)
        return found | {key for key in self.named if self.start_ticks(key[0]) == key[1]}

    def start_ticks(self, pid: int) -> int | None:
        return start_ticks(pid)

    def cmdline(self, pid: int) -> list[str]:
        return title_of(pid).split()


# --- booted once, used by many rows -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rest:
    """What is there of a container between two rows."""

    living: frozenset[Key]
    files: frozenset[str]
    mounts: tuple[str, ...]
    options: str

    def differs(self, other: Rest) -> str:
        """In what another look differs from this one, in words; empty: in nothing."""
        found = [f"died: pid {pid}" for pid, _unused in self.living - other.living]
        found += [f"stayed: pid {pid} {title_of(pid)}" for pid, _unused in other.living - self.living]
        found += [f"gone: {name}" for name in self.files - other.files]
        found += [f"left: {name}" for name in other.files - self.files]
        found += ["other mounts"] if self.mounts != other.mounts else []
        found += ["other settings on the node"] if self.options != other.options else []
        return "; ".join(found)


class Berth:
    """A booted container of the node with its bystanders, which rows use one after another."""

    def __init__(self, node: Node, numbers: t.Sequence[int], **options: t.Any) -> None:
        self.node = node
        self.born = time.monotonic()
        self.later = contextlib.ExitStack()
        self.guest: Guest = self.later.enter_context(node.guest(numbers=numbers, **options))
        try:
            self.names = self._bystanders()
            self.rest = self.look()
        except BaseException:
            self.later.close()
            raise

    @property
    def box(self) -> Container:
        return self.guest.box

    def _bystanders(self) -> dict[Key, str]:
        """Those of every row: everybody of tests/fixtures/bystanders.py, with all GPUs open and their doorbells mapped
        where they are a GPU's, and the container's monitor on the node."""
        box = self.box
        nodes = [f"/dev/nvidia{index}" for index in range(len(self.guest.gpus.indices))]
        found = start_bystanders(box, nodes)
        hold = [PYTHON, f"{DOUBLES}/fixtures/hold_device.py", "--map", "--write-only", *nodes]
        box.run(["systemd-run", "--quiet", "--unit=visitor", f"--uid={SERVER_USER}", "--", *hold], STEP_S).check()
        seen = {one.pid: one for one in box.processes().values()}
        names = {(seen[pid].outer_pid, seen[pid].start_ticks): kind for kind, pid in found.items()}
        (visitor,) = wait_for("the visitor", lambda: box.find("--write-only"))
        maps = Path(f"/proc/{visitor.outer_pid}/maps")
        wait_for("its doorbells", lambda: nodes[-1] in maps.read_text())
        names[visitor.outer_pid, visitor.start_ticks] = "visitor"
        monitor = int(Path(f"/proc/{box.outer_init}/stat").read_text().rpartition(")")[2].split()[1])
        names[monitor, start_ticks(monitor) or 0] = "monitor"
        self._trace()
        return names

    def _trace(self) -> None:
        """An interpreter for modules inside that records every signal which they and their helpers send."""
        path = self.box.root / TRACED_PYTHON.lstrip("/")
        path.write_text(f'#!/bin/sh\nexec {shlex.join(STRACE)} -o {TRACES}/$$ {PYTHON} "$@"\n')
        path.chmod(0o755)
        folder = self.box.root / TRACES.lstrip("/")
        folder.mkdir()
        folder.chmod(0o1777)

    # --- between two rows ---------------------------------------------------------------------------------------------

    def look(self) -> Rest:
        eyes = NodeEyes(self.node)
        eyes.guests = [self.guest]
        living = {key for key in eyes.living() if key[0] in members({self.guest.vmid})}
        helpers = {key for key in living if HELPERS.match(title_of(key[0]))}
        root = self.box.root
        files = {str(path.relative_to(root)) for part in (UNITS, "dev", "dev/shm") for path in (root / part).iterdir()}
        files |= {STATE} & {STATE for _unused in [0] if (root / STATE).exists()}
        mounts = Path(f"/proc/{self.box.outer_init}/mountinfo").read_text().splitlines()
        points = sorted(f"{line.split()[4]} {line.split()[5]}" for line in mounts if "/run/user/" not in line)
        hangs = sorted(path.name for path in self.node.directory.glob("hang-*"))
        settings = f"{self.guest.config.read_text()}{hangs}"
        return Rest(frozenset(living - helpers), frozenset(files), tuple(points), settings)

    def reset(self) -> str:
        """End and remove what a row brought. In what the container is not what it was; empty: it can be used again."""
        if start_ticks(self.box.outer_init) is None:
            return "its init is dead"
        root, base = self.box.root, self.rest
        # A user's own systemd may start what is killed again.
        self.box.run(["systemctl", "stop", "user@*.service"], STEP_S)
        for path in (root / UNITS).iterdir():
            if str(path.relative_to(root)) not in base.files:
                self.box.run(["systemctl", "disable", "--now", "--no-block", path.name], STEP_S)
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        def killed() -> bool:
            extra = self.look().living - base.living
            for pid, ticks in extra:
                with contextlib.suppress(ProcessLookupError):
                    if start_ticks(pid) == ticks:
                        os.kill(pid, signal.SIGKILL)
            return not extra

        with contextlib.suppress(AssertionError):
            wait_for("nobody of the row left", killed, 10)
        self.box.run(["systemctl", "daemon-reload"], STEP_S)
        self.box.run(["systemctl", "reset-failed"], STEP_S)
        for name in self.look().files - base.files:
            path = root / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for folder in (TRACES, LOCAL, "/tmp"):
            for path in (root / folder.lstrip("/")).glob("*"):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self.guest.gpus.write()
        return base.differs(self.look())


class Shared:
    """The lab of this process: one node, and the containers that were not used up."""

    def __init__(self) -> None:
        self.later = contextlib.ExitStack()
        self.berths: dict[tuple[int, ...], Berth] = {}
        self.notes: list[str] = []
        try:
            self.lab = self.later.enter_context(Lab())
            # After the lab's own, so that it is called before that one.
            atexit.register(self.close)
            self.node = self.later.enter_context(Node(self.lab))
            self.interpreter = trace_node(self.node)
            kinds = self.later.enter_context(bystanders_on(self.node, "editor", "shell", "persistenced"))
            self.names = {(pid, start_ticks(pid) or 0): f"the node's {kind}" for kind, pid in kinds.items()}
        except BaseException:
            self.close()
            raise

    def berth(self, numbers: tuple[int, ...]) -> Berth:
        """A container that is as it was after its boot: that is looked at, and one that is not is given up."""
        found = self.berths.get(numbers)
        if found is not None and time.monotonic() - found.born > AGE_S:
            self.give_up(numbers)
            found = None
        why = found.rest.differs(found.look()) if found is not None else ""
        if found is not None and not why:
            return found
        if found is not None:
            self.notes.append(f"container {numbers[0]} was not what it was: {why}")
            self.give_up(numbers)
        self.berths[numbers] = Berth(self.node, numbers)
        return self.berths[numbers]

    def give_up(self, numbers: tuple[int, ...]) -> None:
        berth = self.berths.pop(numbers, None)
        if berth is not None:
            berth.later.close()

    def close(self) -> None:
        """End all of it. May be called twice."""
        atexit.unregister(self.close)
        for numbers in list(self.berths):
            self.give_up(numbers)
        self.later.close()


_shared: list[Shared] = []


def shared() -> Shared:
    """The lab of this process, made at its first use."""
    if not _shared:
        _shared.append(Shared())
    return _shared[0]


def close_shared() -> None:
    """End it, if there is one."""
    while _shared:
        _shared.pop().close()


# --- one row ----------------------------------------------------------------------------------------------------------


class LabSite(Looking):
    """One row's place. ``guest`` is the container, ``neighbour`` another one of the same node with the same GPUs."""

    eyes: NodeEyes

    def __init__(self, directory: Path, made: Shared, bound_s: float) -> None:
        super().__init__(directory, NodeEyes(made.node), bound_s)
        self.shared = made
        self.node = made.node
        self._used: list[Berth] = []
        self._own: Berth | None = None
        self._others: dict[int, Berth] = {}
        for key, name in made.names.items():
            self.name(name, key[0])
        traces = self.node.directory / "traces"
        for path in traces.iterdir():
            path.unlink()

    # --- containers ---------------------------------------------------------------------------------------------------

    @property
    def guest(self) -> Guest:
        """The row's container; booted, or as it was right after its boot."""
        if self._own is not None:
            return self._own.guest
        return self._berth(NUMBERS).guest

    @property
    def box(self) -> Container:
        return self.guest.box

    @property
    def neighbour(self) -> Guest:
        _unused = self.guest  # the lower number first
        return self._berth(NEIGHBOURS).guest

    def _berth(self, numbers: tuple[int, ...]) -> Berth:
        if numbers[0] not in self._others:
            self._others[numbers[0]] = self._take(self.shared.berth(numbers))
        return self._others[numbers[0]]

    def own(self, **options: t.Any) -> Guest:
        """A container of this row alone, for what can't be undone; its options are those of ``Node.guest``."""
        assert self._own is None and not self._others, "before the shared one is used"
        self.shared.give_up(NUMBERS)  # it has the number, and the memory
        self._own = Berth(self.node, NUMBERS, **options)
        self.later.callback(self._own.later.close)
        self._take(self._own)
        return self._own.guest

    def _take(self, berth: Berth) -> Berth:
        self._used.append(berth)
        self.eyes.guests.append(berth.guest)
        where = "" if berth is self._used[0] else "the neighbour's "
        for (pid, _unused), name in berth.names.items():
            self.name(f"{where}{name}", pid)
        return berth

    def close(self) -> None:
        """Undo the row: the scene's own endings first, then whatever it brought."""
        own = self._own
        self.later.close()
        for switch in self.node.directory.glob("hang-*"):
            switch.unlink()
        for numbers, berth in [(NUMBERS, self._others.get(NUMBERS[0])), (NEIGHBOURS, self._others.get(NEIGHBOURS[0]))]:
            if berth is None or berth is own:
                continue
            why = berth.reset()
            if why:
                self.shared.notes.append(f"container {berth.guest.vmid} can't be used again: {why}")
                self.shared.give_up(numbers)
        self.node.gpus.write()

    # --- who is who ---------------------------------------------------------------------------------------------------

    def name(self, name: str, *pids: int) -> None:
        super().name(name, *pids)
        self.eyes.named |= {(pid, start_ticks(pid) or 0) for pid in pids}

    def arrives(self, name: str, pid: int) -> None:
        super().arrives(name, pid)
        self.eyes.named.add((pid, start_ticks(pid) or 0))

    def name_found(self, name: str, title: str, guest: Guest | None = None) -> list[int]:
        """Call those of the container so whose title holds ``title``; their outer pids."""
        pids = [one.outer_pid for one in (guest or self.guest).box.find(title)]
        assert pids, f"nobody is called {title}"
        self.name(name, *pids)
        return pids

    def _belongs(self, pid: int, known: t.Collection[int]) -> bool:
        """An orphan in a container is its init's child, and so the monitor's, who brought up nobody in a run."""
        monitors = {key[0] for berth in self._used for key, name in berth.names.items() if name == "monitor"}
        return super()._belongs(pid, set(known) - monitors)

    def _expected(self, key: Key) -> bool:
        return bool(HELPERS.match(title_of(key[0]))) or super()._expected(key)

    def _signalled(self, signals: t.Sequence[Signal], before: set[Key], names: t.Mapping[Key, str]) -> set[str]:
        """By the records of both interpreters; the container's own has the container's pids."""
        there = {key[0]: names[key] for key in before if key not in self._departed}
        there.update({key[0]: name for key, name in self._arrived.items()})
        pids = {pid for pid, _signal in signalled(self.node)}
        for berth in self._used:
            outer = {inner: pid for pid in there for inner in [_inner(pid, berth.guest.vmid)] if inner}
            pids |= {outer[one.target] for one in _recorded(berth.box) if one.target in outer}
        return {there[pid] for pid in pids if pid in there}

    # --- what there is ------------------------------------------------------------------------------------------------

    def unit(
        self,
        name: str,
        port: int,
        gpu: int = 0,
        *,
        guest: Guest | None = None,
        restart: str = "no",
        called: str = "server",
        argv: t.Sequence[str] | str | None = None,
        serves: bool = True,
        **environment: str,
    ) -> set[int]:
        """A stand-in server as a unit of somebody's, which sees both GPUs; its processes bear the name ``called``."""
        where = guest or self.guest
        order = f"/dev/nvidia{gpu},/dev/nvidia{1 - gpu}"
        settings = {"SGLANG_STANDIN_DEVICES": order, **environment}
        text = unit_file(argv or standin_argv(port), restart=restart, environment=settings)
        start_unit(where.box, f"{name}.service", text)
        if serves:
            wait_serving(where.box, port)
        pids = self.in_unit(f"{name}.service", where)
        self.name(called, *pids)
        return pids

    def in_unit(self, unit: str, guest: Guest | None = None) -> set[int]:
        """Outer pids of everybody in the cgroup of a unit, a user's too."""
        where = guest or self.guest
        return {pid for pid in members({where.vmid}) if f"/{unit}" in group_of(pid) and start_ticks(pid)}

    @contextlib.contextmanager
    def session(self, command: str, *, user: str = OPERATOR) -> t.Iterator[subprocess.Popen[bytes]]:
        """An operator's ssh session with a terminal, in whose login shell ``command`` runs."""
        argv = [*self.box.ssh_argv(user, "-tt"), command]
        pipes: dict[str, t.Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(argv, stdin=subprocess.PIPE, **pipes) as session:
            try:
                yield session
            finally:
                session.kill()

    def outer(self, inner: int, guest: Guest | None = None) -> int:
        """The node's number of a process of the container."""
        return (guest or self.guest).box.processes()[inner].outer_pid

    def leader(self, port: int, guest: Guest | None = None) -> int:
        """The outer pid of the server of this port."""
        (found,) = wait_for("a leader", lambda: leaders((guest or self.guest).box, port))
        return found.outer_pid

    # --- runs ---------------------------------------------------------------------------------------------------------

    def inside(
        self,
        module: str,
        /,
        *,
        user: str = "root",
        guest: Guest | None = None,
        tell: t.Callable[[dict[str, t.Any]], Answer] | None = None,
        meanwhile: t.Callable[[], None] | None = None,
        **arguments: t.Any,
    ) -> None:
        """One module in the container between two looks, by ssh; its signals are recorded."""
        box = (guest or self.guest).box
        variables = {**ansible_host(box, user), "ansible_python_interpreter": TRACED_PYTHON}
        values = {"device_major": LOOP_MAJOR, **arguments}

        def run() -> Answer:
            done = reached(
                lambda: run_module_on(
                    box, module, values, self.directory, variables=variables, deadline_s=self.deadline_s
                )
            )
            return (tell or told)(result_of(done))

        self.look(run, meanwhile=meanwhile)

    def on_node(
        self,
        module: str,
        /,
        *,
        tell: t.Callable[[dict[str, t.Any]], Answer] | None = None,
        meanwhile: t.Callable[[], None] | None = None,
        **arguments: t.Any,
    ) -> None:
        """One module on the node about the container between two looks, by ssh and traced."""
        values = {"container": str(self.guest.vmid), **arguments}

        def run() -> Answer:
            done = reached(
                lambda: run_module_on_node(
                    self.node,
                    module,
                    values,
                    self.directory,
                    deadline_s=self.deadline_s,
                    ansible_python_interpreter=self.shared.interpreter,
                )
            )
            return (tell or told)(result_of(done))

        self.look(run, meanwhile=meanwhile)

    def evict_inside(self, **options: t.Any) -> None:
        """gpu_evict in the container with short deadlines."""
        values = {"name": "main", "deadlines": DEADLINES, "expected_gpus": 2, "devices": ["0"], **options}
        self.inside("gpu_evict", **values)

    def evict_on_node(self, **options: t.Any) -> None:
        """gpu_evict on the node for the container, with short deadlines."""
        values = {"name": "main", "deadlines": DEADLINES, "devices": ["0"], **options}
        self.on_node("gpu_evict", **values)

    def clean_inside(self, **options: t.Any) -> None:
        """clean_state in the container, quick."""
        self.inside("clean_state", **{"expected_gpus": 2, **_quick(options)})

    def clean_on_node(self, **options: t.Any) -> None:
        """clean_state on the node about the container, quick."""
        self.on_node("clean_state", **_quick(options))

    def playbook(
        self,
        playbook: str,
        tell: t.Callable[[PlaybookRun], Answer],
        *arguments: str,
        meanwhile: t.Callable[[], None] | None = None,
        env: t.Mapping[str, str] | None = None,
        **options: t.Any,
    ) -> None:
        """A playbook against the container and its node between two looks; all modules are traced."""
        guest = self.guest
        more = {"ansible_python_interpreter": TRACED_PYTHON, **options.pop("variables", {})}

        def run() -> Answer:
            return tell(
                run_host(
                    guest,
                    playbook,
                    self.directory,
                    "-e",
                    "server=chat",
                    *arguments,
                    variables=more,
                    node_variables={"ansible_python_interpreter": self.shared.interpreter},
                    env={**self.home(), **(env or {})},
                    deadline_s=self.deadline_s,
                    **options,
                )
            )

        self.look(run, meanwhile=meanwhile)

    def home(self) -> dict[str, str]:
        """An operator's home, which knows the node's key, and the collections by which a container is entered."""
        from ansible_collections.cleanslate.sglang.scripts.bootstrap import proxmox_collections

        home = self.directory / "home"
        (home / ".ssh").mkdir(parents=True, exist_ok=True)
        (home / ".ssh" / "known_hosts").write_text(self.node.lab.known_hosts.read_text())
        paths = [str(tree.collections()), str(proxmox_collections())]
        return {"HOME": str(home), "ANSIBLE_COLLECTIONS_PATH": ":".join(paths)}


def _quick(options: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    values = {"allow_simulated": True, "samples": 1, "settle_s": 0, "shm_required_mib": 1, "xid_window_s": 0}
    return {"devices": ["0"], **values, **options}


def reached(run: t.Callable[[], TaskResult]) -> TaskResult:
    """The module's answer; asked once more where ssh, on a busy machine, did not get there."""
    done = run()
    return run() if done.result.get("unreachable") else done


def result_of(done: TaskResult) -> dict[str, t.Any]:
    """A task's result, with ``failed`` as the callback tells it."""
    return {**done.result, "failed": done.status == "failed"}


def _inner(pid: int, vmid: int) -> int:
    """The number that a process of this container has in it; 0: it is not there, or has none."""
    if not group_of(pid).startswith(f"/lxc/{vmid}/"):
        return 0
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
    return int(numbers[1]) if len(numbers) > 1 else 0


def _recorded(box: Container) -> list[Signal]:
    """What modules in the container sent through pidfds."""
    folder = box.root / TRACES.lstrip("/")
    found = [one for path in folder.iterdir() for one in parse_trace(path.read_text(errors="replace"))]
    return [one for one in found if one.call == "pidfd_send_signal" and one.result == 0]


@contextlib.contextmanager
def opened(directory: Path, bound_s: float) -> t.Iterator[LabSite]:
    """A row's place in the shared lab; afterwards the containers are what they were, or are given up."""
    directory.mkdir(parents=True, exist_ok=True)
    site = LabSite(directory, shared(), bound_s)
    try:
        yield site
    finally:
        site.close()
