# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 19: Xid 119 every 45 s for one bus id: that GPU is unhealthy, the others are unaffected. From raw kmsg bytes."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.xids import judge_xids
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.kernel_log import read_kernel_log
from ansible_collections.cleanslate.sglang.tests.unit.builders import gpu

NOW_S = 4000.0
EVERY_S = 45
BUS_IDS = ("00000000:41:00.0", "00000000:61:00.0", "00000000:81:00.0", "00000000:C1:00.0")


def recorded() -> bytes:
    """A boot, an old fault of another GPU, then a GSP that does not answer any more, up to 12 s ago."""
    lines = [
        b"6,0,0,-;Linux version 6.14.11-4-pve (build@proxmox) #1 SMP PREEMPT_DYNAMIC",
        b"6,2211,8123456,-;nvidia 0000:61:00.0: enabling device (0140 -> 0142)",
        b" SUBSYSTEM=pci",
        b" DEVICE=+pci:0000:61:00.0",
        b"3,4000,900000000,-;NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the "
        b"bus.",
    ]
    for number in range(20):
        at_us = int((NOW_S - 12 - (19 - number) * EVERY_S) * 1e6)
        if number == 0:
            lines.append(b"3,4998,%d,-;NVRM: GPU at PCI:0000:61:00: GPU-2c5b0f0e-77a2-4a0c-9d57-0f4c7f5f2b11" % at_us)
        lines.append(
            b"3,%d,%d,-,caller=T1234;NVRM: Xid (PCI:0000:61:00): 119, pid=1234, name=python3, Timeout after 45s of "
            b"waiting for RPC response from GPU1 GSP! Expected function 76 (GSP_RM_CONTROL) (0x20800a4c 0x4)."
            % (5000 + number, at_us)
        )
        lines.append(b"4,%d,%d,-;NVRM: GPU1 GSP RPC buffer contains function 76" % (6000 + number, at_us))
    return b"\n".join(lines) + b"\n"


def test_one_gpu_is_dirty_and_the_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(recorded())
    log = read_kernel_log(str(path))
    gpus = [gpu(index, bus_id=bus_id) for index, bus_id in enumerate(BUS_IDS)]
    (reason,) = judge_xids(gpus, log, NOW_S, 600, "host")
    assert (reason.code, reason.subject, reason.severity, reason.means) == (
        "xid_reset", "GPU 1 (00000000:61:00.0)", "required", "dirty",
    )  # fmt: skip
    assert "Xid 119 14 times in the last 600 s, the last one 12 s ago" in reason.message
    assert "pid=1234, name=python3, Timeout after 45s" in reason.message
    assert "gpu_reset" in reason.message
    # The other servers' GPUs are not held back by it.
    others = [one for one in gpus if one.index != 1]
    assert [(one.code, one.severity) for one in judge_xids(others, log, NOW_S, 600, "host")] == [
        ("xid_elsewhere", "advisory")
    ]
