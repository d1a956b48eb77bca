#!/usr/bin/python
# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: server_plan
version_added: 0.2.0
short_description: Judge a wanted SGLang configuration on the host where it will run, before anything is touched
description:
  - Reads the flags of the installed SGLang from its sources, the model's configuration, GPUs and host memory, and says
    whether a launch would work, with the arithmetic. Nothing of SGLang is imported, and nothing is changed.
  - GPU and host memory are those that will be free once the server's own present processes are gone.
  - What can't be known is named and never guessed.
author:
  - Clean Slate contributors (@cleanslate)
extends_documentation_fragment:
  - cleanslate.sglang.attributes
  - cleanslate.sglang.attributes.info_module
  - cleanslate.sglang.attributes.actiongroup_sglang
  - cleanslate.sglang.options.devices
  - cleanslate.sglang.options.server
options:
  python:
    description:
      - The Python interpreter that has SGLang.
    type: path
    required: true
  flags:
    description:
      - SGLang's options as a mapping, by their names with dashes or underscores.
    type: dict
    required: true
  device:
    description:
      - What the server computes on. With V(cpu) no GPU is planned with.
    type: str
    choices: [gpu, cpu]
    default: gpu
  environment:
    description:
      - Environment variables of the server.
    type: dict
    default: {}
  scope:
    description:
      - What an eviction before the launch may evict; its memory counts as free.
    type: str
    choices: [server, sglang, gpu]
    default: server
  protect:
    description:
      - Who is left alone by that eviction, see M(cleanslate.sglang.gpu_evict).
    type: list
    elements: str
    default: []
  baselines:
    description:
      - Memory in MiB that belongs to a GPU's ordinary day, by index, UUID or bus id.
    type: dict
    default: {}
  rules:
    description:
      - The guardrails, as the file C(guardrails.yml) of the role P(cleanslate.sglang.plan#role) has them.
    type: list
    elements: dict
    default: []
  waivers:
    description:
      - Guardrails that are accepted all the same, each with a written reason, by the rule's id.
    type: dict
    default: {}
  server:
    description:
      - What guardrails may ask about the server besides its flags, C(host), C(restart), C(has_api_key) and
        C(has_admin_api_key).
    type: dict
    default: {}
  node_available_mib:
    description:
      - MemAvailable of the Proxmox node below this container, in MiB.
    type: int
  node_headroom_mib:
    description:
      - What the container's memory limit leaves as its node sees it, in MiB.
    type: int
  min_gpu_headroom_mib:
    description:
      - How much GPU memory must be left once the server serves, in MiB.
    type: int
    default: 2048
  shm_dir:
    description:
      - Where shared memory lives.
    type: path
    default: /dev/shm
notes:
  - Run it as root. What can't be read is reported as unknown.
seealso:
  - module: cleanslate.sglang.server_launch
  - module: cleanslate.sglang.gpu_evict
"""

EXAMPLES = r"""
- name: Would this work?
  cleanslate.sglang.server_plan:
    name: main
    port: 30000
    python: /opt/sglang/bin/python
    devices: ["0", "1", "2", "3", "4", "5", "6", "7"]
    flags:
      model_path: /models/Kimi-K2.5-INT4
      tp_size: 8
      mem_fraction_static: 0.88
      enable_hierarchical_cache: true
      hicache_size: 48
      reasoning_parser: kimi_k2
  register: planned
  failed_when: planned.verdict == 'denied'
"""

RETURN = r"""
verdict:
  description: V(allowed), V(denied) or V(unknown). Warnings do not change it.
  returned: success
  type: str
  sample: denied
summary:
  description: The verdict and its first reason in one sentence.
  returned: success
  type: str
  sample: "denied: HiCache wants 2,400.0 GB of host memory ... [host_memory_short]"
findings:
  description: Everything that was found, the worst first, as C(id), C(severity) (V(deny), V(unknown), V(warn) or
    V(note)), C(subject), C(message), C(remedy), C(source), C(waivable) and C(waived), the reason of whoever accepted
    it.
  returned: success
  type: list
  elements: dict
  sample: []
budget:
  description: The figures of C(gpu) (the rank with the least) and C(host), each with C(name), C(label), C(unit),
    C(value), C(formula), C(inputs), C(source), and the C(reason) of a value that is V(null).
  returned: success
  type: dict
  sample: {gpu: [], host: []}
topology:
  description: Ranks, GPUs and ports.
  returned: success
  type: dict
  sample: {tp: 8, pp: 1, dp: 1, ranks_here: 8}
model:
  description: What the model's directory tells.
  returned: success
  type: dict
  sample: {path: /models/Kimi-K2.5-INT4, source: local, is_mla: true}
host:
  description: Memory of the host once the server's present processes are gone, in MiB.
  returned: success
  type: dict
  sample: {mem_available_mib: 454656, cgroup_headroom_mib: null, shm_free_mib: 230000}
learned:
  description: What the log of the last launch on this host taught, V(null) without one.
  returned: success
  type: dict
  sample: null
sglang_version:
  description: The version that is installed.
  returned: success
  type: str
  sample: 0.5.15
simulated:
  description: Whether the GPUs are those of a test double.
  returned: success
  type: bool
  sample: false
seconds:
  description: How long the module took.
  returned: success
  type: float
  sample: 0.4
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.sglang.plugins.module_utils.arguments import (
    DEVICES,
    SERVER,
    baselines_of,
    look_options,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.defects import Told
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.planning import PlanRequest, plan, to_result

ARGUMENTS: dict[str, t.Any] = {
    **DEVICES,
    **SERVER,
    "python": {"type": "path", "required": True},
    "flags": {"type": "dict", "required": True},
    "device": {"type": "str", "choices": ["gpu", "cpu"], "default": "gpu"},
    "environment": {"type": "dict", "default": {}},
    "scope": {"type": "str", "choices": ["server", "sglang", "gpu"], "default": "server"},
    "protect": {"type": "list", "elements": "str", "default": []},
    "baselines": {"type": "dict", "default": {}},
    "rules": {"type": "list", "elements": "dict", "default": []},
    "waivers": {"type": "dict", "default": {}},
    "server": {"type": "dict", "default": {}},
    "node_available_mib": {"type": "int"},
    "node_headroom_mib": {"type": "int"},
    "min_gpu_headroom_mib": {"type": "int", "default": 2048},
    "shm_dir": {"type": "path", "default": "/dev/shm"},
}


def request_from(params: t.Mapping[str, t.Any]) -> PlanRequest:
    """The module's parameters as the core takes them."""
    baselines = baselines_of(params["baselines"])
    given = params if params["device"] == "gpu" else {**params, "expected_gpus": 0, "devices": []}
    return PlanRequest(
        look=look_options(given, params["protect"], baselines),
        flags=params["flags"],
        python=params["python"],
        name=params["name"],
        port=params["port"],
        unit=params["unit"],
        device=params["device"],
        environment={str(name): str(value) for name, value in params["environment"].items()},
        server=params["server"],
        rules=params["rules"],
        waivers={str(name): str(reason) for name, reason in params["waivers"].items()},
        state_dir=params["state_dir"],
        scope=params["scope"],
        baselines=baselines,
        node_available_mib=params["node_available_mib"],
        node_headroom_mib=params["node_headroom_mib"],
        min_gpu_headroom_mib=params["min_gpu_headroom_mib"],
        shm_dir=params["shm_dir"],
    )


def main() -> t.NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    with Told(module):
        try:
            result = to_result(plan(request_from(module.params)))
        except CleanSlateError as exc:
            module.fail_json(msg=str(exc))
        module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
