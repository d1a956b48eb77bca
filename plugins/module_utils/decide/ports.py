# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the ports that a server wants are free."""

from __future__ import annotations

import os
import typing as t

from ..model import PortUse, Process, Reason

_TITLE_LENGTH = 80


def judge_ports(
    uses: t.Optional[t.Sequence[PortUse]], ports: t.Sequence[int], processes: t.Optional[t.Mapping[int, Process]] = None
) -> tuple[Reason, ...]:
    """What stands against these ports; nothing where they are free.

    A socket that listens makes a port busy (required, ``port_busy``). TIME_WAIT keeps nobody from listening. Any other
    connection that has the port as its local one is told (advisory, ``port_in_use_by_connection``): a client's
    outgoing connection can sit on a port that NCCL or ZMQ wants. ``uses`` None: nobody could look (required,
    ``ports_unknown``). ``processes`` gives names to the owners.
    """
    reasons: list[Reason] = []
    for port in dict.fromkeys(ports):
        subject = f"port {port}"
        if uses is None:
            message = f"whether TCP port {port} is free is not known: the table of TCP sockets could not be read"
            reasons.append(Reason("ports_unknown", message, subject))
            continue
        here = [use for use in uses if use.port == port]
        listening = [use for use in here if use.state == "LISTEN"]
        connected = [use for use in here if use.state not in ("LISTEN", "TIME_WAIT")]
        if listening:
            addresses = ", ".join(sorted({use.address for use in listening}))
            message = f"TCP port {port} is busy: {_owners(listening, processes or {})} listens on {addresses}"
            reasons.append(Reason("port_busy", message, subject))
        if connected:
            reasons.append(
                Reason("port_in_use_by_connection", _connections(port, connected, processes or {}), subject, "advisory")
            )
    return tuple(reasons)


def program_of(process: Process) -> str:
    """What a process runs, without its arguments (they may hold secrets): the program, a module, a script.

    A rewritten title is one word with blanks in it and is kept, cut at 80 characters. Control characters become ``?``.
    """
    words = list(process.argv)
    if not words or not words[0].strip():
        return f"[{process.comm}]"
    shown = [words[0]]
    if os.path.basename(words[0]).startswith("python"):
        shown += _script(words[1:])
    text = " ".join(shown)[:_TITLE_LENGTH].strip()
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _script(words: t.Sequence[str]) -> list[str]:
    """``-m module`` or the script's path after a Python interpreter's own options."""
    for position, word in enumerate(words):
        if word == "-m":
            return list(words[position : position + 2])
        if not word.startswith("-"):
            subcommand = words[position + 1 : position + 2]
            return [word, *subcommand] if os.path.basename(word) == "sglang" and subcommand == ["serve"] else [word]
        if word.startswith("-c"):
            return ["-c"]
    return []


def _owner(pid: int, processes: t.Mapping[int, Process]) -> str:
    process = processes.get(pid)
    return f"pid {pid}" + (f" ({program_of(process)})" if process is not None else "")


def _owners(uses: t.Sequence[PortUse], processes: t.Mapping[int, Process]) -> str:
    pids = sorted({pid for use in uses for pid in use.pids})
    if pids:
        named = " and ".join(_owner(pid, processes) for pid in pids[:3])
        return named + (f" and {len(pids) - 3} more" if len(pids) > 3 else "")
    uids = sorted({use.uid for use in uses if use.uid is not None})
    return "a process that can't be seen from here" + (f" (uid {', '.join(map(str, uids))})" if uids else "")


def _connections(port: int, uses: t.Sequence[PortUse], processes: t.Mapping[int, Process]) -> str:
    first = sorted(uses, key=lambda use: (use.state, use.peer or ""))[0]
    count = "a connection" if len(uses) == 1 else f"{len(uses)} connections"
    owner = f" of {_owners(uses, processes)}" if any(use.pids for use in uses) else ""
    return f"local TCP port {port} is used by {count}{owner} ({first.state}, peer {first.peer or 'unknown'})"
