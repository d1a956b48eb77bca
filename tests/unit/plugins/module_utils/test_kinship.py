# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.kinship import children_of, descendants
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.targets import Memory, Request, select
from ansible_collections.cleanslate.sglang.tests.unit.builders import LEADER, gpu, leader, process, snapshot
from ansible_collections.cleanslate.sglang.tests.unit.plugins.module_utils.properties.foreign import limited


def test_all_below_and_nobody_else() -> None:
    everybody = {one.pid: one for one in (process(2), process(3, ppid=2), process(4, ppid=3), process(5, ppid=1))}
    assert sorted(descendants(2, everybody)) == [3, 4]
    assert descendants(2, everybody, children_of(everybody)) == descendants(2, everybody)
    assert descendants(4, everybody) == []


def test_a_circle_comes_to_an_end() -> None:
    circle = {one.pid: one for one in (process(2, ppid=4), process(3, ppid=2), process(4, ppid=3))}
    assert sorted(descendants(2, circle)) == [3, 4]


@pytest.mark.parametrize("step", [0, 1])
def test_a_fork_storm_does_not_take_its_square(step: int) -> None:
    """Children of one process, and pairs of them; in the second look each one of them is known already."""
    server = process(10, LEADER)
    storm = [process(10_000 + n, ppid=9_999 + n if step and n % 2 else 10) for n in range(20_000)]
    seen = snapshot(server, *storm, gpus=[gpu(0)], leaders=[leader(server)])
    request = Request(port=30000)
    with limited(15):
        first = select(seen, request)
        again = select(seen, request, Memory().with_selection(first))
    assert len(first.members) == len(again.members) == 20_000
