# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is told by identity keeps it on its way from a process below ours."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil

import pytest

from ansible_collections.cleanslate.sglang.plugins import module_utils
from ansible_collections.cleanslate.sglang.plugins.module_utils.sentinels import Sentinel
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.option_table import NOT_KNOWN
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.sources import UNKNOWN
from ansible_collections.cleanslate.sglang.plugins.module_utils.spawn import fetch_bounded

NAMES = [each.name for each in pkgutil.walk_packages(module_utils.__path__, module_utils.__name__ + ".")]


@pytest.mark.parametrize("value", [NOT_KNOWN, UNKNOWN], ids=repr)
def test_it_is_the_same_after_a_copy_and_from_a_bounded_call(value: object) -> None:
    assert pickle.loads(pickle.dumps(value)) is value
    assert copy.deepcopy({"x": (value,)})["x"][0] is value
    assert fetch_bounded(lambda: value, 30).value is value


@pytest.mark.parametrize("name", NAMES)
def test_no_module_shares_a_bare_object(name: str) -> None:
    """A private one stays within its module; others may be sent, and come back as somebody else."""
    found = vars(importlib.import_module(name)).items()
    assert [key for key, value in found if value.__class__ is object and not key.startswith("_")] == []
    for key, value in found:
        if isinstance(value, Sentinel):
            assert pickle.loads(pickle.dumps(value)) is value, key
