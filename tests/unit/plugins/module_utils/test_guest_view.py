# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container by its cgroup and its processes, over recorded trees of a node."""

from __future__ import annotations

import os
import shutil
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import guest as looking
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.guest import (
    check_container,
    read_guest,
    shm_opener,
    uid_outside,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_processes
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Guest, Stuck
from ansible_collections.cleanslate.sglang.tests.harness.proctree import BOOT_ID, Proc, write_proc

VMID = "129"
MAJOR = 195
PRIVILEGED = "         0          0 4294967295\n"
UNPRIVILEGED = "         0     100000      65536\n"
MOUNTINFO = "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def member(pid: int, title: str | t.Sequence[str] = "x", below: str = "/ns/x", **changes: t.Any) -> Proc:
    values: dict[str, t.Any] = {
        "cgroup": f"0::/lxc/{VMID}{below}\n",
        "nspid": (pid, pid - 40),
        "ppid": 50,
        "start_ticks": 1000 + pid,
    }
    return Proc(pid, title, **{**values, **changes})


def container_init(pid: int = 50, **changes: t.Any) -> Proc:
    return member(pid, "/sbin/init", "/ns/init.scope", **{"nspid": (pid, 1), "ppid": 40, **changes})


MONITOR = Proc(40, "[lxc monitor] /var/lib/lxc 129", cgroup=f"0::/lxc.monitor/{VMID}\n")


class Node:
    """A node of files: /proc, the cgroup tree, and the root directory of the container."""

    def __init__(self, top: Path, *processes: Proc, mountinfo: str | None = MOUNTINFO) -> None:
        self.proc, self.sys, self.rootfs = top / "proc", top / "sys", top / "rootfs"
        files = {"1/mountinfo": mountinfo} if mountinfo else {}
        write_proc(self.proc, [Proc(1, "/sbin/init", ppid=0, cgroup="0::/init.scope\n"), *processes], files=files)
        for name in ("dev/shm", "etc", "proc/sys/kernel/random"):
            (self.rootfs / name).mkdir(parents=True)
        (self.sys / "fs/cgroup").mkdir(parents=True)
        for process in processes:
            if f"/lxc/{VMID}" in process.cgroup:
                self.group(process.cgroup.strip().split("::", 1)[1], process.pid)

    def group(self, path: str, *pids: int) -> None:
        directory = self.sys / "fs/cgroup" / path.strip("/")
        top = self.sys / "fs/cgroup"
        directory.mkdir(parents=True, exist_ok=True)
        for one in (directory, *directory.parents):
            if one == top:
                break
            (one / "cgroup.procs").touch()
        with open(directory / "cgroup.procs", "a", encoding="ascii") as stream:
            stream.writelines(f"{pid}\n" for pid in pids)

    def inside(self, *pids: int, uid_map: str = PRIVILEGED, mnt: bool = True) -> Node:
        """These processes have the container's root directory, user namespace and (``mnt``) mount namespace."""
        for pid in pids:
            base = self.proc / str(pid)
            (base / "root").unlink(missing_ok=True)
            (base / "root").symlink_to(self.rootfs)
            (base / "uid_map").write_text(uid_map)
            if mnt:
                (base / "ns").mkdir()
                (base / "ns" / "mnt").symlink_to("mnt:[4026532000]")
        return self

    def look(self, vmid: str = VMID) -> Guest:
        proc, sys = str(self.proc), str(self.sys)
        return read_guest(vmid, read_processes(proc), MAJOR, proc, sys)


# --- whether it is asked where it can be seen ---


@pytest.mark.parametrize("vmid", ["", "0x1", "12 9", "129/../130", "-1", "129\n", "\u0661\u0662\u0669", "1" * 10])
def test_what_is_no_number_is_refused(vmid: str) -> None:
    with pytest.raises(CleanSlateError, match="must be a container's number"):
        check_container(vmid)


def names(top: Path, **namespaces: str) -> str:
    (top / "self" / "ns").mkdir(parents=True)
    for name, number in namespaces.items():
        (top / "self" / "ns" / name).symlink_to(f"{name}:[{number}]")
    return str(top)


def test_only_the_node_itself_sees_containers(tmp_path: Path) -> None:
    check_container(VMID, names(tmp_path / "node", pid="4026531836", cgroup="4026531835"))
    for name, found in (
        ("container", {"pid": "4026532700", "cgroup": "4026532701"}),
        ("pids shared", {"pid": "4026531836", "cgroup": "4026532701"}),
        ("nothing", {}),
    ):
        with pytest.raises(CleanSlateError, match="Run the task on the node"):
            check_container(VMID, names(tmp_path / name, **found))


# --- a container that runs ---


def test_a_privileged_container(tmp_path: Path) -> None:
    node = Node(tmp_path, MONITOR, container_init(), member(100)).inside(50, 100)
    seen = node.look()
    assert (seen.state, seen.init_pid, seen.root_pid, seen.root_start) == ("running", 50, 50, 1050)
    assert (seen.members, seen.inits) == (frozenset({50, 100}), frozenset({50}))
    assert (seen.uid_base, seen.unprivileged, seen.problems, seen.stuck) == (0, False, (), ())
    assert seen.directories == (str(tmp_path / "sys/fs/cgroup/lxc/129"),)
    assert seen.device_minors == frozenset()


def test_an_unprivileged_container(tmp_path: Path) -> None:
    seen = Node(tmp_path, MONITOR, container_init(), member(100)).inside(50, 100, uid_map=UNPRIVILEGED).look()
    assert (seen.uid_base, seen.unprivileged) == (100_000, True)


def test_others_are_not_its(tmp_path: Path) -> None:
    others = [
        Proc(200, "x", cgroup="0::/lxc/130/ns/lxc/129\n", nspid=(200, 5)),
        Proc(201, "x", cgroup="0::/lxc/1299/ns\n", nspid=(201, 5)),
        Proc(202, "x", cgroup="0::/user.slice/lxc/129\n"),
        Proc(203, "x", cgroup="0::/system.slice/pve-container@129.service\n"),
    ]
    seen = Node(tmp_path, MONITOR, container_init(), *others).inside(50).look()
    assert seen.members == frozenset({50})


def test_a_name_with_the_end_of_another_kind_of_line_hides_nobody(tmp_path: Path) -> None:
    """A cgroup may be called anything but a slash and a newline; so may a program."""
    tricks = [
        member(100, below="/ns/x\r0::/lxc/130/y"),
        member(101, below="/ns/x\u20280::/system.slice/apt-daily.service"),
        member(102, comm="a\rNSpid: 9 1"),
        member(103, comm="a\x0bShdPnd: 100"),
    ]
    node = Node(tmp_path, MONITOR, container_init())
    for one in tricks:
        write_proc(tmp_path / str(one.pid), [one])
        os.rename(tmp_path / str(one.pid) / str(one.pid), node.proc / str(one.pid))
    seen = node.inside(50).look()
    assert seen.members == frozenset({50, 100, 101, 102, 103})
    assert (seen.inits, seen.init_pid, seen.stuck) == (frozenset({50}), 50, ())


def test_who_is_outside_of_its_pid_namespace_is_its_all_the_same(tmp_path: Path) -> None:
    attached = member(100, nspid=(100,), ppid=30)
    node = Node(tmp_path, MONITOR, container_init(), attached).inside(50)
    seen = node.look()
    assert seen.members == frozenset({50, 100}) and seen.inits == frozenset({50})
    assert looking.outsiders(seen, read_processes(str(node.proc))) == frozenset({100})
    assert (seen.pid_inside((100,)), seen.pid_inside((100, 60)), seen.pid_inside((100, 60, 7))) == (None, 60, 60)


def test_the_init_of_a_nested_container_is_not_its_own(tmp_path: Path) -> None:
    nested_monitor = member(100)
    nested = member(101, "/sbin/init", "/ns/lxc/200/ns", nspid=(101, 61, 1), ppid=100, start_ticks=9000)
    seen = Node(tmp_path, MONITOR, container_init(), nested_monitor, nested).inside(50, 101).look()
    assert (seen.inits, seen.init_pid, seen.members) == (frozenset({50}), 50, frozenset({50, 100, 101}))


def test_a_path_that_proc_cannot_tell_is_made_up_for_by_the_cgroups_own_list(tmp_path: Path) -> None:
    node = Node(tmp_path, MONITOR, container_init(), Proc(100, "x", cgroup=""))
    node.group(f"/lxc/{VMID}/ns/" + "deep", 100)
    seen = node.inside(50).look()
    assert (seen.members, seen.problems) == (frozenset({50, 100}), ())


def test_whoever_cannot_be_placed_is_told_and_whoever_has_ended_is_not(tmp_path: Path) -> None:
    node = Node(tmp_path, MONITOR, container_init(), Proc(100, "x", cgroup=""), Proc(101, "x", cgroup="")).inside(50)
    processes = read_processes(str(node.proc))
    shutil.rmtree(node.proc / "101")
    seen = read_guest(VMID, processes, MAJOR, str(node.proc), str(node.sys))
    assert seen.members == frozenset({50})
    (problem,) = seen.problems
    assert "(pid 100)" in problem.message


def test_a_list_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    node = Node(tmp_path, MONITOR, container_init()).inside(50)
    procs = node.sys / f"fs/cgroup/lxc/{VMID}/cgroup.procs"
    procs.unlink()
    procs.mkdir()
    seen = node.look()
    assert seen.members == frozenset({50})
    assert [one.message for one in seen.problems] == ["who is in this cgroup can't be read"]


# --- one without a working init ---


def test_an_init_that_is_dead(tmp_path: Path) -> None:
    rest = [member(101, state="D", kill_pending=True, wchan="nfs_wait", start_ticks=2), member(100, start_ticks=3)]
    seen = Node(tmp_path, MONITOR, container_init(state="Z"), *rest).inside(100, 101).look()
    assert (seen.state, seen.inits, seen.init_pid, seen.root_pid) == ("broken", frozenset(), None, 101)
    assert seen.members == frozenset({50, 100, 101})
    assert seen.stuck == (Stuck(101, "D", "nfs_wait"),)


@pytest.mark.parametrize("left", ["pending", "without namespaces"])
def test_an_init_that_was_killed_while_a_child_cannot_end(tmp_path: Path, left: str) -> None:
    init = container_init(kill_pending=left == "pending", wchan="zap_pid_ns_processes")
    stuck = member(100, state="D", kill_pending=True)
    node = Node(tmp_path, MONITOR, init, stuck).inside(50, mnt=left == "pending").inside(100)
    (node.proc / "50/root").unlink()  # it has let go of its files before it waits for its children
    seen = node.look()
    assert (seen.state, seen.inits, seen.init_pid) == ("broken", frozenset({50}), None)
    assert seen.root_pid == 100
    assert (50 in {one.pid for one in seen.stuck}) == (left == "pending")


def test_an_init_of_an_earlier_run(tmp_path: Path) -> None:
    """The container was started again in the same cgroup while what was left of it could not end."""
    earlier = container_init(60, kill_pending=True, ppid=1, start_ticks=10)
    node = Node(tmp_path, MONITOR, earlier, container_init(50, start_ticks=5000)).inside(50, 60)
    seen = node.look()
    assert (seen.state, seen.inits, seen.init_pid, seen.root_pid) == ("running", frozenset({50, 60}), 50, 50)
    assert [one.pid for one in seen.stuck] == [60]


def test_of_two_working_inits_the_later_one_is_the_containers(tmp_path: Path) -> None:
    node = Node(tmp_path, MONITOR, container_init(60, start_ticks=10), container_init(50, start_ticks=5000))
    assert node.inside(50, 60).look().init_pid == 50


def test_without_an_init_files_are_seen_through_a_member_with_another_root(tmp_path: Path) -> None:
    """One that was attached without the mount namespace has the node's root: through it lie the node's files."""
    nodes_root = member(100, start_ticks=1)
    thread = member(101, start_ticks=2, kernel_thread=True)
    later, first = member(102, start_ticks=9), member(103, start_ticks=8)
    node = Node(tmp_path, nodes_root, thread, later, first).inside(101, 102, 103)
    assert node.look().root_pid == 103
    alone = Node(tmp_path / "alone", nodes_root)
    seen = alone.look()
    assert (seen.state, seen.root_pid, seen.uid_base, seen.device_minors) == ("broken", None, None, None)


def test_a_dead_leader_with_a_thread_that_cannot_end_is_stuck(tmp_path: Path) -> None:
    node = Node(tmp_path, MONITOR, container_init(), member(100, state="Z", tids=(108,))).inside(50)
    assert node.look().stuck == ()
    stat = node.proc / "100/task/108/stat"
    stat.write_text(stat.read_text().replace(") S ", ") D "))
    assert [one.pid for one in node.look().stuck] == [100]


# --- one without processes ---


def test_nobody_and_no_cgroup_is_stopped(tmp_path: Path) -> None:
    seen = Node(tmp_path, MONITOR).look()
    assert (seen.state, seen.members, seen.root_pid, seen.directories, seen.problems) == (
        "stopped",
        frozenset(),
        None,
        (),
        (),
    )


def test_nobody_in_a_cgroup_that_is_there_is_not_known(tmp_path: Path) -> None:
    node = Node(tmp_path, MONITOR)
    node.group(f"/lxc/{VMID}/ns")
    assert node.look().state == "unknown"


def test_nobody_where_the_mounts_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    seen = Node(tmp_path, MONITOR, mountinfo=None).look()
    assert (seen.state, [one.call for one in seen.problems]) == ("unknown", ["read mountinfo"])


def test_only_zombies_are_nobody(tmp_path: Path) -> None:
    seen = Node(tmp_path, MONITOR, container_init(state="Z")).look()
    assert (seen.state, seen.init_pid, seen.root_pid) == ("unknown", None, None)


# --- its files ---


def test_its_gpu_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("nvidia0", 195, 0), ("nvidia3", 195, 3), ("nvidiactl", 195, 255), ("nvidia-modeset", 195, 254)]
    monkeypatch.setattr(looking, "device_numbers", lambda *_unused: [*rows, ("nvidia-uvm", 510, 0), ("null", 1, 3)])
    node = Node(tmp_path, MONITOR, container_init()).inside(50)
    assert node.look().device_minors == frozenset({0, 3})
    monkeypatch.setattr(looking, "device_numbers", lambda *_unused: None)
    assert node.look().device_minors is None


def test_a_dev_that_is_a_link_is_the_containers_own(tmp_path: Path) -> None:
    node = Node(tmp_path, MONITOR, container_init()).inside(50)
    (node.rootfs / "dev/shm").rmdir()
    (node.rootfs / "dev").rmdir()
    (node.rootfs / "dev").symlink_to("/dev")
    assert node.look().device_minors is None


def test_files_that_hang_hide_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead file server below the container's root costs a deadline of its own, not the look."""
    monkeypatch.setattr(looking, "FILES_DEADLINE_S", 0.2)
    monkeypatch.setattr(looking, "device_numbers", lambda *_unused: time.sleep(60))
    node = Node(tmp_path, MONITOR, container_init(), member(100)).inside(50, uid_map=UNPRIVILEGED)
    started = time.monotonic()
    seen = node.look()
    assert time.monotonic() - started < 5
    assert (seen.members, seen.init_pid, seen.uid_base, seen.device_minors) == (frozenset({50, 100}), 50, 100_000, None)
    (problem,) = seen.problems
    assert "no answer within 0.2 s" in problem.message


def test_its_own_boot_id(tmp_path: Path) -> None:
    node = Node(tmp_path, MONITOR, container_init()).inside(50)
    assert node.look().boot_id is None
    (node.rootfs / "proc/sys/kernel/random/boot_id").write_text("inner-boot\n")
    assert node.look().boot_id == "inner-boot" != BOOT_ID


# --- its users ---


@pytest.mark.parametrize(
    ("user", "uid_map", "outside"),
    [
        ("sglang", UNPRIVILEGED, 100_997),
        ("sglang", PRIVILEGED, 997),
        ("997", UNPRIVILEGED, 100_997),
        ("0", UNPRIVILEGED, 100_000),
        ("65535", UNPRIVILEGED, 165_535),
        ("65536", UNPRIVILEGED, None),
        ("nobody-here", UNPRIVILEGED, None),
        ("broken", UNPRIVILEGED, None),
        ("endless", UNPRIVILEGED, None),
        ("9" * 5000, UNPRIVILEGED, None),
        ("", UNPRIVILEGED, None),
        ("sglang", "0 100000 500\n500 200000 1000\n", 200_497),
        ("sglang", "", None),
        ("sglang", "x y z\n", None),
    ],
)
def test_the_uid_of_a_containers_user(tmp_path: Path, user: str, uid_map: str, outside: int | None) -> None:
    node = Node(tmp_path, MONITOR, container_init()).inside(50, uid_map=uid_map)
    lines = ["root:x:0:0::/root:/bin/sh", "broken:x:many:1", "sglang:x:997:997::/:/bin/sh", "sglang:x:5:5::/:/bin/sh"]
    lines.append(f"endless:x:{'9' * 5000}:1")  # Python refuses to read such a number
    (node.rootfs / "etc/passwd").write_text("\n".join(lines) + "\n")
    assert uid_outside(node.look(), user, str(node.proc)) == outside


def test_a_name_is_looked_up_in_the_container_and_nowhere_else(tmp_path: Path) -> None:
    node = Node(tmp_path, MONITOR, container_init()).inside(50)
    assert uid_outside(node.look(), "root", str(node.proc)) is None
    (node.rootfs / "etc/passwd").symlink_to("/etc/passwd")
    assert uid_outside(node.look(), "root", str(node.proc)) is None
    stopped = Guest(VMID, "stopped")
    assert uid_outside(stopped, "0", str(node.proc)) is None


# --- its shared memory ---


def test_its_shared_memory_is_opened_and_the_nodes_never(tmp_path: Path) -> None:
    node = Node(tmp_path, MONITOR, container_init()).inside(50)
    (node.rootfs / "dev/shm/sgl").write_text("")
    fd = shm_opener(node.look(), "/dev/shm", str(node.proc))()
    try:
        assert os.listdir(fd) == ["sgl"]
    finally:
        os.close(fd)
    (node.rootfs / "dev/shm/sgl").unlink()
    (node.rootfs / "dev/shm").rmdir()
    (node.rootfs / "dev/shm").symlink_to(tmp_path)
    with pytest.raises(OSError):
        shm_opener(node.look(), "/dev/shm", str(node.proc))()


def test_a_pid_that_was_given_away_leads_nowhere(tmp_path: Path) -> None:
    node = Node(tmp_path, MONITOR, container_init()).inside(50)
    seen = node.look()
    stat = node.proc / "50/stat"
    stat.write_text(stat.read_text().replace(" 1050 ", " 7777 "))
    with pytest.raises(ProcessLookupError):
        shm_opener(seen, "/dev/shm", str(node.proc))()
    with pytest.raises(FileNotFoundError, match="no living process of container 129"):
        shm_opener(Guest(VMID, "stopped"), "/dev/shm", str(node.proc))()
