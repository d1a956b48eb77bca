# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What follows after a failed start, and going back by hand: who is called, in which order, with what."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import refusal_of, summary_of
from ansible_collections.cleanslate.sglang.tests.integration_ns.scripted import (
    UUIDS,
    Scripted,
    clean,
    dirty,
    evicted,
    kept,
    launched,
    unproved,
)

TAKE, GIVE_BACK = "server_lease held", "server_lease released"
PATH = ["gpu_evict", "clean_state", "server_launch", "server_ready"]
AGAIN = ["gpu_evict", "clean_state", "server_launch from old-1", "server_ready"]
TRIAL = "server_launch from last_good (check)"
TRIED = {"changed": True, "config_hash": "sha256:aa"}
READY = {"ready": True, "verdict": "ready", "pid": 9, "port": 31000, "tokens": []}


@pytest.fixture
def fleet(tmp_path: Path) -> Scripted:
    """A host without a node; its preflight tries the start once."""
    one = Scripted(tmp_path)
    one.variables = {}
    one.script("server_launch@inside", TRIED, launched("new-1"), kept("old-1"), launched("again-1", "sha256:bb"))
    return one


def error_of(run: PlaybookRun) -> str:
    """The last error of a run that failed."""
    failed = [task for task in run.tasks if task.status == "failed" and not task.ignored]
    assert run.rc == 2, f"rc {run.rc}\n{run.stdout}\n{run.stderr}"
    return str(failed[-1].result["msg"])


# --- back, once, and the run fails all the same -----------------------------------------------------------------------


def test_a_server_that_is_not_proved_goes_back_and_the_run_fails(fleet: Scripted) -> None:
    fleet.server.update(ready_deadline_s=77, flags={"model_path": str(fleet.directory), "api": 1}, api_key="Sesame")
    fleet.script("server_ready@inside", unproved(), READY)
    run = fleet.run("relaunch")
    assert error_of(run) == (
        "chat on ct129: the new configuration failed (failed: no such model); rolled back to old-1: serving"
    )
    assert fleet.whole() == [TAKE, *PATH, TRIAL, *AGAIN, GIVE_BACK]
    text = summary_of(run)
    for words in ("FAILED: it does not serve; rolled back to old-1: SERVING", "Going back to launch old-1", "Outcome"):
        assert words in text, text
    assert max(map(len, text.splitlines())) <= 100


def test_what_each_step_of_the_way_back_is_told(fleet: Scripted) -> None:
    """The old launch's GPUs and port, no flag, no key; one run id for all of them."""
    fleet.server.update(gpus=[0], api_key="Sesame", settle_s=2, drain={"in_flight": "auto"}, min_gpu_headroom_mib=5)
    trial = kept("old-1", port=31055, gpus=[UUIDS[1]], host="127.0.0.3")
    fleet.script("server_launch@inside", TRIED, launched("new-1"), trial, launched("again-1", "sha256:bb"))
    fleet.script("server_ready@inside", unproved(), READY)
    assert "rolled back" in error_of(fleet.run("relaunch"))
    run_id = fleet.arguments("server_lease@inside")["run_id"]
    first, second = fleet.arguments("gpu_evict@inside", 0), fleet.arguments("gpu_evict@inside", 1)
    assert (first["port"], second["port"]) == (31000, 31000)
    assert (first["devices"], second["devices"]) == (["0"], ["0"])
    assert first["drain"] == {"in_flight": "auto"}
    assert "drain" not in second
    judged = fleet.arguments("clean_state@inside")
    assert (judged["ports"], judged["devices"], judged["settle_s"]) == ([31055], [UUIDS[1]], 2)
    started = fleet.arguments("server_launch@inside")
    assert set(started) <= {"name", "state_dir", "from_launch", "documents", "run_id", "operator", "nvml_deadline_s"}
    assert set(started["documents"]) == {"evict", "clean"}
    tried = fleet.arguments("server_launch@inside", 2)
    assert set(tried) == {"name", "from_launch"}
    proved = fleet.arguments("server_ready@inside")
    assert "api_key" not in proved
    assert (proved["record"], proved["min_gpu_headroom_mib"]) == (True, 5)
    for key in ("gpu_evict@inside", "server_launch@inside", "server_ready@inside"):
        assert fleet.arguments(key)["run_id"] == run_id


def test_the_first_launch_is_told_what_the_steps_before_it_found(fleet: Scripted) -> None:
    fleet.server.update(soak={"requests": 3, "tokens": 9}, hung_after={"weights": 33}, keep_launches=4)
    fleet.variables["sglang_progress_s"] = 2
    fleet.run("relaunch", operator="anna").check()
    started = fleet.arguments("server_launch@inside")
    assert set(started["documents"]) == {"plan", "evict", "clean"}
    assert started["documents"]["plan"]["verdict"] == "allowed"
    assert started["documents"]["evict"]["inside"]["verdict"] == "evicted"
    assert started["documents"]["clean"]["verdict"] == "clean"
    assert "invocation" not in started["documents"]["clean"]
    assert (started["operator"], started["keep_launches"]) == ("anna", 4)
    proved = fleet.arguments("server_ready@inside")
    assert (proved["soak_requests"], proved["soak_tokens"], proved["record"]) == (3, 9, True)
    assert proved["hung_after"] == {"weights": 33.0}
    assert "soak_concurrency" not in proved


def test_a_launch_that_fails_goes_back_as_well(fleet: Scripted) -> None:
    failed = {"failed": True, "msg": "port 31000 is taken"}
    fleet.script("server_launch@inside", TRIED, failed, kept("old-1"), launched("again-1", "sha256:bb"))
    assert error_of(fleet.run("relaunch")) == (
        "chat on ct129: the new configuration failed (it was not started: port 31000 is taken); rolled back to old-1: "
        "serving"
    )
    assert fleet.whole() == [TAKE, *PATH[:3], TRIAL, *AGAIN, GIVE_BACK]


# --- where there is nothing to go back to -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trial", "words"),
    [
        ({"failed": True, "msg": "no launch of 'chat' was ever proved"}, "no launch of 'chat' was ever proved"),
        (kept("old-1", "sha256:aa"), "launch old-1 has the configuration that just failed"),
        ({"failed": True, "msg": "Timed out after 180 second(s)."}, "Timed out"),
    ],
    ids=["never proved", "the same", "no answer"],
)
def test_without_a_way_back_it_is_stopped(fleet: Scripted, trial: dict[str, t.Any], words: str) -> None:
    fleet.script("server_launch@inside", TRIED, launched("new-1"), trial)
    fleet.script("server_ready@inside", unproved())
    message = error_of(fleet.run("relaunch"))
    assert words in message
    assert message.endswith("stopped, the host is clean")
    assert fleet.whole() == [TAKE, *PATH, TRIAL, "gpu_evict", "clean_state", GIVE_BACK]


def test_other_keys_are_another_configuration(fleet: Scripted) -> None:
    same = {**kept("old-1", "sha256:aa"), "secrets_changed": True}
    fleet.script("server_launch@inside", TRIED, launched("new-1"), same, launched("again-1"))
    fleet.script("server_ready@inside", unproved(), READY)
    assert "rolled back to old-1" in error_of(fleet.run("relaunch"))


def test_a_launch_that_failed_without_a_hash_is_known_by_its_trial(fleet: Scripted) -> None:
    failed = {"failed": True, "msg": "no room"}
    fleet.script("server_launch@inside", TRIED, failed, kept("old-1", "sha256:aa"))
    assert "has the configuration that just failed; stopped" in error_of(fleet.run("relaunch"))


# --- by choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["the server", "the command line"])
def test_stop(fleet: Scripted, place: str) -> None:
    fleet.script("server_ready@inside", unproved())
    if place == "the server":
        fleet.server["on_failure"] = "stop"
        run = fleet.run("relaunch")
    else:
        fleet.server["on_failure"] = "leave"
        run = fleet.run("relaunch", on_failure="stop")
    assert error_of(run) == (
        "chat on ct129: the new configuration failed (failed: no such model); stopped, the host is clean"
    )
    assert fleet.whole() == [TAKE, *PATH, "gpu_evict", "clean_state", GIVE_BACK]
    text = summary_of(run)
    assert "FAILED: it does not serve; stopped" in text
    assert "Stopping it" in text


def test_stop_on_a_host_that_does_not_become_clean(fleet: Scripted) -> None:
    fleet.script("server_ready@inside", unproved())
    fleet.script("clean_state@inside", clean("container"), dirty("container", "held"))
    message = error_of(fleet.run("relaunch", on_failure="stop"))
    assert "stopped, the host is not proved clean (dirty: GPU 0 (00000000:01:00.0): held [held])" in message


@pytest.mark.parametrize(("pid", "words"), [(9, "pid 9 still runs"), (None, "its process is gone")])
def test_leave(fleet: Scripted, pid: int | None, words: str) -> None:
    fleet.script("server_ready@inside", unproved(pid=pid))
    message = error_of(fleet.run("relaunch", on_failure="leave"))
    assert message.endswith(f"it was left as it is (on_failure: leave): {words}")
    assert fleet.whole() == [TAKE, *PATH, GIVE_BACK]


def test_an_unknown_choice_is_refused(fleet: Scripted) -> None:
    message = refusal_of(fleet.run("relaunch", on_failure="rolback", lease_wait_s="soon"))
    assert "on_failure is 'rolback'" in message
    assert "did you mean 'rollback'?" in message
    assert "lease_wait_s is 'soon'" in message
    assert fleet.rows() == []


# --- where going back fails too ---------------------------------------------------------------------------------------


def test_a_way_back_that_does_not_serve_is_stopped_and_never_tried_again(fleet: Scripted) -> None:
    fleet.script("server_ready@inside", unproved(), unproved("hung", "no progress for 180 s"))
    run = fleet.run("relaunch")
    assert error_of(run) == (
        "chat on ct129: the new configuration failed (failed: no such model); the rollback to old-1 failed too "
        "(hung: no progress for 180 s): stopped, the host is clean"
    )
    assert fleet.whole() == [TAKE, *PATH, TRIAL, *AGAIN, "gpu_evict", "clean_state", GIVE_BACK]
    text = summary_of(run)
    assert "FAILED: it does not serve; the rollback failed too" in text
    assert text.index("no such model") < text.index("Going back") < text.index("no progress") < text.index("Stopping")


def test_a_way_back_that_can_not_be_started_is_stopped(fleet: Scripted) -> None:
    failed = {"failed": True, "msg": "no such model folder"}
    fleet.script("server_launch@inside", TRIED, launched("new-1"), kept("old-1"), failed)
    fleet.script("server_ready@inside", unproved())
    fleet.script("clean_state@inside", clean("container"), clean("container"), dirty("container", "held"))
    message = error_of(fleet.run("relaunch"))
    assert "the rollback to old-1 failed too (it was not started: no such model folder)" in message
    assert "stopped, the host is not proved clean (dirty" in message


@pytest.mark.promise
@pytest.mark.parametrize(
    ("key", "answers"),
    [
        ("clean_state@inside", [clean("container"), dirty("container", "held")]),
        ("clean_state@inside", [clean("container"), {"failed": True, "msg": "Timed out after 165 second(s)."}]),
        ("gpu_evict@inside", [evicted("evicted", "term"), evicted("failed", "term", "kill")]),
    ],
    ids=["dirty", "no verdict", "somebody stayed"],
)
def test_nothing_is_started_again_on_a_host_that_is_not_proved_clean(
    fleet: Scripted, key: str, answers: list[dict[str, t.Any]]
) -> None:
    fleet.script("server_ready@inside", unproved())
    fleet.script(key, *answers)
    message = error_of(fleet.run("relaunch"))
    assert "the rollback to old-1 failed too" in message
    assert "nothing was started, the host is not proved clean" in message
    assert "server_launch from old-1" not in fleet.whole()
    assert fleet.whole()[-1] == GIVE_BACK


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("gpu_evict@inside", evicted("failed", "kill")),
        ("clean_state@inside", dirty("container", "held")),
    ],
)
def test_what_fails_before_the_start_is_never_followed_by_a_way_back(
    fleet: Scripted, key: str, answer: dict[str, t.Any]
) -> None:
    fleet.script(key, answer)
    run = fleet.run("relaunch")
    assert "rolled back" not in error_of(run)
    assert "server_launch" not in " ".join(fleet.whole())
    assert fleet.whole()[-1] == GIVE_BACK


@pytest.mark.parametrize("step", ["server_launch", "server_ready"])
def test_nothing_more_is_done_where_the_connection_was_lost(fleet: Scripted, step: str) -> None:
    """What it did is not known; it may be loading well."""
    lost = {"kill": True}
    if step == "server_launch":
        fleet.script("server_launch@inside", TRIED, lost)
    else:
        fleet.script("server_ready@inside", lost)
    run = fleet.run("relaunch")
    message = error_of(run)
    assert "the connection was lost in the" in message
    assert "nothing more was done" in message
    assert fleet.whole() == [TAKE, *PATH[: PATH.index(step) + 1], GIVE_BACK]


def test_with_all_servers_one_that_was_rolled_back_ends_the_run(fleet: Scripted) -> None:
    fleet.variables = {
        "sglang_servers": [fleet.server, {**fleet.server, "name": "draft", "port": 31001, "gpus": [1]}],
        "sglang_expected_gpus": 2,
    }
    fleet.script("server_launch@inside", TRIED, TRIED, launched("new-1"), kept("old-1"), launched("again-1"))
    fleet.script("server_ready@inside", unproved(), READY)
    assert "chat on ct129" in error_of(fleet.run("relaunch", all=True))
    names = {row["arguments"].get("name") for row in fleet.rows() if row["key"].startswith("gpu_evict")}
    assert names == {"chat"}


# --- with the container's node ----------------------------------------------------------------------------------------


def test_a_way_back_needs_both_views_too(fleet: Scripted) -> None:
    fleet.variables = {"sglang_proxmox_host": "pve1", "sglang_vmid": 129}
    fleet.script("server_ready@inside", unproved(), READY)
    fleet.script("gpu_evict@inside", evicted("evicted", "term"), evicted("failed", "term", "kill"))
    assert "rolled back to old-1: serving" in error_of(fleet.run("relaunch"))
    assert fleet.whole() == [
        TAKE,
        *["gpu_evict", "clean_state", "clean_state@node", "server_launch", "server_ready"],
        TRIAL,
        *["gpu_evict", TAKE, "gpu_evict@node", "clean_state", "clean_state@node"],
        *["server_launch from old-1", "server_ready"],
        GIVE_BACK,
    ]
    assert fleet.arguments("clean_state@node")["devices"] == [UUIDS[0]]
    assert "run_id" not in fleet.arguments("gpu_evict@node")


def test_a_node_that_calls_it_dirty_lets_nothing_be_started_again(fleet: Scripted) -> None:
    fleet.variables = {"sglang_proxmox_host": "pve1", "sglang_vmid": 129}
    fleet.script("server_ready@inside", unproved())
    fleet.script("clean_state@node", clean("host"), dirty("host", "held"))
    assert "nothing was started, the host is not proved clean (dirty" in error_of(fleet.run("relaunch"))
    assert "server_launch from old-1" not in fleet.whole()


# --- check mode -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trial", "extra", "words"),
    [
        (kept("old-1"), {}, "go back to launch old-1, if it does not serve"),
        (kept("old-1", "sha256:aa"), {}, "stop it, if it does not serve: launch old-1 has the same configuration"),
        ({"failed": True, "msg": "none was ever proved"}, {}, "stop it, if it does not serve: there is nothing to go"),
        (kept("old-1"), {"on_failure": "leave"}, "leave it as it is, if it does not serve"),
    ],
)
def test_check_mode_says_what_a_failure_would_lead_to(
    fleet: Scripted, trial: dict[str, t.Any], extra: dict[str, t.Any], words: str
) -> None:
    fleet.script("server_launch@inside", TRIED, TRIED, trial)
    fleet.script("gpu_evict@inside", evicted("planned", "term"))
    run = fleet.run("relaunch", check=True, **extra).check()
    assert all(row["check"] for row in fleet.rows())
    assert words in " ".join(summary_of(run).split()), summary_of(run)


# --- by hand ----------------------------------------------------------------------------------------------------------


def history(*rows: tuple[str, str, str]) -> dict[str, t.Any]:
    """server_info's answer: launches as (id, verdict, marks)."""
    launches = [
        {"launch_id": name, "verdict": verdict, "current": "current" in marks, "last_good": "good" in marks}
        for name, verdict, marks in rows
    ]
    return {"servers": [{"name": "chat", "state": "running", "launches": launches}], "orphans": []}


BROKEN = history(("new-1", "failed", "current"), ("old-1", "ready", "good"), ("old-0", "ready", ""))
GOOD = history(("old-1", "ready", "current good"), ("mid-1", "failed", ""), ("old-0", "ready", ""))


@pytest.mark.parametrize(
    ("seen", "extra", "goes_to"),
    [
        (BROKEN, {}, "old-1"),
        (GOOD, {}, "old-0"),
        (BROKEN, {"launch": "previous"}, "old-1"),
        (GOOD, {"launch": "last_good"}, "old-1"),
        (GOOD, {"launch": "mid-1"}, "mid-1"),
    ],
)
def test_rollback_by_hand_chooses_and_goes_the_whole_path(
    fleet: Scripted, seen: dict[str, t.Any], extra: dict[str, t.Any], goes_to: str
) -> None:
    fleet.script("server_info@inside", seen)
    fleet.script("server_launch@inside", kept(goes_to), launched("again-1", from_launch=goes_to))
    run = fleet.run("rollback", **extra).check()
    again = [*PATH[:2], f"server_launch from {goes_to}", "server_ready"]
    assert fleet.whole() == [TAKE, *again, GIVE_BACK]
    assert fleet.rows()[1]["arguments"]["from_launch"] == goes_to
    assert fleet.rows()[1]["check"]
    text = summary_of(run)
    assert "chat on ct129: SERVING" in text
    assert f"again from launch {goes_to}" in text


@pytest.mark.parametrize(
    ("seen", "extra", "words"),
    [
        (BROKEN, {"launch": "old-7"}, "launch 'old-7' is not kept on the host; kept are new-1 (failed), old-1 (ready)"),
        (history(("new-1", "ready", "current good")), {}, "no other launch of it was proved to serve"),
        (history(("new-1", "failed", "current")), {"launch": "last_good"}, "no launch of it was ever proved to serve"),
        ({"servers": [], "orphans": []}, {}, "no launch of it is kept on the host"),
        ({"failed": True, "msg": "no permission"}, {}, "no permission"),
    ],
)
def test_rollback_by_hand_touches_nothing_where_there_is_no_way_back(
    fleet: Scripted, seen: dict[str, t.Any], extra: dict[str, t.Any], words: str
) -> None:
    fleet.script("server_info@inside", seen)
    message = refusal_of(fleet.run("rollback", **extra))
    assert words in message, message
    assert "Nothing was touched" in message
    assert fleet.whole() == []


def test_rollback_by_hand_is_refused_where_the_launch_can_not_be_started_again(fleet: Scripted) -> None:
    fleet.script("server_info@inside", BROKEN)
    fleet.script("server_launch@inside", {"failed": True, "msg": "/models/old is gone"})
    message = refusal_of(fleet.run("rollback"))
    assert "launch old-1 can't be started again: /models/old is gone. Nothing was touched" in message
    assert fleet.whole() == []


def test_rollback_by_hand_that_fails_is_stopped(fleet: Scripted) -> None:
    fleet.script("server_info@inside", BROKEN)
    fleet.script("server_launch@inside", kept("old-1", port=31055), launched("again-1", from_launch="old-1"))
    fleet.script("server_ready@inside", unproved())
    assert error_of(fleet.run("rollback")) == (
        "chat on ct129: launch old-1 failed (failed: no such model); stopped, the host is clean"
    )
    assert fleet.whole() == [TAKE, *AGAIN, "gpu_evict", "clean_state", GIVE_BACK]
    assert fleet.arguments("clean_state@inside")["ports"] == [31055]


def test_rollback_by_hand_in_check_mode(fleet: Scripted) -> None:
    fleet.script("server_info@inside", BROKEN)
    fleet.script("server_launch@inside", kept("old-1"))
    fleet.script("gpu_evict@inside", evicted("planned", "term"))
    run = fleet.run("rollback", check=True).check()
    assert all(row["check"] for row in fleet.rows() if not row["key"].startswith("server_info"))
    text = " ".join(summary_of(run).split())
    assert "again from launch old-1" in text
    assert "stop it, if it does not serve" in text
