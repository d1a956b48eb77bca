# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The version that the stand-in claims: SGLANG_STANDIN_VERSION, else that of the dist-info, else 0.5.15."""

from __future__ import annotations

import os
import pathlib

DEFAULT_VERSION = "0.5.15"


def installed_version(site: pathlib.Path) -> str:
    """The version in the name of the dist-info directory beside the package, as SGLang's own installation has it."""
    for entry in sorted(site.glob("sglang-*.dist-info")):
        return entry.name[len("sglang-") : -len(".dist-info")]
    return DEFAULT_VERSION


__version__ = os.environ.get("SGLANG_STANDIN_VERSION") or installed_version(pathlib.Path(__file__).parent.parent)


def version_at_least(*wanted: int) -> bool:
    """Whether the claimed version is at least ``wanted`` (compared number by number, suffixes such as rc2 ignored)."""
    numbers = []
    for part in __version__.split(".")[: len(wanted)]:
        digits = "".join(character for character in part if character.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers) >= wanted
