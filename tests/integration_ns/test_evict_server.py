# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""gpu_evict takes one server off its GPUs: which signals, to whom, and nobody else."""

from __future__ import annotations

import pytest

from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import Host, bounded, plain_signals, rungs, sent

pytestmark = pytest.mark.ns


def test_a_serving_server_leaves_after_sigterm_to_its_leader(host: Host) -> None:
    server = host.server(gpus=(0, 1))
    pids = set(server.tree())
    result = host.evict(port=30000)
    assert not result.failed, result.json
    assert result.json["verdict"] == "evicted"
    assert sent(result) == {(server.leader.pid, "SIGTERM")}
    assert plain_signals(result) == []
    assert rungs(result) == ["term"]
    assert {row["pid"] for row in result.json["ended"]} == pids
    assert [row["used_mib"] for row in result.json["before"]] == [20_000, 20_000]
    assert [row["used_mib"] for row in result.json["after"]] == [0, 0]
    host.gone(pids)
    bounded(result)
