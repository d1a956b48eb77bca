# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Memory figures: what v1 and v2 mean, and that memory follows processes."""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.tests.contract.subject import MIB, Holder, Subject

pytestmark = pytest.mark.promise

# v2.used of an idle GPU; a process that only has a context shows a few MiB in v2 as well.
IDLE_MIB = 64
# What a CUDA context takes beside the allocation, at most.
CONTEXT_MIB = 2_000
SIZE_MIB = 10_000


def test_v1_counts_the_reserved_part_as_used(subject: Subject) -> None:
    gpu = subject.gpu()
    assert gpu["v2"]["reserved"] > 0
    assert abs(gpu["v1"]["used"] - gpu["v2"]["used"] - gpu["v2"]["reserved"]) <= 16 * MIB
    assert gpu["v1"]["total"] == gpu["v2"]["total"]
    assert abs(gpu["v1"]["free"] - gpu["v2"]["free"]) <= 16 * MIB


def test_an_idle_gpu_uses_nearly_nothing_by_v2(subject: Subject) -> None:
    gpu = subject.gpu()
    assert gpu["v2"]["used"] <= IDLE_MIB * MIB
    assert gpu["v1"]["used"] > gpu["v2"]["used"]


def test_memory_follows_a_process(subject: Subject, hold: t.Callable[[int], Holder]) -> None:
    holder = hold(SIZE_MIB)
    while_alive = subject.gpu()
    holder.kill()
    after = subject.wait_for(lambda gpu: gpu["v2"]["used"] <= IDLE_MIB * MIB)
    assert SIZE_MIB <= while_alive["v2"]["used"] // MIB <= SIZE_MIB + CONTEXT_MIB
    assert SIZE_MIB <= (while_alive["v1"]["used"] - while_alive["v2"]["reserved"]) // MIB <= SIZE_MIB + CONTEXT_MIB
    assert after["v2"]["used"] <= IDLE_MIB * MIB
    assert after["compute"] == []


def test_two_processes_add_up(subject: Subject, hold: t.Callable[[int], Holder]) -> None:
    first, second = hold(SIZE_MIB), hold(SIZE_MIB)
    both = subject.gpu()
    first.kill()
    one = subject.wait_for(lambda gpu: gpu["v2"]["used"] < (SIZE_MIB + CONTEXT_MIB) * MIB)
    assert 2 * SIZE_MIB <= both["v2"]["used"] // MIB <= 2 * (SIZE_MIB + CONTEXT_MIB)
    assert sorted(row["pid"] for row in both["compute"]) == sorted([first.pid, second.pid])
    assert SIZE_MIB <= one["v2"]["used"] // MIB <= SIZE_MIB + CONTEXT_MIB
    assert [row["pid"] for row in one["compute"]] == [second.pid]


def test_one_gpus_process_leaves_the_others_alone(subject: Subject, hold: t.Callable[[int], Holder]) -> None:
    before = subject.read()["gpus"][1:]
    hold(SIZE_MIB)
    after = subject.read()["gpus"][1:]
    assert [gpu["compute"] for gpu in after] == [[] for _unused in before]
    # A process that sees another GPU may take a few MiB there without being listed (measured: 3).
    assert all(gpu["v2"]["used"] <= IDLE_MIB * MIB for gpu in after)
