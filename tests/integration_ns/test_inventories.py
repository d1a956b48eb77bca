# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inventories that come along have no mistakes, so that whoever copies one starts from a good one."""

from __future__ import annotations

import json
import os
import sys
import typing as t
from pathlib import Path

import jinja2
import pytest
import yaml

from ansible_collections.cleanslate.sglang.scripts.bootstrap import proxmox_collections
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT, run_command
from ansible_collections.cleanslate.sglang.tests.harness.playbook import run_playbook

PROXMOX = ROOT / "inventory/example-proxmox/pve1.proxmox.yml"

CHECK = """
- hosts: sglang
  gather_facts: false
  tasks:
    - name: Problems
      ansible.builtin.debug:
        msg: "{{ hostvars | cleanslate.sglang.inventory_problems(ansible_play_hosts_all) }}"
      run_once: true
    - name: Choice
      ansible.builtin.debug:
        msg: "{{ (hostvars | cleanslate.sglang.choose_servers(ansible_play_hosts_all, '', true)).chosen }}"
      run_once: true
"""


@pytest.mark.parametrize(
    ("name", "arguments", "chosen"),
    [
        ("local", [], {"localhost": ["demo"]}),
        (
            "example",
            ["-e", f"@{ROOT / 'inventory/example/group_vars/sglang/vault.yml.example'}"],
            {"gpu01": ["chat", "draft"], "gpu02": ["main"], "ct129": ["chat"]},
        ),
    ],
)
def test_an_inventory_that_comes_along(
    tmp_path: Path, name: str, arguments: list[str], chosen: dict[str, t.Any]
) -> None:
    playbook = tmp_path / "check.yml"
    playbook.write_text(CHECK)
    run = run_playbook(
        playbook, *arguments, scratch=tmp_path, deadline_s=60, inventory=ROOT / "inventory" / name
    ).check()
    assert run.named("Problems")[0].result["msg"] == []
    assert run.named("Choice")[0].result["msg"] == chosen


def test_the_proxmox_inventory_is_one_for_its_plugin(tmp_path: Path) -> None:
    """Its options are the plugin's, and its expressions are templates. (Nothing here answers as a cluster does.)"""
    settings = yaml.safe_load(PROXMOX.read_text())
    assert PROXMOX.name.endswith(".proxmox.yml")
    assert settings["compose"]["sglang_proxmox_host"] == "proxmox_node"
    assert settings["compose"]["sglang_vmid"] == "proxmox_vmid"
    for expression in {**settings["compose"], **settings["groups"]}.values():
        jinja2.Environment().compile_expression(expression)
    collections = proxmox_collections()
    if not (collections / "ansible_collections/community/proxmox").is_dir():
        pytest.skip("community.proxmox is not here (`make venv` makes it)")
    ansible_doc = str(Path(sys.executable).parent / "ansible-doc")
    environment = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(collections), "ANSIBLE_HOME": str(tmp_path)}
    done = run_command(
        [ansible_doc, "-t", "inventory", "--json", settings["plugin"]], 60, env=environment, cwd=tmp_path
    )
    assert done.rc == 0, done.stderr
    options = json.loads(done.stdout)[settings["plugin"]]["doc"]["options"]
    assert set(settings) <= set(options), set(settings) - set(options)
