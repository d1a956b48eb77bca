# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a server that was found on a host is asked, and whether it is told the API key for that.

A command line is written by whoever runs the process: it proves neither whose a server is nor where it listens.
"""

from __future__ import annotations

import os
import typing as t

from .model import Process
from .results import user_id, user_name
from .sglang import http

_BY_LOOPBACK = ("0.0.0.0", "::", "::1")


def why_no_key(leader: t.Optional[Process], users: t.Iterable[t.Optional[str]]) -> t.Optional[str]:
    """Why this process, which is not the very one of a record, gets no key; None: it may have it. Whoever runs as the
    server's account has it already, since its launch's files are readable for that, and root as well. A command line
    proves nothing, nor does a unit's name."""
    if leader is None:
        return "which process it is is not known, so it gets no API key"
    names = sorted({str(user) for user in users if user}) or [user_name(os.geteuid()) or ""]
    uid = leader.uid
    if uid is not None and uid in (0, *(user_id(name) for name in names)):
        return None
    return (
        f"pid {leader.pid} runs as {user_name(uid) or 'somebody'} and is not the process that was launched, so it gets "
        f"no API key; the server's account is {' or '.join(names)}"
    )


def endpoint_of(port: int, addresses: t.Collection[str]) -> http.Endpoint:
    """Where to ask a server that listens at these: by loopback if that leads to it."""
    loopback = [one for one in addresses if one in _BY_LOOPBACK or one.startswith("127.")]
    return http.Endpoint(min(loopback or addresses), port)
