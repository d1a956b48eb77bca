# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start the programs in tests/fixtures inside a namespace and read what they print first."""

from __future__ import annotations

import itertools
import json
import sys
import typing as t

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace, NsProcess
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for

FIXTURES = ROOT / "tests" / "fixtures"
_numbers = itertools.count(1)


def start_program(
    ns: Namespace, name: str, *arguments: object, lines: int = 1, env: t.Mapping[str, str] | None = None
) -> tuple[NsProcess, list[str]]:
    """Start tests/fixtures/NAME.py, detached; returns it and the first ``lines`` lines of its output."""
    output = ns.directory / f"{name}.{next(_numbers)}.out"
    argv = [sys.executable, str(FIXTURES / f"{name}.py"), *map(str, arguments)]
    process = ns.popen(argv, {"PYTHONDONTWRITEBYTECODE": "1", **(env or {})}, detached=True, output=output)

    def enough() -> list[str]:
        found = output.read_text().splitlines(keepends=True)
        return found if len([line for line in found if line.endswith("\n")]) >= lines else []

    printed = wait_for(f"{lines} lines of {name}: {output}", enough, 60)
    return process, [line.rstrip("\n") for line in printed[:lines]]


def start_bystanders(ns: Namespace, *kinds: str, devices: t.Sequence[object] = ()) -> dict[str, int]:
    """Start bystanders (all kinds if none is named); returns kind -> pid inside."""
    directory = ns.directory / "bystanders"
    paths = ",".join(map(str, devices))
    _process, lines = start_program(ns, "bystanders", "--directory", directory, "--devices", paths, *kinds)
    return {str(kind): int(pid) for kind, pid in json.loads(lines[0]).items()}
