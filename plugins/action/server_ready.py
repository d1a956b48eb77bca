# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the module server_ready in slices, and tells people how far the start is meanwhile.

One long module call would be silent until its end. Each slice returns what it saw, and the next one goes on with it, so
that the verdict is the same. Lines go to stderr: what a callback prints on stdout stays machine-readable.
"""

from __future__ import annotations

import math
import time
import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()

MODULE = "cleanslate.sglang.server_ready"
SLICE_VARIABLE = "sglang_progress_s"
SLICE_S = 5.0
TELL_EVERY_S = 15.0
# The module keeps the deadline; this one only ends what would go on for ever. A slice may be longer than it should be
# (the last one proves, soaks, and gathers evidence).
NET_S = 900.0
_KEPT_LINES = 500


class ActionModule(ActionBase):
    """Slices, one after another, until the module has its verdict."""

    TRANSFERS_FILES = False
    _requires_connection = True
    _supports_async = True
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Optional[dict[str, t.Any]] = None) -> dict[str, t.Any]:
        variables = task_vars or {}
        result: dict[str, t.Any] = super().run(tmp, variables)
        del tmp
        arguments = dict(self._task.args)
        if self._task.async_val or arguments.get("slice_s") is not None:
            # In the background nobody watches; and whoever cuts the slices himself gets one.
            result.update(self._slice(arguments, variables, background=bool(self._task.async_val)))
            return result
        try:
            slice_s = _seconds(self._templated(variables))
        except ValueError as error:
            return {**result, "failed": True, "msg": f"{SLICE_VARIABLE}: {error}"}
        result.update(self._watch(arguments, variables, slice_s))
        return result

    def _templated(self, variables: t.Mapping[str, t.Any]) -> t.Any:
        return self._templar.template(variables.get(SLICE_VARIABLE, SLICE_S))

    def _watch(self, arguments: dict[str, t.Any], variables: dict[str, t.Any], slice_s: float) -> dict[str, t.Any]:
        teller = _Teller(f"{arguments.get('name')} on {variables.get('inventory_hostname', self._task.delegate_to)}")
        start = time.monotonic()
        watch: t.Optional[t.Mapping[str, t.Any]] = None
        while True:
            given = {**arguments, "slice_s": slice_s, **({} if watch is None else {"watch": watch})}
            answer = self._slice(given, variables)
            if answer.get("finished") is not False or answer.get("failed"):
                break
            watch = answer.get("watch")
            teller.tell(answer)
            waited = time.monotonic() - start
            if not isinstance(watch, dict) or waited > _deadline(arguments) + NET_S:
                answer.update(
                    failed=True,
                    msg=f"server_ready did not come to a verdict within {waited:.0f} s, beyond its own deadline",
                )
                break
        answer.pop("watch", None)
        answer["progress"] = teller.lines
        return answer

    def _slice(
        self, arguments: dict[str, t.Any], variables: dict[str, t.Any], background: bool = False
    ) -> dict[str, t.Any]:
        answer: dict[str, t.Any] = self._execute_module(
            module_name=MODULE, module_args=arguments, task_vars=variables, wrap_async=background
        )
        return answer


class _Teller:
    """Shows a line when the phase changes, and every 15 s."""

    def __init__(self, who: str) -> None:
        self.lines: list[str] = []
        self._who = who
        self._phase: t.Any = None
        self._told_at = -math.inf

    def tell(self, answer: t.Mapping[str, t.Any]) -> None:
        now, phase = time.monotonic(), (answer.get("phase"), "the proof begins" in str(answer.get("progress_line")))
        if phase == self._phase and now - self._told_at < TELL_EVERY_S:
            return
        self._phase, self._told_at = phase, now
        line = f"{self._who}: {answer.get('progress_line')}"
        display.display(line, color="bright blue", stderr=True)
        if len(self.lines) < _KEPT_LINES:
            self.lines.append(line)


def _seconds(value: t.Any) -> float:
    """The length of a slice. Raises ValueError for what is no such number."""
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{value!r} must be a number of seconds greater than 0")
    return seconds


def _deadline(arguments: t.Mapping[str, t.Any]) -> float:
    """The module's own deadline, for the net above it; what is no number the module refuses itself."""
    try:
        return float(arguments.get("deadline_s") or 600)
    except (TypeError, ValueError):
        return 600.0
