# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""clean_state on a living host: dirty as long as anything is left of a server, clean only when nothing is."""

from __future__ import annotations

import signal

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Hold
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import Host, codes

pytestmark = pytest.mark.ns


@pytest.mark.promise
def test_never_clean_a_dirty_host(host: Host) -> None:
    """A serving server, its orphans, memory without a holder: each is dirty by itself; nothing left is clean."""
    before = host.clean(ports=[30000])
    assert before.json["verdict"] == "clean", before.json["summary"]

    server = host.server(gpus=(0, 1), faults={"ORPHAN": "1"})
    serving = host.clean(ports=[30000])
    assert serving.json["verdict"] == "dirty"
    assert {"memory_in_use", "held", "port_busy", "server_running"} <= codes(serving)

    tree = server.tree()
    orphans = {pid for pid, title in tree.items() if title == "python3"}
    host.kill(server.leader.pid, signal.SIGKILL)
    host.gone(set(tree) - orphans)
    orphaned = host.clean(ports=[30000])
    assert orphaned.json["verdict"] == "dirty"
    assert {"memory_in_use", "held"} <= codes(orphaned)
    assert all(f"pid {pid} " in str(orphaned.json["reasons"]) for pid in orphans)

    for pid in orphans:
        host.kill(pid, signal.SIGKILL)
    host.gone(orphans)
    host.memory_follows_mappings(Hold(1, mib=602, always=True, listed="no"))
    stuck = host.clean(vantage="host")
    assert (stuck.json["verdict"], codes(stuck)) == ("dirty", {"holder_unknown"})

    host.memory_follows_mappings()
    after = host.clean(ports=[30000])
    assert after.json["verdict"] == "clean", after.json["summary"]


def test_memory_that_is_still_unpinning_is_waited_for_only_where_asked(host: Host) -> None:
    host.memory_follows_mappings(release_s=2)
    server = host.server(gpus=(0,))
    assert host.clean().json["verdict"] == "dirty"
    pids = set(server.tree())
    host.kill(server.leader.pid, signal.SIGKILL)
    host.gone(pids)
    assert host.clean(samples=1).json["verdict"] == "dirty"
    assert host.clean(settle_s=30).json["verdict"] == "clean"


def test_a_server_that_has_only_begun_to_start_is_seen(host: Host) -> None:
    server = host.server(gpus=(0,), faults={"SPAWN_S": "60"}, wait=False, env={"CUDA_VISIBLE_DEVICES": "0"})
    wait_for("its command line", lambda: "launch_server" in " ".join(host.ns.cmdline(server.leader.pid)))
    assert codes(host.clean(ports=[30000])) == {"server_running"}
    assert codes(host.clean(devices=["0"])) == {"server_starting"}
    assert host.clean(devices=["1"]).json["verdict"] == "clean"


def test_it_signals_nobody(host: Host) -> None:
    host.server(gpus=(0,))
    result = host.module("clean_state", allow_simulated=True, samples=1, trace=True)
    assert [one for one in result.signals if one.call == "pidfd_send_signal"] == []
    assert result.json["verdict"] == "dirty"
