# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Attacks on the joint decision: several servers and hosts in a run, confirmations, options that would open a gate."""

from __future__ import annotations

import json
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, run_playbook
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import refusal_of
from ansible_collections.cleanslate.sglang.tests.integration_ns.scripted import (
    NODE,
    RUN_DEADLINE_S,
    Scripted,
    clean,
    dirty,
    evicted,
)

# The command of ssh's last argument, run here: what is sent over a connection is what matters.
FAKE_SSH = """#!/bin/sh
for last; do :; done
case "$last" in -*) exit 255;; esac
exec sh -c "$last"
"""


class Fleet(Scripted):
    """Several containers and nodes, all by local connections. Each script answers them in the order of the calls."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.containers: dict[str, dict[str, t.Any]] = {}
        self.nodes: dict[str, dict[str, t.Any]] = {NODE: {}}
        self.common: dict[str, t.Any] = {}

    def container(self, name: str, vmid: int | None, *names: str, node: str = NODE, **variables: t.Any) -> None:
        """A host with servers on GPU 0, GPU 1 and the CPU."""
        gpus: list[dict[str, t.Any]] = [{"gpus": [0]}, {"gpus": [1]}, {"device": "cpu", "gpus": []}]
        servers = [
            {**self.server, **gpus[number], "name": each, "port": 31000 + number} for number, each in enumerate(names)
        ]
        where = {} if vmid is None else {"sglang_proxmox_host": node, "sglang_vmid": vmid}
        self.containers[name] = {"sglang_servers": servers, **where, **variables}

    def run(
        self, playbook: str, *, check: bool = False, env: t.Mapping[str, str] | None = None, **extra: t.Any
    ) -> PlaybookRun:
        local = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "sglang_become": False,
            "sglang_host_become": False,
        }
        groups = {
            "sglang": {
                "hosts": {name: {**local, **each} for name, each in self.containers.items()},
                "vars": self.common,
            },
            "proxmox": {"hosts": {name: {**local, **each} for name, each in self.nodes.items()}},
        }
        inventory = self.directory / "inventory.json"
        inventory.write_text(json.dumps({"all": {"children": groups}}))
        (self.directory / "script.json").write_text(json.dumps(self.scripts))
        (self.directory / "calls").write_text("")
        return run_playbook(
            f"cleanslate.sglang.{playbook}",
            scratch=self.directory,
            deadline_s=RUN_DEADLINE_S,
            inventory=inventory,
            extra_vars=extra,
            env={
                "ANSIBLE_COLLECTIONS_PATH": str(self.directory / "collections"),
                "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml",
                **(env or {}),
            },
            cwd=self.directory,
            check=check,
        )


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def acts(fleet: Fleet) -> list[tuple[str, str]]:
    """Who was evicted and started, in the order of the calls: (module@side, server)."""
    return [
        (row["key"], row["arguments"]["name"])
        for row in fleet.rows()
        if row["key"].startswith(("gpu_evict", "server_launch")) and not row["check"]
    ]


def errors_of(run: PlaybookRun) -> str:
    return "\n".join(str(task.result.get("msg")) for task in run.tasks if task.status == "failed" and not task.ignored)


# --- several servers in one run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vmid", [None, 129], ids=["no node", "with its node"])
def test_a_server_that_fails_stops_all_that_would_come_after_it(fleet: Fleet, vmid: int | None) -> None:
    """The one before it has left clean verdicts behind; they are not its own."""
    fleet.container("h1", vmid, "a", "b", "c")
    fleet.container("h2", vmid and 130, "d")
    fleet.script("clean_state@inside", clean("container"), dirty("container", "held"))
    run = fleet.run("relaunch", all=True)
    assert run.rc == 2
    assert "is not clean for b (dirty)" in errors_of(run)
    by_node = [("gpu_evict@node", "b")] if vmid else []
    first = [("gpu_evict@inside", "a"), ("server_launch@inside", "a")]
    assert acts(fleet) == [*first, ("gpu_evict@inside", "b"), *by_node]


@pytest.mark.promise
def test_a_module_that_gives_no_verdict_does_not_borrow_the_last_servers(fleet: Fleet) -> None:
    fleet.container("h1", 129, "a", "b")
    fleet.script("gpu_evict@inside", evicted("evicted", "term"), {"failed": True, "msg": "Timed out"})
    fleet.script("gpu_evict@node", {})
    fleet.script("clean_state@inside", clean("container"), {})
    run = fleet.run("relaunch", all=True)
    assert "is not clean for b (unknown)" in errors_of(run)
    assert ("server_launch@inside", "a") in acts(fleet)
    assert ("server_launch@inside", "b") not in acts(fleet)


def test_no_host_is_touched_where_another_one_fails_late(fleet: Fleet) -> None:
    """Whatever strategy somebody's ansible.cfg sets: the healthy host does not run ahead."""
    slow = fleet.directory / "ssh"
    slow.write_text("#!/bin/sh\nsleep 6\nexit 255\n")
    slow.chmod(0o755)
    fleet.container("h1", None, "a", ansible_connection="ssh", ansible_ssh_executable=str(slow))
    fleet.container("h2", None, "b")
    run = fleet.run("teardown", all=True, env={"ANSIBLE_STRATEGY": "free"})
    assert run.rc != 0
    assert acts(fleet) == []


def test_the_node_acts_for_an_unreachable_container_whatever_the_configuration_says(fleet: Fleet) -> None:
    fleet.container("h1", 129, "a", **fleet.ssh_to_nowhere())
    fleet.run("teardown", env={"ANSIBLE_ANY_ERRORS_FATAL": "true"}).check()
    assert acts(fleet) == [("gpu_evict@node", "a")]


# --- options that would open a gate -----------------------------------------------------------------------------------


@pytest.mark.promise
def test_no_option_of_a_role_lets_a_dirty_host_be_started_on(fleet: Fleet) -> None:
    """Extra variables win over whatever the playbook says to the role."""
    fleet.container("h1", None, "a")
    fleet.script("clean_state@inside", dirty("container", "held"))
    run = fleet.run("relaunch", clean_state_fails=False, teardown_fails=False)
    assert "h1 is not proved clean for a (dirty)" in errors_of(run)
    assert acts(fleet) == [("gpu_evict@inside", "a")]


@pytest.mark.promise
@pytest.mark.parametrize("place", ["inventory", "extra variables"])
def test_a_node_that_is_named_can_not_be_left_out_of_the_verdict(fleet: Fleet, place: str) -> None:
    fleet.container("h1", 129, "a")
    fleet.script("clean_state@node", dirty("host", "held"))
    if place == "inventory":
        fleet.common["clean_state_node"] = ""
        run = fleet.run("relaunch")
    else:
        run = fleet.run("relaunch", clean_state_node="")
    assert "h1 is not" in errors_of(run)
    assert ("server_launch@inside", "a") not in acts(fleet)


def test_a_node_that_answers_for_another_container_gave_no_verdict(fleet: Fleet) -> None:
    fleet.container("h1", 129, "a")
    fleet.script("clean_state@node", clean("host", container={"vmid": "130", "state": "running"}))
    run = fleet.run("relaunch")
    assert "it answered for container 130, not for 129" in errors_of(run)
    assert ("server_launch@inside", "a") not in acts(fleet)


# --- confirmations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [{"confirm_container_stop": "129"}, {"confirm_gpu_reset": "0"}], ids=["stop", "reset"]
)
def test_a_confirmation_counts_for_one_host(fleet: Fleet, given: dict[str, t.Any]) -> None:
    """Container 129 of pve1 is not that of pve2, and neither is GPU 0."""
    fleet.nodes["pve2"] = {}
    fleet.container("h1", 129, "a")
    fleet.container("h2", 129, "b", node="pve2")
    message = refusal_of(fleet.run("teardown", all=True, **given))
    assert "is given, and servers of h1, h2 are chosen" in message
    assert fleet.rows() == []
    fleet.script("gpu_evict@inside", evicted("failed", "kill"))
    fleet.run("teardown", server="h1/a", **given).check()
    assert acts(fleet) == [("gpu_evict@inside", "a"), ("gpu_evict@node", "a")]


def test_a_confirmation_in_the_inventory_is_refused(fleet: Fleet) -> None:
    """Also one of a host that is not the first."""
    fleet.container("h1", 129, "a")
    fleet.container("h2", 130, "b", confirm_gpu_reset=[0])
    message = refusal_of(fleet.run("teardown", all=True))
    assert "h2: confirm_gpu_reset stands in the inventory, but a confirmation is for one run" in message
    assert fleet.rows() == []


def test_a_container_is_stopped_for_one_server(fleet: Fleet) -> None:
    """The server that was relaunched before would go down again, and its summary would still say that it serves."""
    fleet.container("h1", 129, "a", "b")
    message = refusal_of(fleet.run("relaunch", all=True, confirm_container_stop="129", acknowledge="a,b"))
    assert "2 servers in that container are chosen" in message
    assert fleet.rows() == []


# --- which node, which container --------------------------------------------------------------------------------------


def test_two_hosts_that_name_one_container_are_refused(fleet: Fleet) -> None:
    fleet.container("h1", 129, "a")
    fleet.container("h2", 129, "b")
    message = refusal_of(fleet.run("teardown", all=True))
    assert f"h1, h2: all of them name container 129 of node {NODE}" in message
    assert fleet.rows() == []


def test_a_container_that_can_not_be_proved_to_be_the_host_is_refused(fleet: Fleet) -> None:
    fleet.container("h1", 129, "a")
    seen = fleet.scripts["gpu_info@node"][0]
    fleet.script("gpu_info@node", {**seen, "container": {**seen["container"], "init_pid": None}})
    assert "whether container 129 there is h1 can't be told" in refusal_of(fleet.run("teardown"))
    assert acts(fleet) == []


def test_the_role_alone_lets_no_node_act_that_must_not(fleet: Fleet) -> None:
    """Not only the playbooks ask whether the node may."""
    fleet.container("h1", 129, "a", sglang_host_rungs=False)
    play = {
        "hosts": "h1",
        "gather_facts": False,
        "tasks": [
            {
                "ansible.builtin.include_role": {"name": "cleanslate.sglang.teardown"},
                "vars": {"teardown_server": "{{ sglang_servers[0] }}", "teardown_vantage": "host"},
            }
        ],
    }
    (fleet.directory / "collections/ansible_collections/cleanslate/sglang/playbooks/alone.yml").write_text(
        json.dumps([play])
    )
    assert "h1: no node may act for it" in errors_of(fleet.run("alone"))
    assert fleet.rows() == []


# --- becoming root on the node ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["root", None])
def test_root_on_a_node_without_sudo(fleet: Fleet, user: str | None) -> None:
    """Ansible leaves sudo out where the node's entry says root. Where only ssh knows it, the way out is named."""
    fake = fleet.directory / "ssh"
    fake.write_text(FAKE_SSH)
    fake.chmod(0o755)
    no_sudo = fleet.directory / "sudo"
    no_sudo.write_text("#!/bin/sh\necho 'sudo: command not found' >&2; exit 127\n")
    no_sudo.chmod(0o755)
    named = {"ansible_user": user} if user else {}
    fleet.nodes[NODE] = {
        **named,
        "ansible_connection": "ssh",
        "ansible_ssh_executable": str(fake),
        "ansible_host": "127.0.0.1",
        "ansible_become_exe": str(no_sudo),
    }
    fleet.container("h1", 129, "a", sglang_host_become=True)
    run = fleet.run("teardown")
    if user:
        assert run.check()
        return
    assert "set sglang_host_become: false" in refusal_of(run)
    assert fleet.rows() == []
