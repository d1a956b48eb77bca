# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.protected import (
    ACCESS,
    GPU_SERVICES,
    program_name,
    protected_why,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.tests.unit.builders import process


def why(one: Process, protect: t.Sequence[str] = (), **units: str) -> str | None:
    return protected_why(one, {500}, protect, {int(pid[1:]): unit for pid, unit in units.items()})


def test_ourselves_pid_1_and_the_kernel() -> None:
    assert why(process(1)) == "pid 1"
    assert why(process(500)) == "this run itself"
    assert why(process(2, kernel_thread=True)) == "kernel thread"
    assert why(process(3)) is None


@pytest.mark.parametrize("name", GPU_SERVICES + ACCESS)
def test_services_by_their_file(name: str) -> None:
    assert why(process(7, exe=f"/usr/bin/{name}")) is not None
    assert why(process(7, exe=f"/usr/bin/{name} (deleted)")) is not None
    # Where the file can't be read the name that the kernel keeps decides; it is cut at 15 characters.
    assert why(process(7, exe=None, comm=name[:15])) is not None


def test_a_name_that_anybody_can_give_himself_protects_nobody() -> None:
    impostor = process(7, ("nvidia-persistenced",), comm="nvidia-persiste", exe="/tmp/miner")
    assert why(impostor) is None


@pytest.mark.parametrize("word", ["7", "python3.11", "python3", "experiment.service", "worker"])
def test_the_operators_words(word: str) -> None:
    one = process(7, ("/opt/venv/bin/python3", "x.py"), comm="worker")
    assert why(one, [word], p7="experiment.service") == f"protected by the operator ({word})"


@pytest.mark.parametrize("word", ["8", "77", "python", "experiment", "", "ython3"])
def test_words_that_mean_somebody_else(word: str) -> None:
    assert why(process(7, ("/opt/venv/bin/python3", "x.py")), [word], p7="experiment.service") is None


def test_program_name() -> None:
    assert program_name(process(7, exe="/usr/bin/vim (deleted)")) == "vim"
    assert program_name(process(7, exe=None, comm="anything")) == "anything"


def test_a_process_without_a_command_line_is_judged_by_its_program() -> None:
    nameless = process(30, (), exe="/usr/bin/x")
    assert protected_why(nameless, (), ("y",), {}) is None
    assert protected_why(nameless, (), ("x",), {}) is not None
