# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""gpu_evict: servers that do not go, holders that hide, and those who must be left alone."""

from __future__ import annotations

import os
import signal
import sys

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Hold
from ansible_collections.cleanslate.sglang.tests.faults.model import Row
from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch
from ansible_collections.cleanslate.sglang.tests.faults.site import Site
from ansible_collections.cleanslate.sglang.tests.harness.standin import environment
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import DEADLINES, RANK_MIB

CORE = "plugins/module_utils"
CLIMB = f"{CORE}/act/climb.py"
SIGNALS = f"{CORE}/act/signals.py"
TARGETS = f"{CORE}/decide/targets.py"
HOLDERS = f"{CORE}/decide/holders.py"
PROTECTED = f"{CORE}/decide/protected.py"
DEVICES = f"{CORE}/observe/devices.py"
LEADER = [sys.executable, "-m", "sglang.launch_server", "--model-path", "/models/tiny", "--port", "30000"]

# --- the server ---------------------------------------------------------------------------------------------------


def ignores_sigterm(site: Site) -> None:
    site.server(gpus=(0, 1), faults={"IGNORE_TERM": "1"})
    site.evict(port=30000, deadlines={**DEADLINES, "term": 1})


def stopped_scheduler(site: Site) -> None:
    server = site.server(gpus=(0, 1), faults={"IGNORE_TERM": "1"})
    site.host.kill(server.find("sglang::scheduler_TP1"), signal.SIGSTOP)
    site.evict(port=30000, deadlines={**DEADLINES, "term": 90, "term_hung": 1})


def comes_back(site: Site) -> None:
    """A supervisor that starts it again a second after its death."""
    supervisor = site.host.fixture("respawner.py", "--delay-s", "1", *LEADER, env=environment({"LOAD_S": "60"}))
    site.name("supervisor", supervisor.pid)

    def leader() -> list[int]:
        titles = site.ns.titles().items()
        return [pid for pid, title in titles if "-m sglang.launch_server" in title and pid != supervisor.pid]

    site.name("server", *wait_for("a leader", leader))
    site.brings_newcomers()
    site.evict(port=30000)


def another_server(site: Site) -> None:
    """One on another port and GPU, which sees and opens ours too."""
    site.server(gpus=(0,), see=(1,))
    site.server(gpus=(1,), see=(0,), port=30001, name="other server")
    site.evict(port=30000)


# --- holders ------------------------------------------------------------------------------------------------------


def only_visitors(site: Site) -> None:
    site.evict(scope="gpu", devices=["0"])


def gpu_service(site: Site) -> None:
    """Listed by the driver, alive, with the device open: a holder by all evidence."""
    pid = site.service("dcgm")
    site.host.memory_follows_mappings(Hold(0, mib=3, pid=pid))
    site.evict(scope="gpu", devices=["0"])


def zombie_leader(site: Site) -> None:
    """Its own maps and descriptors show nothing; those of its living thread do."""
    node = site.host.nodes[0]
    zombie = site.host.fixture("zombie_leader.py", str(node))
    wait_for("a zombie", lambda: " Z " in (site.ns.proc / str(zombie.pid) / "stat").read_text())
    site.host.nvml.write(*site.host.gpus(), Hold(0, mib=5000, pid=zombie.pid))
    site.evict(scope="gpu", devices=["0"])


def unkillable(site: Site) -> None:
    """SIGKILL is pending, and the process waits in a file system that never answers."""
    mountpoint = site.ns.directory / "fuse"
    log = site.ns.directory / "fuse.log"
    server = site.host.fixture("unkillable_fuse.py", str(mountpoint), output=log)
    wait_for("the mount", lambda: log.exists() and "mounted" in log.read_text())
    stuck = site.host.hold("--map", "--read", str(mountpoint / "x"), str(site.host.nodes[0]))
    site.later.callback(site.host.kill, server.pid, signal.SIGKILL)
    wait_for("the read", lambda: "wait_answer" in (site.ns.proc / str(stuck.pid) / "wchan").read_text())
    site.name("stuck", stuck.pid)
    site.evict(scope="gpu", devices=["0"], deadlines={**DEADLINES, "holders": 3})


def mapped_only(site: Site) -> None:
    """Nothing open any more, and the driver lists nobody: only the mapping is left."""
    site.holder("--close")
    held = [Hold(0, mib=RANK_MIB, device=str(site.host.nodes[0]), listed="no", id="gpu0")]
    site.host.nvml.write(*site.host.gpus(), *held)
    site.evict(scope="gpu", devices=["0"])


def other_name(site: Site) -> None:
    """The same device under another path, as a container's own node is."""
    node = site.ns.directory / "card"
    os.mknod(node, os.stat(site.host.nodes[0]).st_mode, os.stat(site.host.nodes[0]).st_rdev)
    held = site.host.hold("--map", str(node))
    wait_for("the mapping", lambda: str(node) in (site.ns.proc / str(held.pid) / "maps").read_text())
    site.name("holder", held.pid)
    hold = Hold(0, mib=RANK_MIB, device=str(site.host.nodes[0]), listed="no", id="gpu0")
    site.host.nvml.write(*site.host.gpus(), hold)
    site.evict(scope="gpu", devices=["0"])


NO_KILL_RUNG = Patch(CLIMB, '            "kill": self._kill,\n', "")
NO_SHORT_DEADLINE = Patch(
    CLIMB, "limit = self.deadlines.term_hung if hung else self.deadlines.term", "limit = self.deadlines.term"
)
NO_RETURN_WATCH = Patch(CLIMB, "RETURN_S = 2.0", "RETURN_S = 0.0")
ANY_PORT = Patch(
    TARGETS, "if port is not None and leader.port == port and leader.same_network:", "if port is not None:"
)
OPEN_IS_HOLDING = Patch(
    HOLDERS,
    'if use is not None and (use.readable_kib or listed):\n        return "holder"',
    'if use is not None:\n        evidence.append(READABLE_MAPPING)\n        return "holder"',
)
NO_SERVICES = Patch(PROTECTED, "if name in GPU_SERVICES:", "if name in ():")
NO_TASKS = (
    Patch(DEVICES, "[:1] if zombie else [base]", "[:0] if zombie else [base]"),
    Patch(DEVICES, "in _own_file_tables(process.pid, tids, scanner.proc):", "in ():"),
)
NO_DEADLINE = Patch(SIGNALS, "if left <= 0 and not ready:", "if left <= -3600 and not ready:")
NO_MAPS = Patch(DEVICES, "complete = _scan_maps(scanner, base, root, tallies) and complete\n", "pass\n")
BY_PATH = Patch(
    DEVICES,
    "        complete = complete and known\n        if minor is None:",
    '        complete = complete and known\n        if minor is None or "/dev/nvidia" not in line.path:',
)

ROWS = (
    Row(
        "evict-sigterm-ignored", "the leader ignores SIGTERM", "gpu_evict", ("evicted",), ignores_sigterm,
        (NO_KILL_RUNG,), may_die=("server",),
    ),
    Row(
        "evict-stopped-rank", "a rank is stopped (state T), so nobody answers", "gpu_evict", ("evicted",),
        stopped_scheduler, (NO_SHORT_DEADLINE,), may_die=("server",), bound_s=45,
    ),
    Row(
        "evict-supervisor", "a supervisor starts the server again", "gpu_evict", ("failed",), comes_back,
        (NO_RETURN_WATCH,), codes=("respawn",), may_die=("server",), bound_s=90,
    ),
    Row(
        "evict-other-server", "another server beside it sees the same GPUs", "gpu_evict", ("evicted",),
        another_server, (ANY_PORT,), may_die=("server",),
    ),
    Row(
        "evict-visitor", "everybody on the GPU only has it open", "gpu_evict", ("nothing_to_do",), only_visitors,
        (OPEN_IS_HOLDING,),
    ),
    Row(
        "evict-gpu-service", "a GPU service is a holder by all evidence", "gpu_evict", ("nothing_to_do",),
        gpu_service, (NO_SERVICES,),
    ),
    Row(
        "evict-zombie-with-thread", "a zombie leader whose thread lives and holds the GPU", "gpu_evict",
        ("evicted",), zombie_leader, NO_TASKS,
    ),
    Row(
        "evict-unkillable", "state D with SIGKILL pending (FUSE)", "gpu_evict", ("failed",), unkillable,
        (NO_DEADLINE,), codes=("unkillable",), may_die=("stuck",), bound_s=45,
    ),
    Row(
        "evict-mapping-only", "a holder that has only a mapping and is not listed", "gpu_evict", ("evicted",),
        mapped_only, (NO_MAPS,), may_die=("holder",),
    ),
    Row(
        "evict-other-node", "a holder through another node of the same device", "gpu_evict", ("evicted",),
        other_name, (BY_PATH,), may_die=("holder",),
    ),
)  # fmt: skip
