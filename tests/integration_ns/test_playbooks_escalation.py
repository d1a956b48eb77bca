# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When the playbooks go on to the Proxmox node, with what, and when they don't. The modules answer from a script."""

from __future__ import annotations

import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import refusal_of, summary_of
from ansible_collections.cleanslate.sglang.tests.integration_ns.scripted import (
    NODE,
    UUIDS,
    Scripted,
    clean,
    dirty,
    evicted,
)

INSIDE = ["gpu_evict@inside", "clean_state@inside", "clean_state@node"]
BY_NODE = ["gpu_evict@node", "clean_state@inside", "clean_state@node"]
START = ["server_launch@inside", "server_ready@inside"]
TIMED_OUT = {"failed": True, "msg": "Timed out after 700 second(s)."}


@pytest.fixture
def fleet(tmp_path: Path) -> Scripted:
    return Scripted(tmp_path)


def failure_of(run: PlaybookRun) -> str:
    """The error that a run ended with. A relaunch tells it where it happened, and when all that follows is done."""
    failed = [str(task.result["msg"]) for task in run.tasks if task.status == "failed" and not task.ignored]
    assert run.rc == 2, f"rc {run.rc}\n{run.stdout}\n{run.stderr}"
    assert 1 <= len(failed) <= 2 and len(set(failed)) == 1, run.stdout
    return failed[-1]


def modules_of(run: PlaybookRun) -> list[str]:
    """The tasks that ran a module on a host."""
    local = ("debug", "fail", "set_fact", "include_tasks", "include_role")
    return [task.task for task in run.tasks if task.status != "skipped" and task.action.rpartition(".")[2] not in local]


# --- relaunch ---------------------------------------------------------------------------------------------------------


def test_the_inside_path_is_enough_where_both_call_it_clean(fleet: Scripted) -> None:
    """The node is asked, and nothing on it is acted on."""
    text = summary_of(fleet.run("relaunch").check())
    assert fleet.calls() == [*INSIDE, *START]
    for words in ("chat on ct129: SERVING", "inside ct129: clean", f"node {NODE}: clean", "80000 MiB of host memory"):
        assert words in text, text
    assert "Escalated" not in text


def test_a_host_without_a_node_is_worked_on_as_before(fleet: Scripted) -> None:
    fleet.variables = {}
    run = fleet.run("relaunch").check()
    assert fleet.calls() == ["gpu_evict@inside", "clean_state@inside", *START]
    assert not [row for row in fleet.rows() if row["key"].endswith("@node")]
    # Four of the preflight, the lease taken and given back, and one for each step.
    assert len(modules_of(run)) == 10, modules_of(run)


def test_a_node_that_must_not_act_is_not_even_asked(fleet: Scripted) -> None:
    fleet.variables["sglang_host_rungs"] = False
    fleet.script("clean_state@inside", dirty("container", "held_elsewhere"))
    run = fleet.run("relaunch")
    assert "held_elsewhere" in failure_of(run)
    assert fleet.calls() == ["gpu_evict@inside", "clean_state@inside"]
    assert not [row for row in fleet.rows() if row["key"].endswith("@node")]


@pytest.mark.parametrize(
    "inside",
    [evicted("failed", "term", "kill"), TIMED_OUT],
    ids=["somebody stayed", "timed out"],
)
def test_an_eviction_that_fails_inside_goes_on_by_the_node(fleet: Scripted, inside: dict[str, t.Any]) -> None:
    """Straight away: there is nothing to judge yet. Then both views judge."""
    fleet.script("gpu_evict@inside", inside)
    run = fleet.run("relaunch").check()
    assert fleet.calls() == ["gpu_evict@inside", *BY_NODE, *START]
    text = summary_of(run)
    assert f"node {NODE}: kill 0.2 s; evicted, 0.5 s" in text, text
    assert "SERVING" in text
    told = run.named("Escalate to the Proxmox node pve1")[0].result["msg"]
    assert "the eviction from inside did not succeed" in told
    assert "node pve1 goes on" in told


def test_what_is_held_elsewhere_goes_on_by_the_node(fleet: Scripted) -> None:
    fleet.script("gpu_evict@inside", evicted("nothing_to_do"))
    fleet.script("clean_state@inside", dirty("container", "held_elsewhere"), clean("container"))
    fleet.script("clean_state@node", dirty("host", "held"), clean("host"))
    run = fleet.run("relaunch").check()
    assert fleet.calls() == [*INSIDE, *BY_NODE, *START]
    told = run.named("Escalate to the Proxmox node pve1")[0].result["msg"]
    assert "after the eviction from inside it is not clean: GPU 0 (00000000:01:00.0): held [held]" in told
    assert "(seen from node pve1)" in told


def test_both_are_asked_once_more_before_anybody_is_evicted(fleet: Scripted) -> None:
    """The node calls it free: one of the two looked at the wrong moment."""
    fleet.script("clean_state@inside", dirty("container", "held_elsewhere"), clean("container"))
    fleet.run("relaunch").check()
    assert fleet.calls() == [*INSIDE, "clean_state@inside", "clean_state@node", *START]


def test_a_free_gpu_of_the_node_does_not_outvote_the_container(fleet: Scripted) -> None:
    fleet.script("clean_state@inside", dirty("container", "held_elsewhere"))
    run = fleet.run("relaunch")
    message = failure_of(run)
    assert "ct129 is not clean for chat (dirty)" in message
    assert "held_elsewhere" in message
    again = ["clean_state@inside", "clean_state@node"]
    assert fleet.calls() == [*INSIDE, *again, *BY_NODE, *again]
    assert "FAILED: not clean (dirty)" in summary_of(run)


@pytest.mark.promise
@pytest.mark.parametrize(
    ("side", "answer"),
    [
        ("inside", dirty("container", "scan_incomplete", "unknown")),
        ("inside", TIMED_OUT),
        ("node", dirty("host", "held")),
        ("node", {"failed": True, "verdict": "unknown", "msg": "no such container"}),
    ],
    ids=["inside unknown", "inside timed out", "node dirty", "node refused"],
)
def test_nothing_is_started_unless_both_are_clean(fleet: Scripted, side: str, answer: dict[str, t.Any]) -> None:
    fleet.script(f"clean_state@{side}", answer)
    run = fleet.run("relaunch")
    assert "ct129 is not clean for chat" in failure_of(run)
    assert not set(START) & set(fleet.calls())
    assert fleet.calls()[-3:] == BY_NODE
    assert "FAILED: not clean" in summary_of(run)


def test_the_error_names_what_stood_against_the_node(fleet: Scripted) -> None:
    refused = evicted("failed", "kill")
    refused["reasons"] = [{"code": "container_stop_unconfirmed", "message": "nobody confirmed it"}]
    fleet.script("gpu_evict@node", refused)
    fleet.script("clean_state@node", dirty("host", "unkillable"))
    run = fleet.run("relaunch")
    assert "the eviction from node pve1: nobody confirmed it [container_stop_unconfirmed]" in failure_of(run)
    assert "- nobody confirmed it [container_stop_unconfirmed]" in summary_of(run)


def test_check_mode_shows_both_plans_and_acts_on_neither_side(fleet: Scripted) -> None:
    fleet.script("gpu_evict@inside", evicted("planned", "term"))
    fleet.script("gpu_evict@node", evicted("planned", "stop", "kill"))
    text = summary_of(fleet.run("relaunch", check=True).check())
    assert all(row["check"] for row in fleet.rows())
    # The last one asks what a failure would lead to.
    assert fleet.calls() == [*INSIDE, "gpu_evict@node", "server_launch@inside", "server_launch@inside"]
    assert fleet.arguments("server_launch@inside")["from_launch"] == "last_good"
    assert "then, by node pve1, where that is not enough:" in text
    assert text.index("term") < text.index("by node pve1") < text.index("kill")


# --- what the node is told --------------------------------------------------------------------------------------------


def test_the_node_gets_uuids_its_own_rungs_and_the_confirmations(fleet: Scripted) -> None:
    fleet.server["rungs"] = ["term", "kill", "container_stop"]
    fleet.server["deadlines"] = {"attach": 3}
    fleet.variables.update(sglang_expected_gpus=2, sglang_baselines_mib={"0": 150}, sglang_protect=["gdm.service"])
    fleet.script("gpu_evict@inside", evicted("failed", "term"))
    fleet.run("relaunch", confirm_container_stop="129", confirm_gpu_reset="0,1", acknowledge="sshd, jupyter").check()
    told = fleet.arguments("gpu_evict@node")
    assert told["container"] == "129" or told["container"] == 129
    assert told["devices"] == [UUIDS[0]]
    assert told["baselines"] == {UUIDS[0]: 150}
    assert told["rungs"] == ["term", "kill", "container_stop", "gpu_reset"]
    assert str(told["confirm_container_stop"]) == "129"
    assert told["confirm_gpu_reset"] == ["0", "1"]
    assert told["acknowledge"] == ["sshd", "jupyter"]
    assert told["protect"] == ["gdm.service"]
    assert told["deadlines"]["attach"] == 3
    assert "expected_gpus" not in told
    inside = fleet.arguments("gpu_evict@inside")
    assert inside["rungs"] == ["term", "kill"]
    assert inside["devices"] == ["0"]
    assert inside["expected_gpus"] == 2
    assert not {"container", "confirm_container_stop", "confirm_gpu_reset", "acknowledge"} & set(inside)
    asked = fleet.arguments("clean_state@node")
    assert (asked["devices"], asked["ports"]) == ([UUIDS[0]], [31000])
    assert not {"expected_gpus", "vantage", "cuda_probe"} & set(asked)


def test_an_inventory_rung_without_its_confirmation_is_passed_as_it_is(fleet: Scripted) -> None:
    """The module refuses it, with its reason."""
    fleet.server["rungs"] = ["kill", "gpu_reset"]
    fleet.script("gpu_evict@inside", evicted("failed", "kill"))
    fleet.run("relaunch").check()
    told = fleet.arguments("gpu_evict@node")
    assert told["rungs"] == ["kill", "gpu_reset"]
    assert told["confirm_gpu_reset"] == []
    assert "confirm_container_stop" not in told


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"confirm_container_stop": "130"}, ["confirm_container_stop is 130", "the container of ct129 is 129"]),
        ({"confirm_container_stop": 1290}, ["1290", "129"]),
    ],
)
def test_a_confirmation_for_another_container_is_refused(
    fleet: Scripted, extra: dict[str, t.Any], words: list[str]
) -> None:
    message = refusal_of(fleet.run("teardown", **extra))
    for word in words:
        assert word in message, message
    assert fleet.rows() == []


# --- teardown and assert_clean ----------------------------------------------------------------------------------------


def test_teardown_is_done_where_somebody_was_evicted(fleet: Scripted) -> None:
    fleet.run("teardown").check()
    assert fleet.calls() == ["gpu_evict@inside"]


@pytest.mark.parametrize(
    "inside", [evicted("nothing_to_do"), evicted("failed", "kill")], ids=["nobody seen", "somebody stayed"]
)
def test_teardown_asks_the_node_otherwise(fleet: Scripted, inside: dict[str, t.Any]) -> None:
    fleet.script("gpu_evict@inside", inside)
    text = summary_of(fleet.run("teardown").check())
    assert fleet.calls() == ["gpu_evict@inside", "gpu_evict@node"]
    assert f"node {NODE}: kill 0.2 s; evicted" in text, text


def test_teardown_fails_where_the_node_fails(fleet: Scripted) -> None:
    fleet.script("gpu_evict@inside", evicted("failed", "kill"))
    fleet.script("gpu_evict@node", evicted("failed", "kill"))
    message = failure_of(fleet.run("teardown"))
    assert "inside ct129: somebody stayed" in message
    assert "node pve1: somebody stayed" in message


def test_teardown_shows_both_plans(fleet: Scripted) -> None:
    fleet.script("gpu_evict@inside", evicted("planned", "term"))
    fleet.script("gpu_evict@node", evicted("planned", "kill"))
    text = summary_of(fleet.run("teardown", check=True).check())
    assert fleet.calls() == ["gpu_evict@inside", "gpu_evict@node"]
    assert "then, by node pve1" in text


def test_an_unreachable_container_is_torn_down_and_judged_by_its_node_alone(fleet: Scripted) -> None:
    fleet.unreachable()
    torn_down = fleet.run("teardown").check()
    assert fleet.calls() == ["gpu_evict@node"]
    assert fleet.arguments("gpu_evict@node")["devices"] == ["0"]
    text = summary_of(torn_down)
    assert "unreachable:" in text
    assert f"node {NODE}: kill 0.2 s; evicted" in text
    assert not torn_down.named("Try pct exec")

    fleet.variables["sglang_cuda_probe"] = True
    judged = summary_of(fleet.run("assert_clean").check())
    assert fleet.calls() == ["clean_state@node"]
    assert fleet.arguments("clean_state@node")["cuda_probe"] is True
    assert "seen from node pve1" in judged
    assert "container_unreachable" in judged

    fleet.script("clean_state@node", dirty("host", "held"))
    assert "dirty" in failure_of(fleet.run("assert_clean"))


def test_assert_clean_joins_both_views_and_evicts_nobody(fleet: Scripted) -> None:
    fleet.script("clean_state@node", dirty("host", "held"))
    run = fleet.run("assert_clean")
    assert "held" in failure_of(run)
    assert fleet.calls() == ["clean_state@inside", "clean_state@node"]
    text = summary_of(run)
    for words in ("inside ct129: clean", "node pve1: dirty", "[held] (seen from node pve1)"):
        assert words in text, text


def test_inspect_shows_both_views_or_the_nodes_alone(fleet: Scripted) -> None:
    both = summary_of(fleet.run("inspect").check())
    assert "ct129: 2 GPUs" in both
    assert "ct129 seen from node pve1: 2 GPUs" in both
    fleet.unreachable()
    alone = summary_of(fleet.run("inspect").check())
    assert "ct129: it can't be reached" in alone
    assert "ct129 seen from node pve1: 2 GPUs" in alone


# --- before anything is touched ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"failed": True, "msg": "container 129 is not on this node"}, "container 129 is not on this node"),
        ({"gpus": [], "container": {"state": "stopped"}}, "ct129 answers, but container 129 is stopped there"),
        ({"gpus": [], "container": {"state": "running", "init_pid": os.getpid()}}, None),
    ],
    ids=["not there", "stopped", "its own init"],
)
def test_a_wrong_container_is_refused_first(fleet: Scripted, seen: dict[str, t.Any], words: str | None) -> None:
    """Both are this machine here, so its own init is 'the container's'."""
    fleet.script("gpu_info@node", seen)
    run = fleet.run("teardown")
    if words is None:
        assert run.check()
        return
    assert words in refusal_of(run)
    assert fleet.calls() == []


def test_a_node_that_does_not_answer_is_refused_first(fleet: Scripted) -> None:
    unreachable = Scripted.ssh_to_nowhere()
    fleet.node_variables = unreachable
    message = refusal_of(fleet.run("relaunch"))
    assert "ct129: node pve1 can't be asked: unreachable" in message
    assert fleet.rows() == []


def test_an_unreachable_container_can_not_be_started_in(fleet: Scripted) -> None:
    """ssh fails, pct fails (there is none here), and the node says what it sees."""
    fleet.unreachable()
    fleet.variables["sglang_host_environment"] = {"PATH": str(fleet.directory) + ":/usr/bin:/bin"}
    fleet.script("clean_state@node", dirty("host", "unkillable"))
    message = refusal_of(fleet.run("relaunch"))
    for words in (
        "ct129: unreachable",
        "127.0.0.1 port 1",
        "not by pct either: there is no pct",
        "node pve1 sees container 129: dirty: GPU 0 (00000000:01:00.0): unkillable",
        "teardown.yml and assert_clean.yml work without the container",
        "-e confirm_container_stop=129",
    ):
        assert words in message, message


def test_an_unreachable_container_is_not_tried_by_pct_where_that_is_off(fleet: Scripted) -> None:
    fleet.unreachable()
    fleet.variables["sglang_pct_fallback"] = False
    run = fleet.run("relaunch")
    assert "not by pct either: sglang_pct_fallback is false" in refusal_of(run)


def test_a_missing_connection_plugin_is_named(fleet: Scripted) -> None:
    """pct answers, but the controller lacks community.proxmox."""
    fleet.unreachable()
    fleet.pct("exit 0")
    message = refusal_of(fleet.run("relaunch"))
    assert "not by pct either: the connection plugin community.proxmox.proxmox_pct_remote is not installed" in message


def test_a_hanging_attach_costs_its_deadline_only(fleet: Scripted) -> None:
    fleet.unreachable()
    fleet.pct("trap '' TERM; echo $$ > \"$0.pid\"; while :; do sleep 1; done")
    message = refusal_of(fleet.run("relaunch"))
    assert "`pct exec 129` gave no answer within 20 s (attach hangs)" in message
    pid = int((fleet.directory / "pct.pid").read_text())
    wait_for("the end of the hanging pct", lambda: has_ended(pid))


def has_ended(pid: int) -> bool:
    """Gone, or a zombie: `timeout` kills itself with it, and then it is up to pid 1 when it is reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_container_without_ssh_is_reached_by_pct_for_the_rest_of_the_run(fleet: Scripted) -> None:
    """The container's own user, port and key are not taken to the node; delegated tasks go on as before."""
    fleet.unreachable()
    # Inside is root already: whoever becomes root once more needs a sudo that asks no password.
    fleet.variables.update(ansible_user="sglang-ops", ansible_ssh_private_key_file="/container-key", sglang_become=True)
    fleet.node_variables = {
        "ansible_host": "192.0.2.10",
        "ansible_port": 2222,
        "ansible_user": "ops",
        "ansible_ssh_private_key_file": "/node-key",
    }
    fleet.pct("exit 0")
    fleet.pct_plugin()
    fleet.script("gpu_evict@inside", evicted("failed", "kill"))
    run = fleet.run("relaunch").check()
    assert fleet.calls() == ["gpu_evict@inside", *BY_NODE, *START]
    (used,) = {tuple(sorted(each.items())) for each in fleet.connections()}
    assert dict(used) == {
        "remote_addr": "192.0.2.10",
        "port": 2222,
        "remote_user": "ops",
        "private_key_file": "/node-key",
        "vmid": 129,
    }
    told = run.named("Go on by pct exec on the node pve1")[0].result["msg"]
    assert "ct129 does not answer by ssh (unreachable: " in told
    assert "SERVING" in summary_of(run)


def test_pct_answers_and_the_connection_does_not(fleet: Scripted) -> None:
    fleet.unreachable()
    fleet.pct("exit 0")
    fleet.pct_plugin("no route to the node")
    message = refusal_of(fleet.run("relaunch"))
    assert "not by pct either: unreachable: " in message
    assert "no route to the node" in message
    assert "127.0.0.1 port 1" in message
