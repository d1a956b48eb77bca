# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the driver's reports in the kernel log (Xids) ask for. They count for a while, each for its own GPU.

The classes are NVIDIA's immediate actions by code. A report that only asks for another start of the application is a
warning here: whoever judges has just ended the application.
"""

from __future__ import annotations

import typing as t

from ..model import Gpu, Reason
from ..xid import KernelLog, Xid, normal_bus_id

RESTART_APPLICATION = frozenset({13, 31, 94})
NOTHING_TO_DO = frozenset({43})
ENDED_BY_FORCE = 45
RESET_GPU = frozenset({46, 95, 109, 119, 120, 140, 143})
RESTART_HOST = frozenset({79})
RECOVERY_ACTION = 154
_TAKEN_BACK = "to 0x0 "  # of 154: "changed from 0x1 (GPU Reset Required) to 0x0 (None)"
_SHOWN = 120


def judge_xids(
    gpus: t.Sequence[Gpu],
    log: t.Optional[KernelLog],
    now_s: float,
    window_s: float,
    vantage: str,
    resets: t.Optional[t.Mapping[str, float]] = None,
) -> list[Reason]:
    """The reasons that the kernel log gives for or against the chosen GPUs. ``window_s`` 0: it is not asked.

    ``now_s``: the log's clock when it was read. ``resets``: when GPUs were reset (bus id: seconds by the same clock);
    what was reported before that counts no more.
    """
    if window_s <= 0:
        return []
    if log is None or log.xids is None:
        return _unread(log, vantage)
    done = {normal_bus_id(bus_id): at_s for bus_id, at_s in (resets or {}).items()}
    recent = [xid for xid in log.xids if now_s - xid.at_s <= window_s and xid.at_s > done.get(xid.bus_id, -1.0)]
    result: list[Reason] = []
    for gpu in gpus:
        own = [xid for xid in recent if xid.bus_id == normal_bus_id(gpu.bus_id or "")]
        result += _of_gpu(gpu, own, now_s, window_s, log.complete)
    result += _elsewhere(gpus, recent, now_s)
    if vantage == "host":
        result += _gaps(log, now_s, window_s)
    return result


def _unread(log: t.Optional[KernelLog], vantage: str) -> list[Reason]:
    if vantage != "host":  # barred there as a rule; 'not_visible' says so
        return []
    words = "; ".join(f"{one.call}: {one.message}" for one in log.problems) if log else "it was not read"
    text = (
        f"the kernel log can't be read ({words}): whether the driver reported errors (Xid) is not known; what it "
        "says of a GPU's health now counts"
    )
    return [Reason("kernel_log_unknown", text, "kernel log", "warning")]


def _gaps(log: KernelLog, now_s: float, window_s: float) -> list[Reason]:
    words = [problem.message for problem in log.problems]
    if log.since_s > now_s - window_s and log.since_s > 0:
        words.append(f"it reaches back {max(0.0, now_s - log.since_s):.0f} s of the {window_s:g} s asked for")
    if not words:
        return []
    text = f"the kernel log is incomplete ({'; '.join(words)}): reports of the driver (Xid) may be missing"
    return [Reason("kernel_log_incomplete", text, "kernel log", "warning")]


def _of_gpu(gpu: Gpu, xids: t.Sequence[Xid], now_s: float, window_s: float, complete: bool) -> list[Reason]:
    by_code: dict[int, list[Xid]] = {}
    for xid in xids:
        by_code.setdefault(xid.code, []).append(xid)
    taken_back_s = max((xid.at_s for xid in by_code.get(RECOVERY_ACTION, ()) if _TAKEN_BACK in xid.text), default=-1.0)
    others = set(by_code) - NOTHING_TO_DO - {ENDED_BY_FORCE, RECOVERY_ACTION}
    result = []
    for code, same in sorted(by_code.items()):
        if code in NOTHING_TO_DO or (code == ENDED_BY_FORCE and others):  # 45 follows another one: that one counts
            continue
        seen = f"{gpu.label}: {_counted(code, same, now_s, window_s, complete)}"
        result.append(_reason(gpu, code, seen, same[-1].at_s < taken_back_s))
    return result


def _reason(gpu: Gpu, code: int, seen: str, taken_back: bool) -> Reason:
    if code in RESET_GPU | RESTART_HOST and taken_back:
        text = f"{seen}; since then the driver has taken its demand for a recovery back (Xid 154)"
        return Reason("xid_seen", text, gpu.label, "warning")
    if code in RESET_GPU:
        text = (
            f"{seen}; this GPU must be reset: the next step is the opt-in rung gpu_reset, and a reboot of the host "
            "where that fails"
        )
        return Reason("xid_reset", text, gpu.label)
    if code in RESTART_HOST:
        text = f"{seen}; the GPU has fallen off the bus: restart the host, no reset reaches it"
        return Reason("xid_host_restart", text, gpu.label)
    return Reason("xid_seen", f"{seen}; {_advice(code)}", gpu.label, "warning")


def _advice(code: int) -> str:
    if code in RESTART_APPLICATION:
        return "it asks for another start of the program that ran there, no more"
    if code == ENDED_BY_FORCE:
        return "alone it usually means that the program there was ended by force, an eviction for one"
    if code == RECOVERY_ACTION:
        return "the recovery action is judged by what the driver says of it now"
    return f"what Xid {code} asks for is not known here: look it up in NVIDIA's list of Xid errors"


def _counted(code: int, same: t.Sequence[Xid], now_s: float, window_s: float, complete: bool) -> str:
    last = same[-1]
    least = "" if complete else "at least "
    times = "once" if len(same) == 1 else f"{len(same)} times"
    words = last.text if len(last.text) <= _SHOWN else last.text[: _SHOWN - 3] + "..."
    when = f"{least}{times} in the last {window_s:g} s, the last one {_age(last, now_s)} s ago"
    return f"the kernel log has Xid {code} {when}" + (f" ({words})" if words else "")


def _age(xid: Xid, now_s: float) -> str:
    return f"{max(0.0, now_s - xid.at_s):.0f}"


def _elsewhere(gpus: t.Sequence[Gpu], recent: t.Sequence[Xid], now_s: float) -> list[Reason]:
    """Grave reports of GPUs that are not among the chosen: one that fell off the bus may be missing in the choice."""
    chosen = {normal_bus_id(gpu.bus_id or "") for gpu in gpus}
    # A GPU that does not tell its bus id may be the very one.
    severity = "warning" if None in chosen else "advisory"
    last: dict[str, Xid] = {}
    for xid in recent:
        if xid.bus_id not in chosen and xid.code in RESET_GPU | RESTART_HOST:
            last[xid.bus_id] = xid
    return [
        Reason(
            "xid_elsewhere",
            f"the kernel log has Xid {xid.code}, {_age(xid, now_s)} s ago, for the GPU at {bus_id}, which is none of "
            "the chosen GPUs",
            f"GPU at {bus_id}",
            severity,
        )
        for bus_id, xid in sorted(last.items())
    ]
