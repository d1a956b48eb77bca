# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inventories that come along have no mistakes, so that whoever copies one starts from a good one."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.playbook import run_playbook

CHECK = """
- hosts: all
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
