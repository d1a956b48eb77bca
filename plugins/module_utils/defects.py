# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A mistake of ours still ends in a sentence. Ansible keeps no word of an exception where a task has `failed_when`, and
the playbooks judge most results themselves: they would say that a task failed, and not why.
"""

from __future__ import annotations

import os
import traceback
import types
import typing as t

from .exhausted import exhausted_by

_LONGEST = 300


class Module(t.Protocol):
    """The part of AnsibleModule that is needed here."""

    def fail_json(self, msg: str, **more: t.Any) -> t.NoReturn: ...


def defect(error: BaseException) -> str:
    """What went wrong and where, in one line. A limit of the machine is no mistake of ours."""
    limit = exhausted_by(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    if limit is not None:
        return f"this task could not go on{where}: {limit}"
    text = " ".join(str(error).split())
    shown = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return f"a defect of Clean Slate ended this task ({type(error).__name__}: {shown}{where}); please report it"


class Told:
    """``with Told(module):`` around the work of a module: an exception that nobody expected fails it with a message.

    ``results``: what the result holds then besides, such as a verdict.
    """

    def __init__(self, module: Module, **results: t.Any) -> None:
        self._module = module
        self._results = results

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: t.Optional[type[BaseException]],
        error: t.Optional[BaseException],
        trace: t.Optional[types.TracebackType],
    ) -> None:
        if isinstance(error, Exception):
            self._module.fail_json(
                msg=defect(error),
                exception="".join(traceback.format_exception(kind, error, trace)),
                **self._results,
            )
