# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a lab container's root file system gets on top of the machine's own: users, sshd, systemd's target, the doubles.

Everything is written into an overlay, so nothing of it reaches the machine. The container's interpreter for modules is
the system's ``/usr/bin/python3``; the stand-in SGLang is a virtual environment of it in ``/opt/sglang``, as a real one
would be, and every user may run it.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import uuid
from pathlib import Path

from ..doubles.nvml.double import install as install_nvml
from ..harness.command import ROOT, run_command

PYTHON = "/usr/bin/python3"
MINIMUM_PYTHON = (3, 9)
SGLANG_HOME = "/opt/sglang"
SGLANG_PYTHON = f"{SGLANG_HOME}/bin/python"
DOUBLES = "/opt/cleanslate-lab"
SERVER_USER = "sglang"
OPERATOR = "oncall"
MODEL = "/models/tiny"
STEP_DEADLINE_S = 60

# Units of sysinit.target and of timers that want hardware, change the kernel or would only cost time.
MASKED = (
    "systemd-timesyncd.service",
    "systemd-udevd.service",
    "systemd-udev-trigger.service",
    "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket",
    "systemd-modules-load.service",
    "systemd-sysctl.service",
    "systemd-binfmt.service",
    "systemd-pstore.service",
    "systemd-random-seed.service",
    "systemd-hwdb-update.service",
    "systemd-remount-fs.service",
    "systemd-machine-id-commit.service",
    "systemd-ask-password-console.path",
    "systemd-ask-password-wall.path",
    "proc-sys-fs-binfmt_misc.automount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "sys-kernel-config.mount",
    "sys-fs-fuse-connections.mount",
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "ssh.socket",
)
TARGET = """\
[Unit]
Description=Lab container
Requires=sysinit.target
Wants=dbus.socket systemd-logind.service systemd-user-sessions.service ssh.service
After=sysinit.target systemd-user-sessions.service ssh.service
AllowIsolate=yes
"""
SSH_UNIT = """\
[Unit]
Description=OpenBSD Secure Shell server
After=systemd-user-sessions.service

[Service]
ExecStart=/usr/sbin/sshd -D -f /etc/ssh/lab_sshd_config
KillMode=process
RuntimeDirectory=sshd
RuntimeDirectoryMode=0755
"""
SSHD_CONFIG = """\
HostKey /etc/ssh/lab_host_key
AuthorizedKeysFile /etc/ssh/lab_authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM yes
UseDNS no
PrintMotd no
MaxStartups 50
Subsystem sftp internal-sftp
"""


class LabError(Exception):
    """The lab could not be made, or left something behind; the text names what."""


def populate(root: Path, hostname: str, public_key: Path) -> str:
    """Fill a fresh overlay (mounted at ``root``). Returns the container's ssh host key, ``ssh-ed25519 AAAA...``."""
    host_key = _sshd(root, public_key)
    _systemd(root)
    (root / "etc/hostname").write_text(f"{hostname}\n")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost {hostname}\n")
    _replace(root / "etc/machine-id", f"{uuid.uuid4().hex}\n")
    _user(
        root, SERVER_USER, "--system", "--user-group", "--home-dir", "/var/lib/sglang", "--shell", "/usr/sbin/nologin"
    )
    _user(root, OPERATOR, "--user-group", "--home-dir", f"/home/{OPERATOR}", "--shell", "/bin/bash")
    # What an ssh session of root finds must not be the machine's own settings.
    for name in (".bashrc", ".profile", ".bash_profile", ".ssh/rc"):
        _replace(root / "root" / name, "")
    # What the machine itself has launched is no business of the container.
    shutil.rmtree(root / "var/lib/cleanslate", ignore_errors=True)
    _sglang(root)
    _nvml(root)
    return host_key


def _replace(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _sshd(root: Path, public_key: Path) -> str:
    key = root / "etc/ssh/lab_host_key"
    run_command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(key)], STEP_DEADLINE_S).check()
    _replace(root / "etc/ssh/lab_sshd_config", SSHD_CONFIG, 0o600)
    _replace(root / "etc/ssh/lab_authorized_keys", public_key.read_text())
    return " ".join(key.with_suffix(".pub").read_text().split()[:2])


def _systemd(root: Path) -> None:
    units = root / "etc/systemd/system"
    _replace(units / "lab.target", TARGET)
    _replace(units / "ssh.service", SSH_UNIT)
    for name in MASKED:
        path = units / name
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/null")
    # The machine's own timers and services are wanted by other targets than ours; sysinit's list is not.
    _replace(
        root / "etc/systemd/journald.conf.d/lab.conf", "[Journal]\nStorage=volatile\nReadKMsg=no\nRateLimitBurst=0\n"
    )


def _user(root: Path, name: str, *options: str) -> None:
    known = {line.split(":", 1)[0] for line in (root / "etc/passwd").read_text().splitlines()}
    if name in known:
        raise LabError(f"the machine has a user {name!r} of its own, whose settings the lab would inherit")
    run_command(["chroot", str(root), "useradd", "--create-home", *options, name], STEP_DEADLINE_S).check()


def _sglang(root: Path) -> None:
    """The stand-in as a virtual environment, and the fixtures; copies: a checkout may lie where only root looks."""
    copied = root / DOUBLES.lstrip("/")
    for source in ("tests/doubles/sglang_standin", "tests/fixtures"):
        shutil.copytree(ROOT / source, copied / Path(source).name, ignore=shutil.ignore_patterns("__pycache__"))
    argv = ["chroot", str(root), PYTHON, f"{DOUBLES}/sglang_standin/install.py", SGLANG_HOME]
    run_command(argv, STEP_DEADLINE_S).check()
    (root / MODEL.lstrip("/")).mkdir(parents=True)


def _nvml(root: Path) -> None:
    """The NVML double in the loader's path, and nvidia-ml-py for the modules' interpreter."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None:
        raise LabError("this Python has no nvidia-ml-py: use the one of `make venv`")
    script = "import sys; print('python%d.%d' % sys.version_info[:2])"
    version = run_command(["chroot", str(root), PYTHON, "-c", script], STEP_DEADLINE_S).check().stdout.strip()
    packages = root / "usr/local/lib" / version / "dist-packages"
    packages.mkdir(parents=True, exist_ok=True)
    shutil.copy2(spec.origin, packages / "pynvml.py")
    install_nvml(root, python=PYTHON)


def system_python_problem() -> str | None:
    """Why the system's interpreter can't serve the modules, or None."""
    if not Path(PYTHON).exists():
        return f"{PYTHON} is not there"
    done = subprocess.run(
        [PYTHON, "-c", f"import sys, venv; sys.exit(sys.version_info < {MINIMUM_PYTHON})"],
        capture_output=True,
        timeout=STEP_DEADLINE_S,
        check=False,
    )
    return None if done.returncode == 0 else f"{PYTHON} is older than 3.9 or has no venv module"
