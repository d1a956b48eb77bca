# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What one look at a recorded host says of its launchers and of whom the operator protects."""

from __future__ import annotations

import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import look as looking
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.inside import read_inside
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.look import LookOptions, look_with
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Leader, Snapshot, Unit
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Proc, write_proc
from ansible_collections.cleanslate.sglang.tests.unit.builders import LEADER

MANAGER = "/user.slice/user-1000.slice/user@1000.service"
LAUNCH = LEADER[:3]


def see(tmp_path: Path, *processes: Proc, **options: t.Any) -> Snapshot:
    proc = write_proc(tmp_path / "proc", [Proc(1, "/sbin/init", ppid=0), *processes])
    return look_with(LookOptions(proc=str(proc), expected_gpus=0, **options), looking.NO_GPUS)


def launcher(tmp_path: Path, *words: str, **environ: str) -> Leader:
    (found,) = see(tmp_path, Proc(700, (*LAUNCH, *words), environ=environ)).leaders
    return found


def test_a_unit_of_a_users_manager_can_be_protected_but_owns_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def read_unit(name: str, _deadline_s: float) -> Unit:
        asked.append(name)
        return Unit(name, 702, "always", "active", "loaded")

    # systemd is asked about the live /proc only, so the same processes are looked at as if they were there.
    monkeypatch.setattr(looking, "read_unit", read_unit)
    monkeypatch.setattr(looking, "has_systemd", lambda: True)
    user = Proc(701, LEADER, cgroup=f"0::{MANAGER}/app.slice/chat.service\n")
    system = Proc(702, LEADER, cgroup="0::/system.slice/x.service\n")
    seen = see(tmp_path, user, system)
    assert {pid: seen.units[pid] for pid in (701, 702)} == {701: "chat.service", 702: "x.service"}
    assert [one.unit for one in seen.leaders] == [None, None]
    on_live = LookOptions(proc="/proc")
    leaders = {one.process.pid: one.unit for one in looking.find_leaders(seen.processes, on_live)}
    assert asked == ["x.service"]
    assert (leaders[701], leaders[702] is not None) == (None, True)


@pytest.mark.parametrize(
    ("words", "first", "count"),
    [
        ([], 0, 1),
        (["--tp", "4"], 0, 4),
        (["--tp-size", "2", "--pp-size=2", "--base-gpu-id", "4"], 4, 4),
        (["--tp", "2", "--gpu-id-step", "2"], 0, 4),
        (["--tp", "2", "--dp", "2"], 0, 4),
        (["--tp", "2", "--dp", "2", "--enable-dp-attention"], 0, 2),
        (["--tp", "16", "--nnodes", "2"], 0, 8),
        (["--tp", "x"], None, None),
        (["--tp", "0"], None, None),
        (["--base-gpu-id=-1"], None, None),
        (["--num-gpus", "2"], None, None),
        (["--config", "/nowhere/x.yaml"], None, None),
    ],
)
def test_the_gpus_that_a_launcher_will_take_by_its_flags(
    tmp_path: Path, words: list[str], first: int | None, count: int | None
) -> None:
    found = launcher(tmp_path, *words)
    assert (found.first_gpu, found.gpu_count) == (first, count)


def test_its_device_and_the_order_of_its_gpus(tmp_path: Path) -> None:
    found = launcher(tmp_path, "--device", "cpu", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert (found.device, found.pci_bus_order) == ("cpu", True)
    (tmp_path / "b").mkdir()
    other = launcher(tmp_path / "b", CUDA_DEVICE_ORDER="FASTEST_FIRST")
    assert (other.device, other.pci_bus_order) == (None, False)


# --- configuration files that somebody else names ---


def test_a_configuration_file_is_read(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("port: 31000\ntp-size: 2\n")
    found = launcher(tmp_path, "--config", str(config))
    assert (found.port, found.gpu_count) == (31000, 2)


def test_a_fifo_as_a_configuration_file_is_not_opened(tmp_path: Path) -> None:
    """Opened for reading it would block, until the deadline fails the whole look."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    found = launcher(tmp_path, "--config", str(fifo))
    assert (found.port, found.gpu_count) == (None, None)


def test_only_regular_files_are_read_also_through_a_link(tmp_path: Path) -> None:
    file, link, fifo, to_fifo = (tmp_path / name for name in ("file", "link", "fifo", "to_fifo"))
    file.write_bytes(b"abc\xff")
    link.symlink_to(file)
    os.mkfifo(fifo)
    to_fifo.symlink_to(fifo)
    assert read_inside(os.getpid(), str(file)) == read_inside(os.getpid(), str(link)) == "abc\ufffd"
    assert read_inside(os.getpid(), str(file), limit=2) == "ab"
    for other in (fifo, to_fifo, tmp_path, tmp_path / "none", "/dev/zero", "a\0b"):
        assert read_inside(os.getpid(), str(other)) is None


def test_a_device_is_never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    really = os.open

    def record(path: str, flags: int) -> int:
        opened.append(flags)
        return really(path, flags)

    monkeypatch.setattr(os, "open", record)
    assert read_inside(os.getpid(), "/dev/zero") is None
    assert opened and all(flags & os.O_PATH for flags in opened)


@pytest.mark.parametrize(
    "text",
    [
        "tp-size: .inf\n",
        "tp-size: .nan\n",
        "base-gpu-id: 1e400\n",
        f"tp-size: 0x{'f' * 5000}\nenable-hierarchical-cache: true\nhicache-size: .inf\n",
        f"port: 0x{'f' * 5000}\n",
        "port: -1\n",
        "port: true\n",
        "port: [1]\n",
        'port: !!int ""\n',
        "port: 2026-01-01\n",
        "port: " + "[" * 3000 + "\n",
        "a: &a [x, x]\nb: &b [*a, *a]\nport: &c [*b, *b]\n",
        "\x00\xff",
    ],
    ids=lambda text: text[:16],
)
def test_no_configuration_makes_the_look_fail(tmp_path: Path, text: str) -> None:
    """It is anybody's text; one that made the look fail would keep all servers from being judged and evicted."""
    config = tmp_path / "x.yaml"
    config.write_text(text)
    assert launcher(tmp_path, "--config", str(config)).port in (None, looking.DEFAULT_PORT)
