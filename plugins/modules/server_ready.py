#!/usr/bin/python
# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: server_ready
version_added: 0.1.0
short_description: Wait until the server that was started is proved to serve
description:
  - Waits, with a deadline, until the process that M(cleanslate.sglang.server_launch) started serves. It lives, it owns
    the port, C(/health) answers 200, every data parallel rank generates tokens, reasoning is kept apart where it was
    asked for, and the demanded GPU memory is left.
  - Fails at once when it surely won't serve, since the process is gone, another process has the port, or a rank does
    not generate although C(/health) says 200. The error is then the server's own, from its log.
  - Every result comes along on failure, too.
author:
  - Clean Slate contributors (@cleanslate)
extends_documentation_fragment:
  - cleanslate.sglang.attributes
  - cleanslate.sglang.attributes.info_module
  - cleanslate.sglang.attributes.actiongroup_sglang
options:
  name:
    description:
      - The name of the server, as in the inventory.
    type: str
    required: true
  state_dir:
    description:
      - Where launches are recorded on the host.
    type: path
    default: /var/lib/cleanslate
  host:
    description:
      - The address to ask. If not specified, that of the record.
    type: str
  port:
    description:
      - The port to ask. If not specified, that of the record.
    type: int
  deadline_s:
    description:
      - How long, in seconds, to wait at most.
    type: float
    default: 600
  token_deadline_s:
    description:
      - How long, in seconds, one rank may take for its tokens, and the chat answer for its own.
    type: float
    default: 60
  api_key:
    description:
      - The server's key, if it has one.
    type: str
  dp_size:
    description:
      - The number of data parallel ranks. If not specified, that of the record.
    type: int
  reasoning_parser:
    description:
      - Whether reasoning must be kept apart, by the name of a parser or V(true). V(false) demands nothing.
      - If not specified, it is demanded where the server was launched with a reasoning parser.
    type: str
  min_gpu_headroom_mib:
    description:
      - How much memory in MiB must be left on each of the server's GPUs. V(0) demands nothing.
      - Not judged for a server that uses no GPU.
    type: int
    default: 2048
  model:
    description:
      - The model's name for the chat request. If not specified, the name that the server was launched with.
    type: str
  log_lines:
    description:
      - How many lines of the log RV(log_tail) has.
    type: int
    default: 40
  nvml_deadline_s:
    description:
      - How long, in seconds, one look at the GPUs may take.
    type: float
    default: 10
  hung_after:
    description:
      - After how many seconds without any progress a start is V(hung), per phase. Keys are V(imports), V(distributed),
        V(weights), V(kv_cache), V(graphs) and V(warm_up); a phase that is not named keeps its default, which are 180,
        180, 300, 180, 600 and 300.
      - Progress is a new phase or percentage, a log line of a kind that was not there yet, 16 MiB read (while it
        imports or loads weights), 64 MiB more memory, another 64 MiB on a GPU, or other processes below the server.
        Processor time is none.
    type: dict
    default: {}
  stopped_after_s:
    description:
      - For how long, in seconds, a process of the server may be stopped (state T) before the server is V(hung).
    type: float
    default: 10
  slice_s:
    description:
      - How long, in seconds, this one call may take. It then returns V(starting) with RV(finished=false), and RV(watch)
        for the next call. The proof itself is not cut.
      - If not specified, the call waits to the end. A task needs it not, since the action plugin of this name makes
        the slices and shows a line for people meanwhile, each C(sglang_progress_s) seconds (a variable, 5 by default).
    type: float
  watch:
    description:
      - What the call before returned as RV(watch).
    type: dict
  tool_call_parser:
    description:
      - Whether tool calls must be told apart, by the name of a parser or V(true). V(false) demands nothing.
      - If not specified, it is demanded where the server was launched with a tool call parser.
    type: str
  expected_schedulers:
    description:
      - How many schedulers must live on this host. If not specified, as many as the flags make.
    type: int
  soak_requests:
    description:
      - How many requests the soak at the end of the proof has. V(0) leaves it out.
    type: int
    default: 8
  soak_concurrency:
    description:
      - How many of them are under way at once.
    type: int
    default: 4
  soak_tokens:
    description:
      - How many tokens each of them generates.
    type: int
    default: 32
  soak_deadline_s:
    description:
      - How long, in seconds, the soak may take.
    type: float
    default: 120
  record:
    description:
      - Whether the outcome is kept in the launch's folder (C(phases.json), C(proof.json), C(summary.txt)), and the
        launch becomes the last good one where it is ready.
    type: bool
    default: false
  run_id:
    description:
      - The run that holds the server's lease. With it the lease must be held by this run, and is renewed.
    type: str
notes:
  - Run it as root, or as the server's user. Others do not see whose a port is.
seealso:
  - module: cleanslate.sglang.server_launch
  - module: cleanslate.sglang.server_info
"""

EXAMPLES = r"""
- name: Wait for the proof
  cleanslate.sglang.server_ready:
    name: chat
    deadline_s: 900
    api_key: "{{ vault_chat_api_key }}"
    min_gpu_headroom_mib: 2048
"""

RETURN = r"""
ready:
  description: Whether the server is proved to serve.
  returned: always
  type: bool
  sample: true
verdict:
  description: V(ready), V(failed) (it surely won't serve) or V(timeout).
  returned: always
  type: str
  sample: ready
error:
  description: Why it is not ready, in one sentence, with the log's own error. V(null) when ready.
  returned: always
  type: str
  sample: null
phase:
  description: How far the start has come, V(imports), V(distributed), V(weights), V(kv_cache), V(graphs), V(warm_up) or
    V(ready).
  returned: always
  type: str
  sample: ready
phases:
  description: The phases with their seconds by the log's own times. V(null) for the last one.
  returned: always
  type: list
  elements: dict
  sample:
    - name: weights
      seconds: 80
  contains:
    name:
      description: The phase.
      type: str
    seconds:
      description: Its length.
      type: int
launch_id:
  description: The launch that was judged.
  returned: always
  type: str
  sample: 20260131T235959Z-1a2b
pid:
  description: The leader's process id. V(null) if it was gone already.
  returned: always
  type: int
  sample: 4711
start_ticks:
  description: Its start time in clock ticks since boot.
  returned: always
  type: int
  sample: 123456
port:
  description: The port that was asked.
  returned: always
  type: int
  sample: 30000
port_owner:
  description: Who listens on the port. V(null) if nobody does.
  returned: always
  type: dict
  sample:
    pid: 4711
    title: /opt/sglang/bin/python -m sglang.launch_server
    ours: true
    address: 0.0.0.0
  contains:
    pid:
      description: The process id. V(null) if it can't be seen from here.
      type: int
    title:
      description: Its command line, without secrets.
      type: str
    ours:
      description: Whether it belongs to the server that was started.
      type: bool
    address:
      description: The address that it listens on.
      type: str
tokens:
  description: What each data parallel rank generated.
  returned: always
  type: list
  elements: dict
  sample:
    - dp_rank: 0
      count: 4
      seconds: 0.21
      problem: null
  contains:
    dp_rank:
      description: The rank.
      type: int
    count:
      description: The number of tokens. V(null) if none came.
      type: int
    seconds:
      description: How long it took.
      type: float
    problem:
      description: Why this proves nothing. V(null) if it does.
      type: str
reasoning:
  description: Whether reasoning is kept apart. V(null) if that was not demanded.
  returned: always
  type: dict
  sample:
    verdict: separated
    message: reasoning_content holds 120 characters, content 34
    seconds: 1.4
  contains:
    verdict:
      description: V(separated), V(missing) or V(unknown).
      type: str
    message:
      description: What was seen.
      type: str
    seconds:
      description: How long the answer took.
      type: float
headroom_mib:
  description: Memory left on the server's fullest GPU, the lower of the driver's figure and the log's. V(null) if it
    was not judged or is not known.
  returned: always
  type: int
  sample: 6656
max_total_num_tokens:
  description: The size of the KV cache in tokens, as the log says it. V(null) if it doesn't.
  returned: always
  type: int
  sample: 231120
log_tail:
  description: The last lines of the launch's log, redacted. V(null) if it can't be read.
  returned: always
  type: list
  elements: str
  sample:
    - "[2026-01-31 23:59:59] The server is fired up and ready to roll!"
seconds:
  description: How long it was waited.
  returned: always
  type: float
  sample: 42.0
"""

import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.sglang.plugins.module_utils.durations import check_seconds
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process, to_json
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.bounded import (
    fetch_install,
    fetch_process,
    fetch_processes,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.launchlog import read_launch_log
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.nvml import read_gpus
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.ports import read_ports
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import (
    ancestors,
    list_pids,
    read_boot_id,
    read_identity,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import http, proof
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.flags import canonical
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.logs import tail_lines
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.ready import (
    Leader,
    PortOwner,
    Readiness,
    Wants,
    wait_ready,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.record import (
    Record,
    find_recorded,
    recorded_process,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.redact import Redactor

Params = t.Mapping[str, t.Any]
TITLE_DEADLINE_S = 5.0
_NO = ("", "false", "no", "none", "off", "0")


class HostEyes:
    """Looks at this host, for one launch."""

    def __init__(self, record: Record, params: Params, redactor: Redactor) -> None:
        self.record = record
        self.redactor = redactor
        self.port = int(params["port"] or record.port or 30000)
        self.ranks = params["dp_size"] or _ranks(record)
        self.nvml_deadline_s = params["nvml_deadline_s"]
        flags = {canonical(name): value for name, value in record.flags.items()}
        self.model = str(params["model"] or flags.get("served-model-name") or flags.get("model-path") or "default")
        self.endpoint = http.Endpoint(
            params["host"] or record.host or "127.0.0.1", self.port, params["api_key"], tls="ssl-certfile" in flags
        )
        python_path = record.environment.get("PYTHONPATH", "")
        install = fetch_install(record.python, python_path)[0] if record.python else None
        self.version = install.version if install is not None else None

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def leader(self) -> t.Optional[Leader]:
        # Identities never wait for a process; only a leader under another pid is looked for by the command lines.
        boot_id = read_boot_id()
        process = recorded_process(self.record, _identities(), boot_id)
        if process is None:
            process = recorded_process(self.record, fetch_processes(), boot_id)
        return None if process is None else Leader(process.pid, process.start_ticks)

    def port_owners(self) -> t.Optional[t.Sequence[PortOwner]]:
        uses = read_ports(ports=[self.port])
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
        title = None if process is None else self.redactor.text(" ".join(self.redactor.argv(process.argv)))
        ours = leader is not None and pid is not None and leader.pid in (pid, *ancestors(pid, processes))
        return PortOwner(pid, title, ours, address)

    def log(self) -> t.Optional[str]:
        return read_launch_log(self.record)

    def health(self, deadline_s: float) -> http.Response:
        return http.health(self.endpoint, deadline_s)

    def generate(self, rank: int, deadline_s: float) -> http.Response:
        return proof.generate(self.endpoint, rank, self.ranks, self.version, deadline_s)

    def chat(self, deadline_s: float) -> http.Response:
        return proof.chat(self.endpoint, self.model, deadline_s)

    def free_gpu_mib(self) -> t.Optional[int]:
        reading = read_gpus(self.nvml_deadline_s)
        if reading.gpus is None:
            return None
        wanted = self.record.gpus
        gpus = [gpu for gpu in reading.gpus if wanted is None or gpu.uuid in wanted or str(gpu.index) in wanted]
        free = [None if gpu.memory is None else gpu.memory.free_mib for gpu in gpus]
        if not free or (wanted is not None and len(free) != len(wanted)):
            return None
        known = [size for size in free if size is not None]
        return min(known) if len(known) == len(free) else None


def _identities() -> dict[int, Process]:
    found = (read_identity(pid) for pid in list_pids())
    return {process.pid: process for process in found if process is not None}


def _title_of(pid: int) -> t.Optional[Process]:
    """The process with its command line; None where that is locked: it is for people only."""
    try:
        return fetch_process(pid, deadline_s=TITLE_DEADLINE_S)
    except CleanSlateError:
        return None


def _ranks(record: Record) -> int:
    value = {canonical(name): value for name, value in record.flags.items()}.get("dp-size", 1)
    return int(value) if str(value).isdigit() and int(value) > 0 else 1


def _wants_reasoning(given: t.Optional[str], record: Record) -> bool:
    if given is not None:
        return given.strip().lower() not in _NO
    return bool({canonical(name): value for name, value in record.flags.items()}.get("reasoning-parser"))


def result_of(readiness: Readiness, record: Record, port: int, redactor: Redactor, log_lines: int) -> dict[str, t.Any]:
    tail = None if readiness.log is None else [redactor.text(line) for line in tail_lines(readiness.log, log_lines)]
    return {
        "ready": readiness.verdict == "ready",
        "verdict": readiness.verdict,
        "error": None if readiness.error is None else redactor.text(readiness.error),
        "phase": readiness.phase,
        "phases": to_json(readiness.phases),
        "launch_id": record.launch_id,
        "pid": None if readiness.leader is None else readiness.leader.pid,
        "start_ticks": None if readiness.leader is None else readiness.leader.start_ticks,
        "port": port,
        "port_owner": to_json(readiness.port_owner),
        "tokens": redactor.data(to_json(readiness.tokens)),
        "reasoning": redactor.data(to_json(readiness.reasoning)),
        "headroom_mib": readiness.headroom_mib,
        "max_total_num_tokens": readiness.total_tokens,
        "log_tail": tail,
        "seconds": readiness.seconds,
        "evidence": None,
        "proof": None,
        "soak": None,
        "workers": None,
        "gpus_used": None,
        "flags_differ": None,
        "tools": None,
        "progress_line": None,
        "finished": True,
        "watch": None,
    }


def judge(params: Params) -> dict[str, t.Any]:
    """Wait and say what came of it. Raises CleanSlateError when there is nothing to wait for."""
    check_seconds(params, "deadline_s", "token_deadline_s", "nvml_deadline_s")
    record = find_recorded(params["state_dir"], params["name"])
    if record is None:
        raise CleanSlateError(
            f"no launch of {params['name']!r} is recorded in {params['state_dir']}: start it with server_launch first"
        )
    redactor = Redactor([params["api_key"]])
    eyes = HostEyes(record, params, redactor)
    wants = Wants(
        deadline_s=params["deadline_s"],
        ranks=eyes.ranks,
        reasoning=_wants_reasoning(params["reasoning_parser"], record),
        headroom_mib=params["min_gpu_headroom_mib"],
        uses_gpu=record.device != "cpu",
        token_deadline_s=params["token_deadline_s"],
    )
    return result_of(wait_ready(eyes, wants), record, eyes.port, redactor, params["log_lines"])


def main() -> t.NoReturn:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state_dir": {"type": "path", "default": "/var/lib/cleanslate"},
            "host": {"type": "str"},
            "port": {"type": "int"},
            "deadline_s": {"type": "float", "default": 600.0},
            "token_deadline_s": {"type": "float", "default": 60.0, "no_log": False},
            "api_key": {"type": "str", "no_log": True},
            "dp_size": {"type": "int"},
            "reasoning_parser": {"type": "str"},
            "min_gpu_headroom_mib": {"type": "int", "default": 2048},
            "model": {"type": "str"},
            "log_lines": {"type": "int", "default": 40},
            "nvml_deadline_s": {"type": "float", "default": 10.0},
            "hung_after": {"type": "dict", "default": {}},
            "stopped_after_s": {"type": "float", "default": 10.0},
            "slice_s": {"type": "float"},
            "watch": {"type": "dict"},
            "tool_call_parser": {"type": "str"},
            "expected_schedulers": {"type": "int"},
            "soak_requests": {"type": "int", "default": 8},
            "soak_concurrency": {"type": "int", "default": 4},
            "soak_tokens": {"type": "int", "default": 32, "no_log": False},
            "soak_deadline_s": {"type": "float", "default": 120.0},
            "record": {"type": "bool", "default": False},
            "run_id": {"type": "str"},
        },
        supports_check_mode=True,
    )
    try:
        result = judge(module.params)
    except CleanSlateError as error:
        module.fail_json(msg=str(error))
    if not result["ready"]:
        module.fail_json(msg=f"{module.params['name']} is not ready: {result['error']}", **result)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
