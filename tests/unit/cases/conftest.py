# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.unit.cases.recorded import Recorded


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """A host of files with simulated GPUs."""
    return Recorded(tmp_path)
