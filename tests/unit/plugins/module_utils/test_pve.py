# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What Proxmox VE says of a container: current settings only, HA, and a configuration file system that hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.pve import read_guest, read_status
from ansible_collections.cleanslate.sglang.plugins.module_utils.proxmox import (
    parse_config,
    parse_resources,
    parse_status,
)

SHORT_S = 0.5
CONFIG = """\
#lock: this is a note of the operator
arch: amd64
dev0: /dev/nvidia0,gid=44,mode=0666
dev1: mode=0666,path=/dev/nvidiactl
dev2: /dev/dri/renderD128
hostname: gpu129
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind,optional,create=file
lxc.mount.entry = /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file
lxc.mount.entry: /srv srv none bind 0 0
mp0: /srv/models,mp=/models
unprivileged: 1

[pve:pending]
hostname: other

[before-upgrade]
lock: snapshot
hostname: older
dev3: /dev/nvidia7
unprivileged: 0
"""
RESOURCES = """\
ct: 129
\tgroup gpus
\tstate started

vm: 130
\tstate stopped

ct: 131
\tmax_restart 2
# ct: 132
ct: 133
\tstate ignored
"""


@pytest.fixture
def pve_dir(tmp_path: Path) -> Path:
    (tmp_path / "lxc").mkdir()
    (tmp_path / "lxc" / "129.conf").write_text(CONFIG)
    return tmp_path


def add_resources(pve_dir: Path, text: str = RESOURCES) -> Path:
    (pve_dir / "ha").mkdir()
    path = pve_dir / "ha" / "resources.cfg"
    path.write_text(text)
    return path


# --- the configuration ---


def test_a_configuration(pve_dir: Path) -> None:
    found = read_guest("129", str(pve_dir))
    assert (found.vmid, found.exists, found.lock, found.hostname, found.unprivileged) == (
        "129",
        True,
        None,
        "gpu129",
        True,
    )
    assert found.device_nodes == ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia1", "/dev/nvidia-uvm")
    assert found.device_rules == ("c 195:* rwm",)
    assert (found.ha_managed, found.ha_state, found.problems) == (False, None, ())


def test_a_lock_counts_only_in_the_current_part(pve_dir: Path) -> None:
    (pve_dir / "lxc" / "129.conf").write_text("lock: backup\n" + CONFIG)
    assert read_guest("129", str(pve_dir)).lock == "backup"


def test_privileged_is_the_default_and_nonsense_is_unknown() -> None:
    assert parse_config("hostname: a").unprivileged is False
    assert parse_config("unprivileged: 0").unprivileged is False
    assert parse_config("unprivileged: perhaps").unprivileged is None


def test_a_container_that_is_not_here(pve_dir: Path) -> None:
    found = read_guest("777", str(pve_dir))
    assert (found.exists, found.lock, found.unprivileged, found.ha_managed) == (False, None, None, False)


@pytest.mark.parametrize("vmid", ["", "129x", "../129", "-1", "0129"])
def test_what_is_no_number_is_not_looked_for(pve_dir: Path, vmid: str) -> None:
    found = read_guest(vmid, str(pve_dir))
    assert (found.exists, found.ha_managed) == (None, None)
    assert found.problems


# --- high availability ---


@pytest.mark.parametrize(
    ("vmid", "managed", "state"),
    [
        ("129", True, "started"),
        ("130", False, None),  # a virtual machine's number
        ("131", True, "started"),  # no state line
        ("132", False, None),  # a comment
        ("133", False, "ignored"),
    ],
)
def test_ha(pve_dir: Path, vmid: str, managed: bool, state: str | None) -> None:
    add_resources(pve_dir)
    found = read_guest(vmid, str(pve_dir))
    assert (found.ha_managed, found.ha_state) == (managed, state)


def test_ha_that_cannot_be_read_is_unknown(pve_dir: Path) -> None:
    path = add_resources(pve_dir)
    path.unlink()
    path.mkdir()
    found = read_guest("129", str(pve_dir))
    assert (found.exists, found.ha_managed) == (True, None)
    assert [one.message for one in found.problems] == ["Is a directory"]


# --- a file system that does not answer ---


@pytest.mark.parametrize("hanging", ["lxc/129.conf", "ha/resources.cfg"])
def test_a_file_that_hangs_costs_its_deadline_and_is_unknown(pve_dir: Path, hanging: str) -> None:
    add_resources(pve_dir)
    (pve_dir / hanging).unlink()
    os.mkfifo(pve_dir / hanging)  # whoever opens it waits for a writer
    started = time.monotonic()
    found = read_guest("129", str(pve_dir), SHORT_S)
    assert time.monotonic() - started < 10
    assert found.ha_managed is None
    assert found.exists is (None if hanging.startswith("lxc") else True)
    assert [one.call for one in found.problems] == [str(pve_dir / hanging)]
    assert "pve-cluster" in found.problems[0].message


def test_an_empty_directory_is_no_configuration_file_system(tmp_path: Path) -> None:
    found = read_guest("129", str(tmp_path))
    assert (found.exists, found.ha_managed) == (None, None)
    assert "does pve-cluster run" in found.problems[0].message


def test_a_file_beyond_the_limit_is_unknown(pve_dir: Path) -> None:
    (pve_dir / "lxc" / "129.conf").write_text(CONFIG + "#" * (1 << 20))
    assert read_guest("129", str(pve_dir)).exists is None


# --- pct status ---


def scripted(tmp_path: Path, script: str) -> str:
    path = tmp_path / "pct"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "state", "words"),
    [
        ('echo "status: running"', "running", "status: running"),
        ('echo "status: stopped"', "stopped", "status: stopped"),
        ('echo "status: mounted"', "unknown", "status: mounted"),
        ('echo "status: running"; echo broken >&2; exit 2', "unknown", "status: running broken"),
    ],
)
def test_status(tmp_path: Path, script: str, state: str, words: str) -> None:
    found = read_status("129", pct=scripted(tmp_path, f'[ "$1 $2" = "status 129" ] || exit 9\n{script}'))
    assert (found.state, found.words, found.timed_out) == (state, words, False)


def test_a_status_that_hangs(tmp_path: Path) -> None:
    found = read_status("129", SHORT_S, scripted(tmp_path, "exec sleep 600"))
    assert (found.state, found.timed_out, found.stuck_pid) == ("unknown", True, None)


def test_no_pct_here(tmp_path: Path) -> None:
    found = read_status("129", pct=str(tmp_path / "pct"))
    assert (found.state, found.timed_out) == ("unknown", False)
    assert "No such file" in found.words


# --- any text ---


@given(st.text() | st.text("[]:=ctlxc.dev09 \t\n\r#/nvidia,path"))
def test_parsers_never_raise(text: str) -> None:
    config = parse_config(text)
    assert config.unprivileged in (None, True, False)
    assert all(path.startswith("/dev/nvidia") for path in config.device_nodes)
    assert isinstance(config.device_rules, tuple)
    assert all(":" in name for name in parse_resources(text))
    assert parse_status(text) in ("running", "stopped", "unknown")
    assert parse_config(f"[s]\n{text}").settings == {}
