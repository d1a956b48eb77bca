# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel's kill of a whole cgroup: only written where everybody in it may go."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.act.cgroup_kill import kill_cgroup

PATH = "/lxc/129/ns/system.slice/x.service"


class Hierarchy:
    """A cgroup mount in a directory: plain files, in which a kill is a ``1`` that was written."""

    def __init__(self, top: Path, kind: str = "cgroup2 cgroup2 rw", root: str = "/") -> None:
        self.proc = top / "proc"
        self.point = top / "cgroup"
        self.point.mkdir()
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self" / "mountinfo").write_text(f"35 24 0:30 {root} {self.point} rw,nosuid shared:9 - {kind}\n")

    def group(self, path: str, *pids: int, kill: bool = True) -> Path:
        directory = self.point / path.strip("/")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        if kill:
            (directory / "cgroup.kill").write_text("")
        return directory

    def kill(self, path: str = PATH, spared: t.Collection[int] = ()) -> str | None:
        return kill_cgroup(path, lambda pid: "left alone" if pid in spared else None, str(self.proc))

    @property
    def killed(self) -> list[str]:
        written = (one for one in self.point.rglob("cgroup.kill") if one.read_text())
        return sorted("/" + str(one.parent.relative_to(self.point)) for one in written)


@pytest.fixture
def hierarchy(tmp_path: Path) -> Hierarchy:
    return Hierarchy(tmp_path)


def test_the_cgroup_that_is_meant_and_no_other(hierarchy: Hierarchy) -> None:
    hierarchy.group(PATH, 100, 101)
    hierarchy.group(PATH + "/ranks", 102)
    hierarchy.group("/lxc/129/ns/system.slice/y.service", 103)
    hierarchy.group("/lxc/130/ns/system.slice/x.service", 200)
    hierarchy.group("/system.slice/x.service", 300)
    assert hierarchy.kill() is None
    assert hierarchy.killed == [PATH]
    assert (hierarchy.point / PATH.strip("/") / "cgroup.kill").read_text() == "1"


@pytest.mark.parametrize("spared", [100, 102])
def test_somebody_in_it_who_must_stay(hierarchy: Hierarchy, spared: int) -> None:
    hierarchy.group(PATH, 100, 101)
    hierarchy.group(PATH + "/ranks", 102)
    refused = hierarchy.kill(spared={spared, 999})
    assert refused is not None and f"pid {spared}" in refused and "left alone" in refused
    assert hierarchy.killed == []
    assert hierarchy.kill(spared={999}) is None


def test_who_is_in_it_is_not_known(hierarchy: Hierarchy) -> None:
    hierarchy.group(PATH, 100)
    procs = hierarchy.group(PATH + "/ranks") / "cgroup.procs"
    procs.unlink()
    procs.mkdir()
    refused = hierarchy.kill()
    assert refused is not None and "can't be read" in refused
    assert hierarchy.killed == []


def test_an_older_kernel(hierarchy: Hierarchy) -> None:
    hierarchy.group(PATH, 100, kill=False)
    hierarchy.group("/lxc/129/ns/system.slice", 100)
    refused = hierarchy.kill()
    assert refused is not None and "5.14" in refused
    assert hierarchy.killed == []


@pytest.mark.parametrize("path", ["/lxc/129/ns/none.service", "/lxc/129/../130", "/../x"])
def test_a_cgroup_that_is_not_there(hierarchy: Hierarchy, path: str) -> None:
    hierarchy.group("/lxc/129", 100)
    hierarchy.group("/lxc/130", 200)
    refused = hierarchy.kill(path)
    assert refused is not None and "no cgroup v2 hierarchy" in refused
    assert hierarchy.killed == []


def test_v1_has_no_such_file_and_one_that_is_called_so_is_not_written(tmp_path: Path) -> None:
    hierarchy = Hierarchy(tmp_path, "cgroup cgroup rw,memory")
    hierarchy.group(PATH, 100)
    assert "no cgroup v2 hierarchy" in (hierarchy.kill() or "")
    assert hierarchy.killed == []


def test_a_mount_that_shows_a_part_only(tmp_path: Path) -> None:
    hierarchy = Hierarchy(tmp_path, root="/lxc/129")
    hierarchy.group("/ns/system.slice/x.service", 100)
    hierarchy.group("/system.slice/x.service", 300)
    assert hierarchy.kill() is None
    assert hierarchy.killed == ["/ns/system.slice/x.service"]
    assert "no cgroup v2 hierarchy" in (hierarchy.kill("/system.slice/x.service") or "")


def test_mounts_that_cannot_be_read(hierarchy: Hierarchy) -> None:
    hierarchy.group(PATH, 100)
    (hierarchy.proc / "self" / "mountinfo").unlink()
    assert hierarchy.kill() is not None
    assert hierarchy.killed == []


def test_the_kernels_refusal_is_told(hierarchy: Hierarchy) -> None:
    directory = hierarchy.group(PATH, 100, kill=False)
    (directory / "cgroup.kill").mkdir()
    assert "Is a directory" in (hierarchy.kill() or "")
