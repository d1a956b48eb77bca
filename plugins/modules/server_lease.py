#!/usr/bin/python
# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: server_lease
version_added: 0.2.0
short_description: Take or give back the right to work on a server, so that two runs can't meet there
description:
  - Keeps one file for each server, C(lease.json) beside its launch record, that says which run works on it. A second
    run waits, or fails and names who holds it, since when and until when.
  - M(cleanslate.sglang.gpu_evict), M(cleanslate.sglang.server_launch) and M(cleanslate.sglang.server_ready) renew the
    lease while they run, if they are given the same O(run_id), and refuse to act where it is no longer theirs.
  - A lease is broken only when it has expired B(and) the process of its module has ended. Time is counted by the
    kernel's own clock since boot, so that a clock that jumps changes nothing. A reboot ends every lease.
  - A file that can't be understood is a failure that says how to remove it, since nobody knows then who works there.
author:
  - Clean Slate contributors (@cleanslate)
extends_documentation_fragment:
  - cleanslate.sglang.attributes
  - cleanslate.sglang.attributes.actiongroup_sglang
attributes:
  check_mode:
    support: full
    details:
      - In check mode nothing is written, waited for or refused; RV(holder) says who holds the server.
  diff_mode:
    support: none
  idempotent:
    support: full
    details:
      - A lease that this run has already is renewed, which is no change.
options:
  name:
    description:
      - The name of the server, as in the inventory.
    type: str
    required: true
  state_dir:
    description:
      - Where launches and leases are kept on the host, one folder for each server.
    type: path
    default: /var/lib/cleanslate
  state:
    description:
      - V(held) takes the lease, or renews it.
      - V(released) gives it back. A lease of another run is left as it is. Where a module of this run still works, the
        lease stays until that has ended.
    type: str
    choices: [held, released]
    default: held
  run_id:
    description:
      - What names this run, for example a UUID that the controller made. Letters, digits and C(._:-).
    type: str
    required: true
  operator:
    description:
      - Who started the run, for those who find the server held.
    type: str
  controller:
    description:
      - From where, for those who find the server held.
    type: str
  ttl_s:
    description:
      - For how long, in seconds, the lease holds without a module that renews it. It must cover the time between two
        tasks of the run.
    type: float
    default: 60
  wait_s:
    description:
      - How long, in seconds, to wait for another run to give the server back. V(0) fails at once.
    type: float
    default: 0
seealso:
  - module: cleanslate.sglang.gpu_evict
  - module: cleanslate.sglang.server_launch
"""

EXAMPLES = r"""
- name: Nobody else works on chat while this run does
  cleanslate.sglang.server_lease:
    name: chat
    run_id: "{{ run_id }}"
    operator: "{{ lookup('env', 'USER') }}"
    controller: "{{ lookup('pipe', 'hostname') }}"
    wait_s: 90

- name: Give it back
  cleanslate.sglang.server_lease:
    name: chat
    run_id: "{{ run_id }}"
    state: released
"""

RETURN = r"""
lease:
  description: This run's lease. V(null) after it was given back, and in check mode where this run has none.
  returned: always
  type: dict
  sample:
    name: chat
    run_id: 7c9e6679-7425-40de-944b-e07fc1f90ae7
    operator: alice
    controller: ops1
    taken_at: "2026-01-31T23:59:59+00:00"
    renewed_at: "2026-01-31T23:59:59+00:00"
    expires_at: "2026-02-01T00:00:59+00:00"
    module: null
    pid: null
    held: true
holder:
  description: Who holds the server now, this run or another one, in the same form, with C(running) (whether a module of
    it works at this moment) and C(why). V(null) where nobody does.
  returned: always
  type: dict
  sample: null
broken:
  description: Whose lease was broken, in the same form, with C(why). V(null) where none was.
  returned: always
  type: dict
  sample: null
waited_s:
  description: How long, in seconds, it waited for another run.
  returned: always
  type: float
  sample: 0.0
"""

import contextlib
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.sglang.plugins.module_utils import lease as leases
from ansible_collections.cleanslate.sglang.plugins.module_utils.defects import Told
from ansible_collections.cleanslate.sglang.plugins.module_utils.durations import check_seconds
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError

ARGUMENTS: dict[str, t.Any] = {
    "name": {"type": "str", "required": True},
    "state_dir": {"type": "path", "default": "/var/lib/cleanslate"},
    "state": {"type": "str", "choices": ["held", "released"], "default": "held"},
    "run_id": {"type": "str", "required": True},
    "operator": {"type": "str"},
    "controller": {"type": "str"},
    "ttl_s": {"type": "float", "default": 60},
    "wait_s": {"type": "float", "default": 0},
}

Params = t.Mapping[str, t.Any]
Row = dict[str, t.Any]


def _row(lease: t.Optional[leases.Lease]) -> t.Optional[Row]:
    if lease is None:
        return None
    return leases.holder_row(lease, leases.standing(lease, leases.read_clock(), leases.is_alive))


def _check(params: Params) -> None:
    check_seconds(params, "ttl_s")
    if params["ttl_s"] > leases.LONGEST_S:
        raise CleanSlateError(f"ttl_s is {params['ttl_s']:g}; a lease lasts at most {leases.LONGEST_S:g} s")
    if params["wait_s"]:
        check_seconds(params, "wait_s")
    leases.check_run_id(params["run_id"])


def held(params: Params) -> Row:
    """Take the lease; raises CleanSlateError where another run has it."""
    taken = leases.take(
        params["state_dir"],
        params["name"],
        params["run_id"],
        params["ttl_s"],
        params["wait_s"],
        params["controller"],
        params["operator"],
    )
    lease = _row(taken.lease)
    broken = None if taken.broken is None else {**(_row(taken.broken) or {}), "why": taken.broken_why}
    return {"changed": taken.fresh, "lease": lease, "holder": lease, "broken": broken, "waited_s": taken.waited_s}


def released(params: Params) -> Row:
    """Give the lease back, if it is ours."""
    ours, left = leases.release(params["state_dir"], params["name"], params["run_id"])
    return {"changed": ours, "lease": None, "holder": _row(left), "broken": None, "waited_s": 0.0}


def planned(params: Params) -> Row:
    """What would be done, by a look."""
    found = leases.look(params["state_dir"], params["name"])
    ours = found is not None and found[0].run_id == params["run_id"]
    row = None if found is None else leases.holder_row(*found)
    changed = ours if params["state"] == "released" else not ours
    return {"changed": changed, "lease": row if ours else None, "holder": row, "broken": None, "waited_s": 0.0}


def main() -> t.NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    params = module.params
    with Told(module):
        try:
            _check(params)
            act = planned if module.check_mode else released if params["state"] == "released" else held
            result = act(params)
        except CleanSlateError as error:
            holder = None
            with contextlib.suppress(CleanSlateError):
                found = leases.look(params["state_dir"], params["name"])
                holder = None if found is None else leases.holder_row(*found)
            module.fail_json(msg=str(error), lease=None, holder=holder, broken=None, waited_s=params["wait_s"])
        module.exit_json(**result)


if __name__ == "__main__":
    main()
