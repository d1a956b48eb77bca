# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
import stat
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError, NotPermitted
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import record_files as files
from ansible_collections.cleanslate.sglang.tests.unit.kept_launches import KEY, TOKEN, keep, launch_id, prove

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def launch_folder(state: Path, day: int) -> Path:
    return state / "main" / "launches" / launch_id(day)


def test_documents_are_private_and_hold_no_secret_of_the_launch(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    said = {"verdict": "ready", "log_tail": [f"key {KEY}", f"x={TOKEN}."], "api_key": "sk-other", "args": ["--tp", "1"]}
    path = Path(files.write_document(str(tmp_path), "main", launch_id(1), "proof", said))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    for secret in (KEY, TOKEN, "sk-other"):
        assert secret not in text
    kept = files.read_document(str(tmp_path), "main", launch_id(1), "proof")
    assert kept is not None
    assert (kept["verdict"], kept["args"]) == ("ready", ["--tp", "1"])
    assert files.read_document(str(tmp_path), "main", launch_id(1), "plan") is None


def test_nothing_but_the_private_files_of_a_launch_holds_a_secret(tmp_path: Path) -> None:
    keep(tmp_path, 1, waivers={"x": f"since {KEY}"}, operator=f"alice {TOKEN}")
    prove(tmp_path, launch_id(1), log_tail=[KEY])
    files.write_summary(str(tmp_path), "main", launch_id(1))
    holders = set()
    for path in (tmp_path / "main").rglob("*"):
        if path.is_file() and any(secret in path.read_text() for secret in (KEY, TOKEN)):
            holders.add(path.name)
    assert holders == {"config.yaml", "env"}


def test_a_short_variable_with_a_secret_name_masks_no_numbers(tmp_path: Path) -> None:
    keep(tmp_path, 1, environment={"SOME_KEY": "1"})
    files.write_document(str(tmp_path), "main", launch_id(1), "proof", {"error": "rank 1 of 2 died"})
    assert files.read_document(str(tmp_path), "main", launch_id(1), "proof") == {"error": "rank 1 of 2 died"}


def test_a_document_of_no_launch(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    with pytest.raises(CleanSlateError, match="no launch"):
        files.write_document(str(tmp_path), "main", launch_id(2), "proof", {})
    with pytest.raises(CleanSlateError, match="no document"):
        files.write_document(str(tmp_path), "main", launch_id(1), t.cast(t.Any, "../x"), {})
    for hostile in ("../../etc", "", ".", f"{launch_id(1)}/..", launch_id(1) + "\n"):
        with pytest.raises(CleanSlateError, match="no id of a launch"):
            files.write_document(str(tmp_path), "main", hostile, "proof", {})


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100000, '"x"'])
def test_a_broken_document_is_an_error_and_not_none(tmp_path: Path, text: str) -> None:
    keep(tmp_path, 1)
    (launch_folder(tmp_path, 1) / "proof.json").write_text(text)
    with pytest.raises(CleanSlateError, match=r"proof\.json"):
        files.read_document(str(tmp_path), "main", launch_id(1), "proof")


def test_documents_that_are_links_or_pipes_are_not_opened(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    (launch_folder(tmp_path, 1) / "proof.json").symlink_to("/etc/passwd")
    os.mkfifo(launch_folder(tmp_path, 1) / "plan.json")
    for what in files.DOCUMENTS[:1] + files.DOCUMENTS[-1:]:
        with pytest.raises(NotPermitted):
            files.read_document(str(tmp_path), "main", launch_id(1), what)
    # Writing replaces the link itself.
    prove(tmp_path, launch_id(1))
    assert not (launch_folder(tmp_path, 1) / "proof.json").is_symlink()


@ROOT_ONLY
def test_a_document_in_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    os.chown(launch_folder(tmp_path, 1), 12345, 0)
    with pytest.raises(NotPermitted, match="12345"):
        prove(tmp_path, launch_id(1))


# --- links ------------------------------------------------------------------------------------------------------------


def test_links_are_relative_and_replaced_as_a_whole(tmp_path: Path) -> None:
    for day in (1, 2):
        keep(tmp_path, day)
    assert os.readlink(tmp_path / "main" / "current") == f"launches/{launch_id(2)}"
    assert (tmp_path / "main" / "current" / "record.json").is_file()
    assert files.read_link(str(tmp_path), "main", "current") == launch_id(2)
    assert files.read_link(str(tmp_path), "main", "last_good") is None
    assert [name for name in os.listdir(tmp_path / "main") if name.startswith(".")] == []


@pytest.mark.parametrize(
    "target",
    [
        "/etc",
        "launches",
        "launches/..",
        f"launches/{launch_id(1)}/",
        f"launches/{launch_id(1)}/../../../etc",
        f"../main/launches/{launch_id(1)}",
        f"./launches/{launch_id(1)}",
        f"launches//{launch_id(1)}",
        f"launches/{launch_id(1)}\n",
    ],
)
def test_a_link_to_anywhere_else_is_a_problem(tmp_path: Path, target: str) -> None:
    keep(tmp_path, 1)
    (tmp_path / "main" / "last_good").symlink_to(target)
    with pytest.raises(CleanSlateError, match="last_good points to"):
        files.read_link(str(tmp_path), "main", "last_good")


def test_a_link_to_a_launch_that_is_gone_is_a_problem(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    (tmp_path / "main" / "last_good").symlink_to(f"launches/{launch_id(9)}")
    with pytest.raises(CleanSlateError, match=f"{launch_id(9)}, which is not here"):
        files.read_link(str(tmp_path), "main", "last_good")


def test_a_link_to_a_launch_that_is_a_link_itself_is_a_problem(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    (tmp_path / "main" / "launches" / launch_id(2)).symlink_to("/etc")
    (tmp_path / "main" / "last_good").symlink_to(f"launches/{launch_id(2)}")
    with pytest.raises(CleanSlateError, match="not here"):
        files.read_link(str(tmp_path), "main", "last_good")


@ROOT_ONLY
def test_a_link_that_another_user_made_is_a_problem(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    os.lchown(tmp_path / "main" / "current", 12345, 12345)
    with pytest.raises(CleanSlateError, match="uid 12345"):
        files.read_link(str(tmp_path), "main", "current")


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_something_else_in_a_links_place_is_told_before_a_start(tmp_path: Path, make: t.Callable[[Path], None]) -> None:
    keep(tmp_path, 1)
    files.check_links(str(tmp_path), "main")
    make(tmp_path / "main" / "last_good")
    assert "is no link" in str(files.look_link(str(tmp_path), "main", "last_good").problem)
    with pytest.raises(CleanSlateError, match="move it away"):
        files.check_links(str(tmp_path), "main")


def test_last_good_is_only_what_was_proved(tmp_path: Path) -> None:
    for day in (1, 2, 3):
        keep(tmp_path, day)
    prove(tmp_path, launch_id(1))
    with pytest.raises(CleanSlateError, match="has no proof"):
        files.mark_good(str(tmp_path), "main", launch_id(2))
    prove(tmp_path, launch_id(3), "failed")
    with pytest.raises(CleanSlateError, match="'failed'"):
        files.mark_good(str(tmp_path), "main", launch_id(3))
    assert files.read_link(str(tmp_path), "main", "last_good") == launch_id(1)


# --- for people -------------------------------------------------------------------------------------------------------


def test_a_person_reads_what_was_started_and_why_it_failed(tmp_path: Path) -> None:
    keep(tmp_path, 1, waivers={"hicache_too_large": "tried by hand"}, flags={"model_path": "/m\x1b[31m", "tp_size": 2})
    phases = [{"name": "imports", "seconds": 12.04}, {"name": "weights", "seconds": 72.0, "rate": "1.3 GB/s"}]
    files.write_document(str(tmp_path), "main", launch_id(1), "phases", {"phases": phases})
    files.write_document(str(tmp_path), "main", launch_id(1), "clean", {"verdict": "clean"})
    soak = {"requests": 8, "concurrency": 4, "failed": 0, "tokens_per_s": 55.25, "latency_s": {"p50": 1.5, "max": 2}}
    prove(tmp_path, launch_id(1), "failed", error="a rank died", seconds=90.2, soak=soak, log_tail=["one", "two\r\n"])
    path = Path(files.write_summary(str(tmp_path), "main", launch_id(1)))
    text = path.read_text()
    for words in (
        f"main, launch {launch_id(1)}",
        "by alice (run run-1)",
        "failed after 90.2 s: a rank died",
        "pid 101, user sglang, sglang-main.service",
        "0.0.0.0:8000",
        "GPU-c, GPU-a",
        "tp-size: 2",
        "hicache_too_large: tried by hand",
        "clean state: clean, see clean.json",
        "imports          12.0 s",
        "weights          72.0 s  1.3 GB/s",
        "8 requests, 4 at a time, none failed; 55.2 tokens/s",
        "  two",
    ):
        assert words in text, text
    assert "\x1b" not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_summary_needs_no_documents_and_survives_broken_ones(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    assert "not judged" in Path(files.write_summary(str(tmp_path), "main", launch_id(1))).read_text()
    (launch_folder(tmp_path, 1) / "phases.json").write_text("{")
    (launch_folder(tmp_path, 1) / "proof.json").write_text(
        json.dumps({"verdict": "failed", "soak": [], "proof": 3, "log_tail": 7, "seconds": "x"})
    )
    text = Path(files.write_summary(str(tmp_path), "main", launch_id(1))).read_text()
    assert "phases.json" in text
    assert "failed" in text
