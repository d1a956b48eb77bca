# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fault matrix:  faults.py [--proof] [--all] [ROW ...]     docs/faults.md says how to read it

Without --all or rows: a selection for which ten minutes are enough. With --proof each row runs against a copy of the
collection without the row's defence, and must turn red. --table prints the rows for docs/faults.md. Exit status 0 only
if every row came out as expected, and at least one did.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / ".collections"))
INSIDE = "CLEANSLATE_FAULTS_INSIDE"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="ids; a trailing * stands for all that begin so")
    parser.add_argument("--all", action="store_true", help="every row")
    parser.add_argument("--proof", action="store_true", help="without each row's defence it must turn red")
    parser.add_argument("--table", action="store_true", help="print the table of docs/faults.md")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin no row after this time")
    arguments = parser.parse_args()
    if INSIDE not in os.environ:
        return in_venv()

    from ansible_collections.cleanslate.sglang.tests.faults import matrix

    if arguments.table:
        print(matrix.table(), end="")
        return 0
    if arguments.rows:
        try:
            rows = matrix.by_id(arguments.rows)
        except KeyError as unknown:
            parser.error(f"no row {unknown}; --table lists them")
    else:
        rows = tuple(row for row in matrix.ROWS if arguments.all or arguments.proof or row.quick)
    return run(rows, arguments.proof, arguments.budget)


def in_venv() -> int:
    """The same with the interpreter of the newest Ansible venv, which has what modules and playbooks need."""
    from ansible_collections.cleanslate.sglang.tests.tools.suites import newest

    venv = newest()
    if venv.skip is not None:
        print(f"skipped: {venv.skip}")
        return 1
    argv = venv.command("python", *sys.argv)
    return subprocess.run(argv, env={**os.environ, **venv.env, INSIDE: "1"}, check=False, cwd=ROOT).returncode


def run(rows: tuple[object, ...], proof: bool, budget_s: float | None) -> int:
    """Run the rows one after another, print each as it ends, and the counts."""
    from ansible_collections.cleanslate.sglang.tests.faults import matrix, runner
    from ansible_collections.cleanslate.sglang.tests.faults.model import ERROR, Outcome, Row
    from ansible_collections.cleanslate.sglang.tests.faults.patches import DoesNotApply
    from ansible_collections.cleanslate.sglang.tests.lab import containers

    started = time.monotonic()
    outcomes: list[Outcome] = []
    missing: dict[str, int] = {}
    try:
        for row in rows:
            assert isinstance(row, Row)
            why = runner.why_not(row, containers.why_not)
            if why is None and budget_s is not None and time.monotonic() - started > budget_s:
                why = f"the budget of {budget_s:g} s is used up"
            if why is not None:
                missing[why] = missing.get(why, 0) + 1
                continue
            with tempfile.TemporaryDirectory(prefix="faults-") as name:
                try:
                    outcome = (runner.prove_row if proof else runner.run_row)(row, Path(name))
                except DoesNotApply as problem:
                    outcome = Outcome(ERROR, str(problem))
            outcomes.append(outcome)
            print(matrix.line(row, outcome), flush=True)
    finally:
        runner.close()
    for why, count in missing.items():
        print(f"skipped: {count} rows: {why}")
    print(("proofs: " if proof else "") + matrix.closing(outcomes) + f"; {time.monotonic() - started:.0f} s")
    return 0 if outcomes and all(one.result == "ok" for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
