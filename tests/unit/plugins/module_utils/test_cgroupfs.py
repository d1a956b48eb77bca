# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where cgroups are mounted, and who is in one: v1, v2 and hybrid hosts."""

from __future__ import annotations

import errno
import os
import typing as t
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import cgroupfs
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.cgroupfs import (
    CgroupMount,
    directories_of,
    guest_directories,
    parse_mounts,
    pids_below,
    read_mounts,
    rebase,
)

V2 = b"35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
UNIFIED = b"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
MEMORY = b"35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
SYSTEMD = b"34 31 0:31 / /sys/fs/cgroup/systemd rw,relatime shared:8 master:2 - cgroup cgroup rw,xattr,name=systemd\n"


def test_one_hierarchy() -> None:
    assert parse_mounts(b"24 1 0:5 / /dev rw - devtmpfs udev rw\n" + V2) == [CgroupMount(2, "/", "/sys/fs/cgroup")]


def test_a_host_with_both_tells_v2_first(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_bytes(MEMORY + SYSTEMD + UNIFIED)
    mounts = read_mounts(str(tmp_path))
    assert mounts is not None
    assert [(one.version, one.point) for one in mounts] == [
        (2, "/sys/fs/cgroup/unified"),
        (1, "/sys/fs/cgroup/memory"),
        (1, "/sys/fs/cgroup/systemd"),
    ]
    assert "memory" in mounts[1].controllers and "name=systemd" in mounts[2].controllers


def test_a_table_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    assert read_mounts(str(tmp_path)) is None


def test_blanks_in_paths() -> None:
    line = rb"35 24 0:30 /a\040b\134c /sys/fs/cgroup/x\011y rw - cgroup2 cgroup2 rw" + b"\n"
    assert parse_mounts(line) == [CgroupMount(2, "/a b\\c", "/sys/fs/cgroup/x\ty")]


@pytest.mark.parametrize(
    "line", [b"", b"garbage", V2.replace(b" - ", b" "), b"35 24 - cgroup2 x y", b"1 2 3 4 5 6 - cgroup2"]
)
def test_lines_that_make_no_sense_are_passed_over(line: bytes) -> None:
    assert parse_mounts(line + b"\n" + V2) == [CgroupMount(2, "/", "/sys/fs/cgroup")]


@given(st.binary())
def test_no_bytes_make_it_raise(data: bytes) -> None:
    assert isinstance(parse_mounts(data), list)


def test_a_recorded_sys_stands_for_sys_and_for_nothing_else() -> None:
    assert rebase("/sys/fs/cgroup", "/tmp/sys") == "/tmp/sys/fs/cgroup"
    assert rebase("/sys", "/tmp/sys") == "/tmp/sys"
    assert rebase("/system", "/tmp/sys") is None
    assert rebase("/cgroup2", "/tmp/sys") is None
    assert rebase("/cgroup2", "/sys") == "/cgroup2"


# --- where a cgroup is found ---


def make(*directories: Path) -> None:
    for one in directories:
        one.mkdir(parents=True, exist_ok=True)


def test_a_container_is_found_in_each_hierarchy_that_has_it(tmp_path: Path) -> None:
    v2, memory, other = tmp_path / "unified", tmp_path / "memory", tmp_path / "cpu"
    make(v2 / "lxc/129", memory / "lxc/129", other / "lxc/130", v2 / "lxc/1299")
    mounts = [
        CgroupMount(2, "/", str(v2)),
        CgroupMount(1, "/", str(memory), frozenset({"memory"})),
        CgroupMount(1, "/", str(other), frozenset({"cpu"})),
    ]
    assert guest_directories("129", mounts) == [str(v2 / "lxc/129"), str(memory / "lxc/129")]
    assert guest_directories("131", mounts) == []
    assert guest_directories("..", mounts) == []


@pytest.mark.parametrize("name", ["lxc/129", "lxc.payload/129", "lxc.payload.129"])
def test_the_names_that_lxc_gives(tmp_path: Path, name: str) -> None:
    make(tmp_path / name)
    assert guest_directories("129", [CgroupMount(2, "/", str(tmp_path))]) == [str(tmp_path / name)]


def test_a_bind_mount_shows_a_part(tmp_path: Path) -> None:
    point = tmp_path / "cgroup"
    make(point / "ns", point / "lxc/129", tmp_path / "cgroup9")
    mounts = [CgroupMount(2, "/lxc/129", str(point))]
    assert directories_of("/lxc/129", mounts) == [str(point)]
    assert directories_of("/lxc/129/ns", mounts) == [str(point / "ns")]
    assert directories_of("/lxc/129/none", mounts) == []
    assert directories_of("/lxc/1299", mounts) == []
    assert directories_of("/lxc", mounts) == []


def test_dots_lead_nowhere_and_the_same_mount_counts_once(tmp_path: Path) -> None:
    make(tmp_path / "lxc/129")
    mounts = [CgroupMount(2, "/", str(tmp_path))] * 2
    assert directories_of("/lxc/129", mounts) == [str(tmp_path / "lxc/129")]
    assert directories_of("/lxc/129/../129", mounts) == []


# --- who is in it ---


def group(directory: Path, *pids: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    return directory


def test_everybody_in_it_and_below(tmp_path: Path) -> None:
    top = group(tmp_path / "129")
    group(top / "ns", 50)
    group(top / "ns/system.slice/x.service", 100, 101)
    group(tmp_path / "130", 200)
    assert pids_below(str(top)) == frozenset({50, 100, 101})


def test_one_that_has_vanished_is_empty(tmp_path: Path) -> None:
    assert pids_below(str(tmp_path / "none")) == frozenset()
    assert pids_below(str(group(tmp_path / "129"))) == frozenset()


@pytest.mark.parametrize("below", ["", "ns", "ns/x.service"])
def test_a_list_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, below: str) -> None:
    top = group(tmp_path / "129", 7)
    group(top / "ns", 50)
    group(top / "ns/x.service", 100)
    (top / below / "cgroup.procs").unlink()
    (top / below / "cgroup.procs").mkdir()
    assert pids_below(str(top)) is None


@pytest.mark.parametrize(
    ("number", "where", "known"),
    [
        (errno.EOPNOTSUPP, "ns/x.service", True),  # a threaded cgroup, whose processes its domain lists
        (errno.EOPNOTSUPP, "", False),
        (errno.ENODEV, "ns/x.service", True),  # removed since
        (errno.EACCES, "ns/x.service", False),
        (errno.ENAMETOOLONG, "ns/x.service", False),
    ],
)
def test_what_the_kernel_answers_instead_of_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str, known: bool
) -> None:
    top = group(tmp_path / "129", 7)
    group(top / "ns", 50, 100)
    group(top / "ns/x.service", 100)
    refusing = str(top / where / "cgroup.procs") if where else str(top / "cgroup.procs")

    def opened(path: str, *options: t.Any, **more: t.Any) -> t.Any:
        if path == refusing:
            raise OSError(number, os.strerror(number), path)
        return open(path, *options, **more)

    monkeypatch.setattr(cgroupfs, "open", opened, raising=False)
    assert pids_below(str(top)) == (frozenset({7, 50, 100}) if known else None)


def test_a_deep_tree_is_followed_to_its_end(tmp_path: Path) -> None:
    """Deeper than Python may recurse; a container makes as many cgroups as it likes."""
    path = str(group(tmp_path / "129", 7))
    depth = 1200
    for _unused in range(depth):
        path += "/a"
        os.mkdir(path)
        with open(f"{path}/cgroup.procs", "w", encoding="ascii"):
            pass
    with open(f"{path}/cgroup.procs", "w", encoding="ascii") as stream:
        stream.write("42\n")
    try:
        assert pids_below(str(tmp_path / "129")) == frozenset({7, 42})
    finally:
        for _unused in range(depth):  # shutil.rmtree recurses
            os.unlink(f"{path}/cgroup.procs")
            os.rmdir(path)
            path = path[:-2]


@pytest.mark.parametrize(
    ("error", "known"), [(PermissionError(13, "denied"), False), (FileNotFoundError(2, "gone"), True)]
)
def test_a_directory_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, known: bool
) -> None:
    top = group(tmp_path / "129", 7)
    closed = group(top / "ns", 50)
    really = os.scandir

    def scandir(path: t.Any = ".") -> t.Any:
        if os.fspath(path) == str(closed):
            raise error
        return really(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert pids_below(str(top)) == (frozenset({7}) if known else None)


def test_a_tree_without_an_end_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroupfs, "MAX_CGROUPS", 4)
    top = group(tmp_path / "129", 7)
    for number in range(3):
        group(top / str(number), 100 + number)
    assert pids_below(str(top)) == frozenset({7, 100, 101, 102})
    group(top / "3", 103)
    assert pids_below(str(top)) is None
