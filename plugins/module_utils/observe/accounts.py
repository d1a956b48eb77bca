# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Users and groups of the host by name."""

from __future__ import annotations

import grp
import os
import pwd
import typing as t

from ..errors import CleanSlateError
from ..sglang.launch import Account


def find_account(user: t.Optional[str], group: t.Optional[str]) -> Account:
    """The account that a server runs as. Without a user: our own, but never root by default.

    Raises:
        CleanSlateError: no such user or group, or root without having been named.
    """
    if user is None:
        if os.geteuid() == 0:
            raise CleanSlateError("user is missing: name an account for the server (root only if you mean it)")
        user = pwd.getpwuid(os.geteuid()).pw_name
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise CleanSlateError(f"user: {user!r} does not exist on this host; create it first") from None
    gid = entry.pw_gid
    if group is not None:
        try:
            gid = grp.getgrnam(group).gr_gid
        except KeyError:
            raise CleanSlateError(f"group: {group!r} does not exist on this host; create it first") from None
    return Account(user, _group_name(gid), entry.pw_uid, gid, entry.pw_dir, tuple(os.getgrouplist(user, gid)))


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
