#!/usr/bin/python
# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: client_hold
version_added: 0.2.0
short_description: Stop or pause what keeps sending to a server, and let it go on afterwards
description:
  - Holds the clients of a server before it goes, so that nothing is sent into its end. What to let go afterwards, and
    whether, is the caller's choice.
  - A client is a systemd unit, or a process that a pid file names and that runs the declared program. Whatever is not
    proved to be that is left alone and named, for example a pid that was used again, another program, an alias of a
    unit that people need to get in, a unit in which this task itself runs, or an SGLang server.
  - Everybody is judged before anybody is asked. Where one client can't be held, none is touched.
  - Nothing is ever killed. A client that does not end on SIGTERM, or that systemd does not stop in time, is reported as
    C(stayed).
author:
  - Clean Slate contributors (@cleanslate)
extends_documentation_fragment:
  - cleanslate.sglang.attributes
  - cleanslate.sglang.attributes.actiongroup_sglang
attributes:
  check_mode:
    support: full
    details:
      - In check mode nobody is asked; RV(plan) says what would be done.
  diff_mode:
    support: none
  idempotent:
    support: full
options:
  state:
    description:
      - V(held) stops or pauses the O(clients) that run.
      - V(released) lets those go on that O(held) names, and touches nobody else. A unit that was stopped is started, a
        paused client goes on. A process that was stopped by its pid file can't be started from here, and is named.
      - V(looked) only says what there is of the O(clients).
    type: str
    choices: [held, released, looked]
    default: held
  clients:
    description:
      - What keeps sending.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: What people call it.
        type: str
        required: true
      unit:
        description: The systemd unit (a service or a timer) that runs it. Either this, or O(clients[].pid_file).
        type: str
      pid_file:
        description: The file that holds its process id. Only its owner may be able to change the file.
        type: path
      program:
        description:
          - What that process must run, as the base name of its executable, or of the script or module that its
            interpreter was given. The name of an interpreter proves nothing and is refused.
        type: str
      action:
        description:
          - V(stop) has systemd stop the unit, or sends SIGTERM to the process.
          - V(pause) freezes the unit (cgroup v2), or else sends SIGSTOP to everybody in it; for a process to it and to
            all its descendants. What it was about to send, it sends when it goes on.
        type: str
        choices: [stop, pause]
        default: stop
      after:
        description:
          - What O(state=released) does with it. V(leave) leaves it stopped (or paused), to be started by somebody.
        type: str
        choices: [release, leave]
        default: release
      host:
        description:
          - Not used here, and handed back in RV(held), so that the caller knows where to let it go.
        type: str
  held:
    description:
      - For O(state=released), the RV(held) that an earlier call returned, as it is.
    type: list
    elements: dict
    default: []
  deadline_s:
    description:
      - How long, in seconds, all clients together may take.
    type: float
    default: 30
  protect:
    description:
      - Who is left alone in any case, by pid, by the base name of the executable, or by systemd unit. The same as
        O(cleanslate.sglang.gpu_evict#module:protect).
    type: list
    elements: str
    default: []
notes:
  - Run it on the machine where the clients run, as root or, for a process, as its user.
seealso:
  - module: cleanslate.sglang.gpu_evict
"""

EXAMPLES = r"""
- name: Hold what keeps sending to chat
  cleanslate.sglang.client_hold:
    clients:
      - name: nightly evaluation
        unit: evaluation.service
      - name: load generator
        pid_file: /run/loadgen/pid
        program: run_inference.py
        action: pause
  register: clients
  delegate_to: load01

- name: Let them go on
  cleanslate.sglang.client_hold:
    state: released
    held: "{{ clients.held }}"
  delegate_to: load01
"""

RETURN = r"""
verdict:
  description:
    - V(held), V(released) or V(looked) where that was done, V(planned) in check mode, V(nothing_to_do) where no client
      runs (or O(held) is empty).
    - V(failed) where a client could not be held or let go; RV(problems) says which and why.
  returned: always
  type: str
  sample: held
clients:
  description:
    - Each client with its C(result) and C(detail).
    - C(result) is C(held), C(released), C(running), C(paused), C(absent) (it does not run), C(planned), C(not_asked)
      (since another one can't be held), C(left) (it can't be started from here, or is to be left), C(stayed) (it did
      not do so in time), C(refused) (it must not be touched) or C(unknown) (it could not be seen).
  returned: always
  type: list
  elements: dict
  sample:
    - {name: nightly evaluation, kind: unit, action: stop, unit: evaluation.service, pid_file: null, program: null,
       host: null, after: release, result: held, detail: ""}
held:
  description: What this call holds, to be handed back with O(state=released). Also there when the task failed.
  returned: always
  type: list
  elements: dict
  sample:
    - {name: nightly evaluation, kind: unit, action: stop, unit: evaluation.service, pid_file: null, program: null,
       host: null, after: release, boot_id: 2d7f1c9e-0000-0000-0000-000000000001}
problems:
  description: What went wrong, one sentence for each client.
  returned: always
  type: list
  elements: str
  sample: []
plan:
  description: In check mode, and where nobody was asked since one client can't be held, what would be done.
  returned: always
  type: list
  elements: str
  sample: []
seconds:
  description: How long the module took.
  returned: always
  type: float
  sample: 0.4
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.sglang.plugins.module_utils import clients
from ansible_collections.cleanslate.sglang.plugins.module_utils.defects import Told
from ansible_collections.cleanslate.sglang.plugins.module_utils.durations import check_seconds
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError

CLIENT: dict[str, t.Any] = {
    "name": {"type": "str", "required": True},
    "unit": {"type": "str"},
    "pid_file": {"type": "path"},
    "program": {"type": "str"},
    "action": {"type": "str", "choices": ["stop", "pause"], "default": "stop"},
    "after": {"type": "str", "choices": ["release", "leave"], "default": "release"},
    "host": {"type": "str"},
}
ARGUMENTS: dict[str, t.Any] = {
    "state": {"type": "str", "choices": ["held", "released", "looked"], "default": "held"},
    "clients": {"type": "list", "elements": "dict", "options": CLIENT, "default": []},
    "held": {"type": "list", "elements": "dict", "default": []},
    "deadline_s": {"type": "float", "default": 30},
    "protect": {"type": "list", "elements": "str", "default": []},
}


def answer(params: t.Mapping[str, t.Any], check_mode: bool) -> dict[str, t.Any]:
    """Do what was asked; raises CleanSlateError where that makes no sense."""
    check_seconds(params, "deadline_s")
    if params["state"] == "released":
        return clients.release(params["held"], params["deadline_s"], check_mode)
    if params["held"]:
        raise CleanSlateError(f"held only belongs to state: released, and state is {params['state']}")
    if params["state"] == "looked":
        return clients.looked(params["clients"], params["protect"])
    return clients.hold(params["clients"], params["protect"], params["deadline_s"], check_mode)


def main() -> t.NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    with Told(module):
        try:
            result = answer(module.params, module.check_mode)
        except CleanSlateError as error:
            module.fail_json(msg=str(error), verdict="failed", clients=[], held=[], problems=[str(error)], plan=[])
        if result["verdict"] == "failed":
            module.fail_json(msg="; ".join(result["problems"]), **result)
        module.exit_json(**result)


if __name__ == "__main__":
    main()
