# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The eyes of `sglang/ready.py` on this host: everything that a watch and a proof of one launch look at.

Identities come from /proc/PID/stat and never wait for a process; whatever can wait is read in a bounded child.
"""

from __future__ import annotations

import os
import time
import typing as t

from .decide.gpu_use import GpuUse
from .decide.workers import Worker
from .errors import CleanSlateError
from .model import Gpu, Process
from .observe import activity as tree
from .observe.bounded import fetch_install, fetch_process, fetch_processes
from .observe.devices import NVIDIA_MAJOR
from .observe.launchlog import read_launch_log
from .observe.memory import available_mib, read_cgroup_limit, read_meminfo
from .observe.nvml import read_gpus
from .observe.ports import read_ports
from .observe.procfs import ancestors, list_pids, read_boot_id, read_identity
from .observe.serving import Served, look_at_flags, look_at_gpus, look_at_workers
from .observe.stacks import find_py_spy, gather
from .sglang import http
from .sglang.causes import Kills
from .sglang.configfile import read_config
from .sglang.evidence import Closeup, GpuEvidence, MemoryEvidence
from .sglang.flags import canonical
from .sglang.logs import read_ends
from .sglang.proof import Client
from .sglang.ready import Leader, PortOwner
from .sglang.record import Record, recorded_process
from .sglang.redact import is_secret_flag
from .sglang.running import RunningFlags
from .sglang.watch import Activity
from .spawn import fetch_bounded

TITLE_DEADLINE_S = 5.0
LEADER_DEADLINE_S = 3.0
SHM = "/dev/shm"
MEMORY_DEADLINE_S = 5.0
MOST_DIGITS = 4  # of a size that something is done for each of


def flags_of(record: Record) -> dict[str, t.Any]:
    """The record's flags by their canonical names."""
    return {canonical(name): value for name, value in record.flags.items()}


def ranks_of(record: Record) -> int:
    """The data parallel size by the flags."""
    value = flags_of(record).get("dp-size", 1)
    text = str(value)
    return max(1, int(text)) if text.isdecimal() and len(text) <= MOST_DIGITS else 1


def model_of(record: Record) -> t.Optional[str]:
    """The model's path, for people."""
    value = flags_of(record).get("model-path")
    return None if value is None else str(value)


def launch_secrets(record: Record) -> dict[str, str]:
    """The secrets of a launch by its own configuration file, for asking and for masking. Empty where it can't be read.
    """
    if record.config is None:
        return {}
    path = record.config
    called = fetch_bounded(lambda: read_ends(path), MEMORY_DEADLINE_S)
    flags = read_config(called.value or "") if called.ok else None
    return {
        canonical(name): str(value)
        for name, value in (flags or {}).items()
        if is_secret_flag(name) and value is not None
    }


class HostEyes:
    """Looks at this host, for one launch."""

    def __init__(
        self,
        record: Record,
        client: Client,
        title: t.Callable[[t.Sequence[str]], str],
        nvml_deadline_s: float = 10.0,
        device_major: int = NVIDIA_MAJOR,
    ) -> None:
        """``title``: how a command line is shown, without secrets."""
        self.record = record
        self.client = client
        self.nvml_deadline_s = nvml_deadline_s
        self.device_major = device_major
        self._title = title

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    # --- who it is ---

    def leader(self) -> t.Optional[Leader]:
        """Identities never wait for a process; only a leader under another pid is looked for by the command lines."""
        process = self._process()
        return None if process is None else Leader(process.pid, process.start_ticks)

    def _process(self) -> t.Optional[Process]:
        boot_id = read_boot_id()
        process = recorded_process(self.record, _identities(), boot_id)
        if process is not None:
            return process
        known = self.record.pid is not None and self.record.boot_id == boot_id
        try:
            # Its own pid is known to be gone: whether a supervisor started it anew is worth a moment.
            found = fetch_processes(deadline_s=LEADER_DEADLINE_S) if known else fetch_processes()
        except CleanSlateError:
            if known:
                return None
            raise
        return recorded_process(self.record, found, boot_id)

    def port_owners(self) -> t.Optional[t.Sequence[PortOwner]]:
        uses = read_ports(ports=[self.client.endpoint.port])
        if uses is None:
            return None
        listening = [use for use in uses if use.state == "LISTEN"]
        leader = self.leader() if listening else None
        processes = _identities()
        owners: list[PortOwner] = []
        for use in listening:
            owners += [self._owner(pid, use.address, leader, processes) for pid in use.pids or (None,)]
        return owners

    def _owner(
        self, pid: t.Optional[int], address: str, leader: t.Optional[Leader], processes: t.Mapping[int, Process]
    ) -> PortOwner:
        process = None if pid is None else _title_of(pid)
        title = None if process is None else self._title(process.argv)
        ours = leader is not None and pid is not None and leader.pid in (pid, *ancestors(pid, processes))
        return PortOwner(pid, title, ours, address)

    # --- how far it is ---

    def log(self) -> t.Optional[str]:
        return read_launch_log(self.record)

    def activity(self, leader: int) -> Activity:
        return tree.fetch_activity(leader)

    def gpus_in_use(self) -> t.Optional[t.Mapping[str, int]]:
        gpus = self._gpus()[0]
        if not gpus:
            return None
        found = {gpu.uuid or str(gpu.index): gpu.memory.used_mib for gpu in gpus if gpu.memory is not None}
        return {name: used for name, used in found.items() if used is not None}

    def _gpus(self) -> tuple[t.Optional[tuple[Gpu, ...]], t.Optional[str]]:
        """The server's GPUs, or None and why not."""
        if self.record.device == "cpu":
            return None, "the server uses no GPU"
        reading = read_gpus(self.nvml_deadline_s)
        if reading.gpus is None:
            problem = reading.problems[0].message if reading.problems else "the driver does not answer"
            return None, problem
        wanted = self.record.gpus
        return tuple(
            gpu for gpu in reading.gpus if wanted is None or gpu.uuid in wanted or str(gpu.index) in wanted
        ), None

    def oom_places(self, leader: int) -> tuple[str, ...]:
        return tree.memory_cgroups(leader)

    def oom_counts(self, places: t.Sequence[str]) -> t.Mapping[str, t.Optional[int]]:
        return {"cgroup": tree.oom_kills(places), "host": tree.host_oom_kills()}

    def closeup(self, leader: t.Optional[int], kills: Kills) -> Closeup:
        members = () if leader is None else tree.read_tree(leader)
        gpus, problem = self._gpus()
        return Closeup(
            processes=gather(members, find_py_spy()) if members else (),
            gpus=None if gpus is None else tuple(_gpu_evidence(gpu) for gpu in gpus),
            gpus_problem=problem,
            memory=_memory(kills),
        )

    # --- what it answers ---

    def health(self, deadline_s: float) -> http.Response:
        return http.health(self.client.endpoint, deadline_s)

    def generate(self, rank: int, deadline_s: float) -> http.Response:
        return self.client.generate(rank, deadline_s)

    def chat(self, deadline_s: float) -> http.Response:
        return self.client.chat(deadline_s)

    def tool_chat(self, deadline_s: float) -> http.Response:
        return self.client.tool_chat(deadline_s)

    def soak_request(self, index: int, tokens: int, deadline_s: float) -> http.Response:
        return self.client.soak_request(index, tokens, deadline_s)

    def server_info(self, deadline_s: float) -> http.Response:
        return self.client.server_info(deadline_s)

    def schedulers(self) -> t.Optional[t.Sequence[Worker]]:
        leader = self.leader()
        return None if leader is None else look_at_workers(leader.pid, leader.start_ticks)

    def gpu_users(self) -> t.Optional[t.Sequence[GpuUse]]:
        leader = self.leader()
        if leader is None:
            return None
        record = self.record
        served = Served(leader.pid, leader.start_ticks, record.flags, record.gpus, record.environment)
        return look_at_gpus(served, self.nvml_deadline_s, self.device_major)

    def running_flags(self) -> t.Optional[RunningFlags]:
        leader = self.leader()
        return None if leader is None else look_at_flags(leader.pid, leader.start_ticks)

    def free_gpu_mib(self) -> t.Optional[int]:
        gpus = self._gpus()[0]
        wanted = self.record.gpus
        if not gpus or (wanted is not None and len(gpus) != len(wanted)):
            return None
        free = [None if gpu.memory is None else gpu.memory.free_mib for gpu in gpus]
        known = [size for size in free if size is not None]
        return min(known) if len(known) == len(free) else None


def installed_version(record: Record) -> t.Optional[str]:
    """The version of the SGLang that was started; None where it can't be told.

    Raises:
        CleanSlateError: its folder does not answer in time.
    """
    install = fetch_install(record.python, record.environment.get("PYTHONPATH", ""))[0] if record.python else None
    return install.version if install is not None else None


def _identities() -> dict[int, Process]:
    found = (read_identity(pid) for pid in list_pids())
    return {process.pid: process for process in found if process is not None}


def _title_of(pid: int) -> t.Optional[Process]:
    """The process with its command line; None where that is locked: it is for people only."""
    try:
        return fetch_process(pid, deadline_s=TITLE_DEADLINE_S)
    except CleanSlateError:
        return None


def _gpu_evidence(gpu: Gpu) -> GpuEvidence:
    memory = gpu.memory
    if memory is None:
        return GpuEvidence(gpu.index, gpu.uuid, None, None, None)
    return GpuEvidence(gpu.index, gpu.uuid, memory.used_mib, memory.free_mib, memory.total_mib)


def _memory(kills: Kills) -> MemoryEvidence:
    def read() -> tuple[t.Optional[int], t.Optional[int]]:
        try:
            room = os.statvfs(SHM)
            free: t.Optional[int] = room.f_bavail * room.f_frsize // 2**20
        except OSError:
            free = None
        return available_mib(read_meminfo(), read_cgroup_limit()), free

    called = fetch_bounded(read, MEMORY_DEADLINE_S)
    available, free = called.value if called.ok else (None, None)
    return MemoryEvidence(available, free, kills.cgroup, kills.host)
