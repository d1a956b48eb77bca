# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the project's gates and tests:  run.py SUITE ... [--shard K/N] [--only STEP ...]

Suites: gates, unit, promises, test (these three), full (everything, or one shard of it), lab (of full, the lab alone).

Logs are in build/logs; the table at the end says what passed, what was skipped and why.  Exit status 0 only if nothing
failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.cleanslate.sglang.tests.tools import suites  # noqa: E402
from ansible_collections.cleanslate.sglang.tests.tools.runner import Runner, Step, Stopped, summary  # noqa: E402

DEFAULT_PARTS = 18


def parse_shard(text: str) -> tuple[int, int]:
    part, _slash, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: want K/N with 1 <= K <= N, for example 2/4")
    return int(part), int(parts)


def steps_of(suite: str, shard: tuple[int, int] | None) -> list[Step]:
    """The steps of a suite; ``full`` without a shard is all shards one after the other."""
    if suite == "full":
        wanted = [shard] if shard else [(part, DEFAULT_PARTS) for part in range(1, DEFAULT_PARTS + 1)]
        return [step for part, parts in wanted for step in suites.full(part, parts)]
    if suite == "test":
        return [*suites.gates(), *suites.unit(), *suites.promises()]
    return {"gates": suites.gates, "unit": suites.unit, "promises": suites.promises, "lab": suites.lab}[suite]()


def chosen_steps(names: Sequence[str], shard: tuple[int, int] | None) -> list[Step]:
    """The steps of all suites in turn, each step once."""
    steps: dict[str, Step] = {}
    for name in names:
        for step in steps_of(name, shard):
            steps.setdefault(step.name, step)
    return list(steps.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("suites", nargs="+", choices=["gates", "unit", "promises", "test", "full", "lab"])
    parser.add_argument("--shard", type=parse_shard, metavar="K/N", help="one part of the full suite")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all steps together")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="only the steps of these names")
    parser.add_argument("--list", action="store_true", help="print the steps' names and commands, run nothing")
    arguments = parser.parse_args()
    steps = chosen_steps(arguments.suites, arguments.shard)
    if arguments.only:
        unknown = set(arguments.only) - {step.name for step in steps}
        if unknown:
            parser.error(f"no step {', '.join(sorted(unknown))} in {' '.join(arguments.suites)}")
        steps = [step for step in steps if step.name in arguments.only]
    if arguments.list:
        for step in steps:
            print(f"{step.name:24} {step.skip or ' '.join(step.argv)}")
        return 0
    runner = Runner(ROOT / "build" / "logs", budget_s=arguments.budget)
    started = time.monotonic()
    stopped: BaseException | None = None
    try:
        runner.run(steps)
    except (KeyboardInterrupt, Stopped) as stop:
        stopped = stop
    status = summary(runner.results, time.monotonic() - started)
    if stopped is not None:
        print(f"interrupted by {stopped or 'Ctrl-C'}")
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
