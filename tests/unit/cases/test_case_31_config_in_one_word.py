# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""`--config=f.yaml` is silently ignored by SGLang: refused where we write, told where somebody else wrote it."""

from __future__ import annotations

import json
import os
import typing as t
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.cleanslate.sglang.plugins.modules import server_info, server_launch

PID = 4711


def recorded_host(root: Path, words: list[str]) -> Path:
    """A proc tree with one leader, from raw bytes; its root directory holds the configuration file."""
    proc = root / "proc"
    folder = proc / str(PID)
    for name in ("fd", "map_files", "task", "ns", "root/etc/sglang"):
        (folder / name).mkdir(parents=True)
    argv = ["/opt/v/bin/python", "-m", "sglang.launch_server", *words]
    (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in argv))
    (folder / "environ").write_bytes(b"NCCL_DEBUG=INFO\0PATH=/usr/bin\0")
    fields = ["S", "1", str(PID), str(PID), "0", "-1", "4194304", *["0"] * 10, "1", "0", "5000", *["0"] * 30]
    (folder / "stat").write_text(f"{PID} (python) " + " ".join(fields) + "\n")
    (folder / "status").write_text("Name:\tpython\nUid:\t0\t0\t0\t0\nNSpid:\t4711\nSigPnd:\t0\nShdPnd:\t0\n")
    (folder / "cgroup").write_text("0::/system.slice/sglang.service\n")
    (folder / "maps").write_text("")
    (folder / "root/etc/sglang/f.yaml").write_text("port: 8000\ntp_size: 8\napi-key: sk-File-Secret\n")
    os.symlink("/", folder / "cwd")
    (proc / "uptime").write_text("1000.0 1.0\n")
    (proc / "net").mkdir()
    header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    for name in ("tcp", "tcp6"):
        (proc / "net" / name).write_text(header)
    return proc


def run(module: t.Any, arguments: dict[str, t.Any], capsys: pytest.CaptureFixture[str]) -> dict[str, t.Any]:
    with patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


def shown(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, t.Any]:
    proc = recorded_host(tmp_path, words)
    arguments = {"proc_root": str(proc), "state_dir": str(tmp_path / "state"), "expected_gpus": 0}
    result = run(server_info, arguments, capsys)
    assert [server["leader"]["pid"] for server in result["servers"]] == [PID]
    assert "sk-File-Secret" not in json.dumps(result)
    server = result["servers"][0]
    assert isinstance(server, dict)
    return server


@pytest.mark.parametrize("words", [["--config=/etc/sglang/f.yaml"], ["--conf", "/etc/sglang/f.yaml"]])
def test_a_running_leader_whose_file_is_ignored(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    server = shown(tmp_path, [*words, "--model-path", "/m"], capsys)
    assert server["flags"] == {"model-path": "/m"}
    assert server["port"] == 30000
    assert "ignores" in " ".join(server["flag_problems"])


def test_a_running_leader_whose_file_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = shown(tmp_path, ["--config", "/etc/sglang/f.yaml", "--model-path", "/m"], capsys)
    assert server["flags"] == {"port": 8000, "tp-size": 8, "api-key": "********", "model-path": "/m"}
    assert (server["port"], server["flag_problems"]) == (8000, [])


@pytest.mark.parametrize("name", ["config", "--config", "--Config"])
def test_a_launch_refuses_it(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {
        "name": "main",
        "python": "/opt/v/bin/python",
        "user": "root",
        "launcher": "detached",
        "state_dir": str(tmp_path / "state"),
        "flags": {"model_path": "m", name: "f.yaml"},
    }
    result = run(server_launch, arguments, capsys)
    assert result["failed"] is True
    assert "'config' is not taken" in result["msg"]
    assert not (tmp_path / "state").exists()
