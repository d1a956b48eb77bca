# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container whose root answers in the modules' stead, with facts that Ansible takes for variables: they say neither
which node acts, nor on which container, nor how.
"""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest
import yaml

from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch, apply_all
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.tree import copy_tree, using
from ansible_collections.cleanslate.sglang.tests.integration_ns.scripted import NODE, VMID, Scripted, dirty, evicted

OTHER = 130
FORGED: dict[str, t.Any] = {
    "sglang_vmid": OTHER,
    "sglang_proxmox_host": NODE,
    "sglang_host_environment": {"LD_PRELOAD": "/tmp/evil.so"},
    "sglang_state_dir": "/tmp/evil",
    "sglang_allow_simulated": True,
    "teardown_node": NODE,
    "teardown_scope": "gpu",
    "clean_state_node": "",
    "scope": "gpu",
    "confirm_container_stop": str(OTHER),
    "acknowledge": ["everybody"],
}
HIDING = {"sglang_proxmox_host": "", "sglang_host_rungs": False, "clean_state_node": "", "escalation_node": ""}
ANSWERERS = ("gpu_info", "server_lease", "gpu_evict", "clean_state")


def forge(fleet: Scripted, facts: dict[str, t.Any], *modules: str) -> None:
    for module in modules:
        for answer in fleet.scripts[f"{module}@inside"]:
            answer["ansible_facts"] = dict(facts)


def node_calls(fleet: Scripted) -> list[dict[str, t.Any]]:
    return [row["arguments"] for row in fleet.rows() if row["key"].endswith("@node")]


@pytest.mark.parametrize("playbook", ["teardown", "relaunch", "assert_clean", "inspect"])
def test_no_answer_says_which_container_the_node_acts_on(tmp_path: Path, playbook: str) -> None:
    fleet = Scripted(tmp_path)
    fleet.script("gpu_evict@inside", evicted("failed", "term"))
    fleet.script("clean_state@inside", dirty("container", "held"))
    forge(fleet, FORGED, *ANSWERERS, "server_info", "memory_info")
    run = fleet.run(playbook)
    asked = node_calls(fleet)
    assert asked, run.stdout
    assert {str(one["container"]) for one in asked} == {str(VMID)}
    for one in asked:
        assert not one.get("confirm_container_stop") and not one.get("acknowledge"), one
        assert one.get("scope", "server") == "server" and one.get("state_dir") is None, one
    assert "LD_PRELOAD" not in run.stdout


def test_no_answer_keeps_the_node_from_being_asked(tmp_path: Path) -> None:
    """A verdict of the container alone would be its own word."""
    fleet = Scripted(tmp_path)
    forge(fleet, HIDING, *ANSWERERS)
    fleet.run("relaunch").check()
    assert "clean_state@node" in fleet.calls(), fleet.calls()


def test_it_can_fail(tmp_path: Path) -> None:
    """Without it the node evicts from another container."""
    tree = copy_tree(tmp_path / "copy")
    apply_all(tree, [Patch(str(path.relative_to(ROOT)), "meta: clear_facts", "meta: noop") for path in clearing()])
    with using(tree):
        fleet = Scripted(tmp_path / "run")
    fleet.script("gpu_evict@inside", evicted("failed", "term"))
    forge(fleet, FORGED, "gpu_evict")
    fleet.run("teardown")
    assert str(OTHER) in {str(one["container"]) for one in node_calls(fleet)}


def clearing() -> list[Path]:
    """The files with that step once; those with more are named one by one below."""
    folders = (ROOT / "playbooks", ROOT / "roles")
    found = [path for folder in folders for path in folder.rglob("*.yml") if "collections" not in path.parts]
    return sorted(path for path in found if path.read_text().count("meta: clear_facts") == 1)


# --- the whole kind ---------------------------------------------------------------------------------------------------


INCLUDES = ("include_tasks", "import_tasks", "include_role", "import_role")
NO_CONTACT = ("set_fact", "fail", "debug", "meta", "assert", *INCLUDES)


def tasks_of(path: Path) -> list[dict[str, t.Any]]:
    """The tasks of a file in their order, those in blocks too."""

    def flat(entries: t.Iterable[dict[str, t.Any]]) -> t.Iterator[dict[str, t.Any]]:
        for entry in entries:
            parts = [part for name in ("block", "rescue", "always", "tasks") for part in entry.get(name) or []]
            if parts:
                yield from flat(parts)
            else:
                yield entry

    return list(flat(yaml.safe_load(path.read_text()) or []))


def is_contact(task: dict[str, t.Any]) -> bool:
    """Whether the host of the play is asked."""
    names = [name.rpartition(".")[2] for name in task if "." in name]
    return any(name not in NO_CONTACT for name in names) and "delegate_to" not in task


def test_the_node_is_never_asked_right_after_a_host() -> None:
    """In each file that delegates to a node: what the play's host has answered before is cleared first."""
    seen = 0
    files = [*(ROOT / "playbooks").rglob("*.yml"), *(ROOT / "roles").rglob("*.yml")]
    for path in files:
        if "collections" in path.parts or "_node" not in (text := path.read_text()) or "delegate_to" not in text:
            continue
        dirtied = ""
        for task in tasks_of(path):
            if task.get("ansible.builtin.meta") == "clear_facts":
                dirtied = ""
            elif is_contact(task):
                dirtied = str(task.get("name"))
            elif "_node" in str(task.get("delegate_to", "")):
                seen += 1
                assert not dirtied, f"{path}: {task['name']}: after {dirtied}"
    assert seen >= 5
