#!/usr/bin/python
# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_evict
version_added: 0.1.0
short_description: Take an SGLang server (or whoever holds the GPUs) off the GPUs, rung by rung
description:
  - Climbs a ladder and stops at the first rung after which nobody wanted gone is left. Each rung has its own deadline,
    waits on events, and reports who was asked, who left, who stayed and why.
  - A process is signalled only when evidence ties it to what was asked for. The evidence is checked again at the
    moment of the signal, which goes through a pidfd and so can't reach another process that got the same pid.
  - After the last process is gone, it waits for the GPUs' memory as long as the pinned host memory makes plausible
    (the kernel unpins it at about 0.25 seconds per GB), and says so.
  - No HTTP request is sent, since a probe of a hung server spoils its later exit. The one exception is C(/v1/loads) of
    SGLang 0.5.13 and newer, which is answered from shared memory, and only where O(drain) is asked for.
  - Where the server has a lease (M(cleanslate.sglang.server_lease)) of another run, nothing is done.
  - It does not certify its own work. Run M(cleanslate.sglang.clean_state) afterwards.
author:
  - Clean Slate contributors (@cleanslate)
extends_documentation_fragment:
  - cleanslate.sglang.attributes
  - cleanslate.sglang.attributes.actiongroup_sglang
  - cleanslate.sglang.options.devices
  - cleanslate.sglang.options.container
  - cleanslate.sglang.options.server
attributes:
  check_mode:
    support: full
    details:
      - In check mode nothing is signalled; RV(plan) says who would be asked at which rung. Where part of the look
        failed the verdict is V(unknown), as it is without check mode, whatever else is planned.
  diff_mode:
    support: none
  idempotent:
    support: full
options:
  scope:
    description:
      - V(server) evicts the named server only, known by its launch record, its unit or its port.
      - V(sglang) evicts every SGLang server and orphaned worker on the chosen GPUs.
      - V(gpu) evicts also any other holder of the chosen GPUs. A process that merely has a GPU open is never one.
    type: str
    choices: [server, sglang, gpu]
    default: server
  rungs:
    description:
      - The rungs that may be climbed, in their order. V(holders) is only climbed with O(scope=gpu).
      - V(drain) waits until no request is in flight. It is climbed where O(drained_clients) or O(drain.in_flight) says
        so; otherwise, and for a server that hangs, it is only counted what is cut off.
      - V(container_stop) stops and starts O(container) where all that was not enough. It needs
        O(confirm_container_stop), and refuses a container that is locked or looked after by the HA manager, and
        whoever else in it was not acknowledged.
      - V(gpu_reset) resets chosen GPUs whose memory nobody explains. It needs O(confirm_gpu_reset), runs on the host
        only, is refused while anybody uses the GPU, and leaves persistence mode as it was.
    type: list
    elements: str
    choices: [drain, stop, term, kill, holders, container_stop, gpu_reset]
    default: [drain, stop, term, kill, holders]
  protect:
    description:
      - Who is left alone in any case, by pid, by the base name of the executable, or by systemd unit. GPU services
        such as C(nvidia-persistenced) and C(dcgm-exporter), sshd, sudo, pid 1 and this run itself are always protected.
    type: list
    elements: str
    default: []
  deadlines:
    description:
      - Seconds for each rung. O(deadlines.kill) grows by 0.25 seconds for each GB of pinned host memory.
    type: dict
    suboptions:
      drain:
        description: For the requests in flight to end, before anybody is asked to go.
        type: float
        default: 60
        version_added: 0.2.0
      stop:
        description: For the owner (unit or container) to stop the server.
        type: float
        default: 45
      term:
        description: For the leader to leave after SIGTERM; it finishes requests in flight first.
        type: float
        default: 45
      term_hung:
        description: The same where the server is known to hang.
        type: float
        default: 10
      kill:
        description: For the tree to go after SIGKILL.
        type: float
        default: 10
      holders:
        description: For other holders; half of it after SIGTERM, the rest after SIGKILL.
        type: float
        default: 10
      attach:
        description: For one command in the container (C(pct exec)), which has no deadline of its own.
        type: float
        default: 20
      container_stop:
        description: For the container to end after C(pct stop).
        type: float
        default: 60
      container_start:
        description: For C(pct start), which is tried twice.
        type: float
        default: 60
      gpu_reset:
        description: For the reset of one GPU.
        type: float
        default: 90
    default: {}
  hung:
    description:
      - Say that the server is known to hang, so that SIGTERM gets O(deadlines.term_hung) only.
      - A stopped process (state T) in the server's tree is noticed without it.
    type: bool
    default: false
  max_used_mib:
    description:
      - Down to how many MiB, beyond its baseline, a GPU's memory is waited for.
    type: int
    default: 64
  baselines:
    description:
      - Memory in MiB that belongs to a GPU's ordinary day, by index, UUID or bus id.
    type: dict
    default: {}
  confirm_container_stop:
    description:
      - The operator's word for the rung V(container_stop), which ends everything in the container. It must be the
        container's number.
    type: str
    version_added: 0.2.0
  confirm_gpu_reset:
    description:
      - The operator's word for the rung V(gpu_reset), the GPUs by index, UUID or bus id.
    type: list
    elements: str
    default: []
    version_added: 0.2.0
  acknowledge:
    description:
      - Other servers and holders in the container that may go down with it, each by a name that the refusal tells (a
        unit, C(port 30001), C(pid 4711), a program).
    type: list
    elements: str
    default: []
    version_added: 0.2.0
  shm_dir:
    description:
      - Where shared memory lives, for the leftovers of the dead server.
    type: path
    default: /dev/shm
  drained_clients:
    description:
      - Say that whoever sends to the server is held already (M(cleanslate.sglang.client_hold)), so that it is worth
        waiting for the requests in flight.
    type: bool
    default: false
    version_added: 0.2.0
  drain:
    description:
      - How to tell the requests in flight. Giving it asks for the rung V(drain).
    type: dict
    suboptions:
      in_flight:
        description:
          - V(loads) asks the server (C(/v1/loads)), where its version is known and 0.5.13 or newer, and counts what
            runs and waits. Where that is nothing, each scheduler must be seen to rest, by the loads that it writes into
            the server's shared memory; otherwise one request is counted.
          - V(connections) counts the connections on its port, an upper bound. V(auto) takes the first that is possible.
            V(none) waits for nothing.
        type: str
        choices: [auto, connections, loads, none]
        default: auto
    version_added: 0.2.0
  run_id:
    description:
      - What names this run, where it took the server's lease with M(cleanslate.sglang.server_lease). The lease must be
        this run's, and is looked at before each step. Not used with O(container), whose lease lies inside.
      - If not specified, the eviction is refused while any other run holds the server.
    type: str
    version_added: 0.2.0
notes:
  - Run it as root, or as the user that owns the processes.
seealso:
  - module: cleanslate.sglang.clean_state
  - module: cleanslate.sglang.gpu_info
"""

EXAMPLES = r"""
- name: What can't be evicted from inside container 129, from its Proxmox node
  cleanslate.sglang.gpu_evict:
    container: "129"
    name: main
    port: 30000
    scope: sglang
    devices: ["GPU-5a3f0e2c-0000-0000-0000-000000000001"]
  delegate_to: pve1

- name: The same, and the container is restarted where that is not enough
  cleanslate.sglang.gpu_evict:
    container: "129"
    port: 30000
    rungs: [stop, term, kill, container_stop]
    confirm_container_stop: "129"
    acknowledge: [port 30001]
  delegate_to: pve1

- name: Evict the server 'main' that Clean Slate launched
  cleanslate.sglang.gpu_evict:
    name: main
    port: 30000
    devices: ["0", "1"]

- name: Whoever holds GPU 3, except one experiment
  cleanslate.sglang.gpu_evict:
    devices: ["3"]
    scope: gpu
    protect: [experiment.service]

- name: Who would be asked?
  cleanslate.sglang.gpu_evict:
    name: main
  check_mode: true
"""

RETURN = r"""
verdict:
  description:
    - V(nothing_to_do) where nobody wanted gone was there, V(evicted), V(planned) in check mode, V(failed) where
      somebody or some memory stayed, V(unknown) where the result, or in check mode part of what is there, could not be
      seen.
  returned: always
  type: str
  sample: evicted
plan:
  description: In check mode, who would be asked at which rung.
  returned: always
  type: list
  elements: dict
  sample:
    - rung: term
      targets: ["pid 4711 python -m sglang.launch_server (its command line says port 30000)"]
rungs:
  description: What each climbed rung did, with C(asked), C(left), C(stayed) (and why) and C(seconds).
  returned: always
  type: list
  elements: dict
  sample:
    - rung: term
      asked: [{what: SIGTERM, pid: 4711, result: sent, detail: ""}]
      left: [4711, 4790, 4791]
      stayed: []
      seconds: 7.3
      note: ""
ended:
  description: The processes that went, with C(pid), C(title) and the C(rung) that was enough.
  returned: always
  type: list
  elements: dict
  sample: [{pid: 4711, title: python -m sglang.launch_server, rung: term}]
before:
  description: The GPUs before, with C(used_mib) and holders.
  returned: always
  type: list
  elements: dict
  sample: [{index: 0, used_mib: 76109, holders: [{pid: 4790, title: "sglang::scheduler_TP0"}]}]
after:
  description: The GPUs afterwards, in the same form.
  returned: always
  type: list
  elements: dict
  sample: [{index: 0, used_mib: 0, holders: []}]
pinned:
  description: The wait for memory, with C(pinned_mib), C(expected_s), C(waited_s), C(freed) and a C(note) for people.
    C(freed) is V(null) where it is not known, and where somebody who was left alone holds one of the GPUs.
  returned: when something was evicted
  type: dict
  sample: {pinned_mib: 38172, expected_s: 20.0, waited_s: 9.6, freed: true, note: "memory free after 9.6 s; 40.0 GB of
    host memory was pinned"}
drain:
  description:
    - The requests in flight, V(null) where no server was found or the rung V(drain) was left out.
    - C(cut_off) is how many there were when the server was asked to go; it lets them finish where it can.
      V(null) where that is not known.
  returned: always
  type: dict
  sample: {asked: true, waited_s: 3.1, in_flight_before: 4, in_flight_after: 0, cut_off: 0, source: loads, note: ""}
container:
  description: The container as its node saw it at the end, see M(cleanslate.sglang.gpu_info).
  returned: always, V(null) without O(container)
  type: dict
  sample: {vmid: "129", state: running, members: 31, init_pid: 4242, unprivileged: true, gpu_nodes: [0, 1], stuck: []}
vantage:
  description: From where it acted, V(host) or V(container).
  returned: always
  type: str
  sample: host
gpu_resets:
  description: When GPUs were reset, by bus id, in seconds of the kernel log's clock. M(cleanslate.sglang.clean_state)
    takes it.
  returned: always
  type: dict
  sample: {}
respawns:
  description: Leaders that came back after a kill, with the supervisor that started them.
  returned: always
  type: list
  elements: dict
  sample: []
spared:
  description: Who uses the GPUs, or is a server, and was left alone, and why.
  returned: always
  type: list
  elements: dict
  sample: [{pid: 900, title: nvidia-persistenced, why: GPU service nvidia-persistenced}]
leftovers:
  description: Files of the dead server in shared memory, C(removed) and C(kept) with the reason.
  returned: always
  type: dict
  sample: {removed: [sglang_loads_0123456789ab_01234567.shm], kept: []}
reasons:
  description: Why the eviction failed, as C(code), C(message) and C(subject).
  returned: always
  type: list
  elements: dict
  sample: []
seconds:
  description: How long the module took.
  returned: always
  type: float
  sample: 9.9
"""

import math
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.sglang.plugins.module_utils.act.drain import HOW, DrainWish
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.optin import OPT_IN
from ansible_collections.cleanslate.sglang.plugins.module_utils.arguments import (
    CONTAINER,
    DEVICES,
    SERVER,
    baselines_of,
    look_options,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.defects import Told
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.nvml import PendingReading

if t.TYPE_CHECKING:
    from ansible_collections.cleanslate.sglang.plugins.module_utils.evict import Order

DEADLINES: dict[str, t.Any] = {
    "drain": {"type": "float", "default": 60},
    "stop": {"type": "float", "default": 45},
    "term": {"type": "float", "default": 45},
    "term_hung": {"type": "float", "default": 10},
    "kill": {"type": "float", "default": 10},
    "holders": {"type": "float", "default": 10},
    "attach": {"type": "float", "default": 20},
    "container_stop": {"type": "float", "default": 60},
    "container_start": {"type": "float", "default": 60},
    "gpu_reset": {"type": "float", "default": 90},
}
RUNGS = ["drain", "stop", "term", "kill", "holders"]
ARGUMENTS: dict[str, t.Any] = {
    **DEVICES,
    **SERVER,
    **CONTAINER,
    "scope": {"type": "str", "choices": ["server", "sglang", "gpu"], "default": "server"},
    "rungs": {"type": "list", "elements": "str", "choices": [*RUNGS, *OPT_IN], "default": RUNGS},
    "confirm_container_stop": {"type": "str"},
    "confirm_gpu_reset": {"type": "list", "elements": "str", "default": []},
    "acknowledge": {"type": "list", "elements": "str", "default": []},
    "protect": {"type": "list", "elements": "str", "default": []},
    "deadlines": {"type": "dict", "options": DEADLINES, "default": {}},
    "hung": {"type": "bool", "default": False},
    "max_used_mib": {"type": "int", "default": 64},
    "baselines": {"type": "dict", "default": {}},
    "shm_dir": {"type": "path", "default": "/dev/shm"},
    "drained_clients": {"type": "bool", "default": False},
    "drain": {"type": "dict", "options": {"in_flight": {"type": "str", "choices": HOW, "default": "auto"}}},
    "run_id": {"type": "str"},
}


def order_from(params: t.Mapping[str, t.Any], check_mode: bool) -> Order:
    """The module's parameters as the core takes them."""
    from ansible_collections.cleanslate.sglang.plugins.module_utils.act.climb import Deadlines
    from ansible_collections.cleanslate.sglang.plugins.module_utils.evict import Order

    deadlines = {name: value for name, value in (params["deadlines"] or {}).items() if value is not None}
    baselines = baselines_of(params["baselines"])
    return Order(
        look=look_options(params, params["protect"], baselines),
        scope=params["scope"],
        name=params["name"],
        state_dir=params["state_dir"],
        unit=params["unit"],
        port=params["port"],
        rungs=tuple(rung for rung in (*RUNGS, *OPT_IN) if rung in params["rungs"]),
        deadlines=Deadlines(**deadlines),
        hung=params["hung"],
        max_used_mib=params["max_used_mib"],
        baselines=baselines,
        shm_dir=params["shm_dir"],
        check_mode=check_mode,
        pve_dir=params["pve_dir"],
        confirm_container_stop=params["confirm_container_stop"],
        confirm_gpu_reset=tuple(params["confirm_gpu_reset"]),
        acknowledge=tuple(params["acknowledge"]),
        run_id=params["run_id"],
        drain=DrainWish(params["drained_clients"], (params["drain"] or {}).get("in_flight")),
    )


def ask_driver(params: t.Mapping[str, t.Any]) -> t.Optional[PendingReading]:
    """Ask NVML now: it answers while the rest of the module is loaded, which takes as long. None where the first look
    does not begin with it: a container is asked for, no GPU is there, or the order will be refused."""
    refused = not 0 < params["nvml_deadline_s"] < math.inf
    if refused or params["container"] or params["expected_gpus"] == 0:
        return None
    return PendingReading(params["nvml_deadline_s"], params["proc_root"])


def run(params: t.Mapping[str, t.Any], check_mode: bool) -> dict[str, t.Any]:
    """The whole eviction.

    Raises:
        CleanSlateError: nothing was touched, and why.
    """
    asked = ask_driver(params)
    try:
        from ansible_collections.cleanslate.sglang.plugins.module_utils.evict import evict

        return evict(order_from(params, check_mode), asked)
    finally:
        if asked is not None:
            asked.abandon()


def main() -> t.NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    with Told(module, verdict="unknown"):
        try:
            result = run(module.params, module.check_mode)
        except CleanSlateError as exc:
            module.fail_json(msg=str(exc), verdict="unknown")
        if result["verdict"] in ("failed", "unknown"):
            module.fail_json(msg=result["summary"], **result)
        module.exit_json(**result)


if __name__ == "__main__":
    main()
