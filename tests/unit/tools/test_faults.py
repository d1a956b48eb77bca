# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fault matrix: its judge by made-up facts, its rows and patches against this tree, and the list in the docs."""

from __future__ import annotations

import dataclasses
import re
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.faults import matrix
from ansible_collections.cleanslate.sglang.tests.faults.model import (
    ENTRIES,
    RESULTS,
    Answer,
    Facts,
    Outcome,
    Row,
    counts,
    judge,
    judge_proof,
)
from ansible_collections.cleanslate.sglang.tests.faults.patches import DoesNotApply, Patch, patched
from ansible_collections.cleanslate.sglang.tests.harness import tree
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.modules import module_env

ROW = Row(
    "row", "a fault", "gpu_evict", ("evicted",), lambda site: None, (), codes=("seen",), may_die=("server",), bound_s=10
)
GOOD = Facts(Answer("evicted", frozenset({"seen", "more"})), 3.0, died=("server",), signalled=("server",))


def with_facts(**changes: t.Any) -> str:
    return judge(ROW, dataclasses.replace(GOOD, **changes)).result


def test_what_is_as_it_should_be_is_ok() -> None:
    assert judge(ROW, GOOD) == Outcome("ok", "", 3.0)


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({"died": ("server", "visitor")}, "bystander_killed"),
        ({"signalled": ("visitor",)}, "bystander_killed"),
        ({"missing": ("sgl_shm_1",)}, "bystander_killed"),
        ({"seconds": 10.1}, "hang"),
        ({"timed_out": True, "answer": None}, "hang"),
        ({"answer": Answer("nothing_to_do", frozenset({"seen"}))}, "false_clean"),
        ({"answer": Answer("failed", frozenset({"seen"}))}, "wrong_verdict"),
        ({"answer": Answer("evicted", frozenset({"more"}))}, "wrong_verdict"),
        ({"stayed": ("pid 7",)}, "wrong_verdict"),
        ({"answer": None, "problem": "Traceback"}, "error"),
        ({"problem": "Traceback"}, "error"),
    ],
)
def test_each_finding_has_its_result(changes: dict[str, t.Any], result: str) -> None:
    assert with_facts(**changes) == result


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({"died": ("visitor",), "seconds": 99.0, "answer": None, "problem": "x"}, "bystander_killed"),
        ({"seconds": 99.0, "answer": Answer("nothing_to_do")}, "hang"),
    ],
)
def test_the_gravest_finding_counts(changes: dict[str, t.Any], result: str) -> None:
    assert with_facts(**changes) == result


def test_a_proof_is_a_red_row_and_no_exception() -> None:
    def proof(**changes: t.Any) -> str:
        return judge_proof(ROW, dataclasses.replace(GOOD, **changes)).result

    assert proof(died=("visitor",)) == proof(timed_out=True) == proof(answer=Answer("clean")) == "ok"
    assert proof() == "error", "it stayed green"
    assert proof(answer=None, problem="Traceback") == "error"


def test_the_closing_line_counts_every_result() -> None:
    outcomes = [Outcome(result) for result in RESULTS]
    assert counts(outcomes) == dict.fromkeys(RESULTS, 1)
    words = matrix.closing(outcomes)
    assert words == (
        "1 of 6 rows as expected; false cleans: 1, bystanders killed: 1, hangs: 1, wrong verdicts: 1, errors: 1"
    )


def test_a_patch_fits_exactly_once() -> None:
    patch = Patch("file", "b", "x")
    assert patched("abc", patch) == "axc"
    for text in ("ac", "abcb"):
        with pytest.raises(DoesNotApply):
            patched(text, patch)


def test_a_copy_is_run_instead_of_the_checkout_and_only_for_a_while(tmp_path: Path) -> None:
    copy = tree.copy_tree(tmp_path)
    with tree.using(copy):
        assert tree.root() == copy and tree.collections() == tmp_path
        (found,) = module_env()["PYTHONPATH"].split(":")
        assert Path(found, "ansible_collections/cleanslate/sglang/plugins/modules/gpu_evict.py").is_file()
    assert (tree.root(), tree.collections()) == (ROOT, ROOT / ".collections")
    assert not list(copy.rglob("collections")), "Ansible would find the checkout beside the copy's playbooks"


# --- the rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", matrix.ROWS, ids=lambda row: row.id)
def test_the_patches_of_each_row_apply_to_this_tree(row: Row) -> None:
    assert row.breaks, "a row that nothing breaks proves nothing"
    texts: dict[str, str] = {}
    for patch in row.breaks:
        text = texts.get(patch.file) or (ROOT / patch.file).read_text(encoding="utf-8")
        texts[patch.file] = changed = patched(text, patch)
        assert changed != text
        if patch.file.endswith(".py"):
            compile(changed, patch.file, "exec")


def test_rows_are_told_apart_and_speak_of_known_entry_points() -> None:
    assert len({row.id for row in matrix.ROWS}) == len(matrix.ROWS)
    assert {row.entry for row in matrix.ROWS} <= set(ENTRIES)
    assert len([*matrix.of_modules(), *matrix.of_playbooks(), *matrix.of_lab(), *matrix.of_light()]) == len(matrix.ROWS)


def test_each_row_of_a_module_is_a_test() -> None:
    """The files that hold them: each entry point of a module is named by one of them."""
    texts = [path.read_text() for path in (ROOT / "tests" / "faults").glob("test_faults_*.py")]
    for entry in matrix.MODULES:
        named = [text for text in texts if re.search(rf'of_modules\([^)]*"{entry}"', text)]
        assert len(named) == 1, entry


def test_the_docs_list_is_the_table() -> None:
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    begin, end = "<!-- rows: tests/tools/faults.py --table -->\n", "<!-- end of rows -->\n"
    assert text.partition(begin)[2].partition(end)[0] == matrix.table()
