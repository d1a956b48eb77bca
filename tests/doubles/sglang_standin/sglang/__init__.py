# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for SGLang: its processes, titles, ports, log lines and failures, without any model. See README.md."""

from __future__ import annotations

from sglang.version import __version__

__all__ = ["__version__"]
