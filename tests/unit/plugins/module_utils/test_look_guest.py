# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One look at a container from its node: its launchers by their cgroups, its GPUs, and whom that look asks: nobody."""

from __future__ import annotations

import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils import assess as assessing
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.lastrungs import members_now
from ansible_collections.cleanslate.sglang.plugins.module_utils.assess import Wanted
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.clean import Limits
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError, UnknownDevice
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import GpuReading, Problem
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import look as looking
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.look import LookOptions, find_leaders, look_with
from ansible_collections.cleanslate.sglang.plugins.module_utils.proxmox import GuestConfig
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Leader, Snapshot, Unit
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Proc, write_proc
from ansible_collections.cleanslate.sglang.tests.unit.builders import LEADER, gpu, process
from ansible_collections.cleanslate.sglang.tests.unit.guest_builders import (
    INIT,
    OTHER,
    UNIT,
    UNIT_PATH,
    VMID,
    guest,
    guest_init,
    inside,
    node,
)

SERVICE = f"/ns/system.slice/{UNIT}"
OURS = inside(100, LEADER, SERVICE)
THEIRS = inside(200, LEADER, SERVICE, OTHER, ppid=190)
NODES = process(300, LEADER, cgroups=(f"/system.slice/{UNIT}",))


def leaders_of(seen: Snapshot, options: LookOptions) -> dict[int, Leader]:
    return {one.process.pid: one for one in find_leaders(seen.processes, options, seen.guest)}


def recorded(top: Path, *processes: Proc, networks: t.Mapping[int, int] | None = None) -> Path:
    proc = write_proc(top / "proc", [Proc(1, "/sbin/init", ppid=0), *processes])
    for pid, number in (networks or {}).items():
        (proc / str(pid) / "ns").mkdir(exist_ok=True)
        (proc / str(pid) / "ns" / "net").symlink_to(f"net:[{number}]")
    return proc


# --- launchers ---


def test_a_launchers_unit_is_told_by_its_cgroup_and_no_systemd_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's systemd may have a unit of the same name; the container's could hang."""
    monkeypatch.setattr(looking, "has_systemd", lambda: True)
    monkeypatch.setattr(looking, "read_unit", lambda *_unused: pytest.fail("systemd was asked"))
    found = leaders_of(node(OURS, THEIRS, NODES), LookOptions(container=VMID))
    assert found[100].unit == Unit(UNIT, 100, "", "active", "loaded", UNIT_PATH)
    assert (found[200].unit, found[300].unit) == (None, None)
    assert found[100].owns_unit and found[100].container == "lxc:129"


def test_the_port_is_one_of_the_containers_network(tmp_path: Path) -> None:
    """Two servers of one port: in the container's network, and in one of its own within the container."""
    processes = [Proc(pid, LEADER) for pid in (100, 101)]
    proc = recorded(tmp_path, Proc(INIT, "/sbin/init"), *processes, networks={1: 1, INIT: 2, 100: 2, 101: 3})
    seen = node(OURS, inside(101, LEADER))
    found = leaders_of(seen, LookOptions(container=VMID, proc=str(proc)))
    assert {pid: one.same_network for pid, one in found.items()} == {100: True, 101: False}
    (proc / str(INIT) / "ns" / "net").unlink()
    found = leaders_of(seen, LookOptions(container=VMID, proc=str(proc)))
    assert {one.same_network for one in found.values()} == {None}


def test_the_configuration_of_somebody_elses_launcher_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could hang, and nobody asks for that server."""
    words = (*LEADER[:3], "--config", "/c.yaml")
    read: list[int] = []

    def read_inside(pid: int, _path: str, *_unused: t.Any) -> str:
        read.append(pid)
        return "port: 31000\n"

    monkeypatch.setattr(looking, "read_inside", read_inside)
    proc = recorded(tmp_path, *(Proc(pid, words) for pid in (100, 200, 300)))
    strangers = (inside(200, words, vmid=OTHER), process(300, words))
    found = leaders_of(node(*strangers), LookOptions(container=VMID, proc=str(proc)))
    assert (read, {pid: one.port for pid, one in found.items()}) == ([], {200: None, 300: None})


# --- GPUs ---


def see(monkeypatch: pytest.MonkeyPatch, minors: set[int] | None, **options: t.Any) -> list[int]:
    seen = node(OURS, guest_changes={"device_minors": None if minors is None else frozenset(minors)})
    monkeypatch.setattr(
        looking, "bounded_view", lambda _options: (dict(seen.processes), seen.scan, seen.leaders, seen.guest)
    )
    found = look_with(LookOptions(container=VMID, **options), GpuReading("nvml", (gpu(0), gpu(1))))
    assert found.guest == seen.guest and set(found.holders) == {0, 1}
    return [one.index for one in found.gpus]


def test_the_gpus_that_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    assert see(monkeypatch, {1}) == [1]
    assert see(monkeypatch, {1}, devices=("GPU-1",)) == [1]
    assert see(monkeypatch, {0, 1}, devices=("1",)) == [1]
    assert see(monkeypatch, None, expected_gpus=0) == []
    for options in ({"devices": ("0",)}, {"devices": ("GPU-0",)}, {"baseline_names": ("0",)}):
        with pytest.raises(UnknownDevice):
            see(monkeypatch, {1}, **options)
    assert see(monkeypatch, {1}, baseline_names=("GPU-1",)) == [1]


def test_the_gpus_of_an_earlier_look_stay_the_chosen_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes are gone with its /dev, or it is broken by now."""
    for minors in (None, set(), {0}):
        assert see(monkeypatch, minors, devices=("1",), pinned=("GPU-1",)) == [1]
        assert see(monkeypatch, minors, pinned=()) == []
    with pytest.raises(UnknownDevice):
        see(monkeypatch, {0, 1}, pinned=("GPU-7",))


def test_where_containers_cannot_be_seen_nobody_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(looking.nvml, "read_gpus", lambda *_unused: pytest.fail("the driver was asked"))
    monkeypatch.setattr(looking, "bounded_view", lambda *_unused: pytest.fail("processes were read"))
    with pytest.raises(CleanSlateError, match="Run the task on the node"):
        looking.look(LookOptions(container=VMID, proc=str(tmp_path)))


# --- who is in it now ---


def group(directory: Path, *pids: int) -> None:
    directory.mkdir(parents=True)
    (directory / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))


def test_members_at_this_moment_of_every_hierarchy(tmp_path: Path) -> None:
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    (proc / "self").mkdir(parents=True)
    assert members_now(VMID, str(proc), str(sys)) is None
    (proc / "self/mountinfo").write_text(
        "35 24 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "36 24 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    )
    assert members_now(VMID, str(proc), str(sys)) == []
    group(sys / "fs/cgroup/unified/lxc/129", 7)
    group(sys / "fs/cgroup/unified/lxc/129/ns", 9)
    group(sys / "fs/cgroup/memory/lxc/129", 7, 8)
    group(sys / "fs/cgroup/unified/lxc/130", 200)
    assert members_now(VMID, str(proc), str(sys)) == [7, 8, 9]
    procs = sys / "fs/cgroup/memory/lxc/129/cgroup.procs"
    procs.unlink()
    procs.mkdir()
    assert members_now(VMID, str(proc), str(sys)) is None


# --- what is asked beside the look ---


def wanted(top: Path, **changes: t.Any) -> Wanted:
    return Wanted(LookOptions(container=VMID, proc=str(top)), Limits(), **changes)


def test_the_servers_user_is_the_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessing, "uid_outside", lambda _guest, user, *_unused: {"sglang": 100_997}.get(user))
    assert assessing._uid_inside(guest(), wanted(tmp_path, user="sglang")) == 100_997
    assert assessing._uid_inside(guest(), wanted(tmp_path, user="root")) is None
    assert assessing._uid_inside(guest(), wanted(tmp_path)) is None


def test_a_user_database_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessing, "READINGS_DEADLINE_S", 0.2)
    monkeypatch.setattr(assessing, "uid_outside", lambda *_unused: time.sleep(60))
    started = time.monotonic()
    assert assessing._uid_inside(guest(), wanted(tmp_path, user="sglang")) is None
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("state", "config", "codes"),
    [
        ("stopped", GuestConfig(VMID, True), []),
        ("stopped", GuestConfig(VMID, False), ["container_not_here"]),
        ("stopped", GuestConfig(VMID, None, problems=(Problem("/etc/pve", None, "hangs"),)), ["container_unknown"]),
        ("unknown", GuestConfig(VMID, True), ["container_unknown"]),
        ("running", GuestConfig(VMID, None), ["container_config_unknown"]),
        ("running", GuestConfig(VMID, True, device_nodes=("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl")), []),
        (
            "running",
            GuestConfig(VMID, True, device_nodes=("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2")),
            ["container_nodes_missing"],
        ),
    ],
)
def test_what_proxmox_says_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, config: GuestConfig, codes: list[str]
) -> None:
    monkeypatch.setattr(assessing, "read_guest_config", lambda _vmid, _dir: config)
    monkeypatch.setattr(assessing, "device_numbers", lambda *_unused: [("nvidia0", 195, 0), ("nvidia1", 195, 1)])
    monkeypatch.setattr(assessing, "device_rule_problems", lambda *_unused: [])
    found = assessing._guest_reasons(wanted(tmp_path), guest(guest_init(), state=state))
    assert [one.code for one in found] == codes
    assert all(one.severity == "required" for one in found)


def test_nothing_is_asked_of_proxmox_without_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessing, "read_guest_config", lambda *_unused: pytest.fail("it was asked"))
    assert assessing._guest_reasons(wanted(tmp_path), None) == ()
