# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Install the system packages that the tests use and that are missing here (Debian or Ubuntu, root).

No daemon is left running: while apt works, a ``policy-rc.d`` refuses service starts, as it does in image builds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# A command that proves the package, and the package.  Each is there for the suite named behind it.
WANTED = {
    "lxc-start": "lxc",  # tests/lab: containers that boot systemd
    "ip": "iproute2",  # tests/lab: their bridge
    "sshd": "openssh-server",  # tests/lab: the way into them
    "ssh": "openssh-client",
    "fuser": "psmisc",  # tests/lab: what an operator would ask, and what it does not see
    "setfacl": "acl",  # become to another unprivileged user
    "setfattr": "attr",
    "unshare": "util-linux",  # tests/integration_ns: PID namespaces
    "strace": "strace",  # proof of exactly which pids were signalled
    "losetup": "mount",  # device nodes that can be mapped, for holders
    "gcc": "gcc",  # the NVML double
    "make": "make",
    "git": "git",  # ansible-test lists the checkout's files
}
EXTRA = {"gcc": ("libc6-dev",)}
APT_DEADLINE_S = 600
POLICY = Path("/usr/sbin/policy-rc.d")


def missing_packages() -> list[str]:
    """Packages whose command is not there; sbin directories count even where a user's PATH lacks them."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    names: list[str] = []
    for command, package in WANTED.items():
        if shutil.which(command, path=path) is None:
            names += [package, *EXTRA.get(package, ())]
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        names.append("python3-venv")
    return names


@contextlib.contextmanager
def no_service_starts() -> Iterator[None]:
    """Refuse service starts by package scripts, unless the machine has a policy of its own."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def apt_get(*arguments: str) -> None:
    subprocess.run(
        ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *arguments],
        check=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        timeout=APT_DEADLINE_S,
    )


def main() -> int:
    names = missing_packages()
    if not names:
        print("system packages: all there")
        return 0
    text = " ".join(names)
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        print(f"skipped: system packages missing: {text} (needs root and apt-get); tests that use them say so and skip")
        return 0
    print(f"system packages: installing {text}", flush=True)
    try:
        with no_service_starts():
            try:
                apt_get("install", "-y", "--no-install-recommends", *names)
            except subprocess.CalledProcessError:
                # A bare machine has no package lists yet, or old ones.
                apt_get("update")
                apt_get("install", "-y", "--no-install-recommends", *names)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"error: apt-get could not install {text}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
