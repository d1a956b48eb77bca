# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over one run: who runs it, its lease, and what follows after a failure."""

from __future__ import annotations

import getpass
import os
import socket
import typing as t
import uuid

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import going_back, runs


def run_identity(operator: t.Any = "") -> dict[str, str]:
    """A new name for this run, and who runs it from where. Behind sudo the person counts, not root."""
    return {
        "run_id": str(uuid.uuid4()),
        "operator": str(operator or os.environ.get("SUDO_USER") or _user()),
        "controller": socket.gethostname() or "unknown",
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "after_failure": going_back.after_failure,
            "choose_launch": going_back.choose_launch,
            "clients_go_on": going_back.clients_go_on,
            "launch_documents": going_back.documents,
            "launches_of": going_back.launches_of,
            "lease_lost": going_back.lease_lost,
            "lease_problem": runs.lease_problem,
            "outcome": going_back.outcome,
            "reachable_clients": runs.reachable_clients,
            "run_identity": run_identity,
            "way_back": going_back.way_back,
        }
