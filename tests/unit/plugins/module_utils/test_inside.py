# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of a container, of which its root makes what he likes. Both ways: openat2, and the walk on an old kernel."""

from __future__ import annotations

import errno
import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import inside
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.inside import (
    device_numbers,
    load_inside,
    open_inside,
    read_inside,
    real_path_inside,
)

PID = 50
SECRET = "of the node"


class Container:
    """Process 50 of a recorded tree, whose root directory is ``root``; beside it lies a file of the node."""

    def __init__(self, top: Path) -> None:
        self.proc = top / "proc"
        self.root = top / "rootfs"
        (self.proc / str(PID)).mkdir(parents=True)
        (self.root / "etc").mkdir(parents=True)
        (self.proc / str(PID) / "root").symlink_to(self.root)
        self.nodes_file = top / "etc" / "passwd"
        self.nodes_file.parent.mkdir()
        self.nodes_file.write_text(SECRET)
        (self.root / "etc" / "passwd").write_text("inner")

    def link(self, name: str, target: str | Path) -> str:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).symlink_to(target)
        return "/" + name

    def read(self, path: str, **options: t.Any) -> str | None:
        return read_inside(PID, path, str(self.proc), **options)

    def load(self, path: str) -> str | None:
        return load_inside(PID, path, str(self.proc))


def no_openat2(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_root: int, path: str, _flags: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)

    monkeypatch.setattr(inside, "_openat2", refuse)


@pytest.fixture(params=["openat2", "walk"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "walk":
        no_openat2(monkeypatch)
    return str(request.param)


@pytest.fixture
def container(tmp_path: Path, way: str) -> Container:
    return Container(tmp_path)


@pytest.fixture(autouse=True)
def nothing_stays_open() -> t.Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"


def test_a_plain_file(container: Container) -> None:
    assert container.read("/etc/passwd") == container.load("/etc/passwd") == "inner"
    assert container.read("/etc/./passwd") == container.read("etc//passwd") == "inner"
    assert container.read("/etc/passwd", limit=3) == "inn"


def test_an_absolute_link_is_the_containers_own(container: Container, way: str) -> None:
    """To the node's own file, by a path that exists outside: what is read is the container's, or nothing."""
    (container.root / "inner.txt").write_text("inner")
    good, bad = container.link("good", "/inner.txt"), container.link("bad", container.nodes_file)
    assert container.read(good) == ("inner" if way == "openat2" else None)
    assert container.read(bad) is None
    folder = container.link("folder", container.nodes_file.parent)
    assert container.read(f"{folder}/passwd") is None
    inner = container.link("var", "/etc")
    assert container.read(f"{inner}/passwd") == ("inner" if way == "openat2" else None)


@pytest.mark.parametrize("ups", [1, 3, 12])
def test_dots_do_not_lead_out(container: Container, way: str, ups: int) -> None:
    path = "../" * ups + "etc/passwd"
    expected = "inner" if way == "openat2" else None
    assert container.read("/" + path) == expected
    assert container.read("/etc/" + path) == expected
    assert container.read(container.link("sub/link", path)) == expected


def test_a_link_to_itself(container: Container) -> None:
    path = container.link("loop", "loop")
    assert container.read(path) is None
    with pytest.raises(OSError):
        container.load(path)


@pytest.mark.parametrize("path", ["/proc/self/root/etc/hostname", "/proc/self/cwd", "/proc/self/exe"])
def test_a_magic_link_is_not_followed(way: str, path: str) -> None:
    """In a container's /proc they lead to wherever the process that they belong to is."""
    assert os.path.lexists(path.replace("/etc/hostname", ""))
    assert read_inside(os.getpid(), path) is None
    if path.endswith("exe"):
        with pytest.raises(OSError):
            load_inside(os.getpid(), path)
    else:
        with pytest.raises(OSError):
            open_inside(os.getpid(), path, os.O_RDONLY | os.O_DIRECTORY)


def test_only_regular_files_are_opened(container: Container) -> None:
    os.mkfifo(container.root / "fifo")
    for path in ("/fifo", "/etc"):
        assert container.read(path) is None
        with pytest.raises(OSError, match="no regular file"):
            container.load(path)


def test_a_device_is_not_opened_and_says_so(way: str) -> None:
    with pytest.raises(OSError, match="no regular file"):
        load_inside(os.getpid(), "/dev/zero")


def test_what_is_not_there_is_no_error(container: Container) -> None:
    assert container.load("/none") is None
    assert container.load("/etc/passwd/below") is None
    assert container.read("/none") is None


def test_a_nul_and_a_process_that_is_gone(container: Container) -> None:
    assert container.read("/etc/pass\0wd") is None
    with pytest.raises(ValueError):
        container.load("/etc/pass\0wd")
    assert read_inside(77, "/etc/passwd", str(container.proc)) is None
    with pytest.raises(OSError):
        open_inside(77, "/", os.O_RDONLY | os.O_DIRECTORY, str(container.proc))


def test_a_directory_can_be_opened(container: Container) -> None:
    fd = open_inside(PID, "/etc", os.O_RDONLY | os.O_DIRECTORY, str(container.proc))
    try:
        assert os.listdir(fd) == ["passwd"]
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
    with pytest.raises(NotADirectoryError):
        open_inside(PID, "/etc/passwd", os.O_RDONLY | os.O_DIRECTORY, str(container.proc))


def test_an_error_of_the_kernel_is_no_reason_to_walk(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    """EXDEV or EAGAIN is openat2's refusal: another way must not be tried after it."""

    def refuse(_root: int, path: str, _flags: int) -> int:
        raise OSError(errno.EAGAIN, "try again", path)

    monkeypatch.setattr(inside, "_openat2", refuse)
    monkeypatch.setattr(inside, "_walk", lambda *_unused: pytest.fail("the walk was tried"))
    assert container.read("/etc/passwd") is None


def test_the_path_behind_links_is_named_as_the_process_names_it(tmp_path: Path) -> None:
    container = Container(tmp_path)
    (container.root / "usr").mkdir()
    (container.root / "usr" / "python3.11").write_text("")
    link = container.link("venv/bin/python", "/usr/python3.11")
    assert real_path_inside(PID, link, str(container.proc)) == str(container.root / "usr" / "python3.11")
    assert real_path_inside(PID, "/none", str(container.proc)) is None
    assert real_path_inside(77, link, str(container.proc)) is None


# --- device nodes ---


def test_the_numbers_of_device_nodes(way: str) -> None:
    nodes = device_numbers(os.getpid(), "/dev")
    assert nodes is not None
    assert {("null", 1, 3), ("zero", 1, 5)} <= set(nodes)
    assert not {"shm", "pts", "fd", "stdin"} & {name for name, _major, _minor in nodes}


def test_links_and_files_are_no_device_nodes(container: Container) -> None:
    (container.root / "dev").mkdir()
    (container.root / "dev" / "nvidia0").symlink_to("/dev/null")
    (container.root / "dev" / "nvidia1").write_text("")
    os.mkfifo(container.root / "dev" / "nvidia2")
    assert device_numbers(PID, "/dev", str(container.proc)) == []


def test_a_directory_that_cannot_be_read_is_not_an_empty_one(container: Container) -> None:
    assert device_numbers(PID, "/dev", str(container.proc)) is None
    assert device_numbers(PID, "/etc/passwd", str(container.proc)) is None
    assert device_numbers(77, "/etc", str(container.proc)) is None
