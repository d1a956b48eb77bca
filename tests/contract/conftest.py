# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The contract runs against the double, or with CLEANSLATE_CONTRACT=real against the library of this machine's GPU.

    python -m pytest tests/contract
    CLEANSLATE_CONTRACT=real python -m pytest tests/contract      # needs torch, an idle GPU, nobody else on it
"""

from __future__ import annotations

import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.contract.subject import DoubleSubject, Holder, RealSubject, Subject

IDLE_MIB = 64


@pytest.fixture
def subject(tmp_path: Path) -> t.Iterator[Subject]:
    wanted = os.environ.get("CLEANSLATE_CONTRACT", "double")
    if wanted not in {"double", "real"}:
        raise pytest.UsageError(f"CLEANSLATE_CONTRACT={wanted} is neither double nor real")
    made: Subject = RealSubject() if wanted == "real" else DoubleSubject(tmp_path)
    idle = made.wait_for(lambda gpu: gpu["v2"]["used"] <= IDLE_MIB * 1024 * 1024)
    assert idle["v2"]["used"] <= IDLE_MIB * 1024 * 1024, "the contract needs an idle GPU 0"
    yield made
    made.close()


@pytest.fixture
def hold(subject: Subject) -> t.Iterator[t.Callable[[int], Holder]]:
    """Starts a process that holds so many MiB of GPU 0; ended with the test."""
    started: list[Holder] = []

    def start(mib: int) -> Holder:
        started.append(subject.hold(mib))
        return started[-1]

    yield start
    for holder in started:
        holder.close()
