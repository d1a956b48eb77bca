# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/scale.md names what there is, and the definition of the execution environment holds no version of its own."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S)


def load(name: str) -> t.Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", range(len(blocks("yaml"))))
def test_every_play_of_the_page_is_one(number: int, tmp_path: Path) -> None:
    play = tmp_path / "play.yml"
    play.write_text(blocks("yaml")[number])
    argv = [str(Path(sys.executable).parent / "ansible-playbook"), "--syntax-check", "-i", "sglang,", str(play)]
    done = subprocess.run(argv, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_page_has_plays_and_settings() -> None:
    assert len(blocks("yaml")) >= 2
    settings = configparser.ConfigParser()
    settings.read_string(blocks("ini")[0])
    assert settings["defaults"].getint("forks") and settings["ssh_connection"].getboolean("pipelining")
    for program in blocks("python"):
        compile(program, "page", "exec")


def test_every_playbook_and_variable_of_the_page_is_there() -> None:
    names = set(re.findall(r"`([a-z_]+)\.yml`", PAGE))
    assert {"rollout", "relaunch", "drift"} <= names
    for name in names - {"collections"}:
        assert (ROOT / "playbooks" / f"{name}.yml").is_file(), name
    known = "".join(path.read_text() for path in (ROOT / "playbooks").rglob("*.yml"))
    known += "".join(path.read_text() for path in (ROOT / "plugins" / "plugin_utils").glob("*.py"))
    for variable in set(re.findall(r"`((?:rollout|relaunch|router|on)_[a-z_]+)`", PAGE)):
        assert variable in known, variable
    for name in re.findall(r"`([a-z0-9.-]+\.(?:txt|yml))`", PAGE):
        assert list(ROOT.glob(f"requirements/{name}")) or list(ROOT.glob(f"playbooks/{name}")), name


def test_versions_stand_in_the_lists_alone() -> None:
    for name in ("ee/execution-environment.yml", "meta/execution-environment.yml"):
        assert not re.search(r"[<>=]=?\s*\d", yaml.safe_dump(load(name))), name
    told = load("meta/execution-environment.yml")["dependencies"]
    assert told == {"python": "requirements/controller.txt", "system": "requirements/bindep.txt"}
    assert all((ROOT / name).is_file() for name in told.values())
    definition = load("ee/execution-environment.yml")
    sources = [*(each["src"] for each in definition["additional_build_files"]), definition["dependencies"]["galaxy"]]
    for source in sources:
        path = (ROOT / "ee" / source).resolve()
        assert path.is_file() or path.is_relative_to(ROOT / "build"), source


def test_what_is_developed_with_names_no_range_again() -> None:
    def names(file: str) -> set[str]:
        lines = (ROOT / "requirements" / file).read_text().splitlines()
        return {re.split(r"[<>=\s]", line)[0].lower() for line in lines if line and line[0] not in "#-"}

    product = names("controller.txt") | names("drift.txt")
    assert {"ansible-runner", "paramiko", "jinja2"} <= product
    assert not product & names("dev.txt")
