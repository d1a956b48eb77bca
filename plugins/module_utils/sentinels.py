# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Values that are told by identity, also when a process of ours below has sent them: pickle and copy keep them."""

from __future__ import annotations


class Sentinel:
    """``NAME = Sentinel("NAME", __name__)`` in the module that has it as ``NAME``."""

    def __init__(self, name: str, module: str) -> None:
        self._name = name
        self.__module__ = module  # where pickle looks for the name

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name
