# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whose lease it is, at every time and on every boot, and what lies in its place on the disk."""

from __future__ import annotations

import fcntl
import json
import os
import typing as t
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils import lease as leases
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.lease import Clock, Lease, standing

CLOCK = Clock(1_800_000_000.0, 5000.0, "boot-a")
PID, TICKS = 812, 4711


def lease(**changes: t.Any) -> Lease:
    """Alice's, renewed a second ago for a minute, with a module at work."""
    values: dict[str, t.Any] = {
        "name": "chat",
        "run_id": "run-a",
        "taken_at": CLOCK.epoch - 100,
        "renewed_at": CLOCK.epoch - 1,
        "expires_at": CLOCK.epoch + 59,
        "renewed_since_boot": CLOCK.since_boot - 1,
        "expires_since_boot": CLOCK.since_boot + 59,
        "boot_id": "boot-a",
        "controller": "ops1",
        "operator": "alice",
        "module": "gpu_evict",
        "pid": PID,
        "start_ticks": TICKS,
        **changes,
    }
    return Lease(**values)


def lives(pid: int, ticks: int) -> bool:
    return (pid, ticks) == (PID, TICKS)


def nobody(_pid: int, _ticks: int) -> bool:
    return False


LATER = replace(CLOCK, epoch=CLOCK.epoch + 600, since_boot=CLOCK.since_boot + 600)


@pytest.mark.parametrize(
    ("held", "clock", "alive", "changes"),
    [
        (True, CLOCK, lives, {}),
        (True, CLOCK, nobody, {}),  # its module was killed: it still has its time
        (True, LATER, lives, {}),  # it has expired, and its module works on
        (False, LATER, nobody, {}),
        (False, LATER, lives, {"start_ticks": TICKS + 1}),  # the pid was used again
        (False, LATER, lives, {"pid": None, "start_ticks": None}),
        (True, replace(CLOCK, epoch=CLOCK.epoch + 1e6), nobody, {}),  # somebody set the clock forward
        (True, replace(CLOCK, epoch=0.0), nobody, {}),
        (False, replace(LATER, epoch=0.0), nobody, {}),  # and back
        (False, replace(CLOCK, boot_id="boot-b"), lives, {}),  # another boot: that pid is somebody else
        (True, replace(CLOCK, boot_id=None), nobody, {}),  # which boot is not known: the time of day
        (False, replace(LATER, boot_id=None), nobody, {}),
        (True, replace(LATER, boot_id=None), lives, {}),
    ],
)
def test_it_is_held_until_it_has_expired_and_its_module_has_ended(
    held: bool, clock: Clock, alive: leases.Alive, changes: dict[str, t.Any]
) -> None:
    state = standing(lease(**changes), clock, alive)
    assert state.held is held, state
    assert state.why


def test_this_process_is_alive_and_no_other_start_time_is() -> None:
    pid, ticks = leases.our_process()
    assert leases.is_alive(pid, ticks)
    assert not leases.is_alive(pid, ticks + 1)


# --- taking, renewing, giving back ---


@pytest.fixture
def state_dir(tmp_path: Path) -> str:
    return str(tmp_path / "state")


def stored(state_dir: str) -> dict[str, t.Any]:
    found = json.loads(Path(state_dir, "chat", "lease.json").read_text())
    assert isinstance(found, dict)
    return found


def store(state_dir: str, found: Lease) -> None:
    folder = Path(state_dir, "chat")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lease.json").write_text(json.dumps(asdict(found)))


def expired(**changes: t.Any) -> Lease:
    now = leases.read_clock()
    return lease(
        boot_id=now.boot_id,
        renewed_since_boot=now.since_boot - 100,
        expires_since_boot=now.since_boot - 40,
        **changes,
    )


def test_take_renew_release(state_dir: str) -> None:
    taken = leases.take(state_dir, "chat", "run-a", 30, operator="alice\x1b[2J", controller="ops1")
    assert taken.fresh and taken.broken is None
    assert taken.lease.operator == "alice?[2J"
    assert os.stat(Path(state_dir, "chat", "lease.json")).st_mode & 0o777 == 0o644
    again = leases.take(state_dir, "chat", "run-a", 90)
    assert not again.fresh and again.lease.taken_at == taken.lease.taken_at and again.lease.operator == "alice?[2J"
    assert again.lease.expires_since_boot - again.lease.renewed_since_boot == pytest.approx(90)
    assert leases.release(state_dir, "chat", "run-b") == (False, again.lease)
    assert leases.release(state_dir, "chat", "run-a") == (True, None)
    assert leases.look(state_dir, "chat") is None
    assert leases.release(state_dir, "chat", "run-a") == (False, None)


def test_the_second_one_is_told_who_since_when_and_from_where(state_dir: str) -> None:
    leases.take(state_dir, "chat", "run-a", operator="alice", controller="ops1")
    before = stored(state_dir)
    with pytest.raises(CleanSlateError) as caught:
        leases.take(state_dir, "chat", "run-b", wait_s=0.2)
    text = str(caught.value)
    assert "run run-a of alice on ops1 works on 'chat' since " + leases.when(before["taken_at"]) in text
    assert "until " + leases.when(before["expires_at"]) in text
    assert stored(state_dir) == before


def test_an_expired_one_is_broken_and_named(state_dir: str) -> None:
    store(state_dir, expired(pid=None, start_ticks=None))
    taken = leases.take(state_dir, "chat", "run-b")
    assert taken.broken is not None and taken.broken.operator == "alice"
    assert "expired" in str(taken.broken_why)


def test_an_expired_one_whose_module_lives_is_not_broken(state_dir: str) -> None:
    pid, ticks = leases.our_process()
    store(state_dir, expired(pid=pid, start_ticks=ticks))
    with pytest.raises(CleanSlateError, match=rf"its gpu_evict \(pid {pid}\) runs now"):
        leases.take(state_dir, "chat", "run-b")
    store(state_dir, expired(pid=pid, start_ticks=ticks + 1))
    assert leases.take(state_dir, "chat", "run-b").broken is not None


# --- what is not a lease ---


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        "[]",
        "[" * 100_000,
        json.dumps({"name": "chat"}),
        json.dumps({**asdict(lease()), "run_id": "../x"}),
        json.dumps({**asdict(lease()), "name": "other"}),
        json.dumps({**asdict(lease()), "expires_since_boot": 1e12}),
        json.dumps({**asdict(lease()), "expires_at": float("nan")}),
        json.dumps({**asdict(lease()), "pid": True}),
        json.dumps({**asdict(lease()), "pid": -1}),
        json.dumps({**asdict(lease()), "ttl_s": 0}),
        "x" * (2 << 20),
    ],
)
def test_a_file_that_is_no_lease_is_a_failure_that_says_how_to_remove_it(state_dir: str, text: str) -> None:
    path = Path(state_dir, "chat", "lease.json")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    for attempt in (
        lambda: leases.take(state_dir, "chat", "run-b"),
        lambda: leases.release(state_dir, "chat", "run-b"),
        lambda: leases.look(state_dir, "chat"),
        lambda: leases.keep(state_dir, "chat", None, "gpu_evict", 10).__enter__(),
    ):
        with pytest.raises(CleanSlateError, match=f"rm -- {path}"):
            attempt()
    assert path.read_text() == text


def test_links_in_its_place_are_not_followed(state_dir: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text(json.dumps(asdict(lease())))
    folder = Path(state_dir, "chat")
    folder.mkdir(parents=True)
    (folder / "lease.json").symlink_to(target)
    with pytest.raises(CleanSlateError, match=r"can't be read.*rm -- "):
        leases.take(state_dir, "chat", "run-b")
    (folder / "lease.json").unlink()
    (folder / ".lease.lock").unlink()
    (folder / ".lease.lock").symlink_to(tmp_path / "made")
    with pytest.raises(CleanSlateError, match=r"\.lease\.lock"):
        leases.take(state_dir, "chat", "run-b")
    assert not (tmp_path / "made").exists()


def test_a_folder_that_others_may_change_is_refused(state_dir: str) -> None:
    leases.take(state_dir, "chat", "run-a")
    os.chmod(Path(state_dir, "chat"), 0o777)
    with pytest.raises(CleanSlateError, match="can be changed by others"):
        leases.take(state_dir, "chat", "run-a")


def test_a_lock_that_somebody_keeps_is_named_after_a_while(state_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leases.take(state_dir, "chat", "run-a")
    monkeypatch.setattr(leases, "LOCK_WAIT_S", 0.1)
    with open(Path(state_dir, "chat", ".lease.lock"), encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CleanSlateError, match="has been locked by another process"):
            leases.take(state_dir, "chat", "run-a")


@pytest.mark.parametrize("run_id", ["", "-x", "a b", "a/b", "x" * 200, "a\n"])
def test_what_names_no_run_is_refused(state_dir: str, run_id: str) -> None:
    with pytest.raises(CleanSlateError, match="run_id is"):
        leases.take(state_dir, "chat", run_id)
    assert not os.path.exists(state_dir)


# --- keep ---


def test_a_module_names_itself_and_leaves_the_run_its_time(state_dir: str) -> None:
    leases.take(state_dir, "chat", "run-a", 200)
    with leases.keep(state_dir, "chat", "run-a", "gpu_evict", 300) as kept:
        inside = stored(state_dir)
        assert (inside["pid"], inside["start_ticks"]) == leases.our_process() and inside["module"] == "gpu_evict"
        assert inside["expires_since_boot"] - inside["renewed_since_boot"] == pytest.approx(360)
        assert kept.lost() is None
    after = stored(state_dir)
    assert (after["pid"], after["module"]) == (None, None)
    assert after["expires_since_boot"] - after["renewed_since_boot"] == pytest.approx(200)


def test_it_ends_the_same_way_after_an_error(state_dir: str) -> None:
    leases.take(state_dir, "chat", "run-a")
    with pytest.raises(RuntimeError), leases.keep(state_dir, "chat", "run-a", "gpu_evict", 300):
        raise RuntimeError
    assert stored(state_dir)["pid"] is None


@pytest.mark.parametrize("taken", [None, "run-b"])
def test_a_run_that_lost_its_lease_does_not_begin(state_dir: str, taken: t.Optional[str]) -> None:
    if taken:
        leases.take(state_dir, "chat", taken, operator="bob")
    with pytest.raises(CleanSlateError, match="is no longer ours") as caught:
        leases.keep(state_dir, "chat", "run-a", "gpu_evict", 10).__enter__()
    assert ("of bob" if taken else "nobody holds it") in str(caught.value)


def test_a_lease_that_is_lost_on_the_way_is_noticed_and_left_alone(state_dir: str) -> None:
    leases.take(state_dir, "chat", "run-a")
    other = expired(run_id="run-b", operator="bob", pid=None, start_ticks=None)
    with leases.keep(state_dir, "chat", "run-a", "gpu_evict", 10) as kept:
        store(state_dir, other)
        assert "run run-b of bob" in str(kept.lost())
        with pytest.raises(CleanSlateError):
            kept.check()
    assert stored(state_dir)["run_id"] == "run-b"


def test_two_modules_of_one_run_do_not_act_at_once(state_dir: str) -> None:
    pid, ticks = os.getppid(), 0
    process = leases.read_identity(pid)
    assert process is not None
    ticks = process.start_ticks
    store(state_dir, expired(pid=pid, start_ticks=ticks))
    with pytest.raises(CleanSlateError, match=rf"another module of this run, gpu_evict \(pid {pid}\)"):
        leases.keep(state_dir, "chat", "run-a", "server_launch", 10).__enter__()


def test_without_a_run_it_goes_on_only_where_nobody_works(state_dir: str) -> None:
    with leases.keep(state_dir, "chat", None, "gpu_evict", 10) as kept:
        assert kept.lost() is None
    assert not os.path.exists(state_dir)
    leases.take(state_dir, "chat", "run-a", operator="alice")
    with pytest.raises(CleanSlateError, match=r"alice works on 'chat'.*has no run_id"):
        leases.keep(state_dir, "chat", None, "gpu_evict", 10).__enter__()
    store(state_dir, expired(pid=None, start_ticks=None))
    with leases.keep(state_dir, "chat", None, "gpu_evict", 10):
        pass


def test_looking_and_check_mode_demand_and_write_nothing(state_dir: str) -> None:
    leases.take(state_dir, "chat", "run-b")
    before = stored(state_dir)
    for run_id in (None, "run-a"):
        with leases.keep(state_dir, "chat", run_id, "gpu_evict", 10, check_mode=True):
            assert stored(state_dir) == before
    with leases.keep(state_dir, "chat", None, "server_ready", 10, acts=False):
        assert stored(state_dir) == before


def test_a_lease_given_back_while_its_module_works_ends_with_that(state_dir: str) -> None:
    leases.take(state_dir, "chat", "run-a")
    with leases.keep(state_dir, "chat", "run-a", "gpu_evict", 300):
        ours, left = leases.release(state_dir, "chat", "run-a")
        assert ours and left is not None and left.pid == os.getpid()
        with pytest.raises(CleanSlateError, match="works on 'chat'"):
            leases.take(state_dir, "chat", "run-b")
    assert leases.look(state_dir, "chat") is None
