# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run ansible-test on a plain checkout:  ansible_test.py CORE sanity --local ...  (CORE: 2.19 or 2.21)

ansible-test insists on a path .../ansible_collections/NAMESPACE/NAME and resolves links.  So the checkout is
bind-mounted there, in a private mount namespace (as a plain user: in a user namespace as well).  The same namespace
gives it an output directory of its own, so that two cores can run side by side, and a get-pip stand-in in its download
cache; nothing of the user's is touched.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.cleanslate.sglang.scripts.bootstrap import cache_dir, find_interpreter  # noqa: E402

# Targets run Python 3.9 and newer: compile and import are tested on each of these that this machine has.
TARGET_PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")

# $0 checkout, $1 where it is mounted, $2 output directory, $3 download cache, $4 where that is mounted; the command
MOUNT_AND_RUN = """
set -e
mount --bind "$3" "$4"
mount --bind "$0" "$1"
mount --bind "$2" "$1/tests/output"
cd "$1"
shift 4
exec "$@"
"""


def link_interpreters(directory: Path) -> None:
    """Fill ``directory`` with links to the Pythons that really run; ansible-test trips over pyenv's shims for absent
    ones.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for version in TARGET_PYTHONS:
        found = find_interpreter([version])
        link = directory / f"python{version}"
        if link.is_symlink() and (found is None or os.readlink(link) != found.path):
            link.unlink()
        if found is not None and not link.is_symlink():
            link.symlink_to(found.path)


def get_pip_name(venv: Path) -> str:
    """The file name under which this venv's ansible-test keeps the get-pip.py that it downloads."""
    source = next(venv.glob("lib/python*/site-packages/ansible_test/_internal/python_requirements.py")).read_text()
    found = re.search(r"""\bpip=['"]([0-9.]+)['"]""", source)
    if found is None:
        raise SystemExit(
            f"error: {venv}: can't tell which get-pip.py ansible-test wants: its python_requirements.py has changed"
        )
    return "get_pip_{}.py".format(found[1].replace(".", "_"))


def main() -> None:
    core, arguments = sys.argv[1], sys.argv[2:]
    venv = cache_dir() / f"venv-{core}"
    work = cache_dir() / "ansible-test"
    mounted = work / "ansible_collections" / "cleanslate" / "sglang"
    output = work / f"output-{core}"
    downloads = work / "downloads"
    downloads_place = Path("~/.ansible/test/cache").expanduser()
    for directory in (mounted, output, downloads, downloads_place, ROOT / "tests" / "output"):
        directory.mkdir(parents=True, exist_ok=True)
    link_interpreters(work / "bin")
    shutil.copyfile(ROOT / "tests" / "tools" / "get_pip.py", downloads / get_pip_name(venv))
    others = [each for each in os.environ.get("PATH", os.defpath).split(os.pathsep) if not each.endswith("/shims")]
    os.environ["PATH"] = os.pathsep.join([str(venv / "bin"), str(work / "bin"), *others])
    places = [ROOT, mounted, output, downloads, downloads_place]
    unshare = ["unshare", "--mount" if os.geteuid() == 0 else "-rm", "--propagation", "private"]
    argv = [*unshare, "bash", "-c", MOUNT_AND_RUN, *map(str, places), "ansible-test", *arguments]
    os.execvp("unshare", argv)


if __name__ == "__main__":
    main()
