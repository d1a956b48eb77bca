# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Numbers of seconds that users give. YAML has `.nan` and `.inf`, and no comparison refuses them by itself."""

from __future__ import annotations

import math
import typing as t

from .errors import CleanSlateError


def check_seconds(params: t.Mapping[str, t.Any], *names: str) -> None:
    """Raise CleanSlateError unless each of these is a finite number above 0."""
    for name in names:
        if not 0 < params[name] < math.inf:
            raise CleanSlateError(f"{name} is {params[name]:g}; it must be a finite number of seconds greater than 0")
