# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real SGLang takes its time to start: fixtures, and the skip where there is none."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.scripts.bootstrap import cache_dir
from ansible_collections.cleanslate.sglang.tests.engine.real import SHM_MIB, RealServer, why_no_engine
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace, why_not


@pytest.fixture
def engine_ns(tmp_path: Path) -> t.Iterator[Namespace]:
    """A namespace in which the engine shows through."""
    reason = why_not() or why_no_engine()
    if reason is not None:
        pytest.skip(reason)
    with Namespace(tmp_path, shm_mib=SHM_MIB, keep=[cache_dir()]) as namespace:
        yield namespace


@pytest.fixture
def server(engine_ns: Namespace, tmp_path: Path) -> RealServer:
    return RealServer(engine_ns, tmp_path)
