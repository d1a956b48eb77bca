# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A callback that writes each task's result as one JSON line into the file that HARNESS_EVENTS names."""

from __future__ import annotations

DOCUMENTATION = r"""
name: harness_events
type: aggregate
short_description: Task results as JSON lines
description:
  - Writes one JSON object per task and host into the file named by the environment variable E(HARNESS_EVENTS).
requirements:
  - enable in configuration
"""

import json
import os
import typing as t

from ansible.parsing.ajson import AnsibleJSONEncoder
from ansible.plugins.callback import CallbackBase


class CallbackModule(CallbackBase):
    """See DOCUMENTATION."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "harness_events"
    CALLBACK_NEEDS_ENABLED = True

    def _write(self, result: t.Any, status: str, ignored: bool = False) -> None:
        event = {
            "host": result._host.get_name(),
            "task": result._task.get_name(),
            "action": result._task.action,
            "status": status,
            "ignored": ignored,
            "result": result._result,
        }
        with open(os.environ["HARNESS_EVENTS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(event, cls=t.cast("type[json.JSONEncoder]", AnsibleJSONEncoder)) + "\n")

    def v2_runner_on_ok(self, result: t.Any) -> None:
        self._write(result, "ok")

    def v2_runner_on_failed(self, result: t.Any, ignore_errors: bool = False) -> None:
        self._write(result, "failed", ignore_errors)

    def v2_runner_on_skipped(self, result: t.Any) -> None:
        self._write(result, "skipped")

    def v2_runner_on_unreachable(self, result: t.Any) -> None:
        self._write(result, "unreachable")
