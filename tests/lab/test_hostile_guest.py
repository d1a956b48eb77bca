# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Root of a container that means harm, and its node: nobody else is signalled, nothing else is opened or removed, no
text of the node shows in a result, everything ends, and no GPU that it still holds is called free.
"""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.lab.hostile import assault, field_of
from ansible_collections.cleanslate.sglang.tests.lab.node import Node
from ansible_collections.cleanslate.sglang.tests.lab.scenarios import DEADLINES

pytestmark = [pytest.mark.lab, pytest.mark.long(80), pytest.mark.timeout(600)]

ALL_BUT_MOUNTS = ("names", "records", "links", "cgroups", "namespaces", "handles", "devices", "cmdlines", "storm")
ONE_BY_ONE = ("names", "links", "records", "cgroups", "namespaces", "handles", "devices", "cmdlines")


@pytest.mark.parametrize("attack", ONE_BY_ONE)
def test_one_by_one(node: Node, tmp_path: Path, request: pytest.FixtureRequest, attack: str) -> None:
    with field_of(node) as field:
        field.attack(attack)
        done = assault(field, tmp_path, request, attack)
        assert done[1].result["ended"] or attack == "cmdlines", done[1].result


def test_all_at_once(node: Node, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """With a neighbour on the same GPU, so whatever is left of the others, the GPU is not free."""
    with field_of(node, neighbour=True) as field:
        field.attack(*ALL_BUT_MOUNTS, more=["--many", "200"])
        done = assault(field, tmp_path, request, "all at once", exact=False)
        assert done[2].result["verdict"] in ("dirty", "unknown")


@pytest.mark.parametrize("attacks", [("mounts",), ("fuse", "mounts")], ids=["mounts", "hanging mounts"])
def test_its_mounts(node: Node, tmp_path: Path, request: pytest.FixtureRequest, attacks: tuple[str, ...]) -> None:
    """Its root over /dev/shm and files over /proc; with file systems that hang in its shared memory and in the server's
    folder.
    """
    with field_of(node) as field:
        field.attack(*attacks)
        assault(field, tmp_path, request, " and ".join(attacks), trace="fuse" not in attacks)


@pytest.mark.parametrize("escape", [False, True], ids=["in its own cgroup", "in another one"])
def test_a_fork_storm(node: Node, tmp_path: Path, request: pytest.FixtureRequest, escape: bool) -> None:
    """Seen from the node: signals one by one are too slow for it, and no look meets the same process twice. It may come
    to an end, or get away; then nobody says that it did.
    """
    with field_of(node) as field:
        field.attack("storm", more=["--escape"] if escape else [])
        order: dict[str, t.Any] = {"rungs": ["term", "kill", "holders"], "deadlines": {**DEADLINES, "term": 3}}
        done = assault(field, tmp_path, request, f"storm, escape {escape}", exact=False, **order)
        assert field.still_held() or done[1].result["verdict"] == "evicted", done[1].result
