# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a command line says: is this process an SGLang leader or worker, and with which flags was it started.

A leader is `python -m sglang.launch_server ...`, `python .../bin/sglang serve ...` or `python .../sglang/launch_server.py`;
its title is never rewritten. Workers rewrite theirs by setproctitle (`sglang::scheduler_DP0_TP1`), which wipes their argv
and environ, so flags are read from the leader only.
"""

from __future__ import annotations

import os
import re
import typing as t
from dataclasses import dataclass, field

_LEADER_MODULES = ("sglang.launch_server",)
_COMMAND_MODULES = ("sglang", "sglang.cli.main")  # these need `serve` as the next word
_INTERPRETER = re.compile(r"^python(\d+(\.\d+)*)?[a-z]*$")
_VALUE_OPTIONS = ("X", "W")
_WORKER = re.compile(
    r"^(?P<family>sglang|sgl_diffusion)::(?P<kind>[a-z]+(?:_[a-z]+)*)"
    r"(?P<ranks>(?:_[A-Z]+(?:_[A-Z]+)*\d+)*)(?:[:_](?P<number>\d+))?$"
)
_RANK = re.compile(r"_([A-Z]+(?:_[A-Z]+)*)(\d+)")


@dataclass(frozen=True)
class WorkerRole:
    """What a worker's title says of it.

    ``kind``: scheduler, detokenizer, detokenizer_router, data_parallel_controller, tokenizer_worker, ...
    ``ranks``: only the dimensions larger than 1 are in the title, e.g. ``{"DP": 0, "TP": 1}``; empty for a single GPU.
    ``family``: sglang or sgl_diffusion. ``number``: the trailing figure of titles like `sglang::tokenizer_worker:4711`.
    """

    kind: str
    ranks: t.Mapping[str, int] = field(default_factory=dict)
    family: str = "sglang"
    number: t.Optional[int] = None


def worker_role(title: str) -> t.Optional[WorkerRole]:
    """The role of a process by its rewritten title; None if the whole title isn't one that SGLang gives."""
    match = _WORKER.match(title.strip(" \0"))
    if match is None:
        return None
    number = match.group("number")
    return WorkerRole(
        kind=match.group("kind"),
        ranks={name: int(value) for name, value in _RANK.findall(match.group("ranks"))},
        family=match.group("family"),
        number=None if number is None else int(number),
    )


def is_leader(argv: t.Sequence[str]) -> bool:
    """Whether this argv is an SGLang launcher, and not an editor, shell or grep that merely names one."""
    return server_arguments(argv) is not None


def server_arguments(argv: t.Sequence[str]) -> t.Optional[t.Tuple[str, ...]]:
    """The arguments that SGLang itself parses (after the module, script or `serve`); None if this is no leader."""
    if not argv or not _INTERPRETER.match(os.path.basename(argv[0])):
        return None
    program = _program(argv[1:])
    if program is None:
        return None
    kind, name, rest = program
    if kind == "module":
        if name in _LEADER_MODULES:
            return rest
        return rest[1:] if name in _COMMAND_MODULES and rest[:1] == ("serve",) else None
    if name.endswith("sglang/launch_server.py"):
        return rest
    if os.path.basename(name) == "sglang" and rest[:1] == ("serve",):
        return rest[1:]
    return None


def _program(words: t.Sequence[str]) -> t.Optional[t.Tuple[str, str, t.Tuple[str, ...]]]:
    """Skip the interpreter's own options: ("module"|"script", name, arguments), or None (-c, stdin, nothing)."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("-") or word == "-":
            return None if word in ("-", "") else ("script", word, tuple(words[index:]))
        if word.startswith("--"):
            index += word == "--check-hash-based-pycs"
            continue
        for position, letter in enumerate(word[1:], start=1):
            attached = word[position + 1 :]
            if letter == "m":
                if attached:
                    return ("module", attached, tuple(words[index:]))
                return ("module", words[index], tuple(words[index + 1 :])) if index < len(words) else None
            if letter == "c":
                return None
            if letter in _VALUE_OPTIONS:
                index += not attached
                break
    return None
