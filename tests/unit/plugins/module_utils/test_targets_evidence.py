# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each kind of evidence by itself: whom it reaches, whom it does not, and that it is said in so many words."""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.targets import (
    Memory,
    RecordedLaunch,
    Request,
    Selection,
    nearest_leaders,
    owner_of,
    select,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Snapshot, Unit
from ansible_collections.cleanslate.sglang.tests.unit.builders import (
    BOOT,
    LEADER,
    PYTHON,
    gpu,
    holds,
    leader,
    process,
    snapshot,
    visits,
)

SPAWNED = ("/usr/bin/python3", "-c", "from multiprocessing.spawn import spawn_main; ...", "--multiprocessing-fork")
WORKER = "sglang::scheduler_TP0"
SERVER = process(100, LEADER)
RECORD = RecordedLaunch(100, 1100, 100, BOOT, None, None, PYTHON, own_session=True)
UNIT = Unit("chat.service", 100, "no", "active", "loaded", "/system.slice/chat.service")


def said(selection: Selection) -> dict[int, tuple[str, ...]]:
    """Who is selected, and why."""
    return {target.process.pid: target.why for target in selection.everybody}


def record(**changes: t.Any) -> Request:
    values = {**{name: getattr(RECORD, name) for name in RECORD.__dataclass_fields__}, **changes}
    return Request(name="chat", record=RecordedLaunch(**values))


# --- the server's own people ---


def test_whoever_is_below_the_leader() -> None:
    child = process(101, WORKER, ppid=100, sid=7, pgid=7)
    below = process(102, ("sh",), ppid=101, exe="/bin/sh", sid=7, pgid=7)
    found = said(select(snapshot(SERVER, child, below, leaders=[leader(SERVER)]), Request(port=30000)))
    assert found == {
        100: ("its command line says port 30000",),
        101: ("descends from leader 100",),
        102: ("descends from leader 100",),
    }


def test_whoever_was_seen_before_and_his_children() -> None:
    orphan = process(101, ("python3", "x"), sid=7, pgid=7)
    child = process(102, ("python3", "y"), ppid=101, sid=7, pgid=7)
    memory = Memory({orphan.key: "descends from leader 100"})
    found = said(select(snapshot(orphan, child), Request(port=30000), memory))
    assert found == {101: ("descends from leader 100",), 102: ("descends from member 101",)}


def test_the_cgroup_of_a_unit_that_is_the_leaders_own() -> None:
    inside = {"cgroups": ("/system.slice/chat.service",)}
    server, mate = process(100, LEADER, **inside), process(150, ("sh",), exe="/bin/sh", **inside)
    seen = snapshot(server, mate, leaders=[leader(server, unit=UNIT)])
    why = "in the cgroup of chat.service, which runs the leader and nothing else"
    assert said(select(seen, Request(port=30000)))[150] == (why,)
    others = Unit("chat.service", 99, "no", "active", "loaded")
    assert said(select(snapshot(server, mate, leaders=[leader(server, unit=others)]), Request(port=30000))).keys() == {
        100
    }


@pytest.mark.parametrize("which", [{"sid": 100, "pgid": 5}, {"sid": 5, "pgid": 100}])
def test_workers_of_the_session_or_group_that_the_leader_leads(which: dict[str, int]) -> None:
    mates = [
        process(101, WORKER, exe="/opt/other/python3", **which),
        process(102, SPAWNED, **which),
        process(103, SPAWNED, exe="/opt/other/python3", **which),
        process(104, ("python3", "holds a GPU"), **which),
        process(105, ("python3", "holds none"), **which),
        process(106, WORKER, start_ticks=1099, **which),
        process(107, WORKER, start_ticks=1100, **which),
    ]
    seen = snapshot(SERVER, *mates, leaders=[leader(SERVER)], gpus=[gpu()], uses=[holds(104)])
    name = "session" if which["sid"] == 100 else "process group"
    why = f"in the {name} that leader 100 led, a worker or a holder of a GPU"
    found = said(select(seen, Request(port=30000)))
    assert found == {pid: (why,) for pid in (101, 102, 104, 107)} | {100: ("its command line says port 30000",)}


def test_a_leader_whose_program_is_not_known_shares_none() -> None:
    server, mate = process(100, LEADER, exe=None), process(101, SPAWNED, exe=None, sid=100)
    assert said(select(snapshot(server, mate, leaders=[leader(server)]), Request(port=30000))).keys() == {100}


# --- orphans of a recorded launch ---

ORPHANS = (process(301, SPAWNED, sid=100), process(302, WORKER, sid=100), process(303, ("python3", "x"), sid=100))
OF_SESSION = "in session 100, which the launch record made for this server"


def test_the_recorded_session() -> None:
    seen = snapshot(*ORPHANS, gpus=[gpu()], uses=[holds(303)])
    assert said(select(seen, record())) == {pid: (OF_SESSION,) for pid in (301, 302, 303)}


def test_a_worker_of_the_same_tick_is_the_launchs_and_an_older_one_is_not() -> None:
    mates = [process(301, WORKER, sid=100, start_ticks=1100), process(302, WORKER, sid=100, start_ticks=1099)]
    assert said(select(snapshot(*mates), record())).keys() == {301}


def test_a_session_whose_leaders_pid_is_another_process_by_now_is_nobodys() -> None:
    """Its number may be given out again then."""
    stranger = process(100, ("vim",), start_ticks=5000)
    assert said(select(snapshot(stranger, *ORPHANS), record())) == {}
    itself = process(100, ("python3", "no launcher to be seen"), state="Z", exe=None)
    assert said(select(snapshot(itself, *ORPHANS), record())).keys() == {301, 302}
    assert said(select(snapshot(stranger, *ORPHANS), record(pid=None))).keys() == {301, 302}


@pytest.mark.parametrize(
    "unsure",
    [{"start_ticks": None}, {"sid": None}, {"own_session": False}, {"boot_id": None}, {"boot_id": "another"}],
)
def test_a_record_that_does_not_say_all_reaches_no_session(unsure: dict[str, t.Any]) -> None:
    assert said(select(snapshot(*ORPHANS), record(**unsure))) == {}


def test_two_boots_that_are_not_known_are_not_the_same() -> None:
    inside = process(302, WORKER, sid=100, cgroups=("/system.slice/chat.service",))
    assert said(select(snapshot(inside, boot_id=None), record(boot_id=None, unit="chat.service"))) == {}


def test_the_cgroup_of_the_recorded_unit() -> None:
    inside = {"cgroups": ("/system.slice/chat.service",)}
    mates = [
        process(301, WORKER, start_ticks=1100, **inside),
        process(302, WORKER, start_ticks=1099, **inside),
        process(303, ("python3", "holds a GPU"), **inside),
        process(304, ("python3", "holds none"), **inside),
        process(305, WORKER, cgroups=("/system.slice/other.service",)),
    ]
    seen = snapshot(*mates, gpus=[gpu()], uses=[holds(303)])
    found = said(select(seen, record(unit="chat.service", own_session=False)))
    why = "in the cgroup of chat.service, which the launch record made for this server"
    assert found == {301: (why,), 303: (why,)}
    assert said(select(seen, record(unit="chat.service", own_session=False, start_ticks=None))) == {}


# --- orphans of nobody, and whoever holds a GPU ---


def test_orphans_by_the_gpus_that_were_asked_for() -> None:
    workers = [
        process(301, WORKER, pgid=300),
        process(302, "sglang::detokenizer", pgid=300),
        process(303, WORKER, pgid=400),
        process(304, "sglang::detokenizer", pgid=400),
        process(305, WORKER, exe="/bin/bash", pgid=300),
    ]
    seen = snapshot(*workers, gpus=[gpu(0), gpu(1)], uses=[holds(301, 0), holds(303, 1)], chosen=[0])
    for scope in ("sglang", "gpu"):
        found = said(select(seen, Request(scope=scope, devices=("0",))))
        assert found == {
            301: (f"SGLang worker {WORKER} holds a chosen GPU",),
            302: ("SGLang worker sglang::detokenizer in the process group of one that holds a chosen GPU",),
        }
    everybody = said(select(seen, Request(scope="sglang")))
    assert everybody.keys() == {301, 302, 303, 304}
    assert everybody[302] == ("SGLang worker sglang::detokenizer without a leader",)


def test_every_holder_of_each_chosen_gpu() -> None:
    """One that is spared does not end the search, and who holds two is told of both."""
    names = [process(pid, (f"program{pid}",), exe=f"/bin/program{pid}") for pid in (401, 402, 403)]
    protected = process(400, ("nvidia-persistenced",), exe="/usr/bin/nvidia-persistenced", comm="nvidia-persiste")
    uses = [holds(pid, minor) for minor in (0, 1) for pid in (400, 401, 402)] + [visits(403, 0)]
    seen = snapshot(protected, *names, gpus=[gpu(0), gpu(1)], uses=uses)
    selection = select(seen, Request(scope="gpu"))
    assert {target.process.pid for target in selection.holders} == {401, 402}
    assert {target.part for target in selection.everybody} == {"holder"}
    for why in said(selection).values():
        assert list(dict.fromkeys(word.split(":")[0] for word in why)) == ["GPU 0", "GPU 1"]
    spared = {one.process.pid: one.why for one in selection.spared}
    assert spared[403].startswith("only has open GPU 0 (")
    assert spared[403].endswith(", outside of the scope")


def test_who_is_spared_is_told_what_he_does_with_the_gpu() -> None:
    holder, suspect = process(401, ("a",), exe="/bin/a"), process(402, ("b",), exe="/bin/b")
    seen = snapshot(holder, suspect, gpus=[gpu(0, listed=[402])], uses=[holds(401)])
    spared = {one.process.pid: one.why for one in select(seen, Request(port=1)).spared}
    assert spared[401].startswith("holds GPU 0 (")
    assert spared[402].startswith("may hold GPU 0 (")


def test_a_holder_without_a_process_is_nobody_to_spare() -> None:
    assert select(snapshot(gpus=[gpu(0, listed=[777])]), Request(port=1)).spared == ()


# --- which leader is meant ---


def test_unit_and_port_of_the_record_name_the_server_where_nobody_else_does() -> None:
    seen = snapshot(SERVER, leaders=[leader(SERVER, unit=UNIT)])
    assert said(select(seen, record(pid=None, port=30000))) == {100: ("its command line says port 30000",)}
    assert said(select(seen, record(pid=None, unit="chat.service")))[100][0] == "main process of chat.service"


def test_a_shell_around_the_leader_is_named() -> None:
    unit = Unit("chat.service", 90, "no", "active", "loaded")
    seen = snapshot(SERVER, process(90, ("sh",), exe="/bin/sh"), leaders=[leader(SERVER, unit=unit, wrapper_pid=90)])
    found = said(select(seen, Request(unit="chat.service")))
    assert found[100] == ("pid 90, the main process of chat.service, is only a shell around it",)


def test_a_server_that_holds_other_gpus_is_not_chosen_by_what_it_could_see() -> None:
    seen = snapshot(
        SERVER,
        gpus=[gpu(0), gpu(1)],
        uses=[holds(100, 1)],
        chosen=[0],
        leaders=[leader(SERVER, visible_devices="0,1")],
    )
    assert said(select(seen, Request(scope="sglang", devices=("0",)))) == {}
    starts = snapshot(SERVER, gpus=[gpu(0), gpu(1)], chosen=[0], leaders=[leader(SERVER, visible_devices="0,1")])
    found = said(select(starts, Request(scope="sglang", devices=("0",))))
    assert found == {100: ("it starts on GPU 0 (CUDA_VISIBLE_DEVICES)",)}


def test_a_circle_of_parents_has_no_leader() -> None:
    seen: Snapshot = snapshot(SERVER, process(2, ppid=4), process(3, ppid=2), process(4, ppid=3))
    assert nearest_leaders(seen) == {}


@pytest.mark.parametrize(("nspid", "owned"), [((100, 1), True), ((100, 7, 1), True), ((100, 1, 7), False), ((), False)])
def test_a_container_is_asked_only_where_the_leader_is_its_first_process(nspid: tuple[int, ...], owned: bool) -> None:
    inner = process(100, LEADER, nspid=nspid)
    owner = owner_of(leader(inner, container="docker:0123abcd"))
    assert (owner is not None) is owned
    if owner is not None:
        assert (owner.kind, owner.name, owner.leader_pid) == ("container", "0123abcd", 100)
