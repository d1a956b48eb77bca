# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import dataclasses
import shutil
import subprocess
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.unit import (
    UnitPlan,
    check_unit_name,
    command_line,
    environment_text,
    unit_text,
)

PLAN = UnitPlan(
    server="main",
    argv=["/opt/v/bin/python3", "-m", "sglang.launch_server", "--config", "/s/config.yaml"],
    user="sglang",
    group="sglang",
    environment_file="/s/env",
)

TEXT = """\
# Written by cleanslate.sglang.server_launch at each launch; changes belong into unit_overrides.

[Unit]
Description=SGLang server main
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
User=sglang
Group=sglang
WorkingDirectory=/
EnvironmentFile=/s/env
RuntimeDirectory=sglang-main
RuntimeDirectoryMode=0700
Environment=TMPDIR=%t/sglang-main
ExecStart=/opt/v/bin/python3 -m sglang.launch_server --config /s/config.yaml
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec=60
Restart=no
LimitMEMLOCK=infinity
LimitNOFILE=1048576
UMask=0027
StandardInput=null
StandardOutput=journal
StandardError=journal
"""


def test_the_unit() -> None:
    assert unit_text(PLAN) == TEXT


def test_a_restart_comes_with_a_start_limit_and_a_check_before() -> None:
    plan = dataclasses.replace(
        PLAN, restart="on-failure", exec_start_pre=[["/check", "a b"]], wanted_by="multi-user.target"
    )
    text = unit_text(plan)
    for line in (
        "Restart=on-failure",
        "RestartSec=15",
        "StartLimitIntervalSec=1800",
        "StartLimitBurst=3",
        'ExecStartPre=+/check "a b"',
        "WantedBy=multi-user.target",
    ):
        assert f"\n{line}\n" in text
    assert text.index("StartLimitBurst") < text.index("[Service]")


def test_overrides_are_merged() -> None:
    overrides = {
        "Service": {"Nice": 5, "KillMode": "control-group", "PrivateTmp": True, "DeviceAllow": ["a rw", "b r"]}
    }
    text = unit_text(dataclasses.replace(PLAN, overrides={**overrides, "Install": {"Also": "x.service"}}))
    for line in (
        "Nice=5",
        "KillMode=control-group",
        "PrivateTmp=yes",
        "DeviceAllow=a rw",
        "DeviceAllow=b r",
        "Also=x.service",
    ):
        assert f"\n{line}\n" in text
    assert "KillMode=mixed" not in text


@pytest.mark.parametrize(
    "changes",
    [
        {"overrides": {"Service": {"Nice": "5\nUser=root"}}},
        {"overrides": {"Service": {"Nice": "5\\"}}},
        {"overrides": {"Service": {"User": "root"}}},
        {"overrides": {"Service": {"ExecStart": "/bin/sh"}}},
        {"overrides": {"Service\n[X]": {"Nice": 1}}},
        {"overrides": {"Service": {"A=b\nC": 1}}},
        {"overrides": {"Service": {"Nice": None}}},
        {"overrides": {"Service": "Nice=1"}},
        {"user": "a\nb"},
        {"argv": ["/x", "a\nb"]},
        {"log": "/l\nX=1"},
        {"working_directory": "/a\r"},
    ],
)
def test_nothing_breaks_out_of_its_line(changes: dict[str, t.Any]) -> None:
    with pytest.raises(CleanSlateError):
        unit_text(dataclasses.replace(PLAN, **changes))


def test_words_of_a_command() -> None:
    assert (
        command_line(["/a b/x", "100%", "$HOME", 'q"\\', "", "plain"])
        == '"/a b/x" "100%%" "$$HOME" "q\\"\\\\" "" plain'
    )


def test_the_environment_file() -> None:
    assert environment_text({"B": 'a "b" \\ $c `d`', "A": "1"}) == 'A="1"\nB="a \\"b\\" \\\\ \\$c \\`d\\`"\n'
    for bad in ({"A": "1\n2"}, {"A B": "1"}, {"": "1"}, {"A": "\0"}):
        with pytest.raises(CleanSlateError):
            environment_text(bad)


@pytest.mark.parametrize(
    "name", ["x", "../x.service", "a b.service", ".service\n", "x.timer", "/x.service", "-Hx.service"]
)
def test_names_that_are_no_unit(name: str) -> None:
    with pytest.raises(CleanSlateError, match="no name of a service"):
        check_unit_name(name)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "sglang-main.service"
    plan = dataclasses.replace(
        PLAN, user="root", group="root", argv=["/bin/true", "100%", "$HOME"], restart="on-failure"
    )
    path.write_text(unit_text(plan))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
