# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What stands against a container's stop and a GPU's reset. Every refusal is followed by what lifts it."""

from __future__ import annotations

import dataclasses
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.optin import (
    Other,
    others_in_container,
    refuse_container_stop,
    refuse_gpu_reset,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import (
    GpuHealth,
    GpuReading,
    MigInstance,
    Problem,
    Process,
    Reason,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.proxmox import GuestConfig
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Snapshot, Unit
from ansible_collections.cleanslate.sglang.tests.unit.builders import (
    LEADER,
    gpu,
    holds,
    leader,
    process,
    snapshot,
    visits,
)

INSIDE = ("/lxc/129/ns/system.slice/x.service",)
FREE = GuestConfig("129", True, ha_managed=False)
PERSISTENCE = GpuHealth(persistence_mode=True)


def codes(reasons: t.Sequence[Reason]) -> list[str]:
    return [reason.code for reason in reasons]


def inside(pid: int, argv: str | t.Sequence[str] = ("/opt/tool", "-x"), **changes: t.Any) -> Process:
    values = {"cgroups": INSIDE, "nspid": (pid, pid - 4000), "exe": "/opt/tool", **changes}
    return process(pid, argv, **values)


# --- who else is in the container -------------------------------------------------------------------------------------

A = inside(4100, LEADER)
A_RANK = inside(4101, "sglang::scheduler_TP0", ppid=4100, sid=4100)
B = inside(4200, (*LEADER[:-1], "30001"))
B_RANK = inside(4201, "sglang::scheduler_TP0", ppid=4200, sid=4200)
HOST = process(4300, ("/opt/tool",))
MEMBERS = {4100, 4101, 4200, 4201}


def two_servers(*more: Process, **options: t.Any) -> Snapshot:
    """Servers A (asked for) and B in the container, on GPU 0 and GPU 1; a holder of GPU 1 outside of it."""
    uses = [holds(4101, 0), holds(4201, 1), holds(4300, 1), *options.pop("uses", ())]
    values = {"gpus": [gpu(0), gpu(1)], "leaders": [leader(A), leader(B, 30001)], **options}
    return snapshot(A, A_RANK, B, B_RANK, HOST, *more, uses=uses, **values)


def others(seen: Snapshot, *more: int, keys: t.Sequence[tuple[int, int]] = (A.key, A_RANK.key)) -> tuple[Other, ...]:
    return others_in_container(seen, MEMBERS | set(more), keys)


def test_another_server_counts_once_with_its_ranks_and_nobody_outside() -> None:
    (other,) = others(two_servers())
    assert other.pid == 4200
    assert other.names == ("port:30001", "port 30001", "4200", "pid 4200")
    assert other.what == (
        "the SGLang server of port 30001: pid 4200, 200 inside (/usr/bin/python3 -m sglang.launch_server), "
        "which uses GPU 1"
    )


def test_nobody_but_the_selected_server_is_nobody() -> None:
    assert others(two_servers(), keys=[A.key, A_RANK.key, B.key, B_RANK.key]) == ()


def test_the_whole_container_counts_where_nobody_is_selected() -> None:
    assert [one.pid for one in others(two_servers(), keys=[])] == [4100, 4200]


def test_a_reused_pid_is_not_the_selected_process() -> None:
    stale = (A.pid, A.start_ticks - 1)
    assert [one.pid for one in others(two_servers(), keys=[stale, A_RANK.key])] == [4100, 4200]


def test_a_server_by_its_unit() -> None:
    unit = Unit("sglang-b.service", 4200, "always", "active", "loaded")
    seen = two_servers(leaders=[leader(A), leader(B, None, unit=unit)])
    (other,) = others(seen)
    assert "sglang-b.service" in other.names
    assert other.what.startswith("the SGLang server of unknown port: pid 4200")


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (("/opt/tool", "-x"), "tool"),
        (("/usr/bin/python3", "/srv/train.py", "--lr", "1"), "train.py"),
        (("/usr/bin/python3", "-m", "vllm.entrypoints"), "vllm.entrypoints"),
    ],
)
def test_a_holder_by_its_program_and_unit(argv: tuple[str, ...], name: str) -> None:
    holder = inside(4400, argv, exe=argv[0])
    seen = two_servers(holder, uses=[holds(4400, 0)], units={4400: "train.service"})
    other = others(seen, 4400)[-1]
    assert other.names == ("4400", "pid 4400", "train.service", name)
    assert other.what.endswith("which uses GPU 0")


def test_no_name_that_everybody_bears() -> None:
    """A session scope, an interpreter, or SGLang's own title would acknowledge more than was meant."""
    orphan = inside(4401, "sglang::scheduler_TP0", exe="/usr/bin/python3.11")
    child = inside(4402, ("/usr/bin/python3", "-c", "spawn_main()"), exe="/usr/bin/python3.11")
    seen = two_servers(orphan, child, uses=[holds(4401), holds(4402)], units={4401: "session-1.scope"})
    assert [one.names for one in others(seen, 4401, 4402)[1:]] == [("4401", "pid 4401"), ("4402", "pid 4402")]


def test_a_visitor_is_nobody_unless_it_may_hold() -> None:
    visitor = inside(4400)
    assert len(others(two_servers(visitor, uses=[visits(4400)]), 4400)) == 1
    unlisted = two_servers(visitor, uses=[visits(4400)], gpus=[gpu(0, processes=None), gpu(1)])
    assert [one.pid for one in others(unlisted, 4400)] == [4200, 4400]
    other_node = two_servers(visitor, uses=[visits(4400, 7)])
    assert [one.pid for one in others(other_node, 4400)] == [4200, 4400]


def test_holders_are_seen_where_the_driver_is_silent() -> None:
    seen = two_servers(inside(4400), uses=[holds(4400)], reading=GpuReading("none", None))
    assert [one.pid for one in others(seen, 4400)] == [4200, 4400]


def test_a_suspect_counts() -> None:
    seen = two_servers(inside(4400), gpus=[gpu(0, listed=[4400]), gpu(1)])
    assert [one.pid for one in others(seen, 4400)] == [4200, 4400]


def test_who_cannot_be_looked_into_counts() -> None:
    other = others(two_servers(inside(4400), unreadable=[4400]), 4400)[-1]
    assert (other.pid, other.what.endswith("whether it holds a GPU is not known")) == (4400, True)


def test_whoever_the_operator_protects_counts_and_the_rest_does_not() -> None:
    seen = two_servers(inside(4400), inside(4401, ("/usr/sbin/cron",), exe="/usr/sbin/cron"))
    found = others_in_container(seen, MEMBERS | {4400, 4401}, [A.key, A_RANK.key, B.key, B_RANK.key], ["cron"])
    assert [one.pid for one in found] == [4401]
    assert found[0].what == "pid 4401, 401 inside (/usr/sbin/cron), which is protected by the operator (cron)"


def test_a_zombie_is_nobody() -> None:
    dead = inside(4400, state="Z")
    assert len(others(two_servers(dead, uses=[holds(4400)]), 4400)) == 1


# --- the stop of a container ------------------------------------------------------------------------------------------

OTHER = Other(4200, ("port:30001", "port 30001", "4200", "pid 4200", "b.service"), "the SGLang server of port 30001")


def stop(
    config: GuestConfig = FREE, *found: Other, confirm: str | None = "129", acknowledge: t.Sequence[str] = ()
) -> tuple[Reason, ...]:
    return refuse_container_stop("129", confirm, config, found, acknowledge)


def test_a_confirmed_stop_of_a_free_container_is_allowed() -> None:
    assert stop() == ()


@pytest.mark.parametrize("confirm", [None, "", "130", "1290", "12", "yes", "129,130"])
def test_a_stop_needs_exactly_its_number(confirm: str | None) -> None:
    (reason,) = stop(confirm=confirm)
    assert (reason.code, reason.subject, reason.means) == ("container_stop_unconfirmed", "container 129", "dirty")
    assert reason.message.endswith("-e confirm_container_stop=129")
    assert stop(confirm=" 129 ") == ()


def test_a_locked_container() -> None:
    (reason,) = stop(dataclasses.replace(FREE, lock="backup"))
    assert reason.code == "container_locked"
    assert "locked (backup)" in reason.message
    assert "pct unlock 129" in reason.message
    assert stop(dataclasses.replace(FREE, lock=None)) == ()


def test_a_container_of_the_ha_manager() -> None:
    (reason,) = stop(dataclasses.replace(FREE, ha_managed=True, ha_state="started"))
    assert reason.code == "container_ha_managed"
    assert "ha-manager set ct:129 --state ignored" in reason.message
    assert stop(dataclasses.replace(FREE, ha_managed=False, ha_state="ignored")) == ()


def test_unknown_ha() -> None:
    problem = Problem("/etc/pve/ha/resources.cfg", None, "Permission denied")
    (reason,) = stop(dataclasses.replace(FREE, ha_managed=None, problems=(problem,)))
    assert (reason.code, reason.means) == ("container_ha_unknown", "unknown")
    assert "/etc/pve/ha/resources.cfg: Permission denied" in reason.message
    assert stop(dataclasses.replace(FREE, problems=(problem,))) == ()


def test_an_unknown_configuration() -> None:
    problem = Problem("/etc/pve/lxc/129.conf", None, "not read within 10 s")
    (reason,) = stop(GuestConfig("129", None, problems=(problem,)))
    assert (reason.code, reason.means) == ("container_config_unknown", "unknown")
    assert "not read within 10 s" in reason.message
    assert codes(stop(dataclasses.replace(FREE, vmid="130"))) == ["container_config_unknown"]


def test_a_container_of_another_node() -> None:
    (reason,) = stop(GuestConfig("129", False, ha_managed=False))
    assert reason.code == "container_not_here"


@pytest.mark.parametrize(
    "name", ["port:30001", "port 30001", "port=30001", " port  30001", "4200", "pid 4200", "b.service"]
)
def test_others_have_to_be_acknowledged_by_a_name_of_theirs(name: str) -> None:
    (reason,) = stop(FREE, OTHER)
    assert (reason.code, reason.subject) == ("container_unacknowledged", "pid 4200")
    assert "the SGLang server of port 30001" in reason.message
    assert "-e acknowledge=port:30001" in reason.message
    assert stop(FREE, OTHER, acknowledge=[name]) == ()


@pytest.mark.parametrize("name", ["", "port", "30001", "port 3000", "42000", "all", "*", "b"])
def test_no_other_name_acknowledges(name: str) -> None:
    assert codes(stop(FREE, OTHER, acknowledge=[name])) == ["container_unacknowledged"]


def test_each_other_by_itself_and_everything_at_once() -> None:
    third = Other(4400, ("4400", "pid 4400", "tool"), "pid 4400 (/opt/tool)")
    reasons = stop(FREE, OTHER, third, acknowledge=["tool"])
    assert [(one.code, one.subject) for one in reasons] == [("container_unacknowledged", "pid 4200")]
    config = dataclasses.replace(FREE, lock="backup", ha_managed=True)
    assert codes(stop(config, third, confirm=None)) == [
        "container_stop_unconfirmed",
        "container_locked",
        "container_ha_managed",
        "container_unacknowledged",
    ]


# --- the reset of GPUs ------------------------------------------------------------------------------------------------


def reset(
    *processes: Process, confirm: t.Sequence[str] = ("0",), vantage: str = "host", **options: t.Any
) -> tuple[Reason, ...]:
    gpus = options.pop("gpus", [gpu(0, 500, health=PERSISTENCE)])
    seen = snapshot(*processes, gpus=gpus, **options)
    return refuse_gpu_reset(seen, seen.gpus, confirm, vantage)


def changed(**changes: t.Any) -> list[t.Any]:
    return [gpu(0, 500, **{"health": PERSISTENCE, **changes})]


def test_a_confirmed_reset_of_a_gpu_that_nobody_uses_is_allowed() -> None:
    assert reset() == ()
    assert reset(gpus=changed(health=GpuHealth(persistence_mode=False))) == ()


def test_a_pid_that_only_the_driver_lists_keeps_nobody() -> None:
    assert reset(gpus=changed(listed=[777])) == ()


@pytest.mark.parametrize("name", ["0", "GPU-0", "gpu-0", "00000000:01:00.0", "01:00.0"])
def test_a_reset_needs_the_name_of_its_gpu(name: str) -> None:
    (reason,) = reset(confirm=["1"])
    assert (reason.code, reason.subject) == ("gpu_reset_unconfirmed", "GPU 0 (00000000:01:00.0)")
    assert "-e confirm_gpu_reset=0" in reason.message
    assert codes(reset(confirm=[])) == ["gpu_reset_unconfirmed"]
    assert reset(confirm=[name]) == ()


def test_each_gpu_needs_its_own() -> None:
    both = [gpu(0, health=PERSISTENCE), gpu(1, health=PERSISTENCE)]
    reasons = reset(gpus=both)
    assert [(one.code, one.subject) for one in reasons] == [("gpu_reset_unconfirmed", "GPU 1 (00000000:02:00.0)")]
    assert reset(gpus=both, confirm=["GPU-1", "0"]) == ()


def test_only_from_the_host() -> None:
    (reason,) = reset(vantage="container")
    assert reason.code == "gpu_reset_not_host"
    assert reset(vantage="host") == ()


@pytest.mark.parametrize(
    ("use", "words"), [(holds(4400), "holds it"), (visits(4400), "has it open"), (None, "may hold it")]
)
def test_whoever_uses_the_gpu_is_named_and_keeps_it(use: t.Any, words: str) -> None:
    user = inside(4400, cgroups=("/lxc/130/ns/system.slice/train.service",))
    options: dict[str, t.Any] = {"units": {4400: "train.service"}}
    options.update({"uses": [use]} if use else {"gpus": changed(listed=[4400])})
    (reason,) = reset(user, **options)
    assert (reason.code, reason.means) == ("gpu_reset_in_use", "dirty")
    assert f"pid 4400, 400 inside (/opt/tool) of container 130, train.service {words}" in reason.message


def test_a_user_of_another_gpu_keeps_nobody() -> None:
    seen = snapshot(inside(4400), gpus=[gpu(0, health=PERSISTENCE), gpu(1, health=PERSISTENCE)], uses=[holds(4400, 1)])
    assert refuse_gpu_reset(seen, seen.gpus[:1], ["0"], "host") == ()
    assert codes(refuse_gpu_reset(seen, seen.gpus, ["0", "1"], "host")) == ["gpu_reset_in_use"]


def test_the_persistence_daemon_of_the_host_is_no_user() -> None:
    daemon = process(4400, ("/usr/bin/nvidia-persistenced",), exe="/usr/bin/nvidia-persistenced")
    assert reset(daemon, uses=[visits(4400)]) == ()
    assert codes(reset(dataclasses.replace(daemon, cgroups=INSIDE), uses=[visits(4400)])) == ["gpu_reset_in_use"]
    monitor = process(4400, ("/usr/bin/nv-hostengine",), exe="/usr/bin/nv-hostengine")
    assert codes(reset(monitor, uses=[visits(4400)])) == ["gpu_reset_in_use"]


@pytest.mark.parametrize("missing", ["processes", "minor", "bus_id", "uuid"])
def test_unknown_users_keep_it(missing: str) -> None:
    reasons = reset(gpus=changed(**{missing: None}))
    assert [(one.code, one.means) for one in reasons] == [("gpu_reset_users_unknown", "unknown")]


def test_a_scan_with_gaps_keeps_it() -> None:
    (reason,) = reset(inside(4400), unreadable=[4400])
    assert (reason.code, reason.means) == ("gpu_reset_users_unknown", "unknown")
    assert "pid 4400" in reason.message
    assert reset(inside(4400)) == ()


def test_a_silent_driver_keeps_it() -> None:
    seen = snapshot(reading=GpuReading("none", None, problems=(Problem("nvmlInit", 999, "Unknown Error"),)))
    (reason,) = refuse_gpu_reset(seen, [gpu(0, health=PERSISTENCE)], ["0"], "host")
    assert (reason.code, reason.means) == ("gpu_reset_users_unknown", "unknown")
    assert "Unknown Error" in reason.message


def test_mig_keeps_it() -> None:
    slices = (MigInstance("MIG-0", None, ()),)
    assert codes(reset(gpus=changed(mig_enabled=True, mig=slices))) == ["gpu_reset_mig"]
    assert codes(reset(gpus=changed(mig_enabled=True))) == ["gpu_reset_mig"]
    assert reset(gpus=changed(mig_enabled=False)) == ()
    assert reset(gpus=changed(mig_enabled=None)) == ()  # no MIG on this model; nvidia-smi is asked again


def test_unknown_persistence_keeps_it() -> None:
    (reason,) = reset(gpus=changed(health=GpuHealth()))
    assert (reason.code, reason.means) == ("gpu_reset_persistence_unknown", "unknown")
