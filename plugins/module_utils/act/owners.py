# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asking the owner of a server to stop it: a systemd unit or a container. Nothing is signalled here."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from ..decide.targets import Owner
from ..spawn import run_bounded

CONTAINER_TOOLS = ("docker", "podman")


@dataclass(frozen=True)
class Asked:
    """The owner's answer: accepted, or an error in its words."""

    owner: Owner
    accepted: bool
    detail: str = ""


def ask_to_stop(owner: Owner, deadline_s: float, attach_deadline_s: float = 20.0) -> Asked:
    """Ask and return at once where the owner allows that; the caller waits for the processes, not for the command.

    A container's systemd is asked by ``pct exec``, which has no deadline of its own and was seen to hang.
    """
    if owner.kind == "systemd" and owner.guest is not None:
        return _ask_inside(owner, owner.guest, attach_deadline_s)
    if owner.kind == "systemd":
        done = run_bounded(["systemctl", "stop", "--no-block", "--", owner.name], min(deadline_s, 20.0))
        return Asked(owner, done.ok, "" if done.ok else _words(done.stderr, done.error, done.timed_out))
    return _stop_container(owner, deadline_s)


def _ask_inside(owner: Owner, vmid: str, deadline_s: float) -> Asked:
    argv = ["pct", "exec", vmid, "--", "systemctl", "stop", "--no-block", "--", owner.name]
    done = run_bounded(argv, deadline_s)
    if done.timed_out:
        stuck = "" if done.stuck_pid is None else f"; its pid {done.stuck_pid} can't be ended"
        return Asked(owner, False, f"pct exec {vmid} gave no answer within {deadline_s:g} s{stuck}")
    return Asked(owner, done.ok, "" if done.ok else f"pct exec {vmid}: {_words(done.stderr, done.error, False)}")


def _stop_container(owner: Owner, deadline_s: float) -> Asked:
    """Stop a container whose main process, by the engine's own word, is the leader; another one is left alone."""
    details: list[str] = []
    for tool in CONTAINER_TOOLS:
        shown = run_bounded([tool, "inspect", "--format", "{{.State.Pid}}", owner.name], 10.0)
        if not shown.ok:
            details.append(f"{tool}: {_words(shown.stderr, shown.error, shown.timed_out)}")
            continue
        if shown.stdout.strip() != str(owner.leader_pid):
            return Asked(owner, False, f"{tool} says that its main process is {shown.stdout.strip()}, not the leader")
        done = run_bounded([tool, "stop", "--time", str(max(1, int(deadline_s) - 5)), owner.name], deadline_s)
        return Asked(owner, done.ok, "" if done.ok else _words(done.stderr, done.error, done.timed_out))
    return Asked(owner, False, "; ".join(details))


def _words(stderr: str, error: t.Optional[str], timed_out: bool) -> str:
    if timed_out:
        return "no answer within the deadline"
    return error or " ".join(stderr.split())[:300] or "failed without a word"
