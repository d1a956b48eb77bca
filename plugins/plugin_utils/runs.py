# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One run's lease and clients: pure functions over registered results."""

from __future__ import annotations

import typing as t

from .going_back import lease_lost
from .results import Result, failure, mapping, ran


def lease_problem(result: t.Any, run_id: str, renewal: bool = False) -> str:
    """Why a run has no lease, in one sentence; empty where it has.

    ``renewal``: it had one before. Then one that had to be taken anew is lost, since another run may have worked in
    between. A host that gives no answer is no reason, since nobody can take it there either.
    """
    told = ran(result) and "lease" in result
    lease = mapping(result, "lease") if told else {}
    if lease.get("run_id") == run_id and not (renewal and result.get("changed")):
        return ""
    if renewal and not told and not lease_lost(result):
        return ""
    if lease:
        return f"the lease on '{lease.get('name')}' is no longer ours: it was another run's, or taken away, in between"
    return failure(result)


def reachable_clients(clients: t.Any, host: str, inside: bool) -> list[Result]:
    """The clients that can be asked: those of a host that can't be reached are out of reach as well."""
    return [each for each in clients or [] if inside or each.get("host") not in (None, "", host)]
