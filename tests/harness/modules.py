# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run one of our modules for real, as a process of its own, and read its result.

    result = run_module("gpu_evict", {"scope": "gpu"}, deadline_s=60, ns=ns)
    assert result.json["changed"]

``run_task`` does the same through ansible-playbook with a local connection, that is with AnsiballZ and all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.harness import tree
from ansible_collections.cleanslate.sglang.tests.harness.command import run_command
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.trace import Signal, run_traced

RUNNER = Path(__file__).parent / "run_module.py"


@dataclasses.dataclass(frozen=True)
class ModuleResult:
    """``json`` is what the module printed; ``signals`` is filled where the run was traced."""

    rc: int
    json: dict[str, t.Any]
    stderr: str
    signals: tuple[Signal, ...] = ()

    @property
    def failed(self) -> bool:
        return bool(self.json.get("failed"))


def module_argv(name: str, *, check: bool = False, diff: bool = False) -> list[str]:
    """The command line that runs a module; it reads its arguments as JSON on stdin."""
    return [sys.executable, str(RUNNER), name, *(["--check"] if check else []), *(["--diff"] if diff else [])]


def module_env(env: t.Mapping[str, str] | None = None) -> dict[str, str]:
    """What a module's process needs in addition to our environment."""
    paths = [str(tree.collections()), *filter(None, [(env or {}).get("PYTHONPATH")])]
    return {"PYTHONDONTWRITEBYTECODE": "1", **(env or {}), "PYTHONPATH": os.pathsep.join(paths)}


def run_module(
    name: str,
    arguments: t.Mapping[str, t.Any],
    deadline_s: float,
    *,
    ns: Namespace | None = None,
    env: t.Mapping[str, str] | None = None,
    check: bool = False,
    diff: bool = False,
    trace: bool = False,
) -> ModuleResult:
    """Run ``plugins/modules/NAME.py``, in a namespace if one is given; ``trace`` (only there) records its signals."""
    argv, stdin = module_argv(name, check=check, diff=diff), json.dumps(dict(arguments))
    signals: list[Signal] = []
    if ns is None:
        assert not trace, "a module is only traced inside a namespace"
        done = run_command(argv, deadline_s, env={**os.environ, **module_env(env)}, stdin=stdin)
    elif trace:
        done, signals = run_traced(ns, argv, deadline_s, module_env(env), stdin=stdin)
    else:
        done = ns.run(argv, deadline_s, module_env(env), stdin=stdin)
    return ModuleResult(done.rc, parse_result(done.stdout, done.stderr), done.stderr, tuple(signals))


def parse_result(stdout: str, stderr: str) -> dict[str, t.Any]:
    """The JSON object on the last line of a module's output; AssertionError with everything where there is none."""
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    assert lines, f"the module printed no result\nstdout: {stdout}\nstderr: {stderr}"
    value = json.loads(lines[-1])
    assert isinstance(value, dict), f"the module's result is no object: {value!r}"
    return value
