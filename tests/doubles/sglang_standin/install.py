# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Install the stand-in as a virtual environment, so that it lies where a real SGLang would.

usage: install.py DIRECTORY [VERSION]
DIRECTORY/bin/python, DIRECTORY/bin/sglang, DIRECTORY/lib/pythonX.Y/site-packages/{sglang,sglang-VERSION.dist-info}
"""

from __future__ import annotations

import shutil
import sys
import venv
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
DEFAULT_VERSION = "0.5.15"


def install(directory: Path, version: str = DEFAULT_VERSION) -> Path:
    """Make the environment (without pip); returns its interpreter. A standing one is replaced."""
    venv.create(directory, clear=True, symlinks=True)
    python = directory / "bin" / "python"
    site = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    shutil.copytree(SOURCES / "sglang", site / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
    info = site / f"sglang-{version}.dist-info"
    shutil.copytree(SOURCES / f"sglang-{DEFAULT_VERSION}.dist-info", info)
    metadata = info / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"Version: {DEFAULT_VERSION}", f"Version: {version}"))
    script = directory / "bin" / "sglang"
    lines = (SOURCES / "bin" / "sglang").read_text().splitlines(keepends=True)
    script.write_text(f"#!{python.absolute()}\n" + "".join(lines[1:]))
    script.chmod(0o755)
    return python


if __name__ == "__main__":
    print(install(Path(sys.argv[1]), *sys.argv[2:3]))
