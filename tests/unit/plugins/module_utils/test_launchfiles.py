# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of a launch as they lie there, and the unit that systemd would start."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import launchfiles
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.launchfiles import (
    UnitFiles,
    read_launch_files,
    read_unit_files,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.record import Record, create_launch_dir

RECORD = Record("main", "20260131T235959Z-1a2b", "started", "detached")
UNIT = "sglang-main.service"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(create_launch_dir(str(tmp_path), RECORD.name, RECORD.launch_id))


def test_texts_times_and_what_is_missing(tmp_path: Path, folder: Path) -> None:
    (folder / "config.yaml").write_text("tp-size: 1\n")
    (folder / "env").write_text('A="b c"\n')
    (folder / "unit").write_text("[Service]\n")
    found = read_launch_files(str(tmp_path), RECORD)
    assert (found.config, found.environment, found.unit) == ("tp-size: 1\n", {"A": "b c"}, "[Service]\n")
    assert (sorted(found.times), found.missing, found.problems, found.request) == (["config.yaml", "env"], (), (), None)
    (folder / "env").unlink()
    assert read_launch_files(str(tmp_path), RECORD).missing == ("env",)


def test_a_folder_that_is_gone_misses_all(tmp_path: Path, folder: Path) -> None:
    folder.rmdir()
    assert read_launch_files(str(tmp_path), RECORD).missing == ("config.yaml", "env")


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("env", "A=b\n", "its line 1 is not one that a launch writes"),
        ("request.json", "{", "request.json"),
        ("request.json", "{}", "has the format None"),
    ],
)
def test_what_cannot_be_used_is_said_and_hides_nothing_else(
    tmp_path: Path, folder: Path, file: str, text: str, words: str
) -> None:
    (folder / "config.yaml").write_text("tp-size: 1\n")
    (folder / file).write_text(text)
    found = read_launch_files(str(tmp_path), RECORD)
    assert found.config == "tp-size: 1\n"
    assert any(words in problem for problem in found.problems), found.problems


def test_a_link_in_a_file_s_place_is_not_followed(tmp_path: Path, folder: Path) -> None:
    (folder / "env").symlink_to("/etc/passwd")
    found = read_launch_files(str(tmp_path), RECORD)
    assert found.environment is None and found.problems


# --- the unit ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two folders of a search path, the first of which counts more."""
    found = [tmp_path / "etc", tmp_path / "run"]
    for place in found:
        place.mkdir()
    monkeypatch.setattr(launchfiles, "UNIT_DIRS", tuple(map(str, found)))
    monkeypatch.setattr(launchfiles, "_DROP_IN_DIRS", tuple(map(str, found)))
    return found


def test_without_systemd_the_search_path_counts(folders: list[Path], tmp_path: Path) -> None:
    assert read_unit_files(UNIT, None) == UnitFiles()
    own = tmp_path / "own"
    own.mkdir()
    for number, place in enumerate((own, folders[1], folders[0])):
        (place / UNIT).write_text(str(number))
        assert read_unit_files(UNIT, str(own)) == UnitFiles(str(place / UNIT), str(number))


def test_drop_ins_of_the_unit_and_of_its_family_but_not_of_every_service(folders: list[Path]) -> None:
    (folders[0] / UNIT).write_text("x")
    for name in (f"{UNIT}.d", "sglang-.service.d", "service.d", "other.service.d"):
        (folders[1] / name).mkdir()
        (folders[1] / name / "a.conf").write_text("")
        (folders[1] / name / "note.txt").write_text("")
    wanted = tuple(str(folders[1] / name / "a.conf") for name in (f"{UNIT}.d", "sglang-.service.d"))
    assert read_unit_files(UNIT, None).drop_ins == wanted


def test_what_systemd_says_counts_more(folders: list[Path]) -> None:
    path = folders[1] / UNIT
    path.write_text("x")
    (folders[1] / "service.d").mkdir()
    (folders[1] / "service.d" / "lxc.conf").write_text("")
    shown = {
        "FragmentPath": str(path),
        "DropInPaths": f"{folders[1]}/service.d/lxc.conf {folders[1]}/gone.conf",
        "UnitFileState": "enabled",
    }
    assert read_unit_files(UNIT, None, shown) == UnitFiles(str(path), "x", (), True)
    assert read_unit_files(UNIT, None, {**shown, "UnitFileState": "static"}).enabled is False
    assert read_unit_files(UNIT, None, {**shown, "UnitFileState": "bad"}).enabled is None
    # It has loaded a file that was removed since.
    path.unlink()
    assert read_unit_files(UNIT, None, shown).text is None


def test_a_masked_unit_is_a_link(folders: list[Path]) -> None:
    (folders[0] / UNIT).symlink_to("/dev/null")
    assert read_unit_files(UNIT, None) == UnitFiles(str(folders[0] / UNIT), "a link to /dev/null")
