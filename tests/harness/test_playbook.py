# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Playbooks and modules run as processes, and their results are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.modules import parse_result
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.playbook import run_playbook, run_task

PLAY = """
- hosts: localhost
  connection: local
  gather_facts: false
  vars: {ansible_python_interpreter: "{{ ansible_playbook_python }}"}
  tasks:
    - name: Say it
      ansible.builtin.debug: {msg: "{{ word }}"}
    - name: Not now
      ansible.builtin.debug: {msg: never}
      when: false
    - name: Fail
      ansible.builtin.fail: {msg: broken}
"""


def test_results_of_a_playbook(tmp_path: Path) -> None:
    playbook = tmp_path / "play.yml"
    playbook.write_text(PLAY)
    run = run_playbook(playbook, scratch=tmp_path, deadline_s=60, inventory="localhost,", extra_vars={"word": "hello"})
    assert run.rc == 2, run.stderr
    assert [(task.task, task.status) for task in run.tasks] == [
        ("Say it", "ok"),
        ("Not now", "skipped"),
        ("Fail", "failed"),
    ]
    assert run.named("Say")[0].result["msg"] == "hello"
    assert run.of_action("fail")[0].result["msg"] == "broken"


@pytest.mark.ns
def test_task_inside_a_namespace(ns: Namespace, tmp_path: Path) -> None:
    result = run_task(
        "ansible.builtin.command", {"argv": ["readlink", "/proc/self/ns/pid"]}, scratch=tmp_path, deadline_s=60, ns=ns
    )
    assert result.status == "ok", result.result
    assert result.result["stdout"] == ns._pid_namespace


def test_result_is_the_last_json_line() -> None:
    assert parse_result('warning\n{"a": 1}\n', "") == {"a": 1}
    with pytest.raises(AssertionError, match="Traceback"):
        parse_result("", "Traceback")
