# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who may start a server again: what can't be seen counts as somebody, and only an init has no such tie."""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.restarters import restarter_of
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.tests.unit.builders import LEADER, init, process

GUEST_INIT = process(4242, "/sbin/init", ppid=4240, exe="/usr/lib/systemd/systemd", nspid=(4242, 1))
DOCKER = "/docker/0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"


def leader(**changes: t.Any) -> Process:
    return process(500, LEADER, **changes)


def of(one: Process, *others: Process) -> str:
    return restarter_of(one, {each.pid: each for each in (one, *others)})


@pytest.mark.parametrize(
    ("one", "others"),
    [
        (leader(), [init()]),
        (leader(cgroups=("/user.slice/user-0.slice/session-3.scope",)), [init()]),
        (leader(cgroups=("/init.scope",)), [init()]),
        (leader(ppid=4242, cgroups=("/lxc/129/ns",)), [GUEST_INIT]),
    ],
)
def test_nobody_has_a_tie_to_what_an_init_has_adopted(one: Process, others: list[Process]) -> None:
    assert of(one, *others) == ""


@pytest.mark.parametrize(
    ("one", "others", "words"),
    [
        (leader(ppid=77), [process(77, ("bash", "-c", "while :; do serve; done"))], "pid 77 (bash -c while"),
        (leader(ppid=77), [], "pid 77, which can't be seen"),
        (leader(ppid=0), [], "pid 0, which can't be seen"),
        (leader(cgroups=("/system.slice/sglang.service",)), [init()], "unit sglang.service"),
        (leader(cgroups=("/user.slice/user-1.slice/user@1.service/app.slice/x.service",)), [init()], "unit x.service"),
        (leader(cgroups=(DOCKER,)), [init()], "container docker:0123"),
        # Process 1 of a container is often its restart loop, or an init that is asked by one.
        (leader(), [process(1, ("bash", "/entry.sh"), ppid=0, exe="/usr/bin/bash")], "pid 1 (bash /entry.sh)"),
        (leader(), [process(1, ("tini", "--"), ppid=0, exe="/usr/bin/tini")], "pid 1 (tini --)"),
        # It calls itself init and is not process 1.
        (leader(ppid=77), [process(77, ("init",), exe="/home/me/init")], "pid 77 (init)"),
        # It calls itself so, and its program is another.
        (leader(), [process(1, ("/sbin/init",), ppid=0, exe="/usr/bin/python3")], "pid 1 (/sbin/init)"),
    ],
)
def test_whoever_may_start_it_again_is_named(one: Process, others: list[Process], words: str) -> None:
    assert words in of(one, *others)
