# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import NvmlDouble
from ansible_collections.cleanslate.sglang.tests.harness.devices import loop_nodes
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.trace import strace_missing
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import Host


@pytest.fixture
def host(ns: Namespace, tmp_path: Path) -> t.Iterator[Host]:
    """A namespace with two simulated GPUs whose memory belongs to whoever has them mapped readable."""
    reason = strace_missing()
    if reason:
        pytest.skip(reason)
    with loop_nodes(tmp_path / "dev", 2) as nodes, NvmlDouble(tmp_path) as nvml:
        host = Host(ns, nvml, nodes)
        host.memory_follows_mappings()
        yield host
