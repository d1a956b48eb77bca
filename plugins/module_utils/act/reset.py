# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reset GPUs by ``nvidia-smi --gpu-reset``, one by one, and leave persistence mode as it was.

Persistence mode counts as a user of the GPU, and a reset is refused while it is on (NVIDIA/NVSentinel#1690). So it is
turned off before and on again afterwards, whatever became of the reset: a failed restore is a reason of its own.
"""

from __future__ import annotations

import re
import time
import typing as t
from dataclasses import dataclass, field

from ..model import Gpu, Reason
from ..spawn import Completed, run_bounded

QUERY_S = 20.0
SETTING_S = 30.0
RESTORE_TRIES = 2
MODES = {"Enabled": True, "Disabled": False}
DONE = "successfully reset"
# What nvidia-smi says where it refuses: code, words to look for, what it means and the next step.
REFUSALS = (
    (
        "gpu_reset_in_use",
        re.compile(r"in use by another client|being used by", re.IGNORECASE),
        "the driver says that somebody uses it, though nobody was seen: a monitor (dcgm, another nvidia-smi), the "
        "fabric manager, a display server or nvidia_drm. Stop that, then reset it by hand, or reboot",
    ),
    (
        "gpu_reset_not_permitted",
        re.compile(r"insufficient permissions|permission denied", re.IGNORECASE),
        "only root may reset a GPU: run with become",
    ),
    (
        "gpu_reset_peers",
        re.compile(r"nvlink|peer|together|all gpus", re.IGNORECASE),
        "GPUs joined by NVLink must be reset together here: free all of them and run `nvidia-smi --gpu-reset` for all "
        "of them by hand, or reboot",
    ),
    (
        "gpu_reset_unsupported",
        re.compile(r"not supported|primary gpu|unsupported", re.IGNORECASE),
        "this GPU or driver can't do it: reboot the host",
    ),
)

Row = t.Mapping[str, t.Any]


@dataclass(frozen=True)
class GpuReset:
    """What became of one GPU. ``persistence_before`` and ``persistence_after``: the mode; None: not known."""

    index: int
    bus_id: t.Optional[str]
    done: bool
    persistence_before: t.Optional[bool]
    persistence_after: t.Optional[bool]


@dataclass(frozen=True)
class ResetOutcome:
    """All GPUs of one call, in their order; those after a hang were not touched and are named in a reason."""

    gpus: tuple[GpuReset, ...]
    steps: tuple[Row, ...]
    reasons: tuple[Reason, ...]
    seconds: float

    @property
    def all_done(self) -> bool:
        return all(one.done for one in self.gpus)


@dataclass(frozen=True)
class _State:
    """What nvidia-smi says of a GPU: ``mig`` None where it says neither that MIG is on nor off nor absent."""

    uuid: str
    persistence: t.Optional[bool]
    mig: t.Optional[bool]


@dataclass
class _Resetter:
    command: str
    deadline_s: float
    env: t.Optional[t.Mapping[str, str]]
    steps: list[Row] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    hung: bool = False

    def reset(self, gpu: Gpu) -> GpuReset:
        """Reset one GPU, having checked that nvidia-smi means the same one."""
        bus_id = gpu.bus_id
        if self.hung:
            self._reason(gpu, "gpu_reset_skipped", "was not reset: nvidia-smi failed for the GPU before it")
            return GpuReset(gpu.index, bus_id, False, None, None)
        state = self._checked_state(gpu)
        if bus_id is None or state is None:
            return GpuReset(gpu.index, bus_id, False, state.persistence if state else None, None)
        if not state.persistence:
            return GpuReset(gpu.index, bus_id, self._reset_now(gpu, bus_id), False, False)
        done = False
        after: t.Optional[bool] = None
        try:
            done = self._turn_off(gpu, bus_id) and self._reset_now(gpu, bus_id)
        finally:
            after = self._restore(gpu, bus_id)
        return GpuReset(gpu.index, bus_id, done, True, after)

    # --- steps ---

    def _checked_state(self, gpu: Gpu) -> t.Optional[_State]:
        """The GPU's state, where a reset may follow. Its UUID has to be the driver's: the library that named the GPU
        and this nvidia-smi could speak of different machines' GPUs (a test double's), or count them anew.
        """
        if gpu.bus_id is None or gpu.uuid is None:
            self._reason(gpu, "gpu_reset_users_unknown", "was not reset: its bus id or UUID is not known", "unknown")
            return None
        done, state = self._query(gpu.bus_id)
        if state is None:
            self.hung = done.timed_out
            why = f"was not reset: nvidia-smi does not tell its persistence mode: {_words(done, QUERY_S)}"
            self._reason(gpu, "gpu_reset_persistence_unknown", why, "unknown")
            return None
        if state.uuid.lower() != gpu.uuid.lower():
            why = f"was not reset: nvidia-smi has {state.uuid} at {gpu.bus_id}, the driver's library {gpu.uuid}"
            self._reason(gpu, "gpu_reset_other_gpu", f"{why}. Look at LD_LIBRARY_PATH and PATH")
            return None
        if state.mig is not False:
            said, means = ("MIG is on", "dirty") if state.mig else ("whether MIG is on is not known", "unknown")
            self._reason(gpu, "gpu_reset_mig", f"was not reset: {said}, and a reset takes every slice", means)
            return None
        if state.persistence is None:
            why = "was not reset: nvidia-smi does not tell its persistence mode, so it could not be restored"
            self._reason(gpu, "gpu_reset_persistence_unknown", why, "unknown")
            return None
        return state

    def _turn_off(self, gpu: Gpu, bus_id: str) -> bool:
        done = self._run("-pm 0", gpu, SETTING_S)
        _query, state = self._query(bus_id) if not done.timed_out else (done, None)
        if state is not None and state.persistence is False:
            return True
        self.hung = self.hung or done.timed_out
        why = f"was not reset: persistence mode could not be turned off: {_words(done, SETTING_S)}"
        self._reason(gpu, "gpu_reset_persistence_stays", why)
        return False

    def _reset_now(self, gpu: Gpu, bus_id: str) -> bool:
        done = self._run("--gpu-reset", gpu, self.deadline_s)
        text = _text(done)
        if done.ok and DONE in text:
            return True
        if done.timed_out:
            self.hung = True
            stuck = f"; its pid {done.stuck_pid} can't be ended (state D)" if done.stuck_pid is not None else ""
            why = f"may be half reset: nvidia-smi --gpu-reset gave no answer within {self.deadline_s:g} s{stuck}"
            self._reason(gpu, "gpu_reset_timed_out", f"{why}. A reboot of the host is the next step", "unknown")
            return False
        words = _words(done, self.deadline_s)
        for code, pattern, meaning in REFUSALS:
            if done.error is None and pattern.search(text):
                self._reason(gpu, code, f"was not reset: {words}: {meaning}")
                return False
        self._reason(gpu, "gpu_reset_failed", f"was not reset: {words}")
        return False

    def _restore(self, gpu: Gpu, bus_id: str) -> t.Optional[bool]:
        """Turn persistence mode on again and look whether it is: nvidia-smi may exit with 0 and have done nothing."""
        words = ""
        after: t.Optional[bool] = None
        for _attempt in range(RESTORE_TRIES):
            done = self._run("-pm 1", gpu, SETTING_S)
            words = _words(done, SETTING_S)
            asked, state = self._query(bus_id) if not done.timed_out else (done, None)
            after = state.persistence if state is not None else None
            if after:
                return True
            if done.timed_out or asked.timed_out:
                break
        self.hung = True
        text = (
            f"has lost its persistence mode, which was on: {words or 'nvidia-smi does not tell that it is on again'}. "
            f"Turn it on by hand: nvidia-smi -i {bus_id} -pm 1"
        )
        self._reason(gpu, "persistence_not_restored", text)
        return after

    # --- nvidia-smi ---

    def _run(self, what: str, gpu: Gpu, deadline_s: float) -> Completed:
        done = run_bounded([self.command, "-i", str(gpu.bus_id), *what.split()], deadline_s, env=self.env)
        result = "accepted" if done.ok else "no answer" if done.timed_out else "refused"
        row = {"what": f"nvidia-smi {what} of {gpu.label}", "pid": None, "result": result}
        self.steps.append({**row, "detail": _words(done, deadline_s)})
        return done

    def _query(self, bus_id: str) -> tuple[Completed, t.Optional[_State]]:
        fields = "--query-gpu=uuid,persistence_mode,mig.mode.current"
        argv = [self.command, fields, "--format=csv,noheader", "-i", bus_id]
        done = run_bounded(argv, QUERY_S, env=self.env)
        return done, parse_state(done.stdout) if done.ok else None

    def _reason(self, gpu: Gpu, code: str, message: str, means: str = "dirty") -> None:
        self.reasons.append(Reason(code, f"{gpu.label} {message}", gpu.label, means=means))


def reset_gpus(
    gpus: t.Sequence[Gpu],
    deadline_s: float,
    command: str = "nvidia-smi",
    env: t.Optional[t.Mapping[str, str]] = None,
) -> ResetOutcome:
    """Reset ``gpus`` one after another; nothing stands against it by decide/optin.py.

    ``deadline_s`` holds for each reset. One that gives no answer ends it: the others are left alone.
    """
    started = time.monotonic()
    run = _Resetter(command, deadline_s, env)
    results = tuple(run.reset(gpu) for gpu in gpus)
    return ResetOutcome(results, tuple(run.steps), tuple(run.reasons), round(time.monotonic() - started, 3))


def parse_state(text: str) -> t.Optional[_State]:
    """The one line ``uuid, persistence_mode, mig.mode.current``; None where it is not that. ``[N/A]`` as MIG mode is a
    GPU without MIG.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    cells = [cell.strip() for cell in lines[0].split(",")] if len(lines) == 1 else []
    if len(cells) != 3:
        return None
    uuid, persistence, mig = cells
    return _State(uuid, MODES.get(persistence), {"[N/A]": False, "N/A": False, **MODES}.get(mig))


def _text(done: Completed) -> str:
    return " ".join((done.stdout + " " + done.stderr).split())


def _words(done: Completed, deadline_s: float) -> str:
    if done.timed_out:
        stuck = f"; its pid {done.stuck_pid} can't be ended" if done.stuck_pid is not None else ""
        return f"no answer within {deadline_s:g} s{stuck}"
    if done.error is not None:
        return done.error
    return _text(done)[:300] if done.ok else f"exit {done.rc}: {_text(done)[:300] or 'failed without a word'}"
