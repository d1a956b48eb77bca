# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""SGLang's servers among the processes: leaders with their trees, orphans, and whether one is as wanted. Pure."""

from __future__ import annotations

import re
import typing as t
from dataclasses import dataclass

from ..model import Process
from . import flags as flag_tools
from .cmdline import LaunchedFlags, is_leader, worker_role
from .flags import Difference
from .option_table import OptionTable
from .redact import is_secret_variable

_FAMILIES = (
    *("CUDA", "CUBLAS", "CUDNN", "NVIDIA", "NVTE", "NVSHMEM", "NCCL", "GLOO", "UCX", "MC", "MOONCAKE", "NIXL", "FI"),
    *("HIP", "HSA", "ROCR", "RCCL", "SGLANG", "SGL", "VLLM", "DG", "DEEPEP", "FLASHINFER", "TRITON", "TVM"),
    *("TORCH", "PYTORCH", "TORCHINDUCTOR", "TORCHDYNAMO", "HF", "HUGGINGFACE", "TRANSFORMERS", "TOKENIZERS"),
    *("SAFETENSORS", "OMP", "KMP", "MKL", "OPENBLAS", "MALLOC", "XGRAMMAR", "OUTLINES"),
)
_SINGLE = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
)
_RELEVANT = re.compile(rf"(?:{'|'.join(_FAMILIES)})_\w+|{'|'.join(_SINGLE)}")
# Made by the launch itself, from the GPUs; these are compared as GPUs.
_BY_GPUS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
BY_LAUNCH = frozenset({"PATH", "HOME", "USER", "LOGNAME", "LANG", *_BY_GPUS})
"""What a launch sets itself, whatever the inventory has."""
_BY_OPTIONS = ("host", "port")


@dataclass(frozen=True)
class Member:
    """A process of a server's tree. ``role``: leader, scheduler, detokenizer, ..., starting (spawned, not yet named)
    or other."""

    process: Process
    role: str
    ranks: t.Mapping[str, int]


def leaders(processes: t.Mapping[int, Process]) -> list[Process]:
    """All launchers, the oldest first. One whose parent is a launcher too is a part of that server (it forked)."""
    found = [process for process in processes.values() if is_leader(process.argv) and not process.dead]
    pids = {process.pid for process in found}
    return sorted((process for process in found if process.ppid not in pids), key=lambda process: process.start_ticks)


def tree_of(leader: Process, processes: t.Mapping[int, Process]) -> list[Member]:
    """The leader and all its descendants, by parents."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process)
    members: list[Member] = []
    waiting = [leader]
    seen = {leader.pid}
    while waiting:
        process = waiting.pop(0)
        members.append(_member(process, leader))
        for child in sorted(children.get(process.pid, []), key=lambda one: one.pid):
            if child.pid not in seen:
                seen.add(child.pid)
                waiting.append(child)
    return members


def _member(process: Process, leader: Process) -> Member:
    if process.pid == leader.pid:
        return Member(process, "leader", {})
    role = worker_role(process.title)
    if role is not None:
        return Member(process, role.kind, role.ranks)
    if "multiprocessing.resource_tracker" in process.title:
        return Member(process, "resource_tracker", {})
    return Member(process, "starting" if "--multiprocessing-fork" in process.argv else "other", {})


def orphans(processes: t.Mapping[int, Process], trees: t.Iterable[t.Iterable[Member]]) -> list[Process]:
    """Workers by their title that belong to no living leader's tree: they hold GPUs and nobody serves with them."""
    known = {member.process.pid for tree in trees for member in tree}
    return [
        process
        for process in processes.values()
        if process.pid not in known and not process.dead and worker_role(process.title) is not None
    ]


def relevant_environment(environment: t.Mapping[str, str]) -> dict[str, str]:
    """The variables that decide how SGLang runs."""
    return {name: value for name, value in sorted(environment.items()) if _is_relevant(name)}


def _is_relevant(name: str) -> bool:
    # Proxies are obeyed in small letters as well.
    return _RELEVANT.fullmatch(name.upper() if name.endswith("_proxy") else name) is not None


@dataclass(frozen=True)
class Wanted:
    """How a server should have been launched. None: not judged. ``gpus``: UUIDs (or indices) in order, empty for
    all."""

    flags: t.Optional[t.Mapping[str, t.Any]] = None
    environment: t.Optional[t.Mapping[str, str]] = None
    gpus: t.Optional[tuple[str, ...]] = None


@dataclass(frozen=True)
class Comparison:
    """``matches`` None: something that is needed to judge isn't known."""

    matches: t.Optional[bool]
    differences: tuple[Difference, ...]


def compare(
    wanted: Wanted,
    launched: t.Optional[LaunchedFlags],
    environment: t.Optional[t.Mapping[str, str]],
    gpus: t.Optional[tuple[str, ...]],
    gpus_known: bool,
    options: t.Optional[OptionTable] = None,
    chosen: t.Collection[str] = (),
) -> Comparison:
    """What differs from what is wanted. ``gpus``: None stands for all of the host's. ``chosen``: variables that are
    known to have been chosen for this server; they count as those do that decide how SGLang runs."""
    differences: list[Difference] = []
    unknown = False
    if wanted.flags is not None:
        if launched is None or not launched.complete:
            unknown = True
        if launched is not None:
            differences += _flag_differences(wanted.flags, launched.flags, options)
    if wanted.environment is not None:
        if environment is None:
            unknown = True
        else:
            differences += _environment_differences(wanted.environment, environment, chosen)
    if wanted.gpus is not None:
        if not gpus_known:
            unknown = True
        elif (wanted.gpus or None) != gpus:
            differences.append(Difference("gpus", list(wanted.gpus) or "all", "all" if gpus is None else list(gpus)))
    if differences:
        return Comparison(False, tuple(differences))
    return Comparison(None if unknown else True, ())


def _flag_differences(
    wanted: t.Mapping[str, t.Any], found: t.Mapping[str, t.Any], options: t.Optional[OptionTable]
) -> list[Difference]:
    """Host and port are options of the server, not flags of the inventory: compared only where they are wanted as
    flags."""
    names = {flag_tools.canonical(str(name), options) for name in wanted}
    seen = {name: value for name, value in found.items() if name in names or name not in _BY_OPTIONS}
    rows = flag_tools.differences(flag_tools.check(wanted), seen, options)
    return [Difference(f"flags.{row.item}", row.wanted, row.found) for row in rows]


def _environment_differences(
    wanted: t.Mapping[str, str], found: t.Mapping[str, str], chosen: t.Collection[str]
) -> list[Difference]:
    """What is wanted must be there; beyond it, what decides how SGLang runs or was chosen must not (secrets come by
    another way)."""
    rows = []
    extra = {
        name
        for name in found
        if (_is_relevant(name) or name in chosen) and name not in _BY_GPUS and not is_secret_variable(name)
    }
    for name in sorted({*wanted, *extra}):
        left, right = wanted.get(name), found.get(name)
        if left != right:
            rows.append(Difference(f"environment.{name}", left, right))
    return rows
