# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Mutation testing of ``plugins/module_utils/decide`` by mutmut: which small changes of a decision would no test see?

    python3 tests/tools/mutation.py [--clean] [--quick] [--show] [MODULE ...]

It works on a copy of the checkout below the cache, one per module, keeps its results there, and goes on where it was
ended; ``--clean`` begins anew. Each change meets the tests that draw nothing; those that survived meet all of them,
unless ``--quick`` (drawn examples take a hundred times as long). Prints the score of each module; ``--show`` also the
changes that nobody saw. A change of nothing but the words of a sentence is counted apart: people read them, and no
decision hangs on them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.cleanslate.sglang.scripts import bootstrap
from ansible_collections.cleanslate.sglang.tests.tools.house_rules import tracked_files

INSIDE = "ansible_collections/cleanslate/sglang"
DECIDE = "plugins/module_utils/decide"
UNIT = "tests/unit/plugins/module_utils"
_BLIND = "properties/test_less_is_never_better"
# The tests that judge a module by itself; a suite that drives it through a whole eviction sees less and takes longer.
TESTS = {
    "argv": ("test_argv",),
    "budget": ("test_budget",),
    "budget_findings": ("test_budget", "test_planning"),
    "budget_host": ("test_budget", "test_planning"),
    "clean": ("test_clean", "test_clean_guest", "test_clean_reasons"),
    "clients": ("test_clients",),
    "conditions": ("test_conditions", _BLIND),
    "devicerules": ("test_devicerules",),
    "drift": ("test_drift", _BLIND),
    "drift_host": ("test_drift_host",),
    "drift_server": ("test_drift_server", "test_drift_keys"),
    "flags_plan": ("test_flags_plan",),
    "gpu_use": ("test_gpu_use",),
    "gpus": ("test_gpus",),
    "guardrails": ("test_guardrails", _BLIND),
    "guests": ("test_guests", "test_guest_findings"),
    "holders": ("test_holders",),
    "kinship": ("test_kinship",),
    "leftovers": ("test_leftovers", _BLIND),
    "optin": ("test_optin",),
    "ports": ("test_ports",),
    "protected": ("test_protected", "test_targets"),
    "restarters": ("test_restarters",),
    "routing": ("test_routing_decisions", "sglang/test_router"),
    "targets": ("test_targets", "test_targets_evidence", "test_targets_guest", "test_fork_chains"),
    "topology": ("test_topology",),
    "visible": ("test_targets", "test_clean"),
    "workers": ("test_workers", _BLIND),
    "wrappers": ("test_wrappers",),
    "xids": ("test_xids",),
}
WITHOUT_DRAWN = '-m "not hypothesis"'
SURVIVED, UNTESTED = 0, 33  # mutmut's exit codes; None: not tried yet, everything else: killed
_WORD = re.compile(r"\"(?:[^\"\\]|\\.)*\"")


@dataclass(frozen=True)
class Score:
    """Of one module. ``words``: survivors that change nothing but a sentence."""

    module: str
    killed: int
    survived: int
    words: int
    left: int

    def __str__(self) -> str:
        tried = self.killed + self.survived
        part = f"{100 * self.killed / tried:.0f} %" if tried else "-"
        weighty = tried - self.words
        real = f"{100 * self.killed / weighty:.0f} %" if weighty else "-"
        rest = f", {self.left} not tried" if self.left else ""
        return f"{self.module:12} {self.killed:5} of {tried:5} killed ({part}; without mere words {real}){rest}"


def environment() -> tuple[Path, dict[str, str]]:
    """The program, and its environment: the Ansible venv's packages come along by PYTHONPATH."""
    base = bootstrap.newest_ansible_venv()
    if base is None:
        raise bootstrap.BootstrapError("no Ansible venv; run `make venv` first")
    requirements = ROOT / "requirements" / "mutation.txt"
    key = bootstrap.digest("1", str(base.resolve()), requirements.read_text())
    with bootstrap.built_once("mutation", key) as target:
        if target:
            log = bootstrap.cache_dir() / f"{target.name}.log"
            argv = [str(base / "bin/python"), "-m", "venv", str(target)]
            bootstrap.run_logged(argv, label="mutation: venv", log=log, grows=target, deadline_s=180)
            bootstrap.pip_install(target, "mutation: mutmut", ["-r", str(requirements)])
    packages = next((base / "lib").glob("python*/site-packages"))
    return bootstrap.cache_dir() / "mutation/bin/mutmut", {**os.environ, "PYTHONPATH": str(packages)}


def copy_to(place: Path, module: str) -> None:
    """The checkout, laid out by the name under which it is imported, and mutmut's settings."""
    for path in tracked_files(ROOT):
        if path.parts[0] in ("plugins", "tests", "roles", "scripts", "docs", "inventory", "requirements"):
            target = place / INSIDE / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_file() or target.read_bytes() != (ROOT / path).read_bytes():
                shutil.copy2(ROOT / path, target)
    tests = [f"{INSIDE}/{UNIT}/{test}.py" for test in TESTS[module]]
    settings = f"""[tool.mutmut]
source_paths = ["ansible_collections"]
only_mutate = {json.dumps([f"{INSIDE}/{DECIDE}/{module}.py"])}
pytest_add_cli_args_test_selection = {json.dumps(tests)}
use_git_change_detection = false
track_dependencies = false
on_dependency_change = "ignore"

[tool.pytest.ini_options]
pythonpath = ["."]
addopts = "--strict-markers --import-mode=importlib -p no:cacheprovider -p no:xdist"
timeout = 300
markers = ["gpu: needs a real NVIDIA GPU"]
"""
    (place / "pyproject.toml").write_text(settings)


def only_words(diff: str) -> bool:
    """Whether a change is one of a sentence alone: the same line, but for the texts of several words in it."""
    lines = [line for line in diff.splitlines() if re.match(r"[-+](?![-+])", line)]
    plain = {_WORD.sub(lambda match: "TEXT" if " " in match.group() else match.group(), line[1:]) for line in lines}
    return len(lines) == 2 and len(plain) == 1


def score(place: Path, module: str, diff_of: dict[str, str]) -> Score:
    meta = place / "mutants" / INSIDE / DECIDE / f"{module}.py.meta"
    codes: dict[str, int | None] = json.loads(meta.read_text())["exit_code_by_key"] if meta.is_file() else {}
    lived = [name for name, code in codes.items() if code in (SURVIVED, UNTESTED)]
    left = sum(code is None for code in codes.values())
    words = sum(only_words(diff_of.get(name, "")) for name in lived)
    return Score(module, len(codes) - len(lived) - left, len(lived), words, left)


def shown(program: Path, env: dict[str, str], place: Path, name: str) -> str:
    """A change as a diff."""
    argv = [str(program), "show", name]
    return subprocess.run(argv, cwd=place, env=env, check=False, capture_output=True, text=True, timeout=60).stdout


def survivors(place: Path, module: str) -> list[str]:
    meta = place / "mutants" / INSIDE / DECIDE / f"{module}.py.meta"
    codes = json.loads(meta.read_text())["exit_code_by_key"] if meta.is_file() else {}
    return [name for name, code in codes.items() if code in (SURVIVED, UNTESTED)]


def try_all(program: Path, env: dict[str, str], place: Path, module: str, quick: bool) -> int:
    """Tries what was not tried yet, and again what survived: there may be new tests."""
    command = [str(program), "run", "--max-children", "1"]
    plain = {**env, "PYTEST_ADDOPTS": WITHOUT_DRAWN}
    before = survivors(place, module)
    code = subprocess.run(command, cwd=place, env=plain, check=False).returncode
    again = before if quick else survivors(place, module)
    if code or not again:
        return code
    return subprocess.run([*command, *again], cwd=place, env=plain if quick else env, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(sorted(TESTS))}; default: all")
    parser.add_argument("--clean", action="store_true", help="forget earlier results")
    parser.add_argument("--quick", action="store_true", help="no tests that draw their examples")
    parser.add_argument("--show", action="store_true", help="print the changes that no test saw")
    options = parser.parse_args()
    unknown = sorted(set(options.modules) - set(TESTS))
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(sorted(TESTS))}")
    try:
        program, env = environment()
    except bootstrap.BootstrapError as error:
        print(f"error: {error}")
        return 1
    code = 0
    for module in options.modules or sorted(TESTS):
        place = bootstrap.cache_dir() / "mutants" / module
        if options.clean:
            shutil.rmtree(place, ignore_errors=True)
        copy_to(place, module)
        code |= try_all(program, env, place, module, options.quick)
        names = survivors(place, module)
        diffs = {name: shown(program, env, place, name) for name in names}
        print(score(place, module, diffs))
        for name in names if options.show else ():
            if not only_words(diffs[name]):
                print(diffs[name])
    return code


if __name__ == "__main__":
    sys.exit(main())
