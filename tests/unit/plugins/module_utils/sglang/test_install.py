# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.install import (
    Install,
    find_install,
    version_tuple,
)


def put(site: Path, version: str | None = "0.5.15", package: bool = True) -> None:
    site.mkdir(parents=True)
    if version:
        (site / f"sglang-{version}.dist-info").mkdir()
    if package:
        (site / "sglang" / "srt").mkdir(parents=True)


def interpreter(prefix: Path) -> str:
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python3").touch()
    return str(prefix / "bin" / "python3")


def test_a_virtual_environment_is_not_followed_to_its_base(tmp_path: Path) -> None:
    base = interpreter(tmp_path / "base")
    put(tmp_path / "base" / "lib" / "python3.11" / "site-packages", "0.4.0")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "venv" / "bin" / "python").symlink_to(base)
    python = str(tmp_path / "venv" / "bin" / "python")
    assert find_install(python) is None
    site = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    put(site)
    assert find_install(python) == Install(f"{site}/sglang", "0.5.15")


def test_a_link_to_an_interpreter_elsewhere_is_followed(tmp_path: Path) -> None:
    site = tmp_path / "opt" / "lib" / "python3.12" / "site-packages"
    put(site)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(interpreter(tmp_path / "opt"))
    assert find_install(str(tmp_path / "bin" / "python3")) == Install(f"{site}/sglang", "0.5.15")


def test_pythonpath_goes_first_and_a_root_is_put_before(tmp_path: Path) -> None:
    interpreter(tmp_path / "root" / "v")
    put(tmp_path / "root" / "v" / "lib" / "python3.11" / "site-packages", "0.5.1")
    put(tmp_path / "root" / "src", None)
    root = str(tmp_path / "root")
    assert find_install("/v/bin/python3", "relative:/src", root) == Install("/src/sglang", None)
    assert find_install("/v/bin/python3", "", root) == Install("/v/lib/python3.11/site-packages/sglang", "0.5.1")


def test_an_editable_install_has_a_version_and_no_package(tmp_path: Path) -> None:
    python = interpreter(tmp_path / "v")
    put(tmp_path / "v" / "lib" / "python3.11" / "site-packages", package=False)
    assert find_install(python) == Install(None, "0.5.15")


@pytest.mark.parametrize(
    ("text", "numbers"), [("0.5.12.post1", (0, 5, 12)), ("1.0rc2", (1, 0)), ("main", None), ("", None), (None, None)]
)
def test_version_numbers(text: str | None, numbers: tuple[int, ...] | None) -> None:
    assert version_tuple(text) == numbers
