#!/usr/bin/python
# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: router_worker
version_added: 0.2.0
short_description: Take a server out of SGLang's routers without losing a request, and put it back
description:
  - Lists, removes, drains and adds workers at one or several routers (C(sglang-router), also called the SGLang model
    gateway, 0.3), and runs commands for other load balancers.
  - A router lets requests in flight finish after a removal, and forgets how many there are. So they are counted at the
    worker itself, by its C(/v1/loads), until there are none.
  - Before anything is taken out, every router must answer, the worker must be able to say when it is idle, and enough
    other healthy workers must be left. Otherwise nothing is changed anywhere.
  - In the end all routers are asked again. RV(routers) says for each how it was and how it is, also where the task
    failed.
author:
  - Clean Slate contributors (@cleanslate)
extends_documentation_fragment:
  - cleanslate.sglang.attributes
  - cleanslate.sglang.attributes.actiongroup_sglang
attributes:
  check_mode:
    support: full
    details:
      - In check mode routers and workers are only asked; RV(plan) says what would be done. It fails where the real run
        would refuse. Hooks are not run.
  diff_mode:
    support: full
  idempotent:
    support: full
    details:
      - O(hooks) are run each time, and then reported as a change. Everything else is only done where it is needed.
options:
  state:
    description:
      - V(present) adds the workers at every router that does not list them, and waits until each router calls them
        healthy. A worker that is listed as not healthy is not added again, only waited for. Where one router can't be
        reached the others get them all the same, and the task fails.
      - V(absent) removes them at every router and proves that no router lists them any more.
      - V(drained) does the same and then waits until the workers themselves have no request in flight.
      - V(listed) only looks.
    type: str
    choices: [present, absent, drained, listed]
    default: listed
  routers:
    description:
      - The routers in front of the workers, all of them. One that is not named here goes on sending.
    type: list
    elements: dict
    default: []
    suboptions:
      url:
        description: Its base URL, for example V(http://router1:30000).
        type: str
        required: true
      name:
        description: What people call it. If not specified, its host and port.
        type: str
      api_key:
        description:
          - The key for its management, of a router that was started with C(--control-plane-api-keys) (the role must be
            C(admin)) or with C(--api-key).
        type: str
  workers:
    description:
      - The servers, as the routers know them.
    type: list
    elements: dict
    default: []
    suboptions:
      url:
        description:
          - Its URL, under which the routers reach it, for example V(http://gpu01:30000). It is compared by host, port
            and path; scheme, letter case and a closing slash make no difference.
          - O(state=drained) also asks it there, from where this module runs.
        type: str
        required: true
      aliases:
        description:
          - Other URLs under which a router may know it, for example by its address instead of its name. An entry that
            leads to the same address and is not named here is a failure, since it would go on sending.
        type: list
        elements: str
        default: []
      api_key:
        description: The key of the server itself, to ask how many requests it has in flight.
        type: str
      give_key:
        description:
          - Whether routers are given O(workers[].api_key) when the worker is added. Such a router sends that key
            instead of the client's own, so that whoever reaches the router reaches the server. Without it a router
            can't ask a server with a key for its model's name, and passes the client's key on.
        type: bool
        default: false
      settings:
        description:
          - What a router is told when the worker is added, beside its URL. A router can't be asked for all of this, so
            what is not given here is the router's default after a removal; RV(warnings) names what would be lost.
        type: dict
        suboptions:
          priority:
            description: Its priority. The default of routers is 50.
            type: int
          cost:
            description: Its cost factor. The default of routers is 1.
            type: float
          worker_type:
            description: Its part where prefill and decode are apart.
            type: str
            choices: [regular, prefill, decode]
          bootstrap_port:
            description: The bootstrap port of a prefill worker.
            type: int
          model_id:
            description: The model that it serves, where the router shall not ask it.
            type: str
          labels:
            description: Labels as texts.
            type: dict
  hooks:
    description:
      - Commands for other load balancers, run where this module runs, without a shell. They get one line of JSON on
        standard input, such as C({"action":"out","hook":"edge","workers":[{"url":"http://gpu01:30000"}]}), and no
        secret.
      - Status 0 means that it is done; for V(out), that no new request will come from there.
      - They run after the routers, in this order, and not at all where a router failed to let go.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: What people call it.
        type: str
        required: true
      out:
        description: The command, in words, for O(state=absent) and O(state=drained).
        type: list
        elements: str
      back:
        description: The command, in words, for O(state=present).
        type: list
        elements: str
      list:
        description:
          - The command, in words, for O(state=listed). It changes nothing, and answers on standard output with those
            that it sends to, C({"workers":[{"url":"http://gpu01:30000"}]}). Without it nobody can tell what this load
            balancer has.
        type: list
        elements: str
      deadline_s:
        description: How long, in seconds, it may take. Then it is ended, with what it started.
        type: float
        default: 60
  leave_healthy:
    description:
      - How many other healthy workers for the same model every router must have, for a healthy worker to be taken out.
        V(0) takes out the last one too.
      - A router notices a dead worker late (after 180 seconds with its defaults), so this is no proof that they serve.
    type: int
    default: 1
  in_flight:
    description:
      - How requests in flight are counted for O(state=drained). V(loads) asks the worker's C(/v1/loads), which can be
        asked without harm since SGLang 0.5.13. V(none) waits for nothing.
      - For older servers use O(state=absent), and the rung C(drain) of M(cleanslate.sglang.gpu_evict) on the server's
        host.
    type: str
    choices: [loads, none]
    default: loads
  allow_cut:
    description:
      - Whether requests that are still in flight when O(drain_deadline_s) is over are accepted, counted in
        RV(drained.cut). Otherwise the task fails, with the worker out of the routers.
    type: bool
    default: false
  request_deadline_s:
    description:
      - How long, in seconds, one request to a router may take, with the look-up of its name.
    type: float
    default: 10
  removed_deadline_s:
    description:
      - Until no router lists the workers any more, in seconds.
    type: float
    default: 30
  drain_deadline_s:
    description:
      - Until nothing is in flight, in seconds. Give it more than the longest request takes.
    type: float
    default: 120
  healthy_deadline_s:
    description:
      - Until every router calls the workers healthy, in seconds. A new worker is healthy after a second or two; one
        that was listed all the time and comes back, after 120 seconds with the router's defaults.
    type: float
    default: 180
  validate_certs:
    description:
      - Whether the certificates of C(https) URLs are checked. Keys are sent to whoever answers where they are not.
    type: bool
    default: true
  ca_path:
    description:
      - The file of the authorities that signed them. If not specified, what the system trusts.
    type: path
notes:
  - Run it where routers and workers can be reached, for example on the controller with C(delegate_to=localhost).
  - A router with C(--dp-aware) lists a worker once for each rank and can't remove such entries; that is refused.
  - An addition that a router has not done yet can't be called back. A worker that was added before it served comes in
    by itself, also after a removal; the last look tells it where that was within the time of this task.
seealso:
  - module: cleanslate.sglang.gpu_evict
  - module: cleanslate.sglang.server_ready
"""

EXAMPLES = r"""
- name: Take chat out of both routers, and wait for its last request
  cleanslate.sglang.router_worker:
    state: drained
    routers:
      - {name: east, url: 'http://router1:8000', api_key: '{{ vault_router_key }}'}
      - {name: west, url: 'http://router2:8000', api_key: '{{ vault_router_key }}'}
    workers:
      - {url: 'http://gpu01:30000', api_key: '{{ vault_sglang_api_key }}'}
    drain_deadline_s: 300
  delegate_to: localhost

- name: Back again
  cleanslate.sglang.router_worker:
    state: present
    routers: "{{ sglang_routers }}"
    workers:
      - url: http://gpu01:30000
    hooks:
      - name: edge
        out: [/usr/local/bin/edge, drain]
        back: [/usr/local/bin/edge, undrain]
  delegate_to: localhost
"""

RETURN = r"""
verdict:
  description:
    - V(present), V(absent), V(drained) or V(listed) where that is so, V(planned) in check mode.
    - V(failed) where it is not, V(unknown) where a router or worker could not be asked in the end. The task has failed
      then.
  returned: always
  type: str
  sample: drained
routers:
  description: Each router, in the order given.
  returned: always
  type: list
  elements: dict
  contains:
    name:
      description: Its name.
      type: str
      sample: east
    url:
      description: Its URL.
      type: str
      sample: http://router1:8000
    reachable:
      description: Whether it answered each time.
      type: bool
      sample: true
    error:
      description: What went wrong when it was asked for its list. V(null) where nothing did.
      type: str
      sample: null
    workers:
      description:
        - Each of the O(workers), with C(before) and C(after), the C(action) (C(added), C(removed), C(waited) or
          C(none)), how many C(seconds) it took, and a C(detail) where it failed.
        - C(before) and C(after) have a C(state) (C(healthy), C(unhealthy), C(absent), or C(unknown) where the router
          did not answer), and the router's C(entries).
      type: list
      elements: dict
      sample:
        - url: http://gpu01:30000
          before:
            state: healthy
            entries:
              - {id: 920a7c05-0568-4b7d-9d42-65731cfd570f, url: 'http://gpu01:30000', healthy: true, load: 0,
                 model_id: chat, worker_type: regular, priority: 50, cost: 1.0, job: null}
          after: {state: absent, entries: []}
          action: removed
          seconds: 0.6
          detail: ""
    listed:
      description: All workers that it lists in the end, in the form of C(entries).
      type: list
      elements: dict
      sample: []
drained:
  description: What became of the requests in flight. V(null) where they were not waited for.
  returned: always
  type: dict
  contains:
    seconds:
      description: How long it was waited.
      type: float
      sample: 21.5
    in_flight_at_start:
      description: How many there were when no router listed the workers any more.
      type: int
      sample: 7
    in_flight_at_end:
      description: How many there were at the end. V(null) where that could not be told.
      type: int
      sample: 0
    cut:
      description: How many are, or were, cut off. V(null) where that is not known.
      type: int
      sample: 0
    source:
      description: What was counted.
      type: str
      sample: loads
    note:
      description: What else is to be said about it.
      type: str
      sample: ""
hooks:
  description:
    - The hooks that were run, each with its C(result), which is C(done), C(failed) or C(timeout).
    - With O(state=listed) also C(listed), the URLs that it answered, and C(missing), the workers that are not among
      them, or null where it could not tell.
  returned: always
  type: list
  elements: dict
  sample:
    - {name: edge, action: out, result: done, detail: "", seconds: 0.4}
plan:
  description: What is, or in check mode would be, done.
  returned: always
  type: list
  elements: str
  sample: ['remove http://gpu01:30000 at router east']
problems:
  description: What went wrong, one sentence each, and last where the workers are now at every router.
  returned: always
  type: list
  elements: str
  sample: []
warnings:
  description: What is worth knowing, for example settings that a worker would not get again.
  returned: when there are any
  type: list
  elements: str
  sample: []
seconds:
  description: How long the module took.
  returned: always
  type: float
  sample: 22.4
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.sglang.plugins.module_utils import routing
from ansible_collections.cleanslate.sglang.plugins.module_utils.defects import Told
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError

ROUTER: dict[str, t.Any] = {
    "url": {"type": "str", "required": True},
    "name": {"type": "str"},
    "api_key": {"type": "str", "no_log": True},
}
SETTINGS: dict[str, t.Any] = {
    "priority": {"type": "int"},
    "cost": {"type": "float"},
    "worker_type": {"type": "str", "choices": ["regular", "prefill", "decode"]},
    "bootstrap_port": {"type": "int"},
    "model_id": {"type": "str"},
    "labels": {"type": "dict"},
}
WORKER: dict[str, t.Any] = {
    "url": {"type": "str", "required": True},
    "aliases": {"type": "list", "elements": "str", "default": []},
    "api_key": {"type": "str", "no_log": True},
    "give_key": {"type": "bool", "default": False, "no_log": False},
    "settings": {"type": "dict", "options": SETTINGS},
}
HOOK: dict[str, t.Any] = {
    "name": {"type": "str", "required": True},
    "out": {"type": "list", "elements": "str"},
    "back": {"type": "list", "elements": "str"},
    "list": {"type": "list", "elements": "str"},
    "deadline_s": {"type": "float", "default": 60},
}
ARGUMENTS: dict[str, t.Any] = {
    "state": {"type": "str", "choices": ["present", "absent", "drained", "listed"], "default": "listed"},
    "routers": {"type": "list", "elements": "dict", "options": ROUTER, "default": []},
    "workers": {"type": "list", "elements": "dict", "options": WORKER, "default": []},
    "hooks": {"type": "list", "elements": "dict", "options": HOOK, "default": []},
    "leave_healthy": {"type": "int", "default": 1},
    "in_flight": {"type": "str", "choices": ["loads", "none"], "default": "loads"},
    "allow_cut": {"type": "bool", "default": False},
    "request_deadline_s": {"type": "float", "default": 10},
    "removed_deadline_s": {"type": "float", "default": 30},
    "drain_deadline_s": {"type": "float", "default": 120},
    "healthy_deadline_s": {"type": "float", "default": 180},
    "validate_certs": {"type": "bool", "default": True},
    "ca_path": {"type": "path"},
}


def main() -> t.NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    with Told(module):
        try:
            result = routing.run(module.params, module.check_mode)
        except CleanSlateError as error:
            empty: dict[str, t.Any] = {"routers": [], "hooks": [], "plan": [], "drained": None, "seconds": 0.0}
            module.fail_json(msg=str(error), verdict="failed", problems=[str(error)], **empty)
        warnings = result.pop("warnings")
        for warning in warnings:
            module.warn(warning)
        if result["problems"]:
            module.fail_json(msg="; ".join(result["problems"]), **result)
        module.exit_json(**result)


if __name__ == "__main__":
    main()
