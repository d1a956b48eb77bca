# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of the node's view that were found once: units below units, forks without a parent, configurations that hang,
containers without GPU nodes, records that can't be read.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils import evict as evict_module
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.guests import guest_unit, judge_nodes
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.targets import Request
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.evict import Order
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import look as looking
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.look import LookOptions
from ansible_collections.cleanslate.sglang.plugins.module_utils.proxmox import GuestConfig
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Proc, write_proc
from ansible_collections.cleanslate.sglang.tests.unit.builders import LEADER
from ansible_collections.cleanslate.sglang.tests.unit.guest_builders import INIT, guest, inside
from ansible_collections.cleanslate.sglang.tests.unit.plugins.module_utils.test_climb_guest import (
    RANK,
    SERVER,
    SERVICE,
    NodeWorld,
)


def test_a_unit_below_a_delegated_one_is_not_systemds() -> None:
    launcher = inside(100, LEADER, "/ns/system.slice/foo.service/postgresql.service")
    assert guest_unit(launcher, {100: launcher}, {INIT}, ()) is None


def test_a_double_fork_in_the_servers_own_cgroup_is_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    world = NodeWorld(monkeypatch, SERVER, RANK)
    objection = world.climber()._kill_objection(world.look())
    world.processes[500] = inside(500, ("x",), SERVICE, ppid=INIT)
    assert objection(500) is None


def test_a_configuration_that_hangs_costs_no_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "SCAN_DEADLINE_S", 8.0)
    monkeypatch.setattr(looking, "read_inside", lambda *_u: time.sleep(60))
    launcher = Proc(700, (*LEADER[:3], "--config", "/c.yaml"))
    proc = write_proc(tmp_path / "proc", [Proc(1, "/sbin/init", ppid=0), launcher])
    processes, _scan, leaders, _guest = looking.bounded_view(LookOptions(proc=str(proc)))
    assert 700 in processes and leaders[0].port is None


def test_an_eviction_that_could_choose_no_gpu_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    world = NodeWorld(monkeypatch, inside(120))
    really = world.look
    monkeypatch.setattr(world, "look", lambda: dataclasses.replace(really(), gpus=()))
    climber = world.climb(request=Request(scope="gpu"), rungs=("stop", "term", "kill", "holders"))
    assert [one.code for one in climber.report.reasons if one.severity == "required"]


def test_a_record_that_can_not_be_read_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_order: Order) -> None:
        raise CleanSlateError("the record is broken")

    monkeypatch.setattr(evict_module, "_find_record", broken)
    order = Order(look=LookOptions(container="129"), name="main", port=30000)
    request, reasons = evict_module._request(order)
    assert (request.record, request.port, [one.code for one in reasons]) == (None, 30000, ["record_unknown"])
    assert reasons[0].means == "unknown"
    for lost in (dataclasses.replace(order, port=None), dataclasses.replace(order, look=LookOptions())):
        with pytest.raises(CleanSlateError, match="broken"):
            evict_module._request(lost)


def test_all_gpus_of_a_container_whose_configuration_is_not_read_are_not_known() -> None:
    for config, named, expected in (
        (GuestConfig("129", None), False, [("container_config_unknown", "unknown")]),
        (GuestConfig("129", None), True, []),
        (GuestConfig("129", True), False, []),
    ):
        found = judge_nodes(guest(), config, named)
        assert [(one.code, one.means) for one in found] == expected
