# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""LXC containers that boot the machine's own systemd on an overlay of its root, with sshd and Proxmox's cgroup layout.

    with Lab() as lab, lab.container() as box:
        box.run(["systemctl", "is-system-running"], deadline_s=10).check()
        box.ssh(["id"], deadline_s=10).check()

Everything of a run lies in one directory below the temporary one; a lock on it says that the run lives. By hand:

    python -m tests.lab.containers up          a container until Ctrl-C; prints how to get in
    python -m tests.lab.containers cleanup     ends and removes what dead runs left behind
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import typing as t
from pathlib import Path

from ..harness.command import Completed, run_command
from ..harness.waiting import wait_for
from .idmap import IDS, mount_idmapped, shift_ids
from .leftovers import detach_loops_below, end_node_processes, unmount_below
from .rootfs import PYTHON, SGLANG_PYTHON, LabError, populate, system_python_problem

BRIDGE = "csbr0"
NETWORK = "10.99.0"
# The slots: how many containers there may be on a machine at one time, over all runs.
NUMBERS = (129, 130)
SLOT_DEADLINE_S = 900
BOOT_DEADLINE_S = 60
STOP_DEADLINE_S = 40
STEP_DEADLINE_S = 30
CAP_SYS_ADMIN = 21
# Where an unprivileged container's ids begin outside, as on Proxmox.
IDS_BASE = 100000
CONFIG = """\
lxc.rootfs.path = dir:{root}
lxc.uts.name = {name}
lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed
lxc.cgroup.dir.monitor = lxc.monitor/{number}
lxc.cgroup.dir.container = lxc/{number}
lxc.cgroup.dir.container.inner = ns
lxc.apparmor.profile = unconfined
lxc.cap.drop = sys_time sys_module sys_rawio mac_admin mac_override
lxc.init.cmd = /sbin/init --unit=lab.target
lxc.tty.max = 0
lxc.pty.max = 64
lxc.net.0.type = veth
lxc.net.0.link = {bridge}
lxc.net.0.flags = up
lxc.net.0.ipv4.address = {address}/24
lxc.mount.entry = tmpfs dev/shm tmpfs rw,nosuid,nodev,size=256m,create=dir 0 0
lxc.mount.entry = tmpfs tmp tmpfs rw,nosuid,nodev,mode=1777 0 0
"""
# After lxc.cap.drop: the included file gives a user namespace all capabilities of its own.
CONFIG_UNPRIVILEGED = f"""\
lxc.include = /usr/share/lxc/config/userns.conf
lxc.idmap = u 0 {IDS_BASE} {IDS}
lxc.idmap = g 0 {IDS_BASE} {IDS}
"""
# lxc-start asks /etc/subuid even when root starts it; the machine's own stays as it is.
START_UNPRIVILEGED = """\
mount --bind "$1" /etc/subuid && mount --bind "$1" /etc/subgid && shift && exec "$@"
"""


def why_not() -> str | None:
    """Why no lab container can be made on this machine, or None."""
    if os.geteuid() != 0:
        return "lab containers need root"
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    wanted = ("lxc-start", "lxc-stop", "lxc-info", "lxc-attach", "ip", "ssh", "sshd", "ssh-keygen", "mount", "chroot")
    missing = [name for name in wanted if shutil.which(name, path=path) is None]
    if missing:
        return f"lab containers need {', '.join(missing)} (`make system` installs them)"
    if not os.path.exists("/sbin/init") or "systemd" not in os.path.realpath("/sbin/init"):
        return "lab containers boot the machine's own systemd, and /sbin/init is none"
    if not os.path.exists("/dev/loop-control"):
        return "lab containers use loop devices as GPU nodes, and /dev/loop-control is not there"
    if not _capable(CAP_SYS_ADMIN):
        return "lab containers need CAP_SYS_ADMIN, which this root does not have"
    return system_python_problem()


def _capable(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def base_directory() -> Path:
    """The one directory of all runs on this machine."""
    return Path(os.environ.get("CLEANSLATE_LAB_DIR") or Path(tempfile.gettempdir()) / f"cleanslate-lab-{os.geteuid()}")


@dataclasses.dataclass(frozen=True)
class Seen:
    """A process of a container: its pid inside, its start time, and what it is."""

    pid: int
    start_ticks: int
    uid: int
    title: str
    outer_pid: int

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.start_ticks


class Container:
    """A running container. Paths and pids are those inside, unless their name says ``outer``."""

    def __init__(self, lab: Lab, number: int, lock: int, *, unprivileged: bool = False) -> None:
        self.lab = lab
        self.number = number
        self.unprivileged = unprivileged
        self.name = f"gpu{number}"
        self.address = f"{NETWORK}.{number}"
        self.directory = lab.lxc / str(number)
        self.merged = self.directory / "merged"
        self.host_key = ""
        self._lock = lock

    # --- life ---------------------------------------------------------------------------------------------------------

    def make(self, mounts: t.Iterable[str] = ()) -> None:
        """Its root file system and its configuration, with ``mounts`` as further lxc.mount.entry lines."""
        for part in ("upper", "work", "merged"):
            (self.directory / part).mkdir(parents=True)
        self._mount()
        self.host_key = populate(self.merged, self.name, self.lab.key.with_suffix(".pub"))
        if self.unprivileged:
            # An overlay's upper layer may only change while it is not mounted.
            _run("umount", str(self.merged))
            shift_ids(self.directory / "upper", IDS_BASE)
            self._mount()
            for path in (self.lab.base, self.lab.directory, self.lab.lxc, self.directory):
                path.chmod(0o711)
        config = CONFIG.format(
            root=self.merged, name=self.name, number=self.number, bridge=BRIDGE, address=self.address
        )
        config += CONFIG_UNPRIVILEGED if self.unprivileged else ""
        config += "".join(f"lxc.mount.entry = {entry}\n" for entry in mounts)
        (self.directory / "config").write_text(config)
        self.lab.write_known_hosts()

    def _mount(self) -> None:
        lower = self.lab.idmapped_root() if self.unprivileged else Path("/")
        options = f"lowerdir={lower},upperdir={self.directory}/upper,workdir={self.directory}/work"
        _run("mount", "-t", "overlay", "overlay", "-o", options, str(self.merged))

    @property
    def start_argv(self) -> list[str]:
        """The command that starts it, and returns once it runs."""
        log = str(self.directory / "lxc.log")
        start = ["lxc-start", *self._which(), "--daemon", "--logfile", log, "--logpriority", "INFO"]
        if not self.unprivileged:
            return start
        ids = self.lab.directory / "subid"
        ids.write_text(f"root:{IDS_BASE}:{IDS}\n")
        words = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", START_UNPRIVILEGED, "sh", str(ids)]
        return [*words, *start]

    def _complaints(self) -> str:
        """The errors in LXC's log."""
        log = self.directory / "lxc.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join([line for line in lines if " ERROR " in line or " WARN " in line][-12:])

    def start(self) -> None:
        """Boot, and wait until systemd is up and sshd answers."""
        remove_stale_cgroups(self.number)
        try:
            _run(*self.start_argv)
        except LabError as error:  # lxc-start itself says only that there is more in its log
            raise LabError(f"{error}\n{self._complaints()}") from None
        self.wait_booted()

    def wait_booted(self) -> None:
        """Until systemd is up and sshd answers."""
        wait_for(f"{self.name} booted", self._booted, BOOT_DEADLINE_S)
        wait_for(f"sshd of {self.name} answers", lambda: self.ssh(["true"], 10).rc == 0, BOOT_DEADLINE_S)

    def _booted(self) -> bool:
        done = self.run(["systemctl", "is-system-running"], STEP_DEADLINE_S)
        if done.stdout.strip() == "degraded":
            failed = self.run(["systemctl", "--failed", "--plain", "--no-legend"], STEP_DEADLINE_S).stdout
            raise LabError(f"{self.name} booted with failed units: {failed}")
        return done.stdout.strip() == "running"

    def close(self) -> None:
        """Kill the container, unmount, remove its directory, give its number back."""
        try:
            remove_container(self.lab.lxc, self.number)
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1
            self.lab.forget(self)

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _which(self) -> tuple[str, ...]:
        return "-P", str(self.lab.lxc), "-n", str(self.number)

    # --- commands inside ----------------------------------------------------------------------------------------------

    def run(
        self,
        argv: t.Sequence[str],
        deadline_s: float,
        env: t.Mapping[str, str] | None = None,
        *,
        stdin: str = "",
    ) -> Completed:
        """Run a command as root, past sshd and systemd (``lxc-attach``), in a clean environment plus ``env``."""
        words = ["lxc-attach", *self._which(), "--clear-env"]
        settings = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            **(env or {}),
        }
        words += [f"--set-var={name}={value}" for name, value in settings.items()]
        return run_command([*words, "--", *argv], deadline_s, stdin=stdin)

    def ssh_argv(self, user: str = "root", *options: str) -> list[str]:
        """The words of an ssh command to the container, without a command for it and without connection sharing."""
        return ["ssh", *shlex.split(self.lab.ssh_options), "-i", str(self.lab.key), *options, f"{user}@{self.address}"]

    def ssh(self, argv: t.Sequence[str], deadline_s: float, user: str = "root") -> Completed:
        """Run a command through sshd; the words are quoted for the remote shell."""
        return run_command([*self.ssh_argv(user, "-T"), shlex.join(argv)], deadline_s)

    # --- looking ------------------------------------------------------------------------------------------------------

    @property
    def outer_init(self) -> int:
        """The pid of the container's init outside."""
        pid = init_pid(self.lab.lxc, self.number)
        if pid is None:
            raise LabError(f"{self.name} does not run")
        return pid

    @property
    def root(self) -> Path:
        """The root as the container's processes see it (with its own /run, /tmp and /dev). Beware of absolute links."""
        return Path(f"/proc/{self.outer_init}/root")

    def processes(self) -> dict[int, Seen]:
        """All processes inside by their inner pid, zombies left out."""
        namespace = os.readlink(f"/proc/{self.outer_init}/ns/pid")
        found = (_seen(int(name), namespace) for name in os.listdir("/proc") if name.isdigit())
        return {seen.pid: seen for seen in found if seen is not None}

    def find(self, title: str) -> list[Seen]:
        """Processes whose title holds ``title``."""
        return [seen for seen in self.processes().values() if title in seen.title]


class Lab:
    """One run: a directory, an ssh key, the bridge, and at most as many containers as there are slots."""

    def __init__(self) -> None:
        reason = why_not()
        if reason is not None:
            raise LabError(reason)
        self.base = _make_base()
        sweep(self.base)
        with _base_lock(self.base):
            self.directory = Path(tempfile.mkdtemp(prefix="run-", dir=self.base))
            self._lock = _locked(self.directory / "alive")
        self.lxc = self.directory / "lxc"
        self.lxc.mkdir()
        # A unix socket's path has at most 108 bytes, so this one is short.
        self.sockets = self.directory / "cp"
        self.sockets.mkdir(mode=0o700)
        self.key = self.directory / "key"
        self.known_hosts = self.directory / "known_hosts"
        self.containers: list[Container] = []
        # Hosts of a run that are no containers: what known_hosts calls them, and their keys.
        self.other_hosts: dict[str, str] = {}
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(self.key))
        self.write_known_hosts()
        atexit.register(self.close)

    @property
    def ssh_options(self) -> str:
        """Options for every ssh of the lab, as one text: host keys are checked, nothing of the user's own is read."""
        settings = (
            f"UserKnownHostsFile={self.known_hosts}",
            "GlobalKnownHostsFile=/dev/null",
            "StrictHostKeyChecking=yes",
            "IdentitiesOnly=yes",
            "IdentityAgent=none",
            "BatchMode=yes",
            "ConnectTimeout=5",
            "ServerAliveInterval=5",
            "ServerAliveCountMax=3",
        )
        return "-F /dev/null " + " ".join(f"-o {setting}" for setting in settings)

    def container(
        self,
        *,
        numbers: t.Sequence[int] = NUMBERS,
        unprivileged: bool = False,
        prepare: t.Callable[[Container], t.Iterable[str]] | None = None,
    ) -> Container:
        """A new container, booted. Waits for a free slot of ``numbers``; LabError where none gets free.

        Who wants several at once takes them in ascending order, or two such runs wait for each other. ``prepare`` is
        called before the container is made and returns further lxc.mount.entry lines for it.
        """
        number, lock = _take_slot(self.base, numbers)
        container = Container(self, number, lock, unprivileged=unprivileged)
        self.containers.append(container)
        try:
            make_bridge(self.base)
            container.directory.mkdir()
            container.make(prepare(container) if prepare is not None else ())
            container.start()
        except BaseException:
            container.close()
            raise
        return container

    def write_known_hosts(self) -> None:
        lines = [f"{one.address} {one.host_key}\n" for one in self.containers if one.host_key]
        lines += [f"{name} {key}\n" for name, key in self.other_hosts.items()]
        self.known_hosts.write_text("".join(lines))

    def idmapped_root(self) -> Path:
        """The machine's root file system, read only, as unprivileged containers see its ids."""
        mounted = self.directory / "idroot"
        if not mounted.exists():
            mounted.mkdir()
            mount_idmapped(Path("/"), mounted, IDS_BASE)
        return mounted

    def forget(self, container: Container) -> None:
        if container in self.containers:
            self.containers.remove(container)

    def close(self) -> None:
        """End everything of this run. May be called twice."""
        if self._lock < 0:
            return
        atexit.unregister(self.close)
        for container in list(self.containers):
            container.close()
        os.close(self._lock)
        self._lock = -1
        remove_run(self.directory)
        remove_bridge(self.base)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


# --- ending things ----------------------------------------------------------------------------------------------------


def init_pid(lxc: Path, number: int) -> int | None:
    """The outer pid of a container's init, or None where it does not run."""
    done = run_command(["lxc-info", "-P", str(lxc), "-n", str(number), "-pH"], STEP_DEADLINE_S)
    text = done.stdout.strip()
    return int(text) if text.isdigit() and int(text) > 0 else None


def remove_container(lxc: Path, number: int) -> None:
    """Kill a container (if it runs), unmount its root, remove its directory. LabError names what stayed."""
    directory = lxc / str(number)
    if (directory / "config").exists() and init_pid(lxc, number) is not None:
        run_command(["lxc-stop", "-P", str(lxc), "-n", str(number), "--kill"], STOP_DEADLINE_S)
        wait_for(f"container {number} gone", lambda: init_pid(lxc, number) is None, STOP_DEADLINE_S)
    merged = directory / "merged"
    if os.path.ismount(merged):
        wait_for(f"{merged} unmounted", lambda: run_command(["umount", str(merged)], STEP_DEADLINE_S).rc == 0, 20)
    if os.path.ismount(merged):
        raise LabError(f"{merged} is still mounted")
    shutil.rmtree(directory, ignore_errors=not directory.exists())


def remove_run(directory: Path) -> None:
    """End and remove what a run has left: connections, containers, mounts, files."""
    for socket in sorted((directory / "cp").glob("*")):
        if stat.S_ISSOCK(socket.stat().st_mode):
            run_command(["ssh", "-F", "/dev/null", "-O", "exit", "-o", f"ControlPath={socket}", "lab"], STEP_DEADLINE_S)
    lxc = directory / "lxc"
    for container in sorted(lxc.iterdir()) if lxc.is_dir() else ():
        remove_container(lxc, int(container.name))
    end_node_processes(directory / "node")
    unmount_below(directory)
    detach_loops_below(directory)
    shutil.rmtree(directory)


def sweep(base: Path) -> list[str]:
    """Remove the runs whose process is dead; returns their names."""
    removed = []
    for directory in sorted(base.glob("run-*")):
        # A run's folder and its lock appear together.
        with _base_lock(base):
            try:
                lock = _locked(directory / "alive")
            except BlockingIOError:
                continue
            except FileNotFoundError:
                continue  # its own process removes it at this moment
        try:
            remove_run(directory)
        finally:
            os.close(lock)
        removed.append(directory.name)
    if removed:
        remove_bridge(base)
    return removed


# --- slots and the bridge ---------------------------------------------------------------------------------------------


def _make_base() -> Path:
    base = base_directory()
    base.mkdir(mode=0o700, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise LabError(f"{base} is not a directory of ours alone; remove it or set CLEANSLATE_LAB_DIR")
    return base


def _locked(path: Path, *, wait: bool = False) -> int:
    """A descriptor with an exclusive lock, which the kernel drops when its process dies. BlockingIOError: taken."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _base_lock(base: Path) -> t.Iterator[None]:
    """For short steps that two runs must not do at the same time."""
    lock = _locked(base / "lock", wait=True)
    try:
        yield
    finally:
        os.close(lock)


def _take_slot(base: Path, numbers: t.Sequence[int]) -> tuple[int, int]:
    end = time.monotonic() + SLOT_DEADLINE_S
    for attempt in itertools.count():
        for number in numbers:
            with contextlib.suppress(BlockingIOError):
                return number, _locked(base / f"slot-{number}")
        if time.monotonic() > end:
            break
        if attempt % 60 == 0:
            print(f"lab: waiting for one of {len(numbers)} container slots", file=sys.stderr, flush=True)
        time.sleep(0.5)
    raise LabError(f"no container slot got free within {SLOT_DEADLINE_S} s ({base}/slot-*)")


def make_bridge(base: Path) -> None:
    """The bridge, shared by all runs of this machine."""
    with _base_lock(base):
        if not os.path.isdir(f"/sys/class/net/{BRIDGE}"):
            _run("ip", "link", "add", BRIDGE, "type", "bridge")
            _run("ip", "address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")


def remove_bridge(base: Path) -> None:
    """Remove the bridge once no run lives and nothing is plugged into it."""
    with _base_lock(base):
        ports = Path(f"/sys/class/net/{BRIDGE}/brif")
        if ports.is_dir() and not any(ports.iterdir()) and not any(base.glob("run-*")):
            _run("ip", "link", "delete", BRIDGE)


def remove_stale_cgroups(number: int, root: Path = Path("/sys/fs/cgroup")) -> None:
    """What a run that was killed left behind: LXC starts nothing over it. The slot of this number is ours, so whatever
    still lives in there is none of ours to end, and the start will say so.
    """
    for kind in ("lxc", "lxc.monitor"):
        for top in [root / kind / str(number), *root.glob(f"*/{kind}/{number}")]:
            for folder, _names, _files in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):  # EBUSY: somebody lives there
                    os.rmdir(folder)


# --- small things -----------------------------------------------------------------------------------------------------


def _run(*argv: str) -> Completed:
    done = run_command(argv, STEP_DEADLINE_S)
    if done.rc != 0:
        raise LabError(f"{shlex.join(argv)}: rc {done.rc} {done.stdout}{done.stderr}".strip())
    return done


def _seen(outer: int, namespace: str) -> Seen | None:
    """A process as its container sees it; None where it is gone, a zombie, or of another namespace."""
    proc = Path(f"/proc/{outer}")
    try:
        if os.readlink(proc / "ns/pid") != namespace:
            return None
        fields = (proc / "stat").read_text(errors="replace").rpartition(")")[2].split()
        lines = (proc / "status").read_text(errors="replace").splitlines()
        status = dict(line.split(":", 1) for line in lines if ":" in line)
        words = (proc / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    title = b" ".join(word for word in words if word).decode(errors="replace") or status["Name"].strip()
    return Seen(int(status["NSpid"].split()[-1]), int(fields[19]), int(status["Uid"].split()[0]), title, outer)


def ansible_host(container: Container, user: str = "root") -> dict[str, str]:
    """The variables by which Ansible reaches a container."""
    return {
        "ansible_host": container.address,
        "ansible_user": user,
        "ansible_ssh_private_key_file": str(container.lab.key),
        "ansible_ssh_common_args": container.lab.ssh_options,
        "ansible_python_interpreter": PYTHON,
    }


def _up() -> int:
    with Lab() as lab, lab.container() as box:
        inventory = lab.directory / "hosts.json"
        hosts = {box.name: {**ansible_host(box), "sglang_allow_simulated": True, "sglang_become": False}}
        inventory.write_text(json.dumps({"all": {"children": {"sglang": {"hosts": hosts}}}}, indent=1))
        print(f"{box.name} runs, with a stand-in SGLang for {SGLANG_PYTHON}.")
        print(f"  ssh:       {shlex.join(box.ssh_argv())}")
        print(f"  attach:    lxc-attach -P {lab.lxc} -n {box.number}")
        print(f"  inventory: {inventory}")
        with contextlib.suppress(KeyboardInterrupt):  # also while the line is being printed
            print("Ctrl-C ends it.", flush=True)
            signal.pause()
    return 0


def main(arguments: t.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.containers", description="Containers of the lab, by hand."
    )
    parser.add_argument("what", choices=["up", "cleanup"])
    what = parser.parse_args(arguments).what
    signal.signal(signal.SIGTERM, lambda *_unused: sys.exit(143))
    try:
        if what == "up":
            return _up()
        removed = sweep(base_directory()) if base_directory().is_dir() else []
        print(f"removed {len(removed)} dead runs" if removed else "nothing left behind by a dead run")
    except (LabError, AssertionError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
