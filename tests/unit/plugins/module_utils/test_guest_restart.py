# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container's restart against a scripted ``pct``; a directory with a file for each pid is its cgroup."""

from __future__ import annotations

import os
import subprocess
import time
import typing as t
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.act import guest
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.guest import GuestOutcome, restart_container

GENEROUS_S = 20.0
SHORT_S = 0.5
# Each command is logged, then does what the test wrote for it.
PCT = """#!/bin/sh
echo "$1 $2" >> {root}/log
[ "$2" = 129 ] || exit 9
tries=$(grep -c "^$1 " {root}/log)
end() {{ rm -f {root}/members/*; }}
boot() {{ : > {root}/members/1; }}
case $1 in
stop) {stop} ;;
start) {start} ;;
status) {status} ;;
*) exit 9 ;;
esac
"""
STATUS = f'if ls {"{root}"}/members/* >/dev/null 2>&1; then echo "status: running"; else echo "status: stopped"; fi'


@dataclass
class Container:
    """Container 129 with one process (pid 4711 by default)."""

    root: Path
    unknown: bool = False
    proc: str = "/proc"
    scripts: dict[str, str] = field(default_factory=lambda: {"stop": "end", "start": "boot", "status": STATUS})

    def members(self) -> list[int] | None:
        return None if self.unknown else [int(path.name) for path in (self.root / "members").iterdir()]

    def restart(self, stop_s: float = GENEROUS_S, start_s: float = GENEROUS_S, **scripts: str) -> GuestOutcome:
        pct = self.root / "pct"
        texts = {name: text.replace("{root}", str(self.root)) for name, text in {**self.scripts, **scripts}.items()}
        pct.write_text(PCT.format(root=self.root, **texts))
        pct.chmod(0o755)
        return restart_container("129", stop_s, start_s, self.members, str(pct), self.proc, retry_pause_s=0)

    def log(self) -> list[str]:
        path = self.root / "log"
        return (
            [line for line in path.read_text().splitlines() if not line.startswith("status")] if path.exists() else []
        )


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    monkeypatch.setattr(guest, "AFTER_S", 0.5)
    (tmp_path / "members").mkdir()
    (tmp_path / "members" / "4711").touch()
    return Container(tmp_path)


@pytest.fixture
def stuck(container: Container) -> t.Iterator[int]:
    """A live process that stays in the container's cgroup."""
    with subprocess.Popen(["sleep", "600"]) as process:
        (container.root / "members" / "4711").unlink()
        (container.root / "members" / str(process.pid)).touch()
        yield process.pid
        process.kill()


def codes(outcome: GuestOutcome) -> list[str]:
    return [reason.code for reason in outcome.reasons]


def rows(outcome: GuestOutcome) -> list[tuple[str, str]]:
    return [(row["what"], row["result"]) for row in outcome.steps]


def test_stop_and_start(container: Container) -> None:
    outcome = container.restart()
    assert (outcome.vmid, outcome.stopped, outcome.started, outcome.blockers, outcome.reasons) == (
        "129",
        True,
        True,
        (),
        (),
    )
    assert outcome.steps == (
        {"what": "pct stop", "pid": None, "result": "accepted", "detail": ""},
        {"what": "pct start", "pid": None, "result": "accepted", "detail": ""},
    )
    assert container.log() == ["stop 129", "start 129"]


def test_members_that_outlive_the_command_are_waited_for(container: Container) -> None:
    looks = iter([[4711], [4711, 4712], [4712], [], [1]])
    container.restart(stop_s=SHORT_S)  # writes the script
    outcome = restart_container("129", GENEROUS_S, GENEROUS_S, lambda: next(looks), str(container.root / "pct"))
    assert (outcome.stopped, outcome.started, outcome.reasons) == (True, True, ())
    assert next(looks, None) is None


def test_a_stop_that_hangs_while_the_container_ends_is_followed_by_a_start(container: Container) -> None:
    outcome = container.restart(stop_s=SHORT_S, stop="end; exec sleep 600")
    assert rows(outcome) == [("pct stop", "no answer"), ("pct start", "accepted")]
    assert (outcome.stopped, outcome.started, outcome.reasons) == (True, True, ())


def test_a_member_that_stays_is_named_and_nothing_is_started(container: Container, stuck: int) -> None:
    outcome = container.restart(stop_s=SHORT_S, stop=":")
    assert (outcome.stopped, outcome.started) == (False, False)
    assert container.log() == ["stop 129"]
    assert codes(outcome) == ["container_stop_hung"]
    (blocker,) = outcome.blockers
    assert (blocker.process.pid, blocker.process.argv) == (stuck, ("sleep", "600"))
    assert blocker.why.startswith("state S")
    text = outcome.reasons[0].message
    assert f"pid {stuck} (sleep): state S" in text
    assert "pct start 129" in text


def test_a_stop_that_hangs_with_its_container(container: Container, stuck: int) -> None:
    outcome = container.restart(stop_s=SHORT_S, stop="exec sleep 600")
    assert rows(outcome) == [("pct stop", "no answer")]
    assert codes(outcome) == ["container_stop_hung"]
    assert outcome.reasons[0].message.startswith("pct stop gave no answer and container 129 did not end within 0.5 s")
    assert [one.process.pid for one in outcome.blockers] == [stuck]


def recorded(container: Container, pid: int, comm: str, status: str = "", cmdline: str = "") -> Path:
    """A process of a recorded /proc, in state D."""
    base = container.root / "proc" / str(pid)
    base.mkdir(parents=True)
    fields = " ".join(["D", "1", "7", "7", *["0"] * 13, "1", "0", "99"])
    (base / "stat").write_text(f"{pid} ({comm}) {fields}\n")
    (base / "status").write_text(status)
    (base / "cmdline").write_text(cmdline)
    (base / "wchan").write_text("fuse_wait_answer")
    container.proc = str(base.parent)
    return base


PENDING = "SigPnd:\t0000000000000100\n"


@pytest.mark.parametrize("stop", [":", "exec sleep 600", 'echo "lxc-stop: timeout" >&2; exit 1'])
def test_a_member_that_was_killed_and_does_not_end_is_named_whatever_pct_says(container: Container, stop: str) -> None:
    recorded(container, 4711, "sglang::schedul", PENDING)
    outcome = container.restart(stop_s=SHORT_S, stop=stop)
    assert (outcome.stopped, outcome.started, codes(outcome)) == (False, False, ["container_stop_hung"])
    (one,) = outcome.blockers
    assert (one.process.comm, one.why, one.wchan) == (
        "sglang::schedul",
        "state D, SIGKILL pending, waits in fuse_wait_answer",
        "fuse_wait_answer",
    )
    text = outcome.reasons[0].message
    assert "pid 4711 ([sglang::schedul]): state D, SIGKILL pending, waits in fuse_wait_answer" in text
    assert ("exit 1: lxc-stop: timeout" in text) == ("exit 1" in stop)


def test_after_a_refusal_those_that_were_killed_get_the_time_that_is_left(container: Container) -> None:
    recorded(container, 4711, "python3", PENDING)
    container.restart(stop_s=SHORT_S, stop="exit 1")  # writes the script
    gone = time.monotonic() + 2 * guest.AFTER_S

    def members() -> list[int]:
        if container.log()[1:] == ["stop 129", "start 129"]:
            return [1]
        return [4711] if time.monotonic() < gone else []

    pct = str(container.root / "pct")
    outcome = restart_container("129", GENEROUS_S, GENEROUS_S, members, pct, container.proc)
    assert (outcome.stopped, outcome.started, outcome.reasons) == (True, True, ())


def test_a_locked_command_line_does_not_keep_a_blocker_from_being_named(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "READ_S", SHORT_S)
    base = recorded(container, 4711, "python3")
    (base / "cmdline").unlink()
    os.mkfifo(base / "cmdline")  # whoever opens it waits
    (one,) = guest.find_blockers([4711], container.proc)
    assert (one.process.comm, one.process.argv, one.why) == ("python3", (), "state D, waits in fuse_wait_answer")


def test_a_stop_that_is_refused_starts_nothing_and_says_why(container: Container) -> None:
    outcome = container.restart(stop='echo "CT is locked (backup)" >&2; exit 255')
    assert rows(outcome) == [("pct stop", "refused")]
    assert (outcome.stopped, outcome.started, codes(outcome)) == (False, False, ["container_stop_failed"])
    assert "exit 255: CT is locked (backup)" in outcome.reasons[0].message
    assert "still runs" in outcome.reasons[0].message


def test_a_stop_with_an_error_that_worked_all_the_same_is_followed_by_a_start(container: Container) -> None:
    outcome = container.restart(stop='end; echo "command socket: Connection reset" >&2; exit 1')
    assert (outcome.stopped, outcome.started, outcome.reasons) == (True, True, ())


def test_no_pct_stops_nothing(container: Container) -> None:
    outcome = restart_container("129", SHORT_S, SHORT_S, container.members, str(container.root / "no-pct"))
    assert (outcome.stopped, outcome.started, codes(outcome)) == (False, False, ["container_stop_failed"])
    assert "No such file" in outcome.reasons[0].message


def test_a_start_that_fails_once_is_repeated(container: Container) -> None:
    outcome = container.restart(start='if [ $tries = 1 ]; then echo "busy" >&2; exit 1; fi; boot')
    assert rows(outcome)[1:] == [("pct start", "refused"), ("pct start", "accepted")]
    assert (outcome.stopped, outcome.started, outcome.reasons) == (True, True, ())


def test_a_start_that_fails_twice_leaves_it_down_and_says_how_to_start_it(container: Container) -> None:
    outcome = container.restart(start='echo "no space left on device" >&2; exit 1')
    assert container.log() == ["stop 129", "start 129", "start 129"]
    assert (outcome.stopped, outcome.started, codes(outcome)) == (True, False, ["container_start_failed"])
    text = outcome.reasons[0].message
    assert "container 129 is stopped now" in text
    assert "exit 1: no space left on device" in text
    assert text.endswith("Start it by hand: pct start 129")


LOCKED = "can't lock file '/run/lock/lxc/pve-config-129.lock' - got timeout"


def test_a_start_waits_for_a_lock_that_the_hung_stop_left(container: Container) -> None:
    outcome = container.restart(start=f'if [ $tries -lt 5 ]; then echo "{LOCKED}" >&2; exit 255; fi; boot')
    assert rows(outcome)[1:] == [("pct start", "refused")] * 4 + [("pct start", "accepted")]
    assert (outcome.started, outcome.reasons) == (True, ())


def test_a_lock_that_stays_is_given_up_and_its_task_is_named(container: Container) -> None:
    recorded(container, 77, "task", cmdline="task UPID:pve1:0000004D:0001E240:6565B2C1:vzstop:129:root@pam:\0")
    recorded(container, 78, "task", cmdline="task UPID:pve1:0000004E:0001E240:6565B2C1:vzstop:1290:root@pam:\0")
    outcome = container.restart(start=f'echo "{LOCKED}" >&2; exit 255')
    assert len(outcome.steps) == 1 + guest.CONTENDED_TRIES
    assert (outcome.stopped, outcome.started, codes(outcome)) == (True, False, ["container_start_failed"])
    text = outcome.reasons[0].message
    assert "perhaps with its lock: pid 77 (task vzstop). Start it by hand" in text


def test_a_start_that_claims_success_without_a_process_is_none(container: Container) -> None:
    outcome = container.restart(start=":")
    assert (outcome.started, codes(outcome)) == (False, ["container_start_failed"])


def test_a_start_that_hangs_though_the_container_runs_is_a_start(container: Container) -> None:
    outcome = container.restart(start_s=SHORT_S, start="boot; exec sleep 600")
    assert rows(outcome)[1:] == [("pct start", "no answer")]
    assert (outcome.started, outcome.reasons) == (True, ())


def test_a_start_that_hangs_is_tried_twice_and_no_more(container: Container) -> None:
    outcome = container.restart(start_s=SHORT_S, start="exec sleep 600")
    assert rows(outcome)[1:] == [("pct start", "no answer")] * 2
    assert (outcome.started, codes(outcome)) == (False, ["container_start_failed"])


def test_members_that_cannot_be_read_stop_nothing(container: Container) -> None:
    container.unknown = True
    outcome = container.restart()
    assert (outcome.stopped, outcome.steps, codes(outcome)) == (False, (), ["container_state_unknown"])
    assert outcome.reasons[0].means == "unknown"
    assert container.log() == []


def test_a_container_that_does_not_run_is_left_alone(container: Container) -> None:
    (container.root / "members" / "4711").unlink()
    outcome = container.restart()
    assert (outcome.stopped, outcome.started, codes(outcome)) == (False, False, ["container_not_running"])
    assert container.log() == []


class Blinded:
    """Members that can be read once, before the stop, and never after."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> t.Sequence[int] | None:
        self.looks += 1
        if self.looks == 1:
            return [4711]
        raise OSError("cgroup is gone")


def test_where_members_are_unknown_after_the_stop_the_monitor_is_asked(container: Container) -> None:
    container.restart()  # writes the script
    pct = str(container.root / "pct")
    (container.root / "members" / "1").touch()
    outcome = restart_container("129", SHORT_S, SHORT_S, Blinded(), pct, retry_pause_s=0)
    assert (outcome.stopped, outcome.started, outcome.reasons) == (True, True, ())


def test_where_nobody_knows_whether_it_ended_nothing_is_started(container: Container) -> None:
    container.restart(stop_s=SHORT_S, stop=":")  # writes the script; pct goes on to say that it runs
    log = len(container.log())
    outcome = restart_container("129", SHORT_S, SHORT_S, Blinded(), str(container.root / "pct"))
    assert (outcome.stopped, outcome.started, codes(outcome)) == (False, False, ["container_state_unknown"])
    assert "OSError: cgroup is gone" in outcome.reasons[0].message
    assert "pct start 129" in outcome.reasons[0].message
    assert container.log()[log:] == ["stop 129"]
