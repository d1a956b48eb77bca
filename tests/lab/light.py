# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Light hosts: each has pids, mounts, /var/lib, a network and an sshd of its own, and is up in a second.

    with LightNetwork(tmp_path) as network:
        hosts = [network.host(f"gpu{number:02}") for number in range(1, 7)]
        network.centre.run(network.ssh_argv(hosts[0], "id"), 10).check()

The centre is one namespace more: it has the bridge, and is where routers, clients and Ansible run. Nothing of it is in
the machine's own network, so nothing is left there, however a run ends.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import typing as t
from pathlib import Path

from ..harness import namespace
from ..harness.command import run_command
from ..harness.namespace import Namespace, NsProcess
from ..harness.waiting import wait_for

NETWORK = "10.98.0"
CENTRE_ADDRESS = f"{NETWORK}.1"
STEP_DEADLINE_S = 20
SSHD_CONFIG = """\
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/key.pub
StrictModes no
UsePAM yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
PrintMotd no
MaxStartups 50
MaxSessions 50
PidFile none
Subsystem sftp internal-sftp
"""
# The machine's own state below /var/lib shows through, what is written there is the host's. What a login of root would
# read is emptied. $1: what Clean Slate keeps there.
OWN_MOUNTS = """\
set -e
mkdir -p /run/sshd /run/light/upper /run/light/work
mount -t overlay overlay -o lowerdir=/var/lib,upperdir=/run/light/upper,workdir=/run/light/work /var/lib
rm -rf "$1"
: >/run/light/empty
for name in .bashrc .profile .bash_profile .ssh/rc .ssh/environment; do
    if [ -e "/root/$name" ]; then mount --bind /run/light/empty "/root/$name"; fi
done
"""
STATE_DIR = "/var/lib/cleanslate"


def why_not() -> str | None:
    """Why there can't be light hosts here, or None."""
    reason = namespace.why_not()
    if reason is not None:
        return reason
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    missing = [name for name in ("ip", "ssh", "sshd", "ssh-keygen") if shutil.which(name, path=path) is None]
    return f"light hosts need {', '.join(missing)} (`make system` installs them)" if missing else None


class LightHost:
    """One host, reached by ssh at ``address``. Paths and pids are those inside."""

    def __init__(self, name: str, number: int, ns: Namespace, ssh: Path) -> None:
        self.name = name
        self.address = f"{NETWORK}.{10 + number}"
        self.ns = ns
        self.interface = f"host{number}"
        self._ssh = ssh

    def start_sshd(self) -> NsProcess:
        """Its way in."""
        argv = [_program("sshd"), "-D", "-e", "-f", str(self._ssh / "sshd_config")]
        return self.ns.popen(argv, detached=True, output=self.ns.directory / "sshd.log")

    def link(self, state: str) -> None:
        """``up`` or ``down``: the cable."""
        self.ns.run([_program("ip"), "link", "set", "eth0", state], STEP_DEADLINE_S).check()

    def lose(self) -> None:
        """Nobody reaches it any more: the cable is out, then sshd and its sessions are dead."""
        self.link("down")
        pids = [pid for pid, title in self.ns.titles().items() if title.startswith(("sshd", _program("sshd")))]
        self.ns.run(["kill", "-KILL", *map(str, pids)], STEP_DEADLINE_S)

    def find(self) -> None:
        """It is back."""
        self.link("up")
        self.start_sshd()

    def path(self, inside: str) -> Path:
        """A path of the host, seen from outside."""
        return self.ns.root / inside.lstrip("/")


class LightNetwork:
    """The hosts of a test and their centre. ``shared`` and ``keep`` show in all of them; each has its own directory
    beside."""

    def __init__(self, directory: Path, keep: t.Sequence[Path] = ()) -> None:
        self.directory = directory
        self._keep = [directory / "shared", *keep]
        self.shared = directory / "shared"
        self.ssh = directory / "shared" / "ssh"
        self.hosts: list[LightHost] = []
        self.centre = Namespace(directory / "centre", keep=self._keep)
        self._ended = contextlib.ExitStack()

    def __enter__(self) -> LightNetwork:
        self.ssh.mkdir(parents=True)
        for name in ("key", "host_key"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.ssh / name)]
            run_command(make, STEP_DEADLINE_S).check()
        (self.ssh / "sshd_config").write_text(SSHD_CONFIG.format(directory=self.ssh))
        self._ended.enter_context(self.centre)
        ip = _program("ip")
        script = f"{ip} link add name light type bridge && {ip} address add {CENTRE_ADDRESS}/24 dev light"
        self.centre.run(["sh", "-c", f"{script} && {ip} link set light up"], STEP_DEADLINE_S).check()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ended.close()

    def host(self, name: str) -> LightHost:
        """One host more, which answers."""
        number = len(self.hosts) + 1
        ns = self._ended.enter_context(Namespace(self.directory / name, keep=self._keep))
        host = LightHost(name, number, ns, self.ssh)
        ns.run(["sh", "-c", OWN_MOUNTS, "sh", STATE_DIR], STEP_DEADLINE_S).check()
        ip = _program("ip")
        cable = [ip, "link", "add", host.interface, "netns", str(self.centre.init_pid), "type", "veth"]
        cable += ["peer", "name", "eth0", "netns", str(ns.init_pid)]
        run_command(cable, STEP_DEADLINE_S).check()
        plug = f"{ip} link set {host.interface} master light up"
        self.centre.run(["sh", "-c", plug], STEP_DEADLINE_S).check()
        ns.run([ip, "address", "add", f"{host.address}/24", "dev", "eth0"], STEP_DEADLINE_S).check()
        host.link("up")
        host.start_sshd()
        self.hosts.append(host)
        self._write_known_hosts()
        self.wait_answers(host)
        return host

    def wait_answers(self, host: LightHost) -> None:
        wait_for(
            f"sshd of {host.name} answers",
            lambda: self.centre.run(self.ssh_argv(host, "true"), STEP_DEADLINE_S).rc == 0,
            STEP_DEADLINE_S,
        )

    def _write_known_hosts(self) -> None:
        key = " ".join((self.ssh / "host_key.pub").read_text().split()[:2])
        (self.ssh / "known_hosts").write_text("".join(f"{host.address} {key}\n" for host in self.hosts))

    @property
    def ssh_options(self) -> str:
        """Options for every ssh, as one text: host keys are checked, nothing of the user's own is read."""
        settings = (
            f"UserKnownHostsFile={self.ssh}/known_hosts",
            "GlobalKnownHostsFile=/dev/null",
            "StrictHostKeyChecking=yes",
            "IdentitiesOnly=yes",
            "IdentityAgent=none",
            "BatchMode=yes",
            "ConnectTimeout=3",
            "ServerAliveInterval=2",
            "ServerAliveCountMax=3",
        )
        return "-F /dev/null " + " ".join(f"-o {setting}" for setting in settings)

    def ssh_argv(self, host: LightHost, *argv: str) -> list[str]:
        """A command on a host, to be run in the centre."""
        words = ["ssh", *shlex.split(self.ssh_options), "-i", str(self.ssh / "key"), "-T", f"root@{host.address}"]
        return [*words, shlex.join(argv)]

    def variables(self, host: LightHost) -> dict[str, t.Any]:
        """How Ansible, in the centre, reaches a host."""
        return {
            "ansible_connection": "ssh",
            "ansible_host": host.address,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.ssh / "key"),
            "ansible_ssh_common_args": self.ssh_options,
            "sglang_become": False,
        }

    @staticmethod
    def ansible_env() -> dict[str, str]:
        """Shared connections and pipelining, as operators have them; /tmp is the centre's own, and a short path."""
        return {
            "ANSIBLE_SSH_CONTROL_PATH_DIR": "/tmp/cp",
            "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=60s",
            "ANSIBLE_PIPELINING": "True",
            "ANSIBLE_REMOTE_TEMP": "/tmp/ansible",
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml",
            "ANSIBLE_TIMEOUT": "5",
        }


def _program(name: str) -> str:
    """Its path: sshd must be started by it."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    found = shutil.which(name, path=path)
    assert found is not None, f"{name} is not installed"
    return found
