# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the collection, install the archive away from the checkout, verify it there and read its playbooks by their
full names.

Runs with the Ansible commands that stand first in PATH.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Must not be in the archive: they belong to a checkout.
CHECKOUT_ONLY = (".collections", "playbooks/collections", "tests/output", ".git", "build")


def run(argv: list[str], cwd: Path, env: dict[str, str]) -> None:
    print("$", *argv, flush=True)
    done = subprocess.run(argv, cwd=cwd, env=env, check=False, stdin=subprocess.DEVNULL, timeout=120)
    if done.returncode:
        raise SystemExit(f"error: {argv[0]}: exit status {done.returncode}")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="cleanslate-build-") as name:
        scratch = Path(name)
        installed = scratch / "installed"
        # No configuration but ours: the checkout's ansible.cfg would find the checkout instead of the archive.
        env = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
        config = scratch / "ansible.cfg"
        config.write_text("[defaults]\n")
        env.update(ANSIBLE_COLLECTIONS_PATH=str(installed), ANSIBLE_CONFIG=str(config), ANSIBLE_NOCOLOR="1")
        run(["ansible-galaxy", "collection", "build", "--output-path", str(scratch), str(ROOT)], scratch, env)
        archive = next(scratch.glob("cleanslate-sglang-*.tar.gz"))
        with tarfile.open(archive) as opened:
            stray = [entry for entry in opened.getnames() if entry.startswith(CHECKOUT_ONLY)]
        if stray:
            print(f"error: the archive holds what belongs to a checkout only: {', '.join(stray[:5])}")
            return 1
        run(["ansible-galaxy", "collection", "install", "--offline", "-p", str(installed), str(archive)], scratch, env)
        run(["ansible-galaxy", "collection", "verify", "--offline", "cleanslate.sglang"], scratch, env)
        runner = installed / "ansible_collections" / "cleanslate" / "sglang" / "scripts" / "drift.py"
        run([sys.executable, str(runner), "--help"], scratch, env)
        for playbook in sorted((ROOT / "playbooks").glob("*.yml")):
            full_name = f"cleanslate.sglang.{playbook.stem}"
            run(["ansible-playbook", "--syntax-check", "-i", "localhost,", full_name], scratch, env)
    return 0


if __name__ == "__main__":
    sys.exit(main())
