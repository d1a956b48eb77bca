# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run a command under a deadline, its output in files: a surviving grandchild that holds it can't hang a test."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import tempfile
import typing as t
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclasses.dataclass(frozen=True)
class Completed:
    """How a command ended. ``rc`` is negative where a signal ended it; the output is text."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str

    def check(self) -> Completed:
        """Itself, or an AssertionError with all output where rc is not 0."""
        assert self.rc == 0, f"{self.argv}: rc {self.rc}\nstdout: {self.stdout}\nstderr: {self.stderr}"
        return self


class DeadlinePassed(AssertionError):
    """The command ran past its deadline and was killed; the text holds its output so far."""


def run_command(
    argv: t.Sequence[str],
    deadline_s: float,
    *,
    env: t.Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
    on_timeout: t.Callable[[], None] | None = None,
) -> Completed:
    """Run ``argv`` in a session of its own; on timeout call ``on_timeout``, kill the session's first group and raise.

    ``env`` is the whole environment (None: ours).
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as given:
        given.write(stdin.encode())
        given.seek(0)
        process = subprocess.Popen(
            list(argv), stdin=given, stdout=output, stderr=errors, env=env, cwd=cwd, start_new_session=True
        )
        timed_out = False
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            if on_timeout is not None:
                on_timeout()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        done = Completed(tuple(argv), process.returncode, texts[0], texts[1])
    if timed_out:
        raise DeadlinePassed(f"not done after {deadline_s:g} s: {done}")
    return done
