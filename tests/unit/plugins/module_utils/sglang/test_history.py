# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import history
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import record as records
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import record_files as files
from ansible_collections.cleanslate.sglang.tests.unit.kept_launches import keep, launch_id, prove


def choose(state: Path, wanted: str) -> str:
    return history.choose_launch(str(state), "main", wanted)


def test_no_launches_are_an_empty_history(tmp_path: Path) -> None:
    assert history.list_launches(str(tmp_path), "main") == []
    assert history.list_launches(str(tmp_path / "nowhere"), "main") == []


def test_the_newest_comes_first_with_what_became_of_it(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    prove(tmp_path, launch_id(1), seconds=84.5, soak={"tokens_per_s": 123.4})
    keep(tmp_path, 2)
    prove(tmp_path, launch_id(2), "hung", error="no progress", seconds=200)
    keep(tmp_path, 3)
    third, second, first = history.list_launches(str(tmp_path), "main")
    assert (third.launch_id, third.verdict, third.current, third.startable) == (launch_id(3), None, True, True)
    assert (second.verdict, second.error, second.seconds_to_ready) == ("hung", "no progress", None)
    assert (first.verdict, first.last_good, first.current) == ("ready", True, False)
    assert (first.seconds_to_ready, first.tokens_per_s) == (84.5, 123.4)
    assert (second.soak, third.soak) == (None, None)
    assert (first.operator, first.run_id, first.user) == ("alice", "run-1", "sglang")


def test_broken_entries_are_listed_and_hide_nobody(tmp_path: Path) -> None:
    for day in range(1, 6):
        keep(tmp_path, day)
    folder = tmp_path / "main" / "launches"
    (folder / launch_id(1) / "record.json").unlink()
    (folder / launch_id(2) / "record.json").write_text("{")
    (folder / launch_id(3) / "proof.json").write_text("[]")
    os.mkfifo(folder / launch_id(6))
    (folder / launch_id(7)).symlink_to("/etc")
    (folder / "something").mkdir()
    rows = {row.launch_id: row for row in history.list_launches(str(tmp_path), "main")}
    assert sorted(rows) == [launch_id(day) for day in range(1, 8)]
    assert sorted(row.launch_id for row in rows.values() if row.problem is None) == [launch_id(4), launch_id(5)]
    assert "interrupted" in str(rows[launch_id(1)].problem)
    assert rows[launch_id(3)].user == "sglang"


def test_the_current_one_is_by_the_record_and_not_by_an_old_link(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    keep(tmp_path, 2)
    files.set_link(str(tmp_path), "main", "current", launch_id(1))  # a run was killed between record and link
    assert [row.launch_id for row in history.list_launches(str(tmp_path), "main") if row.current] == [launch_id(2)]
    (tmp_path / "main" / records.CURRENT).unlink()
    assert [row.launch_id for row in history.list_launches(str(tmp_path), "main") if row.current] == [launch_id(1)]


def test_values_of_the_wrong_kind_in_a_proof_are_not_shown(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    prove(tmp_path, launch_id(1), seconds="soon", error=["x"], soak={"tokens_per_s": True, "latency_s": "x"})
    [row] = history.list_launches(str(tmp_path), "main")
    assert (row.verdict, row.seconds_to_ready, row.error, row.tokens_per_s) == ("ready", None, None, None)


def test_which_launch_is_meant(tmp_path: Path) -> None:
    for day in (1, 2, 3, 4):
        keep(tmp_path, day)
    for day in (1, 2, 4):
        prove(tmp_path, launch_id(day))
    prove(tmp_path, launch_id(3), "failed")
    assert choose(tmp_path, "last_good") == launch_id(4)
    assert choose(tmp_path, "previous") == launch_id(2)
    assert choose(tmp_path, launch_id(3)) == launch_id(3)
    (tmp_path / "main" / "launches" / launch_id(2) / "request.json").unlink()
    assert choose(tmp_path, "previous") == launch_id(1)


@pytest.mark.parametrize("wanted", ["yesterday", "", "../x", launch_id(9), f"{launch_id(1)}\n"])
def test_a_launch_that_is_not_kept_is_an_error_with_those_that_are(tmp_path: Path, wanted: str) -> None:
    keep(tmp_path, 1)
    prove(tmp_path, launch_id(1))
    keep(tmp_path, 2)
    with pytest.raises(CleanSlateError) as caught:
        choose(tmp_path, wanted)
    assert f"kept are {launch_id(2)} (never judged, current), {launch_id(1)} (ready, last_good)" in str(caught.value)


def test_nothing_to_go_back_to(tmp_path: Path) -> None:
    with pytest.raises(CleanSlateError, match="no launch is kept"):
        choose(tmp_path, "last_good")
    keep(tmp_path, 1)
    with pytest.raises(CleanSlateError, match="was proved yet"):
        choose(tmp_path, "last_good")
    prove(tmp_path, launch_id(1))
    with pytest.raises(CleanSlateError, match="but the current one"):
        choose(tmp_path, "previous")


def test_a_last_good_that_was_removed_by_hand_is_told(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    prove(tmp_path, launch_id(1))
    keep(tmp_path, 2)
    (tmp_path / "main" / "launches" / launch_id(1)).rename(tmp_path / "away")
    with pytest.raises(CleanSlateError, match=f"{launch_id(1)}, which is not here; kept are {launch_id(2)}"):
        choose(tmp_path, "last_good")


def test_the_baseline_is_the_newest_soak_of_the_same_configuration(tmp_path: Path) -> None:
    for day, flags in ((1, {"model_path": "/m"}), (2, {"model_path": "/m"}), (3, {"model_path": "/other"})):
        keep(tmp_path, day, flags=flags)
        prove(tmp_path, launch_id(day), soak={"tokens_per_s": float(day)})
    keep(tmp_path, 4, flags={"model_path": "/m"})
    prove(tmp_path, launch_id(4), "failed", soak={"tokens_per_s": 4.0})
    config_hash = str(history.list_launches(str(tmp_path), "main")[0].config_hash)
    assert history.baseline_of(str(tmp_path), "main", config_hash) == {"tokens_per_s": 2.0, "launch_id": launch_id(2)}
    assert history.baseline_of(str(tmp_path), "main", "sha256:0") is None


def test_the_figures_of_a_soak_are_kept_for_a_later_one(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    latency = {"p50": 0.5, "p95": 1.0, "max": 2.0}
    whole = {"requests": 8, "failed": 0, "concurrency": 4, "tokens": 256, "tokens_per_s": 99.5, "latency_s": latency}
    prove(tmp_path, launch_id(1), soak=whole)
    figures = {"requests": 8.0, "concurrency": 4.0, "tokens": 256.0, "tokens_per_s": 99.5, "latency_p50_s": 0.5}
    assert history.list_launches(str(tmp_path), "main")[0].soak == figures
    prove(tmp_path, launch_id(1), soak={"tokens_per_s": "fast", "latency_s": None})
    assert history.list_launches(str(tmp_path), "main")[0].soak == dict.fromkeys(figures)
