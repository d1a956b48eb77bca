# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Markers and fixtures that all suites share."""

from __future__ import annotations

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.fixtures import ns, register_markers, skip_without_namespaces

__all__ = ["ns"]


def pytest_configure(config: pytest.Config) -> None:
    register_markers(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without_namespaces(items)
