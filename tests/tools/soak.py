# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The soak:  soak.py [--count N] [--seed N] [--minutes M] [--fault NAME ...]     docs/development.md: what it judges

Relaunches in a row on one lab host, each with a fault that the seed picks; one line a round and a table at the end.
Exit status 0 only if every verdict was as expected, every claim true, every bystander alive, and nothing grew.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / ".collections"))
INSIDE = "CLEANSLATE_SOAK_INSIDE"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=200, metavar="N", help="rounds; default 200")
    parser.add_argument("--seed", type=int, metavar="N", help="of the random numbers; printed where it is not given")
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no round after this time")
    parser.add_argument("--fault", action="append", metavar="NAME", help="only these; may be given several times")
    arguments = parser.parse_args()
    if INSIDE not in os.environ:
        return in_venv()

    from ansible_collections.cleanslate.sglang.tests.lab import soak
    from ansible_collections.cleanslate.sglang.tests.lab.containers import why_not

    faults = [fault for fault in soak.FAULTS if not arguments.fault or fault.name in arguments.fault]
    if len(faults) < len(set(arguments.fault or ())):
        parser.error(f"--fault: known are {', '.join(fault.name for fault in soak.FAULTS)}")
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return 1
    # Ended from outside, it takes its container with it; a background job of a shell ignores Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_unused: sys.exit(143))
    seed = arguments.seed if arguments.seed is not None else random.randrange(1 << 31)
    until = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as name, soak.opened(Path(name)) as place:
        report = soak.Soak(place, seed, lambda line: print(line, flush=True)).run(arguments.count, until, faults)
    print(report.table())
    return 0 if report.ok else 1


def in_venv() -> int:
    """The same with the interpreter of the newest Ansible venv, which has what modules and playbooks need."""
    from ansible_collections.cleanslate.sglang.tests.tools.suites import newest

    venv = newest()
    if venv.skip is not None:
        print(f"skipped: {venv.skip}")
        return 1
    argv = venv.command("python", *sys.argv)
    return subprocess.run(argv, env={**os.environ, **venv.env, INSIDE: "1"}, check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
