# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The project's gates and tests as data: which commands, with which venv, under which deadline."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.cleanslate.sglang.scripts.bootstrap import cache_dir
from ansible_collections.cleanslate.sglang.tests.lab.containers import why_not
from ansible_collections.cleanslate.sglang.tests.tools.runner import Step

ROOT = Path(__file__).resolve().parent.parent.parent
TOOLS = ROOT / "tests" / "tools"
IN_COLLECTIONS = "ansible_collections/cleanslate/sglang"
CORES = ("2.19", "2.21")
# Directories below tests/ that are no process suites.
OTHER_TESTS = ("unit", "tools", "output", "sanity")


@dataclass(frozen=True)
class Venv:
    """One Ansible venv of ``make venv``; ``skip`` says why it can't be used."""

    core: str
    path: Path

    @property
    def skip(self) -> str | None:
        if (self.path / ".complete").is_file():
            return None
        return f"no venv with ansible-core {self.core} (it needs a Python that `make venv` did not find)"

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": os.pathsep.join([str(self.path / "bin"), os.environ.get("PATH", os.defpath)]),
            "VIRTUAL_ENV": str(self.path),
            "NO_COLOR": "1",
            "ANSIBLE_NOCOLOR": "1",
        }

    def command(self, *argv: str) -> tuple[str, ...]:
        return (str(self.path / "bin" / argv[0]), *argv[1:])


def venvs() -> list[Venv]:
    return [Venv(core, cache_dir() / f"venv-{core}") for core in CORES]


def newest() -> Venv:
    """The venv of the newest core that is there; the oldest core's where none is."""
    return next((venv for venv in reversed(venvs()) if venv.skip is None), venvs()[0])


def gates() -> list[Step]:
    """Everything that reads the tree without running the product."""
    venv = newest()

    def step(
        name: str, argv: tuple[str, ...], deadline_s: float = 180, cwd: Path = ROOT, env: dict[str, str] | None = None
    ) -> Step:
        return Step(name, argv, deadline_s, skip=venv.skip, cwd=cwd, env={**venv.env, **(env or {})})

    mypy_cache = str(cache_dir() / "mypy")
    typed = [f"{IN_COLLECTIONS}/{part}" for part in ("plugins", "scripts", "tests") if (ROOT / part).is_dir()]
    collections = {"ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")}
    return [
        *(
            Step(
                f"sanity-{each.core}",
                (sys.executable, str(TOOLS / "ansible_test.py"), each.core, "sanity", "--local", "--color", "no"),
                600,
                skip=each.skip,
                cwd=ROOT,
            )
            for each in venvs()
        ),
        step("ruff", venv.command("ruff", "check", "--no-cache", ".")),
        step(
            "mypy",
            venv.command("mypy", "--config-file", "../pyproject.toml", "--cache-dir", mypy_cache, *typed),
            cwd=ROOT / ".collections",
        ),
        step("house-rules", (sys.executable, str(TOOLS / "house_rules.py"))),
        step(
            "ansible-lint",
            venv.command("ansible-lint", "--offline", "--nocolor", "--profile", "production"),
            env=collections,
        ),
        step(
            "docs",
            venv.command(
                "antsibull-docs", "lint-collection-docs", "--plugin-docs", "--validate-collection-refs", "all", "."
            ),
            env=collections,
        ),
        step("changelog", venv.command("antsibull-changelog", "lint")),
        step("build-install", (sys.executable, str(TOOLS / "build_install.py"))),
        step("execution-environment", venv.command("python", str(TOOLS / "execution_environment.py"), "check"), 300),
    ]


def pytest_step(name: str, venv: Venv, deadline_s: float, *arguments: str) -> Step:
    return Step(
        name,
        venv.command("pytest", "-q", "--color=no", *arguments),
        deadline_s,
        alone=True,
        skip=venv.skip,
        cwd=ROOT,
        env=venv.env,
    )


def unit() -> list[Step]:
    """The unit and case tests on each supported ansible-core."""
    return [pytest_step(f"unit-{venv.core}", venv, 600, "-n", "2", "tests/unit") for venv in venvs()]


def process_suites() -> list[str]:
    """Directories with tests that start real processes; they signal, so each brings its own PID namespace or container.
    """
    found = [each for each in sorted((ROOT / "tests").iterdir()) if each.is_dir() and each.name not in OTHER_TESTS]
    return [f"tests/{each.name}" for each in found if any(each.rglob("test_*.py"))]


def lab() -> list[Step]:
    """The lab alone: containers, and this machine as their Proxmox node; it says why where it can't be."""
    venv = newest()
    step = pytest_step("lab", venv, 2400, "--durations=15", "-rs", "tests/lab")
    return [dataclasses.replace(step, skip=venv.skip or why_not())]


def promises() -> list[Step]:
    """One scenario of each promise, with real processes."""
    suites = process_suites()
    if not suites:
        return [Step("promises", (), 0, skip="no process suites in this checkout")]
    return [pytest_step("promises", newest(), 900, "-m", "promise", "--durations=10", *suites)]


def full(part: int, parts: int) -> list[Step]:
    """One shard of everything: the first also runs the gates and the unit tests, the last the promises on the oldest
    core.
    """
    steps: list[Step] = []
    if part == 1:
        steps += [*gates(), *unit()]
    suites = process_suites()
    if suites:
        shard = ("-p", "ansible_collections.cleanslate.sglang.tests.tools.shard", "--shard", f"{part}/{parts}")
        steps.append(pytest_step(f"full-{part}-of-{parts}", newest(), 1440, "--durations=15", *shard, *suites))
    oldest = venvs()[0]
    if part == parts and suites and newest() != oldest:
        steps.append(pytest_step(f"promises-{oldest.core}", oldest, 900, "-m", "promise", *suites))
    return steps
