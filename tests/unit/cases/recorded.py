# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A recorded host for case tests: a proc tree of files, and NVML's answers through the C double and the real client.

A module runs in this process, which has the double loaded under the name that the client asks for: the client's calls
are made in a forked child of the module's. Where the library is another variant, or nvidia-smi is to be asked, the
module runs as a process of its own, since the loader reads LD_LIBRARY_PATH at its start.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import typing as t
from pathlib import Path
from unittest import mock

import pynvml
import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import LIBRARY, NvmlDouble, Variant
from ansible_collections.cleanslate.sglang.tests.harness.devices import make_node
from ansible_collections.cleanslate.sglang.tests.harness.modules import ModuleResult, parse_result, run_module
from ansible_collections.cleanslate.sglang.tests.harness.proctree import Mapping, Proc, write_proc
from ansible_collections.cleanslate.sglang.tests.unit.fake_host import V2_MOUNT

DEADLINE_S = 60
LEADER = ("/opt/venv/bin/python3", "-m", "sglang.launch_server", "--port", "30000")
SYSTEM = (
    Proc(1, "/sbin/init", ppid=0, exe="/usr/sbin/init", cgroup="0::/\n"),
    Proc(300, "/usr/sbin/sshd", exe="/usr/sbin/sshd"),
)


class Recorded:
    """Files below ``root``; ``nvml`` is the double, whose state the test writes."""

    def __init__(self, root: Path, variant: Variant = Variant.FULL, *, smi: bool = True) -> None:
        self.root = root
        self.proc = root / "proc"
        self.nvml = NvmlDouble(root, variant)
        self.smi = smi
        self.alone = variant is not Variant.FULL or not smi
        if not self.alone:
            ctypes.CDLL(str(self.nvml.library_dir / LIBRARY))
        (root / "sys" / "fs" / "cgroup").mkdir(parents=True)
        self.environment: dict[str, str] = {}
        (root / "shm").mkdir()
        (root / "dev").mkdir()

    def node(self, minor: int) -> Path:
        """/dev/nvidiaN with NVIDIA's own numbers."""
        path = self.root / "dev" / f"nvidia{minor}"
        return path if path.exists() else make_node(path, 195, minor)

    def holder(self, pid: int, title: str | t.Sequence[str], *minors: int, **options: t.Any) -> Proc:
        """A process with a context on these GPUs: a readable mapping, doorbells and an open descriptor."""
        nodes = [self.node(minor) for minor in minors]
        maps = [Mapping(node, "rw-s", 2048) for node in nodes] + [Mapping(node, "-w-s", 64) for node in nodes]
        return Proc(pid, title, maps=maps, fds=nodes, **options)

    def visitor(self, pid: int, title: str | t.Sequence[str], *minors: int, **options: t.Any) -> Proc:
        """A process that sees these GPUs: doorbells, mapped write-only, and an open descriptor."""
        nodes = [self.node(minor) for minor in minors]
        return Proc(pid, title, maps=[Mapping(node, "-w-s", 64) for node in nodes], fds=nodes, **options)

    def distrust_client(self) -> None:
        """Put a client library before the real one that others than root may write: nvidia-smi is then asked.

        The stand-in of nvidia-smi is a Python program itself and may use it.
        """
        fake = self.root / "python" / "pynvml.py"
        fake.parent.mkdir()
        fake.write_text(
            "import sys\n"
            "if not sys.argv[0].endswith('nvidia-smi'):\n"
            "    raise SystemExit('code of a stranger was run')\n"
            f"exec(compile(open({pynvml.__file__!r}).read(), 'pynvml.py', 'exec'))\n"
        )
        fake.chmod(0o666)
        self.environment["PYTHONPATH"] = str(fake.parent)

    def write(self, *processes: Proc, **options: t.Any) -> None:
        files = {"1/mountinfo": V2_MOUNT.decode(), **options.pop("files", {})}
        write_proc(self.proc, [*SYSTEM, *processes], files=files, **options)

    def module(self, module: str, /, *, check: bool = False, **arguments: t.Any) -> ModuleResult:
        if not self.proc.exists():
            self.write()
        arguments = {"proc_root": str(self.proc), **arguments}
        env = {**self.nvml.env(smi=self.smi), **self.environment}
        if not self.smi:
            env["PATH"] = os.defpath
        if self.alone or self.environment:
            return run_module(module, arguments, DEADLINE_S, env=env, check=check)
        with mock.patch.dict(os.environ, env):
            return _run_here(module, {**arguments, "_ansible_check_mode": check})

    def clean(self, **arguments: t.Any) -> ModuleResult:
        """clean_state with quick samples, on a host whose driver may be simulated."""
        values = {
            "allow_simulated": True,
            "interval_s": 0.01,
            "shm_dir": str(self.root / "shm"),
            "shm_required_mib": 1,
            "sys_root": str(self.root / "sys"),
        }
        return self.module("clean_state", **{**values, **arguments})


def _run_here(module: str, arguments: dict[str, t.Any]) -> ModuleResult:
    main = importlib.import_module(f"ansible_collections.cleanslate.sglang.plugins.modules.{module}").main
    output = io.StringIO()
    with patch_module_args(arguments), contextlib.redirect_stdout(output), pytest.raises(SystemExit) as ended:
        main()
    return ModuleResult(int(ended.value.code or 0), parse_result(output.getvalue(), ""), "")


def codes(result: ModuleResult) -> list[str]:
    return [row["code"] for row in result.json["reasons"]]


def warnings(result: ModuleResult) -> list[str]:
    return [row["code"] for row in result.json["warnings_found"] if row["severity"] == "warning"]
