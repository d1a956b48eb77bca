# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pytest side of the harness: markers and fixtures. tests/conftest.py takes them in for every suite."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace, why_not

MARKERS = (
    "promise: one scenario of each promise; part of `make test`",
    "ns: needs root and Linux namespaces",
    "lab: needs root and LXC containers",
    "engine: needs the real SGLang of `make engine`",
    "slow: runs longer than 30 s",
    "long: runs for minutes",
)


def register_markers(config: pytest.Config) -> None:
    """For pytest_configure: the markers, so that --strict-markers knows them wherever pytest is started."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def skip_without_namespaces(items: t.Iterable[pytest.Item]) -> None:
    """For pytest_collection_modifyitems: skip tests marked ``ns`` or ``lab``, with the reason, where they can't run."""
    reason = why_not()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("ns") or item.get_closest_marker("lab"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def ns(tmp_path: Path) -> t.Iterator[Namespace]:
    """A fresh namespace for this test; at its end everything inside is gone, or the test fails."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Namespace(tmp_path) as namespace:
        yield namespace
