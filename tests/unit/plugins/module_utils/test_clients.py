# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which client may be held: only what is proved to be the declared one."""

from __future__ import annotations

import os
import typing as t
from dataclasses import replace
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils import clients as core
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.clients import (
    Client,
    PidFile,
    Scene,
    UnitView,
    judge_family,
    judge_process,
    judge_unit,
    parse_clients,
    programs_of,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.clients import parse_client_unit, read_pid_file

NOW = 1_800_000_000.0
UPTIME = 10_000.0
CGROUP = "/system.slice/load.service"


def process(pid: int, *argv: str, **changes: t.Any) -> Process:
    """One that started 1,000 s ago."""
    values: dict[str, t.Any] = {
        "pid": pid,
        "start_ticks": 900_000,
        "ppid": 1,
        "pgid": pid,
        "sid": pid,
        "state": "S",
        "comm": "x",
        "argv": argv,
        "uid": 1000,
        "exe": argv[0] if argv and argv[0].startswith("/") else None,
        **changes,
    }
    return Process(**values)


def scene(*found: Process, own: t.Iterable[int] = (), protect: tuple[str, ...] = ()) -> Scene:
    return Scene({one.pid: one for one in found}, frozenset(own), protect, NOW, UPTIME)


BY_PID = Client("load", pid_file="/run/load.pid", program="run_inference.py")
BY_UNIT = Client("load", unit="load.service")
LOAD = process(700, "/usr/bin/python3.11", "-u", "/opt/run_inference.py", "--port", "30000")
FILE = PidFile(700, 1000, NOW - 999)
UNIT = UnitView("load.service", "loaded", "active", 700, CGROUP, "i1", frozen=False)
INSIDE = replace(LOAD, cgroups=(CGROUP,))


# --- what may be declared ---


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": ""}, "is no name"),
        ({"name": "a"}, "needs either unit, or pid_file"),
        ({"name": "a", "unit": "x.service", "pid_file": "/p", "program": "p"}, "and not both"),
        ({"name": "a", "pid_file": "/p"}, "belong together"),
        ({"name": "a", "unit": "*.service"}, "without '\\*'"),
        ({"name": "a", "unit": "--all.service"}, "must be the whole name"),
        ({"name": "a", "unit": "session-1.scope"}, "one .service or .timer"),
        ({"name": "a", "unit": "x"}, "one .service or .timer"),
        ({"name": "a", "unit": "x.timer", "action": "pause"}, "nothing to pause"),
        ({"name": "a", "unit": "x.service", "action": "kill"}, "stop or pause"),
        ({"name": "a", "pid_file": "p", "program": "p"}, "absolute path"),
        ({"name": "a", "pid_file": "/p", "program": "/opt/p"}, "without its folder"),
        ({"name": "a", "pid_file": "/p", "program": "python3"}, "runs anything"),
        ({"name": "a", "pid_file": "/p", "program": "bash"}, "runs anything"),
    ],
)
def test_what_makes_no_sense_is_refused(entry: dict[str, t.Any], words: str) -> None:
    with pytest.raises(CleanSlateError, match=words):
        parse_clients([entry])


def test_a_name_stands_once() -> None:
    with pytest.raises(CleanSlateError, match="load is named more than once"):
        parse_clients([{"name": "load", "unit": "a.service"}, {"name": "load", "unit": "b.service"}])


# --- a process by its pid file ---


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["/usr/bin/python3", "/opt/run.py", "other.py"], {"run.py"}),
        (["/usr/bin/python3", "-u", "-W", "ignore", "run.py"], {"run.py"}),
        (["/usr/bin/python3", "-m", "bench.serving"], {"bench.serving", "serving"}),
        (["/usr/bin/python3", "-c", "import run.py"], set()),
        (["/usr/bin/vim", "run.py"], {"vim"}),
        (["/usr/bin/tail", "-f", "run.py"], {"tail"}),
        (["/opt/loadgen", "run.py"], {"loadgen"}),
        ([], set()),
    ],
)
def test_what_a_process_runs(argv: list[str], names: set[str]) -> None:
    assert programs_of(process(1, *argv)) == names


def test_the_declared_process_is_found() -> None:
    assert judge_process(BY_PID, FILE, scene(LOAD)) == (LOAD, None)
    assert judge_process(BY_PID, replace(FILE, uid=0), scene(LOAD)) == (LOAD, None)


@pytest.mark.parametrize("file", [PidFile(), FILE])
def test_nobody_there_is_no_objection(file: PidFile) -> None:
    assert judge_process(BY_PID, file, scene()) == (None, None)
    assert judge_process(BY_PID, FILE, scene(replace(LOAD, state="Z"))) == (None, None)


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        (FILE, {"argv": ("/usr/bin/vim", "/opt/run_inference.py"), "exe": "/usr/bin/vim"}, "the pid was used again"),
        (FILE, {"argv": ("/usr/bin/python3", "other.py")}, "does not run run_inference.py"),
        (FILE, {"start_ticks": 999_000}, "started 989 s after"),  # the same program, started again
        (replace(FILE, uid=1001), {}, "it may name anybody"),
        (PidFile(problem="/run/load.pid holds no process id"), {}, "holds no process id"),
    ],
)
def test_what_is_not_proved_is_left_alone(file: PidFile, changes: dict[str, t.Any], words: str) -> None:
    found, why = judge_process(BY_PID, file, scene(replace(LOAD, **changes)))
    assert found is None and why is not None and words in why


def test_the_same_second_is_in_time() -> None:
    started = NOW - UPTIME + LOAD.start_ticks / 100
    assert judge_process(BY_PID, replace(FILE, written_at=started - 2), scene(LOAD))[1] is None


@pytest.mark.parametrize(
    ("around", "words"),
    [
        ({"own": [700]}, "this run itself"),
        ({"protect": ("700",)}, "protected by the operator"),
        ({"protect": ("load.service",)}, "protected by the operator"),
    ],
)
def test_protected_ones_are_left_alone(around: dict[str, t.Any], words: str) -> None:
    found, why = judge_process(BY_PID, FILE, scene(INSIDE, **around))
    assert found is None and words in str(why)


def test_a_server_is_no_client() -> None:
    argv = ("/opt/venv/bin/python", "-m", "sglang.launch_server", "--port", "1")
    found, why = judge_process(
        replace(BY_PID, program="sglang.launch_server"), FILE, scene(replace(LOAD, argv=argv, exe="/usr/bin/python3"))
    )
    assert found is None and "SGLang server" in str(why)


def test_a_family_with_a_protected_child_is_not_paused() -> None:
    child = process(701, "/usr/sbin/sshd", ppid=700)
    family, why = judge_family(LOAD, scene(LOAD, child, process(702, "/x", ppid=701)))
    assert [one.pid for one in family] == [700, 701, 702]
    assert "pid 701" in str(why) and "sshd" in str(why)


# --- a unit ---


def test_a_unit_with_its_processes() -> None:
    worker = process(701, "/x", cgroups=(CGROUP + "/workers",))
    other = process(702, "/x", cgroups=(CGROUP + "2",))
    assert judge_unit(BY_UNIT, UNIT, scene(INSIDE, worker, other)) == ((INSIDE, worker), None)


@pytest.mark.parametrize(
    ("view", "words"),
    [
        ({"load_state": "masked"}, "is masked"),
        ({"name": "ssh.service"}, "which is ssh.service"),  # an alias
        ({"name": "user@1000.service"}, "the way into it"),
        ({"name": "systemd-logind.service"}, "the way into it"),
        ({"name": "session-4.scope"}, "the way into it"),
        ({"name": "-.slice"}, "the way into it"),
        ({"control_group": ""}, "does not tell who runs"),
        ({"control_group": "/"}, "does not tell who runs"),
        ({"main_pid": 999}, "not to be seen in its cgroup"),
        ({"may_stop": False}, "RefuseManualStop"),
        ({"stops_too": ("other.service",)}, "would stop other.service"),
    ],
)
def test_units_that_are_left_alone(view: dict[str, t.Any], words: str) -> None:
    _members, why = judge_unit(BY_UNIT, replace(UNIT, **view), scene(INSIDE))
    assert why is not None and words in why, why


@pytest.mark.parametrize(
    ("inside", "around", "words"),
    [
        ({}, {"own": [701]}, "this run itself"),
        ({"exe": "/usr/sbin/sshd"}, {}, "sshd"),
        ({"exe": "/usr/bin/nvidia-persistenced"}, {}, "GPU service"),
        ({"argv": ("python3", "-m", "sglang.launch_server"), "exe": "/usr/bin/python3"}, {}, "SGLang server"),
        ({"argv": ("sglang::scheduler_TP0",), "exe": "/usr/bin/python3"}, {}, "SGLang server"),
    ],
)
def test_a_unit_with_somebody_else_inside_is_left_alone(
    inside: dict[str, t.Any], around: dict[str, t.Any], words: str
) -> None:
    other = process(701, "/x", cgroups=(CGROUP,), **{"exe": "/x", **inside}) if "argv" not in inside else None
    other = other or replace(process(701, "/x", cgroups=(CGROUP,)), **inside)
    _members, why = judge_unit(BY_UNIT, UNIT, scene(INSIDE, other, **around))
    assert why is not None and "pid 701" in why and words in why


def test_targets_and_inactive_neighbours_do_not_matter_and_a_watchdog_does_for_a_pause() -> None:
    assert judge_unit(BY_UNIT, replace(UNIT, stops_too=("multi-user.target",)), scene(INSIDE))[1] is None
    paused = replace(BY_UNIT, action="pause")
    assert judge_unit(paused, replace(UNIT, stops_too=("a.service",)), scene(INSIDE))[1] is None
    assert "watchdog" in str(judge_unit(paused, replace(UNIT, watchdog=True), scene(INSIDE))[1])


def test_what_systemd_says() -> None:
    text = (
        "Id=load.service\nLoadState=loaded\nActiveState=active\nMainPID=700\nControlGroup=/a\nInvocationID=i\n"
        "FreezerState=running\nRefuseManualStop=no\nWatchdogUSec=0\nType=oneshot\nTriggeredBy=load.timer\n"
        "RequiredBy=a.service b.target\nBoundBy=\nConsistsOf=c.service\n"
    )
    assert parse_client_unit(text) == UnitView(
        "load.service",
        "loaded",
        "active",
        700,
        "/a",
        "i",
        frozen=False,
        once=True,
        stops_too=("a.service", "b.target", "c.service"),
        triggers=("load.timer",),
    )
    without = text.replace("FreezerState=running\n", "").replace("WatchdogUSec=0", "WatchdogUSec=30s")
    view = parse_client_unit(without)
    assert view is not None and view.frozen is None and view.watchdog
    assert parse_client_unit("") is None
    assert parse_client_unit("Id=x\nLoadState=loaded\nActiveState=active\nMainPID=x") is None


# --- pid files ---


@pytest.mark.parametrize(
    ("text", "pid", "problem"),
    [
        ("700\n", 700, None),
        (" 700 \nmore\n", 700, None),
        ("", None, "holds no process id"),
        ("0", None, "holds no process id"),
        ("-1", None, "holds no process id"),
        ("700 800", None, "holds no process id"),
        ("9" * 30, None, "holds no process id"),
    ],
)
def test_a_pid_file(tmp_path: Path, text: str, pid: t.Optional[int], problem: t.Optional[str]) -> None:
    path = tmp_path / "pid"
    path.write_text(text)
    os.chmod(path, 0o644)
    found = read_pid_file(str(path))
    assert found.pid == pid
    assert (problem is None and found.problem is None) or (problem or "") in (found.problem or "")


def test_pid_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    assert read_pid_file(str(path)) == PidFile()
    path.write_text("700")
    os.chmod(path, 0o666)
    assert "can be changed by others" in str(read_pid_file(str(path)).problem)
    (tmp_path / "link").symlink_to(path)
    assert read_pid_file(str(tmp_path / "link")).problem is not None
    os.mkfifo(tmp_path / "fifo")
    assert read_pid_file(str(tmp_path / "fifo")).problem is not None


# --- what is handed back ---


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"name": "x", "kind": "unit", "action": "stop", "unit": "*.service"},
        {"name": "x", "kind": "unit", "action": "stop", "unit": "--now.service\n"},
        {"name": "x", "kind": "process", "action": "kill", "processes": [[1, 2]]},
        {"name": "x", "kind": "process", "action": "pause", "processes": [["1", 2]]},
        {"name": "x", "kind": "process", "action": "pause", "processes": [[-1, 2]]},
        {"name": "x", "kind": "process", "action": "pause", "unit": "a.service", "processes": []},
    ],
)
def test_what_no_call_of_ours_returned_is_refused(entry: dict[str, t.Any]) -> None:
    with pytest.raises(CleanSlateError, match="not what this module returned"):
        core.release([entry], 5)


def test_what_is_to_be_left_is_left() -> None:
    entry = {"name": "x", "kind": "unit", "action": "stop", "unit": "a.service", "after": "leave"}
    result = core.release([entry], 5)
    assert result["verdict"] == "released" and not result["changed"]
    assert [row["result"] for row in result["clients"]] == ["left"]
