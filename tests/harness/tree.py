# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which tree of the collection the harness runs: the checkout, or a copy that a test has changed.

    with using(copy_tree(tmp_path / "broken")):
        run_module(...)     # the module of the copy
"""

from __future__ import annotations

import contextlib
import shutil
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT

PARTS = ("plugins", "roles", "playbooks", "meta")
_current: list[Path] = []


def root() -> Path:
    """The collection's root directory."""
    return _current[-1] if _current else ROOT


def collections() -> Path:
    """The directory that holds ansible_collections, as Ansible and Python want it on their paths."""
    return _current[-1].parents[2] if _current else ROOT / ".collections"


def copy_tree(directory: Path) -> Path:
    """Copy what runs of the collection below ``directory``; returns the copy's root. Its tests are the checkout's."""
    target = directory / "ansible_collections" / "cleanslate" / "sglang"
    target.mkdir(parents=True)
    for part in PARTS:
        # playbooks/collections is a link to the checkout, which Ansible would prefer to the copy.
        shutil.copytree(ROOT / part, target / part, ignore=shutil.ignore_patterns("__pycache__", "collections"))
    shutil.copy(ROOT / "galaxy.yml", target)
    return target


@contextlib.contextmanager
def using(tree: Path | None) -> t.Iterator[None]:
    """Run this tree until the end of the block; None: the checkout."""
    if tree is None:
        yield
        return
    _current.append(tree)
    try:
        yield
    finally:
        _current.pop()
