# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""systemd, asked with a deadline."""

from __future__ import annotations

import os
import re
import typing as t

from ..snapshot import Unit
from ..spawn import run_bounded


def has_systemd(run: str = "/run") -> bool:
    """Whether systemd is this machine's (or container's) init: sd_booted(3)."""
    return os.path.isdir(f"{run}/systemd/system")


def read_unit(name: str, deadline_s: float = 10.0, systemctl: str = "systemctl") -> t.Optional[Unit]:
    """A unit's state; None where systemd can't be asked. An absent unit has load_state ``not-found``."""
    fields = "Id,MainPID,Restart,ActiveState,LoadState,ControlGroup"
    done = run_bounded([systemctl, "show", f"--property={fields}", "--", name], deadline_s)
    if not done.ok:
        return None
    return parse_unit(done.stdout)


def parse_unit(text: str) -> t.Optional[Unit]:
    """The ``key=value`` lines of ``systemctl show``."""
    values = dict(line.split("=", 1) for line in text.split("\n") if "=" in line)
    main_pid = values.get("MainPID", "0")
    if "LoadState" not in values or not re.fullmatch("[0-9]{1,9}", main_pid):
        return None
    return Unit(
        values.get("Id", ""),
        int(main_pid),
        values.get("Restart", ""),
        values.get("ActiveState", ""),
        values["LoadState"],
        values.get("ControlGroup", ""),
    )
