# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A program that starts servers and ends each start at once, as by SIGKILL, before its N-th change of the file system.

    cut_launch.py LAUNCH_ID STATE_DIR:N ...      prints, for each, 9 (it was cut) or 0 (it came to its end)

The process itself is left out (none is made): what is tried is every moment between two writes of the record.
"""

from __future__ import annotations

import os
import sys
import traceback
import typing as t

from ansible_collections.cleanslate.sglang.plugins.module_utils.act import launch as act
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.launch import (
    Account,
    LaunchRequest,
    plan_launch,
)

CHANGES = ("rename", "symlink", "mkdir", "unlink", "rmdir", "chown", "chmod", "open")
DOCUMENTS: dict[t.Any, dict[str, t.Any]] = {"plan": {"verdict": "approved"}, "clean": {"verdict": "clean"}}


def request_of(state_dir: str) -> LaunchRequest:
    return LaunchRequest(
        name="main",
        python=sys.executable,
        account=Account("root", "root", 0, 0, "/root", (0,)),
        flags={"model_path": "/"},
        launcher="detached",
        state_dir=state_dir,
        boot_id="b",
        secrets={"api-key": "sk-Cut-Secret"},
    )


def cut_before(number: int) -> None:
    """End this very process before its ``number``-th change. No handler runs, as with SIGKILL."""
    left = [number]

    def counted(real: t.Callable[..., t.Any]) -> t.Callable[..., t.Any]:
        def call(*args: t.Any, **kwargs: t.Any) -> t.Any:
            if real is not real_open or args[1] & os.O_CREAT:
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)
            return real(*args, **kwargs)

        return call

    real_open = os.open
    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))


def start(state_dir: str, number: int, launch_id: str) -> None:
    request = request_of(state_dir)
    plan = plan_launch(request, launch_id)
    act._start_detached = lambda *_words: Process(4242, 7, 1, 4242, 4242, "S", "python3", plan.argv)
    cut_before(number)
    act.start(request, plan, keep=2, documents=DOCUMENTS)


def main() -> None:
    launch_id = sys.argv[1]
    for word in sys.argv[2:]:
        state_dir, _colon, number = word.rpartition(":")
        pid = os.fork()
        if pid == 0:
            try:
                start(state_dir, int(number), launch_id)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
