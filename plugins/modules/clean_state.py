#!/usr/bin/python
# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: clean_state
version_added: 0.1.0
short_description: Prove that a host is clean, or say why it is not
description:
  - Judges whether the chosen GPUs and the host are ready for a launch. The verdict is V(clean), V(dirty) or
    V(unknown), and the module fails unless it is V(clean). What could not be seen is unknown, never clean.
  - It changes nothing and signals nobody. It is a step of its own, since what acted never certifies its own work.
  - The memory of each GPU must be in bounds in the last O(samples) samples; a rebound is V(dirty).
author:
  - Clean Slate contributors (@cleanslate)
extends_documentation_fragment:
  - cleanslate.sglang.attributes
  - cleanslate.sglang.attributes.info_module
  - cleanslate.sglang.attributes.actiongroup_sglang
  - cleanslate.sglang.options.devices
  - cleanslate.sglang.options.container
options:
  max_used_mib:
    description:
      - How much memory of a GPU may be in use, in MiB, beyond its baseline. The driver's reserved part does not count.
    type: int
    default: 64
  baselines:
    description:
      - Memory in MiB that belongs to a GPU's ordinary day, such as a desktop's, by index, UUID or bus id. It is never
        guessed.
    type: dict
    default: {}
  samples:
    description:
      - How many samples in a row must be in bounds.
    type: int
    default: 3
  interval_s:
    description:
      - Seconds between two samples.
    type: float
    default: 1
  settle_s:
    description:
      - How long to wait, in seconds, for samples in bounds, since memory outlives its process. V(0) judges the first
        ones.
    type: float
    default: 0
  required_available_mib:
    description:
      - How much host memory the next launch needs, in MiB. The least of MemAvailable and the cgroup's headroom counts.
    type: int
    default: 0
  ports:
    description:
      - TCP ports that must be free. A port in TIME_WAIT is free, one that somebody listens on is not.
    type: list
    elements: int
    default: []
  shm_required_mib:
    description:
      - How much room O(shm_dir) must have, in MiB. A full one makes the next start die of SIGBUS.
    type: int
    default: 64
  shm_dir:
    description:
      - Where shared memory lives.
    type: path
    default: /dev/shm
  user:
    description:
      - The server's user. Leftovers in O(shm_dir) without a creator's pid in their name are only called so if they are
        this user's.
    type: str
  allow_simulated:
    description:
      - Whether a simulated driver (a test double) may count as clean. For demonstrations and tests.
    type: bool
    default: false
  cuda_probe:
    description:
      - Whether to make a CUDA context and take 64 MiB on each GPU, since the driver can answer while CUDA fails.
    type: bool
    default: false
  cuda_deadline_s:
    description:
      - How long the CUDA probe may take, in seconds.
    type: float
    default: 60
  vantage:
    description:
      - From where this looks. V(auto) finds out by the PID namespace.
    type: str
    choices: [auto, container, host]
    default: auto
  xid_window_s:
    description:
      - How far back, in seconds, the driver's reports in the kernel log (Xid) count against a GPU. V(0) does not look.
      - The log is only looked at from the host, where it tells of all GPUs.
    type: int
    default: 600
    version_added: 0.2.0
  gpu_resets:
    description:
      - What M(cleanslate.sglang.gpu_evict) returned as RV(cleanslate.sglang.gpu_evict#module:gpu_resets). Reports of
        the driver from before a GPU's reset do not count.
    type: dict
    default: {}
    version_added: 0.2.0
  kmsg:
    description:
      - Where the kernel log is read. Other values serve recorded logs.
    type: path
    default: /dev/kmsg
    version_added: 0.2.0
  sys_root:
    description:
      - Where C(sys) is found. Other values serve recorded trees.
    type: path
    default: /sys
notes:
  - Run it as root. What can't be looked into makes the verdict V(unknown).
seealso:
  - module: cleanslate.sglang.gpu_evict
  - module: cleanslate.sglang.gpu_info
  - module: cleanslate.sglang.memory_info
"""

EXAMPLES = r"""
- name: The same for container 129, judged from its Proxmox node
  cleanslate.sglang.clean_state:
    container: "129"
    devices: ["GPU-5a3f0e2c-0000-0000-0000-000000000001"]
    ports: [30000]
    user: sglang
  delegate_to: pve1

- name: Prove that two GPUs are free and that the next launch finds its memory and port
  cleanslate.sglang.clean_state:
    devices: ["0", "1"]
    expected_gpus: 8
    required_available_mib: 65536
    ports: [30000]
    settle_s: 30

- name: A host with a desktop on its first GPU
  cleanslate.sglang.clean_state:
    baselines:
      "0": 150
"""

RETURN = r"""
verdict:
  description: V(clean), V(dirty) or V(unknown).
  returned: always
  type: str
  sample: dirty
summary:
  description: The verdict and its first reason in one sentence.
  returned: always
  type: str
  sample: "dirty: GPU 0 (00000000:3B:00.0) has 76109 MiB in use, limit 64 MiB: held elsewhere, nobody here holds it;
    look from the host"
reasons:
  description: Everything that keeps the host from being clean, dirty before unknown, as C(code), C(message),
    C(subject), C(means).
  returned: always
  type: list
  elements: dict
  sample:
    - code: held_elsewhere
      message: "GPU 0 (00000000:3B:00.0) has 76109 MiB in use, limit 64 MiB: held elsewhere, nobody here holds it; look
        from the host"
      subject: GPU 0 (00000000:3B:00.0)
      severity: required
      means: dirty
warnings_found:
  description: What does not fail the verdict but should be known, in the same form; C(severity) is V(warning) or
    V(advisory).
  returned: always
  type: list
  elements: dict
  sample: []
vantage:
  description: From where this looked, V(host) or V(container).
  returned: always
  type: str
  sample: container
container:
  description: The container as its node sees it, see M(cleanslate.sglang.gpu_info).
  returned: always, V(null) without O(container)
  type: dict
  sample: {vmid: "129", state: running, members: 31, init_pid: 4242, unprivileged: true, gpu_nodes: [0, 1], stuck: []}
simulated:
  description: Whether the driver was a test double.
  returned: always
  type: bool
  sample: false
samples_taken:
  description: The samples that were judged, each with C(at_s), C(used_mib) by GPU and C(holder_pids) by GPU.
  returned: always
  type: list
  elements: dict
  sample:
    - at_s: 0.0
      used_mib: {"0": 76109}
      holder_pids: {"0": []}
facts_seen:
  description: The raw figures of the driver, the GPUs, host memory, its cgroup, shared memory and ports.
  returned: always
  type: dict
  sample: {}
seconds:
  description: How long the module took.
  returned: always
  type: float
  sample: 2.1
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.sglang.plugins.module_utils.arguments import (
    CONTAINER,
    DEVICES,
    baselines_of,
    look_options,
    resets_of,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.assess import Wanted, assess
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.clean import Limits
from ansible_collections.cleanslate.sglang.plugins.module_utils.defects import Told
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError

ARGUMENTS: dict[str, t.Any] = {
    **DEVICES,
    **CONTAINER,
    "max_used_mib": {"type": "int", "default": 64},
    "baselines": {"type": "dict", "default": {}},
    "samples": {"type": "int", "default": 3},
    "interval_s": {"type": "float", "default": 1},
    "settle_s": {"type": "float", "default": 0},
    "required_available_mib": {"type": "int", "default": 0},
    "ports": {"type": "list", "elements": "int", "default": []},
    "shm_required_mib": {"type": "int", "default": 64},
    "shm_dir": {"type": "path", "default": "/dev/shm"},
    "user": {"type": "str"},
    "allow_simulated": {"type": "bool", "default": False},
    "cuda_probe": {"type": "bool", "default": False},
    "cuda_deadline_s": {"type": "float", "default": 60},
    "vantage": {"type": "str", "choices": ["auto", "container", "host"], "default": "auto"},
    "xid_window_s": {"type": "int", "default": 600},
    "gpu_resets": {"type": "dict", "default": {}},
    "kmsg": {"type": "path", "default": "/dev/kmsg"},
    "sys_root": {"type": "path", "default": "/sys"},
}


def wanted_from(params: t.Mapping[str, t.Any]) -> Wanted:
    """The module's parameters as the core takes them."""
    limits = Limits(
        max_used_mib=params["max_used_mib"],
        baselines=baselines_of(params["baselines"]),
        required_available_mib=params["required_available_mib"],
        ports=tuple(params["ports"]),
        shm_required_mib=params["shm_required_mib"],
        expected_gpus=params["expected_gpus"],
        allow_simulated=params["allow_simulated"],
        xid_window_s=params["xid_window_s"],
        gpu_resets=resets_of(params["gpu_resets"]),
    )
    return Wanted(
        look=look_options(params, baselines=limits.baselines),
        limits=limits,
        samples=params["samples"],
        interval_s=params["interval_s"],
        settle_s=params["settle_s"],
        shm_dir=params["shm_dir"],
        user=params["user"],
        cuda_deadline_s=params["cuda_deadline_s"] if params["cuda_probe"] else None,
        vantage=None if params["vantage"] == "auto" else params["vantage"],
        kmsg=params["kmsg"],
        pve_dir=params["pve_dir"],
    )


def main() -> t.NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    with Told(module, verdict="unknown"):
        try:
            result = assess(wanted_from(module.params))
        except CleanSlateError as exc:
            module.fail_json(msg=str(exc), verdict="unknown")
        if result["verdict"] != "clean":
            module.fail_json(msg=result["summary"], **result)
        module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
