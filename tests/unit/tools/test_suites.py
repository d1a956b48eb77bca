# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Suites: where the lab can't be, its step says so instead of passing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.tools import suites


@pytest.fixture(name="venv", autouse=True)
def _venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".complete").touch()
    monkeypatch.setattr(suites, "newest", lambda: suites.Venv("2.21", tmp_path))


def test_make_lab_says_why_it_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "why_not", lambda: "lab containers need root")
    (step,) = suites.lab()
    assert step.skip == "lab containers need root"


def test_make_lab_runs_the_lab_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "why_not", lambda: None)
    (step,) = suites.lab()
    assert step.skip is None and step.argv[-1] == "tests/lab" and "-m" not in step.argv
