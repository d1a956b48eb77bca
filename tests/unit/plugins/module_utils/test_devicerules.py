# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.devicerules import device_rule_problems

DEVICES = """Character devices:
  1 mem
195 nvidia-frontend
236 nvidia-caps
511 nvidia-uvm
508 aux

Block devices:
  7 loop
509 nvidia-uvm
"""
GPU = "lxc.cgroup2.devices.allow: c 195:* rwm"
UVM_NODE = "lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file"
GPU_NODE = "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file"
CAP_NODE = "/dev/nvidia-caps/nvidia-cap1"


def messages(allow: list[str], nodes: list[str] | None = None, devices: str | None = DEVICES) -> list[str]:
    found = device_rule_problems(devices, allow, nodes or [], "129")
    assert all((one.severity, one.subject) == ("warning", "container 129") for one in found)
    assert all(one.code in ("device_rule_stale", "device_rules_unknown") for one in found)
    return [one.message for one in found]


@pytest.mark.parametrize(
    ("allow", "nodes"),
    [
        ([GPU, "lxc.cgroup2.devices.allow: c 511:* rwm"], [GPU_NODE, UVM_NODE]),
        (["c 195:* rwm", "c 511:0 rw"], []),
        (["c *:* rwm"], [UVM_NODE]),
        (["a"], [UVM_NODE]),
        (["lxc.cgroup2.devices.allow = a"], [UVM_NODE]),
        ([GPU], ["dev0: /dev/nvidia0", "dev1: /dev/nvidia-uvm,gid=44,mode=0660"]),
        ([], [GPU_NODE, UVM_NODE]),  # no rules: nothing that could be stale
        (["c 10:200 rwm"], []),  # no GPU at all
        ([], []),
        ([GPU, "c 511:* rwm", "c 236:* rwm"], [CAP_NODE]),
        ([GPU, "c 511:* rwm"], ["/dev/nvidia-uvm 511:0", "/dev/nvidia0 195:0", "/dev/null 1:3"]),
    ],
)
def test_rules_that_fit(allow: list[str], nodes: list[str]) -> None:
    assert messages(allow, nodes) == []


def test_uvm_got_another_major_at_the_boot() -> None:
    (text,) = messages([GPU, "lxc.cgroup2.devices.allow: c 509:* rwm"], [UVM_NODE])
    assert "nvidia-uvm has major 511" in text
    assert "allow 509" in text
    assert "NVML works and CUDA fails" in text
    assert (
        "In /etc/pve/lxc/129.conf change the line 'lxc.cgroup2.devices.allow: c 509:* rwm' to "
        "'lxc.cgroup2.devices.allow: c 511:* rwm', and restart it" in text
    )


def test_the_old_major_belongs_to_somebody_else_now() -> None:
    (text,) = messages([GPU, "c 508:* rwm"])
    assert "508" in text and "c 511:* rwm" in text


def test_several_old_majors() -> None:
    (text,) = messages([GPU, "c 509:* rwm", "c 507:* rwm"])
    assert "allow 509, 507" in text
    assert "that was for nvidia-uvm to 'lxc.cgroup2.devices.allow: c 511:* rwm'" in text


@pytest.mark.parametrize("allow", [[GPU], [GPU, "c 10:200 rwm", "b 511:* rwm", "nonsense", ""]])
def test_no_rule_at_all(allow: list[str]) -> None:
    (text,) = messages(allow)
    assert "no rule of the container allows it" in text
    assert "add the line 'lxc.cgroup2.devices.allow: c 511:* rwm'" in text


def test_of_a_mere_path_only_an_old_rule_counts() -> None:
    assert messages([GPU], ["/dev/nvidia0", "/dev/nvidia-uvm"]) == []
    assert "no rule" in messages([GPU], [UVM_NODE])[0]
    assert "allow 509" in messages([GPU, "c 509:* rwm"], ["/dev/nvidia0", "/dev/nvidia-uvm"])[0]


def test_caps_count_where_the_container_has_them() -> None:
    assert messages([GPU, "c 511:* rwm", "c 235:* rwm"]) == []
    (text,) = messages([GPU, "c 511:* rwm", "c 235:* rwm"], [CAP_NODE])
    assert "nvidia-caps has major 236" in text and "allow 235" in text and "MIG" in text


def test_a_node_of_another_boot() -> None:
    texts = messages(["a"], ["/dev/nvidia-uvm 509:0", "/dev/nvidia-uvm-tools 511:1", "/dev/nvidia0 195:0"])
    assert len(texts) == 1
    assert "/dev/nvidia-uvm in the container has major 509, nvidia-uvm has 511" in texts[0]


def test_uvm_is_not_loaded() -> None:
    (text,) = messages([GPU, "c 511:* rwm"], devices="Character devices:\n195 nvidia\n\nBlock devices:\n")
    assert "nvidia-uvm is not loaded" in text


def test_no_driver_has_a_reason_of_its_own() -> None:
    assert messages([GPU], devices="Character devices:\n  1 mem\n") == []


@pytest.mark.parametrize("devices", [None, "", "garbage"])
def test_unreadable_devices_are_told(devices: str | None) -> None:
    (text,) = messages([GPU], devices=devices)
    assert "can't be read" in text
    assert messages([], devices=devices) == []


PIECES = st.lists(
    st.sampled_from(
        ["c ", "195", ":", "*", "a", " rwm", "dev0: ", "/dev/nvidia-uvm", "/dev/nvidia0", " 1:1", "lxc.", "é"]
    )
    | st.text(max_size=9),
    max_size=7,
).map("".join)


@given(
    st.none() | st.text() | PIECES.map(lambda text: "Character devices:\n195 nvidia\n" + text),
    st.lists(PIECES),
    st.lists(PIECES),
)
def test_no_text_raises(devices: str | None, allow: list[str], nodes: list[str]) -> None:
    messages(allow, nodes, devices)
