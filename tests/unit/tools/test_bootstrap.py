# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bootstrap: interpreters that only look alive, builds that broke, commands without an end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.scripts import bootstrap

THIS = "{}.{}".format(*sys.version_info[:2])


@pytest.fixture(name="cache")
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLEANSLATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_dead_shim_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "shims" / f"python{THIS}", "echo command not found >&2; exit 127")
    program(tmp_path / "bin" / f"python{THIS}", f'exec "{sys.executable}" "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}/shims:{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "nothing"))
    found = bootstrap.find_interpreter([THIS])
    assert found is not None
    assert found.version == sys.version_info[:3]


def test_another_version_behind_the_name_is_no_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin" / "python3.99", f'exec "{sys.executable}" "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "nothing"))
    assert bootstrap.find_interpreter(["3.99"]) is None


def test_a_build_is_stamped_linked_and_not_repeated(cache: Path) -> None:
    with bootstrap.built_once("thing", "k1") as target:
        assert target is not None
        target.mkdir()
        (target / "file").write_text("made")
    assert (cache / "thing" / "file").read_text() == "made"
    with bootstrap.built_once("thing", "k1") as target:
        assert target is None


def test_a_broken_build_leaves_no_link_and_starts_again(cache: Path) -> None:
    with pytest.raises(bootstrap.BootstrapError), bootstrap.built_once("thing", "k1") as target:
        assert target is not None
        target.mkdir()
        (target / "half").write_text("half")
        raise bootstrap.BootstrapError("broken")
    assert not (cache / "thing").exists()
    with bootstrap.built_once("thing", "k1") as target:
        assert target is not None
        assert not target.exists()
        target.mkdir()


def test_a_new_key_moves_the_link(cache: Path) -> None:
    for key in ("k1", "k2"):
        with bootstrap.built_once("thing", key) as target:
            assert target is not None
            target.mkdir()
    assert (cache / "thing").resolve().name == "thing-k2"
    assert (cache / "thing-k1").is_dir()


def test_a_command_without_an_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(bootstrap.BootstrapError, match="no end after"):
        bootstrap.run_logged(["sleep", "600"], label="slow", log=tmp_path / "log", grows=tmp_path, deadline_s=0.0)


def test_a_failing_command_shows_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(bootstrap.BootstrapError, match="no space left"):
        bootstrap.run_logged(
            ["sh", "-c", "echo no space left; exit 3"],
            label="pip",
            log=tmp_path / "log",
            grows=tmp_path,
            deadline_s=20.0,
        )


def test_sizes_are_counted_below_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x" * 500_000)
    (tmp_path / "loop").symlink_to(tmp_path)
    assert 0.5 <= bootstrap.tree_mb(tmp_path) < 0.51
