#!/usr/bin/python
# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: server_launch
version_added: 0.1.0
short_description: Start an SGLang server from flags that are data
description:
  - Starts one SGLang server, as a systemd unit or as a detached process that outlives the connection, and records
    what was started on the host.
  - Flags become SGLang's own C(--config) file, which only the server's user can read. No secret stands on a command
    line, in a unit or in a result.
  - Everything that would make the start fail, and that can be seen before, is an error before anything is written.
  - Whether the server then serves is for M(cleanslate.sglang.server_ready) to prove.
  - Each launch has a folder on the host, with which the same can be started again (O(from_launch)).
author:
  - Clean Slate contributors (@cleanslate)
extends_documentation_fragment:
  - cleanslate.sglang.attributes
  - cleanslate.sglang.attributes.actiongroup_sglang
attributes:
  check_mode:
    support: full
    details:
      - In check mode a server that runs already is no error, since it would have been evicted before.
  diff_mode:
    support: full
    details:
      - The difference is one of configurations, to the launch before. Secrets are masked.
  idempotent:
    support: none
    details:
      - A start is a change, and a server that runs already is an error. Whether it may be left alone as it is says
        M(cleanslate.sglang.server_info) with O(cleanslate.sglang.server_info#module:wanted).
options:
  name:
    description:
      - The name of the server, as in the inventory.
    type: str
    required: true
  python:
    description:
      - The Python interpreter that has SGLang, as an absolute path. Required without O(from_launch).
    type: path
  flags:
    description:
      - SGLang's options by their names, with dashes or underscores. V(true) is a bare flag, V(false) leaves it away.
      - The secrets V(api_key), V(admin_api_key) and V(ssl_keyfile_password) are refused here, since they have options
        of their own, and so is V(config), since these flags become that file.
      - Required without O(from_launch).
    type: dict
  host:
    description:
      - The address to listen on. If not specified, SGLang's default is used.
    type: str
  port:
    description:
      - The port to listen on. If not specified, SGLang's default (30000) is used.
    type: int
  gpus:
    description:
      - The server's GPUs, each by its index, UUID or PCI bus id. They become C(CUDA_VISIBLE_DEVICES) in this order.
      - An empty list stands for all GPUs of the host.
    type: list
    elements: str
    default: []
  environment:
    description:
      - The server's environment. Beside it there are only C(PATH), C(HOME), C(USER), C(LOGNAME), C(LANG) and what
        O(gpus) makes; nothing is inherited.
    type: dict
    default: {}
  secret_environment:
    description:
      - More of the environment, whose values are never shown.
    type: dict
    default: {}
  api_key:
    description:
      - The key that SGLang demands of its clients. SGLang itself prints it into its log.
    type: str
  admin_api_key:
    description:
      - The key for SGLang's administrative endpoints.
    type: str
  ssl_keyfile_password:
    description:
      - The password of the TLS key file.
    type: str
  user:
    description:
      - The account that the server runs as. Needed when the module runs as root; C(root) must be named to be taken.
    type: str
  group:
    description:
      - The primary group. If not specified, that of the user.
    type: str
  launcher:
    description:
      - How the server is started. V(auto) is V(systemd) where systemd runs and the module is root, else V(detached).
      - A detached server gets as many open files as may be given to it here; fewer than 1024 are refused.
    type: str
    choices: [auto, systemd, detached]
    default: auto
  state_dir:
    description:
      - Where launches are recorded on the host, one folder for each server.
    type: path
    default: /var/lib/cleanslate
  unit:
    description:
      - The name of the systemd unit. If not specified, C(sglang-NAME.service).
    type: str
  unit_dir:
    description:
      - Where the unit is written.
    type: path
    default: /etc/systemd/system
  unit_overrides:
    description:
      - Settings for the unit, by section and name, that replace or add to ours. A list makes several lines.
      - What other options set (C(ExecStart), C(User), C(Group), C(EnvironmentFile), C(Type)) is refused.
    type: dict
    default: {}
  limit_memlock:
    description:
      - How much memory the server may lock, in bytes, or V(infinity). HiCache pins its pool.
    type: str
    default: infinity
  stop_timeout_s:
    description:
      - How long, in seconds, systemd waits after SIGTERM before it kills.
    type: int
    default: 60
  restart:
    description:
      - Whether systemd restarts a server that failed. With V(on-failure) three starts in half an hour are the limit.
    type: str
    choices: ['no', on-failure]
    default: 'no'
  start_check:
    description:
      - A command in words that systemd runs as root before each start; if it fails, the server is not started.
    type: list
    elements: str
    default: []
  enabled:
    description:
      - Whether systemd starts the server at boot.
    type: bool
    default: false
  log:
    description:
      - Where the server's output goes, V(journal), V(file) (in the launch's folder) or an absolute path.
      - If not specified, V(journal) with systemd and V(file) for a detached process.
      - The raw output holds the keys in clear, since SGLang prints them.
    type: str
  workdir:
    description:
      - The server's working directory. If not specified, C(/).
    type: path
  waivers:
    description:
      - Guardrails that were accepted, each with its written reason. They are kept in the record.
    type: dict
    default: {}
    version_added: 0.2.0
  from_launch:
    description:
      - Start exactly what an earlier launch started, with the same configuration file, environment, unit and command
        line. It is the id of a kept launch, V(last_good) (the newest that was proved to serve) or V(previous) (the
        newest proved one that is not current).
      - Everything comes from the record of that launch, its secrets from its private files. GPUs are looked up anew by
        their UUIDs. So no option is taken beside it but O(name), O(state_dir), O(documents), O(run_id), O(operator),
        O(keep_launches) and O(nvml_deadline_s).
    type: str
    version_added: 0.2.0
  documents:
    description:
      - What was found and done before this launch, kept in its folder. Secrets are masked, and what is larger than
        256 KiB is shortened.
    type: dict
    suboptions:
      plan:
        description:
          - The result of M(cleanslate.sglang.server_plan).
        type: dict
      evict:
        description:
          - The result of M(cleanslate.sglang.gpu_evict).
        type: dict
      clean:
        description:
          - The result of M(cleanslate.sglang.clean_state).
        type: dict
    version_added: 0.2.0
  operator:
    description:
      - Who starts the server, for the record.
    type: str
    version_added: 0.2.0
  run_id:
    description:
      - The run that holds the server's lease. The start is refused if the lease is another run's.
      - If not specified, the start is refused while anybody holds the lease.
    type: str
    version_added: 0.2.0
  keep_launches:
    description:
      - How many launches are kept in O(state_dir), from 2 to 100. The current one and the last good one always are.
    type: int
    default: 10
    version_added: 0.2.0
  nvml_deadline_s:
    description:
      - How long, in seconds, one look at the GPUs may take. A server on the CPU needs none.
    type: float
    default: 10
seealso:
  - module: cleanslate.sglang.gpu_evict
  - module: cleanslate.sglang.server_info
  - module: cleanslate.sglang.server_ready
"""

EXAMPLES = r"""
- name: Start a server on two GPUs
  cleanslate.sglang.server_launch:
    name: chat
    python: /opt/sglang/bin/python
    user: sglang
    host: 0.0.0.0
    port: 30000
    gpus: [0, 1]
    flags:
      model_path: /models/chat
      tp_size: 2
      mem_fraction_static: 0.88
      reasoning_parser: kimi_k2
      trust_remote_code: true
    environment:
      NCCL_P2P_DISABLE: "1"
    api_key: "{{ vault_chat_api_key }}"
  register: launch

- name: Go back to what served last
  cleanslate.sglang.server_launch:
    name: chat
    from_launch: last_good
    operator: alice

- name: Show what would start
  cleanslate.sglang.server_launch:
    name: chat
    python: /opt/sglang/bin/python
    user: sglang
    flags:
      model_path: /models/chat
  check_mode: true
  diff: true
"""

RETURN = r"""
launch_id:
  description: Names the launch; sorts by time. V(null) in check mode.
  returned: success
  type: str
  sample: 20260131T235959Z-1a2b
pid:
  description: The leader's process id. V(null) in check mode.
  returned: success
  type: int
  sample: 4711
start_ticks:
  description: The leader's start time in clock ticks since boot. V(null) in check mode.
  returned: success
  type: int
  sample: 123456
boot_id:
  description: The kernel's id of this boot.
  returned: success
  type: str
  sample: 0f6f8f3c-7f6e-4b7e-9a67-2d2f3c0b8a11
launcher:
  description: How it was started, V(systemd) or V(detached).
  returned: success
  type: str
  sample: systemd
unit:
  description: The systemd unit. V(null) for a detached process.
  returned: success
  type: str
  sample: sglang-chat.service
config_hash:
  description: Changes with flags, environment, GPUs, interpreter and user; secrets are left out of it.
  returned: success
  type: str
  sample: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
config_changed:
  description: Whether the configuration differs from that of the launch before. V(null) if there was none.
  returned: success
  type: bool
  sample: true
secrets_changed:
  description:
    - Whether the keys or the environment's file differ from those of the launch before, compared on the host.
    - V(null) if there was none, or if its files can't be read.
  returned: success
  type: bool
  sample: false
argv:
  description: The command line.
  returned: success
  type: list
  elements: str
  sample: [/opt/sglang/bin/python, -m, sglang.launch_server, --config, /var/lib/cleanslate/chat/launches/x/config.yaml]
log:
  description: The file that takes the output, or V(journal).
  returned: success
  type: str
  sample: journal
files:
  description: The files that were written, or would be, with whether their content is new.
  returned: success
  type: list
  elements: dict
  sample:
    - path: /var/lib/cleanslate/chat/launches/20260131T235959Z-1a2b/config.yaml
      changed: true
  contains:
    path:
      description: The file.
      type: str
    changed:
      description: Whether it was written.
      type: bool
from_launch:
  description: The kept launch that was started again. V(null) if it was none.
  returned: success
  type: str
  sample: null
  version_added: 0.2.0
record:
  description:
    - The record as it lies on the host, redacted. In check mode it is what would be recorded, so that GPUs, port and
      device of a kept launch are known before anything is touched.
    - Its C(fingerprint) has what the host had at the start beside the flags, with which
      M(cleanslate.sglang.server_drift) compares; in check mode it is V(null).
  returned: success
  type: dict
  sample:
    name: chat
    state: started
    user: sglang
    port: 30000
    log: journal
"""

import dataclasses
import json
import os
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.sglang.plugins.module_utils import lease
from ansible_collections.cleanslate.sglang.plugins.module_utils.act import launch as act
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.gpus import choose_gpus
from ansible_collections.cleanslate.sglang.plugins.module_utils.defects import Told
from ansible_collections.cleanslate.sglang.plugins.module_utils.durations import check_seconds
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import to_json
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.accounts import find_account
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.bounded import fetch_install, fetch_processes
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.fingerprint import read_fingerprint
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.nvml import read_gpus
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_boot_id
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import flags as flag_tools
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import history
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.again import Now, plan_again, request_again
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.keeping import LEAST_KEPT, MOST_KEPT
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.kept import environment_of, print_of
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.launch import (
    ChosenGpu,
    LaunchPlan,
    LaunchRequest,
    plan_launch,
    shown_before,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.private_files import secrets_differ
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.record import (
    KEPT_LAUNCHES,
    Record,
    server_dir,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.unit import check_unit_name

Params = t.Mapping[str, t.Any]


def argument_spec() -> dict[str, t.Any]:
    return {
        "name": {"type": "str", "required": True},
        "python": {"type": "path"},
        "flags": {"type": "dict"},
        "host": {"type": "str"},
        "port": {"type": "int"},
        "gpus": {"type": "list", "elements": "str", "default": []},
        "environment": {"type": "dict", "default": {}},
        "secret_environment": {"type": "dict", "default": {}, "no_log": True},
        "api_key": {"type": "str", "no_log": True},
        "admin_api_key": {"type": "str", "no_log": True},
        "ssl_keyfile_password": {"type": "str", "no_log": True},
        "user": {"type": "str"},
        "group": {"type": "str"},
        "launcher": {"type": "str", "choices": ["auto", "systemd", "detached"], "default": "auto"},
        "state_dir": {"type": "path", "default": "/var/lib/cleanslate"},
        "unit": {"type": "str"},
        "unit_dir": {"type": "path", "default": act.DEFAULT_UNIT_DIR},
        "unit_overrides": {"type": "dict", "default": {}},
        "limit_memlock": {"type": "str", "default": "infinity"},
        "stop_timeout_s": {"type": "int", "default": 60},
        "restart": {"type": "str", "choices": ["no", "on-failure"], "default": "no"},
        "start_check": {"type": "list", "elements": "str", "default": []},
        "enabled": {"type": "bool", "default": False},
        "log": {"type": "str"},
        "workdir": {"type": "path"},
        "nvml_deadline_s": {"type": "float", "default": 10.0},
        "waivers": {"type": "dict", "default": {}},
        "from_launch": {"type": "str"},
        "documents": {"type": "dict", "options": {name: {"type": "dict"} for name in ("plan", "evict", "clean")}},
        "operator": {"type": "str"},
        "run_id": {"type": "str"},
        "keep_launches": {"type": "int", "default": KEPT_LAUNCHES},
    }


BESIDE_FROM_LAUNCH = ("name", "state_dir", "documents", "operator", "run_id", "keep_launches", "nvml_deadline_s")
LONGEST_OPERATOR = 200
LEASE_S = 300.0


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What shall be started. ``note``: what is worth a warning."""

    request: LaunchRequest
    plan: LaunchPlan
    note: t.Optional[str] = None


def wanted_from(params: Params) -> Wanted:
    """What the parameters ask for. Raises CleanSlateError for what makes no sense, or can't be started."""
    check_seconds(params, "nvml_deadline_s")
    if not LEAST_KEPT <= params["keep_launches"] <= MOST_KEPT:
        raise CleanSlateError(
            f"keep_launches is {params['keep_launches']}; it must be from {LEAST_KEPT} (the current launch and the "
            f"last good one) to {MOST_KEPT}"
        )
    operator = params["operator"]
    if operator is not None and not (operator.isprintable() and 0 < len(operator) <= LONGEST_OPERATOR):
        raise CleanSlateError(f"operator: {operator!r} must be printable, with 1 to {LONGEST_OPERATOR} characters")
    if params["run_id"] is not None:
        lease.check_run_id(params["run_id"])
    if params["from_launch"] is not None:
        return again_from(params)
    request = request_from(params)
    return Wanted(request, plan_launch(request, history.next_launch_id(request.state_dir, request.name)))


def again_from(params: Params) -> Wanted:
    """A kept launch, with what the host has for it today."""
    state_dir, name = params["state_dir"], params["name"]
    launch_id = history.choose_launch(state_dir, name, params["from_launch"])
    kept = history.read_kept(state_dir, name, launch_id)
    then = kept.request
    try:
        install = fetch_install(then.python, environment_of(kept.environment).get("PYTHONPATH", ""))[0]
        now = Now(
            account=find_account(then.user, None if then.group.isdigit() else then.group),  # some groups have no name
            gpus=None if then.gpus is None else _gpus(gpu_names(then.gpus), params["nvml_deadline_s"]),
            boot_id=read_boot_id(),
            version=None if install is None else install.version,
            operator=params["operator"],
            run_id=params["run_id"],
        )
        request = request_again(kept, now, state_dir)
        plan = plan_again(kept, request, history.next_launch_id(state_dir, name))
    except (CleanSlateError, ValueError) as error:
        raise CleanSlateError(history.again_error(name, launch_id, error)) from error
    note = None
    if then.version is not None and now.version != then.version:
        found = now.version or "none that is found"
        note = f"the launch {launch_id} of {name!r} ran SGLang {then.version}; {then.python} has {found} now"
    return Wanted(request, plan, note)


def gpu_names(kept: t.Iterable[tuple[int, t.Optional[str]]]) -> list[str]:
    return [uuid or str(index) for index, uuid in kept]


def request_from(params: Params) -> LaunchRequest:
    """The module's parameters as a request. Raises CleanSlateError for what makes no sense."""
    if params["limit_memlock"] != "infinity" and not params["limit_memlock"].isdigit():
        raise CleanSlateError(f"limit_memlock: {params['limit_memlock']!r} is neither a number of bytes nor 'infinity'")
    if params["stop_timeout_s"] <= 0:
        raise CleanSlateError(f"stop_timeout_s must be greater than 0, not {params['stop_timeout_s']}")
    server_dir(params["state_dir"], params["name"])  # refuses a name that is no plain file name
    environment = _variables(params["environment"], "environment")
    secrets = ("api_key", "admin_api_key", "ssl_keyfile_password")
    install, table = fetch_install(params["python"], environment.get("PYTHONPATH", ""))
    return LaunchRequest(
        name=params["name"],
        python=params["python"],
        account=find_account(params["user"], params["group"]),
        flags=params["flags"],
        launcher=act.choose_launcher(params["launcher"]),
        state_dir=params["state_dir"],
        boot_id=read_boot_id(),
        host=params["host"],
        port=params["port"],
        gpus=_gpus(params["gpus"], params["nvml_deadline_s"]),
        environment=environment,
        secret_environment=_variables(params["secret_environment"], "secret_environment"),
        secrets={name.replace("_", "-"): params[name] for name in secrets if params[name]},
        unit=check_unit_name(params["unit"] or f"sglang-{params['name']}.service"),
        unit_overrides=params["unit_overrides"],
        limit_memlock=params["limit_memlock"],
        stop_timeout_s=params["stop_timeout_s"],
        restart=params["restart"],
        start_check=tuple(params["start_check"]),
        enabled=params["enabled"],
        log=params["log"],
        workdir=params["workdir"],
        waivers={str(name): str(reason) for name, reason in params["waivers"].items()},
        options=table,
        unit_dir=params["unit_dir"],
        version=None if install is None else install.version,
        operator=params["operator"],
        run_id=params["run_id"],
    )


def _variables(mapping: t.Mapping[str, t.Any], where: str) -> dict[str, str]:
    """YAML's numbers become text; booleans are ambiguous (1, true, True?) and are refused, as are structures."""
    result = {}
    for name, value in mapping.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise CleanSlateError(f"{where}: {name} is a {type(value).__name__}; write its value as text, in quotes")
        result[str(name)] = str(value)
    return result


def _gpus(names: t.Sequence[str], deadline_s: float) -> t.Optional[tuple[ChosenGpu, ...]]:
    if not names:
        return None
    reading = read_gpus(deadline_s)
    if reading.gpus is None:
        why = "; ".join(problem.message for problem in reading.problems) or "no answer"
        raise CleanSlateError(f"gpus: the GPUs {', '.join(names)} can't be looked up: {why}")
    return tuple(ChosenGpu(gpu.index, gpu.uuid) for gpu in choose_gpus(reading.gpus, names))


def diff(before: t.Optional[Record], request: LaunchRequest, plan: LaunchPlan, unit_dir: str) -> dict[str, str]:
    unit = None
    if request.launcher == "systemd":
        unit = act.read_unit_file(os.path.join(unit_dir, str(request.unit)))
    last = before if before is None or unit is None else dataclasses.replace(before, unit=request.unit)
    return {
        "before_header": f"{request.name} ({before.launch_id})" if before is not None else request.name,
        "after_header": request.name,
        "before": shown_before(last, unit, request.redactor),
        "after": plan.shown,
    }


def result_of(
    record: Record,
    before: t.Optional[Record],
    files: t.Iterable[tuple[str, bool]],
    secrets_changed: t.Optional[bool] = None,
) -> dict[str, t.Any]:
    return {
        "launch_id": record.launch_id,
        "pid": record.pid,
        "start_ticks": record.start_ticks,
        "boot_id": record.boot_id,
        "launcher": record.launcher,
        "unit": record.unit,
        "config_hash": record.config_hash,
        "config_changed": None if before is None else before.config_hash != record.config_hash,
        "secrets_changed": secrets_changed,
        "argv": list(record.argv),
        "log": record.log,
        "files": [{"path": path, "changed": changed} for path, changed in files],
        "from_launch": record.from_launch,
        "record": to_json(record),
    }


def planned_files(request: LaunchRequest, plan: LaunchPlan, unit_dir: str) -> list[tuple[str, bool]]:
    files = [(os.path.join(plan.folder, name), True) for name in (*plan.files, *plan.kept, "record.json")]
    if plan.unit_text is not None:
        path = os.path.join(unit_dir, str(request.unit))
        files.append((path, act.read_unit_file(path) != plan.unit_text))
    return files


def without_launch_id(result: dict[str, t.Any], launch_id: str) -> dict[str, t.Any]:
    """What check mode returns: there is no such launch, so no id is to be taken for one."""
    shown = json.loads(json.dumps(result).replace(launch_id, "<launch>"))
    return {**shown, "launch_id": None}


def with_fingerprint(request: LaunchRequest, plan: LaunchPlan, nvml_deadline_s: float) -> LaunchPlan:
    """The plan, its record with what the host has for it."""
    flags = {flag_tools.canonical(name): value for name, value in plan.record.flags.items()}
    model, revision = flags.get("model-path"), flags.get("revision")
    found = read_fingerprint(
        model=None if model is None else str(model),
        revision=None if revision is None else str(revision),
        environment=plan.environment,
        version=request.version,
        uses_gpu=plan.record.device != "cpu",
        unit=None if plan.unit_text is None else print_of(plan.unit_text),
        nvml_deadline_s=nvml_deadline_s,
    )
    return dataclasses.replace(plan, record=dataclasses.replace(plan.record, fingerprint=found))


def check_preconditions(wanted: Wanted, may_run: bool) -> t.Optional[Record]:
    """What would make the start fail. Of a kept launch the error says that it is one."""
    request, record = wanted.request, wanted.plan.record
    try:
        return act.check_preconditions(request, fetch_processes(), request.unit_dir, may_run=may_run)
    except CleanSlateError as error:
        if record.from_launch is None:
            raise
        raise CleanSlateError(history.again_error(record.name, record.from_launch, error)) from error


def main() -> t.NoReturn:
    others = sorted(set(argument_spec()) - {*BESIDE_FROM_LAUNCH, "from_launch"})
    module = AnsibleModule(
        argument_spec=argument_spec(),
        mutually_exclusive=[("from_launch", name) for name in others],
        required_one_of=[("from_launch", "python"), ("from_launch", "flags")],
        supports_check_mode=True,
    )
    params = module.params
    with Told(module):
        try:
            wanted = wanted_from(params)
            request, plan = wanted.request, wanted.plan
            before = check_preconditions(wanted, may_run=module.check_mode)
            if wanted.note is not None:
                module.warn(wanted.note)
            result: dict[str, t.Any] = {"diff": diff(before, request, plan, request.unit_dir)} if module._diff else {}
            changed = secrets_differ(before, plan, request.state_dir)
            if module.check_mode:
                files = planned_files(request, plan, request.unit_dir)
                would = result_of(plan.record, before, files, changed)
                module.exit_json(changed=True, **result, **without_launch_id(would, plan.record.launch_id))
            plan = with_fingerprint(request, plan, params["nvml_deadline_s"])
            documents = {what: data for what, data in (params["documents"] or {}).items() if data is not None}
            with lease.keep(request.state_dir, request.name, params["run_id"], "server_launch", LEASE_S):
                launched = act.start(request, plan, request.unit_dir, params["keep_launches"], documents)
        except CleanSlateError as error:
            module.fail_json(msg=str(error), lease_lost="no longer ours" in str(error))
        for problem in launched.problems:
            module.warn(problem)
        module.exit_json(changed=True, **result, **result_of(launched.record, before, launched.files, changed))


if __name__ == "__main__":
    main()
