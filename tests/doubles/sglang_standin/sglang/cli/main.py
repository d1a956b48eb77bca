# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ``sglang`` command: ``sglang serve ...`` and ``sglang version``."""

from __future__ import annotations

import sys

from sglang.version import __version__


def main() -> None:
    """Entry point of the console script."""
    if sys.argv[1:2] == ["serve"]:
        from sglang.standin.leader import main as serve

        serve(sys.argv[2:])
    elif sys.argv[1:] == ["version"]:
        print(f"sglang version: {__version__}")
    else:
        sys.exit("usage: sglang serve [options] | sglang version")
