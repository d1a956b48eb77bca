# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which process gets an API key though no record knows it by pid and start time."""

from __future__ import annotations

import os
import pwd

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.asking import why_no_key
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.results import user_name

NOBODY = pwd.getpwnam("nobody")


def leader(uid: int | None) -> Process:
    argv = ("python3", "-m", "sglang.launch_server")
    return Process(pid=812, start_ticks=1, ppid=1, pgid=812, sid=812, state="S", comm="python3", argv=argv, uid=uid)


@pytest.mark.parametrize(
    ("uid", "users"),
    [
        (NOBODY.pw_uid, ("nobody", None)),
        (NOBODY.pw_uid, ("root", "nobody")),  # of its record
        (NOBODY.pw_uid, (str(NOBODY.pw_uid),)),
        (0, ("nobody",)),
        (os.geteuid(), (None, None)),
    ],
)
def test_the_server_s_account_and_root_have_the_key_anyway(uid: int, users: tuple[str | None, ...]) -> None:
    assert why_no_key(leader(uid), users) is None


@pytest.mark.parametrize(
    ("uid", "users"),
    [
        (NOBODY.pw_uid, ("root", None)),
        (os.geteuid() + 4242, (None, None)),
        (NOBODY.pw_uid, ("no-such-account",)),
        (None, ("nobody",)),
        (None, ("no-such-account",)),
    ],
)
def test_anybody_else_gets_none_and_is_named(uid: int | None, users: tuple[str | None, ...]) -> None:
    why = why_no_key(leader(uid), users)
    assert why is not None and "pid 812" in why and "gets no API key" in why
    assert (users[0] or user_name(os.geteuid()) or "") in why


def test_nobody_who_is_known_gets_none() -> None:
    assert "gets no API key" in str(why_no_key(None, ("nobody",)))
