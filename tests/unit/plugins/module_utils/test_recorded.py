# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the launch record says of a leader that was dead before anybody came."""

from __future__ import annotations

import dataclasses

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Process
from ansible_collections.cleanslate.sglang.plugins.module_utils.recorded import recorded_death
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.record import Record
from ansible_collections.cleanslate.sglang.tests.unit.builders import process

CONFIG = "/var/lib/cleanslate/main/launches/x/config.yaml"
RECORD = dataclasses.replace(
    Record("main", "20260131T235959Z-1a2b", "started", "detached", boot_id="b", user="root", config=CONFIG),
    pid=60,
    start_ticks=7,
)
LEADER = ("python3", "-m", "sglang.launch_server", "--config", CONFIG)


def death(record: Record | None, *seen: Process) -> tuple[int, float] | None:
    return recorded_death(record, {one.pid: one for one in seen}, "b", 12.5)


def test_it_is_dead_and_the_look_says_when() -> None:
    assert death(RECORD) == (0, 12.5)
    assert death(RECORD, process(60, LEADER[:3], start_ticks=8)) == (0, 12.5)  # its number is another's now
    assert death(dataclasses.replace(RECORD, boot_id="earlier")) == (0, 12.5)


@pytest.mark.parametrize("pid", [60, 61])
def test_one_that_lives_is_not_dead(pid: int) -> None:
    """By its number, and by its configuration where systemd gave it another one."""
    assert death(RECORD, process(pid, LEADER, start_ticks=7)) is None


def test_without_a_record_or_its_user_nothing_is_known() -> None:
    assert death(None) is None
    assert death(dataclasses.replace(RECORD, user=None)) is None
    assert death(dataclasses.replace(RECORD, user="nobody-of-that-name")) is None
