# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fixtures of the lab: a fresh container for every test (it boots in two seconds), with two simulated GPUs.

Tests of a Proxmox node take ``node``, and ``pair`` or containers of their own choice by ``node.guest(...)``.
"""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.tests.lab.containers import Container, Lab, why_not
from ansible_collections.cleanslate.sglang.tests.lab.gpus import Gpus, simulated_gpus
from ansible_collections.cleanslate.sglang.tests.lab.node import Guest, Node


@pytest.fixture(scope="session")
def lab() -> t.Iterator[Lab]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Lab() as made:
        yield made


@pytest.fixture
def box(lab: Lab) -> t.Iterator[Container]:
    """A booted container."""
    with lab.container() as container:
        yield container


@pytest.fixture
def gpus(box: Container) -> t.Iterator[Gpus]:
    """The box's two GPUs."""
    with simulated_gpus(box) as made:
        yield made


@pytest.fixture
def node(lab: Lab) -> t.Iterator[Node]:
    """This machine as a Proxmox node with two GPUs."""
    with Node(lab) as made:
        yield made


@pytest.fixture
def pair(node: Node) -> t.Iterator[tuple[Guest, Guest]]:
    """Containers 129 and 130 of the node, both with all of its GPUs."""
    with node.guest(numbers=[129]) as first, node.guest(numbers=[130]) as second:
        yield first, second


def pytest_terminal_summary(terminalreporter: t.Any) -> None:
    """What each scenario took against the sum of its deadlines."""
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.getreports(kind)]
    lines = [text for one in reports if one.when == "call" for name, text in one.user_properties if name == "bounded"]
    if lines:
        terminalreporter.section("deadlines")
        for line in sorted(lines):
            terminalreporter.write_line(line)
