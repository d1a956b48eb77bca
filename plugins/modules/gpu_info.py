#!/usr/bin/python
# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_info
version_added: 0.1.0
short_description: Show the GPUs of a host, and who holds them on what evidence
description:
  - Shows each GPU's memory by the call that told it, the driver's process list, the processes that really hold the
    GPU, those that merely have it open, and the GPU's health.
  - A C(holder) has a readable mapping of the GPU's device node, or is listed by the driver, alive, visible and has the
    node open. A C(visitor) has less, as every CUDA process has of each GPU that it sees. A C(suspect) is one where the
    evidence disagrees.
  - All queries run in a child process with a deadline, so that a driver that hangs gives an answer here too, namely
    that it hangs.
  - A figure that could not be read is V(null), never zero, and RV(gpus[].errors) or RV(problems) says why.
author:
  - Clean Slate contributors (@cleanslate)
extends_documentation_fragment:
  - cleanslate.sglang.attributes
  - cleanslate.sglang.attributes.info_module
  - cleanslate.sglang.attributes.actiongroup_sglang
  - cleanslate.sglang.options.devices
  - cleanslate.sglang.options.container
notes:
  - Run it as root. Other users can't see what foreign processes have open, and C(complete) in RV(scan) is then
    V(false).
  - With C(nvidia-ml-py) in the module's own interpreter NVML is asked directly (some 10 ms), else C(nvidia-smi) is.
seealso:
  - module: cleanslate.sglang.clean_state
  - module: cleanslate.sglang.gpu_evict
  - module: cleanslate.sglang.memory_info
"""

EXAMPLES = r"""
- name: Who holds the GPUs of container 129, seen from its node?
  cleanslate.sglang.gpu_info:
    container: "129"
  delegate_to: pve1

- name: Look at all GPUs
  cleanslate.sglang.gpu_info:
  register: gpus

- name: Look at two GPUs of a host that must show eight
  cleanslate.sglang.gpu_info:
    devices: ["0", "GPU-6f1fbb1f-6f4a-4d51-9d39-3f0fb1f1f4a5"]
    expected_gpus: 8
"""

RETURN = r"""
vantage:
  description: V(host), or V(container) where holders in other PID namespaces can't be seen.
  returned: success
  type: str
  sample: container
source:
  description: Who told it, V(nvml), V(nvidia-smi) or V(none).
  returned: success
  type: str
  sample: nvml
simulated:
  description: Whether the library is no driver's but a test double.
  returned: success
  type: bool
  sample: false
driver_version:
  description: The driver's version as the library tells it.
  returned: success
  type: str
  sample: 580.159.04
kernel_module_version:
  description: The version of the loaded kernel module, V(null) where C(/proc/driver/nvidia) is not visible.
  returned: success
  type: str
  sample: 580.159.04
nvml_version:
  description: The version of NVML.
  returned: success
  type: str
  sample: 13.580.159.04
cuda_driver_version:
  description: The highest CUDA version that the driver serves.
  returned: success
  type: str
  sample: "13.0"
library:
  description: The library file that was really loaded.
  returned: success
  type: str
  sample: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04
problems:
  description: Queries of the driver as a whole that failed, as C(call), C(code) and C(message).
  returned: success
  type: list
  elements: dict
  sample: []
gpus:
  description: The chosen GPUs. V(null) when not even their number could be had.
  returned: success
  type: list
  elements: dict
  contains:
    index:
      description: The driver's index. It can change with a reboot; the UUID does not.
      type: int
    uuid:
      description: The GPU's UUID.
      type: str
    bus_id:
      description: The PCI bus id.
      type: str
    minor:
      description: The number in C(/dev/nvidiaN). It need not equal the index.
      type: int
    name:
      description: The product's name.
      type: str
    compute_capability:
      description: The CUDA compute capability.
      type: str
    memory:
      description: C(total_mib), C(used_mib), C(reserved_mib), C(free_mib), the C(api) that told it and whether it is
        C(unified).
      type: dict
    processes:
      description: The driver's own list, V(null) when it could not be had. In a container it may be empty or name
        strangers.
      type: list
      elements: dict
    holders:
      description: Processes that hold the GPU, with C(evidence), start time, user, unit and whether they are
        C(protected).
      type: list
      elements: dict
    visitors:
      description: Processes that have it open without a context.
      type: list
      elements: dict
    suspects:
      description: Processes where the evidence disagrees.
      type: list
      elements: dict
    stale_pids:
      description: Pids that the driver lists and that do not live any more.
      type: list
      elements: int
    health:
      description: Pending retirement, row remapping, recovery action, throttle reasons, utilisation, persistence mode.
      type: dict
    mig_enabled:
      description: Whether the GPU is cut into MIG instances.
      type: bool
    mig:
      description: The MIG instances, each with its own memory, processes and errors.
      type: list
      elements: dict
    errors:
      description: Queries of this GPU that failed, as C(call), C(code) and C(message).
      type: list
      elements: dict
  sample:
    - index: 0
      uuid: GPU-6f1fbb1f-6f4a-4d51-9d39-3f0fb1f1f4a5
      bus_id: "00000000:3B:00.0"
      minor: 0
      name: NVIDIA H200
      memory: {total_mib: 143771, used_mib: 0, reserved_mib: 615, free_mib: 143156, api: v2, unified: false}
      holders: []
container:
  description: The container as the node sees it, with C(vmid), C(state) (V(running), V(broken) without an init,
    V(stopped) or V(unknown)), C(members), C(init_pid), C(unprivileged), C(gpu_nodes), and C(stuck) processes that
    SIGKILL does not end; C(node_available_mib) is the node's own MemAvailable, C(headroom_mib) what the container's
    memory limit leaves (V(null) without one).
  returned: success, V(null) without O(container)
  type: dict
  sample: {vmid: "129", state: running, members: 31, init_pid: 4242, unprivileged: true, gpu_nodes: [0, 1], stuck: []}
scan:
  description: How the processes were looked at; C(complete) is V(false) where some could not be looked into.
  returned: success
  type: dict
  sample: {complete: true, processes: 311, unreadable_pids: [], seconds: 0.12}
seconds:
  description: How long the driver took to answer.
  returned: success
  type: float
  sample: 0.02
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.sglang.plugins.module_utils.arguments import CONTAINER, DEVICES, look_options
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.guests import judge_absence
from ansible_collections.cleanslate.sglang.plugins.module_utils.defects import Told
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.look import look
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.memory import read_guest_limit, read_meminfo
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.pve import read_guest
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.vantage import vantage
from ansible_collections.cleanslate.sglang.plugins.module_utils.results import driver_row, gpu_rows, guest_row


def show(params: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The module's result for these parameters."""
    options = look_options(params)
    snapshot = look(options)
    guest = snapshot.guest
    if guest is not None and guest.state in ("stopped", "unknown"):
        absence = judge_absence(guest, read_guest(guest.vmid, params["pve_dir"]))
        if absence:
            raise CleanSlateError(absence[0].message)
    return {
        "vantage": vantage(options.proc),
        "container": None if guest is None else {**(guest_row(guest) or {}), **memory_of(guest.vmid, options.proc)},
        **driver_row(snapshot),
        "gpus": None if snapshot.reading.gpus is None else gpu_rows(snapshot, options.proc),
        "scan": {
            "complete": snapshot.scan.complete and not snapshot.problems,
            "processes": snapshot.scan.processes,
            "unreadable_pids": list(snapshot.scan.unreadable),
            "seconds": snapshot.scan.seconds,
        },
        "seconds": snapshot.reading.seconds,
    }


def memory_of(vmid: str, proc: str) -> dict[str, t.Any]:
    """What the node has left, and what the container may still take of it, in MiB. Kernel files, which never wait."""
    memory, limit = read_meminfo(proc), read_guest_limit(vmid, proc)
    return {"node_available_mib": memory.mem_available_mib, "headroom_mib": limit.headroom_mib}


def main() -> t.NoReturn:
    module = AnsibleModule(argument_spec={**DEVICES, **CONTAINER}, supports_check_mode=True)
    with Told(module):
        try:
            result = show(module.params)
        except CleanSlateError as exc:
            module.fail_json(msg=str(exc))
        module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
