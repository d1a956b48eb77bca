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
  - A server that makes no progress for longer than its phase may take is V(hung), with RV(evidence) of where it hangs.
    One that still does when the deadline is over is V(starting).
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
  soak_min_tokens_per_s:
    description:
      - How many tokens per second all requests of the soak together must make. With less the soak is repeated twice,
        with other prompts, since the first requests of a server are slow; then the proof fails.
      - If not specified, the rate is not judged.
    type: float
    version_added: 0.2.0
  soak_max_latency_s:
    description:
      - How long, in seconds, an answer of the soak may take, by the median of all. With more it is as with
        O(soak_min_tokens_per_s).
      - If not specified, the latency is not judged.
    type: float
    version_added: 0.2.0
  record:
    description:
      - Whether the outcome is kept in the launch's folder (C(phases.json), C(proof.json), C(summary.txt)), and the
        launch becomes the last good one where it is ready.
    type: bool
    default: false
  last_good:
    description:
      - When, with O(record), the launch becomes the last good one, to which a failed launch goes back.
      - V(ready) means as soon as it is ready. V(later) means not in this task, since it is a node of a server over
        several hosts, which is good only if all of its nodes are.
      - V(now) says that they are, so the current launch is marked if its kept proof says that it was ready. Nothing is
        waited for, no other option but O(name), O(state_dir) and O(run_id) matters, and only RV(ready), RV(verdict),
        RV(finished), RV(error) and RV(launch_id) are returned.
    type: str
    choices: [ready, later, now]
    default: ready
    version_added: 0.2.0
  unit:
    description:
      - For a node of a server over several hosts, which tasks wait for its nodes, so that they end together. The first
        one that fails ends the others, and one that is ready is looked at again until the others are.
      - It is for tasks that run side by side in one run on one controller, and is handled there.
    type: dict
    version_added: 0.2.0
    suboptions:
      key:
        description:
          - The same text for all nodes of the server, and another one for each start of it.
        type: str
        required: true
      hosts:
        description:
          - The inventory's names of the hosts of its nodes.
        type: list
        elements: str
        required: true
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
  description:
    - V(ready), V(failed) (it surely won't serve), V(hung) (it lives and makes no progress, or listens and does not
      answer) or V(starting) (the time is over, the deadline's or the slice's, and it still makes progress).
  returned: always
  type: str
  sample: ready
finished:
  description: V(false) where only the slice is over. The next call goes on with RV(watch).
  returned: always
  type: bool
  sample: true
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
  description: The phases that were seen, with their seconds by the log's own times. The last one counts until now.
  returned: always
  type: list
  elements: dict
  sample:
    - name: weights
      seconds: 80
      percent: 62
      rate: 2.5 s/shard
      detail: 5/8 shards
  contains:
    name:
      description: The phase.
      type: str
    seconds:
      description: Its length. V(null) where that is not known, and for V(ready).
      type: int
    percent:
      description: How far its progress bar is. V(null) if it has none.
      type: int
    rate:
      description: The speed of its progress bar, in words.
      type: str
    detail:
      description: How much of how many its progress bar has.
      type: str
progress_line:
  description: How far the start is, in one line for people.
  returned: always
  type: str
  sample: weights 62 %, 1.3 GB/s, 84 s (imports 12 s, distributed 3 s)
progress:
  description: The lines that were shown meanwhile. A task has them, one single slice has not.
  returned: when the action plugin made the slices
  type: list
  elements: str
  sample:
    - "chat on gpu01: weights 62 %, 1.3 GB/s, 84 s (imports 12 s, distributed 3 s)"
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
tools:
  description: Whether tool calls are told apart. V(null) if that was not demanded.
  returned: always
  type: dict
  sample:
    verdict: called
    message: tool_calls names get_weather
    seconds: 0.9
  contains:
    verdict:
      description: V(called), V(missing) (the call stands in the text), V(not_called) (answered in words, which proves
        nothing) or V(unknown).
      type: str
    message:
      description: What was seen.
      type: str
    seconds:
      description: How long the answer took.
      type: float
workers:
  description: The server's worker processes, against what its flags make. V(null) if they were not looked at.
  returned: always
  type: dict
  sample:
    expected: 4
    schedulers: 4
    missing: []
    problem: null
  contains:
    expected:
      description: How many schedulers there should be. V(null) if the flags don't tell.
      type: int
    schedulers:
      description: How many live.
      type: int
    missing:
      description: The ranks whose scheduler is not there. V(null) if the flags don't tell.
      type: list
      elements: str
    dead:
      description: Worker processes that are dead.
      type: list
      elements: dict
    stopped:
      description: Worker processes that are stopped.
      type: list
      elements: dict
    problem:
      description: What is wrong, in one sentence. V(null) if nothing is.
      type: str
gpus_used:
  description: Whether the server holds each planned GPU. V(null) if that was not judged.
  returned: always
  type: list
  elements: dict
  sample:
    - gpu: GPU-0c1d2e3f
      index: 0
      used: true
      ours: [4799]
      strangers: []
      note: null
      absent: false
  contains:
    gpu:
      description: The planned GPU.
      type: str
    index:
      description: Its number.
      type: int
    used:
      description: Whether a process of the server holds it. V(null) if that can't be seen from here.
      type: bool
    ours:
      description: The server's processes that hold it.
      type: list
      elements: int
    strangers:
      description: Others who hold it.
      type: list
      elements: str
    note:
      description: Why it can't be judged.
      type: str
    absent:
      description: Whether the driver shows no such GPU. The proof fails then.
      type: bool
flags_differ:
  description: Whether what runs is what was wanted. V(null) if that was not judged.
  returned: always
  type: dict
  sample:
    matches: true
    differences: []
    resolved: []
    compared: 7
    problem: null
    notes: []
  contains:
    matches:
      description: Whether all wanted flags are as wanted. V(null) if that is not known.
      type: bool
    differences:
      description: Flags that are not as wanted. Each is a failure.
      type: list
      elements: dict
    resolved:
      description: Wanted flags that SGLang set to something else itself. No failure.
      type: list
      elements: dict
    compared:
      description: How many wanted flags the server itself told.
      type: int
    problem:
      description: Why it is not known.
      type: str
    notes:
      description: What is odd on the command line.
      type: list
      elements: str
soak:
  description: The soak at the end of the proof. V(null) if there was none.
  returned: always
  type: dict
  sample:
    requests: 8
    failed: 0
    concurrency: 4
    tokens: 256
    seconds: 2.1
    tokens_per_s: 121.9
    latency_s: {p50: 0.9, p95: 1.1, max: 1.2}
    first_error: null
  contains:
    requests:
      description: How many requests were wanted.
      type: int
    failed:
      description: How many of them failed, or came to nothing in time.
      type: int
    concurrency:
      description: How many were under way at once.
      type: int
    tokens:
      description: How many tokens were generated.
      type: int
    seconds:
      description: How long the soak took.
      type: float
    tokens_per_s:
      description: Tokens per second of all requests together. V(null) if no answer came.
      type: float
    latency_s:
      description: The latencies C(p50), C(p95) and C(max) in seconds. V(null) if no answer came.
      type: dict
    first_error:
      description: Why the first failed request failed.
      type: str
proof:
  description: The proof in short; its parts stand beside it. V(null) if the server was not asked.
  returned: always
  type: dict
  sample:
    problems: []
    warnings: []
    hung: false
    seconds: 4.2
  contains:
    problems:
      description: All failures, the first one first.
      type: list
      elements: str
    warnings:
      description: What is worth knowing and no failure.
      type: list
      elements: str
    hung:
      description: Whether the first failure is a server that lives and does not answer.
      type: bool
    seconds:
      description: How long the proof took.
      type: float
evidence:
  description: What was seen of a server that is not ready, gathered once at the end, without secrets. V(null) while it
    is not at its end, and when it is ready.
  returned: always
  type: dict
  sample: null
  contains:
    log_error:
      description: The log's own error, in one sentence. V(null) if it names none.
      type: str
    last_lines:
      description: The last lines of the log.
      type: list
      elements: str
    processes:
      description: The server's processes, with role, state, what each waits on (C(wchan)) and its stack, by C(py-spy)
        or the kernel.
      type: list
      elements: dict
    gpus:
      description: Used, free and total memory of its GPUs in MiB. V(null) if that was not looked at or not answered.
      type: list
      elements: dict
    gpus_problem:
      description: Why there is no answer about the GPUs.
      type: str
    memory:
      description: Available host memory and what is left of shared memory in MiB, and how often the OOM killer struck
        since the watch began.
      type: dict
    port:
      description: Who listens on the port, in words.
      type: str
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
  description: How long it was waited, over all slices.
  returned: always
  type: float
  sample: 42.0
watch:
  description: What the next slice goes on with. V(null) at the end; a task does not show it.
  returned: always
  type: dict
  sample: null
lease_lost:
  description: Whether the lease of O(run_id) is no longer held by this run.
  returned: when there is nothing to wait for, or the lease is not held
  type: bool
  sample: false
"""

import contextlib
import datetime
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.sglang.plugins.module_utils import lease
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.workers import expected_workers
from ansible_collections.cleanslate.sglang.plugins.module_utils.defects import Told
from ansible_collections.cleanslate.sglang.plugins.module_utils.durations import check_seconds
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.hosteyes import (
    HostEyes,
    flags_of,
    installed_version,
    launch_secrets,
    model_of,
    ranks_of,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import to_json
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_boot_id
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.http import Endpoint
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.logs import tail_lines
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.phases import utc_seconds
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.proof import Client
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.proving import Proof, ProofWants
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.ready import Readiness, Wants, wait_ready
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.record import Record, find_recorded
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.record_files import (
    mark_good,
    write_document,
    write_summary,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.redact import Redactor
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.soak import SoakWants
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.watch import (
    Limits,
    Watch,
    from_data,
    thresholds,
    to_data,
)

Params = t.Mapping[str, t.Any]
_NO = ("", "false", "no", "none", "off", "0")
_SECONDS = ("deadline_s", "token_deadline_s", "nvml_deadline_s", "stopped_after_s", "soak_deadline_s")
_GIVEN_SECONDS = ("slice_s", "soak_max_latency_s")


def _wanted(given: t.Optional[str], flags: t.Mapping[str, t.Any], name: str) -> bool:
    """Whether a parser is demanded: by the task, else by the flags that the server was launched with."""
    if given is not None:
        return given.strip().lower() not in _NO
    return bool(flags.get(name))


def _node_rank(flags: t.Mapping[str, t.Any]) -> int:
    value = str(flags.get("node-rank", 0))
    return int(value) if value.isdigit() else 0


def wants_of(params: Params, record: Record, version: t.Optional[str]) -> Wants:
    """What is demanded, by the task and by the record."""
    flags = flags_of(record)
    proof = ProofWants(
        ranks=params["dp_size"] or ranks_of(record),
        reasoning=_wanted(params["reasoning_parser"], flags, "reasoning-parser"),
        tools=_wanted(params["tool_call_parser"], flags, "tool-call-parser"),
        headroom_mib=params["min_gpu_headroom_mib"],
        uses_gpu=record.device != "cpu",
        expected=expected_workers(record.flags, version, params["expected_schedulers"]),
        flags=record.flags,
        soak=SoakWants(
            requests=params["soak_requests"],
            concurrency=params["soak_concurrency"],
            tokens=params["soak_tokens"],
            deadline_s=params["soak_deadline_s"],
            min_tokens_per_s=params["soak_min_tokens_per_s"],
            max_latency_s=params["soak_max_latency_s"],
            request_deadline_s=min(params["token_deadline_s"], params["soak_deadline_s"]),
        ),
        token_deadline_s=params["token_deadline_s"],
    )
    return Wants(
        deadline_s=params["deadline_s"],
        proof=proof,
        limits=Limits(thresholds(params["hung_after"]), params["stopped_after_s"]),
        launch_id=record.launch_id,
        boot_id=read_boot_id(),
        slice_s=params["slice_s"],
        started_at=utc_seconds(record.started_at) or utc_seconds(record.launch_id),
        utc_offset_s=time.localtime().tm_gmtoff,
        node=_node_rank(flags) > 0,
        model=model_of(record),
    )


def eyes_of(params: Params, record: Record, redactor: Redactor, api_key: t.Optional[str]) -> HostEyes:
    """The eyes on this host, with the key that the launch was given."""
    flags = flags_of(record)
    endpoint = Endpoint(
        params["host"] or record.host or "127.0.0.1",
        int(params["port"] or record.port or 30000),
        api_key,
        tls="ssl-certfile" in flags,
    )
    client = Client(
        endpoint,
        str(params["model"] or flags.get("served-model-name") or flags.get("model-path") or "default"),
        ranks=params["dp_size"] or ranks_of(record),
        version=installed_version(record),
        nonce=record.launch_id,
    )
    return HostEyes(
        record, client, lambda argv: redactor.text(" ".join(redactor.argv(argv))), params["nvml_deadline_s"]
    )


def result_of(readiness: Readiness, record: Record, port: int, redactor: Redactor, log_lines: int) -> dict[str, t.Any]:
    """What the module returns: everything that was found, also after a failure, without secrets."""
    tail = None if readiness.log is None else [redactor.text(line) for line in tail_lines(readiness.log, log_lines)]
    proof = readiness.proof or Proof()
    asked = readiness.proof is not None
    return {
        "ready": readiness.verdict == "ready",
        "verdict": readiness.verdict,
        "finished": readiness.finished,
        "error": None if readiness.error is None else redactor.text(readiness.error),
        "phase": readiness.phase,
        "phases": redactor.data(to_json(readiness.phases)),
        "progress_line": redactor.text(readiness.progress_line),
        "launch_id": record.launch_id,
        "pid": None if readiness.leader is None else readiness.leader.pid,
        "start_ticks": None if readiness.leader is None else readiness.leader.start_ticks,
        "port": port,
        "port_owner": to_json(readiness.port_owner),
        "tokens": redactor.data(to_json(proof.tokens)),
        "reasoning": redactor.data(to_json(proof.reasoning)),
        "tools": redactor.data(to_json(proof.tools)),
        "headroom_mib": proof.headroom_mib,
        "max_total_num_tokens": readiness.total_tokens,
        "workers": redactor.data(to_json(proof.workers)),
        "gpus_used": redactor.data(to_json(proof.gpus_used)),
        "flags_differ": redactor.data(to_json(proof.flags)),
        "soak": redactor.data(to_json(proof.soak)),
        "proof": redactor.data(_proof_row(proof)) if asked else None,
        "evidence": _shown(readiness, redactor),
        "log_tail": tail,
        "seconds": readiness.seconds,
        "watch": None if readiness.watch is None else to_data(readiness.watch),
    }


def _proof_row(proof: Proof) -> dict[str, t.Any]:
    """The proof in short: its parts stand in the result beside it."""
    return {
        "problems": list(proof.problems),
        "warnings": list(proof.warnings),
        "hung": proof.hung,
        "seconds": round(proof.seconds, 1),
    }


def _shown(readiness: Readiness, redactor: Redactor) -> t.Optional[dict[str, t.Any]]:
    """The evidence without secrets: a stack or a title may hold one."""
    if readiness.evidence is None:
        return None
    shown: dict[str, t.Any] = redactor.data(to_json(readiness.evidence))
    return shown


def keep_record(
    result: t.Mapping[str, t.Any], record: Record, state_dir: str, redactor: Redactor, good: bool = True
) -> None:
    """Write the outcome into the launch's folder; where it is ready and ``good``, it becomes the last good one."""
    where = (state_dir, record.name, record.launch_id)
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    started = utc_seconds(record.started_at) or utc_seconds(record.launch_id)
    phases = {"phase": result["phase"], "phases": result["phases"], "at": now.isoformat()}
    proof = {
        name: result[name]
        for name in (
            "verdict",
            "error",
            "phase",
            "tokens",
            "reasoning",
            "tools",
            "headroom_mib",
            "max_total_num_tokens",
            "workers",
            "gpus_used",
            "flags_differ",
            "soak",
            "proof",
            "evidence",
            "log_tail",
        )
    }
    seconds = result["seconds"] if started is None else round(now.timestamp() - started, 1)
    write_document(*where, "phases", phases, redactor)
    write_document(*where, "proof", {**proof, "seconds": seconds, "at": now.isoformat()}, redactor)
    if result["ready"] and good:
        mark_good(*where)
    write_summary(*where)


def judge(params: Params, check_mode: bool = False) -> dict[str, t.Any]:
    """Wait and say what came of it. Raises CleanSlateError when there is nothing to wait for."""
    check_seconds(params, *_SECONDS, *[name for name in _GIVEN_SECONDS if params[name] is not None])
    slowest = params["soak_min_tokens_per_s"]
    if slowest is not None and not 0 <= slowest < float("inf"):
        raise CleanSlateError(f"soak_min_tokens_per_s is {slowest}; it must be a number of tokens, 0 or more")
    for name in ("soak_requests", "soak_concurrency", "soak_tokens"):
        least = 0 if name == "soak_requests" else 1
        if params[name] < least:
            raise CleanSlateError(f"{name} is {params[name]}; it must be {least} or more")
    record = find_recorded(params["state_dir"], params["name"])
    if record is None:
        raise CleanSlateError(
            f"no launch of {params['name']!r} is recorded in {params['state_dir']}: start it with server_launch first"
        )
    secrets = launch_secrets(record)
    redactor = Redactor([params["api_key"], *secrets.values()])
    eyes = eyes_of(params, record, redactor, params["api_key"] or secrets.get("api-key"))
    wants = wants_of(params, record, eyes.client.version)
    readiness = wait_ready(eyes, wants, _watch_of(params, wants, eyes.now()))
    result = result_of(readiness, record, eyes.client.endpoint.port, redactor, params["log_lines"])
    if params["record"] and readiness.finished and not check_mode:
        keep_record(result, record, params["state_dir"], redactor, params["last_good"] == "ready")
    return result


def mark_now(params: Params, check_mode: bool = False) -> dict[str, t.Any]:
    """The current launch becomes the last good one, as its kept proof and those of the other nodes say."""
    where = (params["state_dir"], params["name"])
    record = find_recorded(*where)
    if record is None:
        raise CleanSlateError(f"no launch of {params['name']!r} is recorded in {params['state_dir']}: nothing to mark")
    if not check_mode:
        mark_good(*where, record.launch_id)
        write_summary(*where, record.launch_id)
    return {"ready": True, "verdict": "ready", "finished": True, "launch_id": record.launch_id, "error": None}


def _watch_of(params: Params, wants: Wants, now: float) -> t.Optional[Watch]:
    given = params["watch"]
    return from_data(given, wants.launch_id, wants.boot_id, now) if given else None


def lease_of(params: Params, check_mode: bool) -> contextlib.AbstractContextManager[t.Any]:
    """The run's lease, renewed for this call. Without a run this module only looks, and asks for nothing.

    The proof, the soak and the evidence may outlast a slice: as long as this process lives nobody breaks the lease. One
    that died with its controller must not keep the next run waiting for long.
    """
    length = params["slice_s"] or params["deadline_s"]
    return lease.keep(
        params["state_dir"], params["name"], params["run_id"], "server_ready", length, check_mode, acts=False
    )


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
            "soak_min_tokens_per_s": {"type": "float", "no_log": False},
            "soak_max_latency_s": {"type": "float"},
            "record": {"type": "bool", "default": False},
            "last_good": {"type": "str", "default": "ready", "choices": ["ready", "later", "now"]},
            "unit": {
                "type": "dict",
                "options": {
                    "key": {"type": "str", "required": True, "no_log": False},
                    "hosts": {"type": "list", "elements": "str", "required": True},
                },
            },
            "run_id": {"type": "str"},
        },
        supports_check_mode=True,
    )
    with Told(module):
        try:
            with lease_of(module.params, module.check_mode):
                act = mark_now if module.params["last_good"] == "now" else judge
                result = act(module.params, module.check_mode)
        except CleanSlateError as error:
            module.fail_json(msg=str(error), lease_lost="no longer ours" in str(error))
        if not result["ready"] and result["finished"]:
            module.fail_json(msg=f"{module.params['name']} is not ready: {result['error']}", **result)
        module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
