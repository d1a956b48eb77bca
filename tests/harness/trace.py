# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Proof of which processes were signalled.

With ptrace: the program runs under strace, whose record of kill, tgkill, tkill and pidfd_send_signal is read:

    done, signals = run_traced(ns, argv, deadline_s=60)
    assert {(s.target, s.signal) for s in signals} == {(leader, "SIGTERM")}

Without it, compare ``ns.living()`` before and after (see ``who_left``).
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.harness.command import Completed
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace

CALLS = "kill,tgkill,tkill,pidfd_send_signal,pidfd_open"
# The filter in the kernel lets all other calls pass without a stop: a run takes a fraction of the time.
STRACE = ("strace", "-f", "--seccomp-bpf", "-qq", "-e", f"trace={CALLS}", "-e", "signal=none", "--decode-fds=pidfd")

# `123 kill(456, SIGTERM) = 0`; the sender's number is padded, and missing where there is only one task.
_CALL = re.compile(r"^(?:(?P<task>\d+) +)?(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)")
_UNFINISHED = re.compile(r"^(?:(?P<task>\d+) +)?(?P<name>\w+)\((?P<arguments>.*?),? <unfinished \.\.\.>$")
_RESUMED = re.compile(r"^(?:(?P<task>\d+) +)?<\.\.\. (?P<name>\w+) resumed>(?P<rest>.*)$")
_DECODED = re.compile(r"^(?P<number>\d+)<pid:(?P<pid>\d+)>$")


@dataclasses.dataclass(frozen=True)
class Signal:
    """One signal that was sent. ``sender`` is the sending task; ``target`` a pid (negative: a group) in its namespace.

    ``target`` is None where a pidfd could not be resolved: treat it as a failure of the proof. ``result`` is 0 or -1.
    """

    sender: int
    target: int | None
    signal: str
    call: str
    result: int


def parse_trace(text: str) -> list[Signal]:
    """The signals in strace's output; signal 0 (a mere question) is left out."""
    opened: dict[tuple[int, int], int] = {}
    last_opened: dict[int, int] = {}
    waiting: dict[tuple[int, str], str] = {}
    found: list[Signal] = []
    for line in text.splitlines():
        if unfinished := _UNFINISHED.match(line):
            waiting[int(unfinished["task"] or 0), unfinished["name"]] = unfinished["arguments"]
            continue
        if resumed := _RESUMED.match(line):
            key = int(resumed["task"] or 0), resumed["name"]
            rest = resumed["rest"]
            arguments = waiting.pop(key)
            if not rest.lstrip().startswith(")"):
                arguments += ", "
            line = f"{resumed['task']} {resumed['name']}({arguments}{rest.lstrip()}"
        call = _CALL.match(line)
        if call is None or call["name"] not in CALLS.split(","):
            continue
        task, result = int(call["task"] or 0), int(call["result"])
        arguments_list = [argument.strip() for argument in call["arguments"].split(",")]
        if call["name"] == "pidfd_open":
            if result >= 0:
                opened[task, result] = last_opened[result] = int(arguments_list[0])
            continue
        target, name = _target(call["name"], arguments_list, task, opened, last_opened)
        if name != "0":
            found.append(Signal(task, target, name, call["name"], result))
    return found


def _target(
    call: str,
    arguments: list[str],
    task: int,
    opened: t.Mapping[tuple[int, int], int],
    last_opened: t.Mapping[int, int],
) -> tuple[int | None, str]:
    """(pid, signal name) of one call. For tgkill the thread group counts."""
    if call == "tgkill":
        return int(arguments[0]), arguments[2]
    if call != "pidfd_send_signal":
        return int(arguments[0]), arguments[1]
    decoded = _DECODED.match(arguments[0])
    if decoded:
        return int(decoded["pid"]), arguments[1]
    number = int(arguments[0].partition("<")[0])
    # Another task of the same process may have opened it.
    return opened.get((task, number), last_opened.get(number)), arguments[1]


def strace_missing() -> str | None:
    """Why tracing is not possible, or None."""
    return None if shutil.which("strace") else "strace is not installed"


def traced(argv: t.Sequence[str], record: Path) -> list[str]:
    """The command line that runs ``argv`` under strace with its record in a file."""
    return [*STRACE, "-o", str(record), *argv]


def run_traced(
    ns: Namespace, argv: t.Sequence[str], deadline_s: float, env: t.Mapping[str, str] | None = None, *, stdin: str = ""
) -> tuple[Completed, list[Signal]]:
    """Run a command inside under strace; what it (and all its children) signalled."""
    record = ns.directory / "trace"
    record.unlink(missing_ok=True)
    done = ns.run(traced(argv, record), deadline_s, env, stdin=stdin)
    return done, parse_trace(record.read_text(errors="replace"))


def who_left(before: set[tuple[int, int]], after: set[tuple[int, int]]) -> set[int]:
    """The pids of ``ns.living()`` that are gone; one whose number now belongs to another process counts as gone."""
    return {pid for pid, _ticks in before - after}
