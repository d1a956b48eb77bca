#!/usr/bin/python
# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: server_info
version_added: 0.1.0
short_description: Show the SGLang servers of a host and how they were launched
description:
  - Shows each SGLang server with its leader and tree, the flags that it was launched with (abbreviations completed,
    its C(--config) file read), the environment that matters, its version, port, owner and GPUs.
  - Looking does no harm. C(/server_info) of a hung server would hang and spoil its later stop, so it is asked only
    after C(/health) answered 200 in the same run, and nothing at all is asked with O(probe=false).
  - Keys are masked in everything that SGLang echoes.
author:
  - Clean Slate contributors (@cleanslate)
extends_documentation_fragment:
  - cleanslate.sglang.attributes
  - cleanslate.sglang.attributes.info_module
  - cleanslate.sglang.attributes.actiongroup_sglang
options:
  name:
    description:
      - Show the server of this name only, by its record in O(state_dir).
      - If O(port) is given too, a server on that port is shown also if it was launched by others.
    type: str
  state_dir:
    description:
      - Where launches are recorded on the host.
    type: path
    default: /var/lib/cleanslate
  port:
    description:
      - Show the server that was launched for this port only.
    type: int
  probe:
    description:
      - Whether C(/health) is asked, and after its 200 C(/server_info).
    type: bool
    default: true
  api_key:
    description:
      - The key for C(/server_info). It is given to the process that a record names, to those that run as the account of
        such a record, and to root's; others are asked C(/health) without a key, at the address where they listen.
    type: str
  wanted:
    description:
      - How the shown servers should have been launched. Each then has RV(servers[].matches) and
        RV(servers[].differences).
      - Secrets are never compared.
    type: dict
    suboptions:
      flags:
        description:
          - SGLang's options. Values are compared by meaning, so V(0.90) is V(0.9) and V(128k) is V(128000).
          - Flags that were given and are not wanted are differences, apart from C(host) and C(port).
        type: dict
      environment:
        description:
          - Environment variables. Others that decide how SGLang runs (C(NCCL_*), C(SGLANG_*), C(LD_LIBRARY_PATH),
            C(PYTHONPATH) and so on) are differences, unless they were given as secrets.
        type: dict
      gpus:
        description:
          - GPUs by index, UUID or PCI bus id. An empty list stands for all.
        type: list
        elements: str
  expected_gpus:
    description:
      - With V(0) the host is one without GPUs, and no GPU is asked for.
    type: int
  nvml_deadline_s:
    description:
      - How long, in seconds, one look at the GPUs may take.
    type: float
    default: 10
  device_major:
    description:
      - The major device number of the GPU nodes. Other values serve tests.
    type: int
    default: 195
  proc_root:
    description:
      - Where the C(proc) file system is found. Other values serve recorded trees, which are never probed.
    type: path
    default: /proc
notes:
  - Run it as root. Other users see neither the environment nor the GPUs of foreign processes.
seealso:
  - module: cleanslate.sglang.server_launch
  - module: cleanslate.sglang.server_ready
  - module: cleanslate.sglang.gpu_info
"""

EXAMPLES = r"""
- name: Look at all servers without asking them anything
  cleanslate.sglang.server_info:
    probe: false
  register: seen

- name: Does the server run with the wanted flags?
  cleanslate.sglang.server_info:
    name: chat
    api_key: "{{ vault_chat_api_key }}"
    wanted:
      flags:
        model_path: /models/chat
        mem_fraction_static: 0.88
      gpus: [0, 1]
  register: chat

- name: Show what differs
  ansible.builtin.debug:
    var: chat.servers[0].differences
"""

RETURN = r"""
servers:
  description: The servers, the oldest first.
  returned: success
  type: list
  elements: dict
  sample:
    - name: chat
      launched_by_us: true
      launch_id: 20260131T235959Z-1a2b
      version: 0.5.15
      port: 30000
      listening: true
      state: serving
      gpus: [0, 1]
  contains:
    name:
      description: The name in the record. V(null) for a server that was launched by others.
      type: str
    launched_by_us:
      description: Whether a record in the state directory stands for this very process.
      type: bool
    launch_id:
      description: The launch in the record.
      type: str
    config_hash:
      description: The hash of the configuration in the record.
      type: str
    leader:
      description: The launcher.
      type: dict
      contains:
        pid:
          description: The process id.
          type: int
        start_ticks:
          description: The start time in clock ticks since boot.
          type: int
        uid:
          description: The user's number.
          type: int
        user:
          description: The user's name.
          type: str
        argv:
          description: The command line, without secrets.
          type: list
          elements: str
        exe:
          description: The program. A virtual environment's is the base Python.
          type: str
        cwd:
          description: The working directory.
          type: str
        started_at:
          description: When it was started.
          type: str
        age_s:
          description: Seconds since then, by the boot clock.
          type: float
    tree:
      description: The leader and its descendants.
      type: list
      elements: dict
      contains:
        pid:
          description: The process id.
          type: int
        title:
          description: The title, without secrets.
          type: str
        role:
          description: V(leader), V(scheduler), V(detokenizer) and so on, V(starting) before it has a title, else
            V(other).
          type: str
        ranks:
          description: The ranks in its title.
          type: dict
        state:
          description: The kernel's state letter.
          type: str
    flags:
      description: The flags as launched, secrets masked. V(null) if they can't be read.
      type: dict
    flags_complete:
      description: Whether all flags are known. V(false) if the C(--config) file can't be read.
      type: bool
    flag_sources:
      description: Where each flag comes from, C(command line) or the path of a file.
      type: dict
    flag_problems:
      description: What is odd about the command line, such as a C(--config=FILE) that SGLang ignores.
      type: list
      elements: str
    environment:
      description: The variables that decide how SGLang runs, secrets masked. V(null) if they can't be read.
      type: dict
    version:
      description: SGLang's version, by its installation or by the server itself. V(null) if neither tells.
      type: str
    host:
      description: The address that it was launched for.
      type: str
    port:
      description: The port that it was launched for. V(null) if its flags are not known.
      type: int
    listening:
      description: Whether its tree listens on that port. V(null) if that can't be seen from here.
      type: bool
    unit:
      description: The systemd unit that it lives in, of whatever owner.
      type: str
    container:
      description: The container that it lives in.
      type: str
    cgroup:
      description: Its cgroup.
      type: str
    gpus:
      description: Indices of the GPUs that its tree holds. V(null) if that is not known.
      type: list
      elements: int
    health:
      description: The answer of C(/health). V(null) if it was not asked.
      type: dict
      contains:
        status:
          description: V(ok), V(refused), V(timeout), V(broken) or V(unhealthy).
          type: str
        code:
          description: The HTTP status.
          type: int
        seconds:
          description: How long it took.
          type: float
    resolved:
      description: What the server says of itself (C(/server_info)), secrets masked. V(null) if it was not asked or
        gave no answer.
      type: dict
    resolved_error:
      description: Why there is no such answer though it was asked.
      type: str
    state:
      description: V(serving), V(starting), V(listening) (it was not asked), V(hung) or V(unknown).
      type: str
    launches:
      description: The launches of this server that are kept in the state directory, the newest first.
      type: list
      elements: dict
      version_added: 0.2.0
      contains:
        launch_id:
          description: The launch.
          type: str
        started_at:
          description: When its process was started, V(null) if the run that started it did not come to that.
          type: str
        config_hash:
          description: The hash of its configuration.
          type: str
        user:
          description: The account that it ran as.
          type: str
        from_launch:
          description: The launch that it repeated.
          type: str
        operator:
          description: Who started it.
          type: str
        run_id:
          description: The run that started it.
          type: str
        verdict:
          description: V(ready), V(failed), V(hung) or V(starting). V(null) if nobody ever judged it.
          type: str
        error:
          description: Why it was not ready.
          type: str
        seconds_to_ready:
          description: Seconds from its start to its proof.
          type: float
        tokens_per_s:
          description: What it generated in the soak of its proof.
          type: float
        soak:
          description: That soak, to compare a later one with. V(null) if there was none. C(requests), C(concurrency),
            C(tokens), C(tokens_per_s) and C(latency_p50_s), each V(null) if it is not known.
          type: dict
          version_added: 0.2.0
        current:
          description: Whether it is the current launch.
          type: bool
        last_good:
          description: Whether it is the newest one that was proved to serve.
          type: bool
        startable:
          description: Whether its folder has what O(cleanslate.sglang.server_launch#module:from_launch) needs.
          type: bool
        problem:
          description: What of its folder can't be used, and why.
          type: str
    matches:
      description: Whether it was launched as wanted. V(null) if that is not known. Only with O(wanted).
      type: bool
    differences:
      description: What differs. Only with O(wanted).
      type: list
      elements: dict
      contains:
        item:
          description: The setting.
          type: str
        wanted:
          description: The wanted value, V(null) for none.
          type: raw
        found:
          description: The value found, V(null) for none.
          type: raw
orphans:
  description: Workers of no living server, by their titles.
  returned: success
  type: list
  elements: dict
  sample:
    - pid: 4712
      title: sglang::scheduler_TP0
records:
  description:
    - Records whose process does not live, or that can't be used. Each has RV(servers[].launches) as well.
  returned: success
  type: list
  elements: dict
  sample:
    - name: chat
      launch_id: 20260131T235959Z-1a2b
      problem: its process does not live
      launches: []
problems:
  description: What could not be seen, and why.
  returned: success
  type: list
  elements: dict
  sample: []
"""

import dataclasses
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.sglang.plugins.module_utils.arguments import DEVICES, look_options
from ansible_collections.cleanslate.sglang.plugins.module_utils.asking import endpoint_of, why_no_key
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.gpus import choose_gpus
from ansible_collections.cleanslate.sglang.plugins.module_utils.defects import Told
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError, UnknownDevice
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Gpu, Problem, Process, to_json
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.bounded import fetch_launched
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.look import look
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.ports import read_ports
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_boot_id, read_uptime_s
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.servers import (
    LaunchedServer,
    same_network,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.results import process_row
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import http
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import servers as core
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.flags import port_number
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.history import list_launches
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.record import (
    Reading,
    Record,
    list_records,
    read_record,
    recorded_process,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.redact import MASK, Redactor
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Snapshot

Params = t.Mapping[str, t.Any]
Json = dict[str, t.Any]
_DEFAULT_PORT = 30000
_HUNG_AFTER_S = 5.0  # SGLang takes 20 s to say 503 of a hung scheduler, and says it at once while it starts


class Survey:
    """One look at the host, and what is asked of it."""

    def __init__(self, params: Params) -> None:
        self.params = params
        self.proc: str = params["proc_root"]
        self.snapshot: Snapshot = look(look_options({**params, "devices": []}))
        self.uptime_s = read_uptime_s(self.proc)
        self.redactor = Redactor([params["api_key"]])
        self.readings = self._readings()
        self.records = self._living_records()
        leaders = core.leaders(self.snapshot.processes)
        self.trees = {leader.pid: core.tree_of(leader, self.snapshot.processes) for leader in leaders}
        self.leaders = leaders
        self.problems: list[Problem] = []

    def _readings(self) -> dict[str, Reading]:
        state_dir, name = self.params["state_dir"], self.params["name"]
        if name is None:
            return list_records(state_dir)
        reading = read_record(state_dir, name)
        return {} if reading == Reading() else {name: reading}

    def _living_records(self) -> dict[int, Record]:
        boot_id = read_boot_id(self.proc)
        result: dict[int, Record] = {}
        for reading in self.readings.values():
            if reading.record is not None:
                process = recorded_process(reading.record, self.snapshot.processes, boot_id)
                if process is not None:
                    result[process.pid] = reading.record
        return result

    def dead_records(self) -> list[Json]:
        rows: list[Json] = []
        living = {record.name for record in self.records.values()}
        for name, reading in self.readings.items():
            if reading.problem is not None:
                rows.append({"name": name, "launch_id": None, "problem": reading.problem})
            elif reading.record is not None and name not in living:
                rows.append(
                    {"name": name, "launch_id": reading.record.launch_id, "problem": "its process does not live"}
                )
        return [{**row, "launches": self._launches(row["name"])} for row in rows]

    def _launches(self, name: t.Optional[str]) -> list[Json]:
        if name is None:
            return []
        try:
            launches = list_launches(self.params["state_dir"], name)
        except CleanSlateError as error:
            self.problems.append(Problem("launches", None, str(error)))
            return []
        return [self.redactor.data(to_json(launch)) for launch in launches]

    def servers(self) -> list[Json]:
        rows = []
        for leader in self.leaders:
            launched, unknown = fetch_launched(leader, self.proc)
            if unknown is not None:
                self.problems.append(Problem("server", None, unknown))
            port = _port(launched)
            if self._is_meant(leader, port):
                rows.append(self._server(leader, launched, port))
        return rows

    def _is_meant(self, leader: Process, port: t.Optional[int]) -> bool:
        name, wanted_port = self.params["name"], self.params["port"]
        if name is None and wanted_port is None:
            return True
        return (name is not None and leader.pid in self.records) or (wanted_port is not None and port == wanted_port)

    def _server(self, leader: Process, launched: LaunchedServer, port: t.Optional[int]) -> Json:
        record = self.records.get(leader.pid)
        flags = launched.flags
        listening, endpoint = self._listening(leader, port)
        row = process_row(leader, self.uptime_s)
        server: Json = {
            "name": None if record is None else record.name,
            "launched_by_us": record is not None,
            "launch_id": None if record is None else record.launch_id,
            "config_hash": None if record is None else record.config_hash,
            "leader": {
                **{key: row[key] for key in ("pid", "start_ticks", "uid", "user", "exe", "started_at", "age_s")},
                "argv": self.redactor.argv(leader.argv),
                "cwd": launched.cwd,
            },
            "tree": [self._member(member) for member in self.trees[leader.pid]],
            "flags": None if flags is None else self.redactor.data(dict(flags.flags)),
            "flags_complete": flags is not None and flags.complete,
            "flag_sources": {} if flags is None else dict(flags.sources),
            "flag_problems": [] if flags is None else [self.redactor.text(problem) for problem in flags.problems],
            "environment": self._environment(launched),
            "host": _text(launched, "host", "127.0.0.1"),
            "port": port,
            "listening": listening,
            "unit": row["unit"],
            "container": row["container"],
            "cgroup": row["cgroup"],
            "gpus": self._held(leader),
            **self._asked(leader, launched, endpoint, listening),
            "launches": self._launches(None if record is None else record.name),
        }
        server["version"] = (launched.install.version if launched.install is not None else None) or _told_version(
            server
        )
        if self.params["wanted"] is not None:
            server.update(self._compared(launched, record))
        return server

    def _member(self, member: core.Member) -> Json:
        process = member.process
        title = " ".join(self.redactor.argv(process.argv)).strip() or f"[{process.comm}]"
        return {
            "pid": process.pid,
            "title": title,
            "role": member.role,
            "ranks": dict(member.ranks),
            "state": process.state,
        }

    def _environment(self, launched: LaunchedServer) -> t.Optional[dict[str, str]]:
        if launched.environment is None:
            return None
        return self.redactor.environment(core.relevant_environment(launched.environment))

    def _listening(
        self, leader: Process, port: t.Optional[int]
    ) -> tuple[t.Optional[bool], t.Optional[http.Endpoint]]:
        """Whether the server's tree listens on its port, and where it can be asked."""
        if port is None or same_network(leader.pid, self.proc) is False:
            return None, None
        uses = read_ports(self.proc, [port])
        if uses is None:
            return None, None
        pids = {member.process.pid for member in self.trees[leader.pid]}
        listeners = [use for use in uses if use.state == "LISTEN"]
        own = [use.address for use in listeners if pids.intersection(use.pids)]
        if own:
            return True, endpoint_of(port, own)
        return (None if any(not use.pids for use in listeners) else False), None

    def _held(self, leader: Process) -> t.Optional[list[int]]:
        if self.snapshot.reading.gpus is None:
            return None
        pids = {member.process.pid for member in self.trees[leader.pid]}
        return sorted(
            index
            for index, found in self.snapshot.holders.items()
            if any(holder.pid in pids for holder in found.holders)
        )

    def _why_no_key(self, leader: Process) -> t.Optional[str]:
        """Only the process of a record, or one of the account of a record that is meant, or root's, gets the key."""
        if self.params["api_key"] is None or leader.pid in self.records:
            return None
        recorded = (reading.record for reading in self.readings.values())
        return why_no_key(leader, [record.user for record in recorded if record is not None])

    def _asked(
        self,
        leader: Process,
        launched: LaunchedServer,
        endpoint: t.Optional[http.Endpoint],
        listening: t.Optional[bool],
    ) -> Json:
        """What the server answers, if it is asked at all. It is asked where its own tree was seen to listen: its
        command line may name another host."""
        nothing: Json = {"health": None, "resolved": None, "resolved_error": None}
        if not listening or endpoint is None:
            return {**nothing, "state": "unknown" if listening is None else "starting"}
        if not self.params["probe"] or self.proc != "/proc":
            return {**nothing, "state": "listening"}
        flags = {} if launched.flags is None else launched.flags.flags
        endpoint = dataclasses.replace(endpoint, tls="ssl-certfile" in flags)
        stranger = self._why_no_key(leader)
        if stranger is None:
            probe = http.probe(dataclasses.replace(endpoint, api_key=self.params["api_key"]))
        else:
            probe = http.Probe(http.health(endpoint), None, f"not asked: {stranger}")
        seen = probe.health
        status = seen.kind or ("ok" if seen.ok else "unhealthy")
        # /health of a later node is a constant 200 of a dummy server: it says nothing of the schedulers.
        later_node = str(flags.get("node-rank", "0")) != "0"
        return {
            "health": {"status": status, "code": seen.status, "seconds": round(seen.seconds, 2)},
            "resolved": None if probe.info is None else self.redactor.data(dict(probe.info)),
            "resolved_error": probe.info_error,
            "state": "unknown" if later_node else _state(seen),
        }

    def _compared(self, launched: LaunchedServer, record: t.Optional[Record]) -> Json:
        raw = self.params["wanted"]
        known, wanted_gpus, found_gpus = self._gpus(raw.get("gpus"), launched, record)
        environment = raw.get("environment")
        wanted = core.Wanted(
            flags=raw.get("flags"),
            environment=None if environment is None else {str(k): str(v) for k, v in environment.items()},
            gpus=wanted_gpus if raw.get("gpus") is not None else None,
        )
        found = launched.environment
        if found is not None and record is not None:
            # Whatever a variable is called, it may have been given as a secret: its record has it masked as a whole.
            found = {
                name: value
                for name, value in found.items()
                if name in (environment or {}) or record.environment.get(name) != MASK
            }
        compared = core.compare(wanted, launched.flags, found, found_gpus, known, launched.options)
        rows = [{"item": row.item, "wanted": row.wanted, "found": row.found} for row in compared.differences]
        return {"matches": compared.matches, "differences": [self._shown(row) for row in rows]}

    def _shown(self, row: Json) -> Json:
        """A variable's name stands in ``item``, so its values are masked by that name."""
        name = row["item"].rpartition(".")[2]
        return {key: self.redactor.data(value, name if key != "item" else "") for key, value in row.items()}

    def _gpus(
        self, names: t.Optional[t.Sequence[str]], launched: LaunchedServer, record: t.Optional[Record]
    ) -> tuple[bool, tuple[str, ...], t.Optional[tuple[str, ...]]]:
        """(whether both are known, wanted, found) as UUIDs where the driver tells them."""
        gpus = self.snapshot.reading.gpus
        try:
            wanted = tuple(str(name) for name in names or ()) if gpus is None else _uuids(gpus, names or ())
        except UnknownDevice as error:
            raise CleanSlateError(f"wanted.gpus: {error}") from error
        if record is not None:
            by_uuid = all(name.startswith(("GPU-", "MIG-")) for name in wanted)
            return gpus is not None or by_uuid, wanted, record.gpus
        if launched.environment is None:
            return False, wanted, None
        visible = launched.environment.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return True, wanted, None
        if gpus is None:
            return False, wanted, None
        try:
            return True, wanted, _uuids(gpus, [name.strip() for name in visible.split(",") if name.strip()])
        except UnknownDevice:
            return False, wanted, None

    def orphans(self) -> list[Json]:
        rows = []
        for process in core.orphans(self.snapshot.processes, self.trees.values()):
            rows.append(process_row(process, self.uptime_s))
        return rows


def _uuids(gpus: t.Sequence[Gpu], names: t.Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ()
    return tuple(gpu.uuid or str(gpu.index) for gpu in choose_gpus(gpus, names))


def _state(health: http.Response) -> str:
    if health.ok:
        return "serving"
    if health.status == 503:
        return "starting" if health.seconds < _HUNG_AFTER_S else "hung"
    return "hung" if health.kind == "timeout" else "unknown"


def _port(launched: LaunchedServer) -> t.Optional[int]:
    flags = launched.flags
    if flags is None:
        return None
    port = flags.flags.get("port", _DEFAULT_PORT if flags.complete else None)
    return port_number(port)


def _text(launched: LaunchedServer, name: str, default: str) -> str:
    return default if launched.flags is None else str(launched.flags.flags.get(name, default))


def _told_version(server: Json) -> t.Optional[str]:
    version = (server["resolved"] or {}).get("version")
    return version if isinstance(version, str) else None


def survey(params: Params) -> Json:
    """The module's result. Raises CleanSlateError."""
    seen = Survey(params)
    reading = seen.snapshot.reading
    problems = [*seen.snapshot.problems, *(reading.problems if params["expected_gpus"] != 0 else ())]
    unreadable = len(seen.snapshot.scan.unreadable)
    if unreadable:
        words = f"{unreadable} processes could not be looked into: whether they hold GPUs is not known"
        problems.append(Problem("device scan", None, words))
    servers = seen.servers()
    records = seen.dead_records()
    return {
        "servers": servers,
        "orphans": seen.orphans(),
        "records": records,
        "problems": to_json([*problems, *seen.problems]),
    }


def main() -> t.NoReturn:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str"},
            "state_dir": {"type": "path", "default": "/var/lib/cleanslate"},
            "port": {"type": "int"},
            "probe": {"type": "bool", "default": True},
            "api_key": {"type": "str", "no_log": True},
            "wanted": {
                "type": "dict",
                "options": {
                    "flags": {"type": "dict"},
                    "environment": {"type": "dict"},
                    "gpus": {"type": "list", "elements": "str"},
                },
            },
            **{name: DEVICES[name] for name in ("expected_gpus", "nvml_deadline_s", "device_major", "proc_root")},
        },
        supports_check_mode=True,
    )
    with Told(module):
        try:
            result = survey(module.params)
        except CleanSlateError as error:
            module.fail_json(msg=str(error))
        module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
