# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that turn results into text for people."""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import inspect_report, report, results


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "clean_lines": report.clean_lines,
            "failure": results.failure,
            "inspect_lines": inspect_report.inspect_lines,
            "launch_problem": results.launch_problem,
            "relaunch_lines": report.relaunch_lines,
            "teardown_lines": report.teardown_lines,
            "why": results.why,
        }
