# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Our modules run as processes of their own, plainly and through the whole of Ansible."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.modules import run_module
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.playbook import run_task
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Proc, write_proc
from ansible_collections.cleanslate.sglang.tests.harness.standin import start_standin
from ansible_collections.cleanslate.sglang.tests.harness.trace import strace_missing

MODULE = "cleanslate.sglang.memory_info"


def test_module_reads_a_recorded_tree(tmp_path: Path) -> None:
    root = write_proc(tmp_path / "proc", [Proc(1, "/sbin/init")], meminfo_kib={"MemAvailable": 7 * 1024})
    result = run_module("memory_info", {"proc_root": str(root)}, 60)
    assert (result.rc, result.failed) == (0, False)
    assert result.json["meminfo"]["mem_available_mib"] == 7


def test_module_that_fails_gives_its_message(tmp_path: Path) -> None:
    result = run_module("memory_info", {"proc_root": str(tmp_path / "none")}, 60)
    assert result.failed and str(tmp_path / "none") in result.json["msg"]


@pytest.mark.ns
def test_both_ways_see_the_server_in_the_namespace(ns: Namespace, tmp_path: Path) -> None:
    server = start_standin(ns, faults={"PINNED_MIB": "16"})
    plain = run_module("memory_info", {}, 60, ns=ns)
    whole = run_task(MODULE, {}, scratch=tmp_path, deadline_s=90, ns=ns)
    assert whole.status == "ok", whole.result
    for result in (plain.json, whole.result):
        titles = {entry["pid"]: entry["title"] for entry in result["sglang"]}
        assert titles.get(server.find("sglang::scheduler")) == "sglang::scheduler"


@pytest.mark.ns
def test_a_module_that_only_looks_signals_nobody(ns: Namespace) -> None:
    reason = strace_missing()
    if reason:
        pytest.skip(reason)
    start_standin(ns)
    before = ns.living()
    result = run_module("memory_info", {}, 120, ns=ns, trace=True)
    assert not result.failed and result.signals == ()
    assert before <= ns.living()
