# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations


class CleanSlateError(Exception):
    """An error for people: names the object, the value, the limit and the next step."""


class UnknownDevice(CleanSlateError):
    """A GPU was asked for by an index, UUID or bus id that this host does not show."""


class NotPermitted(CleanSlateError):
    """The caller may not do or see what the task needs."""
