# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a start failed, in one sentence, from SGLang's own log. Pure.

A cause that is known by its words goes before the exceptions that follow from it: where one rank dies, the others and
the leader report lost connections, and a log of eight ranks ends with those.
"""

from __future__ import annotations

import re
import signal
import typing as t
from dataclasses import dataclass

from .phases import plain, short_lines, without_time

_LONGEST = 400
_Say = t.Callable[[t.Match[str]], str]

# Errors that SGLang itself passes over, which each start of a healthy server has; and its echo of all arguments.
_HARMLESS = re.compile(
    r"server_args=|Ignore import error when loading|Failed to load generation config|[A-Z]\w*Warning: "
)


@dataclass(frozen=True)
class Kills:
    """How often the kernel's OOM killer struck since the watch began: in the server's control group, and on the whole
    host. None: not known."""

    cgroup: t.Optional[int] = None
    host: t.Optional[int] = None

    def words(self) -> str:
        """Whether a SIGKILL was the OOM killer's."""
        if self.cgroup:
            return f"by the kernel's OOM killer, which struck {self.cgroup} times in its control group: memory is short"
        if self.host:
            return f"most likely by the kernel's OOM killer, which struck {self.host} times on this host meanwhile"
        if self.host == 0:
            return "not by the kernel's OOM killer, so somebody sent it"
        return "whether by the kernel's OOM killer or by somebody is not known"


def _out_of_gpu_memory(match: t.Match[str]) -> str:
    """torch's own words, shortened: what was tried, what was free, who has the rest."""
    text = match.group(0)
    tried = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
    if tried is None:
        return f"out of GPU memory: {match.group(1)}"
    words = f"out of GPU memory: Tried to allocate {tried.group(1)}"
    room = re.search(r"(GPU \d+) has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", text)
    if room is not None:
        words += f" where {room.group(3)} of {room.group(2)} were free on {room.group(1)}"
    own = re.search(r"this process has ([\d.]+ \w+) memory in use", text)
    words += f"; this process has {own.group(1)}" if own else ""
    others = re.findall(r"Process (\d+) has ([\d.]+ \w+) memory in use", text)
    words += "".join(f", process {pid} has {size}" for pid, size in others[:3])
    if "Capture cuda graph failed" in text:
        words += "; in the capture of CUDA graphs: lower mem_fraction_static, or capture fewer batch sizes"
    return words


def _no_model(match: t.Match[str]) -> str:
    return f"the model can't be found: {match.group(1)}"


# Patterns that begin with anything are bound to a line's begin: else each place of a line is tried as one.
_CAUSES: tuple[tuple[t.Pattern[str], _Say], ...] = (
    (
        re.compile(r"(?:launch_server(?:\.py)?|sglang(?: serve)?|__main__\.py): error: (.+)"),
        lambda m: f"SGLang refuses its arguments: {m.group(1)}",
    ),
    (re.compile(r"(Unsupported config option .+)"), lambda m: f"SGLang refuses its configuration file: {m.group(1)}"),
    (
        re.compile(r"SGLANG_CPU_OMP_THREADS_BIND is not set.*?tp_size (\d+) should be .*? on the machine (\d+)"),
        lambda m: (
            f"no thread binding: tp_size is {m.group(1)}, and this machine has {m.group(2)} NUMA node(s) for its ranks;"
            " set SGLANG_CPU_OMP_THREADS_BIND in the environment (cores of each rank, such as 0-15|16-31)"
        ),
    ),
    (
        re.compile(r"(SGLANG_CPU_OMP_THREADS_BIND setting must be aligned with TP size parameter \(\d+\))"),
        lambda m: f"wrong thread binding: {m.group(1)}",
    ),
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
    (re.compile(r"^[^\n]*?(CUDA (?:error: )?out of memory[^\n]*)", re.M), _out_of_gpu_memory),
    (
        re.compile(r"DefaultCPUAllocator: (?:can't|not enough) [^\n]*?tried to allocate (\d{1,18}) bytes"),
        lambda m: f"out of host memory: tried to allocate {int(m.group(1)) / 2**30:.2f} GiB",
    ),
    (
        re.compile(r"^(?:[\w.]+\.)?(?:MemoryError|OSError: \[Errno 12\][^\n]*|[^\n]*: Cannot allocate memory)$", re.M),
        lambda m: f"out of host memory: {m.group(0)}",
    ),
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
        re.compile(r"^([^\n]*\bis used by a process already[^\n]*)", re.M),
        lambda m: f"a port is in use already: {without_time(m.group(1))}",
    ),
    (re.compile(r"(No accelerator [^\n]*is available[^\n]*)"), lambda m: m.group(1)),
    (
        re.compile(r"Watchdog caught collective operation timeout: ([^\n]*)"),
        lambda m: f"NCCL timed out, so one rank does not take part: {m.group(1)}",
    ),
    (
        re.compile(
            r"((?:torch\.distributed\.\w+|nccl\w+Error)[^\n]*NCCL[^\n]*|NCCL error[^\n]*)(?:\n(nccl\w+: [^\n]+))?"
        ),
        lambda m: f"NCCL failed: {m.group(1)}" + (f" ({m.group(2)})" if m.group(2) else ""),
    ),
    (re.compile(r"(?:RuntimeError|AcceleratorError): (CUDA (?:driver )?error: [^\n]+)"), lambda m: m.group(1)),
    (
        re.compile(r"((?:no CUDA-capable device|CUDA driver version is insufficient|Unsupported architecture)[^\n]*)"),
        lambda m: f"the GPU can't be used: {m.group(1)}",
    ),
    (
        re.compile(r"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '(/[^']*)'"),
        lambda m: f"the model's folder is missing: {m.group(1)}",
    ),
    (
        re.compile(r"(We couldn't connect to '[^']*' to load the files[^\n]*)"),
        lambda m: f"the model is not on this host and can't be fetched: {m.group(1)}",
    ),
    (
        re.compile(
            r"^(?:[\w.]+\.)?(?:HFValidationError|RepositoryNotFoundError|LocalEntryNotFoundError|OfflineModeIsEnabled"
            r"|GatedRepoError): ([^\n]+)",
            re.M,
        ),
        _no_model,
    ),
    (re.compile(r"(?:^|:)([^\n:]* is not a local folder and is not a valid model identifier[^\n]*)", re.M), _no_model),
    (re.compile(r"(You are trying to access a gated repo[^\n]*)"), _no_model),
    (
        re.compile(r"^OSError: ([^\n]*does not appear to have a file named[^\n]*)", re.M),
        lambda m: f"the model is not whole: {m.group(1)}",
    ),
    (
        re.compile(r"((?:Cannot find any model weights with|Error while deserializing header)[^\n]*)"),
        lambda m: f"the model is not whole: {m.group(1)}",
    ),
    (
        re.compile(r"^([^\n]*(?:Can't load tokenizer for|Couldn't instantiate the backend tokenizer)[^\n]*)", re.M),
        lambda m: f"the tokenizer can't be loaded: {without_time(m.group(1))}",
    ),
    (
        re.compile(r"^[^\n]*`trust_remote_code=True`[^\n]*", re.M),
        lambda m: f"the model brings code of its own; set trust_remote_code if you trust it: {without_time(m.group())}",
    ),
    (
        re.compile(r"^ValueError: (Unrecognized model in [^\n]*)", re.M),
        lambda m: f"the model is not whole: {m.group(1)}",
    ),
    (re.compile(r"(Model architectures [^\n]*not supported[^\n]*)"), lambda m: m.group(1)),
    (re.compile(r"^FileNotFoundError: ([^\n]+)", re.M), lambda m: f"a file is missing: {m.group(1)}"),
    (
        re.compile(r"^(?:ModuleNotFoundError|ImportError): ([^\n]+)", re.M),
        lambda m: f"the installation is not whole: {m.group(1)}",
    ),
    (
        re.compile(r"^\S*python[\w.]*: (?:Error while finding module [^\n]*?)?(No module named [^\n)]+)", re.M),
        lambda m: f"the installation is not whole: {m.group(1)}",
    ),
)
_DIED = re.compile(
    r"^([^\n]*?(?:(?:died|crashed|exited|terminated)\b[^\n]*?(?:exit ?code:?|exitcode=) ?|\bterminated with )"
    r"(-?\d{1,9})\)?)",
    re.M,
)
_EXCEPTION = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit))(?:: ([^\n]*))?$", re.M)
_NO_CAUSE = ("SystemExit", "KeyboardInterrupt")
# What the others say after one has died.
_FOLLOWS = re.compile(
    r"^(?:\w+\.)*(?:EOFError|BrokenPipeError|ConnectionResetError|ConnectionAbortedError|ConnectionRefusedError)\b"
    r"|Connection (?:closed by peer|reset by peer)|scheduler died|Broken pipe"
)


_BIND = re.compile(r"error while attempting to bind on address[^\n]*")
# After these the server ends itself; how soon depends on what it still waits for.
_FATAL = re.compile(r"Scheduler hit an exception|Received sigquit from a child process|Initialization failed\.")


def last_error(text: str, kills: t.Optional[Kills] = None, model: t.Optional[str] = None) -> t.Optional[str]:
    """Why the server failed, in one sentence, from its log; None if the log holds no error that is known.

    ``model``: the model as it was wanted; SGLang's words on one that is missing leave its name out.
    """
    found = _last_error(text, kills or Kills())
    if found is None or model is None or model in found or not found.startswith("the model "):
        return found
    return _sentence(found.replace("the model ", f"the model {model} ", 1))


def bind_error(text: str) -> t.Optional[str]:
    """The port could not be had. The server does not end by that: its other processes wait for each other."""
    found = [match.group() for line in short_lines(text) for match in [_BIND.search(line)] if match]
    return f"the port is in use already: {found[-1].strip()}" if found else None


def is_fatal(text: str) -> bool:
    """Whether the log says that the server is about to end itself."""
    return _FATAL.search(text) is not None


def silent_end(text: str, kills: Kills) -> str:
    """What is to be said of a server that ended and whose log names no error."""
    if "SIGTERM received" in text:
        return "its log names no error; it was told to end (SIGTERM)"
    return f"its log names no error, as after a SIGKILL ({kills.words()})"


def _last_error(text: str, kills: Kills) -> t.Optional[str]:
    text = "\n".join(line for line in map(plain, short_lines(text)) if not _HARMLESS.search(line))
    for pattern, say in _CAUSES:
        matches = list(pattern.finditer(text))
        if matches:
            return _sentence(say(matches[-1]))
    exceptions = [match for match in _EXCEPTION.finditer(text) if match.group(1) not in _NO_CAUSE]
    died = next(_DIED.finditer(text), None)
    # What is raised after a process was ended by a signal follows from that; one that ended by itself says why before.
    ended = len(text) if died is None or not died.group(2).startswith("-") else died.start()
    own = [match for match in exceptions if match.start() < ended and not _FOLLOWS.search(match.group(0))]
    if own:
        return _sentence(_exception(own[-1], text))
    if died is not None:
        return _sentence(_death(died.group(1), died.group(2), kills))
    return _sentence(_exception(exceptions[-1], text)) if exceptions else None


def _exception(match: t.Match[str], text: str) -> str:
    name, words = match.group(1), (match.group(2) or "").strip()
    if name == "AssertionError":
        return f"an assertion failed: {words or _statement_before(text, match.start())}"
    return f"{name}: {words}" if words else f"{name} in {_statement_before(text, match.start())}"


def _death(words: str, code: str, kills: Kills) -> str:
    """The first process that died: with its signal, where one ended it."""
    who = re.sub(r"^(?:\w+\.)*\w+(?:Error|Exception): ", "", without_time(words))
    number = -int(code) if code.startswith("-") else int(code) - 128
    if number == signal.SIGKILL:
        return f"{who}: killed by SIGKILL, {kills.words()}"
    try:
        return f"{who}: ended by {signal.Signals(number).name}"
    except ValueError:
        return who


def _statement_before(text: str, position: int) -> str:
    """The source line that a traceback shows last."""
    lines = [
        line.strip() for line in text[:position].splitlines() if line.strip() and not set(line.strip()) <= set("^~")
    ]
    return lines[-1] if lines else "an unknown place"


def _sentence(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _LONGEST else words[: _LONGEST - 3] + "..."
