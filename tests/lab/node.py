# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""This machine as the Proxmox node of a run's containers: an sshd of its own, pct, /etc/pve, GPUs passed through.

    with Node(lab) as node, node.guest() as guest:
        node.run(["pct", "exec", str(guest.vmid), "--", "id"], deadline_s=10).check()

What runs on the node sees this machine's processes and cgroups, as the real one does; its mount namespace is its own,
so that /usr/sbin/pct, /run and the rest of it never reach the machine. Everything is in one folder of the run. By hand:

    python -m tests.lab.node          a node with a container until Ctrl-C; prints how to get in
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import typing as t
from pathlib import Path

from ..harness.command import ROOT, Completed, run_command
from ..harness.devices import LOOP_MAJOR, loop_nodes
from ..harness.waiting import wait_for
from .containers import NETWORK, Container, Lab, ansible_host, make_bridge
from .gpus import SHARED, GuestGpus, NodeGpus
from .leftovers import end_node_processes, node_processes
from .rootfs import LabError

NAME = "pve1"
ADDRESS = f"{NETWORK}.1"
GPU_COUNT = 2
STEP_DEADLINE_S = 30
LOADER_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SSHD_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {directory}/host_key
PidFile {directory}/sshd.pid
AuthorizedKeysFile {directory}/authorized_keys
AllowUsers root
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
UseDNS no
PrintMotd no
MaxStartups 50
Subsystem sftp internal-sftp
"""
# In a mount namespace of its own: pct where community.proxmox looks for it, /etc/pve, a /run for sshd, and a home: what
# the machine's own /root has in its files may wait for locks.
START = """\
set -e
mount -t overlay overlay -o lowerdir=/usr/sbin,upperdir="$1/sbin/upper",workdir="$1/sbin/work" /usr/sbin
mount -t overlay overlay -o lowerdir=/etc,upperdir="$1/etc/upper",workdir="$1/etc/work" /etc
mount --bind "$1/pve" /etc/pve
mount -t tmpfs -o mode=0755 tmpfs /run
mkdir /run/sshd
# A sandbox may hide its own first process even from root, which no node does: here it has nothing open or mapped.
if ! head -c 1 /proc/1/maps >/dev/null 2>&1; then
  mkdir -p "$1/proc1/fd" "$1/proc1/map_files" "$1/proc1/task"
  for file in stat status cmdline comm cgroup; do cat "/proc/1/$file" >"$1/proc1/$file"; done
  : >"$1/proc1/maps"
  mount --bind "$1/proc1" /proc/1
fi
exec /usr/sbin/sshd -D -e -f "$1/sshd_config"
"""
CONFIG = """\
arch: amd64
cores: 2
hostname: {name}
memory: 8192
ostype: debian
unprivileged: {unprivileged}
"""


@dataclasses.dataclass(frozen=True)
class PctCall:
    """One call of pct. ``rc`` is None where it has not ended (or has become lxc-attach)."""

    pid: int
    argv: tuple[str, ...]
    at: float
    hung: bool
    rc: int | None


class Guest:
    """A container of the node with its share of the GPUs."""

    def __init__(self, node: Node, box: Container, gpus: GuestGpus) -> None:
        self.node = node
        self.box = box
        self.gpus = gpus
        self.vmid = box.number
        self.config = node.pve / "lxc" / f"{box.number}.conf"

    def set_option(self, name: str, value: str | None) -> None:
        """A line of its configuration, like ``lock: backup``; None takes it away."""
        lines = [line for line in self.config.read_text().splitlines() if not line.startswith(f"{name}:")]
        lines += [] if value is None else [f"{name}: {value}"]
        self.config.write_text("".join(f"{line}\n" for line in lines))

    def variables(self) -> dict[str, t.Any]:
        """What the inventory says of it beyond an ordinary host's entry."""
        return {
            "sglang_proxmox_host": NAME,
            "sglang_vmid": self.vmid,
            "sglang_host_become": False,
            "sglang_host_environment": self.node.environment,
            # The node's driver is found by its environment, so it is told apart from a real one.
            "sglang_allow_simulated": True,
        }


class Node:
    """The node of a run. ``gpus`` are all that it has."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.directory = lab.directory / "node"
        self.bin = self.directory / "bin"
        self.pve = self.directory / "pve"
        self.port = 0
        self.gpus: NodeGpus
        self._sshd: subprocess.Popen[bytes] | None = None
        self._undo = contextlib.ExitStack()

    # --- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Node:
        try:
            self._make()
            self._start_sshd()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End and remove everything of it. May be called twice."""
        self._undo.close()

    def _make(self) -> None:
        make_bridge(self.lab.base)
        for part in ("bin", "pve/lxc", "pve/ha", "guests", "sbin/upper", "sbin/work", "etc/upper/pve", "etc/work"):
            (self.directory / part).mkdir(parents=True)
        self._undo.callback(shutil.rmtree, self.directory)
        nodes = self._undo.enter_context(loop_nodes(self.directory / "dev", GPU_COUNT))
        self.gpus = NodeGpus(self.directory, nodes)
        (self.directory / "root").mkdir(mode=0o700)
        users = [one for one in Path("/etc/passwd").read_text().splitlines() if not one.startswith("root:")]
        users = [f"root:x:0:0:root:{self.directory}/root:/bin/sh", *users]
        (self.directory / "etc/upper/passwd").write_text("".join(f"{one}\n" for one in users))
        source = (ROOT / "tests/doubles/pct/pct.py").read_text().partition("from __future__ import annotations\n")
        text = f"#!{sys.executable} -I\n{''.join(source[:2])}INSTALLED_FOR = {str(self.directory)!r}\n{source[2]}"
        for folder in (self.bin, self.directory / "sbin/upper"):
            (folder / "pct").write_text(text)
            (folder / "pct").chmod(0o755)

    def _start_sshd(self) -> None:
        run = self.directory
        run_command(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "node", "-f", str(run / "host_key")], STEP_DEADLINE_S
        ).check()
        shutil.copy(self.lab.key.with_suffix(".pub"), run / "authorized_keys")
        with socket.socket() as probe:
            probe.bind((ADDRESS, 0))
            self.port = probe.getsockname()[1]
        text = SSHD_CONFIG.format(port=self.port, address=ADDRESS, directory=run)
        (run / "sshd_config").write_text(text)
        # It dies with us: a killed run must not leave a root login behind.
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "slave"]
        with (run / "sshd.log").open("wb") as log:
            self._sshd = subprocess.Popen(
                [*words, "sh", "-c", START, "sh", str(run)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._undo.callback(self._end_sshd)
        name = f"[{ADDRESS}]:{self.port}"
        self.lab.other_hosts[name] = " ".join((run / "host_key.pub").read_text().split()[:2])
        self._undo.callback(self.lab.other_hosts.pop, name)
        self.lab.write_known_hosts()
        wait_for("the node's sshd answers", self._answers, STEP_DEADLINE_S)

    def _answers(self) -> bool:
        if self._sshd is None or self._sshd.poll() is not None:
            raise LabError(f"the node's sshd ended: {(self.directory / 'sshd.log').read_text()}")
        with contextlib.suppress(OSError), socket.create_connection((ADDRESS, self.port), 5) as connection:
            return connection.recv(4) == b"SSH-"
        return False

    def _end_sshd(self) -> None:
        for switch in self.directory.glob("hang-*"):
            switch.unlink()
        end_node_processes(self.directory)
        if self._sshd is not None:
            self._sshd.wait(STEP_DEADLINE_S)

    @contextlib.contextmanager
    def frozen(self) -> t.Iterator[None]:
        """Its sshd takes connections and never greets."""
        assert self._sshd is not None
        self._sshd.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._sshd.send_signal(signal.SIGCONT)

    # --- containers ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def guest(
        self,
        *,
        numbers: t.Sequence[int] | None = None,
        unprivileged: bool = False,
        passthrough: str = "devN",
        gpus: t.Sequence[int] = tuple(range(GPU_COUNT)),
        mounts: t.Sequence[str] = (),
    ) -> t.Iterator[Guest]:
        """A booted container with these of the node's GPUs. ``mounts``: further lxc.mount.entry lines."""
        share = GuestGpus(self.gpus, gpus)
        choice = {} if numbers is None else {"numbers": numbers}
        box = self.lab.container(
            unprivileged=unprivileged, prepare=lambda made: [*share.prepare(made, passthrough), *mounts], **choice
        )
        with box:
            guest = Guest(self, box, share)
            self._configure(guest, passthrough)
            yield guest

    def _configure(self, guest: Guest, passthrough: str) -> None:
        box = guest.box
        text = CONFIG.format(name=box.name, unprivileged=int(box.unprivileged))
        for position, index in enumerate(guest.gpus.indices):
            path = f"/dev/nvidia{index}"
            if passthrough == "devN":
                text += f"dev{position}: {path}\n"
            else:
                text += f"lxc.mount.entry: {path} {path.lstrip('/')} none bind,optional,create=file\n"
        guest.config.write_text(text)
        which = ["-P", str(self.lab.lxc), "-n", str(box.number)]
        # The container's root file system is mounted in our mount namespace, perhaps not in the node's.
        ours = ["nsenter", f"--mount=/proc/{os.getpid()}/ns/mnt", "--"]
        commands = {
            "attach": ["lxc-attach", *which],
            "info": ["lxc-info", *which, "-sH"],
            "start": [*ours, *box.start_argv],
            "stop": ["lxc-stop", *which, "--kill"],
        }
        (self.directory / "guests" / f"{box.number}.json").write_text(json.dumps(commands))

    # --- pct ----------------------------------------------------------------------------------------------------------

    def hang(self, command: str, *, ignore_term: bool = False) -> None:
        """From now on ``pct COMMAND`` gives no answer."""
        (self.directory / f"hang-{command}").write_text("ignore-term\n" if ignore_term else "")

    def pct_calls(self, command: str | None = None) -> list[PctCall]:
        """The calls so far, oldest first."""
        path = self.directory / "pct.log"
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        calls: list[PctCall] = []
        for event in events:
            if event["event"] == "start":
                calls.append(PctCall(event["pid"], tuple(event["argv"]), event["at"], False, None))
                continue
            at = max(place for place, call in enumerate(calls) if call.pid == event["pid"])
            changes = {"rc": event["rc"]} if event["event"] == "end" else {"hung": True}
            calls[at] = dataclasses.replace(calls[at], **changes)
        return [call for call in calls if command is None or call.argv[:1] == (command,)]

    def set_ha(self, *vmids: int, state: str = "started") -> None:
        """These containers, and no others, are under the HA manager's care."""
        text = "".join(f"ct: {vmid}\n\tgroup all\n\tstate {state}\n\n" for vmid in vmids)
        (self.pve / "ha" / "resources.cfg").write_text(text)

    # --- reaching it --------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """What tasks on the node need to find pct and the driver."""
        driver = self.gpus.nvml.env(smi=False)
        path = f"{self.bin}:{self.gpus.nvml.library_dir / 'bin'}:{LOADER_PATH}"
        return {**driver, "PATH": path}

    def host_vars(self, **more: t.Any) -> dict[str, t.Any]:
        """Its entry in an inventory."""
        return {
            "ansible_host": ADDRESS,
            "ansible_port": self.port,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.lab.key),
            "ansible_ssh_common_args": self.lab.ssh_options,
            "ansible_python_interpreter": sys.executable,
            **more,
        }

    def run(self, argv: t.Sequence[str], deadline_s: float) -> Completed:
        """A command on the node, by ssh, with the environment of its tasks."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return run_command(["ssh", *self.ssh_words, shlex.join(["env", *settings, *argv])], deadline_s)

    @property
    def ssh_words(self) -> list[str]:
        """What stands between ``ssh`` and a command for the node."""
        return [
            *shlex.split(self.lab.ssh_options),
            "-i",
            str(self.lab.key),
            "-p",
            str(self.port),
            "-T",
            f"root@{ADDRESS}",
        ]

    def processes(self) -> list[int]:
        """The pids of sshd, its sessions and what runs in them."""
        return node_processes(self.directory)


# --- who only the node sees -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outsider:
    """A process in a container's cgroups and mounts, but outside of its PID namespace."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def lives(self) -> bool:
        return self.process.poll() is None


@contextlib.contextmanager
def outsider(
    guest: Guest, gpu: int, *options: str, title: str = "sglang::scheduler_TP0", place: int = 0
) -> t.Iterator[Outsider]:
    """Such a process, which holds a GPU; its lock says so to the container's driver (``place``: one of several). Ended
    with the block.
    """
    standin = ROOT / "tests/doubles/sglang_standin"
    words = ["--init", str(guest.box.outer_init), "--title", title, "--lock", f"{SHARED}/gpu{gpu}.{place}"]
    argv = [sys.executable, str(ROOT / "tests/fixtures/join_container.py"), *words, *options, "--map"]
    with started([*argv, f"/dev/nvidia{gpu}"], {"PYTHONPATH": str(standin)}) as process:
        yield Outsider(process)


@contextlib.contextmanager
def started(argv: t.Sequence[str], env: t.Mapping[str, str] | None = None) -> t.Iterator[subprocess.Popen[bytes]]:
    """A program that prints a line (left unread) once it is what it should be; killed at the end."""
    settings = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
    with subprocess.Popen(list(argv), env=settings, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(t.cast(t.Any, process.stdout), selectors.EVENT_READ)
                assert selector.select(STEP_DEADLINE_S), f"no line from {argv}"
            yield process
        finally:
            process.kill()
            process.wait(STEP_DEADLINE_S)


@contextlib.contextmanager
def silent_files(directory: Path) -> t.Iterator[subprocess.Popen[bytes]]:
    """A file system at ``directory`` whose files never answer a read. Its server's death frees whoever waits there."""
    words = ["setpriv", "--pdeathsig", "KILL", sys.executable, str(ROOT / "tests/fixtures/unkillable_fuse.py")]
    try:
        with started([*words, str(directory)]) as server:
            yield server
    finally:
        run_command(["umount", "--lazy", str(directory)], STEP_DEADLINE_S)
        directory.rmdir()


# --- by hand ----------------------------------------------------------------------------------------------------------


def inventory_of(guests: t.Sequence[Guest]) -> dict[str, t.Any]:
    """Containers and their node, as an operator writes them down."""
    node = guests[0].node
    plain = {"sglang_become": False, "sglang_device_major": LOOP_MAJOR}
    hosts = {one.box.name: {**ansible_host(one.box), **plain, **one.variables()} for one in guests}
    groups = {"sglang": {"hosts": hosts}, "proxmox_nodes": {"hosts": {NAME: node.host_vars()}}}
    return {"all": {"children": groups}}


def main() -> int:
    """A node with one container until Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_unused: sys.exit(143))
    try:
        with Lab() as lab, Node(lab) as node, node.guest() as guest:
            inventory = lab.directory / "hosts.json"
            inventory.write_text(json.dumps(inventory_of([guest]), indent=1))
            print(f"node {NAME} with container {guest.vmid} runs.")
            print(f"  container: {shlex.join(guest.box.ssh_argv())}")
            print(f"  node:      {shlex.join(['ssh', *node.ssh_words])}")
            print(f"  pct hangs: touch {node.directory}/hang-exec")
            print(f"  inventory: {inventory}")
            with contextlib.suppress(KeyboardInterrupt):
                print("Ctrl-C ends it.", flush=True)
                signal.pause()
    except (LabError, AssertionError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
