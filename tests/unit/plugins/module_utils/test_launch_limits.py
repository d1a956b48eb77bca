# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A server that would die of its limits is refused before anybody is asked to go."""

from __future__ import annotations

import resource

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.act import launch as act
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError


def settable(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    monkeypatch.setattr(act, "_settable", lambda which, value: (files, files))


@pytest.mark.parametrize("files", [0, 64, 1023])
def test_too_few_open_files_are_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    settable(monkeypatch, files)
    with pytest.raises(CleanSlateError) as refused:
        act._check_open_files()
    for words in (f"no more than {files} files", "RLIMIT_NOFILE", "1024 at least", "limits.conf"):
        assert words in str(refused.value)


@pytest.mark.parametrize("files", [1024, 1048576, resource.RLIM_INFINITY])
def test_what_a_login_has_by_default_is_enough(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    settable(monkeypatch, files)
    act._check_open_files()
