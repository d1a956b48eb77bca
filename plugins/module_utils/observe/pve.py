# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What Proxmox VE says of a container: its configuration, whether the HA manager looks after it, whether it runs.

/etc/pve is a FUSE file system (pmxcfs) that can hang, and that is an empty directory while pve-cluster is down: each
file is read in a child with a deadline, and what was not read is unknown. A lock is what the configuration's ``lock``
says; the file /run/lock/lxc/pve-config-<vmid>.lock is not looked at: it stays there after its flock was released.
"""

from __future__ import annotations

import os
import typing as t
from dataclasses import dataclass, field

from ..model import Problem
from ..proxmox import VMID, GuestConfig, GuestStatus, parse_config, parse_resources, parse_status
from ..spawn import Called, fetch_bounded, run_bounded

READ_DEADLINE_S = 10.0
STATUS_DEADLINE_S = 20.0
FILE_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class _File:
    """A file's text. ``text`` None: it is missing, or (``error``) could not be read."""

    text: t.Optional[str] = None
    error: t.Optional[str] = None


@dataclass
class _Reader:
    """Reads below one pve_dir; after a hang it asks no more, since the next file would hang as well."""

    deadline_s: float
    problems: list[Problem] = field(default_factory=list)
    hung: bool = False

    def read(self, path: str) -> _File:
        if self.hung:
            return _File(error="not asked after the hang")
        called = fetch_bounded(lambda: _read_file(path), self.deadline_s)
        if called.ok:
            found = t.cast(_File, called.value)
            if found.error is not None:
                self.problems.append(Problem(path, None, found.error))
            return found
        self.hung = called.timed_out
        words = _hang_words(called, self.deadline_s) if called.timed_out else str(called.error)
        self.problems.append(Problem(path, None, words))
        return _File(error=words)

    def is_answering(self, pve_dir: str) -> bool:
        """Whether the configuration file system is mounted at all: without pve-cluster the directory is empty."""
        if self.hung:
            return False
        called = fetch_bounded(lambda: len(os.listdir(f"{pve_dir}/lxc")), self.deadline_s)
        if called.ok:
            return True
        self.hung = called.timed_out
        text = f"{called.error}: is this a Proxmox VE node, does pve-cluster run, and are we root?"
        text = _hang_words(called, self.deadline_s) if called.timed_out else text
        self.problems.append(Problem(pve_dir, None, text))
        return False


def read_guest(vmid: str, pve_dir: str = "/etc/pve", deadline_s: float = READ_DEADLINE_S) -> GuestConfig:
    """What the configuration says of container ``vmid``; returns within three deadlines, and after a hang at once."""
    if not VMID.match(vmid):
        return GuestConfig(vmid, None, problems=(Problem("vmid", None, f"{vmid!r} is no number of a container"),))
    reader = _Reader(deadline_s)
    if not reader.is_answering(pve_dir):
        return GuestConfig(vmid, None, problems=tuple(reader.problems))
    found = reader.read(f"{pve_dir}/lxc/{vmid}.conf")
    resources = reader.read(f"{pve_dir}/ha/resources.cfg")
    ha_managed: t.Optional[bool] = None
    ha_state = None
    if resources.error is None:
        ha_state = parse_resources(resources.text or "").get(f"ct:{vmid}")
        ha_managed = ha_state is not None and ha_state != "ignored"
    config = None if found.text is None else parse_config(found.text)
    return GuestConfig(
        vmid=vmid,
        exists=None if found.error is not None else config is not None,
        lock=config.lock if config else None,
        ha_managed=ha_managed,
        unprivileged=config.unprivileged if config else None,
        hostname=config.settings.get("hostname") if config else None,
        device_nodes=config.device_nodes if config else (),
        problems=tuple(reader.problems),
        ha_state=ha_state,
        device_rules=config.device_rules if config else (),
    )


def read_status(vmid: str, deadline_s: float = STATUS_DEADLINE_S, pct: str = "pct") -> GuestStatus:
    """``pct status``, with a deadline. It says ``running`` for a container of which only a stuck process is left."""
    done = run_bounded([pct, "status", vmid], deadline_s)
    if done.timed_out:
        return GuestStatus("unknown", f"no answer within {deadline_s:g} s", True, done.stuck_pid)
    words = done.error or " ".join((done.stdout + " " + done.stderr).split())[:300]
    return GuestStatus(parse_status(done.stdout) if done.ok else "unknown", words)


def _read_file(path: str) -> _File:
    """Read here, in the child: whatever it is, a FUSE file or anything that blocks, it costs the deadline only."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(FILE_LIMIT_BYTES + 1)
    except FileNotFoundError:
        return _File()
    except OSError as exc:
        return _File(error=os.strerror(exc.errno or 0))
    if len(data) > FILE_LIMIT_BYTES:
        return _File(error=f"larger than {FILE_LIMIT_BYTES} bytes, which no file of Proxmox VE is")
    return _File(data.decode("utf-8", "replace"))


def _hang_words(called: Called, deadline_s: float) -> str:
    where = f" (waits in {called.stuck_wchan})" if called.stuck_wchan else ""
    return f"not read within {deadline_s:g} s{where}: pmxcfs does not answer; see `systemctl status pve-cluster`"
