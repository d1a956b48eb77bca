# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What SGLang's own log says: how far a start has come, why it failed, how much GPU memory it left.

The lines are those of SGLang 0.5.1 to 0.5.23; each begins with `[2026-01-31 23:59:59 DP0 TP0 EP0] ` (ranks only where
there are more
than one). SGLang's "GB" are GiB.
"""

from __future__ import annotations

import calendar
import os
import re
import time
import typing as t
from dataclasses import dataclass

from .files import open_regular

PHASES = ("imports", "distributed", "weights", "kv_cache", "graphs", "warm_up", "ready")
"""A start's phases in their order. A log may jump over some (no graphs on a CPU)."""

_PREFIX = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)((?: [A-Z_]+\d+)*)\]")
_BEGINS = (
    ("distributed", re.compile(r"Init torch distributed begin")),
    ("weights", re.compile(r"Load weight begin")),
    ("kv_cache", re.compile(r"Load weight end|KV Cache is allocated|Memory pool end")),
    ("graphs", re.compile(r"(?i)\bCapture .*?graph begin")),
    ("warm_up", re.compile(r"Uvicorn running on|Application startup complete|Started server process")),
    ("ready", re.compile(r"The server is fired up and ready to roll!")),
)
_PERCENT = re.compile(r"Loading (?:safetensors|pt|gguf|\w+) ?checkpoint shards:\s*(\d{1,3})% Completed")
_CAPTURE_END = re.compile(r"(?i)Capture .*?graph end\..*?avail mem=([\d.]+) GB")
_AVAILABLE = re.compile(r"available_gpu_mem=([\d.]+) GB")
_TOKENS = re.compile(r"max_total_num_tokens=(\d+)")
_MIB_PER_GB = 1024

_Say = t.Callable[[t.Match[str]], str]


@dataclass(frozen=True)
class Phase:
    """A phase that was seen. ``seconds`` until the next one began by the log's own times; None for the last and where
    unknown."""

    name: str
    seconds: t.Optional[int]


@dataclass(frozen=True)
class Progress:
    """How far a start has come. ``weights_percent`` only while the newest phase is the weights'."""

    phase: str
    phases: tuple[Phase, ...]
    weights_percent: t.Optional[int]


def read_ends(path: str, head_bytes: int = 1 << 20, tail_bytes: int = 1 << 20) -> t.Optional[str]:
    """The beginning and the end of a log, however large it is; None if it can't be read. No links, no FIFOs."""
    try:
        fd = open_regular(path)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as stream:
        status = os.fstat(fd)
        if status.st_size <= head_bytes + tail_bytes:
            return stream.read(head_bytes + tail_bytes).decode("utf-8", errors="replace")
        head = stream.read(head_bytes)
        stream.seek(-tail_bytes, os.SEEK_END)
        tail = stream.read(tail_bytes)
    # Whole lines only.
    text = head[: head.rfind(b"\n") + 1] + b"[... left out ...]\n" + tail[tail.find(b"\n") + 1 :]
    return text.decode("utf-8", errors="replace")


def tail_lines(text: str, count: int) -> list[str]:
    """The last lines, without terminal colours."""
    return [_plain(line) for line in text.splitlines()[-count:]]


def _plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).rstrip()


def progress(text: str) -> Progress:
    """The phases in the log so far. A log without any known line is one of a process that imports."""
    seen: dict[str, t.Optional[int]] = {"imports": None}
    percent = None
    for line in text.splitlines():
        at = _time_of(line)
        if at is not None and seen["imports"] is None:
            seen["imports"] = at
        for name, pattern in _BEGINS:
            if name not in seen and pattern.search(line):
                seen[name] = at
        found = _PERCENT.search(line)
        if found:
            percent = int(found.group(1))
    names = [name for name in PHASES if name in seen]
    phases = []
    for index, name in enumerate(names):
        begin = seen[name]
        end = seen[names[index + 1]] if index + 1 < len(names) else None
        phases.append(Phase(name, None if begin is None or end is None else max(end - begin, 0)))
    return Progress(names[-1], tuple(phases), percent if names[-1] == "weights" else None)


def _time_of(line: str) -> t.Optional[int]:
    match = _PREFIX.match(line)
    if match is None:
        return None
    try:
        return calendar.timegm(time.strptime(match.group(1), "%Y-%m-%d %H:%M:%S"))
    except ValueError:
        return None


def headroom_mib(text: str) -> t.Optional[int]:
    """GPU memory left after the start, in MiB, on the rank with the least: after the last graph capture, else as the
    scheduler reports it. None if the log doesn't say."""
    least: dict[str, float] = {}
    for line in text.splitlines():
        found = _CAPTURE_END.search(line) or _AVAILABLE.search(line)
        if found:
            prefix = _PREFIX.match(line)
            try:
                least[prefix.group(2) if prefix else ""] = float(found.group(1))
            except ValueError:
                continue
    return int(min(least.values()) * _MIB_PER_GB) if least else None


def total_tokens(text: str) -> t.Optional[int]:
    """Size of the KV cache in tokens, as the scheduler reports it."""
    found = _TOKENS.findall(text)
    return int(found[-1]) if found else None


# --- why a start failed -----------------------------------------------------------------------------------------------

_CAUSES: tuple[tuple[t.Pattern[str], _Say], ...] = (
    (
        re.compile(r"(?:launch_server(?:\.py)?|sglang(?: serve)?|__main__\.py): error: (.+)"),
        lambda m: f"SGLang refuses its arguments: {m.group(1)}",
    ),
    (re.compile(r"(Unsupported config option .+)"), lambda m: f"SGLang refuses its configuration file: {m.group(1)}"),
    (
        re.compile(r"(Not enough host memory available\. Requesting .+?)(?: Please .*)?$", re.M),
        lambda m: f"HiCache does not fit into the host's memory: {m.group(1)} Lower hicache-size",
    ),
    (
        re.compile(r"(Cannot automatically size HiCache host memory.*)"),
        lambda m: f"{m.group(1)}; give hicache-size",
    ),
    (
        re.compile(r"(The host memory should be larger than the device memory with the current protocol)"),
        lambda m: f"HiCache is smaller than the KV cache on the GPU: {m.group(1)}; raise hicache-size",
    ),
    (
        re.compile(r"(Not enough memory\. Please try to increase --mem-fraction-static\.?)"),
        lambda m: f"no GPU memory is left for the KV cache: {m.group(1)}",
    ),
    (
        re.compile(r"(The memory capacity is unbalanced\.[^\n]*)"),
        lambda m: f"{m.group(1)} (something else holds memory on one of the GPUs)",
    ),
    (
        re.compile(
            r"(?:torch\.OutOfMemoryError|torch\.cuda\.OutOfMemoryError|OutOfMemoryError): (CUDA out of memory\.[^\n]*)"
        ),
        lambda m: f"out of GPU memory: {m.group(1)}",
    ),
    (re.compile(r"(CUDA (?:error: )?out of memory[^\n]*)"), lambda m: f"out of GPU memory: {m.group(1)}"),
    (
        re.compile(r"exit ?code:? ?-7\b|\bSIGBUS\b|Bus error"),
        lambda m: "a process died of SIGBUS (exit code -7): /dev/shm is most likely full; look at memory_info",
    ),
    (
        re.compile(r"No space left on device[^\n]*"),
        lambda m: "no space left on a device (/dev/shm or /tmp is full)",
    ),
    (
        re.compile(
            r"(?:\[Errno \d+\]|error while attempting to bind)[^\n]*[Aa]ddress already in use[^\n]*|EADDRINUSE[^\n]*"
        ),
        lambda m: f"a port is in use already: {m.group(0)}",
    ),
    (
        re.compile(r"([^\n]*\bis used by a process already[^\n]*)"),
        lambda m: f"a port is in use already: {_bare(m.group(1))}",
    ),
    (re.compile(r"(No accelerator [^\n]*is available[^\n]*)"), lambda m: m.group(1)),
    (
        re.compile(r"((?:torch\.distributed\.\w+|nccl\w+Error)[^\n]*NCCL[^\n]*|NCCL error[^\n]*)"),
        lambda m: f"NCCL failed: {m.group(1)}",
    ),
    (
        re.compile(
            r"^(?:[\w.]+\.)?(?:HFValidationError|RepositoryNotFoundError|LocalEntryNotFoundError|OfflineModeIsEnabled)"
            r": ([^\n]+)",
            re.M,
        ),
        lambda m: f"the model can't be found: {m.group(1)}",
    ),
    (
        re.compile(r"^OSError: ([^\n]*does not appear to have a file named[^\n]*)", re.M),
        lambda m: f"the model is not whole: {m.group(1)}",
    ),
    (re.compile(r"^FileNotFoundError: ([^\n]+)", re.M), lambda m: f"a file is missing: {m.group(1)}"),
    (
        re.compile(r"^(?:ModuleNotFoundError|ImportError): ([^\n]+)", re.M),
        lambda m: f"the installation is not whole: {m.group(1)}",
    ),
    (re.compile(r"^[^\n]*: (No module named [^\n]+)", re.M), lambda m: f"the installation is not whole: {m.group(1)}"),
)
_EXCEPTION = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit))(?:: ([^\n]*))?$", re.M)
_DIED = re.compile(r"([^\n]*(?:died|exited|terminated)[^\n]*exit ?code:? ?(-?\d+)[^\n]*)")
_LONGEST = 400


def last_error(text: str) -> t.Optional[str]:
    """Why the server failed, in one sentence, from its log; None if the log holds no error that is known.

    A cause that is known by its words goes before the exceptions that follow from it.
    """
    text = "\n".join(_plain(line) for line in text.splitlines())
    for pattern, say in _CAUSES:
        matches = list(pattern.finditer(text))
        if matches:
            return _sentence(say(matches[-1]))
    exceptions = [
        match for match in _EXCEPTION.finditer(text) if match.group(1) not in ("SystemExit", "KeyboardInterrupt")
    ]
    if exceptions:
        name, words = exceptions[-1].group(1), (exceptions[-1].group(2) or "").strip()
        if name == "AssertionError":
            return _sentence(f"an assertion failed: {words or _statement_before(text, exceptions[-1].start())}")
        return _sentence(
            f"{name}: {words}" if words else f"{name} in {_statement_before(text, exceptions[-1].start())}"
        )
    died = _DIED.findall(text)
    if died:
        words, code = died[-1]
        hint = " (killed: the kernel's OOM killer, or someone)" if code in ("-9", "137") else ""
        return _sentence(_bare(words) + hint)
    return None


def _bare(line: str) -> str:
    """A line without its time stamp."""
    return _PREFIX.sub("", line).strip()


def _statement_before(text: str, position: int) -> str:
    """The source line that a traceback shows last."""
    lines = [
        line.strip() for line in text[:position].splitlines() if line.strip() and not set(line.strip()) <= set("^~")
    ]
    return lines[-1] if lines else "an unknown place"


def _sentence(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _LONGEST else words[: _LONGEST - 3] + "..."
