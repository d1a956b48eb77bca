# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Process lists: who is in them, in which shape, and who is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.tests.contract.subject import MIB, Holder, Subject, maps_readable

pytestmark = pytest.mark.promise

SIZE_MIB = 4_000
CONTEXT_MIB = 2_000
IDLE_MIB = 64
SUCCESS, INSUFFICIENT_SIZE = 0, 7
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="looks at mappings of processes, which only root may")


def why_no_namespace() -> t.Optional[str]:
    """Why a PID namespace can't be made here, or None."""
    if shutil.which("unshare") is None:
        return "no unshare program (util-linux)"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=30, check=False)
    return f"no PID namespace can be made here: {tried.stderr.strip()}" if tried.returncode else None


def test_a_holder_is_listed_with_its_memory(subject: Subject, hold: t.Callable[[int], Holder]) -> None:
    holder = hold(SIZE_MIB)
    gpu = subject.gpu()
    assert [row["pid"] for row in gpu["compute"]] == [holder.pid]
    assert SIZE_MIB <= gpu["compute"][0]["used"] // MIB <= SIZE_MIB + CONTEXT_MIB
    assert gpu["graphics"] == []
    assert gpu["mps"] == []


def test_the_versions_of_the_list_agree(subject: Subject, hold: t.Callable[[int], Holder]) -> None:
    hold(SIZE_MIB)
    gpu = subject.gpu()
    assert len(gpu["compute"]) == 1
    assert gpu["compute_v2"] == gpu["compute"]
    assert gpu["compute_v1"] == gpu["compute"]


def test_the_first_of_two_calls_asks_for_room(subject: Subject, hold: t.Callable[[int], Holder]) -> None:
    idle = subject.gpu()
    hold(SIZE_MIB)
    busy = subject.gpu()
    assert idle["first_call"] == {"code": SUCCESS, "count": 0}
    assert busy["first_call"]["code"] == INSUFFICIENT_SIZE
    assert busy["first_call"]["count"] >= 1


@needs_root
def test_a_holder_has_a_readable_mapping_of_the_device(subject: Subject, hold: t.Callable[[int], Holder]) -> None:
    holder = hold(SIZE_MIB)
    child = holder.fork()
    device = subject.device_number()
    assert maps_readable(holder.pid, device)
    assert maps_readable(child, device)
    assert not maps_readable(os.getpid(), device)


@needs_root
def test_a_client_of_nvml_alone_holds_nothing(subject: Subject) -> None:
    script = (
        "import pynvml, sys; pynvml.nvmlInit(); pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=subject.env(), text=True
    ) as visitor:
        assert visitor.stdout is not None
        assert visitor.stdout.readline() == "up\n"
        gpu = subject.gpu()
        mapped = maps_readable(visitor.pid, subject.device_number())
        visitor.kill()
    assert gpu["compute"] == []
    assert gpu["v2"]["used"] <= IDLE_MIB * MIB
    assert not mapped


def test_a_fork_keeps_the_memory_of_its_dead_parent(subject: Subject, hold: t.Callable[[int], Holder]) -> None:
    holder = hold(SIZE_MIB)
    child = holder.fork()
    with_both = subject.gpu()
    holder.kill()
    orphaned = subject.gpu()
    holder.kill_children()
    after = subject.wait_for(lambda gpu: gpu["v2"]["used"] <= IDLE_MIB * MIB)
    assert [row["pid"] for row in with_both["compute"]] == [holder.pid]
    assert child != holder.pid
    assert orphaned["v2"]["used"] >= SIZE_MIB * MIB
    assert [row["pid"] for row in orphaned["compute"]] == [holder.pid]
    assert after["v2"]["used"] <= IDLE_MIB * MIB
    assert after["compute"] == []


def test_another_pid_namespace_sees_the_memory_and_nobody(subject: Subject, hold: t.Callable[[int], Holder]) -> None:
    reason = why_no_namespace()
    if reason is not None:
        pytest.skip(reason)
    hold(SIZE_MIB)
    inside = subject.gpu(*UNSHARE)
    outside = subject.gpu()
    assert inside["v2"]["used"] == outside["v2"]["used"] >= SIZE_MIB * MIB
    assert inside["compute"] == []
    assert len(outside["compute"]) == 1


def test_another_pid_namespace_with_its_own_proc(subject: Subject, hold: t.Callable[[int], Holder]) -> None:
    reason = why_no_namespace()
    if reason is not None:
        pytest.skip(reason)
    hold(SIZE_MIB)
    inside = subject.gpu(*UNSHARE, "--mount-proc")
    assert inside["v2"]["used"] >= SIZE_MIB * MIB
    assert inside["compute"] == []
