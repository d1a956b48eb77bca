# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module arguments that several modules share, beside plugins/doc_fragments/options.py."""

from __future__ import annotations

import math
import re
import typing as t

from .errors import CleanSlateError

if t.TYPE_CHECKING:
    from .observe.look import LookOptions

DEVICES: dict[str, t.Any] = {
    "devices": {"type": "list", "elements": "str", "default": []},
    "expected_gpus": {"type": "int"},
    "nvml_deadline_s": {"type": "float", "default": 10},
    "device_major": {"type": "int", "default": 195},
    "proc_root": {"type": "path", "default": "/proc"},
}
CONTAINER: dict[str, t.Any] = {
    "container": {"type": "str"},
    "pve_dir": {"type": "path", "default": "/etc/pve"},
}
SERVER: dict[str, t.Any] = {
    "name": {"type": "str"},
    "state_dir": {"type": "path", "default": "/var/lib/cleanslate"},
    "unit": {"type": "str"},
    "port": {"type": "int"},
}


def look_options(
    params: t.Mapping[str, t.Any], protect: t.Sequence[str] = (), baselines: t.Iterable[str] = ()
) -> LookOptions:
    """The options of a look from a module's parameters. ``baselines``: the GPUs that have one.

    Raises:
        CleanSlateError: a number makes no sense.
    """
    if not 0 < params["nvml_deadline_s"] < math.inf:
        given = params["nvml_deadline_s"]
        raise CleanSlateError(f"nvml_deadline_s is {given:g}; it must be above 0 seconds, with an end.")
    expected = params["expected_gpus"]
    if expected is not None and expected < 0:
        raise CleanSlateError(f"expected_gpus is {expected}; it must be 0 (a host without GPUs) or more.")
    if expected == 0 and params["devices"]:
        raise CleanSlateError(
            f"expected_gpus is 0, yet devices names {', '.join(params['devices'])}: a host without GPUs has "
            "none to choose."
        )
    from .observe.look import LookOptions

    return LookOptions(
        devices=tuple(str(name) for name in params["devices"]),
        expected_gpus=expected,
        nvml_deadline_s=params["nvml_deadline_s"],
        device_major=params["device_major"],
        proc=params["proc_root"],
        protect=tuple(protect),
        container=params.get("container") or None,
        baseline_names=tuple(baselines),
        sys=params.get("sys_root", "/sys"),
    )


def baselines_of(raw: t.Optional[t.Mapping[str, t.Any]]) -> dict[str, int]:
    """Baselines in MiB by GPU.

    Raises:
        CleanSlateError: a value is no whole number of MiB.
    """
    result = {}
    for name, value in (raw or {}).items():
        text = str(value)
        if not re.fullmatch("[0-9]{1,9}", text):
            raise CleanSlateError(f"baselines: GPU {name!r} has {text!r}; it must be a whole number of MiB.")
        result[str(name)] = int(text)
    return result


def resets_of(raw: t.Optional[t.Mapping[str, t.Any]]) -> dict[str, float]:
    """When GPUs were reset, in seconds of the kernel log's clock, by bus id.

    Raises:
        CleanSlateError: a value is no number of seconds.
    """
    result = {}
    for name, value in (raw or {}).items():
        text = str(value)
        if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]+)?", text):
            raise CleanSlateError(f"gpu_resets: GPU {name!r} has {text!r}; it must be seconds since boot.")
        result[str(name)] = float(text)
    return result
