# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a command line says: is this process an SGLang leader or worker, and with which flags was it started.

A leader is `python -m sglang.launch_server ...`, `python .../bin/sglang serve ...` or `python
.../sglang/launch_server.py`;
its title is never rewritten. Workers rewrite theirs by setproctitle (`sglang::scheduler_DP0_TP1`), which wipes their
argv
and environ, so flags are read from the leader only.
"""

from __future__ import annotations

import os
import re
import typing as t
from dataclasses import dataclass, field

from .configfile import read_config
from .flags import canonical, normalise
from .option_table import COMMON_OPTIONS, OptionTable
from .redact import MASK, Redactor, is_secret_flag

_LEADER_MODULES = ("sglang.launch_server",)
_COMMAND_MODULES = ("sglang", "sglang.cli.main")  # these need `serve` as the next word
_INTERPRETER = re.compile(r"^python(\d+(\.\d+)*)?[a-z]*$")
_VALUE_OPTIONS = ("X", "W")
_WORKER = re.compile(
    r"^(?P<family>sglang|sgl_diffusion)::(?P<kind>[a-z]+(?:_[a-z]+)*)"
    r"(?P<ranks>(?:_[A-Z]+(?:_[A-Z]+)*\d{1,9})*)(?:[:_](?P<number>\d{1,18}))?$"
)
_ROUTER = "router"
_RANK = re.compile(r"_([A-Z]+(?:_[A-Z]+)*)(\d{1,9})")


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
    """The role of a process by its rewritten title; None if the whole title isn't one that SGLang gives.

    The router calls itself `sglang::router` in the same way. It is no part of any server, has no GPU, and other servers
    live behind it.
    """
    match = _WORKER.match(title.strip(" \0"))
    if match is None or match.group("kind") == _ROUTER:
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


def server_arguments(argv: t.Sequence[str]) -> t.Optional[tuple[str, ...]]:
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


def _program(words: t.Sequence[str]) -> t.Optional[tuple[str, str, tuple[str, ...]]]:
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


@dataclass(frozen=True)
class LaunchedFlags:
    """The flags of a running leader.

    ``flags``: canonical name -> value (words as text, bare flags True, lists where more than one value follows),
    secrets masked.
    ``sources``: canonical name -> "command line" or the path of the `--config` file.
    ``config_path``: the `--config` file in effect, if any. ``complete``: False when that file couldn't be read or
    understood;
    flags that are not in ``flags`` are then unknown, not unset. ``problems``: findings for people.
    """

    flags: t.Mapping[str, t.Any]
    sources: t.Mapping[str, str]
    config_path: t.Optional[str]
    complete: bool
    problems: tuple[str, ...]


def launched_flags(
    argv: t.Sequence[str],
    read_config_text: t.Callable[[str], t.Optional[str]],
    options: t.Optional[OptionTable] = None,
    cut: bool = False,
) -> t.Optional[LaunchedFlags]:
    """How this leader was started; None if the argv is no leader's.

    ``cut``: it goes on behind what could be read. Since the last word wins, no flag is known then.

    ``read_config_text`` gives the text of a configuration file by the path on the command line, or None. ``options``
    are the installed
    version's; without them a built-in list of common ones completes abbreviations.
    The order is SGLang's: the file first, then the command line, the last word wins.
    """
    words = server_arguments(argv)
    if words is None:
        return None
    if cut:
        return LaunchedFlags({}, {}, None, False, ("its command line is too long to be read whole: no flag is known",))
    table = options if options is not None else COMMON_OPTIONS
    problems: list[str] = []
    flags: dict[str, t.Any] = {}
    sources: dict[str, str] = {}
    path, rest = _take_config(words, problems)
    complete = True
    if path is not None:
        text = read_config_text(path)
        config = None if text is None else read_config(text)
        if config is None:
            complete = False
            why = "can't be read" if text is None else "is not a mapping in YAML that is understood here"
            problems.append(f"the configuration file {path} {why}: flags that it sets are unknown")
        else:
            for name, value in config.items():
                if value is not False and value != []:
                    _put(flags, sources, canonical(name, table), value, path)
    for name, value, ignored in _options_of(rest, table, problems):
        if ignored:
            problems.append(
                f"started with --{name} in one word or abbreviated: SGLang takes this form and ignores the file "
                "without a word; what it holds is not in effect (write --config FILE in two words)"
            )
            continue
        _put(flags, sources, canonical(name, table), value, "command line")
    return LaunchedFlags(flags, sources, path, complete, tuple(problems))


def _put(flags: dict[str, t.Any], sources: dict[str, str], name: str, value: t.Any, source: str) -> None:
    flags[name] = MASK if is_secret_flag(name) and value not in (None, "") else value
    sources[name] = source


def _take_config(words: t.Sequence[str], problems: list[str]) -> tuple[t.Optional[str], tuple[str, ...]]:
    """SGLang looks for the very word `--config`; the path is the word behind it."""
    if "--config" not in words:
        return None, tuple(words)
    index = words.index("--config")
    if index + 1 >= len(words):
        problems.append("--config is the last word: no file follows")
        return None, tuple(words[:index])
    return words[index + 1], tuple(words[:index]) + tuple(words[index + 2 :])


def _options_of(
    words: t.Sequence[str], table: OptionTable, problems: list[str]
) -> t.Iterator[tuple[str, t.Any, bool]]:
    """(name as written, value, is an ignored form of --config) for each option on the command line."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not _is_option(word):
            if word not in ("", "--"):
                problems.append(f"the word {Redactor().text(word)!r} belongs to no option")
            continue
        name, equals, attached = word[2:].partition("=")
        option = table.get(normalise(name))
        if canonical(name, table) == "config":
            while not equals and index < len(words) and not _is_option(words[index]):
                index += 1
            yield name + equals + attached, attached, True
            continue
        if equals:
            yield name, attached, False
            continue
        values: list[str] = []
        limit = len(words) if option is None else _MOST_VALUES[option.values]
        while len(values) < limit and index < len(words) and not _is_option(words[index]):
            values.append(words[index])
            index += 1
        if option is not None and option.values == "many":
            yield name, values, False
        else:
            yield name, (True if not values else values[0] if len(values) == 1 else values), False


_MOST_VALUES = {"none": 0, "one": 1, "optional": 1, "many": 10**6}


def _is_option(word: str) -> bool:
    """argparse's rule: a word with a space in it, or a negative number, is a value even if it begins with a dash."""
    return word.startswith("--") and word != "--" and " " not in word.partition("=")[0]
