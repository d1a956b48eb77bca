# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a launch has other secrets than the one before, by the private files of both. No value leaves this file."""

from __future__ import annotations

import os
import typing as t

from .configfile import read_config
from .files import open_regular
from .launch import LaunchPlan
from .record import Record, launch_dir
from .redact import is_secret_flag

_LIMIT_BYTES = 1024 * 1024


def secrets_differ(before: t.Optional[Record], plan: LaunchPlan, state_dir: str) -> t.Optional[bool]:
    """Compare the keys in config.yaml and the whole env file. None: there was no launch, or its files don't tell."""
    if before is None:
        return None
    folder = launch_dir(state_dir, before.name, before.launch_id)
    config, environment = _text(folder, "config.yaml"), _text(folder, "env")
    if config is None or environment is None:
        return None
    old, new = _secrets(config), _secrets(plan.files["config.yaml"])
    if old is None or new is None:
        return None
    return old != new or environment != plan.files["env"]


def _secrets(config: str) -> t.Optional[dict[str, str]]:
    flags = read_config(config)
    if flags is None:
        return None
    return {name: str(value) for name, value in flags.items() if is_secret_flag(name)}


def _text(folder: str, name: str) -> t.Optional[str]:
    try:
        fd = open_regular(os.path.join(folder, name))
    except OSError:
        return None
    with os.fdopen(fd, "rb") as stream:
        data = stream.read(_LIMIT_BYTES + 1)
    return None if len(data) > _LIMIT_BYTES else data.decode("utf-8", errors="replace")
