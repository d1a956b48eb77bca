# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for Proxmox's pct over plain LXC containers. README.md says what it imitates and how it is switched.

usage: pct exec VMID -- WORDS | pct start|stop|status|config VMID | pct list
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import typing as t
from pathlib import Path

# The folder of one node; install() writes a line like this in front of the rest.
NODE = Path(globals().get("INSTALLED_FOR") or os.environ.get("PCT_DOUBLE_NODE") or ".")


class Refused(Exception):
    """What pct says on stderr before it exits with 255."""


class Guest:
    """A container that this node knows."""

    def __init__(self, vmid: str) -> None:
        self.vmid = vmid
        self.config = NODE / "pve" / "lxc" / f"{vmid}.conf"
        if not vmid.isdigit() or not self.config.exists():
            raise Refused(f"Configuration file 'nodes/lab/lxc/{vmid}.conf' does not exist")
        self.commands: dict[str, list[str]] = json.loads((NODE / "guests" / f"{vmid}.json").read_text())

    def setting(self, name: str) -> str:
        for line in self.config.read_text().splitlines():
            key, _colon, value = line.partition(":")
            if key == name:
                return value.strip()
        return ""

    @property
    def state(self) -> str:
        done = subprocess.run(self.commands["info"], stdout=subprocess.PIPE, check=False, text=True)
        return "stopped" if "STOPPED" in done.stdout or done.returncode else "running"

    def check_lock(self) -> None:
        lock = self.setting("lock")
        if lock:
            raise Refused(f"CT is locked ({lock})")


def log(**values: object) -> None:
    """One line per event; a short append is never torn."""
    line = json.dumps({"pid": os.getpid(), "at": time.time(), **values}) + "\n"
    with (NODE / "pct.log").open("a") as file:
        file.write(line)


def hang_if_wanted(command: str) -> None:
    """Sleep for ever, as seen in the field, while the switch is on."""
    switch = NODE / f"hang-{command}"
    if not switch.exists():
        return
    if "ignore-term" in switch.read_text():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log(event="hangs", command=command)
    while True:
        signal.pause()


def enter(vmid: str, words: t.Sequence[str]) -> int:
    """pct.pm's exec: it becomes lxc-attach, without a deadline, with our environment."""
    guest = Guest(vmid)
    if guest.state != "running":
        raise Refused(f"container '{vmid}' not running!")
    argv = [*guest.commands["attach"], "--", *(words[1:] if words[:1] == ["--"] else words)]
    os.execvp(argv[0], argv)


def start(vmid: str) -> int:
    guest = Guest(vmid)
    guest.check_lock()
    if guest.state == "running":
        raise Refused(f"CT {vmid} already running")
    return subprocess.run(guest.commands["start"], check=False).returncode


def stop(vmid: str) -> int:
    """LXC.pm: `lxc-stop --kill`, which takes no deadline and waits for the last process."""
    guest = Guest(vmid)
    guest.check_lock()
    if guest.state == "stopped":
        raise Refused(f"CT {vmid} not running")
    return subprocess.run(guest.commands["stop"], check=False).returncode


def status(vmid: str) -> int:
    print(f"status: {Guest(vmid).state}")
    return 0


def config(vmid: str) -> int:
    print(Guest(vmid).config.read_text(), end="")
    return 0


def list_all() -> int:
    print(f"{'VMID':<10} {'Status':<10} {'Lock':<12} {'Name':<20}")
    for path in sorted((NODE / "pve" / "lxc").glob("*.conf")):
        guest = Guest(path.stem)
        print(f"{guest.vmid:<10} {guest.state:<10} {guest.setting('lock'):<12} {guest.setting('hostname'):<20}")
    return 0


def run(command: str, rest: t.Sequence[str]) -> int:
    if command == "list" and not rest:
        return list_all()
    if command == "exec" and len(rest) > 1:
        return enter(rest[0], rest[1:])
    commands: dict[str, t.Callable[[str], int]] = {"start": start, "stop": stop, "status": status, "config": config}
    if command not in commands or len(rest) != 1:
        sys.stderr.write(f"ERROR: unknown command 'pct {' '.join([command, *rest])}'\n")
        return 255
    return commands[command](rest[0])


def main() -> int:
    command, rest = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    log(event="start", argv=sys.argv[1:])
    hang_if_wanted(command)
    try:
        code = run(command, rest)
    except Refused as refusal:
        sys.stderr.write(f"{refusal}\n")
        code = 255
    log(event="end", rc=code)
    return code


if __name__ == "__main__":
    sys.exit(main())
