# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Relaunch, teardown, assert_clean and inspect from end to end, on the stand-in server and simulated GPUs."""

from __future__ import annotations

import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import PlaybookHost, summary_of

pytestmark = pytest.mark.ns
SECRET = "Sesame-51a7-do-not-show"


@pytest.fixture
def host(ns: Namespace, tmp_path: Path) -> PlaybookHost:
    one = PlaybookHost(tmp_path, ns)
    one.follow_schedulers()
    one.servers = [one.server("demo", 31000, flags={"tp_size": 2, "reasoning_parser": "kimi_k2"})]
    return one


def test_start_then_a_changed_flag_then_nothing_to_change(host: PlaybookHost, ns: Namespace) -> None:
    """From nothing to serving; with another flag; a third run leaves it alone; then it is taken down."""
    first = summary_of(host.run("relaunch.yml").check())
    assert "demo on gpu01: SERVING" in first
    assert "nothing_to_do" in first
    before = host.record("demo")

    host.servers[0]["flags"]["max_total_tokens"] = 2048
    second_run = host.run("relaunch.yml").check()
    second = summary_of(second_run)
    after = host.record("demo")
    assert after["pid"] != before["pid"]
    assert before["pid"] not in ns.pids()
    assert f"ended: pid {before['pid']}" in second
    for words in ("SERVING", "Before MiB", "20,000", "rung", "reasoning separated", after["launch_id"], "Time"):
        assert words in second, second
    assert max(map(len, second.splitlines())) <= 100
    assert "{" not in second

    left_alone = host.run("relaunch.yml", extra_vars={"relaunch_when": "changed"}).check()
    assert "left alone" in summary_of(left_alone)
    assert not left_alone.of_action("gpu_evict")
    assert host.record("demo")["pid"] == after["pid"]

    dirty = host.run("assert_clean.yml")
    assert dirty.rc == 2
    assert "dirty" in summary_of(dirty)

    seen = summary_of(host.run("inspect.yml").check())
    for words in (
        "2 GPUs (SIMULATED)",
        "sglang::scheduler_TP1",
        "demo: ",
        "max-total-tokens=2048",
        "RAM: ",
        "/dev/shm: ",
    ):
        assert words in seen, seen

    torn_down = host.run("teardown.yml").check()
    assert "assert_clean.yml" in summary_of(torn_down)
    assert not [title for title in ns.titles().values() if title.startswith("sglang::")]
    assert "clean" in summary_of(host.run("assert_clean.yml").check())


@pytest.mark.parametrize(
    "changes",
    [{"api_key": f"{SECRET}-new"}, {"secret_environment": {"HF_TOKEN": f"{SECRET}-new"}}, {"python": "link"}],
    ids=["api_key", "secret_environment", "python"],
)
def test_changed_secrets_or_another_interpreter_are_changes(
    host: PlaybookHost, tmp_path: Path, changes: dict[str, t.Any]
) -> None:
    """None of them is in the flags, the environment or the GPUs that a running server shows."""
    host.servers[0].update({"api_key": SECRET, "secret_environment": {"HF_TOKEN": SECRET}})
    host.run("relaunch.yml").check()
    before = host.record("demo")
    if "python" in changes:
        interpreter = tmp_path / "python3"
        interpreter.symlink_to(sys.executable)
        changes = {"python": str(interpreter)}
    host.servers[0].update(changes)
    run = host.run("relaunch.yml", extra_vars={"relaunch_when": "changed"}).check()
    assert "left alone" not in summary_of(run)
    assert host.record("demo")["pid"] != before["pid"]
    assert SECRET not in run.stdout + run.stderr
    assert SECRET not in repr(run.tasks)


def test_check_mode_tells_the_plan_and_changes_nothing(host: PlaybookHost, ns: Namespace) -> None:
    host.run("relaunch.yml").check()
    before = (ns.living(), host.record("demo"))
    host.servers[0]["flags"]["max_total_tokens"] = 2048
    run = host.run("relaunch.yml", "--diff", check=True).check()
    text = summary_of(run)
    for words in (
        "check mode, nothing was changed",
        "term",
        "kill",
        f"pid {before[1]['pid']}",
        "sglang::scheduler_TP1",
    ):
        assert words in text, text
    assert "start configuration sha256:" in text, text
    assert any("max-total-tokens: 2048" in line for line in run.stdout.splitlines() if line.startswith("+")), run.stdout
    assert (ns.living(), host.record("demo")) == before


@pytest.mark.promise
def test_a_host_that_is_not_clean_is_never_started_on(host: PlaybookHost) -> None:
    """Promise 1: memory that nobody visible holds is dirty; nothing is started, and the summary says why."""
    host.nvml.write(Gpu(0, extra_mib=602), Gpu(1))
    host.servers[0]["settle_s"] = 1
    run = host.run("relaunch.yml")
    assert run.rc == 2
    text = summary_of(run)
    assert "FAILED: not clean (dirty)" in text
    assert "602 MiB" in text
    assert "Launched  nothing" in text
    assert not (host.directory / "state" / "demo" / "current.json").exists()


def test_a_server_that_dies_at_its_start_fails_with_its_own_error(host: PlaybookHost) -> None:
    host.servers[0] = host.server("demo", 31000, faults={"CRASH": "memory"})
    run = host.run("relaunch.yml")
    assert run.rc == 2
    text = summary_of(run)
    assert "FAILED: it does not serve" in text
    assert "Not enough memory" in text


@pytest.mark.promise
def test_a_server_that_hangs_at_its_start_is_given_up_at_the_deadline(host: PlaybookHost) -> None:
    """Promise 3: a start that never ends is given up and named."""
    host.servers[0] = host.server("demo", 31000, faults={"HANG": "sleep"}, ready_deadline_s=6)
    run = host.run("relaunch.yml")
    assert run.rc == 2
    assert "not serving: starting" in summary_of(run)


def test_keys_show_nowhere(host: PlaybookHost) -> None:
    host.servers[0].update({"api_key": SECRET, "secret_environment": {"HF_TOKEN": f"{SECRET}-2"}})
    run = host.run("relaunch.yml", "-vvv", "--diff").check()
    again = host.run("relaunch.yml", "-vvv", "--diff", extra_vars={"relaunch_when": "changed"}).check()
    assert "left alone" in summary_of(again)
    for each in (run, again):
        assert SECRET not in each.stdout + each.stderr
        assert SECRET not in repr(each.tasks)
    assert SECRET not in (host.directory / "state" / "demo" / "current.json").read_text()


def test_all_servers_one_after_another_and_one_by_name(host: PlaybookHost, ns: Namespace) -> None:
    # Both have the same titles, so the simulated memory can't follow each to its own GPU: they compute without.
    on_cpu = {"flags": {"device": "cpu"}}
    host.servers = [host.server("one", 31001, gpus=[0], **on_cpu), host.server("two", 31002, gpus=[1], **on_cpu)]
    host.nvml.write(*host.nvml.lines[:2])
    host.run("relaunch.yml", extra_vars={"all": True}).check()
    one, two = host.record("one"), host.record("two")
    host.run("relaunch.yml", extra_vars={"server": "two"}).check()
    assert host.record("one")["pid"] == one["pid"]
    assert host.record("two")["pid"] != two["pid"]
    assert one["pid"] in ns.pids()


@pytest.mark.parametrize("where", ["playbooks", "name"])
def test_it_runs_from_anywhere_and_by_its_full_name(host: PlaybookHost, where: str) -> None:
    if where == "playbooks":
        run = host.run("inspect.yml", cwd=ROOT / "playbooks")
    else:
        run = host.run("cleanslate.sglang.inspect", cwd=host.directory)
    assert "2 GPUs" in summary_of(run.check())
