#!/usr/bin/python
# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: server_drift
version_added: 0.2.0
short_description: Compare what runs on a host with what the inventory says
description:
  - Compares each server's settings with its launch's files, its leader's command line and environment and what SGLang
    itself resolved, and the host with what it should be. Nothing is changed, and drift is no failure but a result.
  - A server is asked C(/health) once, and C(/server_info) only after its 200, when its port is proved to be its own and
    all of its processes run. Nothing is generated.
  - Each difference is one row, however many places show it. What can't be seen is a row that is V(unknown).
  - Run it as root. Without the right to look into the servers' processes much is V(unknown).
author:
  - Clean Slate contributors (@cleanslate)
extends_documentation_fragment:
  - cleanslate.sglang.attributes
  - cleanslate.sglang.attributes.info_module
  - cleanslate.sglang.attributes.actiongroup_sglang
options:
  servers:
    description:
      - The inventory's servers with all of their settings but the secrets, which are refused here, since a module's
        arguments are logged on the host.
      - C(name) is needed. Of the others C(flags), C(host), C(port), C(device), C(gpus), C(python), C(user),
        C(environment), the settings of the unit and C(waivers) are compared, and C(ready_deadline_s),
        C(max_used_mib) and C(baselines_mib) are used. Other keys are passed over.
      - An entry that makes no sense is V(unknown), and hides no other.
    type: list
    elements: dict
    default: []
  secrets:
    description:
      - The servers' secrets, by the server's name, as mappings with C(api_key), C(admin_api_key),
        C(ssl_keyfile_password) and C(secret_environment). Their values are neither compared nor returned.
      - C(settings_json) has the settings that hold a secret within, such as a C(HF_TOKEN) in C(environment), as one
        text in JSON. They are compared as if they stood in O(servers), where they are refused.
    type: dict
    default: {}
  state_dir:
    description: Where launches are recorded on the host.
    type: path
    default: /var/lib/cleanslate
  expected_gpus:
    description: How many GPUs the host has. With V(0) no GPU is asked for.
    type: int
  nvml_deadline_s:
    description: How long, in seconds, one look at the GPUs may take.
    type: float
    default: 10
  device_major:
    description: The major device number of the GPU nodes. Other values serve tests.
    type: int
    default: 195
  max_used_mib:
    description:
      - How much of a GPU's memory, in MiB, may be in use without a holder that is seen. The servers' own
        C(max_used_mib) and C(baselines_mib) count too.
    type: int
    default: 64
  baselines:
    description: What other programs are known to use on a GPU, in MiB, by index, UUID or bus id. It is added.
    type: dict
    default: {}
  probe:
    description:
      - Whether servers are asked C(/health), and after its 200 C(/server_info). Without it a scheduler that is busy for
        ever is not found, and what SGLang itself resolved is not compared.
    type: bool
    default: true
  health_deadline_s:
    description: How long C(/health) may take, in seconds. SGLang takes 20 to say 503.
    type: float
    default: 25
  info_deadline_s:
    description: How long C(/server_info) may take, in seconds.
    type: float
    default: 10
  accepted:
    description: Drift that is accepted, each with a reason and an end. What is unknown is never accepted.
    type: list
    elements: dict
    default: []
    suboptions:
      server:
        description: A server's name. V(*) stands for all, and for the host itself.
        type: str
        default: '*'
      item:
        description: The item, or a pattern such as V(env:NCCL_*).
        type: str
        required: true
      reason:
        description: Why.
        type: str
        required: true
      until:
        description: The last day (UTC) on which it is accepted, such as V(2026-01-31).
        type: str
        required: true
  today:
    description: The day to judge acceptances by. Serves tests.
    type: str
"""

EXAMPLES = r"""
- name: Does the host run what was chosen?
  cleanslate.sglang.server_drift:
    servers: "{{ sglang_servers }}"
    expected_gpus: 8
    accepted:
      - server: chat
        item: flag:mem-fraction-static
        reason: tried until the new model comes, ticket 12
        until: "2026-01-31"
  register: drift
"""

RETURN = r"""
verdict:
  description:
    - V(in_sync), V(drifted), or V(unknown) where something that is needed could not be seen.
    - Drift outranks what is unknown; rows of the severity V(note) change no verdict.
  returned: success
  type: str
  sample: in_sync
summary:
  description: The verdict with how many rows drifted, are unknown and are accepted.
  returned: success
  type: str
  sample: "drifted: 1 drifted, 0 unknown, 0 accepted"
servers:
  description: The servers, in the order of O(servers).
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: The server.
      type: str
      sample: chat
    verdict:
      description: V(in_sync), V(drifted) or V(unknown), of this server alone.
      type: str
      sample: drifted
    running:
      description: Whether its leader runs. V(null) if that is not known.
      type: bool
      sample: true
    pid:
      description: The leader's process id. V(null) if it does not run.
      type: int
      sample: 4711
    started_at:
      description: When the leader was started, in UTC.
      type: str
      sample: "2026-01-31T23:59:59+00:00"
    uptime_s:
      description: For how many seconds the leader has run.
      type: float
      sample: 3600.5
    launch_id:
      description: The launch that the host's record names. V(null) if there is none.
      type: str
      sample: 20260131T235959Z-1a2b
    config_hash:
      description: The configuration of that launch, as M(cleanslate.sglang.server_launch) returned it.
      type: str
      sample: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    health:
      description:
        - What C(/health) said, V(ok), V(unhealthy) (another status than 200), V(timeout), V(refused) or V(broken).
        - V(null) if it was not asked.
      type: str
      sample: ok
    engine_keys_compared:
      description: How many of the wanted flags were found in C(/server_info).
      type: int
      sample: 12
    drift:
      description: What differs, or could not be seen, each item once.
      type: list
      elements: dict
      contains:
        server:
          description: The server. V(null) for the host itself.
          type: str
          sample: chat
        item:
          description: What differs, such as V(flag:tp-size), V(env:NCCL_DEBUG), V(not_running) or V(sglang_version).
          type: str
          sample: flag:tp-size
        wanted:
          description: What was chosen.
          type: raw
          sample: 4
        found:
          description: What is there. For what is unknown, why.
          type: raw
          sample: 2
        where:
          description: The place nearest to what answers that shows it, V(host), V(file), V(process) or V(engine).
          type: str
          sample: process
        also:
          description: The other places that show it.
          type: list
          elements: str
          sample: [file]
        severity:
          description: V(critical), V(warning) or V(note).
          type: str
          sample: critical
        remedy:
          description: What to do about it.
          type: str
          sample: "relaunch it: playbooks/relaunch.yml -e server=chat"
        state:
          description: V(drift), V(unknown), V(accepted), or V(expired_acceptance).
          type: str
          sample: drift
        reason:
          description: The reason of the acceptance. V(null) if there is none.
          type: str
          sample: null
    accepted:
      description: What differs and is accepted, in the same form.
      type: list
      elements: dict
      sample: []
host:
  description: The host itself.
  returned: success
  type: dict
  contains:
    verdict:
      description: V(in_sync), V(drifted) or V(unknown), of the host without its servers.
      type: str
      sample: in_sync
    drift:
      description: What differs or could not be seen, in the form of a server's rows.
      type: list
      elements: dict
      sample: []
    accepted:
      description: What differs and is accepted.
      type: list
      elements: dict
      sample: []
    gpus:
      description: The GPUs with their memory and who holds it.
      type: list
      elements: dict
      sample:
        - index: 0
          uuid: GPU-9ea5bb8b-4eb4-2d8a-2d6e-0f0b8a9a3d10
          used_mib: 20000
          total_mib: 81920
    driver_version:
      description: The driver's version. V(null) if the driver does not answer.
      type: str
      sample: 580.95.05
    simulated:
      description: Whether the driver is a test double.
      type: bool
      sample: false
    memory:
      description: The host's memory.
      type: dict
      sample:
        total_mib: 1031000
        available_mib: 980000
seconds:
  description: How long the look took.
  returned: success
  type: float
  sample: 1.4
"""

import datetime
import json
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.sglang.plugins.module_utils.arguments import DEVICES, baselines_of, look_options
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.drift import parse_acceptance
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.drift_host import MAX_USED_MIB
from ansible_collections.cleanslate.sglang.plugins.module_utils.defects import Told
from ansible_collections.cleanslate.sglang.plugins.module_utils.drifting import DriftOptions, check
from ansible_collections.cleanslate.sglang.plugins.module_utils.durations import check_seconds
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.apart import apart, joined, names_of

Params = t.Mapping[str, t.Any]
SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password", "secret_environment")
HIDDEN = "settings_json"


def argument_spec() -> dict[str, t.Any]:
    return {
        "servers": {"type": "list", "elements": "dict", "default": [], "no_log": False},
        "secrets": {"type": "dict", "default": {}, "no_log": True},
        "state_dir": {"type": "path", "default": "/var/lib/cleanslate"},
        **{name: DEVICES[name] for name in ("expected_gpus", "nvml_deadline_s", "device_major")},
        "max_used_mib": {"type": "int", "default": MAX_USED_MIB},
        "baselines": {"type": "dict", "default": {}},
        "probe": {"type": "bool", "default": True},
        "health_deadline_s": {"type": "float", "default": 25},
        "info_deadline_s": {"type": "float", "default": 10},
        "accepted": {
            "type": "list",
            "elements": "dict",
            "default": [],
            "options": {
                "server": {"type": "str", "default": "*"},
                "item": {"type": "str", "required": True},
                "reason": {"type": "str", "required": True},
                "until": {"type": "str", "required": True},
            },
        },
        "today": {"type": "str"},
    }


def servers_from(params: Params) -> list[dict[str, t.Any]]:
    """The servers with their secrets. Raises CleanSlateError for what is no server."""
    names: list[str] = []
    for number, raw in enumerate(params["servers"]):
        name = raw.get("name")
        if not isinstance(name, str) or not name:
            raise CleanSlateError(f"servers[{number}] has no name; give it the name that it has in the inventory")
        if name in names:
            raise CleanSlateError(f"servers[{number}]: the name {name!r} is taken by servers[{names.index(name)}]")
        names.append(name)
        given = [key for key in SECRETS if raw.get(key)]
        if given:
            raise CleanSlateError(
                f"servers[{number}] ({name}) has {', '.join(given)}: a module's arguments are logged on the host; "
                f"give it by the option secrets: {{{name}: ...}}"
            )
    secrets = params["secrets"]
    for name, each in secrets.items():
        if name not in names:
            raise CleanSlateError(f"secrets: there is no server {name!r} in servers")
        if not isinstance(each, t.Mapping) or set(each) - {*SECRETS, HIDDEN}:
            raise CleanSlateError(f"secrets: {name} must be a mapping with keys out of {', '.join(SECRETS)}, {HIDDEN}")
    return [_with_secrets(number, raw, secrets.get(raw["name"], {})) for number, raw in enumerate(params["servers"])]


def _with_secrets(number: int, raw: Params, secrets: Params) -> dict[str, t.Any]:
    """The server as the inventory has it. What holds a secret must not have come among the servers."""
    given = {key: value for key, value in secrets.items() if key != HIDDEN}
    unseen = names_of(apart(raw, _values(given))[1])
    if unseen:
        raise CleanSlateError(
            f"servers[{number}] ({raw['name']}) has a secret within {'; '.join(unseen)}: a module's arguments are "
            f"logged on the host; give it by the option secrets: {{{raw['name']}: {{{HIDDEN}: ...}}}}, or, of the "
            "environment, in secret_environment"
        )
    return {**joined(raw, _hidden(raw["name"], secrets.get(HIDDEN))), **given}


def _hidden(name: str, text: t.Any) -> Params:
    if text is None:
        return {}
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, t.Mapping):
        raise CleanSlateError(f"secrets: {name}: {HIDDEN} is no mapping in JSON")
    return found


def _values(given: Params) -> list[str]:
    rows = (each.values() if isinstance(each, t.Mapping) else (each,) for each in given.values())
    return [str(value) for row in rows for value in row if value]


def options_from(params: Params) -> DriftOptions:
    """Raises CleanSlateError for what makes no sense."""
    check_seconds(params, "health_deadline_s", "info_deadline_s")
    if params["max_used_mib"] < 0:
        raise CleanSlateError(f"max_used_mib is {params['max_used_mib']}; it must be 0 or more")
    try:
        accepted = tuple(parse_acceptance(raw, number) for number, raw in enumerate(params["accepted"]))
    except ValueError as error:
        raise CleanSlateError(str(error)) from error
    try:
        today = None if params["today"] is None else datetime.date.fromisoformat(params["today"])
    except ValueError as error:
        raise CleanSlateError(f"today is {params['today']!r}; write a day like 2026-01-31") from error
    return DriftOptions(
        state_dir=params["state_dir"],
        look=look_options({**params, "devices": [], "proc_root": "/proc"}),
        accepted=accepted,
        probe=params["probe"],
        health_deadline_s=params["health_deadline_s"],
        info_deadline_s=params["info_deadline_s"],
        max_used_mib=params["max_used_mib"],
        baselines=baselines_of(params["baselines"]),
        today=today,
    )


def main() -> t.NoReturn:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    with Told(module, verdict="unknown"):
        try:
            servers = servers_from(module.params)
            result = check(options_from(module.params), servers)
        except CleanSlateError as error:
            module.fail_json(msg=str(error), verdict="unknown")
        module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
