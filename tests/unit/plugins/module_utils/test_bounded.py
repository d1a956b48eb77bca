# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Readings of processes, installations and logs that hang: each ends at its deadline."""

from __future__ import annotations

import dataclasses
import os
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import bounded, launchlog
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_process
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.record import Record


def hang(*_words: t.Any) -> t.NoReturn:
    time.sleep(600)
    raise AssertionError("nobody waited")


def own_process() -> t.Any:
    process = read_process(os.getpid())
    assert process is not None
    return process


def test_processes_come_back_as_they_are() -> None:
    """All but the state: who waits for the answer sleeps."""
    for found in (bounded.fetch_processes()[os.getpid()], bounded.fetch_process(os.getpid())):
        assert found is not None
        assert dataclasses.replace(found, state="R") == dataclasses.replace(own_process(), state="R")


def test_a_locked_process_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "read_processes", hang)
    with pytest.raises(CleanSlateError, match="command lines: not read within 0.2 s"):
        bounded.fetch_processes(deadline_s=0.2)


def test_an_installation_on_a_dead_file_server_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "find_install", hang)
    with pytest.raises(CleanSlateError, match="the SGLang of /nfs/venv/bin/python: not read within 0.2 s"):
        bounded.fetch_install("/nfs/venv/bin/python", deadline_s=0.2)


def test_an_installation_and_its_options_are_found(tmp_path: Path) -> None:
    srt = tmp_path / "lib/python3.11/site-packages/sglang/srt"
    srt.mkdir(parents=True)
    (srt / "server_args.py").write_text('parser.add_argument("--tp-size", type=int)\n')
    install, options = bounded.fetch_install(str(tmp_path / "bin/python"))
    assert install is not None and options is not None
    assert options.names == {"tp-size"}


def test_a_launch_that_cannot_be_read_is_unknown_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "read_launched", hang)
    launched, why = bounded.fetch_launched(own_process(), deadline_s=0.2)
    assert set(launched) == {None}
    assert why is not None and f"pid {os.getpid()}" in why


def test_an_error_in_the_reading_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_proc: str) -> t.NoReturn:
        raise PermissionError("closed")

    monkeypatch.setattr(bounded, "read_processes", fail)
    with pytest.raises(CleanSlateError, match="PermissionError: closed"):
        bounded.fetch_processes()


def test_a_log_on_a_dead_file_server_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = Record("main", "20260131T235959Z-1a2b", "started", "detached", log=str(tmp_path / "log"))
    (tmp_path / "log").write_text("a line\n")
    assert launchlog.read_launch_log(record) == "a line\n"
    monkeypatch.setattr(launchlog, "read_ends", hang)
    monkeypatch.setattr(launchlog, "LOG_DEADLINE_S", 0.2)
    assert launchlog.read_launch_log(record) is None
