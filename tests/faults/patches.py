# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Small edits that take a defence away, for a copy of the collection. The product itself has no switch for it."""

from __future__ import annotations

import dataclasses
import typing as t
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Patch:
    """In ``file`` (relative to the collection) the text ``old``, which stands there exactly once, becomes ``new``."""

    file: str
    old: str
    new: str


class DoesNotApply(Exception):
    """The text of a patch is not in its file, or more than once: the product has changed, so the patch must too."""


def patched(text: str, patch: Patch) -> str:
    """``text`` with the patch applied."""
    found = text.count(patch.old)
    if found != 1:
        raise DoesNotApply(f"{patch.file}: found {found} times, not once: {patch.old!r}")
    return text.replace(patch.old, patch.new)


def apply_all(tree: Path, patches: t.Iterable[Patch]) -> None:
    """Change the files of a copy of the collection."""
    for patch in patches:
        path = tree / patch.file
        path.write_text(patched(path.read_text(encoding="utf-8"), patch), encoding="utf-8")
