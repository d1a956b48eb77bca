# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An eviction from the node: what a container's own launch record may say, and what is removed from its shared memory.

The container writes the record, so it is a claim of the container's, never one about anybody else.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils import evict as evict_module
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.climb import Climber
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.targets import RecordedLaunch, Request, select
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.evict import Order, evict
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process, ShmFile, ShmReading
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import inside as reading_inside
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import pve
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.look import LookOptions
from ansible_collections.cleanslate.sglang.plugins.module_utils.proxmox import GuestConfig
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.record import CURRENT, Record
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Guest, Snapshot
from ansible_collections.cleanslate.sglang.tests.unit.builders import BOOT, LEADER, PYTHON, leader, process
from ansible_collections.cleanslate.sglang.tests.unit.guest_builders import (
    INIT,
    OTHER,
    UNIT,
    VMID,
    guest,
    inside,
    node,
)

STATE = "/var/lib/cleanslate"
CONFIG = f"{STATE}/main/launches/x/config.yaml"
INNER_BOOT = "boot-of-the-container"
WORKER = "sglang::scheduler_TP0"


def record(**changes: t.Any) -> Record:
    values: dict[str, t.Any] = {
        "name": "main",
        "launch_id": "20260131T235959Z-1a2b",
        "state": "started",
        "launcher": "direct",
        "boot_id": INNER_BOOT,
        "pid": 60,
        "start_ticks": 1100,
        "sid": 60,
    }
    return Record(**{**values, **changes})


class Host:
    """A node with a recorded /proc; the container's files lie below ``rootfs``."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proc, self.rootfs = top / "proc", top / "rootfs"
        (self.proc / str(INIT)).mkdir(parents=True)
        (self.proc / str(INIT) / "root").symlink_to(self.rootfs)
        (self.proc / str(INIT) / "uid_map").write_text("0 0 4294967295\n")
        (self.proc / "sys/kernel/random").mkdir(parents=True)
        (self.proc / "sys/kernel/random/boot_id").write_text(BOOT + "\n")
        (self.rootfs / STATE.strip("/") / "main").mkdir(parents=True)
        self.path = self.rootfs / STATE.strip("/") / "main" / CURRENT
        self.seen = node()
        self.changes: dict[str, t.Any] = {"boot_id": INNER_BOOT, "uid_base": os.geteuid()}
        monkeypatch.setattr(evict_module, "bounded_view", lambda _options: self.view())

    def view(self) -> tuple[t.Any, ...]:
        looked_at = self.seen.guest
        assert looked_at is not None
        changed = None if self.changes.get("gone") else dataclasses.replace(looked_at, **self.changes)
        return dict(self.seen.processes), self.seen.scan, self.seen.leaders, changed

    def order(self, **changes: t.Any) -> Order:
        return Order(LookOptions(container=VMID, proc=str(self.proc)), **{"name": "main", **changes})

    def has(self, *processes: Process) -> Snapshot:
        leaders = [leader(one) for one in processes if one.argv[1:3] == LEADER[1:3]]
        self.seen = node(*processes, leaders=leaders)
        return self.seen

    def write(self, text: str | bytes) -> None:
        self.path.write_bytes(text.encode() if isinstance(text, str) else text)
        self.path.chmod(0o644)

    def find(self, **changes: t.Any) -> Record | None:
        return evict_module._find_record(self.order(**changes))

    def recorded(self, **changes: t.Any) -> RecordedLaunch:
        return evict_module._recorded(record(**changes), self.order())

    def selected(self, **changes: t.Any) -> list[int]:
        request = Request(name="main", record=self.recorded(**changes))
        return sorted(target.process.pid for target in select(self.seen, request).everybody)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def text_of(**changes: t.Any) -> str:
    return json.dumps({**dataclasses.asdict(record()), **changes})


# --- where it is read ---


def test_the_record_is_the_containers_own(host: Host) -> None:
    assert host.find() is None
    host.write(text_of(pid=77))
    found = host.find()
    assert found is not None and found.pid == 77


def test_a_record_of_the_node_is_never_taken_for_it(host: Host, tmp_path: Path) -> None:
    """By a link, or by dots in the name: what would be found is a file of the node."""
    outside = tmp_path / "main"
    outside.mkdir()
    (outside / CURRENT).write_text(text_of(pid=77))
    assert host.find(state_dir=str(tmp_path)) is None
    host.path.symlink_to(outside / CURRENT)
    assert host.find() is None
    for name in ("../main", "a/b", "..", "a\0b"):
        with pytest.raises(CleanSlateError, match="no name of a server"):
            host.find(name=name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        b"\xff\xfe\x00",
        "[" * 100_000,
        text_of(pid="1"),
        text_of(pid=-1),
        text_of(pid=True),
        text_of(pid=1.0),
        text_of(name="../x"),
        text_of(state="gone"),
        text_of(argv=7),
        text_of(flags=[]),
        text_of(config=7),
    ],
    ids=lambda text: str(text)[:20],
)
def test_a_record_that_makes_no_sense_is_no_absent_one(host: Host, text: str | bytes) -> None:
    host.write(text)
    with pytest.raises(CleanSlateError, match="can't be used"):
        host.find()


def test_a_record_of_another_server_is_none(host: Host) -> None:
    host.write(text_of(name="other"))
    assert host.find() is None


def test_a_record_that_is_no_file(host: Host) -> None:
    os.mkfifo(host.path)
    with pytest.raises(CleanSlateError, match="no regular file"):
        host.find()
    host.path.unlink()
    host.path.symlink_to(CURRENT)
    with pytest.raises(CleanSlateError, match="can't be read"):
        host.find()


def test_a_record_that_others_may_change(host: Host) -> None:
    host.write(text_of())
    host.path.chmod(0o666)
    with pytest.raises(CleanSlateError, match="others may change it"):
        host.find()
    host.path.chmod(0o644)
    host.changes["uid_base"] = 100_000
    with pytest.raises(CleanSlateError, match=f"uid {os.geteuid()} or others"):
        host.find()


def test_a_record_that_hangs_is_no_absent_one(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evict_module, "SHM_DEADLINE_S", 0.2)
    monkeypatch.setattr(reading_inside, "load_inside", lambda *_a, **_k: time.sleep(60))
    with pytest.raises(CleanSlateError, match="no answer within 0.2 s"):
        host.find()


def test_without_anybody_who_leads_to_its_files_there_is_none(host: Host) -> None:
    host.write(text_of())
    host.changes["root_pid"] = None
    assert host.find() is None


# --- whom it means ---


def test_a_living_leader_by_its_own_pid(host: Host) -> None:
    host.has(inside(100, LEADER), inside(101, WORKER, ppid=100))
    found = host.recorded()
    assert (found.pid, found.start_ticks, found.sid, found.boot_id, found.program) == (100, 1100, 100, BOOT, PYTHON)
    assert host.selected() == [100, 101]


def test_the_nodes_boot_id_names_this_boot_as_well(host: Host) -> None:
    """Without lxc.autodev a container has no boot id of its own."""
    host.has(inside(100, LEADER))
    host.changes["boot_id"] = None
    assert host.recorded(boot_id=BOOT).pid == 100
    assert host.recorded(boot_id=None).pid is None


@pytest.mark.parametrize(
    "changes", [{"boot_id": "older"}, {"boot_id": None}, {"start_ticks": 1}, {"start_ticks": None}, {"pid": None}]
)
def test_another_boot_or_another_process_is_not_meant(host: Host, changes: dict[str, t.Any]) -> None:
    host.has(inside(100, LEADER), inside(101, WORKER, sid=100, nssid=(100, 60)))
    assert host.recorded(**changes).pid is None
    assert host.selected(**changes) == []


def test_a_pid_of_the_node_or_of_another_container_is_not_meant(host: Host) -> None:
    """The number 60 is the record's; our own pid 60, and the other container's, are others."""
    nodes = process(60, LEADER, start_ticks=1100)
    theirs = inside(200, LEADER, vmid=OTHER, nspid=(200, 60), start_ticks=1100)
    nested = inside(300, LEADER, nspid=(300, 260, 60), start_ticks=1100)
    attached = inside(61, LEADER, nspid=(61,), start_ticks=1100)
    host.has(nodes, theirs, nested, attached)
    assert host.recorded().pid is None
    assert host.recorded(pid=61).pid is None
    assert host.selected() == host.selected(pid=61) == []


def test_a_dead_one_is_not_meant(host: Host) -> None:
    host.has(inside(100, LEADER, state="Z"))
    assert host.recorded().pid is None


# --- by its configuration ---


def with_config(pid: int, path: str = CONFIG, **changes: t.Any) -> Process:
    return inside(pid, (*LEADER[:3], "--config", path), **changes)


def test_by_the_launchs_configuration_where_systemd_started_it_anew(host: Host) -> None:
    host.has(with_config(100, start_ticks=9999), with_config(110, CONFIG + "2"))
    found = host.recorded(config=CONFIG)
    assert (found.pid, found.start_ticks) == (100, 9999)
    assert host.recorded(config=CONFIG, pid=None, start_ticks=None).pid == 100


@pytest.mark.parametrize("config", ["-m", "--config", "sglang.launch_server", "30000", "/usr/bin/vim", ""])
def test_a_word_that_is_no_configuration_names_nobody(host: Host, config: str) -> None:
    host.has(inside(100, (*LEADER, "--config", "c.yaml")), inside(101, ("/usr/bin/vim", "/usr/bin/vim")))
    assert host.recorded(config=config, pid=5).pid is None
    assert host.selected(config=config, pid=5) == []


def test_the_very_process_comes_before_its_configuration(host: Host) -> None:
    host.has(with_config(90), inside(100, LEADER))
    assert host.recorded(config=CONFIG).pid == 100


def test_the_configuration_on_anothers_command_line_names_nobody(host: Host) -> None:
    words = (*LEADER[:3], "--config", CONFIG)
    host.has(process(100, words), inside(200, words, vmid=OTHER))
    assert host.selected(config=CONFIG, pid=5) == []


# --- the session and the unit of a dead leader ---


def test_orphans_of_its_session(host: Host) -> None:
    host.has(
        inside(101, WORKER, sid=95, nssid=(95, 60)),
        inside(102, WORKER, sid=96, nssid=(96, 61)),
        inside(201, WORKER, vmid=OTHER, sid=97, nssid=(97, 60)),
        process(301, WORKER, sid=60, nssid=(60,)),
    )
    found = host.recorded()
    assert (found.pid, found.sid, found.boot_id, found.own_session) == (None, 95, BOOT, True)
    assert host.selected() == [101]


def test_a_session_of_a_nested_container_is_another_one(host: Host) -> None:
    host.has(inside(101, WORKER, sid=95, nspid=(101, 61, 8), nssid=(95, 55, 60)))
    assert (host.recorded().sid, host.selected()) == (None, [])


def test_two_sessions_of_that_number_are_none(host: Host) -> None:
    host.has(inside(101, WORKER, sid=95, nssid=(95, 60)), inside(102, WORKER, sid=96, nssid=(96, 60)))
    assert (host.recorded().sid, host.selected()) == (None, [])


def test_a_number_that_somebody_else_got_since_is_no_session_of_its(host: Host) -> None:
    host.has(inside(100, ("bash",), start_ticks=5000), inside(101, WORKER, sid=100, nssid=(100, 60)))
    assert (host.recorded().sid, host.selected()) == (None, [])


def test_a_session_that_the_launch_did_not_make_is_none(host: Host) -> None:
    host.has(inside(101, WORKER, sid=95, nssid=(95, 50)))
    found = host.recorded(sid=50)
    assert (found.sid, found.own_session) == (95, False)
    assert host.selected(sid=50) == []


def test_orphans_of_its_unit(host: Host) -> None:
    below = f"/ns/system.slice/{UNIT}"
    host.has(
        inside(101, WORKER, below, nspid=(101,)),
        inside(201, WORKER, below, OTHER),
        process(301, WORKER, cgroups=(f"/system.slice/{UNIT}",)),
    )
    assert host.selected(unit=UNIT) == [101]
    assert host.selected(unit=UNIT, boot_id="older") == []


# --- its shared memory ---


def climbed(seen: Snapshot, monkeypatch: pytest.MonkeyPatch, **report: t.Any) -> None:
    def climb(self: Climber) -> None:
        self.after = seen
        for name, value in report.items():
            setattr(self.report, name, value)

    monkeypatch.setattr(Climber, "climb", climb)


def leftover(path: Path, creator: int = 777) -> ShmFile:
    info = path.stat()
    return ShmFile(path.name, 1.0, info.st_uid, 0.0, creator, False, (), (), info.st_dev, info.st_ino)


def test_only_the_containers_own_shared_memory_is_cleared(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    shm = host.rootfs / "dev/shm"
    shm.mkdir(parents=True)
    file = shm / "sgl_shm_mq_777_a"
    file.write_text("")
    stat = host.proc / str(INIT) / "stat"
    stat.write_text(f"{INIT} (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1050 0 0\n")
    seen = node(guest_changes={"root_start": 1050})

    def read(path: str, _proc: str, opener: t.Callable[[], int], inner: frozenset[int]) -> ShmReading:
        fd = opener()
        names = os.listdir(fd)
        os.close(fd)
        return ShmReading(
            path, 1, 1, 1, tuple(leftover(shm / name) for name in names), scan_complete=inner == frozenset()
        )

    monkeypatch.setattr(evict_module, "read_shm", read)
    climbed(seen, monkeypatch)
    monkeypatch.setattr(evict_module, "_validate", lambda _order: None)
    result = evict(host.order(name=None, port=1))
    assert result["leftovers"] == {"removed": [file.name], "kept": []}
    assert not file.exists()


def test_a_removal_that_hangs_costs_its_deadline(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    file = host.rootfs / "sgl_shm_mq_777_a"
    file.write_text("")
    reading = ShmReading("/dev/shm", 1, 1, 1, (leftover(file),))
    monkeypatch.setattr(evict_module, "SHM_DEADLINE_S", 0.3)
    monkeypatch.setattr(evict_module, "read_shm", lambda *_unused: reading)
    monkeypatch.setattr(evict_module, "remove_leftover", lambda *_unused: time.sleep(60))
    monkeypatch.setattr(evict_module, "_validate", lambda _order: None)
    climbed(node(), monkeypatch)
    started = time.monotonic()
    result = evict(host.order(name=None, port=1))
    assert time.monotonic() - started < 10
    (kept,) = result["leftovers"]["kept"]
    assert "no answer within 0.3 s" in kept["why"] and file.exists()


# --- nobody there ---


@pytest.mark.parametrize(
    ("state", "exists", "verdict", "codes"),
    [
        ("stopped", True, "nothing_to_do", []),
        ("stopped", False, "failed", ["container_not_here"]),
        ("stopped", None, "unknown", ["container_unknown"]),
        ("unknown", True, "unknown", ["container_unknown"]),
        ("running", None, "nothing_to_do", []),
    ],
)
def test_nobody_there_is_only_good_news_of_a_container_that_is_known(
    host: Host, monkeypatch: pytest.MonkeyPatch, state: str, exists: bool | None, verdict: str, codes: list[str]
) -> None:
    looked_at: Guest = guest(state=state, root_pid=None, init_pid=None, inits=frozenset())
    climbed(dataclasses.replace(node(), guest=looked_at), monkeypatch)
    monkeypatch.setattr(pve, "read_guest", lambda vmid, _dir: GuestConfig(vmid, exists))
    monkeypatch.setattr(evict_module, "_validate", lambda _order: None)
    result = evict(host.order(name=None, port=1))
    assert (result["verdict"], [one["code"] for one in result["reasons"]]) == (verdict, codes)
    assert result["container"]["state"] == state
